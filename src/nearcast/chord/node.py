"""A set's place on the ring, as one of its replicas sees it: what the driver talks to.

Every replica of a set has one of these. All of them apply the set's log; the one that leads answers, asks and decides. A
driver

* gives it what arrives for the set (:meth:`RingNode.receive`), what the log commits (:meth:`RingNode.commit`), who leads
  (:meth:`RingNode.lead`, :meth:`RingNode.follow`), and the time (:meth:`RingNode.tick` at :meth:`RingNode.next_deadline`);
* does what it gets back, in order: :mod:`nearcast.chord.effects`. An entry may be applied before it is on this replica's disk,
  if it is on those of a majority; what the driver sends for a leader rests on committed entries only.

Nothing here is remembered over a restart but what the log and its snapshots hold.

A set joins when it has seeds and leads nowhere (``join``), or founds a ring (``found``); it leaves by ``leave``. What lookups,
joins, leaves and lost leaders look like step by step is in docs/concepts/lookup.md.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import msgspec

from nearcast.chord import messages
from nearcast.chord.commands import Apply, Change, Found, Mourn, Repaid, Retire
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import FOREVER, Effect, Send
from nearcast.chord.giving_back import GivingBack
from nearcast.chord.identifiers import CIRCLE, identifier, packed, unpacked
from nearcast.chord.messages import (
    AnyBody,
    Beat,
    Check,
    Checked,
    Copied,
    Copy,
    Depart,
    Fetch,
    Find,
    Get,
    Hints,
    Join,
    Message,
    NotLeader,
    Repay,
    Repayment,
    Round,
    Route,
    Value,
    Write,
)
from nearcast.chord.records import cut
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import IN, JOINING, LEAVING, OUT, ReplicatedState, Result


class RingNode(GivingBack):
    """See the module."""

    def __init__(
        self,
        broker: str,
        contact: Contact,
        settings: RingSettings,
        rng: random.Random,
        now: float,
        wall_offset: float = 0.0,
        seeds: Iterable[Contact] = (),
    ) -> None:
        super().__init__(broker, contact, settings, rng, wall_offset)
        self._seeds = tuple(one for one in seeds if one.name != contact.name)
        self._wants_in = self._wants_out = False
        self._retire_at = now
        self._fetched_by = now
        self._finger_at = self._probe_at = self._hints_at = now
        self.forget_offers()
        self.reset_copy()
        self.reset_neighbours(now)

    # --- what the driver says --------------------------------------------------------------------------------------------

    def found(self, now: float) -> list[Effect]:
        """Be the first set of a ring. For one set of a deployment, once."""
        self._wants_in = True
        self._join_at = now + 3.0 * self.settings.failed_s  # if it is removed one day, it joins
        self.propose(Found(self.me(), self._new_life(now)), now=now)
        return self.take()

    def join(self, now: float) -> list[Effect]:
        """Be on the ring, from now on, whatever happens. To be told to all replicas of a set, as ``leave`` is."""
        self._wants_in, self._wants_out = True, False
        self._join_at = now
        return self.tick(now)

    def leave(self, now: float) -> list[Effect]:
        """Leave the ring in order. Done when ``state.phase`` is OUT; the last set stays."""
        self._wants_in, self._wants_out = False, True
        self._retire(now)
        return self.take()

    def _retire(self, now: float) -> None:
        """Asked for again and again, since a proposal may be lost with whoever led."""
        is_on = self.leads and self.state.phase == IN and not self.state.is_sole
        if is_on and self._wants_out and now >= self._retire_at:
            self._retire_at = now + self.settings.failed_s
            self.propose(Retire(), now=now)

    def mourn(self, now: float) -> list[Effect]:
        """Whatever was lost here will not come back: topics of which nothing is known do not exist."""
        self.propose(Mourn(), now=now)
        return self.take()

    def lead(self, now: float) -> list[Effect]:
        """This replica leads the set now, and has applied what was committed before."""
        self._forget_all()
        self.leads, self.leader = True, self.broker
        self.reset_neighbours(now)
        self._finger_at = self._probe_at = self._hints_at = now
        return self.tick(now)

    def follow(self, leader: str, now: float) -> list[Effect]:
        """Another replica leads (or, with an empty name, nobody is known to)."""
        if self.leads:
            self._forget_all()
        self.leads, self.leader = False, leader
        return self.take()

    def commit(self, entry: bytes, now: float) -> list[Effect]:
        """An entry of the log is committed. On every replica, in the log's order, each once."""
        self.apply(entry, now)
        if self.leads:
            self.copy(now)
        return self.take()

    def dropped(self, number: int, now: float) -> list[Effect]:
        """A proposal will never be committed."""
        self.drop(number, now)
        return self.take()

    def confirmed(self, number: int, now: float) -> list[Effect]:
        """What a Confirm asked for holds."""
        self.sure(number, now)
        return self.take()

    def restore(self, state: ReplicatedState) -> None:
        """The state as a snapshot has it, in the place of what was applied so far."""
        self.state = state

    def receive(self, broker: str, message: Message, now: float) -> list[Effect]:
        """A message for this set, or an answer to it."""
        if not message.is_request:
            if self.leads:
                self._caller.receive(broker, message, now)
        elif message.replica_set == self.contact.name:
            if isinstance(message.body, Hints):
                self._hinted(broker, message.body)
            elif not self.leads:
                self.answer(broker, message.number, NotLeader(self.leader))
            else:
                self._request(broker, message.number, message.body, now)
        return self.take()

    def unreachable(self, broker: str, now: float) -> list[Effect]:
        """There is no way to a broker."""
        self._caller.unreachable(broker, now)
        return self.take()

    def tick(self, now: float) -> list[Effect]:
        """Time has passed."""
        if self.leads:
            self._caller.tick(now)
            self.seeker.tick_requests(now)
            if self.state.phase in (IN, LEAVING):
                self._retire(now)
                self.stabilise(now)
                self.copy(now)
                self._look_around(now)
            elif self.state.phase == JOINING:
                self._go_on_joining(now)
            elif self._wants_in and now >= self._join_at:
                self._seek_place(now)
        return self.take()

    def next_deadline(self) -> float:
        if not self.leads:
            return FOREVER
        phase = self.state.phase
        own = FOREVER
        if phase in (IN, LEAVING):
            own = min(self.next_beat(), self._finger_at, self._probe_at, self._hints_at)
        elif phase == JOINING:
            own = self._fetched_by
        elif phase == OUT and self._wants_in:
            own = self._join_at
        return min(own, self._caller.next_deadline(), self.seeker.next_request())

    def _forget_all(self) -> None:
        self._caller.forget()
        self._proposals.clear()
        self._confirms.clear()
        self.forget_offers()
        self._fetching = ""
        self.reset_copy()

    # --- requests --------------------------------------------------------------------------------------------------------

    def _request(self, broker: str, number: int, body: AnyBody, now: float) -> None:
        match body:
            case Find():
                found, contacts = self.route(unpacked(body.key), now)
                self.answer(broker, number, Route(found, contacts[: messages.MAX_CONTACTS]))
            case Beat():
                self.on_beat(broker, number, body, now)
            case Copy():
                self._on_copy(broker, number, body, now)
            case Get():
                self._on_get(broker, number, body, now)
            case Write():
                self._on_write(broker, number, body, now)
            case Join():
                self.on_join(broker, number, body, now)
            case Fetch():
                self.on_fetch(broker, number, body)
            case Depart():
                self.on_depart(broker, number, body, now)
            case Round():
                self.on_round(broker, number, body, now)
            case Repay():
                self._on_repay(broker, number, body, now)
            case Check():
                self.confirm(lambda now: self.answer(broker, number, Checked(self.state.phase == OUT)))
            case _:
                pass  # decoding lets no other request through

    def _on_get(self, broker: str, number: int, get: Get, now: float) -> None:
        state = self.state
        key = identifier(get.topic)
        if not self._is_responsible(broker, number, key, now):
            return

        def sure(now: float) -> None:
            if not state.owns(key) or not self.has_lease(now):
                self.answer(broker, number, Value(messages.BUSY, None))
                return
            record = state.share.get(key)
            outcome = messages.UNCERTAIN if record is None and state.lost_by(key) is not None else messages.DONE
            # What is read must not be taken back: it has to be where the range goes if this set is lost.
            self.when_settled(state.sequence, lambda now: self._reply(broker, number, key, Value(outcome, record), now), now)

        self.confirm(sure)

    def _on_write(self, broker: str, number: int, write: Write, now: float) -> None:
        record = write.record
        key = record.key
        if not self._is_responsible(broker, number, key, now):
            return
        stamped = msgspec.structs.replace(write, stamp=self.wall_us(now))

        def applied(result: Result | None, now: float) -> None:
            if result is None or result.outcome == messages.BUSY:
                self.answer(broker, number, Value(messages.BUSY, None))
                return
            value = Value(result.outcome, result.record)
            self.when_settled(result.sequence, lambda now: self._reply(broker, number, key, value, now), now)

        self.propose(Change(stamped), applied, now)

    def _on_repay(self, broker: str, number: int, repay: Repay, now: float) -> None:
        """Somebody that was lost here has nothing more to give back."""
        state = self.state
        low, high = unpacked(repay.low), unpacked(repay.high)
        if not self._is_responsible(broker, number, (low + 1) % CIRCLE, now):
            return
        if any(interval.source != repay.source for interval in cut(state.lost, low, high)):
            self.answer(broker, number, Repayment(False, packed(state.place)))
            return  # somebody else, who was lost after that one, is to say first what it knew of it

        def applied(result: Result | None, now: float) -> None:
            if result is not None:
                done = Repayment(True, packed(state.place))
                self.when_settled(result.sequence, lambda now: self.answer(broker, number, done), now)

        self.propose(Repaid(repay.source, repay.rest), applied, now)

    def _is_responsible(self, broker: str, number: int, key: int, now: float) -> bool:
        """Whether this set may answer for a key; else it has said where to go, or that it has to be asked again."""
        if not self.state.owns(key):
            self.answer(broker, number, Route(*self.route(key, now)))
            return False
        if not self.has_lease(now):
            self.answer(broker, number, Value(messages.BUSY, None))
            return False
        return True

    def _reply(self, broker: str, number: int, key: int, value: Value, now: float) -> None:
        if self.state.owns(key) and self.has_lease(now):
            self.answer(broker, number, value)
        else:
            self.answer(broker, number, Value(messages.BUSY, None))

    def _on_copy(self, broker: str, number: int, copy: Copy, now: float) -> None:
        def applied(result: Result | None, now: float) -> None:
            shadow = self.state.shadows.get(copy.sender)
            if shadow is None or shadow.life != copy.life:
                self.answer(broker, number, Copied(False, -1, False))
                return
            settled = shadow.have >= 0 and self.is_range_settled(copy.sender)
            self.answer(broker, number, Copied(result is not None and result.done, shadow.have, settled))

        self.propose(Apply(copy), applied, now)

    # --- looking around --------------------------------------------------------------------------------------------------

    def _look_around(self, now: float) -> None:
        settings = self.settings
        if now >= self._finger_at:
            self._finger_at = now + settings.finger_s
            self._fix_finger(now)
        if now >= self._probe_at:
            self._probe_at = now + settings.probe_s * (0.5 + self._rng.random())
            self._probe(now)
        if now >= self._hints_at:
            self._hints_at = now + settings.hints_s
            self._hint()
            self.give_back(now)

    def _fix_finger(self, now: float) -> None:
        state = self.state
        where = self.fingers.next_start(state.successors[0] if state.successors else None)
        if where is None:
            return
        number, start = where

        def found(contacts: tuple[Contact, ...], hops: int, now: float) -> None:
            if contacts:
                self.fingers.set(number, contacts[0])
                self.fingers.remember(contacts)

        self.seeker.lookup(start, found, now)

    def _probe(self, now: float) -> None:
        """Ask somebody from former days who comes behind us. If that is another than we think, we were two rings."""
        contact = self.fingers.any_remembered()
        if contact is None or self.state.phase not in (IN, LEAVING):
            return
        key = (self.state.place + 1) % (1 << 160)

        def answered(body: AnyBody | None, now: float) -> None:
            if isinstance(body, Route):
                self.fingers.remember(body.contacts)
                for one in (contact, *body.contacts):
                    self.found_nearer(one, now)

        self._caller.ask(contact, Find(packed(key)), answered, now)

    def _hint(self) -> None:
        known = (*self.fingers.contacts(), *self.fingers.remembered())[: messages.MAX_CONTACTS]
        for replica in self.contact.replicas:
            if replica != self.broker and known:
                self._outgoing.append(Send(replica, Message(self.contact.name, 0, Hints(known))))

    def _hinted(self, broker: str, hints: Hints) -> None:
        if not self.leads and broker in self.contact.replicas:
            self.fingers.hinted(hints.contacts)

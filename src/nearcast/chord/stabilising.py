"""The set among its neighbours: heartbeats, leases, and taking over what a neighbour leaves (Canal §III-A and §III-C).

**Heartbeats.** Once a second a set tells its successor that it is there, and hears who the successor's predecessor is, and its
successors: Chord's *stabilize* and *notify* in one. If somebody is in between, that one is the successor from now on. One
whose replicas do not answer as leader in time is passed over for the next of the list.

**Leases.** The answer to a heartbeat is also the leave to answer for the own range, for ``lease_s`` from when the heartbeat
was sent. The successor gives it if its log says that the sender is its predecessor, it is sure to lead its own set, and has a
lease itself. ``takeover_s`` after the last one it gave, and no sooner, it may take over the range; a new leader, who does not
know when that was, counts from when it began to lead, and one that had no lease from when it has one. So a set that cannot be
reached has stopped answering before another one begins. Leaders of one set are kept apart by its log, not by time.

**Who vouches for the first?** A set that is alone needs no lease, nor one whose only neighbour has not entered yet. If nobody
has a lease any more, after a power cut say, nobody could give one. Then a *round* asks all around the ring whether each is
still its successor's predecessor. If all are, nobody has been taken over, and whose round it was has a lease. Everyone asked
promises at that moment not to take over its predecessor for as long as a lease.
"""

from __future__ import annotations

import functools

from nearcast.chord.commands import Forget, Meet, Removed, Successors, TakeOver
from nearcast.chord.contacts import Contact, same
from nearcast.chord.copying import Copying
from nearcast.chord.identifiers import CIRCLE, between, distance, identifier, packed, within
from nearcast.chord.messages import AnyBody, Beat, Check, Checked, Depart, Departed, Passed, Round, Route, Vouch
from nearcast.chord.state import IN, LEAVING, Result


class Stabilising(Copying):
    """See the module."""

    _granted_at = 0.0
    """When this set may have vouched for its predecessor last."""
    _had_lease = False
    _without_since = 0.0
    _beat_began_at: float | None = None
    _taking_over = False
    _is_listing = False
    _is_trying = False
    _below: Contact | None = None
    """A set before the predecessor that took this one for its successor: nobody it can reach is in between."""
    _below_at = 0.0
    _checked_at = 0.0
    _over: tuple[str, int, float] | None = None
    """The predecessor, in a life that is over by its own word, and since when that is known."""
    _round_number = 0
    _round_began_at = 0.0
    takeovers = 0
    rounds = 0

    def reset_neighbours(self, now: float) -> None:
        self.lease_until = float("-inf")
        self._granted_at = now
        self._had_lease = False
        self._without_since = now
        self._beat_at = now
        self._beat_began_at = None
        self._taking_over = False
        self._is_listing = self._is_trying = False
        self._below = None
        self._over = None
        self._round_number = 0
        self._round_began_at = now

    # --- time ------------------------------------------------------------------------------------------------------------

    def stabilise(self, now: float) -> None:
        """Whatever is due."""
        has_lease = self.has_lease(now)
        if has_lease != self._had_lease:
            self._had_lease = has_lease
            if has_lease:
                self._granted_at = now
            else:
                self._without_since = self._round_began_at = now
        if now >= self._beat_at and self._beat_began_at is None:
            self._beat(now)
        self._look_back(now, has_lease)
        if not has_lease and self.state.phase == IN and now - self._round_began_at > self._round_wait_s:
            self._begin_round(now)

    @functools.cached_property
    def _round_wait_s(self) -> float:
        # Not all at once: who begins first mostly is enough.
        return self.settings.takeover_s * (1.0 + 0.5 * self._rng.random())

    def next_beat(self) -> float:
        return self._beat_at if self._beat_began_at is None else float("inf")

    # --- forwards: the successor -----------------------------------------------------------------------------------------

    def _beat(self, now: float) -> None:
        self._beat_at = now + self.settings.beat_s
        state = self.state
        if not state.successors:
            if not state.is_alone:
                self._find_successor(now)
            return
        successor = state.successors[0]
        self._beat_began_at = now
        beat = Beat(self.me(), state.life, state.sequence, state.predecessors[: state.chain])

        def answered(body: AnyBody | None, now: float) -> None:
            sent_at, self._beat_began_at = self._beat_began_at, None
            if sent_at is None:
                return
            if isinstance(body, Vouch):
                self._vouched(successor, body, sent_at, now)
            else:
                if body is not None:  # it is not on the ring; it may be again
                    self._caller.suspect(successor.name, now + 2.0 * self.settings.beat_s)
                self._lost_successor(successor, now)

        self._caller.ask(successor, beat, answered, now)

    def _vouched(self, successor: Contact, vouch: Vouch, sent_at: float, now: float) -> None:
        state = self.state
        self.fingers.remember((*vouch.successors, successor))
        if vouch.removed:
            if state.phase in (IN, LEAVING):
                self.propose(Removed(keep=True))
            return
        if vouch.granted and state.phase == IN:
            self.lease_until = max(self.lease_until, sent_at + self.settings.lease_s)
        nearer = vouch.predecessor
        listed: list[Contact] = [successor, *vouch.successors]
        if nearer is not None and nearer.name == self.contact.name:
            self.has_copy(successor.name, vouch.have, vouch.settled, now)
        elif nearer is not None and between(nearer.place, state.place, successor.place) and not self.is_gone(nearer, now):
            self._try_nearer(nearer, now)
        if state.phase == LEAVING:
            self._depart(successor, now)
        if state.successors and state.successors[0].name == successor.name:
            self._set_successors(listed, now)  # else a nearer one was found meanwhile

    def _try_nearer(self, contact: Contact, now: float) -> None:
        """Somebody is said to be between this set and its successor: it is the successor, if it answers."""
        if self._is_trying:
            return
        self._is_trying = True
        state = self.state

        def answered(body: AnyBody | None, now: float) -> None:
            self._is_trying = False
            if isinstance(body, Vouch) and state.phase in (IN, LEAVING):
                self._set_successors([contact, *state.successors], now)
            elif body is not None:
                self._caller.suspect(contact.name, now + 2.0 * self.settings.beat_s)

        beat = Beat(self.me(), state.life, state.sequence, state.predecessors[: state.chain])
        self._caller.ask(contact, beat, answered, now)

    def _set_successors(self, listed: list[Contact], now: float) -> None:
        successors = self.next_ones(listed)
        if not successors or self._is_listing or same(successors, self.state.successors):
            return
        self._is_listing = True
        is_other = not self.state.successors or successors[0].name != self.state.successors[0].name

        def applied(result: Result | None, now: float) -> None:
            self._is_listing = False
            if is_other:
                self._beat_at = now

        self.propose(Successors(successors), applied, now)

    def next_ones(self, listed: list[Contact]) -> tuple[Contact, ...]:
        """A successor list: once around at most, each set once."""
        wanted: dict[str, Contact] = {}
        for contact in listed:
            if contact.name == self.contact.name:
                break
            wanted.setdefault(contact.name, contact)
        return tuple(wanted.values())[: self.settings.successors]

    def _lost_successor(self, successor: Contact, now: float) -> None:
        """No replica of it answers as leader: the next of the list is the successor, for all that we can see."""
        self.fingers.drop(successor.name)
        rest = [contact for contact in self.state.successors if contact.name != successor.name]
        alive = [contact for contact in rest if not self.is_gone(contact, now)]
        if alive:
            self._set_successors(alive, now)
        else:
            self._find_successor(now)

    def _find_successor(self, now: float) -> None:
        """The whole list is gone: whoever is known comes next, as far as they know."""
        state = self.state
        known = (*self.fingers.contacts(), *self.fingers.remembered(), *state.predecessors, *state.successors)
        alive = [one for one in known if one.name != self.contact.name and not self.is_gone(one, now)]
        if alive:
            self.found_nearer(min(alive, key=lambda one: distance(state.place, one.place)), now)

    def found_nearer(self, contact: Contact, now: float) -> None:
        """A set was heard of that may be the successor."""
        state = self.state
        if state.phase not in (IN, LEAVING) or state.is_alone or contact.name == self.contact.name:
            return
        if self.is_gone(contact, now):
            return
        successors = [one for one in state.successors if not self.is_gone(one, now)]
        if not successors or between(contact.place, state.place, successors[0].place):
            self._try_nearer(contact, now)

    def _depart(self, successor: Contact, now: float) -> None:
        """Leaving in order: once the successor has everything, it takes over at once."""
        state = self.state
        if not self.is_copied(state.sequence):
            self._beat_at = now + 0.1
            return

        def answered(body: AnyBody | None, now: float) -> None:
            if isinstance(body, Departed) and body.done and self.state.phase == LEAVING:
                self.propose(Removed(keep=False))

        self._caller.ask(successor, Depart(self.contact.name, state.life, state.sequence), answered, now)

    # --- backwards: the predecessor --------------------------------------------------------------------------------------

    def on_beat(self, broker: str, number: int, beat: Beat, now: float) -> None:
        """Somebody takes this set for its successor."""
        state = self.state
        if state.phase not in (IN, LEAVING):
            self.answer(broker, number, Route(False, ()))
            return
        self.fingers.remember((beat.sender,))
        self._caller.trust(beat.sender.name)
        former = state.predecessor
        if former is None or former.name != beat.sender.name or state.predecessor_life not in (0, beat.life):
            self._beaten_by_other(broker, number, beat.sender, now)
            return
        if state.predecessor_life == 0 or state.reserved or self._is_news(beat):
            was_sole = state.is_sole

            def met(result: Result | None, now: float) -> None:
                if was_sole:
                    # Until now no other set could have a lease; from now on this one needs one, too.
                    self.lease_until = max(self.lease_until, now + self.settings.lease_s)
                    self._beat_at = now
                self._vouch_for(broker, number, beat, now)

            self.propose(Meet(beat.sender, beat.life, beat.predecessors), met, now)
            return
        for name in state.shadows:
            if name != former.name:
                self.propose(Forget(name))
        self._vouch_for(broker, number, beat, now)

    def _is_news(self, beat: Beat) -> bool:
        """Whether the predecessor says something about itself, or about those before it, that is not known."""
        known, told = self.state.predecessors, self.state.chained((beat.sender, *beat.predecessors))
        return len(known) != len(told) or not all(a.is_exactly(b) for a, b in zip(known, told, strict=True))

    def _vouch_for(self, broker: str, number: int, beat: Beat, now: float) -> None:
        """Answer the predecessor."""
        state = self.state
        if self._taking_over or not self.has_lease(now):
            self.answer(broker, number, self._vouch(False, False, self._have(beat)))
            return

        def sure(now: float) -> None:
            still = state.predecessor is not None and state.predecessor.name == beat.sender.name
            have = self._have(beat)
            granted = still and not self._taking_over and have >= 0 and self.has_lease(now)
            # That it is the predecessor, and how far its range goes, must outlive this set.
            granted = granted and self.is_settled(state.moved_sequence) and self.is_range_settled(beat.sender.name)
            if granted:
                self._granted_at = now
            self.answer(broker, number, self._vouch(granted, False, have))

        self.confirm(sure)

    def _beaten_by_other(self, broker: str, number: int, sender: Contact, now: float) -> None:
        """By a set that is not the predecessor: somebody is in between; or its range is this set's by now, and it is out."""
        state = self.state
        if state.holds(sender.place):
            # It was taken over when its lease was over and this set had one. Whether it still has one is all the same.
            self.confirm(lambda now: self.answer(broker, number, self._vouch(False, state.holds(sender.place), -1)))
            return
        if state.predecessor is not None and self._is_nearer_below(sender):
            self._below, self._below_at = sender, now
        self.answer(broker, number, self._vouch(False, False, -1))

    def _have(self, beat: Beat) -> int:
        shadow = self.state.shadows.get(beat.sender.name)
        return -1 if shadow is None or shadow.life != beat.life else shadow.have

    def is_range_settled(self, name: str) -> bool:
        """Whether the own successor knows how far the predecessor's range goes."""
        shadow = self.state.shadows.get(name)
        if shadow is None:
            return False
        # Of two sets each is the other's successor: there is nobody else to tell.
        successors = self.state.successors
        return (bool(successors) and successors[0].name == name) or self.is_copied(shadow.range_sequence)

    def _vouch(self, granted: bool, removed: bool, have: int) -> Vouch:
        # One that has not entered yet is nobody's successor.
        former = None if self.state.reserved else self.state.predecessor
        settled = former is not None and have >= 0 and self.is_range_settled(former.name)
        return Vouch(granted, removed, have, settled, former, self.state.successors)

    def _is_nearer_below(self, contact: Contact) -> bool:
        """Whether a set before the predecessor is the nearest that was heard of."""
        state = self.state
        if not between(contact.place, state.place, state.low):
            return False
        return self._below is None or not between(contact.place, state.place, self._below.place)

    def _look_back(self, now: float, has_lease: bool) -> None:
        """Take over the predecessor's range, if it is time."""
        state = self.state
        former = state.predecessor
        if former is None or self._taking_over:
            return
        settings = self.settings
        silent_s = now - self._granted_at
        if state.reserved:
            # It has nothing yet as long as the own successor does not know. Two that wait for each other both give way.
            has_nothing = not self.is_settled(state.moved_sequence)
            if silent_s > (settings.beat_s * (1.0 + self._rng.random()) if has_nothing else settings.takeover_s):
                self.take_over(former, now)
            return
        if silent_s <= settings.takeover_s:
            return
        is_over = self._is_over(former, now)
        if not has_lease and not is_over and not self._is_abandoned(now):
            return
        shadow = state.shadows.get(former.name)
        if shadow is not None and shadow.have >= 0 and shadow.life == state.predecessor_life:
            self.take_over(former, now)
        elif len(state.predecessors) > 1 and state.knows_second:
            self.take_over(former, now, state.predecessors[1].place, state.predecessors[1:])
        elif self._is_abandoned(now) or (is_over and self._over is not None and now - self._over[2] > settings.takeover_s):
            self._take_over_blindly(former, now)

    def _is_over(self, former: Contact, now: float) -> bool:
        """Whether the predecessor is on no ring any more; it is asked now and then. For what it says about itself nobody's
        lease has to vouch: so a ring of which nobody has one closes again."""
        over = self._over
        if over is not None and over[:2] == (former.name, self.state.predecessor_life):
            return True
        if now >= self._checked_at:
            self._checked_at = now + self.settings.beat_s
            life = self.state.predecessor_life

            def answered(body: AnyBody | None, now: float) -> None:
                if isinstance(body, Checked) and body.over and (self._over is None or self._over[:2] != (former.name, life)):
                    self._over = (former.name, life, now)

            self._caller.ask(former, Check(), answered, now)
        return False

    def _is_abandoned(self, now: float) -> bool:
        limit_s = self.settings.abandon_s
        return bool(limit_s) and now - max(self._without_since, self._granted_at) > limit_s

    def _take_over_blindly(self, former: Contact, now: float) -> None:
        """Nobody knows how far down the range went: to the nearest set that is known to be before it."""
        if not self.is_gone(former, now):
            self._caller.ask(former, Beat(self.me(), self.state.life, 0, ()), lambda body, now: None, now)
        below = list(self.state.predecessors[1:])
        if self._below is not None and now - self._below_at < 3.0 * self.settings.beat_s:
            below = [one for one in below if within(one.place, self._below.place, former.place)] or [self._below]
        if not below:
            return
        nearest = max(below, key=lambda one: distance(former.place, one.place))
        rest = [one for one in below if one.name != nearest.name]
        chain = (nearest, *sorted(rest, key=lambda one: distance(one.place, nearest.place)))
        self.take_over(former, now, nearest.place, chain)

    def take_over(self, former: Contact, now: float, low: int = 0, chain: tuple[Contact, ...] = ()) -> None:
        self._taking_over = True

        def applied(result: Result | None, now: float) -> None:
            self._taking_over = False
            self._granted_at = now
            self.takeovers += bool(result is not None and result.done)
            self.copy(now)

        self.propose(TakeOver(former.name, self.state.predecessor_life, packed(low % CIRCLE), chain), applied)

    def on_depart(self, broker: str, number: int, depart: Depart, now: float) -> None:
        """The predecessor leaves. It answers for nothing any more, so nobody has to wait."""
        state = self.state
        former = state.predecessor
        if former is None or former.name != depart.sender or state.predecessor_life != depart.life:
            owns = state.owns(identifier(depart.sender)) and self.has_lease(now)
            self.answer(broker, number, Departed(owns and self.is_settled(state.moved_sequence)))
            return
        shadow = state.shadows.get(depart.sender)
        if shadow is None or shadow.have != depart.sequence or self._taking_over:
            self.answer(broker, number, Departed(False))
            return
        self._taking_over = True

        def applied(result: Result | None, now: float) -> None:
            self._taking_over = False
            self._granted_at = now
            if result is None or not result.done:
                self.answer(broker, number, Departed(False))
                return
            # Whoever comes after this set has to know that the range is ours, before its former owner forgets what was in it.
            self.when_settled(result.sequence, lambda now: self.answer(broker, number, Departed(True)), now)
            self.copy(now)

        self.propose(TakeOver(depart.sender, depart.life, packed(0), ()), applied)

    # --- around ----------------------------------------------------------------------------------------------------------

    def _begin_round(self, now: float) -> None:
        self._round_began_at = now
        if not self.state.successors:
            return
        self._round_number = self._rng.getrandbits(60) + 1
        self.rounds += 1
        self._pass_on(self.contact.name, self._round_number, now)

    def _pass_on(self, origin: str, number: int, now: float) -> None:
        state = self.state
        successor = state.successors[0]
        message = Round(origin, number, self.contact.name, state.life)
        self._caller.ask(successor, message, lambda body, now: None, now, self.settings.lease_s)

    def on_round(self, broker: str, number: int, asked: Round, now: float) -> None:
        state = self.state
        former = state.predecessor
        is_ours = former is not None and former.name == asked.sender and state.predecessor_life in (0, asked.life)
        shadow = state.shadows.get(asked.sender)
        is_on = state.phase in (IN, LEAVING) and bool(state.successors)
        is_on = is_on and self.is_settled(state.moved_sequence)
        if not is_on or not is_ours or self._taking_over or state.reserved or shadow is None:
            self.answer(broker, number, Passed(False))
            return

        def sure(now: float) -> None:
            if self._taking_over or self.state.predecessor is None or self.state.predecessor.name != asked.sender:
                return
            self._granted_at = now
            if asked.origin == self.contact.name:
                if asked.number == self._round_number:
                    self._round_number = 0
                    self.lease_until = max(self.lease_until, self._round_began_at + self.settings.lease_s)
                    self._beat_at = now
            elif (
                self._round_number and self.contact.name > asked.origin and now < self._round_began_at + self.settings.lease_s
            ):
                return  # two rounds at once: the one of the larger name goes on
            elif not self.has_lease(now):
                self._pass_on(asked.origin, asked.number, now)

        self.answer(broker, number, Passed(True))
        self.confirm(sure)

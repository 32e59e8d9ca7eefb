"""One replica's part in its set: the log below it, leading or following, and what it asks of others."""

from __future__ import annotations

import random
from collections.abc import Callable

from nearcast.chord.calls import Caller
from nearcast.chord.commands import AnyCommand, Entry, decode_entry, encode_entry
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import Confirm, Effect, Propose, Send
from nearcast.chord.fingers import Fingers
from nearcast.chord.identifiers import between, distance, within
from nearcast.chord.messages import AnyBody, Message
from nearcast.chord.records import MAX_NUMBER
from nearcast.chord.seeking import Seeker
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import IN, ReplicatedState, Result

MAX_PROPOSALS = 10_000

WAYS = 4
"""Contacts in an answer that does not end a lookup: the best, and what else to try."""

Applied = Callable[[Result | None, float], None]
"""Takes what became of a command, or none if it was dropped."""


class Standing:
    """See the module. ``broker`` is the one that this replica is on; ``wall_offset`` makes wall clock of ``now``, for
    versions."""

    def __init__(
        self, broker: str, contact: Contact, settings: RingSettings, rng: random.Random, wall_offset: float = 0.0
    ) -> None:
        self.broker = broker
        self.contact = contact
        self.settings = settings
        self.state = ReplicatedState(contact.name, settings.successors + 1)
        self.leads = False
        self.leader = ""
        """Who leads the set, as far as this replica knows."""
        self._rng = rng
        self._wall_offset = wall_offset
        self._outgoing: list[Effect] = []
        self._caller = Caller(settings, rng, self._outgoing)
        self.seeker = Seeker(settings, rng, self._outgoing, self._caller, self.route)
        self.fingers = Fingers(contact.name, contact.place, rng)
        self._proposals: dict[int, Applied] = {}
        self._confirms: dict[int, Callable[[float], None]] = {}
        self._number = rng.getrandbits(48)

    # --- the log below ---------------------------------------------------------------------------------------------------

    def propose(self, command: AnyCommand, applied: Applied | None = None, now: float = 0.0) -> None:
        """Put a command in the log. ``applied`` is called only if this replica still leads then."""
        if len(self._proposals) >= MAX_PROPOSALS:
            if applied is not None:
                applied(None, now)
            return
        self._number += 1
        if applied is not None:
            self._proposals[self._number] = applied
        self._outgoing.append(Propose(self._number, encode_entry(Entry(self.broker, self._number, command))))

    def confirm(self, then: Callable[[float], None]) -> None:
        """Do something once it is certain that this replica leads."""
        if len(self._confirms) < MAX_PROPOSALS:
            self._number += 1
            self._confirms[self._number] = then
            self._outgoing.append(Confirm(self._number))

    def apply(self, entry: bytes, now: float) -> None:
        """The next committed entry of the log."""
        decoded = decode_entry(entry)
        result = self.state.apply(decoded.command)
        if decoded.proposer == self.broker:
            applied = self._proposals.pop(decoded.number, None)
            if applied is not None and self.leads:
                applied(result, now)

    def drop(self, number: int, now: float) -> None:
        """A proposal will never be committed."""
        applied = self._proposals.pop(number, None)
        if applied is not None and self.leads:
            applied(None, now)

    def sure(self, number: int, now: float) -> None:
        """A Confirm was fulfilled."""
        then = self._confirms.pop(number, None)
        if then is not None and self.leads:
            then(now)

    # --- others ----------------------------------------------------------------------------------------------------------

    def me(self) -> Contact:
        """As others are to know this set now."""
        return Contact(self.contact.name, self.contact.replicas, self.broker if self.leads else self.leader, self.state.life)

    def answer(self, broker: str, number: int, body: AnyBody) -> None:
        self._outgoing.append(Send(broker, Message("", number, body)))

    def take(self) -> list[Effect]:
        effects = self._outgoing[:]
        self._outgoing.clear()
        return effects

    def wall_us(self, now: float) -> int:
        return min(max(int((now + self._wall_offset) * 1e6), 0), MAX_NUMBER >> 1)

    # --- ways ------------------------------------------------------------------------------------------------------------

    def is_gone(self, contact: Contact, now: float) -> bool:
        return self._caller.is_suspect(contact.name, now)

    def route(self, key: int, now: float) -> tuple[bool, tuple[Contact, ...]]:
        """Chord's find_successor, one step: whether the first of the contacts is the one; else whom to ask."""
        state = self.state
        if state.owns(key):
            return True, (self.me(), *state.successors)
        successors = tuple(one for one in state.successors if not self.is_gone(one, now))
        if state.phase == IN and successors and within(key, state.place, successors[0].place):
            return True, successors
        return False, self._nearer(key, now)

    def _nearer(self, key: int, now: float) -> tuple[Contact, ...]:
        """The known sets that precede a key, nearest first; if none does, any others."""
        state = self.state
        known = {one.name: one for one in (*self.fingers.preceding(key), *state.successors, *state.predecessors)}
        known.pop(self.contact.name, None)
        if state.phase != IN or not known:
            known |= {one.name: one for one in self.fingers.remembered()}
        alive = [one for one in known.values() if not self.is_gone(one, now)]
        ahead = [one for one in alive if between(one.place, state.place, key)]
        ways = ahead if ahead and state.phase == IN else alive or list(known.values())
        return tuple(sorted(ways, key=lambda one: distance(one.place, key))[:WAYS])

"""Finding the set that is responsible for a key, from anywhere, and asking it.

A lookup is led by whoever wants to know (Chord's iterative style): it asks the set nearest before the key that it has heard
of, which names nearer ones, and so on; each answer at least halves the way, if fingers are right. A set that does not answer
costs one time-out and is passed over for the next best. So nobody on the way keeps anything, and a set that lies can only
waste a hop: what it names has to be nearer to the key, and a lookup makes at most ``MAX_HOPS``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from nearcast.chord.calls import Caller
from nearcast.chord.contacts import Contact
from nearcast.chord.effects import FOREVER, Effect, Finished
from nearcast.chord.identifiers import distance, identifier, packed
from nearcast.chord.messages import BUSY, AnyBody, Find, Get, Message, Route, Value, Write
from nearcast.chord.settings import RingSettings

MAX_HOPS: Final = 256
"""With no finger right, a lookup goes along successors, so it takes as many hops as there are sets, divided by three."""

MAX_CANDIDATES: Final = 32
AGAIN_S: Final = 0.1
MAX_KNOWN: Final = 256
MAX_OWNERS: Final = 10_000

Found = Callable[[tuple[Contact, ...], int, float], None]
"""Takes the responsible set and those behind it (nothing: not found), how many were asked, and the time."""

Start = Callable[[int, float], tuple[bool, tuple[Contact, ...]]]
"""Where a lookup for this key begins: as in a Route."""


class Lookup:
    """One, on its way."""

    def __init__(self, caller: Caller, key: int, start: Iterable[Contact], found: Found, now: float, avoid: str = "") -> None:
        self._caller = caller
        self._key = key
        self._found = found
        self._asked: set[str] = {avoid}
        self._candidates: dict[str, Contact] = {}
        self._nearest = FOREVER
        self.hops = 0
        self._add(start)
        self._next(now)

    def _add(self, contacts: Iterable[Contact]) -> None:
        for contact in contacts:
            if contact.name not in self._asked and len(self._candidates) < MAX_CANDIDATES:
                self._candidates[contact.name] = contact

    def _next(self, now: float) -> None:
        if not self._candidates or self.hops >= MAX_HOPS:
            self._found((), self.hops, now)
            return
        key = self._key
        trusted = [one for one in self._candidates.values() if not self._caller.is_suspect(one.name, now)]
        contact = min(trusted or self._candidates.values(), key=lambda one: distance(one.place, key))
        del self._candidates[contact.name]
        self._asked.add(contact.name)
        self.hops += 1
        self._caller.ask(contact, Find(packed(key)), self._answered, now)

    def _answered(self, body: AnyBody | None, now: float) -> None:
        if isinstance(body, Route):
            if body.found and body.contacts:
                self._found(body.contacts, self.hops, now)
                return
            self._add(body.contacts)
        self._next(now)


class Request(msgspec.Struct):
    """A topic's record is wanted, or is to be changed."""

    number: int
    body: Get | Write
    key: int
    ends_at: float
    hops: int = 0
    again_at: float = FOREVER


class Seeker:
    """Reads and writes the directory for one broker, which need not be on the ring: give it contacts of some sets that are.

    Whoever asks waits for ``Finished(number, Value)``, or ``Finished(number, None)`` when nothing came of it in time: a write
    may have been done all the same. A writer's name in the record (``Record.writer``) makes asking again harmless.
    """

    def __init__(
        self,
        settings: RingSettings,
        rng: random.Random,
        outgoing: list[Effect],
        caller: Caller | None = None,
        start: Start | None = None,
    ) -> None:
        self._settings = settings
        self._outgoing = outgoing
        self._rng = rng
        self._caller = Caller(settings, rng, outgoing) if caller is None else caller
        self._start = self._nearest_known if start is None else start
        self._known: dict[str, Contact] = {}
        self._owners: dict[int, Contact] = {}
        self._requests: dict[int, Request] = {}
        self._next_number = 0
        self.lookups = 0
        self.hops = 0

    # --- what is wanted --------------------------------------------------------------------------------------------------

    def get(self, topic: str, now: float) -> int:
        """Read a topic's record. Returns the number that the answer will have."""
        return self._begin(Get(topic), identifier(topic), now)

    def write(self, write: Write, now: float) -> int:
        """Change a topic's record, or remove it."""
        return self._begin(write, write.record.key, now)

    def meet(self, contacts: Iterable[Contact]) -> None:
        """Sets to begin with. The latest ones are kept."""
        for contact in contacts:
            self._known.pop(contact.name, None)
            self._known[contact.name] = contact
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def lookup(self, key: int, found: Found, now: float, avoid: str = "") -> None:
        """Find who is responsible for a key. ``avoid``: a set that is not to be asked."""
        self.lookups += 1

        def done(contacts: tuple[Contact, ...], hops: int, now: float) -> None:
            self.hops += hops
            self.meet(contacts)
            found(contacts, hops, now)

        is_found, contacts = self._start(key, now)
        if is_found:
            done(contacts, 0, now)
        else:
            Lookup(self._caller, key, contacts, done, now, avoid)

    # --- what happens ----------------------------------------------------------------------------------------------------

    def receive(self, broker: str, message: Message, now: float) -> None:
        self._caller.receive(broker, message, now)

    def unreachable(self, broker: str, now: float) -> None:
        self._caller.unreachable(broker, now)

    def tick(self, now: float) -> None:
        self._caller.tick(now)
        self.tick_requests(now)

    def tick_requests(self, now: float) -> None:
        for request in list(self._requests.values()):
            if now >= request.again_at:
                request.again_at = FOREVER
                self._seek(request, now)

    def next_deadline(self) -> float:
        return min(self._caller.next_deadline(), self.next_request())

    def next_request(self) -> float:
        return min((request.again_at for request in self._requests.values()), default=FOREVER)

    # --- how it is done --------------------------------------------------------------------------------------------------

    def _begin(self, body: Get | Write, key: int, now: float) -> int:
        self._next_number += 1
        request = Request(self._next_number, body, key, now + self._settings.lookup_s)
        self._requests[request.number] = request
        owner = self._owners.get(key)
        if owner is not None:
            self._ask(request, owner, now)
        else:
            self._seek(request, now)
        return request.number

    def _seek(self, request: Request, now: float) -> None:
        if now >= request.ends_at:
            self._finish(request, None)
            return

        def found(contacts: tuple[Contact, ...], hops: int, now: float) -> None:
            request.hops += hops
            if contacts:
                self._ask(request, contacts[0], now)
            else:
                self._later(request, now)

        self.lookup(request.key, found, now)

    def _ask(self, request: Request, contact: Contact, now: float) -> None:
        def answered(body: AnyBody | None, now: float) -> None:
            if isinstance(body, Value) and body.outcome != BUSY:
                if len(self._owners) >= MAX_OWNERS:
                    del self._owners[next(iter(self._owners))]
                self._owners[request.key] = contact
                self._finish(request, body)
                return
            self._owners.pop(request.key, None)
            if isinstance(body, Route):
                self.meet(body.contacts)
            self._later(request, now)

        within_s = min(self._settings.failed_s, max(0.0, request.ends_at - now))
        self._caller.ask(contact, request.body, answered, now, within_s)

    def _later(self, request: Request, now: float) -> None:
        request.again_at = now + AGAIN_S * (0.5 + self._rng.random())

    def _finish(self, request: Request, answer: Value | None) -> None:
        del self._requests[request.number]
        self._outgoing.append(Finished(request.number, answer))

    def _nearest_known(self, key: int, now: float) -> tuple[bool, tuple[Contact, ...]]:
        trusted = [one for one in self._known.values() if not self._caller.is_suspect(one.name, now)]
        return False, tuple(sorted(trusted or self._known.values(), key=lambda one: distance(one.place, key))[:MAX_CANDIDATES])

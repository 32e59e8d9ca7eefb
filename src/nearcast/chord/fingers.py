"""Which sets a leader knows of, beside its neighbours: fingers across the circle, and contacts of former days.

Finger *i* is the successor of ``me + 2**i`` (Chord §4.3). Most of the 160 are the same few sets: with N sets about log2 N
differ. None of this is replicated. It makes lookups short, never right or wrong, and a new leader begins with what the one
before told it.

Remembered contacts are what plain Chord lacks: sets that were once heard of, dead or alive. Two parts of a ring that were cut
off from each other have forgotten each other in all lists by the time the network is whole again, and would stay two rings.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final

from nearcast.chord.contacts import Contact
from nearcast.chord.identifiers import BITS, CIRCLE, between, distance

MAX_REMEMBERED: Final = 64


class Fingers:
    """See the module. ``place`` is the set's own."""

    def __init__(self, name: str, place: int, rng: random.Random) -> None:
        self._name = name
        self._place = place
        self._rng = rng
        self._fingers: dict[int, Contact] = {}
        self._next = BITS
        self._remembered: dict[str, Contact] = {}

    def __len__(self) -> int:
        """How many different sets there are in it."""
        return len({contact.name for contact in self._fingers.values()})

    def next_start(self, successor: Contact | None) -> tuple[int, int] | None:
        """Which finger to look at now: its number, and where it begins. Those that begin before the successor are the
        successor."""
        if successor is None:
            return None
        lowest = distance(self._place, successor.place).bit_length()
        if lowest >= BITS:
            return None
        self._next -= 1
        if self._next < lowest:
            self._next = BITS - 1
        return self._next, (self._place + (1 << self._next)) % CIRCLE

    def set(self, number: int, contact: Contact) -> None:
        """A finger was found."""
        if contact.name == self._name:
            self._fingers.pop(number, None)
        else:
            self._fingers[number] = contact

    def drop(self, name: str) -> None:
        """A set failed."""
        for number in [number for number, contact in self._fingers.items() if contact.name == name]:
            del self._fingers[number]

    def preceding(self, key: int) -> list[Contact]:
        """Different fingers in ``(me, key)``."""
        found = {}
        for contact in self._fingers.values():
            if contact.name not in found and between(contact.place, self._place, key):
                found[contact.name] = contact
        return list(found.values())

    def contacts(self) -> list[Contact]:
        return list({contact.name: contact for contact in self._fingers.values()}.values())

    def hinted(self, contacts: Iterable[Contact]) -> None:
        """What the leader knows, for the case that this replica leads next: each is taken for the highest finger that it can
        be."""
        self._fingers.clear()
        for contact in contacts:
            number = distance(self._place, contact.place).bit_length() - 1
            held = self._fingers.get(number)
            start = (self._place + (1 << number)) % CIRCLE
            if held is None or between(contact.place, start - 1, held.place):
                self._fingers[number] = contact
        self.remember(contacts)

    # --- remembered ------------------------------------------------------------------------------------------------------

    def remember(self, contacts: Iterable[Contact]) -> None:
        """Sets that were heard of. When there are too many, a random one is forgotten: old ones are worth as much as new
        ones."""
        for contact in contacts:
            if contact.name == self._name:
                continue
            if contact.name not in self._remembered and len(self._remembered) >= MAX_REMEMBERED:
                del self._remembered[self._rng.choice(list(self._remembered))]
            self._remembered[contact.name] = contact

    def any_remembered(self) -> Contact | None:
        return self._rng.choice(list(self._remembered.values())) if self._remembered else None

    def remembered(self) -> list[Contact]:
        return list(self._remembered.values())

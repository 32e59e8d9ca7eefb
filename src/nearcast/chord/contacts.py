"""Who is on the ring: not machines but replica sets, each with the brokers that hold its replicas (Canal §III-C).

A contact says how to reach a set whoever leads it now. ``leader`` is only a belief: a replica that does not lead says who
does, and if nobody there knows, the others of the set are asked. So a change of leader changes no entry that matters: two
contacts are the same set if their names are, and are to be told anew only if their replicas differ.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from nearcast.chord.identifiers import identifier

MAX_NAME_CHARACTERS: Final = 128
MAX_REPLICAS: Final = 15

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_NAME_CHARACTERS)]
MaybeName = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARACTERS)]


class Contact(msgspec.Struct, frozen=True, array_like=True):
    """A replica set: its name, which is its place on the ring; the brokers of its replicas; the one believed to lead."""

    name: Name
    replicas: Annotated[tuple[Name, ...], msgspec.Meta(min_length=1, max_length=MAX_REPLICAS)]
    leader: MaybeName = ""
    life: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    """When the set came to the ring, as it says; 0: not known. It has another one each time that it joins."""

    @property
    def place(self) -> int:
        return identifier(self.name)

    def is_as(self, other: Contact) -> bool:
        """Whether both say the same, but for who leads."""
        return self.name == other.name and self.replicas == other.replicas

    def is_exactly(self, other: Contact) -> bool:
        """The same, in the same life."""
        return self.is_as(other) and self.life == other.life


def same(one: tuple[Contact, ...], other: tuple[Contact, ...]) -> bool:
    """Whether two lists name the same sets in the same order, with the same replicas."""
    return len(one) == len(other) and all(a.is_as(b) for a, b in zip(one, other, strict=True))

"""What the directory holds for a topic, and the share of it that one set keeps.

A record's *version* is when it was written, in microseconds of wall clock and above all versions that were given for its part
of the circle before: it never comes again, so who has seen a version may make a change depend on it, also after the record was
removed and made anew. Its *epoch* is its owner's, as in :mod:`nearcast.fabric.owner_records`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from typing import Annotated, Final

import msgspec

from nearcast.chord.contacts import MaybeName, Name
from nearcast.chord.identifiers import CIRCLE, between, identifier, packed, unpacked, within

MAX_TOPIC_CHARACTERS: Final = 65_535
MAX_SEGMENTS: Final = 1_024
MAX_SUBSCRIPTIONS: Final = 256
MAX_NUMBER: Final = 1 << 62

Number = Annotated[int, msgspec.Meta(ge=0, le=MAX_NUMBER)]
KeyBytes = Annotated[bytes, msgspec.Meta(min_length=20, max_length=20)]


class Segment(msgspec.Struct, frozen=True, array_like=True):
    """From ``first_index`` on, up to the next segment's, the topic's messages are in the log of ``replica_set``."""

    replica_set: Name
    first_index: Number


class Record(msgspec.Struct, frozen=True, array_like=True):
    """A topic. ``writer`` names the request that wrote it, so that whoever has to ask twice knows its own work."""

    topic: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_TOPIC_CHARACTERS)]
    owner: MaybeName = ""
    topic_class: Annotated[str, msgspec.Meta(max_length=32)] = ""
    bound_ms: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    epoch: Number = 0
    segments: Annotated[tuple[Segment, ...], msgspec.Meta(max_length=MAX_SEGMENTS)] = ()
    subscriptions: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_SUBSCRIPTIONS)] = ()
    version: Number = 0
    writer: Annotated[str, msgspec.Meta(max_length=160)] = ""

    @property
    def key(self) -> int:
        return identifier(self.topic)


class Item(msgspec.Struct, frozen=True, array_like=True):
    """A key and its record as it is told to another set; without a record it is to be removed."""

    key: KeyBytes
    record: Record | None


class Interval(msgspec.Struct, frozen=True, array_like=True):
    """``(low, high]``. ``source``: who had it, in which life (:func:`source`)."""

    low: KeyBytes
    high: KeyBytes
    source: Annotated[str, msgspec.Meta(max_length=160)] = ""

    def has(self, key: int) -> bool:
        return within(key, unpacked(self.low), unpacked(self.high))


class Share:
    """The records of a range, by key. Keys are put in order when somebody wants them so."""

    def __init__(self) -> None:
        self._records: dict[int, Record] = {}
        self._ordered: list[int] | None = []

    def __len__(self) -> int:
        return len(self._records)

    def get(self, key: int) -> Record | None:
        return self._records.get(key)

    def put(self, key: int, record: Record | None) -> None:
        """Set, or remove."""
        if record is not None:
            if key not in self._records:
                self._ordered = None
            self._records[key] = record
        elif self._records.pop(key, None) is not None:
            self._ordered = None

    def items(self) -> Iterator[tuple[int, Record]]:
        return iter(self._records.items())

    def clockwise(self, low: int, limit: int) -> list[tuple[int, Record]]:
        """The first records behind a place, once around at most."""
        ordered = self._in_order()
        start = bisect_right(ordered, low)
        keys = (ordered[start:] + ordered[:start])[:limit] if start + limit > len(ordered) else ordered[start : start + limit]
        return [(key, self._records[key]) for key in keys]

    def take(self, low: int, high: int) -> Share:
        """Move what is in ``(low, high]`` to a share of its own."""
        taken = Share()
        for key in [key for key in self._records if within(key, low, high)]:
            taken.put(key, self._records.pop(key))
        self._ordered = None
        return taken

    def clear_between(self, low: int, high: int) -> None:
        """Remove what is in ``(low, high]``."""
        if low % CIRCLE != high % CIRCLE:
            ordered = self._in_order()
            start, end = bisect_right(ordered, low), bisect_right(ordered, high)
            keys = ordered[start:end] if low < high else ordered[start:] + ordered[:end]
        else:
            keys = list(self._records)
        for key in keys:
            self.put(key, None)

    def add(self, other: Share) -> None:
        for key, record in other.items():
            self.put(key, record)

    def _in_order(self) -> list[int]:
        if self._ordered is None:
            self._ordered = sorted(self._records)
        return self._ordered


def source(name: str, life: int) -> str:
    """A set in one of its lives, as whoever had a range."""
    return f"{name} {life}"


def item(key: int, record: Record | None) -> Item:
    return Item(packed(key), record)


def cut(intervals: tuple[Interval, ...], low: int, high: int) -> tuple[Interval, ...]:
    """The parts of intervals that are in ``(low, high]``."""
    parts = []
    for interval in intervals:
        start, end = unpacked(interval.low), unpacked(interval.high)
        if start == low or between(start, low, high):
            first = start
        elif between(low, start, end):
            first = low
        else:
            continue
        last = end if within(end, first, high) else high
        parts.append(Interval(packed(first), packed(last), interval.source))
    return tuple(parts)

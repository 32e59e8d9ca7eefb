"""Which part each message event is judged in: whole topics together, and topics too large for a part in pieces.

Topics are counted and dealt out by *bucket*, a hash of the run and the topic, so a plan has one size however many topics there
are. A large bucket is dealt out twice, for two things that need different events together:

- *flows*, by stream and by subscriber: what one subscriber got of one stream is in one part, and what was published in that
  stream is in each part of its subscribers;
- *messages*, by number: each event is in one part, with all others of its message. Events are counted here, and what brokers
  carried.

Knows NumPy, neither files nor Spark.
"""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

BUCKETS = 8_192
_ODD = 0x9E3779B97F4A7C15

Numbers = npt.NDArray[Any]


@dataclass(frozen=True)
class Share:
    """What a part does for its topics, and for which of their subscribers."""

    flows: bool = True
    messages: bool = True
    column: int = 0
    columns: int = 1

    def holds(self, subscriber: str) -> bool:
        """Whether this subscriber is judged here."""
        return self.columns == 1 or _place(zlib.crc32(subscriber.encode()), self.columns) == self.column


WHOLE = Share()


@dataclass(frozen=True)
class Split:
    """The parts of a large bucket: ``streams * subscribers`` for flows from ``first``, then ``messages``."""

    first: int
    streams: int
    subscribers: int
    messages: int

    @property
    def flows(self) -> int:
        return self.streams * self.subscribers


@dataclass(frozen=True)
class Plan:
    """How all buckets are dealt out."""

    parts: int
    part_of: Numbers
    """By bucket; -1 for one that is split."""
    splits: dict[int, Split]

    def share(self, part: int) -> Share:
        """What a part does."""
        for split in self.splits.values():
            number = part - split.first
            if 0 <= number < split.flows:
                return Share(messages=False, column=number % split.subscribers, columns=split.subscribers)
            if 0 <= number < split.flows + split.messages:
                return Share(flows=False)
        return WHOLE


def plan(others: Numbers, delivered: Numbers, rows_per_part: int) -> Plan:
    """Of how many events of each bucket were deliveries and how many not, parts of about ``rows_per_part`` events."""
    rows = others + delivered
    large = rows > rows_per_part
    parts = max(1, -(-int(rows[~large].sum()) // rows_per_part))
    part_of = np.full(BUCKETS, -1, dtype=np.int32)
    filled = [(0, part) for part in range(parts)]
    for bucket in np.argsort(np.where(large, -1, -rows), kind="stable").tolist():
        if not large[bucket]:
            # The largest first, each to where there is least.
            held, part = filled[0]
            heapq.heapreplace(filled, (held + int(rows[bucket]), part))
            part_of[bucket] = part
    splits = {}
    for bucket in np.flatnonzero(large).tolist():
        # Half of a part for what was published, half for deliveries. What was published is repeated for each column of
        # subscribers; so sized, that adds no more events than there are deliveries.
        half = max(1, rows_per_part // 2)
        streams = max(1, -(-int(others[bucket]) // half))
        subscribers = max(1, -(-int(delivered[bucket]) // (streams * half)))
        splits[bucket] = Split(parts, streams, subscribers, -(-int(rows[bucket]) // rows_per_part))
        parts += splits[bucket].flows + splits[bucket].messages
    return Plan(parts, part_of, splits)


def buckets(run: int, topics: Iterable[str]) -> Numbers:
    """Of each topic, wherever it is read; and 0 for none, at the end."""
    return np.array([*(zlib.crc32(f"{run}/{name}".encode()) % BUCKETS for name in topics), 0], dtype=np.int64)


def deal(
    plan: Plan, bucket: Numbers, delivered: Numbers, event: dict[str, Numbers], processed: Numbers
) -> Iterator[tuple[int, Numbers]]:
    """``part, rows`` for events in these buckets. ``event`` has ``message_id``, ``stream`` and, as :func:`hashed`,
    ``publisher`` and ``subscriber``. Events of brokers (``processed``) belong to messages, not to flows."""
    part = plan.part_of[bucket]
    yield from _grouped(np.flatnonzero(part >= 0), part[part >= 0])
    for number in np.unique(bucket[part < 0]).tolist():
        split = plan.splits[number]
        rows = np.flatnonzero(bucket == number)
        of_message = _places(event["message_id"][rows].astype(np.uint64), split.messages)
        yield from _grouped(rows, split.first + split.flows + of_message)
        stream = event["publisher"][rows] + event["stream"][rows].astype(np.uint64) * np.uint64(1 << 32)
        line = _places(stream, split.streams)
        column = _places(event["subscriber"][rows], split.subscribers)
        came = delivered[rows]
        sent = ~came & ~processed[rows]
        published = dict(_grouped(rows[sent], line[sent]))
        deliveries = dict(_grouped(rows[came], (line * split.subscribers + column)[came]))
        for cell in range(split.flows):
            found = [each for each in (published.get(cell // split.subscribers), deliveries.get(cell)) if each is not None]
            if found:
                yield split.first + cell, np.concatenate(found)


def hashed(names: Iterable[str]) -> Numbers:
    """A number for each name, and one for none at the end."""
    return np.array([*(zlib.crc32(name.encode()) for name in names), 0], dtype=np.uint64)


def _places(numbers: Numbers, places: int) -> Numbers:
    mixed: Numbers = ((numbers * np.uint64(_ODD)) >> np.uint64(33)).astype(np.int64) % places
    return mixed


def _place(number: int, places: int) -> int:
    """The same for one number."""
    return ((number * _ODD & 0xFFFF_FFFF_FFFF_FFFF) >> 33) % places


def _grouped(rows: Numbers, number: Numbers) -> Iterator[tuple[int, Numbers]]:
    order = np.argsort(number, kind="stable")
    numbers, begins = np.unique(number[order], return_index=True)
    yield from zip(numbers.tolist(), np.split(rows[order], begins[1:]), strict=True) if len(rows) else ()

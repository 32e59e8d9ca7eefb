"""Where the blocks of one segment lie: runs, in the order of the log, and which of them belong to a topic.

A run is a stretch of adjacent blocks of one topic, as long as they are small: up to ``RUN_BYTES``. A record is found by a
binary search for its run and a walk over the few blocks inside. Topics that alternate make a run of every block.

The segment that grows has its runs in memory (:class:`Runs`); a sealed one has them in its index file, in the same columns
(:mod:`nearcast.topiclog.indexes`). This module knows no bytes of blocks and no files.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from typing import Final

from mypy_extensions import i64, mypyc_attr

RUN_BYTES: Final = 4_096

_EMPTY: Final = array("I")


def column_bytes(column: Sequence[int]) -> bytes:
    """A column as it lies in memory."""
    if isinstance(column, (array, memoryview)):
        return column.tobytes()
    raise TypeError("a column is an array or a view of one")


class Part:
    """What one segment has of one topic. ``first`` equals ``next`` when that is no record."""

    def __init__(self, number: int, name: bytes, next_index: int) -> None:
        self.number = number
        self.name = name
        self.declared_at: i64 = 0
        """Where in the file it was named, unless an index file was all that was read."""
        self.floor = 0
        """Records below this index were removed, says this segment; 0 says nothing."""
        self.first = next_index
        self.next = next_index
        self.bytes: i64 = 0
        self.first_time_us: i64 = 0
        self.last_time_us: i64 = 0
        self.postings_at: int = 0
        self.postings_count: int = 0
        self.postings: Sequence[int] = _EMPTY
        """The topic's runs, by number."""
        self.growing: array[int] | None = None
        """The same, in a segment that grows."""


@mypyc_attr(allow_interpreted_subclasses=False)
class RunColumns:
    """Runs as columns. Positions in the log count ``logical`` offsets: those that a block had when it was written."""

    def __init__(self) -> None:
        self.count: i64 = 0
        self.firsts: Sequence[int] = array("Q")
        self.topics: Sequence[int] = array("I")
        self.offsets: Sequence[int] = array("I")
        self.lengths: Sequence[int] = array("I")
        self.counts: Sequence[int] = array("I")
        self.logical: Sequence[int] = self.offsets

    def settle(self) -> None:
        """Bring the columns up to date."""

    def part(self, number: int) -> Part | None:
        """What there is of a topic, by its number."""
        raise NotImplementedError

    def need(self, number: int) -> Part:
        """What there is of a topic that is known to be there."""
        part = self.part(number)
        if part is None:
            raise LookupError(f"the segment has no topic {number}")
        return part

    def parts(self) -> list[Part]:
        """What there is of each topic."""
        raise NotImplementedError

    def run_at(self, logical: int) -> int:
        """The first run that ends after a logical offset."""
        run: i64 = bisect_right(self.logical, logical, 0, self.count) - 1
        if run < 0:
            return 0
        return run if self.logical[run] + self.lengths[run] > logical else run + 1

    def posting_of(self, part: Part, index: int) -> int:
        """Where in the part's postings the run with this index is: the last one that begins at or before it, or the first."""
        postings = part.postings
        low: i64 = 0
        high: i64 = len(postings)
        firsts = self.firsts
        while low < high:
            middle = (low + high) // 2
            if firsts[postings[middle]] <= index:
                low = middle + 1
            else:
                high = middle
        return low - 1 if low else 0


class Runs(RunColumns):
    """The runs of a segment that grows."""

    def __init__(self) -> None:
        super().__init__()
        self._firsts: array[int] = array("Q")
        self._topics: array[int] = array("I")
        self._offsets: array[int] = array("I")
        self._lengths: array[int] = array("I")
        self._counts: array[int] = array("I")
        self.firsts = self._firsts
        self.topics = self._topics
        self.offsets = self.logical = self._offsets
        self.lengths = self._lengths
        self.counts = self._counts
        self.is_restored = False
        self._parts: dict[int, Part] = {}
        # The last run, which may still grow; the columns have what it was when they were last settled.
        self._topic: i64 = -1
        self._end: i64 = 0
        self._length: i64 = 0
        self._records: i64 = 0

    def restore(self, columns: RunColumns) -> None:
        """Take over runs that an index file has; what is added follows them."""
        self._firsts.frombytes(column_bytes(columns.firsts))
        self._topics.frombytes(column_bytes(columns.topics))
        self._offsets.frombytes(column_bytes(columns.offsets))
        self._lengths.frombytes(column_bytes(columns.lengths))
        self._counts.frombytes(column_bytes(columns.counts))
        self.count = columns.count
        self.is_restored = True
        for part in columns.parts():
            part.growing = array("I")
            part.growing.frombytes(column_bytes(part.postings))
            part.postings = part.growing
            self._parts[part.number] = part

    def declare(self, number: int, name: bytes, next_index: int, offset: int) -> Part:
        """A topic that the segment has from now on."""
        part = self._parts.get(number)
        if part is None:
            part = self._parts[number] = Part(number, name, next_index)
            part.declared_at = offset
        return part

    def forget_from(self, offset: int) -> None:
        """Topics that were named only at this offset or behind are not in the segment."""
        for part in list(self._parts.values()):
            if part.declared_at >= offset:
                del self._parts[part.number]

    def cut(self, offset: int) -> list[tuple[Part, int]]:
        """Blocks at this offset and behind, which no run spans, are gone; returns what lost something, and how many bytes."""
        self.settle()
        self._topic = -1
        self._end = -1
        begin: i64 = bisect_left(self._offsets, offset)
        lost: dict[int, int] = {}
        run: i64 = self.count
        while run > begin:
            run -= 1
            part = self._parts[self._topics[run]]
            lost[part.number] = lost.get(part.number, 0) + self._lengths[run]
            part.next = self._firsts[run]
            if part.growing is not None:
                part.growing.pop()
        for column in (self._firsts, self._topics, self._offsets, self._lengths, self._counts):
            del column[begin:]
        self.count = begin
        found: list[tuple[Part, int]] = []
        for number, size in lost.items():
            part = self._parts[number]
            part.bytes -= size
            if part.growing is None or not part.growing:
                part.first = part.next
            found.append((part, size))
        return found

    def add(self, part: Part, first: int, offset: int, length: int, count: int, first_time_us: int, last_time_us: int) -> None:
        """Blocks of one topic, adjacent to each other and younger than all before."""
        begin: i64 = offset
        size: i64 = length
        number: i64 = part.number
        if number == self._topic and begin == self._end and self._length + size <= RUN_BYTES:
            self._length += size
            self._records += count
        else:
            if self._topic >= 0:
                self.settle()
            self._topic = number
            self._length = size
            self._records = count
            self._firsts.append(first)
            self._topics.append(part.number)
            self._offsets.append(offset)
            self._lengths.append(length)
            self._counts.append(count)
            postings = part.growing
            if postings is None:
                part.postings = part.growing = postings = array("I")
            postings.append(self.count)
            self.count += 1
        self._end = begin + size
        if part.first == part.next:
            part.first = first
            part.first_time_us = first_time_us
        part.next = first + count
        part.bytes += size
        part.last_time_us = last_time_us

    def add_run(
        self, part: Part, first: int, offset: int, length: int, count: int, first_time_us: int, last_time_us: int
    ) -> None:
        """The same, as a run of its own."""
        self._end = -1
        self.add(part, first, offset, length, count, first_time_us, last_time_us)

    def set_logical(self, logical: list[int]) -> None:
        """The runs stand elsewhere than where they were written."""
        self.logical = array("I", logical)

    def settle(self) -> None:
        if self._topic >= 0:
            self._lengths[-1] = self._length
            self._counts[-1] = self._records

    def part(self, number: int) -> Part | None:
        return self._parts.get(number)

    def parts(self) -> list[Part]:
        return [self._parts[number] for number in sorted(self._parts)]

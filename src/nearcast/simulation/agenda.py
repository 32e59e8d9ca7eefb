"""What is still to happen, in order of time: the simulator's event queue.

Events go into buckets of a fixed width of virtual time, and a bucket is sorted only when its time comes: appending to a list
and one sort per bucket cost a fraction of what a heap with tens of thousands of entries does. Two events at the same instant
happen in the order in which they were planned. Knows nothing of what events mean.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any, Final

from mypy_extensions import i64

from nearcast.errors import SimulationLimit

Entry = tuple[Any, ...]
"""When; the event's number times ``KINDS`` plus its kind; three things that the kind gives a meaning.

Numbers are unique, so comparing two entries never reaches the things, and one number is cheaper to keep than two. The type is
loose because mypyc would unpack a tuple of known length and pack it again at every step.
"""

KINDS: Final = 16
BUCKETS_PER_SECOND: Final = 1000.0

FARTHEST_S: Final = 1e12
"""What is planned for later than this shares a bucket: 'never' is written in many ways, some of them beyond 64 bits."""

MAX_ENTRIES: Final = 5_000_000
"""About a gigabyte of datagrams on their way."""


class Agenda:
    """A priority queue for events whose times are at or after the one popped last."""

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self.max_entries: i64 = max_entries
        self.numbered: i64 = 0
        self._size: i64 = 0
        self._buckets: dict[int, list[Entry]] = {}
        self._bucket_heap: list[int] = []
        # The bucket whose time is now: sorted, read from `_position` on. What is planned for it meanwhile waits in a heap.
        self._current: list[Entry] = []
        self._position: i64 = 0
        self._current_bucket: i64 = -1
        self._late: list[Entry] = []

    def __len__(self) -> int:
        return self._size

    def plan(self, when: float, kind: i64, first: object, second: object, third: object) -> i64:
        """Add an event; returns its number."""
        number = self.numbered
        self.numbered = number + 1
        if self._size >= self.max_entries:
            raise SimulationLimit(
                f"more than {self.max_entries:,} events are planned and have not happened: "
                "something plans or sends faster than time passes"
            )
        self._size += 1
        entry: Entry = (when, number * KINDS + kind, first, second, third)
        bucket: i64 = int((when if when < FARTHEST_S else FARTHEST_S) * BUCKETS_PER_SECOND)
        if bucket <= self._current_bucket:
            heappush(self._late, entry)
            return number
        entries = self._buckets.get(bucket)
        if entries is None:
            self._buckets[bucket] = [entry]
            heappush(self._bucket_heap, bucket)
        else:
            entries.append(entry)
        return number

    def pop(self, until: float) -> Entry | None:
        """Take the next event that happens at ``until`` or before; None if there is none."""
        while True:
            position = self._position
            current = self._current
            late = self._late
            if position < len(current):
                entry = current[position]
                if late and late[0] < entry:
                    return self._pop_late(until)
                when: float = entry[0]
                if when > until:
                    return None
                self._position = position + 1
                self._size -= 1
                return entry
            if late:
                return self._pop_late(until)
            if not self._bucket_heap:
                return None
            bucket = self._bucket_heap[0]
            # A bucket is opened only when its time has come: what is planned before it would have to be late otherwise.
            if bucket / BUCKETS_PER_SECOND > until:
                return None
            heappop(self._bucket_heap)
            self._current = self._buckets.pop(bucket)
            self._current.sort()
            self._position = 0
            self._current_bucket = bucket

    def _pop_late(self, until: float) -> Entry | None:
        when: float = self._late[0][0]
        if when > until:
            return None
        self._size -= 1
        return heappop(self._late)

    def clear(self) -> None:
        """Forget everything, to free the memory of a run that is over."""
        self._buckets.clear()
        self._bucket_heap.clear()
        self._current = []
        self._late = []
        self._position = 0
        self._size = 0

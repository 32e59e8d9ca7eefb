"""Who a message is, wherever it came along, and which messages were here already.

A message's identity is its origin (the broker that received it from a client), that broker's epoch and the number it got
there. Messages of class ``broadcast`` may come to a broker by several ways: flooded by their origin, passed on by a leader,
out of the cloud by an old leader and by a new one. :class:`Seen` lets each through once.

What was here is kept as stretches of numbers, for each origin :data:`MAX_STRETCHES` of them: numbers of one origin rise, so
what is forgotten is old. A message that is older than everything remembered counts as new: it would rather be delivered twice
than not at all. All origins together have :data:`MAX_ALL_STRETCHES`; beyond that each forgets its older half.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

MAX_STRETCHES: Final = 4_096
"""Of one origin. A message out of the cloud, where not all of an origin's messages come from, takes one."""

MAX_ALL_STRETCHES: Final = 500_000
MAX_ORIGINS: Final = 20_000


class Identity:
    """One message's identity, and what travels with it through the cloud.

    ``served`` are the shared subscriptions, as whole filters, whose members had the message already; ``leader`` is who relayed
    it; ``stamp`` is that of a retained message (:mod:`nearcast.fabric.replication`), else 0.
    """

    def __init__(
        self, origin: str, epoch: int, sequence: int, served: list[str] | None = None, leader: str = "", stamp: int = 0
    ) -> None:
        self.origin = origin
        self.epoch = epoch
        self.sequence = sequence
        self.served: list[str] = [] if served is None else served
        self.leader = leader
        self.stamp = stamp

    def __repr__(self) -> str:
        return f"{self.origin}/{self.epoch:x}/{self.sequence}"


class _Stretches:
    """Numbers as stretches that do not touch: ``starts[i]`` to ``ends[i]``, both included, rising."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, first: int, last: int) -> list[tuple[int, int]]:
        """Add ``first`` to ``last``; returns the stretches of these that were not there, in order."""
        starts, ends = self.starts, self.ends
        if not ends or first > ends[-1]:
            if ends and first == ends[-1] + 1:
                ends[-1] = last
            else:
                starts.append(first)
                ends.append(last)
            return [(first, last)]
        fresh = self.absent(first, last)
        if fresh:
            self._insert(first, last)
        return fresh

    def absent(self, first: int, last: int) -> list[tuple[int, int]]:
        """The stretches from ``first`` to ``last`` that are not there, in order."""
        starts, ends = self.starts, self.ends
        fresh: list[tuple[int, int]] = []
        begin = first
        place = max(0, bisect_right(starts, first) - 1)
        while begin <= last and place < len(starts):
            if begin < starts[place]:
                until = min(last, starts[place] - 1)
                fresh.append((begin, until))
                begin = until + 1
            else:
                begin = max(begin, ends[place] + 1)
                place += 1
        if begin <= last:
            fresh.append((begin, last))
        return fresh

    def _insert(self, first: int, last: int) -> None:
        starts, ends = self.starts, self.ends
        low = bisect_right(ends, first - 2)  # the first stretch that touches or lies behind
        high = bisect_right(starts, last + 1)  # behind the last one that touches
        if low < high:
            first = min(first, starts[low])
            last = max(last, ends[high - 1])
        starts[low:high] = [first]
        ends[low:high] = [last]

    def forget_half(self) -> None:
        """The older one. Half at once, so that the lists are moved rarely."""
        half = len(self.starts) // 2
        del self.starts[:half]
        del self.ends[:half]


class Seen:
    """The messages of class ``broadcast`` that were taken here, by origin and epoch."""

    def __init__(
        self,
        max_stretches: int = MAX_STRETCHES,
        max_all_stretches: int = MAX_ALL_STRETCHES,
        max_origins: int = MAX_ORIGINS,
    ) -> None:
        self._max_stretches = max_stretches
        self._max_all_stretches = max_all_stretches
        self._max_origins = max_origins
        self._by_origin: dict[tuple[str, int], _Stretches] = {}
        self._stretches = 0
        #: Messages that came again.
        self.repeated = 0

    def take(self, origin: str, epoch: int, first: int, count: int) -> list[tuple[int, int]]:
        """Take ``count`` messages from this number on; returns those that were not here, as (first number, count) each."""
        key = (origin, epoch)
        known = self._by_origin.get(key)
        if known is None:
            if len(self._by_origin) >= self._max_origins:
                self._stretches -= len(self._by_origin.pop(next(iter(self._by_origin))).starts)
            known = _Stretches()
            self._by_origin[key] = known
        before = len(known.starts)
        fresh = known.add(first, first + count - 1)
        self._stretches += len(known.starts) - before
        if len(known.starts) > self._max_stretches:
            self._forget_half(known)
        if self._stretches > self._max_all_stretches:
            for one in self._by_origin.values():
                self._forget_half(one)
        taken = 0
        found: list[tuple[int, int]] = []
        for begin, end in fresh:
            found.append((begin, end - begin + 1))
            taken += end - begin + 1
        self.repeated += count - taken
        return found

    def absent(self, origin: str, epoch: int, first: int, count: int) -> list[tuple[int, int]]:
        """Those that were not here, as :meth:`take` has them, without taking them."""
        known = self._by_origin.get((origin, epoch))
        if known is None:
            return [(first, count)]
        return [(begin, end - begin + 1) for begin, end in known.absent(first, first + count - 1)]

    def _forget_half(self, known: _Stretches) -> None:
        before = len(known.starts)
        known.forget_half()
        self._stretches -= before - len(known.starts)

    def has(self, origin: str, epoch: int, sequence: int) -> bool:
        """Whether a message was here."""
        known = self._by_origin.get((origin, epoch))
        if known is None:
            return False
        place = bisect_right(known.starts, sequence) - 1
        return place >= 0 and sequence <= known.ends[place]

"""What has arrived at all subscribers of a load: how far each publisher's messages have come, and what went wrong.

Owns the checkers of one run, one per subscriber. Progress opens the publishers' windows; loss, duplicates and order are the
run's verdict. Knows nothing of sockets, nor of what was sent: it is told.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from nearcast.bench.patterns import Plan
from nearcast.bench.verify import GroupTally, MemberChecker, StreamChecker

_NEVER = np.iinfo(np.int64).max


class Deliveries:
    """A plan's streams, or its one group, where subscribers share a subscription."""

    def __init__(self, plan: Plan) -> None:
        publishers = len(plan.topics)
        subscribers = len(plan.filters)
        self._sources = plan.sources
        # Next sequence numbers by subscriber and publisher; publishers that a subscriber does not hear hold nobody up.
        self._expected: npt.NDArray[np.int64] = np.full((subscribers, publishers), _NEVER, dtype=np.int64)
        for subscriber, own in enumerate(plan.sources):
            self._expected[subscriber, own] = 0
        self._written_off = [0] * publishers
        self._tally = GroupTally(publishers) if plan.group else None
        self._members: list[MemberChecker] = []
        self._streams: list[StreamChecker] = []
        if self._tally is not None:
            self._members = [MemberChecker(self._tally, publishers) for _ in range(subscribers)]
        else:
            self._streams = [StreamChecker(expected) for expected in self._expected]

    def checker(self, subscriber: int) -> StreamChecker | MemberChecker:
        return self._streams[subscriber] if self._tally is None else self._members[subscriber]

    def progress(self) -> list[int]:
        """Per publisher, how far its slowest subscriber has come."""
        if self._tally is not None:
            arrived = self._tally.received.tolist()
        else:
            arrived = self._expected.min(axis=0).tolist()
        return [max(pair) for pair in zip(arrived, self._written_off, strict=True)]

    def write_off(self, sent: list[int]) -> None:
        """Give up what is still under way: windows open again, and what never came stays lost."""
        self._written_off = sent

    def lost(self, sent: list[int]) -> int:
        """Messages that never came, when publishers sent so many."""
        if self._tally is not None:
            return sum(self._tally.lost(publisher, count) for publisher, count in enumerate(sent))
        return sum(
            stream.lost(publisher, sent[publisher])
            for stream, own in zip(self._streams, self._sources, strict=True)
            for publisher in own
        )

    @property
    def duplicates(self) -> int:
        if self._tally is not None:
            return self._tally.duplicates
        return sum(stream.duplicates for stream in self._streams)

    @property
    def order_violations(self) -> int:
        return sum(stream.order_violations for stream in self._streams) + sum(
            member.order_violations for member in self._members
        )

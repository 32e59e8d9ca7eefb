"""What a load process counts: deliveries by stream, and times, in bounded memory."""

from __future__ import annotations

import bisect
import math
from array import array

import msgspec

_GROWTH = 1.01
_LOWEST_NS = 1_000
_BUCKETS = 2_100
"""From a microsecond to over a thousand seconds, in steps of a hundredth."""

_SCALE = 1.0 / math.log(_GROWTH)


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution of times, in milliseconds, to within a hundredth."""

    count: int = 0
    mean_ms: float | None = None
    p50_ms: float | None = None
    p90_ms: float | None = None
    p99_ms: float | None = None
    max_ms: float | None = None


class LoadSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What a load process did, printed as JSON at its end."""

    run: str
    host: str | None
    complete: bool
    """False: it was told to end, or failed (``error``), before the scenario was over."""

    error: str | None
    clients: int
    connections: int
    """Connections that were accepted; more than clients when some had to come again."""

    connection_failures: int
    """Attempts to connect for the first time that failed and were repeated."""

    disconnections: int
    """Connections lost before the end."""

    sent: int
    acknowledged: int
    refused: int
    skipped: int
    """Messages that were due and not sent: no connection at QoS 0, or too many waiting."""

    unacknowledged: int
    """Messages of QoS 1 and 2 still without an answer at the end."""

    delivered: int
    """Messages received, duplicates included."""

    duplicated: int
    """Messages that a subscriber had already."""

    lost: int
    """Messages missing between the first and the last that a subscriber had of a stream, also because their publisher skipped
    them: a subscriber cannot know. What is missing after the last shows only in comparison with the publishers' records."""

    dropped: int
    """QoS 0 messages that a client of ours could not take in time: then this process was the bottleneck."""

    foreign: int
    """Messages that are none of this scenario's, or of an earlier run of it that the broker still had."""

    latency: Times
    """From sending to delivery."""

    acknowledgement: Times
    """From sending to the broker's acknowledgement, at QoS 1 and 2."""

    lag: Times
    """How much later than due messages were sent: above a few milliseconds, this process was too busy to be trusted."""

    late: int
    """Messages sent later than due by ``late_ms`` or more."""

    started_late_ms: float
    """How long after ``start_ns`` this process was ready to begin."""

    recorded: int
    recording_stalled_ms: float
    """How long everything stood still because the disk did not keep up with recording."""

    cpu_share: float
    """Processor time that this process used, of one core. Near 1 it was the bottleneck."""


class Histogram:
    """Counts of times in buckets that grow by a hundredth."""

    def __init__(self) -> None:
        self._counts = array("q", bytes(8 * _BUCKETS))
        self._count = 0
        self._sum_ns = 0
        self._max_ns = 0

    def add(self, nanoseconds: int) -> None:
        self._count += 1
        self._sum_ns += nanoseconds
        if nanoseconds > self._max_ns:
            self._max_ns = nanoseconds
        if nanoseconds <= _LOWEST_NS:
            self._counts[0] += 1
        else:
            self._counts[min(_BUCKETS - 1, 1 + int(math.log(nanoseconds / _LOWEST_NS) * _SCALE))] += 1

    def percentile_ns(self, share: float) -> float:
        """The time that this share of all times does not exceed."""
        wanted = max(1, math.ceil(self._count * share))
        seen = 0
        for bucket, count in enumerate(self._counts):
            seen += count
            if seen >= wanted:
                return min(float(self._max_ns), _LOWEST_NS * _GROWTH ** (bucket - 0.5)) if bucket else float(_LOWEST_NS)
        return float(self._max_ns)

    def times(self) -> Times:
        if not self._count:
            return Times()
        return Times(
            count=self._count,
            mean_ms=round(self._sum_ns / self._count / 1e6, 4),
            p50_ms=round(self.percentile_ns(0.5) / 1e6, 4),
            p90_ms=round(self.percentile_ns(0.9) / 1e6, 4),
            p99_ms=round(self.percentile_ns(0.99) / 1e6, 4),
            max_ms=round(self._max_ns / 1e6, 4),
        )


class Received:
    """Which sequence numbers of a stream a subscriber has: runs without gaps, normally a single one."""

    __slots__ = ("_first", "_last")

    def __init__(self) -> None:
        self._first: list[int] = []
        self._last: list[int] = []

    def add(self, sequence: int) -> bool:
        """Take a number in; False when it was there already."""
        first, last = self._first, self._last
        if last and sequence == last[-1] + 1:
            last[-1] = sequence
            return True
        at = bisect.bisect_right(first, sequence) - 1
        if at >= 0 and sequence <= last[at]:
            return False
        joins_before = at >= 0 and last[at] == sequence - 1
        joins_after = at + 1 < len(first) and first[at + 1] == sequence + 1
        if joins_before and joins_after:
            last[at] = last.pop(at + 1)
            first.pop(at + 1)
        elif joins_before:
            last[at] = sequence
        elif joins_after:
            first[at + 1] = sequence
        else:
            first.insert(at + 1, sequence)
            last.insert(at + 1, sequence)
        return True

    @property
    def missing(self) -> int:
        """Numbers between the first and the last that are not there."""
        return sum(later - earlier - 1 for earlier, later in zip(self._last, self._first[1:], strict=False))

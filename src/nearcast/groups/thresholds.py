"""How near brokers must be to share a group: one threshold to join, a higher one to leave (section II-C).

Latencies here and everywhere in groups are one way, in milliseconds: half the measured round trip.
"""

from __future__ import annotations


class Thresholds:
    """The paper's rule: two fixed thresholds, the second above the first, so that a latency that moves a little moves nobody."""

    def __init__(self, join_ms: float, leave_ms: float) -> None:
        self._join_ms = join_ms
        self._leave_ms = leave_ms

    @property
    def join_ms(self) -> float:
        """Leaders nearer than this merge; a member follows its leader to another that is nearer than this."""
        return self._join_ms

    @property
    def leave_ms(self) -> float:
        """A member farther than this from its leader leaves."""
        return self._leave_ms

    @property
    def largest_ms(self) -> float:
        """More than this the first never becomes: brokers farther away need no measuring."""
        return self._join_ms

    def observed(self, correct: int, redundant: int, now: float) -> None:
        """So many messages were wanted by somebody in the group, and so many by nobody. The fixed rule does not care."""

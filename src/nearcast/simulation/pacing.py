"""How fast a stream sends and how long it waits for an answer: measured round trips, and a window that loss makes smaller.

The timeout is RFC 6298's with Linux's bounds; the window is that of TCP Reno: slow start, then a segment more per round trip,
half of it after a loss, one segment after silence.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

FIRST_TIMEOUT_S: Final = 1.0
MIN_TIMEOUT_S: Final = 0.2
MAX_TIMEOUT_S: Final = 120.0
FIRST_WINDOW_SEGMENTS: Final = 10
MAX_BACKOFF: Final = 16


class Pace:
    """What one direction of a stream has learned about its way."""

    def __init__(self, segment_bytes: i64) -> None:
        self.window_bytes: i64 = segment_bytes * FIRST_WINDOW_SEGMENTS
        """How much may be on its way."""
        self.backoff: i64 = 0
        """How many times in a row nobody has answered."""
        self._segment: i64 = segment_bytes
        self._threshold: i64 = 1 << 40
        self._timeout_s = FIRST_TIMEOUT_S
        self._smoothed_s = -1.0
        self._deviation_s = 0.0

    def measured(self, seconds: float) -> None:
        """A round trip."""
        if self._smoothed_s < 0.0:
            self._smoothed_s = seconds
            self._deviation_s = seconds / 2
        else:
            self._deviation_s = 0.75 * self._deviation_s + 0.25 * abs(self._smoothed_s - seconds)
            self._smoothed_s = 0.875 * self._smoothed_s + 0.125 * seconds
        self._timeout_s = self._smoothed_s + max(MIN_TIMEOUT_S, 4 * self._deviation_s)

    def wait_s(self) -> float:
        """How long to wait for an answer, this time."""
        wait = self._timeout_s
        for _ in range(self.backoff):
            wait *= 2
        return min(wait, MAX_TIMEOUT_S)

    def grow(self, acknowledged_bytes: i64) -> None:
        if self.window_bytes < self._threshold:
            self.window_bytes += acknowledged_bytes if acknowledged_bytes < self._segment else self._segment
        else:
            self.window_bytes += max(1, self._segment * self._segment // self.window_bytes)

    def lost_one(self, outstanding_bytes: i64) -> None:
        """Later segments arrived and one did not."""
        self._threshold = max(outstanding_bytes // 2, 2 * self._segment)
        self.window_bytes = self._threshold

    def heard_nothing(self, outstanding_bytes: i64) -> None:
        """The timeout passed."""
        self._threshold = max(outstanding_bytes // 2, 2 * self._segment)
        self.window_bytes = self._segment

    def wait_longer(self) -> None:
        if self.backoff < MAX_BACKOFF:
            self.backoff += 1

"""Time and randomness as things that are handed in.

No pure machine reads a clock: drivers pass ``now``, the seconds of :meth:`Clock.monotonic`. Only what must survive a restart
(a session's expiry, a message's) is written in :meth:`Clock.wall` time.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Where a driver gets its ``now`` from."""

    def monotonic(self) -> float:
        """Seconds that never go back; the zero point means nothing."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""


class SystemClock:
    """The machine's own clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class ManualClock:
    """A clock that moves only when told to; for tests and for virtual time."""

    def __init__(self, monotonic: float = 0.0, wall: float = 1_700_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> float:
        """Move both clocks forward; returns the new monotonic reading."""
        if seconds < 0:
            raise ValueError("a clock does not go back")
        self._monotonic += seconds
        self._wall += seconds
        return self._monotonic

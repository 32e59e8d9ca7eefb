"""Leaders that are not worth asking for a while: they did not answer, would not merge, or lead no more.

Without this a leader that can be measured but not reached, because something between lets pings through and nothing else,
would stay the nearest one for ever, and nobody behind it would ever be asked.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

MAX_NAMES: Final = 256
MAX_DOUBLINGS: Final = 5
"""A leader that fails each time is asked about every half minute, with the usual ``retry_s`` of 1 s."""


class Avoidance:
    """Names, and until when each is avoided: twice as long after every failure in a row."""

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._until: dict[str, float] = {}
        self._failures: dict[str, int] = {}

    def failed(self, name: str, now: float) -> None:
        """It did not answer, or said no."""
        failures = self._failures.pop(name, 0)
        self._failures[name] = failures + 1
        self._avoid(name, now + self._retry_s * float(1 << min(failures, MAX_DOUBLINGS)))

    def is_no_leader(self, name: str, now: float) -> None:
        """It says so, and soon its announcements will."""
        self._avoid(name, now + self._retry_s / 2.0)

    def succeeded(self, name: str) -> None:
        """All is well with it."""
        if self._until:
            self._until.pop(name, None)
            self._failures.pop(name, None)

    def names(self, now: float) -> Collection[str]:
        """Whom to avoid now."""
        if not self._until:
            return ()
        return {name for name, until in self._until.items() if now < until}

    def _avoid(self, name: str, until: float) -> None:
        self._until.pop(name, None)
        self._until[name] = until
        if len(self._until) > MAX_NAMES:
            oldest = next(iter(self._until))
            del self._until[oldest]
            self._failures.pop(oldest, None)

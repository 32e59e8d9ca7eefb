"""How long a client of the bulk port tries again without getting anywhere, and how long it waits in between.

Getting somewhere is an answer or a batch. A connection is not: a broker, or something in front of it, that takes connections
and ends them would otherwise be asked for ever, as fast as it can.
"""

from __future__ import annotations

import random

RETRY_SECONDS = (0.05, 2.0)
"""First and longest pause between attempts."""


class Patience:
    """Counts the time since things last went well, on whatever clock its owner reads."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._since: float | None = None
        self._pause = RETRY_SECONDS[0]

    def rewarded(self) -> None:
        """An answer came, or a batch."""
        self._since = None
        self._pause = RETRY_SECONDS[0]

    def wait_seconds(self, now: float) -> float | None:
        """An attempt failed: the time until the next, none after the first; ``None`` when it has been enough."""
        if self._since is None:
            self._since = now
            return 0.0
        left = self._since + self._seconds - now
        if left <= 0:
            return None
        wait = min(left, self._pause * random.uniform(0.5, 1.0))
        self._pause = min(RETRY_SECONDS[1], self._pause * 2)
        return wait

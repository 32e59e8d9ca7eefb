"""When to connect to the cloud, and what is said about it when that fails. Decides; a driver connects."""

from __future__ import annotations

import random
from typing import Final

from nearcast.mqtt.client_reconnection import Backoff, Reconnection

NEVER: Final = float("inf")

BACKOFF: Final = Backoff(initial_seconds=0.25, max_seconds=10.0)

RARELY: Final = 6
"""The attempt from which on the delay is longest: for what does not pass by itself. It is tried all the same, because somebody
may put it right at the cloud."""

MAX_NEWS: Final = 64


class CloudDialling:
    """Attempts to connect, over any number of connections."""

    def __init__(self, rng: random.Random) -> None:
        self.under_way = False
        #: When to connect next; for ever away while there was no reason to.
        self.due_at = NEVER
        #: Why there is no connection, in words for people; empty while there is one, or none was wanted.
        self.problem = ""
        self._attempts = Reconnection(BACKOFF, rng)
        self._news: list[tuple[bool, str]] = []

    def wake(self, now: float) -> None:
        """There is a reason to connect, if there was none before."""
        if self.due_at == NEVER:
            self.due_at = now

    def rest(self) -> None:
        """There is no reason any more."""
        self.due_at = NEVER

    def failed(self, reason: str, rarely: bool, now: float) -> None:
        """There is no connection: try again later."""
        if rarely:
            self._attempts.attempt = max(self._attempts.attempt, RARELY)
        self.due_at = now + self._attempts.next_delay_seconds()
        if reason != self.problem:
            self._tell(False, reason)
        self.problem = reason

    def connected(self, now: float) -> None:
        """There is a connection."""
        self._attempts.connected(now)
        self.problem = ""
        self._tell(True, "")

    def lost(self, now: float) -> None:
        """It is over."""
        self._attempts.lost(now)

    def _tell(self, up: bool, text: str) -> None:
        if len(self._news) < MAX_NEWS:
            self._news.append((up, text))

    def take_news(self) -> list[tuple[bool, str]]:
        """Connections that came (true) and new reasons why there is none (false) since the last call, for logs."""
        taken = self._news
        if taken:
            self._news = []
        return taken

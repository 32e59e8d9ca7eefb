"""When to try again: exponential backoff with jitter, and which refusals are worth another attempt. Decides, does not wait."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import Disconnected

#: A connection that held so long proves that the broker works: the next backoff starts from its beginning.
STABLE_SECONDS: Final = 5.0

#: Refusals that pass by themselves. Anything else would be answered the same way again.
TEMPORARY_REFUSALS = frozenset(
    {
        reasons.UNSPECIFIED_ERROR,
        reasons.SERVER_UNAVAILABLE,
        reasons.SERVER_BUSY,
        reasons.SERVER_SHUTTING_DOWN,
        reasons.QUOTA_EXCEEDED,
        reasons.CONNECTION_RATE_EXCEEDED,
        reasons.USE_ANOTHER_SERVER,
    }
)

#: DISCONNECTs after which reconnecting is wrong. Two clients with one identifier would throw each other out for ever.
FINAL_DISCONNECTS = frozenset(
    {
        reasons.SESSION_TAKEN_OVER,
        reasons.NOT_AUTHORIZED,
        reasons.BANNED,
        reasons.BAD_AUTHENTICATION_METHOD,
    }
)


@dataclass(frozen=True)
class Backoff:
    """Delays between attempts to reconnect."""

    initial_seconds: float = 0.25
    """Before the first attempt. Too low hammers a broker that restarts; too high leaves a gap after a short outage."""

    max_seconds: float = 30.0
    """Upper bound of the doubling delay. Too high leaves clients away long after the broker is back."""

    def delay_seconds(self, attempt: int, rng: random.Random) -> float:
        """Before attempt 0, 1, 2, ...: doubling, and spread over its upper half so that clients do not return in step."""
        ceiling = min(self.max_seconds, self.initial_seconds * 2.0 ** min(attempt, 30))
        return ceiling * (0.5 + rng.random() / 2)


class Reconnection:
    """One client's attempts, over any number of connections."""

    def __init__(self, backoff: Backoff, rng: random.Random) -> None:
        self.attempt = 0
        """How many attempts the next one has behind it."""
        self._backoff = backoff
        self._rng = rng
        self._connected_at = 0.0

    def connected(self, now: float) -> None:
        """There is a connection."""
        self._connected_at = now

    def lost(self, now: float) -> None:
        """The connection ended."""
        if now - self._connected_at >= STABLE_SECONDS:
            self.attempt = 0

    def begin_anew(self) -> None:
        """It goes somewhere else now: what failed before says nothing about that."""
        self.attempt = 0

    def next_delay_seconds(self, elsewhere: bool = False) -> float:
        """How long to wait before the next attempt. The first one at another broker, to which one was sent, need not wait."""
        attempt = self.attempt
        self.attempt += 1
        return 0.0 if elsewhere and attempt == 0 else self._backoff.delay_seconds(attempt, self._rng)


def is_final(end: Disconnected) -> bool:
    """Whether a connection ended in a way after which reconnecting is wrong."""
    return end.by_server and end.reason_code in FINAL_DISCONNECTS


def is_temporary(refusal_code: int) -> bool:
    """Whether a refused CONNECT is worth another attempt."""
    return refusal_code in TEMPORARY_REFUSALS

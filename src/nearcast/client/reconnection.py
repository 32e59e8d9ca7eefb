"""When to try again: exponential backoff with jitter, and which refusals are worth another attempt. Decides, does not wait."""

from __future__ import annotations

import random
from dataclasses import dataclass

from nearcast.mqtt import reasons

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

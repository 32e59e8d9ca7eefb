"""How long to wait: round trips as measured, and the election timeout that follows from them.

Only durations on one machine's own monotonic clock are compared, never times of two machines: clocks that are wrong, or run
at slightly different rates, make elections earlier or later, and nothing wrong.
"""

from __future__ import annotations

import random
from typing import Final

from nearcast.raft.settings import RaftSettings

UNRANKED: Final = -1
_RANK_STEP: Final = 0.5
_MAX_STEPS: Final = 3


class RoundTrips:
    """Mean and deviation of round trips to one replica, smoothed as TCP does (RFC 6298)."""

    def __init__(self) -> None:
        self.mean_s = 0.0
        self._deviation_s = 0.0

    def measured(self, seconds: float) -> None:
        """One more; nonsense (a clock that was answered from another life) is left out."""
        if not 0.0 <= seconds <= 60.0:
            return
        if self.mean_s == 0.0:
            self.mean_s = seconds
            self._deviation_s = seconds / 2.0
            return
        self._deviation_s += (abs(seconds - self.mean_s) - self._deviation_s) / 4.0
        self.mean_s += (seconds - self.mean_s) / 8.0

    @property
    def worst_s(self) -> float:
        """What nearly all of them stay below."""
        return self.mean_s + 4.0 * self._deviation_s


def election_timeout(settings: RaftSettings, worst_round_trip_s: float) -> float:
    """For a replica set whose slowest voter is so far from its leader."""
    wanted = settings.round_trips_per_timeout * worst_round_trip_s
    return min(max(settings.election_timeout_seconds, wanted), settings.max_election_timeout_seconds)


def election_delay(timeout_s: float, rank: int, rng: random.Random) -> float:
    """How long to wait for a leader before standing for election.

    Ranked replicas have slots of their own, one behind the other, so that the first one usually wins before the second
    stands; without a rank (no leader has been heard yet) anything up to twice the timeout (Raft §5.2).
    """
    if rank == UNRANKED:
        return timeout_s * (1.0 + rng.random())
    slot = min(rank, _MAX_STEPS)
    return timeout_s * (1.0 + _RANK_STEP * (slot + rng.random()))

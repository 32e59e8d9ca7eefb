"""When a client publishes: evenly or at random, as a machine that is asked for the next moment. No clock inside.

A driver sends while ``schedule.next_s`` has come and calls :meth:`Schedule.advance` after each message. One that falls behind
sends what it missed as fast as it can: the moments do not depend on how well it keeps up, so the load stays what was asked
for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

from nearcast.scenario.expansion import Client
from nearcast.scenario.workload import Publishing


def publication_times(client: Client, stream: int, seed: int) -> Schedule:
    """The moments of one stream (a position in ``client.publish``) of a client. They depend on nothing but the seed, the
    client's name and the stream: in the simulator and on the emulated WAN a client publishes at the same moments."""
    rng = Random(f"{seed}/{client.name}/{stream}")
    return Schedule(client.publish[stream], client.start_s, client.stop_s, rng)


class Schedule:
    """The moments of one stream of messages, in seconds after the start of the scenario."""

    def __init__(self, publishing: Publishing, start_s: float, stop_s: float, rng: Random) -> None:
        self.sequence = 0
        """Number of the next message, from 0."""

        self._rng = rng if publishing.poisson else None
        self._rate_hz = publishing.rate_hz
        self._stop_s = stop_s
        # Clients that start together must not send together: evenly spaced streams begin anywhere in their first interval.
        gap_s = rng.expovariate(self._rate_hz) if publishing.poisson else rng.random() / self._rate_hz
        self._first_s = self._moment_s = start_s + gap_s

    @property
    def next_s(self) -> float:
        """When the next message is due; infinity when there is none left."""
        return self._moment_s if self._moment_s < self._stop_s else math.inf

    def advance(self) -> None:
        """The message is sent; on to the next one."""
        self.sequence += 1
        if self._rng is None:
            # Not by adding up, which would drift over millions of messages.
            self._moment_s = self._first_s + self.sequence / self._rate_hz
        else:
            self._moment_s += self._rng.expovariate(self._rate_hz)

    def __iter__(self) -> Iterator[float]:
        """The moments that are left."""
        while self.next_s < math.inf:
            yield self.next_s
            self.advance()

"""The built-in protocol ``probes``: every host sends a small datagram to a random other one, again and again, and is answered.

It is the load of the simulator's scale bar, and a first look at a topology: what round trips are there, and what gets lost.
Settings: ``period_s`` between two probes of one host (1), ``size_bytes`` of a probe (64).
"""

from __future__ import annotations

import math
import random
from typing import TYPE_CHECKING, Any, Final

from mypy_extensions import i64

from nearcast.errors import ConfigError, InvariantViolated
from nearcast.simulation.hosts import Host, Node
from nearcast.simulation.invariants import Invariant, Protocol

if TYPE_CHECKING:
    from nearcast.scenario.scenario import Scenario
    from nearcast.simulation.world import World

# Round trips are counted in buckets that grow by 2 % each, from 1 microsecond.
_GROWTH: Final = 1.02
_LOG_GROWTH: Final = math.log(_GROWTH)
_SHORTEST_S: Final = 1e-6
_BUCKETS: Final = 1200


class Probe:
    """Asks for an answer; says when it was sent, on the sender's clock."""

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at

    def __repr__(self) -> str:
        return f"Probe({self.sent_at:.6f})"


class Answer:
    """Gives a probe's time back."""

    def __init__(self, sent_at: float) -> None:
        self.sent_at = sent_at

    def __repr__(self) -> str:
        return f"Answer({self.sent_at:.6f})"


class Tally:
    """What all probing nodes of one run have seen together."""

    def __init__(self, hosts: int, rng: random.Random, period_s: float, size_bytes: int, end_s: float) -> None:
        self.hosts: i64 = hosts
        self.rng = rng
        self.period_s = period_s
        self.size_bytes: i64 = size_bytes
        self.end_s = end_s
        self.probes: i64 = 0
        self.answered: i64 = 0
        self.answers: i64 = 0
        self.counts: list[int] = [0] * _BUCKETS
        self.longest_s = 0.0

    def measured(self, round_trip_s: float) -> None:
        self.answers += 1
        if round_trip_s > self.longest_s:
            self.longest_s = round_trip_s
        bucket: i64 = 0
        if round_trip_s > _SHORTEST_S:
            bucket = int(math.log(round_trip_s / _SHORTEST_S) / _LOG_GROWTH)
            if bucket >= _BUCKETS:
                bucket = _BUCKETS - 1
        self.counts[bucket] += 1

    def quantile_ms(self, share: float) -> float:
        """Round trip that so large a share stays below, to 2 %; 0 without answers."""
        wanted = float(self.answers) * share
        seen = 0
        for bucket, count in enumerate(self.counts):
            seen += count
            if seen >= wanted and count:
                return float(_SHORTEST_S * _GROWTH ** (bucket + 0.5) * 1000.0)
        return 0.0


class ProbingNode(Node):
    """Sends a probe to a random other host every period, and answers those of others."""

    def __init__(self, host: Host, tally: Tally) -> None:
        super().__init__(host)
        self._tally = tally

    def start(self) -> None:
        self.host.wake_at(self.host.now + self._tally.rng.random() * self._tally.period_s)

    def woken(self) -> None:
        host = self.host
        tally = self._tally
        now = host.now
        if host.world.now >= tally.end_s:
            return
        target: i64 = int(tally.rng.random() * float(tally.hosts - 1))
        if target >= host.index:
            target += 1
        tally.probes += 1
        host.send(target, Probe(now), tally.size_bytes)
        host.wake_at(now + tally.period_s)

    def received(self, source: int, message: object) -> None:
        if isinstance(message, Probe):
            self._tally.answered += 1
            self.host.send(source, Answer(message.sent_at), self._tally.size_bytes)
        elif isinstance(message, Answer):
            # After a power cut the clock begins anew, and an answer to the machine's former self says nothing.
            round_trip_s = self.host.now - message.sent_at
            if round_trip_s >= 0.0:
                self._tally.measured(round_trip_s)


class NoMoreAnswersThanProbes(Invariant):
    """Nobody is answered who did not ask, as long as the network does not duplicate."""

    def __init__(self, tally: Tally, world: World) -> None:
        self._tally = tally
        self._world = world

    def check(self) -> None:
        tally = self._tally
        duplicated = self._world.network.duplicated
        if tally.answered > tally.probes + duplicated or tally.answers > tally.answered + duplicated:
            raise InvariantViolated(
                f"{tally.probes} probes were sent, {tally.answered} answered, {tally.answers} answers received"
            )


class Probes(Protocol):
    """Probes between all hosts of the topology."""

    def __init__(self) -> None:
        self._tally: Tally | None = None

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        period_s = _positive(scenario.settings, "period_s", 1.0)
        size_bytes = int(_positive(scenario.settings, "size_bytes", 64))
        unknown = sorted(set(scenario.settings) - {"period_s", "size_bytes"})
        if unknown:
            raise ConfigError(f"`settings.{unknown[0]}`: the protocol probes has only period_s and size_bytes")
        if len(world.hosts) < 2:
            raise ConfigError("the protocol probes needs a topology with at least two hosts")
        tally = Tally(len(world.hosts), world.rng, period_s, size_bytes, scenario.duration_s)
        self._tally = tally
        for host in world.hosts:
            world.place(host.name, lambda host: ProbingNode(host, tally))
        return [NoMoreAnswersThanProbes(tally, world)]

    def report(self) -> dict[str, Any]:
        tally = self._tally
        if tally is None:
            return {}
        return {
            "hosts": tally.hosts,
            "probes": tally.probes,
            "answers": tally.answers,
            "unanswered": 0.0 if not tally.probes else round(1.0 - float(tally.answers) / float(tally.probes), 6),
            "round_trip_p50_ms": round(tally.quantile_ms(0.5), 3),
            "round_trip_p99_ms": round(tally.quantile_ms(0.99), 3),
            "round_trip_max_ms": round(tally.longest_s * 1000.0, 3),
        }


def _positive(settings: dict[str, Any], name: str, default: float) -> float:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 < value < 1e9:
        raise ConfigError(f"`settings.{name}` must be a number above 0")
    return float(value)

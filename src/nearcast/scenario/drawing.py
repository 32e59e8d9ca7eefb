"""Random faults become events: drawn once, before the run, from a ``random.Random``; the same seed gives the same faults.

What :class:`~nearcast.scenario.events.RandomFaults` promises is kept here: how many on average, how long, that every fault
ends ``quiet_s`` before the end. Two faults of one host that would undo each other's repair do not overlap: a process that is
down is not killed again, a slow link not slowed again, a wrong clock not set wrong again. A fault that finds no host free for
it is left out, so a few hosts under many faults get fewer than asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from random import Random

import msgspec

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeAccess, Crash, Cut, Event, Kill, Pause, RandomFaults, SkewClock
from nearcast.scenario.expansion import match_hosts
from nearcast.scenario.rules import unknown

MAX_FAULTS = 1_000_000
"""Faults of one run."""

_ATTEMPTS = 20
_IDEAL = Conditions()


def draw(
    faults: RandomFaults,
    hosts: Sequence[str],
    duration_s: float,
    rng: Random,
    access: Mapping[str, Conditions] | None = None,
) -> tuple[Event, ...]:
    """Events in the order of their time. ``hosts`` are the names of all hosts; ``access`` their access links, where these are
    not ideal."""
    hit: dict[str, None] = {} if faults.hosts else dict.fromkeys(hosts)
    for pattern in faults.hosts:
        matched = match_hosts(pattern, hosts)
        if not matched:
            raise ConfigError(f"`random_faults.hosts`: {unknown('host', pattern, hosts)}", key="random_faults.hosts")
        hit.update(dict.fromkeys(matched))
    return _Drawing(faults, list(hit), list(hosts), duration_s, rng, access or {}).events()


class _Drawing:
    def __init__(
        self,
        faults: RandomFaults,
        hit: list[str],
        hosts: list[str],
        duration_s: float,
        rng: Random,
        access: Mapping[str, Conditions],
    ) -> None:
        self._faults = faults
        self._hit = hit
        self._hosts = hosts
        self._end_s = duration_s - faults.quiet_s
        self._rng = rng
        self._access = access
        # When each host is already in trouble, per kind of trouble that must not overlap.
        self._busy: dict[tuple[str, str], list[tuple[float, float]]] = {}

    def events(self) -> tuple[Event, ...]:
        faults = self._faults
        plan: tuple[tuple[float, Callable[[], list[Event]]], ...] = (
            (faults.kills_per_minute, self._kill),
            (faults.crashes_per_minute, self._crash),
            (faults.pauses_per_minute, self._pause),
            (faults.cuts_per_minute, self._cut),
            (faults.slow_links_per_minute, self._slow_link),
            (faults.skews_per_minute, self._skew),
        )
        if self._end_s <= 0 or not self._hit:
            return ()
        expected = sum(rate for rate, _ in plan) * self._end_s / 60
        if expected > MAX_FAULTS:
            raise ConfigError(f"about {expected:,.0f} random faults: at most {MAX_FAULTS:,}; lower the rates or the duration")
        found: list[Event] = []
        for rate, make in plan:
            for _ in range(self._count(rate)):
                found += make()
        return tuple(sorted(found, key=lambda event: event.at_s))

    def _count(self, per_minute: float) -> int:
        """How many there are: a Poisson number, by counting exponential gaps until the end."""
        if per_minute <= 0:
            return 0
        count = 0
        moment_s = self._rng.expovariate(per_minute / 60)
        while moment_s < self._end_s:
            count += 1
            moment_s += self._rng.expovariate(per_minute / 60)
        return count

    def _span(self) -> tuple[float, float]:
        """When one fault begins and how long it lasts, in whole microseconds. It is over before the quiet time."""
        longest_s = self._faults.max_fault_s
        duration_s = longest_s * math.exp(self._rng.uniform(math.log(0.01), 0.0))
        duration_s = max(1e-6, _floor(min(duration_s, self._end_s)))
        return _floor(self._rng.uniform(0.0, max(0.0, self._end_s - duration_s))), duration_s

    def _spot(self, trouble: str) -> tuple[str, float, float] | None:
        """A host and a time at which it is not in that trouble; None if none was found."""
        for _ in range(_ATTEMPTS):
            host = self._rng.choice(self._hit)
            start_s, duration_s = self._span()
            spans = self._busy.setdefault((trouble, host), [])
            if all(start_s > until or start_s + duration_s < since for since, until in spans):
                spans.append((start_s, start_s + duration_s))
                return host, start_s, duration_s
        return None

    def _kill(self) -> list[Event]:
        spot = self._spot("process")
        return [] if spot is None else [Kill(at_s=spot[1], host=spot[0], restart_after_s=spot[2])]

    def _crash(self) -> list[Event]:
        spot = self._spot("process")
        return [] if spot is None else [Crash(at_s=spot[1], host=spot[0], restart_after_s=spot[2])]

    def _pause(self) -> list[Event]:
        spot = self._spot("process")
        return [] if spot is None else [Pause(at_s=spot[1], host=spot[0], for_s=spot[2])]

    def _cut(self) -> list[Event]:
        start_s, duration_s = self._span()
        one_way = self._rng.random() < 0.5
        alone = self._rng.random() < 0.5 or len(self._hit) < 2
        source: tuple[str, ...]
        target: tuple[str, ...] = ()
        if alone:
            host = self._rng.choice(self._hit)
            source = (host,)
            others = tuple(other for other in self._hosts if other != host)
            if one_way and others and self._rng.random() < 0.5:
                # Deaf instead of mute.
                source, target = others, source
        else:
            shuffled = self._rng.sample(self._hit, len(self._hit))
            middle = len(shuffled) // 2
            source, target = tuple(shuffled[:middle]), tuple(shuffled[middle:])
        return [Cut(at_s=start_s, source=source, target=target, one_way=one_way, for_s=duration_s)]

    def _slow_link(self) -> list[Event]:
        spot = self._spot("access")
        if spot is None:
            return []
        host, start_s, duration_s = spot
        before = self._access.get(host, _IDEAL)
        factor = math.exp(self._rng.uniform(math.log(10.0), math.log(100.0)))
        slow = msgspec.structs.replace(
            before,
            latency_ms=max(50.0, before.latency_ms * factor),
            loss=max(before.loss, self._rng.uniform(0.01, 0.2)),
        )
        return [ChangeAccess(at_s=start_s, host=host, conditions=slow, for_s=duration_s)]

    def _skew(self) -> list[Event]:
        spot = self._spot("clock")
        if spot is None:
            return []
        host, start_s, duration_s = spot
        jump_s = self._rng.uniform(-self._faults.max_skew_s, self._faults.max_skew_s)
        rate = self._rng.uniform(0.99, 1.01)
        # What the clock gained by its rate until then is taken back with the jump.
        undo_s = -(jump_s + (rate - 1.0) * duration_s)
        return [
            SkewClock(at_s=start_s, host=host, offset_s=jump_s, rate=rate),
            SkewClock(at_s=start_s + duration_s, host=host, offset_s=undo_s, rate=1.0),
        ]


def _floor(seconds: float) -> float:
    return math.floor(seconds * 1e6) / 1e6

"""Brokers that form groups by one rule or another, and what a stated workload costs them: hours of virtual time in seconds.

The machines are those that are shipped: :class:`~nearcast.groups.formation.Formation`,
:class:`~nearcast.groups.thresholds.AdaptiveThresholds`, :class:`~nearcast.groups.flows.Flows` and
:class:`~nearcast.groups.adaptation.Adaptation`, whose messages take the network's time. Messages of clients are not sent one
by one but counted: every :data:`STEP_S` each origin's messages go where section II-B says, by the views that the brokers have
at that moment, and each broker's machine is told how many came and how many of them somebody wanted. Latencies between
brokers are known exactly; announcements reach all within :data:`ANNOUNCED_S`.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Collection, Sequence
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.groups.adaptation import Adaptation
from nearcast.groups.flows import Flows
from nearcast.groups.formation import Formation, LeaderChanged
from nearcast.groups.messages import Message, Report
from nearcast.groups.settings import FormationSettings
from nearcast.groups.stability import unstable
from nearcast.groups.thresholds import AdaptiveThresholds, Thresholds
from nearcast.network.latency import EARTH_RADIUS_KM

STEP_S: Final = 5.0
"""Messages are counted in steps of this, half as long as a period of the rules."""

ANNOUNCED_S: Final = 1.0
LEAVE_FACTOR: Final = 1.25

Floats = npt.NDArray[np.float64]


class Rule(msgspec.Struct, frozen=True, kw_only=True):
    """How groups form. Without a budget the threshold is fixed; it is where an adaptive one begins."""

    name: str
    threshold_ms: float
    budget: float | None = None
    flow_aware: bool = False
    least_ms: float = 1.0
    largest_ms: float = 50.0


class Place(NamedTuple):
    """Where the brokers are: one-way latencies in milliseconds, to each other and to the cloud; who could lead how well."""

    names: list[str]
    apart_ms: Floats
    cloud_ms: Floats
    lcm: list[float]


class Demand(NamedTuple):
    """Who publishes how much a second, and who wants it: for each origin, the brokers with subscribers."""

    rates: list[float]
    wanted_by: list[list[int]]


class Moment(msgspec.Struct, frozen=True):
    """How things are at one time."""

    at_s: float
    groups: int
    excess: float
    """Share of the messages at brokers that nobody there wanted."""
    latency_ms: float
    """Mean delivery latency between brokers, weighted by messages."""
    median_ms: float
    by_cloud: float
    """Share of deliveries between brokers that went by way of the cloud."""


class Result(msgspec.Struct, kw_only=True):
    """What became of a rule."""

    rule: Rule
    moments: list[Moment]
    changes_s: list[float]
    """When brokers changed their leader, one entry for each."""
    unstable: list[str]
    """What keeps the formation from being over, at the end."""
    over_budget: list[float]
    """At the end, the excess of groups that are above their budget and could still lower their threshold."""
    thresholds_ms: list[float]
    """Of the groups, at the end."""

    @property
    def last(self) -> Moment:
        return self.moments[-1]

    def changes_between(self, begin_s: float, end_s: float) -> int:
        return sum(1 for at in self.changes_s if begin_s <= at < end_s)


class _Broker:
    def __init__(self, index: int, study: Study) -> None:
        rule, place, now = study.rule, study.place, study.now
        rng = random.Random(f"{study.seed}/{index}")
        leave_ms = LEAVE_FACTOR * rule.threshold_ms
        self.index = index
        self.name = place.names[index]
        self.thresholds = Thresholds(rule.threshold_ms, leave_ms)
        if rule.budget is not None:
            self.thresholds = AdaptiveThresholds(rule.threshold_ms, leave_ms, rule.budget, rule.least_ms, rule.largest_ms, now)
        # A study of hours need not look every second whether a latency that does not change has changed.
        settings = FormationSettings(check_interval_s=5.0, renew_interval_s=20.0)
        self.study = study
        self.formation = Formation(self.name, f"{self.name}:1884", settings, self, self.thresholds, place.lcm[index], rng, now)
        flows = Flows(now) if rule.flow_aware else None
        self.adaptation = Adaptation(
            self.formation, self.thresholds, flows, adaptive=rule.budget is not None, rng=rng, now=now
        )
        self.wakes_at = math.inf

    # What the formation asks of its neighbours.

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        study = self.study
        apart_ms = study.place.apart_ms[self.index]
        best, best_ms = "", below_ms
        for index, threshold_ms in study.announced(now):
            if apart_ms[index] < best_ms and apart_ms[index] < threshold_ms and index != self.index:
                name = study.place.names[index]
                if name not in avoid:
                    best, best_ms = name, apart_ms[index]
        return best

    def latency_ms(self, name: str) -> float:
        return float(self.study.place.apart_ms[self.index, self.study.numbers[name]])

    def address(self, name: str) -> str:
        return f"{name}:1884"


class Study:
    """One rule, one place, one demand."""

    def __init__(self, rule: Rule, place: Place, demand: Demand, seed: int) -> None:
        self.rule = rule
        self.place = place
        self.demand = demand
        self.seed = seed
        self.now = 0.0
        self.numbers = {name: index for index, name in enumerate(place.names)}
        self.changes_s: list[float] = []
        self._announced: list[tuple[int, float]] = []
        self._announced_until = -1.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, int, str, Message | None]] = []
        self.brokers = [_Broker(index, self) for index in range(len(place.names))]
        for broker in self.brokers:
            self._act(broker)

    def announced(self, now: float) -> list[tuple[int, float]]:
        """Leaders and their thresholds, as they were announced last."""
        if now >= self._announced_until:
            self._announced_until = now + ANNOUNCED_S
            self._announced = [(broker.index, broker.thresholds.join_ms) for broker in self.brokers if broker.formation.leads]
        return self._announced

    # --- time -----------------------------------------------------------------------------------------------------------

    def run(self, duration_s: float, every_s: float) -> Result:
        """Let it go on, and look at it now and then."""
        moments: list[Moment] = []
        end = self.now + duration_s
        step_at, look_at = self.now + STEP_S, self.now + every_s
        while step_at <= end:
            self._run_until(step_at)
            self._count(STEP_S)
            if step_at >= look_at or step_at + STEP_S > end:
                moments.append(self.moment())
                look_at += every_s
            step_at += STEP_S
        return Result(
            rule=self.rule,
            moments=moments,
            changes_s=self.changes_s,
            unstable=unstable((broker.formation for broker in self.brokers), self._apart_ms),
            over_budget=self._over_budget(),
            thresholds_ms=[broker.thresholds.join_ms for broker in self.brokers if broker.formation.leads],
        )

    def _run_until(self, end: float) -> None:
        due = self._due
        while due and due[0][0] <= end:
            at, _, index, sender, message = heapq.heappop(due)
            broker = self.brokers[index]
            if message is None and at != broker.wakes_at:
                continue
            self.now = at
            if message is None:
                broker.wakes_at = math.inf
                broker.formation.tick(at)
                broker.adaptation.tick(at)
            elif isinstance(message, Report):
                broker.adaptation.reported(sender, message, at)
            else:
                broker.formation.handle(sender, message, at)
            self._act(broker)
        self.now = end

    def _act(self, broker: _Broker) -> None:
        now = self.now
        changes = broker.formation.take_changes()
        if changes:
            broker.adaptation.regrouped(now)
            self.changes_s += [now for change in changes if isinstance(change, LeaderChanged)]
        for to, message in [*broker.formation.take_outgoing(), *broker.adaptation.take_outgoing()]:
            number = self.numbers[to]
            at = now + float(self.place.apart_ms[broker.index, number]) / 1e3
            heapq.heappush(self._due, (at, next(self._order), number, broker.name, message))
        wakes_at = max(now, min(broker.formation.next_deadline(), broker.adaptation.next_deadline()))
        if wakes_at < broker.wakes_at:
            broker.wakes_at = wakes_at
            heapq.heappush(self._due, (wakes_at, next(self._order), broker.index, "", None))

    # --- messages -------------------------------------------------------------------------------------------------------

    def _reached(self, origin: int) -> dict[int, str]:
        """Brokers that process an origin's message, and which leader relayed it there (empty: flooded)."""
        numbers = self.numbers
        view = self.brokers[origin].formation.view
        reached = {numbers[name]: "" for name in view.members}
        for wanting in self.demand.wanted_by[origin]:
            if wanting not in reached:
                theirs = self.brokers[numbers[self.brokers[wanting].formation.leader]].formation.view
                reached.update({numbers[name]: view.leader for name in theirs.members if numbers[name] not in reached})
                reached.setdefault(wanting, view.leader)
        return reached

    def _count(self, seconds: float) -> None:
        for origin, rate in enumerate(self.demand.rates):
            messages = round(rate * seconds)
            wanted_by = set(self.demand.wanted_by[origin])
            for index, relayed_by in self._reached(origin).items():
                if index == origin:
                    self.brokers[index].adaptation.published(messages)
                else:
                    self.brokers[index].adaptation.arrived(index in wanted_by, relayed_by, messages)

    def moment(self) -> Moment:
        """How things are now."""
        processed = wanted = 0.0
        latencies: list[float] = []
        weights: list[float] = []
        by_cloud = 0.0
        place, numbers = self.place, self.numbers
        leader_of = [numbers[broker.formation.leader] for broker in self.brokers]
        for origin, rate in enumerate(self.demand.rates):
            reached = self._reached(origin)
            processed += rate * len(reached)
            wanted += rate
            for wanting in self.demand.wanted_by[origin]:
                wanted += rate
                if reached[wanting]:
                    from_, to = leader_of[origin], leader_of[wanting]
                    by_cloud += rate
                    latency_ms = (
                        place.apart_ms[origin, from_]
                        + place.cloud_ms[from_]
                        + place.cloud_ms[to]
                        + place.apart_ms[to, wanting]
                    )
                else:
                    latency_ms = place.apart_ms[origin, wanting]
                latencies.append(float(latency_ms))
                weights.append(rate)
        groups = sum(broker.formation.leads for broker in self.brokers)
        excess = 1.0 - wanted / processed
        if not latencies:
            return Moment(self.now, groups, excess, 0.0, 0.0, 0.0)
        total = sum(weights)
        order = np.argsort(latencies)
        median_ms = latencies[order[np.searchsorted(np.cumsum(np.asarray(weights)[order]), total / 2.0)]]
        mean_ms = float(np.average(latencies, weights=weights))
        return Moment(self.now, groups, excess, mean_ms, median_ms, by_cloud / total)

    def _over_budget(self) -> list[float]:
        if self.rule.budget is None:
            return []
        counts: dict[int, list[float]] = {}
        for origin, rate in enumerate(self.demand.rates):
            wanted_by = {origin, *self.demand.wanted_by[origin]}
            for index in self._reached(origin):
                group = counts.setdefault(self.numbers[self.brokers[index].formation.leader], [0.0, 0.0])
                group[index not in wanted_by] += rate
        return sorted(
            redundant / (correct + redundant)
            for leader, (correct, redundant) in counts.items()
            if redundant / (correct + redundant) > self.rule.budget
            and self.brokers[leader].thresholds.join_ms > self.rule.least_ms
        )

    def _apart_ms(self, one: str, other: str) -> float:
        return float(self.place.apart_ms[self.numbers[one], self.numbers[other]])


def distances_ms(places: Sequence[tuple[float, float]], others: Sequence[tuple[float, float]], ms_per_km: float) -> Floats:
    """Between positions (latitude, longitude), by great circles."""
    one, other = np.radians(np.asarray(places)), np.radians(np.asarray(others))
    north = np.sin((one[:, None, 0] - other[None, :, 0]) / 2.0) ** 2
    east = np.sin((one[:, None, 1] - other[None, :, 1]) / 2.0) ** 2
    chord = north + np.cos(one[:, None, 0]) * np.cos(other[None, :, 0]) * east
    found: Floats = 2.0 * EARTH_RADIUS_KM * np.arcsin(np.minimum(1.0, np.sqrt(chord))) * ms_per_km
    return found

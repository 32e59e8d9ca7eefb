"""``group-rules``: the two rules past the broadcast-group paper against its fixed threshold (its section VI, future work).

Virtual hours with the shipped machines (:mod:`nearcast.experiments.group_rules_model`), in two settings that the paper's
discussion names:

*budgets*: half of the brokers are around Frankfurt, where messages of each are wanted by the nearest third of them, and half
around Chicago, where each is wanted by the two nearest only. One threshold for all is too low for the former or too high for
the latter. Compared is the mean delivery latency of the adaptive rule with that of a fixed threshold of the same excess data
(between two thresholds of the sweep: the line from one to the other).

*flows*: brokers around Frankfurt in pairs that exchange all their messages, each pair nearer than the threshold: "two very
well-connected brokers that exchange large amounts of data might end up in separate broadcast groups". Compared are both sorts
of membership at the same threshold.

Latency is the paper's: great-circle distance times 0.021 ms/km, the cloud in Dublin.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_most
from nearcast.experiments.group_rules_model import Demand, Place, Result, Rule, Study, distances_ms
from nearcast.experiments.groups_runs import MS_PER_KM
from nearcast.experiments.run import Run
from nearcast.scenario.places import City, distance_km, find_city, largest_cities

CENTRES = ("Frankfurt am Main, DE", "Chicago, US")
CLOUD = "Dublin, IE"
RADIUS_KM = 1_000.0
PAIRS_RADIUS_KM = 1_500.0
POOL = 15_000
RATE_HZ = 10.0
SETTLED_S = 200.0
"""Virtual seconds after which a fixed rule has long been stable."""
LAST_S = 3_600.0
FIRST_MS = 5.0
"""Where adaptive thresholds begin."""


class RuleParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 40 brokers of *budgets* and the 60 of *flows*."""

    duration_s: float = 21_600.0
    """Virtual seconds for each adaptive rule."""

    repetitions: int = 3
    """Places and demands, each with a seed of its own."""

    budgets: tuple[float, ...] = (0.2, 0.4, 0.6)
    """Excess budgets of the adaptive rule."""

    thresholds_ms: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 15.0, 20.0, 30.0, 50.0)
    """Fixed thresholds that it is compared with."""

    flow_thresholds_ms: tuple[float, ...] = (5.0, 8.0, 12.0)
    """Thresholds of *flows*."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.duration_s >= 2 * LAST_S, "duration_s", "must be two hours or more: the last one is looked at")
        self.require(0.1 <= self.scale <= 25.0, "scale", "must be between 0.1 and 25")
        self.require(1 <= self.repetitions <= 100, "repetitions", "must be between 1 and 100")
        self.require(
            bool(self.budgets) and all(0.0 < one < 1.0 for one in self.budgets), "budgets", "are shares between 0 and 1"
        )
        fits = len(self.thresholds_ms) >= 2 and all(0.0 <= one <= 1e6 for one in self.thresholds_ms)
        self.require(fits, "thresholds_ms", "must be two or more, from 0 to a million")
        fits = bool(self.flow_thresholds_ms) and all(0.0 < one <= 1e6 for one in self.flow_thresholds_ms)
        self.require(fits, "flow_thresholds_ms", "must be above 0, and at most a million")


class GroupRules(Experiment[RuleParameters]):
    name = "group-rules"
    summary = "Adaptive thresholds and flow-aware membership of broadcast groups against the paper's fixed rule."
    parameters = RuleParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "duration_s": 10_800.0,
        "repetitions": 1,
        "budgets": (0.4, 0.6),
        "thresholds_ms": (0.0, 2.0, 5.0, 8.0, 12.0, 20.0, 50.0),
        "flow_thresholds_ms": (8.0,),
    }

    def bars(self, parameters: RuleParameters) -> Sequence[Bar]:
        return [
            at_most("adaptive_latency_ratio", 0.9, "latency by that of a fixed threshold of the same excess, geometric mean"),
            at_most("adaptive_over_budget_groups", 0.0, "groups above their budget at the end that could be smaller"),
            at_most("adaptive_changes_per_broker_hour", 0.5, "changes of leader in the last hour, mean"),
            at_most("flow_latency_ratio", 0.7, "latency by that of the fixed rule at the same threshold, geometric mean"),
            at_most("flow_cloud_ratio", 0.5, "share of deliveries by way of the cloud by that of the fixed rule"),
            at_most("flow_excess_ratio", 1.0, "excess data by that of the fixed rule"),
            at_most("flow_changes_last_hour", 0.0, "changes of leader in the last hour"),
            at_most("unstable_ends", 0.0, "runs that ended with the paper's conditions for the end unmet"),
        ]

    def check(self, parameters: RuleParameters) -> None:
        plots.require()
        find_city(CLOUD)

    def run(self, run: Run[RuleParameters]) -> None:
        parameters = run.parameters
        unfinished = 0
        budgets: list[_Compared] = []
        flows: list[tuple[Result, Result]] = []
        for repetition in range(parameters.repetitions):
            seed = parameters.seed + repetition
            run.step(f"budgets, repetition {repetition + 1} of {parameters.repetitions}")
            budgets.append(_compare_budgets(run, seed))
            run.step(f"flows, repetition {repetition + 1} of {parameters.repetitions}")
            flows += _compare_flows(run, seed)
        for one in budgets:
            unfinished += sum(bool(result.unstable) for result in (*one.fixed, *one.adaptive))
        unfinished += sum(bool(result.unstable) for pair in flows for result in pair)
        run.measured("unstable_ends", unfinished)
        _tell_budgets(run, budgets)
        _tell_flows(run, flows)


class _Compared:
    """The fixed rule at all thresholds, and the adaptive one with all budgets, in one place."""

    def __init__(self, fixed: list[Result], adaptive: list[Result], brokers: int) -> None:
        self.fixed = fixed
        self.adaptive = adaptive
        self.brokers = brokers

    def fixed_latency_ms(self, excess: float) -> float:
        """What a fixed threshold of this excess costs."""
        known = sorted((result.last.excess, result.last.latency_ms) for result in self.fixed)
        return float(np.interp(excess, [share for share, _ in known], [latency_ms for _, latency_ms in known]))


def late(result: Result) -> tuple[float, float, float]:
    """Excess, mean latency and share by way of the cloud over the last hour."""
    moments = [moment for moment in result.moments if moment.at_s >= result.last.at_s - LAST_S]
    return (
        float(np.mean([moment.excess for moment in moments])),
        float(np.mean([moment.latency_ms for moment in moments])),
        float(np.mean([moment.by_cloud for moment in moments])),
    )


def _compare_budgets(run: Run[RuleParameters], seed: int) -> _Compared:
    parameters = run.parameters
    brokers = 2 * max(4, round(20 * parameters.scale))
    place = place_of(brokers, CENTRES, RADIUS_KM, seed)
    demand = nearest_demand(place, near=max(2, brokers // 3), far_near=2)
    rules = [Rule(name=f"fixed, {one:g} ms", threshold_ms=one) for one in parameters.thresholds_ms]
    rules += [Rule(name=f"adaptive, {one:.0%}", threshold_ms=FIRST_MS, budget=one) for one in parameters.budgets]
    results = []
    for number, rule in enumerate(rules):
        run.advance(number / len(rules))
        duration_s = SETTLED_S if rule.budget is None else parameters.duration_s
        results.append(Study(rule, place, demand, seed).run(duration_s, min(300.0, duration_s)))
    count = len(parameters.thresholds_ms)
    return _Compared(results[:count], results[count:], brokers)


def _compare_flows(run: Run[RuleParameters], seed: int) -> list[tuple[Result, Result]]:
    parameters = run.parameters
    brokers = max(6, round(60 * parameters.scale))
    place = place_of(brokers, CENTRES[:1], PAIRS_RADIUS_KM, seed)
    found = []
    for number, threshold_ms in enumerate(parameters.flow_thresholds_ms):
        run.advance(number / len(parameters.flow_thresholds_ms))
        demand = paired_demand(place, threshold_ms, seed)
        rules = [Rule(name="fixed", threshold_ms=threshold_ms)]
        rules.append(Rule(name="flow-aware", threshold_ms=threshold_ms, flow_aware=True))
        fixed, aware = (Study(rule, place, demand, seed).run(2 * LAST_S, 300.0) for rule in rules)
        found.append((fixed, aware))
    return found


def _tell_budgets(run: Run[RuleParameters], compared: list[_Compared]) -> None:
    rows: list[list[str | float | None]] = []
    ratios, changes, over = [], [], 0
    for number, rule in enumerate(compared[0].adaptive):
        points = [late(one.adaptive[number]) for one in compared]
        fixed_ms = [one.fixed_latency_ms(point[0]) for one, point in zip(compared, points, strict=True)]
        ratios += [point[1] / known for point, known in zip(points, fixed_ms, strict=True)]
        for one in compared:
            result = one.adaptive[number]
            over += len(result.over_budget)
            changes.append(result.changes_between(result.last.at_s - LAST_S, result.last.at_s + 1.0) / one.brokers)
        excess, latency_ms, by_cloud = (float(np.mean(values)) for values in zip(*points, strict=True))
        groups = float(np.mean([one.adaptive[number].last.groups for one in compared]))
        rows.append([rule.rule.name, groups, 100.0 * excess, latency_ms, 100.0 * by_cloud, float(np.mean(fixed_ms))])
    for number, rule in enumerate(compared[0].fixed):
        moments = [one.fixed[number].last for one in compared]
        mean = [
            float(np.mean([getattr(moment, field) for moment in moments])) for field in ("excess", "latency_ms", "by_cloud")
        ]
        groups = float(np.mean([moment.groups for moment in moments]))
        rows.append([rule.rule.name, groups, 100.0 * mean[0], mean[1], 100.0 * mean[2], None])
    columns = ["rule", "groups", "excess %", "mean latency ms", "by the cloud %", "fixed of that excess ms"]
    run.table("Budgets", columns, [[_rounded(cell) for cell in row] for row in rows])
    run.measured("adaptive_latency_ratio", _geometric(ratios))
    run.figure("adaptive_latency_ratios", [round(ratio, 3) for ratio in ratios])
    run.measured("adaptive_over_budget_groups", over)
    run.measured("adaptive_changes_per_broker_hour", float(np.mean(changes)))
    hours = range(int(run.parameters.duration_s // LAST_S))
    run.figure(
        "changes_by_hour",
        {
            result.rule.name: [
                sum(one.adaptive[number].changes_between(hour * LAST_S, (hour + 1) * LAST_S) for one in compared)
                for hour in hours
            ]
            for number, result in enumerate(compared[0].adaptive)
        },
    )
    with run.plot("budgets", "Excess data and latency", "excess data (share)", "mean delivery latency (ms)") as axes:
        for number, one in enumerate(compared):
            points_of = sorted((result.last.excess, result.last.latency_ms) for result in one.fixed)
            axes.plot(
                *zip(*points_of, strict=True), "o-", alpha=0.5, color=plots.COLOURS[0], label=None if number else "fixed"
            )
            both = [late(result) for result in one.adaptive]
            axes.plot(
                [x[0] for x in both], [x[1] for x in both], "s", color=plots.COLOURS[1], label=None if number else "adaptive"
            )


def _tell_flows(run: Run[RuleParameters], pairs: list[tuple[Result, Result]]) -> None:
    thresholds = run.parameters.flow_thresholds_ms
    rows: list[list[str | float | None]] = []
    latency, cloud, excess, last = [], [], [], 0
    for fixed, aware in pairs:
        before, after = late(fixed), late(aware)
        excess.append(after[0] / before[0] if before[0] else 1.0)
        latency.append(after[1] / before[1])
        cloud.append((before[2], after[2]))
        last += aware.changes_between(aware.last.at_s - LAST_S, aware.last.at_s + 1.0)
    for number, threshold_ms in enumerate(thresholds):
        for which, name in enumerate(("fixed", "flow-aware")):
            points = [late(pair[which]) for pair in pairs[number :: len(thresholds)]]
            means = [float(np.mean(values)) for values in zip(*points, strict=True)]
            rows.append([f"{name}, {threshold_ms:g} ms", 100.0 * means[0], means[1], 100.0 * means[2]])
    columns = ["rule", "excess %", "mean latency ms", "by the cloud %"]
    run.table("Flows", columns, [[_rounded(cell) for cell in row] for row in rows])
    before_all, after_all = (sum(shares) for shares in zip(*cloud, strict=True))
    run.measured("flow_latency_ratio", _geometric(latency))
    run.measured("flow_cloud_ratio", after_all / before_all if before_all else 1.0)
    run.measured("flow_excess_ratio", _geometric(excess))
    run.measured("flow_changes_last_hour", last)


def _geometric(ratios: Sequence[float]) -> float:
    return float(np.exp(np.mean(np.log(ratios))))


def _rounded(cell: str | float | None) -> str | float | None:
    return round(cell, 2) if isinstance(cell, float) else cell


# --- where brokers are, and what they want ----------------------------------------------------------------------------------


def place_of(brokers: int, centres: Sequence[str], radius_km: float, seed: int) -> Place:
    """Brokers in cities around centres, as many around each; the capability is the population."""
    cities: list[City] = []
    for centre in centres:
        middle = find_city(centre)
        near = {
            (city.latitude, city.longitude): city
            for city in reversed(largest_cities(POOL))
            if distance_km(middle.latitude, middle.longitude, city.latitude, city.longitude) < radius_km
        }
        around = sorted(near.values(), key=lambda city: (-city.population, city.name))
        random.Random(f"{seed}/{centre}").shuffle(around)
        cities += around[: brokers // len(centres)]
    positions = [(city.latitude, city.longitude) for city in cities]
    cloud = find_city(CLOUD)
    return Place(
        [f"broker-{number}" for number in range(len(cities))],
        distances_ms(positions, positions, MS_PER_KM),
        distances_ms(positions, [(cloud.latitude, cloud.longitude)], MS_PER_KM)[:, 0],
        [float(max(1, city.population)) for city in cities],
    )


def nearest_demand(place: Place, near: int, far_near: int) -> Demand:
    """Everybody publishes alike; in the first half it is wanted by ``near`` neighbours, in the other by ``far_near``."""
    brokers = len(place.names)
    wanted_by = []
    for origin in range(brokers):
        count = near if origin < brokers // 2 else far_near
        wanted_by.append(sorted(int(other) for other in np.argsort(place.apart_ms[origin], kind="stable")[1 : 1 + count]))
    return Demand([RATE_HZ] * brokers, wanted_by)


def paired_demand(place: Place, reach_ms: float, seed: int) -> Demand:
    """Brokers in pairs, each partner nearer than ``reach_ms``, that want all of each other's messages."""
    rng = random.Random(f"{seed}/pairs")
    brokers = len(place.names)
    wanted_by: list[list[int]] = [[] for _ in range(brokers)]
    left = list(range(brokers))
    rng.shuffle(left)
    while left:
        one = left.pop()
        near = [other for other in left if place.apart_ms[one, other] < reach_ms]
        if near:
            other = rng.choice(near)
            left.remove(other)
            wanted_by[one].append(other)
            wanted_by[other].append(one)
    return Demand([RATE_HZ] * brokers, wanted_by)

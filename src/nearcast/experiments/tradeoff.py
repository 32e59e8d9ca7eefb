"""``tradeoff``: latency against excess data over thresholds, from cloud relay (0) to flooding (all in one group), and the rule
that finds its threshold by itself. Simulated, with the machines that are shipped.

Brokers stand in the most populous cities of Germany, the cloud in Dublin; latency is by distance. Clients at every broker
publish in a topic of their own; clients at all brokers within 150 km, at the nearest one in any case, and at another that is
drawn subscribe to it: most interest is regional, which is what groups are for, and some is not. The workload is the same for
every threshold.

The broadcast-group paper (sections IV-D and VI) shows both ends and one point between them, and leaves a threshold for each
group that follows from local conditions to future work; that is the last line of the table.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from nearcast.errors import ConfigError
from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run
from nearcast.experiments.simulated import run_simulated
from nearcast.recording.schema import arrow
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.files import resolve
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, LatencyModel, Site, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

BROKERS = 16
COUNTRY = "DE"
CLOUD = "cloud"
CLOUD_CITY = "Dublin"
EVERYBODY_MS = 10_000.0
"""A threshold that puts all brokers in one group."""

MS_PER_KM = 0.021048
BASE_MS = 0.3
NEAR_MS = BASE_MS + 150 * MS_PER_KM
"""Brokers so near have subscribers to what is published at one."""

FAR = 1
"""Of the others, drawn."""

LEAST_BROKERS = 4
FORMING_S = 30.0
SUBSCRIBED_S = 2.0
SETTLE_S = 3.0
BUDGET_ROOM = 1.15
"""How far above its budget the adaptive rule may be: it lowers the threshold only when that lasts."""

ADAPTIVE = "adaptive"


class TradeoffParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the brokers (16); ``duration_s`` is how long is measured, in virtual time."""

    duration_s: float = 10.0
    thresholds_ms: tuple[float, ...] = (0.0, 1.0, 2.0, 3.0, 5.0, 8.0, 12.0, EVERYBODY_MS)
    """The first and the last are the two ends."""

    rate_hz: float = 2.0
    """Of each publisher."""

    adaptive_s: float = 600.0
    """How long the adaptive rule has, in virtual time, before it is measured; 0 leaves it out."""

    excess_budget: float = 0.3
    """Of the adaptive rule: share of messages that a group's brokers may get for nobody."""

    start_ms: float = 5.0
    """The threshold that the adaptive rule begins with."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.brokers <= 200, "scale", "makes more than 200 brokers: `experiment groups` has thousands")
        ordered = list(self.thresholds_ms) == sorted(set(self.thresholds_ms)) and min(self.thresholds_ms, default=-1.0) >= 0
        self.require(ordered and len(self.thresholds_ms) >= 2, "thresholds_ms", "must be two or more, rising, from 0")
        self.require(0.1 <= self.rate_hz <= 1_000, "rate_hz", "must be between 0.1 and 1,000")
        self.require(self.adaptive_s >= 0, "adaptive_s", "must not be negative")
        self.require(0 < self.excess_budget < 1, "excess_budget", "is a share: between 0 and 1")

    @property
    def brokers(self) -> int:
        return max(LEAST_BROKERS, round(BROKERS * self.scale))


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table."""

    threshold: str
    groups: int
    largest_group: int
    median_ms: float
    mean_ms: float
    p90_ms: float
    correct: int
    redundant: int
    edge_excess: float
    """At the edge brokers alone, which is what the adaptive rule counts; the cloud has no clients here."""

    lost: int
    duplicated: int

    @property
    def excess(self) -> float:
        return self.redundant / max(1, self.correct + self.redundant)


class Tradeoff(Experiment[TradeoffParameters]):
    name = "tradeoff"
    summary = "Latency against excess data over the thresholds of broadcast groups, and the rule that finds its own."
    parameters = TradeoffParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "scale": 0.5,
        "thresholds_ms": [0.0, 4.0, EVERYBODY_MS],
        "duration_s": 5.0,
        "adaptive_s": 90.0,
    }

    def bars(self, parameters: TradeoffParameters) -> Sequence[Bar]:
        found = [
            at_least("latency_gained_ms", 1.0, "median latency of the first threshold above that of the last"),
            at_least("excess_paid_percent", 1.0, "excess data of the last threshold above that of the first"),
            at_most("dominated", 0, "thresholds with more excess data than the one before and a longer mean latency"),
            at_most("lost", 0, "deliveries that should have been and were not"),
            at_most("duplicated", 0, "deliveries of what a subscriber had already"),
        ]
        if parameters.adaptive_s:
            found += [
                at_most(
                    "adaptive_excess_of_budget",
                    BUDGET_ROOM,
                    "excess data at edge brokers with the adaptive rule, of its budget",
                ),
                at_least("adaptive_latency_gained_ms", 1.0, "mean latency of the first threshold above the adaptive rule's"),
            ]
        return found

    def check(self, parameters: TradeoffParameters) -> None:
        arrow()
        plots.require()
        scenario_of(parameters, 0.0)

    def run(self, run: Run[TradeoffParameters]) -> None:
        parameters = run.parameters
        points = []
        for threshold_ms in parameters.thresholds_ms:
            run.step(f"threshold {_label(threshold_ms)}")
            points.append(self._point(run, _label(threshold_ms), scenario_of(parameters, threshold_ms)))
        if parameters.adaptive_s:
            run.step(f"the adaptive rule, for {parameters.adaptive_s:g} s of virtual time")
            points.append(self._point(run, ADAPTIVE, scenario_of(parameters, parameters.start_ms, adaptive=True)))
        self._tell(run, points)

    def _point(self, run: Run[TradeoffParameters], label: str, scenario: Scenario) -> Point:
        # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
        import numpy as np

        from nearcast.experiments.excess import Tally, processed
        from nearcast.experiments.measures import measure

        name = label.replace(" ", "-")
        run.keep(f"scenarios/{name}.json", scenario)
        result = run_simulated(run, scenario, run.parameters.seed, events=name, processed=True)
        since_ns = round((scenario.duration_s - run.parameters.duration_s) * 1e9)
        measured = measure(run.events(name), scenario, since_ns)
        tally = processed(run.events(name), {"all": "#"}, since_ns)["all"]
        if tally.repeated:
            run.note(f"{label}: brokers processed {tally.repeated} messages again, which the shares do not count")
        edge = [each for broker, each in tally.by_broker.items() if broker != CLOUD]
        edge_tally = Tally(correct=sum(each.correct for each in edge), redundant=sum(each.redundant for each in edge))
        latencies = np.concatenate(list(measured.latencies_ms.values()))
        return Point(
            threshold=label,
            groups=int(result.figures["groups"]),
            largest_group=int(result.figures["largest_group"]),
            median_ms=round(float(np.median(latencies)), 3),
            mean_ms=round(float(latencies.mean()), 3),
            p90_ms=round(float(np.quantile(latencies, 0.9)), 3),
            correct=tally.total.correct,
            redundant=tally.total.redundant,
            edge_excess=edge_tally.excess or 0.0,
            lost=measured.delivery.lost,
            duplicated=measured.delivery.duplicated,
        )

    def _tell(self, run: Run[TradeoffParameters], points: Sequence[Point]) -> None:
        run.figure("points", points)
        columns = [
            "threshold",
            "groups",
            "largest",
            "median ms",
            "mean ms",
            "p90 ms",
            "excess %",
            "at the edge %",
            "processed",
        ]
        rows: list[list[str | float | None]] = [
            [
                *(point.threshold, point.groups, point.largest_group, point.median_ms, point.mean_ms, point.p90_ms),
                *(round(100 * point.excess, 1), round(100 * point.edge_excess, 1), point.correct + point.redundant),
            ]
            for point in points
        ]
        run.table("Latency against excess data", columns, rows)
        fixed = [point for point in points if point.threshold != ADAPTIVE]
        first, last = fixed[0], fixed[-1]
        run.measured("latency_gained_ms", round(first.median_ms - last.median_ms, 3))
        run.measured("excess_paid_percent", round(100 * (last.excess - first.excess), 2))
        pairs = itertools.pairwise(fixed)
        run.measured("dominated", sum(a.mean_ms < b.mean_ms and a.excess < b.excess for a, b in pairs))
        run.measured("lost", sum(point.lost for point in points))
        run.measured("duplicated", sum(point.duplicated for point in points))
        for point in points:
            if point.threshold == ADAPTIVE:
                run.measured("adaptive_excess_of_budget", round(point.edge_excess / run.parameters.excess_budget, 3))
                run.measured("adaptive_latency_gained_ms", round(first.mean_ms - point.mean_ms, 3))
        with run.plot("tradeoff", "Latency against excess data", "excess data (%)", "latency (ms)") as axes:
            excess = [100 * point.excess for point in fixed]
            axes.plot(excess, [point.mean_ms for point in fixed], marker="o", label="mean")
            axes.plot(excess, [point.median_ms for point in fixed], marker="o", linestyle="--", label="median")
            named: dict[tuple[float, float], list[str]] = {}
            for point in points:
                named.setdefault((100 * point.excess, point.mean_ms), []).append(point.threshold)
                if point.threshold == ADAPTIVE:
                    axes.plot([100 * point.excess], [point.mean_ms], marker="s", linestyle="", label="mean, adaptive rule")
            for place, labels in named.items():
                axes.annotate(", ".join(labels), place, textcoords="offset points", xytext=(6, 6))


def _label(threshold_ms: float) -> str:
    return "all" if threshold_ms >= EVERYBODY_MS else f"{threshold_ms:g} ms"


def topology(brokers: int) -> Topology:
    """Cities, and the cloud elsewhere."""
    from nearcast.scenario.worldwide import city_topology

    model = LatencyModel(kind="linear", base_ms=BASE_MS, ms_per_km=MS_PER_KM)
    cities = city_topology(brokers, country=COUNTRY, model=model)
    if len(cities.sites) < brokers:
        raise ConfigError(f"there are no {brokers} cities to put brokers in")
    return msgspec.structs.replace(
        cities,
        sites=(*cities.sites, Site(name="dublin", tier="cloud", city=CLOUD_CITY)),
        hosts=(*cities.hosts, Host(name=CLOUD, site="dublin")),
    )


def scenario_of(parameters: TradeoffParameters, threshold_ms: float, *, adaptive: bool = False) -> Scenario:
    """The scenario of a threshold, as data."""
    place = topology(parameters.brokers)
    hosts = [host.name for host in place.hosts if host.name != CLOUD]
    groups: dict[str, Any] = {"cloud": f"mqtt://{CLOUD}:1883", "threshold_ms": threshold_ms}
    if adaptive:
        groups |= {"adaptive": True, "excess_budget": parameters.excess_budget}
    adapting_s = parameters.adaptive_s if adaptive else 0.0
    begin_s = FORMING_S + SUBSCRIBED_S
    scenario = Scenario(
        name="tradeoff",
        description=f"{len(hosts)} brokers in cities, a threshold of {_label(threshold_ms)}.",
        topology=place,
        protocol="fabric",
        duration_s=begin_s + adapting_s + parameters.duration_s,
        settle_s=SETTLE_S,
        settings={
            "fabric": {"classes": [{"topic": "#", "topic_class": "broadcast"}], "groups": groups},
            # The larger the city, the more capable its broker.
            "lcm": {host: float(len(hosts) - number) for number, host in enumerate(hosts)},
        },
        brokers=(Broker(host=CLOUD), *(Broker(host=host, fabric=True) for host in hosts)),
    )
    wanted = interest(resolve(scenario), hosts, parameters.seed)
    clients = [
        Clients(
            name=f"wants-{host}",
            host=host,
            broker=host,
            start_s=FORMING_S,
            subscribe=tuple(Subscribing(filter=f"from/{source}", qos=1) for source in sources),
        )
        for host, sources in wanted.items()
    ]
    clients += [
        Clients(
            name=f"tells-{host}",
            host=host,
            broker=host,
            start_s=begin_s,
            publish=(Publishing(topic=f"from/{host}", rate_hz=parameters.rate_hz, qos=1),),
        )
        for host in hosts
    ]
    return resolve(msgspec.structs.replace(scenario, clients=tuple(clients)))


def interest(scenario: Scenario, hosts: Sequence[str], seed: int) -> dict[str, list[str]]:
    """By broker, whose messages its clients want: each broker's are wanted at those near it, and at some that are drawn."""
    network, names = build_network(topology_of(scenario), random.Random(0))
    number = {name: index for index, name in enumerate(names)}
    rng = random.Random(f"{seed}/interest")
    found: dict[str, list[str]] = {host: [] for host in hosts}
    for source in hosts:
        away_ms = {host: network.one_way_ms(number[source], number[host]) for host in hosts if host != source}
        nearest = min(away_ms, key=lambda host: (away_ms[host], host))
        near = [host for host, latency_ms in away_ms.items() if latency_ms <= NEAR_MS or host == nearest]
        far = [host for host in away_ms if host not in near]
        for host in (*near, *rng.sample(far, min(FAR, len(far)))):
            found[host].append(source)
    if any(math.isinf(network.one_way_ms(number[host], number[CLOUD])) for host in hosts):
        raise ConfigError("the cloud cannot be reached from every broker")
    return found

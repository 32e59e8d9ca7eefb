"""What came of a run of ``iov``: latencies against what the links alone make them, excess data, and which groups there were.

Owns the definitions. The *model* latency of a pair is the sum of the links' one-way latencies along the way that its strategy
means: within a group from broker to broker, between groups over leaders and the cloud. At QoS 2 Mosquitto passes a message on
when its sender releases it, a round trip later. A car's own messages come back to it and are counted as deliveries, but are no
pair here, as in the paper.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.experiments import plots
from nearcast.experiments.excess import Processed, processed
from nearcast.experiments.iov import BROKER_MS, CLOUD, FLOWS, STRATEGIES, IovParameters, Strategy
from nearcast.experiments.measures import Measured, Pair, measure
from nearcast.experiments.run import Run
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import Client, expand_clients, topology_of
from nearcast.scenario.scenario import Scenario

Floats = npt.NDArray[np.float64]


class GroupsSeen(msgspec.Struct, frozen=True, kw_only=True):
    """Groups after a run: how many, and what real brokers said of theirs."""

    count: int
    brokers: list[dict[str, Any]] = []

    @classmethod
    def told(cls, brokers: list[dict[str, Any]]) -> GroupsSeen:
        """From what brokers said; none while one of them says nothing: silence is no group."""
        leaders = [facts.get("leader") for facts in brokers]
        return cls(count=len(set(leaders)) if all(leaders) else 0, brokers=brokers)

    @property
    def members_by_leader(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for facts in self.brokers:
            found.setdefault(str(facts.get("leader", "")), []).append(str(facts["name"]))
        return {leader: sorted(members) for leader, members in sorted(found.items())}


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """How messages of a pair travel."""

    brokers: tuple[str, ...]
    model_ms: float

    @property
    def label(self) -> str:
        return " → ".join(self.brokers)


def ways(scenario: Scenario, strategy: Strategy, *, releases: bool = False) -> dict[Pair, Way]:
    """Of all pairs but those of a car with itself; ``releases``: the cloud passes on what was released (QoS 2)."""
    network, names = build_network(topology_of(scenario), random.Random(0))
    number = {name: index for index, name in enumerate(names)}
    clients = expand_clients(scenario)
    found = {}
    for source in clients:
        for target in clients:
            if source.publish and _hears(target, source) and source.host != target.host:
                brokers = _brokers(source.broker, target.broker, strategy)
                hosts = [source.host, *brokers, target.host]
                legs = [network.one_way_ms(number[one], number[other]) for one, other in itertools.pairwise(hosts)]
                if releases and CLOUD in brokers:
                    before = number[brokers[brokers.index(CLOUD) - 1]]
                    legs += [network.one_way_ms(number[CLOUD], before), network.one_way_ms(before, number[CLOUD])]
                found[Pair(source.name, target.name)] = Way(brokers=brokers, model_ms=sum(legs))
    return found


def _hears(target: Client, source: Client) -> bool:
    prefix = source.publish[0].topic.rpartition("/")[0]
    return any(wanted.filter.startswith(prefix) for wanted in target.subscribe)


def _brokers(one: str, other: str, strategy: Strategy) -> tuple[str, ...]:
    """The brokers on the way from one to another, in order, each once."""
    group = {broker: group for group in strategy.groups for broker in group}
    if one == other:
        way = [one]
    elif other == CLOUD:
        way = [one, group[one][0], CLOUD]
    elif group[one] == group[other]:
        way = [one, other]
    else:
        way = [one, group[one][0], CLOUD, group[other][0], other]
    return tuple(dict.fromkeys(way))


def evaluate(run: Run[IovParameters], scenarios: Mapping[str, Scenario], seen: Mapping[str, GroupsSeen]) -> None:
    """Tables, plots and bars."""
    lost = duplicated = 0
    latencies: dict[str, dict[Pair, Floats]] = {}
    rows: list[list[str | float | None]] = []
    tallies: dict[str, dict[str, Processed]] = {}
    for name, scenario in scenarios.items():
        measured = measure(run.events(name), scenario)
        delivery = measured.delivery
        lost += delivery.lost
        duplicated += delivery.duplicated
        run.figure(f"{name}_delivery", delivery)
        if delivery.unexpected:
            run.note(f"{name}: {delivery.unexpected} deliveries to somebody who should not have got them")
        latencies[name] = measured.latencies_ms
        releases = run.parameters.qos == 2 and not run.parameters.simulated
        rows += _latencies(run, name, ways(scenario, STRATEGIES[name], releases=releases), measured)
        tallies[name] = processed(run.events(name), FLOWS)
        _excess(run, name, tallies[name])
        groups = seen[name]
        found, expected = groups.members_by_leader, {group[0]: sorted(group) for group in STRATEGIES[name].groups}
        run.figure(f"{name}_groups", {"count": groups.count, "members_by_leader": found, "brokers": groups.brokers})
        run.measured(f"{name}_groups", groups.count)
        if groups.brokers and found != expected:
            run.note(f"{name}: groups were {found}, not {expected}")
    columns = ["strategy", "from", "to", "way", "links ms", "median ms", "p99 ms", "max ms", "messages"]
    run.table("Delivery latency (figures 5 to 7)", columns, rows)
    for flow, title in (("telemetry", "table I: car telemetry"), ("monitoring", "table II: monitoring data")):
        _excess_table(run, flow, title, tallies)
    run.measured("lost", lost)
    run.measured("duplicated", duplicated)
    _draw(run, scenarios, latencies)


def _latencies(
    run: Run[IovParameters], name: str, expected: Mapping[Pair, Way], measured: Measured
) -> list[list[str | float | None]]:
    rows: list[list[str | float | None]] = []
    errors: list[float] = []
    tails: list[float] = []
    remote: list[float] = []
    for pair, way in sorted(expected.items(), key=lambda entry: (entry[1].model_ms, entry[0])):
        values = measured.latencies_ms.get(pair)
        if values is None or not len(values):
            run.note(f"{name}: nothing was delivered for {pair}")
            continue
        median, p99 = (float(value) for value in np.quantile(values, (0.5, 0.99)))
        error = median - way.model_ms
        # Brokers can only make it longer.
        errors.append(max(0.0, error - BROKER_MS * len(way.brokers), -error))
        if CLOUD in way.brokers[1:-1]:
            remote.append(median)
            tails.append(p99 - way.model_ms)
        worst = float(values.max())
        rows.append(
            [
                *(name, pair.publisher, pair.subscriber.removesuffix("-hears"), way.label),
                *(round(value, 3) for value in (way.model_ms, median, p99, worst)),
                len(values),
            ]
        )
    run.measured(f"{name}_latency_error_ms", round(max(errors), 3) if len(errors) == len(expected) else None)
    if name == "relay":
        run.measured("relay_remote_ms", round(min(remote), 3) if remote else None)
        run.measured("relay_tail_ms", round(max(tails), 3) if tails else None)
    return rows


def _excess(run: Run[IovParameters], name: str, found: Mapping[str, Processed]) -> None:
    for flow, each in found.items():
        share = each.total.excess
        run.measured(f"{name}_{flow}_excess_percent", None if share is None else round(100 * share, 2))
        if each.unknown:
            run.note(f"{name}: {each.unknown} messages of {flow} were processed that nobody recorded as published")
        if each.repeated:
            run.note(f"{name}: brokers processed {each.repeated} messages of {flow} again, which the shares do not count")
    run.figure(
        f"{name}_processed",
        {
            flow: {
                broker: {"correct": tally.correct, "redundant": tally.redundant} for broker, tally in each.by_broker.items()
            }
            for flow, each in found.items()
        },
    )


def _excess_table(run: Run[IovParameters], flow: str, title: str, tallies: Mapping[str, Mapping[str, Processed]]) -> None:
    rows: list[Sequence[str | float | None]] = []
    for name, found in tallies.items():
        total = found[flow].total
        share = total.excess
        percent = None if share is None else round(100 * share, 2)
        rows.append([name, total.correct, total.redundant, percent, round(STRATEGIES[name].excess_percent[flow], 1)])
    run.table(f"Excess data, {title}", ["strategy", "correct", "redundant", "excess %", "the paper's %"], rows)


def _draw(run: Run[IovParameters], scenarios: Mapping[str, Scenario], latencies: Mapping[str, Mapping[Pair, Floats]]) -> None:
    for name, scenario in scenarios.items():
        expected = ways(scenario, STRATEGIES[name])
        by_car: dict[str, list[Floats]] = {}
        for pair, values in latencies[name].items():
            if pair in expected and pair.subscriber != "authority":
                by_car.setdefault(pair.subscriber.removesuffix("-hears"), []).append(values)
        with run.plot(f"telemetry-{name}", f"Car telemetry, {name}", "latency (ms)", "share of deliveries") as axes:
            for car, found in sorted(by_car.items()):
                plots.cdf(axes, np.concatenate(found), car)
    with run.plot("monitoring", "Monitoring data", "latency (ms)", "share of deliveries") as axes:
        for name, measured in latencies.items():
            found = [values for pair, values in measured.items() if pair.subscriber == "authority"]
            if found:
                plots.cdf(axes, np.concatenate(found), name)

"""``agreement``: one MQTT scenario in the simulator and on the emulated WAN; do both tell the same delivery latencies?

The topology is the ready-made ``iov``. Its four expected latencies (section IV-C of the broadcast-group paper: 4, 7, 44 and
55 ms) appear as four streams: between cars at one edge broker, to a car at the next edge, from a camera to the authority in
the cloud, and between cars over a broker in the cloud. Brokers are not linked here: each stream goes over one of them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np

from nearcast.emulation import namespaces
from nearcast.experiments import plots
from nearcast.experiments.emulated import run_emulated
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.measures import Measured, Pair, expected_pairs, measure
from nearcast.experiments.run import Run
from nearcast.experiments.simulated import run_simulated
from nearcast.recording.schema import arrow
from nearcast.scenario.assembly import build_network
from nearcast.scenario.events import Kill
from nearcast.scenario.expansion import expand_clients, topology_of
from nearcast.scenario.files import load_topology, resolve
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

MEDIAN_MS = 2.0
"""How far the medians of a pair may be apart. The simulator's processors take no time; real ones take a few hundred
microseconds for each of publisher, broker and subscriber, more on a machine with fewer cores than processes."""

LOOPBACK_MEDIAN_MS = 4.0
"""The same in loopback mode, which keeps delays to about 2 ms itself."""

MODEL_MS = 0.5
SETTLE_S = 2.0
SETTLE_AFTER_KILL_S = 8.0
SUBSCRIBED_S = 2.0
"""Publishers begin so long after subscribers, so that every message has its subscribers."""


class AgreementParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the publishers of each stream; ``duration_s`` is how long they publish."""

    duration_s: float = 30.0
    publishers: int = 2
    """Of each stream."""

    rate_hz: float = 10.0
    """Of each publisher."""

    jitter_ms: float = 0.5
    """Of every link between sites; 0 leaves them as the topology has them."""

    qos: int = 1
    kill: bool = False
    """Kill the broker of two streams in the middle and start it again a second later. Brokers then keep journals and clients
    their sessions, so still nothing may be lost; duplicates may come, as QoS 1 allows."""

    loopback: bool = False
    """Use loopback mode even where namespaces are possible."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(self.publishers >= 1, "publishers", "must be 1 or more")


class Agreement(Experiment[AgreementParameters]):
    name = "agreement"
    summary = "One MQTT scenario in the simulator and on the emulated WAN: do delivery latencies agree?"
    parameters = AgreementParameters
    quick: ClassVar[Mapping[str, Any]] = {"duration_s": 10.0}

    def bars(self, parameters: AgreementParameters) -> Sequence[Bar]:
        delivery = [
            at_most("lost_simulated", 0, "deliveries that should have been and were not, in the simulator"),
            at_most("lost_emulated", 0, "the same, on the emulated WAN"),
            at_least("deliveries_compared", 100, "in the runtime that has fewer of them"),
        ]
        if parameters.kill:
            # Latencies are then mostly how long the broker was away, and how fast this disk flushes.
            return delivery
        loopback = parameters.loopback or namespaces.available() is not None
        bound_ms = LOOPBACK_MEDIAN_MS if loopback else MEDIAN_MS
        return [
            at_most("worst_median_difference_ms", bound_ms, "between the two runtimes, of the pair that differs most"),
            at_most("simulator_model_error_ms", MODEL_MS, "simulated median against the network model's own sum of latencies"),
            at_most("duplicated", 0, "deliveries of what a subscriber had already, in both"),
            *delivery,
        ]

    def check(self, parameters: AgreementParameters) -> None:
        arrow()
        plots.require()
        scenario_of(parameters)

    def run(self, run: Run[AgreementParameters]) -> None:
        parameters = run.parameters
        scenario = scenario_of(parameters)
        run.keep("scenario.json", scenario)
        run.step("simulating")
        simulation = run_simulated(run, scenario, parameters.seed, events="simulation")
        run.figure("simulation", simulation)
        run.step("starting the brokers on the emulated WAN")
        emulation = run_emulated(
            run, scenario, parameters.seed, events="emulation", mode="loopback" if parameters.loopback else "auto"
        )
        run.figure("emulation", {"mode": emulation.mode, "loads": emulation.loads, "traffic": emulation.status.traffic})
        run.step("comparing")
        self._compare(run, scenario, measure(run.events("simulation"), scenario), measure(run.events("emulation"), scenario))

    def _compare(self, run: Run[AgreementParameters], scenario: Scenario, simulated: Measured, emulated: Measured) -> None:
        rows: list[dict[str, Any]] = []
        for pair, model_ms in model_latencies_ms(scenario).items():
            one, other = simulated.latencies_ms.get(pair), emulated.latencies_ms.get(pair)
            if one is None or other is None:
                run.note(f"nothing was delivered for {pair} in one of the runtimes")
                continue
            rows.append(
                {
                    "pair": str(pair),
                    "model_ms": round(model_ms, 3),
                    "simulated_ms": quantiles(one),
                    "emulated_ms": quantiles(other),
                    "median_difference_ms": round(float(np.median(other) - np.median(one)), 3),
                    "simulated": len(one),
                    "emulated": len(other),
                }
            )
        run.figure("pairs", rows)
        run.figure("delivery", {"simulated": simulated.delivery, "emulated": emulated.delivery})
        values: dict[str, float] = {
            "lost_simulated": simulated.delivery.lost,
            "lost_emulated": emulated.delivery.lost,
            "duplicated": simulated.delivery.duplicated + emulated.delivery.duplicated,
            "deliveries_compared": min(simulated.delivery.delivered, emulated.delivery.delivered),
        }
        if len(rows) == len(expected_pairs(scenario)):
            values["worst_median_difference_ms"] = max(abs(row["median_difference_ms"]) for row in rows)
            values["simulator_model_error_ms"] = max(abs(row["simulated_ms"]["p50"] - row["model_ms"]) for row in rows)
        for bar in self.bars(run.parameters):
            run.measured(bar.name, values.get(bar.name))
        self._draw(run, scenario, simulated, emulated)

    def _draw(self, run: Run[AgreementParameters], scenario: Scenario, simulated: Measured, emulated: Measured) -> None:
        with run.plot(
            "latency", "Delivery latency: simulator and emulated WAN", "latency (ms)", "share of deliveries"
        ) as axes:
            longest_ms = 0.0
            for number, (stream, pairs) in enumerate(streams(scenario).items()):
                colour = plots.COLOURS[number % len(plots.COLOURS)]
                for name, measured, dashed in (("simulated", simulated, False), ("emulated", emulated, True)):
                    values = [measured.latencies_ms[pair] for pair in pairs if pair in measured.latencies_ms]
                    if values:
                        longest_ms = max(longest_ms, float(np.quantile(np.concatenate(values), 0.99)))
                        plots.cdf(axes, np.concatenate(values), f"{stream}, {name}", dashed=dashed, colour=colour)
            # A single straggler must not press all the rest against the axis; figures.json has it.
            axes.set_xlim(0.0, longest_ms * 1.15 or None)


def scenario_of(parameters: AgreementParameters) -> Scenario:
    """The scenario, as data."""
    publishers = max(1, round(parameters.publishers * parameters.scale))

    def publish(name: str, host: str, broker: str) -> Clients:
        publishing = Publishing(topic=f"{name}/{{client}}", rate_hz=parameters.rate_hz, qos=parameters.qos)
        return Clients(name=name, host=host, broker=broker, count=publishers, publish=(publishing,), start_s=SUBSCRIBED_S)

    def subscribe(name: str, host: str, broker: str, topic: str) -> Clients:
        return Clients(name=name, host=host, broker=broker, subscribe=(Subscribing(filter=f"{topic}/#", qos=parameters.qos),))

    scenario = Scenario(
        name="agreement",
        description="Four streams over the iov topology, each with the broker that its expected latency is about.",
        topology=jittery(load_topology("iov"), parameters.jitter_ms),
        duration_s=parameters.duration_s + SUBSCRIBED_S,
        settle_s=SETTLE_S,
        brokers=tuple(Broker(host=host, durable=parameters.kill) for host in ("broker-1", "broker-3", "cloud-broker")),
        clients=(
            subscribe("neighbour", "car-3", "broker-3", "position"),
            subscribe("next-edge", "car-1", "broker-3", "position"),
            subscribe("authority", "authority", "broker-1", "camera"),
            subscribe("over-cloud", "car-2", "cloud-broker", "relayed"),
            publish("position", "car-2", "broker-3"),
            publish("camera", "camera", "broker-1"),
            publish("relayed", "car-1", "cloud-broker"),
        ),
    )
    if parameters.kill:
        middle_s = SUBSCRIBED_S + parameters.duration_s / 2
        scenario = msgspec.structs.replace(
            scenario,
            settle_s=SETTLE_AFTER_KILL_S,
            clients=tuple(msgspec.structs.replace(group, clean_start=False) for group in scenario.clients),
            events=(Kill(at_s=middle_s, host="broker-3", restart_after_s=1.0),),
        )
    return resolve(scenario)


def jittery(topology: Topology, jitter_ms: float) -> Topology:
    """The same with jitter on its links, so that there are distributions to compare."""
    if not jitter_ms:
        return topology
    links = tuple(msgspec.structs.replace(link, jitter_ms=jitter_ms) for link in topology.links)
    return msgspec.structs.replace(topology, links=links)


def model_latencies_ms(scenario: Scenario) -> dict[Pair, float]:
    """What the network model says: from the publisher to its broker, from there to the subscriber."""
    network, names = build_network(topology_of(scenario), random.Random(0))
    number = {name: index for index, name in enumerate(names)}
    clients = {client.name: client for client in expand_clients(scenario)}
    found = {}
    for pair in expected_pairs(scenario):
        source, target = clients[pair.publisher], clients[pair.subscriber]
        broker = number[source.broker]
        found[pair] = network.one_way_ms(number[source.host], broker) + network.one_way_ms(broker, number[target.host])
    return found


def streams(scenario: Scenario) -> dict[str, list[Pair]]:
    """Pairs with the same expected latency, by a name that says it."""
    found: dict[str, list[Pair]] = {}
    for pair, latency_ms in sorted(model_latencies_ms(scenario).items(), key=lambda entry: entry[1]):
        found.setdefault(f"{latency_ms:g} ms", []).append(pair)
    return found


def quantiles(values: Sequence[float] | np.ndarray[Any, Any]) -> dict[str, float]:
    low, median, high, worst = np.quantile(np.asarray(values), (0.1, 0.5, 0.9, 0.99))
    return {"p10": round(low, 3), "p50": round(median, 3), "p90": round(high, 3), "p99": round(worst, 3)}

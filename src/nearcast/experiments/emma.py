"""``emma``: the paper's scenario on the emulated WAN: regions, client groups behind gateways, eight events in order.

EMMA (section VI) runs in three AWS regions. Ten client machines in each of two regions have a gateway, a subscriber and seven
publishers that exchange messages in a topic called like the region; a topic ``global`` spans all three. Brokers come and go,
and the controller moves clients to better ones. What the paper could not do is what this is held to: nothing lost, nothing
twice, at every QoS, and no client notices. A stream of 100 messages a second in each region shows how long a move
interrupts.

What becomes of the events is in :mod:`nearcast.experiments.emma_results`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from nearcast.emulation import namespaces
from nearcast.emulation.wan import Wan
from nearcast.errors import ConfigError, EmulationError
from nearcast.experiments import plots
from nearcast.experiments.emulated import Program, run_emulated
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.nodes import http_ports
from nearcast.experiments.run import Run
from nearcast.experiments.simulated import run_simulated
from nearcast.recording.schema import arrow
from nearcast.scenario.files import load_topology, resolve
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Topology
from nearcast.scenario.workload import OWN_HOST, Clients, Publishing, Subscribing

if TYPE_CHECKING:
    from nearcast.experiments.emma_results import Told

EVENTS = (
    "clients of `global` appear",
    "client group appears in us-east",
    "broker starts in eu-west (1)",
    "client group appears in eu-west",
    "broker starts in us-east",
    "broker starts in eu-west (2)",
    "subscriber of `global` in eu-central leaves",
    "broker stops in us-east",
)
"""Section VI-B-2, in its order. The first is the beginning."""

REGIONS = {"east": "us-east", "west": "eu-west"}
"""The regions with client groups: what hosts are called after, and what the region and its topic are."""

GROUP = 10
"""Client machines in a group."""

PUBLISHERS = 7
"""On each of them, beside one subscriber."""

RATE_HZ = 10.0
PAYLOAD_BYTES = 118
STREAM_HZ = 100.0

INTERVAL_S = 15.0
"""How often EMMA's controller reconfigures, when events are a minute apart."""

PING_INTERVAL_MS = 250.0
SPACING_S = 60.0
LEAST_INTERVAL_S = 1.0
SETTLE_S = 3.0

EXCESS_MS = 2.0
"""Mean latency between clients of a region that has a broker, above what the emulated links alone make it."""

GAP_MS = 50.0
"""What a move may interrupt beyond two round trips between the old and the new broker."""


class EmmaParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the client machines of a group (10); ``duration_s`` is eight times the time from event to event.
    Whatever has a period (reconfiguration, pings) shrinks with the latter."""

    duration_s: float = len(EVENTS) * SPACING_S
    rate_hz: float = RATE_HZ
    """Of each publisher."""

    qos: tuple[int, ...] = (0, 1, 2)
    """Of the publishers of each client machine, in turn. EMMA had 0 only."""

    stream_qos: int = 0
    """Of the streams that show how long a move interrupts."""

    durable: bool = False
    """Brokers keep journals and flush them before they acknowledge."""

    simulated: bool = False
    """Run it in the simulator instead: no root, no noise, no throughput of real processes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(len(self.qos) > 0 and all(level in (0, 1, 2) for level in self.qos), "qos", "must be of 0, 1 and 2")
        self.require(self.stream_qos in (0, 1, 2), "stream_qos", "must be 0, 1 or 2")
        self.require(self.duration_s >= 2 * len(EVENTS), "duration_s", f"must be {2 * len(EVENTS)} or more: eight events")
        self.require(0.1 <= self.rate_hz <= 10_000, "rate_hz", "must be between 0.1 and 10,000")

    @property
    def spacing_s(self) -> float:
        """From event to event."""
        return self.duration_s / len(EVENTS)

    def event_s(self, number: int) -> float:
        """When an event happens, from 1; one after the last is the end."""
        return (number - 1) * self.spacing_s


class Emma(Experiment[EmmaParameters]):
    name = "emma"
    summary = "EMMA's regions, client groups and eight events: clients move to better brokers and notice nothing."
    parameters = EmmaParameters
    quick: ClassVar[Mapping[str, Any]] = {"scale": 0.1, "duration_s": 32.0}

    def bars(self, parameters: EmmaParameters) -> Sequence[Bar]:
        levels = sorted({*parameters.qos, parameters.stream_qos})
        return [
            at_most(
                "intra_region_excess_ms",
                EXCESS_MS,
                "mean latency between clients of a region with a broker, above what links impose; the worse region",
            ),
            *(at_most(f"lost_qos_{level}", 0, "deliveries that should have been and were not") for level in levels),
            *(at_most(f"duplicated_qos_{level}", 0, "deliveries of what a subscriber had already") for level in levels),
            at_most(
                "interruption_ratio",
                1.0,
                f"longest gap of a {STREAM_HZ:g} msg/s stream at a move, of 2 RTT(old, new) + {GAP_MS:g} ms; the worst move",
            ),
            at_most("out_of_order", 0, "deliveries after one of a newer message of the same publisher"),
            at_most("connections_lost", 0, "clients whose connection broke"),
            at_least("moves", 4, "clients that were moved, and their streams watched, often enough to say so"),
        ]

    def check(self, parameters: EmmaParameters) -> None:
        arrow()
        plots.require()
        reason = namespaces.available()
        if not parameters.simulated and reason is not None:
            raise EmulationError(
                f"{reason}; loopback mode carries no UDP, which nodes measure with: `--set simulated=true` needs no root"
            )
        scenario_of(parameters)

    def run(self, run: Run[EmmaParameters]) -> None:
        # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
        from nearcast.experiments import emma_results

        parameters = run.parameters
        scenario = scenario_of(parameters)
        run.keep("scenario.json", scenario)
        if parameters.simulated:
            run.step("simulating")
            result = run_simulated(run, scenario, parameters.seed, events="emma")
            run.figure("simulation", result)
            told = emma_results.simulated(result.figures)
            start_ns = 0
        else:
            told = self._emulate(run, scenario)
            start_ns = int((run.folder / "load" / "emma" / "start").read_text())
        run.step("evaluating")
        emma_results.evaluate(run, scenario, told, start_ns)

    def _emulate(self, run: Run[EmmaParameters], scenario: Scenario) -> Told:
        from nearcast.experiments import emma_results

        parameters = run.parameters
        run.step(f"starting {len(scenario.gateways)} groups of gateways, the controller and the first broker")
        samples = run.directory("samples").absolute()
        every_s = max(0.5, parameters.spacing_s / 30)
        samplers = [
            Program(
                name=f"sampler-{name}",
                host=host,
                command=(
                    "python",
                    "-P",
                    "-m",
                    "nearcast.experiments.sampling",
                    f"http://127.0.0.1:{port}/metrics",
                    str(samples / f"{name}.jsonl"),
                    "--every",
                    f"{every_s:g}",
                ),
            )
            for name, (host, port) in http_ports(scenario).items()
        ]
        answers: list[Told] = []

        async def question(wan: Wan) -> None:
            answers.append(await emma_results.ask(wan, scenario))

        result = run_emulated(
            run, scenario, parameters.seed, events="emma", mode="namespaces", beside=samplers, question=question
        )
        run.figure("emulation", {"mode": result.mode, "loads": result.loads, "traffic": result.status.traffic})
        for process in result.status.processes:
            if process.state in ("failed", "killed") or (process.exit_code or 0) > 0:
                run.note(f"{process.name} did not end as it should: see {process.log}")
        return answers[0]


def scenario_of(parameters: EmmaParameters) -> Scenario:
    """The scenario, as data."""
    shrink = parameters.spacing_s / SPACING_S
    best = max(parameters.qos)
    at_s = parameters.event_s
    clients: list[Clients] = []
    for number, (word, region) in enumerate(REGIONS.items()):
        level = parameters.qos[number % len(parameters.qos)]
        clients += [
            Clients(
                name=f"global-sub-{word}",
                host=f"global-{word}",
                broker=OWN_HOST,
                subscribe=(Subscribing(filter="global", qos=best),),
            ),
            Clients(
                name=f"global-pub-{word}",
                host=f"global-{word}",
                broker=OWN_HOST,
                publish=(_publishing("global", parameters.rate_hz, level),),
            ),
            Clients(
                name=f"watch-{word}",
                host=f"global-{word}",
                broker=OWN_HOST,
                subscribe=(Subscribing(filter=stream_topic(region), qos=parameters.stream_qos),),
            ),
            Clients(
                name=f"stream-{word}",
                host=f"global-{word}",
                broker=OWN_HOST,
                publish=(_publishing(stream_topic(region), STREAM_HZ, parameters.stream_qos),),
            ),
        ]
    clients.append(
        Clients(
            name="global-sub-central",
            host="global-central",
            broker=OWN_HOST,
            subscribe=(Subscribing(filter="global", qos=best),),
            stop_s=at_s(7),
            leave=True,
        )
    )
    clients += _group("east", at_s(2), parameters)
    clients += _group("west", at_s(4), parameters)
    return resolve(
        Scenario(
            name="emma",
            description="EMMA's evaluation (section VI-B): " + "; ".join(EVENTS) + ".",
            topology=_topology(parameters.scale),
            protocol="fabric",
            duration_s=parameters.duration_s,
            settle_s=SETTLE_S,
            controller=Controller(
                host="controller",
                interval_s=max(LEAST_INTERVAL_S, INTERVAL_S * shrink),
                ping_interval_ms=max(10.0, PING_INTERVAL_MS * min(1.0, shrink)),
            ),
            brokers=(
                Broker(host="broker-central", fabric=True, durable=parameters.durable),
                Broker(host="broker-west-1", fabric=True, durable=parameters.durable, start_s=at_s(3)),
                Broker(host="broker-east", fabric=True, durable=parameters.durable, start_s=at_s(5), stop_s=at_s(8)),
                Broker(host="broker-west-2", fabric=True, durable=parameters.durable, start_s=at_s(6)),
            ),
            # The machines are there from the beginning, their clients appear with the events: twenty programs that start at
            # once would disturb what is measured, where EMMA had a machine for each.
            gateways=(Gateway(host="global-*"), Gateway(host="clients-*")),
            clients=tuple(clients),
        )
    )


def _group(word: str, start_s: float, parameters: EmmaParameters) -> list[Clients]:
    """The clients of a region's machines."""
    host, region = f"clients-{word}*", REGIONS[word]
    subscribing = Subscribing(filter=region, qos=max(parameters.qos))
    found = [Clients(name=f"sub-{word}", host=host, broker=OWN_HOST, start_s=start_s, subscribe=(subscribing,))]
    turns = list(itertools.islice(itertools.cycle(parameters.qos), PUBLISHERS))
    for level in sorted(set(turns)):
        publishing = _publishing(region, parameters.rate_hz, level)
        found.append(
            Clients(
                name=f"pub-{word}-qos-{level}",
                host=host,
                broker=OWN_HOST,
                count=turns.count(level),
                start_s=start_s,
                publish=(publishing,),
            )
        )
    return found


def _publishing(topic: str, rate_hz: float, qos: int) -> Publishing:
    return Publishing(topic=topic, rate_hz=rate_hz, payload_bytes=PAYLOAD_BYTES, qos=qos)


def stream_topic(region: str) -> str:
    """Of the stream that shows how long moves interrupt in a region."""
    return f"stream/{region}"


def _topology(scale: float) -> Topology:
    """The ready-made one, with as many client machines as asked for."""
    topology = load_topology("emma")
    count = max(1, round(GROUP * scale))
    hosts = tuple(
        msgspec.structs.replace(host, count=count) if host.name.startswith("clients-") else host for host in topology.hosts
    )
    if 2 * count > 200:
        raise ConfigError(f"`scale`: {2 * count} client machines, and as many gateways, are more than one machine can run")
    return msgspec.structs.replace(topology, hosts=hosts)

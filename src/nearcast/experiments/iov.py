"""``iov``: cars and traffic monitoring on the emulated WAN with real brokers, and Mosquitto as the cloud.

Section IV-B of the broadcast-group paper: three edge brokers and a cloud broker; car 1 at edge 2, cars 2 and 3 at edge 3, a
camera at edge 1, the traffic authority at the cloud. The same workload runs with each strategy, and strategies are thresholds
of one mechanism: *flooding* puts all edge brokers in one group, *groups* (5 ms) edges 2 and 3, *relay* (0 ms) none. Brokers
record every message that they process; what of it was for nobody is excess data (tables I and II).

The way from edge 1 to the others leads over the cloud's site, so in flooding the camera's messages take 44 ms only when edge 1
leads: it has the highest capability measure. What becomes of the events is in :mod:`nearcast.experiments.iov_results`.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from nearcast.emulation import namespaces
from nearcast.emulation.wan import Wan
from nearcast.errors import ConfigError, EmulationError
from nearcast.experiments import plots
from nearcast.experiments.emulated import run_emulated
from nearcast.experiments.experiment import Bar, Bound, Experiment, Parameters, at_least, at_most
from nearcast.experiments.nodes import http_ports
from nearcast.experiments.run import Run
from nearcast.experiments.simulated import run_simulated
from nearcast.recording.schema import arrow
from nearcast.scenario.files import load_topology, resolve
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Process, ReadyCheck
from nearcast.scenario.workload import Clients, Publishing, Subscribing

if TYPE_CHECKING:
    from pathlib import Path

    from nearcast.experiments.iov_results import GroupsSeen

CLOUD = "cloud-broker"
EDGES = ("broker-1", "broker-2", "broker-3")
CAPABILITY = {"broker-1": 3.0, "broker-2": 1.0, "broker-3": 2.0}
CARS = {"car-1": "broker-2", "car-2": "broker-3", "car-3": "broker-3"}
TELEMETRY = "/car-telemetry/realtime"
MONITORING = "/traffic-control/monitoring"
FLOWS = {"telemetry": f"{TELEMETRY}/#", "monitoring": f"{MONITORING}/#"}


class Strategy(msgspec.Struct, frozen=True, kw_only=True):
    """One of the three, and what the paper found with it."""

    threshold_ms: float
    leave_threshold_ms: float
    """Far above, because hosts of the emulated WAN share a few cores: a measurement in passing must not end a group."""

    groups: tuple[tuple[str, ...], ...]
    """Brokers of each group, the leader first."""

    excess_percent: Mapping[str, float]
    """By flow: tables I and II."""


STRATEGIES = {
    "flooding": Strategy(
        threshold_ms=10_000.0,
        leave_threshold_ms=10_000.0,
        groups=(("broker-1", "broker-2", "broker-3"),),
        excess_percent={"telemetry": 50.0, "monitoring": 50.0},
    ),
    "groups": Strategy(
        threshold_ms=5.0,
        leave_threshold_ms=20.0,
        groups=(("broker-1",), ("broker-3", "broker-2")),
        excess_percent={"telemetry": 100 / 3, "monitoring": 0.0},
    ),
    "relay": Strategy(
        threshold_ms=0.0,
        leave_threshold_ms=0.0,
        groups=(("broker-1",), ("broker-2",), ("broker-3",)),
        excess_percent={"telemetry": 100 / 3, "monitoring": 0.0},
    ),
}

TELEMETRY_BYTES, TELEMETRY_HZ = 20, 20.0
MONITORING_BYTES, MONITORING_HZ = 1_000, 1.0

LATENCY_MS = 1.0
"""How far a median may be from the links' own latency, beyond what brokers take."""

BROKER_MS = 0.5
"""What each broker on the way may take: reading, routing and writing, and the processes waiting for a core meanwhile."""

RELAYED_MS = 55.0
"""The least that the paper expects of messages over the cloud (section IV-C). One that was faster took another way."""

TAIL_MS = 10.0
"""How far the 99th percentile of relayed messages may be above the links' own latency. The paper's had a long tail."""

EXCESS_PERCENT = 0.5
"""How far excess data may be from the paper's: its numbers differ by some messages from run to run, too."""

SUBSCRIBED_S = 1.5
"""Publishers begin so long after subscribers, so that every message has its subscribers."""

FORMING_S = 30.0
"""In the simulator: from the start to the clients', for groups to form. On the WAN clients wait until they have."""

SETTLE_S = 2.0


class IovParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the rates of cars and camera; ``duration_s`` is how long they publish, with each strategy."""

    duration_s: float = 900.0
    strategies: tuple[str, ...] = tuple(STRATEGIES)
    """Which of them run, in turn."""

    qos: int = 0
    """Of messages and subscriptions. The paper's clients had 0."""

    simulated: bool = False
    """Run it in the simulator instead, with a broker of ours as the cloud: no root, no Mosquitto, no processor's time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        known = f"must be of {', '.join(STRATEGIES)}, each at most once"
        fits = set(self.strategies) <= set(STRATEGIES) and len(set(self.strategies)) == len(self.strategies) > 0
        self.require(fits, "strategies", known)
        self.require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")


class Iov(Experiment[IovParameters]):
    name = "iov"
    summary = "Cars and traffic monitoring with flooding, broadcast groups and cloud relay: latency and excess data."
    parameters = IovParameters
    quick: ClassVar[Mapping[str, Any]] = {"duration_s": 4.0}

    def bars(self, parameters: IovParameters) -> Sequence[Bar]:
        found: list[Bar] = []
        for name in parameters.strategies:
            strategy = STRATEGIES[name]
            found.append(
                at_most(
                    f"{name}_latency_error_ms",
                    LATENCY_MS,
                    f"median latency against the links' own, beyond {BROKER_MS:g} ms for each broker; the worst pair",
                )
            )
            for flow, percent in strategy.excess_percent.items():
                bound = Bound(at_least=round(percent - EXCESS_PERCENT, 2), at_most=round(percent + EXCESS_PERCENT, 2))
                found.append(
                    Bar(name=f"{name}_{flow}_excess_percent", bound=bound, meaning="messages that a broker had for nobody")
                )
            count = float(len(strategy.groups))
            found.append(Bar(name=f"{name}_groups", bound=Bound(at_least=count, at_most=count), meaning="that formed"))
        if "relay" in parameters.strategies:
            found.append(at_least("relay_remote_ms", RELAYED_MS, "median latency of relayed telemetry, the fastest pair"))
            found.append(
                at_most("relay_tail_ms", TAIL_MS, "99th percentile of relayed telemetry, above the links' own latency")
            )
        return [
            *found,
            at_most("lost", 0, "deliveries that should have been and were not"),
            at_most("duplicated", 0, "deliveries of what a subscriber had already"),
        ]

    def check(self, parameters: IovParameters) -> None:
        arrow()
        plots.require()
        if parameters.simulated:
            return
        reason = namespaces.available()
        if reason is not None:
            raise EmulationError(
                f"{reason}; loopback mode carries no UDP, which brokers measure with: `--set simulated=true` needs no root"
            )
        mosquitto()

    def run(self, run: Run[IovParameters]) -> None:
        # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
        from nearcast.experiments import iov_results

        parameters = run.parameters
        seen: dict[str, GroupsSeen] = {}
        for name in parameters.strategies:
            scenario = scenario_of(parameters, name)
            # The first is what an evaluation of the folder takes sites from; they differ in thresholds only.
            run.keep(f"scenario-{name}.json" if seen else "scenario.json", scenario)
            if parameters.simulated:
                run.step(f"{name}: simulating")
                result = run_simulated(run, scenario, parameters.seed, events=name, processed=True)
                run.figure(f"{name}_simulation", result)
                seen[name] = iov_results.GroupsSeen(count=int(result.figures["groups"]))
            else:
                seen[name] = self._emulate(run, with_mosquitto(scenario, run.directory("cloud")), name)
        run.step("evaluating")
        iov_results.evaluate(run, {name: scenario_of(parameters, name) for name in parameters.strategies}, seen)

    def _emulate(self, run: Run[IovParameters], scenario: Scenario, name: str) -> GroupsSeen:
        from nearcast.experiments.iov_results import GroupsSeen

        run.step(f"{name}: brokers start, and form groups")
        seen: list[dict[str, Any]] = []

        async def form(wan: Wan) -> None:
            await groups_of(wan, scenario, STRATEGIES[name].groups)

        async def look(wan: Wan) -> None:
            seen.extend(await groups_of(wan, scenario, ()))

        result = run_emulated(
            run, scenario, run.parameters.seed, events=name, mode="namespaces", before=form, question=look, processed=True
        )
        run.figure(f"{name}_emulation", {"mode": result.mode, "loads": result.loads, "traffic": result.status.traffic})
        for process in result.status.processes:
            if process.state in ("failed", "killed") or (process.exit_code or 0) > 0:
                run.note(f"{process.name} did not end as it should: see {process.log}")
        return GroupsSeen.told(seen)


async def groups_of(wan: Wan, scenario: Scenario, expected: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """What every broker says of its group, once it is as expected or patience is at an end."""

    async def one(broker: str, host: str, port: int) -> dict[str, Any]:
        group = next((group for group in expected if broker in group), ())
        command = ["python", "-P", "-m", "nearcast.experiments.group_watch", f"http://127.0.0.1:{port}/healthz"]
        answer = await wan.run(host, [*command, *group[:1], *group], timeout_s=60)
        try:
            return dict(msgspec.json.decode(answer.output) or {"name": broker})
        except msgspec.DecodeError as error:
            raise EmulationError(f"{broker} does not say what group it is in: {answer.error.strip() or error}") from error

    return await asyncio.gather(*(one(broker, host, port) for broker, (host, port) in http_ports(scenario).items()))


def mosquitto() -> str:
    """The program, or the one line that says how to get it."""
    found = shutil.which("mosquitto") or shutil.which("mosquitto", path="/usr/sbin:/usr/local/sbin")
    if found is None:
        raise ConfigError(
            "the cloud of this experiment is Mosquitto, which is not installed (apt install mosquitto); "
            "`--set simulated=true` uses a broker of ours"
        )
    return found


def with_mosquitto(scenario: Scenario, directory: Path) -> Scenario:
    """The same with Mosquitto in the place of the cloud's broker."""
    configuration = directory.absolute() / "mosquitto.conf"
    # Without TCP_NODELAY its small packets may wait for acknowledgements of those before them.
    configuration.write_text(
        "listener 1883 0.0.0.0\nallow_anonymous true\npersistence false\nset_tcp_nodelay true\nmax_queued_messages 100000\n"
    )
    process = Process(
        name="mosquitto", host=CLOUD, command=(mosquitto(), "-c", str(configuration)), ready=ReadyCheck(port=1883)
    )
    topology = scenario.topology
    if isinstance(topology, str):
        topology = load_topology(topology)
    return resolve(
        msgspec.structs.replace(scenario, topology=msgspec.structs.replace(topology, processes=(process, *topology.processes)))
    )


def scenario_of(parameters: IovParameters, strategy: str) -> Scenario:
    """The scenario of a strategy, as data."""
    begin_s = FORMING_S if parameters.simulated else 0.0
    groups: dict[str, Any] = {
        "cloud": f"mqtt://{CLOUD}:1883",
        "threshold_ms": STRATEGIES[strategy].threshold_ms,
        "leave_threshold_ms": STRATEGIES[strategy].leave_threshold_ms,
    }
    clients = [
        Clients(
            name="authority",
            host="authority",
            broker=CLOUD,
            start_s=begin_s,
            subscribe=(Subscribing(filter=f"{MONITORING}/#", qos=parameters.qos),),
        ),
        _publisher("camera", "camera", "broker-1", f"{MONITORING}/1", MONITORING_HZ, MONITORING_BYTES, parameters, begin_s),
    ]
    for number, (car, broker) in enumerate(CARS.items(), start=1):
        wanted = Subscribing(filter=f"{TELEMETRY}/+", qos=parameters.qos)
        clients += [
            Clients(name=f"{car}-hears", host=car, broker=broker, start_s=begin_s, subscribe=(wanted,)),
            _publisher(car, car, broker, f"{TELEMETRY}/{number}", TELEMETRY_HZ, TELEMETRY_BYTES, parameters, begin_s),
        ]
    return resolve(
        Scenario(
            name="iov",
            description=f"The broadcast-group paper's experiment (section IV-B) with {strategy}.",
            topology=load_topology("iov"),
            protocol="fabric",
            duration_s=begin_s + SUBSCRIBED_S + parameters.duration_s,
            settle_s=SETTLE_S,
            settings={
                "fabric": {
                    "classes": [{"topic": "#", "topic_class": "broadcast"}],
                    "groups": groups,
                },
                "lcm": CAPABILITY,
            },
            brokers=(Broker(host=CLOUD), *(Broker(host=edge, fabric=True) for edge in EDGES)),
            clients=tuple(clients),
        )
    )


def _publisher(
    name: str, host: str, broker: str, topic: str, rate_hz: float, size: int, parameters: IovParameters, begin_s: float
) -> Clients:
    publishing = Publishing(topic=topic, rate_hz=rate_hz * parameters.scale, payload_bytes=size, qos=parameters.qos)
    return Clients(name=name, host=host, broker=broker, start_s=begin_s + SUBSCRIBED_S, publish=(publishing,))

"""``migration``: all topics change owners at once, with the controller near and far (ePulsar, section 5.7, figure 7).

Two brokers, and clients behind a gateway between them; each topic has one client that publishes and gets its own messages. A
program beside the controller asks for all topics to be moved from the one broker to the other, and back; some of them, the
*watched*, have a stream that shows how long clients got nothing. It runs with several distances of the controller and several
numbers of executors, and with the baseline workflow of Pulsar: release, then everybody asks, one topic after the other. What
becomes of it is in :mod:`.migration_results`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec

from nearcast.emulation.wan import Wan
from nearcast.errors import EmulationError
from nearcast.experiments.emulated import doubts, happening, run_load
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.nodes import with_nodes
from nearcast.experiments.owned_runs import MigrationView, check_machine, convert, migrations_of, secret_of
from nearcast.experiments.run import Run
from nearcast.network.conditions import Conditions
from nearcast.scenario.files import resolve
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

if TYPE_CHECKING:
    from pathlib import Path

TOPICS = 128
EDGE_MS = 5.0
"""One way between clients and each of the brokers: 10 ms there and back."""

SLACK_MS = 10.0
"""What a client may be without messages beyond a round trip to the new owner."""

DISTANCES_MS = (10.0, 20.0, 40.0, 80.0)
EXECUTORS = (1, 2, 4, 8, 16, 32)
MAIN_EXECUTORS = 16
MAIN_DISTANCE_MS = 40.0
EFFECT_MS = 10.0
"""How much the controller's distance may add to the median downtime."""

SLOW_HZ = 2.0
PAYLOAD_BYTES = 64
AFTER_S = 2.0
"""Clients that follow their owner do so within this time of its move: that belongs to the phase."""

QUIET_S = 2.0
"""Before a phase: the same is measured while nothing moves."""

PATIENCE_S = 240.0
"""For one phase."""

PREFIX = "move"
FIRST, SECOND = "broker-a", "broker-b"


class Setup(NamedTuple):
    """How the controller moves topics."""

    workflow: str
    executors: int

    @property
    def label(self) -> str:
        return f"{self.workflow}-{self.executors}"


class MigrationParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 128 topics. There is no duration: every phase takes as long as it takes."""

    watched: int = 16
    """Topics with a stream that shows gaps; the others have two messages a second."""

    rate_hz: float = 50.0
    """Of the watched ones."""

    distances_ms: tuple[float, ...] = DISTANCES_MS
    """One way between brokers and controller, with 16 executors and with the baseline."""

    executors: tuple[int, ...] = EXECUTORS
    """Migrations at once, with the controller 40 ms away."""

    rest_s: float = 13.0
    """Between two phases. After as long a rest, clients follow their owner at once again, and a phase does not depend on the
    one before; after a shorter one they may still be elsewhere when the next begins."""

    baseline: bool = True
    """Whether Pulsar's workflow runs, too."""

    qos: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(1 <= self.watched <= 10_000, "watched", "must be between 1 and 10,000")
        self.require(1 <= self.rate_hz <= 1_000, "rate_hz", "must be between 1 and 1,000")
        self.require(len(self.distances_ms) > 0, "distances_ms", "must name one distance at least")
        self.require(all(0 < each <= 1_000 for each in self.distances_ms), "distances_ms", "must be between 0 and 1,000")
        self.require(all(1 <= each <= 10_000 for each in self.executors), "executors", "must be between 1 and 10,000")
        self.require(QUIET_S <= self.rest_s <= 600, "rest_s", f"must be between {QUIET_S:g} and 600")
        self.require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")

    @property
    def topics(self) -> int:
        return max(1, round(TOPICS * self.scale))

    def setups(self) -> list[tuple[Setup, tuple[float, ...]]]:
        """Each with the distances it runs at."""
        found = {Setup("handover", MAIN_EXECUTORS): self.distances_ms}
        for executors in self.executors:
            found.setdefault(Setup("handover", executors), (MAIN_DISTANCE_MS,))
        if self.baseline:
            found[Setup("release", 1)] = self.distances_ms
        return sorted(found.items(), key=lambda entry: (entry[0].workflow, entry[0].executors))


class Phase(msgspec.Struct, frozen=True, kw_only=True):
    """All topics moved once."""

    setup: str
    distance_ms: float
    target: str
    from_s: float
    """Seconds after the start of the load of its setup."""

    until_s: float
    asked: int
    migrations: list[MigrationView]


class Migration(Experiment[MigrationParameters]):
    name = "migration"
    summary = "All topics change owners at once: how long clients get nothing, near and far from the controller (figure 7)."
    parameters = MigrationParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "scale": 0.125,
        "watched": 6,
        "rate_hz": 40.0,
        "distances_ms": (10.0, 80.0),
        "executors": (),
        "rest_s": 4.0,
    }

    def bars(self, parameters: MigrationParameters) -> Sequence[Bar]:
        found = [
            at_most(
                "median_downtime_ms",
                2 * EDGE_MS + SLACK_MS,
                "a client's longest gap beyond its publishing interval: a round trip to the new owner and 10 ms",
            ),
            at_most("lost", 0, "deliveries that should have been and were not; our workflow"),
            at_most("duplicated", 0, "deliveries of what a subscriber had already; our workflow"),
            at_most("out_of_order", 0, "deliveries after one of a newer message of the same publisher; our workflow"),
            at_most("failed", 0, "migrations that were asked for and not done"),
            at_least("moved", parameters.topics, "topics with our workflow, in all phases"),
        ]
        if len(parameters.distances_ms) > 1:
            meaning = "median downtime with the farthest controller, above that with the nearest"
            found.insert(1, at_most("distance_effect_ms", EFFECT_MS, meaning))
        return found

    def check(self, parameters: MigrationParameters) -> None:
        check_machine()
        for setup, _ in parameters.setups():
            scenario_of(parameters, setup)

    def run(self, run: Run[MigrationParameters]) -> None:
        # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
        from nearcast.experiments import migration_results

        phases: list[Phase] = []
        parameters = run.parameters
        for number, (setup, distances) in enumerate(parameters.setups()):
            scenario = scenario_of(parameters, setup)
            run.keep(f"scenario-{setup.label}.json" if number else "scenario.json", scenario)
            run.step(f"{setup.workflow}, {setup.executors} at once: starting")
            phases += asyncio.run(_measure(run, scenario, setup, distances))
            run.keep("phases.json", phases)
        run.step("evaluating")
        scenarios = {setup.label: scenario_of(parameters, setup) for setup, _ in parameters.setups()}
        migration_results.evaluate(run, scenarios, phases)


async def _measure(run: Run[MigrationParameters], scenario: Scenario, setup: Setup, distances: Sequence[float]) -> list[Phase]:
    """One setup: a WAN, a load, and all of its phases."""
    seed = run.parameters.seed
    recorded, directory = run.new_events(setup.label), run.directory(f"load/{setup.label}")
    happens, _ = happening(scenario, seed)
    name = f"migration-{setup.workflow}-{os.getpid()}"
    stop = asyncio.Event()
    phases: list[Phase] = []
    output = run.directory(f"wan/{setup.label}")
    async with Wan.up(with_nodes(scenario), mode="namespaces", seed=seed, output=output, name=name) as wan:
        async with asyncio.TaskGroup() as group:
            driving = group.create_task(_drive(run, wan, scenario, setup, distances, directory, stop, phases))
            summaries = await run_load(
                wan,
                scenario,
                happens,
                run,
                seed=seed,
                directory=directory,
                events=recorded,
                name=run.name_of(setup.label),
                stop=stop,
            )
            if not driving.done():
                driving.cancel()
                raise EmulationError(f"{setup.label}: the clients ended before all topics were moved; see {directory}")
        status = await wan.status()
    doubts(run, summaries)
    for doubt in status.traffic.doubts:
        run.note(f"do not trust this run: {doubt}")
    run.figure(f"{setup.label}_traffic", status.traffic)
    return phases


async def _drive(
    run: Run[MigrationParameters],
    wan: Wan,
    scenario: Scenario,
    setup: Setup,
    distances: Sequence[float],
    directory: Path,
    stop: asyncio.Event,
    phases: list[Phase],
) -> None:
    """Move all topics once for each distance, after they have been brought together at the first broker."""
    try:
        start = directory / "start"
        while not start.exists():  # noqa: ASYNC110  # made by another task of this process
            await asyncio.sleep(0.1)
        start_s = int(start.read_text()) / 1e9
        wanted = run.parameters.topics
        await _move_all(wan, scenario, FIRST, wanted)
        for number, distance_ms in enumerate(distances):
            for site in ("edge-a", "edge-b", "homes"):
                await wan.link(site, "cloud", latency_ms=distance_ms)
            await asyncio.sleep(AFTER_S + run.parameters.rest_s)
            target = FIRST if number % 2 else SECOND
            run.step(f"{setup.workflow}, {setup.executors} at once: controller {distance_ms:g} ms away")
            moved = await _move_all(wan, scenario, target, wanted)
            own = [each for each in await migrations_of(wan, scenario) if each.created_at >= moved.began]
            phases.append(
                Phase(
                    setup=setup.label,
                    distance_ms=distance_ms,
                    target=target,
                    from_s=moved.began - start_s,
                    until_s=moved.ended - start_s,
                    asked=moved.asked,
                    migrations=own,
                )
            )
        await asyncio.sleep(AFTER_S + 1.0)
    finally:
        stop.set()


class Moved(msgspec.Struct):
    """What the program beside the controller says; times are those of the wall clock."""

    began: float
    ended: float
    asked: int
    missing: int


async def _move_all(wan: Wan, scenario: Scenario, target: str, topics: int) -> Moved:
    """Ask for every topic to be at a broker, and wait until it is."""
    controller = scenario.controller
    if controller is None:
        raise EmulationError("the scenario has no controller to ask")
    command = ["python", "-P", "-m", "nearcast.experiments.mover", f"http://127.0.0.1:{controller.http_port}"]
    command += [str(await secret_of(wan)), target, str(topics), "--patience", f"{PATIENCE_S:g}"]
    answer = await wan.run(controller.host, command, timeout_s=2 * PATIENCE_S)
    if answer.code != 0:
        raise EmulationError(f"not all topics got to {target}: {answer.error.strip()}")
    moved: Moved = convert(answer.output.encode(), Moved)
    return moved


def scenario_of(parameters: MigrationParameters, setup: Setup) -> Scenario:
    """The scenario of a setup, as data. It lasts longer than any run: the load is ended when all phases are over."""
    watched = min(parameters.watched, parameters.topics)
    groups = [("watched", watched, parameters.rate_hz)]
    if parameters.topics > watched:
        groups.append(("plain", parameters.topics - watched, SLOW_HZ))
    return resolve(
        Scenario(
            name="migration",
            description=f"ePulsar's figure 7: {setup.workflow}, {setup.executors} migrations at once.",
            topology=_topology(),
            protocol="fabric",
            duration_s=3_600.0,
            settle_s=1.0,
            settings={
                "fabric": {"classes": [{"topic": f"{PREFIX}/#", "topic_class": "owned"}]},
            },
            controller=Controller(
                host="controller",
                settings={"planner": "none", "executors": setup.executors, "migration_workflow": setup.workflow},
            ),
            brokers=(Broker(host=FIRST, fabric=True), Broker(host=SECOND, fabric=True)),
            gateways=(Gateway(host="gate"),),
            clients=tuple(
                Clients(
                    name=name,
                    host="clients",
                    broker="gate",
                    count=count,
                    publish=(
                        Publishing(
                            topic=f"{PREFIX}/{{client}}",
                            rate_hz=rate_hz,
                            payload_bytes=PAYLOAD_BYTES,
                            qos=parameters.qos,
                        ),
                    ),
                    subscribe=(Subscribing(filter=f"{PREFIX}/{{client}}", qos=parameters.qos),),
                )
                for name, count, rate_hz in groups
            ),
        )
    )


def _topology() -> Topology:
    far = MAIN_DISTANCE_MS
    return Topology(
        name="migration",
        description="Two edge brokers, 10 ms apart, clients halfway between them, and a controller far away.",
        sites=(
            Site(name="edge-a"),
            Site(name="edge-b"),
            Site(name="homes", local=Conditions(latency_ms=0.1)),
            Site(name="cloud", tier="cloud"),
        ),
        links=(
            SiteLink(between=("edge-a", "homes"), latency_ms=EDGE_MS),
            SiteLink(between=("edge-b", "homes"), latency_ms=EDGE_MS),
            SiteLink(between=("edge-a", "cloud"), latency_ms=far),
            SiteLink(between=("edge-b", "cloud"), latency_ms=far),
            SiteLink(between=("homes", "cloud"), latency_ms=far),
        ),
        hosts=(
            Host(name="controller", site="cloud"),
            Host(name=FIRST, site="edge-a"),
            Host(name=SECOND, site="edge-b"),
            Host(name="gate", site="homes"),
            Host(name="clients", site="homes"),
        ),
    )

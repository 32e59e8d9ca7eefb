"""``nearcast wan up``: a WAN in the foreground, from its start to its summary.

In a terminal a picture is redrawn; elsewhere, and with ``--json``, there is a line per thing that happens. Ctrl-C and SIGTERM
take the WAN down in order; a second one does not wait for anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import msgspec
from rich.console import Console
from rich.live import Live

from nearcast.cli import wan_clients
from nearcast.cli import wan_display as display
from nearcast.cli.wan_clients import ClientsResult
from nearcast.cli.wan_exec import run_command
from nearcast.emulation.control import Happening, Mode, WanStatus
from nearcast.emulation.wan import Signal, Wan
from nearcast.errors import ConfigError, EmulationError, NearcastError
from nearcast.experiments import emulated, nodes
from nearcast.scenario.events import Event
from nearcast.scenario.files import load_scenario, load_topology, ready_scenarios
from nearcast.scenario.mobility import moves
from nearcast.scenario.movement import Trace, Waypoints
from nearcast.scenario.scenario import MQTT_PROTOCOLS, Scenario
from nearcast.scenario.topology import Topology

REDRAW_SECONDS = 0.5

#: Random movement is drawn before the start; without --duration, for so long.
DEFAULT_MOVEMENT_SECONDS = 3_600.0


@dataclass(frozen=True)
class UpOptions:
    """What the command line says."""

    topology: str
    command: tuple[str, ...]
    host: str | None
    name: str | None
    mode: Mode
    output: Path | None
    duration_s: float | None
    seed: int
    trace: Path | None
    waypoint_mps: float | None
    moving: tuple[str, ...]
    clients: bool
    detach: bool
    as_json: bool
    base: Path


def movement(topology: Topology, options: UpOptions) -> list[Event]:
    """The moves that the options ask for."""
    duration_s = options.duration_s or DEFAULT_MOVEMENT_SECONDS
    rng = Random(f"{options.seed}/mobility/0")
    found: list[Event] = []
    if options.trace is not None:
        found += moves(topology, Trace(file=str(options.trace)), options.duration_s or inf, rng)
    if options.waypoint_mps is not None:
        if not options.moving:
            raise NearcastError("say which hosts move: --moving 'car-*'")
        slow, fast = options.waypoint_mps * 0.5, options.waypoint_mps * 1.5
        waypoints = Waypoints(hosts=options.moving, min_speed_mps=slow, max_speed_mps=fast)
        found += moves(topology, waypoints, duration_s, rng)
    elif options.moving:
        raise NearcastError("--moving needs --waypoint SPEED")
    return found


@dataclass(frozen=True)
class Description:
    """What to run, and what happens to it."""

    topology: Topology
    events: list[Event]
    scenario: Scenario | None = None
    notes: tuple[str, ...] = ()
    """What of the scenario a WAN cannot do."""


def load_either(name: str) -> Topology | Scenario:
    """A topology or a scenario, ready-made or from a file."""
    try:
        return load_topology(name)
    except ConfigError as error:
        if name not in ready_scenarios() and error.key != "topology":
            raise
    return load_scenario(name)


def description(options: UpOptions) -> Description:
    """What to run. A scenario brings its brokers, clients, events, movement and random faults along."""
    scenario = load_either(options.topology)
    if isinstance(scenario, Topology):
        return Description(scenario, movement(scenario, options))
    if scenario.protocol not in MQTT_PROTOCOLS:
        raise NearcastError(
            f"scenario {scenario.name} runs the protocol {scenario.protocol}, which exists in the simulator only: "
            f"nearcast simulate {options.topology}"
        )
    if options.duration_s is not None:
        scenario = msgspec.structs.replace(scenario, duration_s=options.duration_s)
    topology = nodes.with_nodes(scenario)
    events, notes = emulated.happening(scenario, options.seed)
    together = sorted(events + movement(topology, options), key=lambda event: event.at_s)
    return Description(topology, together, scenario, tuple(notes))


async def bring_up(options: UpOptions) -> int:
    """Run a WAN to its end; returns the exit code."""
    described = description(options)
    topology, scenario = described.topology, described.scenario
    host = _command_host(topology, options)
    with_clients = scenario is not None and bool(scenario.clients) and _clients_wanted(options)
    if scenario is not None and scenario.clients and not with_clients and options.clients:
        sys.stderr.write(
            f"nearcast: the clients of {scenario.name} are not started: `nearcast wan up {options.topology}` does\n"
        )
    if options.detach:
        return await _detached(described, options)
    if with_clients:
        wan_clients.check_output(options.output)
    console = Console(stderr=bool(options.command))
    stop = asyncio.Event()
    signals: asyncio.Queue[Signal] = asyncio.Queue()
    live = console.is_terminal and not options.as_json and not options.command
    recent = display.Recent()
    show = _shower(console, recent, live=live, as_json=options.as_json, quiet=bool(options.command))
    last: WanStatus | None = None
    result: ClientsResult | None = None
    code = 0
    with _signals(stop):
        async with (
            Wan.up(
                topology,
                name=_wan_name(described, options),
                mode=options.mode,
                # With clients, events happen at their time after the clients' beginning.
                events=() if with_clients else described.events,
                seed=options.seed,
                output=options.output,
                base=options.base,
                wait=False,
            ) as wan,
            _shown(wan, console, recent, show, live=live),
        ):
            if not await _ready_or_stopped(wan, stop):
                return 130
            if options.command and host is not None:
                code = await run_command(wan, host, options.command, signals)
            elif scenario is not None and with_clients:
                result = await _with_clients(wan, described, scenario, options, stop, recent, show)
                code = 0 if result is not None and result.complete else 130
            else:
                code = await _wait(wan, stop, options.duration_s)
            try:
                last = await wan.status()
            except EmulationError:
                recent.taken_down = True
    _summarise(console, last, recent, options, result)
    if scenario is not None and result is not None and not options.as_json:
        wan_clients.print_result(console, scenario, result)
    return code


def _clients_wanted(options: UpOptions) -> bool:
    return options.clients and not options.command and not options.detach


def _wan_name(described: Description, options: UpOptions) -> str | None:
    """A scenario's WAN is called like the scenario."""
    return options.name or (described.scenario.name[:40] if described.scenario is not None else None)


async def _with_clients(
    wan: Wan,
    described: Description,
    scenario: Scenario,
    options: UpOptions,
    stop: asyncio.Event,
    recent: display.Recent,
    show: display.Show,
) -> ClientsResult | None:
    """Run the clients; None when somebody takes the WAN down meanwhile."""
    ended = asyncio.create_task(wan.ended(), name="ended")
    running = asyncio.create_task(
        wan_clients.run_clients(
            wan,
            scenario,
            described.events,
            described.notes,
            seed=options.seed,
            output=options.output,
            stop=stop,
            recent=recent,
            show=show,
        ),
        name="clients",
    )
    try:
        await asyncio.wait([ended, running], return_when=asyncio.FIRST_COMPLETED)
        if ended.done():
            return None
        return running.result()
    finally:
        for task in (ended, running):
            task.cancel()
        await asyncio.gather(ended, running, return_exceptions=True)


def _command_host(topology: Topology, options: UpOptions) -> str | None:
    """Where the command after ``--`` runs."""
    if not options.command:
        if options.host is not None:
            raise NearcastError("--host says where a command runs: give one after --")
        return None
    names = topology.host_names()
    if options.host is not None and options.host not in names:
        raise NearcastError(f"topology {topology.name} has no host {options.host}; it has {', '.join(names[:8])}")
    return options.host or names[0]


async def _detached(described: Description, options: UpOptions) -> int:
    if options.command:
        raise NearcastError("--detach and a command exclude each other: use `nearcast wan exec` afterwards")
    name = await Wan.up_detached(
        described.topology,
        name=_wan_name(described, options),
        mode=options.mode,
        events=described.events,
        seed=options.seed,
        output=options.output,
        base=options.base,
    )
    if options.as_json:
        print(msgspec.json.encode({"name": name}).decode())
    else:
        print(f"WAN {name} is up: `nearcast wan status` shows it, `nearcast wan down {name}` ends it")
    return 0


async def _ready_or_stopped(wan: Wan, stop: asyncio.Event) -> bool:
    """Wait for all processes; False if the user did not."""
    ready = asyncio.create_task(wan.ready(), name="ready")
    stopped = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
        if ready.done():
            ready.result()
            return True
        return False
    finally:
        ready.cancel()
        stopped.cancel()


async def _wait(wan: Wan, stop: asyncio.Event, duration_s: float | None) -> int:
    """Until Ctrl-C, the end of the duration, or somebody else's ``down``."""
    stopped = asyncio.create_task(stop.wait(), name="stop")
    ended = asyncio.create_task(wan.ended(), name="ended")
    try:
        await asyncio.wait([stopped, ended], timeout=duration_s, return_when=asyncio.FIRST_COMPLETED)
        return 0
    finally:
        stopped.cancel()
        ended.cancel()


@contextlib.contextmanager
def _signals(stop: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks to end, the second ends this process at once, and the keeper takes the WAN down."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if stop.is_set():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                loop.remove_signal_handler(number)
            os.kill(os.getpid(), signal.SIGTERM)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, asked)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _shower(console: Console, recent: display.Recent, *, live: bool, as_json: bool, quiet: bool) -> display.Show:
    """How something that happens is shown."""

    def show(happening: Happening) -> None:
        if live and happening.kind in ("limit", "fallback"):
            console.print(display.happening_text(happening))  # above the picture, to stay
            return
        recent.add(happening)
        if as_json:
            print(msgspec.json.encode(happening).decode(), flush=True)
        elif happening.kind == "ended":
            return  # the error line says the same
        elif not live and (not quiet or happening.kind in ("problem", "failed", "exited", "limit", "fallback")):
            print(display.happening_line(happening), file=sys.stderr if quiet else sys.stdout, flush=True)

    return show


@contextlib.asynccontextmanager
async def _shown(wan: Wan, console: Console, recent: display.Recent, show: display.Show, *, live: bool) -> AsyncIterator[None]:
    """What happens is shown meanwhile."""

    async def watch() -> None:
        async for happening in wan.watch():
            show(happening)

    tasks = [asyncio.create_task(watch(), name="watch")]
    if live:
        tasks.append(asyncio.create_task(_draw(wan, console, recent), name="draw"))
    try:
        yield
    finally:
        for task in tasks[1:]:
            task.cancel()
        with contextlib.suppress(EmulationError, asyncio.CancelledError):
            await asyncio.gather(*tasks[1:], return_exceptions=True)
        tasks[0].cancel()
        await asyncio.gather(tasks[0], return_exceptions=True)


async def _draw(wan: Wan, console: Console, recent: display.Recent) -> None:
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            try:
                status, matrix = await wan.status(), await wan.matrix(display.MAX_ROWS)
                live.update(display.picture(status, matrix, list(recent.happenings), recent.progress), refresh=True)
            except EmulationError:
                pass  # it is not there yet, or not any more
            await asyncio.sleep(REDRAW_SECONDS)


def _summarise(
    console: Console,
    last: WanStatus | None,
    recent: display.Recent,
    options: UpOptions,
    result: ClientsResult | None,
) -> None:
    summary = summary_of(last, recent)
    if result is not None:
        summary["clients"] = result
    if options.as_json:
        print(msgspec.json.encode({"summary": summary}).decode())
        return
    if options.command:
        _doubt(console, last)
        return
    if last is None:
        console.print("the WAN was taken down by another command" if recent.taken_down else "it ended before it was up")
        return
    hosts, processes = _counted(len(last.hosts), "host", "hosts"), _counted(len(last.processes), "process", "processes")
    console.print(
        f"WAN {last.name} was up for {last.uptime_s:.0f} s: {hosts}, {processes}, "
        f"{summary['ended_by_themselves']} ended by themselves; {display.traffic_text(last)}",
        highlight=False,
    )
    _doubt(console, last)
    if options.output is not None:
        console.print(f"logs and data: {options.output}", highlight=False)


def _doubt(console: Console, last: WanStatus | None) -> None:
    """What speaks against trusting the run."""
    if last is not None:
        for text in (*([last.error] if last.error is not None else []), *last.traffic.doubts):
            console.print(display.doubt_line(text), style="red", highlight=False)


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def summary_of(last: WanStatus | None, recent: display.Recent) -> dict[str, Any]:
    """The run in a few figures."""
    return {
        "name": last.name if last is not None else None,
        "mode": last.mode if last is not None else None,
        "uptime_s": last.uptime_s if last is not None else None,
        "traffic": last.traffic if last is not None else None,
        "ended_by_themselves": recent.counts.get("exited", 0),
        "problems": recent.counts.get("problem", 0),
        "limits": last.limits if last is not None else (),
    }

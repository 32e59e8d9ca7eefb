"""``nearcast wan``: a deployment as real processes on an emulated WAN.

``up`` runs a WAN in the foreground; the other commands talk to a running one over its control socket. Everything they do,
:class:`nearcast.emulation.wan.Wan` does from Python.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from random import Random
from typing import Annotated, Any, TypeVar

import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nearcast.cli import wan_display as display
from nearcast.cli import wan_exec
from nearcast.emulation import directories
from nearcast.emulation.control import Matrix, Mode, WanStatus
from nearcast.emulation.wan import Signal, Wan
from nearcast.errors import NearcastError
from nearcast.scenario.assembly import build_network
from nearcast.scenario.events import Crash
from nearcast.scenario.files import load_topology, ready_topologies
from nearcast.scenario.topology import Topology

Result = TypeVar("Result")

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich")

LOOK = "Look at one"
NETWORK = "Change the network"
PROCESSES = "Processes"

Name = Annotated[
    str | None, typer.Option("--name", "-n", envvar="NEARCAST_WAN", help="Which WAN; not needed while only one is running.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
For = Annotated[float | None, typer.Option("--for", min=0.001, metavar="SECONDS", help="Undo it after so many seconds.")]
OneWay = Annotated[bool, typer.Option("--one-way", help="Only from the first to the second.")]
Target = Annotated[str, typer.Argument(help="A process, or a host for all of its processes.")]
TopologyName = Annotated[str, typer.Argument(help="A topology or a scenario: ready-made, or a file.", metavar="TOPOLOGY")]

Latency = Annotated[float | None, typer.Option("--latency", "-l", min=0.0, metavar="MS", help="One way, in milliseconds.")]
Jitter = Annotated[
    float | None, typer.Option("--jitter", min=0.0, metavar="MS", help="Spread of the latency, in milliseconds.")
]
JitterShape = Annotated[str | None, typer.Option("--jitter-shape", help="uniform, normal, lognormal or pareto.")]
Loss = Annotated[float | None, typer.Option("--loss", min=0.0, max=100.0, metavar="PERCENT", help="Packets lost, in percent.")]
Bandwidth = Annotated[
    float | None, typer.Option("--bandwidth", min=0.0, metavar="MBPS", help="Megabits per second; 0 is unlimited.")
]
Queue = Annotated[float | None, typer.Option("--queue", min=0.0, metavar="MS", help="Longest wait for bandwidth.")]
Reorder = Annotated[float | None, typer.Option("--reorder", min=0.0, max=100.0, metavar="PERCENT", help="Packets overtaken.")]
Duplicate = Annotated[
    float | None, typer.Option("--duplicate", min=0.0, max=100.0, metavar="PERCENT", help="Packets that arrive twice.")
]


def _base() -> Path:
    """The directory of running WANs."""
    named = os.environ.get("NEARCAST_WAN_DIRECTORY")
    return Path(named).absolute() if named else directories.default_base()


def _with(name: str | None, action: Callable[[Wan], Awaitable[Result]]) -> Result:
    """Do something with a running WAN."""

    async def connect_and_act() -> Result:
        async with Wan.connect(name, base=_base()) as wan:
            return await action(wan)

    return _run(connect_and_act())


def _run(work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def _print_json(value: Any) -> None:
    print(msgspec.json.encode(value).decode())


# -- start and end -----------------------------------------------------------------------------------------------------------


@app.command("up", rich_help_panel="Start and end")
def up(
    topology: Annotated[
        str,
        typer.Argument(
            help="A topology or a scenario: ready-made (`nearcast wan topologies`, `nearcast simulate --list`) or a file."
        ),
    ],
    command: Annotated[
        list[str] | None,
        typer.Argument(help="After --: run this on --host, then end with its exit code.", metavar="-- COMMAND"),
    ] = None,
    host: Annotated[str | None, typer.Option("--host", help="Where COMMAND runs; the first host by default.")] = None,
    name: Annotated[
        str | None, typer.Option("--name", "-n", help="What to call it; by default as its topology or scenario.")
    ] = None,
    loopback: Annotated[bool, typer.Option("--loopback", help="Delay connections on loopback: no root, less exact.")] = False,
    namespaces: Annotated[bool, typer.Option("--namespaces", help="Fail rather than fall back to loopback.")] = False,
    output: Annotated[
        Path | None, typer.Option("--out", "-o", help="Keep logs, data and recorded events here.", metavar="DIR")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option("--duration", "-d", min=0.1, help="Seconds until it ends; of a scenario, instead of its own."),
    ] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="Of jitter, loss, random movement and random faults.")] = 1,
    mobility: Annotated[Path | None, typer.Option("--mobility", help="Move hosts as this CSV trace says.")] = None,
    waypoint: Annotated[
        float | None,
        typer.Option(
            "--waypoint",
            min=0.1,
            metavar="M/S",
            help="Move hosts at random, at about this speed; without --duration for an hour.",
        ),
    ] = None,
    moving: Annotated[
        list[str] | None, typer.Option("--moving", help="With --waypoint: who moves (`car-*`); may be repeated.")
    ] = None,
    no_clients: Annotated[
        bool, typer.Option("--no-clients", help="Do not start a scenario's clients; it then runs until Ctrl-C.")
    ] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Leave it running; `nearcast wan down` ends it.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per thing that happens, and a last one.")] = False,
) -> None:
    """Start the hosts and processes of a topology and keep them until Ctrl-C; or run a scenario, with its clients, to its end.

    A scenario's brokers and clients start, its events and faults happen, and a table tells what became of the messages.

    The same file runs in virtual time with `nearcast simulate`.

    Examples: nearcast wan up uav; nearcast wan up mqtt --duration 20
    """
    from nearcast.cli.wan_up import UpOptions, bring_up  # with NumPy, which the other commands start faster without

    if loopback and namespaces:
        raise NearcastError("--loopback and --namespaces exclude each other: give one of them")
    mode: Mode = "loopback" if loopback else "namespaces" if namespaces else "auto"
    options = UpOptions(
        topology=topology,
        command=tuple(command or ()),
        host=host,
        name=name,
        mode=mode,
        output=output,
        duration_s=duration,
        seed=seed,
        trace=mobility,
        waypoint_mps=waypoint,
        moving=tuple(moving or ()),
        clients=not no_clients,
        detach=detach,
        as_json=as_json,
        base=_base(),
    )
    raise typer.Exit(_run(bring_up(options)))


@app.command("down", rich_help_panel="Start and end")
def down(
    wan: Annotated[str | None, typer.Argument(help="Which WAN; not needed while only one is running.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
) -> None:
    """Take a WAN down: processes are asked to end, then all is removed."""
    names = [found.name for found in directories.running(_base())] if every else [wan]
    problems = []
    for name in names:
        try:
            _with(name, lambda running: running.down())
        except NearcastError as error:
            problems.append(str(error))
    if problems:
        raise NearcastError("; ".join(problems))


@app.command("topologies", rich_help_panel="Start and end")
def topologies(as_json: AsJson = False) -> None:
    """List the ready-made topologies."""
    found = [load_topology(name) for name in ready_topologies()]
    if as_json:
        _print_json([{"name": one.name, "description": one.description.strip(), "hosts": one.host_names()} for one in found])
        return
    table = Table("topology", "what", box=None)
    for one in found:
        summary = " ".join(one.description.split()).partition(". ")[0].rstrip(".")
        table.add_row(Text(one.name, style="bold"), f"{len(one.host_names())} hosts at {len(one.sites)} sites. {summary}.")
    Console().print(table)


@app.command("show", rich_help_panel="Start and end")
def show(topology: TopologyName, as_json: AsJson = False) -> None:
    """Show a topology, or that of a scenario, and its latencies without starting anything."""
    from nearcast.cli.wan_up import load_either  # with NumPy
    from nearcast.experiments.nodes import with_nodes

    found = load_either(topology)
    loaded = found if isinstance(found, Topology) else with_nodes(found)
    network, names = build_network(loaded, Random(0))
    # All pairs of very many hosts take long, and nobody reads them.
    everyone = range(len(names) if as_json else min(len(names), display.MAX_MATRIX))
    rows = tuple(tuple(_finite(network.one_way_ms(source, target)) for target in everyone) for source in everyone)
    matrix = Matrix(hosts=tuple(names), one_way_ms=rows)
    if as_json:
        _print_json({"topology": loaded, "matrix": matrix})
        return
    console = Console()
    about = " ".join(found.description.split())
    console.print(f"[bold]{found.name}[/bold]{': ' if about else ''}{about}", highlight=False)
    for site in loaded.sites:
        here = [name for number, name in enumerate(names) if network.sites[network.site_of(number)] == site.name]
        if here:
            shown, more = here[: display.MAX_NAMED], len(here) - display.MAX_NAMED
            tail = f" and {more:,} more" if more > 0 else ""
            console.print(f"  {site.name} ({site.tier}): {', '.join(shown)}{tail}", highlight=False)
    for process in loaded.processes:
        console.print(f"  {process.name} on {process.host}: {' '.join(process.command)}", highlight=False)
    console.print()
    console.print(display.matrix_table(matrix, console.width))


def _finite(value: float) -> float | None:
    return round(value, 6) if value < float("inf") else None


# -- look --------------------------------------------------------------------------------------------------------------------


@app.command("list", rich_help_panel=LOOK)
def list_running(as_json: AsJson = False) -> None:
    """List the WANs of this user that are running."""

    async def statuses() -> list[tuple[str, WanStatus | None]]:
        found: list[tuple[str, WanStatus | None]] = []
        for directory in directories.running(_base()):
            try:
                async with Wan.connect(directory.name, base=_base()) as wan:
                    found.append((directory.name, await wan.status()))
            except NearcastError:
                found.append((directory.name, None))  # it has just begun, is ending, or hangs; the others are there
        return found

    running = _run(statuses())
    if as_json:
        rows = [(name, one.topology, one.mode, one.state) if one else (name, None, None, "silent") for name, one in running]
        _print_json([dict(zip(("name", "topology", "mode", "state"), row, strict=True)) for row in rows])
        return
    if not running:
        print("no WAN is running: start one with `nearcast wan up TOPOLOGY`")
    for name, one in running:
        if one is None:
            print(f"{name}  does not answer: it is being started or ended, or hangs")
        else:
            print(f"{name}  {one.topology}, {one.mode}, {one.state} {one.uptime_s:.0f} s, {len(one.hosts)} hosts")


@app.command("status", rich_help_panel=LOOK)
def status(name: Name = None, as_json: AsJson = False) -> None:
    """Show hosts, processes and traffic."""

    async def look(wan: Wan) -> tuple[WanStatus, Matrix]:
        return await wan.status(), await wan.matrix(None if as_json else display.MAX_ROWS)

    now, matrix = _with(name, look)
    if as_json:
        _print_json({"status": now, "matrix": matrix})
        return
    console = Console()
    console.print(f"[bold]{now.name}[/bold] {now.topology}, {now.mode}, {now.state} {now.uptime_s:.0f} s")
    console.print(display.hosts_table(now, matrix))
    console.print(display.traffic_text(now), highlight=False)
    if now.error is not None:
        console.print(now.error, style="bold red", highlight=False)
    for doubt in now.traffic.doubts:
        console.print(display.doubt_line(doubt), style="red")
    for cut in now.cuts:
        console.print(f"cut: {cut}", style="red")
    for limit in now.limits:
        console.print(f"cannot show: {limit}", style="yellow", highlight=False)
    console.print(f"logs and data: {now.output}", style="dim", highlight=False)


@app.command("watch", rich_help_panel=LOOK)
def watch(name: Name = None, as_json: AsJson = False) -> None:
    """Show everything that happens, until the WAN ends or Ctrl-C."""

    async def follow(wan: Wan) -> None:
        async for happening in wan.watch():
            print(msgspec.json.encode(happening).decode() if as_json else display.happening_line(happening), flush=True)

    _with(name, follow)


@app.command("logs", rich_help_panel=LOOK)
def logs(
    process: Annotated[str, typer.Argument(help="A process of the topology.")],
    name: Name = None,
    lines: Annotated[int, typer.Option("--lines", min=0, help="How many of the last lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what it writes from now on.")] = False,
) -> None:
    """Show what a process wrote."""

    async def show_lines(wan: Wan) -> None:
        if follow:
            async for line in wan.follow(process, lines):
                print(line, flush=True)
        else:
            for line in await wan.logs(process, lines):
                print(line)

    _with(name, show_lines)


@app.command("matrix", rich_help_panel=LOOK)
def matrix(name: Name = None, as_json: AsJson = False) -> None:
    """Show the one-way latencies that are expected now."""
    found = _with(name, lambda wan: wan.matrix(None if as_json else display.MAX_MATRIX))
    if as_json:
        _print_json(found)
    else:
        console = Console()
        console.print(display.matrix_table(found, console.width))


# -- change the network ------------------------------------------------------------------------------------------------------


def _changes(
    latency: float | None,
    jitter: float | None,
    jitter_shape: str | None,
    loss: float | None,
    bandwidth: float | None,
    queue: float | None,
    reorder: float | None,
    duplicate: float | None,
) -> dict[str, float | str]:
    """The fields of Conditions that options name; shares are percent on the command line."""
    given: dict[str, float | str | None] = {
        "latency_ms": latency,
        "jitter_ms": jitter,
        "jitter": jitter_shape,
        "loss": None if loss is None else loss / 100,
        "bandwidth_mbps": bandwidth,
        "queue_ms": queue,
        "reorder": None if reorder is None else reorder / 100,
        "duplicate": None if duplicate is None else duplicate / 100,
    }
    changes = {field: value for field, value in given.items() if value is not None}
    if not changes:
        raise NearcastError("say what to change: --latency, --jitter, --loss, --bandwidth, ...")
    return changes


@app.command("link", rich_help_panel=NETWORK)
def link(
    first: Annotated[str, typer.Argument(help="A site.")],
    second: Annotated[str, typer.Argument(help="Another site.")],
    latency: Latency = None,
    jitter: Jitter = None,
    jitter_shape: JitterShape = None,
    loss: Loss = None,
    bandwidth: Bandwidth = None,
    queue: Queue = None,
    reorder: Reorder = None,
    duplicate: Duplicate = None,
    one_way: OneWay = False,
    duration: For = None,
    name: Name = None,
) -> None:
    """Change the link between two sites; what is not named stays as it is.

    Example: nearcast wan link zone-1 cloud --latency 80 --loss 1
    """
    changes = _changes(latency, jitter, jitter_shape, loss, bandwidth, queue, reorder, duplicate)
    conditions = _with(name, lambda wan: wan.link(first, second, one_way=one_way, for_s=duration, **changes))
    print(f"{first} {'→' if one_way else '↔'} {second}: {conditions.described()}")


@app.command("access", rich_help_panel=NETWORK)
def access(
    host: Annotated[str, typer.Argument(help="A host.")],
    latency: Latency = None,
    jitter: Jitter = None,
    jitter_shape: JitterShape = None,
    loss: Loss = None,
    bandwidth: Bandwidth = None,
    queue: Queue = None,
    reorder: Reorder = None,
    duplicate: Duplicate = None,
    duration: For = None,
    name: Name = None,
) -> None:
    """Change a host's own link; what is not named stays as it is.

    Example: nearcast wan access car-1 --loss 10 --for 5
    """
    changes = _changes(latency, jitter, jitter_shape, loss, bandwidth, queue, reorder, duplicate)
    conditions = _with(name, lambda wan: wan.access(host, for_s=duration, **changes))
    print(f"{host}: {conditions.described()}")


@app.command("move", rich_help_panel=NETWORK)
def move(
    host: Annotated[str, typer.Argument(help="A host.")],
    site: Annotated[str, typer.Argument(help="Where to.")],
    name: Name = None,
) -> None:
    """Move a host to another site."""
    _with(name, lambda wan: wan.move(host, site))


@app.command("cut", rich_help_panel=NETWORK)
def cut(
    source: Annotated[str, typer.Argument(help="Hosts or sites, with commas between them.")],
    target: Annotated[str | None, typer.Argument(help="The same; without it, everything else.")] = None,
    one_way: OneWay = False,
    duration: For = None,
    name: Name = None,
) -> None:
    """Let nothing pass between hosts or sites.

    Example: nearcast wan cut zone-1 cloud --for 10
    """
    sources, targets = source.split(","), target.split(",") if target else ()
    _with(name, lambda wan: wan.cut(sources, targets, one_way=one_way, for_s=duration))


@app.command("heal", rich_help_panel=NETWORK)
def heal(name: Name = None) -> None:
    """Undo every cut."""
    _with(name, lambda wan: wan.heal())


# -- processes ---------------------------------------------------------------------------------------------------------------


@app.command("kill", rich_help_panel=PROCESSES)
def kill(target: Target, name: Name = None) -> None:
    """SIGKILL, at once, for a process and all that it started."""
    _with(name, lambda wan: wan.kill(target))


@app.command("stop", rich_help_panel=PROCESSES)
def stop(target: Target, name: Name = None) -> None:
    """Ask a process to end; killed if it does not in time."""
    _with(name, lambda wan: wan.stop(target))


@app.command("start", rich_help_panel=PROCESSES)
def start(target: Target, name: Name = None) -> None:
    """Start what does not run, and wait until it is ready."""
    _with(name, lambda wan: wan.start(target))


@app.command("restart", rich_help_panel=PROCESSES)
def restart(target: Target, name: Name = None) -> None:
    """Stop it if it runs, start it, and wait until it is ready."""
    _with(name, lambda wan: wan.restart(target))


@app.command("pause", rich_help_panel=PROCESSES)
def pause(target: Target, name: Name = None) -> None:
    """Let a process stand still (SIGSTOP)."""
    _with(name, lambda wan: wan.pause(target))


@app.command("resume", rich_help_panel=PROCESSES)
def resume(target: Target, name: Name = None) -> None:
    """Let it go on (SIGCONT)."""
    _with(name, lambda wan: wan.resume(target))


@app.command("crash", rich_help_panel=PROCESSES)
def crash(
    host: Annotated[str, typer.Argument(help="A host.")],
    restart_after: Annotated[
        float | None, typer.Option("--restart-after", min=0.0, metavar="SECONDS", help="Start it again by itself.")
    ] = None,
    name: Name = None,
) -> None:
    """Take the power from a host: off the network, then its processes are killed; `start` brings it back."""
    _with(name, lambda wan: wan.apply(Crash(at_s=0.0, host=host, restart_after_s=restart_after)))


@app.command(
    "exec", rich_help_panel=PROCESSES, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False}
)
def execute(
    host: Annotated[str, typer.Argument(help="A host.")],
    command: Annotated[list[str], typer.Argument(help="Program and arguments; {name} is the address of that host.")],
    name: Name = None,
) -> None:
    """Run a command on a host, with this terminal; ends with its exit code.

    Example: nearcast wan exec car-1 mosquitto_sub -h broker-1 -t '#'
    """

    async def run(wan: Wan) -> int:
        signals: asyncio.Queue[Signal] = asyncio.Queue()
        return await wan_exec.run_command(wan, host, command[1:] if command[0] == "--" else command, signals)

    raise typer.Exit(_with(name, run))


# -- measure -----------------------------------------------------------------------------------------------------------------


@app.command("measure", rich_help_panel="Start and end")
def measure(
    topology: Annotated[str | None, typer.Argument(help="By default 20 hosts with 0.5 to 100 ms between them.")] = None,
    rate: Annotated[float, typer.Option("--rate", min=1.0, help="Packets per second, over all pairs of hosts.")] = 1_000.0,
    duration: Annotated[float, typer.Option("--duration", "-d", min=0.5, help="Seconds.")] = 10.0,
    as_json: AsJson = False,
) -> None:
    """Measure how exact the delays are on this machine. Needs root."""
    from nearcast.cli.wan_measure import show_accuracy

    show_accuracy(topology, rate, duration, as_json)

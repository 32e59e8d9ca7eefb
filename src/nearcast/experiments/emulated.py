"""A scenario as real processes on an emulated WAN: its brokers, and a load process on each host that has clients.

Owns the composition that no runtime below knows: how load processes begin together on one clock, where their events go. Which
commands its nodes are is :mod:`nearcast.experiments.nodes`'s. The scenario is the same that the simulator runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nearcast.emulation.control import Mode
from nearcast.emulation.wan import Signal, Wan, WanStatus
from nearcast.errors import ConfigError, EmulationError
from nearcast.experiments.nodes import Recorded, node_events, with_nodes
from nearcast.experiments.run import Run
from nearcast.load.meeting import PATIENCE_S, start_together
from nearcast.load.spec import LoadSpec, SharedClock, clock_offset_ns
from nearcast.load.tally import LoadSummary
from nearcast.scenario.events import Crash, Event, FailDisk, Kill, Move, Pause, SkewClock
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline

GRACE_S = 20.0
"""After the scenario's end, a load process that has not ended is given up."""


class EmulationResult(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run on the WAN."""

    mode: str
    limits: tuple[str, ...]
    """What this mode cannot show."""

    loads: dict[str, LoadSummary]
    """By host."""

    status: WanStatus
    """Just before it was taken down."""


class Program(msgspec.Struct, frozen=True, kw_only=True):
    """Something that runs on a host beside the load, and is asked to end with it."""

    name: str
    """Of the file that its output goes to."""

    host: str
    command: tuple[str, ...]
    """``{name}`` in it is the address of a host."""


Question = Callable[[Wan], Awaitable[None]]
"""What is asked of a WAN before the load, or when it is over and everything still runs."""


class Listener(Protocol):
    """Who is told how a load goes: a run of an experiment is one."""

    def step(self, text: str) -> None:
        """Another part of it begins."""

    def advance(self, share: float) -> None:
        """So much of this part is done, 0 to 1."""

    def note(self, text: str) -> None:
        """Something that qualifies the figures."""


def happening(scenario: Scenario, seed: int) -> tuple[list[Event], list[str]]:
    """What happens in a scenario (its topology loaded), nodes that come and go included, and a line for each kind of it that
    only the simulator can do."""
    found = timeline(scenario, seed)
    left_out = Counter("wrong clocks" if isinstance(event, SkewClock) else "disk faults" for event in found if _virtual(event))
    lines = [f"only the simulator has {what}: left out ({count} of the scenario)" for what, count in left_out.items()]
    clients = {client.host for client in expand_clients(scenario)}
    if any(isinstance(event, Kill | Crash | Pause) and event.host in clients for event in found):
        lines.append("clients go on when their host is killed, crashed or paused; a crashed one is off the network meanwhile")
    together = [*node_events(scenario), *(event for event in found if not _virtual(event))]
    return sorted(together, key=lambda event: event.at_s), lines


def _virtual(event: Event) -> bool:
    return isinstance(event, SkewClock | FailDisk)


def run_emulated(
    run: Run[Any],
    scenario: Scenario,
    seed: int,
    *,
    events: str,
    mode: Mode = "auto",
    beside: Sequence[Program] = (),
    before: Question | None = None,
    question: Question | None = None,
    processed: bool = False,
) -> EmulationResult:
    """Run a scenario (its topology loaded) in real time; ``events`` names the directory of recorded events.

    Its events happen at their time after all processes are ready, within milliseconds of the load's beginning, which waits for
    ``before``. ``beside`` runs as long as the load does; then ``question`` is asked. With ``processed``, brokers of a fabric
    record what they process beside what clients see.
    """
    return asyncio.run(_run(run, scenario, seed, events, mode, beside, before, question, processed))


async def _run(
    run: Run[Any],
    scenario: Scenario,
    seed: int,
    events: str,
    mode: Mode,
    beside: Sequence[Program],
    before: Question | None,
    question: Question | None,
    processed: bool,
) -> EmulationResult:
    if not expand_clients(scenario):
        raise ConfigError(f"the scenario {scenario.name} has no clients: nothing would happen on the emulated WAN")
    happens, left_out = happening(scenario, seed)
    for line in left_out:
        run.note(line)
    # Of this part of the run alone: the meeting of an earlier one would begin the load at once.
    recorded, directory = run.new_events(events), run.directory(f"load/{events}")
    # Named by this process, so that two experiments may run at the same time.
    name = f"{scenario.name[:24]}-{os.getpid()}"
    recording = Recorded(directory=str(recorded.absolute()), run=run.name_of(events)) if processed else None
    topology = with_nodes(scenario, recording)
    async with Wan.up(topology, mode=mode, seed=seed, output=run.directory(f"wan/{events}"), name=name) as wan:
        if before is not None:
            await before(wan)
        async with _beside(wan, beside, directory):
            summaries = await run_load(
                wan, scenario, happens, run, seed=seed, directory=directory, events=recorded, name=run.name_of(events)
            )
            if question is not None:
                await question(wan)
        status = await wan.status()
    for limit in status.limits:
        run.note(f"{status.mode} mode: {limit}")
    doubts(run, summaries)
    for doubt in status.traffic.doubts:
        run.note(f"do not trust this run: {doubt}")
    for host, summary in summaries.items():
        if not summary.complete:
            raise EmulationError(f"the load on {host} was ended before the scenario was over")
    return EmulationResult(mode=status.mode, limits=status.limits, loads=summaries, status=status)


@contextlib.asynccontextmanager
async def _beside(wan: Wan, programs: Sequence[Program], directory: Path) -> AsyncIterator[None]:
    """Run programs for as long as the block does."""
    stop = asyncio.Event()
    running = [asyncio.create_task(_run_beside(wan, program, directory, stop), name=program.name) for program in programs]
    try:
        yield
    finally:
        stop.set()
        await asyncio.gather(*running, return_exceptions=True)


async def _run_beside(wan: Wan, program: Program, directory: Path, stop: asyncio.Event) -> None:
    signals: asyncio.Queue[Signal] = asyncio.Queue()
    stopping = asyncio.create_task(_stop(stop, signals), name=f"stopping {program.name}")
    try:
        with _streams(directory / f"{program.name}.out", directory / f"{program.name}.log") as streams:
            await wan.execute(program.host, list(program.command), streams, signals=signals)
    finally:
        stopping.cancel()


async def run_load(
    wan: Wan,
    scenario: Scenario,
    happens: Sequence[Event],
    listener: Listener,
    *,
    seed: int,
    directory: Path,
    events: Path,
    name: str,
    stop: asyncio.Event | None = None,
) -> dict[str, LoadSummary]:
    """Run a scenario's clients on a WAN that has its brokers, to the end or until ``stop``; summaries by host.

    ``happens`` are the events that happen meanwhile. ``directory`` is where the load processes meet and leave their output,
    ``events`` where they record, ``name`` what the run is called there.
    """
    clients = expand_clients(scenario)
    hosts = list(dict.fromkeys(client.host for client in clients))
    brokers = sorted({host for client in clients for host in (client.broker, *client.roams)})
    clock = SharedClock(clock_offset_ns())
    path = _write_spec(scenario, happens, seed, clock, directory, events, name)
    total_s = scenario.duration_s + scenario.settle_s
    stop = stop or asyncio.Event()
    listener.step(f"clients of {len(hosts)} {'host' if len(hosts) == 1 else 'hosts'} begin")
    async with asyncio.TaskGroup() as group:
        loads = {host: group.create_task(_load(wan, host, path, brokers, PATIENCE_S + total_s, stop)) for host in hosts}
        accompanying = group.create_task(_accompany(wan, hosts, directory, clock, happens, listener, total_s))
        await asyncio.wait(loads.values())
        accompanying.cancel()
    return {host: summary for host, load in loads.items() if (summary := load.result()) is not None}


def _write_spec(
    scenario: Scenario,
    happens: Sequence[Event],
    seed: int,
    clock: SharedClock,
    directory: Path,
    events: Path,
    name: str,
) -> Path:
    """What all load processes are told."""
    spec = LoadSpec(
        # What happens was decided by the caller, once: the load only needs to know who publishes what.
        scenario=msgspec.structs.replace(scenario, events=(), mobility=(), random_faults=None),
        run=name,
        seed=seed,
        moves=tuple(event for event in happens if isinstance(event, Move)),
        meeting=str(directory.absolute()),
        clock_offset_ns=clock.offset_ns,
        events=str(events.absolute()),
    )
    path = directory.absolute() / "spec.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(spec)))
    return path


async def _accompany(
    wan: Wan,
    hosts: Sequence[str],
    meeting: Path,
    clock: SharedClock,
    happens: Sequence[Event],
    listener: Listener,
    total_s: float,
) -> None:
    """Name the moment to begin at, let events happen at their time after it, and tell how far it is."""
    start_ns = await start_together(meeting, hosts, clock)
    listener.step(f"{total_s:g} s on the emulated WAN")
    async with asyncio.TaskGroup() as group:
        group.create_task(_advance(listener, clock, start_ns, total_s))
        for event in happens:
            await asyncio.sleep(max(0.0, (start_ns - clock.now_ns()) / 1e9 + event.at_s))
            # Not waited for: a restart takes until the process is ready, and the next event has its own time.
            group.create_task(_apply(wan, event, listener))


async def _apply(wan: Wan, event: Event, listener: Listener) -> None:
    try:
        await wan.apply(event)
    except EmulationError as error:
        listener.note(f"an event of the scenario at {event.at_s:g} s did not happen: {error}")


async def _advance(listener: Listener, clock: SharedClock, start_ns: int, total_s: float) -> None:
    while (passed_s := (clock.now_ns() - start_ns) / 1e9) < total_s:
        listener.advance(max(0.0, passed_s / total_s))
        await asyncio.sleep(0.25)


async def _load(
    wan: Wan, host: str, spec: Path, brokers: list[str], expected_s: float, stop: asyncio.Event
) -> LoadSummary | None:
    """Run the load of one host; None when it was stopped before it could say anything."""
    addresses = [word for broker in brokers for word in ("--address", f"{broker}={{{broker}}}")]
    command = ["python", "-P", "-m", "nearcast.load", str(spec), "--host", host, *addresses]
    signals: asyncio.Queue[Signal] = asyncio.Queue()
    stopping = asyncio.create_task(_stop(stop, signals), name=f"stopping the load on {host}")
    answers, complaints = spec.with_name(f"{host}.json"), spec.with_name(f"{host}.log")
    try:
        with _streams(answers, complaints) as streams:
            async with asyncio.timeout(expected_s + GRACE_S):
                code = await wan.execute(host, command, streams, signals=signals)
    except TimeoutError:
        raise EmulationError(f"the load on {host} did not end {GRACE_S:g} s after the scenario") from None
    finally:
        stopping.cancel()
    try:
        return msgspec.json.decode(answers.read_bytes(), type=LoadSummary)
    except msgspec.DecodeError:
        if stop.is_set():
            return None
        said = (complaints.read_text(errors="replace").strip() or "nothing").rpartition("\n")[2]
        raise EmulationError(f"the load on {host} ended with exit code {code}: {said}") from None


@contextlib.contextmanager
def _streams(answers: Path, complaints: Path) -> Iterator[tuple[int, int, int]]:
    """Nothing to read, and two files to write to."""
    with open(os.devnull, "rb") as nothing, answers.open("wb") as output, complaints.open("wb") as error:
        yield nothing.fileno(), output.fileno(), error.fileno()


async def _stop(stop: asyncio.Event, signals: asyncio.Queue[Signal]) -> None:
    await stop.wait()
    signals.put_nowait("TERM")


def doubts(run: Listener, summaries: dict[str, LoadSummary]) -> None:
    """What makes the figures of load clients questionable."""
    for host, summary in summaries.items():
        if summary.error is not None:
            raise EmulationError(f"the load on {host} failed: {summary.error}")
        if summary.started_late_ms > 0:
            run.note(f"the load on {host} was ready {summary.started_late_ms:.0f} ms late: this machine is slow or busy")
        if summary.late > 0.01 * max(1, summary.sent):
            run.note(f"the load on {host} sent {summary.late} of {summary.sent} messages 10 ms late or later")
        if summary.dropped:
            run.note(f"the load on {host} could not take {summary.dropped} messages in time")

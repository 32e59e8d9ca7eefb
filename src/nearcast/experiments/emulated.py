"""A scenario as real processes on an emulated WAN: its brokers, and a load process on each host that has clients.

Owns the composition that no runtime below knows: which command a broker is, how load processes begin together on one clock,
where their events go. The scenario is the same that the simulator runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from nearcast.emulation.control import Mode
from nearcast.emulation.wan import Wan, WanStatus
from nearcast.errors import EmulationError
from nearcast.experiments.run import Run
from nearcast.load.meeting import PATIENCE_S, start_together
from nearcast.load.spec import LoadSpec, SharedClock, clock_offset_ns
from nearcast.load.tally import LoadSummary
from nearcast.scenario.events import Event
from nearcast.scenario.expansion import expand_brokers, expand_clients, topology_of
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.timeline import timeline
from nearcast.scenario.topology import Process, ReadyCheck, Topology

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


def with_brokers(scenario: Scenario) -> Topology:
    """The scenario's topology with its brokers as processes, ahead of its own."""
    topology = topology_of(scenario)
    brokers = tuple(_broker(broker) for broker in expand_brokers(scenario))
    return msgspec.structs.replace(topology, processes=(*brokers, *topology.processes))


def _broker(broker: Broker) -> Process:
    # On its own host's address: in loopback mode, hosts are addresses of one machine.
    command = ["nearcast", "broker", "--host", f"{{{broker.host}}}", "--port", str(broker.port), "--allow-anonymous"]
    if broker.durable:
        command += ["--data", "{data}", "--sync", "fsync"]
    return Process(
        name=f"{broker.host}-mqtt-{broker.port}",
        host=broker.host,
        command=tuple(command),
        ready=ReadyCheck(port=broker.port),
    )


def run_emulated(run: Run[Any], scenario: Scenario, seed: int, *, events: str, mode: Mode = "auto") -> EmulationResult:
    """Run a scenario (its topology loaded) in real time; ``events`` names the directory of recorded events.

    Its events happen at their time after all processes are ready, within milliseconds of the load's beginning.
    """
    return asyncio.run(_run(run, scenario, seed, events, mode))


async def _run(run: Run[Any], scenario: Scenario, seed: int, events: str, mode: Mode) -> EmulationResult:
    hosts = list(dict.fromkeys(client.host for client in expand_clients(scenario)))
    brokers = sorted({broker.host for broker in expand_brokers(scenario)})
    directory = run.events(events)
    specs = run.directory("load")
    # What happens is decided here, once: the processes of the load only need to know who publishes what.
    happening = timeline(scenario, seed)
    loaded = msgspec.structs.replace(scenario, events=(), mobility=(), random_faults=None)
    # Named by this process, so that two experiments may run at the same time.
    name = f"{scenario.name[:24]}-{os.getpid()}"
    async with Wan.up(with_brokers(scenario), mode=mode, seed=seed, output=run.directory("wan"), name=name) as wan:
        run.step(f"{len(hosts)} load processes begin")
        clock = SharedClock(clock_offset_ns())
        spec = LoadSpec(
            scenario=loaded,
            run=events,
            seed=seed,
            meeting=str(specs.absolute()),
            clock_offset_ns=clock.offset_ns,
            events=str(directory.absolute()),
        )
        path = run.keep("load/spec.json", spec).absolute()
        total_s = scenario.duration_s + scenario.settle_s
        async with asyncio.TaskGroup() as group:
            loads = {host: group.create_task(_load(wan, host, path, brokers, PATIENCE_S + total_s)) for host in hosts}
            start_ns = await start_together(specs, hosts, clock)
            run.step(f"{total_s:g} s on the emulated WAN")
            group.create_task(_happen(wan, happening, clock, start_ns))
            group.create_task(_advance(run, clock, start_ns, total_s))
        status = await wan.status()
    summaries = {host: load.result() for host, load in loads.items()}
    _doubt(run, summaries, status)
    return EmulationResult(mode=status.mode, limits=status.limits, loads=summaries, status=status)


async def _load(wan: Wan, host: str, spec: Path, brokers: list[str], expected_s: float) -> LoadSummary:
    addresses = [word for broker in brokers for word in ("--address", f"{broker}={{{broker}}}")]
    command = ["python", "-P", "-m", "nearcast.load", str(spec), "--host", host, *addresses]
    try:
        completed = await wan.run(host, command, timeout_s=expected_s + GRACE_S)
    except TimeoutError:
        raise EmulationError(f"the load on {host} did not end {GRACE_S:g} s after the scenario") from None
    try:
        return msgspec.json.decode(completed.output, type=LoadSummary)
    except msgspec.DecodeError:
        said = (completed.error.strip() or completed.output.strip() or "nothing").rpartition("\n")[2]
        raise EmulationError(f"the load on {host} ended with exit code {completed.code}: {said}") from None


async def _happen(wan: Wan, events: Sequence[Event], clock: SharedClock, start_ns: int) -> None:
    """The scenario's events, moves and random faults, at their time after the load's beginning."""
    for event in events:
        await asyncio.sleep(max(0.0, (start_ns - clock.now_ns()) / 1e9 + event.at_s))
        await wan.apply(event)


async def _advance(run: Run[Any], clock: SharedClock, start_ns: int, total_s: float) -> None:
    while (passed_s := (clock.now_ns() - start_ns) / 1e9) < total_s:
        run.advance(max(0.0, passed_s / total_s))
        await asyncio.sleep(0.25)


def _doubt(run: Run[Any], summaries: dict[str, LoadSummary], status: WanStatus) -> None:
    """What makes the figures of a run on the WAN questionable."""
    for limit in status.limits:
        run.note(f"{status.mode} mode: {limit}")
    for host, summary in summaries.items():
        if summary.error is not None:
            raise EmulationError(f"the load on {host} failed: {summary.error}")
        if summary.started_late_ms > 0:
            run.note(f"the load on {host} was ready {summary.started_late_ms:.0f} ms late: this machine is slow or busy")
        if summary.late > 0.01 * max(1, summary.sent):
            run.note(f"the load on {host} sent {summary.late} of {summary.sent} messages 10 ms late or later")
        if summary.dropped:
            run.note(f"the load on {host} could not take {summary.dropped} messages in time")
    if status.traffic.dropped:
        run.note(f"the router dropped {status.traffic.dropped} packets for lack of room: do not trust this run")

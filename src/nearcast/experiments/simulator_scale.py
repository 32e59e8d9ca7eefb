"""``simulator-scale``: how many events the simulator handles per second, and in how much memory, with 10,000 nodes that probe
each other (the ready scenario ``probes``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run
from nearcast.experiments.simulated import run_simulated
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.files import load_scenario, resolve
from nearcast.scenario.scenario import Scenario

NODES = 10_000
EVENTS_PER_SECOND = 200_000
MEMORY_GB = 2.0
WAITED = 0.8
"""Below this share of the rate by processor time, others had the core too often not to say so."""


class ScaleParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 10,000 nodes."""

    duration_s: float = 60.0
    """Virtual seconds."""

    period_s: float = 1.0
    """Between two probes of a node."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(0.0 < self.period_s <= 1e6, "period_s", "must be above 0, and at most a million seconds")


class SimulatorScale(Experiment[ScaleParameters]):
    name = "simulator-scale"
    summary = "Events per second and memory of the simulator, with 10,000 nodes probing each other."
    parameters = ScaleParameters
    # All the nodes, for a shorter time: with fewer, the memory bar would say nothing.
    quick: ClassVar[Mapping[str, Any]] = {"duration_s": 10.0}

    def bars(self, parameters: ScaleParameters) -> Sequence[Bar]:
        return [
            at_least("events_per_second", EVENTS_PER_SECOND, "events that one core handles in a second of the clock"),
            at_most("peak_memory_gb", MEMORY_GB, "most memory of the simulator's process, interpreter included"),
        ]

    def check(self, parameters: ScaleParameters) -> None:
        plots.require()
        scaled(parameters)

    def run(self, run: Run[ScaleParameters]) -> None:
        parameters = run.parameters
        scenario = scaled(parameters)
        nodes = len(topology_of(scenario).host_names())
        run.figure("nodes", nodes)
        if nodes < NODES:
            run.note(f"{nodes:,} nodes instead of {NODES:,}: the memory bar is about the full number")
        run.keep("scenario.json", scenario)
        run.step(f"simulating {nodes:,} nodes for {parameters.duration_s:g} s of virtual time")
        result = run_simulated(run, scenario, parameters.seed)
        run.measured("events_per_second", result.events_per_second)
        # What it would be on a machine where nobody else is at work: to be read, not to be held to.
        run.figure("events_per_cpu_second", result.events_per_cpu_second)
        if result.events_per_second < WAITED * result.events_per_cpu_second:
            share = 1.0 - result.events_per_second / result.events_per_cpu_second
            run.note(f"the simulator had no core for {share:.0%} of the time: events per second are fewer accordingly")
        run.measured("peak_memory_gb", round(result.peak_bytes / 1e9, 3))
        run.figure("simulation", result)
        with run.plot("pace", "Pace of the simulator", "virtual time (s)", "events per second") as axes:
            axes.plot([moment_s for moment_s, _ in result.pace], [rate for _, rate in result.pace], label="by the clock")
            axes.axhline(EVENTS_PER_SECOND, color="black", linestyle="--", linewidth=1, label="bar")
            axes.set_ylim(bottom=0.0)


def scaled(parameters: ScaleParameters) -> Scenario:
    """The ready scenario with other numbers of hosts and another duration."""
    ready = load_scenario("probes")
    topology = topology_of(ready)
    before = sum(host.count for host in topology.hosts)
    hosts = tuple(
        msgspec.structs.replace(host, count=max(1, round(host.count * NODES / before * parameters.scale)))
        for host in topology.hosts
    )
    return resolve(
        msgspec.structs.replace(
            ready,
            topology=msgspec.structs.replace(topology, hosts=hosts),
            duration_s=parameters.duration_s,
            settings={**ready.settings, "period_s": parameters.period_s},
        )
    )

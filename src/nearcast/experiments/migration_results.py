"""What came of a run of ``migration``: gaps in streams around each phase, times of migrations, what was lost or repeated.

*Downtime* of a client is its longest time without a message from when topics were asked to move until 2 s after the last one
had, in which clients follow their owner, less its publishing interval. *Per-topic time* is the paper's: from the controller's
order to the answer that it is done. The same gap in the 2 s before a phase, when nothing moves, is what the machine itself
makes of it: the *quiet* one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from nearcast.experiments import plots
from nearcast.experiments.flows import Count, Flows, longest_gap
from nearcast.experiments.migration import (
    AFTER_S,
    MAIN_DISTANCE_MS,
    MAIN_EXECUTORS,
    PREFIX,
    QUIET_S,
    MigrationParameters,
    Phase,
    Setup,
)
from nearcast.experiments.run import Run
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario


class Outcome(NamedTuple):
    """One phase."""

    phase: Phase
    downtimes_ms: list[float]
    """Of watched topics."""

    quiet_ms: list[float]
    times_ms: list[float]
    """From order to answer, of each topic."""


def evaluate(run: Run[MigrationParameters], scenarios: Mapping[str, Scenario], phases: Sequence[Phase]) -> None:
    """Everything, from what was recorded."""
    outcomes: list[Outcome] = []
    counts: dict[str, dict[int, Count]] = {}
    disorder: dict[str, int] = {}
    for label, scenario in scenarios.items():
        start_ns = int((run.folder / "load" / label / "start").read_text())
        last_s = max((phase.until_s for phase in phases if phase.setup == label), default=0.0)
        flows = Flows(run.events(label), scenario, start_ns, last_s + AFTER_S)
        counts[label] = flows.counts()
        disorder[label] = flows.out_of_order()
        watched = [client.name for client in expand_clients(scenario) if client.name.startswith("watched")]
        streams = {name: flows.deliveries(f"{PREFIX}/{name}").received_s for name in watched}
        for phase in (each for each in phases if each.setup == label):
            outcomes.append(_outcome(phase, streams, 1e3 / run.parameters.rate_hz))
    _tell(run, outcomes)
    _tell_delivery(run, counts, disorder)
    _judge(run, outcomes)
    _draw(run, outcomes)


def _outcome(phase: Phase, streams: Mapping[str, np.ndarray], interval_ms: float) -> Outcome:
    downtimes, quiet = [], []
    for received_s in streams.values():
        gap = longest_gap(received_s, phase.from_s, phase.until_s + AFTER_S)
        if gap is not None:
            downtimes.append(max(0.0, gap[1] * 1e3 - interval_ms))
        before = longest_gap(received_s, phase.from_s - QUIET_S, phase.from_s)
        if before is not None:
            quiet.append(max(0.0, before[1] * 1e3 - interval_ms))
    times = [
        (each.ended_at - each.ordered_at) * 1e3
        for each in phase.migrations
        if each.state == "done" and each.ended_at and each.ordered_at
    ]
    return Outcome(phase, downtimes, quiet, times)


def _tell(run: Run[MigrationParameters], outcomes: Sequence[Outcome]) -> None:
    rows: list[list[str | float | None]] = []
    figures = []
    for each in outcomes:
        phase = each.phase
        took_s = phase.until_s - phase.from_s
        workflow, _, executors = phase.setup.partition("-")
        row: list[str | float | None] = [
            workflow,
            int(executors),
            phase.distance_ms,
            len(each.times_ms),
            _median(each.downtimes_ms),
            round(max(each.downtimes_ms), 1) if each.downtimes_ms else None,
            _median(each.quiet_ms),
            _median(each.times_ms),
            round(took_s * 1e3 / max(1, phase.asked), 1),
        ]
        rows.append(row)
        figures.append(
            {
                "workflow": workflow,
                "executors": int(executors),
                "distance_ms": phase.distance_ms,
                "downtimes_ms": each.downtimes_ms,
                "quiet_ms": each.quiet_ms,
                "times_ms": each.times_ms,
                "took_s": took_s,
                "asked": phase.asked,
            }
        )
    run.table(
        "topics moved at once: times in milliseconds",
        [
            "workflow",
            "executors",
            "controller",
            "topics",
            "downtime",
            "longest",
            "quiet",
            "per topic",
            "all/topics",
        ],
        rows,
    )
    run.figure("phases", figures)


def _tell_delivery(
    run: Run[MigrationParameters], counts: Mapping[str, Mapping[int, Count]], disorder: Mapping[str, int]
) -> None:
    rows: list[list[str | int]] = []
    for label, levels in counts.items():
        for qos, count in levels.items():
            if count.published:
                rows.append([label, f"QoS {qos}", *count, disorder[label]])
    run.table("messages", ["", "", "published", "expected", "delivered", "lost", "duplicated", "out of order"], rows)
    own = [label for label in counts if label.startswith("handover")]
    run.measured("lost", sum(count.lost for label in own for count in counts[label].values()))
    run.measured("duplicated", sum(count.duplicated for label in own for count in counts[label].values()))
    run.measured("out_of_order", sum(disorder[label] for label in own))


def _judge(run: Run[MigrationParameters], outcomes: Sequence[Outcome]) -> None:
    main = [each for each in outcomes if each.phase.setup == Setup("handover", MAIN_EXECUTORS).label]
    downtimes = [value for each in main for value in each.downtimes_ms]
    run.measured("median_downtime_ms", _median(downtimes))
    ours = [each for each in outcomes if each.phase.setup.startswith("handover")]
    run.measured("moved", sum(len(each.times_ms) for each in ours))
    run.measured("failed", sum(each.phase.asked - len(each.times_ms) for each in ours))
    if len(run.parameters.distances_ms) > 1 and main:
        nearest = min(main, key=lambda each: each.phase.distance_ms)
        farthest = max(main, key=lambda each: each.phase.distance_ms)
        near, far = _median(nearest.downtimes_ms), _median(farthest.downtimes_ms)
        run.measured("distance_effect_ms", None if near is None or far is None else round(max(0.0, far - near), 1))


def _draw(run: Run[MigrationParameters], outcomes: Sequence[Outcome]) -> None:
    main = {
        "ours, 16 executors": Setup("handover", MAIN_EXECUTORS).label,
        "release, then lookup": Setup("release", 1).label,
    }
    title = f"Client downtime, {run.parameters.topics} topics at once (figure 7a)"
    with run.plot("downtime", title, "controller, one way (ms)", "median downtime (ms)") as axes:
        for number, (label, setup) in enumerate(main.items()):
            own = sorted((each for each in outcomes if each.phase.setup == setup), key=lambda each: each.phase.distance_ms)
            points = [(each.phase.distance_ms, _median(each.downtimes_ms)) for each in own if each.downtimes_ms]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label, color=plots.COLOURS[number])
        axes.set_ylim(bottom=0.0)
    title = f"Time per topic, controller {MAIN_DISTANCE_MS:g} ms away (figure 7b)"
    with run.plot("per-topic", title, "executors", "all topics' time / topics (ms)") as axes:
        for number, workflow in enumerate(("handover", "release")):
            shares = sorted(
                (int(each.phase.setup.partition("-")[2]), (each.phase.until_s - each.phase.from_s) * 1e3 / each.phase.asked)
                for each in outcomes
                if each.phase.setup.startswith(workflow) and each.phase.distance_ms == MAIN_DISTANCE_MS and each.phase.asked
            )
            if shares:
                axes.plot(*zip(*shares, strict=True), marker="o", label=workflow, color=plots.COLOURS[number])
        axes.set_ylim(bottom=0.0)


def _median(values: Sequence[float]) -> float | None:
    return round(float(np.median(values)), 1) if len(values) else None

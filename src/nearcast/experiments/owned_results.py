"""What came of a run with owned topics: how well bounds were kept, how long violations lasted, what was moved; plots.

The definitions are :mod:`nearcast.experiments.bounds`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from nearcast.experiments import plots
from nearcast.experiments.bounds import (
    GRACE_S,
    Kept,
    Recovery,
    Slots,
    Violation,
    kept,
    recoveries,
    share_kept,
    slots,
    violations,
)
from nearcast.experiments.flows import Flows
from nearcast.experiments.owned_runs import MigrationView, Told
from nearcast.experiments.run import Run
from nearcast.scenario.scenario import Scenario

MOST_SHOWN = 20


class Judged(msgspec.Struct, frozen=True, kw_only=True):
    """What is judged."""

    bound_ms: float
    begin_s: float
    """Messages sent before it are not."""

    changes: Mapping[str, Sequence[float]]
    """By topic, when its clients moved or became others, in seconds after the start."""

    change: str
    """What such a moment is called."""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, for an experiment to go on with."""

    question: Judged
    flows: Any
    topics: dict[str, Slots]
    violations: dict[str, list[Violation]]
    lost: int
    end_s: float


def judge(run: Run[Any], scenario: Scenario, told: Told, question: Judged) -> Findings:
    """Figures, tables and the bars ``within_bound_percent``, ``longest_violation_s`` and ``migrations``."""
    run.step("evaluating")
    flows = Flows(run.events(scenario.name), scenario, told.start_ns)
    end_s = scenario.duration_s
    topics: dict[str, Slots] = {}
    found: dict[str, list[Violation]] = {}
    parts: dict[str, Kept] = {}
    recovered: dict[str, list[Recovery]] = {}
    for topic, changes in question.changes.items():
        deliveries = flows.deliveries(topic).sent_between(question.begin_s, end_s)
        topics[topic] = slots(deliveries.sent_s, deliveries.latency_ms)
        found[topic] = violations(topics[topic], question.bound_ms)
        parts[topic] = kept(topics[topic], question.bound_ms, changes)
        recovered[topic] = recoveries(found[topic], [at_s for at_s in changes if at_s >= question.begin_s], end_s)
    in_all, outside = share_kept(list(parts.values()))
    run.measured("within_bound_percent", None if outside is None else round(outside, 3))
    took = [recovery.took_s for each in recovered.values() for recovery in each]
    run.measured("longest_violation_s", round(max(took), 2) if took else None)
    run.figure("within_bound", {"percent_of_all_time": in_all, "percent_outside_grace": outside, "grace_s": GRACE_S})
    run.figure("within_bound_by_topic", {topic: part._asdict() for topic, part in parts.items()})
    run.figure("violations", {topic: [each._asdict() for each in own] for topic, own in found.items() if own})
    run.figure("recoveries_s", {topic: [list(each) for each in own] for topic, own in recovered.items() if own})
    _tell_violations(run, question, found, took)
    tell_migrations(run, told)
    lost = _tell_delivery(run, flows)
    return Findings(question=question, flows=flows, topics=topics, violations=found, lost=lost, end_s=end_s)


def _tell_violations(run: Run[Any], question: Judged, found: Mapping[str, Sequence[Violation]], took: Sequence[float]) -> None:
    each = sorted(((topic, one) for topic, own in found.items() for one in own), key=lambda entry: -entry[1].length_s)
    lengths = np.array([one.length_s for _, one in each])
    if took:
        values = np.array(took)
        run.table(
            f"violations after a {question.change}",
            ["", "changes", "without violation", "median (s)", "p90 (s)", "longest (s)"],
            [
                [
                    question.change,
                    len(values),
                    int((values == 0).sum()),
                    round(float(np.median(values)), 2),
                    round(float(np.quantile(values, 0.9)), 2),
                    round(float(values.max()), 2),
                ]
            ],
        )
    run.figure("violation_lengths_s", {"count": len(lengths), "total": float(lengths.sum()) if len(lengths) else 0.0})
    rows: list[list[str | float]] = [
        [topic, round(one.begin_s, 1), round(one.length_s, 1), round(one.worst_ms, 1)] for topic, one in each[:MOST_SHOWN]
    ]
    if rows:
        run.table("the longest violations", ["topic", "from (s)", "for (s)", "worst (ms)"], rows)


def tell_migrations(run: Run[Any], told: Told) -> None:
    """What the controller moved, and the bar ``migrations``."""
    start = told.start_ns / 1e9
    own = [each for each in told.migrations if each.created_at >= start]
    run.figure(
        "migrations",
        [{**msgspec.to_builtins(each), "at_s": round((each.ordered_at or each.created_at) - start, 3)} for each in own],
    )
    run.figure("owners_at_the_end", told.owners)
    done = [each for each in own if each.state == "done"]
    run.measured("migrations", len(done))
    kinds: dict[tuple[str, str], list[MigrationView]] = {}
    for each in own:
        kinds.setdefault((each.kind, each.state), []).append(each)
    rows: list[list[str | float | None]] = []
    for (kind, state), entries in sorted(kinds.items()):
        times = [each.duration_ms for each in entries if each.duration_ms]
        rows.append([kind, state, len(entries), round(float(np.median(times)), 1) if times else None])
    if rows:
        run.table("migrations", ["why", "outcome", "count", "median time (ms)"], rows)


def _tell_delivery(run: Run[Any], flows: Flows) -> int:
    counts = flows.counts()
    run.figure("delivery", {f"qos_{qos}": count._asdict() for qos, count in counts.items()})
    run.figure("skipped", flows.skipped)
    run.figure("out_of_order", flows.out_of_order())
    rows: list[list[str | int]] = [[f"QoS {qos}", *count] for qos, count in counts.items() if count.published]
    if any(count.expected for count in counts.values()):  # subscriptions that change are an experiment's own to count
        run.table("messages", ["", "published", "expected", "delivered", "lost", "duplicated"], rows)
    lost = sum(count.lost for count in counts.values())
    losses = flows.losses()
    if losses:
        run.figure("first_losses", [loss._asdict() for loss in losses])
        first = losses[0]
        run.note(
            f"the first loss: what {first.publisher} sent after {first.sent_s:.3f} s, to {first.subscriber} (QoS {first.qos})"
        )
    return lost


def draw_topics(run: Run[Any], findings: Findings, name: str, title: str, topics: Mapping[str, str]) -> None:
    """The slowest delivery of each slot, over time, of some topics, with their changes and the bound."""
    question = findings.question
    with run.plot(name, title, "time (s)", "latency (ms)") as axes:
        for number, (label, topic) in enumerate(topics.items()):
            found = findings.topics[topic]
            colour = plots.COLOURS[number % len(plots.COLOURS)]
            dashes = "-" if number < len(plots.COLOURS) else "--"
            axes.plot(found.begin_s, found.worst_ms, label=label, linewidth=0.9, color=colour, linestyle=dashes)
            for at_s in question.changes[topic]:
                axes.axvline(at_s, linestyle=":", color=colour, linewidth=0.6)
        axes.axhline(question.bound_ms, linestyle="--", color="#444444", linewidth=1.0, label="bound")
        axes.set_ylim(bottom=0.0, top=max(4 * question.bound_ms, 1.0))

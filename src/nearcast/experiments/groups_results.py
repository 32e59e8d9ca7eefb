"""What came of the sweep of ``groups``: figures, tables, plots and bars out of its rows.

Owns the definitions. *Operations* are leader joins and member joins; *messages, as the paper counts* are three for each leader
join, a notification for each member that was told to follow, and one for each member join that came of it (section IV-A).
*All messages* is what brokers did send: answers that refused, views, renewals too. Over several seeds, figures are means.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from nearcast.experiments.groups_reference import NOTIFICATIONS_PER_MEMBER_JOIN, REFERENCE
from nearcast.experiments.run import Run

if TYPE_CHECKING:
    from nearcast.experiments.groups import GroupsParameters

MOST_FAILURES_SHOWN = 5
MOST_LINES = 6
"""In one plot."""

LABELS_APART_PERCENT = 4.0

FROM_MS, TO_MS = 10.0, 100.0
"""Thresholds between which groups fall like a power of the threshold: above, a handful is left."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A row of the sweep's results, as far as it is read here."""

    brokers: int
    threshold_ms: float
    seed: int
    seconds: float
    error_type: str | None = None
    error_message: str | None = None
    groups: float | None = None
    largest_group: float | None = None
    stable_s: float | None = None
    leader_joins: float | None = None
    member_joins: float | None = None
    notifications: float | None = None
    paper_messages: float | None = None
    messages: float | None = None
    megabytes: float | None = None
    excess_share: float | None = None
    delivery_mean_ms: float | None = None
    delivery_median_ms: float | None = None
    delivered_in_group: float | None = None


class Told:
    """Who Spark's job tells how far it is: the run of the experiment."""

    def __init__(self, run: Run[Any]) -> None:
        self._run = run

    def step(self, text: str) -> None:
        self._run.step(text)

    def advance(self, share: float) -> None:
        self._run.advance(share)

    def note(self, text: str) -> None:
        self._run.note(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """The job's own summary: ours says more."""


def read_rows(path: Path) -> list[Row]:
    """The results of the sweep."""
    import pyarrow.parquet as pq

    return msgspec.convert(pq.read_table(path).to_pylist(), list[Row], strict=False)


class Results:
    """Means over the seeds, by brokers and threshold."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.good = [row for row in rows if row.error_type is None]
        self.failed = [row for row in rows if row.error_type is not None]
        self.counts = sorted({row.brokers for row in self.good})
        self.thresholds_ms = sorted({row.threshold_ms for row in self.good})
        self._by_point: dict[tuple[int, float], list[Row]] = {}
        for row in self.good:
            self._by_point.setdefault((row.brokers, row.threshold_ms), []).append(row)

    def mean(self, name: str, brokers: int, threshold_ms: float) -> float | None:
        """Of a figure; None where there is no run."""
        values = [
            value for row in self._by_point.get((brokers, threshold_ms), ()) if (value := getattr(row, name)) is not None
        ]
        return sum(values) / len(values) if values else None

    def operations(self, brokers: int, threshold_ms: float) -> float | None:
        """Leader joins and member joins."""
        joins = [self.mean(name, brokers, threshold_ms) for name in ("leader_joins", "member_joins")]
        return None if joins[0] is None or joins[1] is None else joins[0] + joins[1]

    def paper_messages(self, brokers: int, threshold_ms: float) -> float | None:
        return self.mean("paper_messages", brokers, threshold_ms)

    def over_brokers(
        self, figure: Callable[[int, float], float | None], threshold_ms: float
    ) -> tuple[list[float], list[float]]:
        """The numbers of brokers, and a figure for each."""
        found = [(float(count), value) for count in self.counts if (value := figure(count, threshold_ms)) is not None]
        return [count for count, _ in found], [value for _, value in found]


def evaluate(run: Run[GroupsParameters], rows: Sequence[Row], measured: set[str]) -> None:
    """Measure everything. ``measured``: the names of the bars that there are."""
    results = Results(rows)
    run.figure("runs", [msgspec.to_builtins(row) for row in rows])
    run.measured("runs", len(results.good))
    for row in results.failed[:MOST_FAILURES_SHOWN]:
        point = f"{row.brokers:,} brokers at {row.threshold_ms:g} ms, seed {row.seed}"
        run.note(f"{point}, failed: {row.error_type}: {row.error_message}")
    if not results.good:
        return
    run.figure("computing_s", round(sum(row.seconds for row in rows), 1))
    run.figure("slowest_run_s", round(max(row.seconds for row in rows), 1))
    _linearity(run, results, measured)
    ratios = [
        row.notifications / row.member_joins for row in results.good if row.member_joins and row.notifications is not None
    ]
    run.figure("notifications_per_member_join", {"ours": ratios, "paper_median": NOTIFICATIONS_PER_MEMBER_JOIN})
    if ratios and "notifications_per_member_join" in measured:
        run.measured("notifications_per_member_join", round(float(np.median(ratios)), 4))
    _exponent(run, results, measured)
    _against_reference(run, results, measured)
    _by_threshold(run, results)
    _draw(run, results)


def straight_line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """Slope, intercept, and r² of the line of least squares; r² is 1 where there is nothing to explain."""
    slope, intercept = np.polyfit(x, y, 1).tolist()
    total = float(np.sum((np.asarray(y) - np.mean(y)) ** 2))
    left = float(np.sum((np.asarray(y) - (slope * np.asarray(x) + intercept)) ** 2))
    return slope, intercept, 1.0 if total == 0.0 else 1.0 - left / total


def exponent(x: Sequence[float], y: Sequence[float]) -> float | None:
    """The power of x that y grows with; None where there is nothing that grows."""
    return straight_line(np.log(x).tolist(), np.log(y).tolist())[0] if len(x) > 1 and all(y) else None


def _linearity(run: Run[GroupsParameters], results: Results, measured: set[str]) -> None:
    if "operations_linear_r2" not in measured:
        return
    rows: list[list[str | float | None]] = []
    operations_r2, messages_r2, power = [], [], None
    for threshold_ms in results.thresholds_ms:
        counts, operations = results.over_brokers(results.operations, threshold_ms)
        _, messages = results.over_brokers(results.paper_messages, threshold_ms)
        if len(operations) < 3 or len(messages) < len(operations):
            continue
        each, _, r2 = straight_line(counts, operations)
        message_each, _, message_r2 = straight_line(counts, messages)
        power = exponent(counts, operations)
        operations_r2.append(round(r2, 4))
        messages_r2.append(round(message_r2, 4))
        shown = None if power is None else round(power, 2)
        rows.append([threshold_ms, round(each, 2), operations_r2[-1], shown, round(message_each, 2), messages_r2[-1]])
    run.table(
        "What one more broker costs: the slope over the number of brokers",
        ["ms", "operations", "r²", "exponent", "messages, as the paper counts", "r²"],
        rows,
    )
    if rows:
        run.measured("operations_linear_r2", min(operations_r2))
        run.measured("messages_linear_r2", min(messages_r2))
    if power is not None and "operations_exponent" in measured:
        run.measured("operations_exponent", round(power, 3))


def _exponent(run: Run[GroupsParameters], results: Results, measured: set[str]) -> None:
    most = results.counts[-1]
    thresholds_ms = [each for each in results.thresholds_ms if FROM_MS <= each <= TO_MS]
    power = exponent(thresholds_ms, [results.mean("groups", most, each) or 0.0 for each in thresholds_ms])
    if power is not None and "groups_exponent" in measured:
        run.measured("groups_exponent", round(power, 3))


def _against_reference(run: Run[GroupsParameters], results: Results, measured: set[str]) -> None:
    lines: list[list[str | float | None]] = []
    factors = []
    for theirs in REFERENCE:
        groups = results.mean("groups", theirs.brokers, theirs.threshold_ms)
        if groups is None:
            continue
        factors.append(max(groups / theirs.groups, theirs.groups / groups))
        line: list[str | float | None] = [theirs.brokers, theirs.threshold_ms]
        for name in ("groups", "leader_joins", "member_joins", "notifications"):
            line += [results.mean(name, theirs.brokers, theirs.threshold_ms), getattr(theirs, name)]
        lines.append(line)
    if not lines or run.parameters.fibre:
        return
    names = [name for ours in ("groups", "leader joins", "member joins", "notices") for name in (ours, "theirs")]
    run.table("Beside the stored runs of the paper's simulation, on other cities", ["brokers", "ms", *names], lines)
    if "reference_factor" in measured:
        run.measured("reference_factor", round(max(factors), 3))


def _by_threshold(run: Run[GroupsParameters], results: Results) -> None:
    most = results.counts[-1]
    lines: list[list[str | float | None]] = []
    for threshold_ms in results.thresholds_ms:

        def of(name: str, digits: int = 0, share: float = 1.0, threshold_ms: float = threshold_ms) -> float | None:
            value = results.mean(name, most, threshold_ms)
            return None if value is None else round(value * share, digits or None)

        member_joins, notifications = of("member_joins"), of("notifications")
        lines.append(
            [
                threshold_ms,
                of("groups"),
                of("largest_group"),
                of("stable_s", 1),
                of("paper_messages", 1, 1.0 / most),
                of("messages", 1, 1.0 / most),
                of("megabytes", 1, 1e3 / most),
                round(notifications / member_joins, 3) if member_joins and notifications is not None else None,
                of("excess_share", 1, 100.0),
                of("delivery_median_ms", 1),
                of("delivery_mean_ms", 1),
            ]
        )
    run.table(
        f"{most:,} brokers: groups by threshold, messages per broker until stable, then the workload's excess and latency",
        [
            "ms",
            "groups",
            "largest",
            "stable s",
            "paper's msgs",
            "all msgs",
            "kB",
            "notices/join",
            "excess %",
            "median",
            "mean ms",
        ],
        lines,
    )


def _draw(run: Run[GroupsParameters], results: Results) -> None:
    counts, thresholds_ms = _some(results.counts), _some([each for each in results.thresholds_ms if each > 0])
    with run.plot("groups-by-threshold", "Groups by threshold", "threshold, one way (ms)", "groups") as axes:
        for count in counts:
            points = [(each, results.mean("groups", count, each)) for each in results.thresholds_ms if each > 0]
            axes.loglog(*_columns(points), "o-", markersize=3, label=f"{count:,} brokers")
        theirs = [(each.threshold_ms, float(each.groups)) for each in REFERENCE if each.brokers in results.counts]
        if theirs and not run.parameters.fibre:
            axes.loglog(*_columns(theirs), "kx", label="the paper's simulation")
    for name, title, figure in (
        ("groups-by-brokers", "Groups", lambda count, each: results.mean("groups", count, each)),
        ("operations", "Leader and member joins", results.operations),
        ("messages", "Messages, as the paper counts", results.paper_messages),
        ("stable", "Time until nobody changes groups any more (s)", lambda count, each: results.mean("stable_s", count, each)),
    ):
        with run.plot(name, f"{title} by number of brokers", "brokers", title) as axes:
            for each in thresholds_ms:
                axes.plot(*results.over_brokers(figure, each), "o-", markersize=3, label=f"{each:g} ms")
            axes.set_ylim(bottom=0.0)
    most = results.counts[-1]
    with run.plot(
        "tradeoff", f"Latency against excess data, {most:,} brokers", "excess data (%)", "mean latency (ms)"
    ) as axes:
        points = [
            (100.0 * (results.mean("excess_share", most, each) or 0.0), results.mean("delivery_mean_ms", most, each))
            for each in results.thresholds_ms
        ]
        axes.plot(*_columns(points), "o-", markersize=4)
        last = -math.inf
        for each, (excess, latency_ms) in zip(results.thresholds_ms, points, strict=True):
            # Large thresholds are alike, and their labels would lie on each other.
            if latency_ms is not None and excess - last >= LABELS_APART_PERCENT:
                axes.annotate(f"{each:g} ms", (excess, latency_ms), textcoords="offset points", xytext=(5, 5))
                last = excess
        axes.set_ylim(bottom=0.0)


def _columns(points: Sequence[tuple[float, float | None]]) -> tuple[list[float], list[float]]:
    known = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _some(values: Sequence[Any]) -> list[Any]:
    """Not more of them than a plot has room for: the first, the last, and others in between."""
    if len(values) <= MOST_LINES:
        return list(values)
    return [values[round(position * (len(values) - 1) / (MOST_LINES - 1))] for position in range(MOST_LINES)]

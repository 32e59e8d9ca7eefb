"""The table that a comparison prints: medians, ratios to the baseline, and verdicts against bars and goals."""

from __future__ import annotations

from statistics import median
from typing import Any

import msgspec
from rich import box
from rich.table import Table
from rich.text import Text

from nearcast.bench.brokers import BASELINE
from nearcast.bench.comparison import Comparison
from nearcast.bench.scenarios import Direction, Figure, Sample, Scenario

OURS = "nearcast"
DURABLE = "nearcast --data"
CURVE_BAR = 1.5
"""Growth of the CPU cost per message from the fewest to the most subscriptions that still counts as independent of them: a
hundred times the subscriptions are a hundred times the memory, and caches do notice."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure of one broker."""

    scenario: str
    title: str
    unit: str
    broker: str
    value: float
    low: float
    high: float
    ratio: float | None
    cpu_us: float | None
    lost: int
    duplicates: int
    order_violations: int
    unexpected: int
    bar: str
    verdict: str


def _median(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _verdict(broker: str, figure: Figure, value: float, ratio: float | None, samples: list[Sample]) -> str:
    if broker not in (OURS, DURABLE):
        return ""
    if any(each.lost or each.duplicates or each.order_violations or each.unexpected for each in samples):
        return "wrong"
    measured = value if figure.absolute else ratio
    if figure.bar is None or measured is None or broker != OURS:
        return ""
    if figure.goal is not None and figure.meets(measured, figure.goal):
        return "goal"
    return "bar" if figure.meets(measured, figure.bar) else "below"


def _bar_text(figure: Figure) -> str:
    if figure.bar is None:
        return ""
    sign = "≥" if figure.better is Direction.HIGHER else "≤"
    if figure.absolute:
        return f"{sign} {figure.bar:g} {figure.unit}"
    goal = "" if figure.goal is None else f" ({'< 1×' if figure.goal == 0.999 else f'{figure.goal:g}×'})"
    return f"{sign} {figure.bar:g}×{goal}"


def _cost_text(broker: str, value: float, in_memory: float | None) -> str:
    """What persistence costs: the bars are for the broker without it."""
    if broker != DURABLE or not in_memory:
        return ""
    return f"{value / in_memory:.2f}× {OURS}"


def make_rows(comparison: Comparison, scenarios: list[Scenario]) -> list[Row]:
    """Medians over the rounds, in the order of scenarios and brokers."""
    rows = []
    for scenario in scenarios:
        baseline = comparison.samples(scenario.name, BASELINE)
        for figure in scenario.figures:
            reference = _median([each.figures[figure.key] for each in baseline])
            in_memory = _median([each.figures[figure.key] for each in comparison.samples(scenario.name, OURS)])
            for broker in comparison.brokers:
                samples = comparison.samples(scenario.name, broker)
                if not samples:
                    continue
                values = [each.figures[figure.key] for each in samples]
                value = median(values)
                ratio = value / reference if reference and broker != BASELINE else None
                several = len(scenario.figures) > 1
                rows.append(
                    Row(
                        scenario=scenario.name,
                        title=f"{scenario.title}, {figure.title}" if several else scenario.title,
                        unit=figure.unit,
                        broker=broker,
                        value=value,
                        low=min(values),
                        high=max(values),
                        ratio=ratio,
                        cpu_us=_median([each.cpu_us for each in samples]),
                        lost=sum(each.lost for each in samples),
                        duplicates=sum(each.duplicates for each in samples),
                        order_violations=sum(each.order_violations for each in samples),
                        unexpected=sum(each.unexpected for each in samples),
                        bar=_bar_text(figure) if broker == OURS else _cost_text(broker, value, in_memory),
                        verdict=_verdict(broker, figure, value, ratio, samples),
                    )
                )
    return rows + _curve_rows(comparison, scenarios)


def _curve_rows(comparison: Comparison, scenarios: list[Scenario]) -> list[Row]:
    """How the CPU cost per message grows with the subscriptions: the most against the fewest."""
    curve = sorted((each for each in scenarios if each.subscriptions), key=lambda each: each.subscriptions)
    if len(curve) < 2:
        return []
    few, many = curve[0], curve[-1]
    rows = []
    for broker in comparison.brokers:
        small = _median([each.cpu_us for each in comparison.samples(few.name, broker)])
        large = _median([each.cpu_us for each in comparison.samples(many.name, broker)])
        if not small or large is None:
            continue
        growth = large / small
        judged = broker == OURS
        rows.append(
            Row(
                scenario="subscriptions-growth",
                title=f"CPU per message, {many.subscriptions:,} against {few.subscriptions:,} subscriptions",
                unit="×",
                broker=broker,
                value=growth,
                low=growth,
                high=growth,
                ratio=None,
                cpu_us=None,
                lost=0,
                duplicates=0,
                order_violations=0,
                unexpected=0,
                bar=f"≤ {CURVE_BAR:g}" if judged else "",
                verdict=("bar" if growth <= CURVE_BAR else "below") if judged else "",
            )
        )
    return rows


def make_notes(comparison: Comparison) -> list[str]:
    """What a reader must know before believing the table."""
    notes = []
    stolen = [each.stolen_share for each in comparison.measurements]
    if stolen and max(stolen) > _BUSY_SHARE:
        notes.append(
            f"the hypervisor kept {median(stolen):.0%} of this machine for others (up to {max(stolen):.0%} in a measurement): "
            "a rate or a latency may be its, not the broker's; measure again in a quieter hour"
        )
    waits = [each.sample.wait_share for each in comparison.measurements if each.sample.wait_share is not None]
    if waits and median(waits) > _BUSY_SHARE:
        notes.append(f"other processes took {median(waits):.0%} of a core from the brokers: trust ratios and CPU, not rates")
    for scenario in dict.fromkeys(each.scenario for each in comparison.measurements):
        for broker in comparison.brokers:
            idle = _median([each.generator_idle for each in comparison.samples(scenario, broker)])
            if idle is not None and idle < _TIRED_SHARE:
                notes.append(
                    f"{scenario}: the generator was busy all the time against {broker}, which may be faster than shown"
                )
    return notes


_BUSY_SHARE = 0.05
_TIRED_SHARE = 0.05
_STYLES = {"goal": "bold green", "bar": "green", "below": "bold red", "wrong": "bold red", "": ""}
_WORDS = {"goal": "goal met", "bar": "bar met", "below": "below bar", "wrong": "wrong", "": ""}


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


_WIDE_COLUMNS = 110


def make_table(rows: list[Row], columns: int = _WIDE_COLUMNS) -> Table:
    """The table for a terminal of so many columns; a narrow one does without the bars, the verdicts say enough."""
    table = Table(
        box=box.SIMPLE_HEAD, title=f"Medians, × {BASELINE}, lost/duplicated/out of order", title_justify="left", pad_edge=False
    )
    table.add_column("scenario", min_width=18, overflow="fold")
    table.add_column("broker", no_wrap=True)
    table.add_column("median", justify="right", no_wrap=True)
    table.add_column("×", justify="right", no_wrap=True)
    table.add_column("CPU µs", justify="right", no_wrap=True)
    table.add_column("l/d/o", justify="right", no_wrap=True)
    if columns >= _WIDE_COLUMNS:
        table.add_column("bar (goal)", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    previous = ""
    for index, row in enumerate(rows):
        last = index + 1 == len(rows) or rows[index + 1].title != row.title
        wrong = row.lost or row.duplicates or row.order_violations
        table.add_row(
            row.title if row.title != previous else "",
            row.broker,
            f"{_number(row.value)} {row.unit}",
            "" if row.ratio is None else f"{row.ratio:.2f}",
            "" if row.cpu_us is None else f"{row.cpu_us:.2f}",
            Text(f"{row.lost}/{row.duplicates}/{row.order_violations}", style="bold red" if wrong else "dim"),
            *([row.bar] if columns >= _WIDE_COLUMNS else []),
            Text(_WORDS[row.verdict], style=_STYLES[row.verdict]),
            end_section=last,
        )
        previous = row.title
    return table


def to_summary(rows: list[Row]) -> list[dict[str, Any]]:
    return [msgspec.to_builtins(row) for row in rows]

"""The figures of an evaluation that fit on a page: what ``summary.json`` holds, ``--json`` prints and the report draws.

Only what is bounded is in it: a row for each run, broker and piece of time, and the worst of the rest.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any

import numpy as np

from nearcast import __version__
from nearcast.pipeline.evaluation.histograms import RELATIVE_ERROR
from nearcast.pipeline.evaluation.judging import CAUSES
from nearcast.pipeline.evaluation.tables import worst

if TYPE_CHECKING:
    from nearcast.pipeline.evaluation.evaluation import Evaluation

WORST = 15
"""Rows of lists of the worst, for each run."""

MAX_SLOTS = 600
MAX_PAIRS = 40 * 40
MAX_BROKERS = 200
CDF_POINTS = 400

LATE_TO_SEND_WORTH_SAYING = 0.01


def summarise(evaluation: Evaluation) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    small = evaluation.small
    runs = _rows(small["runs"])
    notes = [*evaluation.notes, *_notes(evaluation, runs)]
    passes = evaluation.passes
    bounds = [
        {"filter": bound.filter, "bound_ms": bound.bound_ns / 1e6} | ({} if bound.run is None else {"run": bound.run})
        for bound in passes.bounds
    ]
    return {
        "version": 1,
        "nearcast": __version__,
        "events": evaluation.inputs.rows,
        "relative_error": RELATIVE_ERROR,
        "bounds": bounds,
        "settle_s": evaluation.options.settle_ns / 1e9,
        "bucket_s": passes.slot_ns / 1e9,
        "notes": notes,
        "runs": [run | _identity(evaluation, run["run"]) for run in runs],
        "histogram": _rows(small["histogram"]),
        "timeline": _first(small["timeline"], MAX_SLOTS),
        "worst_topics": _plains(worst(map(_ranked, evaluation.parts("topics")), ["violation_ratio", "p99_ms"], WORST)),
        "site_pairs": _first(small["site_pairs"], MAX_PAIRS) if "site_pairs" in small else [],
        "longest_episodes": _plains(worst(evaluation.parts("episodes"), ["duration_ms"], WORST)),
        "most_losses": _plains(worst(map(_lossy, evaluation.parts("flows")), ["lost"], WORST)),
        "brokers": _first(small["brokers"], MAX_BROKERS),
        "longest_outages": _plains(worst(iter([small["downtime"]]), ["downtime_ms"], WORST)),
        "downtime_distribution": _shares(small["downtime"], "downtime_ms"),
        "until_delivery_distribution": _shares(small["downtime"], "until_delivery_ms"),
        "refusals": _plains(worst(iter([small["refusals"]]), ["events"], WORST)),
    }


def _lossy(flows: Any) -> Any:
    """The flows with losses."""
    names = ["run", "publisher", "subscriber", "topic", "expected", "lost", *(f"lost_{cause}" for cause in CAUSES)]
    return flows.select(names).filter(np.asarray(flows["lost"]) > 0)


def _ranked(topics: Any) -> Any:
    """A topic without a bound violates none."""
    place = topics.column_names.index("violation_ratio")
    return topics.set_column(place, "violation_ratio", topics["violation_ratio"].fill_null(0.0))


def _identity(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Who the run was, as its folder tells it."""
    for run in evaluation.inputs.runs:
        if run.name == name:
            folder = run.folder
            return {
                "recorded_as": run.recorded,
                "events": run.rows,
                "files": len(run.files),
                "links": _links(evaluation).get(name, ""),
                "folder": None if folder is None else str(folder.path),
                "command": "" if folder is None else folder.command,
                "scenario": None if folder is None or folder.scenario is None else folder.scenario.name,
            }
    return {}


def _links(evaluation: Evaluation) -> dict[str, str]:
    return {run.name: "linked" if run.linked else "separate" for run in evaluation.passes.runs}


def _notes(evaluation: Evaluation, runs: list[dict[str, Any]]) -> list[str]:
    """What qualifies the figures."""
    found = []
    for recorded in evaluation.inputs.runs:
        if recorded.folder is not None and not recorded.folder.complete:
            found.append(f"{recorded.name}: this run was not complete: what was on its way when it ended counts as lost")
    for run in runs:
        name = run["run"]
        if not run["published"] and run["delivered"]:
            found.append(f"{name}: nothing was recorded as published: losses cannot be told")
        if run["published"] and not run["expected"]:
            found.append(f"{name}: nobody was recorded as subscribed to what was published: losses cannot be told")
        if run["unexpected"]:
            found.append(
                f"{name}: {run['unexpected']:,} deliveries to clients that were not recorded as subscribed, or of messages "
                "that were not recorded as published"
            )
        if run["late_to_send"] > LATE_TO_SEND_WORTH_SAYING * max(1, run["published"]):
            found.append(f"{name}: {run['late_to_send']:,} of {run['published']:,} messages were sent 10 ms late or later")
        if run["min_ms"] is not None and run["min_ms"] < 0:
            found.append(f"{name}: messages arrived up to {-run['min_ms']:.3f} ms before they were sent: clocks disagree")
        if _links(evaluation).get(name) == "separate" and evaluation.options.links == "auto" and run["expected"]:
            found.append(
                f"{name}: no message went from one broker to another: only subscribers at the publisher's are expected"
            )
    return found


def _first(table: Any, rows: int) -> list[dict[str, Any]]:
    """The first rows of each run."""
    seen: Counter[str] = Counter()
    found = []
    for row in table.to_pylist():
        seen[row["run"]] += 1
        if seen[row["run"]] <= rows:
            found.append(row)
    return _plains(found)


def _shares(table: Any, column: str) -> list[dict[str, Any]]:
    """A distribution as the values at 101 shares."""
    values: dict[str, list[float]] = defaultdict(list)
    for row in table.select(["run", column]).to_pylist():
        if row[column] is not None:
            values[row["run"]].append(row[column])
    return [
        {"run": run, "values_ms": [_plain(float(value)) for value in np.percentile(each, range(101))]}
        for run, each in sorted(values.items())
    ]


def _rows(table: Any) -> list[dict[str, Any]]:
    return _plains(table.to_pylist())


def _plains(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in row.items()} for row in rows]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value

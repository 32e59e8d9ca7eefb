"""The figures of an evaluation that fit on a page: what ``summary.json`` holds, ``--json`` prints and the report draws.

Only what is bounded leaves Spark: a row for each run, broker and piece of time, and the worst of the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

from nearcast import __version__
from nearcast.pipeline.evaluation.histograms import RELATIVE_ERROR

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

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
    tables = evaluation.tables
    runs = _rows(tables["runs"].orderBy("run"))
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
        "histogram": _rows(tables["histogram"].orderBy("run", "bucket")),
        "timeline": _rows(_first(tables["timeline"], "at_s", MAX_SLOTS).orderBy("run", "at_s")),
        "worst_topics": _rows(_worst(tables["topics"], F.coalesce("violation_ratio", F.lit(0.0)), F.col("p99_ms"))),
        "site_pairs": _rows(_first(tables["site_pairs"], "publisher_site", MAX_PAIRS)) if "site_pairs" in tables else [],
        "longest_episodes": _rows(_worst(tables["episodes"], F.col("duration_ms"))),
        "most_losses": _rows(
            _worst(tables["flows"].where(F.col("lost") > 0), F.col("lost")).select(
                "run", "publisher", "subscriber", "topic", "expected", "lost", *_causes(tables["flows"])
            )
        ),
        "brokers": _rows(_first(tables["brokers"], "broker", MAX_BROKERS).orderBy("run", "broker")),
        "longest_outages": _rows(_worst(tables["downtime"], F.col("downtime_ms"))),
        "downtime_distribution": _shares(tables["downtime"], "downtime_ms"),
        "until_delivery_distribution": _shares(tables["downtime"], "until_delivery_ms"),
        "refusals": _rows(_worst(tables["refusals"], F.col("events"))),
    }


def _causes(flows: DataFrame) -> list[str]:
    return [name for name in flows.columns if name.startswith("lost_")]


def _identity(evaluation: Evaluation, name: str) -> dict[str, Any]:
    """Who the run was, as its folder tells it."""
    for run in evaluation.inputs.runs:
        if run.name == name:
            folder = run.folder
            return {
                "recorded_as": run.recorded,
                "events": run.rows,
                "files": len(run.files),
                "links": evaluation.passes.links.get(name, ""),
                "folder": None if folder is None else str(folder.path),
                "command": "" if folder is None else folder.command,
                "scenario": None if folder is None or folder.scenario is None else folder.scenario.name,
            }
    return {}


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
        if evaluation.passes.links.get(name) == "separate" and evaluation.options.links == "auto" and run["expected"]:
            found.append(
                f"{name}: no message went from one broker to another: only subscribers at the publisher's are expected"
            )
    return found


def _worst(table: DataFrame, *by: Any) -> DataFrame:
    order = Window.partitionBy("run").orderBy(*(each.desc_nulls_last() for each in by))
    return (
        table.withColumn("_place", F.row_number().over(order))
        .where(F.col("_place") <= WORST)
        .orderBy("run", "_place")
        .drop("_place")
    )


def _first(table: DataFrame, by: str, rows: int) -> DataFrame:
    order = Window.partitionBy("run").orderBy(by)
    return table.withColumn("_place", F.row_number().over(order)).where(F.col("_place") <= rows).drop("_place")


def _shares(table: DataFrame, column: str) -> list[dict[str, Any]]:
    """A distribution as the values at 101 shares."""
    steps = F.array(*(F.lit(step / 100) for step in range(101)))
    found = table.where(F.col(column).isNotNull()).groupBy("run").agg(F.percentile(column, steps).alias("values"))
    return [
        {"run": row.run, "values_ms": [_plain(value) for value in row["values"]]} for row in found.orderBy("run").collect()
    ]


def _rows(table: DataFrame) -> list[dict[str, Any]]:
    return [{key: _plain(value) for key, value in row.asDict().items()} for row in table.collect()]


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value

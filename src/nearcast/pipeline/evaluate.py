"""A recorded run's latencies, losses, violations; a report.

Reads recorded message events (docs/reference/recording.md) and leaves Parquet tables, ``summary.json`` and ``report.html``.
docs/guides/evaluating.md defines every figure. The work is :mod:`nearcast.pipeline.evaluation`'s.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from nearcast.errors import ConfigError, StorageUnavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from nearcast.pipeline.evaluation import EvaluationOptions
    from nearcast.pipeline.progress import Progress

SUMMARY, REPORT = "summary.json", "report.html"


class Options(msgspec.Struct, frozen=True, kw_only=True):
    paths: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="Folders of runs, or directories or files of recorded events. Several runs are compared.",
            extra={"argument": True, "metavar": "FOLDER..."},
        ),
    ]
    out: Annotated[
        str,
        msgspec.Meta(
            description="Directory for the tables, summary.json and report.html.", extra={"metavar": "DIR", "short": "o"}
        ),
    ]
    bound: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="How long a delivery may take: `50ms` for every topic, or `FILTER=20ms`. Repeatable; the first that "
            "matches counts. Bounds of the scenario hold for the topics that none matches.",
            extra={"metavar": "BOUND"},
        ),
    ] = ()
    sites: Annotated[
        str | None,
        msgspec.Meta(
            description="Where clients are: CSV with the header client,site, or JSON. By default as the scenario says.",
            extra={"metavar": "FILE"},
        ),
    ] = None
    strategy: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="A label for how messages were distributed: `LABEL`, or `RUN=LABEL`. Repeatable.",
            extra={"metavar": "LABEL"},
        ),
    ] = ()
    bucket: Annotated[
        str | None,
        msgspec.Meta(description="Length of the pieces of time; by default about 120 of them.", extra={"metavar": "TIME"}),
    ] = None
    settle: Annotated[
        str,
        msgspec.Meta(
            description="What was sent so shortly before the end of a run may be on its way and is not expected.",
            extra={"metavar": "TIME"},
        ),
    ] = "1s"
    brokers: Annotated[
        Literal["auto", "linked", "separate"],
        msgspec.Meta(
            description="Whether subscribers at other brokers than the publisher's are entitled to its messages. auto: when "
            "any of them got one.",
        ),
    ] = "auto"
    skip_damaged: Annotated[bool, msgspec.Meta(description="Leave out files that cannot be read.")] = False
    title: Annotated[str, msgspec.Meta(description="Title of the report.", extra={"metavar": "TEXT"})] = ""


def check(options: Options) -> None:
    """What can be refused before a JVM is started."""
    from nearcast.pipeline.evaluation.inputs import find_inputs, strategies
    from nearcast.pipeline.evaluation.places import all_bounds, read_sites

    wanted = _wanted(options)
    found = find_inputs(options.paths, skip_damaged=options.skip_damaged)
    strategies(found.runs, options.strategy)
    all_bounds(wanted.bounds, found.runs)
    if options.sites is not None:
        read_sites(Path(options.sites))
    out = Path(options.out)
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: there is a file of that name")
    # What an evaluation that failed has left there may be replaced, too.
    if out.is_dir() and not (out / SUMMARY).is_file() and not all(map(_is_ours, out.iterdir())):
        raise ConfigError(f"--out {out}: the directory holds something else than an evaluation; name another")


def _is_ours(path: Path) -> bool:
    from nearcast.pipeline.evaluation.passes import FINAL
    from nearcast.pipeline.evaluation.tables import SPANNING

    return path.name == REPORT or path.name.startswith(".work-") or path.name.removesuffix(".parquet") in (*FINAL, *SPANNING)


def run(spark: SparkSession, options: Options, progress: Progress) -> Mapping[str, object]:
    """Evaluate, write, show."""
    from nearcast.pipeline.evaluation import evaluate
    from nearcast.pipeline.evaluation.report import render

    out = Path(options.out)
    # What is there of an earlier evaluation is no summary of this one.
    (out / SUMMARY).unlink(missing_ok=True)
    with evaluate(spark, options.paths, _wanted(options), out=out, progress=progress) as evaluation:
        progress.step("writing the report")
        summary = evaluation.summary()
        title = options.title or f"Evaluation of {', '.join(run['run'] for run in summary['runs'][:3])}"
        command = shlex.join(["nearcast", *sys.argv[1:]]) if Path(sys.argv[0]).name in ("nearcast", "__main__.py") else ""
        made = f"Nearcast {summary['nearcast']}, {datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        _write(out / REPORT, render(summary, title=title, command=command, made=made).encode())
        # Last: where it is, the directory is whole.
        _write(out / SUMMARY, msgspec.json.format(msgspec.json.encode(summary | {"command": command})) + b"\n")
    _show(summary, progress)
    return {"events": summary["events"], "runs": len(summary["runs"]), "report": str(out / REPORT), "tables": str(out)}


def _wanted(options: Options) -> EvaluationOptions:
    from nearcast.pipeline.evaluation import Bound, EvaluationOptions
    from nearcast.pipeline.evaluation.places import parse_duration_ns

    slot_ns = None if options.bucket is None else parse_duration_ns(options.bucket, "--bucket")
    if slot_ns == 0:
        raise ConfigError("--bucket: must be above zero")
    return EvaluationOptions(
        bounds=tuple(map(Bound.parse, options.bound)),
        sites=options.sites,
        strategies=options.strategy,
        slot_ns=slot_ns,
        settle_ns=parse_duration_ns(options.settle, "--settle"),
        links=options.brokers,
        skip_damaged=options.skip_damaged,
    )


def _show(summary: dict[str, Any], progress: Progress) -> None:
    def rows(*names: str) -> list[list[object]]:
        return [[run["run"], *(_rounded(run[name]) for name in names)] for run in summary["runs"]]

    for run in summary["runs"]:
        for name in ("violation_ratio", "excess_share"):
            run[f"{name}_percent"] = None if run[name] is None else 100 * run[name]
    progress.table(
        "latency (ms)",
        ("run", "delivered", "p50", "p90", "p99", "p99.9", "max", "violations %", "longest"),
        rows(
            "delivered", "p50_ms", "p90_ms", "p99_ms", "p999_ms", "max_ms", "violation_ratio_percent", "longest_violation_ms"
        ),
    )
    progress.table(
        "messages",
        ("run", "published", "expected", "lost", "unexplained", "twice", "out of order", "excess %", "outages", "away p50 ms"),
        rows(
            "published",
            "expected",
            "lost",
            "lost_unexplained",
            "duplicates",
            "out_of_order",
            "excess_share_percent",
            "outages",
            "downtime_p50_ms",
        ),
    )
    for note in summary["notes"]:
        progress.note(note)


def _rounded(value: Any) -> Any:
    """Four digits are enough on a screen."""
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _write(path: Path, content: bytes) -> None:
    """The new content or the old, never half of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        aside.write_bytes(content)
        aside.replace(path)
    except OSError as error:
        raise StorageUnavailable(
            str(path), f"cannot be written: {error.strerror}; name another directory with --out"
        ) from error
    finally:
        aside.unlink(missing_ok=True)

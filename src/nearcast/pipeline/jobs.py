"""The jobs that ``nearcast pipeline run`` knows, and what a job is.

A job is a module with

- ``Options``: a frozen, keyword-only msgspec Struct. Its fields become the command's options: ``max_rows: int = 5`` is
  ``--max-rows 5``, a ``bool`` is a switch, a ``tuple[str, ...]`` may be given several times. The field's
  ``msgspec.Meta(description=...)`` is its help; ``Meta(extra={"argument": True})`` makes it positional, and
  ``extra={"metavar": "DIR", "short": "o"}`` names its value and a short form;
- ``run(spark, options, progress)``: does the work; what it returns (a mapping, or None) is shown at the end, and an entry
  ``failed`` above 0 makes the exit code 1. A streaming job starts its queries, then calls
  :func:`nearcast.pipeline.queries.await_queries`;
- if it wants: ``check(options)``, which raises before a JVM is started, and ``settings(options)``, Spark settings of its own.

The module's docstring starts with the line that ``nearcast pipeline list`` shows.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

from nearcast.errors import PipelineError

if TYPE_CHECKING:
    import msgspec
    from pyspark.sql import SparkSession

    from nearcast.pipeline.progress import Progress


class JobModule(Protocol):
    """What a job's module has to have; ``check`` and ``settings`` are asked for by name."""

    Options: type[msgspec.Struct]

    def run(self, spark: SparkSession, options: Any, progress: Progress) -> Mapping[str, object] | None: ...


@dataclass(frozen=True)
class Job:
    """A job by name."""

    name: str
    module: str
    summary: str
    streaming: bool = False

    def load(self) -> JobModule:
        return cast(JobModule, importlib.import_module(self.module))


JOBS = (
    Job("evaluate", "nearcast.pipeline.evaluate", "A recorded run's latencies, losses, violations; a report."),
    Job("archive", "nearcast.pipeline.archive", "Stream topics to partitioned Parquet, compacted.", streaming=True),
    Job("telemetry", "nearcast.pipeline.telemetry", "Plan where owned topics belong, from telemetry.", streaming=True),
    Job("sweep", "nearcast.pipeline.sweep", "A function of (parameters, seed) over a grid; resumable."),
)

USER = Job("FILE.py", "nearcast.pipeline.user_jobs", "A file of yours with `def pipeline(spark, topics)`.", streaming=True)


def find(name: str) -> Job:
    """The job of this name; a name that ends in ``.py`` is a user's file."""
    for job in JOBS:
        if job.name == name:
            return job
    if name.endswith(".py"):
        return USER
    names = ", ".join(job.name for job in JOBS)
    raise PipelineError(f"there is no job {name!r}: there are {names}, and files of yours that end in .py")

"""Recorded runs evaluated: the Python interface that the job, the report and experiments use.

>>> from nearcast.pipeline.evaluation import EvaluationOptions, evaluate
>>> with evaluate(spark, ["experiments/agreement-1"], EvaluationOptions()) as evaluation:  # doctest: +SKIP
...     evaluation.tables["topics"].orderBy("p99_ms").show()
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearcast.errors import StorageUnavailable
from nearcast.pipeline.evaluation.inputs import Inputs, find_inputs, strategies
from nearcast.pipeline.evaluation.passes import Links, Passes, Wanted
from nearcast.pipeline.evaluation.places import Bound, all_bounds
from nearcast.pipeline.evaluation.tables import Tables
from nearcast.pipeline.progress import Progress, Silent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_PARTITION = 1_500_000
"""Of a shuffle, so that a sort fits in memory."""

BROADCAST = "64m"
"""Tables of keys up to this size (as files) are handed to every task instead of shuffling events to them."""

INTERPRETED_ROWS = 200_000
"""Up to so many events, compiling the queries takes longer than running them uncompiled."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """What is asked for beside the events."""

    bounds: tuple[Bound, ...] = ()
    """How long deliveries may take; the first whose filter matches counts, then the scenario's, then the one for ``#``."""

    sites: str | Path | None = None
    """A CSV or JSON file ``client, site``, instead of the scenario's hosts."""

    strategies: tuple[str, ...] = ()
    """``LABEL`` for every run, or ``RUN=LABEL``; instead of what a run's folder says."""

    slot_ns: int | None = None
    """Length of the pieces of time; None: about 120 of them."""

    settle_ns: int = 1_000_000_000
    """Messages sent so shortly before the end of a run may be on their way: nobody is expected to have got them."""

    links: Links = "auto"
    """Whether subscribers at other brokers than the publisher's are entitled to a message; ``auto``: when any such one got
    one."""

    skip_damaged: bool = False
    """Leave out files that cannot be read, with a note, instead of refusing."""


class Evaluation:
    """What came of it: DataFrames by name, read from files in ``directory``; :meth:`close` removes those nobody asked to
    keep."""

    def __init__(self, inputs: Inputs, passes: Passes, options: EvaluationOptions, directory: Path, *, keep: bool) -> None:
        self.inputs = inputs
        self.options = options
        self.passes = passes
        self.directory = directory
        self.strategies = strategies(inputs.runs, options.strategies)
        self._keep = keep
        made = Tables(passes, self.strategies)
        self.tables: dict[str, DataFrame] = {
            name: self._written(name, table) for name, table in {"runs": made.runs(), **made.all}.items()
        }
        self.notes = [*inputs.notes, *passes.notes]

    def _written(self, name: str, table: DataFrame) -> DataFrame:
        path = f"file://{self.directory.absolute() / name}.parquet"
        table.write.mode("overwrite").parquet(path)
        return table.sparkSession.read.schema(table.schema).option("__globPaths__", "false").parquet(path)

    def close(self) -> None:
        """Remove the tables, unless ``out`` was named for them."""
        if not self._keep:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> Evaluation:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def summary(self) -> dict[str, Any]:
        """The figures that fit on a page, as plain values."""
        from nearcast.pipeline.evaluation.summary import summarise

        return summarise(self)


def evaluate(
    spark: SparkSession,
    paths: Sequence[str | Path],
    options: EvaluationOptions | None = None,
    *,
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Evaluate recorded runs: files, directories of them, or folders of experiments. The tables are Parquet files in ``out``,
    or in a temporary directory. On a cluster, events and ``out`` are on a file system that all its machines share."""
    options = options or EvaluationOptions()
    progress = progress or Silent()
    progress.step("looking at the files")
    inputs = find_inputs(paths, skip_damaged=options.skip_damaged)
    strategies(inputs.runs, options.strategies)
    wanted = Wanted(
        bounds=all_bounds(options.bounds, inputs.runs),
        sites=options.sites,
        slot_ns=options.slot_ns,
        settle_ns=options.settle_ns,
        links=options.links,
    )
    directory = Path(tempfile.mkdtemp(prefix="nearcast-evaluation-")) if out is None else Path(out)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".work-", dir=directory))
    except OSError as error:
        raise StorageUnavailable(str(directory), f"cannot be written: {error.strerror}; name another with --out") from error
    try:
        with _settings(spark, inputs.rows):
            passes = Passes(spark, inputs, wanted, work, progress)
            progress.step("making tables")
            return Evaluation(inputs, passes, options, directory, keep=out is not None)
    except BaseException:
        if out is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _settings(spark: SparkSession, rows: int) -> Iterator[None]:
    """More partitions for more events, and for few of them no planning that costs more than it saves; what the session had
    comes back."""
    partitions = min(2_000, -(-rows // ROWS_PER_PARTITION))
    wanted = {"spark.sql.shuffle.partitions": str(partitions), "spark.sql.autoBroadcastJoinThreshold": BROADCAST}
    if rows <= INTERPRETED_ROWS:
        wanted |= {
            "spark.sql.shuffle.partitions": "1",
            "spark.sql.adaptive.enabled": "false",
            "spark.sql.codegen.wholeStage": "false",
            "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        }
    before = {key: spark.conf.get(key) for key in wanted}
    for key, value in wanted.items():
        spark.conf.set(key, value)
    try:
        yield
    finally:
        for key, old in before.items():
            if old is not None:
                spark.conf.set(key, old)

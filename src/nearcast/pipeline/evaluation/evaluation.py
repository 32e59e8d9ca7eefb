"""Recorded runs evaluated: the Python interface that the job, the report and experiments use.

>>> from nearcast.pipeline.evaluation import EvaluationOptions, evaluate
>>> with evaluate(spark, ["experiments/agreement-1"], EvaluationOptions()) as evaluation:  # doctest: +SKIP
...     evaluation.tables["topics"].orderBy("p99_ms").show()
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearcast.errors import StorageUnavailable
from nearcast.pipeline.evaluation.inputs import Inputs, find_inputs, strategies
from nearcast.pipeline.evaluation.passes import FINAL, Links, Passes, Wanted, write
from nearcast.pipeline.evaluation.places import Bound, all_bounds
from nearcast.pipeline.evaluation.tables import SPANNING, Tables, read
from nearcast.pipeline.progress import Progress, Silent

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


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

    def __init__(
        self, spark: SparkSession, inputs: Inputs, passes: Passes, options: EvaluationOptions, directory: Path, *, keep: bool
    ) -> None:
        self.inputs = inputs
        self.options = options
        self.passes = passes
        self.directory = directory
        self.strategies = strategies(inputs.runs, options.strategies)
        self._keep = keep
        made = Tables(passes, self.strategies)
        self.small: dict[str, Any] = made.all
        """The tables that span topics, as Arrow tables."""
        for name, table in self.small.items():
            write(directory / f"{name}.parquet", 0, table)
        self._spark = spark
        self.notes = [*inputs.notes, *passes.notes, *made.notes]

    @cached_property
    def tables(self) -> dict[str, DataFrame]:
        """All tables, by name."""
        return {name: self._read(name) for name in (*self.small, *FINAL)}

    def _read(self, name: str) -> DataFrame:
        from pyarrow import parquet
        from pyspark.sql.pandas.types import from_arrow_schema

        path = self.directory.absolute() / f"{name}.parquet"
        schema = from_arrow_schema(parquet.read_schema(next(path.glob("part-*.parquet"))))
        # The directory's name is taken as it is, brackets and stars included.
        return self._spark.read.schema(schema).option("__globPaths__", "false").parquet(f"file://{path}")

    def parts(self, name: str) -> Iterator[Any]:
        """A table of any size, one Arrow table after the other."""
        return map(read, self.passes.files(name))

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
        for name in (*FINAL, *SPANNING):
            # Of an earlier evaluation; it may have had more parts.
            shutil.rmtree(directory / f"{name}.parquet", ignore_errors=True)
        passes = Passes(spark, inputs, wanted, directory, work, progress)
        progress.step("adding up")
        return Evaluation(spark, inputs, passes, options, directory, keep=out is not None)
    except BaseException:
        if out is None:
            shutil.rmtree(directory, ignore_errors=True)
        raise
    finally:
        shutil.rmtree(work, ignore_errors=True)

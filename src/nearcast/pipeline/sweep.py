"""``sweep``: a function of (parameters, seed) over a grid, as Spark tasks; resumable, with failures as rows.

The points run in waves, each a Spark job of tasks in the grid's order; what a wave brought is on the driver's disk before the
next but one begins, so a killed sweep loses a few seconds of work. Results travel through the driver: the executors of a
cluster need no file system in common. A point that raises is a row with the error; one that takes its worker with it (a crash
in native code, memory) is found by halving the wave, and is a row as well.
"""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from nearcast.errors import PipelineError
from nearcast.pipeline.progress import Progress, Silent
from nearcast.pipeline.settings import is_local
from nearcast.pipeline.sweep_points import Failure, Grid, Point, Row, figures_of, parse_grid, parse_seeds, points
from nearcast.pipeline.user_code import load_function

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

Function = Callable[[Mapping[str, Any], int], Mapping[str, Any]]

_TASK_SECONDS = 0.2
"""Points that take less share a task, which itself costs some 30 ms of CPU."""

_WAVE_SECONDS = 3.0
"""How much work is lost at most, twice over, when the driver is killed."""

_MAX_WAVE_POINTS = 20_000
_WAVES_AT_ONCE = 2
"""The second one has tasks for cores that the first one's last points leave idle."""

_SHOWN_SUMMARY = 50


class Options(msgspec.Struct, frozen=True, kw_only=True):
    function: Annotated[
        str,
        msgspec.Meta(
            description="What to call with (parameters, seed): `package.module:function` or `file.py:function`.",
            extra={"metavar": "PLACE", "short": "f"},
        ),
    ]
    set: Annotated[
        tuple[str, ...],
        msgspec.Meta(
            description="A parameter and its values: `a=1,2,3`, `n=1..10`. Repeatable; every combination is a point.",
            extra={"metavar": "NAME=VALUES"},
        ),
    ] = ()
    seeds: Annotated[
        str,
        msgspec.Meta(description="How many seeds for each point (1 to N), or `5..20`, or `3,7,9`.", extra={"metavar": "N"}),
    ] = "1"
    out: Annotated[
        str,
        msgspec.Meta(
            description="Directory of the results. The same command again goes on where it stopped.",
            extra={"metavar": "DIR", "short": "o"},
        ),
    ]
    retry_failed: Annotated[bool, msgspec.Meta(description="Run points that failed again.")] = False
    summary: Annotated[bool, msgspec.Meta(description="Show mean, minimum and maximum over the seeds, by parameters.")] = False
    points_per_task: Annotated[
        Annotated[int, msgspec.Meta(ge=1)] | None,
        msgspec.Meta(
            description="Points that share a Spark task; by default as many as take a fifth of a second.",
            extra={"metavar": "N"},
        ),
    ] = None


def check(options: Options) -> None:
    """What can be refused before a JVM is started."""
    _prepared(load_function(options.function), points(parse_grid(options.set), parse_seeds(options.seeds)))


def run(spark: SparkSession, options: Options, progress: Progress) -> Mapping[str, object]:
    wanted = points(parse_grid(options.set), parse_seeds(options.seeds))
    rows = perform(
        spark,
        load_function(options.function),
        wanted,
        name=options.function,
        out=Path(options.out),
        retry_failed=options.retry_failed,
        points_per_task=options.points_per_task,
        progress=progress,
    )
    failed = [row for row in rows if row.error is not None]
    for row in failed[:5]:
        assert row.error is not None  # noqa: S101  # chosen by it
        progress.note(f"failed: {_shown(row.parameters)} seed {row.seed}: {row.error.type}: {row.error.message}")
    if len(failed) > 5:
        progress.note(f"failed: {len(failed) - 5:,} more; column error_message of the results has them")
    if options.summary:
        _summary(rows, progress)
    return {"points": len(rows), "failed": len(failed), "results": f"{options.out}/results.parquet"}


def sweep(
    spark: SparkSession,
    function: Function | str,
    grid: Grid,
    seeds: int | Iterable[int] = 1,
    out: str | Path | None = None,
    *,
    retry_failed: bool = False,
    points_per_task: int | None = None,
    progress: Progress | None = None,
) -> DataFrame:
    """Call ``function(parameters, seed)`` for every point of a grid with every seed, and return what came of it.

    ``grid`` maps parameters to their values (every combination is a point), or lists points. ``seeds`` is how many, or which.
    The columns: the parameters, ``seed``, the figures that the function returned, ``seconds``, and of points that raised
    ``error_type``, ``error_message``, ``error_traceback``. With ``out``, what is done is kept there and is not done again.
    """
    wanted = points(grid, seeds)
    if isinstance(function, str):
        name = function
    else:
        name = f"{function.__module__}:{getattr(function, '__qualname__', type(function).__qualname__)}"
    called = load_function(function) if isinstance(function, str) else function
    directory = None if out is None else Path(out)
    rows = perform(
        spark,
        called,
        wanted,
        name=name,
        out=directory,
        retry_failed=retry_failed,
        points_per_task=points_per_task,
        progress=progress or Silent(),
    )
    if directory is not None and is_local(str(spark.sparkContext.master)):
        return spark.read.parquet(str((directory / "results.parquet").absolute()))
    from nearcast.pipeline.sweep_journal import table_of

    return spark.createDataFrame(table_of(rows))


def perform(
    spark: SparkSession,
    function: Function,
    wanted: Sequence[Point],
    *,
    name: str,
    out: Path | None,
    retry_failed: bool,
    points_per_task: int | None,
    progress: Progress,
) -> list[Row]:
    """Run what is not done yet; the rows of all points, in their order."""
    from nearcast.pipeline.sweep_journal import Identity, Journal

    function = _prepared(function, wanted)
    _require_travelling(function)
    if out is None:
        rows: dict[str, Row] = {}
        _run_all(spark, function, wanted, rows, rows_kept=None, points_per_task=points_per_task, progress=progress)
        return [rows[point.key] for point in wanted]
    parameters = list(dict.fromkeys(parameter for point in wanted for parameter in point.parameters))
    with Journal(out, Identity(name, parameters)) as journal:
        done = {point.key for point in wanted if (row := journal.rows.get(point.key)) and not (retry_failed and row.error)}
        if done:
            progress.note(f"{len(done):,} of {len(wanted):,} points are done already in {out}")
        left = [point for point in wanted if point.key not in done]
        try:
            _run_all(spark, function, left, journal.rows, journal.append, points_per_task, progress, len(done))
        except BaseException:
            kept = sum(point.key in journal.rows for point in wanted)
            progress.note(f"{kept:,} of {len(wanted):,} points are done; the same command goes on with the rest")
            raise
        finally:
            # After a Ctrl-C as well: the table is what there is so far.
            journal.write_results(wanted)
        return [journal.rows[point.key] for point in wanted]


def _prepared(function: Function, wanted: Sequence[Point]) -> Function:
    """A function may have a method ``prepare``: called here, once, with the parameters of all points (each combination once),
    it returns what is called in its place, with what executors cannot get at themselves."""
    prepare = getattr(function, "prepare", None)
    if prepare is None:
        return function
    combinations = {json.dumps(point.parameters, sort_keys=True): point.parameters for point in wanted}
    prepared: Function = prepare([dict(combination) for combination in combinations.values()])
    return prepared


def _require_travelling(function: Function) -> None:
    """Spark would say the same once per wave, and longer."""
    from pyspark import cloudpickle

    try:
        cloudpickle.dumps(_Task(function))  # type: ignore[no-untyped-call]
    except Exception as error:
        raise PipelineError(f"the function cannot be sent to Spark's workers: {error}") from error


def _run_all(
    spark: SparkSession,
    function: Function,
    left: Sequence[Point],
    rows: dict[str, Row],
    rows_kept: Callable[[list[Row]], None] | None,
    points_per_task: int | None,
    progress: Progress,
    already: int = 0,
) -> None:
    """Waves, two at a time; each is kept as soon as it is there."""
    total = already + len(left)
    waves = _Waves(left, spark.sparkContext.defaultParallelism, points_per_task)
    finished, failed = already, 0
    progress.step(f"{finished:,} of {total:,} points")
    with ThreadPoolExecutor(_WAVES_AT_ONCE, thread_name_prefix="wave") as threads:
        running: set[Future[list[Row]]] = set()
        try:
            while True:
                while len(running) < _WAVES_AT_ONCE and (wave := waves.next_wave()) is not None:
                    running.add(threads.submit(_run_wave, spark, function, *wave))
                if not running:
                    return
                ended, running = wait(running, return_when=FIRST_COMPLETED)
                for future in ended:
                    brought = future.result()
                    if rows_kept is None:
                        rows.update((row.point.key, row) for row in brought)
                    else:
                        rows_kept(brought)
                    waves.learn(brought)
                    finished += len(brought)
                    failed += sum(row.error is not None for row in brought)
                said = f"{finished:,} of {total:,} points" + (f", {failed:,} failed" if failed else "")
                progress.step(said)
                progress.advance(finished / total)
        except BaseException:
            spark.sparkContext.cancelAllJobs()
            # What the other wave still brings is worth keeping; cancelled, it raises.
            for future in running:
                if rows_kept is not None and future.exception() is None:
                    rows_kept(future.result())
            raise


class _Waves:
    """Cuts the points into waves: small at first, then as large as some seconds of work, by what points have taken so far."""

    def __init__(self, left: Sequence[Point], cores: int, points_per_task: int | None) -> None:
        self._left = left
        self._next = 0
        self._cores = max(1, cores)
        self._fixed = points_per_task
        self._seconds = self._count = 0.0

    def learn(self, rows: Sequence[Row]) -> None:
        self._seconds += sum(row.seconds for row in rows)
        self._count += len(rows)

    def next_wave(self) -> tuple[list[Point], int] | None:
        """Points and how many of them share a task; None at the end."""
        if self._next >= len(self._left):
            return None
        mean = max(self._seconds / self._count, 1e-6) if self._count else None
        group = self._fixed or (1 if mean is None else max(1, min(1_000, int(_TASK_SECONDS / mean))))
        size = self._cores * group
        if mean is not None:
            size = max(size, min(_MAX_WAVE_POINTS, int(_WAVE_SECONDS * self._cores / mean)))
        wave = list(self._left[self._next : self._next + size])
        self._next += len(wave)
        return wave, group


def _run_wave(spark: SparkSession, function: Function, wave: list[Point], group: int) -> list[Row]:
    """The rows of a wave, in its order."""
    context = spark.sparkContext
    tasks = max(1, -(-len(wave) // group))
    try:
        answers = (
            context.parallelize([msgspec.json.encode(point) for point in wave], tasks).mapPartitions(_Task(function)).collect()
        )
    except Exception as error:
        if _is_over(spark, error):
            raise
        if len(wave) > 1:
            middle = len(wave) // 2
            return _run_wave(spark, function, wave[:middle], group) + _run_wave(spark, function, wave[middle:], group)
        return [_crashed(wave[0], error)]
    return [msgspec.msgpack.decode(answer, type=Row) for answer in answers]


def _is_over(spark: SparkSession, error: Exception) -> bool:
    """Whether Spark ended or was asked to: nothing that a point did."""
    text = str(error)
    if "SPARK_JOB_CANCELLED" in text or "cancelled" in text or "SparkContext was shut down" in text:
        return True
    # Functions that do not travel, and workers that cannot load what they need, fail for every point alike.
    if "PicklingError" in text or "ModuleNotFoundError" in text or "PYTHON_VERSION_MISMATCH" in text:
        return True
    try:
        return bool(spark.sparkContext._jsc.sc().isStopped())
    except Exception:  # noqa: BLE001  # no answer is an answer
        return True


def _crashed(point: Point, error: Exception) -> Row:
    message = "the point ended its Python process: a crash in native code, os._exit, or killed for its memory"
    failure = Failure("WorkerCrashed", message, str(error))
    return Row(point.parameters, point.seed, 0.0, {}, failure)


class _Task:
    """What runs on an executor: points in, rows out, each as bytes."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def __call__(self, encoded: Iterable[bytes]) -> Iterator[bytes]:
        for each in encoded:
            point = msgspec.json.decode(each, type=Point)
            row = run_point(self._function, point)
            try:
                yield msgspec.msgpack.encode(row)
            except (ValueError, OverflowError) as error:
                # Text that is none, numbers beyond 64 bits.
                failure = Failure(type(error).__name__, f"the figures cannot be kept: {error}", "")
                yield msgspec.msgpack.encode(Row(point.parameters, point.seed, row.seconds, {}, failure))


def run_point(function: Function, point: Point) -> Row:
    """Call the function; whatever it raises is a row."""
    began = time.perf_counter()
    figures: dict[str, Any] = {}
    failure = None
    try:
        figures = figures_of(function(dict(point.parameters), point.seed))
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:  # noqa: BLE001  # sys.exit() in somebody's function is a failure of this point as well
        failure = Failure(type(error).__name__, str(error), "".join(traceback.format_exception(error)))
    return Row(point.parameters, point.seed, time.perf_counter() - began, figures, failure)


def _shown(parameters: Mapping[str, object]) -> str:
    return " ".join(f"{name}={value}" for name, value in parameters.items()) or "(no parameters)"


def _summary(rows: Sequence[Row], progress: Progress) -> None:
    from nearcast.pipeline.sweep_journal import summarise

    groups = list(summarise(rows))
    parameters = list(dict.fromkeys(name for row in rows for name in row.parameters))
    figures = list(dict.fromkeys(name for *_, found in groups for name in found))
    lines: list[list[object]] = []
    for values, count, failed, found in groups:
        for name in figures if found else [""]:
            if name in found or not found:
                mean, low, high = found.get(name, (None, None, None))
                lines.append([*(values.get(parameter) for parameter in parameters), count, failed, name, mean, low, high])
    if len(lines) > _SHOWN_SUMMARY:
        progress.note(f"the summary's first {_SHOWN_SUMMARY} of {len(lines):,} lines; the results have all")
    progress.table(
        "by parameters, over the seeds",
        [*parameters, "seeds", "failed", "figure", "mean", "min", "max"],
        lines[:_SHOWN_SUMMARY],
    )

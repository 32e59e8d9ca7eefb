"""Sweeps on a real Spark: results, failures, what is done again and what is not."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from nearcast.errors import PipelineError
from nearcast.pipeline import sweep as job
from nearcast.pipeline.progress import Silent
from nearcast.pipeline.sweep import sweep
from nearcast.pipeline.sweep_points import Grid

pytestmark = [pytest.mark.integration, pytest.mark.slow]


def _calls(directory: Path) -> list[str]:
    """What was computed, in whichever process: one file per call."""
    return sorted(path.name.partition("@")[0] for path in directory.glob("*@*"))


class Counting:
    """A function that leaves a trace of each call; ``crash`` and ``fail`` are the seeds for which it does."""

    def __init__(self, directory: Path, *, fail: Sequence[int] = (), crash: Sequence[int] = ()) -> None:
        self.directory, self.fail, self.crash = directory, fail, crash
        directory.mkdir(exist_ok=True)

    __qualname__ = "Counting"

    def __call__(self, parameters: Mapping[str, Any], seed: int) -> dict[str, Any]:
        name = f"{parameters['a']}-{seed}"
        number = len(list(self.directory.glob(f"{name}@*")))
        (self.directory / f"{name}@{number}").touch()
        if seed in self.crash:
            os._exit(3)
        if seed in self.fail:
            raise ValueError(f"not {seed}")
        return {"value": parameters["a"] * 100 + seed, "pid": os.getpid()}


class Steps(Silent):
    """Remembers the steps; ``stop_after`` ends the job once so many points are done, as a kill would."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.notes: list[str] = []
        self.tables: list[tuple[Sequence[str], Sequence[Sequence[object]]]] = []

    def step(self, text: str) -> None:
        if self.stop_after is not None and int(text.split()[0].replace(",", "")) >= self.stop_after:
            raise InterruptedError("stopped")

    def note(self, text: str) -> None:
        self.notes.append(text)

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        self.tables.append((columns, rows))


def test_results_are_a_frame_in_the_grids_order(spark: SparkSession, tmp_path: Path) -> None:
    frame = sweep(spark, Counting(tmp_path / "calls", fail=[2]), {"a": [2, 1]}, 3, tmp_path / "out")
    assert frame.columns == ["a", "seed", "value", "pid", "seconds", "error_type", "error_message", "error_traceback"]
    rows = frame.collect()
    assert [(row.a, row.seed, row.value) for row in rows] == [
        (2, 1, 201), (2, 2, None), (2, 3, 203), (1, 1, 101), (1, 2, None), (1, 3, 103),
    ]  # fmt: skip
    assert [(row.seed, row.error_type, row.error_message) for row in rows if row.error_type] == [
        (2, "ValueError", "not 2")
    ] * 2
    assert "in __call__" in rows[1].error_traceback
    assert os.getpid() not in {row.pid for row in rows}


def test_without_a_directory_the_results_are_a_frame_too(spark: SparkSession) -> None:
    frame = sweep(spark, lambda parameters, seed: {"x": parameters["a"] + seed}, [{"a": 1}, {"a": 5}], [10])
    assert [(row.a, row.seed, row.x) for row in frame.collect()] == [(1, 10, 11), (5, 10, 15)]


def test_a_sweep_that_was_stopped_goes_on(spark: SparkSession, tmp_path: Path) -> None:
    function, out = Counting(tmp_path / "calls"), tmp_path / "out"
    with pytest.raises(InterruptedError):
        sweep(spark, function, {"a": [1, 2]}, 20, out, points_per_task=1, progress=Steps(stop_after=2))
    # The table holds what there is so far. Tasks of a wave that was cancelled may still make calls: nothing is kept of those.
    kept = [f"{row['a']}-{row['seed']}" for row in pq.read_table(out / "results.parquet").to_pylist()]
    assert 2 <= len(kept) < 40
    steps = Steps()
    frame = sweep(spark, function, {"a": [1, 2]}, 20, out, progress=steps)
    assert frame.count() == 40
    assert steps.notes == [f"{len(kept)} of 40 points are done already in {out}"]
    calls = _calls(tmp_path / "calls")
    assert [calls.count(point) for point in kept] == [1] * len(kept), "what is done is not done again"


def test_more_seeds_and_values_add_to_what_is_there(spark: SparkSession, tmp_path: Path) -> None:
    function = Counting(tmp_path / "calls")
    sweep(spark, function, {"a": [1]}, 2, tmp_path / "out")
    frame = sweep(spark, function, {"a": [1, 2]}, [2, 3], tmp_path / "out")
    assert [(row.a, row.seed) for row in frame.collect()] == [(1, 2), (1, 3), (2, 2), (2, 3)], "those that were asked for"
    assert _calls(tmp_path / "calls") == ["1-1", "1-2", "1-3", "2-2", "2-3"]


def test_failures_are_run_again_only_when_asked(spark: SparkSession, tmp_path: Path) -> None:
    failing, mended = Counting(tmp_path / "calls", fail=[2]), Counting(tmp_path / "calls")
    sweep(spark, failing, {"a": [1]}, 3, tmp_path / "out")
    again = sweep(spark, mended, {"a": [1]}, 3, tmp_path / "out")
    assert again.where("error_type is not null").count() == 1
    assert len(_calls(tmp_path / "calls")) == 3
    again = sweep(spark, mended, {"a": [1]}, 3, tmp_path / "out", retry_failed=True)
    assert again.where("error_type is not null").count() == 0
    assert _calls(tmp_path / "calls") == ["1-1", "1-2", "1-2", "1-3"]


def test_a_point_that_takes_its_process_with_it_is_a_row(spark: SparkSession, tmp_path: Path) -> None:
    frame = sweep(spark, Counting(tmp_path / "calls", crash=[3]), {"a": [1]}, 5, tmp_path / "out", points_per_task=5)
    rows = {row.seed: row for row in frame.collect()}
    assert rows[3].error_type == "WorkerCrashed"
    assert [rows[seed].value for seed in (1, 2, 4, 5)] == [101, 102, 104, 105]


def test_the_job_reads_a_users_file_and_shows_a_summary(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("FACTOR = 3\n")
    file = tmp_path / "function.py"
    file.write_text(
        "import helper\n\n\ndef work(parameters, seed):\n"
        "    if seed == 4:\n        raise KeyError(seed)\n"
        "    return {'x': parameters['a'] * seed * FACTOR}\n\n\nFACTOR = helper.FACTOR\n"
    )
    options = job.Options(function=f"{file}:work", set=("a=1,10", "b=t"), seeds="4", out=str(tmp_path / "out"), summary=True)
    job.check(options)
    steps = Steps()
    answer = job.run(spark, options, steps)
    assert (answer["points"], answer["failed"]) == (8, 2)
    assert steps.notes == ["failed: a=1 b=t seed 4: KeyError: 4", "failed: a=10 b=t seed 4: KeyError: 4"]
    ((columns, rows),) = steps.tables
    assert columns == ["a", "b", "seeds", "failed", "figure", "mean", "min", "max"]
    assert rows == [[1, "t", 4, 1, "x", 6.0, 3.0, 9.0], [10, "t", 4, 1, "x", 60.0, 30.0, 90.0]]


def test_a_function_that_does_not_travel_is_one_clear_failure(spark: SparkSession, tmp_path: Path) -> None:
    file = (tmp_path / "open").open("w")
    with file, pytest.raises(PipelineError, match="cannot be sent to Spark's workers"):
        sweep(spark, lambda parameters, seed: {"name": file.name}, {"a": [1, 2]})


def test_simulated_scenarios(spark: SparkSession, tmp_path: Path) -> None:
    grid: Grid = {"scenario": ["mqtt"], "duration_s": [30], "brokers.0.durable": [True]}
    frame = sweep(spark, "nearcast.experiments.sweeping:simulate", grid, [7])
    (row,) = frame.collect()
    assert row.error_message is None
    assert row["published"] > 0
    assert row["network.packets"] > 0

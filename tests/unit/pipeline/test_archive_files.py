"""The files of an archive: whatever step a crash cuts off, each row is there exactly once afterwards, and at every moment."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nearcast.errors import PipelineError
from nearcast.pipeline.archive_files import Archive, FileFacts, Gap, State, follow, read_gaps

PARTITION = "topic_key=a%2Fb/date=2026-05-01"


class Crashed(BaseException):
    """Stands for a process that is gone: nothing cleans up after it but the operating system."""


def write(archive: Archive, batch: int, first: int, count: int, topic: str = "a/b", partition: str = PARTITION) -> None:
    """What Spark does: a file of one topic."""
    directory = archive.work_directory(batch) / partition
    directory.mkdir(parents=True)
    indexes = list(range(first, first + count))
    pq.write_table(pa.table({"topic": [topic] * count, "index": indexes}), directory / "part-0.snappy.parquet")


def rows(directory: Path) -> list[int]:
    """What any reader sees."""
    found: list[int] = []
    for path in sorted(directory.glob("topic_key=*/**/*.parquet")):
        found += pq.ParquetFile(path).read(columns=["index"]).column(0).to_pylist()
    return found


def test_batches_are_added_once_and_in_order(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("query")
        for batch in range(3):
            assert not archive.is_in(batch)
            write(archive, batch, 1 + 10 * batch, 10)
            assert archive.add(batch) == []
            assert archive.is_in(batch)
    assert rows(tmp_path) == list(range(1, 31))
    with Archive(tmp_path) as archive:
        archive.begin("query")
        assert archive.is_in(2)
        assert archive.state == State(query="query", last_batch=2, rows=30, next_indexes={"a/b": 31})


def crash_at(number: int) -> Callable[[str], None]:
    left = [number]

    def step(name: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Crashed(name)

    return step


def fill(directory: Path, step: Callable[[str], None]) -> None:
    """A job that adds what is not in yet and compacts after each batch, from wherever it is."""
    with Archive(directory, step) as archive:
        archive.begin("query")
        for batch in range(4):
            if not archive.is_in(batch):
                write(archive, batch, 1 + 10 * batch, 10)
                archive.add(batch)
            for partition in archive.partitions():
                archive.compact(partition, min_files=2, target_bytes=1 << 20)


def test_a_crash_at_any_step_neither_loses_nor_doubles_a_row(tmp_path: Path) -> None:
    for number in range(1_000):
        directory = tmp_path / str(number)
        try:
            fill(directory, crash_at(number))
        except Crashed:
            at_the_crash = rows(directory)
            assert len(at_the_crash) == len(set(at_the_crash)), f"rows twice after a crash at step {number}"
            assert at_the_crash == list(range(1, len(at_the_crash) + 1)), "no row is ever lost again"
            fill(directory, lambda name: None)
            assert rows(directory) == list(range(1, 41)), f"after a crash at step {number}"
            assert list((directory / "_work").iterdir()) == []
        else:
            assert number > 20, "there were steps to crash at"
            assert rows(directory) == list(range(1, 41))
            return
    pytest.fail("never came to an end")


def test_two_crashes_in_a_row(tmp_path: Path) -> None:
    for number in range(0, 60, 7):
        directory = tmp_path / str(number)
        for step in (number, number // 2, number // 3):
            try:
                fill(directory, crash_at(step))
            except Crashed:
                pass
        fill(directory, lambda name: None)
        assert rows(directory) == list(range(1, 41))


def test_compaction_keeps_large_files_and_the_order(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("query")
        first = 1
        for batch in range(12):
            count = 20_000 if batch == 5 else 10
            write(archive, batch, first, count)
            archive.add(batch)
            first += count
        (partition,) = archive.partitions()
        large = max(partition.iterdir(), key=lambda path: path.stat().st_size)
        kept = large.stat().st_ino
        limit = large.stat().st_size
        assert archive.compact(partition, min_files=100, target_bytes=limit) == 0
        assert archive.compact(partition, min_files=2, target_bytes=limit) == 9
        assert sorted(path.name for path in partition.iterdir()) == [
            "000000000000-00000.parquet",
            "000000000005-00000.parquet",
            "000000000006-00000.parquet",
        ]
        assert large.stat().st_ino == kept, "a file that is large enough is not written again"
        assert archive.compact(partition, min_files=2, target_bytes=limit) == 0
    assert rows(tmp_path) == list(range(1, first))


def test_one_job_at_a_time(tmp_path: Path) -> None:
    with Archive(tmp_path), pytest.raises(PipelineError, match="another archive job writes here"), Archive(tmp_path):
        pass
    with Archive(tmp_path):
        pass


def test_a_checkpoint_that_is_gone_is_noticed(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("one")
        write(archive, 0, 1, 10)
        archive.add(0)
    with Archive(tmp_path) as archive, pytest.raises(PipelineError, match="whose checkpoint is gone"):
        archive.begin("another")
    (tmp_path / "_state.json").unlink()
    with Archive(tmp_path) as archive, pytest.raises(PipelineError, match=r"no _state\.json: restore it"):
        archive.begin("one")


def test_a_damaged_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "_state.json").write_bytes(b"{")
    with pytest.raises(PipelineError, match=r"_state\.json is damaged"), Archive(tmp_path):
        pass


def test_gaps_are_noted_once(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("query")
        write(archive, 0, 5, 10)
        assert archive.add(0) == [], "what was removed before the archive began is no gap"
        write(archive, 1, 20, 10)
        assert archive.add(1) == [Gap("a/b", 15, 20, 1)]
    with (tmp_path / "_gaps.jsonl").open("ab") as file:
        file.write(b'{"topic": "cut o')
    assert read_gaps(tmp_path) == [Gap("a/b", 15, 20, 1)]
    with Archive(tmp_path) as archive:
        archive.begin("query")
        write(archive, 2, 31, 10)
        archive.add(2)
    assert read_gaps(tmp_path) == [Gap("a/b", 15, 20, 1), Gap("a/b", 30, 31, 2)]


def test_a_plan_that_comes_back_after_a_power_cut_is_passed_over(tmp_path: Path) -> None:
    kept: list[bytes] = []

    def step(name: str) -> None:
        if name == "forget the plan":
            kept.append((tmp_path / "_work" / "plan.json").read_bytes())

    fill(tmp_path, step)
    (tmp_path / "_work" / "plan.json").write_bytes(kept[-1])
    fill(tmp_path, lambda name: None)
    assert rows(tmp_path) == list(range(1, 41))


def test_gaps_within_a_batch(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("query")
        directory = archive.work_directory(0) / PARTITION
        directory.mkdir(parents=True)
        pq.write_table(pa.table({"topic": ["a/b"] * 4, "index": [1, 2, 5, 9]}), directory / "part-0.parquet")
        assert archive.add(0) == [Gap("a/b", 3, 5, 0), Gap("a/b", 6, 9, 0)]


def test_files_of_one_topic_are_taken_together() -> None:
    facts = [FileFacts(Path("x"), "t", 11, 20, 10), FileFacts(Path("y"), "t", 1, 10, 10), FileFacts(Path("z"), "u", 7, 7, 1)]
    gaps, after = follow(State(query="q"), 0, facts)
    assert gaps == []
    assert after.next_indexes == {"t": 21, "u": 8}


def test_long_topics_are_read_from_the_rows(tmp_path: Path) -> None:
    with Archive(tmp_path) as archive:
        archive.begin("query")
        write(archive, 0, 1, 3, topic="é" * 500)
        archive.add(0)
        assert archive.state is not None
        assert archive.state.next_indexes == {"é" * 500: 4}

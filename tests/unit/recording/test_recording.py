"""Recorded events: the schema that others read, files that are whole or absent, and what is said about files that are not."""

from __future__ import annotations

import builtins
import errno
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from nearcast.errors import ConfigError, LocalProtocolError, StorageCorrupt, StorageUnavailable
from nearcast.recording import (
    COLUMNS,
    KINDS,
    EventWriter,
    MessageEvent,
    arrow_schema,
    check,
    files,
    message_id,
    read_events,
    read_table,
    schema,
    writer,
)
from nearcast.recording.__main__ import main

PAGE = Path(__file__).resolve().parents[3] / "docs/reference/recording.md"


def published(number: int = 0) -> MessageEvent:
    return MessageEvent(
        kind="published",
        at_ns=1_000 + number,
        client="car-1",
        message_id=message_id(7, number),
        stream=0,
        sequence=number,
        topic="cars/1",
        publisher="car-1",
        due_ns=900 + number,
        sent_ns=1_000 + number,
        qos=1,
        retained=False,
        size_bytes=100,
        path=("broker-1",),
    )


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.01)


def test_columns_are_the_fields_of_an_event() -> None:
    assert [column.name for column in COLUMNS] == ["run", *MessageEvent.__struct_fields__]


def test_the_schema_has_only_types_that_spark_reads_as_they_are() -> None:
    found = arrow_schema("r")
    for column in COLUMNS:
        kind = found.field(column.name).type
        assert not pyarrow.types.is_timestamp(kind), "Spark refuses nanosecond timestamps"
        assert not pyarrow.types.is_unsigned_integer(kind), "Spark reads unsigned 64-bit integers as decimals"
        assert not pyarrow.types.is_large_string(kind)
        assert not pyarrow.types.is_dictionary(kind)
        assert found.field(column.name).nullable == column.nullable


def test_a_file_carries_version_and_run_and_the_list_layout_of_the_parquet_format(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "run 7") as events:
        events.write(published())
    [path] = files(tmp_path)
    with parquet.ParquetFile(path) as file:
        assert file.schema_arrow.metadata[b"nearcast.schema_version"] == str(schema.VERSION).encode()
        assert file.schema_arrow.metadata[b"nearcast.run"] == b"run 7"
        assert "path.list.element" in {file.schema.column(number).path for number in range(len(file.schema))}
    assert read_table(tmp_path, ["run"]).column("run").to_pylist() == ["run 7"]


def test_events_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [published(number) for number in range(1_300)]
    written.append(MessageEvent(kind="disconnected", at_ns=5, client="ü-1", path=("b",), reason="no answer"))
    with EventWriter(tmp_path, "r") as events:
        for event in written:
            events.write(event)
    assert list(read_events(tmp_path)) == written
    assert events.rows == len(written)
    found = check(tmp_path)
    assert (found.files, found.rows, found.problems) == (1, 1_301, ())
    assert found.kinds == {"published": 1_300, "disconnected": 1}


def test_writers_share_a_directory_and_runs_are_read_together(tmp_path: Path) -> None:
    for host in ("a", "b"):
        with EventWriter(tmp_path / host, f"run {host}", source=host) as events:
            events.write(published())
    assert sorted(read_table(tmp_path).column("run").to_pylist()) == ["run a", "run b"]


def test_files_end_by_rows_and_by_age(tmp_path: Path) -> None:
    with EventWriter(tmp_path / "rows", "r", rows_per_file=writer.BATCH_ROWS) as events:
        for number in range(3 * writer.BATCH_ROWS):
            events.write(published(number))
    assert len(files(tmp_path / "rows")) == 3
    with EventWriter(tmp_path / "age", "r", seconds_per_file=0.05) as events:
        events.write(published())
        events.flush()
        wait_for(lambda: len(files(tmp_path / "age")) == 1, "an old file gets its name although nothing more comes")


def test_an_empty_recording_is_a_table_without_rows(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r"):
        pass
    assert read_table(tmp_path).num_rows == 0
    assert read_table(tmp_path, ["topic"]).column_names == ["topic"]
    assert check(tmp_path).rows == 0


WRITES_UNTIL_KILLED = """
import sys
from nearcast.recording import EventWriter, MessageEvent
events = EventWriter(sys.argv[1], "killed", seconds_per_file=0.05)
number = 0
while True:
    events.write(MessageEvent(kind="connected", at_ns=number, client="c"))
    number += 1
"""


def test_a_killed_writer_leaves_only_whole_files(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", WRITES_UNTIL_KILLED, str(tmp_path)])
    try:
        wait_for(lambda: len(files(tmp_path)) >= 3, "three files")
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    found = check(tmp_path)
    assert found.problems == ()
    times = sorted(read_table(tmp_path).column("at_ns").to_pylist())
    assert times == list(range(len(times))), "what is there is all there was up to some moment"


def test_a_full_disk_is_an_error_of_the_next_call_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    events = EventWriter(tmp_path, "r", rows_per_file=1)
    events.write(published())
    events.flush()

    wait_for(lambda: not list(tmp_path.iterdir()), "the half file is gone")
    with pytest.raises(StorageUnavailable, match="No space left on device; make room or record elsewhere"):
        events.close()
    assert list(tmp_path.iterdir()) == []


def test_whatever_fails_in_the_writing_thread_nobody_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise MemoryError

    monkeypatch.setattr(writer, "QUEUED_BATCHES", 1)
    monkeypatch.setattr(os, "fsync", broken)
    events = EventWriter(tmp_path, "r", rows_per_file=1)

    def write_on() -> None:
        for number in range(100):
            events.write(published(number))
            events.flush()
        events.close()

    with pytest.raises(StorageUnavailable, match=r"events cannot be recorded: MemoryError\(\)"):
        write_on()


def test_a_writer_waits_when_the_disk_does_not_keep_up_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "QUEUED_BATCHES", 1)
    flush = os.fsync

    def slow(descriptor: int) -> None:
        time.sleep(0.02)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    with EventWriter(tmp_path, "r", rows_per_file=1) as events:
        for number in range(10):
            events.write(published(number))
            events.flush()
    assert events.stalled_s > 0
    assert read_table(tmp_path).num_rows == 10


def test_a_directory_that_cannot_be_made_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageUnavailable, match="events cannot be recorded: Not a directory"):
        EventWriter(tmp_path / "file" / "events", "r")


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    events = EventWriter(tmp_path, "r")
    events.close()
    events.close()
    events.write(published())
    with pytest.raises(LocalProtocolError, match="closed"):
        events.flush()


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "pyarrow":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ConfigError, match=r"nearcast\[lab\]"):
        EventWriter(tmp_path, "r")


# -- files that are something else --


def test_half_a_file_is_named_with_its_path(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(published())
    [path] = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StorageCorrupt, match="not a readable Parquet file"):
        read_table(tmp_path)
    assert str(path) in check(tmp_path).problems[0]


@pytest.mark.parametrize("content", [b"", b"PAR1", b"garbage" * 100])
def test_garbage_is_a_problem_not_a_crash(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.parquet").write_bytes(content)
    assert len(check(tmp_path).problems) == 1


def test_other_parquet_files_and_other_versions_are_told_apart(tmp_path: Path) -> None:
    table = arrow_schema("r").empty_table()
    parquet.write_table(table.replace_schema_metadata(None), tmp_path / "foreign.parquet")
    newer = table.replace_schema_metadata({b"nearcast.schema_version": b"99"})
    parquet.write_table(newer, tmp_path / "newer.parquet")
    lacking = table.drop_columns(["topic"]).replace_schema_metadata(table.schema.metadata)
    parquet.write_table(lacking, tmp_path / "lacking.parquet")
    foreign, without, version = check(tmp_path).problems
    assert "not one of recorded events" in foreign
    assert "the column topic is missing" in without
    assert "version 99" in version


def test_rows_that_contradict_their_kind_are_found(tmp_path: Path) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(MessageEvent(kind="delivered", at_ns=1, client="c"))
        events.write(MessageEvent(kind="exploded", at_ns=1, client="c"))  # type: ignore[arg-type]
    problems = check(tmp_path).problems
    assert any("the kind exploded is unknown" in problem for problem in problems)
    assert any("1 events delivered have no received_ns" in problem for problem in problems)


def test_unfinished_files_are_passed_over_and_mentioned(tmp_path: Path) -> None:
    (tmp_path / ".half.parquet").write_bytes(b"PAR1")
    found = check(tmp_path)
    assert (found.files, found.problems) == (0, ())
    assert found.unfinished == (str(tmp_path / ".half.parquet"),)


def test_a_recording_is_checked_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(published())
    assert main([str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["kinds"] == {"published": 1}
    (tmp_path / "x.parquet").write_bytes(b"")
    assert main([str(tmp_path)]) == 1
    assert len(json.loads(capsys.readouterr().out)["problems"]) == 1
    assert main([str(tmp_path / "absent")]) == 1
    assert "no such directory" in capsys.readouterr().err


def test_no_directory_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        read_table(tmp_path / "absent")


def test_message_numbers_are_signed_64_bit_and_different() -> None:
    numbers = {message_id(publisher, sequence) for publisher in (0, 1, 2**63, 2**64 - 1) for sequence in range(1_000)}
    assert len(numbers) == 4_000
    assert all(-(2**63) <= number < 2**63 for number in numbers)


def test_the_example_of_the_reference_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with EventWriter(tmp_path, "r") as events:
        events.write(published())
    [example] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    exec(re.sub(r'"experiments/[^"]*"', repr(str(tmp_path)), example), {})  # noqa: S102
    assert "rows=1" in capsys.readouterr().out


def test_the_reference_page_holds_the_schema() -> None:
    assert schema.reference() in PAGE.read_text(), f"the tables in {PAGE.name} should be:\n{schema.reference()}"
    assert set(KINDS) == set(schema.Kind.__args__)  # type: ignore[attr-defined]

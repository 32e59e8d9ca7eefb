"""Writes events to Parquet files that are whole or absent.

Events are collected in small batches, turned into columns by the caller's thread (half a millisecond at a time, so that a
client being measured is not held up) and written by a thread of the writer's own. A file under construction has a name that
readers and Spark pass over (it begins with a dot); it gets its final name when it is complete and flushed to disk. Files end
after ``seconds_per_file``, so a killed process loses the events of that long at most (and what was not flushed yet, see
:meth:`EventWriter.flush`), and nothing that was there before.

What is not on disk yet is bounded. When the disk does not keep up, :meth:`EventWriter.write` waits, because an event that is
dropped would count as a lost message later; ``stalled_s`` says for how long. A disk that fails is an error of the next call.
"""

from __future__ import annotations

import os
import queue
import re
import secrets
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from nearcast.errors import ConfigError, LocalProtocolError, StorageUnavailable
from nearcast.recording.schema import COLUMNS, MessageEvent, arrow, arrow_schema

BATCH_ROWS = 512
QUEUED_BATCHES = 128
ROW_GROUP_ROWS = 65_536

_ASIDE = "."
_SUFFIX = ".parquet"


class EventWriter:
    """Records the events of one process into a directory that several may share.

    ``write``, ``flush`` and ``close`` belong to one thread. When events are rare, call :meth:`flush` now and then: they go to
    the disk when a batch is full or when it is called.
    """

    def __init__(
        self,
        directory: str | Path,
        run: str,
        *,
        source: str = "client",
        seconds_per_file: float = 10.0,
        rows_per_file: int = 1_000_000,
    ) -> None:
        if rows_per_file < 1 or seconds_per_file <= 0:
            raise ConfigError("a recording needs at least one row and some time per file")
        self.directory = Path(directory)
        self.rows = 0
        self.stalled_s = 0.0
        self._run = run
        self._schema = arrow_schema(run)
        self._types = [self._schema.field(column.name).type for column in COLUMNS]
        # What pyarrow imports when it is first used (pandas, where that is installed) holds up every thread for a second on a
        # busy machine: now, and not among the first events.
        from pyarrow import parquet  # noqa: F401

        self._batch([MessageEvent(kind="connected", at_ns=0, client="")])
        self._events: list[MessageEvent] = []
        self._queue: queue.Queue[Any] = queue.Queue(QUEUED_BATCHES)
        self._failure: StorageUnavailable | None = None
        self._closed = False
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unavailable(self.directory, error) from error
        name = f"{re.sub(r'[^A-Za-z0-9_@-]', '_', source)}-{os.getpid()}-{secrets.token_hex(4)}"
        files = _Files(self.directory, name, self._schema, seconds_per_file, rows_per_file)
        self._thread = threading.Thread(target=self._work, args=(files,), name="nearcast recording", daemon=True)
        self._thread.start()

    def write(self, event: MessageEvent) -> None:
        """Record an event."""
        self._events.append(event)
        if len(self._events) >= BATCH_ROWS:
            self.flush()

    def flush(self) -> None:
        """Hand what is collected to the writing thread."""
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise LocalProtocolError("this recording is closed")
        events, self._events = self._events, []
        if not events:
            return
        batch = self._batch(events)
        self.rows += len(events)
        try:
            self._queue.put_nowait(batch)
        except queue.Full:
            began = time.monotonic()
            self._queue.put(batch)
            self.stalled_s += time.monotonic() - began

    def close(self) -> None:
        """Write what is left and give the last file its name. A second call does nothing."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._closed = True
            self._queue.put(None)
            self._thread.join()
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> EventWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _batch(self, events: list[MessageEvent]) -> Any:
        pyarrow = arrow()
        # The run first, then the event's fields, in their order: that is the order of the columns.
        columns = [(self._run,) * len(events), *zip(*map(msgspec.structs.astuple, events), strict=True)]
        arrays = [pyarrow.array(values, type=kind) for values, kind in zip(columns, self._types, strict=True)]
        return pyarrow.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _work(self, files: _Files) -> None:
        """The writing thread. After a failure it goes on taking batches, so that nobody waits for room for ever."""
        while True:
            try:
                batch = self._queue.get(timeout=files.remaining_s())
            except queue.Empty:
                batch = _DUE
            if self._failure is None:
                try:
                    if batch is None or batch is _DUE:
                        files.finish()
                    else:
                        files.add(batch)
                except Exception as error:  # noqa: BLE001  # the edge of the thread: without it, whoever writes waits for ever
                    self._failure = _unavailable(self.directory, error)
                    files.abandon()
            if batch is None:
                return


_DUE = object()
"""In place of a batch: the file is old enough."""


class _Files:
    """One file after the other; used by the writing thread alone."""

    def __init__(self, directory: Path, name: str, schema: Any, seconds_per_file: float, rows_per_file: int) -> None:
        self._directory = directory
        self._name = name
        self._schema = schema
        self._seconds = seconds_per_file
        self._rows_per_file = rows_per_file
        self._number = 0
        self._writer: Any = None
        self._sink: Any = None
        self._aside = directory
        self._due = 0.0
        self._rows = 0
        self._waiting: list[Any] = []
        self._waiting_rows = 0

    def remaining_s(self) -> float | None:
        """How long the current file may stay open; None when there is none."""
        return None if self._writer is None else max(0.0, self._due - time.monotonic())

    def add(self, batch: Any) -> None:
        if self._writer is None:
            self._open()
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._rows += batch.num_rows
        if self._waiting_rows >= ROW_GROUP_ROWS:
            self._write_group()
        if self._rows >= self._rows_per_file or time.monotonic() >= self._due:
            self.finish()

    def finish(self) -> None:
        """Complete the current file, if there is one, and give it its name."""
        if self._writer is None:
            return
        self._write_group()
        self._writer.close()
        self._writer = None
        self._sink.flush()
        os.fsync(self._sink.fileno())
        self._sink.close()
        final = self._directory / f"{self._name}-{self._number:05}{_SUFFIX}"
        self._aside.rename(final)
        self._number += 1

    def abandon(self) -> None:
        """The disk failed: leave no half file."""
        for part in (self._writer, self._sink):
            try:
                if part is not None:
                    part.close()
            except Exception:  # noqa: BLE001, S110
                pass  # it is what failed
        self._writer = None
        self._waiting = []
        try:
            self._aside.unlink(missing_ok=True)
        except OSError:
            pass  # readers pass over it in any case

    def _open(self) -> None:
        from pyarrow import parquet

        self._aside = self._directory / f"{_ASIDE}{self._name}-{self._number:05}{_SUFFIX}"
        self._sink = self._aside.open("xb")
        self._writer = parquet.ParquetWriter(self._sink, self._schema, compression="zstd", version="2.6")
        self._due = time.monotonic() + self._seconds
        self._rows = 0

    def _write_group(self) -> None:
        if self._waiting:
            batches, self._waiting, self._waiting_rows = self._waiting, [], 0
            self._writer.write_table(arrow().Table.from_batches(batches, self._schema), row_group_size=ROW_GROUP_ROWS)


def _unavailable(directory: Path, error: Exception) -> StorageUnavailable:
    reason = (isinstance(error, OSError) and error.strerror) or " ".join(str(error).split()) or repr(error)
    return StorageUnavailable(str(directory), f"events cannot be recorded: {reason}; make room or record elsewhere")

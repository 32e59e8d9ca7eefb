"""Reads recorded events, and says what is wrong with files that hold none.

Everything here fits in memory; evaluation of what does not is Spark's, which reads the same files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from nearcast.errors import ConfigError, StorageCorrupt
from nearcast.recording.schema import COLUMNS, KINDS, RUN_KEY, VERSION, VERSION_KEY, MessageEvent, arrow, arrow_schema


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """What :func:`check` found."""

    files: int
    rows: int
    kinds: dict[str, int]
    problems: tuple[str, ...]
    unfinished: tuple[str, ...]
    """Files of writers that run still, or were killed; readers pass over them."""


def files(directory: str | Path) -> list[Path]:
    """The whole files in a directory and below, by name."""
    found = Path(directory)
    if not found.is_dir():
        raise ConfigError(f"{directory}: no such directory; recorded events are a directory of .parquet files")
    return sorted(path for path in found.rglob("*.parquet") if not path.name.startswith((".", "_")))


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """What the end of a file says about it; see :func:`describe`."""

    path: Path
    run: str
    rows: int


def describe(path: str | Path) -> Recorded:
    """Check a file's schema and say what is in it, without reading its events."""
    with _opened(Path(path)) as file:
        schema = file.schema_arrow
        return Recorded(path=Path(path), run=schema.metadata[RUN_KEY].decode(), rows=file.metadata.num_rows)


def read_table(directory: str | Path, columns: Sequence[str] | None = None) -> Any:
    """All events in a directory and below as one Arrow table, in no particular order."""
    pyarrow = arrow()
    tables = [_read(path, columns) for path in files(directory)]
    if tables:
        return pyarrow.concat_tables(tables)
    empty = arrow_schema("").empty_table()
    return empty if columns is None else empty.select(list(columns))


def read_events(directory: str | Path) -> Iterator[MessageEvent]:
    """All events, one by one; for small recordings and tests."""
    for path in files(directory):
        for row in _read(path, None).to_pylist():
            del row["run"]
            yield MessageEvent(**{**row, "path": tuple(row["path"])})


def check(directory: str | Path) -> Check:
    """Read everything and say what does not hold: unreadable files, other versions, rows that contradict their kind."""
    rows = 0
    kinds: dict[str, int] = {}
    problems: list[str] = []
    found = files(directory)
    for path in found:
        try:
            table = _read(path, None)
        except (ConfigError, StorageCorrupt) as error:
            problems.append(str(error))
            continue
        rows += table.num_rows
        for kind, count in _counts(table.column("kind")):
            kinds[kind] = kinds.get(kind, 0) + count
        problems += [f"{path}: {problem}" for problem in _contradictions(table)]
    unfinished = tuple(str(path) for path in sorted(Path(directory).rglob(".*.parquet")))
    return Check(files=len(found), rows=rows, kinds=kinds, problems=tuple(problems), unfinished=unfinished)


def _read(path: Path, columns: Sequence[str] | None) -> Any:
    with _opened(path) as file:
        table = file.read(columns=None if columns is None else list(columns))
    # Files differ in their metadata (the run's name); tables that are put together must not.
    return table.replace_schema_metadata(None)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A file of our schema, open; what is wrong with it is an error of ours, also while it is read."""
    pyarrow = arrow()
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            _check_schema(path, file.schema_arrow)
            yield file
    except (pyarrow.ArrowInvalid, pyarrow.ArrowException) as error:
        raise StorageCorrupt(str(path), 0, f"not a readable Parquet file: {' '.join(str(error).split())}") from error
    except OSError as error:
        reason = error.strerror or " ".join(str(error).split())
        raise StorageCorrupt(str(path), 0, f"cannot be read: {reason}") from error


def _check_schema(path: Path, schema: Any) -> None:
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise ConfigError(f"{path}: a Parquet file, but not one of recorded events")
    if version != str(VERSION).encode():
        raise ConfigError(
            f"{path}: recorded with version {version.decode('ascii', 'replace')} of the schema, and this is a reader of "
            f"version {VERSION}: use the Nearcast that recorded it"
        )
    if RUN_KEY not in schema.metadata:
        raise ConfigError(f"{path}: does not say which run it belongs to")
    expected = arrow_schema("")
    for column in COLUMNS:
        if column.name not in schema.names:
            raise ConfigError(f"{path}: the column {column.name} is missing")
        found, wanted = schema.field(column.name).type, expected.field(column.name).type
        if found != wanted:
            raise ConfigError(f"{path}: the column {column.name} is {found}, not {wanted}")


def _counts(column: Any) -> Iterator[tuple[str, int]]:
    for entry in column.value_counts().to_pylist():
        yield entry["values"], entry["counts"]


def _contradictions(table: Any) -> Iterator[str]:
    """Rows that no writer of ours makes; each said once per file."""
    arrow()
    from pyarrow import compute

    kinds = table.column("kind")
    for kind, _ in _counts(kinds):
        if kind not in KINDS:
            yield f"the kind {kind} is unknown"
    required = {
        "published": ("message_id", "topic", "publisher", "sent_ns", "qos", "size_bytes"),
        "acknowledged": ("message_id", "publisher", "sent_ns"),
        "skipped": ("message_id", "publisher", "due_ns", "reason"),
        "subscribed": ("topic",),
        "unsubscribed": ("topic",),
        "processed": ("message_id", "topic", "sent_ns", "size_bytes"),
        "delivered": ("message_id", "topic", "publisher", "subscriber", "sent_ns", "received_ns", "qos", "size_bytes"),
    }
    for kind, names in required.items():
        rows = table.filter(compute.equal(kinds, kind))
        for name in names:
            if rows.column(name).null_count:
                yield f"{rows.column(name).null_count} events {kind} have no {name}"

"""What a sweep has done, kept in its directory as it goes: a journal of one JSON line per point, so nothing is done twice.

``sweep.json`` says what is swept, ``journal.jsonl`` has the rows, ``results.parquet`` is the table made of them. A line that a
kill cut short is dropped; of two lines about one point the later counts. One process at a time.
"""

from __future__ import annotations

import fcntl
import math
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from nearcast.errors import PipelineError
from nearcast.pipeline.sweep_points import OWN_COLUMNS, Point, Row

_RESULTS = "results.parquet"
_UNUSUAL = {math.inf: "Infinity", -math.inf: "-Infinity"}


class Identity(msgspec.Struct, frozen=True):
    """What a directory is about."""

    function: str
    parameters: list[str]


class Journal:
    """The directory of a sweep, open."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.directory = directory
        self._identity = identity
        self._file: IO[bytes] | None = None
        self.rows: dict[str, Row] = {}

    def __enter__(self) -> Journal:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = (self.directory / "journal.jsonl").open("a+b")
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise PipelineError(f"another sweep is writing to {self.directory}") from None
            self._check_identity()
            self._recover()
        except OSError as error:
            self.close()
            raise PipelineError(f"cannot use {self.directory}: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def append(self, rows: Iterable[Row]) -> None:
        """Keep rows, on the disk before this returns."""
        if self._file is None:
            raise PipelineError("the sweep's journal is closed")
        rows = list(rows)
        data = b"".join(msgspec.json.encode(_encoded(row)) + b"\n" for row in rows)
        place = self._file.tell()
        try:
            self._file.write(data)
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            try:
                self._file.truncate(place)
            except OSError:
                pass
            raise PipelineError(f"cannot write to {self.directory}: {error.strerror}; run it again to go on") from error
        self.rows.update((row.point.key, row) for row in rows)

    def write_results(self, points: Iterable[Point]) -> Path:
        """The table of what is done of these points, in their order."""
        path = self.directory / _RESULTS
        write_table(table_of(row for point in points if (row := self.rows.get(point.key)) is not None), path)
        return path

    def _check_identity(self) -> None:
        path = self.directory / "sweep.json"
        if not path.exists():
            _replace(path, msgspec.json.format(msgspec.json.encode(self._identity)) + b"\n")
            return
        try:
            found = msgspec.json.decode(path.read_bytes(), type=Identity)
        except msgspec.DecodeError as error:
            raise PipelineError(f"{path} is damaged ({error}): choose another directory") from error
        if found.function != self._identity.function:
            raise PipelineError(f"{self.directory} holds a sweep of {found.function}: choose another directory")
        if sorted(found.parameters) != sorted(self._identity.parameters):
            names = ", ".join(found.parameters) or "none"
            raise PipelineError(f"{self.directory} holds a sweep over the parameters {names}: choose another directory")

    def _recover(self) -> None:
        file = self._file
        if file is None:
            return
        file.seek(0)
        good = 0
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                row = _decoded(line)
            except (msgspec.DecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
                raise PipelineError(
                    f"{self.directory}/journal.jsonl:{number}: damaged ({error}): choose another directory"
                ) from None
            self.rows[row.point.key] = row
            good += len(line)
        # What a kill cut short goes, so that the next line starts at its beginning.
        file.truncate(good)
        file.seek(good)


def _encoded(row: Row) -> dict[str, Any]:
    """JSON has no numbers that are none: those travel as {"number": "NaN"}."""
    plain: dict[str, Any] = msgspec.to_builtins(row)
    plain["figures"] = {name: _encoded_value(value) for name, value in row.figures.items()}
    return plain


def _encoded_value(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {"number": _UNUSUAL.get(value, "NaN")}
    if isinstance(value, int) and not isinstance(value, bool) and not -(2**63) <= value < 2**63:
        return {"number": str(value)}
    return value


def _decoded(line: bytes) -> Row:
    plain = msgspec.json.decode(line)
    plain["figures"] = {
        name: float(value["number"]) if isinstance(value, dict) else value for name, value in plain["figures"].items()
    }
    return msgspec.convert(plain, Row)


def table_of(rows: Iterable[Row]) -> pa.Table:
    """Rows as columns: the parameters, the seed, the figures, the seconds, the error."""
    kept = list(rows)
    parameters = _names(row.parameters for row in kept)
    figures = _names(row.figures for row in kept)
    columns: dict[str, pa.Array] = {name: _column([row.parameters.get(name) for row in kept]) for name in parameters}
    columns["seed"] = pa.array([row.seed for row in kept], pa.int64())
    for name in figures:
        # A figure may be called like a parameter, or like a column of ours.
        column = f"figure_{name}" if name in columns or name in OWN_COLUMNS else name
        columns[column] = _column([row.figures.get(name) for row in kept])
    columns["seconds"] = pa.array([row.seconds for row in kept], pa.float64())
    columns["error_type"] = pa.array([row.error and row.error.type for row in kept], pa.string())
    columns["error_message"] = pa.array([row.error and row.error.message for row in kept], pa.string())
    columns["error_traceback"] = pa.array([row.error and row.error.traceback for row in kept], pa.string())
    return pa.table(columns)


def _names(mappings: Iterable[dict[str, Any]]) -> list[str]:
    """Every key, in the order of its first appearance."""
    return list(dict.fromkeys(name for mapping in mappings for name in mapping))


def _column(values: list[Any]) -> pa.Array:
    """The narrowest type that holds them all: boolean, bigint, double, else text."""
    kinds = {type(value) for value in values if value is not None}
    if kinds == {bool}:
        return pa.array(values, pa.bool_())
    if kinds == {int} and all(value is None or -(2**63) <= value < 2**63 for value in values):
        return pa.array(values, pa.int64())
    if kinds and kinds <= {int, float}:
        return pa.array([None if value is None else float(value) for value in values], pa.float64())
    return pa.array([None if value is None else _text(value) for value in values], pa.string())


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def write_table(table: pa.Table, path: Path) -> None:
    """A Parquet file, whole or not at all."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".results-")
        os.close(handle)
        try:
            pq.write_table(table, temporary)
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise PipelineError(f"cannot write {path}: {error.strerror or error}; run it again to go on") from error


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".new")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def summarise(rows: Iterable[Row]) -> Iterator[tuple[dict[str, Any], int, int, dict[str, tuple[float, float, float]]]]:
    """By combination of parameters, in order: the parameters, how many seeds, how many failed, and of each figure that is a
    number its mean, minimum and maximum over the seeds that did not."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(repr(sorted(row.parameters.items())), []).append(row)
    for group in groups.values():
        figures: dict[str, tuple[float, float, float]] = {}
        for name in _names(row.figures for row in group):
            values = [float(value) for row in group if isinstance(value := row.figures.get(name), (bool, int, float))]
            if values:
                figures[name] = (math.fsum(values) / len(values), min(values), max(values))
        yield group[0].parameters, len(group), sum(row.error is not None for row in group), figures

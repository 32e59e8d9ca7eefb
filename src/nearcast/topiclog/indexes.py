"""Index files: the runs of a sealed segment as columns that are used where they lie, without being read in.

Opening the log reads the tables at the beginning (which topics, how far, how much); the columns behind them are mapped and
checked when a reader first needs the segment. Numbers are in the machine's own order, which the header names::

    header    "nearcast index 1 little\\n", then _HEADER
    tables    a row for each topic, by number; u32 numbers; the names; the marks to remember
    columns   u64 firsts; u32 topics, offsets, lengths, counts, postings; u32 logical, when the segment was written anew

An index is worth nothing without its segment and is made anew from it when it is missing, damaged, or of another version or
kind of machine.
"""

from __future__ import annotations

import struct
import sys
import zlib
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, Literal

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.marks import Mark, decode_marks, encode_marks
from nearcast.topiclog.runs import Part, RunColumns, column_bytes
from nearcast.topiclog.storage import Storage

VERSION: Final = 1
_MAGIC: Final = f"nearcast index {VERSION} {sys.byteorder}\n".encode()
_HEADER: Final = struct.Struct("=32sQQqIIIIIIII")
_HEADER_BYTES: Final = _HEADER.size
_ROW: Final = struct.Struct("=IIIIQQQQqq")
_ROW_BYTES: Final = _ROW.size
_HAS_LOGICAL: Final = 1


class Tables:
    """What stands at the beginning of an index file."""

    def __init__(self) -> None:
        self.log_bytes: int = 0
        """Size of the segment's file that the index describes."""
        self.logical_bytes: int = 0
        self.last_time_us: int = 0
        self.topic_count: int = 0
        self.marks: list[Mark] = []
        self.run_count: int = 0
        self.has_logical = False
        self.columns_at: int = 0
        self.columns_checksum: int = 0
        self.rows = b""
        self.names = b""

    def parts(self) -> list[Part]:
        """What the segment has of each topic, without its postings."""
        return [_part(self.rows, row, self.topic_count, self.names) for row in range(self.topic_count)]


def encode(
    runs: RunColumns, log_bytes: int, logical_bytes: int, last_time_us: int, marks: list[Mark], *, has_logical: bool
) -> list[bytes]:
    """The index file of a segment, in pieces."""
    rows: list[bytes] = []
    names: list[bytes] = []
    numbers = array("I")
    postings = array("I")
    name_at = 0
    for part in runs.parts():
        rows.append(
            _ROW.pack(
                part.number,
                name_at,
                len(postings),
                len(part.postings),
                part.first,
                part.next,
                part.floor,
                part.bytes,
                part.first_time_us,
                part.last_time_us,
            )
        )
        numbers.append(part.number)
        names.append(part.name)
        name_at += len(part.name)
        postings.extend(part.postings)
    mark_bytes = encode_marks(marks)
    tables = b"".join((*rows, column_bytes(numbers), *names, mark_bytes))
    tables += bytes(-len(tables) % 8)
    columns = [
        column_bytes(runs.firsts),
        column_bytes(runs.topics),
        column_bytes(runs.offsets),
        column_bytes(runs.lengths),
        column_bytes(runs.counts),
    ]
    columns.append(column_bytes(postings))
    if has_logical:
        columns.append(column_bytes(runs.logical))
    checksum = 0
    for column in columns:
        checksum = zlib.crc32(column, checksum)
    fields = (log_bytes, logical_bytes, last_time_us, len(rows), runs.count, name_at, len(mark_bytes))
    head = _HEADER.pack(_MAGIC, *fields, _HAS_LOGICAL if has_logical else 0, checksum, zlib.crc32(tables), 0)
    head = head[:-4] + struct.pack("=I", zlib.crc32(head[:-4]))
    return [head, tables, *columns]


def read_tables(storage: Storage, name: str) -> Tables:
    """The tables of an index file; raises :class:`StorageCorrupt` when it cannot be used."""
    path = storage.path(name)
    head = storage.read(name, 0, _HEADER_BYTES)
    if len(head) < _HEADER_BYTES:
        raise StorageCorrupt(path, 0, "the index ends inside its header", torn=True)
    (
        magic,
        log_bytes,
        logical_bytes,
        last_time_us,
        topic_count,
        run_count,
        names_bytes,
        marks_bytes,
        flags,
        columns_checksum,
        tables_checksum,
        head_checksum,
    ) = _HEADER.unpack(head)
    if magic.rstrip(b"\0") != _MAGIC or zlib.crc32(head[:-4]) != head_checksum:
        raise StorageCorrupt(path, 0, "this is not an index of a segment")
    tables_bytes = topic_count * (_ROW_BYTES + 4) + names_bytes + marks_bytes
    tables_bytes += -tables_bytes % 8
    data = storage.read(name, _HEADER_BYTES, tables_bytes)
    if zlib.crc32(data) != tables_checksum:
        raise StorageCorrupt(path, _HEADER_BYTES, "the checksum of the tables does not match")
    found = Tables()
    found.topic_count = topic_count
    found.log_bytes = log_bytes
    found.logical_bytes = logical_bytes
    found.last_time_us = last_time_us
    found.run_count = run_count
    found.has_logical = flags & _HAS_LOGICAL != 0
    found.columns_at = _HEADER_BYTES + tables_bytes
    found.columns_checksum = columns_checksum
    names_at = topic_count * (_ROW_BYTES + 4)
    marks_at = names_at + names_bytes
    found.rows = data[:names_at]
    found.names = data[names_at:marks_at]
    try:
        found.marks = decode_marks(data[marks_at : marks_at + marks_bytes])
    except ValueError as error:
        raise StorageCorrupt(path, _HEADER_BYTES + marks_at, f"a mark makes no sense: {error}") from error
    return found


class MappedRuns(RunColumns):
    """The runs of a sealed segment, in its index file. The columns, which may be large, are there from :meth:`settle` on."""

    def __init__(self, storage: Storage, name: str) -> None:
        super().__init__()
        tables = read_tables(storage, name)
        self.log_bytes = tables.log_bytes
        self._storage = storage
        self._name = name
        self._tables = tables
        self._is_settled = False
        self._postings: Sequence[int] = array("I")
        self._rows = tables.rows
        self._names = tables.names
        self._topic_count = tables.topic_count
        self._numbers = _column(memoryview(tables.rows), self._topic_count * _ROW_BYTES, self._topic_count, "I")

    def settle(self) -> None:
        if self._is_settled:
            return
        storage, name, tables = self._storage, self._name, self._tables
        path = storage.path(name)
        count = tables.run_count
        at = tables.columns_at
        end = at + count * (8 + 4 * (6 if tables.has_logical else 5))
        data = storage.view(name, end)
        if len(data) < end:
            raise StorageCorrupt(path, len(data), "the index ends inside its columns", torn=True)
        if zlib.crc32(data[at:end]) != tables.columns_checksum:
            raise StorageCorrupt(path, at, "the checksum of the columns does not match")
        self.count = count
        self.firsts = _column(data, at, count, "Q")
        at += 8 * count
        self.topics = _column(data, at, count, "I")
        self.offsets = _column(data, at + 4 * count, count, "I")
        self.lengths = _column(data, at + 8 * count, count, "I")
        self.counts = _column(data, at + 12 * count, count, "I")
        self._postings = _column(data, at + 16 * count, count, "I")
        self.logical = _column(data, at + 20 * count, count, "I") if tables.has_logical else self.offsets
        self._is_settled = True

    def part(self, number: int) -> Part | None:
        row = bisect_left(self._numbers, number)
        if row == self._topic_count or self._numbers[row] != number:
            return None
        return self._row(row)

    def parts(self) -> list[Part]:
        return [self._row(row) for row in range(self._topic_count)]

    def _row(self, row: int) -> Part:
        part = _part(self._rows, row, self._topic_count, self._names)
        part.postings = self._postings[part.postings_at : part.postings_at + part.postings_count]
        return part


def _part(rows: bytes, row: int, count: int, names: bytes) -> Part:
    at = row * _ROW_BYTES
    number, name_at, postings_at, postings_count, first, next_index, floor, size, first_time_us, last_time_us = (
        _ROW.unpack_from(rows, at)
    )
    name_end = len(names)
    if row + 1 < count:
        name_end = _ROW.unpack_from(rows, at + _ROW_BYTES)[1]
    part = Part(number, names[name_at:name_end], first)
    part.next = next_index
    part.floor = floor
    part.bytes = size
    part.first_time_us = first_time_us
    part.last_time_us = last_time_us
    part.postings_at = postings_at
    part.postings_count = postings_count
    return part


def _column(data: memoryview, offset: int, count: int, kind: Literal["I", "Q"]) -> Sequence[int]:
    if count == 0:
        return array(kind)
    return data[offset : offset + count * (8 if kind == "Q" else 4)].cast(kind)

"""Entries of a replicated log in the bytes of its segments: where they are, and what they say.

In a segment, an entry is the GROUPED blocks behind the entry before, and one MARK of ``RAFT`` that ends them: its
``batch`` is the entry's index, its ``part`` the term. Whatever else stands between, names of topics and what is repeated at
the beginning of a segment, is the replica's own and in no entry. This module knows bytes; which segment, its caller does.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.blocks import CHECKED_FROM, FLOOR, GROUPED, HEADER, HEADER_BYTES, LINK, MARK, RECORDS, TOPIC
from nearcast.topiclog.entries import EntryWriter, Run
from nearcast.topiclog.marks import RAFT, Mark, decode_mark
from nearcast.topiclog.topics import Topic

TERMS: Final = "$raft/terms"
"""The producer whose mark has in its body where terms begin."""
COMMITTED: Final = "$raft/committed"
"""The producer whose mark tells up to which entry the log was committed when it was closed. In no entry, only in the index."""
CONFIGURATIONS: Final = "$raft/configurations"
"""The producer whose mark has in its body the latest entries of that kind."""
DATA: Final = 1
"""The kind of entries that say something to the log. Those of other kinds are kept whole, in the mark's body."""
CONFIGURATION: Final = 2
NOOP: Final = 3

_BODY: Final = struct.Struct("<BQ")
_CONFIGURATION: Final = struct.Struct("<QI")
_TERM: Final = struct.Struct("<QQ")


def entry_mark(index: int, term: int, kind: int, committed_index: int, payload: bytes) -> Mark:
    """What ends an entry in the log. It also says how far the log was known to be committed when it was written."""
    return Mark(producer=RAFT, batch=index, part=term, body=_BODY.pack(kind, committed_index) + payload)


def kind_of(mark: Mark) -> int:
    """Of the entry that a mark ends."""
    return mark.body[0] if mark.body else DATA


def committed_by(mark: Mark) -> int:
    """The entry up to which the log was known to be committed when the mark was written."""
    return int(_BODY.unpack_from(mark.body)[1]) if len(mark.body) >= _BODY.size else 0


def payload_of(mark: Mark) -> bytes:
    """Of an entry that is not for the log."""
    return mark.body[_BODY.size :]


def encode_terms(firsts: list[int], terms: list[int]) -> bytes:
    """The body of the mark that says where terms begin."""
    return b"".join([_TERM.pack(first, term) for first, term in zip(firsts, terms, strict=True)])


def decode_terms(body: bytes) -> tuple[list[int], list[int]]:
    """(first entries, terms) of what :func:`encode_terms` made."""
    pairs = list(_TERM.iter_unpack(body[: len(body) // _TERM.size * _TERM.size]))
    return [first for first, _ in pairs], [term for _, term in pairs]


def encode_configurations(known_from: int, configurations: list[tuple[int, bytes]]) -> bytes:
    """The body of the mark that repeats entries about who belongs to the set: from which entry on they are all there, and
    (index, payload) of each."""
    pieces = [_CONFIGURATION.pack(index, len(payload)) + payload for index, payload in configurations]
    return b"".join([_CONFIGURATION.pack(known_from, 0), *pieces])


def decode_configurations(body: bytes) -> tuple[int, list[tuple[int, bytes]]]:
    """What :func:`encode_configurations` made."""
    found: list[tuple[int, bytes]] = []
    if len(body) < _CONFIGURATION.size:
        return 0, found
    known_from = int(_CONFIGURATION.unpack_from(body)[0])
    at = _CONFIGURATION.size
    while at + _CONFIGURATION.size <= len(body):
        index, size = _CONFIGURATION.unpack_from(body, at)
        at += _CONFIGURATION.size
        found.append((index, body[at : at + size]))
        at += size
    return known_from, found


class FoundEntry:
    """An entry's place in a segment: ``begin`` is where the one before ended."""

    def __init__(self, mark: Mark, begin: int, end: int) -> None:
        self.index = mark.batch
        self.term = mark.part
        self.mark = mark
        self.begin = begin
        self.end = end


def find_entries(data: memoryview, begin: i64, end: i64, last_index: int, path: str) -> list[FoundEntry]:
    """The entries that end between two offsets; ``last_index`` is that of the one before. A block that is not whole ends it.

    Only lengths and kinds are looked at. Marks that repeat what is further back, at a segment's beginning, are no entries:
    their index is not above ``last_index``.
    """
    found: list[FoundEntry] = []
    at = begin
    entry_begin = begin
    index = last_index
    while at + HEADER_BYTES + 4 <= end:
        length: i64 = int.from_bytes(data[at : at + 4], "little")
        if length > end - at:
            break
        if length < HEADER_BYTES + 4:
            raise StorageCorrupt(path, int(at), "no block begins here")
        kind = data[at + 8]
        if kind == LINK:
            entry_begin = at + length
        elif kind == MARK and not data[at + 9] & GROUPED:
            mark = mark_at(data, at, path)
            if mark.producer == RAFT and mark.batch > index:
                index = mark.batch
                found.append(FoundEntry(mark, entry_begin, at + length))
            entry_begin = at + length
        at += length
    return found


class Contents:
    """What a stretch of a segment brought, for the books: topics and marks, without the records."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.first_indexes: list[int] = []
        self.next_indexes: list[int] = []
        self.floors: list[tuple[int, int]] = []
        self.marks: list[Mark] = []
        self.time_us = 0


def contents_of(data: memoryview, begin: i64, end: i64, path: str) -> Contents:
    """What blocks between two offsets brought."""
    found = Contents()
    places: dict[int, int] = {}
    at = begin
    while at < end:
        length = _length_at(data, at, end, path)
        _, _, kind, flags, _, number, first, time_us, count, _ = HEADER.unpack_from(data, at)
        if kind != TOPIC:
            found.time_us = max(found.time_us, time_us)
        if kind == MARK:
            found.marks.append(mark_at(data, at, path))
        elif flags & GROUPED:
            place = places.get(number)
            if place is None:
                places[number] = len(found.numbers)
                found.numbers.append(number)
                found.first_indexes.append(first)
                found.next_indexes.append(first + count)
            else:
                found.next_indexes[place] = first + count
            if kind == TOPIC:
                found.floors.append((number, first))
        at += length
    return found


def make_again(data: memoryview, begin: i64, end: i64, numbered: dict[int, Topic], path: str) -> list[bytes]:
    """The entry between two offsets, as it came. Every block is checked: what is broken here does not go to others."""
    writer = EntryWriter()
    at = begin
    while at < end:
        length = _length_at(data, at, end, path)
        checksum = int.from_bytes(data[at + 4 : at + 8], "little")
        if zlib.crc32(data[at + CHECKED_FROM : at + length]) != checksum:
            raise StorageCorrupt(path, int(at), "the checksum does not match")
        _, _, kind, flags, publisher_bytes, number, _, time_us, count, properties_bytes = HEADER.unpack_from(data, at)
        if kind == RECORDS and flags & GROUPED:
            body = bytes(data[at + HEADER_BYTES : at + length])
            topic = _topic(numbered, number, path, at)
            writer.add(Run(topic, flags & ~GROUPED, time_us, count, publisher_bytes, properties_bytes, [body], len(body)))
        elif kind == TOPIC and flags & GROUPED and flags & FLOOR:
            writer.delete(_topic(numbered, number, path, at))
        elif kind == MARK and flags & GROUPED:
            mark = mark_at(data, at, path)
            if not mark.producer.startswith(RAFT):
                writer.mark(mark)
        at += length
    return writer.finish()


def mark_at(data: memoryview, at: i64, path: str) -> Mark:
    """The mark in the block at an offset."""
    fields = HEADER.unpack_from(data, at)
    body_at = at + HEADER_BYTES + 4
    body_bytes: i64 = fields[9]
    try:
        return decode_mark(data[body_at : body_at + body_bytes])
    except ValueError as error:
        raise StorageCorrupt(path, int(at), f"a mark makes no sense: {error}") from error


def _topic(numbered: dict[int, Topic], number: int, path: str, at: i64) -> bytes:
    topic = numbered.get(number)
    if topic is None:
        raise StorageCorrupt(path, int(at), f"topic {number} was not named before")
    return topic.name


def _length_at(data: memoryview, at: i64, end: i64, path: str) -> i64:
    """Of the block at an offset, which ends before ``end``."""
    length: i64 = 0
    if at + HEADER_BYTES + 4 <= end:
        length = int.from_bytes(data[at : at + 4], "little")
    if length < HEADER_BYTES + 4 or length & 7 or length > end - at:
        raise StorageCorrupt(path, int(at), "no block begins here")
    return length

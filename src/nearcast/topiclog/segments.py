"""A segment: one file of the log; its names, and how it is read again when it has no index.

Reading stops at the first block that is not whole. In the segment that grew last, that is the end of the log: a write that a
crash cut short. In an older one it is damage; if the next block begins where the broken one says, reading goes on there.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt, StorageUnavailable
from nearcast.topiclog.blocks import (
    CHECKED_FROM,
    FLOOR,
    GROUPED,
    HEADER,
    HEADER_BYTES,
    LINK,
    MARK,
    RECORDS,
    SEGMENT_HEADER,
    TOPIC,
    VERSION,
)
from nearcast.topiclog.marks import Mark, decode_mark
from nearcast.topiclog.runs import Part, RunColumns, Runs
from nearcast.topiclog.storage import Storage

SEGMENT_HEADER_BYTES: Final = 24
_FRAME: Final = struct.Struct("<II")
_ANY_HEADER: Final = re.compile(rb"nearcast topics ([1-9]\d{0,8})\n")
_LOG_NAME: Final = re.compile(r"(\d{10})(?:\.(\d{1,6}))?\.log")


def log_name(sequence: int, generation: int) -> str:
    """The file of a segment; every time it is written anew it gets the next generation."""
    return f"{sequence:010d}.{generation}.log" if generation else f"{sequence:010d}.log"


def index_name(name: str) -> str:
    """The index file of a segment's file."""
    return name[: -len(".log")] + ".index"


def parse_log_name(name: str) -> tuple[int, int] | None:
    """(sequence, generation) of a segment's file; None for any other."""
    found = _LOG_NAME.fullmatch(name)
    return (int(found.group(1)), int(found.group(2) or 0)) if found else None


def too_new(path: str) -> StorageUnavailable:
    """What to say about files that a later version wrote."""
    return StorageUnavailable(path, "was written by a newer version of nearcast: use that version, or another directory")


def check_version(storage: Storage, name: str) -> None:
    """Raises :class:`StorageUnavailable` for a segment that a newer version wrote."""
    found = _ANY_HEADER.match(storage.read(name, 0, 64))
    if found is not None and int(found.group(1)) > VERSION:
        raise too_new(storage.path(name))


class Segment:
    """One file of the log."""

    def __init__(self, sequence: int, generation: int) -> None:
        self.sequence = sequence
        self.generation = generation
        self.name = log_name(sequence, generation)
        self.size: i64 = 0
        """How much of the file is written."""
        self.logical_size: i64 = 0
        """Where its positions end: more than ``size`` once it was written anew."""
        self.last_time_us: i64 = 0
        """Of its youngest block."""
        self.live_bytes: i64 = 0
        """Bytes of blocks that a reader may still want."""
        self.whole_bytes: i64 = 0
        """What ``live_bytes`` was when the file was written."""
        self.marks: list[Mark] = []
        """Marks to remember, as they stood at its end."""
        self.runs: RunColumns | None = None
        """In memory, or mapped while it is in use."""
        self.has_index = False
        """Whether there is an index file, so that ``runs`` can be let go."""
        self.view = memoryview(b"")
        self.has_deletions = False
        """Whether it says of topics that all their records before were removed: older segments may still have them."""


class Scanned:
    """What is in a segment's file."""

    def __init__(self) -> None:
        self.runs = Runs()
        self.end: int = 0
        """Where the last block ends that counts."""
        self.last_time_us: int = 0
        self.marks: list[tuple[int, Mark]] = []
        """All marks in it, with their offsets."""
        self.damage: list[StorageCorrupt] = []
        self.floors: list[tuple[int, int, int]] = []
        """Topics that a group emptied, with the group's end: (offset behind it, topic, floor)."""
        self.repeated_marks: int = -1
        """How many of the marks are repeated from before, says its LINK; -1: there is none."""

    def apply_floors(self, end: int) -> None:
        """What groups emptied that end up to here is gone: they are committed."""
        for at, number, floor in self.floors:
            part = self.runs.part(number)
            if at <= end and part is not None:
                part.floor = max(part.floor, floor)

    @property
    def is_begun(self) -> bool:
        """Whether its beginning is whole: the link, and the marks that are repeated from before."""
        return 0 <= self.repeated_marks <= len(self.marks)


class _Group:
    """Blocks that wait for their mark."""

    def __init__(self, is_used: bool) -> None:
        self.is_used = is_used
        self.last_time_us = 0
        self.blocks: list[tuple[Part, int, int, int, int, int]] = []
        self.floors: list[tuple[int, int]] = []
        self.marks: list[tuple[int, Mark]] = []

    @property
    def is_open(self) -> bool:
        return bool(self.blocks or self.floors or self.marks)

    def clear(self) -> None:
        self.blocks.clear()
        self.floors.clear()
        self.marks.clear()

    def drop(self, last_time_us: int) -> None:
        """They do not exist."""
        self.clear()
        self.last_time_us = last_time_us


def scan(storage: Storage, name: str, *, is_last: bool, known: Scanned | None = None) -> Scanned:
    """Read a whole segment, or what follows the part that is known. One that is not the last goes on behind damage, where it
    can."""
    found = known if known is not None else Scanned()
    size: i64 = storage.size(name)
    view = storage.view(name, size)
    path = storage.path(name)
    if size < SEGMENT_HEADER_BYTES:
        if size or not is_last:
            found.damage.append(StorageCorrupt(path, 0, "the file ends inside its header", torn=True))
        return found
    if bytes(view[:SEGMENT_HEADER_BYTES]) != SEGMENT_HEADER:
        found.damage.append(StorageCorrupt(path, 0, "this is not a segment of a topic log"))
        return found
    offset: i64 = max(found.end, SEGMENT_HEADER_BYTES)
    found.end = offset
    parsed = parse_log_name(name)
    # Whoever wrote a segment anew took whole groups, and no marks.
    group = _Group(parsed is None or parsed[1] == 0)
    group.last_time_us = found.last_time_us
    while offset < size:
        problem = _problem_at(view, offset, size)
        if problem:
            found.damage.append(StorageCorrupt(path, offset, problem, torn=problem.startswith("the file ends")))
            behind = -1 if is_last else _behind(view, offset, size)
            if behind < 0:
                break
            group.drop(found.last_time_us)
            offset = behind
            continue
        offset += _take(found, group, view, offset, path)
        if not group.is_open:
            found.end = offset
            found.last_time_us = group.last_time_us
    if is_last:
        if found.end == SEGMENT_HEADER_BYTES:
            found.end = 0  # a beginning that is not whole is written again
        found.runs.forget_from(found.end)
    return found


def _problem_at(view: memoryview, offset: i64, size: i64) -> str:
    """What is wrong with the block at an offset; "" if nothing is."""
    if offset + HEADER_BYTES + 4 > size:
        return "the file ends inside a block"
    found = _FRAME.unpack_from(view, offset)
    length: i64 = found[0]
    if length == 0:  # nobody writes an empty block; zeros are what a file system leaves after a power cut
        return "zeros where a block should be"
    if length < HEADER_BYTES + 4 or length & 7:
        return "no block begins here"
    if offset + length > size:
        return "the file ends inside a block"
    if zlib.crc32(view[offset + CHECKED_FROM : offset + length]) != found[1]:
        return "the checksum does not match"
    return ""


def _behind(view: memoryview, offset: i64, size: i64) -> i64:
    """Where a whole block begins behind a broken one, if its length can be believed; -1 if not."""
    length: i64 = int.from_bytes(view[offset : offset + 4], "little")
    behind = offset + length
    if length < HEADER_BYTES + 4 or length & 7 or behind >= size or _problem_at(view, behind, size):
        return -1
    return behind


def _take(found: Scanned, group: _Group, view: memoryview, offset: i64, path: str) -> i64:
    """Take note of a whole block; returns its length."""
    (
        length,
        _,
        kind,
        flags,
        publisher_bytes,
        number,
        first,
        time_us,
        count,
        properties_bytes,
    ) = HEADER.unpack_from(view, offset)
    # A name may be there without the group that it was written for: its time says nothing.
    if kind != TOPIC and time_us > group.last_time_us:
        group.last_time_us = time_us
    runs = found.runs
    if kind == RECORDS:
        part = runs.part(number)
        if part is None:
            found.damage.append(StorageCorrupt(path, offset, f"topic {number} was not named before"))
        elif flags & GROUPED and group.is_used:
            group.blocks.append((part, first, offset, length, count, time_us))
        else:
            group.clear()
            runs.add(part, first, offset, length, count, time_us, time_us)
        return int(length)
    body_at = offset + HEADER_BYTES + 4 * (count + 1) + publisher_bytes
    body = bytes(view[body_at : body_at + properties_bytes])
    if kind == TOPIC:
        part = runs.declare(number, body, first, offset)
        if flags & GROUPED:
            group.floors.append((number, first))
            return int(length)
        if flags & FLOOR:
            part.floor = max(part.floor, first)
        if part.first == part.next and part.next < first:
            part.first = part.next = first
    elif kind == MARK:
        try:
            mark = decode_mark(body)
        except ValueError as error:
            found.damage.append(StorageCorrupt(path, offset, f"a mark makes no sense: {error}"))
            group.clear()
            return int(length)
        if flags & GROUPED:
            group.marks.append((int(offset), mark))
            return int(length)
        for part, first, at, size, records, time in group.blocks:
            runs.add(part, first, at, size, records, time, time)
        found.marks += group.marks
        found.marks.append((int(offset), mark))
        end = int(offset) + int(length)
        found.floors += [(end, number, floor) for number, floor in group.floors]
        group.clear()
    elif kind == LINK:
        found.repeated_marks = number
    else:
        # The block is whole, so this was meant: damage would not have passed the checksum.
        raise too_new(path)
    return int(length)


def linked_size(storage: Storage, name: str) -> int:
    """The size of the segment before this one, as this one's beginning has it; -1 when it has none, or is not that whole."""
    head = memoryview(storage.read(name, SEGMENT_HEADER_BYTES, HEADER_BYTES + 8))
    if len(head) < HEADER_BYTES + 8 or _problem_at(head, 0, len(head)):
        return -1
    fields = HEADER.unpack_from(head, 0)
    return int(fields[6]) if fields[2] == LINK else -1


def repeated_marks(storage: Storage, name: str) -> list[Mark]:
    """The marks that a segment begins with, as far as they are whole."""
    data = storage.view(name, storage.size(name))
    found: list[Mark] = []
    at: i64 = SEGMENT_HEADER_BYTES
    size: i64 = len(data)
    left = -1
    while left and not _problem_at(data, at, size):
        fields = HEADER.unpack_from(data, at)
        body_at = at + HEADER_BYTES + 4
        if fields[2] == LINK:
            left = fields[5]
        elif left < 0 or fields[2] != MARK:
            break
        else:
            left -= 1
            try:
                found.append(decode_mark(data[body_at : body_at + fields[9]]))
            except ValueError:
                break
        at += fields[0]
    return found

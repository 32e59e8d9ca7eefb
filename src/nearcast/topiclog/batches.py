"""Blocks back into records: what a reader of the log's bytes does with them.

``parse`` is for people and small amounts; whoever wants columns takes them out of whole blocks (:func:`blocks`).
This module knows bytes, and names of topics only as its caller gives them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.blocks import CHECKED_FROM, HEADER, HEADER_BYTES, QOS_MASK, RECORDS, RETAIN


class Record:
    """One message, as it is in the log. ``payload`` is a view into the bytes it was read from."""

    __slots__ = ("index", "payload", "properties", "publisher", "qos", "retain", "time_us", "topic")

    def __init__(
        self,
        topic: str,
        index: int,
        time_us: int,
        publisher: str,
        qos: int,
        retain: bool,
        properties: bytes,
        payload: memoryview,
    ) -> None:
        self.topic = topic
        self.index = index
        self.time_us = time_us
        self.publisher = publisher
        self.qos = qos
        self.retain = retain
        self.properties = properties
        self.payload = payload

    def __repr__(self) -> str:
        return f"Record({self.topic!r}, {self.index}, {len(self.payload)} bytes)"


class Block:
    """The header of a block of records at ``offset`` in ``data``, and where its parts begin."""

    __slots__ = (
        "checksum",
        "count",
        "data",
        "first_index",
        "flags",
        "kind",
        "length",
        "offset",
        "payloads_at",
        "properties_at",
        "properties_bytes",
        "publisher_at",
        "publisher_bytes",
        "time_us",
        "topic",
    )

    def __init__(self, data: memoryview, offset: int) -> None:
        (
            length,
            checksum,
            kind,
            flags,
            publisher_bytes,
            topic,
            first_index,
            time_us,
            count,
            properties_bytes,
        ) = HEADER.unpack_from(data, offset)
        at: i64 = offset
        records: i64 = count
        self.data = data
        self.offset = offset
        self.length: int = length
        self.checksum: int = checksum
        self.kind: int = kind
        self.flags: int = flags
        self.topic: int = topic
        self.first_index: int = first_index
        self.time_us: int = time_us
        self.count: int = count
        self.publisher_bytes: int = publisher_bytes
        self.properties_bytes: int = properties_bytes
        self.publisher_at: int = at + HEADER_BYTES + 4 * (records + 1)
        self.properties_at: int = self.publisher_at + self.publisher_bytes
        self.payloads_at: int = self.properties_at + self.properties_bytes

    def check(self) -> bool:
        """Whether the checksum is right and all parts lie inside the block."""
        begin = self.offset
        end = begin + self.length
        if end > len(self.data) or self.payloads_at > end:
            return False
        return zlib.crc32(self.data[begin + CHECKED_FROM : end]) == self.checksum

    def publisher(self) -> str:
        """The client identifier of whoever published these."""
        return str(self.data[self.publisher_at : self.properties_at], "utf-8", "replace")

    def properties(self) -> bytes:
        """MQTT 5 properties that the records share, encoded, without their length."""
        return bytes(self.data[self.properties_at : self.payloads_at])

    def offsets(self) -> memoryview:
        """Where payloads begin and end, from ``payloads_at`` on: count + 1 numbers."""
        begin = self.offset + HEADER_BYTES
        return self.data[begin : self.publisher_at].cast("I")

    def payload_bytes(self) -> int:
        """Of all payloads together."""
        at = self.publisher_at
        return int.from_bytes(self.data[at - 4 : at], "little")

    def record(self, number: int, name: str) -> Record:
        """The record ``number`` (from 0) of this block."""
        position: i64 = self.offset + HEADER_BYTES + 4 * number
        begin = int.from_bytes(self.data[position : position + 4], "little")
        end = int.from_bytes(self.data[position + 4 : position + 8], "little")
        return Record(
            name,
            self.first_index + number,
            self.time_us,
            self.publisher(),
            self.flags & QOS_MASK,
            self.flags & RETAIN != 0,
            self.properties(),
            self.data[self.payloads_at + begin : self.payloads_at + end],
        )


def blocks(data: bytes | memoryview, where: str = "a batch", *, check: bool = True) -> Iterator[Block]:
    """All blocks of records in ``data``, which holds whole blocks; :class:`StorageCorrupt` names the place of a broken one."""
    view = memoryview(data)
    offset = 0
    end = len(view)
    while offset < end:
        if offset + HEADER_BYTES > end:
            raise StorageCorrupt(where, offset, "ends inside a block", torn=True)
        block = Block(view, offset)
        if block.length < HEADER_BYTES + 4 or offset + block.length > end:
            raise StorageCorrupt(where, offset, "ends inside a block", torn=True)
        if check and not block.check():
            raise StorageCorrupt(where, offset, "the checksum does not match")
        if block.kind == RECORDS:
            yield block
        offset += block.length


def tally(data: bytes | memoryview, where: str = "a batch") -> tuple[int, int]:
    """(records, payload bytes) in ``data``, every block checked: a batch is whole, or :class:`StorageCorrupt` is raised."""
    held = data if isinstance(data, bytes) else bytes(data)  # compiled code reads bytes without a call, and views with several
    end: i64 = len(held)
    offset: i64 = 0
    records: i64 = 0
    payload_bytes: i64 = 0
    while offset < end:
        if offset + HEADER_BYTES + 4 > end:
            raise StorageCorrupt(where, offset, "ends inside a block", torn=True)
        length = _number(held, offset)
        count = _number(held, offset + 32)
        if length < HEADER_BYTES + 4 * (count + 1) or offset + length > end:
            raise StorageCorrupt(where, offset, "ends inside a block", torn=True)
        if zlib.crc32(held[offset + CHECKED_FROM : offset + length]) != _number(held, offset + 4):
            raise StorageCorrupt(where, offset, "the checksum does not match")
        records += count
        payload_bytes += _number(held, offset + HEADER_BYTES + 4 * count)
        offset += length
    return records, payload_bytes


def _number(data: bytes, at: i64) -> i64:
    low: i64 = data[at]
    second: i64 = data[at + 1]
    third: i64 = data[at + 2]
    high: i64 = data[at + 3]
    return low + (second << 8) + (third << 16) + (high << 24)


def parse(
    data: bytes | memoryview,
    names: Mapping[int, str],
    *,
    start: int = 0,
    end: int = 1 << 63,
    check: bool = True,
) -> Iterator[Record]:
    """Every record in ``data`` with an index from ``start`` on and below ``end``; ``names`` says how topics are called."""
    for block in blocks(data, check=check):
        first = block.first_index
        name = names.get(block.topic)
        if name is None:
            raise StorageCorrupt("a batch", block.offset, f"topic {block.topic} was never announced")
        for number in range(max(0, start - first), min(block.count, end - first)):
            yield block.record(number, name)

"""The format of the log: blocks. A segment file is a header and blocks; the read port sends the very same bytes.

A block is checksummed and holds messages that share topic, publisher, properties and arrival: what one publication brought.
All numbers are little-endian, offsets stand in the form that Arrow uses, and a block begins at a multiple of 8 bytes, so that
a reader can take whole columns out of it without a copy::

    at   size
     0   u32   length of the block, this field and the padding included: a multiple of 8
     4   u32   crc32 of everything that follows, padding included
     8   u8    kind
     9   u8    flags: QoS (bits 0 and 1), RETAIN, GROUPED, FLOOR
    10   u16   publisher_bytes
    12   u32   topic, as numbered by this log; a TOPIC block of the same segment precedes its first use there
    16   u64   first_index: the topic's index of the first record; the others count on from it
    24   i64   time_us: when the broker took them, microseconds since 1970; never falls from one block to the next
    32   u32   count of records
    36   u32   properties_bytes
    40   u32   offsets[count + 1] of the payloads, from the first payload's first byte; the first is 0
         ...   publisher (a client identifier), properties (MQTT 5, encoded, without their length), payloads, zeros

Other kinds use the same header with a count of 0 and one offset of 0; their body stands where the properties are:

- TOPIC: the name of ``topic``; ``first_index`` is the index its next record gets. With FLOOR, it is the oldest index there is:
  records below it were removed, even where a file still has them.
- MARK: who wrote the GROUPED blocks right before it, and how far it has come (:class:`nearcast.topiclog.marks.Mark`, as
  MessagePack). GROUPED blocks that no MARK follows do not exist: together they are there or not. A MARK that is GROUPED itself
  does not end the group but belongs to it, and so does a TOPIC with FLOOR.
- LINK: first in every segment: ``first_index`` is the size that the segment before had when this one was begun, because a
  file system may keep the end of one file in a power cut and lose that of another; ``topic`` is how many marks follow that
  are remembered from before.

This module knows bytes; it knows no files, no topics' state, and no clock.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from mypy_extensions import i64

VERSION: Final = 1
SEGMENT_HEADER: Final = b"nearcast topics %d\n\0\0\0\0\0\0" % VERSION
"""24 bytes, so that the first block is aligned."""

HEADER: Final = struct.Struct("<IIBBHIQqII")
HEADER_BYTES: Final = 40
CHECKED_FROM: Final = 8
"""What the checksum does not cover."""
TIME_AT: Final = 24
"""Where in a block its time stands."""

RECORDS: Final = 1
TOPIC: Final = 2
MARK: Final = 3
LINK: Final = 4

QOS_MASK: Final = 0x03
RETAIN: Final = 0x04
GROUPED: Final = 0x08
FLOOR: Final = 0x10

MAX_BLOCK_BYTES: Final = 1 << 30

_REST: Final = struct.Struct("<BBHIQqII")
_SIZES: Final = struct.Struct("<II")
_PADDING: Final = b"\0\0\0\0\0\0\0"
_COPIED_BYTES: Final = 2_048
"""Payloads up to this size are copied into their block; larger ones stay pieces of their own on their way to the disk."""


def encode(
    kind: int,
    flags: int,
    topic: int,
    first_index: int,
    time_us: int,
    publisher: bytes,
    properties: bytes,
    payloads: list[bytes],
) -> bytes:
    """One block."""
    pieces: list[bytes] = []
    encode_into(pieces, kind, flags, topic, first_index, time_us, publisher, properties, payloads)
    return b"".join(pieces)


def encode_into(
    pieces: list[bytes],
    kind: int,
    flags: int,
    topic: int,
    first_index: int,
    time_us: int,
    publisher: bytes,
    properties: bytes,
    payloads: list[bytes],
) -> int:
    """Add one block to ``pieces``, without a copy of large payloads; returns the block's length."""
    count = len(payloads)
    if count == 1:
        payload = payloads[0]
        offsets = _SIZES.pack(0, len(payload))
    else:
        ends = [0]
        end = 0
        for item in payloads:
            end += len(item)
            ends.append(end)
        offsets = struct.pack(f"<{count + 1}I", *ends)
        payload = b"".join(payloads)
    size: i64 = HEADER_BYTES + len(offsets) + len(publisher) + len(properties) + len(payload)
    padding_bytes: i64 = -size & 7
    size += padding_bytes
    padding = _PADDING[:padding_bytes]
    rest = _REST.pack(kind, flags, len(publisher), topic, first_index, time_us, count, len(properties))
    if len(payload) <= _COPIED_BYTES:
        checked = b"".join((rest, offsets, publisher, properties, payload, padding))
        pieces.append(_SIZES.pack(size, zlib.crc32(checked)))
        pieces.append(checked)
    else:
        head = b"".join((rest, offsets, publisher, properties))
        checksum = zlib.crc32(padding, zlib.crc32(payload, zlib.crc32(head)))
        pieces.append(_SIZES.pack(size, checksum) + head)
        pieces.append(payload)
        if padding_bytes:
            pieces.append(padding)
    return size


def encode_body(publisher: bytes, properties: bytes, payloads: list[bytes]) -> list[bytes]:
    """What stands behind a block's header: in one piece, or in several around large payloads, which are not copied."""
    count = len(payloads)
    if count == 1:
        payload = payloads[0]
        offsets = _SIZES.pack(0, len(payload))
    else:
        ends = [0]
        end = 0
        for item in payloads:
            end += len(item)
            ends.append(end)
        offsets = struct.pack(f"<{count + 1}I", *ends)
        payload = b"".join(payloads)
    size: i64 = HEADER_BYTES + len(offsets) + len(publisher) + len(properties) + len(payload)
    padding = _PADDING[: -size & 7]
    if len(payload) <= _COPIED_BYTES:
        return [b"".join((offsets, publisher, properties, payload, padding))]
    return [b"".join((offsets, publisher, properties)), payload, padding]


def encode_records(
    pieces: list[bytes],
    flags: int,
    topic: int,
    first_index: int,
    time_us: int,
    count: int,
    publisher_bytes: int,
    properties_bytes: int,
    body: list[bytes],
    body_bytes: int,
) -> int:
    """Add a block of records whose body is there already; returns the block's length."""
    size: i64 = HEADER_BYTES + body_bytes
    rest = _REST.pack(RECORDS, flags, publisher_bytes, topic, first_index, time_us, count, properties_bytes)
    checksum = zlib.crc32(rest)
    for piece in body:
        checksum = zlib.crc32(piece, checksum)
    pieces.append(_SIZES.pack(size, checksum) + rest)
    pieces.extend(body)
    return size

"""The format of the log: blocks. A segment file is a header and blocks; the read port sends the very same bytes.

A block is checksummed and holds messages that share topic, publisher, properties and arrival: what one publication brought.
All numbers are little-endian, offsets stand in the form that Arrow uses, and a block begins at a multiple of 8 bytes, so that
a reader can take whole columns out of it without a copy::

    at   size
     0   u32   length of the block, this field and the padding included: a multiple of 8
     4   u32   crc32 of everything that follows, padding included
     8   u8    kind
     9   u8    flags: QoS (bits 0 and 1), RETAIN, GROUPED
    10   u16   publisher_bytes
    12   u32   topic, as numbered by this log; a TOPIC block of the same segment precedes its first use there
    16   u64   first_index: the topic's index of the first record; the others count on from it
    24   i64   time_us: when the broker took them, microseconds since 1970; never falls from one block to the next
    32   u32   count of records
    36   u32   properties_bytes
    40   u32   offsets[count + 1] of the payloads, from the first payload's first byte; the first is 0
         ...   publisher (a client identifier), properties (MQTT 5, encoded, without their length), payloads, zeros

Other kinds use the same header with a count of 0 and one offset of 0; their body stands where the properties are:

- TOPIC: the name of ``topic``; ``first_index`` is the index its next record gets.
- MARK: who wrote the GROUPED blocks right before it, and how far it has come (:class:`nearcast.topiclog.marks.Mark`, as
  MessagePack). GROUPED blocks that no MARK follows do not exist: together they are there or not.

This module knows bytes; it knows no files, no topics' state, and no clock.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

VERSION: Final = 1
SEGMENT_HEADER: Final = b"nearcast topics %d\n\0\0\0\0\0\0" % VERSION
"""24 bytes, so that the first block is aligned."""

HEADER: Final = struct.Struct("<IIBBHIQqII")
HEADER_BYTES: Final = 40
CHECKED_FROM: Final = 8
"""What the checksum does not cover."""

RECORDS: Final = 1
TOPIC: Final = 2
MARK: Final = 3

QOS_MASK: Final = 0x03
RETAIN: Final = 0x04
GROUPED: Final = 0x08

MAX_BLOCK_BYTES: Final = 1 << 30
MAX_PUBLISHER_BYTES: Final = 65_535

_REST: Final = struct.Struct("<BBHIQqII")
_SIZES: Final = struct.Struct("<II")
_PADDING: Final = b"\0\0\0\0\0\0\0"


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
    count = len(payloads)
    if count == 1:
        offsets = _SIZES.pack(0, len(payloads[0]))
        payload = payloads[0]
    else:
        ends = [0]
        end = 0
        for item in payloads:
            end += len(item)
            ends.append(end)
        offsets = struct.pack(f"<{count + 1}I", *ends)
        payload = b"".join(payloads)
    size = HEADER_BYTES + len(offsets) + len(publisher) + len(properties) + len(payload)
    padding = _PADDING[: -size % 8]
    checked = b"".join(
        (
            _REST.pack(kind, flags, len(publisher), topic, first_index, time_us, count, len(properties)),
            offsets,
            publisher,
            properties,
            payload,
            padding,
        )
    )
    return _SIZES.pack(size + len(padding), zlib.crc32(checked)) + checked

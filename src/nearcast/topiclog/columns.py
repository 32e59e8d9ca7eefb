"""Where the blocks of a piece of the log begin: the one loop that taking columns out of it needs.

Owns the walk along the lengths, checking checksums as it goes; what the blocks hold is taken by whole columns elsewhere
(:mod:`nearcast.pipeline.arrow`). Where every block holds one small record, this loop is what reading costs: it is compiled.
"""

from __future__ import annotations

import zlib
from typing import Final

from mypy_extensions import i64

from nearcast.errors import RemoteProtocolError

_MALFORMED: Final = 0x81
_MIN_BLOCK_BYTES: Final = 48
"""A header, the offsets of an empty body and the padding."""


def block_starts(data: bytes) -> list[int]:
    """The position of each block.

    Raises ``RemoteProtocolError`` when the lengths do not lead exactly to the end, or a checksum is wrong.
    """
    starts: list[int] = []
    end: i64 = len(data)
    position: i64 = 0
    while position < end:
        if end - position < _MIN_BLOCK_BYTES:
            raise RemoteProtocolError(_MALFORMED, f"a block of the log is cut off at byte {position} of {end}")
        # Four reads and no call: what makes this loop fast when compiled.
        low: i64 = data[position]
        second: i64 = data[position + 1]
        third: i64 = data[position + 2]
        high: i64 = data[position + 3]
        length: i64 = low + (second << 8) + (third << 16) + (high << 24)
        if length < _MIN_BLOCK_BYTES or length & 7 or length > end - position:
            raise RemoteProtocolError(_MALFORMED, f"a block of the log at byte {position} of {end} says it has {length} bytes")
        expected: i64 = data[position + 4]
        second = data[position + 5]
        third = data[position + 6]
        high = data[position + 7]
        expected += (second << 8) + (third << 16) + (high << 24)
        if zlib.crc32(data[position + 8 : position + length]) != expected:
            raise RemoteProtocolError(_MALFORMED, f"the checksum of a block of the log at byte {position} of {end} is wrong")
        starts.append(position)
        position += length
    return starts

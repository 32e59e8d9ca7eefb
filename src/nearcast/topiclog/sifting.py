"""Taking out of whole blocks what a reader has yet to get: the one loop that a stream over several topics runs per block.

Blocks that are wanted whole stay where they are, adjacent ones in one chunk; only a block of which some records are wanted is
made anew. This module knows bytes and indexes; what becomes of them is :mod:`nearcast.topiclog.streams`'s business.
"""

from __future__ import annotations

import struct
from typing import Final

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.batches import Block
from nearcast.topiclog.blocks import HEADER_BYTES, RECORDS, encode
from nearcast.topiclog.topics import Topic

_WALKED: Final = struct.Struct("<I8xIQqI")


class Sifted:
    """What was found."""

    def __init__(self) -> None:
        self.chunks: list[bytes | memoryview] = []
        self.next_indexes: dict[int, int] = {}
        """Where to go on, of each topic that something was found of."""
        self.gaps: list[tuple[int, int, int]] = []
        """(topic number, first missing index, first that is there)."""
        self.reached_end_time = False


def sift(data: memoryview, nexts: dict[int, int], ends: dict[int, int], topics: dict[int, Topic], end_time_us: int) -> Sifted:
    """The records from ``nexts`` on, below ``ends`` and before a time, of topics by their number."""
    found = Sifted()
    chunks = found.chunks
    reached = found.next_indexes
    size: i64 = len(data)
    begin: i64 = 0
    offset: i64 = 0
    until_us: i64 = end_time_us
    while offset < size:
        if size - offset < HEADER_BYTES:
            raise StorageCorrupt("the topic log", offset, "a block reaches beyond the bytes that were read", torn=True)
        length_read, number, first_read, time_read, count_read = _WALKED.unpack_from(data, offset)
        length: i64 = length_read
        if length < HEADER_BYTES + 4 or length > size - offset:
            raise StorageCorrupt("the topic log", offset, "a block reaches beyond the bytes that were read", torn=True)
        time_us: i64 = time_read
        if time_us >= until_us:
            found.reached_end_time = True
            break
        first: i64 = first_read
        after: i64 = count_read
        after += first
        known = reached.get(number)
        following: i64 = nexts[number] if known is None else known
        floor: i64 = topics[number].first_index
        low = first if first > following else following
        if floor > low:
            low = floor
        end = ends[number]
        high = after if after < end else i64(end)
        if low != first or high != after:
            if begin < offset:
                chunks.append(data[begin:offset])
            begin = offset + length
            if low < high:
                chunks.append(part_of(Block(data, offset), low, high))
        if low < high:
            if low > following:
                found.gaps.append((number, following, low))
            reached[number] = high
        offset += length
    if begin < offset:
        chunks.append(data[begin:offset])
    return found


def part_of(block: Block, low: int, high: int) -> bytes:
    """A block of some of a block's records: those from index ``low`` on and below ``high``."""
    first = block.first_index
    ends = block.offsets()
    base = block.payloads_at
    payloads = [bytes(block.data[base + ends[at] : base + ends[at + 1]]) for at in range(low - first, high - first)]
    publisher = bytes(block.data[block.publisher_at : block.properties_at])
    return encode(RECORDS, block.flags, block.topic, low, block.time_us, publisher, block.properties(), payloads)

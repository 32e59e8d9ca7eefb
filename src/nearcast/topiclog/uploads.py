"""Rows on their way into a batch: how a producer packs them, and how the broker takes them apart again.

Rows travel and wait in blocks of the log: a TOPIC block gives a name its number within the upload, and RECORDS blocks hold the
rows; index, time and publisher are left open. Rows of one piece that share topic, properties and flags share a block: the rows
of a topic stay in their order, while those of different topics need not.
The broker trusts none of it: :class:`UploadReader` checks every byte, whatever way the upload is cut into pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import sub
from typing import Final

from nearcast.errors import BatchRefused, RemoteProtocolError
from nearcast.topiclog import blocks
from nearcast.topiclog.batches import Block

PIECE_BYTES: Final = 524_288
"""What is sent at once."""

MAX_TOPICS: Final = 1_000_000
"""Topics of one upload."""

_MALFORMED: Final = 0x81


class StagedRows:
    """Packs the rows of one upload. ``max_frame_bytes`` is what the broker takes in one piece."""

    def __init__(self, max_frame_bytes: int) -> None:
        self._max_row_bytes = max_frame_bytes - 4 * blocks.HEADER_BYTES
        self._piece_bytes = min(PIECE_BYTES, self._max_row_bytes)
        self._topics: dict[str, int] = {}
        self.rows = 0

    def encode(self, rows: Iterable[tuple[str, bytes, bytes, int]]) -> Iterator[bytes]:
        """Pieces to send, of whole blocks, for rows (topic, payload, encoded properties, flags)."""
        gathered: list[bytes] = []
        open_groups: dict[str, tuple[bytes, int, list[bytes]]] = {}
        size = 0
        for topic, payload, properties, flags in rows:
            if len(payload) + len(properties) + len(topic) > self._max_row_bytes:
                raise BatchRefused(f"row {self.rows} has {len(payload):,} bytes; the broker takes {self._max_row_bytes:,}")
            if size and size + len(payload) > self._piece_bytes:
                self._close_all(gathered, open_groups)
                yield b"".join(gathered)
                gathered, size = [], 0
            group = open_groups.get(topic)
            if group is not None and group[0] == properties and group[1] == flags:
                group[2].append(payload)
                size += len(payload) + 4
            else:
                # Rows of one topic stay in their order: what shares its block with others ends here.
                if group is not None:
                    self._close(gathered, topic, *group)
                open_groups[topic] = (properties, flags, [payload])
                size += len(payload) + len(properties) + 2 * len(topic) + 2 * blocks.HEADER_BYTES + 32
            self.rows += 1
        self._close_all(gathered, open_groups)
        if gathered:
            yield b"".join(gathered)

    def _close_all(self, gathered: list[bytes], open_groups: dict[str, tuple[bytes, int, list[bytes]]]) -> None:
        for topic, group in open_groups.items():
            self._close(gathered, topic, *group)
        open_groups.clear()

    def _close(self, gathered: list[bytes], topic: str, properties: bytes, flags: int, payloads: list[bytes]) -> None:
        number = self._topics.get(topic)
        if number is None:
            number = self._topics[topic] = len(self._topics) + 1
            gathered.append(blocks.encode(blocks.TOPIC, 0, number, 0, 0, b"", topic.encode("utf-8", "surrogatepass"), []))
        gathered.append(blocks.encode(blocks.RECORDS, flags, number, 0, 0, b"", properties, payloads))


class Rows:
    """Rows that share topic, properties and flags."""

    __slots__ = ("flags", "largest", "payloads", "properties", "topic")

    def __init__(self, topic: bytes, flags: int, properties: bytes, payloads: list[bytes], largest: int) -> None:
        self.topic = topic
        self.flags = flags
        self.properties = properties
        self.payloads = payloads
        self.largest = largest
        """Bytes of the largest payload."""


class UploadReader:
    """Reads an upload piece by piece; a piece holds whole blocks. ``names`` are the topics so far."""

    def __init__(self) -> None:
        self.names: dict[int, bytes] = {}
        self.rows = 0

    def read(self, piece: bytes | memoryview, *, payloads: bool = True) -> Iterator[Rows]:
        """The rows of a piece; without ``payloads`` they are only checked and counted."""
        view = memoryview(piece)
        offset, end = 0, len(view)
        while offset < end:
            if end - offset < blocks.HEADER_BYTES + 4:
                raise RemoteProtocolError(_MALFORMED, "rows that end inside a block")
            block = Block(view, offset)
            if block.length < blocks.HEADER_BYTES + 4 or block.length % 8 or block.length > end - offset or not block.check():
                raise RemoteProtocolError(_MALFORMED, "rows in a damaged block")
            if block.kind == blocks.TOPIC:
                self._name(block)
            elif block.kind == blocks.RECORDS:
                yield self._rows(block, payloads)
            else:
                raise RemoteProtocolError(_MALFORMED, f"rows with a block of kind {block.kind}")
            offset += block.length

    def _name(self, block: Block) -> None:
        if block.topic in self.names or len(self.names) >= MAX_TOPICS:
            raise RemoteProtocolError(_MALFORMED, "rows that number a topic twice, or too many topics")
        self.names[block.topic] = block.properties()

    def _rows(self, block: Block, payloads: bool) -> Rows:
        topic = self.names.get(block.topic)
        if topic is None or block.count == 0 or block.publisher_bytes:
            raise RemoteProtocolError(_MALFORMED, "rows of no topic, or none at all")
        ends = block.offsets().tolist()
        # Without a loop of ours: this runs beside an event loop that waits for the interpreter meanwhile.
        sizes = list(map(sub, ends[1:], ends))
        if min(sizes) < 0:
            raise RemoteProtocolError(_MALFORMED, "rows whose payloads run backwards")
        last = ends[-1]
        if ends[0] or block.payloads_at + last > block.offset + block.length:
            raise RemoteProtocolError(_MALFORMED, "rows whose payloads lie outside their block")
        self.rows += block.count
        found: list[bytes] = []
        if payloads:
            at = block.payloads_at
            data = bytes(block.data[at : at + last])
            found = [data[ends[place] : ends[place + 1]] for place in range(block.count)]
        return Rows(topic, block.flags & (blocks.QOS_MASK | blocks.RETAIN), block.properties(), found, max(sizes))

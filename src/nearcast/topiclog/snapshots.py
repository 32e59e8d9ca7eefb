"""What stands in for the entries of a replicated log that are not there any more: all that it still has, in bounded chunks.

A snapshot stands for the log up to an entry that is committed. It carries, in the order of the log, what topics have of
records up to there, the next index of every topic, also of those without a record, and the latest mark of every producer.
Retention may take records away while it is sent: then the receiver begins a topic a little later, and never has a gap. In
chunks::

    HEAD      entry, term, time of the youngest block
    TOPICS    number in this snapshot, next index, name; of many
    MARKS     as MessagePack; of many
    BLOCKS    as they are in the sender's log, with its numbers of topics
    END       how many chunks there were

The other side is :mod:`nearcast.topiclog.installing`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from nearcast.topiclog.catalog import Catalog
from nearcast.topiclog.marks import RAFT, Mark, encode_marks
from nearcast.topiclog.reading import scan
from nearcast.topiclog.sifting import sift
from nearcast.topiclog.topics import Extents, Topic

HEAD: Final = b"H"
TOPICS: Final = b"T"
MARKS: Final = b"M"
BLOCKS: Final = b"B"
END: Final = b"E"

HEAD_FIELDS: Final = struct.Struct("<QQq")
TOPIC_FIELDS: Final = struct.Struct("<IQH")
END_FIELDS: Final = struct.Struct("<Q")
CHUNK_BYTES: Final = 1 << 20
_NO_END: Final = (1 << 63) - 1


class SnapshotSource:
    """A snapshot of a log as it is committed now. The log may go on meanwhile."""

    def __init__(
        self, catalog: Catalog, index: int, term: int, time_us: int, marks: dict[str, Mark], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.index = index
        self.term = term
        self._catalog = catalog
        self._chunk_bytes = chunk_bytes
        self._end = catalog.committed_position
        self._cursor = 0
        self._topics: dict[int, Topic] = {}
        self._nexts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        for topic in catalog.topics.values():
            if topic.committed_index > 1:
                self._topics[topic.number] = topic
                self._nexts[topic.number] = topic.first_index
                self._ends[topic.number] = topic.committed_index
        self._numbers = set(self._topics)
        self._front = self._make_front(HEAD_FIELDS.pack(index, term, time_us), marks)
        self._sent = 0

    def _make_front(self, head: bytes, marks: dict[str, Mark]) -> Iterator[bytes]:
        yield HEAD + head
        pieces: list[bytes] = []
        size = 0
        for number, topic in list(self._topics.items()):
            pieces.append(TOPIC_FIELDS.pack(number, self._ends[number], len(topic.name)) + topic.name)
            size += len(pieces[-1])
            if size >= self._chunk_bytes:
                yield TOPICS + b"".join(pieces)
                pieces, size = [], 0
        if pieces:
            yield TOPICS + b"".join(pieces)
        several: list[Mark] = []
        size = 0
        for producer, mark in list(marks.items()):
            if producer.startswith(RAFT):
                continue
            several.append(mark)
            size += 64 + len(producer) + len(mark.body)
            if size >= self._chunk_bytes:
                yield MARKS + encode_marks(several)
                several, size = [], 0
        if several:
            yield MARKS + encode_marks(several)

    def next_extents(self) -> Extents | None:
        """Where the blocks of the next chunk lie, for whoever reads them in a thread; None: there are no more."""
        return None if self._cursor >= self._end else scan(self._catalog, self._numbers, self._cursor, self._chunk_bytes)

    def chunks(self) -> Iterator[bytes]:
        """All of it. What is not in memory is read from the disk meanwhile."""
        yield from self.front()
        while True:
            extents = self.next_extents()
            if extents is None:
                break
            chunk = self.chunk_of(extents, extents.gather())
            if chunk:
                yield chunk
        yield self.end()

    def front(self) -> Iterator[bytes]:
        """The chunks before those with blocks."""
        for chunk in self._front:
            self._sent += 1
            yield chunk

    def chunk_of(self, extents: Extents, data: memoryview) -> bytes:
        """A chunk with the blocks that :meth:`next_extents` meant; empty if nothing of them belongs to the snapshot."""
        self._cursor = extents.cursor
        found = sift(data, self._nexts, self._ends, self._topics, _NO_END)
        self._nexts.update(found.next_indexes)
        if not found.chunks:
            return b""
        self._sent += 1
        return BLOCKS + b"".join(found.chunks)

    def end(self) -> bytes:
        """The last chunk."""
        return END + END_FIELDS.pack(self._sent)

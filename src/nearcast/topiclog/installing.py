"""Taking a snapshot of another replica in: a log beside the one that is there, which takes its place as a whole.

A small file says with which segment the log begins. While a snapshot comes in, its segments are made behind all that are
there, and the file says so: after a crash they are removed, the old log is there, and asks again. Once the snapshot is whole
and on disk, the file is replaced by one that begins with them, in one step; the old segments are removed after, now or when
the log is opened next. Readers read the old log until then.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from typing import Final

from nearcast.errors import RemoteProtocolError, StorageCorrupt
from nearcast.topiclog.batches import Block, blocks
from nearcast.topiclog.blocks import GROUPED, HEADER_BYTES
from nearcast.topiclog.entries import Run
from nearcast.topiclog.log import Job, TopicLog
from nearcast.topiclog.marks import RAFT, Mark, decode_marks
from nearcast.topiclog.segments import parse_log_name
from nearcast.topiclog.snapshots import BLOCKS, END, END_FIELDS, HEAD, HEAD_FIELDS, MARKS, TOPIC_FIELDS, TOPICS
from nearcast.topiclog.storage import Storage
from nearcast.topiclog.walking import (
    CONFIGURATIONS,
    NOOP,
    TERMS,
    encode_configurations,
    encode_terms,
    entry_mark,
)

BEGINNING: Final = "beginning"
"""The file that says with which segment the log begins."""

_CONTENT: Final = re.compile(rb"nearcast replica 1: begins with (\d{1,10}), installing (\d{1,10})\n")
_MALFORMED: Final = 0x81
_WRITE_BYTES: Final = 1 << 20


def first_sequence(storage: Storage) -> int:
    """With which segment the log begins; whatever is not part of it, of before a crash, is removed."""
    if BEGINNING not in storage.names():
        return 1
    content = storage.read(BEGINNING, 0, 100)
    found = _CONTENT.fullmatch(content)
    if found is None:
        raise StorageCorrupt(storage.path(BEGINNING), 0, "this does not say where the log begins")
    begin, installing = int(found.group(1)), int(found.group(2))
    for name in _log_files(storage):
        sequence = int(name[:10])
        if sequence < begin or (installing and sequence >= installing):
            storage.remove(name)
    if installing:  # the log may grow to where that was
        _note(storage, begin, 0)
    return begin


def _log_files(storage: Storage) -> list[str]:
    """Segments and indexes."""
    names = storage.names()
    segments = [name for name in names if parse_log_name(name) is not None]
    return segments + [name for name in names if name.endswith(".index") and name[:10].isdigit()]


def _note(storage: Storage, begin: int, installing: int) -> None:
    content = f"nearcast replica 1: begins with {begin}, installing {installing}\n"
    storage.put(BEGINNING, [content.encode()], True)


class _Behind:
    """A storage of which only the segments from one on are seen."""

    def __init__(self, storage: Storage, begin: int) -> None:
        self._storage = storage
        self._begin = begin

    def path(self, name: str) -> str:
        return self._storage.path(name)

    def names(self) -> list[str]:
        return [name for name in _log_files(self._storage) if int(name[:10]) >= self._begin]

    def size(self, name: str) -> int:
        return self._storage.size(name)

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self._storage.read(name, offset, size)

    def view(self, name: str, size: int) -> memoryview:
        return self._storage.view(name, size)

    def create(self, name: str) -> None:
        self._storage.create(name)

    def resume(self, name: str, size: int) -> None:
        self._storage.resume(name, size)

    def append(self, pieces: list[bytes]) -> None:
        self._storage.append(pieces)

    def put(self, name: str, pieces: Iterable[bytes], flush: bool) -> None:
        self._storage.put(name, pieces, flush)

    def remove(self, name: str) -> None:
        self._storage.remove(name)


class Installation:
    """A snapshot that comes in. Chunks that make no sense raise :class:`~nearcast.errors.RemoteProtocolError`."""

    def __init__(self, storage: Storage, begins: int, segment_bytes: int, configuration: tuple[int, bytes] | None) -> None:
        self.index = 0
        """The entry that it stands for, known from the first chunk on; ``term`` likewise."""
        self.term = 0
        self.is_whole = False
        """Whether the last chunk was taken: what was written is to be flushed now."""
        self._storage = storage
        self._begins = begins
        used = [int(name[:10]) for name in _log_files(storage)]
        self._installing = max(used, default=0) + 1
        self._configuration = configuration
        self._chunks = 0
        self._time_us = 0
        self._marks: dict[str, Mark] = {}
        self._names: dict[int, bytes] = {}
        self._ends: dict[int, int] = {}
        self._unwritten = 0
        self._has_begun = False
        _note(storage, begins, self._installing)
        self._log = TopicLog(_Behind(storage, self._installing), segment_bytes, 1 << 40)
        self._log.first_sequence = self._installing
        self._log.recover()

    def take(self, chunk: bytes) -> None:
        """The next chunk. Raises :class:`~nearcast.errors.StorageUnavailable` as well."""
        kind = chunk[:1]
        body = memoryview(chunk)[1:]
        if self.is_whole or (kind == HEAD) != (self._chunks == 0):
            raise _malformed("its chunks are out of order")
        try:
            if kind == HEAD:
                self.index, self.term, self._time_us = HEAD_FIELDS.unpack(body)
            elif kind == TOPICS:
                self._take_topics(body)
            elif kind == MARKS:
                for mark in decode_marks(body):
                    self._marks[mark.producer] = mark
            elif kind == BLOCKS:
                self._take_blocks(body)
            elif kind == END and END_FIELDS.unpack(body)[0] == self._chunks:
                self._end()
            else:
                raise _malformed("chunks are missing, or are none")
        except (struct.error, ValueError) as error:
            raise _malformed(str(error)) from error
        except StorageCorrupt as error:
            if error.path != "a batch":
                raise
            raise _malformed(str(error)) from error
        self._chunks += 1

    def _take_topics(self, body: memoryview) -> None:
        at = 0
        while at < len(body):
            number, end, size = TOPIC_FIELDS.unpack_from(body, at)
            at += TOPIC_FIELDS.size
            name = bytes(body[at : at + size])
            at += size
            if not name or len(name) != size or end < 1 or number in self._names:
                raise _malformed("a topic makes no sense")
            self._names[number] = name
            self._ends[number] = end

    def _begin(self) -> None:
        """What comes first in the new log: the marks, and among them that of the entry that all this stands for."""
        if self._has_begun:
            return
        self._has_begun = True
        marks = self._marks
        marks[RAFT] = entry_mark(self.index, self.term, NOOP, self.index, b"")
        marks[TERMS] = Mark(producer=TERMS, batch=self.index, body=encode_terms([self.index], [self.term]))
        if self._configuration is not None:
            body = encode_configurations(self._configuration[0], [self._configuration])
            marks[CONFIGURATIONS] = Mark(producer=CONFIGURATIONS, batch=self._configuration[0], body=body)
        self._log.begin_with(marks, 0)

    def _take_blocks(self, body: memoryview) -> None:
        self._begin()
        for block in blocks(body):
            self._take_block(block, body)
            self._unwritten += block.length
            if self._unwritten >= _WRITE_BYTES:
                self._write()
        self._write()

    def _take_block(self, block: Block, body: memoryview) -> None:
        name = self._names.get(block.topic)
        if name is None or block.first_index + block.count > self._ends[block.topic]:
            raise _malformed("it has records of which it said nothing")
        log = self._log
        topic = log.topic(name)
        if topic is None or block.first_index < topic.next_index:
            raise _malformed("records come twice")
        if block.first_index > topic.next_index:
            log.begin_at(topic, block.first_index)
        rest = bytes(body[block.offset + HEADER_BYTES : block.offset + block.length])
        run = Run(
            name,
            block.flags & ~GROUPED,
            block.time_us,
            block.count,
            block.publisher_bytes,
            block.properties_bytes,
            [rest],
            len(rest),
        )
        log.append_run(topic, run, 0)

    def _write(self) -> None:
        self._unwritten = 0
        self._log.commit(self._log.write())

    def _end(self) -> None:
        self._begin()
        log = self._log
        for number, end in self._ends.items():
            topic = log.topic(self._names[number])
            if topic is not None and topic.next_index < end:  # its newest records were removed meanwhile
                log.begin_at(topic, end)
        log.advance_time(self._time_us)
        log.append_mark(self._marks[RAFT])
        self._write()
        log.close([])
        self.is_whole = True

    def collect(self, now_us: int) -> Job | None:
        """Index files are made meanwhile, as :meth:`TopicLog.collect` has it."""
        return self._log.collect(now_us)

    def finish(self, job: Job, failed: bool = False) -> None:
        """A job was run."""
        self._log.finish(job, failed)

    @property
    def working(self) -> bool:
        """Whether a job is under way."""
        return self._log.working

    def complete(self) -> int:
        """All of it is on disk: from now on this is the log. Returns the segment that it begins with."""
        _note(self._storage, self._installing, 0)
        return self._installing

    def give_up(self) -> None:
        """The old log stays; whoever keeps it says next where it grows."""
        for name in _log_files(self._storage):
            if int(name[:10]) >= self._installing:
                self._storage.remove(name)
        _note(self._storage, self._begins, 0)


def _malformed(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(_MALFORMED, f"this is not a snapshot of a replicated log: {why}")

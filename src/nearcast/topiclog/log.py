"""The log: topics, what is appended and committed, and what readers get of it.

One log holds the messages of all topics, in segments, and each topic has a strictly increasing index into it (Canal, section
III-D). Appending and committing are apart, and only what is committed exists for readers::

    append(...) ... append_mark(...)      gathered in memory
    position = write()                    handed to the storage in one piece: all of it, or nothing
    ... the storage's owner flushes, or, once the log is replicated, a quorum does ...
    commit(position)                      readers see it

A position is a number that only grows: the segment's in the upper 32 bits, and the offset that a block had there when it was
written. ``cut`` drops what was written and never committed, which a replica needs when another one's log wins.

All calls come from one thread. This module knows neither disks, nor clocks, nor who reads.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from nearcast.config import Retention
from nearcast.errors import LocalProtocolError, RecordUnavailable, StorageCorrupt
from nearcast.topiclog import blocks
from nearcast.topiclog.batches import Block, Record
from nearcast.topiclog.blocks import FLOOR, GROUPED, MARK, RECORDS, SEGMENT_HEADER, TOPIC, encode_into
from nearcast.topiclog.marks import Mark, encode_mark
from nearcast.topiclog.runs import RUN_BYTES, Runs
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES, Segment, check_version, log_name, parse_log_name, scan
from nearcast.topiclog.storage import Storage

OFFSET_BITS: Final = 32
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
MAX_WALK: Final = 65_536
"""Runs that one scan looks at before it hands over to whoever waits."""
DAMAGED: Final = ".damaged"
MAX_DAMAGED_FILES: Final = 3
"""Pieces of damaged files that are kept for whoever wants to look."""

_NO_RETENTION: Final = Retention()


class Topic:
    """One topic of the log. Its records are ``first_index`` .. ``committed_index`` - 1; beyond, up to ``next_index``, they are
    not committed yet."""

    def __init__(self, name: bytes, number: int) -> None:
        self.name = name
        self.number = number
        self.first_index: int = 1
        self.next_index: int = 1
        self.committed_index: int = 1
        self.bytes: i64 = 0
        self.first_time_us: i64 = 0
        self.last_time_us: i64 = 0
        self.retention: Retention = _NO_RETENTION
        # The segments that have records of it, and the first index in each.
        self.places: list[Segment] = []
        self.place_firsts: array[int] = array("Q")
        # What is gathered and not written yet.
        self.declared_in: i64 = -1
        self.touched = False
        self.saved_next: int = 1
        self.saved_declared: i64 = -1

    def text(self) -> str:
        """The name in front of people."""
        return self.name.decode("utf-8", "replace")


class Extents:
    """Whole blocks, where they lie: ``pieces`` of (file, offset, size), in order.

    The first and last block may hold records beyond what was asked for, which the reader leaves out. ``next_index`` (of a
    read) or ``cursor`` (of a scan) is where to go on.
    """

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self.pieces: list[tuple[str, int, int]] = []
        self._segments: list[Segment] = []
        self.bytes: int = 0
        self.next_index: int = 0
        self.cursor: int = 0
        self._end: i64 = -1

    def add(self, segment: Segment, offset: i64, size: i64) -> None:
        """One more stretch of blocks."""
        self.bytes += size
        if offset == self._end and self._segments[-1] is segment:
            name, begin, before = self.pieces[-1]
            self.pieces[-1] = (name, begin, before + size)
        else:
            self.pieces.append((segment.name, offset, size))
            self._segments.append(segment)
        self._end = offset + size

    def views(self) -> list[memoryview]:
        """The blocks without a copy. What is not in memory is read from the disk as it is touched."""
        found: list[memoryview] = []
        for segment, (_, offset, size) in zip(self._segments, self.pieces, strict=True):
            end = offset + size
            if len(segment.view) < end:
                segment.view = self._storage.view(segment.name, end)
            found.append(segment.view[offset:end])
        return found

    def gather(self) -> memoryview:
        """The blocks in one piece: a view if they lie in one, a copy if not."""
        views = self.views()
        return views[0] if len(views) == 1 else memoryview(b"".join(views))


class _Entry:
    """Adjacent blocks of one topic that are gathered, or the name of one."""

    def __init__(
        self, topic: Topic, offset: i64, size: i64, first: int, count: i64, first_time_us: i64, declares: bool, floor: int
    ) -> None:
        self.topic = topic
        self.offset: i64 = offset
        self.size: i64 = size
        self.first = first
        self.count: i64 = count
        self.first_time_us: i64 = first_time_us
        self.last_time_us: i64 = first_time_us
        self.declares = declares
        self.floor = floor


class _Written:
    """What one write handed to the storage and waits to be committed."""

    def __init__(self, position: int, topics: list[Topic], next_indexes: list[int], marks: list[Mark]) -> None:
        self.position = position
        self.topics = topics
        self.next_indexes = next_indexes
        self.marks = marks


class TopicLog:
    """See the module. ``damage`` lists what recovery found broken."""

    def __init__(self, storage: Storage, segment_bytes: int, max_topics: int) -> None:
        self.damage: list[StorageCorrupt] = []
        self.topics: dict[bytes, Topic] = {}
        self.marks: dict[str, Mark] = {}
        """The latest committed mark of each producer."""
        self.on_commit: Callable[[], None] | None = None
        """Called after every commit that made something visible."""
        self.recovered_marks: list[tuple[int, Mark]] = []
        """(position, mark) of all marks in the segment that grew last, as recovery found them."""
        self.committed_position: int = 0
        self.written_position: int = 0
        self._storage = storage
        self._segment_bytes: i64 = segment_bytes
        self._max_topics: i64 = max_topics
        self._numbered: dict[int, Topic] = {}
        self._next_number: int = 1
        self._segments: list[Segment] = []
        self._sequences: list[int] = []
        self._runs = Runs()
        self._time_us: i64 = 0
        self._latest_marks: dict[str, Mark] = {}
        # What is gathered.
        self._pieces: list[bytes] = []
        self._entries: list[_Entry] = []
        self._gathered_bytes: i64 = 0
        self._touched: list[Topic] = []
        self._gathered_marks: list[Mark] = []
        self._group_open = False
        self._rolling = False
        self._sequence: i64 = 0
        self._uncommitted: deque[_Written] = deque()

    # --- opening --------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read what the storage holds. All of it counts as committed: the owner flushes it before readers come."""
        storage = self._storage
        found = self._find_segments()
        for sequence, generation in found:
            check_version(storage, log_name(sequence, generation))
        self._forget_all()
        for at in range(len(found)):
            sequence, generation = found[at]
            name = log_name(sequence, generation)
            is_last = at == len(found) - 1
            scanned = scan(storage, name, is_last=is_last)
            segment = Segment(sequence, generation, scanned.end, scanned.runs)
            self.damage.extend(scanned.damage)
            if is_last:
                self._resume(segment, scanned.damage)
                self._runs = scanned.runs
                base = segment.sequence << OFFSET_BITS
                self.recovered_marks = [(base + offset, mark) for offset, mark in scanned.marks]
            for _, mark in scanned.marks:
                if mark.producer:
                    self._latest_marks[mark.producer] = mark
            self._time_us = max(self._time_us, scanned.last_time_us)
            self._add_segment(segment)
        if not found:
            self._start(1)
        self._register_topics()
        self.marks = dict(self._latest_marks)
        last = self._segments[-1]
        self._sequence = last.sequence
        self.written_position = self.committed_position = (last.sequence << OFFSET_BITS) + last.size

    def _find_segments(self) -> list[tuple[int, int]]:
        """The files of the log, oldest first. Of a segment that was written anew, the newest one counts."""
        newest: dict[int, int] = {}
        for name in self._storage.names():
            parsed = parse_log_name(name)
            if parsed is not None:
                newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], 0))
        return sorted(newest.items())

    def _forget_all(self) -> None:
        for topic in self.topics.values():
            topic.places = []
            topic.place_firsts = array("Q")
            topic.declared_in = -1
            topic.touched = False
            topic.bytes = 0
            topic.first_index = topic.next_index = topic.committed_index = 1
        self._numbered = {}
        self._segments = []
        self._sequences = []
        self._latest_marks = {}
        self._uncommitted.clear()
        self._drop_gathered()

    def _start(self, sequence: int) -> None:
        """The first segment of an empty log."""
        self._storage.create(log_name(sequence, 0))
        self._runs = Runs()
        self._add_segment(Segment(sequence, 0, 0, self._runs))

    def _add_segment(self, segment: Segment) -> None:
        self._segments.append(segment)
        self._sequences.append(segment.sequence)

    def _resume(self, segment: Segment, damage: list[StorageCorrupt]) -> None:
        """Go on writing behind what is whole; the rest is kept aside."""
        storage = self._storage
        size = storage.size(segment.name)
        if size > segment.size:
            earlier = sorted(name for name in storage.names() if name.endswith(DAMAGED))
            for name in earlier[: 1 - MAX_DAMAGED_FILES]:
                storage.remove(name)
            rest = storage.read(segment.name, segment.size, size - segment.size)
            storage.put(f"{segment.name}.{segment.size}{DAMAGED}", [rest], False)
        storage.resume(segment.name, segment.size)

    def _register_topics(self) -> None:
        known = self.topics
        self.topics = {}
        floors: dict[int, int] = {}
        for segment in self._segments:
            for part in segment.runs.parts():
                topic = self._numbered.get(part.number)
                if topic is None:
                    topic = known.get(part.name)
                    if topic is None or part.name in self.topics:
                        topic = Topic(part.name, part.number)
                    topic.number = part.number
                    topic.next_index = part.first
                    self._numbered[part.number] = topic
                    self.topics[part.name] = topic
                floors[part.number] = max(floors.get(part.number, 0), part.floor)
                if part.next > part.first:
                    topic.places.append(segment)
                    topic.place_firsts.append(part.first)
                    topic.last_time_us = part.last_time_us
                topic.next_index = max(topic.next_index, part.next)
                self._next_number = max(self._next_number, part.number + 1)
        active = self._segments[-1]
        for part in active.runs.parts():
            self._numbered[part.number].declared_in = active.sequence
        for topic in list(self._numbered.values()):
            first = topic.place_firsts[0] if topic.places else topic.next_index
            topic.first_index = first
            for segment in topic.places:
                held = segment.runs.need(topic.number)
                topic.bytes += held.bytes
                segment.live_bytes += held.bytes
                if topic.first_index == held.first:
                    topic.first_time_us = held.first_time_us
            topic.committed_index = topic.next_index

    # --- topics ---------------------------------------------------------------------------------------------------------

    def topic(self, name: bytes, create: bool = True) -> Topic | None:
        """The topic of this name. A new one if asked for, or None when there are as many as there may be."""
        found = self.topics.get(name)
        if found is not None or not create or len(self.topics) >= self._max_topics:
            return found
        topic = Topic(name, self._next_number)
        self._next_number += 1
        self.topics[name] = topic
        self._numbered[topic.number] = topic
        return topic

    def numbered(self, number: int) -> Topic | None:
        """The topic that blocks call by this number."""
        return self._numbered.get(number)

    def set_retention(self, topic: Topic, retention: Retention) -> None:
        """How much of a topic is kept from now on."""
        topic.retention = retention

    # --- writing --------------------------------------------------------------------------------------------------------

    def append(
        self, topic: Topic, publisher: bytes, flags: int, properties: bytes, payloads: list[bytes], time_us: int
    ) -> int:
        """Records that share publisher, properties and arrival; returns the first one's index. Nothing is written yet."""
        self._begin()
        arrived: i64 = time_us
        if arrived < self._time_us:
            arrived = self._time_us
        else:
            self._time_us = arrived
        if not topic.touched:
            topic.touched = True
            topic.saved_next = topic.next_index
            topic.saved_declared = topic.declared_in
            self._touched.append(topic)
        if topic.declared_in != self._sequence:
            self._declare(topic, 0)
        first = topic.next_index
        count: i64 = len(payloads)
        size: i64 = encode_into(self._pieces, RECORDS, flags, topic.number, first, arrived, publisher, properties, payloads)
        offset = self._gathered_bytes
        self._gathered_bytes = offset + size
        topic.next_index = first + count
        if flags & GROUPED:
            self._group_open = True
        entries = self._entries
        if entries:
            last = entries[-1]
            if (
                last.topic is topic
                and not last.declares
                and last.offset + last.size == offset
                and last.size + size <= RUN_BYTES
            ):
                last.size += size
                last.count += count
                last.last_time_us = arrived
                return first
        entries.append(_Entry(topic, offset, size, first, count, arrived, False, 0))
        return first

    def append_mark(self, mark: Mark) -> None:
        """End a group: the GROUPED blocks before it and the mark are there together or not at all."""
        self._begin()
        self._put_mark(mark)
        self._gathered_marks.append(mark)
        self._group_open = False

    def write(self) -> int:
        """Hand all that was gathered to the storage; returns the position behind it.

        Raises :class:`StorageUnavailable`; then nothing of it is there, and its indexes are free again.
        """
        if not self._pieces:
            return self.written_position
        if self._group_open:
            self._undo()
            raise LocalProtocolError("a group of blocks was not ended by a mark")
        storage = self._storage
        try:
            if self._rolling:
                storage.create(log_name(self._sequence, 0))
            storage.append(self._pieces)
        except BaseException:
            self._undo()
            raise
        if self._rolling:
            self._segments[-1].marks = list(self._latest_marks.values())
            self._runs = Runs()
            self._add_segment(Segment(self._sequence, 0, 0, self._runs))
        segment = self._segments[-1]
        self._apply(segment)
        segment.size += self._gathered_bytes
        segment.logical_size = segment.size
        position = (segment.sequence << OFFSET_BITS) + segment.size
        self.written_position = position
        next_indexes: list[int] = []
        for topic in self._touched:
            topic.touched = False
            next_indexes.append(topic.next_index)
        marks = self._gathered_marks
        for mark in marks:
            if mark.producer:
                self._latest_marks[mark.producer] = mark
        self._uncommitted.append(_Written(position, self._touched, next_indexes, marks))
        self._touched = []
        self._drop_gathered()
        return position

    def commit(self, position: int) -> None:
        """Everything written up to ``position`` is there for readers from now on."""
        uncommitted = self._uncommitted
        if not uncommitted or uncommitted[0].position > position:
            return
        while uncommitted and uncommitted[0].position <= position:
            written = uncommitted.popleft()
            for topic, next_index in zip(written.topics, written.next_indexes, strict=True):
                topic.committed_index = next_index
            for mark in written.marks:
                if mark.producer:
                    self.marks[mark.producer] = mark
            self.committed_position = written.position
        if self.on_commit is not None:
            self.on_commit()

    def cut(self, position: int) -> None:
        """Drop what was written after ``position``, which is not committed yet; also what is merely gathered."""
        if position < self.committed_position:
            raise LocalProtocolError("what is committed cannot be cut off")
        self._undo()
        sequence = position >> OFFSET_BITS
        storage = self._storage
        for segment in reversed(self._segments):
            if segment.sequence > sequence:
                storage.remove(segment.name)
            elif segment.sequence == sequence:
                storage.resume(segment.name, position & OFFSET_MASK)
                segment.view = memoryview(b"")
        retentions = {name: topic.retention for name, topic in self.topics.items()}
        committed = self.committed_position
        indexes = {name: topic.committed_index for name, topic in self.topics.items()}
        self.recover()
        self.committed_position = committed
        for name, topic in self.topics.items():
            topic.retention = retentions.get(name, _NO_RETENTION)
            topic.committed_index = indexes.get(name, topic.first_index)

    def _begin(self) -> None:
        """Before the first thing that is gathered: which segment it goes to, and what that one begins with."""
        if self._pieces:
            return
        active = self._segments[-1]
        self._rolling = active.size >= self._segment_bytes
        self._sequence = active.sequence + 1 if self._rolling else active.sequence
        if self._rolling or active.size == 0:
            self._pieces.append(SEGMENT_HEADER)
            self._gathered_bytes = SEGMENT_HEADER_BYTES
            for mark in self._latest_marks.values():
                self._put_mark(mark)

    def _put_mark(self, mark: Mark) -> None:
        self._gathered_bytes += encode_into(self._pieces, MARK, 0, 0, 0, self._time_us, b"", encode_mark(mark), [])

    def _declare(self, topic: Topic, floor: int) -> None:
        """Name a topic in the segment."""
        flags = FLOOR if floor else 0
        first = floor or topic.next_index
        size: i64 = encode_into(self._pieces, TOPIC, flags, topic.number, first, self._time_us, b"", topic.name, [])
        self._entries.append(_Entry(topic, self._gathered_bytes, size, topic.next_index, 0, 0, True, floor))
        self._gathered_bytes += size
        topic.declared_in = self._sequence

    def _apply(self, segment: Segment) -> None:
        """What was gathered is written: the index has it from now on."""
        base = segment.size
        runs = self._runs
        for entry in self._entries:
            topic = entry.topic
            if entry.declares:
                part = runs.declare(topic.number, topic.name, entry.first, base + entry.offset)
                part.floor = max(part.floor, entry.floor)
                continue
            held = runs.need(topic.number)
            if held.first == held.next:
                topic.places.append(segment)
                topic.place_firsts.append(entry.first)
                if len(topic.places) == 1:
                    topic.first_time_us = entry.first_time_us
            runs.add(held, entry.first, base + entry.offset, entry.size, entry.count, entry.first_time_us, entry.last_time_us)
            topic.bytes += entry.size
            topic.last_time_us = entry.last_time_us
            segment.live_bytes += entry.size

    def _undo(self) -> None:
        """What was gathered never was."""
        for topic in self._touched:
            topic.touched = False
            topic.next_index = topic.saved_next
            topic.declared_in = topic.saved_declared
        self._touched = []
        self._drop_gathered()

    def _drop_gathered(self) -> None:
        self._pieces = []
        self._entries = []
        self._gathered_bytes = 0
        self._gathered_marks = []
        self._group_open = False
        self._rolling = False

    # --- reading --------------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, index: int) -> Record:
        """One record. :class:`RecordUnavailable` if it is not there, :class:`StorageCorrupt` if it is damaged."""
        segment, run = self._find(topic, index)
        runs = segment.runs
        begin: i64 = runs.offsets[run]
        size: i64 = runs.lengths[run]
        data, at = self._bytes_at(segment, begin, size)
        end = at + size
        while at < end:
            block = Block(data, at)
            if index < block.first_index + block.count:
                if index < block.first_index:
                    break
                if not block.check():
                    raise StorageCorrupt(self._storage.path(segment.name), begin, "the checksum does not match")
                return block.record(index - block.first_index, topic.text())
            if block.length < blocks.HEADER_BYTES:
                raise StorageCorrupt(self._storage.path(segment.name), begin, "no block begins here")
            at += block.length
            begin += block.length
        raise self._unavailable(topic, index)

    def read(self, topic: Topic, start: int, end: int, max_bytes: int) -> Extents:
        """Blocks that hold the records from ``start`` on and below ``end``: about ``max_bytes``, but at least one block.

        ``next_index`` says where to go on; it is ``end``, or the end of what is committed, when nothing is left. Raises
        :class:`RecordUnavailable` for a start that is not there any more or not nearly there yet.
        """
        found = Extents(self._storage)
        stop = min(end, topic.committed_index)
        found.next_index = start
        if start < topic.first_index or start > topic.committed_index:
            raise self._unavailable(topic, start)
        place: i64 = bisect_right(topic.place_firsts, start) - 1
        if place < 0:
            place = 0
        limit: i64 = max_bytes
        while found.next_index < stop and place < len(topic.places):
            segment = topic.places[place]
            if not self._read_part(found, segment, topic.number, stop, limit):
                break
            place += 1
        else:
            found.next_index = max(found.next_index, stop) if start < stop else start
        return found

    def _read_part(self, found: Extents, segment: Segment, number: int, stop: int, max_bytes: i64) -> bool:
        """What one segment has of a read; False when the read is to end here."""
        runs = segment.runs
        runs.settle()
        part = runs.part(number)
        if part is None or found.next_index >= part.next:
            return True
        committed = self._committed_in(segment)
        at: i64 = runs.posting_of(part, found.next_index)
        postings = part.postings
        count: i64 = len(postings)
        while at < count:
            run = postings[at]
            first = runs.firsts[run]
            if first >= stop:
                break
            offset: i64 = runs.offsets[run]
            size: i64 = runs.lengths[run]
            if found.bytes and found.bytes + size > max_bytes:
                return False
            last = first + runs.counts[run]
            if offset + size > committed:
                size = committed - offset
                last = stop
            if size <= 0:
                return False
            if last > found.next_index:
                found.add(segment, offset, size)
                found.next_index = min(last, stop)
            at += 1
        return True

    def scan(self, numbers: set[int] | None, cursor: int, max_bytes: int) -> Extents:
        """Blocks of several topics (None: all), in the order of the log, from a position on.

        There is nothing left when the ``cursor`` of what comes back is ``committed_position``; otherwise go on there, also
        when nothing came back, because a long stretch had nothing of these topics.
        """
        found = Extents(self._storage)
        walked: i64 = 0
        limit: i64 = max_bytes
        at: i64 = bisect_right(self._sequences, cursor >> OFFSET_BITS) - 1
        begin: i64 = cursor & OFFSET_MASK
        if at < 0 or self._sequences[at] != cursor >> OFFSET_BITS:
            at += 1
            begin = 0
        while at < len(self._segments):
            segment = self._segments[at]
            base = segment.sequence << OFFSET_BITS
            if base > self.committed_position:
                break
            committed = self._committed_in(segment)
            runs = segment.runs
            runs.settle()
            run: i64 = runs.run_at(begin)
            while run < runs.count:
                logical: i64 = runs.logical[run]
                offset: i64 = runs.offsets[run]
                size: i64 = runs.lengths[run]
                if offset >= committed:
                    break
                if walked >= MAX_WALK:
                    found.cursor = base + logical
                    return found
                walked += 1
                if numbers is None or runs.topics[run] in numbers:
                    if begin > logical:
                        offset += begin - logical
                        size -= begin - logical
                    if offset + size > committed:
                        size = committed - offset
                    if found.bytes and found.bytes + size > limit:
                        found.cursor = base + max(logical, begin)
                        return found
                    if self._is_live(runs.topics[run], runs.firsts[run] + runs.counts[run]):
                        found.add(segment, offset, size)
                run += 1
            at += 1
            begin = 0
        found.cursor = self.committed_position
        return found

    def position_of(self, topic: Topic, index: int) -> int:
        """The position of a record, to scan from; of the next one to come, if it is that."""
        if index >= topic.committed_index:
            return self.committed_position
        segment, run = self._find(topic, max(index, topic.first_index))
        return (segment.sequence << OFFSET_BITS) + segment.runs.logical[run]

    def index_at(self, topic: Topic, time_us: int) -> int:
        """The first index whose record came at ``time_us`` or later; of the next one to come, if none did."""
        low: i64 = 0
        high: i64 = len(topic.places)
        while low < high:
            middle = (low + high) // 2
            part = topic.places[middle].runs.need(topic.number)
            if part.last_time_us < time_us:
                low = middle + 1
            else:
                high = middle
        if low == len(topic.places):
            return topic.committed_index
        found = self._index_in(topic.places[low], topic.number, time_us)
        return min(max(found, topic.first_index), topic.committed_index)

    def _index_in(self, segment: Segment, number: int, time_us: int) -> int:
        """The first index in a segment that came at a time or later; the segment has one."""
        runs = segment.runs
        runs.settle()
        part = runs.need(number)
        postings = part.postings
        low: i64 = 0
        high: i64 = len(postings)
        while low < high:  # the first run that begins at that time or later
            middle = (low + high) // 2
            data, at = self._bytes_at(segment, runs.offsets[postings[middle]], blocks.HEADER_BYTES + 4)
            if Block(data, at).time_us < time_us:
                low = middle + 1
            else:
                high = middle
        if low == 0:
            return part.first
        # It may lie inside the run before.
        run = postings[low - 1]
        size: i64 = runs.lengths[run]
        data, at = self._bytes_at(segment, runs.offsets[run], size)
        end = at + size
        while at < end:
            block = Block(data, at)
            if block.time_us >= time_us:
                return block.first_index
            at += max(block.length, 8)
        return int(runs.firsts[run] + runs.counts[run])

    def _find(self, topic: Topic, index: int) -> tuple[Segment, int]:
        """Segment and run with a committed record."""
        if index < topic.first_index or index >= topic.committed_index or not topic.places:
            raise self._unavailable(topic, index)
        place = bisect_right(topic.place_firsts, index) - 1
        segment = topic.places[place]
        runs = segment.runs
        runs.settle()
        part = runs.part(topic.number)
        if part is None or index >= part.next:
            raise self._unavailable(topic, index)
        return segment, part.postings[runs.posting_of(part, index)]

    def _bytes_at(self, segment: Segment, offset: i64, size: i64) -> tuple[memoryview, i64]:
        """Bytes of a segment, and where in them the asked for begin."""
        if len(segment.view) >= offset + size:
            return segment.view, offset
        if segment is self._segments[-1]:
            # Mapping it again after every append would cost more than this copy.
            return memoryview(self._storage.read(segment.name, offset, size)), 0
        segment.view = self._storage.view(segment.name, segment.size)
        return segment.view, offset

    def _committed_in(self, segment: Segment) -> i64:
        """How much of a segment's file readers may see."""
        if segment.sequence != self.committed_position >> OFFSET_BITS:
            return segment.size if segment.sequence < self.committed_position >> OFFSET_BITS else 0
        return self.committed_position & OFFSET_MASK

    def _is_live(self, number: int, end_index: int) -> bool:
        topic = self._numbered.get(number)
        return topic is not None and end_index > topic.first_index

    def _unavailable(self, topic: Topic, index: int) -> RecordUnavailable:
        return RecordUnavailable(topic.text(), index, topic.first_index, topic.committed_index)

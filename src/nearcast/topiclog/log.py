"""The log: topics, what is appended and committed, and what readers get of it.

One log holds the messages of all topics, in segments, and each topic has a strictly increasing index into it (Canal, section
III-D). Appending and committing are apart, and only what is committed exists for readers::

    append(...) ... append_mark(...)      gathered in memory
    position = write()                    handed to the storage in one piece: all of it, or nothing
    ... the storage's owner flushes, or, once the log is replicated, a quorum does ...
    commit(position)                      readers see it

A position is a number that only grows: the segment's in the upper 32 bits, and the offset that a block had there when it was
written. ``cut`` drops what was written and never committed, which a replica needs when another one's log wins.

Work that takes long comes as jobs, for a thread::

    job = collect(now_us)                 topics lose what their retention says; what is to do about the files?
    job.run()                             anywhere
    finish(job)

All other calls come from one thread. This module knows neither disks, nor clocks, nor who reads.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from typing import Final

from mypy_extensions import i64

from nearcast.config import Retention
from nearcast.errors import LocalProtocolError, StorageCorrupt
from nearcast.topiclog import divisions, reading, retention
from nearcast.topiclog.batches import Record
from nearcast.topiclog.blocks import FLOOR, GROUPED, LINK, MARK, RECORDS, SEGMENT_HEADER, TOPIC, encode_into, encode_records
from nearcast.topiclog.catalog import OFFSET_BITS, OFFSET_MASK, Catalog
from nearcast.topiclog.divisions import Division
from nearcast.topiclog.entries import Run
from nearcast.topiclog.jobs import Job, Remove, Rewrite, Seal
from nearcast.topiclog.marks import Mark, encode_mark, remember
from nearcast.topiclog.recovery import Recovery
from nearcast.topiclog.runs import RUN_BYTES, Runs
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES, Segment, index_name, log_name
from nearcast.topiclog.storage import Storage
from nearcast.topiclog.topics import NO_RETENTION, Extents, Topic

__all__ = ["Extents", "Job", "Record", "Topic", "TopicLog"]

LOOKED_AT: Final = 1_000
"""Topics whose retention one step looks at."""
MOVED: Final = 100
"""Topics that one step takes something away from: each may cost a read of the disk."""


class _Entry:
    """Adjacent blocks of one topic that are gathered, or the name of one."""

    def __init__(self, topic: Topic, offset: i64, size: i64, first: int, count: i64, time_us: i64) -> None:
        self.topic = topic
        self.offset: i64 = offset
        self.size: i64 = size
        self.first = first
        self.count: i64 = count
        self.first_time_us: i64 = time_us
        self.last_time_us: i64 = time_us
        self.declares = False
        self.floor = 0


class TopicLog:
    """See the module."""

    def __init__(self, storage: Storage, segment_bytes: int, max_topics: int) -> None:
        self.marks: dict[str, Mark] = {}
        """The latest committed mark of each producer."""
        self.on_commit: Callable[[], None] | None = None
        """Called after every commit that made something visible."""
        self.written_position: int = 0
        self.first_sequence: int = 1
        """Of the segment that an empty log begins with."""
        self.divided: list[int] = []
        """Where the divisions of the last write end."""
        self.remembers_names = False
        """Whether topics without records keep their next index when nothing else in the log names them."""
        self.flushed_position: int = 1 << 62
        """Up to where the disk is known to have it, if it may be committed before that."""
        self.held_from: int = 1 << 62
        """Segments from this one on are neither removed nor written anew."""
        self._storage = storage
        self._catalog = Catalog(storage)
        self._segment_bytes: i64 = segment_bytes
        self._max_topics: i64 = max_topics
        self._last_number: int = 0
        self._runs = Runs()
        self._time_us: i64 = 0
        self._saved_time_us: i64 = 0
        self._committed_time_us: int = 0
        self._latest_marks: dict[str, Mark] = {}
        # What is gathered.
        self._pieces: list[bytes] = []
        self._entries: list[_Entry] = []
        self._gathered_bytes: i64 = 0
        self._gathered_topics: list[Topic] = []
        self._gathered_divisions: list[Division] = []
        # Of those, what belongs to the division that is gathered last.
        self._division: i64 = 1
        self._touched: list[Topic] = []
        self._first_indexes: list[int] = []
        self._gathered_marks: list[Mark] = []
        self._gathered_floors: list[tuple[Topic, int]] = []
        self._group_open = False
        self._rolling = False
        self._sequence: i64 = 0
        self._uncommitted: deque[Division] = deque()
        # Retention and jobs.
        self._round: list[Topic] = []
        self._job: Job | None = None
        self._garbage: list[str] = []
        """Files of segments that are not part of the log any more."""
        self._deleted: dict[int, Topic] = {}
        """Topics without a record that some file still names."""
        self._reminded_position: int = 0
        """Where it was last repeated that such topics are there."""
        self._reminding = False
        self._found_floors: list[tuple[int, int, int]] = []

    @property
    def topics(self) -> dict[bytes, Topic]:
        """All topics, by name."""
        return self._catalog.topics

    @property
    def damage(self) -> list[StorageCorrupt]:
        """What recovery and readers found broken."""
        return self._catalog.damage

    @damage.setter
    def damage(self, damage: list[StorageCorrupt]) -> None:
        self._catalog.damage = damage

    @property
    def committed_position(self) -> int:
        """Up to where readers see."""
        return self._catalog.committed_position

    @property
    def catalog(self) -> Catalog:
        """Where things are, for what reads the log in other ways than by topic."""
        return self._catalog

    @property
    def working(self) -> bool:
        """Whether a job is under way."""
        return self._job is not None

    @property
    def latest_time_us(self) -> int:
        """Of the youngest block: nothing that is appended gets an earlier time."""
        return self._time_us

    @property
    def committed_time_us(self) -> int:
        """The same, of what is committed."""
        return self._committed_time_us

    def written_marks(self) -> dict[str, Mark]:
        """The latest mark of each producer, committed or not."""
        return dict(self._latest_marks)

    @property
    def segment_count(self) -> int:
        """Files of the log."""
        return len(self._catalog.segments)

    @property
    def disk_bytes(self) -> int:
        """Their size, without index files."""
        return sum([segment.size for segment in self._catalog.segments])

    def recover(self) -> None:
        """Read what the storage holds. All of it counts as committed: the owner flushes it before readers come.

        :class:`StorageUnavailable` says that a newer version wrote it; then nothing was touched.
        """
        self.recover_unsettled()
        self.settle(self.written_position, [], self.marks, self._time_us)

    def recover_unsettled(self) -> None:
        """The same, when it is not known yet how much of it is committed; :meth:`settle` says so next."""
        self._sequence = 0  # not open
        recovery = Recovery(self._catalog, self.first_sequence)
        recovery.run()
        self._drop_gathered()
        self._uncommitted.clear()
        self._round = []
        self._job = None
        self._deleted = {topic.number: topic for topic in self._catalog.topics.values() if not topic.places}
        self._garbage = []  # files that are still there are part of the log again
        self._runs = recovery.runs
        self._time_us = recovery.last_time_us
        self._latest_marks = recovery.marks
        self.marks = dict(recovery.marks)
        self._last_number = max(self._last_number, recovery.last_number)
        last = self._catalog.segments[-1]
        self._sequence = last.sequence
        self.written_position = self._catalog.committed_position = (last.sequence << OFFSET_BITS) + last.size
        self._reminded_position = self.written_position
        self.divided = []
        self._found_floors = recovery.group_floors

    def settle(self, position: int, uncommitted: list[Division], marks: dict[str, Mark], time_us: int) -> None:
        """After :meth:`recover_unsettled`: the log is committed up to ``position``, where its marks and its youngest block's
        time were these; the rest is not."""
        catalog = self._catalog
        self.marks = marks
        self._committed_time_us = time_us
        catalog.committed_position = position
        first_seen: set[int] = set()
        for division in uncommitted:
            for topic, first_index in zip(division.topics, division.first_indexes, strict=True):
                if topic.number not in first_seen:
                    first_seen.add(topic.number)
                    topic.committed_index = max(first_index, topic.first_index)
                    if topic.first_index >= first_index:
                        self._deleted[topic.number] = topic
        self._uncommitted.extend(uncommitted)
        for end, number, floor in self._found_floors:
            named = catalog.numbered.get(number)
            if named is not None and end <= position:
                self._remove_below(named, floor, end)
        self._found_floors = []

    def close(self, marks: list[Mark] | None = None) -> None:
        """Write down where the newest segment's blocks lie, so that opening need not read it. All is committed by now.

        Whoever knows better how much is committed says so in marks, which are found as the latest of their producers; all is
        flushed by now.

        Whoever does not come to call this only opens more slowly. Raises :class:`StorageUnavailable`.
        """
        if not self._sequence:  # opening it failed: nothing is touched
            return
        active = self._catalog.segments[-1]
        is_settled = self._catalog.committed_position == self.written_position
        if marks is not None:  # an index has only what was emptied for good
            is_settled = not any(division.floors for division in self._uncommitted)
            for mark in marks:
                self._latest_marks[mark.producer] = mark
        if active.size and is_settled and not self._pieces:
            active.marks = list(self._latest_marks.values())
            Seal(self._storage, active, self._catalog.runs_of(active)).run()

    # --- topics ---------------------------------------------------------------------------------------------------------

    def topic(self, name: bytes, create: bool = True) -> Topic | None:
        """The topic of this name. A new one if asked for, or None when there are as many as there may be."""
        topics = self._catalog.topics
        found = topics.get(name)
        if found is not None or not create or len(topics) >= self._max_topics:
            return found
        self._last_number += 1
        topic = Topic(name, self._last_number)
        topics[name] = self._catalog.numbered[topic.number] = topic
        return topic

    def numbered(self, number: int) -> Topic | None:
        """The topic that blocks call by this number."""
        return self._catalog.numbered.get(number)

    def last_number(self) -> int:
        """The highest number that a topic has."""
        return self._last_number

    def set_retention(self, topic: Topic, bounds: Retention) -> None:
        """How much of a topic is kept from now on."""
        topic.retention = bounds

    def delete(self, topic: Topic) -> None:
        """Gather that all records of a topic are removed. Its index goes on from where it is."""
        self._begin()
        self._touch(topic)
        self._declare(topic, topic.next_index)

    def delete_when_committed(self, topic: Topic) -> None:
        """The same, as part of a group: when that is committed, and not at all if it is cut off."""
        self._begin()
        self._touch(topic)
        self._name(topic, FLOOR | GROUPED, topic.next_index)
        self._gathered_floors.append((topic, topic.next_index))
        self._group_open = True

    def forget_mark(self, producer: str) -> None:
        """Do not repeat a producer's mark in segments to come."""
        self._latest_marks.pop(producer, None)
        self.marks.pop(producer, None)

    # --- writing --------------------------------------------------------------------------------------------------------

    def append(
        self, topic: Topic, publisher: bytes, flags: int, properties: bytes, payloads: list[bytes], time_us: int
    ) -> int:
        """Records that share publisher, properties and arrival; returns the first one's index. Nothing is written yet."""
        if not self._pieces:
            self._begin()
        arrived: i64 = time_us
        if arrived < self._time_us:
            arrived = self._time_us
        else:
            self._time_us = arrived
        if topic.touched_in != self._division:
            self._touch(topic)
        if topic.declared_in != self._sequence:
            self._declare(topic, 0)
        first = topic.next_index
        size: i64 = encode_into(self._pieces, RECORDS, flags, topic.number, first, arrived, publisher, properties, payloads)
        if flags & GROUPED:
            self._group_open = True
        self._gather(topic, size, len(payloads), arrived)
        return first

    def append_run(self, topic: Topic, run: Run, group_flag: int = GROUPED) -> int:
        """The records of an entry's run, as part of a group or not; returns the first one's index."""
        if not self._pieces:
            self._begin()
        arrived: i64 = run.time_us
        if arrived < self._time_us:
            arrived = self._time_us
        else:
            self._time_us = arrived
        if topic.touched_in != self._division:
            self._touch(topic)
        if topic.declared_in != self._sequence:
            self._declare(topic, 0)
        first = topic.next_index
        size: i64 = encode_records(
            self._pieces,
            run.flags | group_flag,
            topic.number,
            first,
            arrived,
            run.count,
            run.publisher_bytes,
            run.properties_bytes,
            run.body,
            run.body_bytes,
        )
        self._group_open = self._group_open or group_flag != 0
        self._gather(topic, size, run.count, arrived)
        return first

    def begin_at(self, topic: Topic, index: int) -> None:
        """Gather that a topic has no records, and that the next one gets this index, which is not below what it would get."""
        self._begin()
        self._touch(topic)
        topic.next_index = index
        self._declare(topic, index)

    def begin_with(self, marks: dict[str, Mark], time_us: int) -> None:
        """A log without anything begins with these marks and this time."""
        if self.written_position & OFFSET_MASK or self._pieces:
            raise LocalProtocolError("the log has something")
        self._latest_marks = dict(marks)
        self.marks = dict(marks)
        self._time_us = time_us

    def _gather(self, topic: Topic, size: i64, count: i64, arrived: i64) -> None:
        """Take note of a block that was gathered."""
        offset = self._gathered_bytes
        self._gathered_bytes = offset + size
        first = topic.next_index
        topic.next_index = first + count
        entries = self._entries
        if entries:
            last = entries[-1]
            adjacent = last.topic is topic and not last.declares and last.offset + last.size == offset
            if adjacent and last.size + size <= RUN_BYTES:
                last.size += size
                last.count += count
                last.last_time_us = arrived
                return
        entries.append(_Entry(topic, offset, size, first, count, arrived))

    def advance_time(self, time_us: int) -> None:
        """Nothing that is appended from now on gets an earlier time."""
        self._begin()
        self._time_us = max(self._time_us, time_us)

    def append_mark(self, mark: Mark) -> None:
        """End a group: the GROUPED blocks before it and the mark are there together or not at all."""
        self._begin()
        self._put_mark(mark, 0)
        self._gathered_marks.append(mark)
        self._group_open = False

    def append_group_mark(self, mark: Mark) -> None:
        """A further mark of the group that another one ends."""
        self._begin()
        self._put_mark(mark, GROUPED)
        self._gathered_marks.append(mark)
        self._group_open = True

    def divide(self) -> None:
        """What was gathered so far can be committed, and stay, without what follows."""
        next_indexes: list[int] = []
        for topic in self._touched:
            next_indexes.append(topic.next_index)
        self._gathered_divisions.append(
            Division(
                self._gathered_bytes,
                self._touched,
                self._first_indexes,
                next_indexes,
                self._gathered_marks,
                self._gathered_floors,
                self._time_us,
            )
        )
        self._division += 1
        self._touched = []
        self._first_indexes = []
        self._gathered_marks = []
        self._gathered_floors = []

    def write(self) -> int:
        """Hand all that was gathered to the storage; returns the position behind it.

        Raises :class:`StorageUnavailable`; then nothing of it is there, and its indexes are free again.
        """
        if not self._pieces:
            return self.written_position
        if self._group_open:
            self._undo()
            raise LocalProtocolError("a group of blocks was not ended by a mark")
        try:
            if self._rolling:
                self._storage.create(log_name(self._sequence, 0))
            self._storage.append(self._pieces)
        except BaseException:
            self._undo()
            raise
        gathered = self._gathered_divisions
        if not gathered or gathered[-1].position < self._gathered_bytes:
            self.divide()
        if self._rolling:
            self._roll()
        for division in gathered:
            for mark in division.marks:
                remember(self._latest_marks, mark)
        segment = self._catalog.segments[-1]
        base = (segment.sequence << OFFSET_BITS) + segment.size
        self._apply(segment)
        segment.size += self._gathered_bytes
        segment.logical_size = segment.size
        segment.last_time_us = self._time_us
        position = (segment.sequence << OFFSET_BITS) + segment.size
        self.written_position = position
        if self._reminding:
            self._reminded_position = position
        self.divided = []
        for division in gathered:
            division.position += base
            self.divided.append(division.position)
            self._uncommitted.append(division)
        for topic in self._gathered_topics:
            topic.touched = False
        self._drop_gathered()
        return position

    def commit(self, position: int) -> None:
        """Everything written up to ``position`` is there for readers from now on."""
        uncommitted = self._uncommitted
        if not uncommitted or uncommitted[0].position > position:
            return
        while uncommitted and uncommitted[0].position <= position:
            division = uncommitted.popleft()
            for topic, next_index in zip(division.topics, division.next_indexes, strict=True):
                # Retention may have gone further, before a restart after which less was known to be committed.
                topic.committed_index = next_index if next_index > topic.first_index else topic.first_index
            for mark in division.marks:
                remember(self.marks, mark)
            self._catalog.committed_position = division.position
            self._committed_time_us = division.time_us
            for topic, floor in division.floors:
                self._remove_below(topic, floor, division.position)
        if self.on_commit is not None:
            self.on_commit()

    def cut(self, position: int) -> None:
        """Drop what was written after ``position``, which was returned by :meth:`write` and is not before what is committed;
        also what is merely gathered."""
        catalog = self._catalog
        committed = catalog.committed_position
        if position < committed:
            raise LocalProtocolError("what is committed cannot be cut off")
        if self._job is not None:
            raise LocalProtocolError("finish the job first")
        self._undo()
        sequence = position >> OFFSET_BITS
        for segment in reversed(catalog.segments):
            if segment.sequence < sequence:
                break
            catalog.unmap(segment)
            self._storage.remove(index_name(segment.name))
            if segment.sequence > sequence:
                self._storage.remove(segment.name)
            else:
                self._storage.resume(segment.name, position & OFFSET_MASK)
        before: dict[bytes, tuple[int, int, Retention]] = {}
        for topic in catalog.topics.values():
            before[topic.name] = (topic.first_index, topic.committed_index, topic.retention)
        marks = self.marks
        kept = [division for division in self._uncommitted if division.position <= position]
        self.recover()
        self._uncommitted.extend(kept)
        self.marks = marks
        catalog.committed_position = committed
        for topic in catalog.topics.values():
            first, committed_index, bounds = before.get(topic.name, (1, topic.first_index, NO_RETENTION))
            topic.retention = bounds
            topic.committed_index = min(committed_index, topic.next_index)
            if first > topic.first_index:
                retention.advance(catalog, topic, first)

    def cut_tail(self, position: int) -> None:
        """The same at the end of a division that a mark ends, without reading anything again; jobs may be under way."""
        catalog = self._catalog
        if position < catalog.committed_position:
            raise LocalProtocolError("what is committed cannot be cut off")
        self._undo()
        uncommitted = self._uncommitted
        if position == self.written_position:
            return
        while uncommitted and uncommitted[-1].position > position:
            uncommitted.pop()
        time_us = uncommitted[-1].time_us if uncommitted else self._committed_time_us
        for topic in divisions.cut(catalog, position, time_us):
            if topic.first_index >= topic.committed_index:
                self._deleted[topic.number] = topic
        last = catalog.segments[-1]
        runs = catalog.runs_of(last)
        if isinstance(runs, Runs):
            self._runs = runs
        self._sequence = last.sequence
        self._time_us = time_us
        self._latest_marks = dict(self.marks)
        for division in uncommitted:
            for mark in division.marks:
                remember(self._latest_marks, mark)
        self.written_position = position
        self._reminded_position = min(self._reminded_position, position)

    def _remove_below(self, topic: Topic, floor: int, position: int) -> None:
        """A group that ends at a position, and is committed, emptied a topic."""
        catalog = self._catalog
        at = bisect_right(catalog.sequences, position >> OFFSET_BITS) - 1
        segment = catalog.segments[at]
        part = catalog.runs_of(segment).need(topic.number)
        part.floor = max(part.floor, floor)
        segment.has_deletions = True
        if floor > topic.first_index:
            retention.advance(catalog, topic, floor)
        self._deleted[topic.number] = topic

    def _begin(self) -> None:
        """Before the first thing that is gathered: which segment it goes to, and what that one begins with."""
        if self._pieces:
            return
        self._saved_time_us = self._time_us
        active = self._catalog.segments[-1]
        self._rolling = active.size >= self._segment_bytes
        self._sequence = active.sequence + 1 if self._rolling else active.sequence
        if self._rolling or active.size == 0:
            self._pieces.append(SEGMENT_HEADER)
            self._gathered_bytes = SEGMENT_HEADER_BYTES
            segments = self._catalog.segments
            before = active if self._rolling else segments[-2] if len(segments) > 1 else None
            marks = list(self._latest_marks.values())
            size = before.size if before is not None else 0
            self._gathered_bytes += encode_into(self._pieces, LINK, 0, len(marks), size, self._time_us, b"", b"", [])
            for mark in marks:
                self._put_mark(mark, 0)

    def _put_mark(self, mark: Mark, flags: int) -> None:
        self._gathered_bytes += encode_into(self._pieces, MARK, flags, 0, 0, self._time_us, b"", encode_mark(mark), [])

    def _touch(self, topic: Topic) -> None:
        """Remember what a topic is before anything is gathered for it."""
        if topic.touched_in != self._division:
            topic.touched_in = self._division
            self._touched.append(topic)
            self._first_indexes.append(topic.next_index)
        if not topic.touched:
            topic.touched = True
            topic.saved_next = topic.next_index
            topic.saved_declared = topic.declared_in
            self._gathered_topics.append(topic)

    def _declare(self, topic: Topic, floor: int) -> None:
        """Name a topic in the segment; with a floor, its records below are removed."""
        self._name(topic, FLOOR if floor else 0, floor)

    def _name(self, topic: Topic, flags: int, floor: int) -> None:
        first = topic.next_index
        size: i64 = encode_into(self._pieces, TOPIC, flags, topic.number, first, self._time_us, b"", topic.name, [])
        entry = _Entry(topic, self._gathered_bytes, size, first, 0, 0)
        entry.declares = True
        entry.floor = 0 if flags & GROUPED else floor
        self._entries.append(entry)
        self._gathered_bytes += size
        topic.declared_in = self._sequence

    def _roll(self) -> None:
        """What was gathered is the beginning of a new segment."""
        before = self._catalog.segments[-1]
        before.marks = list(self._latest_marks.values())
        self._runs = Runs()
        segment = Segment(self._sequence, 0)
        segment.runs = self._runs
        self._catalog.add(segment)

    def _apply(self, segment: Segment) -> None:
        """What was gathered is written: the index has it from now on."""
        base = segment.size
        runs = self._runs
        for entry in self._entries:
            topic = entry.topic
            offset = base + entry.offset
            if entry.declares:
                part = runs.declare(topic.number, topic.name, entry.first, offset)
                if entry.floor:
                    segment.has_deletions = True
                    part.floor = entry.floor
                    retention.advance(self._catalog, topic, entry.floor)
                    self._deleted[topic.number] = topic
                continue
            part = runs.need(topic.number)
            if part.first == part.next or not topic.places:
                if not topic.places:
                    topic.first_time_us = entry.first_time_us
                    topic.dead_bytes = part.bytes  # of before it was deleted
                    topic.dead_runs = len(part.postings)
                    topic.dead_in_run = 0
                topic.places.append(segment)
                topic.place_firsts.append(entry.first)
            runs.add(part, entry.first, offset, entry.size, entry.count, entry.first_time_us, entry.last_time_us)
            topic.bytes += entry.size
            topic.last_time_us = entry.last_time_us
            segment.live_bytes += entry.size
            segment.whole_bytes += entry.size

    def _undo(self) -> None:
        """What was gathered never was."""
        for topic in self._gathered_topics:
            topic.touched = False
            topic.next_index = topic.saved_next
            topic.declared_in = topic.saved_declared
        if self._pieces:
            self._time_us = self._saved_time_us
        self._drop_gathered()

    def _drop_gathered(self) -> None:
        self._pieces = []
        self._entries = []
        self._gathered_bytes = 0
        self._gathered_topics = []
        self._gathered_divisions = []
        self._division += 1
        self._touched = []
        self._first_indexes = []
        self._gathered_marks = []
        self._gathered_floors = []
        self._group_open = False
        self._rolling = False
        self._reminding = False

    # --- reading --------------------------------------------------------------------------------------------------------

    def get(self, topic: Topic, index: int) -> Record:
        """One record. :class:`RecordUnavailable` if it is not there, :class:`StorageCorrupt` if it is damaged."""
        return reading.get(self._catalog, topic, index)

    def read(self, topic: Topic, start: int, end: int, max_bytes: int) -> Extents:
        """Blocks that hold the records from ``start`` on and below ``end``: about ``max_bytes``, but at least one block.

        ``next_index`` says where to go on; it is ``end``, or the end of what is committed, when nothing is left. Raises
        :class:`RecordUnavailable` for a start that is not there any more, or beyond the end of what is committed.
        """
        return reading.read(self._catalog, topic, start, end, max_bytes)

    def scan(self, numbers: set[int] | None, cursor: int, max_bytes: int) -> Extents:
        """Blocks of several topics (None: all), in the order of the log, from a position on.

        There is nothing left when the ``cursor`` of what comes back is ``committed_position``; otherwise go on there, also
        when nothing came back, because a long stretch had nothing of these topics.
        """
        return reading.scan(self._catalog, numbers, cursor, max_bytes)

    def position_of(self, topic: Topic, index: int) -> int:
        """Where to scan from, to meet a record and those behind it; for one that is not committed yet, the end."""
        return reading.position_of(self._catalog, topic, index)

    def index_at(self, topic: Topic, time_us: int) -> int:
        """The first index whose record came at ``time_us`` or later; of the next one to come, if none did."""
        return reading.index_at(self._catalog, topic, time_us)

    # --- retention ------------------------------------------------------------------------------------------------------

    @property
    def collecting(self) -> bool:
        """Whether there are topics whose retention the next step is to look at, before it begins again with all."""
        return bool(self._round)

    def collect(self, now_us: int) -> Job | None:
        """A step: some topics lose what their retention says. Returns what is to be done about the files, if there is
        something and nothing is being done already; call :meth:`finish` when it is."""
        if not self._round:
            self._round = list(self._catalog.topics.values())
        moved: i64 = 0
        looked: i64 = 0
        while self._round and looked < LOOKED_AT and moved < MOVED:
            topic = self._round.pop()
            looked += 1
            # Bounds that say nothing are the rule where there are many topics.
            if topic.retention is not NO_RETENTION and self._catalog.numbered.get(topic.number) is topic:
                try:
                    moved += retention.apply_bounds(self._catalog, topic, now_us)
                except StorageCorrupt as damage:
                    self._catalog.report(damage)
        if self._job is None:
            self._job = self._next_job()
            return self._job
        return None

    def _next_job(self) -> Job | None:
        catalog = self._catalog
        safe_position = min(catalog.committed_position, self.flushed_position)
        committed = safe_position >> OFFSET_BITS
        if not safe_position & OFFSET_MASK:
            committed -= 1  # the marks that the newest segment repeats are not on disk yet
        storage = self._storage
        for segment in catalog.segments:
            if segment.sequence >= committed:
                break
            # Without the word that a topic was deleted, what older segments have of it would be back after a restart.
            is_needed = segment.has_deletions and segment is not catalog.segments[0]
            is_held = segment.sequence >= self.held_from
            if segment.live_bytes == 0 and not is_needed and not is_held:
                if self._are_names_kept(segment):
                    self._drop(segment)
                break
            if not segment.has_index:
                return Seal(storage, segment, catalog.runs_of(segment))
            if not is_held and retention.is_mostly_dead(segment):
                return Rewrite(catalog, segment, catalog.runs_of(segment))
        return Remove(storage, self._garbage) if self._garbage else None

    def _are_names_kept(self, segment: Segment) -> bool:
        """Whether names and next indexes are known without this segment. If not, they are gathered to be written again."""
        if not self.remembers_names:
            return True
        if self._reminding or self._reminded_position > self._catalog.committed_position:
            return False
        kept = True
        for topic in self._deleted.values():
            is_empty = topic.first_index >= topic.committed_index
            if not is_empty or topic.next_index == 1:
                continue
            if topic.next_index > topic.committed_index:
                kept = False  # it comes again: that is committed soon, or cut off
            elif topic.declared_in < 0 or topic.declared_in == segment.sequence:
                kept = False
                self._reminding = True
                self.delete(topic)
        return kept

    def _drop(self, segment: Segment) -> None:
        """Nobody will read a segment any more."""
        catalog = self._catalog
        catalog.drop(segment)
        self._garbage.append(segment.name)
        for topic in list(self._deleted.values()):
            if self.remembers_names:
                if topic.first_index < topic.committed_index:
                    del self._deleted[topic.number]
            elif topic.places or topic.touched:
                del self._deleted[topic.number]
            elif topic.declared_in < catalog.sequences[0]:  # no file names it any more: it is forgotten
                del self._deleted[topic.number]
                del catalog.numbered[topic.number]
                del catalog.topics[topic.name]

    def finish(self, job: Job, failed: bool = False) -> None:
        """A job was run. One that failed is tried again later."""
        self._job = None
        if failed:
            return
        if isinstance(job, Seal):
            self._catalog.sealed(job.segment)
        elif isinstance(job, Remove):
            self._garbage = [name for name in self._garbage if name not in job.names]
        elif isinstance(job, Rewrite):
            self._garbage.append(job.segment.name)
            retention.replace(self._catalog, job)

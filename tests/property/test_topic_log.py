"""The log against a dumb oracle: a list of records per topic, a list of all of them, and what was committed of it.

A run appends, writes, commits, reads in every way, applies retention, deletes topics, runs jobs, loses power at any byte of
what was not committed, cuts, and opens the log again, in random order.
"""

from __future__ import annotations

from random import Random

import pytest

from nearcast.config import Retention
from nearcast.errors import RecordUnavailable, StorageUnavailable
from nearcast.topiclog.batches import parse
from nearcast.topiclog.blocks import GROUPED
from nearcast.topiclog.log import Job, Topic, TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.storage import MemoryStorage

SEGMENT_BYTES = 2_000
NAMES = [b"a", b"b/c", b"sensors/1", b"sensors/2"]
Message = tuple[bytes, int, int, bytes]
"""Topic, index, time, payload."""


class Oracle:
    """What the log has to hold."""

    def __init__(self) -> None:
        self.committed: list[Message] = []
        self.written: list[tuple[int, list[Message], dict[str, Mark]]] = []
        self.gathered: list[Message] = []
        self.marks: dict[str, Mark] = {}
        self.written_marks: dict[str, Mark] = {}
        self.gathered_marks: dict[str, Mark] = {}
        self.firsts = dict.fromkeys(NAMES, 1)
        self.deleted: dict[bytes, int] = {}
        """The next index of topics that were deleted, until they are forgotten."""
        self.time_us = 0

    def next_index(self, name: bytes) -> int:
        everything = [*self.committed, *(message for _, messages, _ in self.written for message in messages), *self.gathered]
        return max((message[1] + 1 for message in everything if message[0] == name), default=self.deleted.get(name, 1))

    def commit(self, count: int) -> None:
        for _, messages, marks in self.written[:count]:
            self.committed += messages
            self.marks |= marks
        del self.written[:count]

    def visible(self, name: bytes) -> list[Message]:
        return [message for message in self.committed if message[0] == name and message[1] >= self.firsts[name]]


class Run:
    """One random history."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.storage = MemoryStorage()
        self.log = TopicLog(self.storage, SEGMENT_BYTES, 100)
        self.log.recover()
        self.oracle = Oracle()
        self.job: Job | None = None
        self.reopened = 0

    def topic(self, name: bytes) -> Topic:
        if name not in self.log.topics:  # perhaps it was deleted, and is forgotten
            assert not self.oracle.visible(name)
            self.oracle.deleted.pop(name, None)
            self.oracle.firsts[name] = 1
        topic = self.log.topic(name)
        assert topic is not None
        return topic

    def step(self) -> None:
        actions = [self.append] * 6 + [self.group, self.write, self.write, self.commit, self.commit, self.check_reads]
        actions += [self.collect, self.finish, self.crash, self.reopen, self.cut, self.fail, self.retain, self.check_scan]
        actions += [self.delete]
        self.random.choice(actions)()

    # --- writing ---

    def append(self, flags: int = 0) -> None:
        name = self.random.choice(NAMES)
        payloads = [
            self.random.randbytes(self.random.choice([0, 3, 60, 300])) for _ in range(self.random.choice([1, 1, 1, 4]))
        ]
        self.oracle.time_us = max(self.oracle.time_us, self.oracle.time_us + self.random.randrange(-3, 5))
        first = self.log.append(self.topic(name), b"publisher", 1 | flags, b"\x03\x00\x01x", payloads, self.oracle.time_us)
        assert first == self.oracle.next_index(name)
        for number, payload in enumerate(payloads):
            self.oracle.gathered.append((name, first + number, self.oracle.time_us, payload))

    def group(self) -> None:
        for _ in range(self.random.randrange(3)):
            self.append(GROUPED)
        mark = Mark(producer=self.random.choice("pq"), batch=self.random.randrange(1_000))
        self.log.append_mark(mark)
        self.oracle.gathered_marks[mark.producer] = mark

    def write(self) -> None:
        position = self.log.write()
        oracle = self.oracle
        if oracle.gathered or oracle.gathered_marks:
            oracle.written.append((position, oracle.gathered, oracle.gathered_marks))
            oracle.gathered, oracle.gathered_marks = [], {}

    def commit(self) -> None:
        if self.oracle.written:
            count = self.random.randrange(len(self.oracle.written)) + 1
            self.log.commit(self.oracle.written[count - 1][0])
            self.oracle.commit(count)

    def fail(self) -> None:
        """The disk is full."""
        self.storage.capacity_bytes = sum(map(len, self.storage.files.values())) + self.random.randrange(30)
        if self.oracle.gathered:
            with pytest.raises(StorageUnavailable):
                self.log.write()
            self.oracle.gathered, self.oracle.gathered_marks = [], {}
        self.storage.capacity_bytes = 1 << 62

    def cut(self) -> None:
        self.finish()
        written = self.oracle.written
        keep = self.random.randrange(len(written) + 1)
        self.log.cut(written[keep - 1][0] if keep else self.log.committed_position)
        del written[keep:]
        self.oracle.gathered, self.oracle.gathered_marks = [], {}

    def delete(self) -> None:
        """A topic loses all records; while nothing else is on its way, which keeps the oracle dumb."""
        name = self.random.choice(NAMES)
        oracle = self.oracle
        if oracle.visible(name) and not (oracle.gathered or oracle.gathered_marks or oracle.written):
            topic = self.topic(name)
            self.log.delete(topic)
            self.log.commit(self.log.write())
            oracle.committed = [message for message in oracle.committed if message[0] != name]
            oracle.firsts[name] = oracle.deleted[name] = topic.next_index

    # --- the end of a process ---

    def crash(self) -> None:
        """Lose the files' tails from any byte on that is not committed; what is left of whole writes comes back."""
        committed = self.log.committed_position
        names = sorted(name for name in self.storage.files if name.endswith(".log"))
        by_sequence = {int(name[:10]): name for name in names}
        uncommitted = []
        for sequence, name in by_sequence.items():
            if sequence > committed >> 32:
                uncommitted.append((name, 0))
            elif sequence == committed >> 32:
                uncommitted.append((name, committed & 0xFFFFFFFF))
        lost_from = None
        for name, begin in uncommitted:
            data = self.storage.files[name]
            kept = self.random.randrange(begin, len(data) + 1)
            if lost_from is not None:
                kept = 0
            if kept < len(data):
                lost_from = lost_from or (int(name[:10]) << 32) + kept
                del data[kept:]
                data += self.random.choice([b"", b"\0" * 16, self.random.randbytes(self.random.randrange(60))])
        oracle = self.oracle
        if lost_from is not None:
            oracle.written = [each for each in oracle.written if each[0] <= lost_from]
        partly = self.open()
        # Of a write that was torn, whole blocks from its beginning may have come back: they count now, in order.
        oracle.commit(len(oracle.written))
        known = {message[:2] for message in oracle.committed}
        oracle.committed += [message for message in partly if message[:2] not in known]
        oracle.marks = dict(self.log.marks)

    def reopen(self) -> None:
        if self.random.random() < 0.5:
            self.log.close()
        self.open()
        self.oracle.commit(len(self.oracle.written))

    def open(self) -> list[Message]:
        if self.random.random() < 0.3:  # indexes are no more than a help
            for file in [file for file in self.storage.files if file.endswith(".index")]:
                if self.random.random() < 0.5:
                    del self.storage.files[file]
                else:
                    self.storage.files[file][self.random.randrange(len(self.storage.files[file]))] ^= 1
        self.job = None
        self.storage._views.clear()
        oracle = self.oracle
        oracle.gathered, oracle.gathered_marks = [], {}
        before = {topic.name: topic.retention for topic in self.log.topics.values()}
        self.log = TopicLog(self.storage, SEGMENT_BYTES, 100)
        self.log.recover()
        self.reopened += 1
        for topic in self.log.topics.values():
            name: bytes = topic.name
            self.log.set_retention(topic, before.get(name, Retention()))
            # What retention removed and no file forgot yet may come back; a reader may not see less than before.
            assert topic.first_index <= oracle.firsts[name] or not oracle.visible(name)
            if topic.next_index >= oracle.deleted.get(name, 1):
                assert topic.first_index >= oracle.deleted.get(name, 1), "what was deleted does not"
            oracle.firsts[name] = topic.first_index
            if topic.first_index == topic.next_index:
                oracle.deleted[name] = topic.next_index
        for name in NAMES:
            if name not in self.log.topics:
                oracle.firsts[name] = 1
                oracle.deleted.pop(name, None)
        return self.scanned()

    # --- retention ---

    def retain(self) -> None:
        bounds = Retention(
            max_records=self.random.choice([0, 0, 1, 5]),
            max_bytes=self.random.choice([0, 0, 100, 700]),
            max_age_seconds=self.random.choice([0.0, 0.0, 0.00002]),
        )
        self.log.set_retention(self.topic(self.random.choice(NAMES)), bounds)

    def collect(self) -> None:
        job = self.log.collect(self.oracle.time_us)
        for name in NAMES:
            topic = self.topic(name)
            visible = self.oracle.visible(name)
            bounds = topic.retention
            assert topic.first_index >= self.oracle.firsts[name]
            self.oracle.firsts[name] = topic.first_index
            left = self.oracle.visible(name)
            assert bool(left) == bool(visible)
            if bounds.max_records:
                assert len(left) <= bounds.max_records
            if bounds.max_age_seconds and len(left) > 1:
                assert all(message[2] >= self.oracle.time_us - 20 for message in left[:-1])
            if not (bounds.max_records or bounds.max_bytes or bounds.max_age_seconds):
                assert left == visible
        if job is not None:
            assert self.job is None
            self.job = job

    def finish(self) -> None:
        if self.job is not None:
            failed = self.random.random() < 0.1
            if not failed:
                self.job.run()
            self.log.finish(self.job, failed)
            self.job = None

    # --- reading ---

    def check_reads(self) -> None:
        name = self.random.choice(NAMES)
        topic = self.log.topic(name, create=False)
        visible = self.oracle.visible(name)
        if topic is None:
            assert not visible
            return
        assert topic.first_index == (visible[0][1] if visible else topic.committed_index)
        assert topic.committed_index == (visible[-1][1] + 1 if visible else topic.first_index)
        start = self.random.randrange(topic.first_index, topic.committed_index + 1)
        end = self.random.randrange(start, topic.committed_index + 2)
        found: list[Message] = []
        at = start
        while at < min(end, topic.committed_index):
            extents = self.log.read(topic, at, end, self.random.choice([1, 500, 5_000]))
            assert extents.next_index > at
            data = extents.gather()
            assert len(data) == extents.bytes
            found += messages(self.log, data, start=at, end=min(end, extents.next_index))
            at = extents.next_index
        assert found == [message for message in visible if start <= message[1] < end]
        if visible:
            wanted = self.random.choice(visible)
            record = self.log.get(topic, wanted[1])
            assert (record.topic.encode(), record.index, record.time_us, bytes(record.payload)) == wanted
            assert (record.publisher, record.qos, record.properties) == ("publisher", 1, b"\x03\x00\x01x")
            moment = self.random.randrange(self.oracle.time_us + 2)
            later = [message[1] for message in visible if message[2] >= moment]
            assert self.log.index_at(topic, moment) == (later[0] if later else topic.committed_index)
            position = self.log.position_of(topic, wanted[1])
            data = self.log.scan({topic.number}, position, 1 << 30).gather()
            assert messages(self.log, data, start=wanted[1]) == [each for each in visible if each[1] >= wanted[1]]
        for index in (topic.first_index - 1, topic.committed_index):
            with pytest.raises(RecordUnavailable):
                self.log.get(topic, index)

    def scanned(self, numbers: set[int] | None = None) -> list[Message]:
        found: list[Message] = []
        cursor = 0
        while cursor < self.log.committed_position:
            extents = self.log.scan(numbers, cursor, self.random.choice([1, 500, 5_000]))
            assert extents.cursor > cursor
            cursor = extents.cursor
            found += messages(self.log, extents.gather())
            if self.random.random() < 0.05:
                self.finish()  # a segment that is written anew does not lose its place
        return found

    def check_scan(self) -> None:
        names = self.random.sample(NAMES, self.random.randrange(1, len(NAMES) + 1))
        numbers = {topic.number for name, topic in self.log.topics.items() if name in names}
        found = self.scanned(None if len(names) == len(NAMES) else numbers)
        firsts = self.oracle.firsts
        assert [each for each in found if each[1] >= firsts[each[0]]] == [
            each for each in self.oracle.committed if each[0] in names and each[1] >= firsts[each[0]]
        ]
        assert self.log.marks == self.oracle.marks
        for name, topic in self.log.topics.items():
            if not self.oracle.written:
                total = self.log.read(topic, topic.first_index, topic.committed_index, 1 << 30).bytes
                assert topic.bytes <= total <= topic.bytes + 4_096, name


def messages(log: TopicLog, data: memoryview, start: int = 0, end: int = 1 << 63) -> list[Message]:
    names = {topic.number: topic.text() for topic in log.topics.values()}
    found = parse(data, names, start=start, end=end)
    return [(record.topic.encode(), record.index, record.time_us, bytes(record.payload)) for record in found]


@pytest.mark.parametrize("seed", range(60))
def test_a_random_history(seed: int) -> None:
    run = Run(seed)
    for _ in range(300):
        run.step()
    run.reopen()
    run.check_scan()

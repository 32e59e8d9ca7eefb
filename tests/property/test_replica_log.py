"""Replicas of one log against a dumb oracle: a list of entries per replica, and what follows from it.

Three replicas with segments of different sizes get the same entries, made again by whoever leads, at different times. They cut
what another leader did not have, lose power at any byte that was not flushed, apply retention of their own, run jobs, take
snapshots and are opened again, in random order. What is compared: every record, every index, every mark, every entry.
"""

from __future__ import annotations

from random import Random

import pytest

from nearcast.config import Retention
from nearcast.errors import StorageUnavailable
from nearcast.simulation.mqtt_topics import TopicDisk
from nearcast.topiclog.entries import Deletion, EntryWriter, Item, Run, decode
from nearcast.topiclog.log import Job
from nearcast.topiclog.marks import Mark, remember
from nearcast.topiclog.replica import ReplicaLog
from nearcast.topiclog.storage import MemoryStorage
from nearcast.topiclog.walking import CONFIGURATION, DATA
from tests.unit.simulation.worlds import make_world

NAMES = [b"a", b"b/c", b"sensors/1", b"sensors/2", b"rare"]
NOOP = 3
Message = tuple[int, int, bytes, int, bytes, bytes]
"""Index, time, publisher, flags, properties, payload."""


class Entry:
    def __init__(self, term: int, kind: int, pieces: list[bytes]) -> None:
        self.term = term
        self.kind = kind
        self.payload = b"".join(pieces)
        self.items: list[Item] = decode(self.payload) if kind == DATA else []

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Entry)
        return (self.term, self.kind, self.payload) == (other.term, other.kind, other.payload)


class State:
    """What follows from a list of entries."""

    def __init__(self, entries: list[Entry]) -> None:
        self.messages: dict[bytes, list[Message]] = {}
        self.nexts: dict[bytes, int] = {}
        self.marks: dict[str, Mark] = {}
        for entry in entries:
            for item in entry.items:
                if isinstance(item, Mark):
                    remember(self.marks, item)
                elif isinstance(item, Deletion):
                    self.messages[item.topic] = []
                    self.nexts.setdefault(item.topic, 1)
                else:
                    self.add(item)

    def add(self, run: Run) -> None:
        first = self.nexts.get(run.topic, 1)
        self.nexts[run.topic] = first + run.count
        self.messages.setdefault(run.topic, []).extend(
            (first + number, run.time_us, run.publisher(), run.flags, run.properties(), payload)
            for number, payload in enumerate(run.payloads())
        )


class MemoryDisk:
    """Files in memory, which lose their tails from any byte on that is not flushed, and get noise in its place."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.storage = MemoryStorage()

    def fill(self) -> None:
        self.storage.capacity_bytes = sum(map(len, self.storage.files.values())) + self.random.randrange(30)

    def empty(self) -> None:
        self.storage.capacity_bytes = 1 << 62

    def flush(self) -> None:
        pass

    def lose_power(self, flushed_position: int) -> None:
        lost = False
        for name in sorted(name for name in self.storage.files if name.endswith(".log")):
            sequence = int(name[:10])
            data = self.storage.files[name]
            begin = len(data)
            if sequence > flushed_position >> 32:
                begin = 0
            elif sequence == flushed_position >> 32:
                begin = min(flushed_position & 0xFFFFFFFF, begin)
            if lost:
                del data[0:]
            elif begin < len(data):
                kept = self.random.randrange(begin, len(data) + 1)
                lost = kept < len(data)
                del data[kept:]
                if lost:
                    data += self.random.choice([b"", b"\0" * 16, self.random.randbytes(self.random.randrange(60))])

    def damage_indexes(self) -> None:
        """Indexes are no more than a help."""
        self.storage._views.clear()
        if self.random.random() < 0.3:
            for file in [file for file in self.storage.files if file.endswith(".index")]:
                if self.random.random() < 0.5:
                    del self.storage.files[file]
                else:
                    self.storage.files[file][self.random.randrange(len(self.storage.files[file]))] ^= 1


class SimulatedDisk:
    """A disk of the simulator: every file, and every name, keeps a prefix of what was not flushed."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.world = make_world(seed=random.randrange(1 << 30))
        self.storage = TopicDisk(self.world.hosts[0].disk, "topics/")

    def fill(self) -> None:
        self.world.hosts[0].disk.full = True

    def empty(self) -> None:
        self.world.hosts[0].disk.full = False

    def flush(self) -> None:
        self.world.hosts[0].disk.sync()
        self.world.run(self.world.now + 0.1)

    def lose_power(self, flushed_position: int) -> None:
        self.world.hosts[0].crash()
        self.world.hosts[0].boot()
        self.storage = TopicDisk(self.world.hosts[0].disk, "topics/")
        for name in self.storage.names():
            if name.endswith(".partial"):
                self.storage.remove(name)

    def damage_indexes(self) -> None:
        pass


class Replica:
    """One replica, and the list of entries that it has."""

    def __init__(self, random: Random, name: str, segment_bytes: int, disk: MemoryDisk | SimulatedDisk) -> None:
        self.random = random
        self.name = name
        self.segment_bytes = segment_bytes
        self.disk = disk
        self.storage = disk.storage
        self.log = ReplicaLog(self.storage, segment_bytes, 100)
        self.log.recover(0)
        self.entries: list[Entry] = []
        self.gathered = 0
        self.flushed = 0
        self.flushed_position = 0
        self.committed = 0
        self.committed_once = 0
        self.job: Job | None = None
        self.past: list[list[Entry]] = [[]]
        """What the log was since it was last flushed: a power cut may bring any of that back, or the beginning of it."""

    # --- what a driver does ---

    def append(self, entry: Entry, ready_made: bool) -> None:
        kept = 1 + (len(entry.payload) // 2)
        pieces = [entry.payload] if self.random.random() < 0.7 else [entry.payload[:kept], entry.payload[kept:]]
        items = entry.items if ready_made and entry.kind == DATA else None
        self.log.append(len(self.entries) + 1, entry.term, entry.kind, pieces, items)
        self.entries.append(entry)
        self.gathered += 1

    def write(self) -> None:
        assert self.log.write() == len(self.entries)
        self.gathered = 0
        self.past.append(self.entries.copy())

    def fail(self) -> None:
        """The disk is full."""
        if not self.gathered:
            return
        self.disk.fill()
        with pytest.raises(StorageUnavailable):
            self.log.write()
        self.disk.empty()
        del self.entries[len(self.entries) - self.gathered :]
        self.gathered = 0
        assert self.log.last_index == len(self.entries)

    def flush(self) -> None:
        self.flushed = len(self.entries) - self.gathered
        self.flushed_position = self.log.log.written_position
        self.disk.flush()
        self.past = [self.entries[: self.flushed]]
        self.log.flushed(self.flushed)

    def commit(self, index: int) -> None:
        if index > self.committed:
            self.log.commit(index)
            self.committed = index
            self.committed_once = max(index, self.committed_once)

    def cut(self, last_index: int) -> None:
        assert last_index >= self.committed
        self.log.cut(last_index)
        if len(self.entries) - self.gathered > last_index:
            self.gathered = 0
        else:
            self.gathered = min(self.gathered, 0)
        del self.entries[last_index:]
        del self.entries[self.log.last_index :]
        self.past.append(self.entries.copy())
        self.flushed = min(self.flushed, last_index)
        self.flushed_position = min(self.flushed_position, self.log.log.written_position)

    # --- the end of a process ---

    def close(self) -> None:
        if self.gathered:
            self.write()
        self.flush()
        self.log.close()
        self.open()
        assert self.log.last_index == len(self.entries)
        self.past = [self.entries.copy()]

    def crash(self) -> None:
        """Lose the files' tails from any byte on that is not flushed."""
        del self.entries[len(self.entries) - self.gathered :]
        self.gathered = 0
        self.disk.lose_power(self.flushed_position)
        self.open()
        assert self.log.last_index >= self.flushed
        self.entries = self.found()
        self.flushed = self.log.last_index
        self.past = [self.entries.copy()]

    def found(self) -> list[Entry]:
        """What the log is now: the beginning of what it was at some time."""
        last = self.log.last_index
        base = self.log.base_index
        stored = self.log.entries(base + 1, last, 1 << 30) if last > base else []
        kept = [Entry(each.term, each.kind, each.pieces) for each in stored]
        for past in reversed(self.past):
            if past[base:last] == kept and len(past) >= last:
                return past[:last]
        raise AssertionError(f"{self.name} came back with entries that it never had together")

    def open(self) -> None:
        self.disk.damage_indexes()
        self.job = None
        before = {topic.name: topic.retention for topic in self.log.log.topics.values()}
        known = self.random.randrange(self.committed + 1)
        self.storage = self.disk.storage
        self.log = ReplicaLog(self.storage, self.segment_bytes, 100)
        self.log.recover(known)
        self.disk.flush()
        assert known <= self.log.committed_index <= self.committed_once, "what was not committed is not shown"
        assert self.log.lost_index == 0
        self.committed = self.log.committed_index
        self.flushed_position = self.log.log.written_position
        for topic in self.log.log.topics.values():
            self.log.log.set_retention(topic, before.get(topic.name, Retention()))

    # --- retention ---

    def collect(self, now_us: int) -> None:
        if self.gathered:
            self.write()
        job = self.log.collect(now_us)
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

    def retain(self) -> None:
        topics = list(self.log.log.topics.values())
        if topics:
            bounds = Retention(max_records=self.random.choice([0, 1, 5]), max_bytes=self.random.choice([0, 0, 700]))
            self.log.log.set_retention(self.random.choice(topics), bounds)

    # --- what has to hold ---

    def check(self) -> None:
        self.check_records()
        self.check_entries()

    def check_records(self) -> None:
        visible = State(self.entries[: self.committed])
        appended = State(self.entries)
        log = self.log.log
        assert self.log.committed_index == self.committed
        for name in NAMES:
            topic = log.topics.get(name)
            expected = visible.messages.get(name, [])
            if topic is None:
                assert not expected, (self.name, name)
                assert appended.nexts.get(name, 1) == 1, (self.name, name)
                continue
            assert topic.next_index == appended.nexts.get(name, 1), (self.name, name)
            if self.committed < self.committed_once and topic.first_index > visible.nexts.get(name, 1):
                continue  # less is known to be committed than before a restart, and retention has gone further
            assert topic.committed_index == visible.nexts.get(name, 1), (self.name, name)
            if not expected or (self.committed < self.committed_once and topic.first_index == topic.committed_index):
                assert topic.first_index == topic.committed_index, (self.name, name)
                continue
            assert expected[0][0] <= topic.first_index < topic.committed_index, (self.name, name)
            for message in expected[topic.first_index - expected[0][0] :]:
                record = log.get(topic, message[0])
                flags = record.qos | (4 if record.retain else 0)
                found = (record.index, record.time_us, record.publisher.encode(), flags, record.properties)
                assert (*found, bytes(record.payload)) == message
        assert {key: mark for key, mark in log.marks.items() if key[0] != "$"} == visible.marks
        assert self.log.marks == appended.marks

    def check_entries(self) -> None:
        written = len(self.entries) - self.gathered
        base = self.log.base_index
        assert 0 <= base <= self.committed
        at = base + 1
        while at <= written:
            stored = self.log.entries(at, written, self.random.choice([1, 500, 50_000]))
            assert stored[0].index == at
            for each in stored:
                assert Entry(each.term, each.kind, each.pieces) == self.entries[each.index - 1], (self.name, each.index)
                assert each.index == at
                assert self.log.term_of(at) == each.term
                at += 1
        runs = self.log.terms()
        assert runs[0] == (base, self.entries[base - 1].term if base else 0)
        for first, term in runs[1:]:
            assert self.entries[first - 1].term == term != self.entries[first - 2].term if first > 1 else term > 0
        assert self.log.last_term == (self.entries[-1].term if self.entries else 0)
        expected = [(at + 1, each.payload) for at, each in enumerate(self.entries) if each.kind == CONFIGURATION]
        before = [each for each in expected if each[0] <= base][-1:]
        assert self.log.configurations() == before + [each for each in expected if each[0] > base]


def same_entries(mine: list[Entry], theirs: list[Entry]) -> int:
    """How many entries two replicas share."""
    count = 0
    for own, other in zip(mine, theirs, strict=False):
        if own != other:
            break
        count += 1
    return count


class History:
    """One random history of a set."""

    def __init__(self, seed: int, disk: type[MemoryDisk] | type[SimulatedDisk] = MemoryDisk) -> None:
        self.random = random = Random(seed)
        sizes = self.random.sample([1_500, 2_500, 6_000, 1 << 20], 3)
        self.replicas = [Replica(random, f"replica {at}", size, disk(random)) for at, size in enumerate(sizes)]
        self.leader = self.replicas[0]
        self.committed: list[Entry] = []
        self.term = 1
        self.now_us = 0

    def step(self) -> None:
        actions = [self.propose] * 6 + [self.write] * 3 + [self.replicate] * 6 + [self.commit] * 3
        actions += [self.elect, self.crash, self.close, self.retain, self.collect, self.collect, self.finish, self.finish]
        actions += [self.fail, self.check, self.flush]
        self.random.choice(actions)()

    def propose(self) -> None:
        random = self.random
        kind = random.choices([DATA, CONFIGURATION, NOOP], [20, 1, 1])[0]
        writer = EntryWriter(self.leader.log.log.latest_time_us)
        if kind != DATA:
            payload = b"" if kind == NOOP else random.randbytes(random.randrange(40))
            self.leader.append(Entry(self.term, kind, [payload]), False)
            return
        self.now_us += random.randrange(-3, 9)
        for _ in range(random.choice([0, 1, 1, 1, 3, 6])):
            choice = random.randrange(24)
            name = random.choices(NAMES, [9, 9, 9, 9, 1])[0]
            if choice == 0:
                writer.delete(name)
            elif choice < 3:
                writer.mark(Mark(producer=random.choice("pqr"), batch=random.randrange(-1, 9)))
            else:
                payloads = [random.randbytes(random.choice([0, 3, 60, 300])) for _ in range(random.choice([1, 1, 1, 4]))]
                properties = random.choice([b"", b"\x03\x00\x01x"])
                publisher = random.choice([b"", b"publisher"])
                writer.run(name, publisher, random.choice([0, 1, 2, 5]), properties, payloads, max(self.now_us, 0))
        self.leader.append(Entry(self.term, DATA, writer.finish()), random.random() < 0.5)

    def write(self) -> None:
        self.random.choice(self.replicas).write()

    def flush(self) -> None:
        self.random.choice(self.replicas).flush()

    def fail(self) -> None:
        self.random.choice(self.replicas).fail()

    def replicate(self) -> None:
        """One that follows gets what it does not have, made again from the leader's blocks."""
        replica = self.random.choice([each for each in self.replicas if each is not self.leader])
        leader = self.leader
        if leader.gathered:
            leader.write()
        same = same_entries(replica.entries, leader.entries)
        if same < leader.log.base_index or self.random.random() < 0.03:
            self.send_snapshot(leader, replica)
            return
        if same < len(replica.entries) and same < len(leader.entries):
            replica.cut(same)
        same = min(same, len(replica.entries))
        if len(replica.entries) > same or same == len(leader.entries):
            return
        stored = leader.log.entries(same + 1, len(leader.entries), self.random.choice([1, 500, 5_000]))
        for each in stored:
            replica.append(Entry(each.term, each.kind, each.pieces), False)
        replica.write()

    def send_snapshot(self, leader: Replica, replica: Replica) -> None:
        """The leader's log goes on meanwhile; the other one may lose power, or hear of another leader."""
        random = self.random
        if replica.gathered:
            replica.write()
        index = leader.log.committed_index
        if index < replica.committed:
            return
        configuration = leader.log.configurations()
        before = [each for each in configuration if each[0] <= index]
        installation = replica.log.install(before[-1] if before else None)
        sent = leader.entries[:index]
        for chunk in leader.log.snapshot(random.choice([1, 700, 1 << 20])).chunks():
            installation.take(chunk)
            choice = random.randrange(120)
            if choice == 0:
                replica.crash()
                return
            if choice == 1:
                replica.log.give_up_installation()
                return
            if choice < 10:
                job = installation.collect(0)
                if job is not None:
                    job.run()
                    installation.finish(job)
            elif choice < 30:
                replica.check_records()
            elif choice < 60:
                random.choice([leader.retain, lambda: leader.collect(self.now_us), leader.finish, self.propose])()
        assert (installation.index, installation.term) == (index, sent[-1].term if sent else 0)
        replica.finish()
        replica.disk.flush()
        replica.log.complete_installation()
        replica.entries = sent
        replica.committed = index
        replica.committed_once = max(index, replica.committed_once)
        replica.flushed = index
        replica.flushed_position = replica.log.log.written_position
        replica.disk.flush()
        replica.past = [sent.copy()]
        assert replica.log.base_index == replica.log.last_index == index
        replica.check()

    def commit(self) -> None:
        """What the leader and another have is committed; and told to some."""
        written = len(self.leader.entries) - self.leader.gathered
        counts = []
        for replica in self.replicas:
            count = 0
            for mine, theirs in zip(
                replica.entries[: len(replica.entries) - replica.gathered], self.leader.entries, strict=False
            ):
                if mine != theirs:
                    break
                count += 1
            counts.append(min(count, written))
        index = sorted(counts)[1]
        if index and self.leader.entries[index - 1].term == self.term and index > len(self.committed):
            self.committed = self.leader.entries[:index]
            for replica, count in zip(self.replicas, counts, strict=True):
                if count >= index:
                    replica.flush()
        for replica, count in zip(self.replicas, counts, strict=True):
            known = min(count, len(self.committed), replica.flushed)
            if known > replica.committed and self.random.random() < 0.7:
                replica.commit(self.random.randrange(replica.committed, known + 1))

    def elect(self) -> None:
        """Somebody who has all that is committed leads."""
        fit = [each for each in self.replicas if each.entries[: len(self.committed)] == self.committed]
        assert fit
        leader = self.random.choice(fit)
        if leader.gathered:
            leader.write()
        self.leader = leader
        self.term += self.random.randrange(1, 3)

    def crash(self) -> None:
        replica = self.random.choice(self.replicas)
        replica.crash()
        if replica is self.leader:
            self.elect()

    def close(self) -> None:
        self.random.choice(self.replicas).close()

    def retain(self) -> None:
        self.random.choice(self.replicas).retain()

    def collect(self) -> None:
        self.random.choice(self.replicas).collect(self.now_us)

    def finish(self) -> None:
        self.random.choice(self.replicas).finish()

    def check(self) -> None:
        self.random.choice(self.replicas).check()


@pytest.mark.parametrize("disk", [MemoryDisk, SimulatedDisk])
@pytest.mark.parametrize("seed", range(60))
def test_a_random_history(seed: int, disk: type[MemoryDisk] | type[SimulatedDisk]) -> None:
    history = History(seed, disk)
    for _ in range(400):
        history.step()
    for replica in history.replicas:
        replica.check()

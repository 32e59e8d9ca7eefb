"""The topic log as a replica's log: what readers see, what can be cut, what is found again, what others are given."""

from __future__ import annotations

import pytest

from nearcast.config import Retention
from nearcast.errors import LocalProtocolError, RemoteProtocolError, StorageCorrupt, StorageUnavailable
from nearcast.topiclog.entries import EntryWriter, Run, decode
from nearcast.topiclog.installing import BEGINNING, Installation
from nearcast.topiclog.marks import FORGOTTEN, Mark
from nearcast.topiclog.replica import ReplicaLog
from nearcast.topiclog.storage import MemoryStorage
from nearcast.topiclog.walking import CONFIGURATION, DATA, NOOP


def opened(storage: MemoryStorage, committed: int = 0, segment_bytes: int = 100_000) -> ReplicaLog:
    storage._views.clear()
    log = ReplicaLog(storage, segment_bytes, 10)
    log.recover(committed)
    return log


def entry(*messages: tuple[bytes, bytes], marks: tuple[Mark, ...] = (), deleted: tuple[bytes, ...] = ()) -> list[bytes]:
    writer = EntryWriter()
    for topic in deleted:
        writer.delete(topic)
    for topic, payload in messages:
        writer.run(topic, b"client", 1, b"\x03\x00\x01x", [payload], 1_000)
    for mark in marks:
        writer.mark(mark)
    return writer.finish()


def add(log: ReplicaLog, *entries: list[bytes], term: int = 1) -> None:
    for pieces in entries:
        log.append(log.last_index + 1, term, DATA, pieces)
    log.write()


def seen(log: ReplicaLog, topic: bytes) -> list[bytes]:
    found = log.log.topics.get(topic)
    if found is None:
        return []
    return [bytes(log.log.get(found, index).payload) for index in range(found.first_index, found.committed_index)]


def payloads(log: ReplicaLog, first: int, last: int) -> list[bytes]:
    found = []
    for stored in log.entries(first, last, 1 << 20):
        for item in decode(b"".join(stored.pieces)):
            assert isinstance(item, Run)
            found += item.payloads()
    return found


def test_readers_see_what_is_committed_entry_by_entry() -> None:
    log = opened(MemoryStorage())
    add(log, entry((b"t", b"1")), entry((b"t", b"2"), (b"u", b"3")), entry((b"t", b"4")))
    assert seen(log, b"t") == []
    log.commit(2)
    assert seen(log, b"t") == [b"1", b"2"]
    assert seen(log, b"u") == [b"3"]
    log.commit(3)
    assert seen(log, b"t") == [b"1", b"2", b"4"]


def test_several_entries_are_one_write() -> None:
    class Counting(MemoryStorage):
        writes = 0

        def append(self, pieces: list[bytes]) -> None:
            self.writes += 1
            super().append(pieces)

    storage = Counting()
    add(opened(storage), *[entry((b"t", b"x")) for _ in range(50)])
    assert storage.writes == 1


def test_a_tail_that_is_not_committed_can_be_cut() -> None:
    log = opened(MemoryStorage())
    add(log, entry((b"t", b"1")), entry((b"t", b"2")), entry((b"new", b"3")))
    log.commit(1)
    log.cut(1)
    assert (log.last_index, log.last_term) == (1, 1)
    add(log, entry((b"t", b"other")), term=2)
    log.commit(2)
    assert seen(log, b"t") == [b"1", b"other"]
    assert [log.term_of(index) for index in (1, 2)] == [1, 2]
    with pytest.raises(LocalProtocolError):
        log.cut(1)


def test_a_cut_takes_whole_segments_and_goes_on_in_the_one_before() -> None:
    storage = MemoryStorage()
    log = opened(storage, segment_bytes=1_000)
    add(log, entry((b"t", b"1" * 600)))
    for number in range(5):
        add(log, entry((b"t", b"%d" % number * 600)))
    assert len(storage.files) > 2
    log.cut(1)
    assert len([name for name in storage.files if name.endswith(".log")]) == 1
    add(log, entry((b"t", b"2")))
    log.commit(2)
    assert seen(log, b"t") == [b"1" * 600, b"2"]
    assert payloads(log, 1, 2) == [b"1" * 600, b"2"]


def test_a_segment_that_a_power_cut_brought_back_is_not_taken_for_the_next() -> None:
    for payload in (b"a" * 600, b"b" * 900):  # as long as what was cut off, or longer
        storage = MemoryStorage()
        log = opened(storage, segment_bytes=900)
        add(log, entry((b"t", b"1")))
        add(log, entry((b"t", b"2" * 600)))
        add(log, entry((b"t", b"3")))
        removed = bytearray(storage.files["0000000002.log"])
        log.cut(1)
        add(log, entry((b"t", payload)), term=2)
        storage.files["0000000002.log"] = removed
        log = opened(storage)
        assert (log.last_index, log.last_term) == (2, 2)
        log.commit(2)
        assert seen(log, b"t") == [b"1", payload]


def test_marks_are_known_when_appended_and_gone_when_cut() -> None:
    log = opened(MemoryStorage())
    add(log, entry(marks=(Mark(producer="p", batch=1),)), entry(marks=(Mark(producer="p", batch=2),)))
    assert log.marks["p"].batch == 2
    assert "p" not in log.log.marks
    log.commit(1)
    assert log.log.marks["p"].batch == 1
    log.cut(1)
    assert log.marks["p"].batch == 1
    add(log, entry(marks=(Mark(producer="p", batch=FORGOTTEN),)))
    assert "p" not in log.marks
    assert log.log.marks["p"].batch == 1
    log.commit(2)
    assert "p" not in log.log.marks


def test_a_topic_is_emptied_when_that_is_committed() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"1"), (b"t", b"2")))
    log.commit(1)
    add(log, entry((b"t", b"3"), deleted=(b"t",)))
    assert seen(log, b"t") == [b"1", b"2"]
    log.cut(1)
    assert seen(opened(storage, 1), b"t") == [b"1", b"2"]
    log = opened(storage, 1)
    add(log, entry((b"t", b"3"), deleted=(b"t",)))
    log = opened(storage, 1)
    assert seen(log, b"t") == [b"1", b"2"], "also after a restart"
    log.commit(2)
    assert seen(log, b"t") == [b"3"]
    assert log.log.topics[b"t"].first_index == 3


def test_after_a_crash_the_rest_waits_for_a_word() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"1")), entry((b"t", b"2")), entry((b"u", b"3")))
    log = opened(storage, 1)
    assert (log.committed_index, log.last_index) == (1, 3)
    assert seen(log, b"t") == [b"1"]
    log.commit(3)
    assert (seen(log, b"t"), seen(log, b"u")) == ([b"1", b"2"], [b"3"])
    log = opened(storage, 1)
    log.cut(2)
    assert opened(storage, 2).last_index == 2


def test_the_log_itself_knows_how_much_was_committed() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"1")), entry((b"t", b"2")))
    log.commit(2)
    add(log, entry((b"t", b"3")))
    assert opened(storage).committed_index == 2
    log = opened(storage)
    log.commit(3)
    log.close()
    assert opened(storage).committed_index == 3


def test_a_commit_lies_segments_back() -> None:
    storage = MemoryStorage()
    log = opened(storage, segment_bytes=1_000)
    for number in range(20):
        add(log, entry((b"t", b"%d" % number * 100), marks=(Mark(producer="p", batch=number),)))
    log = opened(storage, 3, segment_bytes=1_000)
    assert log.committed_index == 3
    assert len(seen(log, b"t")) == 3
    assert log.log.marks["p"].batch == 2
    assert log.marks["p"].batch == 19
    for index in range(4, 21):
        log.commit(index)
        assert len(seen(log, b"t")) == index


def test_a_torn_entry_is_not_there_at_all() -> None:
    storage = MemoryStorage()
    add(opened(storage), entry((b"t", b"1")))
    whole = len(storage.files["0000000001.log"])
    add(opened(storage), entry((b"t", b"2"), (b"u", b"3"), marks=(Mark(producer="p", batch=1),), deleted=(b"t",)))
    data = bytes(storage.files["0000000001.log"])
    for end in range(whole, len(data), 8):
        storage.files = {"0000000001.log": bytearray(data[:end])}
        log = opened(storage, 1)
        assert (log.last_index, log.marks) == (1, {})
        assert seen(log, b"t") == [b"1"]
        add(log, entry((b"u", b"4")))
        log.commit(2)
        assert seen(opened(storage, 2), b"u") == [b"4"]


def test_what_was_committed_and_is_lost_is_told() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"1")), entry((b"t", b"2")))
    assert opened(storage, 2).lost_index == 0
    log = opened(storage, 7)
    assert (log.lost_index, log.committed_index) == (7, 2)


def test_a_write_that_fails_leaves_nothing() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"1")))
    log.append(2, 1, DATA, entry((b"t", b"2"), marks=(Mark(producer="p", batch=1),)))
    log.append(3, 2, CONFIGURATION, [b"members"])
    storage.capacity_bytes = 0
    with pytest.raises(StorageUnavailable):
        log.write()
    storage.capacity_bytes = 1 << 30
    assert (log.last_index, log.last_term, log.marks, log.configurations()) == (1, 1, {}, [])
    add(log, entry((b"t", b"other")))
    log.commit(2)
    assert seen(log, b"t") == [b"1", b"other"]


def test_entries_that_are_not_for_the_log_are_kept_too() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    log.append(1, 1, NOOP, [b""])
    log.append(2, 1, CONFIGURATION, [b"one, ", b"two"])
    log.append(3, 4, NOOP, [])
    log.append(4, 4, CONFIGURATION, [b"one"])
    log.write()
    for each in (log, opened(storage)):
        stored = each.entries(1, 4, 1 << 20)
        assert [(one.index, one.term, one.kind, b"".join(one.pieces)) for one in stored] == [
            (1, 1, NOOP, b""),
            (2, 1, CONFIGURATION, b"one, two"),
            (3, 4, NOOP, b""),
            (4, 4, CONFIGURATION, b"one"),
        ]
        assert each.terms() == [(0, 0), (1, 1), (3, 4)]
        assert each.configurations() == [(2, b"one, two"), (4, b"one")]
    log.cut(3)
    assert log.configurations() == [(2, b"one, two")]


def test_garbage_is_refused_and_nothing_of_it_stays() -> None:
    log = opened(MemoryStorage())
    good = b"".join(entry((b"t", b"1"), (b"u", b"2")))
    with pytest.raises(RemoteProtocolError):
        log.append(1, 1, DATA, [good[:-8]])
    assert log.last_index == 0
    add(log, entry((b"t", b"1")))
    log.commit(1)
    assert seen(log, b"t") == [b"1"]


def test_entries_come_in_order() -> None:
    log = opened(MemoryStorage())
    add(log, entry((b"t", b"1")), term=3)
    for index, term in ((1, 3), (3, 3), (2, 2)):
        with pytest.raises(LocalProtocolError):
            log.append(index, term, NOOP, [b""])
    with pytest.raises(LocalProtocolError):
        log.commit(2)
    with pytest.raises(LocalProtocolError):
        log.entries(1, 2, 100)
    with pytest.raises(LocalProtocolError):
        log.term_of(2)


def test_damage_does_not_go_to_others() -> None:
    storage = MemoryStorage()
    log = opened(storage)
    add(log, entry((b"t", b"x" * 500)), entry((b"t", b"2")))
    storage.files["0000000001.log"][300] ^= 1
    with pytest.raises(StorageCorrupt) as broken:
        log.entries(1, 2, 100_000)
    assert broken.value.path == "memory/0000000001.log"
    assert payloads(log, 2, 2) == [b"2"]


def collected(log: ReplicaLog) -> None:
    for _ in range(50):
        job = log.collect(10_000)
        if job is not None:
            job.run()
            log.finish(job)


def shrunk(storage: MemoryStorage) -> ReplicaLog:
    """A log of which retention has taken the beginning."""
    log = opened(storage, segment_bytes=2_000)
    add(log, entry((b"gone", b"1"), (b"gone", b"2"), marks=(Mark(producer="p", batch=7),)))
    for number in range(30):
        add(log, entry((b"t", b"%d" % number * 100)), entry((b"kept", b"%d" % number)))
    add(log, entry(deleted=(b"gone",)))
    log.commit(log.last_index)
    log.flushed(log.last_index)
    log.log.set_retention(log.log.topics[b"t"], Retention(max_records=3))
    log.log.set_retention(log.log.topics[b"kept"], Retention(max_records=2))
    collected(log)
    return log


def test_retention_moves_the_base() -> None:
    storage = MemoryStorage()
    log = shrunk(storage)
    assert log.base_index > 20
    assert log.terms() == [(log.base_index, 1)]
    assert log.entries(log.base_index + 1, log.last_index, 1 << 20)
    with pytest.raises(LocalProtocolError):
        log.entries(log.base_index, log.last_index, 100)


def test_entries_that_somebody_needs_are_held() -> None:
    log = opened(MemoryStorage(), segment_bytes=2_000)
    for _ in range(60):
        add(log, entry((b"t", b"x" * 100)))
    log.commit(60)
    log.flushed(60)
    log.log.set_retention(log.log.topics[b"t"], Retention(max_records=1))
    log.hold(15)
    collected(log)
    assert 0 < log.base_index < 15
    log.hold(60)
    collected(log)
    assert log.base_index > 40


def test_what_is_not_flushed_is_not_sealed() -> None:
    storage = MemoryStorage()
    log = opened(storage, segment_bytes=500)
    for _ in range(10):
        add(log, entry((b"t", b"x" * 200)))
    log.commit(10)
    collected(log)
    assert not [name for name in storage.files if name.endswith(".index")]
    log.flushed(5)
    collected(log)
    sealed = len([name for name in storage.files if name.endswith(".index")])
    assert sealed
    log.flushed(10)
    collected(log)
    assert len([name for name in storage.files if name.endswith(".index")]) > sealed


def test_a_deleted_topic_keeps_its_index_when_no_record_names_it() -> None:
    storage = MemoryStorage()
    log = shrunk(storage)
    for _ in range(5):
        for _ in range(30):
            add(log, entry((b"t", b"y" * 100)))
        log.commit(log.last_index)
        log.flushed(log.last_index)
        collected(log)
    log = opened(storage, log.last_index, 2_000)
    assert log.log.topics[b"gone"].next_index == 3
    add(log, entry((b"gone", b"again")))
    log.commit(log.last_index)
    assert log.log.topics[b"gone"].first_index == 3


def test_a_leader_asks_whether_there_is_room() -> None:
    log = opened(MemoryStorage())
    add(log, entry(*[(b"t%d" % number, b"") for number in range(10)]))
    assert log.has_room(b"t3")
    assert not log.has_room(b"u")
    add(log, entry((b"u", b"")))  # what the leader has taken, all take
    assert log.has_room(b"u")


def send(source: ReplicaLog, target: ReplicaLog, chunk_bytes: int = 1_000) -> None:
    configurations = source.configurations()
    installation = target.install(configurations[-1] if configurations else None)
    for chunk in source.snapshot(chunk_bytes).chunks():
        installation.take(chunk)
    assert installation.is_whole
    target.complete_installation()


@pytest.mark.parametrize("chunk_bytes", [1, 1_000, 1 << 20])
def test_a_snapshot_replaces_the_log(chunk_bytes: int) -> None:
    source = shrunk(MemoryStorage())
    storage = MemoryStorage()
    target = opened(storage, segment_bytes=1_000)
    add(target, entry((b"t", b"old")), entry((b"other", b"old")))
    target.commit(1)
    send(source, target, chunk_bytes)
    for each in (target, opened(storage)):
        assert each.base_index == each.last_index == each.committed_index == source.last_index
        assert each.terms() == [(source.last_index, 1)]
        for topic in (b"t", b"kept", b"gone"):
            assert seen(each, topic) == seen(source, topic)
            assert each.log.topics[topic].next_index == source.log.topics[topic].next_index
        assert each.marks == source.marks
        assert b"other" not in each.log.topics
    target = opened(storage)
    for log in (source, target):
        log.append(log.last_index + 1, 2, DATA, entry((b"gone", b"on"), (b"t", b"on")))
        log.write()
        log.commit(log.last_index)
    assert payloads(target, target.last_index, target.last_index) == [b"on", b"on"]
    assert target.log.topics[b"gone"].next_index == source.log.topics[b"gone"].next_index == 4


def test_an_empty_log_has_a_snapshot_too() -> None:
    source = opened(MemoryStorage())
    source.append(1, 1, CONFIGURATION, [b"all of us"])
    source.write()
    source.commit(1)
    storage = MemoryStorage()
    target = opened(storage)
    send(source, target)
    assert (target.last_index, target.configurations()) == (1, [(1, b"all of us")])
    assert opened(storage).configurations() == [(1, b"all of us")]


def test_a_snapshot_that_is_not_whole_leaves_the_old_log() -> None:
    source = shrunk(MemoryStorage())
    chunks = list(source.snapshot(500).chunks())
    for count in range(len(chunks)):
        storage = MemoryStorage()
        target = opened(storage, segment_bytes=1_000)
        add(target, entry((b"t", b"old")))
        target.commit(1)
        installation = target.install(None)
        for chunk in chunks[:count]:
            installation.take(chunk)
        assert seen(target, b"t") == [b"old"]
        with pytest.raises(LocalProtocolError):
            target.append(2, 1, NOOP, [b""])
        with pytest.raises(LocalProtocolError):
            target.complete_installation()
        if count % 2:
            target.give_up_installation()
        else:
            target = opened(storage, 1, 1_000)  # a crash
        assert seen(target, b"t") == [b"old"]
        for _ in range(30):
            add(target, entry((b"t", b"new" * 100)))
        target = opened(storage, 31, 1_000)
        assert (target.last_index, len(seen(target, b"t"))) == (31, 31)


def test_a_crash_right_after_the_exchange_finds_the_new_log() -> None:
    source = shrunk(MemoryStorage())
    storage = MemoryStorage()
    target = opened(storage)
    add(target, entry((b"t", b"old")))
    old = dict(storage.files)
    installation = target.install(None)
    for chunk in source.snapshot().chunks():
        installation.take(chunk)
    installation.complete()
    storage.files |= old  # nothing of the old one was removed yet
    target = opened(storage)
    assert seen(target, b"t") == seen(source, b"t")
    assert "0000000001.log" not in storage.files


def take_all(installation: Installation, chunks: list[bytes]) -> None:
    for chunk in chunks:
        installation.take(chunk)


def test_chunks_that_make_no_sense_are_refused() -> None:
    source = shrunk(MemoryStorage())
    chunks = list(source.snapshot(500).chunks())
    for at in range(len(chunks)):
        for changed in (chunks[at][:-1], b"?", b"", chunks[at] + b"x"):
            installation = opened(MemoryStorage()).install(None)
            with pytest.raises(RemoteProtocolError):
                take_all(installation, [*chunks[:at], changed, *chunks[at + 1 :]])
    installation = opened(MemoryStorage()).install(None)
    with pytest.raises(RemoteProtocolError):
        take_all(installation, [*chunks[:2], *chunks[3:]])


def test_where_the_log_begins_is_checked() -> None:
    storage = MemoryStorage()
    storage.put(BEGINNING, [b"nonsense"], True)
    with pytest.raises(StorageCorrupt):
        opened(storage)

"""The log, case by case: what a reader sees, what a crash, damage, a full disk or a newer version leaves."""

from __future__ import annotations

import pytest

from nearcast.config import Retention
from nearcast.errors import LocalProtocolError, RecordUnavailable, StorageCorrupt, StorageUnavailable
from nearcast.topiclog import blocks
from nearcast.topiclog.batches import parse
from nearcast.topiclog.blocks import GROUPED, RETAIN, SEGMENT_HEADER
from nearcast.topiclog.log import Topic, TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.storage import MemoryStorage

LARGE = 1 << 30


def open_log(storage: MemoryStorage, segment_bytes: int = 100_000, max_topics: int = 1_000) -> TopicLog:
    storage._views.clear()
    log = TopicLog(storage, segment_bytes, max_topics)
    log.recover()
    return log


def topic_of(log: TopicLog, name: bytes) -> Topic:
    topic = log.topic(name)
    assert topic is not None
    return topic


def publish(log: TopicLog, name: bytes, *payloads: bytes, time_us: int = 0, flags: int = 0) -> int:
    return log.append(topic_of(log, name), b"client", flags, b"", list(payloads), time_us)


def commit(log: TopicLog) -> None:
    log.commit(log.write())


def run_jobs(log: TopicLog, now_us: int = 0) -> list[str]:
    done: list[str] = []
    while True:
        job = log.collect(now_us)
        if job is None:
            return done
        job.run()
        log.finish(job)
        done.append(type(job).__name__)


def payloads(log: TopicLog, name: bytes) -> list[bytes]:
    topic = topic_of(log, name)
    data = log.read(topic, topic.first_index, topic.committed_index, LARGE).gather()
    found = parse(data, {topic.number: topic.text()}, start=topic.first_index)
    return [bytes(record.payload) for record in found]


# --- what readers see -----------------------------------------------------------------------------------------------------


def test_indexes_begin_with_1_and_are_consecutive_for_each_topic() -> None:
    log = open_log(MemoryStorage())
    assert [publish(log, b"a", b"x", b"y"), publish(log, b"b", b"z"), publish(log, b"a", b"w")] == [1, 1, 3]


def test_only_what_is_committed_can_be_read() -> None:
    log = open_log(MemoryStorage())
    topic = topic_of(log, b"a")
    publish(log, b"a", b"one")
    first = log.write()
    publish(log, b"a", b"two")
    second = log.write()
    with pytest.raises(RecordUnavailable, match="the topic is empty"):
        log.get(topic, 1)
    assert log.scan(None, 0, LARGE).pieces == []
    log.commit(first)
    assert payloads(log, b"a") == [b"one"]
    with pytest.raises(RecordUnavailable, match="the newest there is 1"):
        log.get(topic, 2)
    log.commit(second)
    assert payloads(log, b"a") == [b"one", b"two"]


def test_a_commit_is_announced_once_and_only_when_it_shows_something() -> None:
    log = open_log(MemoryStorage())
    seen: list[int] = []
    log.on_commit = lambda: seen.append(log.committed_position)
    log.commit(log.write())
    assert seen == []
    publish(log, b"a", b"x")
    position = log.write()
    log.commit(position)
    log.commit(position)
    assert seen == [position]


def test_a_record_has_what_was_published() -> None:
    log = open_log(MemoryStorage())
    topic = topic_of(log, "räume/1".encode())
    log.append(topic, b"client-7", 2 | RETAIN, b"\x03\x00\x01x", [b"", b"payload"], 1_234)
    commit(log)
    record = log.get(topic, 2)
    assert (record.topic, record.index, record.time_us, record.publisher) == ("räume/1", 2, 1_234, "client-7")
    assert (record.qos, record.retain, record.properties, bytes(record.payload)) == (2, True, b"\x03\x00\x01x", b"payload")
    assert bytes(log.get(topic, 1).payload) == b""


def test_time_never_goes_back() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    publish(log, b"a", b"1", time_us=100)
    publish(log, b"b", b"1", time_us=50)
    commit(log)
    assert log.get(topic_of(log, b"b"), 1).time_us == 100
    log = open_log(storage)
    publish(log, b"a", b"2", time_us=20)
    commit(log)
    assert log.get(topic_of(log, b"a"), 2).time_us == 100
    assert [log.index_at(topic_of(log, b"a"), time_us) for time_us in (0, 100, 101)] == [1, 1, 3]


def test_adjacent_blocks_are_one_piece_and_foreign_ones_are_left_out() -> None:
    log = open_log(MemoryStorage())
    for _ in range(1_000):
        publish(log, b"a", b"x" * 100)
    publish(log, b"secret", b"s")
    publish(log, b"a", b"x" * 100)
    commit(log)
    extents = log.read(topic_of(log, b"a"), 1, 1_002, LARGE)
    assert len(extents.pieces) == 2
    assert extents.next_index == 1_002
    assert len(list(parse(extents.gather(), {1: "a"}))) == 1_001  # a block of another topic would have no name


def test_a_read_gives_at_least_a_block_and_says_where_to_go_on() -> None:
    log = open_log(MemoryStorage())
    publish(log, b"a", b"x" * 50_000)
    publish(log, b"a", b"y" * 50_000)
    commit(log)
    topic = topic_of(log, b"a")
    extents = log.read(topic, 1, 99, 1)
    assert (len(extents.pieces), extents.next_index) == (1, 2)
    assert log.read(topic, 3, 99, LARGE).pieces == []
    with pytest.raises(RecordUnavailable):
        log.read(topic, 4, 99, LARGE)


def test_the_number_of_topics_is_limited() -> None:
    log = open_log(MemoryStorage(), max_topics=1)
    assert log.topic(b"a") is not None
    assert log.topic(b"b") is None
    assert log.topic(b"c", create=False) is None


# --- groups ---------------------------------------------------------------------------------------------------------------


def test_a_group_without_its_mark_is_our_mistake_and_leaves_nothing() -> None:
    log = open_log(MemoryStorage())
    publish(log, b"a", b"x", flags=GROUPED)
    with pytest.raises(LocalProtocolError):
        log.write()
    assert publish(log, b"a", b"y") == 1


def test_a_crash_at_any_byte_of_a_group_leaves_all_of_it_or_nothing() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    publish(log, b"before", b"kept")
    commit(log)
    begin = storage.size("0000000001.log")
    publish(log, b"a", b"one", flags=GROUPED)
    publish(log, b"b", b"two", flags=GROUPED)
    log.append_mark(Mark(producer="query", batch=7))
    log.write()
    whole = bytes(storage.files["0000000001.log"])
    for end in range(begin, len(whole) + 1):
        storage.files = {"0000000001.log": bytearray(whole[:end])}
        log = open_log(storage)
        assert payloads(log, b"before") == [b"kept"]
        complete = end == len(whole)
        assert (payloads(log, b"a"), payloads(log, b"b")) == (([b"one"], [b"two"]) if complete else ([], []))
        assert log.marks == ({"query": Mark(producer="query", batch=7)} if complete else {})
        # And it goes on from there, in a file that can be read again.
        assert publish(log, b"a", b"next") == 1 + complete
        commit(log)
        assert payloads(open_log(storage), b"a")[-1] == b"next"


def test_marks_outlive_the_segments_they_stand_in() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    log.append_mark(Mark(producer="query", batch=7))
    for number in range(100):
        publish(log, b"a", b"x" * 100, time_us=number)
        log.set_retention(topic_of(log, b"a"), Retention(max_records=1))
        commit(log)
        run_jobs(log)
    assert "0000000001.log" not in storage.files
    assert open_log(storage, 1_000).marks["query"].batch == 7
    log.forget_mark("query")
    for _ in range(20):
        publish(log, b"a", b"x" * 100)
        commit(log)
    assert "query" not in open_log(storage, 1_000).marks


# --- crashes, damage, full disks ------------------------------------------------------------------------------------------


def test_a_crash_at_any_byte_keeps_whole_blocks() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    ends = []
    for number in range(5):
        publish(log, b"a", b"%d" % number)
        commit(log)
        ends.append(storage.size("0000000001.log"))
    whole = bytes(storage.files["0000000001.log"])
    for end in range(len(whole)):
        storage.files = {"0000000001.log": bytearray(whole[:end])}
        log = open_log(storage)
        count = sum(each <= end for each in ends)
        assert payloads(log, b"a") == [b"%d" % number for number in range(count)]
        assert all(damage.torn for damage in log.damage)
        publish(log, b"a", b"next")
        commit(log)
        log = open_log(storage)
        assert payloads(log, b"a")[-1] == b"next"
        assert log.damage == []


@pytest.mark.parametrize("tail", [b"\0" * 4_096, b"\xff" * 64, b"\x30\0\0\0" + b"\0" * 44])
def test_what_a_power_cut_leaves_behind_the_end_is_reported_and_kept_aside(tail: bytes) -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    publish(log, b"a", b"x")
    commit(log)
    end = storage.size("0000000001.log")
    storage.files["0000000001.log"] += tail
    log = open_log(storage)
    assert [(damage.path, damage.offset) for damage in log.damage] == [("memory/0000000001.log", end)]
    assert payloads(log, b"a") == [b"x"]
    assert bytes(storage.files[f"0000000001.log.{end}.damaged"]) == tail
    assert storage.size("0000000001.log") == end


def test_damage_in_the_last_segment_ends_the_log_there() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    offsets = []
    for number in range(3):
        offsets.append(storage.size("0000000001.log"))
        publish(log, b"a", b"%d" % number)
        commit(log)
    storage.files["0000000001.log"][offsets[1] + 50] ^= 1
    log = open_log(storage)
    assert [(damage.offset, damage.torn) for damage in log.damage] == [(offsets[1], False)]
    assert payloads(log, b"a") == [b"0"]


def test_damage_in_an_older_segment_costs_the_block_it_is_in() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    for number in range(30):
        publish(log, b"a", b"%02d" % number * 50)
        commit(log)
    place = log.read(topic_of(log, b"a"), 3, 4, 1).pieces
    assert place[0][0] == "0000000001.log"
    at = bytes(storage.files["0000000001.log"]).index(b"02" * 50)
    storage.files["0000000001.log"][at] ^= 1
    log = open_log(storage, 1_000)
    assert len(log.damage) == 1
    assert log.damage[0].path == "memory/0000000001.log"
    assert [value[:2] for value in payloads(log, b"a")] == [b"%02d" % number for number in range(30) if number != 2]
    topic = topic_of(log, b"a")
    with pytest.raises(RecordUnavailable):
        log.get(topic, 3)
    assert bytes(log.get(topic, 4).payload[:2]) == b"03"


def test_damage_behind_an_index_is_found_by_whoever_reads_it() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    for number in range(30):
        publish(log, b"a", b"%02d" % number * 50)
        commit(log)
    assert run_jobs(log) == ["Seal"] * (log.segment_count - 1)
    at = bytes(storage.files["0000000001.log"]).index(b"02" * 50)
    storage.files["0000000001.log"][at] ^= 1
    log = open_log(storage, 1_000)
    assert log.damage == []
    with pytest.raises(StorageCorrupt, match=r"0000000001\.log: byte \d+: the checksum does not match"):
        log.get(topic_of(log, b"a"), 3)


def test_what_lies_behind_a_lost_end_was_never_committed_and_is_left_out() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    for number in range(30):
        publish(log, b"a", b"%02d" % number * 50)
        commit(log)
    end = log.read(topic_of(log, b"a"), 2, 3, 1).pieces[0][1]
    del storage.files["0000000001.log"][end:]
    later = bytes(storage.files["0000000002.log"])
    log = open_log(storage, 1_000)
    assert [damage.torn for damage in log.damage] == [True]
    assert bytes(storage.files["0000000002.log.0.damaged"]) == later
    assert log.segment_count == 1
    assert publish(log, b"a", b"x") == topic_of(log, b"a").committed_index
    commit(log)
    assert open_log(storage, 1_000).damage == []


@pytest.mark.parametrize("where", ["missing", "header", "tables", "columns", "short"])
def test_an_index_is_made_anew_from_its_segment(where: str) -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    for number in range(40):
        publish(log, b"ab"[number % 2 : number % 2 + 1], b"%d" % number)
        commit(log)
    run_jobs(log)
    before = (payloads(log, b"a"), payloads(log, b"b"))
    index = storage.files["0000000001.index"]
    if where == "missing":
        del storage.files["0000000001.index"]
    elif where == "short":
        del index[-5:]
    else:
        index[{"header": 3, "tables": 120, "columns": len(index) - 3}[where]] ^= 1
    log = open_log(storage, 1_000)
    assert (payloads(log, b"a"), payloads(log, b"b")) == before
    assert bool(log.damage) == (where != "missing")
    assert run_jobs(log) == ["Seal"]
    log = open_log(storage, 1_000)
    assert (log.damage, payloads(log, b"a")) == ([], before[0])


def test_sealed_segments_are_not_read_when_the_log_is_opened() -> None:
    class Counting(MemoryStorage):
        def view(self, name: str, size: int) -> memoryview:
            seen.append(name)
            return super().view(name, size)

    seen: list[str] = []
    storage = Counting()
    log = open_log(storage, segment_bytes=1_000)
    for number in range(40):
        publish(log, b"a", b"%d" % number)
        commit(log)
    run_jobs(log)
    seen.clear()
    log = open_log(storage, 1_000)
    assert set(seen) == {f"{log.segment_count:010d}.log"}


@pytest.mark.parametrize("lost", [0, 10, 500])
def test_a_log_that_was_closed_opens_without_reading_what_is_known(lost: int) -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    log.append_mark(Mark(producer="p", batch=1))
    for number in range(40):
        publish(log, b"ab"[number % 2 : number % 2 + 1], b"%d" % number)
        commit(log)
    log.close()
    log = open_log(storage)
    assert "0000000001.index" not in storage.files  # it is true only as long as nothing is added
    for number in range(40, 44):
        publish(log, b"a", b"%d" % number)
        commit(log)
    log.close()
    del storage.files["0000000001.log"][storage.size("0000000001.log") - lost :]
    log = open_log(storage)
    assert log.marks["p"].batch == 1
    everything = sorted(int(payload) for name in (b"a", b"b") for payload in payloads(log, name))
    assert everything == list(range(44 - (lost == 10) - 9 * (lost == 500)))
    assert publish(log, b"a", b"44") == topic_of(log, b"a").committed_index


def test_a_full_disk_takes_nothing_and_frees_the_indexes() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    publish(log, b"a", b"x")
    commit(log)
    before = bytes(storage.files["0000000001.log"])
    storage.capacity_bytes = len(before) + 10
    assert publish(log, b"a", b"y") == 2
    assert publish(log, b"new", b"y") == 1
    with pytest.raises(StorageUnavailable):
        log.write()
    assert bytes(storage.files["0000000001.log"]) == before
    storage.capacity_bytes = 1 << 40
    assert publish(log, b"a", b"z") == 2
    publish(log, b"new", b"z")
    commit(log)
    log = open_log(storage)
    assert (payloads(log, b"a"), payloads(log, b"new")) == ([b"x", b"z"], [b"z"])


def test_a_disk_that_is_full_when_a_segment_begins_leaves_the_one_before() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=100)
    publish(log, b"a", b"x" * 100)
    commit(log)
    storage.capacity_bytes = storage.size("0000000001.log") + 10
    publish(log, b"a", b"y")
    with pytest.raises(StorageUnavailable):
        log.write()
    storage.capacity_bytes = 1 << 40
    publish(log, b"a", b"z")
    commit(log)
    assert payloads(open_log(storage, 100), b"a") == [b"x" * 100, b"z"]


def test_a_newer_versions_file_is_not_touched() -> None:
    storage = MemoryStorage()
    log = open_log(storage)
    publish(log, b"a", b"x")
    commit(log)
    storage.files["0000000001.log"] += b"torn"
    storage.files["0000000002.log"] = bytearray(b"nearcast topics 2\n" + b"?" * 100)
    before = {name: bytes(data) for name, data in storage.files.items()}
    with pytest.raises(StorageUnavailable, match=r"0000000002\.log: was written by a newer version"):
        open_log(storage)
    assert {name: bytes(data) for name, data in storage.files.items()} == before


def test_a_whole_block_of_an_unknown_kind_is_a_newer_versions() -> None:
    storage = MemoryStorage()
    storage.files["0000000001.log"] = bytearray(SEGMENT_HEADER + blocks.encode(77, 0, 0, 0, 0, b"", b"", []))
    with pytest.raises(StorageUnavailable, match="newer version"):
        open_log(storage)


def test_a_file_that_is_no_segment_is_reported_and_kept_aside() -> None:
    storage = MemoryStorage()
    storage.files["0000000001.log"] = bytearray(b"something else entirely, and long enough")
    log = open_log(storage)
    assert [(damage.path, damage.offset) for damage in log.damage] == [("memory/0000000001.log", 0)]
    publish(log, b"a", b"x")
    commit(log)
    assert payloads(open_log(storage), b"a") == [b"x"]
    assert b"something else" in bytes(storage.files["0000000001.log.0.damaged"])


# --- cutting --------------------------------------------------------------------------------------------------------------


def test_cut_drops_what_is_not_committed_across_segments() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=500)
    publish(log, b"a", b"kept")
    log.append_mark(Mark(producer="p", batch=1))
    commit(log)
    publish(log, b"a", b"also kept")
    position = log.write()
    for number in range(20):
        publish(log, b"a", b"x" * 100)
        publish(log, b"later", b"%d" % number)
        log.append_mark(Mark(producer="p", batch=2))
        log.write()
    topic = topic_of(log, b"a")
    log.cut(position)
    assert topic_of(log, b"a") is topic
    assert (topic.committed_index, topic.next_index, log.segment_count) == (2, 3, 1)
    assert payloads(log, b"a") == [b"kept"]
    log.commit(position)
    assert payloads(log, b"a") == [b"kept", b"also kept"]
    assert publish(log, b"later", b"anew") == 1
    commit(log)
    log = open_log(storage, 500)
    assert (payloads(log, b"a"), payloads(log, b"later")) == ([b"kept", b"also kept"], [b"anew"])
    assert log.marks["p"].batch == 1
    with pytest.raises(LocalProtocolError):
        log.cut(position)


# --- retention ------------------------------------------------------------------------------------------------------------


def fill(log: TopicLog, name: bytes, count: int, *, payload_bytes: int = 100, begin_us: int = 0) -> None:
    for number in range(count):
        publish(log, name, bytes(payload_bytes), time_us=begin_us + number)
        commit(log)


def test_retention_by_count_moves_the_first_index_at_once() -> None:
    log = open_log(MemoryStorage())
    fill(log, b"a", 100)
    topic = topic_of(log, b"a")
    log.set_retention(topic, Retention(max_records=10))
    log.collect(0)
    assert (topic.first_index, topic.committed_index) == (91, 101)
    with pytest.raises(RecordUnavailable, match="removed by retention; the oldest there is 91"):
        log.get(topic, 90)
    with pytest.raises(RecordUnavailable):
        log.read(topic, 90, 101, LARGE)
    assert len(payloads(log, b"a")) == 10


def test_retention_by_bytes_counts_whole_blocks_and_keeps_the_newest() -> None:
    log = open_log(MemoryStorage())
    fill(log, b"a", 100)
    topic = topic_of(log, b"a")
    block = topic.bytes // 100
    log.set_retention(topic, Retention(max_bytes=10 * block))
    log.collect(0)
    assert (topic.first_index, topic.bytes) == (91, 10 * block)
    log.set_retention(topic, Retention(max_bytes=1))
    log.collect(0)
    assert (topic.first_index, topic.committed_index, topic.bytes) == (100, 101, block)


def test_retention_by_age_follows_the_time() -> None:
    log = open_log(MemoryStorage(), segment_bytes=2_000)
    fill(log, b"a", 100, begin_us=1_000_000)
    topic = topic_of(log, b"a")
    log.set_retention(topic, Retention(max_age_seconds=0.00001))
    log.collect(1_000_050)
    assert (topic.first_index, topic.first_time_us) == (41, 1_000_040)
    log.collect(9_000_000)
    assert (topic.first_index, topic.committed_index) == (100, 101)


def test_segments_with_nothing_live_are_removed() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    fill(log, b"a", 100)
    log.set_retention(topic_of(log, b"a"), Retention(max_records=10))
    run_jobs(log)
    assert log.segment_count <= 3
    assert len([name for name in storage.files if name.endswith(".log")]) == log.segment_count
    assert len(payloads(open_log(storage, 2_000), b"a")) >= 10


def test_a_quiet_topic_does_not_pin_the_disk() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=10_000)
    for number in range(50):
        publish(log, b"quiet", b"%d" % number, time_us=number)
        fill(log, b"busy", 20, begin_us=number)
    before = log.disk_bytes
    log.set_retention(topic_of(log, b"busy"), Retention(max_records=10))
    cursor = log.position_of(topic_of(log, b"quiet"), 20)
    assert "Rewrite" in run_jobs(log)
    assert log.disk_bytes < before / 5
    expected = [b"%d" % number for number in range(50)]
    assert payloads(log, b"quiet") == expected
    quiet = topic_of(log, b"quiet")
    data = log.scan({quiet.number}, cursor, LARGE).gather()
    assert [bytes(record.payload) for record in parse(data, {quiet.number: "quiet"}, start=20)] == expected[19:]
    assert log.index_at(quiet, 30) == 13
    # Also after a restart, and after one that finds no index.
    for name in ["", *[name for name in storage.files if name.endswith(".index")]]:
        storage.files.pop(name, None)
        log = open_log(storage, 10_000)
        assert (payloads(log, b"quiet"), log.damage) == (expected, [])
        assert [bytes(log.get(topic_of(log, b"quiet"), index).payload) for index in (1, 50)] == [b"0", b"49"]
    assert run_jobs(log).count("Rewrite") == 0


def test_a_crash_between_rewriting_and_removing_is_harmless() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=10_000)
    for number in range(50):
        publish(log, b"quiet", b"%d" % number)
        fill(log, b"busy", 20)
    log.set_retention(topic_of(log, b"busy"), Retention(max_records=10))
    while True:
        job = log.collect(0)
        assert job is not None
        job.run()
        if type(job).__name__ == "Rewrite":
            break  # and the process ends
        log.finish(job)
    assert {"0000000001.log", "0000000001.1.log"} <= set(storage.files)
    log = open_log(storage, 10_000)
    assert "0000000001.log" not in storage.files
    assert len(payloads(log, b"quiet")) == 50


def test_a_job_that_failed_is_tried_again() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    fill(log, b"a", 30)
    job = log.collect(0)
    assert job is not None
    assert log.collect(0) is None  # one at a time
    storage.capacity_bytes = 0
    with pytest.raises(StorageUnavailable):
        job.run()
    log.finish(job, failed=True)
    storage.capacity_bytes = 1 << 40
    assert run_jobs(log) == ["Seal"] * (log.segment_count - 1)


def test_a_deleted_topic_is_empty_and_its_index_goes_on() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=1_000)
    fill(log, b"a", 30)
    fill(log, b"b", 1)
    topic = topic_of(log, b"a")
    log.delete(topic)
    commit(log)
    assert (topic.first_index, topic.next_index, topic.bytes, payloads(log, b"a")) == (31, 31, 0, [])
    log = open_log(storage, 1_000)
    assert payloads(log, b"a") == []
    assert publish(log, b"a", b"again") == 31
    commit(log)
    log = open_log(storage, 1_000)
    assert payloads(log, b"a") == [b"again"]
    run_jobs(log)
    assert log.segment_count <= 3
    log.delete(topic_of(log, b"a"))
    commit(log)
    fill(log, b"b", 30)
    log.set_retention(topic_of(log, b"b"), Retention(max_records=1))
    run_jobs(log)
    assert list(log.topics) == [b"b"]  # when no file names it any more, it is forgotten


@pytest.mark.parametrize("beside", [b"", b"quiet too"])
def test_a_deletion_outlives_the_segment_that_says_so(beside: bytes) -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    publish(log, b"quiet", b"q" * 2_000)
    publish(log, b"gone", b"secret")
    commit(log)
    log.delete(topic_of(log, b"gone"))
    if beside:
        publish(log, beside, b"kept")
    log.set_retention(topic_of(log, b"busy"), Retention(max_records=1))
    for _ in range(12):
        publish(log, b"busy", b"b" * 400)
        commit(log)
    assert "Rewrite" in run_jobs(log)
    for _ in range(2):
        log = open_log(storage, segment_bytes=2_000)
        topic = topic_of(log, b"gone")
        assert (topic.first_index, topic.next_index) == (2, 2)
        assert run_jobs(log) == []
    # Once nothing older is there, neither is the word.
    for name in (b"quiet", beside):
        if name:
            log.delete(topic_of(log, name))
    for _ in range(12):
        publish(log, b"busy", b"b" * 400)
        commit(log)
    log.set_retention(topic_of(log, b"busy"), Retention(max_records=1))
    run_jobs(log)
    assert b"gone" not in log.topics
    assert b"gone" not in open_log(storage, segment_bytes=2_000).topics


def test_an_index_that_vanishes_at_run_time_is_made_anew() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    for _ in range(12):
        publish(log, b"a", b"x" * 400)
        commit(log)
    run_jobs(log)
    indexes = [name for name in storage.files if name.endswith(".index")]
    for name in indexes:
        storage.remove(name)
    log = open_log(storage, segment_bytes=2_000)
    run_jobs(log)
    for name in indexes:
        storage.remove(name)
    assert len(payloads(log, b"a")) == 12
    assert {damage.path for damage in log.damage} == {storage.path(name) for name in indexes}
    assert run_jobs(log) == ["Seal"] * len(indexes)
    assert set(indexes) <= set(storage.files)


@pytest.mark.parametrize("closed", [False, True])
def test_a_segment_that_was_shortened_between_two_blocks_is_reported(closed: bool) -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    sizes = []
    for _ in range(3 if closed else 12):
        publish(log, b"a", b"x" * 400)
        commit(log)
        sizes.append(log.committed_position & 0xFFFFFFFF)
    run_jobs(log)
    log.close()
    del storage.files["0000000001.log"][sizes[1] :]
    log = open_log(storage, segment_bytes=2_000)
    damage = log.damage[0]
    assert (damage.path, damage.offset, damage.torn) == (storage.path("0000000001.log"), sizes[1], False)
    assert "are missing" in str(damage)
    assert log.get(topic_of(log, b"a"), 2).payload == b"x" * 400
    with pytest.raises(RecordUnavailable):
        log.get(topic_of(log, b"a"), 3)


def test_closing_a_log_that_could_not_be_opened_touches_nothing() -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    log.append_mark(Mark(producer="query", batch=7))
    for _ in range(8):
        publish(log, b"a", b"x" * 400)
        commit(log)
    run_jobs(log)
    newest = max(name for name in storage.files if name.endswith(".log"))
    storage.files[newest] += blocks.encode(99, 0, 0, 0, 0, b"", b"", [])  # what only a newer version writes
    before = {name: bytes(data) for name, data in storage.files.items()}
    storage._views.clear()
    log = TopicLog(storage, 2_000, 1_000)
    with pytest.raises(StorageUnavailable, match="newer version"):
        log.recover()
    log.close()
    assert {name: bytes(data) for name, data in storage.files.items()} == before


def test_removing_whole_segments_of_a_topic_does_not_read_where_its_blocks_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    storage = MemoryStorage()
    log = open_log(storage, segment_bytes=2_000)
    for _ in range(60):
        publish(log, b"a", b"x" * 400)
        publish(log, b"b", b"y" * 400)
        commit(log)
    run_jobs(log)
    log = open_log(storage, segment_bytes=2_000)
    viewed: list[str] = []
    view = storage.view

    def watched(name: str, size: int) -> memoryview:
        viewed.append(name)
        return view(name, size)

    monkeypatch.setattr(storage, "view", watched)
    log.delete(topic_of(log, b"a"))
    commit(log)
    assert [name for name in viewed if name.endswith(".index")] == []
    topic = topic_of(log, b"b")
    log.set_retention(topic, Retention(max_records=5))
    log.collect(0)
    assert topic.first_index == 56
    assert len([name for name in viewed if name.endswith(".index")]) <= 2
    assert payloads(log, b"b") == [b"y" * 400] * 5

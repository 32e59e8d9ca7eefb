"""The broker's side of streams against a log in memory: what a reader gets is what the log has, in order, once."""

from __future__ import annotations

import random

import pytest

from nearcast.topiclog import wire
from nearcast.topiclog.batches import parse
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.storage import MemoryStorage
from nearcast.topiclog.streams import ReadStream


class Log:
    """A log, and what is in it."""

    def __init__(self, segment_bytes: int = 65_536) -> None:
        self.log = TopicLog(MemoryStorage(), segment_bytes, 1_000)
        self.log.recover()
        self.time_us = 1_000
        self.all: list[tuple[str, int, bytes]] = []

    def append(self, topic: str, *payloads: bytes, commit: bool = True) -> None:
        found = self.log.topic(topic.encode())
        assert found is not None
        self.time_us += 10
        first = self.log.append(found, b"client", 1, b"", list(payloads), self.time_us)
        self.all += [(topic, first + place, payload) for place, payload in enumerate(payloads)]
        if commit:
            self.commit()

    def commit(self) -> None:
        self.log.commit(self.log.write())


class Reader:
    """Takes whatever a stream gives, as the driver and the client do together."""

    def __init__(self, log: Log, asked: wire.Open) -> None:
        self.stream = ReadStream(1, asked, log.log)
        self.names: dict[int, str] = {}
        self.starts: dict[str, tuple[int, int | None]] = {}
        self.records: list[tuple[str, int, bytes]] = []
        self.gaps: list[tuple[str, int, int]] = []
        self.progress: dict[str, int] = {}
        self.batches = 0

    def run(self, *, max_bytes: int = 4_096, credit: int = 1 << 30, look: int = 3) -> Reader:
        """Until there is nothing more to do without credit or a commit."""
        self.stream.grant(credit)
        while True:
            opened = self.stream.opened
            for name in self.stream.look(look):
                self.names[name.number] = name.topic
                self.starts[name.topic] = (name.start, name.end)
            if not opened:
                continue
            self._gaps()
            if self.stream.finished or self.stream.credit <= 0:
                return self
            extents = self.stream.plan(max_bytes)
            self._gaps()
            if extents is None:
                if self.stream.waiting or self.stream.finished:
                    return self
                continue
            batch = self.stream.take(memoryview(b"".join(extents.views())))
            self._gaps()
            if batch is not None:
                self.batches += 1
                data = b"".join(batch.chunks)
                assert len(data) == batch.bytes
                got = [(record.topic, record.index, bytes(record.payload)) for record in parse(data, self.names)]
                self.records += got
                last = {topic: index + 1 for topic, index, _ in got}
                assert {self.names[number]: index for number, index in batch.progress.next_indexes} == last
                self.progress.update(last)

    def _gaps(self) -> None:
        self.gaps += [(self.names[gap.number], gap.first_index, gap.next_index) for gap in self.stream.take_gaps()]


def filled() -> Log:
    log = Log()
    for number in range(40):
        log.append(f"a/{number % 3}", *(b"%d.%d" % (number, place) for place in range(number % 5 + 1)))
        if number % 4 == 0:
            log.append("b", b"other")
    return log


def test_one_topic_from_index_to_index() -> None:
    log = filled()
    reader = Reader(log, wire.Open(["a/1"], "index", 4, end_index=17)).run()
    assert reader.records == [entry for entry in log.all if entry[0] == "a/1" and 4 <= entry[1] < 17]
    assert reader.stream.finished
    assert reader.starts == {"a/1": (4, 17)}


def test_several_topics_come_in_the_order_of_the_log() -> None:
    log = filled()
    reader = Reader(log, wire.Open(["a/#"])).run(max_bytes=300)
    assert reader.records == [entry for entry in log.all if entry[0] != "b"]
    assert reader.stream.finished
    assert reader.batches > 1


def test_only_what_is_committed_is_read() -> None:
    log = filled()
    before = list(log.all)
    log.append("a/1", b"not yet", commit=False)
    log.log.write()
    for filters in (["a/1"], ["#"]):
        reader = Reader(log, wire.Open(filters)).run()
        assert reader.records == [entry for entry in before if filters == ["#"] or entry[0] == "a/1"]


def test_a_stream_that_follows_waits_and_goes_on() -> None:
    log = filled()
    reader = Reader(log, wire.Open(["a/1"], "latest", follow=True)).run()
    assert reader.records == []
    assert reader.stream.waiting
    log.append("a/1", b"new")
    log.append("a/2", b"not asked for")
    assert [payload for _, _, payload in reader.run().records] == [b"new"]
    assert not reader.stream.finished


def test_topics_that_appear_later_are_read_from_their_first_record() -> None:
    log = filled()
    reader = Reader(log, wire.Open(["a/#", "new/+"], "latest", follow=True)).run()
    count = len(log.all)
    log.append("new/x", b"1", b"2")
    log.append("c", b"no")
    log.append("a/0", b"3")
    assert reader.run().records == [entry for entry in log.all[count:] if entry[0] != "c"]
    assert reader.starts["new/x"] == (1, None)


def test_a_topic_that_does_not_exist_yet_can_be_followed() -> None:
    log = Log()
    reader = Reader(log, wire.Open(["later"], "latest", follow=True)).run()
    assert not reader.stream.finished
    log.append("other", b"")
    log.append("later", b"here")
    assert reader.run().records == [("later", 1, b"here")]


def test_a_read_of_nothing_ends_at_once() -> None:
    for filters in (["none"], ["none/#"], ["one", "two"]):
        assert Reader(Log(), wire.Open(filters)).run().stream.finished
        assert Reader(filled(), wire.Open(filters)).run().stream.finished


def test_following_up_to_an_end() -> None:
    log = Log()
    log.append("t", b"1")
    reader = Reader(log, wire.Open(["t"], end_indexes={"t": 4}, follow=True)).run()
    assert not reader.stream.finished
    log.append("t", b"2", b"3", b"4", b"5")
    assert [index for _, index, _ in reader.run().records] == [1, 2, 3]
    assert reader.stream.finished


def test_times_bound_a_stream() -> None:
    log = filled()
    start_us, end_us = 1_100, 1_250
    topic = log.log.topic(b"a/1", create=False)
    assert topic is not None
    first, last = log.log.index_at(topic, start_us), log.log.index_at(topic, end_us)
    assert first < last
    expected = [entry for entry in log.all if entry[0] == "a/1" and first <= entry[1] < last]
    for filters in (["a/1"], ["a/#"]):
        reader = Reader(log, wire.Open(filters, "time", start_us, end_time_us=end_us)).run()
        assert [entry for entry in reader.records if entry[0] == "a/1"] == expected
        assert reader.stream.finished
    following = Reader(log, wire.Open(["a/1"], "time", start_us, end_time_us=end_us, follow=True)).run()
    assert following.records == expected
    assert following.stream.finished


def test_no_credit_no_data_and_one_batch_may_overdraw() -> None:
    log = filled()
    reader = Reader(log, wire.Open(["#"])).run(credit=0)
    assert reader.records == []
    reader.run(credit=1, max_bytes=200)
    assert reader.batches == 1
    assert reader.stream.credit <= 0
    while not reader.stream.finished:
        reader.run(credit=500, max_bytes=200)
    assert reader.records == log.all


def test_what_retention_took_is_told() -> None:
    log = filled()
    topic = log.log.topic(b"a/1", create=False)
    assert topic is not None
    topic.first_index = 12  # as retention leaves it
    expected = [entry for entry in log.all if entry[0] == "a/1" and entry[1] >= 12]
    for filters in (["a/1"], ["a/1", "a/2"]):
        reader = Reader(log, wire.Open(filters, start_indexes={"a/1": 5})).run()
        assert [entry for entry in reader.records if entry[0] == "a/1"] == expected
        assert reader.gaps == [("a/1", 5, 12)]


def test_a_slow_reader_that_retention_overtakes_is_told() -> None:
    log = filled()
    topic = log.log.topic(b"a/1", create=False)
    assert topic is not None
    for filters in (["a/1"], ["a/1", "a/2"]):
        topic.first_index = 1
        reader = Reader(log, wire.Open(filters)).run(credit=1, max_bytes=100)
        got = reader.progress.get("a/1", 1)
        topic.first_index = 30
        reader.run(max_bytes=100)
        assert ("a/1", got, 30) in reader.gaps
        assert reader.stream.finished


def test_records_that_are_all_gone_are_told_at_the_end() -> None:
    log = filled()
    topic = log.log.topic(b"a/1", create=False)
    assert topic is not None
    end = topic.committed_index
    reader = Reader(log, wire.Open(["a/1", "a/2"]))
    reader.stream.look(10)
    reader.names = {each.number: each.text() for each in log.log.topics.values()}
    topic.first_index = end
    reader.run()
    assert reader.gaps == [("a/1", 1, end)]
    assert [entry for entry in reader.records if entry[0] == "a/2"] == [entry for entry in log.all if entry[0] == "a/2"]


@pytest.mark.parametrize("seed", range(80))
def test_a_reader_that_comes_and_goes_gets_everything_once(seed: int) -> None:
    """Whatever way a reading is interrupted, what it asks for next makes the whole."""
    rng = random.Random(seed)
    log = Log(segment_bytes=rng.choice((65_536, 1 << 20)))
    names = [f"t/{number}" for number in range(rng.randint(1, 5))]
    for _ in range(rng.randint(1, 60)):
        log.append(rng.choice(names), *(rng.randbytes(rng.choice((0, 3, 700))) for _ in range(rng.randint(1, 6))))
    present = sorted({topic for topic, _, _ in log.all})
    starts = {topic: rng.randint(1, 4) for topic in present}
    ends = {topic: rng.randint(1, 40) for topic in present}
    filters = [rng.choice(present)] if rng.random() < 0.3 else ["t/+"]
    wanted = [
        entry
        for entry in log.all
        if (filters == ["t/+"] or entry[0] == filters[0]) and starts[entry[0]] <= entry[1] < ends[entry[0]]
    ]
    got: list[tuple[str, int, bytes]] = []
    for _ in range(1_000):
        reader = Reader(log, wire.Open(filters, start_indexes=starts, end_indexes=ends, listed_only=True))
        reader.run(credit=rng.choice((1, 300, 5_000)), max_bytes=rng.choice((64, 1_000, 10_000)))
        got += reader.records
        assert reader.gaps == []
        starts = {**starts, **reader.progress}
        if reader.stream.finished:
            break
    else:
        pytest.fail("it never ends")
    assert got == wanted

"""The keeper: what it hands to the log, what it counts as promised, and how log and journal agree after a crash."""

from __future__ import annotations

import pytest

from nearcast.config import Retention, TopicRule
from nearcast.topiclog.keeper import JOURNAL, TopicKeeper
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.rules import RuleTable
from nearcast.topiclog.storage import MemoryStorage


class Broker:
    """A keeper over files in memory that can be opened again."""

    def __init__(self, *, segment_bytes: int = 1_000_000, max_topics: int = 100) -> None:
        self.storage = MemoryStorage()
        self.rules = RuleTable([TopicRule(topic="d/#"), TopicRule(topic="t/#", mode="tap")])
        self.now = 1_700_000_000.0
        self._segment_bytes = segment_bytes
        self._max_topics = max_topics
        self.keeper = self.open(0)

    def open(self, journal_mark: int) -> TopicKeeper:
        log = TopicLog(self.storage, self._segment_bytes, self._max_topics)
        self.keeper = TopicKeeper(log, self.storage, lambda topic: self.rules.match(topic), lambda: self.now)
        self.last_mark = self.keeper.reconcile(journal_mark)
        return self.keeper

    def keep(self, topic: str, *payloads: str, qos: int = 1, mark: int = 0) -> bool:
        kept = self.keeper.keeping(topic.encode())
        assert kept is not None
        return kept.keep([payload.encode() for payload in payloads], qos, False, b"", b"ann", mark)

    def flush(self) -> None:
        self.keeper.write()
        self.keeper.begin_commit()
        self.keeper.commit()

    def read(self, topic: str) -> list[str]:
        found = self.keeper.log.topics.get(topic.encode())
        if found is None:
            return []
        records = [self.keeper.log.get(found, index) for index in range(found.first_index, found.committed_index)]
        return [bytes(record.payload).decode() for record in records]


def test_what_is_promised_and_what_is_not() -> None:
    broker = Broker()
    keeper = broker.keeper
    states = []
    for topic, qos in (("t/a", 2), ("d/a", 0), ("d/a", 1)):
        broker.keep(topic, "x", qos=qos)
        gathered = keeper.gathered
        keeper.write()
        states.append((gathered, keeper.gathered, keeper.uncommitted, keeper.unsynced))
        keeper.begin_commit()
        keeper.commit()
        assert not keeper.uncommitted
        assert not keeper.unsynced
    assert states == [(True, False, True, False), (True, False, True, False), (True, False, True, True)]
    assert (keeper.records, keeper.record_bytes) == (3, 3)


def test_a_commit_covers_what_was_written_when_its_flush_began() -> None:
    broker = Broker()
    keeper = broker.keeper
    broker.keep("d/a", "1")
    keeper.write()
    keeper.begin_commit()
    broker.keep("d/a", "2")
    keeper.write()
    keeper.commit()
    assert broker.read("d/a") == ["1"]
    assert keeper.unsynced


def test_rules_decide_and_retention_follows_them() -> None:
    broker = Broker()
    assert broker.keeper.keeping(b"plain") is None
    broker.keep("d/a", "1")
    broker.flush()
    topic = broker.keeper.log.topics[b"d/a"]
    broker.rules = RuleTable([TopicRule(topic="d/a", retention=Retention(max_records=5))])
    broker.keeper.rules_changed()
    while broker.keeper.review():
        pass
    assert topic.retention.max_records == 5
    broker.rules = RuleTable()
    broker.keeper.rules_changed()
    assert not broker.keeper.review()
    assert topic.retention.max_records == 5, "what no rule keeps any more stays as it was"


def test_no_room_for_another_topic() -> None:
    broker = Broker(max_topics=1)
    assert broker.keep("d/a", "1")
    assert not broker.keep("d/b", "2")
    assert broker.keep("d/a", "3")
    broker.flush()
    assert broker.read("d/a") == ["1", "3"]


def test_arrival_times_do_not_fall() -> None:
    broker = Broker()
    broker.keep("d/a", "1")
    broker.now -= 100
    broker.keep("d/a", "2")
    broker.flush()
    topic = broker.keeper.log.topics[b"d/a"]
    times = [broker.keeper.log.get(topic, index).time_us for index in (1, 2)]
    assert times == [1_700_000_000_000_000] * 2


# --- after a crash ---------------------------------------------------------------------------------------------------------


def test_without_a_crash_nothing_is_cut() -> None:
    broker = Broker()
    for mark in (1, 2, 3):
        broker.keep("d/a", str(mark), qos=2, mark=mark)
        broker.flush()
    broker.open(3)
    assert broker.last_mark == 3
    assert broker.read("d/a") == ["1", "2", "3"]
    assert (broker.keeper.cut_records, broker.keeper.disagreement) == (0, "")


def test_what_the_journal_does_not_know_is_cut_off_and_all_behind_it() -> None:
    broker = Broker()
    broker.keep("d/a", "1", qos=2, mark=1)
    broker.keep("d/b", "before")
    broker.flush()
    broker.keep("d/a", "2", "3", qos=2, mark=2)
    broker.keep("d/b", "behind")
    broker.keep("d/c", "4", qos=2, mark=3)
    broker.keeper.write()
    broker.open(1)
    assert broker.last_mark == 1
    assert broker.read("d/a") == ["1"]
    assert broker.read("d/b") == ["before"]
    assert broker.read("d/c") == []
    assert broker.keeper.cut_records == 4
    assert broker.keeper.last_mark == 1
    # And life goes on: indexes and marks are given again.
    broker.keep("d/a", "2", "3", qos=2, mark=2)
    broker.flush()
    assert broker.open(2).log.topics[b"d/a"].next_index == 4


@pytest.mark.parametrize("known", range(1, 13))
def test_a_cut_reaches_back_over_segments(known: int) -> None:
    broker = Broker(segment_bytes=300)
    broker.keeper.append_mark(Mark(producer="query", batch=7))
    broker.keep("d/a", "1", qos=2, mark=1)
    broker.flush()
    for mark in range(2, 13):
        broker.keep("d/a", str(mark), qos=2, mark=mark)
        broker.keep("d/b", "x" * 60)
        broker.keeper.write()
    files = len(broker.storage.files)
    assert files > 4
    broker.open(known)
    assert broker.last_mark == known
    assert broker.read("d/a") == [str(mark) for mark in range(1, known + 1)]
    assert broker.keeper.log.marks["query"].batch == 7
    assert broker.open(known).log.damage == []


def test_a_group_of_somebody_else_is_not_cut_in_half() -> None:
    broker = Broker()
    broker.keep("d/a", "1", qos=2, mark=1)
    broker.flush()
    topic = broker.keeper.log.topics[b"d/a"]
    broker.keeper.append(topic, b"query", 1 | 8, b"", [b"row"])
    broker.keeper.append_mark(Mark(producer="query", batch=1))
    broker.keep("d/a", "2", qos=2, mark=2)
    broker.keeper.write()
    broker.open(1)
    assert broker.read("d/a") == ["1", "row"]
    assert broker.keeper.log.marks["query"].batch == 1


def test_a_journal_that_was_lost_costs_the_log_nothing() -> None:
    broker = Broker()
    for mark in (1, 2, 3):
        broker.keep("d/a", str(mark), qos=2, mark=mark)
        broker.flush()
    broker.open(0)
    assert broker.read("d/a") == ["1", "2", "3"]
    assert "damaged or removed" in broker.keeper.disagreement
    assert broker.keeper.last_mark == 3, "marks go on behind both"


@pytest.mark.parametrize("journal_mark", [-1, 0])
def test_a_journal_that_was_lost_costs_nothing_that_came_after_the_only_mark(journal_mark: int) -> None:
    broker = Broker()
    broker.keep("d/a", "once", qos=2, mark=1)
    broker.flush()
    broker.keep("d/a", "acknowledged")
    broker.flush()
    broker.open(journal_mark)
    assert broker.read("d/a") == ["once", "acknowledged"]
    assert "damaged or removed" in broker.keeper.disagreement
    assert broker.keeper.last_mark == 1


def test_no_journal_and_no_mark_is_a_first_start() -> None:
    broker = Broker()
    broker.keep("d/a", "1")
    broker.flush()
    broker.open(-1)
    assert broker.read("d/a") == ["1"]
    assert (broker.keeper.disagreement, broker.keeper.last_mark) == ("", 0)


def test_a_journal_that_was_removed_costs_nothing_at_all() -> None:
    broker = Broker()
    broker.keep("d/a", "once", qos=2, mark=1)
    broker.flush()
    broker.open(-1)
    assert broker.read("d/a") == ["once"]
    assert "is gone" in broker.keeper.disagreement


def test_a_log_that_was_lost_says_so_by_its_mark() -> None:
    broker = Broker()
    assert broker.open(9) is broker.keeper
    assert broker.last_mark == 0
    assert broker.keeper.last_mark == 9
    broker.keep("d/a", "1", qos=2, mark=10)
    broker.flush()
    assert broker.keeper.log.marks[JOURNAL] == Mark(producer=JOURNAL, batch=10, part=9)

"""Kept topics of a real broker on a real disk: publishing past MQTT, waiting for commits, retention, figures, restarts."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import pytest

from nearcast.broker.process import Broker
from nearcast.broker.topic_files import TopicFiles
from nearcast.broker.topic_keeping import Run
from nearcast.config import BrokerConfig, Listener, Observability, Persistence, Retention, TopicLogSettings, TopicRule
from nearcast.errors import BatchRefused, LocalProtocolError, RequestRefused, StorageUnavailable
from nearcast.mqtt.packets import Connect, Properties, Publish, Subscribe, SubscriptionRequest
from nearcast.topiclog.marks import Mark
from tests.unit.broker.fakes import attach, feed, in_loop

RULES = (
    TopicRule(topic="d/short", retention=Retention(max_records=2)),
    TopicRule(topic="d/#"),
    TopicRule(topic="t/#", mode="tap"),
)


def broker_on(directory: Path, *, max_topics: int = 100, sync: str = "fsync", segment_bytes: int = 65_536) -> Broker:
    return Broker(
        BrokerConfig(
            listeners=(Listener(port=0),),
            persistence=Persistence(directory=str(directory), sync=sync),  # type: ignore[arg-type]
            topics=RULES,
            topic_log=TopicLogSettings(max_topics=max_topics, segment_bytes=segment_bytes),
            observability=Observability(sys_interval_seconds=0),
        )
    )


def kept(broker: Broker, topic: str) -> list[bytes]:
    log = broker.topics.log
    assert log is not None
    found = log.topics.get(topic.encode())
    if found is None:
        return []
    return [bytes(log.get(found, index).payload) for index in range(found.first_index, found.committed_index)]


@pytest.mark.parametrize("sync", ["fsync", "os"])
@in_loop
async def test_publishing_past_mqtt(tmp_path: Path, sync: str) -> None:
    broker = broker_on(tmp_path, sync=sync)
    await broker.start()
    subscriber, transport = attach(broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("#", 0)]))
    transport.take()
    first = broker.topics.publish(Run(b"d/a", [b"1", b"22"], publisher=b"bulk", properties=b"\x03\x00\x01x", retain=True))
    assert b"22" in transport.take(), "live subscribers are served at once"
    await broker.topics.committed()
    second = broker.topics.publish(Run(b"d/a", [b"3"]))
    plain = broker.topics.publish(Run(b"plain", [b"live only"]))
    await broker.topics.committed()
    assert (first, second, plain) == (1, 3, 0)
    assert b"live only" in transport.take()
    assert kept(broker, "d/a") == [b"1", b"22", b"3"]
    log = broker.topics.log
    assert log is not None
    record = log.get(log.topics[b"d/a"], 2)
    assert (record.publisher, record.qos, record.retain, record.properties) == ("bulk", 1, True, b"\x03\x00\x01x")
    assert broker.engine.retained.count == 1
    subscriber.connection_lost(None)
    await broker.stop()


@in_loop
async def test_a_group_and_its_mark_survive_a_restart(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    runs = [Run(b"d/a", [b"1", b"2"]), Run(b"plain", [b"x"]), Run(b"t/a", [b"3"])]
    broker.topics.publish_group(runs, Mark(producer="query", batch=4))
    await broker.topics.committed()
    await broker.stop()
    again = broker_on(tmp_path)
    await again.start()
    assert (kept(again, "d/a"), kept(again, "t/a")) == ([b"1", b"2"], [b"3"])
    assert again.topics.log is not None
    assert again.topics.log.marks["query"].batch == 4
    await again.stop()


@in_loop
async def test_no_room_for_topics(tmp_path: Path) -> None:
    broker = broker_on(tmp_path, max_topics=2)
    await broker.start()
    topics = broker.topics
    topics.publish(Run(b"d/a", [b"1"]))
    with pytest.raises(BatchRefused, match="max_topics"):
        topics.publish_group([Run(b"d/a", [b"2"]), Run(b"d/b", [b"3"]), Run(b"d/c", [b"4"])], Mark(producer="q", batch=1))
    topics.publish_group([Run(b"d/a", [b"5"]), Run(b"d/b", [b"6"]), Run(b"plain", [b"7"])], Mark(producer="q", batch=1))
    with pytest.raises(RequestRefused, match="2 topics"):
        topics.publish(Run(b"d/c", [b"8"]))
    assert topics.publish(Run(b"t/c", [b"9"])) == 0, "a tap lets it pass"
    await topics.committed()
    assert (kept(broker, "d/a"), kept(broker, "d/b")) == ([b"1", b"5"], [b"6"])
    assert broker.engine.stats.not_kept == 2
    await broker.stop()


@in_loop
async def test_a_disk_that_fails_is_told_to_whoever_waits(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    topics = broker.topics
    topics.publish(Run(b"d/a", [b"1"]))
    waiting = asyncio.ensure_future(topics.committed())
    await asyncio.sleep(0)
    error = StorageUnavailable("/data", "cannot be flushed: I/O error")
    broker._outbox._commits.fail(error)
    with pytest.raises(StorageUnavailable, match="I/O error"):
        await waiting
    with pytest.raises(StorageUnavailable):
        topics.publish(Run(b"d/a", [b"2"]))
    with pytest.raises(StorageUnavailable):
        await topics.committed()
    assert broker.health()["ok"] is False
    await broker.stop()


@in_loop
async def test_a_broker_without_a_directory_keeps_nothing() -> None:
    broker = Broker(BrokerConfig(listeners=(Listener(port=0),), observability=Observability(sys_interval_seconds=0)))
    await broker.start()
    assert broker.topics.log is None
    assert (broker.topics.gauges(), broker.topics.counters(), broker.topics.figures()) == ({}, {}, {})
    assert broker.topics.publish(Run(b"d/a", [b"1"])) == 0, "it only passes"
    await broker.topics.committed()
    with pytest.raises(LocalProtocolError):
        broker.topics.publish_group([Run(b"d/a", [b"1"])], Mark(producer="q", batch=1))
    await broker.stop()


@in_loop
async def test_retention_and_deletion(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    topics = broker.topics
    topics.publish(Run(b"d/short", [b"%d" % number for number in range(10)]))
    topics.publish(Run(b"d/long", [b"x"]))
    await topics.committed()
    topics.tick()
    assert kept(broker, "d/short") == [b"8", b"9"]
    await topics.rules.create(TopicRule(topic="extra/#"))
    for name in (b"extra/1", b"extra/2"):
        topics.publish(Run(name, [b"y"]))
    assert await topics.delete_records("extra/#") == 0, "a rule keeps them"
    await topics.rules.delete("extra/#")
    assert await topics.delete_records("extra/#") == 2
    assert await topics.delete_records("d/long") == 0
    await topics.committed()
    assert (kept(broker, "extra/1"), kept(broker, "extra/2"), kept(broker, "d/long")) == ([], [], [b"x"])
    await broker.stop()
    again = broker_on(tmp_path)
    await again.start()
    assert (kept(again, "extra/1"), kept(again, "d/long")) == ([], [b"x"])
    await again.stop()


def remove_journal(directory: Path) -> None:
    for journal in directory.glob("journal-*"):
        journal.unlink()


@pytest.mark.parametrize("removed", [False, True])
@in_loop
async def test_a_journal_that_was_removed_costs_the_log_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, removed: bool
) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    publisher, _ = attach(broker)
    feed(
        publisher,
        Connect("p", properties=Properties(session_expiry_interval=60)),
        Publish("d/a", b"once", qos=2, packet_id=1),
        Publish("d/a", b"at least", qos=1, packet_id=2),
    )
    await broker.topics.committed()
    publisher.connection_lost(None)
    await broker.stop()
    if removed:
        remove_journal(tmp_path)
    with caplog.at_level(logging.ERROR, "nearcast.broker"):
        again = broker_on(tmp_path)
        await again.start()
    assert kept(again, "d/a") == [b"once", b"at least"]
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert told == (["topic log and journal do not fit together"] if removed else [])
    await again.stop()


@in_loop
async def test_with_many_topics_there_is_more_to_do_than_one_step(tmp_path: Path) -> None:
    broker = broker_on(tmp_path, max_topics=2_000)
    await broker.start()
    topics = broker.topics
    behind = [topics.is_behind]
    for number in range(1_500):
        topics.publish(Run(b"d/%d" % number, [b"x"]))
    await topics.committed()
    for _ in range(2):
        topics.tick()
        behind.append(topics.is_behind)
    await topics.rules.create(TopicRule(topic="extra/#"))
    behind.append(topics.is_behind)
    await broker.stop()
    behind.append(topics.is_behind)
    assert behind == [False, True, False, True, False]


@in_loop
async def test_files_are_tidied_up_in_a_thread(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    topics = broker.topics
    for _ in range(20):
        topics.publish(Run(b"d/short", [bytes(8_000)]))
        await topics.committed()
    segments = tmp_path / "topics"
    before = len(list(segments.glob("*.log")))
    assert before > 2
    for _ in range(20):
        topics.tick()
        if topics._work is not None:
            await topics._work
    assert len(list(segments.glob("*.log"))) < before
    assert kept(broker, "d/short") == [bytes(8_000)] * 2
    await broker.stop()


@in_loop
async def test_one_step_gives_all_segments_their_index(tmp_path: Path) -> None:
    """Segments fill faster than seconds pass: what waited for the next second would wait in memory."""
    broker = broker_on(tmp_path)
    await broker.start()
    topics = broker.topics
    for _ in range(40):
        topics.publish(Run(b"d/long", [bytes(8_000)]))
        await topics.committed()
    topics.tick()
    assert topics._work is not None
    await topics._work
    segments = tmp_path / "topics"
    assert len(list(segments.glob("*.index"))) == len(list(segments.glob("*.log"))) - 1 > 2
    await broker.stop()


@pytest.mark.parametrize("error", [StorageUnavailable("x", "cannot be written: no space"), MemoryError("no memory")])
@in_loop
async def test_work_on_files_that_failed_in_any_way_was_not_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    topics = broker.topics
    for _ in range(20):
        topics.publish(Run(b"d/long", [bytes(8_000)]))
        await topics.committed()

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(TopicFiles, "put", fail)
        topics.tick()
        assert topics._work is not None
        work = topics._work
        await asyncio.wait([work])
        assert work.exception() in (None, error)
    assert kept(broker, "d/long") == [bytes(8_000)] * 20
    topics.tick()
    assert topics._work is not None
    await topics._work
    assert kept(broker, "d/long") == [bytes(8_000)] * 20
    assert list((tmp_path / "topics").glob("*.index"))
    await broker.stop()


@in_loop
async def test_figures(tmp_path: Path) -> None:
    broker = broker_on(tmp_path)
    await broker.start()
    broker.topics.publish(Run(b"d/a", [b"1", b"22"]))
    await broker.topics.committed()
    gauges = {name: value for name, (value, _) in broker.topics.gauges().items()}
    assert gauges == {
        "topic_log_topics": 1,
        "topic_log_rules": 3,
        "topic_log_segments": 1,
        "topic_log_disk_bytes": (tmp_path / "topics" / "0000000001.log").stat().st_size,
        "topic_log_uncommitted": 0,
        "topic_log_waiting": 0,
    }
    assert {name: value for name, (value, _) in broker.topics.counters().items()} == {
        "topic_log_records": 2,
        "topic_log_record_bytes": 3,
    }
    assert broker.topics.figures()["topic log/records"] == 2
    health = broker.health()["topics"]
    assert health == {"enabled": True, "rules": 3, "topics": 1, "damage": []}
    await broker.stop()

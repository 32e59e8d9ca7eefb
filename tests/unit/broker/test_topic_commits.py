"""When acknowledgements of kept topics leave, and when readers see them: a real log in memory, flushed by hand."""

from __future__ import annotations

from typing import cast

import pytest

from nearcast.broker.journal import Journal
from nearcast.broker.process import Broker
from nearcast.config import BrokerConfig, Observability, Persistence, TopicRule
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect, Publish, Subscribe, SubscriptionRequest
from nearcast.topiclog.keeper import TopicKeeper
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.rules import RuleTable
from nearcast.topiclog.storage import MemoryStorage
from tests.unit.broker.fakes import MemoryTransport, attach, feed, in_loop
from tests.unit.broker.test_output import PUBACK_PREFIX, ManualJournal, connect, settle

RULES = RuleTable([TopicRule(topic="d/#"), TopicRule(topic="t/#", mode="tap")])


class Kept:
    """A broker whose journal and log are flushed by hand; ``written`` tells the order of writes."""

    def __init__(self, *, needs_sync: bool) -> None:
        self.written: list[str] = []
        self.journal = ManualJournal(needs_sync)
        self.storage = MemoryStorage()
        self.log = TopicLog(self.storage, 1_000_000, 100)
        self.keeper = TopicKeeper(self.log, self.storage, RULES.match, lambda: 1_700_000_000.0)
        self.keeper.reconcile(0)
        config = BrokerConfig(persistence=Persistence(directory="unused"), observability=Observability(sys_interval_seconds=0))
        self.broker = Broker(config)
        self.broker.engine.keep_with(self.keeper)
        self.broker._outbox.use(cast(Journal, self.journal), self.keeper)
        self._watch()

    def _watch(self) -> None:
        append, storage_append = self.journal.append, self.storage.append

        def journal_append(records: list[bytes]) -> None:
            self.written.append("journal")
            append(records)

        def log_append(pieces: list[bytes]) -> None:
            self.written.append("log")
            storage_append(pieces)

        self.journal.append = journal_append  # type: ignore[method-assign]
        self.storage.append = log_append  # type: ignore[method-assign]

    def committed(self, topic: str) -> int:
        found = self.log.topics.get(topic.encode())
        return 0 if found is None else found.committed_index - 1

    async def client(self, client_id: str, *subscriptions: str, expiry: int = 0) -> tuple[object, MemoryTransport]:
        client, transport = attach(self.broker)
        feed(client, connect(client_id, expiry))
        for topic_filter in subscriptions:
            feed(client, Subscribe(1, [SubscriptionRequest(topic_filter, 1)]))
        await self.flushed()
        transport.take()
        return client, transport

    async def flushed(self) -> None:
        await settle()
        while self.journal.waiting:
            await self.journal.complete()


@in_loop
async def test_an_acknowledgement_of_a_durable_topic_waits_for_the_flush_and_so_do_readers() -> None:
    kept = Kept(needs_sync=True)
    client, transport = await kept.client("p")
    feed(client, Publish("d/a", b"x", qos=1, packet_id=7))  # type: ignore[arg-type]
    await settle()
    assert (transport.take(), kept.committed("d/a")) == (b"", 0)
    assert kept.journal.frames == [], "nothing of it concerns the journal"
    await kept.journal.complete()
    assert (transport.take(), kept.committed("d/a")) == (encode_puback(7), 1)
    assert kept.journal.waiting == []


@in_loop
async def test_one_flush_covers_what_came_together() -> None:
    kept = Kept(needs_sync=True)
    clients = [await kept.client(f"p{number}") for number in range(3)]
    for client, _ in clients:
        feed(client, Publish("d/a", b"x", qos=1, packet_id=7))  # type: ignore[arg-type]
    await settle()
    await kept.journal.complete()
    # The first one's publication began a flush; the others' came while it was awaited.
    await kept.flushed()
    assert all(transport.take() == encode_puback(7) for _, transport in clients)
    assert kept.committed("d/a") == 3


@in_loop
async def test_the_log_is_written_before_the_journal() -> None:
    kept = Kept(needs_sync=True)
    client, transport = await kept.client("p", expiry=1_000)
    kept.written.clear()
    feed(client, Publish("d/a", b"x", qos=2, packet_id=7))  # type: ignore[arg-type]
    assert kept.written == ["log", "journal"]
    await kept.flushed()
    assert transport.take() == b"\x50\x02\x00\x07"


@in_loop
async def test_nothing_waits_for_a_tap() -> None:
    kept = Kept(needs_sync=True)
    client, transport = await kept.client("p")
    feed(client, Publish("t/a", b"x", qos=1, packet_id=7))  # type: ignore[arg-type]
    assert transport.take().startswith(PUBACK_PREFIX)
    await settle()
    assert kept.journal.waiting, "readers wait for a flush all the same"
    feed(client, Publish("plain", b"x", qos=1, packet_id=8))  # type: ignore[arg-type]
    assert transport.take().startswith(PUBACK_PREFIX), "and that flush holds nobody up"
    await kept.flushed()
    assert kept.committed("t/a") == 1


@in_loop
async def test_qos_0_is_committed_without_anybody_waiting() -> None:
    kept = Kept(needs_sync=True)
    client, _ = await kept.client("p")
    feed(client, Publish("d/a", b"x"))  # type: ignore[arg-type]
    await kept.flushed()
    assert kept.committed("d/a") == 1


@in_loop
async def test_a_live_subscriber_at_qos_0_is_served_at_once() -> None:
    kept = Kept(needs_sync=True)
    subscriber, live = attach(kept.broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("d/#", 0)]))
    await kept.flushed()
    live.take()
    client, transport = await kept.client("p")
    feed(client, Publish("d/a", b"x", qos=1, packet_id=7))  # type: ignore[arg-type]
    assert live.take() == encode(Publish("d/a", b"x"), 5)
    assert transport.take() == b""
    await kept.flushed()


@in_loop
async def test_with_os_a_write_is_enough() -> None:
    kept = Kept(needs_sync=False)
    client, transport = await kept.client("p")
    feed(client, Publish("d/a", b"x", qos=1, packet_id=7))  # type: ignore[arg-type]
    assert transport.take() == encode_puback(7)
    assert kept.committed("d/a") == 1
    assert kept.journal.waiting == []


@pytest.mark.parametrize("needs_sync", [False, True])
@in_loop
async def test_a_full_disk_stops_the_broker_and_promises_nothing(needs_sync: bool) -> None:
    kept = Kept(needs_sync=needs_sync)
    client, transport = await kept.client("p")
    feed(client, Publish("d/a", b"1", qos=1, packet_id=6))  # type: ignore[arg-type]
    await kept.flushed()
    transport.take()
    kept.storage.capacity_bytes = 0
    feed(client, Publish("d/a", b"2", qos=1, packet_id=7))  # type: ignore[arg-type]
    await settle()
    assert transport.take() == b""
    assert isinstance(kept.broker._outbox.failed, StorageUnavailable)
    assert transport.closed
    assert kept.committed("d/a") == 1


@in_loop
async def test_output_of_a_congested_client_waits_for_a_flush_that_nobody_asked_for() -> None:
    """The records it depends on are covered by a flush for a tap; it must not leave before that one is done."""
    kept = Kept(needs_sync=True)
    client, transport = await kept.client("p", "big", expiry=1_000)
    other, _ = await kept.client("other")
    transport.blocked = True
    for _ in range(4):
        feed(other, Publish("big", bytes(100_000)))  # type: ignore[arg-type]
    await kept.flushed()
    assert client.connection.congested  # type: ignore[attr-defined]
    feed(client, Publish("plain", b"x", qos=2, packet_id=9))  # type: ignore[arg-type]
    feed(other, Publish("t/a", b"tap"))  # type: ignore[arg-type]
    await settle()
    assert kept.journal.waiting
    transport.unblock()
    await settle()
    assert b"\x50\x03\x00\x09" not in transport.take()
    await kept.flushed()
    assert b"\x50\x03\x00\x09" in transport.take()


def encode_puback(packet_id: int) -> bytes:
    return b"\x40\x02" + packet_id.to_bytes(2, "big")

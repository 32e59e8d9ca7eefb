"""The order of records, output and closing, with a journal that is flushed when the test says so."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from nearcast.broker.journal import Journal
from nearcast.broker.process import Broker
from nearcast.broker.transports import ClientTransport
from nearcast.config import BrokerConfig, Limits, Observability, Persistence
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    ConnAck,
    Connect,
    Disconnect,
    PingReq,
    PingResp,
    Properties,
    PubAck,
    Publish,
    SubAck,
    Subscribe,
    SubscriptionRequest,
)
from tests.unit.broker.fakes import MemoryTransport, attach, feed, in_loop

QUIET = Observability(sys_interval_seconds=0)


class ManualJournal:
    """Keeps frames in memory; ``sync`` returns when :meth:`complete` is called."""

    def __init__(self, needs_sync: bool) -> None:
        self.needs_sync = needs_sync
        self.flushed = 0
        self.frames: list[list[bytes]] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.failure: StorageUnavailable | None = None

    def append(self, records: list[bytes]) -> None:
        if self.failure is not None:
            raise self.failure
        self.frames.append(records)

    @property
    def unsynced(self) -> bool:
        return len(self.frames) > self.flushed

    async def sync(self) -> None:
        covered = len(self.frames)
        flush: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(flush)
        await flush
        self.flushed = covered

    async def complete(self) -> None:
        """The disk has what was appended before the oldest flush began; lets its consequences happen."""
        self.waiting.pop(0).set_result(None)
        await settle()


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


def make(journal: ManualJournal | None, limits: Limits | None = None) -> Broker:
    persistence = Persistence(directory="unused") if journal is not None else Persistence()
    broker = Broker(BrokerConfig(persistence=persistence, observability=QUIET, limits=limits or Limits()))
    broker._outbox.use(cast(Journal | None, journal))
    return broker


def is_congested(client: ClientTransport) -> bool:
    return client.connection is not None and client.connection.congested


PUBLISH = Publish("t", b"x", qos=1, packet_id=7)
PUBACK = encode(PubAck(7), 5)
PUBACK_PREFIX = b"\x40"


def connect(client_id: str, expiry: int = 1_000) -> Connect:
    return Connect(client_id, properties=Properties(session_expiry_interval=expiry))


async def subscribed(broker: Broker, journal: ManualJournal | None) -> None:
    """A durable session that wants "t", and is away."""
    client, _ = attach(broker)
    feed(client, connect("keeper"), Subscribe(1, [SubscriptionRequest("t", 1)]), Disconnect(0))
    await settle()
    while journal is not None and journal.waiting:
        await journal.complete()
    client.connection_lost(None)
    await settle()
    while journal is not None and journal.waiting:
        await journal.complete()


@in_loop
async def test_without_a_journal_an_answer_leaves_at_once() -> None:
    broker = make(None)
    client, transport = attach(broker)
    feed(client, connect("p"))
    transport.take()
    feed(client, PUBLISH)
    assert transport.take().startswith(PUBACK_PREFIX)


@in_loop
async def test_with_os_the_record_is_written_before_the_acknowledgement() -> None:
    journal = ManualJournal(needs_sync=False)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0))
    transport.take()
    written = len(journal.frames)
    feed(client, PUBLISH)
    assert len(journal.frames) == written + 1
    assert transport.take() == PUBACK
    assert journal.waiting == []


@in_loop
async def test_with_fsync_the_acknowledgement_waits_for_the_flush() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0))
    await settle()
    transport.take()
    feed(client, PUBLISH)
    await settle()
    assert transport.take() == b""
    await journal.complete()
    assert transport.take() == PUBACK


@in_loop
async def test_flushes_are_shared_and_do_not_cover_what_came_later() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    clients = [attach(broker) for _ in range(3)]
    for number, (client, transport) in enumerate(clients):
        feed(client, connect(f"p{number}", 0))
        transport.take()
    await settle()
    feed(clients[0][0], PUBLISH)
    await settle()
    assert len(journal.waiting) == 1
    feed(clients[1][0], PUBLISH)
    feed(clients[2][0], PUBLISH)
    await settle()
    assert len(journal.waiting) == 1, "the next flush begins when this one is done"
    await journal.complete()
    assert [transport.take() for _, transport in clients] == [PUBACK, b"", b""]
    await journal.complete()
    assert [transport.take() for _, transport in clients] == [b"", PUBACK, PUBACK]
    assert journal.waiting == []


@in_loop
async def test_qos_0_passes_while_the_disk_works() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0), Subscribe(1, [SubscriptionRequest("live", 0)]))
    await settle()
    while journal.waiting:
        await journal.complete()
    transport.take()
    feed(client, PUBLISH)
    await settle()
    feed(client, Publish("live", b"now"))
    assert transport.take() == encode(Publish("live", b"now"), 5)
    await journal.complete()
    assert transport.take() == PUBACK


@in_loop
async def test_a_disconnect_does_not_overtake_answers_that_wait_for_the_disk() -> None:
    """Nothing may follow a DISCONNECT [MQTT-3.14.4-1]."""
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0))
    await settle()
    transport.take()
    feed(client, PUBLISH)
    await settle()
    client.data_received(b"\x00\x00")  # a packet of no kind
    await settle()
    assert transport.take() == b""
    assert not transport.closed
    while journal.waiting:
        await journal.complete()
    packets = PacketReader(5, 1_000).feed(transport.take())
    assert [type(packet) for packet in packets] == [PubAck, Disconnect]
    assert transport.closed


@in_loop
async def test_a_failed_write_sends_nothing_and_stops_the_broker() -> None:
    journal = ManualJournal(needs_sync=False)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0))
    transport.take()
    journal.failure = StorageUnavailable("/data/journal", "cannot be written: No space left on device")
    feed(client, PUBLISH)
    assert transport.take() == b""
    assert broker.health()["ok"] is False
    assert broker._stop_asked.is_set()
    assert transport.closed
    journal.failure = None
    received = broker.engine.stats.bytes_received
    feed(client, PUBLISH)
    assert transport.take() == b"", "and it stays so"
    late, late_transport = attach(broker)
    feed(late, connect("late"))
    assert late_transport.closed
    client.connection_lost(None)
    assert broker.engine.stats.bytes_received == received, "the engine hears of nothing any more"
    assert broker.engine.take_records() == []


@in_loop
async def test_a_failed_flush_sends_nothing() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    client, transport = attach(broker)
    feed(client, connect("p", 0))
    await settle()
    transport.take()
    feed(client, PUBLISH)
    await settle()
    journal.waiting.pop(0).set_exception(StorageUnavailable("/data/journal", "cannot be flushed: I/O error"))
    await settle()
    assert transport.take() == b""
    assert broker._stop_asked.is_set()


@in_loop
async def test_a_congested_client_is_not_written_to_and_gets_the_rest_later() -> None:
    broker = make(None)
    subscriber, slow = attach(broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("big", 0)]))
    slow.take()
    publisher, _ = attach(broker)
    feed(publisher, Connect("p"))
    slow.blocked = True
    for _ in range(4):
        feed(publisher, Publish("big", bytes(100_000)))
    assert is_congested(subscriber)
    kept = slow.get_write_buffer_size()
    feed(publisher, Publish("big", bytes(100_000)))
    assert slow.get_write_buffer_size() == kept
    slow.unblock()
    assert not is_congested(subscriber)
    assert len(slow.take()) > 5 * 100_000


@in_loop
async def test_a_client_that_never_reads_cannot_grow_the_broker() -> None:
    broker = make(None, Limits(max_output_bytes=300_000))
    subscriber, slow = attach(broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("big", 0)]))
    publisher, _ = attach(broker)
    feed(publisher, Connect("p"))
    slow.blocked = True
    for _ in range(50):
        feed(publisher, Publish("big", bytes(100_000)))
    connection = subscriber.connection
    assert connection is not None
    assert slow.get_write_buffer_size() + connection.out_bytes < 1_200_000
    assert broker.engine.stats.dropped_slow_consumer > 30


@in_loop
async def test_a_client_that_asks_and_never_reads_is_not_read_either() -> None:
    broker = make(None, Limits(max_output_bytes=1_000))
    client, transport = attach(broker)
    feed(client, Connect("c"), Subscribe(1, [SubscriptionRequest("big", 0)]))
    transport.take()
    transport.blocked = True
    feed(client, Publish("big", bytes(300_000)))
    states = [transport.reading]
    for _ in range(10):
        client.data_received(b"\xc0\x00" * 100)
    states.append(transport.reading)
    transport.unblock()
    states.append(transport.reading)
    assert states == [True, False, True]


@in_loop
async def test_a_closing_connection_is_closed_after_its_last_bytes() -> None:
    broker = make(None)
    client, transport = attach(broker)
    feed(client, Connect("c"))
    transport.take()
    assert client.connection is not None
    broker.engine.disconnect(client.connection, 0x8B, 0.0)
    broker.flush()
    assert transport.take().startswith(b"\xe0")
    assert transport.closed


@pytest.mark.parametrize("reads", [True, False])
@in_loop
async def test_stalled_clients_are_cut_off(reads: bool) -> None:
    broker = make(None, Limits(stall_timeout_seconds=60))
    subscriber, slow = attach(broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("big", 0)]))
    publisher, _ = attach(broker)
    feed(publisher, Connect("p"))
    slow.blocked = True
    for _ in range(4):
        feed(publisher, Publish("big", bytes(100_000)))
    since = subscriber.stall_since
    broker.stalls.check(since + 59, 60.0)
    assert not slow.closed
    if reads:
        del slow.waiting[:10]
    broker.stalls.check(since + 61, 60.0)
    assert slow.closed is not reads


async def backlog(broker: Broker, journal: ManualJournal, count: int, size: int) -> tuple[ClientTransport, MemoryTransport]:
    """The keeper comes back to ``count`` messages; nothing is flushed since."""
    await subscribed(broker, journal)
    publisher, _ = attach(broker)
    feed(publisher, connect("p", 0))
    for number in range(count):
        feed(publisher, Publish("t", bytes(size), qos=1, packet_id=number + 1))
    await settle()
    while journal.waiting:
        await journal.complete()
    client, transport = attach(broker)
    feed(client, Connect("keeper", clean_start=False, properties=Properties(session_expiry_interval=1_000)))
    await settle()
    return client, transport


def waiting_bytes(broker: Broker, client: ClientTransport) -> int:
    """What is kept for a client on top of its session."""
    held = sum(len(chunk) for handle, chunks, _ in broker._outbox._commits._held if handle is client for chunk in chunks)
    assert client.connection is not None
    return max(held, client.held_bytes) + client.connection.out_bytes


def messages_in(sent: bytes) -> int:
    return sum(isinstance(packet, Publish) for packet in PacketReader(5, 1_000_000).feed(sent))


@in_loop
async def test_what_waits_for_the_disk_is_bounded_and_all_of_it_goes_out() -> None:
    journal = ManualJournal(needs_sync=True)
    limit = 10_000
    broker = make(journal, Limits(max_output_bytes=limit))
    client, transport = await backlog(broker, journal, 100, 1_000)
    rounds = 0
    while journal.waiting:
        rounds += 1
        assert 0 < waiting_bytes(broker, client) < 3 * limit
        await journal.complete()
    assert messages_in(transport.take()) == 100
    assert rounds > 100_000 // (3 * limit)
    assert client.held_bytes == 0


@in_loop
async def test_what_is_published_during_a_flush_is_bounded_too() -> None:
    journal = ManualJournal(needs_sync=True)
    limit = 10_000
    broker = make(journal, Limits(max_output_bytes=limit))
    client, transport = await backlog(broker, journal, 1, 10)
    publisher, _ = attach(broker)
    feed(publisher, connect("q", 0))
    for number in range(100):
        feed(publisher, Publish("t", bytes(1_000), qos=1, packet_id=number + 1))
        assert waiting_bytes(broker, client) < 3 * limit
    while journal.waiting:
        await journal.complete()
    assert messages_in(transport.take()) == 101


@in_loop
async def test_a_backlog_goes_on_after_its_client_was_congested_meanwhile() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal, Limits(max_output_bytes=300_000))
    client, transport = await backlog(broker, journal, 100, 20_000)
    transport.blocked = True
    while journal.waiting:
        await journal.complete()
    assert is_congested(client)
    assert len(transport.waiting) < 3 * 320_000
    for _ in range(20):
        transport.unblock()
        transport.blocked = True
        await settle()
        while journal.waiting:
            await journal.complete()
    transport.unblock()
    assert messages_in(transport.take()) == 100
    assert not is_congested(client)


@in_loop
async def test_a_backlog_whose_client_leaves_during_a_flush_is_kept() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal, Limits(max_output_bytes=10_000))
    client, transport = await backlog(broker, journal, 100, 1_000)
    transport.close()
    client.connection_lost(None)
    while journal.waiting:
        await journal.complete()
    again, transport = attach(broker)
    feed(again, Connect("keeper", clean_start=False, properties=Properties(session_expiry_interval=1_000)))
    await settle()
    while journal.waiting:
        await journal.complete()
    assert messages_in(transport.take()) == 100


@in_loop
async def test_an_answer_that_waited_for_its_client_still_waits_for_the_disk() -> None:
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    await subscribed(broker, journal)
    slow, transport = attach(broker)
    other, other_transport = attach(broker)
    feed(slow, connect("slow", 0), Subscribe(1, [SubscriptionRequest("big", 0)]))
    feed(other, connect("other", 0))
    await settle()
    while journal.waiting:
        await journal.complete()
    transport.blocked = True
    feed(other, Publish("big", bytes(300_000)))
    assert slow.connection is not None
    assert slow.connection.congested
    feed(slow, PUBLISH)
    feed(other, PUBLISH)
    await settle()
    assert len(journal.waiting) == 1
    other_transport.take()
    transport.unblock()
    assert len(transport.take()) < 300_100, "its acknowledgement is not among what went out"
    await journal.complete()
    while journal.waiting:
        await journal.complete()
    assert other_transport.take() == PUBACK
    assert transport.take() == PUBACK


@in_loop
async def test_a_clean_start_over_a_durable_session_is_answered_once_its_end_is_on_disk() -> None:
    """Found by simulation: told "no session", the client reused identifiers. A power cut brought the old session back, which
    took the QoS 2 messages under those identifiers for repetitions: acknowledged, never delivered."""
    journal = ManualJournal(needs_sync=True)
    broker = make(journal)
    first, _ = attach(broker)
    feed(first, connect("c"), Publish("t", b"x", qos=2, packet_id=1))
    await settle()
    await journal.complete()
    again, transport = attach(broker)
    clean = Connect("c", clean_start=True, properties=Properties(session_expiry_interval=1_000))
    feed(again, clean, PingReq(), Subscribe(2, [SubscriptionRequest("t", 0)]), Publish("t", b"own", qos=0))
    await settle()
    assert transport.take() == b""
    await journal.complete()
    packets = PacketReader(5).feed(transport.take())
    assert [type(packet) for packet in packets] == [ConnAck, PingResp, SubAck, Publish]
    assert isinstance(packets[0], ConnAck)
    assert not packets[0].session_present
    # From then on only promises wait for the disk.
    feed(again, PingReq(), Publish("t", b"own", qos=0))
    assert [type(packet) for packet in PacketReader(5).feed(transport.take())] == [PingResp, Publish]


@in_loop
async def test_without_a_flush_nothing_waits_for_a_clean_start() -> None:
    journal = ManualJournal(needs_sync=False)
    broker = make(journal)
    first, _ = attach(broker)
    feed(first, connect("c"))
    again, transport = attach(broker)
    feed(again, Connect("c", clean_start=True), PingReq())
    assert [type(packet) for packet in PacketReader(5).feed(transport.take())] == [ConnAck, PingResp]

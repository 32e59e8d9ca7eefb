"""Clients that do not play along: the broker's memory stays within its limits, and the others notice nothing.

Memory is the process's resident size. The slack is generous, since an allocator keeps what it once had, but small beside what
would be kept without limits.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.mqtt import reasons
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect, Disconnect, Properties, PubAck, Publish
from tests.integration.broker.running import Authority, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker
from tests.integration.tools import require
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration

MEBIBYTE = 1 << 20
SLACK_BYTES = 48 * MEBIBYTE
QUEUE_BYTES = 8 * MEBIBYTE
CONNECT_TIMEOUT_SECONDS = 1.0

CONFIG = f"""
[limits]
max_output_bytes = {MEBIBYTE}
max_queued_bytes = {QUEUE_BYTES}
max_queued_messages = 20000
connect_timeout_seconds = {CONNECT_TIMEOUT_SECONDS}
max_packet_bytes = {8 * MEBIBYTE}
[[listeners]]
kind = "tcp"
port = 0
[[listeners]]
kind = "ws"
port = 0
[observability]
sys_interval_seconds = 0.2
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, CONFIG) as running:
        yield running


@pytest.fixture(scope="module")
def durable_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    config = CONFIG + "[persistence]\nsnapshot_bytes = 1048576\n"
    with nearcast_broker(tmp_path_factory, config, data=True, arguments=["--sync", "os"]) as running:
        yield running


def dropped(broker: NearcastBroker, reason: str) -> float:
    return broker.metric("messages_dropped_total", reason=reason)


def exchange_is_possible(broker: NearcastBroker) -> None:
    """Somebody else is served as if nothing was."""
    with Wire(broker.port()) as other:
        other.connect()
        other.subscribe("other", 1)
        other.send(Publish("other", b"fine", 1, packet_id=7))
        packets = [other.receive(), other.receive()]
        assert any(isinstance(packet, Publish) and packet.payload == b"fine" for packet in packets)
        assert any(isinstance(packet, PubAck) and packet.packet_id == 7 for packet in packets)


@pytest.mark.parametrize(("version", "kind"), [(4, "tcp"), (5, "tcp"), (5, "ws")])
def test_qos_0_for_a_client_that_stops_reading(broker: NearcastBroker, version: int, kind: str) -> None:
    with Wire(broker.port(kind), version, receive_buffer_bytes=4_096, websocket=kind == "ws") as stalled:
        flood_past(broker, stalled)


def test_qos_0_for_a_client_that_stops_reading_tls(tmp_path: Path) -> None:
    require("openssl")
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    secure = '[[listeners]]\nkind = "tls"\nport = 0\ncertificate_file = "server.pem"\nkey_file = "server.key"\n'
    context = authority.client_context()
    with (
        NearcastBroker(tmp_path, CONFIG + secure) as broker,
        Wire(broker.port("tls"), receive_buffer_bytes=4_096, tls=context) as stalled,
    ):
        flood_past(broker, stalled)


def flood_past(broker: NearcastBroker, stalled: Wire) -> None:
    """Hundreds of megabytes pass a client that takes none of them; its neighbour gets every one."""
    total, payload_bytes, at_once = 4_096, 65_536, 8
    before = dropped(broker, "slow_consumer")
    version = stalled.version
    with Wire(broker.port(), version) as reader, Wire(broker.port(), version) as publisher:
        for client in (stalled, reader):
            client.connect()
            client.subscribe("flood/#")
        publisher.connect()
        memory = broker.resident_bytes()
        peak = 0
        packets = encode(Publish("flood/0", bytes(payload_bytes)), version) * at_once
        received = 0
        for _ in range(total // at_once):
            publisher.socket.sendall(packets)
            expected = received + len(packets)
            while received < expected:  # the neighbour keeps up, so that nothing may be dropped for it
                received += len(reader.socket.recv(MEBIBYTE))
            peak = max(peak, broker.resident_bytes())
        assert received == total // at_once * len(packets)
    lost = dropped(broker, "slow_consumer") - before
    assert peak - memory < SLACK_BYTES, f"{total * payload_bytes / MEBIBYTE:.0f} MiB grew the broker by {peak - memory}"
    # All but what fits the broker's own bound and the kernel's buffers.
    assert total - 32 * MEBIBYTE // payload_bytes < lost < total
    with Wire(broker.port()) as observer:
        observer.connect()
        seen = observer.subscribe("$SYS/broker/publish/messages/dropped")
        while not seen or float(seen[-1].payload) < before + lost:
            seen.append(observer.expect(Publish))


@pytest.mark.parametrize("fixture", ["broker", "durable_broker"])
def test_qos_1_for_a_client_that_stops_reading(request: pytest.FixtureRequest, fixture: str) -> None:
    """QoS 1 waits in the session's queue, up to its bound; what is beyond is dropped and counted. In order, without gaps."""
    broker: NearcastBroker = request.getfixturevalue(fixture)
    total, payload_bytes = 4_000, 16_384
    before = dropped(broker, "queue_full")
    with Wire(broker.port(), receive_buffer_bytes=4_096) as stalled, Wire(broker.port()) as reader:
        with Wire(broker.port()) as publisher:
            for name, client in (("stalled", stalled), ("reader", reader)):
                client.connect(name, expiry_seconds=1_000, properties=Properties(receive_maximum=100))
                client.subscribe("flood/#", 1)
            publisher.connect()
            memory = broker.resident_bytes()
            for number in range(total):
                publisher.send(Publish("flood/1", b"%06d" % number + bytes(payload_bytes), 1, packet_id=number + 1))
                publisher.expect(PubAck)
                message = reader.expect(Publish)
                assert int(message.payload[:6]) == number
                reader.send(PubAck(message.packet_id))
        growth = broker.resident_bytes() - memory
        lost = int(dropped(broker, "queue_full") - before)
        assert growth < QUEUE_BYTES + SLACK_BYTES, f"{total * payload_bytes / MEBIBYTE:.0f} MiB grew the broker by {growth}"
        assert total // 2 < lost < total
        if broker.data.exists():  # the journal is written anew now and then, and old files go
            on_disk = sum(path.stat().st_size for path in broker.data.iterdir())
            assert on_disk < 4 * QUEUE_BYTES, f"the journal holds {on_disk} bytes"
        for number in range(total - lost):  # the stalled one reads on and gets the beginning, unbroken
            message = stalled.expect(Publish)
            assert int(message.payload[:6]) == number
            stalled.send(PubAck(message.packet_id))
        wait_for("an empty queue", lambda: broker.metric("queued_bytes") == 0 and broker.metric("inflight_messages") == 0)
        for client in (stalled, reader):  # and leave no session behind
            client.send(Disconnect(0, Properties(session_expiry_interval=0)))
            assert client.receive() is None


def test_a_large_message_for_a_slow_client_is_no_reason_to_cut_it_off(broker: NearcastBroker) -> None:
    """A message within the limits takes its time, and the client may talk meanwhile."""
    large = bytes(7 * MEBIBYTE)
    for kind in ("tcp", "ws"):
        with Wire(broker.port(kind), receive_buffer_bytes=4_096, websocket=kind == "ws") as slow:
            slow.connect()
            slow.subscribe("large", 1)
            with Wire(broker.port()) as publisher:
                publisher.connect()
                publisher.send(Publish("large", large, 1, packet_id=1))
                publisher.expect(PubAck)
            for number in range(2, 20):
                slow.send(Publish("nobody", b"", 1, packet_id=number))
            packets = [slow.receive() for _ in range(19)]
            (message,) = [packet for packet in packets if isinstance(packet, Publish)]
            assert message.payload == large
            assert sum(isinstance(packet, PubAck) for packet in packets) == 18


def test_a_queue_that_stays_full_costs_no_more_than_its_bytes(broker: NearcastBroker) -> None:
    """A client that takes one message at a time, under a flood of batches of which one message fits the queue."""
    batch, rounds = 1_000, 1_000
    with Wire(broker.port()) as slow, Wire(broker.port()) as publisher:
        slow.connect(properties=Properties(receive_maximum=1))
        slow.subscribe("flood/2", 1)
        publisher.connect()
        packets = b"".join(encode(Publish("flood/2", bytes(100), 1, packet_id=number + 1), 5) for number in range(batch))
        acknowledgements = b"".join(encode(PubAck(number + 1), 5) for number in range(batch))

        def publish_batch() -> None:
            publisher.socket.sendall(packets)
            answer = b""
            while len(answer) < len(acknowledgements):
                answer += publisher.socket.recv(MEBIBYTE)
            assert answer == acknowledgements

        before = dropped(broker, "queue_full")
        while dropped(broker, "queue_full") == before:
            publish_batch()
        memory = broker.resident_bytes()
        for _ in range(rounds):
            slow.send(PubAck(slow.expect(Publish).packet_id))
            publish_batch()
        growth = broker.resident_bytes() - memory
        assert growth < SLACK_BYTES // 2, f"{rounds} rounds of {batch} messages grew a full queue by {growth} bytes"


def test_a_publisher_that_reads_no_acknowledgements_is_paused(broker: NearcastBroker) -> None:
    with Wire(broker.port(), 4, receive_buffer_bytes=4_096) as flooder:
        flooder.connect("flooder")
        memory = broker.resident_bytes()
        packets = b"".join(encode(Publish("nobody", b"", 1, packet_id=number), 4) for number in range(1, 10_001))
        flooder.socket.setblocking(False)
        sent = 0
        limit = 256 * MEBIBYTE
        # The broker stops reading, so the socket takes nothing more.
        while sent < limit and select.select([], [flooder.socket], [], 1.0)[1]:
            start = sent % len(packets)
            sent += flooder.socket.send(packets[start : start + MEBIBYTE])
        assert sent < limit, "the broker reads on although its answers are not taken"
        assert broker.resident_bytes() - memory < SLACK_BYTES
        exchange_is_possible(broker)

        # Whoever takes the answers is served again, and every message is answered in order.
        complete, rest = divmod(sent, len(packets))
        flooder.socket.settimeout(20)
        answers = b"".join(encode(PubAck(number), 4) for number in range(1, 10_001))
        due = complete * len(answers) + rest // (len(packets) // 10_000) * 4
        received = 0
        while received < due:
            chunk = flooder.socket.recv(MEBIBYTE)
            start = received % len(answers)
            assert (answers[start:] + answers * (len(chunk) // len(answers) + 1))[: len(chunk)] == chunk
            received += len(chunk)
        assert received == due


def test_thousands_of_connections_without_connect_are_closed(broker: NearcastBroker) -> None:
    """Silent ones, and ones that dribble half a CONNECT."""
    half = encode(Connect("slow-loris", 5), 5)[:-3]
    idle: list[socket.socket] = []
    try:
        memory = broker.resident_bytes()
        before = broker.metric("connections_opened_total")
        for number in range(2_000):
            sock = socket.create_connection(("127.0.0.1", broker.port()), 20)
            idle.append(sock)
            if number % 2:
                sock.sendall(half)
        wait_for("acceptance", lambda: broker.metric("connections_opened_total") >= before + len(idle))
        exchange_is_possible(broker)
        for sock in idle:
            sock.settimeout(20)
            assert sock.recv(1) == b"", "closed without an answer"
        wait_for("the end of every connection", lambda: broker.metric("connections") == 0)
        assert broker.resident_bytes() - memory < SLACK_BYTES
    finally:
        for sock in idle:
            sock.close()


@pytest.mark.parametrize("version", [4, 5])
def test_oversized_packets_are_refused_by_their_header(broker: NearcastBroker, version: int) -> None:
    memory = broker.resident_bytes()
    for _ in range(20):
        with Wire(broker.port(), version) as client:
            client.connect()
            client.socket.sendall(b"\x30\xff\xff\xff\x7f")  # a PUBLISH of 256 MiB, of which nothing has come yet
            if version == 5:
                assert client.expect(Disconnect).reason_code == reasons.PACKET_TOO_LARGE
            assert client.receive() is None
    with Wire(broker.port(), version) as client:  # the same before CONNECT
        client.socket.sendall(b"\x10\xff\xff\xff\x7f")
        while client.receive() is not None:
            pass
    assert broker.resident_bytes() - memory < SLACK_BYTES
    exchange_is_possible(broker)


def test_a_client_that_takes_nothing_for_too_long_is_cut_off(tmp_path: Path) -> None:
    with (
        NearcastBroker(tmp_path, "[limits]\nstall_timeout_seconds = 1\nmax_output_bytes = 65536\n") as broker,
        Wire(broker.port(), receive_buffer_bytes=4_096) as stalled,
        Wire(broker.port()) as publisher,
    ):
        stalled.connect("stalled")
        stalled.subscribe("flood")
        publisher.connect()
        deadline = time.monotonic() + 20
        while broker.metric("connected_clients") == 2:
            publisher.send(Publish("flood", bytes(65_536)))
            assert time.monotonic() < deadline, "the stalled client is still connected"
        broker.wait_for_log('reason="took no data for too long"')
        exchange_is_possible(broker)

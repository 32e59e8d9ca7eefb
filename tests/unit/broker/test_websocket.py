"""WebSocket: the handshake's refusals, framing independent of packets, and browsers of foreign pages."""

from __future__ import annotations

import base64
from types import SimpleNamespace

import pytest
from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from nearcast.broker.process import Broker
from nearcast.broker.websocket import WebSocketTransport
from nearcast.config import BrokerConfig, Limits, Listener, Observability
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect, Disconnect
from nearcast.serving.websocket import origin_allowed
from tests.unit.broker.fakes import MemoryTransport, in_loop


def attach(listener: Listener | None = None, limits: Limits | None = None) -> tuple[WebSocketTransport, MemoryTransport]:
    config = BrokerConfig(limits=limits or Limits(), observability=Observability(sys_interval_seconds=0))
    bound = SimpleNamespace(
        config=listener or Listener(kind="ws"),
        name="ws",
        peer_of=lambda _: Peer("127.0.0.1", "ws"),
        admits=lambda _: True,
    )
    client = WebSocketTransport(Broker(config), bound)  # type: ignore[arg-type]
    transport = MemoryTransport(client)
    client.connection_made(transport)
    return client, transport


def request(path: str = "/mqtt", **headers: str) -> bytes:
    fields = {
        "Host": "127.0.0.1:8083",
        "Upgrade": "websocket",
        "Connection": "Upgrade",
        "Sec-WebSocket-Key": base64.b64encode(bytes(16)).decode(),
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Protocol": "mqtt",
    }
    fields.update({name.replace("_", "-"): value for name, value in headers.items()})
    lines = [f"{name}: {value}" for name, value in fields.items() if value]
    return "\r\n".join([f"GET {path} HTTP/1.1", *lines, "", ""]).encode()


def status(transport: MemoryTransport) -> int:
    return int(transport.sent.split(b" ", 2)[1])


class Peerside:
    """A client's end, by the same library."""

    def __init__(self, listener: Listener | None = None, limits: Limits | None = None) -> None:
        self.client, self.transport = attach(listener, limits)
        self.protocol = ClientProtocol(parse_uri("ws://127.0.0.1/mqtt"), subprotocols=[Subprotocol("mqtt")])
        self.protocol.send_request(self.protocol.connect())
        self.client.data_received(b"".join(self.protocol.data_to_send()))
        self.protocol.receive_data(self.transport.take())
        assert isinstance(self.protocol.events_received()[0], Response)

    def exchange(self) -> list[Frame]:
        """Send what is to be sent, take what came; the frames among it."""
        data = b"".join(self.protocol.data_to_send())
        if data:
            self.client.data_received(data)
        answer = self.transport.take()
        if answer:
            self.protocol.receive_data(answer)
        if self.transport.closed:
            self.protocol.receive_eof()
        return [item for item in self.protocol.events_received() if isinstance(item, Frame)]


CONNECT = encode(Connect("c"), 5)


@in_loop
async def test_a_packet_in_a_frame() -> None:
    side = Peerside()
    assert side.protocol.subprotocol == "mqtt"
    side.protocol.send_binary(CONNECT)
    (answer,) = side.exchange()
    assert answer.opcode is Opcode.BINARY
    assert answer.data[0] == 0x20


@in_loop
async def test_a_packet_over_many_frames_and_many_packets_in_one() -> None:
    side = Peerside()
    for byte in CONNECT[:-1]:
        side.protocol.send_binary(bytes([byte]))
        assert side.exchange() == []
    side.protocol.send_binary(CONNECT[-1:] + b"\xc0\x00" * 3)
    received = b"".join(bytes(frame.data) for frame in side.exchange())
    assert received[0] == 0x20
    assert received.endswith(b"\xd0\x00" * 3)


@in_loop
async def test_a_fragmented_message_needs_no_end() -> None:
    side = Peerside()
    side.protocol.send_binary(CONNECT[:5], fin=False)
    side.protocol.send_continuation(CONNECT[5:], fin=False)
    assert side.exchange()[0].data[0] == 0x20


@in_loop
async def test_text_is_refused() -> None:
    side = Peerside()
    side.protocol.send_text(b"hello")
    side.exchange()
    assert side.protocol.close_code == 1003
    assert side.transport.closed


@in_loop
async def test_pings_are_answered() -> None:
    side = Peerside()
    side.protocol.send_ping(b"are you there")
    (answer,) = side.exchange()
    assert (answer.opcode, bytes(answer.data)) == (Opcode.PONG, b"are you there")


@in_loop
async def test_frames_are_bounded_by_the_packet_limit() -> None:
    side = Peerside(limits=Limits(max_packet_bytes=100_000))
    side.protocol.send_binary(bytes(200_000))
    side.exchange()
    assert side.protocol.close_code == 1009
    assert side.transport.closed


@in_loop
async def test_a_goodbye_ends_with_a_close_frame() -> None:
    side = Peerside()
    side.protocol.send_binary(CONNECT + encode(Disconnect(0), 5))
    side.exchange()
    assert side.protocol.close_code == 1000
    assert side.transport.closed


@in_loop
async def test_a_peer_that_closes_is_answered_and_lost() -> None:
    side = Peerside()
    side.protocol.send_binary(CONNECT)
    side.exchange()
    side.protocol.send_close(1001)
    side.exchange()
    assert side.protocol.close_code == 1001
    assert side.transport.closed


@in_loop
async def test_the_handshake_in_single_bytes() -> None:
    client, transport = attach()
    for byte in request():
        client.data_received(bytes([byte]))
    assert status(transport) == 101


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (request(Sec_WebSocket_Protocol=""), 400),
        (request(Sec_WebSocket_Protocol="soap"), 400),
        (request(Sec_WebSocket_Version="8"), 400),
        (request(Upgrade=""), 426),
        (request("/other"), 404),
        (request().replace(b"GET", b"POST", 1), 405),
        (request(Origin="https://evil.example"), 403),
        (b"\x10\x0c\x00\x04MQTT\r\n\r\n", None),  # no HTTP, so no answer in HTTP
        (request(X_Long="x" * 100_000), 431),
    ],
)
def test_refused_handshakes_say_why_and_close(data: bytes, expected: int | None) -> None:
    @in_loop
    async def run() -> None:
        client, transport = attach(Listener(kind="ws", path="/mqtt"))
        # What follows a refused request must not reach the engine.
        client.data_received(data + b"\x82\x8e\x00\x00\x00\x00" + CONNECT)
        assert (status(transport) if transport.sent else None) == expected
        assert transport.closed
        assert client.connection is not None
        assert client.connection.bytes_in == 0

    run()


@in_loop
async def test_any_path_is_served_by_default_and_queries_are_ignored() -> None:
    client, transport = attach()
    client.data_received(request("/anything?x=1"))
    assert status(transport) == 101
    client, transport = attach(Listener(kind="ws", path="/mqtt"))
    client.data_received(request("/mqtt?token=1"))
    assert status(transport) == 101


@pytest.mark.parametrize(
    ("origin", "host", "origins", "expected"),
    [
        (None, "127.0.0.1:8083", None, True),
        ("http://127.0.0.1:3000", "127.0.0.1:8083", None, True),
        ("http://localhost", "127.0.0.1:8083", None, False),
        ("https://evil.example", "127.0.0.1:8083", None, False),
        ("null", "127.0.0.1:8083", None, False),
        ("https://evil.example", None, None, False),
        ("https://good.example", "b:1", ("https://good.example",), True),
        ("https://evil.example", "b:1", ("https://good.example",), False),
        ("https://evil.example", "b:1", ("*",), True),
        ("http://[::1]:80", "[::1]:8083", None, True),
    ],
)
def test_origins(origin: str | None, host: str | None, origins: tuple[str, ...] | None, expected: bool) -> None:
    assert origin_allowed(origin, host, origins) is expected


@in_loop
async def test_a_client_that_pings_and_never_reads_is_cut_off() -> None:
    side = Peerside()
    side.protocol.send_binary(CONNECT)
    side.exchange()
    side.transport.blocked = True
    for _ in range(100_000):
        if side.transport.closed:
            break
        for _ in range(100):
            side.protocol.send_ping(bytes(125))
        side.client.data_received(b"".join(side.protocol.data_to_send()))
    assert side.transport.closed

"""A client that is only a socket and the codec, with the few steps that every test of it begins with."""

from __future__ import annotations

import socket
import ssl
from typing import TypeVar, cast

from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Connect,
    Packet,
    Properties,
    Publish,
    SubAck,
    Subscribe,
    SubscriptionRequest,
)
from tests.integration.broker.running import PATIENCE_SECONDS, RawClient

P = TypeVar("P")


class Wire(RawClient):
    """One connection. ``receive_buffer_bytes`` shrinks the kernel's buffer, for clients that shall be slow."""

    def __init__(
        self,
        port: int,
        version: int = MQTT_5,
        *,
        receive_buffer_bytes: int | None = None,
        websocket: bool = False,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        sock = socket.socket()
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(("127.0.0.1", port))
        if tls is not None:
            sock = tls.wrap_socket(sock, server_hostname="localhost")
        super().__init__(cast(socket.socket, WebSocketStream(sock)) if websocket else sock, version)
        self.version = version

    def __enter__(self) -> Wire:
        return self

    def expect(self, kind: type[P]) -> P:
        """The next packet, which must be of this kind."""
        packet = self.receive()
        assert isinstance(packet, kind), f"{kind.__name__} was due, but {packet or 'the end'} came"
        return packet

    def connect(
        self,
        client_id: str = "",
        *,
        clean_start: bool = True,
        expiry_seconds: int = 0,
        properties: Properties | None = None,
    ) -> ConnAck:
        """CONNECT, and the CONNACK that accepts it."""
        if self.version == MQTT_5:
            properties = properties or Properties()
            properties.session_expiry_interval = expiry_seconds or None
        self.send(Connect(client_id, self.version, clean_start, properties=properties))
        answer = self.expect(ConnAck)
        assert answer.reason_code == 0, answer
        return answer

    def subscribe(self, topic_filter: str, qos: int = 0) -> list[Publish]:
        """SUBSCRIBE, and wait for the SUBACK that grants it; returns the messages that came before it, which is allowed."""
        self.send(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]))
        early: list[Publish] = []
        packet: Packet | None = self.receive()
        while isinstance(packet, Publish):
            early.append(packet)
            packet = self.receive()
        assert isinstance(packet, SubAck), packet
        assert packet.reason_codes == [qos], packet
        return early


class WebSocketStream:
    """The client's half of WebSocket framing over a socket, as much as a :class:`RawClient` needs: reads only when asked."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._received = b""
        request = (
            "GET /mqtt HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
        )
        sock.sendall(request.encode())
        while b"\r\n\r\n" not in self._received:
            self._received += sock.recv(4_096)
        head, _, self._received = self._received.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 101 "), head

    def settimeout(self, seconds: float | None) -> None:
        self._socket.settimeout(seconds)

    def sendall(self, data: bytes) -> None:
        """One binary frame, masked with zeros."""
        size = len(data)
        if size < 126:
            head = bytes([0x82, 0x80 | size])
        elif size < 65_536:
            head = b"\x82\xfe" + size.to_bytes(2, "big")
        else:
            head = b"\x82\xff" + size.to_bytes(8, "big")
        self._socket.sendall(head + bytes(4) + data)

    def recv(self, _size: int) -> bytes:
        """The next frame's payload; nothing at the end."""
        second = self._exactly(2)[1:]
        size = second[0] if second else 0
        if size > 125:
            size = int.from_bytes(self._exactly(2 if size == 126 else 8), "big")
        return self._exactly(size)

    def close(self) -> None:
        self._socket.close()

    def _exactly(self, size: int) -> bytes:
        parts = [self._received]
        missing = size - len(self._received)
        while missing > 0:
            data = self._socket.recv(1 << 20)
            if not data:
                self._received = b""
                return b""
            parts.append(data)
            missing -= len(data)
        whole = b"".join(parts)
        self._received = whole[size:]
        return whole[:size]

"""A client that is only a socket and the codec, with the few steps that every test of it begins with."""

from __future__ import annotations

import socket
from typing import TypeVar

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

    def __init__(self, port: int, version: int = MQTT_5, *, receive_buffer_bytes: int | None = None) -> None:
        sock = socket.socket()
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        sock.settimeout(PATIENCE_SECONDS)
        sock.connect(("127.0.0.1", port))
        super().__init__(sock, version)
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

"""Clients that come over WebSocket: :mod:`nearcast.serving.websocket` between the stream and the engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.broker.transports import WRITE_HIGH_BYTES, ClientTransport
from nearcast.serving.websocket import ServerFraming

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

#: Bytes that may wait for a client on top of the MQTT output that the limits admit, before it is cut off.
MAX_PENDING_BYTES = 16 * WRITE_HIGH_BYTES


class WebSocketTransport(ClientTransport):
    """A :class:`ClientTransport` whose bytes travel in binary WebSocket frames."""

    __slots__ = ("frames",)

    def __init__(self, broker: Broker, listener: BoundListener) -> None:
        super().__init__(broker, listener)
        self.frames = ServerFraming(listener.config, broker.config.limits.max_packet_bytes)

    def data_received(self, data: bytes) -> None:
        received = self.frames.receive(data)
        if received:
            self.deliver(received)
        self.frames.write_to(self.transport)
        # The engine bounds MQTT output; pongs are ours to bound, for a client that sends pings and never reads.
        if self.write_buffer_bytes() > MAX_PENDING_BYTES:
            limits = self.broker.config.limits
            if self.write_buffer_bytes() > MAX_PENDING_BYTES + limits.max_output_bytes + limits.max_packet_bytes:
                self.abort()

    def eof_received(self) -> bool | None:
        self.frames.receive_eof()
        self.frames.write_to(self.transport)
        return None

    def send(self, chunks: list[bytes]) -> None:
        self.frames.send(chunks)
        self.frames.write_to(self.transport)

    def close(self) -> None:
        self.frames.close()
        self.frames.write_to(self.transport)
        super().close()

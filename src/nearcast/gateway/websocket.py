"""Clients that come over WebSocket: :mod:`nearcast.serving.websocket` between the stream and the tunnel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.gateway.transports import MAX_PENDING_BYTES, ClientTransport, GatewayListener
from nearcast.serving.websocket import ServerFraming

if TYPE_CHECKING:
    from nearcast.gateway.process import GatewayProcess


class WebSocketTransport(ClientTransport):
    """A client whose bytes travel in binary WebSocket frames."""

    __slots__ = ("frames",)

    def __init__(self, process: GatewayProcess, listener: GatewayListener) -> None:
        super().__init__(process, listener)
        self.frames = ServerFraming(listener.config, process.config.limits.max_packet_bytes)

    def data_received(self, data: bytes) -> None:
        received = self.frames.receive(data)
        if received:
            self.deliver(received)
        self.frames.write_to(self.transport)
        if self.write_buffer_bytes() > MAX_PENDING_BYTES + self.process.config.limits.max_packet_bytes:
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

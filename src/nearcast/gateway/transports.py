"""Clients' transports: bytes between a socket and a :class:`~nearcast.fabric.tunnels.Tunnel`."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from nearcast.config import Listener
from nearcast.fabric.tunnels import Tunnel
from nearcast.serving.listeners import BaseListener
from nearcast.serving.streams import StreamTransport

if TYPE_CHECKING:
    from nearcast.gateway.process import GatewayProcess

#: Above this the kernel has taken too little for now, and the broker is not told to send more. Small: what waits here is on
#: its way to one client, and is lost with it.
WRITE_HIGH_BYTES = 131_072
WRITE_LOW_BYTES = 32_768

#: A WebSocket client that sends pings and does not read the pongs is cut off beyond this.
MAX_PENDING_BYTES = 4_194_304

#: A client that is being sent away and does not take its last bytes is cut off after this.
CLOSING_SECONDS = 10.0


class ClientTransport(StreamTransport):
    """One client. Also the handle of its tunnel."""

    __slots__ = ("listener", "process", "stall_bytes", "stall_since", "tunnel")

    def __init__(self, process: GatewayProcess, listener: GatewayListener) -> None:
        super().__init__()
        self.process = process
        self.listener = listener
        self.tunnel: Tunnel | None = None
        self.stall_bytes = 0
        self.stall_since = 0.0

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        peer = self.listener.peer_of(stream)
        if self.process.stopping or not self.listener.admits(peer):
            stream.abort()
            return
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        self.tunnel = self.process.opened(self, peer)

    def data_received(self, data: bytes) -> None:
        self.deliver(data)

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None:
        if self.tunnel is not None:
            self.tunnel.congested = True
            self.stall_bytes = self.write_buffer_bytes()
            self.stall_since = self.process.monotonic()
            self.process.stalled[self] = None

    def resume_writing(self) -> None:
        tunnel = self.tunnel
        self.process.stalled.pop(self, None)
        if tunnel is not None:
            self.process.machine.writable(tunnel, self.process.monotonic())
            self.process.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        tunnel, self.tunnel = self.tunnel, None
        self.process.gone(self, tunnel)

    # What the machine calls.

    def deliver(self, data: bytes) -> None:
        """Bytes of the MQTT stream arrived."""
        if self.tunnel is not None:
            process = self.process
            process.machine.receive(self.tunnel, data, process.monotonic())
            process.flush()

    def close(self) -> None:
        self.close_within(CLOSING_SECONDS)


class GatewayListener(BaseListener):
    """A listener of the gateway."""

    when_taken = "is a broker or another gateway running? --port takes another port"

    def __init__(self, process: GatewayProcess, config: Listener) -> None:
        super().__init__(process, config)
        self._process = process
        self._transport_class: type[ClientTransport] = ClientTransport
        if config.kind in ("ws", "wss"):
            # Imported here: a gateway without WebSocket listeners does not carry the library.
            from nearcast.gateway.websocket import WebSocketTransport

            self._transport_class = WebSocketTransport

    def make_transport(self) -> ClientTransport:
        return self._transport_class(self._process, self)

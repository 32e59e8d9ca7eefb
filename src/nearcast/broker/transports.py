"""One client's transport: bytes in, bytes out, for TCP, TLS and Unix sockets.

A :class:`ClientTransport` is all the driver keeps per connection, so it is small: no task, no timer, no dict, no buffer. It
hands every read to the engine in one call and knows nothing of MQTT; WebSocket framing is in :mod:`.websocket`.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import Connection
from nearcast.serving.streams import StreamTransport

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

#: Above this the kernel has taken too little for now: the engine keeps further output, under its own limits, until the
#: transport is below the low mark. High enough that the batch of one read does not pause a healthy client.
WRITE_HIGH_BYTES = 262_144
WRITE_LOW_BYTES = 65_536


class ClientTransport(StreamTransport):
    """Drives one engine connection over one stream transport."""

    __slots__ = (
        "announced",
        "broker",
        "connection",
        "held_bytes",
        "listener",
        "sampled_in",
        "sampled_out",
        "stall_bytes",
        "stall_since",
        "waits_to_close",
    )

    def __init__(self, broker: Broker, listener: BoundListener) -> None:
        super().__init__()
        self.broker = broker
        self.listener = listener
        self.connection: Connection | None = None
        self.announced = False
        # Output that waits for the disk.
        self.held_bytes = 0
        self.waits_to_close = False
        self.stall_bytes = 0
        self.stall_since = 0.0
        self.sampled_in = 0
        self.sampled_out = 0

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        peer = self.listener.peer_of(stream)
        if not self.listener.admits(peer):
            stream.abort()
            return
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        self.broker.opened(self, peer)

    def data_received(self, data: bytes) -> None:
        self.deliver(data)

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.congested = True
            self.broker.stalls.watch(self, self.broker.monotonic())

    def resume_writing(self) -> None:
        connection = self.connection
        if connection is not None:
            connection.congested = False
            if not connection.reading and self.transport is not None:
                self.transport.resume_reading()
            broker = self.broker
            broker.stalls.unwatch(self)
            broker.engine.writable(connection, broker.monotonic())
            broker.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        connection, self.connection = self.connection, None
        self.broker.lost(self, connection)

    # What the broker calls.

    def deliver(self, data: bytes) -> None:
        """Give bytes of the MQTT stream to the engine."""
        connection = self.connection
        if connection is not None:
            broker = self.broker
            broker.engine.receive(connection, data, broker.monotonic())
            if not self.announced:
                broker.announce(self, connection)
            broker.flush()
            if connection.congested and connection.out_bytes > connection.max_output_bytes:
                self._pause_reading(connection)

    def _pause_reading(self, connection: Connection) -> None:
        # Messages are dropped or queued for a client that does not read, but answers are not: it gets no further requests in
        # until it takes them.
        if connection.reading and self.transport is not None and not self.transport.is_closing():
            connection.reading = False
            self.transport.pause_reading()

    def close(self) -> None:
        """Close once what was sent is out. Whoever does not take it is cut off by the stall check."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                self.broker.stalls.watch(self, self.broker.monotonic())

    def cut(self) -> None:
        """Close at once, and let the engine hear nothing of it, nor of anything that still arrives."""
        self.connection = None
        self.abort()


def peer_name(connection: Connection) -> str:
    """A connection's peer for logs."""
    peer: Peer = connection.peer
    return peer.address or "unix"

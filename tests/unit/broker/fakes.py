"""A stream transport that keeps what is written, and a broker to drive it: real engine, real output order, no sockets."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any, ParamSpec

from nearcast.broker.transports import ClientTransport
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Packet

P = ParamSpec("P")


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run an asynchronous test in a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class MemoryTransport(asyncio.Transport):
    """Takes everything at once, unless ``blocked``: then it keeps it and tells the protocol to pause."""

    def __init__(self, protocol: ClientTransport) -> None:
        super().__init__()
        self._protocol = protocol
        self.sent = bytearray()
        self.waiting = bytearray()
        self.blocked = False
        self.closed = False
        self.reading = True
        self._paused = False
        self._high = 65_536

    def take(self) -> bytes:
        """What was sent since the last call."""
        taken = bytes(self.sent)
        self.sent.clear()
        return taken

    def unblock(self) -> None:
        """The kernel takes everything again."""
        self.blocked = False
        self.sent += self.waiting
        self.waiting.clear()
        if self._paused:
            self._paused = False
            self._protocol.resume_writing()

    def write(self, data: Any) -> None:
        assert not self.closed
        (self.waiting if self.blocked else self.sent).extend(data)
        if len(self.waiting) > self._high and not self._paused:
            self._paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        for data in list_of_data:
            self.write(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = high or 0

    def get_write_buffer_size(self) -> int:
        return len(self.waiting)

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return ("127.0.0.1", 1) if name == "peername" else default

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True
        self.waiting.clear()

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class MemoryListener:
    """Admits everyone."""

    name = "memory"

    def peer_of(self, transport: asyncio.Transport) -> Peer:
        return Peer("127.0.0.1", self.name)

    def admits(self, peer: Peer) -> bool:
        return True


def attach(broker: Any) -> tuple[ClientTransport, MemoryTransport]:
    """A new client of ``broker``."""
    client = ClientTransport(broker, MemoryListener())  # type: ignore[arg-type]
    transport = MemoryTransport(client)
    client.connection_made(transport)
    return client, transport


def feed(client: ClientTransport, *packets: Packet, version: int = 5) -> None:
    """Everything in one read."""
    client.data_received(b"".join(encode(packet, version) for packet in packets))

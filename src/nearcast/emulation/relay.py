"""One TCP connection of loopback mode, relayed with the delays that the network model gives its segments.

What a program sees: ``connect`` succeeds at once, because the machine's own kernel answers, but nothing passes before the
handshake would have come and gone. Then every segment takes as long as the model says; one that is lost comes again after a
round trip and 200 ms, as Linux would send it; while nothing gets through, it is tried ever more rarely, up to a quarter of an
hour. Bytes stay in order. At most ``WINDOW_BYTES`` are under way in each direction: a reader that is slow, or a line that is
narrow, slows the writer down. Congestion control is not modelled.
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import deque
from typing import Final

from nearcast.network.network import FULL, UNREACHABLE, Network

SEGMENT_BYTES: Final = 1448
HEADER_BYTES: Final = 52
"""IPv4 and TCP with timestamps: what a segment weighs beside its data."""

WINDOW_BYTES: Final = 1 << 20
_READ_BYTES: Final = 32 * 1024
_MINIMUM_TIMEOUT_S: Final = 0.2
_MAXIMUM_TIMEOUT_S: Final = 120.0
_FIRST_SYN_TIMEOUT_S: Final = 1.0
_FULL_RETRY_S: Final = 0.005

#: How long Linux goes on trying: the handshake (6 repetitions) and data (tcp_retries2).
CONNECT_GIVE_UP_S: Final = 127.0
DATA_GIVE_UP_S: Final = 924.0

#: Closing with this sends a reset instead of a goodbye.
_ABORT = struct.pack("ii", 1, 0)


class GaveUp(Exception):
    """Nothing got through for so long that a kernel would have given up."""


class Relay:
    """A connection from one host to a port of another. ``run`` lasts as long as it does."""

    def __init__(self, network: Network, source: int, target: int, client: socket.socket) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._client = client
        self._server: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    async def run(self, address: tuple[str, int], seen_as: str) -> None:
        """Relay to ``address``, where the other end sees the connection come from ``seen_as``; closes the sockets."""
        try:
            await self._pass(HEADER_BYTES, self._source, self._target, _FIRST_SYN_TIMEOUT_S, CONNECT_GIVE_UP_S)
            connected = await self._connect(address, seen_as)
            await self._pass(HEADER_BYTES, self._target, self._source, _FIRST_SYN_TIMEOUT_S, CONNECT_GIVE_UP_S)
            if not connected or self._server is None:
                return
            there = _Direction(self._network, self._source, self._target, self._client, self._server)
            back = _Direction(self._network, self._target, self._source, self._server, self._client)
            async with asyncio.TaskGroup() as group:
                for direction in (there, back):
                    group.create_task(direction.take())
                    group.create_task(direction.give())
            # Both said goodbye: closing lets the kernel send what it still has.
            self._client.close()
            self._server.close()
        except* (GaveUp, OSError):
            pass  # the sockets tell the programs
        finally:
            _reset(self._client)
            if self._server is not None:
                _reset(self._server)

    async def _connect(self, address: tuple[str, int], seen_as: str) -> bool:
        server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._server = server
        server.setblocking(False)
        server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            server.bind((seen_as, 0))
            await self._loop.sock_connect(server, address)
        except OSError:
            return False
        return True

    async def _pass(self, size_bytes: int, source: int, target: int, timeout_s: float, give_up_s: float) -> None:
        """Wait for as long as one packet takes, repetitions included."""
        began = self._loop.time()
        while True:
            now = self._loop.time()
            arrival = self._network.transit(source, target, size_bytes, now)
            if arrival >= 0.0:
                await asyncio.sleep(arrival - now)
                return
            if now - began > give_up_s:
                raise GaveUp
            await asyncio.sleep(timeout_s)
            timeout_s = min(timeout_s * 2, _MAXIMUM_TIMEOUT_S)


class _Segment:
    """Bytes under way. Empty ones are the end: a goodbye or, with ``reset``, an abort."""

    __slots__ = ("arrival", "data", "reset")

    def __init__(self, data: bytes, reset: bool = False) -> None:
        self.data = data
        self.reset = reset
        self.arrival = -1.0
        """Below zero while it is lost and waits to be sent again."""


class _Direction:
    """One direction of a connection: ``take`` reads and sends, ``give`` delivers, in order."""

    def __init__(self, network: Network, source: int, target: int, reading: socket.socket, writing: socket.socket) -> None:
        self._network = network
        self._source = source
        self._target = target
        self._reading = reading
        self._writing = writing
        self._loop = asyncio.get_running_loop()
        self._segments: deque[_Segment] = deque()
        self._unread_bytes = 0
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()
        self._given_up = False
        self._over = False
        """Nobody waits for segments any more."""

    async def take(self) -> None:
        """Read what the program writes until its end, and put every segment on its way."""
        while True:
            await self._room.wait()
            try:
                data = await self._loop.sock_recv(self._reading, _READ_BYTES)
            except OSError:
                await self._send(_Segment(b"", reset=True))
                return
            if not data:
                await self._send(_Segment(b""))
                return
            self._unread_bytes += len(data)
            if self._unread_bytes >= WINDOW_BYTES:
                self._room.clear()
            for start in range(0, len(data), SEGMENT_BYTES):
                await self._send(_Segment(data[start : start + SEGMENT_BYTES]))

    async def _send(self, segment: _Segment) -> None:
        """Put a segment on its way; comes back when the next one may go."""
        self._segments.append(segment)
        began = self._loop.time()
        timeout_s = 0.0
        while True:
            outcome = self._try(segment)
            if outcome == FULL:
                await asyncio.sleep(_FULL_RETRY_S)  # its turn comes when the queue has drained a little
            elif outcome == UNREACHABLE:
                if self._loop.time() - began > DATA_GIVE_UP_S:
                    raise GaveUp
                timeout_s = min(timeout_s * 2, _MAXIMUM_TIMEOUT_S) or self._timeout_s()
                await asyncio.sleep(timeout_s)
            elif outcome < 0.0:
                # Lost: the ones behind it go on and wait for it at the other end.
                self._again_later(segment, self._timeout_s(), began)
                return
            else:
                return

    def _try(self, segment: _Segment) -> float:
        now = self._loop.time()
        outcome = self._network.transit(self._source, self._target, len(segment.data) + HEADER_BYTES, now)
        if outcome >= 0.0:
            segment.arrival = outcome
            self._changed.set()
        return outcome

    def _again_later(self, segment: _Segment, timeout_s: float, began: float) -> None:
        def again() -> None:
            if self._over or self._try(segment) >= 0.0:
                return
            if self._loop.time() - began < DATA_GIVE_UP_S:
                self._again_later(segment, min(timeout_s * 2, _MAXIMUM_TIMEOUT_S), began)
            else:
                self._given_up = True
                self._changed.set()

        self._loop.call_later(timeout_s, again)

    def _timeout_s(self) -> float:
        """A round trip and 200 ms; what is unreachable now has no round trip."""
        there = self._network.one_way_ms(self._source, self._target)
        back = self._network.one_way_ms(self._target, self._source)
        round_trip_s = (there + back) / 1000.0
        return _MINIMUM_TIMEOUT_S + (round_trip_s if round_trip_s < _MAXIMUM_TIMEOUT_S else 0.0)

    async def give(self) -> None:
        """Write segments to the other program when they have arrived, up to the end."""
        try:
            await self._deliver()
        finally:
            self._over = True

    async def _deliver(self) -> None:
        while True:
            due = self._due()
            if due:
                await self._loop.sock_sendall(self._writing, b"".join(segment.data for segment in due))
                self._unread_bytes -= sum(len(segment.data) for segment in due)
                if self._unread_bytes < WINDOW_BYTES:
                    self._room.set()
                last = due[-1]
                if last.reset:
                    raise ConnectionResetError
                if not last.data:
                    self._writing.shutdown(socket.SHUT_WR)
                    return
            await self._wait()

    def _due(self) -> list[_Segment]:
        now = self._loop.time()
        due = []
        while self._segments and 0.0 <= self._segments[0].arrival <= now:
            due.append(self._segments.popleft())
        return due

    async def _wait(self) -> None:
        """Until the first segment arrives, or there is one."""
        if self._segments and self._segments[0].arrival >= 0.0:
            await asyncio.sleep(self._segments[0].arrival - self._loop.time())
            return
        self._changed.clear()
        await self._changed.wait()
        if self._given_up:
            raise GaveUp


def _reset(connection: socket.socket) -> None:
    """Close a connection that was not ended in order: the program at its other end gets a reset."""
    try:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _ABORT)
    except OSError:
        pass
    connection.close()

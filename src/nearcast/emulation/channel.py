"""Lines and file descriptors over a Unix socket, both ways, with bounds: what keeper and clients talk through.

asyncio's streams cannot carry descriptors, hence this. A peer that sends a line beyond the bound, or does not read what it is
sent, loses the connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

#: Descriptors that may come beside one line: standard input, output and error.
MAX_DESCRIPTORS = 3

_READ_BYTES = 64 * 1024
_MAX_UNSENT_BYTES = 32 * 1024 * 1024
_DRAINED_BYTES = 256 * 1024


class LineTooLong(Exception):
    """The peer sent a line beyond the bound."""


class Channel:
    """One connection. ``received`` gets each line without its end; ``ended`` is called once, when no more will come."""

    def __init__(
        self,
        connection: socket.socket,
        max_line_bytes: int,
        received: Callable[[bytes], None],
        ended: Callable[[Exception | None], None],
        farewell: bytes = b"",
    ) -> None:
        """``farewell`` is what a peer hears that sends a line beyond ``max_line_bytes``."""
        self._socket = connection
        self._max_line_bytes = max_line_bytes
        self._received = received
        self._ended = ended
        self._farewell = farewell
        self._loop = asyncio.get_running_loop()
        self._incoming = bytearray()
        self._descriptors: list[int] = []
        self._outgoing: list[tuple[bytes, tuple[int, ...]]] = []
        self._unsent_bytes = 0
        self._writing = False
        self._drained = asyncio.Event()
        self._drained.set()
        self._closing = False
        self.open = True
        connection.setblocking(False)
        self._loop.add_reader(connection, self._readable)

    def take_descriptors(self) -> tuple[int, ...]:
        """The oldest descriptors that came, for the line that they belong to; the caller closes them."""
        taken, self._descriptors = tuple(self._descriptors[:MAX_DESCRIPTORS]), self._descriptors[MAX_DESCRIPTORS:]
        return taken

    def send(self, line: bytes, descriptors: tuple[int, ...] = ()) -> None:
        """Send a line, which ends with a newline, as soon as the peer takes it. Descriptors are copied: close them at will."""
        if not self.open:
            return
        self._outgoing.append((line, tuple(os.dup(descriptor) for descriptor in descriptors)))
        self._unsent_bytes += len(line)
        if not self._writing:
            self._writable()
        if self._unsent_bytes > _MAX_UNSENT_BYTES:
            self.abort(None)
        elif self._unsent_bytes > _DRAINED_BYTES:
            self._drained.clear()

    async def drain(self) -> None:
        """Wait until most of what was sent is gone."""
        await self._drained.wait()

    def finish(self) -> None:
        """Close when everything is sent."""
        self._closing = True
        if not self._outgoing:
            self.abort(None)

    def abort(self, error: Exception | None) -> None:
        """Close now."""
        if not self.open:
            return
        self.open = False
        self._loop.remove_reader(self._socket)
        if self._writing:
            self._loop.remove_writer(self._socket)
        self._socket.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        for _, descriptors in self._outgoing:
            for descriptor in descriptors:
                os.close(descriptor)
        self._descriptors.clear()
        self._outgoing.clear()
        self._drained.set()
        self._ended(error)

    def _readable(self) -> None:
        try:
            data, descriptors, _, _ = socket.recv_fds(self._socket, _READ_BYTES, MAX_DESCRIPTORS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.abort(error)
            return
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        if not data or len(self._descriptors) > 4 * MAX_DESCRIPTORS:
            self.abort(None)
            return
        self._incoming += data
        while self.open and (end := self._incoming.find(b"\n")) >= 0:
            line = bytes(self._incoming[:end])
            del self._incoming[: end + 1]
            self._received(line)
        if self.open and len(self._incoming) > self._max_line_bytes:
            if self._farewell:
                self.send(self._farewell)
            self.abort(LineTooLong())

    def _writable(self) -> None:
        try:
            while self._outgoing:
                line, descriptors = self._outgoing[0]
                sent = socket.send_fds(self._socket, [line], list(descriptors)) if descriptors else self._socket.send(line)
                for descriptor in descriptors:
                    os.close(descriptor)  # they go with the first byte
                self._unsent_bytes -= sent
                if sent < len(line):
                    self._outgoing[0] = (line[sent:], ())
                else:
                    del self._outgoing[0]
                if self._unsent_bytes <= _DRAINED_BYTES:
                    self._drained.set()
        except (BlockingIOError, InterruptedError):
            if not self._writing:
                self._writing = True
                self._loop.add_writer(self._socket, self._writable)
            return
        except OSError as error:
            self.abort(error)
            return
        if self._writing:
            self._writing = False
            self._loop.remove_writer(self._socket)
        if self._closing:
            self.abort(None)

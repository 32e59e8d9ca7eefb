"""The keeper's side of the control socket: who may connect, which lines are requests, and that each is answered once.

What a request means is the keeper's business (:class:`Handler`). Only the user who runs the WAN, and root, may connect: the
socket is theirs alone by its mode and directory, and the kernel is asked again who is at the other end.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import struct
from pathlib import Path
from typing import Any, Protocol

import msgspec

from nearcast.emulation.channel import Channel, LineTooLong
from nearcast.emulation.control import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    Answer,
    Execute,
    Greeting,
    Item,
    Request,
    decode_request,
    encode,
    number_of,
)
from nearcast.emulation.directories import socket_name
from nearcast.errors import NearcastError

MAX_CONNECTIONS = 64
MAX_REQUESTS = 1_024
"""At once, on one connection: experiments run a program on every host at the same time."""

_TOO_LONG = encode(Answer(id=-1, error=f"a request has at most {MAX_REQUEST_BYTES} bytes"))

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """Does what requests ask for."""

    async def handle(self, request: Request, connection: Connection, descriptors: tuple[int, ...]) -> Any:
        """The result of a request. A :class:`NearcastError` becomes its error. Owns the descriptors."""

    def disconnected(self, connection: Connection) -> None:
        """A connection has ended; its requests are being cancelled."""


class Connection:
    """One client."""

    def __init__(self, server: Server, stream: socket.socket, *, owner: bool) -> None:
        self.owner = owner
        """Whether this is the process that started the WAN."""
        self._server = server
        self._finishing = False
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._channel = Channel(stream, MAX_REQUEST_BYTES, self._received, self._ended, _TOO_LONG)
        self._channel.send(encode(Greeting(nearcast_wan=PROTOCOL, name=server.name)))

    async def send_item(self, request: int, item: Any) -> None:
        """One of several answers; waits while the client does not read."""
        self._channel.send(encode(Item(id=request, item=item)))
        await self._channel.drain()

    def refuse(self, reason: str) -> None:
        self._channel.send(encode(Answer(id=-1, error=reason)))
        self._channel.finish()

    def finish(self) -> None:
        """Close once every request is answered and everything is sent."""
        self._finishing = True
        if not self._tasks:
            self._channel.finish()

    def _received(self, line: bytes) -> None:
        try:
            request = decode_request(line)
            if request.id in self._tasks or request.id < 0:
                raise NearcastError(f"request {request.id} is under way already, or has no number")
            if len(self._tasks) >= MAX_REQUESTS:
                raise NearcastError(f"{MAX_REQUESTS} requests are under way on this connection: wait for their answers")
        except (msgspec.DecodeError, NearcastError, UnicodeDecodeError, RecursionError) as error:
            # What came beside it is nobody's: the next program must not get these streams.
            for descriptor in self._channel.take_descriptors():
                os.close(descriptor)
            self._channel.send(encode(Answer(id=number_of(line), error=f"not a request: {error}")))
            return
        # Only a request that needs them: lines before it may have come in the same piece.
        descriptors = self._channel.take_descriptors() if isinstance(request, Execute) else ()
        task = asyncio.create_task(self._serve(request, descriptors), name=f"request {request.id}")
        self._tasks[request.id] = task

    async def _serve(self, request: Request, descriptors: tuple[int, ...]) -> None:
        try:
            result = await self._server.handler.handle(request, self, descriptors)
            answer = Answer(id=request.id, result=result)
        except NearcastError as error:
            answer = Answer(id=request.id, error=str(error))
        except Exception as error:  # noqa: BLE001  # the edge of the task: the keeper goes on, the client and the log are told
            _log.exception("request %s failed", request)
            answer = Answer(id=request.id, error=f"internal error: {error!r}")
        finally:
            self._tasks.pop(request.id, None)
        self._channel.send(encode(answer))
        if self._finishing and not self._tasks:
            self._channel.finish()

    def _ended(self, error: Exception | None) -> None:
        if isinstance(error, LineTooLong):
            _log.warning("a client sent a request beyond %d bytes", MAX_REQUEST_BYTES)
        for task in list(self._tasks.values()):
            task.cancel()
        self._server.forget(self)
        self._server.handler.disconnected(self)

    def abort(self) -> None:
        self._channel.abort(None)


class Server:
    """Listens on the control socket."""

    def __init__(self, handler: Handler, name: str, path: Path) -> None:
        self.handler = handler
        self.name = name
        self._path = path
        self._listener: socket.socket | None = None
        self.connections: set[Connection] = set()
        self._empty = asyncio.Event()

    def open(self) -> None:
        """Bind the socket, for this user alone."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        mask = os.umask(0o177)
        try:
            with socket_name(self._path) as name:
                listener.bind(name)
        finally:
            os.umask(mask)
        listener.listen(MAX_CONNECTIONS)
        listener.setblocking(False)
        self._listener = listener
        asyncio.get_running_loop().add_reader(listener, self._accept)

    def adopt(self, stream: socket.socket, *, owner: bool = False) -> None:
        """Serve a connection that is there already."""
        self.connections.add(Connection(self, stream, owner=owner))

    def close(self) -> None:
        """Stop listening; connections end when their last answers are sent."""
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        for connection in list(self.connections):
            connection.finish()
        self.forget(None)

    async def flushed(self, timeout_seconds: float) -> None:
        """Wait until every client has got its last answer, or time is up."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._empty.wait()
        except TimeoutError:
            pass
        for connection in list(self.connections):
            connection.abort()

    def forget(self, connection: Connection | None) -> None:
        """A connection has ended."""
        if connection is not None:
            self.connections.discard(connection)
        if not self.connections and self._listener is None:
            self._empty.set()

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            stream, _ = self._listener.accept()
        except OSError:
            return  # it left again, or there are no descriptors: it is tried again
        _, user, _ = struct.unpack("3i", stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if user not in (0, os.geteuid()):
            stream.close()
            return
        connection = Connection(self, stream, owner=False)
        self.connections.add(connection)
        if len(self.connections) > MAX_CONNECTIONS:
            connection.refuse(f"{MAX_CONNECTIONS} clients are connected to this WAN: end one of them")

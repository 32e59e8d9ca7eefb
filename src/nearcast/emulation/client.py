"""The other side of the control socket: sends requests and matches answers. Knows the protocol, not what is done with it."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from nearcast.emulation.channel import Channel
from nearcast.emulation.control import MAX_ANSWER_BYTES, PROTOCOL, Greeting, Request, encode
from nearcast.emulation.directories import socket_name
from nearcast.errors import EmulationError

_MAX_WAITING_ITEMS = 10_000
_GREETING_SECONDS = 20.0


class _Line(msgspec.Struct):
    """Any line of the keeper after its greeting."""

    id: int
    error: str | None = None
    result: Any = None
    item: Any = msgspec.UNSET


class Pending:
    """A request that has not been answered yet."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.lines: asyncio.Queue[_Line | None] = asyncio.Queue()


class ControlClient:
    """One connection to a keeper."""

    def __init__(self, stream: socket.socket) -> None:
        self._next = 1
        self._pending: dict[int, Pending] = {}
        self._greeted: asyncio.Future[Greeting] = asyncio.get_running_loop().create_future()
        self._channel = Channel(stream, MAX_ANSWER_BYTES, self._received, self._ended)
        self.ended = asyncio.Event()

    @classmethod
    async def connect(cls, path: Path) -> ControlClient:
        """Connect to the control socket at ``path``."""
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.setblocking(False)
        try:
            with socket_name(path) as name:
                await asyncio.get_running_loop().sock_connect(stream, name)
        except OSError as error:
            stream.close()
            if isinstance(error, FileNotFoundError | ConnectionRefusedError):
                raise EmulationError(f"WAN {path.parent.name} is just being started or ended: try again") from error
            raise EmulationError(f"the WAN at {path.parent} does not answer: {error.strerror}") from error
        client = cls(stream)
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                await client.greeted()
        except TimeoutError:
            client.close()
            raise EmulationError(
                f"WAN {path.parent.name} has not answered for {_GREETING_SECONDS:g} s: end the process that started it"
            ) from None
        except BaseException:
            client.close()
            raise
        return client

    async def greeted(self) -> str:
        """The name of the WAN, once it has introduced itself."""
        greeting = await self._greeted
        if greeting.nearcast_wan != PROTOCOL:
            self.close()
            raise EmulationError(
                f"WAN {greeting.name} was started by another version of nearcast: use that one, or take it down with its own"
            )
        return greeting.name

    def take_number(self) -> int:
        """A number for a request."""
        number = self._next
        self._next += 1
        return number

    async def ask(self, request: Request, descriptors: tuple[int, ...] = ()) -> Any:
        """The result of a request; :class:`EmulationError` with the keeper's words if it refuses."""
        return await self.finish(self.begin(request, descriptors))

    def begin(self, request: Request, descriptors: tuple[int, ...] = ()) -> Pending:
        """Send a request. Descriptors are copied: the caller may close them at once."""
        if not self._channel.open:
            raise EmulationError("the WAN was taken down")
        pending = self._pending[request.id] = Pending(request.id)
        self._channel.send(encode(request), descriptors)
        return pending

    async def finish(self, pending: Pending) -> Any:
        """The result of a request that was begun."""
        async for line in self._lines(pending):
            if line.item is msgspec.UNSET:
                return _result(line)
        raise EmulationError("the WAN was taken down")

    async def items(self, request: Request) -> AsyncIterator[Any]:
        """The items of a request, up to its answer or the end of the WAN."""
        async for line in self._lines(self.begin(request)):
            if line.item is msgspec.UNSET:
                _result(line)
                return
            yield line.item

    async def _lines(self, pending: Pending) -> AsyncIterator[_Line]:
        try:
            while (line := await pending.lines.get()) is not None:
                yield line
        finally:
            self._pending.pop(pending.number, None)

    def send(self, request: Request) -> None:
        """Send a request whose answer nobody waits for."""
        self._channel.send(encode(request))

    def close(self) -> None:
        self._channel.abort(None)

    def _received(self, data: bytes) -> None:
        try:
            if not self._greeted.done():
                self._greeted.set_result(msgspec.json.decode(data, type=Greeting))
                return
            line = msgspec.json.decode(data, type=_Line)
        except msgspec.DecodeError as error:
            self._channel.abort(error)
            return
        pending = self._pending.get(line.id)
        if pending is not None:
            if pending.lines.qsize() >= _MAX_WAITING_ITEMS and line.item is not msgspec.UNSET:
                return  # its reader has stopped reading
            pending.lines.put_nowait(line)
        elif line.id == -1 and line.error is not None:
            for other in self._pending.values():
                other.lines.put_nowait(line)

    def _ended(self, error: Exception | None) -> None:
        self.ended.set()
        if not self._greeted.done():
            self._greeted.set_exception(EmulationError("the WAN ended before it answered"))
            self._greeted.exception()  # somebody may have stopped waiting for it
        for pending in self._pending.values():
            pending.lines.put_nowait(None)


def _result(line: _Line) -> Any:
    if line.error is not None:
        raise EmulationError(line.error)
    return line.result

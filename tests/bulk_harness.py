"""A broker with a bulk port inside a test's own loop, a client that speaks the port's frames by hand, and a relay that cuts
connections. Real sockets on loopback, no processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from nearcast.broker.process import Broker
from nearcast.broker.topic_keeping import Run
from nearcast.config import BrokerConfig, Listener, Persistence, TopicRule
from nearcast.topiclog import wire

LISTENERS = (Listener(port=0), Listener(kind="bulk", port=0))


def config(directory: Path, *, bulk_port: int = 0, **settings: Any) -> BrokerConfig:
    """Durable topics below ``a/``; ``settings`` replace or add to that."""
    found: dict[str, Any] = {
        "listeners": (Listener(port=0), Listener(kind="bulk", port=bulk_port)),
        "persistence": Persistence(directory=str(directory), sync="os"),
        "topics": (TopicRule(topic="a/#"),),
        "shutdown_timeout_seconds": 0.0,
    }
    return BrokerConfig(**{**found, **settings})


@contextlib.asynccontextmanager
async def broker(directory: Path, **settings: Any) -> AsyncIterator[Broker]:
    """A running broker."""
    found = Broker(config(directory, **settings))
    await found.start()
    try:
        yield found
    finally:
        await found.stop()


def bulk_port(found: Broker) -> int:
    return next(listener.port for listener in found.listeners if listener.config.kind.startswith("bulk"))


def url(found: Broker) -> str:
    return f"nearcast://127.0.0.1:{bulk_port(found)}"


async def fill(found: Broker, topic: str, count: int, size: int = 100) -> list[bytes]:
    """Records of a topic, some in one block and some alone."""
    payloads = [b"%08d" % number + bytes(size) for number in range(count)]
    at = 0
    while at < count:
        step = 1 + at % 7
        found.topics.publish(Run(topic.encode(), payloads[at : at + step], publisher=b"filler"))
        at += step
    await found.topics.committed()
    return payloads


class Wire:
    """A client that says exactly what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, number: int, content: wire.Message) -> None:
        self.writer.write(wire.message(number, content))

    async def frame(self) -> tuple[int, int, bytes]:
        """The next frame; ``EOFError`` (IncompleteReadError) when the broker closed the connection."""
        async with asyncio.timeout(20):
            size, kind, number = wire.HEADER.unpack(await self.reader.readexactly(wire.HEADER_BYTES))
            return kind, number, await self.reader.readexactly(size)

    async def message(self) -> tuple[int, wire.FromBroker]:
        kind, number, body = await self.frame()
        assert kind == wire.MESSAGE
        return number, wire.decode_from_broker(body)

    async def answer(self, number: int, content: wire.Message) -> wire.FromBroker:
        """Ask, and skip what belongs to others until the answer is there."""
        self.send(number, content)
        while True:
            kind, found, body = await self.frame()
            if found == number and kind == wire.MESSAGE:
                return wire.decode_from_broker(body)

    async def welcome(self, **hello: Any) -> wire.FromBroker:
        self.send(0, msgspec.structs.replace(wire.Hello(client_id="hand"), **hello))
        return (await self.message())[1]

    async def ended(self) -> bool:
        """Whether the broker closes the connection, whatever it says before."""
        async with asyncio.timeout(20):
            with contextlib.suppress(ConnectionError):
                await self.reader.read(-1)
            return True


@contextlib.asynccontextmanager
async def connected(found: Broker, *, welcome: bool = True) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", bulk_port(found))
    client = Wire(reader, writer)
    try:
        if welcome:
            assert isinstance(await client.welcome(), wire.Welcome)
        yield client
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


class Relay:
    """Between a client and a broker: passes bytes on, and cuts both ways after so many bytes to the client, if told to."""

    def __init__(self, port: int) -> None:
        self.target = port
        self.port = 0
        self.cut_after: list[int] = []
        """For one connection after the other; further ones are not cut."""
        self.cut_upwards_after: list[int] = []
        """The same, by bytes from the client."""
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        self.connections += 1
        left = self.cut_after.pop(0) if self.cut_after else 1 << 60
        left_upwards = self.cut_upwards_after.pop(0) if self.cut_upwards_after else 1 << 60
        to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self.target)

        async def upwards(left: int) -> None:
            with contextlib.suppress(ConnectionError):
                while left > 0 and (data := await reader.read(65_536)):
                    to_writer.write(data[:left])
                    await to_writer.drain()
                    left -= len(data)
            to_writer.close()

        up = asyncio.create_task(upwards(left_upwards))
        try:
            with contextlib.suppress(ConnectionError):
                while left > 0 and (data := await to_reader.read(65_536)):
                    writer.write(data[:left])
                    await writer.drain()
                    left -= len(data)
        finally:
            up.cancel()
            writer.transport.abort()
            to_writer.transport.abort()

"""A broker inside another program: started and stopped in its event loop, leaving nothing behind, and failing cleanly."""

from __future__ import annotations

import asyncio
import gc
import socket
from pathlib import Path

import pytest

from nearcast.broker.process import Broker
from nearcast.config import BrokerConfig, Listener, Observability, Persistence
from nearcast.errors import ConfigError
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Verdict
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import Auth, ConnAck, Connect, Packet, Properties
from tests.unit.broker.fakes import in_loop


class Streams:
    """A client on asyncio streams."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._packets = PacketReader(5, 1_000_000)
        self._received: list[Packet] = []

    @classmethod
    async def to(cls, broker: Broker) -> Streams:
        return cls(*await asyncio.open_connection("127.0.0.1", broker.listeners[0].port))

    async def ask(self, packet: Packet) -> Packet | None:
        self._writer.write(encode(packet, 5))
        while not self._received:
            data = await self._reader.read(65_536)
            if not data:
                return None
            self._received.extend(self._packets.feed(data))
        return self._received.pop(0)

    async def ended(self) -> None:
        while await self._reader.read(65_536):
            pass
        self._writer.close()
        await self._writer.wait_closed()


@in_loop
async def test_start_serve_stop() -> None:
    thresholds = gc.get_threshold()
    broker = Broker(BrokerConfig(listeners=(Listener(port=0),), observability=Observability(http_port=0)))
    await broker.start()
    client = await Streams.to(broker)
    assert isinstance(await client.ask(Connect("c")), ConnAck)
    await asyncio.gather(broker.stop(), client.ended())
    assert broker.handles == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert gc.get_threshold() == thresholds
    await broker.stop()


@in_loop
async def test_a_failed_start_leaves_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        listeners = (Listener(port=0), Listener(kind="unix", path=str(tmp_path / "s")), Listener(port=taken.getsockname()[1]))
        config = BrokerConfig(
            listeners=listeners,
            persistence=Persistence(directory=str(tmp_path / "data")),
            observability=Observability(http_port=0),
        )
        for _ in range(2):  # the second time finds the data directory unlocked and no socket file in the way
            broker = Broker(config)
            with pytest.raises(ConfigError, match="Address already in use"):
                await broker.start()
            assert not (tmp_path / "s").exists()
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Riddle:
    """The documented shape of an enhanced authentication method: an exchange per client, one verdict per step."""

    def start(self, credentials: Credentials) -> Riddle:
        return self

    def step(self, data: bytes) -> Verdict:
        if data == b"":
            return Verdict(False, reasons.CONTINUE_AUTHENTICATION, continue_data=b"what has keys and opens no lock?")
        if data == b"a piano":
            return Verdict(True, username="pianist", data=b"well done")
        return Verdict(False, reasons.NOT_AUTHORIZED, "no")


@in_loop
async def test_a_registered_method_authenticates_clients() -> None:
    broker = Broker(BrokerConfig(listeners=(Listener(port=0),)))
    broker.register_method("riddle", Riddle())
    await broker.start()

    clients: list[Streams] = []

    async def attempt(answer: bytes) -> ConnAck:
        client = await Streams.to(broker)
        clients.append(client)
        challenge = await client.ask(
            Connect("c", properties=Properties(authentication_method="riddle", authentication_data=b""))
        )
        assert isinstance(challenge, Auth)
        assert challenge.properties is not None
        assert challenge.properties.authentication_data == b"what has keys and opens no lock?"
        properties = Properties(authentication_method="riddle", authentication_data=answer)
        verdict = await client.ask(Auth(reasons.CONTINUE_AUTHENTICATION, properties))
        assert isinstance(verdict, ConnAck)
        return verdict

    accepted = await attempt(b"a piano")
    assert accepted.reason_code == reasons.SUCCESS
    assert accepted.properties is not None
    assert accepted.properties.authentication_data == b"well done"
    assert [handle.connection.username for handle in broker.handles if handle.connection is not None] == ["pianist"]
    assert (await attempt(b"a map")).reason_code == reasons.NOT_AUTHORIZED
    await asyncio.gather(broker.stop(), *(client.ended() for client in clients))

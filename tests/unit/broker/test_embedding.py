"""A broker inside another program: started and stopped in its event loop, leaving nothing behind, and failing cleanly."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
from pathlib import Path

import pytest

from nearcast.broker import journal as journal_module
from nearcast.broker.process import Broker
from nearcast.config import BrokerConfig, Limits, Listener, Observability, Persistence
from nearcast.errors import ConfigError
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Credentials, Verdict
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import Auth, ConnAck, Connect, Packet, Properties, Publish
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


@in_loop
async def test_a_start_that_fails_after_the_journal_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Broker, now: float) -> None:
        raise RuntimeError("no figures today")

    config = BrokerConfig(
        listeners=(Listener(kind="unix", path=str(tmp_path / "s")),), persistence=Persistence(directory=str(tmp_path / "data"))
    )
    monkeypatch.setattr(Broker, "_update_sys_topics", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no figures today"):
            await Broker(config).start()
        assert not (tmp_path / "s").exists()
    assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("max_topic_levels", [1, 4])
@in_loop
async def test_few_topic_levels_do_not_keep_a_broker_from_starting(max_topic_levels: int) -> None:
    broker = Broker(BrokerConfig(listeners=(Listener(port=0),), limits=Limits(max_topic_levels=max_topic_levels)))
    await broker.start()
    await broker.stop()


@in_loop
async def test_a_disk_that_fails_closes_everything_also_without_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = BrokerConfig(
        listeners=(Listener(port=0), Listener(kind="unix", path=str(tmp_path / "s"))),
        persistence=Persistence(directory=str(tmp_path / "data"), sync="os"),
    )
    broker = Broker(config)
    await broker.start()
    port = broker.listeners[0].port
    bystander, client = await Streams.to(broker), await Streams.to(broker)
    assert isinstance(await bystander.ask(Connect("bystander")), ConnAck)
    assert isinstance(await client.ask(Connect("c")), ConnAck)

    def full(descriptor: int, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(journal_module, "os", _Os(write=full))
        answer = await client.ask(Publish("t", b"x", qos=1, packet_id=1, retain=True))
        assert answer is None, "neither acknowledged nor kept open"
        await asyncio.gather(bystander.ended(), client.ended())
    assert broker.health()["ok"] is False
    assert not (tmp_path / "s").exists()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    await broker.stop()
    assert broker.handles == set()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    again = Broker(config)  # the directory is unlocked
    await again.start()
    await again.stop()


@in_loop
async def test_a_reload_that_is_refused_changes_nothing_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    def reload_config() -> BrokerConfig:
        raise ValueError("embedded null byte")

    config = BrokerConfig(listeners=(Listener(port=0),))
    broker = Broker(config, reload_config=reload_config)
    await broker.start()
    caplog.clear()
    broker.reload()
    assert [record.getMessage() for record in caplog.records] == ["reload refused, the old configuration stays"]
    assert broker.config is config
    await broker.stop()


class _Os:
    """The ``os`` module with some functions replaced, for one module alone."""

    def __init__(self, **functions: object) -> None:
        self.__dict__.update({name: getattr(os, name) for name in dir(os)} | functions)


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

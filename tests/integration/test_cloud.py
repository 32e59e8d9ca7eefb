"""The way to the cloud on a real socket: Mosquitto as the cloud, restarted, with TLS, with a password, and gone."""

from __future__ import annotations

import asyncio
import contextlib
import random
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from nearcast.broker.cloud import CloudSocket, cloud_address, read_password
from nearcast.config import Limits
from nearcast.errors import ConfigError
from nearcast.fabric.cloud import Cloud
from nearcast.fabric.identities import Identity
from nearcast.fabricconfig import Groups
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import build
from nearcast.serving.logs import TextFormatter
from tests.integration.broker.running import PATIENCE_SECONDS, Authority
from tests.integration.clouds import MosquittoCloud
from tests.integration.tools import require
from tests.unit.fabric.clouds import SECRET, Owner

VERSIONS = ["5", "3.1.1"]


class Leader:
    """A broker's way to the cloud in this process: the machine, its socket, and what a process does after every event."""

    def __init__(self, name: str, url: str, **settings: Any) -> None:
        self.loop = asyncio.get_running_loop()
        self.name = name
        self.owner = Owner()
        self.effects = Effects(False)
        groups = Groups(cloud=url, **settings)
        self.cloud = Cloud(self.owner, groups, name, Limits(), self.effects, SECRET, random.Random(), self.loop.time())
        self.socket = CloudSocket(self.cloud, groups, self.loop.time, self.flush)
        self.changed = asyncio.Event()
        self.sequence = 0
        self._timer: asyncio.TimerHandle | None = None

    def flush(self) -> None:
        dirty, self.effects.dirty = self.effects.dirty, []
        for connection in dirty:
            connection.dirty = False
            handle: Any = connection.handle
            chunks = connection.take()
            if chunks:
                handle.send(chunks)
            if connection.closing:
                handle.close()
        self.socket.dial()
        self.changed.set()
        if self._timer is not None:
            self._timer.cancel()
        due = self.cloud.next_deadline()
        self._timer = self.loop.call_at(due, self._tick) if due < float("inf") else None

    def _tick(self) -> None:
        self.cloud.tick(self.loop.time())
        self.flush()

    def want(self, *filters: str) -> None:
        self.cloud.want(True, self.loop.time())
        self.cloud.change_filters(dict.fromkeys(filters, 2), 1, self.loop.time())
        self.flush()

    def relay(self, topic: str, payload: bytes, qos: int, retain: bool = False) -> None:
        self.sequence += 1
        identity = Identity(self.name, 7, self.sequence, leader=self.name)
        publication = build(topic.encode(), payload, qos, retain)
        self.cloud.relay(publication, 0, identity, self.sequence, self.loop.time())
        self.flush()

    def mark(self, token: int) -> None:
        self.cloud.mark(token, self.loop.time())
        self.flush()

    async def until(self, what: str, condition: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_SECONDS):
                while not condition():
                    self.changed.clear()
                    await self.changed.wait()
        except TimeoutError:
            pytest.fail(f"{self.name}: {what} did not come about: {self.cloud.state} {self.cloud.problem}")

    async def subscribed(self) -> None:
        await self.until("its subscriptions", lambda: self.cloud.connected and bool(self.owner.versions))

    async def has(self, count: int) -> list[bytes]:
        await self.until(f"{count} messages", lambda: len(self.owner.messages) >= count)
        return [payload for _, payload, _ in self.owner.messages]

    async def stop(self) -> None:
        self.socket.say_goodbye()
        await self.socket.ended()
        if self._timer is not None:
            self._timer.cancel()

    def crash(self) -> None:
        """As a process that is killed: nothing is said any more."""
        self.socket.cut()
        if self._timer is not None:
            self._timer.cancel()


@contextlib.asynccontextmanager
async def leaders(url: str, names: str, *filters: str, **settings: Any) -> AsyncIterator[list[Leader]]:
    made = [Leader(name, url, **settings) for name in names]
    try:
        for leader in made:
            leader.want(*filters)
        for leader in made:
            await leader.subscribed()
        yield made
    finally:
        for leader in made:
            await leader.stop()


@pytest.fixture
def mosquitto(tmp_path: Path) -> MosquittoCloud:
    require("mosquitto")
    return MosquittoCloud(tmp_path)


@pytest.mark.parametrize("version", VERSIONS)
def test_messages_go_through_mosquitto_once_at_each_qos(mosquitto: MosquittoCloud, version: str) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "ab", "x/#", cloud_version=version) as (a, b):
            for number in range(300):
                a.relay(f"x/{number % 3}", b"%d" % number, number % 3)
            assert sorted(await b.has(300)) == sorted(b"%d" % number for number in range(300))
            await a.until("all confirmed", lambda: len(a.owner.confirmed) == 300)
            assert all(accepted for _, accepted in a.owner.confirmed)
            b.mark(1)
            await b.until("the marker", lambda: b.owner.marks == [1])
            assert len(b.owner.messages) == 300
            a.mark(1)
            await a.until("the marker", lambda: a.owner.marks == [1])
            assert a.owner.messages == []

    with mosquitto:
        asyncio.run(run())


def test_overlapping_filters_bring_a_bystanders_message_once(mosquitto: MosquittoCloud) -> None:
    """Mosquitto sends a copy for each subscription that matches."""

    async def run() -> None:
        async with leaders(mosquitto.url, "a", "x/+", "+/y") as (a,):
            await publish(mosquitto, "x/y", "once")
            a.mark(1)
            await a.until("the marker", lambda: a.owner.marks == [1])
            assert [(topic, payload) for topic, payload, _ in a.owner.messages] == [("x/y", b"once")]
            assert a.cloud.copies == 1

    with mosquitto:
        asyncio.run(run())


def test_retained_messages_of_ours_and_of_others(mosquitto: MosquittoCloud) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "a") as (a,):
            a.relay("x/1", b"ours", 1, retain=True)
            await a.until("confirmation", lambda: bool(a.owner.confirmed))
            await publish(mosquitto, "x/2", "theirs", "-r")
            async with leaders(mosquitto.url, "b", "x/#") as (b,):
                await b.has(2)
                found = {topic: (payload, repr(identity)) for topic, payload, identity in b.owner.messages}
                assert found == {"x/1": (b"ours", "a/7/1"), "x/2": (b"theirs", "None")}
                assert all(publication.retain for publication in b.owner.publications)

    with mosquitto:
        asyncio.run(run())


@pytest.mark.parametrize("version", VERSIONS)
def test_the_session_is_kept_over_a_restart_of_mosquitto(mosquitto: MosquittoCloud, version: str) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "ab", "x/#", cloud_version=version) as (a, b):
            for number in range(50):
                a.relay("x/1", b"%d" % number, number % 2 + 1)
            await asyncio.to_thread(mosquitto.restart)
            for number in range(50, 100):
                a.relay("x/1", b"%d" % number, number % 2 + 1)
            await a.until("all confirmed", lambda: len(a.owner.confirmed) == 100)
            await b.until("a new connection", lambda: len(b.owner.connections) >= 2)
            assert b.owner.connections[-1]
            # At QoS 1 some may come twice.
            expected = {b"%d" % number for number in range(100)}
            await b.until("each message", lambda: {payload for _, payload, _ in b.owner.messages} == expected)

    with mosquitto:
        asyncio.run(run())


def test_two_brokers_of_one_name_are_suspected(mosquitto: MosquittoCloud, caplog: pytest.LogCaptureFixture) -> None:
    """They take the session from each other, and Mosquitto does not say so."""

    async def run() -> None:
        twins = [Leader("twin", mosquitto.url) for _ in range(2)]
        for twin in twins:
            twin.want("x/#")
        await twins[0].until("the suspicion", lambda: "has another broker the same name?" in caplog.text)
        for twin in twins:
            await twin.stop()

    caplog.handler.setFormatter(TextFormatter())
    with mosquitto:
        asyncio.run(run())


def test_qos_2_after_a_crash_of_ours_is_not_taken_for_a_repetition(mosquitto: MosquittoCloud) -> None:
    """Identifiers that a process left half-way are released before they are used again. Mosquitto compares the content as
    well, so only equal messages show it."""

    async def run() -> None:
        async with leaders(mosquitto.url, "b", "x/#") as (b,):
            a = Leader("a", mosquitto.url)
            a.want()
            await a.subscribed()
            assert a.socket.transport is not None
            a.socket.transport.pause_reading()  # no PUBREC is heard, so no PUBREL is sent
            for _ in range(10):
                a.relay("x/1", b"the same", 2)
            a.relay("x/1", b"behind them", 1)
            assert await b.has(1) == [b"behind them"]
            a.crash()
            again = Leader("a", mosquitto.url)
            again.want()
            await again.subscribed()
            assert again.owner.connections == [True]
            for _ in range(30):
                again.relay("x/1", b"the same", 2)
            await again.until("all confirmed", lambda: len(again.owner.confirmed) == 30)
            again.relay("x/1", b"the last", 2)
            await b.until("the last", lambda: b.owner.messages[-1][1] == b"the last")
            # What was half-way is released, too: its identity says that it is another message.
            received = [payload for _, payload, _ in b.owner.messages]
            assert received == [b"behind them", *[b"the same"] * 40, b"the last"]
            await again.stop()

    with mosquitto:
        asyncio.run(run())


def test_what_came_while_a_broker_was_down_is_there_when_it_is_back(mosquitto: MosquittoCloud) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "a") as (a,):
            b = Leader("b", mosquitto.url)
            b.want("x/#")
            await b.subscribed()
            b.crash()
            for number in range(100):
                a.relay("x/1", b"%d" % number, number % 2 + 1)
            await a.until("all confirmed", lambda: len(a.owner.confirmed) == 100)
            again = Leader("b", mosquitto.url)
            again.want()
            again.mark(1)
            await again.until("the marker", lambda: again.owner.marks == [1])
            assert again.owner.connections == [True]
            numbers = [int(payload) for _, payload, _ in again.owner.messages]
            # Order holds for each QoS.
            assert [number for number in numbers if number % 2 == 0] == list(range(0, 100, 2))
            assert [number for number in numbers if number % 2 == 1] == list(range(1, 100, 2))
            await again.stop()

    with mosquitto:
        asyncio.run(run())


def test_a_cloud_that_is_not_there_is_waited_for(mosquitto: MosquittoCloud) -> None:
    async def run() -> None:
        a = Leader("a", mosquitto.url)
        a.want("x/#")
        await a.until("a reason", lambda: a.cloud.problem == "nothing listens there")
        await asyncio.to_thread(mosquitto.start)
        await a.subscribed()
        assert a.cloud.problem == ""
        await a.stop()

    try:
        asyncio.run(run())
    finally:
        mosquitto.stop()


def test_passwords_and_tls(tmp_path: Path) -> None:
    require("mosquitto")
    authority = Authority(tmp_path)
    certificate, key = authority.issue("localhost", "cloud")
    passwords = tmp_path / "passwords"
    subprocess.run([require("mosquitto_passwd"), "-b", "-c", passwords, "fog", "secret"], check=True)
    cloud = MosquittoCloud(tmp_path)
    lines = [
        f"listener {cloud.port} localhost",
        f"cafile {authority.certificate}",
        f"certfile {certificate}",
        f"keyfile {key}",
        f"password_file {passwords}",
        "user root",
    ]
    cloud._config_path.write_text("\n".join(lines) + "\n")
    secret = tmp_path / "secret"
    secret.write_text("secret\n")
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong\n")
    url = f"mqtts://localhost:{cloud.port}"
    trusted = {"cloud_ca_file": str(authority.certificate), "cloud_username": "fog"}

    async def run() -> None:
        stranger = Leader("a", url, cloud_username="fog", cloud_password_file=str(secret))
        stranger.want()
        await stranger.until("distrust", lambda: "cloud_ca_file" in stranger.cloud.problem)
        stranger.crash()
        refused = Leader("a", url, cloud_password_file=str(wrong), **trusted)
        refused.want()
        await refused.until("refusal", lambda: "not authorized" in refused.cloud.problem.lower())
        refused.crash()
        async with leaders(url, "a", "x/#", cloud_password_file=str(secret), **trusted):
            pass

    with cloud:
        asyncio.run(run())


def test_markers_that_access_rules_keep_back_hold_nobody_up(mosquitto: MosquittoCloud, tmp_path: Path) -> None:
    rules = tmp_path / "rules"
    rules.write_text("topic readwrite x/#\ntopic readwrite nearcast/leaders/#\ntopic readwrite nearcast/filters/#\n")
    with mosquitto._config_path.open("a") as config:
        config.write(f"acl_file {rules}\n")

    async def run() -> None:
        async with leaders(mosquitto.url, "a", "x/#") as (a,):
            a.mark(1)
            await a.until("to be let go", lambda: a.owner.marks == [1])
            assert a.cloud.markers_problem.endswith("let this broker publish and subscribe to 'nearcast/marks/a' there")

    with mosquitto:
        asyncio.run(run())


@pytest.mark.parametrize("highest", [0, 1])
def test_a_cloud_that_comes_back_with_less_qos(mosquitto: MosquittoCloud, highest: int) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "ab", "x/#") as (a, b):
            await asyncio.to_thread(mosquitto.stop)
            await a.until("the loss", lambda: not a.cloud.connected)
            for number in range(20):
                a.relay("x/1", b"%d" % number, 2)
            with mosquitto._config_path.open("a") as config:
                config.write(f"max_qos {highest}\n")
            await b.until("the loss", lambda: not b.cloud.connected)
            await asyncio.to_thread(mosquitto.start)
            await a.until("all confirmed", lambda: len(a.owner.confirmed) == 20)
            assert all(accepted for _, accepted in a.owner.confirmed)
            if highest:  # what is QoS 0 now may have passed before the other was back
                assert await b.has(20) == [b"%d" % number for number in range(20)]

    with mosquitto:
        asyncio.run(run())


def test_a_message_with_very_many_properties_does_not_come_again_and_again(mosquitto: MosquittoCloud) -> None:
    async def run() -> None:
        async with leaders(mosquitto.url, "a", "x/#") as (a,):
            await publish(mosquitto, "x/1", "many", "-V", "5", *["-D", "publish", "user-property", "k", "v"] * 1_500)
            await publish(mosquitto, "x/1", "next")
            assert await a.has(2) == [b"many", b"next"]
            assert a.cloud.connects == 1

    with mosquitto:
        asyncio.run(run())


def test_a_host_name_that_cannot_be_one_is_told() -> None:
    async def run() -> None:
        a = Leader("a", f"mqtt://{'a' * 64}.example")
        a.want()
        await a.until("a reason", lambda: a.cloud.problem == "its host name is none")
        a.crash()

    asyncio.run(run())


async def publish(cloud: MosquittoCloud, topic: str, payload: str, *options: str) -> None:
    command = [str(require("mosquitto_pub")), "-h", "127.0.0.1", "-p", str(cloud.port), "-q", "1", "-t", topic, "-m", payload]
    await asyncio.to_thread(subprocess.run, [*command, *options], check=True)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mqtt://", "write mqtt://host:port"),
        ("mqtt://host:0", "write mqtt://host:port"),
        ("mqtt://host:99999", "is not a URL"),
        ("mqtt://fog:secret@host", "cloud_password_file"),
        ("mqtt://host/topic", "no path"),
    ],
)
def test_a_url_that_is_no_cloud(url: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        cloud_address(Groups(cloud=url))
    assert "secret" not in str(caught.value)


def test_addresses_of_clouds() -> None:
    assert cloud_address(Groups(cloud="mqtt://cloud.example")) == ("cloud.example", 1883, False)
    assert cloud_address(Groups(cloud="mqtts://[::1]")) == ("::1", 8883, True)


def test_passwords_from_files(tmp_path: Path) -> None:
    path = tmp_path / "password"
    path.write_bytes(b"secret\r\nand nothing else\n")
    assert read_password(str(path)) == b"secret"
    path.write_bytes(b"\n")
    with pytest.raises(ConfigError, match="first line"):
        read_password(str(path))
    with pytest.raises(ConfigError, match="cannot read"):
        read_password(str(tmp_path / "missing"))

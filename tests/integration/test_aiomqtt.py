"""aiomqtt, the asyncio client of many Home Assistant and FastAPI programs."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import Any

import aiomqtt
import pytest
from aiomqtt import Client, ProtocolVersion, Will
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker

pytestmark = pytest.mark.integration

both_versions = pytest.mark.parametrize("version", [ProtocolVersion.V311, ProtocolVersion.V5], ids=["3.1.1", "5.0"])


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory) as running:
        yield running


def run(scenario: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_SECONDS):
            await scenario

    asyncio.run(bounded())


async def take(client: Client, count: int) -> list[aiomqtt.Message]:
    found: list[aiomqtt.Message] = []
    async for message in client.messages:
        found.append(message)
        if len(found) == count:
            break
    return found


@both_versions
def test_every_qos(broker: NearcastBroker, version: ProtocolVersion) -> None:
    async def scenario() -> None:
        async with Client("127.0.0.1", broker.port(), protocol=version) as client:
            for qos in (0, 1, 2):
                await client.subscribe(f"aio/{qos}", qos)
                await asyncio.gather(*(client.publish(f"aio/{qos}", b"%d" % number, qos) for number in range(50)))
                received = await take(client, 50)
                assert {message.qos for message in received} == {qos}
                assert sorted(int(bytes(message.payload)) for message in received) == list(range(50))
                await client.unsubscribe(f"aio/{qos}")
                await client.publish(f"aio/{qos}", b"unwanted", qos)
            await client.subscribe("aio/last")
            await client.publish("aio/last", b"last")
            assert [message.payload for message in await take(client, 1)] == [b"last"]

    run(scenario())


@both_versions
def test_retained_and_will(broker: NearcastBroker, version: ProtocolVersion) -> None:
    async def scenario() -> None:
        topic = f"aio/state/{version.value}"
        will = Will(topic, b"offline", qos=1, retain=True)
        async with Client("127.0.0.1", broker.port(), protocol=version) as witness:
            await witness.subscribe(topic, 1)
            with pytest.raises(aiomqtt.MqttError):  # noqa: PT012  the error comes at the end of the inner block
                async with Client("127.0.0.1", broker.port(), protocol=version, will=will, identifier=topic) as device:
                    await device.publish(topic, b"online", 1, retain=True)
                    # Taken over, so that its connection ends without its own DISCONNECT.
                    async with Client("127.0.0.1", broker.port(), protocol=version, identifier=topic):
                        await take(device, 1)
            assert [message.payload for message in await take(witness, 2)] == [b"online", b"offline"]
        async with Client("127.0.0.1", broker.port(), protocol=version) as late:
            await late.subscribe(topic, 1)
            (kept,) = await take(late, 1)
            assert (kept.payload, kept.retain) == (b"offline", True)

    run(scenario())


@both_versions
def test_a_session_is_resumed(broker: NearcastBroker, version: ProtocolVersion) -> None:
    def connect() -> Client:
        options: dict[str, Any] = {"protocol": version, "identifier": f"aio-sleeper-{version.value}"}
        if version == ProtocolVersion.V5:
            keep = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]
            keep.SessionExpiryInterval = 1_000
            options |= {"clean_start": False, "properties": keep}
        else:
            options["clean_session"] = False
        return Client("127.0.0.1", broker.port(), **options)

    async def scenario() -> None:
        async with connect() as sleeper:
            await sleeper.subscribe("aio/queue/#", 2)
        async with Client("127.0.0.1", broker.port(), protocol=version) as publisher:
            for number in range(20):
                await publisher.publish(f"aio/queue/{1 + number % 2}", b"%d" % number, 1 + number % 2)
        async with connect() as sleeper:
            received = await take(sleeper, 20)
            for qos in (1, 2):
                numbers = [int(bytes(message.payload)) for message in received if message.qos == qos]
                assert numbers == list(range(qos - 1, 20, 2))

    run(scenario())


def test_a_filtered_stream_and_properties(broker: NearcastBroker) -> None:
    async def scenario() -> None:
        async with Client("127.0.0.1", broker.port(), protocol=ProtocolVersion.V5) as client:
            await client.subscribe("aio/rooms/+/temperature")
            marked = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
            marked.UserProperty = [("unit", "°C")]
            marked.ContentType = "text/plain"
            for room in ("kitchen", "attic"):
                await client.publish(f"aio/rooms/{room}/humidity", "40")
                await client.publish(f"aio/rooms/{room}/temperature", "21.5", properties=marked)
            received = await take(client, 2)
            assert [str(message.topic) for message in received] == [
                "aio/rooms/kitchen/temperature",
                "aio/rooms/attic/temperature",
            ]
            for message in received:
                got: Any = message.properties
                assert (got.UserProperty, got.ContentType) == ([("unit", "°C")], "text/plain")

    run(scenario())


def test_every_connection_is_let_go(broker: NearcastBroker) -> None:
    wait_for("the end of every connection", lambda: broker.metric("connections") == 0)

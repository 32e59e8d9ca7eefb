"""What the native client promises, with every broker it is promised for: one suite, Mosquitto and our own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

import nearcast.client.sync
from nearcast.client import Backoff, Client, Message, Properties, Will
from nearcast.errors import ConnectionClosed
from tests.contract.brokers import Broker, Mosquitto, Nearcast, nearcast_available

pytestmark = pytest.mark.integration

versions = pytest.mark.parametrize("version", [4, 5])
levels = pytest.mark.parametrize("qos", [0, 1, 2])

PROMPT = Backoff(initial_seconds=0.02, max_seconds=0.2)


@pytest.fixture(
    scope="module",
    params=[
        Mosquitto,
        pytest.param(Nearcast, marks=pytest.mark.skipif(not nearcast_available(), reason="nearcast.broker is not there")),
    ],
)
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    kind: Callable[[Path], Broker] = request.param
    running = kind(tmp_path_factory.mktemp("broker"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def run(scenario: Awaitable[None]) -> None:
    """Run a scenario; one that hangs fails."""

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scenario

    asyncio.run(bounded())


async def take(client: Client, count: int) -> list[Message]:
    """The next messages; fails when they do not come."""
    found: list[Message] = []
    for _ in range(count):
        message = await client.messages.get(10)
        assert message is not None, f"only {len(found)} of {count} messages came"
        found.append(message)
    return found


@versions
@levels
def test_messages_arrive_in_order(broker: Broker, version: int, qos: int) -> None:
    async def scenario() -> None:
        topic = f"order/{version}/{qos}"
        async with Client(broker.url, version=version) as sender, Client(broker.url, version=version) as receiver:
            assert await receiver.subscribe(topic, qos=qos) == [qos]
            async with asyncio.TaskGroup() as group:
                for number in range(300):
                    group.create_task(sender.publish(topic, str(number), qos))
            messages = await take(receiver, 300)
            assert [message.text for message in messages] == [str(number) for number in range(300)]
            assert {message.qos for message in messages} == {qos}
            assert len(receiver.messages) == 0

    run(scenario())


@versions
def test_retained_and_unsubscribe(broker: Broker, version: int) -> None:
    async def scenario() -> None:
        topic = f"retained/{version}"
        async with Client(broker.url, version=version) as client:
            await client.publish(topic, "kept", qos=1, retain=True)
            await client.subscribe(topic)
            (message,) = await take(client, 1)
            assert (message.text, message.retain) == ("kept", True)
            await client.unsubscribe(topic)
            await client.publish(topic, b"", qos=1, retain=True)
            await client.subscribe(topic, "marker")
            await client.publish("marker", "end")
            (message,) = await take(client, 1)
            assert message.topic == "marker", "neither the cleared message nor one for the old subscription came"

    run(scenario())


@versions
def test_a_large_message(broker: Broker, version: int) -> None:
    async def scenario() -> None:
        payload = bytes(range(256)) * 3_000
        async with Client(broker.url, version=version) as client:
            await client.subscribe("large", qos=2)
            await client.publish("large", payload, qos=2)
            (message,) = await take(client, 1)
            assert message.payload == payload

    run(scenario())


def test_properties_travel(broker: Broker) -> None:
    async def scenario() -> None:
        async with Client(broker.url) as client:
            await client.subscribe("properties")
            sent = Properties(user_properties=[("a", "1"), ("a", "2")], content_type="text/plain")
            await client.publish("properties", "x", properties=sent)
            (message,) = await take(client, 1)
            assert message.user_properties == [("a", "1"), ("a", "2")]
            assert message.properties is not None
            assert message.properties.content_type == "text/plain"

    run(scenario())


def test_topic_aliases(broker: Broker) -> None:
    async def scenario() -> None:
        async with Client(broker.url, use_topic_aliases=True) as sender, Client(broker.url) as receiver:
            await receiver.subscribe("alias/#", qos=1)
            topics = ["alias/a", "alias/b", "alias/a", "alias/b", "alias/a"] * 20
            for topic in topics:
                await sender.publish(topic, "x", qos=1)
            assert [message.topic for message in await take(receiver, len(topics))] == topics

    run(scenario())


def test_request_and_response(broker: Broker) -> None:
    async def serve(server: Client) -> None:
        async for message in server.messages:
            await server.respond(message, message.text.upper())

    async def scenario() -> None:
        async with Client(broker.url) as server, Client(broker.url) as client:
            await server.subscribe("service", qos=1)
            serving = asyncio.create_task(serve(server), name="server")
            answers = await asyncio.gather(*(client.request("service", f"number {number}") for number in range(20)))
            assert [answer.text for answer in answers] == [f"NUMBER {number}" for number in range(20)]
            assert len(client.messages) == 0, "answers do not show up as messages"
            serving.cancel()
            with pytest.raises(TimeoutError, match="no answer to 'nobody' within"):
                await client.request("nobody", "x", timeout=0.1)

    run(scenario())


@versions
def test_a_slow_reader_loses_nothing_at_qos_1(broker: Broker, version: int) -> None:
    """More messages than the stream holds wait in the broker, not in this process."""

    async def scenario() -> None:
        topic = f"slow/{version}"
        async with (
            Client(broker.url, version=version) as sender,
            Client(broker.url, version=version, max_queued_messages=10, receive_maximum=15) as receiver,
        ):
            await receiver.subscribe(topic, qos=1)
            async with asyncio.TaskGroup() as group:
                for number in range(500):
                    group.create_task(sender.publish(topic, str(number), 1))
            seen = [message.text for message in await take(receiver, 1)]
            if version == 5 and isinstance(broker, Nearcast):
                assert len(receiver.messages) <= 15
            seen += [message.text for message in await take(receiver, 499)]
            assert seen == [str(number) for number in range(500)]

    run(scenario())


def test_a_full_stream_does_not_lock_out_an_acknowledgement(broker: Broker) -> None:
    async def scenario() -> None:
        async with Client(broker.url) as sender, Client(broker.url, max_queued_messages=5) as receiver:
            await receiver.subscribe("flood")
            for number in range(200):
                await sender.publish("flood", str(number))
            await sender.publish("flood", "last", qos=1)
            await take(receiver, 1)
            await receiver.publish("elsewhere", "answer", qos=2)
            messages = await take(receiver, 200)
            assert messages[-1].text == "last"
            assert receiver.messages.dropped == 0

    run(scenario())


def test_the_will_is_published_when_a_client_vanishes(broker: Broker) -> None:
    async def scenario() -> None:
        async with Client(broker.url) as observer:
            await observer.subscribe("will")
            vanishing = Client(broker.url, client_id="mortal", will=Will("will", b"gone"), reconnect=False)
            async with vanishing:
                async with Client(broker.url, client_id="mortal"):  # taking over ends the first without its DISCONNECT
                    (message,) = await take(observer, 1)
                    assert message.payload == b"gone"
                with pytest.raises(ConnectionClosed):
                    await vanishing.publish("x", qos=1)

    run(scenario())


def test_being_taken_over_is_not_answered_by_reconnecting(broker: Broker) -> None:
    if isinstance(broker, Mosquitto):
        pytest.skip("Mosquitto 2.0.11 closes the connection without a DISCONNECT that says why")

    async def scenario() -> None:
        async with Client(broker.url, client_id="twin", reconnect=PROMPT) as first, Client(broker.url, client_id="twin"):
            with pytest.raises(ConnectionClosed, match="taken over"):
                await first.messages.get(10)

    run(scenario())


@versions
def test_a_session_is_found_again_by_its_name(broker: Broker, version: int) -> None:
    async def scenario() -> None:
        name, topic = f"sleeper-{version}", f"sleep/{version}"

        def sleeper() -> Client:
            return Client(broker.url, client_id=name, version=version, clean_start=False, session_expiry_seconds=600)

        async with sleeper() as client:
            await client.subscribe(topic, qos=1)
        async with Client(broker.url, version=version) as sender:
            await sender.publish(topic, "while asleep", qos=1)
        async with sleeper() as client:
            (message,) = await take(client, 1)
            assert message.text == "while asleep"
        async with Client(broker.url, client_id=name, version=version):
            pass  # a clean start clears it

    run(scenario())


@versions
def test_reconnection_after_a_restart(broker: Broker, version: int) -> None:
    """The restarted broker knows nothing: subscriptions are made again, and waiting publishes get through."""

    async def scenario() -> None:
        topic = f"restart/{version}"
        async with (
            Client(broker.url, version=version, reconnect=PROMPT) as sender,
            Client(broker.url, version=version, reconnect=PROMPT) as receiver,
        ):
            await receiver.subscribe(topic, qos=2)
            await sender.publish(topic, "before", qos=2)
            assert [message.text for message in await take(receiver, 1)] == ["before"]
            await asyncio.to_thread(broker.stop)
            waiting = asyncio.create_task(sender.publish("other", "during", qos=1), name="publish during the outage")
            await asyncio.to_thread(broker.start)
            await waiting
            await receiver.wait_connected()
            await receiver.subscribe("barrier", qos=1)  # answered after the subscriptions that were restored before it
            await sender.publish(topic, "after", qos=2)
            assert [message.text for message in await take(receiver, 1)] == ["after"]

    run(scenario())


def test_without_reconnection_the_loss_is_told(broker: Broker) -> None:
    async def scenario() -> None:
        async with Client(broker.url, reconnect=False) as client:
            await asyncio.to_thread(broker.restart)
            with pytest.raises(ConnectionClosed):
                await client.messages.get(10)
            with pytest.raises(ConnectionClosed):
                await client.publish("x", qos=0)
            with pytest.raises(ConnectionClosed):
                await client.subscribe("x")

    run(scenario())


def test_closing_ends_the_stream_and_its_waiters(broker: Broker) -> None:
    async def read(client: Client) -> int:
        return len([message async for message in client.messages])

    async def scenario() -> None:
        async with Client(broker.url) as client:
            reading = asyncio.create_task(read(client), name="reader")
            await client.publish("x", qos=1)
        assert await reading == 0
        with pytest.raises(ConnectionClosed, match="this client is closed"):
            await client.publish("x", qos=1)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    run(scenario())


def test_cancellation_passes_through(broker: Broker) -> None:
    async def scenario() -> None:
        entered = asyncio.Event()

        async def wait_for_ever() -> None:
            async with Client(broker.url) as client:
                entered.set()
                async for _ in client.messages:
                    pass

        task = asyncio.create_task(wait_for_ever(), name="reader")
        await entered.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    run(scenario())


def test_the_synchronous_face(broker: Broker) -> None:
    with nearcast.client.sync.connect(broker.url) as client:
        assert client.subscribe("sync/#", qos=1) == [1]
        for number in range(5):
            client.publish("sync/a", str(number), qos=1)
        seen = []
        for message in client.messages(timeout=10):
            seen.append(message.text)
            if len(seen) == 5:
                break
        assert seen == ["0", "1", "2", "3", "4"]
        assert client.get(timeout=0) is None
    with pytest.raises(ConnectionClosed):
        client.publish("sync/a", "x")

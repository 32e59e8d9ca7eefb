"""The stream of received messages."""

from __future__ import annotations

import asyncio

import pytest

from nearcast.client.messages import Message, MessageStream
from nearcast.errors import ConnectionClosed
from nearcast.mqtt.packets import Properties, Publish


def message(number: int) -> Message:
    return Message(Publish("t", b"%d" % number))


def test_message_shows_what_its_packet_says() -> None:
    properties = Properties(response_topic="r", correlation_data=b"c", user_properties=[("k", "v")])
    shown = Message(Publish("t", b"\xff", 1, True, properties=properties))
    assert (shown.text, shown.response_topic, shown.correlation_data) == ("�", "r", b"c")
    assert shown.user_properties == [("k", "v")]
    assert message(1).user_properties == []
    assert repr(shown) == "Message('t', b'\\xff', qos=1, retain=True)"


def test_messages_come_in_order_and_are_reported_as_taken() -> None:
    async def scenario() -> None:
        taken: list[Message] = []
        stream = MessageStream(taken.append)
        for number in range(3):
            stream.put(message(number))
        assert len(stream) == 3
        stream.end(None)
        seen = [entry async for entry in stream]
        assert [entry.text for entry in seen] == ["0", "1", "2"]
        assert taken == seen

    asyncio.run(scenario())


def test_what_is_left_comes_before_the_failure() -> None:
    async def scenario() -> None:
        stream = MessageStream(lambda _: None)
        stream.put(message(0))
        stream.end(ConnectionClosed("over"))
        assert await stream.get() is not None
        with pytest.raises(ConnectionClosed, match="over"):
            await stream.get()

    asyncio.run(scenario())


def test_each_message_goes_to_one_reader() -> None:
    async def scenario() -> None:
        stream = MessageStream(lambda _: None)
        readers = [asyncio.create_task(stream.get(), name=f"reader {number}") for number in range(3)]
        await asyncio.sleep(0)
        stream.put(message(0))
        stream.put(message(1))
        stream.end(None)
        results = [await reader for reader in readers]
        assert sorted(entry.text for entry in results if entry is not None) == ["0", "1"]
        assert results.count(None) == 1

    asyncio.run(scenario())


def test_a_cancelled_reader_passes_its_wakeup_on() -> None:
    async def scenario() -> None:
        stream = MessageStream(lambda _: None)
        first = asyncio.create_task(stream.get(), name="first")
        second = asyncio.create_task(stream.get(), name="second")
        await asyncio.sleep(0)
        stream.put(message(0))
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        async with asyncio.timeout(5):
            assert (await second) is not None

    asyncio.run(scenario())


def test_a_timeout_is_no_message() -> None:
    async def scenario() -> None:
        assert await MessageStream(lambda _: None).get(timeout=0) is None

    asyncio.run(scenario())

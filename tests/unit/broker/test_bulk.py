"""The bulk port over real sockets: who gets in, what is answered, what a hostile, slow or vanishing peer costs."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nearcast.broker import bulk
from nearcast.broker.passwords import ScryptVerifier, store_user
from nearcast.broker.topic_keeping import Run
from nearcast.client import BlockingTopics, MissingRecords, Properties, Retention, Topics
from nearcast.config import AccessRule, Listener, Security, TopicLogSettings, TopicRule
from nearcast.errors import ConnectionRefused, RecordUnavailable, RemoteProtocolError, RequestRefused, TopicUnknown
from nearcast.topiclog import wire
from nearcast.topiclog.topics import Extents
from tests.bulk_harness import Relay, Wire, broker, bulk_port, connected, fill, url
from tests.unit.broker.fakes import in_loop

OPEN = (Listener(port=0), Listener(kind="bulk", port=0))


@in_loop
async def test_topics_are_created_published_to_listed_and_read(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        assert await topics.create_topic("new/#", Retention(max_records=100))
        assert not await topics.create_topic("new/#", Retention(max_records=100))
        assert await topics.tap("tapped")
        assert [(rule.topic, rule.mode) for rule in await topics.rules()] == [
            ("a/#", "durable"),
            ("new/#", "durable"),
            ("tapped", "tap"),
        ]
        properties = Properties(content_type="text/plain", user_properties=[("k", "v"), ("k", "w")])
        assert await topics.publish("new/x", "one", properties=properties, retain=True) == 1
        assert await topics.publish_many("new/x", [b"two", b"three"]) == 2
        record = await topics.get("new/x", 1)
        assert (record.topic, record.index, record.payload, record.qos, record.retain) == ("new/x", 1, b"one", 1, True)
        assert (record.content_type, record.user_properties) == ("text/plain", [("k", "v"), ("k", "w")])
        assert record.publisher.startswith("bulk-")
        assert await topics.latest_index("new/x") == 3
        (state,) = await topics.topics("new/#")
        assert (state.topic, state.first_index, state.next_index, state.count) == ("new/x", 1, 4, 3)
        assert await topics.indexes_at("new/#", record.time_us + 1) == {"new/x": 2}
        assert [entry.text for batch in [b async for b in topics.read("new/#")] for entry in batch.records()] == [
            "one",
            "two",
            "three",
        ]
        await topics.delete_topic("new/#")
        with pytest.raises(TopicUnknown, match="no rule keeps the topic"):
            await topics.publish("new/x", b"four")


@in_loop
async def test_errors_say_what_is_wrong(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        await topics.publish("a/x", b"1")
        with pytest.raises(RecordUnavailable, match="the newest there is 1") as missing:
            await topics.get("a/x", 2)
        assert (missing.value.index, missing.value.first_index, missing.value.next_index) == (2, 1, 2)
        with pytest.raises(TopicUnknown, match="the log has no topic 'a/y'"):
            await topics.get("a/y", 1)
        with pytest.raises(TopicUnknown):
            await topics.latest_index("a/y")
        with pytest.raises(TopicUnknown, match="nearcast topic create elsewhere"):
            await topics.publish("elsewhere", b"")
        with pytest.raises(RequestRefused, match=r"larger than limits\.max_packet_bytes"):
            await topics.publish("a/x", bytes(2_000_000))
        assert await topics.latest_index("a/x") == 1, "the connection lives on after refusals"


@in_loop
async def test_a_request_that_is_too_large_is_an_error_and_not_tried_for_ever(tmp_path: Path) -> None:
    payloads = [bytes(1_000_000) for _ in range(6)]
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        with pytest.raises(RequestRefused, match="the broker takes 4,194,304"):
            await topics.publish_many("a/x", payloads)
        assert await topics.publish_many("a/x", payloads[:3]) == 1
        assert await topics.latest_index("a/x") == 3

        def blocking() -> None:
            with BlockingTopics(url(found)) as same, pytest.raises(RequestRefused, match="the broker takes 4,194,304"):
                same.publish_many("a/x", payloads)

        await asyncio.to_thread(blocking)


@in_loop
async def test_a_broker_without_a_directory_says_so(tmp_path: Path) -> None:
    from nearcast.config import Persistence

    async with broker(tmp_path, persistence=Persistence(), topics=()) as found, Topics(url(found)) as topics:
        with pytest.raises(RequestRefused, match="--data DIRECTORY"):
            await topics.topics()
        with pytest.raises(RequestRefused, match="--data DIRECTORY"):
            await topics.create_topic("x")
        with pytest.raises(RequestRefused, match="--data DIRECTORY"):
            await topics.publish("x", b"")


# --- who gets in ------------------------------------------------------------------------------------------------------------


def passwords(path: Path, **users: str) -> Path:
    for name, text in users.items():
        store_user(str(path), name, ScryptVerifier.create(text.encode(), log2_n=10))
    return path


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop run until something holds."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - what is waited for are the insides of a broker, which tell nobody
            await asyncio.sleep(0)


@in_loop
async def test_passwords_are_checked_by_the_brokers_own_rules(tmp_path: Path) -> None:
    security = Security(password_file=str(passwords(tmp_path / "users", ann="right")))
    async with broker(tmp_path / "data", security=security) as found:
        async with Topics(url(found), username="ann", password="right") as topics:
            assert await topics.topics() == []
        address = url(found).removeprefix("nearcast://")
        async with Topics(f"nearcast://ann:right@{address}") as topics:
            assert await topics.topics() == []
        for username, password in (("ann", "wrong"), ("bob", "right"), (None, None)):
            with pytest.raises(ConnectionRefused) as refused:
                await Topics(url(found), username=username, password=password).__aenter__()
            assert refused.value.reason_code in (0x86, 0x87)
        with pytest.raises(ConnectionRefused):
            await asyncio.to_thread(BlockingTopics(url(found), username="ann", password="wrong").open)


@in_loop
async def test_rules_decide_about_reading_writing_and_managing(tmp_path: Path) -> None:
    acl = (
        AccessRule(action="allow", access="subscribe", topic="a/open/#"),
        AccessRule(action="allow", access="publish", topic="a/open/w"),
        AccessRule(action="allow", access="manage", topic="mine/#"),
    )
    async with broker(tmp_path, security=Security(acl=acl)) as found, Topics(url(found)) as topics:
        assert await topics.publish("a/open/w", b"1") == 1
        assert len(await topics.topics("a/open/#")) == 1
        for refused in (
            topics.topics("a/#"),
            topics.get("a/secret", 1),
            topics.publish("a/open/other", b""),
            topics.indexes_at("a/#", 0),
            topics.create_topic("a/open/#"),
            topics.delete_topic("a/#"),
            topics.publish("$SYS/x", b""),
        ):
            with pytest.raises(RequestRefused) as error:
                await refused
            assert error.value.reason_code == 0x87
        with pytest.raises(RequestRefused, match="not allowed"):
            async for _ in topics.read("a/#"):
                pass
        assert await topics.create_topic("mine/x")


@in_loop
async def test_a_client_is_told_of_what_concerns_it(tmp_path: Path) -> None:
    acl = (
        AccessRule(action="deny", access="subscribe", topic="a/open/not"),
        AccessRule(action="allow", access="subscribe", topic="a/open/#"),
        AccessRule(action="allow", access="publish", topic="b/+"),
        AccessRule(action="allow", access="manage", topic="made/#"),
    )
    rules = tuple(TopicRule(topic=topic) for topic in ("a/open", "a/#", "b/x", "hidden/#"))
    settings = {"security": Security(acl=acl), "topics": rules}
    async with broker(tmp_path, **settings) as found, Topics(url(found)) as topics:
        for topic in ("a/open/x", "a/open/not", "a/secret", "hidden/x", "b/x"):
            await fill(found, topic, 3)
        assert [state.topic for state in await topics.topics()] == ["a/open/x"]
        await topics.create_topic("made/x")
        told = [("a/open", "config"), ("a/#", "config"), ("b/x", "config"), ("made/x", "created")]
        assert [(rule.topic, rule.origin) for rule in await topics.rules()] == told
        for shared in ("$share/g/a/open/#", "$share/g/a/open/x"):
            with pytest.raises(RequestRefused, match="not shared out"):
                await topics.topics(shared)
        async with connected(found) as client:
            answer = await client.answer(1, wire.FindIndexes([], 0))
            assert isinstance(answer, wire.Refused)


@in_loop
async def test_nothing_but_a_hello_comes_first(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        for first in (
            wire.message(1, wire.ListTopics(["#"])),
            wire.message(0, wire.Ping()),
            wire.message(0, wire.Hello(version=99)),
            wire.message(0, wire.Hello(client_id="x\0y")),
            wire.message(0, wire.Hello(client_id="x" * 2_000)),
            wire.message(0, wire.Hello()) + wire.message(0, wire.Hello()),
            wire.data_header(0, 0),
            b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
            b"\x10\x0c\x00\x04MQTT\x05\x02\x00\x3c\x00\x00",
            wire.HEADER.pack(1 << 31, wire.MESSAGE, 0),
        ):
            async with connected(found, welcome=False) as client:
                client.writer.write(first)
                assert await client.ended()
        async with Topics(url(found)) as topics:
            assert await topics.topics() == []


@in_loop
async def test_whoever_says_nothing_is_sent_away(tmp_path: Path) -> None:
    async with (
        broker(tmp_path) as found,
        connected(found) as reading,
        connected(found) as idle,
        connected(found, welcome=False) as silent,
    ):
        reading.send(1, wire.Open(["a/#"], follow=True))
        assert isinstance((await reading.message())[1], wire.Opened)
        silent.writer.write(b"\x05")  # half a header
        await until(lambda: len(found.bulk.transports) == 3)
        now = found.monotonic()
        found.bulk.tick(now + found.config.limits.connect_timeout_seconds + 1)
        assert await silent.ended()
        found.bulk.tick(now + 1_000)
        _, refused = await idle.message()
        assert isinstance(refused, wire.Refused)
        assert "nothing was heard" in refused.message
        assert await idle.ended()
        assert len(found.bulk.transports) == 1, "a reader that waits for more is no idler"


@in_loop
async def test_a_hello_that_comes_byte_by_byte_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with broker(tmp_path) as found, connected(found, welcome=False) as slow:
        await until(lambda: len(found.bulk.transports) == 1)
        (transport,) = found.bulk.transports
        begun = found.monotonic()
        timeout = found.config.limits.connect_timeout_seconds
        monkeypatch.setattr(found, "monotonic", lambda: begun + timeout - 0.1)
        slow.writer.write(b"\x05")
        await until(lambda: transport._reader.waiting_bytes == 1)
        found.bulk.tick(begun + timeout + 0.1)
        assert await slow.ended()


@in_loop
async def test_many_requests_at_once_leave_turns_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "TURN_SECONDS", 0.0)
    async with broker(tmp_path) as found, connected(found) as client:
        turns = 0
        handled: list[int] = []
        handle = found.bulk.requests.handle

        def noted(transport: bulk.BulkTransport, number: int, content: wire.FromClient) -> None:
            handled.append(turns)
            handle(transport, number, content)

        monkeypatch.setattr(found.bulk.requests, "handle", noted)
        client.writer.write(b"".join(wire.message(number, wire.ListTopics(["#"])) for number in range(1, 101)))

        async def others() -> None:
            nonlocal turns
            while len(handled) < 100:
                turns += 1
                await asyncio.sleep(0)

        async with asyncio.timeout(20):
            await others()
        answers = [(await client.message())[0] for _ in range(100)]
        assert answers == list(range(1, 101))
        assert len(set(handled)) > 50, "in turns with others, not all at once"


@in_loop
async def test_a_turn_to_read_is_passed_on_by_whoever_cannot_use_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "READS_AT_ONCE", 1)
    asked = wire.Open(["a/x"], credit=1 << 30)
    async with broker(tmp_path) as found, connected(found) as first, connected(found) as gone, connected(found) as last:
        await fill(found, "a/x", 10)
        load = found.bulk.load
        disk = asyncio.Event()

        async def slow(source: str, extents: Extents) -> memoryview:
            await disk.wait()
            return await load(source, extents)

        monkeypatch.setattr(found.bulk, "load", slow)
        for place, client in enumerate((first, gone, last)):
            client.send(1, asked)
            await until(lambda place=place: len(found.bulk._waiting) == place and found.bulk._reads == 1)  # type: ignore[misc]
        gone.writer.transport.abort()
        first.send(1, wire.Close())
        await until(lambda: len(found.bulk.transports) == 2 and found.bulk.stream_count == 1)
        disk.set()
        while not isinstance((await _content(last)), wire.End):
            pass


async def _content(client: Wire) -> wire.FromBroker | None:
    kind, _, body = await client.frame()
    return wire.decode_from_broker(body) if kind == wire.MESSAGE else None


@in_loop
async def test_what_one_request_may_bring_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "MAX_LISTED", 5)
    async with broker(tmp_path) as found, connected(found) as client:
        refused = await client.answer(1, wire.Publish("a/x", [b""] * 100_000))
        assert isinstance(refused, wire.Refused)
        assert "20,000" in refused.message
        indexes = {"a/1": 1, "a/2": 1, "a/3": 1}
        client.send(2, wire.Open(["a/#"], start_indexes=indexes, follow=True))
        assert isinstance((await client.message())[1], wire.Opened)
        refused = await client.answer(3, wire.Open(["a/#"], end_indexes=indexes))
        assert isinstance(refused, wire.Refused)
        assert refused.reason_code == 0x97
        assert isinstance(await client.answer(2, wire.Close()), wire.End)
        client.send(4, wire.Open(["a/#"], end_indexes=indexes))
        assert isinstance((await client.message())[1], wire.Opened)


def test_a_broker_that_talks_nonsense_is_not_talked_to_any_further() -> None:
    welcome = wire.message(0, wire.Welcome(wire.VERSION, "x", 60.0, 1 << 20))
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for answer in (b"\xff" * 64, wire.message(1, wire.Rules([]))):
                connection, _ = server.accept()
                with connection, contextlib.suppress(ConnectionError):
                    connection.recv(65_536)
                    connection.sendall(welcome)
                    connection.recv(65_536)
                    connection.sendall(answer)
                    connection.recv(65_536)

        thread = threading.Thread(target=serve)
        thread.start()
        with BlockingTopics(f"nearcast://127.0.0.1:{server.getsockname()[1]}") as topics:
            with pytest.raises(RemoteProtocolError):
                topics.rules()
            assert topics.rules() == []
        thread.join()


@pytest.mark.parametrize("seed", range(2))
@in_loop
async def test_garbage_after_the_hello_ends_one_connection_only(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    async with broker(tmp_path) as found:
        payloads = await fill(found, "a/x", 50)
        for _ in range(60):
            async with connected(found) as client:
                good = wire.message(rng.randrange(4), rng.choice((wire.ListTopics(["#"]), wire.Open(["#"], credit=99))))
                bad = bytearray(good)
                for _ in range(rng.randint(1, 4)):
                    bad[rng.randrange(len(bad))] = rng.randrange(256)
                client.writer.write(rng.choice((bytes(bad), rng.randbytes(rng.randint(1, 300)))))
                client.writer.write_eof()
                await client.ended()
        async with Topics(url(found)) as topics:
            records = [record.payload async for batch in topics.read("a/x") for record in batch.records()]
            assert records == payloads
        assert found.bulk.stream_count == 0


@in_loop
async def test_a_conversation_cut_into_single_bytes(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, connected(found, welcome=False) as client:
        sent = wire.message(0, wire.Hello()) + wire.message(1, wire.Ping())
        for at in range(len(sent)):
            client.writer.write(sent[at : at + 1])
            await client.writer.drain()
            if at == len(wire.message(0, wire.Hello())) - 1:
                assert isinstance((await client.message())[1], wire.Welcome)
        assert await client.message() == (1, wire.Pong())


@in_loop
async def test_numbers_in_use_and_messages_out_of_place_are_protocol_errors(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        for messages in (
            [wire.Open(["a"], follow=True), wire.ListTopics(["a"])],
            [wire.StageEnd()],
            [wire.Hello()],
            [wire.Stage("p", 0, 0, 0), wire.Stage("p", 0, 0, 1)],
        ):
            async with connected(found) as client:
                for content in messages:
                    client.send(5, content)
                assert await client.ended()
        async with connected(found) as client:
            client.writer.write(wire.data_header(3, 8) + bytes(8))
            assert await client.ended()


# --- streams ----------------------------------------------------------------------------------------------------------------


@in_loop
async def test_credit_bounds_what_a_reader_gets(tmp_path: Path) -> None:
    settings = TopicLogSettings(max_batch_bytes=4_096)
    async with broker(tmp_path, topic_log=settings) as found, connected(found) as client:
        await fill(found, "a/x", 500)
        client.send(1, wire.Open(["a/x"]))
        client.send(2, wire.Ping())
        seen = [await client.message() for _ in range(3)]
        assert sorted(type(content).__name__ for _, content in seen) == ["Names", "Opened", "Pong"]
        received = 0
        for _ in range(5):
            client.send(1, wire.Credit(1))
            kind, _, body = await client.frame()
            assert kind == wire.DATA
            assert 0 < len(body) <= 4_096 + 1_000
            received += len(body)
            assert isinstance((await client.message())[1], wire.Progress)
            # Overdrawn by that one: nothing more comes for a credit that does not cover it.
            assert await client.answer(9, wire.Ping()) == wire.Pong()
            client.send(1, wire.Credit(len(body) - 1))
        client.send(1, wire.Close())
        assert await client.message() == (1, wire.End())
        assert found.bulk.stream_count == 0


@in_loop
async def test_a_reader_that_stops_reading_holds_little(tmp_path: Path) -> None:
    """It gives endless credit and takes nothing: the broker stops when the kernel's buffers are full."""
    async with broker(tmp_path, topic_log=TopicLogSettings(max_batch_bytes=65_536)) as found:
        await fill(found, "a/x", 3_000, size=10_000)
        async with connected(found) as client, Topics(url(found)) as topics:
            client.send(1, wire.Open(["a/x"], credit=1 << 40))
            transport = next(each for each in found.bulk.transports if each.client_id == "hand")
            await until(lambda: transport.paused)
            assert transport.transport is not None
            assert transport.transport.get_write_buffer_size() < 400_000
            assert found.bulk.bytes_sent < 25_000_000
            # Others are served meanwhile.
            assert await topics.latest_index("a/x") == 3_000
            assert len([record async for batch in topics.read("a/x", start=2_900) for record in batch.records()]) == 101


@in_loop
async def test_whoever_takes_no_answers_gets_no_more_of_them(tmp_path: Path) -> None:
    settings = TopicLogSettings(max_batch_bytes=65_536)
    async with broker(tmp_path, topic_log=settings) as found, connected(found) as client:
        await found.topics.rules.create(TopicRule(topic="long/#"))
        for number in range(1_000):
            found.topics.publish(Run(b"long/%d/" % number + b"x" * 1_000, [b""]))
        await found.topics.committed()
        (transport,) = found.bulk.transports

        async def ask() -> None:
            for number in range(1, 61):
                client.send(number, wire.ListTopics(["#"]))
                await client.writer.drain()

        asking = asyncio.create_task(ask())
        await until(lambda: transport.blocked)
        assert transport.transport is not None
        assert transport.transport.get_write_buffer_size() < 8_000_000
        answered = 0
        while answered < 60:
            _, answer = await client.message()
            answered += isinstance(answer, wire.States)
        await asking


@in_loop
async def test_many_topics_are_listed_found_and_read_in_steps(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        for number in range(2_500):
            found.topics.publish(Run(b"a/%d" % number, [b"x"]))
        await found.topics.committed()
        assert len(await topics.topics("a/#")) == 2_500
        assert await topics.indexes_at("a/#", 0) == {f"a/{number}": 1 for number in range(2_500)}
        for start in ("earliest", datetime(2000, 1, 1, tzinfo=UTC)):
            read = [record.topic async for batch in topics.read("a/#", start=start) for record in batch.records()]
            assert read == [f"a/{number}" for number in range(2_500)]


@in_loop
async def test_streams_are_served_in_turn(tmp_path: Path) -> None:
    async with broker(tmp_path, topic_log=TopicLogSettings(max_batch_bytes=4_096)) as found, connected(found) as client:
        await fill(found, "a/x", 400)
        client.send(1, wire.Open(["a/x"], credit=1 << 30))
        client.send(2, wire.Open(["a/#"], credit=1 << 30))
        order = []
        ended = 0
        while ended < 2:
            kind, number, body = await client.frame()
            if kind == wire.DATA:
                order.append(number)
            elif isinstance(wire.decode_from_broker(body), wire.End):
                ended += 1
        both = order[: 2 * min(order.count(1), order.count(2))]
        assert max(len(run) for run in "".join(map(str, both)).replace("12", "1 2").split()) <= 3


@in_loop
async def test_streams_are_limited(tmp_path: Path) -> None:
    async with broker(tmp_path, topic_log=TopicLogSettings(max_readers=3)) as found, connected(found) as client:
        for number in range(1, 4):
            client.send(number, wire.Open(["a/#"], follow=True))
        refused = await client.answer(4, wire.Open(["a/#"], follow=True))
        assert isinstance(refused, wire.Refused)
        assert "topic_log.max_readers" in refused.message
        client.send(1, wire.Close())
        assert isinstance(await client.answer(5, wire.Open(["a/#"], follow=True)), wire.Opened)
        client.writer.close()
        await until(lambda: not found.bulk.stream_count)


@in_loop
async def test_what_retention_takes_is_an_error_or_told(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        await fill(found, "a/x", 20)
        log = found.topics.log
        assert log is not None
        topic = log.topic(b"a/x", create=False)
        assert topic is not None
        topic.first_index = 11
        with pytest.raises(RecordUnavailable, match="the oldest there is 11"):
            async for _ in topics.read("a/x", start=5):
                pass
        gaps: list[MissingRecords] = []
        indexes = [
            record.index async for batch in topics.read("a/x", start=5, on_gap=gaps.append) for record in batch.records()
        ]
        assert indexes == list(range(11, 21))
        assert [(gap.topic, gap.first_index, gap.next_index) for gap in gaps] == [("a/x", 5, 11)]
        assert [record.index async for batch in topics.read("a/x") for record in batch.records()] == indexes


@in_loop
async def test_following_sees_each_commit_and_new_topics(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics, Topics(url(found)) as publisher:
        seen: list[tuple[str, int]] = []
        opened = asyncio.Event()

        async def follow() -> None:
            await topics.topics()  # the connection is there
            async for record in topics.tail("a/#", start="earliest"):
                seen.append((record.topic, record.index))
                opened.set()
                if len(seen) == 41:
                    return

        async with asyncio.timeout(20):
            following = asyncio.create_task(follow())
            await publisher.publish("a/first", b"")
            await opened.wait()
            for number in range(40):
                await publisher.publish(f"a/{number % 4}", b"")
            await following
        assert seen == [("a/first", 1), *((f"a/{number % 4}", number // 4 + 1) for number in range(40))]


@pytest.mark.parametrize("seed", range(6))
@in_loop
async def test_reading_goes_on_over_lost_connections(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    settings = TopicLogSettings(max_batch_bytes=8_192)
    async with broker(tmp_path, topic_log=settings) as found, Relay(bulk_port(found)) as relay:
        await fill(found, "a/x", 700)
        await fill(found, "a/y", 700)
        relay.cut_after = [0, *(rng.choice((10, 100, 1_000, 20_000, 40_000)) for _ in range(6))]
        relay.cut_after[0] = rng.choice((90, 5_000))
        filters = rng.choice((["a/x"], ["a/#"]))
        expected = [("a/x", index) for index in range(1, 701)]
        if filters == ["a/#"]:
            expected += [("a/y", index) for index in range(1, 701)]
        address = f"nearcast://127.0.0.1:{relay.port}"

        def blocking() -> list[tuple[str, int]]:
            with BlockingTopics(address, window_bytes=30_000) as topics:
                return [(record.topic, record.index) for batch in topics.read(filters) for record in batch.records()]

        if seed % 2:
            assert await asyncio.to_thread(blocking) == expected
        else:
            async with Topics(address, window_bytes=30_000) as topics:
                got = [(record.topic, record.index) async for batch in topics.read(filters) for record in batch.records()]
            assert got == expected
        assert relay.connections > 1


@in_loop
async def test_a_restart_in_the_middle_of_a_read(tmp_path: Path) -> None:
    settings = TopicLogSettings(max_batch_bytes=4_096)
    async with broker(tmp_path, topic_log=settings) as found:
        port = bulk_port(found)
        await fill(found, "a/x", 600)
        topics = Topics(url(found), window_bytes=10_000)
        await topics.__aenter__()
        reading = topics.read("a/#")
        got = [record.index for record in (await anext(reading)).records()]
    async with broker(tmp_path, topic_log=settings, bulk_port=port) as found:
        await fill(found, "a/x", 100)
        async for batch in reading:
            got += [record.index for record in batch.records()]
        assert got == list(range(1, 601)), "up to where it was when reading began"
        await topics.close()


@in_loop
async def test_abandoned_readers_leave_nothing(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Topics(url(found)) as topics:
        await fill(found, "a/x", 100)
        for _ in range(100):
            reading = topics.follow("a/x", start="earliest")
            await anext(reading)
            await reading.aclose()  # type: ignore[attr-defined]
        assert await topics.latest_index("a/x") == 100
        assert found.bulk.stream_count == 0


@in_loop
async def test_a_broker_that_stops_says_so(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, connected(found) as client:
        client.send(1, wire.Open(["a/#"], follow=True))
        await client.message()
        await found.stop()
        _, refused = await client.message()
        assert isinstance(refused, wire.Refused)
        assert "stopping" in refused.message
        assert await client.ended()


@in_loop
async def test_mqtt_subscribers_get_what_the_bulk_port_publishes(tmp_path: Path) -> None:
    from nearcast.client import Client

    async with broker(tmp_path) as found, Topics(url(found), client_id="loader") as topics:
        async with Client(f"mqtt://127.0.0.1:{found.listeners[0].port}") as client:
            await client.subscribe("a/#", qos=1)
            await topics.publish_many("a/x", [b"1", b"2"], properties=Properties(content_type="n"))
            messages = [await client.messages.get(10) for _ in range(2)]
            assert [message.payload for message in messages if message is not None] == [b"1", b"2"]
            assert messages[0] is not None
            assert messages[0].properties is not None
            assert messages[0].properties.content_type == "n"
            await client.publish("a/x", b"3", qos=1)
        record = await topics.get("a/x", 3)
        assert record.payload == b"3"
        assert (await topics.get("a/x", 1)).publisher == "loader"

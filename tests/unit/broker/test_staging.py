"""Batches: all or nothing, once, whatever crashes in between; and what limits, rights and vanishing clients do to them."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from nearcast.broker import staging
from nearcast.broker.process import Broker
from nearcast.broker.staging_files import Attempt, Decision, StagingFiles, key_of
from nearcast.broker.topic_keeping import Run
from nearcast.client import BlockingTopics, Client, Properties, Topics
from nearcast.config import AccessRule, Security, TopicLogSettings
from nearcast.errors import BatchRefused, ConnectionClosed, StorageUnavailable
from nearcast.topiclog import blocks, wire
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.uploads import StagedRows
from tests.bulk_harness import Relay, broker, bulk_port, connected, url
from tests.unit.broker.fakes import in_loop

Row = tuple[str, bytes, Properties | bytes | None]


def rows(partition: int, count: int = 40) -> list[Row]:
    return [(f"a/{number % 3}", b"%d.%d." % (partition, number) + bytes(200), None) for number in range(count)]


def hand_in(address: str, batch: int, partitions: Iterable[int], producer: str = "query") -> None:
    with BlockingTopics(address) as topics:
        for partition in partitions:
            assert topics.stage(producer, batch, partition, 7, rows(partition)) == 40


def commit(address: str, batch: int, partitions: Iterable[int], producer: str = "query") -> bool:
    with BlockingTopics(address) as topics:
        return topics.commit_batch(producer, batch, dict.fromkeys(partitions, 7))


def by_topic(records: Iterable[tuple[str, bytes]]) -> dict[str, list[bytes]]:
    """The payloads of each topic in their order: rows of different topics have none between them."""
    found: dict[str, list[bytes]] = {}
    for topic, payload in records:
        found.setdefault(topic, []).append(payload)
    return found


async def contents(found: Broker) -> dict[str, list[bytes]]:
    async with Topics(url(found)) as topics:
        return by_topic([(record.topic, record.payload) async for batch in topics.read("#") for record in batch.records()])


def staged(directory: Path) -> list[str]:
    place = directory / "topics" / "staging"
    return sorted(os.listdir(place)) if place.exists() else []


ALL = [(topic, payload) for partition in range(3) for topic, payload, _ in rows(partition)]
EXPECTED = by_topic(ALL)


@in_loop
async def test_a_batch_is_published_once(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        address = url(found)
        await asyncio.to_thread(hand_in, address, 0, range(3))
        assert await contents(found) == {}
        assert await asyncio.to_thread(commit, address, 0, range(3))
        assert await contents(found) == EXPECTED
        assert not await asyncio.to_thread(commit, address, 0, range(3))
        await asyncio.to_thread(hand_in, address, 0, range(3))
        assert not await asyncio.to_thread(commit, address, 0, range(3))
        assert await contents(found) == EXPECTED
        with closing(BlockingTopics(address)) as topics:
            assert await asyncio.to_thread(topics.last_batch, "query") == 0
            assert await asyncio.to_thread(topics.last_batch, "another") is None
            assert await asyncio.to_thread(topics.commit_batch, "query", 5, {})
            assert await asyncio.to_thread(topics.last_batch, "query") == 5
            assert not await asyncio.to_thread(topics.commit_batch, "query", 4, {0: 7})
    assert staged(tmp_path) == []
    async with broker(tmp_path) as found, Topics(url(found)) as again:
        assert await again.latest_index("a/0") == len(EXPECTED["a/0"])
        assert not await asyncio.to_thread(commit, url(found), 5, range(3))


@in_loop
async def test_two_commits_at_once_publish_once(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        address = url(found)
        await asyncio.to_thread(hand_in, address, 0, range(3))
        outcomes = await asyncio.gather(*(asyncio.to_thread(commit, address, 0, range(3)) for _ in range(4)))
        assert sorted(outcomes) == [False, False, False, True]
        assert await contents(found) == EXPECTED


class Steps:
    """Copies the data directory whenever something is about to happen or has happened: where ``kill -9`` might strike."""

    def __init__(self, directory: Path, target: Path) -> None:
        self.directory = directory
        self.target = target
        self.names: list[str] = []
        self.still = threading.Lock()

    def __call__(self, name: str) -> None:
        with self.still:
            shutil.copytree(self.directory, self.target / f"{len(self.names):03d}-{name}")
            self.names.append(name)


class WatchedFiles(StagingFiles):
    """The real files, with a look before and after each change."""

    def __init__(self, directory: Path, step: Steps) -> None:
        super().__init__(directory)
        self.step = step

    def decide(self, decision: Decision) -> None:
        self.step("before-decision")
        super().decide(decision)
        self.step("decided")

    def undecide(self, decision: Decision) -> None:
        self.step("before-forgetting")
        super().undecide(decision)
        self.step("forgotten")

    def remove(self, attempts: Iterable[Attempt]) -> None:
        for attempt in attempts:
            with self.step.still:  # in another thread than the step that is being looked at
                super().remove([attempt])


def watch(found: Broker, step: Steps) -> None:
    files = found.bulk.requests.staging
    files._files = WatchedFiles(Path(str(found.config.persistence.directory)) / "topics" / "staging", step)
    publish: Callable[..., None] = found.topics.publish_group

    def publish_group(runs: Sequence[Run], mark: Mark) -> None:
        step(f"before-part-{mark.part}")
        publish(runs, mark)
        step(f"part-{mark.part}-written")

    found.topics.publish_group = publish_group  # type: ignore[method-assign]


@in_loop
async def test_a_crash_between_any_two_steps_loses_and_repeats_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 5_000)
    (tmp_path / "copies").mkdir()
    step = Steps(tmp_path / "data", tmp_path / "copies")
    async with broker(tmp_path / "data") as found:
        await asyncio.to_thread(hand_in, url(found), 3, range(3))
        watch(found, step)
        assert await asyncio.to_thread(commit, url(found), 3, range(3))
    assert len(step.names) > 12
    assert step.names[1] == "decided"
    for name in sorted(os.listdir(tmp_path / "copies")):
        directory = tmp_path / "copies" / name
        async with broker(directory) as found:
            with closing(BlockingTopics(url(found))) as topics:
                last = await asyncio.to_thread(topics.last_batch, "query")
                decided = "before-decision" not in name
                assert last == (3 if decided else None), name
                # What was decided on is in the log by now; asked again, as Spark does after a crash, it is so once.
                assert await asyncio.to_thread(topics.commit_batch, "query", 3, dict.fromkeys(range(3), 7)) is not decided
            assert await contents(found) == EXPECTED, name
        assert staged(directory) == [], name


@in_loop
async def test_a_crash_while_carrying_out_after_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts stay the same ones, also when another version of the broker would cut them differently."""
    monkeypatch.setattr(staging, "PART_BYTES", 5_000)
    (tmp_path / "copies").mkdir()
    step = Steps(tmp_path / "data", tmp_path / "copies")
    async with broker(tmp_path / "data") as found:
        await asyncio.to_thread(hand_in, url(found), 0, range(3))
        watch(found, step)
        await asyncio.to_thread(commit, url(found), 0, range(3))
    half = tmp_path / "copies" / next(name for name in sorted(os.listdir(tmp_path / "copies")) if "before-part-3" in name)
    monkeypatch.setattr(staging, "PART_BYTES", 900)
    async with broker(half) as found:
        await asyncio.to_thread(hand_in, url(found), 1, [0])
        assert await asyncio.to_thread(commit, url(found), 1, [0])
        assert await contents(found) == by_topic(ALL + ALL[:40])


@in_loop
async def test_what_was_not_handed_in_is_not_committed(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        address = url(found)
        await asyncio.to_thread(hand_in, address, 0, [0, 1])
        with closing(BlockingTopics(address)) as topics:
            with pytest.raises(BatchRefused, match="partition 2 of batch 0 was not handed in"):
                await asyncio.to_thread(topics.commit_batch, "query", 0, {0: 7, 1: 7, 2: 7})
            with pytest.raises(BatchRefused, match="attempt 8 at partition 1"):
                await asyncio.to_thread(topics.commit_batch, "query", 0, {0: 7, 1: 8})
            with pytest.raises(BatchRefused, match="one attempt of each partition"):
                await asyncio.to_thread(topics.commit_batch, "query", 0, [(0, 7), (0, 7)])
            assert await contents(found) == {}
            await asyncio.to_thread(topics.abort_batch, "query", 0)
            with pytest.raises(BatchRefused):
                await asyncio.to_thread(topics.commit_batch, "query", 0, {0: 7, 1: 7})
            for bad in (("", 0), ("x" * 300, 0), ("query", -1), ("query", 1 << 63)):
                with pytest.raises(BatchRefused):
                    await asyncio.to_thread(topics.commit_batch, *bad, {})
    assert staged(tmp_path) == []


@in_loop
async def test_damage_on_the_way_is_found_before_anything_is_decided(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        await asyncio.to_thread(hand_in, url(found), 0, [0])
        (name,) = staged(tmp_path)
        path = tmp_path / "topics" / "staging" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        with pytest.raises(BatchRefused, match="damaged on the broker's disk"):
            await asyncio.to_thread(commit, url(found), 0, [0])
        path.write_bytes(content[: len(content) // 2])
        with pytest.raises(BatchRefused, match="damaged on the broker's disk"):
            await asyncio.to_thread(commit, url(found), 0, [0])
        await asyncio.to_thread(hand_in, url(found), 0, [0])
        assert await asyncio.to_thread(commit, url(found), 0, [0])
        assert await contents(found) == by_topic(ALL[:40])


@in_loop
async def test_what_may_not_be_published_is_refused_when_it_is_handed_in(tmp_path: Path) -> None:
    acl = (
        AccessRule(action="allow", access="publish", topic="a/#"),
        AccessRule(action="allow", access="subscribe", topic="#"),
    )
    async with broker(tmp_path, security=Security(acl=acl)) as found:
        with closing(BlockingTopics(url(found))) as topics:
            for bad, why in (
                (("b/x", b"", None), "publishing to 'b/x' is not allowed"),
                (("a/+", b"", None), "must not contain"),
                (("$SYS/x", b"", None), "not allowed"),
                (("a/x", bytes(2_000_000), None), "max_packet_bytes"),
                (("a/x", b"", b"\xff\xff"), "properties that MQTT does not know"),
                (("a/x", b"", b"\x23\x00\x01"), "topic alias"),
            ):
                with pytest.raises(Exception, match=why) as refused:
                    await asyncio.to_thread(topics.stage, "query", 0, 0, 7, [*rows(0), bad])
                assert type(refused.value).__name__ in ("BatchRefused", "RequestRefused")
            assert await asyncio.to_thread(topics.stage, "query", 0, 0, 7, rows(0)) == 40
        await until_staged(found, 1)
    assert len(staged(tmp_path)) == 1


async def until_staged(found: Broker, count: int) -> None:
    """Until no upload is under way and so many files wait."""
    place = Path(str(found.config.persistence.directory))
    async with asyncio.timeout(20):
        while found.bulk.requests.staging.uploads or len(staged(place)) != count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@in_loop
async def test_what_waits_is_limited(tmp_path: Path) -> None:
    async with broker(tmp_path, topic_log=TopicLogSettings(max_staged_bytes=25_000)) as found:
        with closing(BlockingTopics(url(found))) as topics:
            assert await asyncio.to_thread(topics.stage, "query", 0, 0, 7, rows(0)) == 40
            assert await asyncio.to_thread(topics.stage, "query", 0, 1, 7, rows(1)) == 40
            with pytest.raises(BatchRefused, match=r"topic_log\.max_staged_bytes is 25,000"):
                await asyncio.to_thread(topics.stage, "query", 0, 2, 7, rows(2))
            assert found.bulk.requests.staging.staged_bytes <= 25_000
            await asyncio.to_thread(topics.abort_batch, "query", 0)
            assert found.bulk.requests.staging.staged_bytes == 0
            assert await asyncio.to_thread(topics.stage, "query", 1, 0, 7, rows(0)) == 40
            # The same attempt again takes the first one's place.
            held = found.bulk.requests.staging.staged_bytes
            assert await asyncio.to_thread(topics.stage, "query", 1, 0, 7, rows(0)) == 40
            assert found.bulk.requests.staging.staged_bytes == held


@in_loop
async def test_another_users_producer_is_another_one(tmp_path: Path) -> None:
    from nearcast.broker.passwords import ScryptVerifier, store_user

    users = tmp_path / "users"
    for name in ("ann", "bob"):
        store_user(str(users), name, ScryptVerifier.create(b"pass", log2_n=10))
    async with broker(tmp_path / "data", security=Security(password_file=str(users))) as found:
        with (
            closing(BlockingTopics(url(found), username="ann", password="pass")) as ann,
            closing(BlockingTopics(url(found), username="bob", password="pass")) as bob,
        ):
            await asyncio.to_thread(ann.stage, "query", 0, 0, 7, rows(0))
            with pytest.raises(BatchRefused):
                await asyncio.to_thread(bob.commit_batch, "query", 0, {0: 7})
            await asyncio.to_thread(bob.abort_batch, "query", 0)
            assert await asyncio.to_thread(ann.commit_batch, "query", 0, {0: 7})
            assert await asyncio.to_thread(bob.last_batch, "query") is None


@in_loop
async def test_half_an_upload_leaves_nothing(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        async with connected(found) as client:
            assert await client.answer(1, wire.Stage("query", 0, 0, 0)) == wire.Done(0)
            block = blocks.encode(blocks.TOPIC, 0, 1, 0, 0, b"", b"a/x", [])
            client.writer.write(wire.data_header(1, len(block)) + block)
            await client.writer.drain()
        await until_staged(found, 0)
        assert found.bulk.requests.staging.staged_bytes == 0
        async with connected(found) as client:
            assert await client.answer(1, wire.Stage("query", 0, 0, 0)) == wire.Done(0)
            assert await client.answer(1, wire.Close()) == wire.End()
            assert await client.answer(1, wire.Stage("query", 0, 0, 0)) == wire.Done(0)
            assert await client.answer(1, wire.StageEnd()) == wire.Done(0), "an empty one"
        async with Relay(bulk_port(found)) as relay:
            relay.cut_upwards_after = [300_000]
            with closing(BlockingTopics(f"nearcast://127.0.0.1:{relay.port}", reconnect_seconds=0)) as topics:
                with pytest.raises(ConnectionClosed):
                    await asyncio.to_thread(topics.stage, "query", 0, 1, 7, endless())
                assert await asyncio.to_thread(topics.stage, "query", 0, 1, 8, rows(1)) == 40
        await until_staged(found, 2)


def endless() -> Iterable[Row]:
    while True:
        yield "a/x", bytes(100_000), None


@pytest.mark.parametrize(
    "piece",
    [
        b"\0" * 48,
        b"garbage that is no block at all, but long enough",
        blocks.encode(blocks.RECORDS, 0, 1, 0, 0, b"", b"", [b"row of no topic"]),
        blocks.encode(blocks.MARK, 0, 1, 0, 0, b"", b"x", []),
        blocks.encode(blocks.TOPIC, 0, 1, 0, 0, b"", b"a", []) * 2,
        blocks.encode(blocks.TOPIC, 0, 1, 0, 0, b"", b"a", []) + blocks.encode(blocks.RECORDS, 0, 1, 0, 0, b"", b"", []),
        blocks.encode(blocks.TOPIC, 0, 1, 0, 0, b"", b"a", [])[:-8],
    ],
)
@in_loop
async def test_rows_that_make_no_sense(tmp_path: Path, piece: bytes) -> None:
    async with broker(tmp_path) as found, connected(found) as client:
        assert await client.answer(1, wire.Stage("query", 0, 0, 0)) == wire.Done(0)
        client.writer.write(wire.data_header(1, len(piece)) + piece)
        refused = await client.answer(1, wire.StageEnd())
        assert isinstance(refused, wire.Refused)
        assert refused.kind == "batch"
        assert "makes no sense" in refused.message
        assert await client.answer(2, wire.LastBatch("query")) == wire.Done(-1)
        await until_staged(found, 0)


@in_loop
async def test_what_a_broker_had_no_time_to_remove_is_removed_at_the_next_start(tmp_path: Path) -> None:
    place = tmp_path / "data" / "topics" / "staging"
    async with broker(tmp_path / "data") as found:
        for batch in range(3):
            await asyncio.to_thread(hand_in, url(found), batch, [0])
        shutil.copytree(place, tmp_path / "copy")
        assert await asyncio.to_thread(commit, url(found), 1, [0])
    shutil.copytree(tmp_path / "copy", place, dirs_exist_ok=True)
    async with broker(tmp_path / "data") as found:
        await until_staged(found, 1)
        assert [name.split(".")[1] for name in staged(tmp_path / "data")] == ["2"]


@in_loop
async def test_what_nobody_commits_expires(tmp_path: Path) -> None:
    async with broker(tmp_path) as found:
        await asyncio.to_thread(hand_in, url(found), 0, [0])
    (name,) = staged(tmp_path)
    place = tmp_path / "topics" / "staging"
    (place / "0123456789abcdef.part").write_bytes(b"half an upload of a broker that was killed")
    os.utime(place / name, (1, 1))
    async with broker(tmp_path) as found:
        await until_staged(found, 0)
        assert found.bulk.requests.staging.staged_bytes == 0


@in_loop
async def test_what_was_decided_on_is_neither_given_up_nor_expires(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "PART_BYTES", 2_000)
    async with broker(tmp_path) as found:
        await asyncio.to_thread(hand_in, url(found), 0, [0])
        publish_group = found.topics.publish_group
        parts = 0

        def failing(runs: Sequence[Run], mark: Mark) -> None:
            nonlocal parts
            parts += 1
            if parts == 2:
                raise BatchRefused("no room just now")
            publish_group(runs, mark)

        monkeypatch.setattr(found.topics, "publish_group", failing)
        with pytest.raises(BatchRefused, match="no room just now"):
            await asyncio.to_thread(commit, url(found), 0, [0])
        with closing(BlockingTopics(url(found))) as topics:
            await asyncio.to_thread(topics.open)
            await asyncio.to_thread(topics.abort_batch, "query", 0)
        held = found.bulk.requests.staging
        held._held = {each: (size, 1.0) for each, (size, _) in held._held.items()}
        held._sweep()
        assert await asyncio.to_thread(commit, url(found), 0, [0])
        assert await contents(found) == by_topic((topic, payload) for topic, payload, _ in rows(0))
        assert not held._committing, "nobody commits: nothing is held"


@in_loop
async def test_a_decided_batch_whose_rows_are_gone_is_an_error_that_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with broker(tmp_path) as found:
        await asyncio.to_thread(hand_in, url(found), 0, [0])
        survey = StagingFiles.survey

        def surveyed(files: StagingFiles, attempts: Iterable[Attempt]) -> set[bytes]:
            topics = survey(files, attempts)
            for name in staged(tmp_path):
                (tmp_path / "topics" / "staging" / name).unlink()
            return topics

        monkeypatch.setattr(StagingFiles, "survey", surveyed)
        with pytest.raises(StorageUnavailable, match=r"remove the batch's \.commit file"):
            await asyncio.to_thread(commit, url(found), 0, [0])
        with pytest.raises(StorageUnavailable, match="put back a copy"):
            await asyncio.to_thread(commit, url(found), 0, [0])
        assert not found.bulk.requests.staging._committing


def test_rows_without_payload_are_cut_into_parts_too(tmp_path: Path) -> None:
    files = StagingFiles(tmp_path)
    attempt = Attempt(key_of("p"), 0, 0, 0)
    upload = files.upload(attempt)
    sizes = [0] * 5_000 + [1_000] * 30 + [9_000] + [0] * 10
    for piece in StagedRows(1 << 22).encode(("a/x", bytes(size), b"", 1) for size in sizes):
        upload.write(piece)
    upload.finish()
    decision = Decision(producer="p", batch=0, attempts=((0, 0),), publisher="x", part_bytes=4_096)
    parts = list(files.parts(decision))
    found = [len(payload) for part in parts for run in part for payload in run.payloads]
    assert found == sizes
    for part in parts:
        cost = sum(len(payload) + 64 for run in part for payload in run.payloads)
        assert cost <= 4_096 or sum(len(run.payloads) for run in part) == 1
    assert list(map(len, parts)) == list(map(len, files.parts(decision)))


@in_loop
async def test_writes_that_never_come_back_do_not_push_a_query_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_PRODUCERS", 2)
    monkeypatch.setattr(staging, "MAX_PASSING_PRODUCERS", 2)

    def work(address: str) -> list[int | None]:
        with BlockingTopics(address) as topics:
            if topics.last_batch("query") is None:
                assert topics.commit_batch("query", 5, {})
            for number in range(4):
                topics.commit_batch(f"once/{number}", 0, {})
            return [topics.last_batch(name) for name in ("query", "once/0", "once/1", "once/2", "once/3")]

    for _ in range(2):
        async with broker(tmp_path) as found:
            assert await asyncio.to_thread(work, url(found)) == [5, None, None, 0, 0]


@in_loop
async def test_only_so_many_producers_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "MAX_PRODUCERS", 3)

    def work(address: str) -> list[int | None]:
        with BlockingTopics(address) as topics:
            for number in range(4):
                assert topics.commit_batch(f"write-{number}", 0, {})
                assert topics.commit_batch("query", number, {})
            return [topics.last_batch(name) for name in ("query", "write-0", "write-1", "write-2", "write-3")]

    async with broker(tmp_path) as found:
        assert await asyncio.to_thread(work, url(found)) == [3, None, None, 0, 0]


@in_loop
async def test_rows_reach_subscribers_also_of_topics_that_are_not_kept(tmp_path: Path) -> None:
    async with broker(tmp_path) as found, Client(f"mqtt://127.0.0.1:{found.listeners[0].port}") as client:
        await client.subscribe("#", qos=1)

        def work() -> None:
            with closing(BlockingTopics(url(found))) as topics:
                some = [("a/x", b"kept", Properties(content_type="t")), ("plain", b"not kept", None)]
                topics.stage("query", 0, 0, 7, some)
                assert topics.commit_batch("query", 0, {0: 7})

        await asyncio.to_thread(work)
        messages = [await client.messages.get(10) for _ in range(2)]
        assert [(each.topic, each.payload) for each in messages if each is not None] == [
            ("a/x", b"kept"),
            ("plain", b"not kept"),
        ]
        assert await contents(found) == {"a/x": [b"kept"]}

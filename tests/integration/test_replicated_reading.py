"""Topics of a replica set read and published to by the bulk port of any broker: the leader's, a follower's, one that is no
member; while the leader is killed, with local topics and those of another set beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.client import BlockingTopics, Topics
from nearcast.errors import RecordUnavailable, RequestRefused, TopicUnknown
from tests.integration.broker.running import wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.test_owned_topics import meet
from tests.integration.test_replica_sets import leader_at

pytestmark = pytest.mark.integration

NAMES = ("b1", "b2", "b3", "b4")
LEADER, FOLLOWER, OUTSIDER = "b2", "b3", "b4"

CONFIG = """
[[topics]]
topic = "local/#"
"""


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[ControlledFabric]:
    with ControlledFabric(tmp_path) as made:
        made.start(*NAMES, data=True, config=CONFIG)
        meet(made, *NAMES)
        made.nearcast("set", "create", "eu", "--members", "b1,b2,b3", "--preferred", LEADER)
        made.nearcast("set", "create", "other", "--members", "b1", "--preferred", "b1")
        made.nearcast("topic", "create", "orders/#", "--class", "owned", "--durable", "--set", "eu")
        made.nearcast("topic", "create", "bills/#", "--class", "owned", "--durable", "--set", "other")
        wait_for("the preferred leader", lambda: all(leader_at(made, name) == LEADER for name in NAMES))
        yield made


def url(fabric: ControlledFabric, name: str) -> str:
    return fabric.nodes[name].bulk_url


def payloads(topics: BlockingTopics, filters: str | list[str], **places: object) -> list[bytes]:
    return [record.payload for batch in topics.read(filters, **places) for record in batch.records()]  # type: ignore[arg-type]


def test_every_broker_gives_the_same(fabric: ControlledFabric) -> None:
    """What is published at one broker is there at the next, at once: get, range, time, list and the newest index."""
    at = {name: BlockingTopics(url(fabric, name)) for name in NAMES}
    for topics in at.values():
        topics.open()
    count = 0
    for _ in range(5):
        for name, topics in at.items():
            count += 1
            assert topics.publish("orders/x", f"{count} {name}") == count
            for reader in at.values():
                assert reader.latest_index("orders/x") == count
                assert reader.get("orders/x", count).payload == f"{count} {name}".encode()
    expected = [f"{number + 1} {NAMES[number % 4]}".encode() for number in range(count)]
    first = at[LEADER].get("orders/x", 1)
    for name, topics in at.items():
        assert payloads(topics, "orders/x") == expected
        assert payloads(topics, "orders/#", start=4, end=9) == expected[3:8]
        assert topics.get("orders/x", 3).publisher.startswith("bulk-")
        assert topics.indexes_at("orders/#", first.time_us) == {"orders/x": 1}
        (state,) = topics.topics("orders/#")
        assert (state.topic, state.count, state.replica_set, state.leader) == ("orders/x", count, "eu", LEADER), name
        with pytest.raises(RecordUnavailable):
            topics.get("orders/x", count + 1)
        with pytest.raises(TopicUnknown):
            topics.get("orders/y", 1)
        with pytest.raises(TopicUnknown):
            topics.latest_index("orders/y")
        topics.close()


def test_one_stream_over_several_logs(fabric: ControlledFabric) -> None:
    """A filter that topics of the broker itself and of two sets match."""
    for name in NAMES:
        with BlockingTopics(url(fabric, name)) as topics:
            for number in range(50):
                for topic in ("orders/a", "orders/b", "bills/a", "local/a", "local/b"):
                    topics.publish(topic, f"{topic} {name} {number}")
    for place, name in enumerate(NAMES):
        with BlockingTopics(url(fabric, name)) as topics:
            found: dict[str, list[bytes]] = {}
            for batch in topics.read("#"):
                for record in batch.records():
                    found.setdefault(record.topic, []).append(record.payload)
                    assert record.index == len(found[record.topic])
            for topic in ("orders/a", "orders/b", "bills/a"):
                assert found[topic] == [f"{topic} {each} {number}".encode() for each in NAMES for number in range(50)]
            for topic in ("local/a", "local/b"):
                assert found[topic] == [f"{topic} {NAMES[place]} {number}".encode() for number in range(50)]
            states = {state.topic: state.replica_set for state in topics.topics()}
            assert states == {"orders/a": "eu", "orders/b": "eu", "bills/a": "other", "local/a": "", "local/b": ""}
            ranges = {"orders/a": (10, 20), "bills/a": (5, 7), "local/b": (1, 3)}
            counts: dict[str, int] = {}
            for batch in topics.read_ranges(["#"], ranges):
                for record in batch.records():
                    counts[record.topic] = counts.get(record.topic, 0) + 1
            assert counts == {"orders/a": 10, "bills/a": 2, "local/b": 2}


@pytest.mark.parametrize("name", [FOLLOWER, OUTSIDER])
def test_a_tail_goes_on_while_leaders_are_killed(fabric: ControlledFabric, name: str) -> None:
    count = 400

    async def run() -> list[int]:
        indexes: list[int] = []
        async with Topics(url(fabric, name)) as topics, Topics(url(fabric, OUTSIDER)) as publisher:
            await publisher.publish("orders/x", b"0")

            async def publish() -> None:
                for number in range(1, count):
                    await publisher.publish("orders/x", str(number))
                    if number == count // 2:
                        await asyncio.to_thread(fabric.nodes[LEADER].kill)

            publishing = asyncio.create_task(publish())
            async with asyncio.timeout(60):
                async for record in topics.tail("orders/#", start="earliest"):
                    assert record.text == str(record.index - 1)
                    indexes.append(record.index)
                    if len(indexes) == count:
                        break
            await publishing
        return indexes

    assert asyncio.run(run()) == list(range(1, count + 1))


def test_much_is_read_through_a_broker_that_has_none_of_it(fabric: ControlledFabric) -> None:
    """More than any window; a member is killed meanwhile, and another one goes on."""
    size, count = 10_000, 3_000
    with BlockingTopics(url(fabric, LEADER)) as topics:
        for begin in range(0, count, 100):
            topics.publish_many("orders/big", [b"%08d" % number + bytes(size) for number in range(begin, begin + 100)])
    with BlockingTopics(url(fabric, OUTSIDER), window_bytes=262_144) as topics:
        found = 0
        for batch in topics.read("orders/big"):
            for record in batch.records():
                assert record.payload[:8] == b"%08d" % found
                found += 1
            if found > count // 3 and fabric.nodes["b1"].process is not None and not killed(fabric, "b1"):
                for name in ("b1", LEADER):
                    fabric.nodes[name].kill()
        assert found == count


def killed(fabric: ControlledFabric, name: str) -> bool:
    process = fabric.nodes[name].process
    return process is None or process.poll() is not None


def test_without_a_majority_what_was_committed_can_be_read(fabric: ControlledFabric) -> None:
    with BlockingTopics(url(fabric, OUTSIDER)) as topics:
        for number in range(10):
            topics.publish("orders/x", str(number))
        wait_for("the follower", lambda: len(follower_has(fabric)) == 10)
        for name in ("b1", LEADER):
            fabric.nodes[name].kill()
        assert len(payloads(topics, "orders/x")) == 10
        assert topics.get("orders/x", 3).payload == b"2"
        with pytest.raises(RequestRefused, match="no leader"):
            topics.latest_index("orders/x")


def follower_has(fabric: ControlledFabric) -> list[bytes]:
    with BlockingTopics(url(fabric, FOLLOWER)) as topics:
        return payloads(topics, "orders/x")


def test_commands_work_at_any_broker(fabric: ControlledFabric) -> None:
    for place, name in enumerate((LEADER, OUTSIDER), 1):
        at = ("--url", url(fabric, name))
        assert fabric.nearcast("topic", "publish", "orders/x", "-m", f"from {name}", *at) == f"orders/x {place}\n"
        assert fabric.nearcast("topic", "get", "orders/x", "latest", *at) == f"from {name}\n"
        assert fabric.nearcast("topic", "get", "orders/x", "1", *at) == f"from {LEADER}\n"
        (shown,) = fabric.json("topic", "list", "orders/#", "--durable", *at)["topics"]
        assert (shown["records"], shown["replica_set"], shown["leader"]) == (place, "eu", LEADER)
        listed = fabric.nearcast("topic", "list", "orders/#", "--durable", *at)
        assert "Leader" in listed
        assert LEADER in listed
        details = fabric.nearcast("topic", "show", "orders/x", *at)
        assert "replica set" in details
        assert "none any more" not in details
        tailed = fabric.nearcast("topic", "tail", "orders/#", "--from", "earliest", "--count", str(place), "--raw", *at)
        assert tailed.splitlines() == [f"from {each}" for each in (LEADER, OUTSIDER)[:place]]

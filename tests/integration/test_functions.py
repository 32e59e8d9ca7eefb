"""Functions on a replica set of real brokers: each message handled once, whatever fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.test_owned_topics import meet
from tests.integration.test_paho import MQTTv5, MQTTv311, Paho
from tests.integration.test_replica_sets import leader_at

pytestmark = pytest.mark.integration

NAMES = ("b1", "b2", "b3")

SUMS = """
def add(topic, index, data, ctx):
    total = ctx.state.get("total", 0) + int(data)
    ctx.state["total"] = total
    ctx.publish("kept/sums", f"{index} {total}")
    ctx.publish("plain/sums", f"{index} {total}")
"""

MOODY = """
def check(topic, index, data, ctx):
    if data == b"bad":
        raise ValueError("I do not like it")
    if data == b"endless":
        while True:
            pass
    ctx.publish("kept/checked", data)
"""


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[ControlledFabric]:
    with ControlledFabric(tmp_path) as made:
        made.start(*NAMES, data=True)
        meet(made, *NAMES)
        made.nearcast("set", "create", "eu", "--members", "b1,b2,b3", "--preferred", "b2")
        made.nearcast("topic", "create", "kept/#", "--class", "owned", "--durable", "--set", "eu")
        wait_for("the preferred leader", lambda: leader_at(made, "b1") == "b2")
        yield made


def deploy(fabric: ControlledFabric, source: str, entry: str, topic: str, *words: str) -> None:
    path = fabric.directory / f"{entry}.py"
    path.write_text(source)
    fabric.nearcast("function", "deploy", f"{path}:{entry}", "--topic", topic, *words)


def publish(publisher: Paho, topic: str, *payloads: str) -> None:
    for payload in payloads:
        publisher.client.publish(topic, payload.encode(), 1).wait_for_publish(PATIENCE_SECONDS)


def payloads(subscriber: Paho, count: int) -> list[str]:
    return [subscriber.messages.get(timeout=PATIENCE_SECONDS).payload.decode() for _ in range(count)]


def test_each_message_is_handled_once_over_leaders_that_are_killed(fabric: ControlledFabric) -> None:
    deploy(fabric, SUMS, "add", "kept/numbers")
    subscriber = Paho(fabric.nodes["b1"].port(), MQTTv5)
    subscriber.subscribe("kept/sums", 1)
    plain = Paho(fabric.nodes["b1"].port(), MQTTv5)
    plain.subscribe("plain/sums", 1)
    count = 0
    expected: list[str] = []
    total = 0
    for _ in range(3):
        publisher = Paho(fabric.nodes["b1"].port(), MQTTv311)
        for _ in range(20):
            count += 1
            total += count
            expected.append(f"{count} {total}")
            publish(publisher, "kept/numbers", str(count))
        publisher.close()
        fabric.nodes["b2"].kill()
        assert payloads(subscriber, 20) == expected[-20:]
        fabric.nodes["b2"].start()
        wait_for("the preferred leader", lambda: leader_at(fabric, "b1") == "b2")
    assert subscriber.messages.empty()
    seen = list(dict.fromkeys(payloads(plain, count)))
    assert seen == expected[: len(seen)]
    for client in (subscriber, plain):
        client.close()


def test_messages_that_fail_are_put_aside_and_the_broker_goes_on(fabric: ControlledFabric) -> None:
    deploy(fabric, MOODY, "check", "kept/in", "--timeout", "0.5", "--retries", "1")
    watcher = Paho(fabric.nodes["b2"].port(), MQTTv5)
    watcher.subscribe("kept/checked", 1)
    dead = Paho(fabric.nodes["b2"].port(), MQTTv5)
    dead.subscribe("$nearcast/functions/check/dead", 1)
    publisher = Paho(fabric.nodes["b3"].port(), MQTTv5)
    publish(publisher, "kept/in", "1", "bad", "2", "endless", "3")
    assert payloads(watcher, 3) == ["1", "2", "3"]
    assert payloads(dead, 2) == ["bad", "endless"]
    for client in (watcher, dead, publisher):
        client.close()


def test_functions_are_listed_changed_and_removed(fabric: ControlledFabric) -> None:
    watcher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    watcher.subscribe("kept/out", 1)
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    publish(publisher, "kept/in", "before")
    deploy(fabric, "def f(topic, index, data, ctx): ctx.publish('kept/out', b'one ' + data)\n", "f", "kept/in")
    wait_for("the function", lambda: "f" in running(fabric))
    publish(publisher, "kept/in", "a")
    assert payloads(watcher, 1) == ["one a"]
    deploy(fabric, "def f(topic, index, data, ctx): ctx.publish('kept/out', b'two ' + data)\n", "f", "kept/in")
    wait_for("its new version", lambda: running(fabric).get("f") == 2)
    publish(publisher, "kept/in", "b")
    assert payloads(watcher, 1) == ["two b"]
    listed = json.loads(fabric.nearcast("function", "list", "--json"))
    assert [(each["name"], each["version"], each["topic"]) for each in listed] == [("f", 2, "kept/in")]
    assert "kept/in" in fabric.nearcast("function", "list")
    fabric.nearcast("function", "remove", "f")
    wait_for("it to end", lambda: not running(fabric))
    publish(publisher, "kept/in", "c")
    deploy(fabric, "def g(topic, index, data, ctx): ctx.publish('kept/out', b'all ' + data)\n", "g", "kept/in", "--from-start")
    assert payloads(watcher, 4) == ["all before", "all a", "all b", "all c"]
    assert "there is no function 'x'" in fabric.nearcast("function", "remove", "x", code=1)
    for client in (watcher, publisher):
        client.close()


def running(fabric: ControlledFabric) -> dict[str, int]:
    """Functions that run anywhere, and their versions."""
    found: dict[str, int] = {}
    for name in NAMES:
        for each in fabric.nodes[name].health()["fabric"]["functions"]:
            found[each["name"]] = each["version"]
    return found

"""A replica set of real brokers: made by command, published to by any client, read at any broker, its leader killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.test_owned_topics import Stream, meet, received
from tests.integration.test_paho import MQTTv5, MQTTv311, Paho

pytestmark = pytest.mark.integration

NAMES = ("b1", "b2", "b3", "b4")


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[ControlledFabric]:
    with ControlledFabric(tmp_path) as made:
        made.start(*NAMES, data=True)
        meet(made, *NAMES)
        made.nearcast("set", "create", "eu", "--members", "b1,b2,b3", "--preferred", "b2")
        made.nearcast("topic", "create", "orders/#", "--class", "owned", "--durable", "--set", "eu")
        wait_for("the preferred leader", lambda: leader_at(made, "b4") == "b2")
        yield made


def leader_at(fabric: ControlledFabric, name: str) -> str:
    """Who leads the set, as a broker has it."""
    sets = fabric.nodes[name].health()["fabric"]["sets"]
    return str(sets[0]["leader"]) if sets else ""


def test_sets_are_listed_with_their_topics(fabric: ControlledFabric) -> None:
    found = json.loads(fabric.nearcast("set", "list", "--json"))
    assert [(each["name"], each["members"], each["topics"]) for each in found] == [("eu", ["b1", "b2", "b3"], ["orders/#"])]
    assert "orders/#" in fabric.nearcast("set", "list")
    assert "remove that rule first" in fabric.nearcast("set", "remove", "eu", code=1)
    assert "there is a replica set 'eu' already" in fabric.nearcast("set", "create", "eu", "--members", "b1", code=1)
    assert "broker 'b9' is not there" in fabric.nearcast("set", "create", "x", "--members", "b9", code=1)
    assert "brokers are at 1 sites" in fabric.nearcast("set", "create", "x", "--replicas", "3", code=1)
    made = json.loads(fabric.nearcast("set", "create", "x", "--placement", "colocated", "--json"))
    assert len(made["members"]) == 3


@pytest.mark.parametrize("qos", [1, 2])
def test_nothing_is_lost_or_doubled_when_leaders_are_killed(fabric: ControlledFabric, qos: int) -> None:
    topic = f"orders/{qos}"
    publisher = Paho(fabric.nodes["b4"].port(), MQTTv311)
    subscriber = Paho(fabric.nodes["b4"].port(), MQTTv5)
    subscriber.subscribe(topic, qos)
    with Stream(publisher, topic, qos) as stream:
        for _ in range(3):
            wait_for("messages", lambda before=stream.count: stream.count > before + 50)  # type: ignore[misc]
            leader = leader_at(fabric, "b4")
            fabric.nodes[leader].kill()
            wait_for("another leader", lambda leader=leader: leader_at(fabric, "b4") not in ("", leader))  # type: ignore[misc]
            wait_for("messages again", lambda before=stream.count: stream.count > before + 20)  # type: ignore[misc]
            fabric.nodes[leader].start()
            wait_for("the preferred leader", lambda: leader_at(fabric, "b4") == "b2")
    assert received(subscriber, stream.count) == list(range(stream.count))
    assert subscriber.messages.empty()
    for client in (publisher, subscriber):
        client.close()


def test_a_fabric_that_is_started_again_as_a_whole_has_everything(fabric: ControlledFabric) -> None:
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    for number in range(20):
        publisher.client.publish("orders/kept", str(number).encode(), 1).wait_for_publish(PATIENCE_SECONDS)
    publisher.close()
    fabric.controller.kill()
    for name in NAMES:
        fabric.nodes[name].kill()
    fabric.controller.start()
    for name in NAMES:
        fabric.nodes[name].start()
    wait_for("a leader", lambda: leader_at(fabric, "b1") != "None")
    subscriber = Paho(fabric.nodes["b3"].port(), MQTTv5)
    subscriber.subscribe("orders/#", 1)
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    publisher.client.publish("orders/kept", b"20", 1).wait_for_publish(PATIENCE_SECONDS)
    assert received(subscriber, 1) == [20]
    for client in (publisher, subscriber):
        client.close()


def test_sets_of_real_brokers_are_a_ring(tmp_path: Path) -> None:
    with ControlledFabric(tmp_path) as made:
        made.start("b1", "b2", "b3", data=True, config="[fabric]\nring = true\n")
        meet(made, "b1", "b2", "b3")
        made.nearcast("set", "create", "eu", "--members", "b1,b2,b3")
        wait_for("a ring of one", lambda: standings(made) == ["in"] * 3)
        made.nearcast("set", "create", "us", "--members", "b2,b3,b1")
        wait_for("a ring of two", lambda: standings(made) == ["in"] * 6)
        made.nodes["b1"].kill()
        made.nodes["b1"].start()
        wait_for("the ring as it was, from the logs", lambda: standings(made) == ["in"] * 6)


def standings(fabric: ControlledFabric) -> list[str]:
    """What each replica of each broker says of its set's place on the ring."""
    return [str(each["ring"]) for node in fabric.nodes.values() for each in node.health()["fabric"]["sets"]]

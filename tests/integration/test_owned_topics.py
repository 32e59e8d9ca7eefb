"""Topics of class owned with real brokers, a real controller and Paho: created, listed, moved, and owners that die."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.placement.plans import PlannedMove, PlanRecord, encode_plan
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.test_paho import MQTTv5, MQTTv311, Paho

pytestmark = pytest.mark.integration

NAMES = ("b1", "b2", "b3")
QUICK_TELEMETRY = "[fabric.telemetry]\ninterval_seconds = 0.5\n"


def meet(fabric: ControlledFabric, *names: str) -> None:
    for name in names:
        others = [other for other in names if other != name]
        node = fabric.nodes[name]
        wait_for("brokers meeting", lambda node=node, others=others: node.sees(*others))  # type: ignore[misc]


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledFabric]:
    """Three brokers for all tests; each leaves them as they were."""
    with ControlledFabric(tmp_path_factory.mktemp("owned")) as made:
        made.start(*NAMES, data=True, config=QUICK_TELEMETRY)
        meet(made, *NAMES)
        made.nearcast("topic", "create", "swarm/#", "--class", "owned", "--max-latency-ms", "2000")
        yield made


def owner_of(fabric: ControlledFabric, topic: str) -> str:
    page = fabric.controller.client().get("/topics", topic_filter=topic)
    return str(page["topics"][0]["owner"]) if page["topics"] else ""


class Stream:
    """Publishes numbers to a topic without a pause, and waits for every acknowledgement."""

    def __init__(self, publisher: Paho, topic: str, qos: int) -> None:
        self._publisher = publisher
        self._topic = topic
        self._qos = qos
        self._stop = threading.Event()
        self.count = 0
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            sent = self._publisher.client.publish(self._topic, str(self.count).encode(), self._qos)
            sent.wait_for_publish(PATIENCE_SECONDS)
            self.count += 1

    def __enter__(self) -> Stream:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)


def received(subscriber: Paho, count: int) -> list[int]:
    return [int(subscriber.messages.get(timeout=PATIENCE_SECONDS).payload) for _ in range(count)]


@pytest.mark.parametrize("qos", [1, 2])
def test_nothing_is_lost_doubled_or_out_of_order_while_a_topic_moves(fabric: ControlledFabric, qos: int) -> None:
    topic = f"swarm/move/{qos}"
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv311)
    subscribers = [Paho(fabric.nodes[name].port(), MQTTv5) for name in NAMES]
    for subscriber in subscribers:
        subscriber.subscribe(topic, qos)
    with Stream(publisher, topic, qos) as stream:
        wait_for("an owner", lambda: owner_of(fabric, topic))
        for target in ("b2", "b3", "b1", "b3"):
            before = stream.count
            assert f"{target} owns {topic} now" in fabric.nearcast("topic", "move", topic, target)
            wait_for("messages afterwards", lambda before=before: stream.count > before + 20)  # type: ignore[misc]
    for subscriber in subscribers:
        assert received(subscriber, stream.count) == list(range(stream.count))
        assert subscriber.messages.empty()
    for client in (publisher, *subscribers):
        client.close()


def test_moves_are_counted(fabric: ControlledFabric) -> None:
    topic = "swarm/counted"
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    publisher.publish(topic, b"1", 1)
    wait_for("an owner", lambda: owner_of(fabric, topic) in NAMES)
    old = owner_of(fabric, topic)
    new = next(name for name in NAMES if name != old)
    handed_over = fabric.nodes[old].metric("owned_handed_over_total")
    acquired = fabric.nodes[new].metric("owned_acquired_total")
    fabric.nearcast("topic", "move", topic, new)
    wait_for("the move", lambda: owner_of(fabric, topic) == new)
    publisher.close()
    assert fabric.nodes[old].metric("owned_handed_over_total") == handed_over + 1
    assert fabric.nodes[new].metric("owned_acquired_total") == acquired + 1
    for figure in ("orders_refused", "messages_parked", "messages_passed_on", "messages_stale", "gates_late"):
        assert fabric.nodes[old].metric(f"owned_{figure}_total") >= 0


def test_topics_are_shown_with_their_owner_latency_and_reason(fabric: ControlledFabric) -> None:
    publisher, subscriber = (Paho(fabric.nodes[name].port(), MQTTv5) for name in ("b1", "b2"))
    subscriber.subscribe("swarm/shown", 1)
    publisher.client.publish("swarm/shown", b"1", 1).wait_for_publish(PATIENCE_SECONDS)
    client = fabric.controller.client()

    def reported() -> bool:
        topics = client.get("/topics", topic_filter="swarm/shown")["topics"]
        return bool(topics) and topics[0]["producers"] == topics[0]["consumers"] == 1

    wait_for("telemetry", reported)
    listed = fabric.nearcast("topic", "list", "swarm/shown", "--owned")
    assert "swarm/#" in listed
    assert "2000 ms" in listed
    assert "b1" in listed
    assert "owner" in fabric.nearcast("topic", "show", "swarm/shown")
    shown = fabric.json("topic", "show", "swarm/shown")["owned"]
    assert (shown["owner"], shown["max_latency_ms"], shown["topic_filter"]) == ("b1", 2000.0, "swarm/#")
    why = fabric.nearcast("topic", "why", "swarm/shown")
    assert "swarm/shown: b1 owns it" in why
    assert "present owner" in why
    assert "owned topic" in fabric.nearcast("status")
    for paho in (publisher, subscriber):
        paho.close()


def test_what_cannot_be_done_is_said_in_one_line(fabric: ControlledFabric) -> None:
    for words, message in (
        (("topic", "why", "plain"), "plain is not owned: `nearcast topic create plain --class owned` makes it so"),
        (("topic", "move", "swarm/never", "b1"), "nobody owns swarm/never yet"),
        (("topic", "set", "other/#", "--max-latency-ms", "5"), "no rule is about 'other/#'"),
        (("topic", "create", "x", "--class", "owned", "--max-latency-ms", "-1"), "a latency bound is between 0 (none) and"),
        (("topic", "create", "x", "--class", "local", "--max-latency-ms", "1"), "only topics of class owned have"),
        (("topic", "delete", "other/#", "--class"), "there is no rule for 'other/#'"),
    ):
        assert message in fabric.nearcast(*words, code=1)
    for words in (
        ("topic", "create", "x", "--class", "mine"),
        ("topic", "create", "x", "--max-latency-ms", "5"),
        ("topic", "create", "x", "--class", "owned", "--max-age", "7d"),
        ("topic", "set", "swarm/#"),
        ("topic", "list", "--owned", "--durable"),
    ):
        fabric.nearcast(*words, code=2)


def test_rules_are_made_changed_and_removed(fabric: ControlledFabric) -> None:
    assert fabric.json("topic", "create", "cars/#", "--class", "owned")["outcome"] == "created"
    assert fabric.json("topic", "create", "cars/#", "--class", "owned")["outcome"] == "unchanged"
    assert "at most 30 ms" in fabric.nearcast("topic", "set", "cars/#", "--max-latency-ms", "30")
    rules = fabric.json("topic", "list", "cars/#", "--owned")["owned"]["rules"]
    assert rules == [{"topic_filter": "cars/#", "topic_class": "owned", "max_latency_ms": 30.0}]
    assert "30 ms" in fabric.nearcast("class")
    assert "no rule gives cars/# a class any more" in fabric.nearcast("topic", "delete", "cars/#", "--class")
    assert "no topic of `cars/#` is owned" in fabric.nearcast("topic", "list", "cars/#", "--owned")


def test_a_topic_is_kept_and_owned_at_once(fabric: ControlledFabric) -> None:
    bulk = fabric.nodes["b1"].bulk_url
    made = fabric.nearcast("topic", "create", "swarm/kept", "--durable", "--class", "owned", "--url", bulk)
    assert made.splitlines() == ["swarm/kept is durable now, keeping everything", "swarm/kept is owned now"]
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    publisher.client.publish("swarm/kept", b"1", 1).wait_for_publish(PATIENCE_SECONDS)
    wait_for("an owner", lambda: owner_of(fabric, "swarm/kept"))
    found = json.loads(fabric.nearcast("topic", "show", "swarm/kept", "--url", bulk, "--json"))
    assert found["owned"]["owner"] == "b1"
    assert found["rule"]["mode"] == "durable"
    listed = fabric.nearcast("topic", "list", "swarm/kept", "--url", bulk)
    assert "durable" in listed
    assert "Owner" in listed
    publisher.close()
    fabric.nearcast("topic", "delete", "swarm/kept", "--yes", "--url", bulk)


def test_a_controller_that_is_started_again_knows_the_owners_and_nobody_waited_for_it(fabric: ControlledFabric) -> None:
    publisher, subscriber = (Paho(fabric.nodes[name].port(), MQTTv5) for name in ("b1", "b2"))
    subscriber.subscribe("swarm/away", 1)
    publisher.client.publish("swarm/away", b"0", 1).wait_for_publish(PATIENCE_SECONDS)
    wait_for("an owner", lambda: owner_of(fabric, "swarm/away"))
    fabric.nearcast("topic", "move", "swarm/away", "b3")
    fabric.controller.stop()
    publisher.client.publish("swarm/away", b"1", 1).wait_for_publish(PATIENCE_SECONDS)
    assert received(subscriber, 2) == [0, 1]
    fabric.controller.start()
    wait_for("the owner's word", lambda: owner_of(fabric, "swarm/away") == "b3")
    assert fabric.json("topic", "show", "swarm/away")["owned"]["max_latency_ms"] == 2000.0
    for paho in (publisher, subscriber):
        paho.close()


def test_a_drained_broker_hands_its_topics_over(fabric: ControlledFabric) -> None:
    publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
    publisher.client.publish("swarm/drained", b"0", 1).wait_for_publish(PATIENCE_SECONDS)
    wait_for("an owner", lambda: owner_of(fabric, "swarm/drained") == "b1")
    assert "b1 has no client of a gateway" in fabric.nearcast("drain", "b1", "--wait", str(PATIENCE_SECONDS))
    assert owner_of(fabric, "swarm/drained") in ("b2", "b3")
    fabric.nearcast("drain", "b1", "--stop")
    publisher.close()


def test_an_owner_that_is_killed_is_replaced_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with ControlledFabric(tmp_path) as fabric:
        fabric.start(*NAMES, data=True)
        meet(fabric, *NAMES)
        fabric.nearcast("topic", "create", "swarm/#", "--class", "owned")
        publisher, subscriber = (Paho(fabric.nodes[name].port(), MQTTv5) for name in ("b1", "b2"))
        subscriber.subscribe("swarm/1", 1)
        with Stream(publisher, "swarm/1", 1) as stream:
            wait_for("messages", lambda: stream.count > 20)
            fabric.nearcast("topic", "move", "swarm/1", "b3")
            wait_for("messages over b3", lambda: stream.count > 60)
            fabric.nodes["b3"].kill()
            wait_for("another owner", lambda: owner_of(fabric, "swarm/1") in ("b1", "b2"))
            before = stream.count
            wait_for("messages over it", lambda: stream.count > before + 20)
        numbers: set[int] = set()
        while len(numbers) < stream.count:
            numbers.add(int(subscriber.messages.get(timeout=PATIENCE_SECONDS).payload))
        assert numbers == set(range(stream.count))
        assert "b3 is gone" in fabric.nearcast("topic", "why", "swarm/1")
        # One that comes back owns nothing of it any more.
        fabric.nodes["b3"].start()
        fabric.wait_for_states(b3="up")
        publisher.client.publish("swarm/1", str(stream.count).encode(), 1).wait_for_publish(PATIENCE_SECONDS)
        assert owner_of(fabric, "swarm/1") in ("b1", "b2")
        for paho in (publisher, subscriber):
            paho.close()


PLANNING_BROKER = """
[[security.acl]]
action = "allow"
topic = "$nearcast/plan"
access = "publish"

[[security.acl]]
action = "allow"
topic = "#"
"""


def test_a_published_plan_is_carried_out_by_a_controller_that_is_told_to(tmp_path: Path) -> None:
    with ControlledFabric(tmp_path, ["--planner", "spark"]) as fabric:
        fabric.start("b1", "b2", config=PLANNING_BROKER)
        meet(fabric, "b1", "b2")
        fabric.nearcast("topic", "create", "swarm/#", "--class", "owned")
        publisher = Paho(fabric.nodes["b1"].port(), MQTTv5)
        publisher.client.publish("swarm/1", b"1", 1).wait_for_publish(PATIENCE_SECONDS)
        wait_for("an owner", lambda: owner_of(fabric, "swarm/1") == "b1")
        plan = PlanRecord(1, 0.0, "nightly", (PlannedMove("swarm/1", "b2", "b1", reason="it is nearer"),))
        publisher.client.publish("$nearcast/plan", encode_plan(plan), 1).wait_for_publish(PATIENCE_SECONDS)
        wait_for("the planned owner", lambda: owner_of(fabric, "swarm/1") == "b2")
        assert "nightly: it is nearer" in fabric.nearcast("topic", "why", "swarm/1")
        publisher.close()

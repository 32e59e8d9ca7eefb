"""Retained messages are the same at every broker, the last one wins, and each costs what it must."""

from __future__ import annotations

import random

import pytest

from nearcast.config import Limits
from nearcast.fabric import replication
from nearcast.mqtt.packets import MQTT_5, Properties
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh, Node


def mesh_of(*names: str, limits: Limits | None = None) -> tuple[Mesh, list[Node]]:
    mesh = Mesh(limits=limits)
    nodes = [mesh.add(name) for name in names]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            mesh.link(name, other)
    mesh.run()
    return mesh, nodes


def retained(node: Node) -> dict[str, bytes]:
    return {message.topic.decode(): message.payloads()[0] for message in node.engine.retained.all()}


# semantics: R1 R2
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_every_broker_has_it_after_the_interval(qos: int) -> None:
    mesh, nodes = mesh_of("a", "b", "c")
    publisher = Client(nodes[0], "publisher")
    publisher.publish("state/1", b"old", qos, retain=True)
    publisher.publish("state/1", b"new", qos, retain=True)
    mesh.run()
    assert retained(nodes[1]) == {}
    mesh.advance(3)
    for node in nodes:
        assert retained(node) == {"state/1": b"new"}
    assert nodes[1].engine.stats.retained_messages == 1


# semantics: R2
def test_only_the_last_of_each_topic_is_copied_where_nobody_subscribes() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    publisher = Client(a, "publisher")
    link = b.fabric.peers["a"].link
    assert link is not None
    before = link.bytes_in
    for number in range(1_000):
        publisher.publish("state/1", b"%0100d" % number, 1, retain=True)
    mesh.advance(3)
    assert retained(b) == {"state/1": b"%0100d" % 999}
    assert link.bytes_in - before < 1_000


# semantics: R2
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_interested_brokers_have_it_at_once_and_get_it_once(qos: int) -> None:
    mesh, (a, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("state/#")
    mesh.run()
    Client(a, "publisher").publish("state/1", b"x" * 5_000, qos, retain=True)
    mesh.run()
    assert retained(b) == {"state/1": b"x" * 5_000}
    link = b.fabric.peers["a"].link
    assert link is not None
    before = link.bytes_in
    mesh.advance(3)
    mesh.advance(3)
    assert len(subscriber.payloads) == 1
    assert not subscriber.messages[0].retain
    assert link.bytes_in - before < 1_000  # its content is not sent again
    assert b.engine.retained.seen == {replication.origin_id("a", a.fabric.epoch): a.fabric.replication._last}


# semantics: R3
def test_a_subscription_is_answered_locally() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "publisher").publish("state/1", b"x", 1, retain=True)
    mesh.advance(3)
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("state/+")  # nothing moves between brokers here
    assert subscriber.payloads == [b"x"]
    assert subscriber.messages[0].retain


# semantics: R3
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_who_subscribes_before_its_broker_knows_gets_it_then(qos: int) -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "publisher").publish("state/1", b"x", qos, retain=True)
    early, choosy, later = Client(b, "early"), Client(b, "choosy"), Client(b, "later")
    early.subscribe("state/+")
    choosy.subscribe("state/+", retain_handling=2)
    mesh.run()
    assert early.payloads == []
    mesh.advance(3)
    later.subscribe("state/+")
    mesh.advance(3)
    assert early.payloads == [b"x"]
    assert early.messages[0].retain
    assert later.payloads == [b"x"]
    assert choosy.payloads == []  # it wants no retained messages


# semantics: R4
def test_a_clear_is_a_change_like_any_other() -> None:
    mesh, nodes = mesh_of("a", "b", "c")
    Client(nodes[0], "publisher").publish("state/1", b"x", 1, retain=True)
    mesh.advance(3)
    Client(nodes[1], "other").publish("state/1", b"", 1, retain=True)
    mesh.advance(3)
    for node in nodes:
        assert retained(node) == {}
        assert b"state/1" in node.engine.retained.versions


# semantics: R4
def test_a_broker_that_was_away_does_not_bring_back_what_was_cleared() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("state/1", b"x", 1, retain=True)
    mesh.advance(3)
    mesh.cut(stream)
    publisher.publish("state/1", b"", 1, retain=True)
    mesh.link("a", "b")
    mesh.advance(3)
    assert retained(a) == retained(b) == {}
    # Long after, nothing is remembered of it.
    mesh.advance(mesh.settings.keep_for_seconds + 1)
    mesh.advance(100)
    assert a.engine.retained.versions == {}


# semantics: R1 R5
def test_the_last_one_wins_everywhere_after_a_partition() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    mesh.cut(stream)
    one, two = Client(a, "one"), Client(b, "two")
    one.publish("state/1", b"a, first", 1, retain=True)
    two.publish("state/2", b"b, first", 1, retain=True)
    mesh.advance(1)
    two.publish("state/1", b"b, last", 1, retain=True)
    one.publish("state/2", b"a, last", 1, retain=True)
    mesh.link("a", "b")
    mesh.run()
    assert retained(a) == retained(b) == {"state/1": b"b, last", "state/2": b"a, last"}


# semantics: R1
def test_stamps_follow_each_other_whatever_the_clocks_say() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    a.engine.effects.wall_offset += 3_600.0  # an hour ahead
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("state/#")
    mesh.run()
    Client(a, "one").publish("state/1", b"first", 1, retain=True)
    mesh.run()
    Client(b, "two").publish("state/1", b"second", 1, retain=True)
    mesh.advance(3)
    assert retained(a) == retained(b) == {"state/1": b"second"}


def test_only_what_is_newer_is_sent_when_a_link_comes_back() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    for number in range(100):
        publisher.publish(f"state/{number}", b"x" * 1_000, 1, retain=True)
    mesh.advance(3)
    mesh.cut(stream)
    publisher.publish("state/7", b"new", 1, retain=True)
    mesh.link("a", "b")
    mesh.run()
    link = b.fabric.peers["a"].link
    assert link is not None
    assert retained(b)["state/7"] == b"new"
    assert link.bytes_in < 3_000


def test_much_is_sent_in_pieces() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    publisher = Client(a, "publisher")
    for number in range(50):
        publisher.publish(f"state/{number}", b"x" * 10_000, 1, retain=True)
    mesh.link("a", "b")
    mesh.run()
    assert 0 < len(retained(b)) < 50
    for _ in range(50):
        mesh.advance(replication.PIECE_S)
    assert len(retained(b)) == 50


def test_messages_queued_for_a_broker_come_before_what_replaced_them() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("state/#")
    mesh.run()
    mesh.cut(stream)
    publisher = Client(a, "publisher")
    for number in range(10):
        publisher.publish("state/1", b"%d" % number, 2, retain=True)
    mesh.link("a", "b")
    mesh.advance(3)
    mesh.advance(3)
    assert subscriber.payloads == [b"%d" % number for number in range(10)]
    assert not any(message.retain for message in subscriber.messages)


# semantics: R5
def test_a_subscriber_learns_after_a_partition_what_it_did_not_get_at_qos_0() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("state/#")
    mesh.run()
    mesh.cut(stream)
    publisher = Client(a, "publisher")
    publisher.publish("state/1", b"1", 0, retain=True)
    publisher.publish("state/1", b"2", 0, retain=True)
    mesh.link("a", "b")
    mesh.run()
    assert subscriber.payloads == [b"2"]
    assert subscriber.messages[0].retain


def test_a_lost_broker_s_changes_reach_those_it_did_not_tell() -> None:
    mesh = Mesh()
    a, b, c = mesh.add("a"), mesh.add("b"), mesh.add("c")
    ab, _ = mesh.link("a", "b"), mesh.link("b", "c")
    ac = mesh.link("a", "c")
    mesh.run()
    mesh.cut(ac)
    Client(a, "publisher").publish("state/1", b"x", 1, retain=True)
    mesh.advance(3)
    assert retained(b) == {"state/1": b"x"}
    assert retained(c) == {}
    mesh.cut(ab)
    mesh.advance(5)
    assert retained(c) == {"state/1": b"x"}


# semantics: R8
def test_a_broker_that_forgot_everything_gets_its_own_back() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    Client(a, "publisher").publish("state/1", b"x", 1, retain=True)
    mesh.advance(3)
    mesh.cut(stream)
    mesh.seed += 1
    again = mesh.add("a")
    mesh.link("b", "a")
    mesh.run()
    assert retained(again) == {"state/1": b"x"}
    Client(again, "publisher").publish("state/1", b"y", 1, retain=True)
    mesh.advance(3)
    assert retained(b) == {"state/1": b"y"}


# semantics: R6
def test_an_expiry_goes_along() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    properties = Properties(message_expiry_interval=60)
    Client(a, "publisher").publish("state/1", b"x", 1, retain=True, properties=properties)
    mesh.advance(3)
    mesh.advance(27)
    subscriber = Client(b, "subscriber", version=MQTT_5)
    subscriber.subscribe("state/1")
    found = subscriber.messages[0].properties
    assert found is not None
    assert found.message_expiry_interval in (30, 31)
    mesh.advance(40)
    mesh.advance(40)
    assert retained(a) == retained(b) == {}


# semantics: D10
def test_the_broker_s_own_figures_stay_at_home() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    a.engine.publish("$SYS/broker/uptime", b"1", 0, True, mesh.now)
    mesh.advance(3)
    assert retained(b) == {}


# semantics: R7
def test_a_broker_without_room_says_nothing_for_others() -> None:
    mesh = Mesh(limits=Limits(max_retained_messages=2))
    a, b, c = mesh.add("a"), mesh.add("b"), mesh.add("c")
    mesh.limits = Limits()
    ab = mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    a.engine.inbound.apply(Limits())
    for number in range(4):
        publisher.publish(f"state/{number}", b"x", 1, retain=True)
    mesh.advance(3)
    assert len(retained(a)) == 4
    assert len(retained(b)) == 2
    assert b.engine.stats.not_retained == 2
    # It passes on what it has, and does not claim that this was all.
    mesh.cut(ab)
    mesh.link("b", "c")
    mesh.run()
    c.engine.inbound.apply(Limits())
    assert len(retained(c)) == 2
    mesh.link("a", "c")
    mesh.run()
    assert len(retained(c)) == 4


# semantics: R5
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_all_agree_in_the_end(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh(seed)
    names = ["a", "b", "c", "d"]
    for name in names:
        mesh.add(name)
    clients = {name: Client(mesh.nodes[name], "client " + name) for name in names}
    watcher = Client(mesh.nodes["d"], "watcher")
    watcher.subscribe("state/+")
    published: dict[str, bytes] = {}
    streams = {}
    pairs = [(one, two) for index, one in enumerate(names) for two in names[index + 1 :]]
    for pair in pairs:
        streams[pair] = mesh.link(*pair)
    mesh.run()
    for step in range(60):
        act = rng.random()
        pair = rng.choice(pairs)
        if act < 0.6:
            topic = f"state/{rng.randrange(5)}"
            payload = b"" if rng.random() < 0.2 else b"%d" % step
            clients[rng.choice(names)].publish(topic, payload, rng.randrange(3), retain=True)
            published[topic] = payload
        elif act < 0.7 and pair in streams:
            mesh.cut(streams.pop(pair))
        elif act < 0.85 and pair not in streams:
            streams[pair] = mesh.link(*pair)
        elif act < 0.95:
            mesh.run()
        mesh.advance(rng.choice([0.01, 1.0, 3.0]) if rng.random() < 0.3 else 0.001)
    for pair in pairs:
        if pair not in streams:
            mesh.link(*pair)
    for _ in range(10):
        mesh.advance(3)
    expected = {topic: payload for topic, payload in published.items() if payload}
    for name in names:
        assert retained(mesh.nodes[name]) == expected, (seed, name)
    # The watcher was told what stands, and nothing twice. Older messages of other brokers may have come after it.
    told = [(message.topic, message.payload) for message in watcher.messages if message.payload]
    assert set(expected.items()) <= set(told)
    assert len(told) == len(set(told))


# --- crashes -------------------------------------------------------------------------------------------------------------


# semantics: R8
def test_what_was_acknowledged_before_a_crash_is_told_after_it() -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=True), mesh.add("b", durable=True)
    mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("state/1", b"old", 1, retain=True)
    publisher.publish("state/2", b"gone", 1, retain=True)
    mesh.advance(3)
    publisher.publish("state/1", b"new", 1, retain=True)
    publisher.publish("state/2", b"", 1, retain=True)
    mesh.run()
    a.crash()  # before the interval was over
    assert retained(a) == {"state/1": b"new"}
    mesh.link("a", "b")
    mesh.run()
    assert retained(b) == {"state/1": b"new"}


def test_a_broker_that_was_restarted_asks_only_for_what_is_newer() -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=True), mesh.add("b", durable=True)
    mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    for number in range(50):
        publisher.publish(f"state/{number}", b"x" * 1_000, 1, retain=True)
    mesh.advance(3)
    b.crash(power_cut=False)
    publisher.publish("state/7", b"new", 1, retain=True)
    mesh.link("a", "b")
    mesh.run()
    link = b.fabric.peers["a"].link
    assert link is not None
    assert link.bytes_in < 4_000
    assert retained(b)["state/7"] == b"new"
    assert len(retained(b)) == 50


def test_the_journal_is_rewritten_with_versions_and_clears() -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=True), mesh.add("b", durable=True)
    mesh.link("a", "b")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("state/1", b"x", 1, retain=True)
    publisher.publish("state/2", b"y", 1, retain=True)
    mesh.advance(3)
    publisher.publish("state/2", b"", 1, retain=True)
    mesh.advance(3)
    before = {topic: (v.stamp, v.origin) for topic, v in b.engine.retained.versions.items()}
    seen = dict(b.engine.retained.seen)
    for _ in range(2):  # a start writes everything anew
        b.crash(power_cut=False)
    assert {topic: (v.stamp, v.origin) for topic, v in b.engine.retained.versions.items()} == before
    assert b.engine.retained.seen == seen
    assert retained(b) == {"state/1": b"x"}


def test_messages_retained_before_there_was_a_fabric_become_part_of_it() -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=True), mesh.add("b")
    a.engine.retained.replica = None
    Client(a, "publisher").publish("state/1", b"x", 1, retain=True)
    a.sync()
    a.crash()
    mesh.link("a", "b")
    mesh.advance(3)
    assert retained(b) == {"state/1": b"x"}


@pytest.mark.parametrize("seed", range(10))
def test_crashes_do_not_bring_anything_back(seed: int) -> None:
    rng = random.Random(seed)
    mesh = Mesh(seed)
    names = ["a", "b", "c"]
    for name in names:
        mesh.add(name, durable=True)
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    for pair in pairs:
        mesh.link(*pair)
    mesh.run()
    published: dict[str, bytes] = {}
    for step in range(40):
        node = mesh.nodes[rng.choice(names)]
        act = rng.random()
        if act < 0.7:
            topic = f"state/{rng.randrange(5)}"
            payload = b"" if rng.random() < 0.3 else b"%d" % step
            Client(node, f"publisher {step}").publish(topic, payload, 1 + rng.randrange(2), retain=True)
            node.sync()  # acknowledged
            published[topic] = payload
        elif act < 0.85:
            node.crash()
            for pair in pairs:
                if node.name in pair:
                    mesh.link(*pair)
        mesh.advance(rng.choice([0.001, 0.01, 3.0]))
    for _ in range(5):
        mesh.advance(3)
    expected = {topic: payload for topic, payload in published.items() if payload}
    for name in names:
        assert retained(mesh.nodes[name]) == expected, (seed, name)


# semantics: L1
def test_topics_of_class_local_stay_at_home() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    a.fabric.classes.replace([("private/#", "local")], 1)
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("#")
    mesh.run()
    Client(a, "publisher").publish("private/1", b"x", 1, retain=True)
    Client(a, "publisher").publish("public/1", b"y", 1, retain=True)
    mesh.advance(3)
    assert retained(a) == {"private/1": b"x", "public/1": b"y"}
    assert retained(b) == {"public/1": b"y"}
    assert subscriber.payloads == [b"y"]


# semantics: R1 R8
def test_a_change_that_its_broker_lost_before_it_was_on_disk_comes_back_from_who_got_the_message() -> None:
    mesh = Mesh()
    a, b, c = mesh.add("a", durable=True), mesh.add("b", durable=True), mesh.add("c")
    mesh.link("a", "b")
    mesh.link("a", "c")
    mesh.link("b", "c")
    Client(b, "subscriber").subscribe("state/#")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("state/1", b"old", 1, retain=True)
    mesh.advance(3)
    saved = dict(a.storage.safe)
    publisher.publish("state/1", b"new", 0, retain=True)  # to b with the message; c would get it with the next batch
    mesh.run()
    assert retained(b) == {"state/1": b"new"}
    assert retained(c) == {"state/1": b"old"}
    a.storage.safe = saved
    a.crash()
    assert retained(a) == {"state/1": b"old"}
    mesh.link("a", "c")
    mesh.run()
    mesh.link("a", "b")
    mesh.run()
    mesh.advance(3)
    for node in (a, b, c):
        assert retained(node) == {"state/1": b"new"}

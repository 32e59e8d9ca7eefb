"""Messages go to the brokers that have subscribers, once, and to no other."""

from __future__ import annotations

import pytest

from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Connect, Publish, Subscribe, SubscriptionRequest, Unsubscribe
from tests.fabric_harness import End, Mesh, Node


def connect(node: Node, client_id: str) -> End:
    client = node.client()
    node.feed(client, encode(Connect(version=MQTT_5, client_id=client_id, clean_start=True, keep_alive=0), MQTT_5))
    return client


def subscribe(node: Node, client: End, topic_filter: str, qos: int = 2) -> None:
    node.feed(client, encode(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]), MQTT_5))


def publish(node: Node, client: End, topic: str, payload: bytes, qos: int, packet_id: int = 1) -> None:
    node.feed(client, encode(Publish(topic, payload, qos, packet_id=packet_id if qos else 0), MQTT_5))


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_crosses_to_the_broker_with_a_subscriber_once(qos: int) -> None:
    mesh = Mesh()
    a, b, c = mesh.add("a"), mesh.add("b"), mesh.add("c")
    for pair in (("a", "b"), ("a", "c"), ("b", "c")):
        mesh.link(*pair)
    mesh.run()
    subscriber, publisher = connect(b, "subscriber"), connect(a, "publisher")
    subscribe(b, subscriber, "rooms/+")
    mesh.run()
    publish(a, publisher, "rooms/1", b"warm", qos)
    publish(a, publisher, "elsewhere", b"cold", qos, 2)
    mesh.run()
    assert bytes(subscriber.received).count(b"warm") == 1
    assert b"cold" not in subscriber.received
    assert c.fabric.peers["a"].received == 0
    assert c.fabric.peers["a"].received_unreliable == 0
    assert not a.fabric.peers["b"].session.queued_messages


def test_interest_ends_with_the_last_subscriber() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    subscriber, publisher = connect(b, "subscriber"), connect(a, "publisher")
    subscribe(b, subscriber, "rooms/1")
    mesh.run()
    b.feed(subscriber, encode(Unsubscribe(2, ["rooms/1"]), MQTT_5))
    mesh.run()
    publish(a, publisher, "rooms/1", b"warm", 1)
    mesh.run()
    assert b.fabric.peers["a"].received == 0


@pytest.mark.parametrize("qos", [1, 2])
def test_what_a_broken_link_swallowed_is_sent_again(qos: int) -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber, publisher = connect(b, "subscriber"), connect(a, "publisher")
    subscribe(b, subscriber, "rooms/1")
    mesh.run()
    publish(a, publisher, "rooms/1", b"warm", qos)
    mesh.cut(stream)
    publish(a, publisher, "rooms/1", b"cosy", qos, 2)
    mesh.link("b", "a")
    mesh.run()
    assert bytes(subscriber.received).count(b"warm") == 1
    assert bytes(subscriber.received).count(b"cosy") == 1

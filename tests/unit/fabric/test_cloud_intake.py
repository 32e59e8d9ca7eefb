"""What comes from the cloud and how brokers take it: what was stored there, what is for members of shared subscriptions."""

from __future__ import annotations

from collections import Counter

from nearcast.mqtt.publication import build
from tests.broadcast_harness import GroupMesh, GroupNode
from tests.fabric_clients import Client


def apart() -> tuple[GroupMesh, GroupNode, GroupNode]:
    """Two brokers far from each other, each its own group."""
    mesh = GroupMesh()
    mesh.far(("a",), ("b",))
    a, b = mesh.broker("a", lcm=2.0), mesh.broker("b", lcm=1.0)
    mesh.form(("a",), ("b",))
    return mesh, a, b


def test_what_is_retained_at_the_cloud_is_not_delivered_again_with_every_subscription() -> None:
    mesh, a, _ = apart()
    outside = Client(mesh.cloud, "outside")
    outside.publish("cars/1", b"parked", 1, retain=True)
    wide, narrow = Client(a, "wide"), Client(a, "narrow")
    wide.subscribe("cars/#")
    mesh.advance(1.0)
    narrow.subscribe("cars/1")
    mesh.advance(1.0)
    assert (wide.payloads, narrow.payloads) == ([b"parked"], [b"parked"])
    wide.unsubscribe("cars/#")  # at the cloud cars/# gives way to cars/1, which brings the message once more
    mesh.advance(1.0)
    assert narrow.payloads == [b"parked"]
    outside.publish("cars/1", b"parked", 1, retain=True)  # said again, not stored
    mesh.advance(1.0)
    assert narrow.payloads == [b"parked", b"parked"]


def test_what_comes_by_subscriptions_that_are_being_given_up_is_left_to_the_leader() -> None:
    mesh = GroupMesh()
    mesh.broker("a", lcm=2.0)
    b = mesh.broker("b", lcm=1.0)
    client = Client(b, "client")
    client.subscribe("cars/#", 1)
    mesh.form(("a", "b"))
    mesh.until("b is covered by a alone", lambda: "b" not in b.fabric.broadcast.coverage.covered)
    late = build(b"cars/1", b"one", 1, False, b"", 0.0)
    b.fabric.broadcast.intake.arrived(late, None, mesh.now)
    Client(mesh.cloud, "outside").publish("cars/1", b"one", 1)
    mesh.advance(1.0)
    assert client.payloads == [b"one"]


def test_what_was_on_its_way_when_its_topic_got_another_class_arrives() -> None:
    mesh, a, b = apart()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("cars/#", 1)
    mesh.advance(1.0)
    mesh.stalled.add("b")
    Client(a, "publisher").publish("cars/1", b"one", 1)
    Client(mesh.cloud, "outside").publish("cars/1", b"two", 1)
    mesh.run()
    for node in (a, b):
        node.fabric.classes.replace([("cars/#", "bridged")], 1)
    mesh.stalled.clear()
    mesh.advance(1.0)
    assert subscriber.payloads == [b"one"]
    assert b.fabric.broadcast.intake.foreign_messages == 1


def test_a_shared_subscription_that_is_wider_than_the_rule_is_served() -> None:
    """``$share/pool/#`` and ``$share/pool/cars/#`` are two groups, also where a rule makes them the same filter."""
    mesh, a, b = apart()
    wide = [Client(a, "wide at a"), Client(b, "wide at b")]
    narrow = Client(b, "narrow at b")
    for client in wide:
        client.subscribe("$share/pool/#")
    narrow.subscribe("$share/pool/cars/#")
    mesh.advance(1.0)
    outside = Client(mesh.cloud, "outside")
    for number in range(20):
        outside.publish("cars/1", b"%d" % number, 1)
    mesh.advance(1.0)
    everything = Counter(b"%d" % number for number in range(20))
    assert Counter(narrow.payloads) == everything
    assert Counter(wide[0].payloads) + Counter(wide[1].payloads) == everything
    assert wide[0].payloads
    assert wide[1].payloads

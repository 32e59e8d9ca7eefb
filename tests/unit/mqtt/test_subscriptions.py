"""The subscription tree and routes: what changes an answer, what is shared, what it costs."""

from __future__ import annotations

from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import build
from nearcast.mqtt.routing import Router, encode_identifier
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription, SubscriptionTree
from tests.engine_harness import World


def session(name: str) -> Session:
    return Session(name, 1, Effects(False), 10, 10_000)


def test_the_generation_changes_only_with_the_answer() -> None:
    tree = SubscriptionTree()
    ann = session("ann")
    before = tree.generation
    assert not tree.remove("", "a", "ann")
    assert tree.generation == before
    tree.add("", "a", Subscription(ann, "a", 0))
    assert tree.generation > before
    before = tree.generation
    tree.add("", "a", Subscription(ann, "a", 1))  # other options: routes must be compiled again
    assert tree.generation > before
    before = tree.generation
    assert tree.remove("", "a", "ann")
    assert tree.generation > before
    assert tree.count == 0


def test_groups_of_one_name_are_told_apart_by_filter() -> None:
    tree = SubscriptionTree()
    for name, inner in (("ann", "a/+"), ("bob", "a/#"), ("cyd", "a/+")):
        tree.add("g", inner, Subscription(session(name), f"$share/g/{inner}", 0))
    groups = {group.inner_filter: sorted(group.members) for group in tree.match(b"a/1").groups}
    assert groups == {"a/+": ["ann", "cyd"], "a/#": ["bob"]}


def test_matching_visits_what_the_topic_asks_for() -> None:
    """A hundred thousand subscriptions elsewhere do not lengthen the walk: nodes are reached by name only."""
    tree = SubscriptionTree()
    for number in range(20_000):
        tree.add("", f"device/{number}/+/state", Subscription(session(f"c{number}"), "x", 0))
    found = tree.match(b"device/777/room/state")
    assert [subscription.session.client_id for subscription in found.subscriptions] == ["c777"]


def test_a_route_is_compiled_once_per_change() -> None:
    effects = Effects(False)
    tree = SubscriptionTree()
    router = Router(effects, tree)
    tree.add("", "t", Subscription(session("ann"), "t", 0))
    first = router.route_for(b"t")
    targets = first.targets
    assert router.route_for(b"t").targets is targets
    tree.add("", "u", Subscription(session("ann"), "u", 0))
    again = router.route_for(b"t")
    assert again is first
    assert again.targets is not targets


def test_routes_that_are_out_of_date_or_idle_are_swept() -> None:
    effects = Effects(False)
    tree = SubscriptionTree()
    router = Router(effects, tree)
    message = build(b"t", b"payload", 0, False)
    router.publish(router.route_for(b"t"), message, None, 0.0)
    tree.add("", "t", Subscription(session("ann"), "t", 0))
    router.publish(router.route_for(b"u"), message, None, 0.0)
    router.route_for(b"idle")
    router.sweep()
    assert [topic for topic, _, _ in router.topic_counts()] == ["u"]
    router.sweep()
    assert router.topic_counts() == []


def test_long_topics_are_not_remembered() -> None:
    router = Router(Effects(False), SubscriptionTree())
    router.route_for(b"x" * 257)
    router.route_for(b"x" * 256)
    assert [topic for topic, _, _ in router.topic_counts()] == ["x" * 256]


def test_topic_counts_and_sequence_numbers() -> None:
    effects = Effects(False)
    router = Router(effects, SubscriptionTree())
    message = build(b"t", b"payload", 0, False)
    assert not router.publish(router.route_for(b"t"), message, None, 0.0)
    second = build(b"t", b"payload", 1, False)
    router.publish(router.route_for(b"t"), second, None, 0.0)
    assert router.topic_counts() == [("t", 2, len(message.packets) + len(second.packets))]
    assert (message.sequence, second.sequence, router.next_sequence) == (1, 2, 3)
    assert effects.stats.unmatched == 2


def test_subscription_identifiers_as_they_are_sent() -> None:
    assert encode_identifier(0) == b""
    assert encode_identifier(1) == b"\x0b\x01"
    assert encode_identifier(268_435_455) == b"\x0b\xff\xff\xff\x7f"


def test_overlapping_subscriptions_with_and_without_no_local() -> None:
    world = World()
    ann = world.connect("ann")
    ann.subscribe("t/#", 0, no_local=True)
    ann.subscribe("t/+", 1)
    ann.publish("t/1", b"mine", 1)
    assert ann.payloads() == [b"mine"]
    bob = world.connect("bob")
    bob.publish("t/1", b"yours", 1)
    assert ann.payloads() == [b"yours"]


def test_a_shared_run_is_spread_over_the_members() -> None:
    world = World()
    members = [world.connect(f"m{number}", 4) for number in range(3)]
    for member in members:
        member.subscribe("$share/g/t", 1)
    publisher = world.connect("p", 4)
    publisher.send(b"".join(b"\x32\x06\x00\x01t\x00" + bytes([number + 1, number]) for number in range(30)))
    got = [member.payloads() for member in members]
    assert [len(payloads) for payloads in got] == [10, 10, 10]
    assert sorted(payload for payloads in got for payload in payloads) == [bytes([number]) for number in range(30)]
    for payloads in got:
        assert payloads == sorted(payloads)


def test_a_member_that_lags_is_passed_over() -> None:
    world = World()
    slow, fast = world.connect("slow", properties=None), world.connect("fast")
    for member in (slow, fast):
        member.subscribe("$share/g/t", 1)
    slow.connection.congested = True
    publisher = world.connect("p", 4)
    for number in range(6):
        publisher.publish("t", bytes([number]), 1, packet_id=number + 1)
    assert len(fast.payloads()) == 6

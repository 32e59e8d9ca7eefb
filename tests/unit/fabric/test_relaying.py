"""From a broker to the cloud: each message once, kept by its origin until the cloud has it, whoever relays, whatever fails."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.group_facts import group_facts
from nearcast.fabric.relaying import MAX_BACKLOG_BYTES, Relay
from nearcast.mqtt.packets import PubAck, PubRec
from nearcast.mqtt.records import number
from tests.broadcast_harness import SETTINGS, GroupMesh, GroupNode
from tests.fabric_clients import Client


def relay_of(node: GroupNode) -> Relay:
    relay = node.fabric.broadcast.relay
    assert relay is not None
    return relay


class Site:
    """a leads b; far away, x, with a subscriber, is alone."""

    def __init__(self, *, settings: object = SETTINGS, durable: bool = True) -> None:
        assert isinstance(settings, type(SETTINGS))
        self.mesh = GroupMesh(settings=settings)
        self.mesh.far(("a", "b"), ("x",))
        self.a = self.mesh.broker("a", lcm=3.0, durable=durable)
        self.b = self.mesh.broker("b", lcm=2.0, durable=durable)
        self.x = self.mesh.broker("x", lcm=1.0, durable=durable)
        self.mesh.form(("a", "b"), ("x",))
        self.subscriber = Client(self.x, "subscriber", expiry=100_000)
        self.subscriber.subscribe("cars/#")
        self.mesh.until("SUBACK", lambda: bool(self.subscriber.subacks))

    def settle(self) -> None:
        self.mesh.until("nothing waits", lambda: not (self.a.waiting or self.b.waiting))
        self.mesh.advance(1.0)


def payloads(count: int) -> list[bytes]:
    return [b"%d" % number_of for number_of in range(count)]


@pytest.mark.parametrize("origin", ["a", "b"])
@pytest.mark.parametrize("qos", [1, 2])
def test_messages_go_to_the_cloud_once_and_in_order(origin: str, qos: int) -> None:
    site = Site()
    node = site.a if origin == "a" else site.b
    publisher = Client(node, "publisher")
    for payload in payloads(20):
        publisher.publish("cars/1", payload, qos)
    site.settle()
    assert site.subscriber.payloads == payloads(20)
    assert relay_of(site.a).relayed_messages == 20
    assert relay_of(site.a).relayed_for_members == (20 if origin == "b" else 0)
    assert relay_of(site.b).relayed_messages == 0


def test_a_member_pushes_what_waits_and_then_sends_nothing_twice() -> None:
    site = Site()
    site.mesh.stop_cloud()
    publisher = Client(site.b, "publisher")
    for payload in payloads(10):
        publisher.publish("cars/1", payload)
    site.mesh.advance(1.0)
    assert site.b.waiting == 10
    site.mesh.start_cloud()
    site.mesh.until("live", lambda: relay_of(site.b).is_live)
    site.settle()
    sent = relay_of(site.b).session.sent_messages
    for payload in payloads(20)[10:]:
        publisher.publish("cars/1", payload)
    site.settle()
    assert relay_of(site.b).session.sent_messages == sent, "its leader takes what it is flooded with"
    assert site.subscriber.payloads == payloads(20)


@pytest.mark.parametrize("seed", range(6))
def test_pushing_becomes_live_in_the_middle_of_things(seed: int) -> None:
    """Messages are published while the queue is pushed, one piece of one stream arriving at a time."""
    site = Site()
    rng = random.Random(seed)
    publisher = Client(site.b, "publisher")
    for payload in payloads(60):
        publisher.publish("cars/1", payload, 1 + int(payload) % 2)
        if int(payload) % 12 == 11:
            site.a.fabric.peers["b"].send(frame(frames.RELAY_STATE, number(0)))  # stop; it asks for the next go itself
            site.mesh.tick(1.0)
        for _ in range(rng.randrange(12)):
            site.mesh.step(rng)
    site.mesh.advance(2.0)
    site.settle()
    assert relay_of(site.b).is_live
    assert site.subscriber.payloads == payloads(60)


@pytest.mark.parametrize("victim", ["a", "b", "x"])
@pytest.mark.parametrize("steps", range(0, 24, 4))
def test_a_power_cut_at_any_moment_loses_nothing(victim: str, steps: int) -> None:
    site = Site()
    rng = random.Random(steps)
    publisher = Client(site.b, "publisher")
    for payload in payloads(3):
        publisher.publish("cars/1", payload, 1 + int(payload) % 2)
    for _ in range(steps):
        site.mesh.step(rng)
    publisher.read()
    acknowledged = [packet.packet_id for packet in publisher.packets if isinstance(packet, PubAck | PubRec)]
    before = site.subscriber.payloads
    node = site.mesh.nodes[victim]
    node.crash()
    after = Client(site.x, "subscriber", clean_start=False, expiry=100_000) if victim == "x" else site.subscriber
    site.mesh.advance(8.0)
    site.settle()
    received = Counter(after.payloads if after is site.subscriber else before + after.payloads)
    for packet_id in acknowledged:
        assert received[payloads(3)[packet_id - 1]] >= 1
    if victim == "a":
        assert max(received.values(), default=0) <= 1, "neither origin nor receiver forgot anything"


def test_a_leader_with_too_much_says_stop_and_goes_on_later() -> None:
    site = Site(durable=False)
    site.mesh.stalled.add("a")
    publisher = Client(site.b, "publisher")
    piece = MAX_BACKLOG_BYTES // 50
    for payload in payloads(90):
        publisher.publish("cars/1", payload.ljust(piece))
        site.mesh.run()
    assert relay_of(site.a).stops >= 1
    assert site.b.waiting == 90, "nothing is lost that the leader had no room for"
    site.mesh.stalled.clear()
    site.settle()
    assert [payload.strip() for payload in site.subscriber.payloads] == payloads(90)


@pytest.mark.parametrize("origin", ["a", "b"])
@pytest.mark.parametrize("waits", [False, True])
def test_large_messages_are_relayed(origin: str, waits: bool) -> None:
    """Larger than what any broker takes unasked, and pushed where they had to wait."""
    site = Site(durable=False)
    large = bytes(1_000_000)
    if waits:
        site.mesh.stop_cloud()
    Client(site.a if origin == "a" else site.b, "publisher").publish("cars/1", large)
    site.mesh.advance(1.0)
    site.mesh.start_cloud()
    site.settle()
    assert site.subscriber.payloads == [large]


def test_a_queue_that_is_too_long_goes_on_in_files_over_a_power_cut() -> None:
    site = Site(settings=msgspec.structs.replace(SETTINGS, max_queued_bytes=20_000, max_queued_messages=100))
    site.mesh.stop_cloud()
    publisher = Client(site.b, "publisher")
    for payload in payloads(500):
        publisher.publish("cars/1", payload.ljust(100))
        site.mesh.run()
    assert relay_of(site.b).session.spilled_messages > 300
    site.b.crash()
    site.mesh.start_cloud()
    site.mesh.advance(8.0)
    site.settle()
    assert relay_of(site.b).session.spilled_messages == 0
    assert [payload.strip() for payload in site.subscriber.payloads] == payloads(500)
    site.mesh.advance(2.0)
    assert site.b.spool.files() == []


def test_qos_0_is_relayed_at_once_or_not_at_all() -> None:
    site = Site()
    publisher = Client(site.b, "publisher")
    publisher.publish("cars/1", b"now", 0)
    site.mesh.run()
    assert site.subscriber.payloads == [b"now"]
    site.mesh.stop_cloud()
    publisher.publish("cars/1", b"never", 0)
    site.mesh.advance(0.1)
    site.mesh.start_cloud()
    site.mesh.advance(5.0)
    assert site.subscriber.payloads == [b"now"]
    assert relay_of(site.a).dropped_messages == 1


def test_a_cloud_that_forgets_everything_is_told_again() -> None:
    site = Site()
    publisher = Client(site.b, "publisher")
    site.mesh.forget_cloud()
    publisher.publish("cars/1", b"waits", 2)
    site.mesh.advance(1.0)
    assert site.b.waiting == 1
    # The subscriber's broker is there before the publisher's leader: the cloud has nobody else to keep it for.
    site.mesh.part("a", "cloud")
    site.mesh.start_cloud()
    site.mesh.until("x is back", lambda: site.x.fabric.broadcast.coverage.is_settled())
    site.mesh.heal()
    site.mesh.until("it is through", lambda: site.subscriber.payloads == [b"waits"])
    site.settle()


def test_the_relay_says_how_it_is() -> None:
    site = Site()
    assert relay_of(site.a).state() == "live"
    assert relay_of(site.b).state() == "live"
    site.mesh.stop_cloud()
    site.mesh.advance(0.5)
    assert relay_of(site.a).state() == "no cloud"
    assert relay_of(site.b).state() == "held"
    facts = group_facts(site.a.fabric.broadcast, leaders=False)
    assert facts is not None
    assert [fellow.relay for fellow in facts.fellows] == ["held"]
    site.mesh.part("a", "b")
    site.mesh.run()
    assert relay_of(site.b).state() == "held"


def test_what_waits_for_the_cloud_at_a_leader_does_not_keep_its_own_clients_waiting() -> None:
    mesh = GroupMesh()
    mesh.far(("a",), ("b",))
    a, b = mesh.broker("a", lcm=2.0), mesh.broker("b", lcm=1.0)
    mesh.form(("a",), ("b",))
    subscriber = Client(a, "subscriber")
    subscriber.subscribe("cars/#")
    mesh.advance(1.0)
    for node in (a, b):
        cloud = node.fabric.broadcast.cloud
        assert cloud is not None
        cloud.machine.settings.max_inflight = 0  # it has no room
    publisher = Client(b, "publisher")
    for payload in payloads(10):
        publisher.publish("cars/1", payload)
    mesh.distances.clear()
    mesh.form(("a", "b"))
    assert subscriber.payloads == payloads(10)
    assert b.waiting == 10


def test_a_member_that_lost_its_memory_is_not_told_of_what_it_had_before() -> None:
    """Its clock may have gone back since: numbers of before may be those of other messages now."""
    site = Site(durable=False)
    site.mesh.stalled.add("a")
    Client(site.b, "publisher").publish("cars/1", b"before", 1)
    site.mesh.run()
    assert site.b.waiting == 1
    site.b.crash()
    site.mesh.until("a link", lambda: site.a.fabric.peers["b"].epoch == site.b.fabric.epoch)
    site.mesh.stalled.clear()
    site.mesh.advance(1.0)
    assert site.subscriber.payloads == [b"before"]
    assert relay_of(site.b).session.last_confirmed == 0

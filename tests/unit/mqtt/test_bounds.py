"""What a client must not be able to do to the broker, and what the broker must not do to a healthy client."""

from __future__ import annotations

import pytest

from nearcast.config import Limits
from nearcast.mqtt.packets import (
    Connect,
    Disconnect,
    Properties,
    PubAck,
    Publish,
    PubRec,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from tests.engine_harness import World


@pytest.mark.parametrize("packet", ["40020000", "50020000", "62020000", "70020000"])
@pytest.mark.parametrize("version", [4, 5])
def test_an_acknowledgement_of_identifier_0_ends_the_connection(version: int, packet: str) -> None:
    world = World()
    client = world.connect("c", version)
    client.send(bytes.fromhex(packet))
    assert client.closed


def test_a_healthy_subscriber_gets_all_retained_messages_however_many() -> None:
    world = World(limits=Limits(max_output_bytes=10_000))
    publisher = world.connect("p")
    for number in range(300):
        publisher.publish(f"r/{number}", b"x" * 1_000, retain=True)
    reader = world.connect("r")
    reader.subscribe("r/#")
    assert len(reader.payloads()) == 300
    assert world.engine.stats.dropped_slow_consumer == 0
    assert reader.connection.owed_retained is None


def test_retained_messages_wait_for_a_client_that_is_slow_and_are_then_what_is_retained() -> None:
    world = World(limits=Limits(max_output_bytes=2_000))
    publisher = world.connect("p")
    for number in range(10):
        publisher.publish(f"r/{number}", b"x" * 1_000, retain=True)
    reader = world.connect("r")
    reader.connection.congested = True
    reader.send(Subscribe(1, [SubscriptionRequest("r/#")]))
    publisher.publish("r/0", b"", retain=True)
    for number in range(1, 10):
        publisher.publish(f"r/{number}", b"new", retain=True)
    world.engine.writable(reader.connection, world.now)
    world.flush()
    retained = [message.payload for message in reader.messages() if message.retain]
    assert retained == [b"new"] * 9


def test_a_filter_that_stands_in_a_packet_many_times_is_one_subscription() -> None:
    world = World()
    publisher = world.connect("p")
    for number in range(20):
        publisher.publish(f"r/{number}", b"m", retain=True)
    reader = world.connect("r")
    reader.send(Subscribe(1, [SubscriptionRequest("#")] * 12_000))
    assert len(reader.messages()) == 20


def test_a_client_cannot_fill_the_broker_with_topic_names() -> None:
    world = World()
    client = world.connect("c")
    for number in range(50):
        client.publish(f"{number}/" + "x" * 60_000, b"")
    assert world.engine.topic_counts() == []
    client.publish("short", b"")
    world.advance(90)
    assert world.engine.topic_counts() == []


def test_retained_messages_are_bounded_in_bytes() -> None:
    world = World(limits=Limits(max_retained_bytes=5_000), durable=True)
    client = world.connect("c")
    for number in range(10):
        client.publish(f"t/{number}", b"x" * 1_000, 1, retain=True, packet_id=number + 1)
    assert {type(packet) for packet in client.packets()} == {PubAck}
    assert world.engine.retained.count == 4
    assert world.engine.stats.not_retained == 6
    client.publish("t/0", b"y" * 3_000, retain=True)
    assert world.engine.retained.get(b"t/0") is None
    assert world.recovered().engine.retained.count == 3


def test_a_retained_qos_2_message_without_room_is_delivered_once() -> None:
    world = World(limits=Limits(max_retained_messages=0))
    client, reader = world.connect("c"), world.connect("r")
    reader.subscribe("t", 2)
    for _ in range(3):
        client.publish("t", b"once", 2, retain=True, packet_id=1)
    assert reader.payloads() == [b"once"]
    assert [packet.reason_code for packet in client.packets() if isinstance(packet, PubRec)] == [0, 0, 0]


def test_lower_limits_do_not_break_what_connected_clients_were_told() -> None:
    world = World()
    client = world.connect("c", will=Will("a/b/c/d", b"gone"))
    client.publish("t", b"m", properties=Properties(topic_alias=5))
    world.engine.apply(Limits(topic_alias_maximum=0, receive_maximum=1, max_packet_bytes=64, max_qos=0, max_topic_levels=2))
    client.send(Publish("", b"x" * 100, properties=Properties(topic_alias=5)))
    for packet_id in (1, 2, 3):
        client.publish("t", b"m", 2, packet_id=packet_id)
    assert not client.closed
    reader = world.connect("r")
    reader.subscribe("#")
    client.lose()
    assert reader.payloads() == [b"gone"]


def test_an_expired_message_of_a_shared_subscription_is_not_passed_on() -> None:
    world = World()
    away, boss = world.connect("away", expiry=50), world.connect("boss")
    away.subscribe("$share/g/t", 1)
    away.lose()
    boss.publish("t", b"old", 1, properties=Properties(message_expiry_interval=5))
    worker = world.connect("worker")
    worker.subscribe("$share/g/t", 1)
    world.advance(60)
    assert worker.payloads() == []
    assert world.engine.stats.dropped_expired == 1


def test_queued_messages_do_not_keep_the_forms_of_other_receivers() -> None:
    world = World()
    sleeper = world.persistent("sleeper", 4)
    sleeper.subscribe("t", 1)
    sleeper.lose()
    world.connect("awake", 5).subscribe("t", 1, identifier=7)
    world.connect("p", 4).publish("t", b"x" * 100, 1)
    queue = world.session("sleeper").queue
    assert queue is not None
    assert queue[0].publication._forms is None


def test_small_reads_do_not_multiply_memory() -> None:
    world = World()
    client = world.open()
    client.send(b"\x10\xff\xff\x03")
    for _ in range(2_000):
        client.send(b"xx")
    assert isinstance(client.connection.partial, bytearray)
    assert len(client.connection.partial) == 4_004


def test_a_refusal_fits_the_clients_maximum_packet_size() -> None:
    world = World(server_reference=None, limits=Limits(max_sessions=1))
    world.connect("one")
    client = world.open()
    answer = client.connect(Connect("two", properties=Properties(maximum_packet_size=16)))
    assert answer.reason_code == 0x97
    assert answer.properties is None


def test_a_connection_that_ended_keeps_nothing_large() -> None:
    world = World()
    client = world.connect("c")
    client.publish("t" * 200, b"", properties=Properties(topic_alias=1))
    client.send(Disconnect())
    connection = client.connection
    assert connection.aliases_in is None
    assert connection.allowed_topics is None
    assert connection.partial is None

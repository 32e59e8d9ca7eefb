"""A gateway in front of real brokers, without sockets: clients, windows, lost brokers, no brokers, moves."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.config import Limits
from nearcast.fabric import tunnels
from nearcast.fabric.gateway import GatewaySettings
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import (
    ConnAck,
    Connect,
    Disconnect,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from tests.fabric_harness import Mesh
from tests.gateway_hosts import Client, GatewayHost


def gateway(*brokers: str, settings: GatewaySettings | None = None, limits: Limits | None = None) -> GatewayHost:
    mesh = Mesh(limits=limits)
    for name in brokers:
        mesh.add(name)
    for index, name in enumerate(brokers):
        for other in brokers[index + 1 :]:
            mesh.link(name, other)
    mesh.run()
    host = GatewayHost(mesh, settings=settings, limits=limits)
    for name in brokers:
        host.link(name)
    return host


def subscribe(client: Client, topic_filter: str, qos: int = 0) -> None:
    client.say(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]))
    assert isinstance(client.take()[0], SubAck)


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_messages_pass(version: int, qos: int) -> None:
    host = gateway("a")
    receiver, sender = host.connect("r", version), host.connect("s", version)
    subscribe(receiver, "t", qos)
    sender.say(Publish("t", b"hello", qos, packet_id=qos and 9))
    if qos == 1:
        assert sender.take() == [PubAck(9)]
    if qos == 2:
        assert sender.take() == [PubRec(9)]
        sender.say(PubRel(9))
        assert sender.take() == [PubComp(9)]
    assert receiver.payloads() == [b"hello"]


def test_the_first_packet_must_be_a_connect() -> None:
    host = gateway("a")
    client = host.accept()
    client.say(PingReq())
    assert client.closed
    assert host.mesh.nodes["a"].engine.stats.connections_opened == 0


def test_what_is_sent_behind_a_connect_waits_for_nothing() -> None:
    host = gateway("a")
    client = host.accept()
    client.say(Connect("c"), Subscribe(1, [SubscriptionRequest("t")]), Publish("t", b"own"), PingReq())
    kinds = [type(packet) for packet in client.take()]
    assert kinds == [ConnAck, SubAck, Publish, PingResp]


def test_a_refused_client_hears_the_brokers_words() -> None:
    host = gateway("a")
    client = host.accept()
    client.say(Connect("c", keep_alive=0), encode(Connect("again"), 5))
    assert isinstance(client.take()[-1], Disconnect)
    assert client.closed


def test_a_malformed_connect_is_the_brokers_to_judge() -> None:
    host = gateway("a")
    client = host.accept()
    client.say(b"\x10\x06\x00\x04MQTX")
    assert client.closed


def test_a_client_that_leaves_is_gone_at_the_broker() -> None:
    host = gateway("a")
    client = host.connect("c")
    assert host.mesh.nodes["a"].engine.stats.connected_clients == 1
    client.vanish()
    assert host.mesh.nodes["a"].engine.stats.connected_clients == 0
    assert not host.machine.tunnels
    assert not host.machine.lines["a"].channels


def test_clients_of_mqtt_3_without_an_identifier_have_one() -> None:
    host = gateway("a")
    first, second = host.connect("", 4), host.connect("", 4)
    assert first.tunnel is not None
    assert second.tunnel is not None
    assert first.tunnel.client_id
    assert first.tunnel.client_id != second.tunnel.client_id
    assert first.tunnel.client_id in host.mesh.nodes["a"].engine.sessions.by_client


def test_a_packet_larger_than_the_window_passes_both_ways() -> None:
    host = gateway("a", limits=Limits(max_packet_bytes=4_000_000, max_output_bytes=8_000_000))
    receiver, sender = host.connect("r"), host.connect("s")
    subscribe(receiver, "t", 1)
    payload = bytes(range(256)) * 8_000
    sender.say(Publish("t", payload, 1, packet_id=1), Publish("t", b"after", 1, packet_id=2))
    assert receiver.payloads() == [payload, b"after"]
    assert [packet for packet in sender.take() if isinstance(packet, PubAck)] == [PubAck(1), PubAck(2)]
    assert sender.reading


def test_a_client_that_does_not_read_stops_its_broker_and_nobody_else() -> None:
    host = gateway("a", limits=Limits(max_output_bytes=100_000))
    slow, quick, sender = host.connect("slow"), host.connect("quick"), host.connect("s")
    subscribe(slow, "t", 1)
    subscribe(quick, "t", 1)
    assert slow.tunnel is not None
    slow.tunnel.congested = True
    for number in range(100):
        sender.say(Publish("t", bytes(10_000), 1, packet_id=number + 1))
        quick.say(*[PubAck(packet.packet_id) for packet in quick.take() if isinstance(packet, Publish)])
    assert slow.tunnel.bytes_out < 262_144 + 100_000 + 20_000
    assert host.mesh.nodes["a"].engine.stats.queued_messages > 0
    host.machine.writable(slow.tunnel, host.mesh.now)
    host.flush()
    received: list[bytes] = []
    for _ in range(30):
        host.mesh.run()
        came = [packet for packet in slow.take() if isinstance(packet, Publish)]
        received += [packet.payload for packet in came]
        slow.say(*[PubAck(packet.packet_id) for packet in came])
    assert len(received) == 100


def test_a_client_without_a_broker_waits_and_is_served_when_one_comes() -> None:
    mesh = Mesh()
    mesh.add("a")
    host = GatewayHost(mesh)
    client = host.accept()
    client.say(Connect("c"))
    assert client.take() == []
    assert client.tunnel is not None
    assert client.tunnel.state == tunnels.WAITING
    host.link("a")
    assert isinstance(client.take()[0], ConnAck)


def test_subscriptions_of_an_earlier_connection_survive_the_broker() -> None:
    host = gateway("a", "b")
    host.machine.assign("a", ["a", "b"], host.mesh.now)
    for _ in range(2):
        client = host.accept(4)
        client.say(Connect("c", 4, clean_start=False))
        (answer,) = client.take()
        assert isinstance(answer, ConnAck)
        if not answer.session_present:
            client.say(*[Subscribe(1, [SubscriptionRequest(f"t/{'x' * 1000}/{index}", 1)]) for index in range(100)])
            client.vanish()
    host.mesh.nodes["a"].crash()
    host.mesh.run()
    assert host.broker_of(client) == "b"
    found = host.mesh.nodes["b"].engine.sessions.by_client["c"]
    assert len(found.subscriptions) == 100
    assert {subscription.qos for subscription in found.subscriptions.values()} == {1}


def test_a_second_link_to_a_broker_takes_over_and_clients_stay() -> None:
    """The gateway thought that the first one was lost, or it is and the broker has not noticed."""
    host = gateway("a")
    watcher = host.mesh.nodes["a"].client()
    host.mesh.nodes["a"].feed(watcher, encode(Connect("w"), 5) + encode(Subscribe(1, [SubscriptionRequest("gone")]), 5))
    client = host.accept()
    client.say(Connect("c", will=Will("gone", b"bye")))
    client.take()
    session = host.mesh.nodes["a"].engine.sessions.by_client["c"]
    host.link("a")
    assert host.machine.stats.resumed == 1
    assert host.mesh.nodes["a"].engine.sessions.by_client["c"] is session
    assert client.take() == []
    assert not client.closed
    host.mesh.run()
    assert b"bye" not in watcher.received


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_does_not_wait_for_ever(version: int) -> None:
    mesh = Mesh()
    host = GatewayHost(mesh, settings=GatewaySettings(patience_s=3))
    client = host.accept(version)
    client.say(Connect("c", version))
    host.advance(2)
    assert not client.closed
    host.advance(1.5)
    (answer,) = client.take()
    assert isinstance(answer, ConnAck)
    assert answer.reason_code == 0x88
    assert client.closed


def test_a_silent_client_is_sent_away() -> None:
    host = gateway("a", limits=Limits(connect_timeout_seconds=2))
    client = host.accept()
    host.advance(2.5)
    assert client.closed


def test_without_a_controller_the_nearest_broker_is_used_and_a_little_less_near_is_good_enough() -> None:
    host = gateway("a", "b")
    choice = host.machine.choice
    host.machine.lines["a"].link.rtt_ms = 20.0
    host.machine.lines["b"].link.rtt_ms = 5.0
    assert choice.reconsider() == "b"
    host.machine.lines["a"].link.rtt_ms = 4.5
    assert choice.reconsider() == ""
    host.machine.lines["a"].link.rtt_ms = 1.0
    assert choice.reconsider() == "a"


def test_the_controllers_word_comes_first() -> None:
    host = gateway("a", "b", "c")
    host.machine.lines["a"].link.rtt_ms = 1.0
    host.machine.assign("b", ["b", "c", "a"], host.mesh.now)
    assert host.broker_of(host.connect("one")) == "b"
    host.machine.lines["b"].leaving = True
    assert host.broker_of(host.connect("two")) == "c"
    assert host.machine.choice.reconsider() == ""


@settings(max_examples=30)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=60), st.integers(0, 2), st.sampled_from([4, 5]))
def test_how_bytes_are_cut_does_not_matter(cuts: list[int], qos: int, version: int) -> None:
    host = gateway("a")
    receiver = host.connect("r", version)
    subscribe(receiver, "#", qos)
    sender = host.accept(version)
    stream = encode(Connect("s", version), version)
    for number in range(10):
        stream += encode(Publish(f"t/{number}", bytes(number * 20), qos, packet_id=number + 1 if qos else 0), version)
        if number % 3 == 0:
            stream += encode(PingReq(), version)
    position = 0
    index = 0
    while position < len(stream):
        size = cuts[index % len(cuts)]
        sender.whisper(stream[position : position + size])
        position += size
        index += 1
        if index % 3 == 0:
            host.mesh.run()
    host.mesh.run()
    assert receiver.payloads() == [bytes(number * 20) for number in range(10)]
    answers = sender.take()
    assert len([packet for packet in answers if isinstance(packet, PingResp)]) == 4
    assert len([packet for packet in answers if isinstance(packet, (PubAck, PubRec))]) == (10 if qos else 0)

"""Brokers that have no link of their own reach each other through others, and lose nothing when those fail."""

from __future__ import annotations

import itertools
import random

import pytest

from nearcast.fabric import routes
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Connect, Publish, Subscribe, SubscriptionRequest
from tests.fabric_harness import End, Mesh, Node
from tests.gateway_harness import Gateway, Shuffle, run_all


def connect(node: Node, client_id: str) -> End:
    client = node.client()
    node.feed(client, encode(Connect(version=MQTT_5, client_id=client_id, clean_start=True, keep_alive=0), MQTT_5))
    return client


def subscribe(node: Node, client: End, topic_filter: str, qos: int = 2) -> None:
    node.feed(client, encode(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]), MQTT_5))


def publish(node: Node, client: End, topic: str, payload: bytes, qos: int, packet_id: int = 1) -> None:
    node.feed(client, encode(Publish(topic, payload, qos, packet_id=packet_id if qos else 0), MQTT_5))


def chain(*names: str) -> Mesh:
    mesh = Mesh()
    for name in names:
        mesh.add(name)
    for first, second in itertools.pairwise(names):
        mesh.link(first, second)
    mesh.run()
    settle(mesh)
    return mesh


def settle(mesh: Mesh, seconds: float = 15.0) -> None:
    """Let adverts, retries and time-outs take their course."""
    for _ in range(int(seconds / 0.25)):
        mesh.advance(0.25)


def all_up(mesh: Mesh) -> bool:
    return all(
        other in node.fabric.peers and node.fabric.peers[other].up
        for name, node in mesh.nodes.items()
        for other in mesh.nodes
        if other != name
    )


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_crosses_brokers_that_do_not_want_it(qos: int) -> None:
    mesh = chain("a", "b", "c", "d")
    assert all_up(mesh)
    a, d = mesh.nodes["a"], mesh.nodes["d"]
    subscriber, publisher = connect(d, "subscriber"), connect(a, "publisher")
    subscribe(d, subscriber, "rooms/+")
    mesh.run()
    publish(a, publisher, "rooms/1", b"warm", qos)
    mesh.run()
    assert bytes(subscriber.received).count(b"warm") == 1
    for between in ("b", "c"):
        peer = mesh.nodes[between].fabric.peers["a"]
        assert peer.received == 0
        assert peer.received_unreliable == 0
    link = d.fabric.peers["a"].link
    assert link is not None
    assert link.relayed


@pytest.mark.parametrize("qos", [1, 2])
def test_when_a_relay_dies_another_way_is_taken_and_nothing_is_lost(qos: int) -> None:
    mesh = Mesh()
    for name in ("a", "b", "c", "d"):
        mesh.add(name)
    upper = [mesh.link("a", "b"), mesh.link("b", "d")]
    mesh.run()
    settle(mesh)
    mesh.link("a", "c")
    mesh.link("c", "d")
    mesh.run()
    settle(mesh)
    a, d = mesh.nodes["a"], mesh.nodes["d"]
    assert [relay.way for relay in a.fabric.routes.relays] == [["a", "b", "d"]]
    subscriber, publisher = connect(d, "subscriber"), connect(a, "publisher")
    subscribe(d, subscriber, "rooms/1")
    mesh.run()
    publish(a, publisher, "rooms/1", b"warm", qos)
    mesh.cut(upper[1])  # with the message on its way
    publish(a, publisher, "rooms/1", b"cosy", qos, 2)
    mesh.run()
    settle(mesh)
    assert [relay.way for relay in a.fabric.routes.relays] == [["a", "c", "d"]]
    assert bytes(subscriber.received).count(b"warm") == 1
    assert bytes(subscriber.received).count(b"cosy") == 1


def test_a_link_of_their_own_takes_over_from_a_relayed_one() -> None:
    mesh = chain("a", "b", "c")
    subscriber, publisher = connect(mesh.nodes["c"], "subscriber"), connect(mesh.nodes["a"], "publisher")
    subscribe(mesh.nodes["c"], subscriber, "rooms/1")
    mesh.run()
    mesh.link("c", "a")
    mesh.run()
    settle(mesh)
    assert not mesh.nodes["a"].fabric.routes.relays
    assert not mesh.nodes["c"].fabric.routes.relays
    publish(mesh.nodes["a"], publisher, "rooms/1", b"warm", 1)
    mesh.run()
    assert bytes(subscriber.received).count(b"warm") == 1


def test_a_stream_takes_no_more_than_its_window() -> None:
    mesh = chain("a", "b", "c")
    a, c = mesh.nodes["a"], mesh.nodes["c"]
    subscriber, publisher = connect(c, "subscriber"), connect(a, "publisher")
    subscribe(c, subscriber, "bulk", 1)
    mesh.run()
    for number in range(1, 101):
        publish(a, publisher, "bulk", b"%03d" % number + bytes(100_000), 1, number)
    [relay] = a.fabric.routes.relays
    assert relay.sent_bytes - relay.taken_bytes < routes.WINDOW_BYTES + 2 * 16_777_216
    mesh.run()
    settle(mesh)
    received = bytes(subscriber.received)
    assert [received.count(b"%03d\0" % number) for number in (1, 50, 100)] == [1, 1, 1]


def test_who_left_is_unreachable_and_who_is_new_is_found() -> None:
    mesh = chain("a", "b", "c")
    stream = mesh.streams[1]
    mesh.cut(stream)
    settle(mesh)
    assert not mesh.nodes["a"].fabric.peers["c"].up
    assert "c" not in mesh.nodes["a"].fabric.routes.ways()
    mesh.add("d")
    mesh.link("d", "b")
    mesh.link("c", "d")
    mesh.run()
    settle(mesh)
    assert all_up(mesh)


def test_who_is_gone_is_forgotten_however_often_it_was_told_of() -> None:
    mesh = chain("a", "b", "c", "d")
    mesh.cut(mesh.streams[2])
    stream = mesh.streams[0]
    for _ in range(12):
        for _ in range(4):
            mesh.advance(25.0)
        mesh.cut(stream)
        stream = mesh.link("a", "b")  # each link that comes up tells of everybody
        mesh.run()
        settle(mesh, 1.0)
    for name in ("a", "b", "c"):
        known = mesh.nodes[name].fabric.routes.known()
        assert known == ["a", "b", "c"], name


def test_a_configured_address_is_dialled_however_long_nobody_answers_there() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    b.fabric.routes.address = "b"
    a.fabric.dial("b", mesh.now)
    assert a.fabric.take_dials() == ["b"]
    stream = mesh.link("a", "b")
    mesh.run()
    settle(mesh)
    mesh.cut(stream)
    for _ in range(110):
        mesh.advance(10.0)
        for address in a.fabric.take_dials():
            a.fabric.dial_failed(address, mesh.now)
    assert a.fabric.routes.known() == ["a"]
    settle(mesh, 20.0)
    assert a.fabric.take_dials() == ["b"]


def test_an_address_that_was_only_heard_of_is_given_up_with_its_broker() -> None:
    mesh = chain("a", "b", "c")
    a, c = mesh.nodes["a"], mesh.nodes["c"]
    c.fabric.routes.address = "c"
    settle(mesh)
    assert [dialing.address for dialing in a.fabric.dialing_of("c")] == ["c"]
    mesh.cut(mesh.streams[1])
    for _ in range(110):
        mesh.advance(10.0)
    assert a.fabric.dialing_of("c") == []


def test_another_broker_at_the_same_address_is_welcome() -> None:
    """One that was given a new name: what is remembered of the old one is no reason to refuse it."""
    mesh = chain("a", "b", "c")
    a = mesh.nodes["a"]
    mesh.nodes["c"].fabric.routes.address = "there"
    settle(mesh)
    mesh.cut(mesh.streams[1])
    del mesh.nodes["c"]
    mesh.add("d").fabric.routes.address = "there"
    mesh.link("b", "d")
    mesh.run()
    settle(mesh, 5.0)
    mesh.nodes["there"] = mesh.nodes["d"]
    mesh.link("a", "there")
    del mesh.nodes["there"]
    mesh.run()
    assert a.fabric.peers["d"].up
    link = a.fabric.peers["d"].link
    assert link is not None
    assert not link.relayed
    for _ in range(110):
        mesh.advance(10.0)
    assert [dialing.address for dialing in a.fabric.dialing_of("d")] == ["there"]


@pytest.mark.parametrize("seed", range(12))
def test_in_any_topology_every_message_arrives_once_whatever_links_break(seed: int) -> None:
    """Random connected graphs; links break and come back while messages are published everywhere."""
    rng = random.Random(seed)
    mesh = Mesh(seed)
    names = [f"n{index}" for index in range(rng.randint(3, 7))]
    for name in names:
        mesh.add(name)
    pairs = [(names[rng.randrange(index)], names[index]) for index in range(1, len(names))]  # a tree: connected
    pairs += [tuple(rng.sample(names, 2)) for _ in range(rng.randint(0, 4))]  # type: ignore[misc]
    pairs = list({(min(pair), max(pair)): None for pair in pairs})
    streams = {pair: mesh.link(*rng.sample(pair, 2)) for pair in pairs}
    mesh.run()
    settle(mesh)
    assert all_up(mesh), seed
    subscribers = {name: connect(mesh.nodes[name], f"subscriber-{name}") for name in names}
    publishers = {name: connect(mesh.nodes[name], f"publisher-{name}") for name in names}
    wanting = [name for name in names if rng.random() < 0.6] or [names[0]]
    for name in wanting:
        subscribe(mesh.nodes[name], subscribers[name], "rooms/#", 2)
    mesh.run()
    settle(mesh, 2.0)
    published = []
    for step in range(40):
        name = rng.choice(names)
        payload = f"<{step}>".encode()
        published.append(payload)
        publish(mesh.nodes[name], publishers[name], f"rooms/{step % 3}", payload, rng.choice((1, 2)), step + 1)
        action = rng.random()
        if action < 0.15 and streams:
            pair = rng.choice(sorted(streams))
            stream = streams.pop(pair)
            if stream in mesh.streams:
                mesh.cut(stream)
        elif action < 0.3:
            missing = [pair for pair in pairs if pair not in streams]
            if missing:
                pair = rng.choice(missing)
                streams[pair] = mesh.link(*rng.sample(pair, 2))
        elif action < 0.5:
            mesh.run()
        elif action < 0.7:
            mesh.advance(rng.choice((0.3, 1.0, 3.0)))
    for pair in pairs:
        if pair not in streams:
            streams[pair] = mesh.link(*pair)
    mesh.run()
    settle(mesh)
    assert all_up(mesh), seed
    for name in wanting:
        received = bytes(subscribers[name].received)
        counts = [received.count(payload) for payload in published]
        assert counts == [1] * len(published), (seed, name)


@pytest.mark.parametrize("seed", range(8))
def test_clients_move_between_brokers_that_only_others_connect(seed: int) -> None:
    """The handover is between the two ends: pieces of it arrive in any order of streams, and nothing is lost at any QoS."""
    rng = random.Random(seed)
    mesh = chain("a", "b", "c", "d")
    gateway = Gateway(mesh, "gateway")
    publishers = {name: gateway.mqtt_client(name, f"publisher-{name}") for name in "ad"}
    client = gateway.mqtt_client("a", "client", expiry=rng.choice([0, 100]))
    for qos in range(3):
        client.subscribe(f"q{qos}/#", qos)
    run_all(mesh, gateway)
    shuffle = Shuffle(mesh, rng, gateway)
    sent: dict[str, list[bytes]] = {}
    for round_number in range(60):
        name = rng.choice("ad")
        topic = f"q{rng.randrange(3)}/{name}"
        publishers[name].publish(topic, b"%d" % round_number, int(topic[1]))
        sent.setdefault(topic, []).append(b"%d" % round_number)
        if round_number % 10 == 5 and not client.is_moving:
            client.move("d" if client.trunk.broker == "a" else "a")
        shuffle.steps(rng.randrange(30))
    shuffle.run()
    for _ in range(8):
        mesh.advance(0.5)
        shuffle.run()
    assert client.moves >= 3
    assert client.failures == []
    got: dict[str, list[bytes]] = {}
    for topic, payload in client.messages:
        got.setdefault(topic, []).append(payload)
    assert got == sent, seed

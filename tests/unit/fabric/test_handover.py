"""Clients go from one broker to another: nothing lost, nothing twice, nothing out of order."""

from __future__ import annotations

import random

import pytest

from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5
from tests.fabric_harness import Mesh
from tests.gateway_harness import Gateway, MqttClient, Shuffle, run_all


def make(names: str = "ab", *, seed: int = 1, durable: bool = False) -> tuple[Mesh, Gateway]:
    mesh = Mesh(seed)
    for name in names:
        mesh.add(name, durable=durable)
    for index, first in enumerate(names):
        for second in names[index + 1 :]:
            mesh.link(first, second)
    mesh.run()
    return mesh, Gateway(mesh, "gateway")


@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_moved_client_goes_on_as_if_nothing_had_happened(qos: int, version: int, durable: bool) -> None:
    mesh, gateway = make(durable=durable)
    publisher = gateway.mqtt_client("a", "publisher")
    client = gateway.mqtt_client("a", "client", version, expiry=100)
    client.subscribe("t", qos)
    run_all(mesh, gateway)
    publisher.publish("t", b"1", qos)
    run_all(mesh, gateway)
    client.move("b")
    run_all(mesh, gateway)
    assert (client.moves, client.failures) == (1, [])
    publisher.publish("t", b"2", qos)
    client.publish("other", b"3", qos)
    run_all(mesh, gateway)
    assert client.messages == [("t", b"1"), ("t", b"2")]
    assert len(client.connacks) == 1
    a, b = mesh.nodes["a"], mesh.nodes["b"]
    assert "client" not in a.engine.sessions.by_client
    assert b.engine.sessions.by_client["client"].connection is not None
    assert (a.engine.stats.connected_clients, b.engine.stats.connected_clients) == (1, 1)
    assert (a.engine.stats.connections, b.engine.stats.connections) == (1, 1)
    assert a.engine.stats.inflight_messages == b.engine.stats.inflight_messages == 0
    assert a.engine.stats.queued_messages == b.engine.stats.queued_messages == 0
    assert not a.fabric.peers["b"].session.subscriptions or "t" in a.fabric.peers["b"].session.subscriptions
    assert "t" not in b.fabric.peers["a"].session.subscriptions


@pytest.mark.parametrize("seed", range(20))
def test_moved_at_random_under_load_nothing_is_lost_or_doubled(seed: int) -> None:
    rng = random.Random(seed)
    durable = rng.random() < 0.4
    mesh, gateway = make("abc", seed=seed, durable=durable)
    publishers = [gateway.mqtt_client(name, f"publisher-{name}") for name in "abc"]
    version = rng.choice([MQTT_3_1_1, MQTT_5])
    client = gateway.mqtt_client("a", "client", version, expiry=rng.choice([0, 100]), alias_maximum=rng.choice([0, 3]))
    for qos in range(3):
        client.subscribe(f"q{qos}/#", qos)
    run_all(mesh, gateway)
    shuffle = Shuffle(mesh, rng, gateway)
    sent: dict[str, list[bytes]] = {}
    movers: list[MqttClient] = [client, publishers[0]]
    for round_number in range(120):
        index = rng.randrange(3)
        topic = f"q{rng.randrange(3)}/{index}"
        payload = b"%d" % round_number
        publishers[index].publish(topic, payload, int(topic[1]))
        sent.setdefault(topic, []).append(payload)
        if rng.random() < 0.2:
            mover = rng.choice(movers)
            if not mover.is_moving:
                mover.move(rng.choice([name for name in "abc" if name != mover.trunk.broker]))
        if rng.random() < 0.1:
            client.acknowledges = not client.acknowledges
            if client.acknowledges:
                client.answer()
        shuffle.steps(rng.randrange(25))
    client.answer()
    shuffle.run()
    for _ in range(30):
        mesh.advance(0.2)
        shuffle.run()
        client.answer()
    got: dict[str, list[bytes]] = {}
    for topic, payload in client.messages:
        got.setdefault(topic, []).append(payload)
    assert client.failures == []
    for topic, payloads in got.items():
        if topic.endswith("/0"):
            # Its publisher moved, too: what it published here and there comes over different links.
            payloads.sort(key=int)
    assert got == sent
    assert client.moves
    for node in mesh.nodes.values():
        assert not node.fabric.handover.departures.by_move
        assert not node.fabric.handover.arrivals.by_move
        assert node.engine.stats.inflight_messages == 0
        assert node.engine.stats.queued_messages == 0

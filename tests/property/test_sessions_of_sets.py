"""Sessions with replicated topics that go from broker to broker: nothing is lost, doubled or left unanswered."""

from __future__ import annotations

import random

import pytest

from tests.fabric_harness import Mesh
from tests.gateway_harness import Gateway, MqttClient, Shuffle, run_all
from tests.set_harness import STEP_S, SetMesh

NAMES = ("b1", "b2", "b3", "b4", "b5")


def pass_time(mesh: Mesh, gateway: Gateway, seconds: float) -> None:
    for _ in range(max(1, round(seconds / STEP_S))):
        mesh.advance(STEP_S)
        run_all(mesh, gateway)


def pass_pieces(mesh: SetMesh, shuffle: Shuffle, rng: random.Random, pieces: int) -> None:
    """Time passes while pieces arrive one by one, from anywhere: brokers are not equally far with anything."""
    for piece in range(pieces):
        shuffle.step()
        if rng.random() < 0.1:
            mesh.nodes[rng.choice(NAMES)].flush_sets()
        if piece % 20 == 0:
            mesh.now += STEP_S
            for node in mesh.nodes.values():
                node.engine.tick(mesh.now)
                node.fabric.tick(mesh.now)
                node.flush()


def broken(mesh: SetMesh) -> list[tuple[str, str]]:
    linked = {frozenset((left.node.name, right.node.name)) for left, right in mesh.streams}
    return [(a, b) for at, a in enumerate(NAMES) for b in NAMES[at + 1 :] if frozenset((a, b)) not in linked]


def of(client: MqttClient, publisher: MqttClient) -> list[int]:
    found = [payload.split() for _, payload in client.messages]
    return [int(number) for who, number in found if who.decode() == publisher.client_id]


@pytest.mark.parametrize("seed", range(40))
def test_clients_move_and_nothing_is_lost_or_repeated_or_left_unanswered(seed: int) -> None:
    rng = random.Random(seed)
    mesh = SetMesh(*NAMES, seed=seed, durable=rng.random() < 0.7)
    mesh.leader()
    gateway = Gateway(mesh, "gateway")
    subscribers = [gateway.mqtt_client(rng.choice(NAMES), f"s{at}", expiry=1_000) for at in range(3)]
    for subscriber in subscribers:
        subscriber.subscribe("kept/#", 2)
    run_all(mesh, gateway)
    publishers = [gateway.mqtt_client(rng.choice(NAMES), f"p{at}", expiry=1_000) for at in range(2)]
    run_all(mesh, gateway)
    shuffle = Shuffle(mesh, rng, gateway)
    sent: dict[str, list[int]] = {publisher.client_id: [] for publisher in publishers}
    number = 0
    for _ in range(120):
        chance = rng.random()
        if chance < 0.5:
            publisher = rng.choice(publishers)
            for _ in range(rng.randrange(1, 8)):
                number += 1
                sent[publisher.client_id].append(number)
                publisher.publish(rng.choice(["kept/a", "kept/b/c"]), b"%s %d" % (publisher.client_id.encode(), number), 2)
        elif chance < 0.8:
            client = rng.choice([*subscribers, *publishers])
            target = rng.choice([name for name in NAMES if name != client.trunk.broker])
            if not client.is_moving:
                client.move(target)
        elif chance < 0.9:
            node = mesh.nodes[rng.choice(NAMES)]
            node.slow = not node.slow
        elif mesh.streams and rng.random() < 0.3:
            mesh.cut(rng.choice(mesh.streams))
        else:
            missing = broken(mesh)
            if missing:
                mesh.link(*rng.choice(missing))
        pass_pieces(mesh, shuffle, rng, rng.choice([5, 20, 60, 300]))
    gateway.stepwise = False
    for node in mesh.nodes.values():
        node.slow = False
    for pair in broken(mesh):
        mesh.link(*pair)
    pass_time(mesh, gateway, 12.0)
    for client in [*subscribers, *publishers]:
        assert not client.closed, f"seed {seed}: {client.client_id} {client.closed}"
    for subscriber in subscribers:
        for publisher in publishers:
            assert of(subscriber, publisher) == sent[publisher.client_id], f"seed {seed}: {subscriber.client_id}"
    assert subscribers[0].messages == subscribers[1].messages == subscribers[2].messages, f"seed {seed}: two orders"
    for publisher in publishers:
        assert len(publisher.acknowledged) == len(sent[publisher.client_id]), f"seed {seed}: {publisher.client_id}"

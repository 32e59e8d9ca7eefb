"""Random faults around a replica set: whatever dies or is cut off, what was published is delivered once, in order."""

from __future__ import annotations

import random

import pytest

from nearcast.mqtt.packets import PubAck, PubRec
from tests.fabric_clients import Client
from tests.set_harness import SetMesh

NAMES = ("b1", "b2", "b3", "b4", "b5")


def broken(mesh: SetMesh) -> list[tuple[str, str]]:
    """The pairs of brokers that have no link."""
    linked = {frozenset((left.node.name, right.node.name)) for left, right in mesh.streams}
    return [(a, b) for at, a in enumerate(NAMES) for b in NAMES[at + 1 :] if frozenset((a, b)) not in linked]


@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_lost_or_repeated_whatever_fails(seed: int) -> None:
    rng = random.Random(seed)
    mesh = SetMesh(*NAMES, seed=seed)
    mesh.leader()
    subscribers = []
    for name in ("b4", "b5"):
        subscriber = Client(mesh.nodes[name], f"s-{name}", expiry=1_000)
        subscriber.subscribe("kept/#")
        subscribers.append(subscriber)
    mesh.run()
    publishers = [Client(mesh.nodes[name], f"p-{name}") for name in ("b4", "b5")]
    sent: dict[str, list[int]] = {publisher.client_id: [] for publisher in publishers}
    number = 0
    for _ in range(60):
        chance = rng.random()
        if chance < 0.55:
            publisher = rng.choice(publishers)
            for _ in range(rng.randrange(1, 8)):
                number += 1
                sent[publisher.client_id].append(number)
                publisher.publish("kept/a", b"%s %d" % (publisher.client_id.encode(), number), qos=rng.choice([1, 2]))
        elif chance < 0.65:
            mesh.nodes[rng.choice(NAMES[:3])].crash(power_cut=rng.random() < 0.5)
        elif chance < 0.75 and mesh.streams:
            mesh.cut(rng.choice(mesh.streams))
        elif chance < 0.8:
            node = mesh.nodes[rng.choice(NAMES[:3])]
            node.slow = not node.slow
        else:
            missing = broken(mesh)
            if missing:
                mesh.link(*rng.choice(missing))
        if rng.random() < 0.5:
            mesh.run()
        mesh.wait(rng.choice([0.0, 0.02, 0.1, 0.5]))
    for node in mesh.nodes.values():
        node.slow = False
    for pair in broken(mesh):
        mesh.link(*pair)
    mesh.wait(8.0)
    mesh.leader()
    mesh.wait(2.0)
    for subscriber in subscribers:
        for publisher in publishers:
            got = [int(text) for who, text in map(bytes.split, subscriber.payloads) if who.decode() == publisher.client_id]
            assert got == sent[publisher.client_id], f"seed {seed}: {subscriber.client_id} of {publisher.client_id}"
    first, second = (subscriber.payloads for subscriber in subscribers)
    assert first == second, f"seed {seed}: two orders"
    for publisher in publishers:
        publisher.read()
        answers = [packet for packet in publisher.packets if isinstance(packet, PubAck | PubRec)]
        assert len(answers) == len(sent[publisher.client_id])

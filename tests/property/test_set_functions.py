"""Functions of a replica set under random faults: every message is handled once, and state, outputs and progress agree."""

from __future__ import annotations

import random

import pytest

from nearcast.fabric.set_functions import Posted
from nearcast.functionconfig import Function
from tests.fabric_clients import Client
from tests.set_harness import SetMesh, SetNode

NAMES = ("b1", "b2", "b3", "b4")
SUM = Function(name="sum", topic="kept/in/+", entry="f", files={"main.py": b"-"})


def work(node: SetNode, rng: random.Random) -> None:
    """What a driver does at a leader: some batches, of some size, each brought back or lost with the broker."""
    hosted = node.hosted
    generation = hosted.functions.generation
    for _ in range(rng.randrange(4)):
        taken = hosted.functions.take("sum", rng.randrange(1, 6))
        if taken is None:
            return
        state = int(hosted.functions.state("sum") or b"0")
        outputs = []
        for record in taken.records:
            state += int(bytes(record.payload))
            outputs.append(Posted("kept/out", b"%d %d" % (int(bytes(record.payload)), state)))
        assert hosted.functions.done("sum", generation, taken, outputs, b"%d" % state, node.mesh.now)
        node.flush()


@pytest.mark.parametrize("seed", range(40))
def test_each_message_is_handled_once(seed: int) -> None:
    rng = random.Random(seed)
    mesh = SetMesh(*NAMES, seed=seed)
    mesh.leader()
    watcher = Client(mesh.nodes["b4"], "watcher", expiry=1_000)
    watcher.subscribe("kept/out")
    publisher = Client(mesh.nodes["b4"], "publisher")
    publisher.publish("kept/in/a", b"1000000")  # before anybody handles it
    mesh.wait(0.2)
    for node in mesh.nodes.values():
        node.fabric.sets.deploy((SUM,))
    mesh.wait(0.2)
    number = 0
    for _ in range(40):
        chance = rng.random()
        if chance < 0.5:
            for _ in range(rng.randrange(1, 6)):
                number += 1
                publisher.publish(f"kept/in/{rng.choice('ab')}", b"%d" % number, qos=rng.choice([1, 2]))
        elif chance < 0.62:
            name = rng.choice(NAMES[:3])
            mesh.nodes[name].crash(power_cut=rng.random() < 0.5)
            mesh.nodes[name].fabric.sets.deploy((SUM,))
        elif chance < 0.7 and mesh.streams:
            mesh.cut(rng.choice(mesh.streams))
        else:
            linked = {frozenset((left.node.name, right.node.name)) for left, right in mesh.streams}
            for at, first in enumerate(NAMES):
                for second in NAMES[at + 1 :]:
                    if frozenset((first, second)) not in linked:
                        mesh.link(first, second)
        for node in mesh.nodes.values():
            if node.fabric.sets.hosted and node.hosted.leads and rng.random() < 0.7:
                work(node, rng)
        if rng.random() < 0.6:
            mesh.run()
        mesh.wait(rng.choice([0.0, 0.02, 0.1, 0.4]))
    linked = {frozenset((left.node.name, right.node.name)) for left, right in mesh.streams}
    for at, first in enumerate(NAMES):
        for second in NAMES[at + 1 :]:
            if frozenset((first, second)) not in linked:
                mesh.link(first, second)
    mesh.wait(6.0)
    leader = mesh.leader()
    for _ in range(200):
        work(leader, random.Random(3))
        mesh.run()
    mesh.wait(1.0)
    handled = [tuple(map(int, payload.split())) for payload in watcher.payloads]
    assert sorted(each for each, _ in handled) == list(range(1, number + 1)), f"seed {seed}"
    total = 0
    for each, state in handled:
        total += each
        assert state == total, f"seed {seed}"

"""Whatever happens to brokers, their links, their distances and the cloud: what was acknowledged reaches everybody in the end.

Everything may be interrupted anywhere: pieces of streams arrive one by one in any order that streams allow, disks take what
was written when they like. At the end all is well again, and then every subscriber has every message that its publisher saw
acknowledged; without crashes none of them twice.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from nearcast.groups.stability import unstable
from nearcast.mqtt.packets import Packet, PubAck, PubRec
from tests.broadcast_harness import FAR_S, GroupMesh
from tests.fabric_clients import Client

HEALED_S = 15.0
"""Longer than anybody waits before trying again."""

STABLE_S = 200.0
"""Brokers that answered late for a while are measured about once in a minute."""

Action = tuple[str, int, int]

CALM = ["publish", "publish", "publish", "arrive", "arrive", "tick", "pass", "move", "cut", "part", "heal", "cloud"]
ACTIONS = st.lists(st.tuples(st.sampled_from(CALM), st.integers(0, 9), st.integers(0, 9)), min_size=10, max_size=60)
ACTIONS_AND_CRASHES = st.lists(
    st.tuples(st.sampled_from([*CALM, "crash"]), st.integers(0, 9), st.integers(0, 9)), min_size=10, max_size=60
)


class World:
    """Brokers with a subscriber and a publisher each."""

    def __init__(self, count: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.mesh = GroupMesh(seed)
        self.names = [f"n{number}" for number in range(count)]
        for number, name in enumerate(self.names):
            # Those that are far are near enough to be measured often.
            self.mesh.broker(name, lcm=float(1 + number % 3), durable=True, threshold_ms=70.0)
        self.pairs = [frozenset(pair) for pair in combinations(self.names, 2)]
        for pair in self.pairs:
            self.move(pair)
        self.mesh.advance(5.0)
        self.acknowledged: list[bytes] = []
        self.received = {name: Counter[bytes]() for name in self.names}
        self.crashed = False
        self._serial = 0
        self._under_way: dict[tuple[str, int], bytes] = {}
        self.subscribers = {name: self._subscriber(name) for name in self.names}
        for subscriber in self.subscribers.values():
            subscriber.subscribe("cars/#")
        self.publishers = {name: Client(self.mesh.nodes[name], f"publisher {name}") for name in self.names}
        self.mesh.until("all SUBACKs", lambda: all(one.subacks for one in self.subscribers.values()))
        # A SUBACK does not wait for ever for a leader that is just being chosen; messages do count from here on.
        self.mesh.advance(10.0)

    def _subscriber(self, name: str, *, clean_start: bool = True) -> Client:
        return Client(self.mesh.nodes[name], f"subscriber {name}", expiry=100_000, clean_start=clean_start)

    def move(self, pair: frozenset[str]) -> None:
        if self.rng.random() < 0.5:
            self.mesh.distances[pair] = FAR_S
        else:
            self.mesh.distances.pop(pair, None)

    def act(self, kind: str, one: int, other: int) -> None:
        mesh = self.mesh
        name = self.names[one % len(self.names)]
        if kind == "publish":
            for _ in range(1 + other % 3):
                self._publish(name, 1 + other % 2)
        elif kind == "arrive":
            for _ in range(1 + one * other):
                mesh.step(self.rng)
        elif kind == "tick":
            mesh.tick((1 + one) * 0.03)
        elif kind == "pass":
            mesh.advance((1 + one) * (1 + other) * 0.05)
        elif kind == "move" and self.pairs:
            self.move(self.pairs[other % len(self.pairs)])
        elif kind == "cut" and mesh.streams:
            mesh.cut(mesh.streams[one % len(mesh.streams)])
        elif kind == "part":
            others = [*(other for other in self.names if other != name), "cloud"]
            mesh.part(name, others[other % len(others)])
        elif kind == "heal":
            mesh.heal()
        elif kind == "cloud" and mesh.cloud_up:
            mesh.stop_cloud()
        elif kind == "cloud":
            mesh.start_cloud()
        elif kind == "crash":
            self._crash(name, power_cut=other % 3 > 0)
        self._look()

    def _publish(self, name: str, qos: int) -> None:
        self._serial += 1
        payload = f"{name} {self._serial}".encode()
        publisher = self.publishers[name]
        self._under_way[name, publisher.publish(f"cars/{name}", payload, qos)] = payload

    def _look(self) -> None:
        """Publishers take note of what was acknowledged."""
        for name, publisher in self.publishers.items():
            publisher.read()
            answered: list[Packet] = publisher.packets
            for packet in answered:
                if isinstance(packet, PubAck | PubRec):
                    payload = self._under_way.pop((name, packet.packet_id), None)
                    if payload is not None:
                        self.acknowledged.append(payload)
            answered.clear()

    def _crash(self, name: str, *, power_cut: bool) -> None:
        self._look()
        self.received[name].update(self.subscribers[name].payloads)
        self.mesh.nodes[name].crash(power_cut=power_cut)
        self.crashed = True
        self._under_way = {key: payload for key, payload in self._under_way.items() if key[0] != name}
        self.publishers[name] = Client(self.mesh.nodes[name], f"publisher {name}")
        self.subscribers[name] = self._subscriber(name, clean_start=False)

    def heal(self) -> None:
        self.mesh.heal()
        self.mesh.start_cloud()
        self.mesh.advance(HEALED_S)
        end = self.mesh.now + STABLE_S
        while self._unstable() and self.mesh.now < end:
            self.mesh.advance(1.0)
        self.mesh.advance(HEALED_S)
        self._look()
        for _ in range(10):  # as many messages as a client takes are on their way to it at a time
            for subscriber in self.subscribers.values():
                subscriber.read()
            self.mesh.run()
        for name, subscriber in self.subscribers.items():
            self.received[name].update(subscriber.payloads)

    def check(self) -> None:
        for name, received in self.received.items():
            assert [payload for payload in self.acknowledged if payload not in received] == [], f"{name} misses some"
            if not self.crashed:
                assert [payload for payload, count in received.items() if count > 1] == [], f"{name} has some twice"
        for node in self.mesh.group_nodes():
            assert node.waiting == 0, f"{node.name} still has some for the cloud"
            assert not node.fabric.broadcast.goodbyes.leaving, f"{node.name} is covered by more than one"
            assert node.fabric.broadcast.covered_version() == node.fabric.interest.version
        assert self._unstable() == []

    def _unstable(self) -> list[str]:
        return unstable([node.fabric.broadcast.formation for node in self.mesh.group_nodes()], self._latency_ms)

    def _latency_ms(self, one: str, other: str) -> float:
        return self.mesh.distances.get(frozenset((one, other)), 0.0) * 1e3


def _run(count: int, seed: int, actions: list[Action]) -> None:
    world = World(count, seed)
    for kind, one, other in actions:
        world.act(kind, one, other)
    world.heal()
    note(f"{len(world.acknowledged)} acknowledged; groups {[node.leader for node in world.mesh.group_nodes()]}")
    world.check()


SLOW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


@SLOW
@given(st.integers(1, 4), st.integers(0, 1_000), ACTIONS)
def test_everybody_has_everything_once(count: int, seed: int, actions: list[Action]) -> None:
    _run(count, seed, actions)


@SLOW
@given(st.integers(1, 4), st.integers(0, 1_000), ACTIONS_AND_CRASHES)
def test_crashes_lose_nothing(count: int, seed: int, actions: list[Action]) -> None:
    _run(count, seed, actions)

"""Owned topics under any interleaving: pieces of streams between brokers arrive in any order that streams allow, and topics
change hands meanwhile. Each subscriber gets each message once, those of a publisher in order, and all see one order.
"""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fabric_clients import Client
from tests.ownership_harness import OwnedMesh

NAMES = ("a", "b", "c", "d")
TOPICS = ("owned/x", "owned/y")

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.sampled_from(range(4)), st.sampled_from(range(6))),
        st.tuples(st.just("publish"), st.sampled_from(range(4)), st.sampled_from(range(6))),
        st.tuples(st.just("migrate"), st.sampled_from(range(4)), st.sampled_from(range(2))),
        st.tuples(st.just("arrive"), st.integers(1, 12), st.just(0)),
        st.tuples(st.just("answer"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def let_arrive(mesh: OwnedMesh, rng: random.Random, pieces: int) -> None:
    """Some pieces of some streams arrive, one by one."""
    for _ in range(pieces):
        ends = [end for stream in mesh.streams for end in stream if end.inbox and end.link is not None]
        if not ends:
            return
        end = rng.choice(ends)
        link = end.link
        assert link is not None
        end.node.fabric.receive(link, end.inbox.popleft(), mesh.now)
        end.node.flush()
        if rng.random() < 0.5:
            end.node.sync()


class Players:
    """A publisher at each broker, and subscribers at some; what was sent, by topic and whether it is reliable."""

    def __init__(self, mesh: OwnedMesh) -> None:
        self.mesh = mesh
        self.publishers = [Client(mesh.nodes[name], f"p-{name}") for name in NAMES]
        self.subscribers = [Client(mesh.nodes[name], f"s{number}") for number, name in enumerate(("a", "c", "c", "d"))]
        for subscriber in self.subscribers:
            subscriber.subscribe("owned/#")
        self.sent: dict[tuple[str, bool, int], list[bytes]] = {}
        self._count = 0

    def publish(self, publisher: int, kind: int) -> None:
        topic, qos = TOPICS[kind % 2], kind // 2
        self._count += 1
        payload = b"%d %d" % (publisher, self._count)
        self.sent.setdefault((topic, qos > 0, publisher), []).append(payload)
        self.publishers[publisher].publish(topic, payload, qos)

    def lines(self, subscriber: Client) -> dict[tuple[str, bool], list[bytes]]:
        found: dict[tuple[str, bool], list[bytes]] = {}
        for message in subscriber.messages:
            found.setdefault((message.topic, message.qos > 0), []).append(message.payload)
        return found

    def check(self) -> None:
        """Each message once, in the order of its publisher, and in one order for all."""
        lines = [self.lines(subscriber) for subscriber in self.subscribers]
        for line in lines:
            for (topic, reliable, publisher), payloads in self.sent.items():
                got = [each for each in line.get((topic, reliable), []) if each.startswith(b"%d " % publisher)]
                assert got == payloads, (topic, reliable, publisher)
        for line in lines[1:]:
            assert line == lines[0], "two subscribers saw different orders"


def settle(mesh: OwnedMesh) -> None:
    for _ in range(8):
        mesh.advance(0.3)


@pytest.mark.parametrize("durable", [False, True])
@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1_000_000), actions=ACTIONS)
def test_any_interleaving_gives_one_order(durable: bool, seed: int, actions: list[tuple[str, int, int]]) -> None:
    rng = random.Random(seed)
    mesh = OwnedMesh(*NAMES, durable=durable)
    players = Players(mesh)
    mesh.run()
    for action, first, second in actions:
        if action == "publish":
            players.publish(first, second)
        elif action == "arrive":
            let_arrive(mesh, rng, first)
        elif action == "answer":
            mesh.directory.answer()
        elif TOPICS[second] in mesh.directory.owners:
            mesh.migrate(TOPICS[second], NAMES[first])
    settle(mesh)
    players.check()
    for topic in TOPICS:
        owner = mesh.directory.owners.get(topic, (0, ""))[1]
        assert mesh.owners(topic) == ([owner] if owner else [])

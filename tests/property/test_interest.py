"""Interest tables agree in the end, whatever clients, links and processes do; and no message crosses a link in vain."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.fabricconfig import Fabric as FabricSettings
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh

NAMES = "abc"
FILTERS = ["t/1", "t/2", "t/+", "t/#", "#", "$share/g/t/1", "$share/h/t/#", "$SYS/#"]

ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["subscribe", "unsubscribe", "leave", "cut", "link", "lose", "crash", "run", "publish"]),
        st.integers(0, 1 << 20),
    ),
    max_size=50,
)


def own_filters(mesh: Mesh, name: str) -> set[str]:
    """What the sessions of a broker's clients subscribe to."""
    sessions = mesh.nodes[name].engine.sessions.by_client.values()
    found = {topic_filter for session in sessions if not session.is_peer for topic_filter in session.subscriptions}
    return {topic_filter for topic_filter in found if not topic_filter.startswith("$SYS/")}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 30), ACTIONS)
def test_tables_converge(seed: int, actions: list[tuple[str, int]]) -> None:
    mesh = Mesh(seed, FabricSettings(keep_for_seconds=1e6))
    for name in NAMES:
        mesh.add(name, durable=True)
    pairs = [("a", "b"), ("b", "c"), ("a", "c")]
    streams = {pair: mesh.link(*pair) for pair in pairs}
    mesh.run()
    clients = [Client(mesh.nodes[name], f"{name}{index}", expiry=1_000) for name in NAMES for index in range(2)]
    for action, number in actions:
        rng = random.Random(number)
        client = rng.choice(clients)
        pair = rng.choice(pairs)
        if action == "subscribe":
            client.subscribe(rng.choice(FILTERS))
        elif action == "unsubscribe":
            client.unsubscribe(rng.choice(FILTERS))
        elif action == "leave":
            clients[clients.index(client)] = Client(client.node, client.client_id, expiry=1_000)
        elif action == "cut" and pair in streams:
            mesh.cut(streams.pop(pair))
        elif action == "link" and pair not in streams:
            streams[pair] = mesh.link(*pair)
        elif action == "lose" and pair in streams:  # as a relay does that dies with frames on their way
            rng.choice(streams[pair]).inbox.clear()
        elif action == "crash":
            node = client.node
            node.crash(power_cut=rng.random() < 0.5)
            streams = {pair: stream for pair, stream in streams.items() if stream in mesh.streams}
            for index, one in enumerate(clients):
                if one.node is node:
                    clients[index] = Client(node, one.client_id, clean_start=False, expiry=1_000)
        elif action == "run":
            mesh.run()
        elif action == "publish":
            client.publish(rng.choice(["t/1", "t/2", "t/3/4", "u"]), b"x", rng.randrange(3))
    for pair in pairs:
        if pair in streams:
            mesh.cut(streams[pair])
        mesh.link(*pair)
    for _ in range(8):
        mesh.advance(1.0)
    for name in NAMES:
        wanted = own_filters(mesh, name)
        for other in NAMES:
            if other != name:
                table = mesh.nodes[other].fabric.peers[name].session
                assert set(table.subscriptions) == wanted, f"seed {seed}: {other} about {name}"
                assert not table.queued_messages, f"seed {seed}: {other} keeps something for {name}"
        interest = mesh.nodes[name].fabric.interest
        assert all(version == interest.version for version in interest.confirmed.values())
        assert interest.next_deadline() == float("inf")
    sent = {name: mesh.nodes[name].fabric.channels.received_messages for name in NAMES}
    Client(mesh.nodes["a"], "publisher").publish("elsewhere/nobody", b"x", 1)
    mesh.run()
    for name in "bc":
        crossed = mesh.nodes[name].fabric.channels.received_messages - sent[name]
        assert crossed == (1 if "#" in own_filters(mesh, name) else 0), f"seed {seed}"

"""Topics that a replica set keeps: proposing, committing, reading, over crashes."""

from __future__ import annotations

import pytest

from nearcast.mqtt.packets import PubAck, PubRec
from tests.fabric_clients import Client
from tests.set_harness import SetMesh

NAMES = ("b1", "b2", "b3", "b4")


def test_a_set_elects_a_leader_and_all_brokers_know_it() -> None:
    mesh = SetMesh(*NAMES)
    leader = mesh.leader()
    assert leader.name in ("b1", "b2", "b3")


@pytest.mark.parametrize("at", NAMES)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_what_is_published_anywhere_reaches_subscribers_everywhere(at: str, qos: int) -> None:
    mesh = SetMesh(*NAMES)
    mesh.leader()
    subscribers = [Client(mesh.nodes[name], f"s{name}") for name in NAMES]
    for subscriber in subscribers:
        subscriber.subscribe("kept/#")
    mesh.run()
    publisher = Client(mesh.nodes[at], "p")
    for number in range(20):
        publisher.publish("kept/a", b"%d" % number, qos=qos)
    mesh.run()
    for subscriber in subscribers:
        assert subscriber.payloads == [b"%d" % number for number in range(20)]


def numbers(client: Client) -> list[int]:
    return [int(payload) for payload in client.payloads]


@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("power_cut", [False, True])
def test_leaders_die_and_nothing_acknowledged_is_lost(qos: int, power_cut: bool) -> None:
    mesh = SetMesh(*NAMES)
    mesh.leader()
    subscriber = Client(mesh.nodes["b4"], "s", expiry=1_000)
    subscriber.subscribe("kept/#")
    mesh.run()
    publisher = Client(mesh.nodes["b4"], "p")
    number = 0
    for _ in range(4):
        for _ in range(10):
            publisher.publish("kept/a", b"%d" % number, qos=qos)
            number += 1
        mesh.leader().crash(power_cut=power_cut)
        for _ in range(10):
            publisher.publish("kept/a", b"%d" % number, qos=qos)
            number += 1
        down = next(name for name, node in mesh.nodes.items() if not any(peer.up for peer in node.fabric.peers.values()))
        mesh.wait(2.0)
        mesh.back(down)
        mesh.wait(1.0)
    assert numbers(subscriber) == list(range(number))
    publisher.read()
    acknowledged = [packet for packet in publisher.packets if isinstance(packet, PubAck | PubRec)]
    assert len(acknowledged) == number


def test_puback_waits_for_a_quorum() -> None:
    mesh = SetMesh(*NAMES)
    leader = mesh.leader()
    publisher = Client(leader, "p")
    others = [mesh.nodes[name] for name in ("b1", "b2", "b3") if name != leader.name]
    for other in others:
        other.slow = True
    publisher.publish("kept/a", b"x")
    publisher.publish("elsewhere", b"y")
    mesh.run()
    assert not [packet for packet in publisher.packets if isinstance(packet, PubAck)]
    others[0].flush_sets()
    mesh.run()
    publisher.read()
    answers = [packet for packet in publisher.packets if isinstance(packet, PubAck)]
    assert [answer.packet_id for answer in answers] == [1, 2]
    assert answers[0].properties is not None
    assert answers[0].properties.user_properties == [("index", "1")]

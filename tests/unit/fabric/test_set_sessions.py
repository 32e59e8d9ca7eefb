"""Publishers and subscribers of replicated topics that move, come back, or whose broker was started again."""

from __future__ import annotations

import pytest

from nearcast.mqtt.packets import Publish, PubRec
from tests.fabric_clients import Client
from tests.gateway_harness import Gateway, run_all
from tests.set_harness import SetMesh

NAMES = ("b1", "b2", "b3", "b4", "b5")


def members_but(mesh: SetMesh, leader: str) -> list[str]:
    return [name for name in ("b1", "b2", "b3") if name != leader]


@pytest.mark.parametrize("qos", [1, 2])
def test_a_client_that_moves_gets_the_answers_that_a_set_owes_it(qos: int) -> None:
    mesh = SetMesh(*NAMES)
    followers = [mesh.nodes[name] for name in members_but(mesh, mesh.leader().name)]
    gateway = Gateway(mesh, "gateway")
    client = gateway.mqtt_client("b4", "p", expiry=100)
    run_all(mesh, gateway)
    for follower in followers:
        follower.slow = True
    client.publish("kept/a", b"1", qos)
    run_all(mesh, gateway)
    client.move("b5")
    run_all(mesh, gateway)
    assert not client.acknowledged
    for follower in followers:
        follower.slow = False
    mesh.wait(0.3)
    run_all(mesh, gateway)
    assert client.acknowledged == {1}
    assert (client.moves, client.trunk.broker) == (1, "b5")


@pytest.mark.parametrize("qos", [1, 2])
def test_a_move_that_waits_too_long_for_a_set_is_given_up_and_its_answers_come_later(qos: int) -> None:
    mesh = SetMesh(*NAMES)
    followers = [mesh.nodes[name] for name in members_but(mesh, mesh.leader().name)]
    gateway = Gateway(mesh, "gateway")
    client = gateway.mqtt_client("b4", "p", expiry=100)
    run_all(mesh, gateway)
    for follower in followers:
        follower.slow = True
    client.publish("kept/a", b"1", qos)
    run_all(mesh, gateway)
    client.move("b5")
    run_all(mesh, gateway)
    for _ in range(4000):
        mesh.advance(0.01)
        run_all(mesh, gateway)
        if client.taken_back:
            break
    assert client.taken_back
    for follower in followers:
        follower.slow = False
    for _ in range(500):
        mesh.advance(0.01)
        run_all(mesh, gateway)
    assert client.acknowledged == {1}
    assert not client.closed


def test_what_a_restart_found_is_not_answered_before_it_is_committed() -> None:
    mesh = SetMesh(*NAMES)
    followers = [mesh.nodes[name] for name in members_but(mesh, mesh.leader().name)]
    for follower in followers:
        follower.slow = True
    publisher = Client(mesh.nodes["b4"], "p", expiry=100)
    publisher.send(Publish("kept/a", b"1", 2, packet_id=7))
    mesh.run()
    mesh.nodes["b4"].crash()
    mesh.back("b4")
    again = Client(mesh.nodes["b4"], "p", expiry=100, clean_start=False)
    again.send(Publish("kept/a", b"1", 2, packet_id=7, dup=True))
    mesh.run()
    again.read()
    assert not [packet for packet in again.packets if isinstance(packet, PubRec)]
    for follower in followers:
        follower.slow = False
    mesh.wait(3.0)
    again.read()
    assert [packet.packet_id for packet in again.packets if isinstance(packet, PubRec)] == [7]
    hosted = mesh.leader().hosted
    assert hosted.last_index(b"kept/a") == 1


def test_a_session_waits_for_every_set_that_it_published_to() -> None:
    mesh = SetMesh(*NAMES)
    node = mesh.nodes["b4"]
    publisher = Client(node, "p", expiry=100)
    publisher.send(Publish("kept/a", b"1", 2, packet_id=7))
    session = node.engine.sessions.by_client["p"]
    assert session.pledges is not None
    assert list(session.pledges) == ["eu"]
    assert not session.is_kept()
    mesh.leader()
    mesh.wait(0.5)
    assert session.is_kept()
    assert session.pledges is None


def test_a_broker_that_began_with_a_leader_without_commit_gets_everything_of_the_next_one() -> None:
    mesh = SetMesh(*NAMES)
    leader = mesh.leader()
    subscriber = Client(mesh.nodes["b4"], "s", expiry=1000)
    subscriber.subscribe("kept/#")
    mesh.run()
    assert mesh.nodes["b4"].fabric.sets.cursors.of("eu") > 0
    publisher = Client(mesh.nodes["b5"], "p")
    publisher.publish("kept/a", b"1")
    leader.crash()
    mesh.wait(3.0)
    mesh.back(leader.name)
    mesh.wait(1.0)
    assert subscriber.payloads == [b"1"]

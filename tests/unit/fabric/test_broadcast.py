"""One broker's part in broadcast groups: whom messages go to, who takes them, links; flooding and relaying as two ends."""

from __future__ import annotations

import random

import msgspec
import pytest

from nearcast.fabric import errands
from nearcast.fabric.group_links import FORGET_S, RECENT_S
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import TopicClass
from nearcast.mqtt.packets import Will
from nearcast.mqtt.publication import build
from tests.broadcast_harness import SETTINGS, GroupMesh, GroupNode
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh

EVERYWHERE_MS = 1e9


def group(*names: str, threshold_ms: float = 5.0) -> tuple[GroupMesh, list[GroupNode]]:
    """One group; the first leads."""
    mesh = GroupMesh()
    nodes = [mesh.broker(name, lcm=10.0 - place, threshold_ms=threshold_ms) for place, name in enumerate(names)]
    mesh.form(names)
    return mesh, nodes


def subscribed(mesh: GroupMesh, node: GroupNode, topic_filter: str = "cars/#", **options: int) -> Client:
    client = Client(node, f"subscriber {node.name}", expiry=100_000)
    client.subscribe(topic_filter, **options)
    mesh.until("SUBACK", lambda: bool(client.subacks))
    return client


def arrived_from_cloud(node: GroupNode) -> int:
    cloud = node.fabric.broadcast.cloud
    assert cloud is not None
    return cloud.arrived_messages


# --- whom messages go to ------------------------------------------------------------------------------------------------


def test_a_message_goes_once_to_each_broker_of_the_group() -> None:
    mesh, nodes = group("a", "b", "c")
    publisher = Client(nodes[1], "publisher")
    for qos in (0, 1, 2):
        publisher.publish("cars/1", b"m", qos)
    mesh.advance(1.0)
    assert [node.fabric.channels.received_messages for node in nodes] == [3, 0, 3]
    assert [node.fabric.broadcast.seen.repeated for node in nodes] == [0, 0, 0]


def test_of_the_filtered_class_it_goes_to_the_leader_and_to_who_wants_it() -> None:
    mesh, (a, b, c, d) = group("a", "b", "c", "d")
    subscribed(mesh, d, "trains/#")
    Client(b, "publisher").publish("trains/1", b"m")
    mesh.advance(1.0)
    assert [node.fabric.channels.received_messages for node in (a, b, c, d)] == [1, 0, 0, 1]


def test_a_threshold_of_zero_relays_everything() -> None:
    mesh = GroupMesh()
    nodes = [mesh.broker(name, lcm=1.0, threshold_ms=0.0) for name in "abc"]
    mesh.form(("a",), ("b",), ("c",))
    present = [subscribed(mesh, node) for node in nodes]
    mesh.advance(5.0)
    Client(nodes[0], "publisher").publish("cars/1", b"m", 2)
    mesh.advance(1.0)
    assert [client.payloads for client in present] == [[b"m"]] * 3
    assert [node.fabric.channels.received_messages for node in nodes] == [0, 0, 0]
    assert [arrived_from_cloud(node) for node in nodes] == [0, 1, 1]


def test_a_threshold_that_is_large_enough_floods_everything() -> None:
    mesh = GroupMesh()
    mesh.far(("a",), ("b",), ("c",))
    nodes = [mesh.broker(name, lcm=9.0 - place, threshold_ms=EVERYWHERE_MS) for place, name in enumerate("abc")]
    mesh.form(("a", "b", "c"))
    present = [subscribed(mesh, node) for node in nodes]
    Client(nodes[1], "publisher").publish("cars/1", b"m", 2)
    mesh.advance(1.0)
    assert [client.payloads for client in present] == [[b"m"]] * 3
    assert [node.fabric.channels.received_messages for node in nodes] == [1, 0, 1]
    assert [arrived_from_cloud(node) for node in nodes] == [0, 0, 0]


def test_without_a_cloud_a_broker_that_comes_later_is_flooded_too() -> None:
    settings = FabricSettings(classes=(TopicClass(topic="cars/#", topic_class="broadcast"),))
    mesh = Mesh(settings=settings)
    a, b = mesh.add("a"), mesh.add("b")
    publisher = Client(a, "publisher")
    publisher.publish("cars/1", b"alone")
    mesh.link("a", "b")
    mesh.run()
    publisher.publish("cars/1", b"two")
    mesh.run()
    assert b.fabric.channels.received_messages == 1
    assert a.fabric.broadcast.relay is None


def test_publishers_do_not_get_their_own_where_they_said_so() -> None:
    mesh, (a, b) = group("a", "b")
    clients = [subscribed(mesh, node, "cars/#", no_local=True) for node in (a, b)]
    for client in clients:
        client.publish("cars/1", client.client_id.encode())
    mesh.advance(1.0)
    assert [client.payloads for client in clients] == [[b"subscriber b"], [b"subscriber a"]]


def test_wills_cross_to_other_groups() -> None:
    mesh = GroupMesh()
    mesh.far(("a", "b"), ("x",))
    for name, lcm in (("a", 3.0), ("b", 2.0), ("x", 1.0)):
        mesh.broker(name, lcm=lcm)
    mesh.form(("a", "b"), ("x",))
    client = subscribed(mesh, mesh.group_nodes()[2])
    doomed = Client(mesh.nodes["b"], "doomed", will=Will("cars/will", b"farewell", 1))
    doomed.vanish()
    mesh.advance(1.0)
    assert client.payloads == [b"farewell"]


# --- who takes them -----------------------------------------------------------------------------------------------------


def test_what_is_pushed_does_not_stand_in_for_what_is_flooded() -> None:
    """The flooded copy says for which shared subscription we were chosen; it may come second."""
    mesh, (a, b) = group("a", "b")
    member = subscribed(mesh, a, "$share/g/cars/#")
    relay = a.fabric.broadcast.relay
    assert relay is not None
    peer = a.fabric.peers["b"]
    view = a.fabric.broadcast.formation.view.version
    turn = relay.sources["b"].turn
    for via in (
        errands.pushed(turn, view) + "\0\6$share/g/cars/#",
        errands.flooded(view) + "\0$share/g/cars/#",
        errands.flooded(view) + "\0$share/g/cars/#",
    ):
        publication = build(b"cars/1", b"m", 1, False, b"", 0.0)
        publication.sequence = b.fabric.engine.router.next_sequence
        publication.origin = peer.number
        a.fabric.broadcast.arrived(peer, publication, via, mesh.now)
        a.flush()
    assert member.payloads == [b"m"]


def test_a_message_that_comes_by_two_ways_is_taken_once() -> None:
    mesh, (a, _) = group("a", "b")
    client = subscribed(mesh, a)
    peer = a.fabric.peers["b"]
    for via in (
        errands.flooded(a.fabric.broadcast.formation.view.version),
        errands.carried("b", peer.epoch, 700, ""),
        errands.carried("b", peer.epoch, 699, "z"),
    ):
        publication = build(b"cars/1", b"m", 1, False, b"", 0.0)
        publication.sequence = 700
        publication.origin = peer.number
        a.fabric.broadcast.arrived(peer, publication, via, mesh.now)
        a.flush()
    assert client.payloads == [b"m", b"m"], "700, and 699, which is another"
    assert a.fabric.broadcast.seen.repeated == 1


@pytest.mark.parametrize("seed", range(4))
def test_two_groups_merge_while_all_publish(seed: int) -> None:
    mesh = GroupMesh(seed)
    mesh.far(("a", "b"), ("x", "y"))
    nodes = [
        mesh.broker(name, lcm=lcm, threshold_ms=70.0, durable=True)
        for name, lcm in (("a", 3.0), ("b", 1.0), ("x", 4.0), ("y", 2.0))
    ]
    mesh.form(("a", "b"), ("x", "y"))
    present = [subscribed(mesh, node) for node in nodes]
    publishers = [Client(node, f"publisher {node.name}") for node in nodes]
    rng = random.Random(seed)
    mesh.distances.clear()
    count = 0
    while any(node.members != {"a", "b", "x", "y"} for node in nodes):
        assert count < 3_000
        for publisher in publishers:
            publisher.publish("cars/1", b"%d" % count, 1 + count % 2)
            count += 1
        for _ in range(rng.randrange(60)):
            mesh.step(rng)
        mesh.tick(0.05)
    mesh.until("everybody has everything", lambda: all(len(client.payloads) >= count for client in present))
    mesh.advance(2.0)
    for client in present:
        assert sorted(client.payloads, key=int) == [b"%d" % number for number in range(count)]


def test_retained_messages_reach_a_group_that_subscribes_later() -> None:
    mesh = GroupMesh()
    mesh.far(("a", "b"), ("x", "y"))
    for name, lcm in (("a", 3.0), ("b", 1.0), ("x", 4.0), ("y", 2.0)):
        mesh.broker(name, lcm=lcm)
    mesh.form(("a", "b"), ("x", "y"))
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish("cars/1", b"old", retain=True)
    publisher.publish("cars/1", b"new", retain=True)
    mesh.advance(1.0)
    nodes = mesh.group_nodes()
    for node in (nodes[3], nodes[2], nodes[0]):
        client = subscribed(mesh, node)
        mesh.advance(1.0)
        assert client.payloads == [b"new"], node.name
    publisher.publish("cars/1", b"", retain=True)
    mesh.advance(1.0)
    late = Client(nodes[2], "late")
    late.subscribe("cars/#")
    mesh.advance(1.0)
    assert late.payloads == []


# --- links --------------------------------------------------------------------------------------------------------------


def test_brokers_of_different_groups_have_no_link_in_the_end() -> None:
    mesh, (a, b) = group("a", "b", threshold_ms=70.0)
    mesh.far(("a",), ("b",))
    mesh.form(("a",), ("b",))
    assert "b" in a.fabric.peers
    mesh.advance(2 * RECENT_S + 5.0)
    assert [peer.up for peer in a.fabric.peers.values()] == [False]
    mesh.advance(FORGET_S)
    assert "b" not in a.fabric.peers
    assert "a" not in b.fabric.peers


def test_what_was_flooded_to_a_fellow_is_brought_to_it_also_when_it_is_none_any_more() -> None:
    mesh, (_, b, c) = group("a", "b", "c", threshold_ms=70.0)
    client = subscribed(mesh, c)
    for other in ("a", "b", "cloud"):
        mesh.part("c", other)
    Client(b, "publisher").publish("cars/1", b"owed")
    mesh.far(("a", "b"), ("c",))
    mesh.form(("a", "b"), ("c",))
    mesh.advance(FORGET_S + RECENT_S)
    mesh.heal()
    mesh.until("b has brought it", lambda: client.payloads == [b"owed"])
    mesh.form(("a", "b"), ("c",))
    mesh.advance(2 * FORGET_S)
    assert "c" not in b.fabric.peers
    assert client.payloads == [b"owed"]


def test_with_a_controller_or_peers_brokers_are_linked_anyhow() -> None:
    linked = msgspec.structs.replace(SETTINGS, peers=("elsewhere:1884",))
    mesh = GroupMesh(settings=linked)
    assert mesh.broker("a", lcm=1.0).fabric.broadcast.links_all
    assert not mesh.broker("b", lcm=1.0, links="group").fabric.broadcast.links_all
    assert not GroupMesh().broker("c", lcm=1.0).fabric.broadcast.links_all


# --- leaving ------------------------------------------------------------------------------------------------------------


def test_a_broker_that_stops_waits_until_the_cloud_has_all_it_published() -> None:
    mesh, (a, b) = group("a", "b")
    mesh.stalled.add("a")
    Client(b, "publisher").publish("cars/1", b"m")
    mesh.run()
    assert not b.fabric.broadcast.has_left()
    mesh.stalled.clear()
    mesh.run()
    assert b.fabric.broadcast.has_left()
    assert a.fabric.broadcast.has_left()


def test_a_member_that_stops_waits_for_its_leader_s_go_but_not_for_a_cloud_that_is_away() -> None:
    mesh, (_a, b) = group("a", "b")
    relay = b.fabric.broadcast.relay
    assert relay is not None
    relay.told_state(b.fabric.peers["a"], 0, mesh.now)  # the leader has too much at the moment
    Client(b, "publisher").publish("cars/1", b"m", 1)
    assert not b.fabric.has_left()
    mesh.until("the next go", b.fabric.has_left)
    assert b.waiting == 0
    mesh.stop_cloud()
    mesh.run()
    Client(b, "publisher").publish("cars/1", b"m", 1)
    assert b.waiting == 1
    assert b.fabric.has_left()


def test_members_of_a_leader_that_stops_miss_nothing() -> None:
    mesh = GroupMesh()
    mesh.far(("a", "b", "c"), ("x",))
    a, b, c = (mesh.broker(name, lcm=lcm) for name, lcm in (("a", 4.0), ("b", 3.0), ("c", 2.0)))
    x = mesh.broker("x", lcm=1.0)
    mesh.form(("a", "b", "c"), ("x",))
    subscribers = [Client(node, f"subscriber {node.name}") for node in (b, c)]
    for subscriber in subscribers:
        subscriber.subscribe("cars/#", 1)
    mesh.advance(1.0)
    publisher = Client(x, "publisher")
    sent: list[bytes] = []

    def has_left() -> bool:
        sent.append(b"%d" % len(sent))
        publisher.publish("cars/1", sent[-1], 1)
        return a.fabric.has_left()

    a.fabric.leave(mesh.now)
    a.flush()
    assert not a.fabric.has_left()
    mesh.until("others cover its members", has_left)
    assert a.leader == "a", "it may come back"
    mesh.part("a", "cloud")  # and does not
    for node in (b, c, x):
        mesh.part("a", node.name)
    publisher.publish("cars/1", b"last", 1)
    mesh.form(("b", "c"), ("x",))
    for subscriber in subscribers:
        assert subscriber.payloads == [*sent, b"last"]


def test_figures_say_what_happened() -> None:
    mesh, (a, b) = group("a", "b")
    subscribed(mesh, a)
    Client(b, "publisher").publish("cars/1", b"m")
    mesh.advance(1.0)
    figures = a.fabric.broadcast.figures()
    assert figures["relayed_messages"] == figures["relayed_for_members"] == 1
    assert figures["correct_messages"] == 1
    assert figures["redundant_messages"] == 0
    assert b.fabric.broadcast.figures()["leader_joins"] == 1


def test_one_that_hears_no_announcements_follows_whoever_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks says where it is, so that it can be measured: nobody follows whom it cannot measure."""
    mesh = GroupMesh()
    mesh.broker("a", lcm=9.0)
    deaf = mesh.broker("b", lcm=1.0)
    monkeypatch.setattr(deaf.fabric.broadcast.board, "hear", lambda content, now: None)
    mesh.form(("a", "b"))
    assert deaf.fabric.broadcast.formation.leaves == 0

"""From the cloud to brokers: who covers whom while brokers come, go, change leaders, crash and return."""

from __future__ import annotations

import random

from nearcast.fabric.coverage import ABSENT, DEPARTING, PRESENT, Coverage
from nearcast.fabric.fabric import Fabric
from tests.broadcast_harness import GroupMesh, GroupNode
from tests.fabric_clients import Client


def coverage_of(node: GroupNode) -> Coverage:
    return node.fabric.broadcast.coverage


def states(node: GroupNode) -> dict[str, int]:
    return {covered.name: covered.state for covered in coverage_of(node).covered.values()}


def subscriptions_at_cloud(mesh: GroupMesh, name: str) -> set[str]:
    """What a broker is subscribed to there, but for what brokers talk on."""
    session = mesh.cloud.engine.sessions.by_client.get(f"nearcast/{name}")
    assert session is not None
    return {topic_filter for topic_filter in session.subscriptions if not topic_filter.startswith("nearcast/")}


def subscribed(mesh: GroupMesh, node: GroupNode, topic_filter: str = "cars/#") -> Client:
    client = Client(node, f"subscriber {node.name} {topic_filter}", expiry=100_000)
    client.subscribe(topic_filter)
    mesh.until("SUBACK", lambda: bool(client.subacks))
    return client


def three_sites(*, durable: bool = True) -> tuple[GroupMesh, GroupNode, GroupNode, GroupNode, GroupNode]:
    """a leads k; far from them and from each other, b and x are alone. b would take k in."""
    mesh = GroupMesh()
    mesh.far(("a", "k"), ("b",), ("x",))
    a, b = mesh.broker("a", lcm=9.0, durable=durable), mesh.broker("b", lcm=8.0, durable=durable)
    k, x = mesh.broker("k", lcm=1.0, durable=durable), mesh.broker("x", lcm=2.0, durable=durable)
    mesh.form(("a", "k"), ("b",), ("x",))
    return mesh, a, b, k, x


def move_k_to_b(mesh: GroupMesh) -> None:
    mesh.distances.clear()
    mesh.far(("a",), ("b", "k"), ("x",))


def test_a_leader_subscribes_for_its_group_and_only_what_is_broadcast() -> None:
    mesh, a, _, k, _ = three_sites()
    one = subscribed(mesh, k, "cars/+/speed")
    two = subscribed(mesh, a, "cars/+/speed")
    subscribed(mesh, k, "yards/#")
    subscribed(mesh, k, "other/topic")
    wide = subscribed(mesh, a, "#")
    mesh.advance(0.5)
    assert subscriptions_at_cloud(mesh, "a") == {"cars/#", "trains/#"}
    wide.unsubscribe("#")
    mesh.advance(0.5)
    assert subscriptions_at_cloud(mesh, "a") == {"cars/+/speed"}
    two.unsubscribe("cars/+/speed")
    mesh.advance(0.5)
    assert subscriptions_at_cloud(mesh, "a") == {"cars/+/speed"}, "the member still wants it"
    one.unsubscribe("cars/+/speed")
    mesh.advance(0.5)
    assert subscriptions_at_cloud(mesh, "a") == set()


def test_rules_may_change_while_brokers_run() -> None:
    mesh, _, _, k, x = three_sites()
    client = subscribed(mesh, k, "#")
    fabrics: list[Fabric] = [node.fabric for node in mesh.group_nodes()]
    for fabric in fabrics:
        fabric.classes.replace([("ships/#", "broadcast")], 1)
    mesh.advance(1.0)
    assert subscriptions_at_cloud(mesh, "a") == {"ships/#"}
    publisher = Client(x, "publisher")
    publisher.publish("ships/1", b"across")
    publisher.publish("cars/1", b"not any more")
    mesh.advance(1.0)
    assert client.payloads == [b"across"]


def test_who_changes_leaders_is_covered_by_the_former_one_until_it_is_by_the_new_one() -> None:
    mesh, a, b, k, x = three_sites()
    rng = random.Random(1)
    client = subscribed(mesh, k)
    publisher = Client(x, "publisher")
    move_k_to_b(mesh)
    while k.leader != "b":
        if not mesh.step(rng):
            mesh.tick(0.05)
    mesh.stalled.add("b")
    publisher.publish("cars/1", b"in between")
    mesh.advance(2.0)
    assert client.payloads == [b"in between"]
    mesh.stalled.clear()
    mesh.until("nobody else covers k", lambda: "k" not in states(a))
    assert states(b)["k"] == PRESENT
    assert subscriptions_at_cloud(mesh, "a") == set()
    publisher.publish("cars/1", b"afterwards")
    mesh.advance(1.0)
    assert client.payloads == [b"in between", b"afterwards"]


def test_one_that_left_gets_what_the_cloud_had_for_it_by_then() -> None:
    mesh, a, _, k, x = three_sites()
    client = subscribed(mesh, k)
    mesh.stalled.add("a")
    publisher = Client(x, "publisher")
    publisher.publish("cars/1", b"on its way to a")
    mesh.run()
    mesh.distances.clear()
    mesh.far(("a",), ("b",), ("k",), ("x",))
    mesh.until("k has left", lambda: states(a).get("k") == DEPARTING)
    publisher.publish("cars/1", b"to k itself")
    mesh.advance(1.0)
    assert client.payloads == [b"to k itself"]
    mesh.stalled.clear()
    mesh.until("a lets it go", lambda: "k" not in states(a))
    assert sorted(client.payloads) == [b"on its way to a", b"to k itself"]


def test_for_a_member_that_is_away_its_leader_keeps_what_it_wants() -> None:
    mesh, a, _, k, x = three_sites()
    client = subscribed(mesh, k)
    for other in ("a", "b", "x", "cloud"):
        mesh.part("k", other)
    mesh.until("a misses k", lambda: states(a).get("k") == ABSENT)
    publisher = Client(x, "publisher")
    publisher.publish("cars/1", b"from afar")
    publisher.publish("trains/1", b"unwanted")
    Client(a, "publisher").publish("cars/1", b"from its leader")
    mesh.advance(1.0)
    assert client.payloads == []
    mesh.heal()
    mesh.until("k is back", lambda: len(client.payloads) == 2)
    mesh.until("as a member", lambda: k.leader == "a" and states(a).get("k") == PRESENT)
    mesh.advance(2.0)
    assert sorted(client.payloads) == [b"from afar", b"from its leader"]


def test_members_of_a_leader_that_restarts_miss_nothing() -> None:
    mesh, a, _, k, x = three_sites()
    client = subscribed(mesh, k)
    publisher = Client(x, "publisher")
    mesh.stalled.add("a")
    publisher.publish("cars/1", b"before")
    mesh.run()
    a.crash()
    publisher.publish("cars/1", b"while it was down")
    mesh.run()
    mesh.stalled.clear()
    assert states(a)["k"] == ABSENT, "known from the journal"
    for number in range(40):
        publisher.publish("cars/1", b"%d" % number)
        mesh.advance(0.1)
        assert "cars/#" in subscriptions_at_cloud(mesh, "a") | subscriptions_at_cloud_of_all(mesh)
    mesh.form(("a", "k"), ("b",), ("x",))
    mesh.advance(2.0)
    assert set(client.payloads) == {b"before", b"while it was down", *(b"%d" % number for number in range(40))}


def subscriptions_at_cloud_of_all(mesh: GroupMesh) -> set[str]:
    return {topic_filter for name in mesh.nodes for topic_filter in subscriptions_at_cloud(mesh, name)}


def test_a_former_leader_that_restarts_is_told_that_others_cover_its_members() -> None:
    mesh, a, b, k, _ = three_sites()
    subscribed(mesh, k)
    move_k_to_b(mesh)
    mesh.until("b covers k", lambda: k.leader == "b" and "k" not in states(a))
    a.crash()
    assert states(a).get("k") == ABSENT, "it cannot know"
    # They are far from each other and have no link; what a passes on to k, k answers.
    mesh.link("k", "a")
    mesh.until("a lets k go", lambda: "k" not in states(a))
    assert states(b)["k"] == PRESENT


def test_versions_of_interest_are_told_one_by_one() -> None:
    """However often others change theirs: nobody waits for a moment in which nothing changes."""
    mesh, a, _, k, _ = three_sites()
    mesh.stalled.add("a")
    first = Client(k, "first")
    first.subscribe("cars/1")
    mesh.run()
    asked = coverage_of(a).filters.version
    Client(a, "busy").subscribe("cars/2")
    mesh.run()
    assert coverage_of(a).filters.version > asked
    assert not first.subacks
    coverage_of(a).placed(asked, mesh.now)
    a.flush()
    mesh.run()
    assert first.subacks, "its filter is in place, if not all that came since"


def test_a_subscription_that_does_not_concern_the_cloud_does_not_wait_for_it() -> None:
    mesh, a, _, k, _ = three_sites()
    mesh.stalled.add("a")
    mesh.stalled.add("k")
    for node in (a, k):
        client = Client(node, "bridged")
        client.subscribe("other/topic")
        mesh.run()
        assert client.subacks
        client.subscribe("cars/#")
        mesh.run()
        assert len(client.subacks) == 1
    mesh.stalled.clear()
    mesh.run()
    assert len(client.subacks) == 2


def test_without_the_cloud_markers_do_not_gather() -> None:
    mesh, a, _, _, _ = three_sites()
    mesh.stop_cloud()
    departures: set[int] = set()
    for _ in range(20):
        coverage_of(a).depart("k", mesh.now)
        departures.add(coverage_of(a).covered["k"].departure)
        coverage_of(a).view_changed(mesh.now)
    assert len(departures) == 1, "one will do for all"
    mesh.start_cloud()
    mesh.advance(5.0)
    assert states(a)["k"] == PRESENT
    assert coverage_of(a).covered["k"].arrival == 0


def test_what_was_flooded_before_a_broker_joined_is_passed_on_by_the_leader() -> None:
    mesh = GroupMesh()
    mesh.far(("k",), ("a", "m"))
    mesh.broker("a", lcm=3.0, threshold_ms=70.0)
    m, k = mesh.broker("m", lcm=2.0, threshold_ms=70.0), mesh.broker("k", lcm=1.0, threshold_ms=70.0)
    mesh.form(("a", "m"), ("k",))
    client = subscribed(mesh, k)
    mesh.part("m", "a")
    mesh.tick(0.1)
    publisher = Client(m, "publisher")
    publisher.publish("cars/1", b"before it knew of k")
    mesh.distances.clear()
    mesh.until("a takes k in", lambda: k.leader == "a")
    mesh.heal()
    mesh.until("k has it", lambda: bool(client.payloads))
    mesh.form(("a", "m", "k"))
    assert client.payloads == [b"before it knew of k"]

"""A broker's side of its registration: whom it dials, forgets, and what it reports."""

from __future__ import annotations

from nearcast.fabric.broker_node import BrokerNode
from nearcast.fabric.control import ClassRule, ClassRules, Departure, Member, Node
from nearcast.fabric.registry import reachable
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect
from tests.broadcast_harness import GroupMesh
from tests.fabric_harness import Mesh
from tests.fabric_harness import Node as MeshNode


def member(name: str, address: str) -> Member:
    return Member(name=name, link=address)


def registrant(node: MeshNode, *, durable: bool = False) -> BrokerNode:
    return BrokerNode(node.fabric, lambda: Node(name=node.name, role="broker"), durable=durable)


def test_members_are_dialled_at_their_latest_address() -> None:
    mesh = Mesh()
    node = mesh.add("a")
    broker = registrant(node)
    broker.members((member("b", "one:1"), member("c", "two:1")), (), mesh.now)
    mesh.now += 5.0
    node.fabric.tick(mesh.now)
    assert sorted(node.fabric.take_dials()) == ["one:1", "two:1"]
    broker.members((member("b", "three:1"),), (), mesh.now)
    mesh.now += 5.0
    node.fabric.tick(mesh.now)
    assert node.fabric.take_dials() == ["three:1"]
    assert not node.fabric.dialing_of("one:1")


def test_only_a_broker_that_left_for_good_is_forgotten() -> None:
    mesh = Mesh()
    one = mesh.add("a")
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    broker = registrant(one)
    broker.members((member("b", "b:1"),), (), mesh.now)
    broker.members((), (Departure("b", left=False),), mesh.now)
    assert one.fabric.peers["b"].up
    broker.members((), (Departure("b", left=True), Departure("unknown", left=True)), mesh.now)
    assert "b" not in one.fabric.peers
    assert not one.fabric.dialing_of("b")


def test_clients_without_a_gateway_are_reported_as_changes() -> None:
    mesh = Mesh()
    node = mesh.add("a")
    broker = registrant(node)
    broker.registered("controller", mesh.now)
    first = node.client()
    node.feed(first, encode(Connect("one", version=5), 5))
    report = broker.report(mesh.now)
    assert report.clients_whole
    assert [facts.client for facts in report.clients] == ["one"]
    assert (report.connections, report.gateway_connections, report.sessions) == (1, 0, 1)
    second = node.client()
    node.feed(second, encode(Connect("two", version=5), 5))
    assert first.other is not None
    assert first.other.connection is not None
    node.engine.lose(first.other.connection, mesh.now)
    report = broker.report(mesh.now)
    assert not report.clients_whole
    assert ([facts.client for facts in report.clients], report.clients_gone) == (["two"], ["one"])
    report = broker.report(mesh.now)
    assert (report.clients, report.clients_gone) == ([], [])
    broker.registered("another controller", mesh.now)
    report = broker.report(mesh.now)
    assert report.clients_whole
    assert [facts.client for facts in report.clients] == ["two"]


def test_links_to_other_brokers_are_reported() -> None:
    mesh = Mesh()
    node = mesh.add("a")
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    (link,) = registrant(node).report(mesh.now).links
    assert (link.name, link.hops) == ("b", 1)


def test_classes_are_used_and_those_that_cannot_be_are_said() -> None:
    mesh = Mesh()
    node = mesh.add("a")
    broker = registrant(node)
    assert broker.class_rules() == ClassRules()
    rules = ClassRules(5, (ClassRule("x/#", "local"),))
    broker.classes(rules, mesh.now)
    assert broker.class_rules() == rules
    assert not node.fabric.classes.crosses(b"x/1")
    broker.classes(ClassRules(6, (ClassRule("x/#", "a class of tomorrow"),)), mesh.now)
    assert "a class of tomorrow" in broker.classes_fault
    assert broker.class_rules() == rules


def test_a_broker_with_a_data_directory_comes_back() -> None:
    node = Mesh().add("a")
    assert registrant(node).leaves_for_good()
    assert not registrant(node, durable=True).leaves_for_good()


def test_addresses_that_stand_for_every_interface_get_the_host_that_was_seen() -> None:
    assert reachable("0.0.0.0:1884", "10.1.1.1") == "10.1.1.1:1884"
    assert reachable("[::]:1884", "fd00::1") == "[fd00::1]:1884"
    assert reachable(":7", "10.1.1.1") == "10.1.1.1:7"
    assert reachable("broker.example.org:1884", "10.1.1.1") == "broker.example.org:1884"
    assert reachable("mqtts://0.0.0.0:8883", "10.1.1.1") == "mqtts://10.1.1.1:8883"
    assert reachable("ws://0.0.0.0:80/mqtt", "10.1.1.1") == "ws://10.1.1.1:80/mqtt"
    assert reachable("unix:/run/nearcast", "10.1.1.1") == "unix:/run/nearcast"
    assert reachable("", "10.1.1.1") == ""


def test_a_broadcast_group_is_reported_soon_after_it_changed() -> None:
    mesh = GroupMesh()
    a, b = mesh.broker("a", lcm=2.0), mesh.broker("b", lcm=1.0)
    broker = registrant(b)
    assert broker.has_news()
    alone = broker.report(mesh.now).group
    assert alone is not None
    assert (alone.leader, alone.fellows, alone.relay, alone.leaders) == ("b", [], "no cloud", [])
    assert not broker.has_news()
    mesh.form(("a", "b"))
    assert broker.has_news()
    joined = broker.report(mesh.now).group
    assert joined is not None
    assert (joined.leader, joined.latency_ms, joined.relay, joined.cloud_state) == ("a", 0.0, "live", "not needed")
    assert [(fellow.name, fellow.up, fellow.relay) for fellow in joined.fellows] == [("a", True, "-")]
    led = registrant(a).report(mesh.now).group
    assert led is not None
    assert [(fellow.name, fellow.address, fellow.relay) for fellow in led.fellows] == [("b", "b:1884", "live")]
    assert not broker.has_news()
    assert registrant(Mesh().add("c")).report(mesh.now).group is None

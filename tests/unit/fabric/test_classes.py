"""Topics of the class ``local`` stay where they were published; rules can be replaced while brokers run."""

from __future__ import annotations

import pytest

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import TopicClass
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh


def linked(*rules: tuple[str, str]) -> Mesh:
    classes = tuple(TopicClass(topic=topic, topic_class=kind) for topic, kind in rules)  # type: ignore[arg-type]
    mesh = Mesh(settings=FabricSettings(classes=classes))
    mesh.add("a")
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    return mesh


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_local_topic_stays(qos: int) -> None:
    mesh = linked(("site/public/#", "bridged"), ("site/#", "local"))
    here, there = Client(mesh.nodes["a"], "here"), Client(mesh.nodes["b"], "there")
    for subscriber in (here, there):
        subscriber.subscribe("site/#")
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish("site/secret", b"stays", qos)
    publisher.publish("site/public/x", b"goes", qos)
    mesh.run()
    here.read()
    there.read()
    assert sorted(message.payload for message in here.messages) == [b"goes", b"stays"]
    assert [message.payload for message in there.messages] == [b"goes"]


def test_a_group_of_a_local_topic_is_served_here_only() -> None:
    mesh = linked(("site/#", "local"))
    there = Client(mesh.nodes["b"], "there")
    there.subscribe("$share/g/site/x")
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish("site/x", b"1", 1)
    here = Client(mesh.nodes["a"], "here")
    here.subscribe("$share/g/site/x")
    mesh.run()
    publisher.publish("site/x", b"2", 1)
    mesh.run()
    here.read()
    there.read()
    assert [message.payload for message in here.messages] == [b"2"]
    assert there.messages == []


def test_a_retained_message_of_a_local_topic_is_not_copied() -> None:
    mesh = linked(("site/#", "local"))
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish("site/x", b"1", 1, retain=True)
    publisher.publish("town/x", b"2", 1, retain=True)
    mesh.advance(5.0)
    assert mesh.nodes["a"].engine.retained.get(b"site/x") is not None
    assert mesh.nodes["b"].engine.retained.get(b"site/x") is None
    assert mesh.nodes["b"].engine.retained.get(b"town/x") is not None


def test_rules_are_replaced_by_newer_ones_only() -> None:
    mesh = linked()
    a = mesh.nodes["a"]
    there = Client(mesh.nodes["b"], "there")
    there.subscribe("t")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("t", b"1", 1)
    assert a.fabric.classes.replace([("t", "local")], 10)
    publisher.publish("t", b"2", 1)
    assert not a.fabric.classes.replace([], 9)
    publisher.publish("t", b"3", 1)
    assert a.fabric.classes.replace([], 11)
    publisher.publish("t", b"4", 1)
    mesh.run()
    there.read()
    assert [message.payload for message in there.messages] == [b"1", b"4"]


@pytest.mark.parametrize(("topic_filter", "topic_class"), [("a/#/b", "local"), ("", "local"), ("a", "nobody's")])
def test_rules_that_make_no_sense_are_refused_whole(topic_filter: str, topic_class: str) -> None:
    classes = linked().nodes["a"].fabric.classes
    classes.replace([("x", "local")], 1)
    with pytest.raises(ConfigError, match="topic class of"):
        classes.replace([("y", "local"), (topic_filter, topic_class)], 2)
    assert classes.rules == [("x", "local")]


def test_a_brokers_own_figures_stay_at_home() -> None:
    mesh = linked()
    there = Client(mesh.nodes["b"], "there")
    there.subscribe("$SYS/#")
    mesh.run()
    a = mesh.nodes["a"]
    a.engine.publish("$SYS/broker/uptime", b"1", 0, True, mesh.now)
    a.flush()
    mesh.run()
    there.read()
    assert there.messages == []
    assert not a.fabric.peers["b"].session.subscriptions

"""docs/semantics.md: each promise has a test that names it (``# semantics: D1``); those that no other file keeps are here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nearcast.mqtt import reasons
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Properties, PubAck, SubAck, Subscribe, SubscriptionRequest, Will
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh, Node

TESTS = Path(__file__).parents[2]
DOCUMENT = TESTS.parent / "docs" / "semantics.md"


def mesh_of(*names: str, durable: bool = False) -> tuple[Mesh, list[Node]]:
    mesh = Mesh()
    nodes = [mesh.add(name, durable=durable) for name in names]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            mesh.link(name, other)
    mesh.run()
    return mesh, nodes


def settle(mesh: Mesh) -> None:
    for _ in range(5):
        mesh.advance(0.1)


def test_every_promise_has_a_test() -> None:
    promises = re.findall(r"^- \*\*([A-Z]\d+)\*\* ", DOCUMENT.read_text(), re.MULTILINE)
    assert len(promises) == len(set(promises)) > 30
    kept: set[str] = set()
    for file in (TESTS / "unit" / "fabric").glob("test_*.py"):
        for names in re.findall(r"^# semantics: (.*)\n(?:@.*\n)*def test_", file.read_text(), re.MULTILINE):
            kept.update(names.split())
    assert sorted(set(promises) - kept) == []
    assert sorted(kept - set(promises)) == []


# --- delivery ------------------------------------------------------------------------------------------------------------


# semantics: D1 D2
@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("asked", [0, 1, 2])
def test_each_subscriber_at_each_broker_gets_it_once_at_the_lower_qos(version: int, published: int, asked: int) -> None:
    mesh, (a, b, c, d) = mesh_of("a", "b", "c", "d")
    subscribers = [Client(node, f"s {node.name}", version=version) for node in (a, b, c)]
    for subscriber in subscribers:
        subscriber.subscribe("rooms/+/warm", asked)
        mesh.run()
    Client(a, "publisher").publish("rooms/1/warm", b"x", published)
    settle(mesh)
    for subscriber in subscribers:
        assert [(message.payload, message.qos) for message in subscriber.messages] == [(b"x", min(published, asked))]
    assert d.fabric.peers["a"].received == d.fabric.peers["a"].received_unreliable == 0


# semantics: D3
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("qos", [1, 2])
def test_what_is_for_a_broker_that_is_away_waits(durable: bool, qos: int) -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=durable), mesh.add("b", durable=durable)
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/1")
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("rooms/1", b"on its way", qos)
    mesh.cut(stream)
    publisher.publish("rooms/1", b"while away", qos)
    mesh.run()
    if durable:
        a.crash()
    mesh.link("a", "b")
    settle(mesh)
    assert subscriber.payloads == [b"on its way", b"while away"]


# semantics: D4
def test_qos_0_goes_at_once_or_not_at_all_and_is_counted() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/1")
    mesh.run()
    mesh.cut(stream)
    before = a.engine.stats.dropped_slow_consumer
    Client(a, "publisher").publish("rooms/1", b"x", 0)
    mesh.link("a", "b")
    settle(mesh)
    assert subscriber.payloads == []
    assert a.engine.stats.dropped_slow_consumer == before + 1


# semantics: D5
def test_an_acknowledgement_is_the_publisher_s_broker_s() -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=True), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    Client(b, "subscriber").subscribe("rooms/1")
    mesh.run()
    mesh.cut(stream)
    publisher = Client(a, "publisher")
    mesh.run()
    publisher.publish("rooms/1", b"x", 1)
    publisher.read()
    assert not any(isinstance(packet, PubAck) for packet in publisher.packets)  # not on disk yet
    a.sync()
    publisher.read()
    assert any(isinstance(packet, PubAck) for packet in publisher.packets)


# semantics: D6
def test_no_matching_subscribers_means_nowhere() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    publisher = Client(a, "publisher")
    publisher.publish("rooms/1", b"x", 1)
    Client(b, "subscriber").subscribe("rooms/1")
    mesh.run()
    publisher.publish("rooms/1", b"x", 1)
    codes = [packet.reason_code for packet in publisher.packets if isinstance(packet, PubAck)]
    assert codes == [reasons.NO_MATCHING_SUBSCRIBERS, reasons.SUCCESS]


# semantics: D7
def test_suback_comes_when_all_reachable_brokers_know() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    subscriber.send(Subscribe(9, [SubscriptionRequest("rooms/1", 1)]))
    assert not subscriber.subacks
    mesh.run()
    assert subscriber.subacks == [SubAck(9, [1])]
    Client(a, "publisher").publish("rooms/1", b"x", 0)
    mesh.run()
    assert subscriber.payloads == [b"x"]


# semantics: D7
def test_suback_does_not_wait_for_ever() -> None:
    mesh, (_, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    subscriber.send(Subscribe(9, [SubscriptionRequest("rooms/1", 1)]))
    mesh.now += mesh.settings.subscribe_timeout_seconds
    b.fabric.tick(mesh.now)
    b.flush()
    assert subscriber.subacks


# semantics: D8
def test_properties_arrive_as_they_were_and_an_expiry_counts_down() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/1")
    mesh.run()
    mesh.cut(stream)
    sent = Properties(
        payload_format_indicator=1,
        message_expiry_interval=100,
        content_type="text/plain",
        response_topic="answers",
        correlation_data=b"17",
        user_properties=[("one", "1"), ("two", "2"), ("one", "3")],
    )
    publisher = Client(a, "publisher")
    publisher.publish("rooms/1", b"x", 1, properties=sent)
    publisher.publish("rooms/1", b"short", 1, properties=Properties(message_expiry_interval=5))
    mesh.advance(30)
    mesh.link("a", "b")
    settle(mesh)
    assert subscriber.payloads == [b"x"]
    got = subscriber.messages[0].properties
    assert got is not None
    assert got.message_expiry_interval in (70, 71)
    got.message_expiry_interval = 100
    assert got == sent


# semantics: D9
def test_overlapping_subscriptions_give_one_copy_with_all_identifiers() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    for identifier, (topic_filter, qos) in enumerate((("rooms/#", 1), ("rooms/+", 2)), 1):
        packet = Subscribe(
            identifier,
            [SubscriptionRequest(topic_filter, qos)],
            properties=Properties(subscription_identifiers=[identifier]),
        )
        subscriber.send(packet)
        mesh.run()
    Client(a, "publisher").publish("rooms/1", b"x", 2)
    settle(mesh)
    assert [(message.payload, message.qos) for message in subscriber.messages] == [(b"x", 2)]
    properties = subscriber.messages[0].properties
    assert properties is not None
    assert sorted(properties.subscription_identifiers or []) == [1, 2]


# semantics: D9
def test_no_local_and_retain_as_published_hold_over_brokers() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    own, other, published = Client(a, "own"), Client(b, "other"), Client(b, "published")
    own.subscribe("rooms/#", no_local=True)
    other.subscribe("rooms/#")
    published.subscribe("rooms/#", retain_as_published=True)
    mesh.run()
    own.publish("rooms/1", b"x", 1, retain=True)
    settle(mesh)
    assert own.payloads == []
    assert [message.retain for message in other.messages] == [False]
    assert [message.retain for message in published.messages] == [True]


# semantics: D10
def test_figures_stay_at_their_broker() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("$SYS/#")
    mesh.run()
    a.engine.publish("$SYS/broker/uptime", b"1", 1, True, mesh.now)
    a.flush()
    mesh.advance(3)
    assert subscriber.payloads == []


# --- order ---------------------------------------------------------------------------------------------------------------


# semantics: O1 O2
@pytest.mark.parametrize("durable", [False, True])
def test_messages_of_a_publisher_arrive_in_order(durable: bool) -> None:
    mesh = Mesh()
    a, b = mesh.add("a", durable=durable), mesh.add("b", durable=durable)
    stream = mesh.link("a", "b")
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/1")
    mesh.run()
    publisher = Client(a, "publisher")
    for number in range(60):
        publisher.publish("rooms/1", b"%d" % number, number % 3)
        if number % 20 == 7:
            mesh.run()
        elif number == 30:
            mesh.cut(stream)
        elif number == 40:
            stream = mesh.link("b", "a")
            mesh.run()
    settle(mesh)
    got = [(message.qos, int(message.payload)) for message in subscriber.messages]
    reliable = [number for qos, number in got if qos]
    assert reliable == [number for number in range(60) if number % 3]
    unreliable = [number for qos, number in got if not qos]
    assert unreliable == sorted(unreliable)
    assert len(unreliable) >= 15  # those of the outage are missing


# --- what other files leave -----------------------------------------------------------------------------------------------


# semantics: S7
def test_no_retained_messages_on_shared_subscriptions() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "publisher").publish("jobs/1", b"x", 1, retain=True)
    early = Client(b, "early")
    early.subscribe("$share/g/jobs/#")
    mesh.advance(3)
    late = Client(b, "late")
    late.subscribe("$share/g/jobs/#")
    mesh.advance(3)
    assert early.payloads == late.payloads == []


# semantics: T7
def test_a_session_that_moved_goes_on_expiring() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "c", expiry=100).disconnect()
    mesh.advance(60)
    session = a.engine.sessions.by_client["c"]
    assert not a.fabric.handover.departures.begin(1, session, "b", None, mesh.now)
    a.flush()
    settle(mesh)
    assert "c" in b.engine.sessions.by_client
    mesh.advance(20)
    assert "c" in b.engine.sessions.by_client
    mesh.advance(21)
    assert "c" not in b.engine.sessions.by_client


# semantics: W3 W5
def test_a_move_takes_a_will_along_and_publishes_none() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    watcher = Client(b, "watcher")
    watcher.subscribe("wills/+")
    mesh.run()
    will = Will("wills/c", b"gone", 1, False, Properties(will_delay_interval=60))
    Client(a, "c", expiry=1_000, will=will).vanish()
    mesh.run()
    session = a.engine.sessions.by_client["c"]
    assert not a.fabric.handover.departures.begin(1, session, "b", None, mesh.now)
    a.flush()
    settle(mesh)
    assert "c" in b.engine.sessions.by_client
    assert watcher.payloads == []
    mesh.advance(61)
    settle(mesh)
    assert watcher.payloads == [b"gone"]


class Rules:
    """Nobody may do anything."""

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return False


# semantics: A1
def test_rules_hold_where_the_client_is() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/#")
    mesh.run()
    b.engine.set_authorizer(Rules())
    Client(a, "publisher").publish("rooms/1", b"allowed at a")
    Client(b, "publisher b").publish("rooms/1", b"not allowed at b")
    settle(mesh)
    assert subscriber.payloads == [b"allowed at a"]
    refused = Client(b, "other")
    refused.subscribe("rooms/#")
    mesh.run()
    assert refused.subacks[0].reason_codes == [reasons.NOT_AUTHORIZED]


class Kept:
    """A topic log that remembers in memory."""

    durable = True

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def keep(self, payloads: list[bytes], qos: int, retain: bool, properties: bytes, publisher: bytes, mark: int) -> bool:
        self.payloads += payloads
        return True

    def keeping(self, topic: bytes) -> Kept:
        return self


# semantics: A2
def test_a_topic_is_kept_where_it_is_published() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    logs = [Kept(), Kept()]
    for node, log in zip((a, b), logs, strict=True):
        node.engine.keep_with(log)
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("rooms/#")
    mesh.run()
    Client(a, "publisher").publish("rooms/1", b"x")
    settle(mesh)
    assert subscriber.payloads == [b"x"]
    assert [log.payloads for log in logs] == [[b"x"], []]

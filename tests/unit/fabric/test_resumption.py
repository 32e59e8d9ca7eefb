"""A client whose broker was lost goes on at another one with what its gateway knows."""

from __future__ import annotations

import pytest

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.trunks import peer_fields
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import (
    MQTT_3_1_1,
    MQTT_5,
    Connect,
    Properties,
    PubComp,
    Publish,
    PubRel,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from nearcast.mqtt.records import Fields, blob, number
from tests.fabric_harness import Mesh
from tests.gateway_harness import Client, Gateway, MqttClient, Trunk, run_all


class Returning(MqttClient):
    """A client that its gateway brings to another broker: it has said CONNECT before."""

    def __init__(self, gateway: Gateway, trunk: Trunk, known: bytes, version: int) -> None:
        self.known = known
        self.resumed: int | None = None
        super().__init__(gateway, trunk, "client", version)

    def open(self, peer: Peer) -> None:
        self.trunk.send(frame(frames.RESUME, number(self.number), peer_fields(peer), self.known))

    def connect(self, **connect: object) -> None:
        """Not again."""

    def moving(self, trunk: Trunk, channel: int, kind: int, fields: Fields) -> None:
        if kind == frames.RESUMED:
            self.resumed = fields.number()
        else:
            super().moving(trunk, channel, kind, fields)


def resume(gateway: Gateway, broker: str, known: bytes, version: int = MQTT_5) -> Returning:
    return Returning(gateway, gateway.trunk(broker), known, version)


def facts(
    connect: Connect,
    *,
    subscriptions: tuple[tuple[str, int], ...] = (),
    received: bytes = b"",
    unreleased: bytes = b"",
    aliases: tuple[tuple[int, bytes], ...] = (),
    lost_at: tuple[tuple[str, bytes], ...] = (),
) -> bytes:
    parts = [blob(encode(connect, connect.version)), blob(b"client"), number(len(subscriptions))]
    parts += [blob(name.encode()) + number(qos) + number(0) for name, qos in subscriptions]
    parts += [blob(received), blob(unreleased), number(len(aliases))]
    parts += [number(alias) + blob(topic) for alias, topic in aliases]
    parts += [number(len(lost_at))] + [blob(name.encode()) + blob(had) for name, had in lost_at]
    return b"".join(parts)


def connect(version: int = MQTT_5, client_id: str = "client", **options: object) -> Connect:
    will = options.get("will")
    properties = options.get("properties")
    return Connect(
        version=version,
        client_id=client_id,
        clean_start=bool(options.get("clean_start", True)),
        keep_alive=0,
        will=will if isinstance(will, Will) else None,
        properties=properties if isinstance(properties, Properties) else None,
    )


def make() -> tuple[Mesh, Gateway]:
    mesh = Mesh()
    mesh.add("a")
    return mesh, Gateway(mesh, "gateway")


@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
def test_it_is_told_nothing_and_gets_what_it_subscribed_to(version: int) -> None:
    mesh, gateway = make()
    publisher = gateway.mqtt_client("a", "publisher")
    publisher.write(encode(Publish("t", b"kept", 1, retain=True, packet_id=99), MQTT_5))
    client = resume(gateway, "a", facts(connect(version), subscriptions=(("t", 1),)), version)
    run_all(mesh, gateway)
    assert client.resumed == 0
    publisher.publish("t", b"new", 1)
    run_all(mesh, gateway)
    assert client.connacks == []
    assert client.messages == [("t", b"new")]


def test_an_assigned_client_identifier_stays() -> None:
    mesh, gateway = make()
    resume(gateway, "a", facts(connect(client_id="")))
    run_all(mesh, gateway)
    assert "client" in mesh.nodes["a"].engine.sessions.by_client


def test_a_session_that_is_found_goes_on() -> None:
    mesh, gateway = make()
    publisher = gateway.mqtt_client("a", "publisher")
    before = gateway.mqtt_client("a", "client", expiry=100)
    before.subscribe("t", 1)
    before.acknowledges = False
    publisher.publish("t", b"1", 1)
    before.close()
    publisher.publish("t", b"2", 1)
    client = resume(gateway, "a", facts(connect(properties=Properties(session_expiry_interval=100))))
    run_all(mesh, gateway)
    assert client.resumed == 1
    assert client.messages == [("t", b"1"), ("t", b"2")]


def two_brokers() -> tuple[Mesh, Gateway, Gateway]:
    """Two brokers that are linked; a gateway that is to lose its link to the first, and one that is not."""
    mesh = Mesh()
    mesh.add("a")
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    return mesh, Gateway(mesh, "gateway"), Gateway(mesh, "other")


WILL = Will("gone", b"bye")


@pytest.mark.parametrize("broker", ["a", "b"])
@pytest.mark.parametrize("noticed", [True, False])
def test_a_session_without_expiry_outlives_the_link_to_its_gateway(broker: str, noticed: bool) -> None:
    """Whether the broker has noticed or not: its QoS 2 messages are published once, its will not at all."""
    mesh, gateway, other = two_brokers()
    watcher = other.mqtt_client("a", "watcher")
    watcher.subscribe("#", 2)
    client = gateway.client("a")  # one that answers nothing
    client.write(encode(connect(will=WILL), MQTT_5) + encode(Subscribe(1, [SubscriptionRequest("t", 1)]), MQTT_5))
    client.write(encode(Publish("own", b"once", 2, packet_id=7), MQTT_5))
    run_all(mesh, gateway, other)
    if noticed:
        gateway.cut("a")
    else:
        gateway.trunks.pop("a")
    run_all(mesh, gateway, other)
    mesh.now += 0.01
    again = resume(gateway, broker, facts(connect(will=WILL)))
    run_all(mesh, gateway, other)
    assert again.resumed == 1
    again.write(encode(Publish("own", b"once", 2, packet_id=7, dup=True), MQTT_5))
    watcher.publish("t", b"still here", 1)
    run_all(mesh, gateway, other)
    assert again.messages == [("t", b"still here")]
    assert sorted(watcher.messages) == [("own", b"once"), ("t", b"still here")]
    mesh.advance(60)
    assert [name for name in ("a", "b") if "client" in mesh.nodes[name].engine.sessions.by_client] == [broker]
    assert len(watcher.messages) == 2


@pytest.mark.parametrize("broker", ["a", "b"])
def test_a_client_that_connects_after_its_gateway_was_lost_has_a_session_only_if_it_asked_for_one(broker: str) -> None:
    for expiry, present in ((0, False), (100, True)):
        mesh, gateway, other = two_brokers()
        gateway.mqtt_client("a", "client", expiry=expiry).subscribe("t", 1)
        run_all(mesh, gateway, other)
        gateway.cut("a")
        run_all(mesh, gateway, other)
        mesh.now += 0.01
        again = other.mqtt_client(broker, "client", expiry=expiry, clean_start=False)
        run_all(mesh, gateway, other)
        assert [connack.session_present for connack in again.connacks] == [present]


def test_sessions_of_a_gateway_that_does_not_come_back_end_as_ever() -> None:
    mesh, gateway, other = two_brokers()
    watcher = other.mqtt_client("a", "watcher")
    watcher.subscribe("gone", 1)
    gateway.mqtt_client("a", "client", will=WILL)
    run_all(mesh, gateway, other)
    gateway.cut("a")
    run_all(mesh, gateway, other)
    mesh.advance(1.9 * mesh.settings.fail_after_seconds)
    run_all(mesh, gateway, other)
    assert watcher.messages == []
    mesh.advance(0.2 * mesh.settings.fail_after_seconds)
    run_all(mesh, gateway, other)
    assert watcher.messages == [("gone", b"bye")]
    assert "client" not in mesh.nodes["a"].engine.sessions.by_client


def test_exchanges_at_qos_2_come_to_their_end() -> None:
    mesh, gateway = make()
    subscriber = gateway.mqtt_client("a", "subscriber")
    subscriber.subscribe("t", 2)
    known = facts(connect(), received=b"\x00\x07", unreleased=b"\x00\x09")
    client = resume(gateway, "a", known)
    run_all(mesh, gateway)
    assert bytes(client.received) == encode(PubRel(9), MQTT_5)
    client.write(encode(Publish("t", b"again", 2, packet_id=7, dup=True), MQTT_5))
    run_all(mesh, gateway)
    assert subscriber.messages == []
    assert encode(PubComp(7), MQTT_5) in bytes(client.received)
    assert mesh.nodes["a"].engine.stats.inflight_messages == 0


def test_aliases_of_topics_are_known() -> None:
    mesh, gateway = make()
    subscriber = gateway.mqtt_client("a", "subscriber")
    subscriber.subscribe("long/name", 0)
    client = resume(gateway, "a", facts(connect(), aliases=((3, b"long/name"),)))
    client.write(encode(Publish("", b"x", 0, properties=Properties(topic_alias=3)), MQTT_5))
    run_all(mesh, gateway)
    assert subscriber.messages == [("long/name", b"x")]


def test_its_will_is_what_it_was() -> None:
    mesh, gateway = make()
    subscriber = gateway.mqtt_client("a", "subscriber")
    subscriber.subscribe("gone", 0)
    client = resume(gateway, "a", facts(connect(will=Will("gone", b"bye"))))
    run_all(mesh, gateway)
    assert subscriber.messages == []
    client.close()
    run_all(mesh, gateway)
    assert subscriber.messages == [("gone", b"bye")]


def test_who_is_not_let_in_is_closed_without_a_connack() -> None:
    mesh, gateway = make()
    bad = [
        facts(connect(properties=Properties(authentication_method="SCRAM-SHA-256"))),
        blob(b"\x10\x02no") + facts(connect())[len(blob(encode(connect(), MQTT_5))) :],
    ]
    for known in bad:
        client: Client = resume(gateway, "a", known)
        run_all(mesh, gateway)
        assert client.closed is not None
        assert client.received == b""
    assert mesh.nodes["a"].engine.stats.connections == 0

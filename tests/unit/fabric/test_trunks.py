"""Clients of a gateway, as the broker sees them: channels on one link."""

from __future__ import annotations

import pytest

from nearcast.config import Limits
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.trunks import GRANT_BYTES, WINDOW_BYTES, peer_fields, read_peer
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Connect, Disconnect, Publish, Subscribe, SubscriptionRequest, Will
from nearcast.mqtt.records import Fields, blob, number
from tests.fabric_harness import Mesh
from tests.gateway_harness import Gateway


def connect(client_id: str, will: Will | None = None) -> bytes:
    return encode(Connect(version=MQTT_5, client_id=client_id, clean_start=True, keep_alive=0, will=will), MQTT_5)


def subscribe(topic_filter: str, qos: int = 2) -> bytes:
    return encode(Subscribe(1, [SubscriptionRequest(topic_filter, qos)]), MQTT_5)


def make() -> tuple[Mesh, Gateway]:
    mesh = Mesh()
    mesh.add("a")
    return mesh, Gateway(mesh, "gateway")


def test_a_client_of_a_gateway_is_a_client() -> None:
    mesh, gateway = make()
    one, two = gateway.client("a"), gateway.client("a")
    one.write(connect("one"))
    two.write(connect("two"))
    one.write(subscribe("rooms/+"))
    two.write(encode(Publish("rooms/1", b"warm", 0), MQTT_5))
    assert one.received[0] >> 4 == 2
    assert bytes(one.received).count(b"warm") == 1
    assert mesh.nodes["a"].fabric.trunks.clients() == 2


def test_what_the_gateway_says_of_a_client_is_known() -> None:
    mesh, gateway = make()
    peer = Peer("192.0.2.1:5000", "tls", True, "somebody", False)
    gateway.client("a", peer).write(connect("one"))
    session = mesh.nodes["a"].engine.sessions.by_client["one"]
    assert session.connection is not None
    known = session.connection.peer
    assert (known.address, known.listener, known.secure, known.certificate_name, known.loopback) == (
        "192.0.2.1:5000",
        "tls",
        True,
        "somebody",
        False,
    )


@pytest.mark.parametrize("how", ["client", "gateway"])
def test_a_client_whose_transport_is_lost_speaks_through_its_will(how: str) -> None:
    mesh, gateway = make()
    watcher, one = gateway.client("a"), gateway.client("a")
    other = Gateway(mesh, "other")
    if how == "gateway":
        watcher = other.client("a")
    watcher.write(connect("watcher"))
    watcher.write(subscribe("gone"))
    one.write(connect("one", Will("gone", b"one is gone")))
    if how == "client":
        one.close()
    else:
        gateway.trunk("a").send(frame(frames.GOODBYE, blob(b"stopping")))
    other.run()
    assert b"one is gone" in watcher.received
    assert mesh.nodes["a"].engine.stats.connected_clients == 1
    assert mesh.nodes["a"].engine.stats.connections == 1


def test_a_client_that_says_goodbye_is_closed_behind_its_last_bytes() -> None:
    mesh, gateway = make()
    one = gateway.client("a")
    one.write(connect("one"))
    one.write(encode(Disconnect(), MQTT_5))
    assert one.closed == "client disconnected"
    assert mesh.nodes["a"].fabric.trunks.clients() == 0
    assert mesh.nodes["a"].engine.stats.connections == 0
    one.write(b"\xc0\x00")  # crosses the close, and is passed over
    assert gateway.trunk("a").up


def test_a_client_that_does_not_read_is_held_up_alone() -> None:
    _, gateway = make()
    slow, quick, publisher = gateway.client("a"), gateway.client("a"), gateway.client("a")
    slow.reads = False
    for client, name in ((slow, "slow"), (quick, "quick"), (publisher, "publisher")):
        client.write(connect(name))
    slow.write(subscribe("bulk", 1))
    quick.write(subscribe("bulk", 1))
    for index in range(100):
        publisher.write(encode(Publish("bulk", b"%04d" % index + b"." * 10_000, 1, packet_id=index + 1), MQTT_5))
    assert WINDOW_BYTES <= len(slow.received) < WINDOW_BYTES + 70_000
    assert bytes(quick.received).count(b"." * 10_000) == 100
    slow.reads = True
    slow.pass_on()
    assert bytes(slow.received).count(b"." * 10_000) == 100


def test_the_gateway_is_told_what_was_taken() -> None:
    _, gateway = make()
    one = gateway.client("a")
    one.write(connect("one"))
    for _ in range(2 * WINDOW_BYTES // 10_000):
        one.write(encode(Publish("nowhere", b"." * 10_000, 0), MQTT_5))
    assert one.sent_bytes - one.granted_bytes < GRANT_BYTES + 20_000


def test_a_channel_number_is_opened_once() -> None:
    _, gateway = make()
    one = gateway.client("a")
    gateway.trunk("a").send(frame(frames.CLIENT_OPEN, number(one.number), peer_fields(Peer("x"))))
    assert not gateway.trunk("a").up


def test_a_broker_that_is_full_says_so() -> None:
    mesh = Mesh(limits=Limits(max_connections=1))
    mesh.add("a")
    gateway = Gateway(mesh, "gateway")
    first, second = gateway.client("a"), gateway.client("a")
    assert first.closed is None
    assert second.closed == "too many connections"


def test_gateways_are_told_that_the_broker_leaves() -> None:
    mesh, gateway = make()
    gateway.client("a").write(connect("one"))
    mesh.nodes["a"].fabric.trunks.leave(mesh.now)
    mesh.nodes["a"].flush()
    mesh.run()
    gateway.run()
    assert gateway.trunk("a").leaving


def test_frames_that_make_no_sense_end_the_link() -> None:
    for content in (
        frame(frames.ADOPTED, number(1), number(2)),
        frame(frames.CLIENT_OPEN, number(1), blob(b"\xff")),
        frame(frames.CLIENT_OPEN),
        frame(99, number(1)),
    ):
        _, gateway = make()
        gateway.client("a")
        gateway.trunk("a").send(content)
        assert not gateway.trunk("a").up


def test_the_facts_of_a_peer_come_back() -> None:
    peer = read_peer(Fields(b"\x00" + peer_fields(Peer("x", "ws", True, None, False))))
    assert (peer.address, peer.listener, peer.secure, peer.certificate_name, peer.loopback) == ("x", "ws", True, None, False)

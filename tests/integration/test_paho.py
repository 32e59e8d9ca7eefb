"""Eclipse Paho's Python client, 3.1.1 and 5.0, over TCP and WebSocket."""

from __future__ import annotations

import queue
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from paho.mqtt.client import Client, MQTTMessage
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode
from paho.mqtt.subscribeoptions import SubscribeOptions

from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker

pytestmark = pytest.mark.integration

MQTTv311 = MQTTProtocolVersion.MQTTv311
MQTTv5 = MQTTProtocolVersion.MQTTv5

LISTENERS = '[[listeners]]\nkind = "tcp"\nport = 0\n[[listeners]]\nkind = "ws"\nport = 0\npath = "/mqtt"\n'

both_versions = pytest.mark.parametrize("version", [MQTTv311, MQTTv5], ids=["3.1.1", "5.0"])

Connect = Callable[..., "Paho"]


def properties(packet_type: int, **values: Any) -> Properties:
    made = Properties(packet_type)  # type: ignore[no-untyped-call]
    for name, value in values.items():
        setattr(made, name, value)
    return made


class Paho:
    """A Paho client with its callbacks turned into queues."""

    def __init__(
        self,
        port: int,
        version: MQTTProtocolVersion,
        client_id: str = "",
        *,
        transport: Any = "tcp",
        persistent: bool = False,
        will: tuple[str, bytes, int, bool] | None = None,
        **connect_properties: Any,
    ) -> None:
        self.version = version
        clean = None if version == MQTTv5 else not persistent
        self.client = Client(
            CallbackAPIVersion.VERSION2, client_id, clean, protocol=version, transport=transport, reconnect_on_failure=False
        )
        self.messages: queue.Queue[MQTTMessage] = queue.Queue()
        self.ends: queue.Queue[ReasonCode] = queue.Queue()
        self._connacks: queue.Queue[tuple[bool, ReasonCode, Properties | None]] = queue.Queue()
        self._subacks: queue.Queue[list[ReasonCode]] = queue.Queue()
        self.client.on_connect = lambda _c, _u, flags, code, found: self._connacks.put((flags.session_present, code, found))
        self.client.on_subscribe = lambda _c, _u, _id, codes, _p: self._subacks.put(codes)
        self.client.on_message = lambda _c, _u, message: self.messages.put(message)
        self.client.on_disconnect = lambda _c, _u, _f, code, _p: self.ends.put(code)
        if will is not None:
            self.client.will_set(*will)
        if version == MQTTv5:
            if persistent:
                connect_properties["SessionExpiryInterval"] = 1_000
            asked = properties(PacketTypes.CONNECT, **connect_properties)
            self.client.connect("127.0.0.1", port, clean_start=not persistent, properties=asked)
        else:
            self.client.connect("127.0.0.1", port)
        self.client.loop_start()
        self.granted: Any
        self.session_present, code, self.granted = self._connacks.get(timeout=PATIENCE_SECONDS)
        assert not code.is_failure, code

    def subscribe(self, topic_filter: str, qos: int = 0, options: SubscribeOptions | None = None, **values: Any) -> None:
        if self.version == MQTTv5:
            asked = properties(PacketTypes.SUBSCRIBE, **values)
            self.client.subscribe(topic_filter, options=options or SubscribeOptions(qos), properties=asked)
        else:
            self.client.subscribe(topic_filter, qos)
        (code,) = self._subacks.get(timeout=PATIENCE_SECONDS)
        assert code.value == (qos if options is None else options.QoS)

    def publish(self, topic: str, payload: bytes, qos: int = 0, retain: bool = False, **values: Any) -> None:
        asked = properties(PacketTypes.PUBLISH, **values) if self.version == MQTTv5 else None
        self.client.publish(topic, payload, qos, retain, asked).wait_for_publish(PATIENCE_SECONDS)

    def receive(self) -> MQTTMessage:
        return self.messages.get(timeout=PATIENCE_SECONDS)

    def received(self) -> tuple[bytes, Any]:
        """Payload and properties of the next message. Paho sets properties by name, which mypy cannot see."""
        message = self.receive()
        return bytes(message.payload), message.properties

    def payloads(self, count: int) -> list[bytes]:
        return [bytes(self.receive().payload) for _ in range(count)]

    def vanish(self) -> None:
        """Lose the connection without a DISCONNECT."""
        sock = self.client.socket()
        assert isinstance(sock, socket.socket)
        sock.shutdown(socket.SHUT_RDWR)
        self.ends.get(timeout=PATIENCE_SECONDS)

    def close(self) -> None:
        self.client.disconnect()
        self.client.loop_stop()
        # Paho closes its last sockets when it is freed, which must not wait for the cycle through the callbacks.
        self.client.on_connect = self.client.on_subscribe = self.client.on_message = self.client.on_disconnect = None


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, LISTENERS) as running:
        yield running


@pytest.fixture
def connect(broker: NearcastBroker) -> Iterator[Connect]:
    opened: list[Paho] = []

    def opener(version: MQTTProtocolVersion, client_id: str = "", *, transport: str = "tcp", **options: Any) -> Paho:
        port = broker.port("ws" if transport == "websockets" else "tcp")
        client = Paho(port, version, client_id, transport=transport, **options)
        opened.append(client)
        return client

    yield opener
    for client in opened:
        client.close()


@both_versions
@pytest.mark.parametrize("transport", ["tcp", "websockets"])
def test_every_qos_to_every_qos(connect: Connect, version: MQTTProtocolVersion, transport: str) -> None:
    publisher = connect(version, transport=transport)
    for asked in (0, 1, 2):
        subscriber = connect(version, transport=transport)
        subscriber.subscribe("qos/#", asked)
        for qos in (0, 1, 2):
            publisher.publish(f"qos/{qos}", b"x" * 10_000 * qos, qos)
            message = subscriber.receive()
            assert (message.topic, message.qos, message.payload) == (f"qos/{qos}", min(qos, asked), b"x" * 10_000 * qos)
            assert not message.retain


@both_versions
def test_order_of_many(connect: Connect, version: MQTTProtocolVersion) -> None:
    subscriber, publisher = connect(version), connect(version)
    for qos in (0, 1, 2):
        subscriber.subscribe(f"many/{qos}", qos)
        sent = [b"%d" % number for number in range(300)]
        for payload in sent:
            publisher.client.publish(f"many/{qos}", payload, qos)
        assert subscriber.payloads(len(sent)) == sent


@both_versions
def test_retained(connect: Connect, version: MQTTProtocolVersion) -> None:
    topic = f"kept/{version}"
    publisher = connect(version)
    publisher.publish(topic, b"first", 1, True)
    publisher.publish(topic, b"second", 2, True)
    subscriber = connect(version)
    subscriber.subscribe(f"{topic}/#", 1)
    message = subscriber.receive()
    assert (message.payload, message.retain, message.qos) == (b"second", True, 1)
    publisher.publish(topic, b"live", 1, True)
    assert not subscriber.receive().retain
    publisher.publish(topic, b"", 1, True)
    assert subscriber.receive().payload == b""
    late = connect(version)
    late.subscribe(topic)
    publisher.publish(topic, b"nothing was kept before this")
    assert late.receive().payload == b"nothing was kept before this"


@both_versions
def test_will(connect: Connect, version: MQTTProtocolVersion) -> None:
    witness = connect(version)
    witness.subscribe("wills/#", 1)
    vanishing = connect(version, will=("wills/lost", b"gone", 1, True))
    vanishing.vanish()
    message = witness.receive()
    assert (message.topic, message.payload, message.qos) == ("wills/lost", b"gone", 1)
    leaving = connect(version, will=("wills/left", b"never", 1, False))
    leaving.close()
    late = connect(version)
    late.subscribe("wills/#")
    assert (late.receive().topic, late.messages.empty()) == ("wills/lost", True)
    late.publish("wills/lost", b"", 1, True)
    assert witness.receive().payload == b""


@both_versions
def test_a_session_keeps_what_came_meanwhile(connect: Connect, version: MQTTProtocolVersion) -> None:
    name = f"sleeper-{version}"
    first = connect(version, name, persistent=True)
    assert not first.session_present
    first.subscribe("meanwhile/#", 2)
    first.close()
    publisher = connect(version)
    for number in range(60):
        publisher.publish(f"meanwhile/{number % 3}", b"%d" % number, number % 3)
    second = connect(version, name, persistent=True)
    assert second.session_present
    # QoS 0 is not kept for a client that is away. Paho shows QoS 2 messages only once they are released.
    kept = [second.receive() for _ in range(40)]
    for qos in (1, 2):
        assert [int(message.payload) for message in kept if message.qos == qos] == list(range(qos, 60, 3))
    publisher.publish("meanwhile/live", b"live")
    assert second.receive().payload == b"live"
    second.close()
    third = connect(version, name)
    assert not third.session_present, "a clean start forgets the session"


@both_versions
def test_shared_subscriptions(connect: Connect, version: MQTTProtocolVersion) -> None:
    members = [connect(version) for _ in range(3)]
    for member in members:
        member.subscribe(f"$share/group-{version}/work/{version}/#", 1)
    outsider = connect(version)
    outsider.subscribe(f"work/{version}/#", 1)
    publisher = connect(version)
    sent = {b"%d" % number for number in range(60)}
    for payload in sent:
        publisher.publish(f"work/{version}/job", payload, 1)
    assert set(outsider.payloads(60)) == sent
    wait_for("all work", lambda: sum(member.messages.qsize() for member in members) >= 60)
    shares = [member.payloads(member.messages.qsize()) for member in members]
    assert all(shares), "somebody got nothing"
    assert sorted(payload for share in shares for payload in share) == sorted(sent)


def test_properties_pass_through(connect: Connect) -> None:
    subscriber, publisher = connect(MQTTv5), connect(MQTTv5)
    subscriber.subscribe("properties", 1, SubscriptionIdentifier=77)
    sent: dict[str, Any] = {
        "PayloadFormatIndicator": 1,
        "ContentType": "text/plain",
        "ResponseTopic": "answers",
        "CorrelationData": b"\x00\x01",
        "UserProperty": [("b", "2"), ("a", "1"), ("b", "2"), ("", "ü")],
    }
    publisher.publish("properties", b"text", 1, **sent)
    _, got = subscriber.received()
    assert {name: getattr(got, name) for name in sent} == sent
    assert got.SubscriptionIdentifier == [77]


def test_subscribe_options(connect: Connect) -> None:
    client = connect(MQTTv5)
    client.publish("options/kept", b"kept", 1, True)
    client.subscribe("options/#", options=SubscribeOptions(1, noLocal=True, retainAsPublished=True, retainHandling=2))
    client.publish("options/own", b"mine", 1)
    other = connect(MQTTv5)
    other.publish("options/kept", b"theirs", 1, True)
    message = client.receive()
    assert (message.payload, message.retain) == (b"theirs", True)
    other.publish("options/kept", b"", 1, True)


def test_message_expiry(connect: Connect) -> None:
    sleeper = connect(MQTTv5, "dozer", persistent=True)
    sleeper.subscribe("expiring", 1)
    sleeper.close()
    publisher = connect(MQTTv5)
    publisher.publish("expiring", b"short-lived", 1, MessageExpiryInterval=1)
    publisher.publish("expiring", b"long-lived", 1, MessageExpiryInterval=1_000)
    published_at = time.monotonic()
    wait_for("the expiry", lambda: time.monotonic() > published_at + 1.2)
    awake = connect(MQTTv5, "dozer", persistent=True)
    payload, got = awake.received()
    assert payload == b"long-lived"
    assert 990 <= got.MessageExpiryInterval < 1_000


def test_topic_aliases_of_the_client(connect: Connect) -> None:
    subscriber, publisher = connect(MQTTv5), connect(MQTTv5)
    assert publisher.granted.TopicAliasMaximum >= 2
    subscriber.subscribe("aliased/#", 1)
    publisher.publish("aliased/one", b"1", 1, TopicAlias=1)
    publisher.publish("aliased/two", b"2", 0, TopicAlias=2)
    publisher.publish("", b"3", 1, TopicAlias=1)
    publisher.publish("", b"4", 0, TopicAlias=2)
    received = [subscriber.receive() for _ in range(4)]
    assert {(message.topic, message.payload) for message in received} == {
        ("aliased/one", b"1"),
        ("aliased/two", b"2"),
        ("aliased/one", b"3"),
        ("aliased/two", b"4"),
    }


def test_topic_aliases_of_the_broker(connect: Connect) -> None:
    """Paho shows aliases as they come, unresolved."""
    subscriber, publisher = connect(MQTTv5, TopicAliasMaximum=1), connect(MQTTv5)
    subscriber.subscribe("alias/#", 1)
    for topic in ("alias/a", "alias/a", "alias/b"):
        publisher.publish(topic, b"", 1)
    received = [subscriber.receive() for _ in range(3)]
    assert [(message.topic, getattr(message.properties, "TopicAlias", None)) for message in received] == [
        ("alias/a", 1),
        ("", 1),
        ("alias/b", None),
    ]


def test_request_and_response(connect: Connect) -> None:
    requester, responder = connect(MQTTv5), connect(MQTTv5)
    responder.subscribe("service/add", 1)
    requester.subscribe("answers/requester", 1)
    requester.publish("service/add", b"2 3", 1, ResponseTopic="answers/requester", CorrelationData=b"call-1")
    payload, request = responder.received()
    answer = b"%d" % sum(int(word) for word in payload.split())
    responder.publish(request.ResponseTopic, answer, 1, CorrelationData=request.CorrelationData)
    payload, response = requester.received()
    assert (payload, response.CorrelationData) == (b"5", b"call-1")


def test_assigned_identifier_and_takeover(connect: Connect) -> None:
    first = connect(MQTTv5)
    name = first.granted.AssignedClientIdentifier
    assert name
    connect(MQTTv5, name)
    assert first.ends.get(timeout=PATIENCE_SECONDS).getName() == "Session taken over"

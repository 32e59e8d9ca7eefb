"""The client machine in scripted exchanges with a server that is nothing but the codec."""

from __future__ import annotations

import pytest

from nearcast.errors import LocalProtocolError, NearcastError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import (
    ClientEvent,
    ClientSettings,
    Connected,
    Disconnected,
    MessageReceived,
    PublishCompleted,
    ReAuthenticated,
    Refused,
    SubscribeCompleted,
    UnsubscribeCompleted,
)
from nearcast.mqtt.client_machine import CLOSED, CONNECTED, ClientMachine
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.properties import MAX_USER_PROPERTIES

both_versions = pytest.mark.parametrize("version", [4, 5])


class Exchange:
    """A machine, the server's end of its wire, and a clock."""

    def __init__(self, settings: ClientSettings, authentication: Scram | None = None) -> None:
        self.machine = ClientMachine(settings, authentication)
        self.version = settings.version
        self.now = 100.0
        self._reader = PacketReader(self.version)

    def sent(self) -> list[Packet]:
        """What the client sent since the last look."""
        return self._reader.feed(b"".join(self.machine.take()))

    def events(self) -> list[ClientEvent]:
        return self.machine.take_events()

    def server(self, *packets: Packet) -> None:
        self.machine.receive(b"".join(encode(packet, self.version) for packet in packets), self.now)

    def connect(self, session_present: bool = False, properties: Properties | None = None) -> Connect:
        """Connect and have it accepted; returns the CONNECT. What follows it on the wire is left for ``sent``."""
        self._reader = PacketReader(self.version)
        self.machine.connect(self.now)
        (packet,) = self.sent()
        assert isinstance(packet, Connect)
        self.server(ConnAck(0, session_present, properties))
        (connected,) = [event for event in self.events() if isinstance(event, Connected)]
        assert connected.session_present == session_present
        return packet

    def publish(self, payload: bytes, qos: int, topic: str = "t") -> int:
        return self.machine.publish(Publish(topic, payload, qos), self.now)


class Scram:
    """A stand-in for an authentication method: it counts challenges and may refuse the server."""

    def __init__(self, refuse: bool = False) -> None:
        self.finished: list[bytes | None] = []
        self._refuse = refuse

    @property
    def method(self) -> str:
        return "COUNT"

    def start(self) -> bytes | None:
        return b"hello"

    def respond(self, challenge: bytes | None) -> bytes | None:
        return (challenge or b"") + b"!"

    def finish(self, data: bytes | None) -> None:
        if self._refuse:
            raise NearcastError("the server did not prove itself")
        self.finished.append(data)


def exchange(version: int = 5, **changes: object) -> Exchange:
    settings = ClientSettings(client_id="c", version=version)
    for name, value in changes.items():
        assert hasattr(settings, name)
        setattr(settings, name, value)
    return Exchange(settings)


def kept(version: int) -> Exchange:
    """A client whose session outlives its connections."""
    if version == 4:
        return exchange(4, clean_start=False)
    return exchange(5, session_expiry_seconds=300)


# -- connecting ------------------------------------------------------------------------------------------------------------


@both_versions
def test_connect_says_who_we_are(version: int) -> None:
    wire = exchange(version, username="u", password=b"p", keep_alive_seconds=30)
    packet = wire.connect()
    assert (packet.client_id, packet.version, packet.clean_start) == ("c", version, True)
    assert (packet.username, packet.password, packet.keep_alive) == ("u", b"p", 30)
    assert wire.machine.state == CONNECTED


@both_versions
def test_refusal(version: int) -> None:
    wire = exchange(version)
    wire.machine.connect(wire.now)
    wire.server(ConnAck(reasons.NOT_AUTHORIZED))
    (refused,) = wire.events()
    assert isinstance(refused, Refused)
    assert refused.reason_code == reasons.NOT_AUTHORIZED
    assert refused.message == "the broker refused the connection: not authorized"
    assert wire.machine.state == CLOSED


def test_refusal_with_another_server() -> None:
    wire = exchange()
    wire.machine.connect(wire.now)
    wire.server(ConnAck(reasons.USE_ANOTHER_SERVER, False, Properties(server_reference="b:1883")))
    (refused,) = wire.events()
    assert isinstance(refused, Refused)
    assert refused.server_reference == "b:1883"


def test_connack_limits_are_taken_over() -> None:
    wire = exchange(client_id="")
    properties = Properties(
        assigned_client_identifier="given",
        server_keep_alive=5,
        receive_maximum=7,
        topic_alias_maximum=3,
        maximum_packet_size=1_000,
        maximum_qos=1,
        retain_available=0,
        response_information="answers/",
    )
    wire.connect(properties=properties)
    limits = wire.machine.limits
    assert (limits.keep_alive_seconds, limits.receive_maximum, limits.topic_alias_maximum) == (5, 7, 3)
    assert (limits.maximum_packet_bytes, limits.maximum_qos, limits.retain_available) == (1_000, 1, False)
    assert wire.machine.client_id == "given"
    assert wire.machine.response_information == "answers/"
    wire.machine.lose(wire.now)
    assert wire.connect().client_id == "given"


@both_versions
def test_connect_timeout(version: int) -> None:
    wire = exchange(version, connect_timeout_seconds=3.0)
    wire.machine.connect(100.0)
    assert wire.machine.next_deadline() == 103.0
    wire.machine.tick(102.9)
    assert not wire.events()
    wire.machine.tick(103.0)
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert "no CONNACK within 3 s" in event.message


@both_versions
def test_anything_before_connack_is_an_error(version: int) -> None:
    wire = exchange(version)
    wire.machine.connect(wire.now)
    wire.server(PingResp())
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert event.reason_code == reasons.PROTOCOL_ERROR


def test_session_present_after_clean_start_is_an_error() -> None:
    wire = exchange()
    wire.machine.connect(wire.now)
    wire.server(ConnAck(0, True))
    (event,) = wire.events()
    assert isinstance(event, Disconnected)


@both_versions
def test_connect_twice_is_our_bug(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    with pytest.raises(LocalProtocolError):
        wire.machine.connect(wire.now)


def test_only_the_first_connection_starts_clean_when_the_session_is_kept() -> None:
    wire = kept(5)
    assert wire.connect().clean_start
    wire.machine.lose(wire.now)
    assert not wire.connect(session_present=True).clean_start


def test_a_session_that_ends_with_its_connection_is_not_asked_for_again() -> None:
    wire = exchange(4)
    assert wire.connect().clean_start
    wire.machine.lose(wire.now)
    assert wire.connect().clean_start


# -- keep-alive ------------------------------------------------------------------------------------------------------------


@both_versions
def test_ping_after_silence_and_timeout(version: int) -> None:
    wire = exchange(version, keep_alive_seconds=10, ping_timeout_seconds=4.0)
    wire.connect()
    assert wire.machine.next_deadline() == 108.0
    wire.machine.tick(108.0)
    assert wire.sent() == [PingReq()]
    wire.now = 109.0
    wire.server(PingResp())
    assert wire.machine.next_deadline() == 116.0
    wire.machine.tick(116.0)
    wire.machine.tick(119.9)
    assert not wire.events()
    wire.machine.tick(120.0)
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert event.message == "the server did not answer a ping"


def test_publishing_at_qos_0_does_not_hide_a_dead_server() -> None:
    wire = exchange(keep_alive_seconds=10)
    wire.connect()
    wire.now = 107.0
    wire.publish(b"", 0)
    wire.sent()
    wire.machine.tick(108.0)
    assert wire.sent() == [PingReq()]


def test_a_ping_is_not_missed_while_nobody_reads() -> None:
    wire = exchange(keep_alive_seconds=10, ping_timeout_seconds=4.0)
    wire.connect()
    wire.machine.tick(108.0)
    wire.machine.set_reading(False, 109.0)
    wire.machine.tick(500.0)
    assert not wire.events()
    wire.machine.set_reading(True, 500.0)
    assert wire.machine.next_deadline() == 504.0


def test_keep_alive_zero_never_pings() -> None:
    wire = exchange(keep_alive_seconds=0)
    wire.connect()
    assert wire.machine.next_deadline() == float("inf")


# -- publishing ------------------------------------------------------------------------------------------------------------


@both_versions
def test_qos_0(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    assert wire.publish(b"x", 0) == 0
    assert wire.sent() == [Publish("t", b"x")]


@both_versions
def test_qos_1(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    token = wire.publish(b"x", 1)
    assert wire.sent() == [Publish("t", b"x", 1, packet_id=1)]
    wire.server(PubAck(1))
    assert wire.events() == [PublishCompleted(token, 0, None)]
    assert wire.machine.unacknowledged == 0


@both_versions
def test_qos_2(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    token = wire.publish(b"x", 2)
    wire.sent()
    wire.server(PubRec(1))
    assert wire.sent() == [PubRel(1)]
    wire.server(PubRec(1))
    assert wire.sent() == [PubRel(1)], "a repeated PUBREC gets its PUBREL again"
    assert not wire.events()
    wire.server(PubComp(1))
    assert wire.events() == [PublishCompleted(token, 0, None)]


def test_refused_publishes_complete_with_their_reason() -> None:
    wire = exchange()
    wire.connect()
    first, second = wire.publish(b"", 1), wire.publish(b"", 2)
    wire.server(PubAck(1, reasons.QUOTA_EXCEEDED, Properties(reason_string="full")))
    wire.server(PubRec(2, reasons.NOT_AUTHORIZED))
    assert wire.events() == [
        PublishCompleted(first, reasons.QUOTA_EXCEEDED, "full"),
        PublishCompleted(second, reasons.NOT_AUTHORIZED, None),
    ]


def test_the_window_is_the_servers_receive_maximum() -> None:
    wire = exchange()
    wire.connect(properties=Properties(receive_maximum=2))
    for payload in (b"a", b"b", b"c", b"d"):
        wire.publish(payload, 2 if payload == b"b" else 1)
    assert [packet.payload for packet in wire.sent() if isinstance(packet, Publish)] == [b"a", b"b"]
    wire.server(PubRec(2))
    assert wire.sent() == [PubRel(2)], "PUBREC frees no place"
    wire.server(PubComp(2))
    assert [packet.payload for packet in wire.sent() if isinstance(packet, Publish)] == [b"c"]
    wire.server(PubAck(1))
    assert [packet.payload for packet in wire.sent() if isinstance(packet, Publish)] == [b"d"]


@both_versions
def test_the_waiting_queue_is_bounded(version: int) -> None:
    wire = exchange(version, max_inflight=1, max_waiting=2)
    wire.connect()
    for _ in range(3):
        assert not wire.machine.full
        wire.publish(b"", 1)
    assert wire.machine.full
    with pytest.raises(LocalProtocolError, match="wait for some to complete"):
        wire.publish(b"", 1)
    wire.server(PubAck(1))
    assert not wire.machine.full


@both_versions
def test_publishing_before_the_connection(version: int) -> None:
    wire = exchange(version)
    wire.publish(b"early", 1)
    with pytest.raises(LocalProtocolError):
        wire.publish(b"early", 0)
    wire.connect()
    assert wire.sent() == [Publish("t", b"early", 1, packet_id=1)]


def test_what_the_server_cannot_take_is_refused_here() -> None:
    wire = exchange()
    wire.connect(properties=Properties(maximum_packet_size=50, maximum_qos=1, retain_available=0))
    with pytest.raises(RequestRefused, match="larger than the 50 bytes"):
        wire.publish(bytes(60), 0)
    with pytest.raises(RequestRefused, match="without retain"):
        wire.machine.publish(Publish("t", b"", 0, True), wire.now)
    too_large, too_high = wire.publish(bytes(60), 1), wire.publish(b"", 2)
    codes = [(event.token, event.reason_code) for event in wire.events() if isinstance(event, PublishCompleted)]
    assert codes == [(too_large, reasons.PACKET_TOO_LARGE), (too_high, reasons.QOS_NOT_SUPPORTED)]
    assert wire.sent() == []
    assert wire.machine.unacknowledged == 0


@pytest.mark.parametrize("message", [Publish("a/+", b"", 1), Publish("", b"", 1), Publish("t", b"", 3), Publish("#", b"", 0)])
def test_misuse_is_told_at_once(message: Publish) -> None:
    wire = exchange()
    wire.connect()
    with pytest.raises(LocalProtocolError):
        wire.machine.publish(message, wire.now)


def test_packet_identifiers_wrap_and_skip_those_in_use() -> None:
    wire = exchange()
    wire.connect()
    wire.publish(b"held", 1)
    for _ in range(65_534):
        wire.publish(b"", 1)
        (packet,) = [packet for packet in wire.sent() if isinstance(packet, Publish) and packet.payload == b""]
        wire.server(PubAck(packet.packet_id))
    wire.publish(b"", 1)
    assert wire.sent() == [Publish("t", b"", 1, packet_id=2)]


def test_an_unknown_pubrec_is_released() -> None:
    wire = exchange()
    wire.connect()
    wire.server(PubRec(9))
    assert wire.sent() == [PubRel(9, reasons.PACKET_IDENTIFIER_NOT_FOUND)]


# -- receiving -------------------------------------------------------------------------------------------------------------


@both_versions
def test_incoming_qos_0_and_1(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    first, second = Publish("t", b"0"), Publish("t", b"1", 1, packet_id=5)
    wire.server(first, second)
    assert wire.events() == [MessageReceived(first), MessageReceived(second)]
    assert wire.sent() == [PubAck(5)]


@both_versions
def test_incoming_qos_2_is_delivered_once(version: int) -> None:
    wire = kept(version)
    wire.connect()
    message = Publish("t", b"2", 2, packet_id=5)
    wire.server(message)
    wire.server(Publish("t", b"2", 2, dup=True, packet_id=5))
    assert wire.events() == [MessageReceived(message)]
    assert wire.sent() == [PubRec(5), PubRec(5)]
    wire.machine.lose(wire.now)
    wire.events()
    wire.connect(session_present=True)
    wire.server(Publish("t", b"2", 2, dup=True, packet_id=5))
    assert wire.events() == [], "the session remembers the identifier over the reconnect"
    assert wire.sent() == [PubRec(5)]
    wire.server(PubRel(5))
    assert wire.sent() == [PubComp(5)]
    wire.server(Publish("t", b"next", 2, packet_id=5))
    assert [event.message.payload for event in wire.events() if isinstance(event, MessageReceived)] == [b"next"]


@both_versions
def test_without_the_session_a_used_identifier_is_a_new_message(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    wire.server(Publish("t", b"old", 2, packet_id=5))
    wire.machine.lose(wire.now)
    wire.events()
    wire.connect()
    wire.server(Publish("t", b"new", 2, packet_id=5))
    assert [event.message.payload for event in wire.events() if isinstance(event, MessageReceived)] == [b"new"]


def test_an_unknown_pubrel_is_answered() -> None:
    wire = exchange()
    wire.connect()
    wire.server(PubRel(5))
    assert wire.sent() == [PubComp(5, reasons.PACKET_IDENTIFIER_NOT_FOUND)]


def test_our_receive_maximum_is_kept_by_the_server_or_else() -> None:
    wire = exchange(receive_maximum=2)
    assert wire.connect().properties == Properties(receive_maximum=2, maximum_packet_size=1_048_576, topic_alias_maximum=16)
    wire.server(*(Publish("t", b"", 2, packet_id=number) for number in (1, 2, 3)))
    assert wire.sent()[-1] == Disconnect(reasons.RECEIVE_MAXIMUM_EXCEEDED)
    assert isinstance(wire.events()[-1], Disconnected)


@both_versions
def test_acknowledgement_when_taken(version: int) -> None:
    wire = kept(version)
    wire.machine.settings.acknowledge_on_receipt = False
    wire.connect()
    wire.server(Publish("t", b"1", 1, packet_id=5), Publish("t", b"2", 2, packet_id=6), Publish("t", b"3", 1, packet_id=7))
    one, two, three = [event.message for event in wire.events() if isinstance(event, MessageReceived)]
    assert wire.sent() == []
    wire.server(Publish("t", b"2", 2, dup=True, packet_id=6))
    assert (wire.sent(), wire.events()) == ([], [])
    wire.machine.acknowledge(one, wire.now)
    wire.machine.acknowledge(two, wire.now)
    wire.machine.acknowledge(two, wire.now)
    assert wire.sent() == [PubAck(5), PubRec(6)]
    wire.machine.lose(wire.now)
    wire.connect(session_present=True)
    wire.machine.acknowledge(three, wire.now)
    assert wire.sent() == [], "it came on another connection: the server sends it again"


def test_what_is_not_taken_counts_against_our_receive_maximum() -> None:
    wire = exchange(receive_maximum=2, acknowledge_on_receipt=False)
    wire.connect()
    wire.server(Publish("t", b"", 1, packet_id=1), Publish("t", b"", 2, packet_id=2))
    assert not any(isinstance(event, Disconnected) for event in wire.events())
    wire.server(Publish("t", b"", 1, packet_id=3))
    assert wire.sent() == [Disconnect(reasons.RECEIVE_MAXIMUM_EXCEEDED)]


def test_a_server_over_our_receive_maximum_may_be_borne() -> None:
    wire = exchange(receive_maximum=1, enforce_receive_maximum=False)
    wire.connect()
    wire.server(*(Publish("t", b"", 2, packet_id=number) for number in (1, 2, 3)))
    assert wire.sent() == [PubRec(1), PubRec(2), PubRec(3)]


def test_incoming_topic_aliases() -> None:
    wire = exchange(topic_alias_maximum=2)
    wire.connect()
    wire.server(Publish("long/topic", b"1", properties=Properties(topic_alias=2)))
    wire.server(Publish("", b"2", properties=Properties(topic_alias=2)))
    assert [event.message.topic for event in wire.events() if isinstance(event, MessageReceived)] == ["long/topic"] * 2
    wire.machine.lose(wire.now)
    wire.events()
    wire.connect()
    wire.server(Publish("", b"3", properties=Properties(topic_alias=2)))
    (event,) = wire.events()
    assert isinstance(event, Disconnected), "aliases end with their connection"
    assert event.reason_code == reasons.PROTOCOL_ERROR


def test_an_alias_we_did_not_offer() -> None:
    wire = exchange(topic_alias_maximum=2)
    wire.connect()
    wire.server(Publish("t", b"1", properties=Properties(topic_alias=3)))
    assert wire.sent() == [Disconnect(reasons.TOPIC_ALIAS_INVALID)]


def test_outgoing_topic_aliases() -> None:
    wire = exchange(use_topic_aliases=True, session_expiry_seconds=60)
    wire.connect(properties=Properties(topic_alias_maximum=1))
    for topic in ("first", "first", "second"):
        wire.publish(b"", 1, topic)
    assert [(packet.topic, packet.properties) for packet in wire.sent() if isinstance(packet, Publish)] == [
        ("first", Properties(topic_alias=1)),
        ("", Properties(topic_alias=1)),
        ("second", None),
    ]
    wire.machine.lose(wire.now)
    wire.connect(session_present=True)
    assert [packet.topic for packet in wire.sent() if isinstance(packet, Publish)] == ["first", "first", "second"]


# -- subscriptions ---------------------------------------------------------------------------------------------------------


@both_versions
def test_subscribe_and_unsubscribe(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    requests = [SubscriptionRequest("a/#", 1), SubscriptionRequest("b", 2)]
    token = wire.machine.subscribe(requests, None, wire.now)
    assert wire.sent() == [Subscribe(1, requests)]
    wire.server(SubAck(1, [1, 0x80]))
    assert wire.events() == [SubscribeCompleted(token, [1, 0x80], None)]
    token = wire.machine.unsubscribe(["a/#"], None, wire.now)
    assert wire.sent() == [Unsubscribe(2, ["a/#"])]
    wire.server(UnsubAck(2, [0] if version == 5 else []))
    assert wire.events() == [UnsubscribeCompleted(token, [0], None)]


@both_versions
def test_a_lost_session_is_subscribed_again(version: int) -> None:
    wire = kept(version)
    wire.connect()
    wire.machine.subscribe([SubscriptionRequest("granted", 1), SubscriptionRequest("refused", 1)], None, wire.now)
    wire.server(SubAck(1, [1, 0x80]))
    wire.machine.lose(wire.now)
    wire.connect(session_present=True)
    wire.sent()
    wire.machine.lose(wire.now)
    wire.connect(session_present=False)
    (packet,) = wire.sent()
    assert isinstance(packet, Subscribe)
    assert packet.subscriptions == [SubscriptionRequest("granted", 1)]
    wire.machine.lose(wire.now)
    wire.connect(session_present=True)
    (again,) = wire.sent()
    assert again == packet, "a resubscription that was cut off is repeated although the session is there"
    wire.events()
    wire.server(SubAck(packet.packet_id, [1]))
    assert wire.events() == [], "nobody waits for it"


@both_versions
def test_a_request_that_was_cut_off_is_repeated(version: int) -> None:
    wire = kept(version)
    wire.connect()
    token = wire.machine.subscribe([SubscriptionRequest("a", 1)], None, wire.now)
    wire.machine.lose(wire.now)
    wire.connect(session_present=True)
    (packet,) = wire.sent()
    assert isinstance(packet, Subscribe)
    wire.events()
    wire.server(SubAck(packet.packet_id, [1]))
    assert wire.events() == [SubscribeCompleted(token, [1], None)]


def test_subscriptions_this_server_does_not_offer() -> None:
    wire = exchange()
    wire.connect(properties=Properties(wildcard_subscription_available=0, shared_subscription_available=0))
    for topic_filter in ("a/#", "$share/g/a"):
        with pytest.raises(RequestRefused):
            wire.machine.subscribe([SubscriptionRequest(topic_filter)], None, wire.now)


@both_versions
def test_a_suback_of_the_wrong_length(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    wire.machine.subscribe([SubscriptionRequest("a")], None, wire.now)
    wire.server(SubAck(1, [0, 0]))
    assert isinstance(wire.events()[-1], Disconnected)


# -- resumption ------------------------------------------------------------------------------------------------------------


@both_versions
def test_resumed_session_resends_in_order(version: int) -> None:
    wire = kept(version)
    wire.connect()
    for number, qos in enumerate((2, 1, 2, 2, 1)):
        wire.publish(b"%d" % number, qos)
    wire.sent()
    wire.server(PubRec(4), PubRec(1), PubAck(2))
    wire.machine.lose(wire.now)
    wire.publish(b"offline", 1)
    wire.connect(session_present=True)
    assert wire.sent() == [
        PubRel(4),
        PubRel(1),
        Publish("t", b"2", 2, dup=True, packet_id=3),
        Publish("t", b"4", 1, dup=True, packet_id=5),
        Publish("t", b"offline", 1, packet_id=6),
    ]


@both_versions
def test_lost_session_sends_again_as_new(version: int) -> None:
    wire = kept(version)
    wire.connect()
    tokens = [wire.publish(b"%d" % number, qos) for number, qos in enumerate((2, 1, 2))]
    wire.server(PubRec(1))
    wire.machine.lose(wire.now)
    wire.machine.connect(wire.now)
    wire.machine.take()
    wire.events()
    wire.server(ConnAck(0, False))
    assert [event.token for event in wire.events() if isinstance(event, PublishCompleted)] == tokens[:1], (
        "the server had it: PUBREC said so"
    )
    resent = [packet for packet in wire.sent() if isinstance(packet, Publish)]
    assert [(packet.payload, packet.dup) for packet in resent] == [(b"1", False), (b"2", False)]


def test_a_smaller_window_after_the_reconnect_holds_for_what_is_resent() -> None:
    wire = kept(5)
    wire.connect()
    for number, qos in enumerate((2, 1, 1, 1)):
        wire.publish(b"%d" % number, qos)
    wire.server(PubRec(1))
    wire.machine.lose(wire.now)
    wire.connect(session_present=True, properties=Properties(receive_maximum=2))
    assert wire.sent() == [PubRel(1), Publish("t", b"1", 1, dup=True, packet_id=2)]
    wire.server(PubComp(1))
    assert wire.sent() == [Publish("t", b"2", 1, dup=True, packet_id=3)]
    wire.server(PubAck(2), PubAck(3))
    assert wire.sent() == [Publish("t", b"3", 1, dup=True, packet_id=4)]


# -- the end ---------------------------------------------------------------------------------------------------------------


@both_versions
def test_our_disconnect(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    wire.machine.disconnect(wire.now)
    assert wire.sent() == [Disconnect()]
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert not event.by_server
    wire.machine.disconnect(wire.now)
    assert not wire.events()


def test_a_session_for_reconnection_only_ends_with_our_disconnect() -> None:
    wire = exchange(session_expiry_seconds=300, end_session_on_disconnect=True)
    wire.connect()
    wire.machine.disconnect(wire.now)
    assert wire.sent() == [Disconnect(0, Properties(session_expiry_interval=0))]


def test_the_servers_disconnect() -> None:
    wire = exchange()
    wire.connect()
    wire.server(Disconnect(reasons.SERVER_MOVED, Properties(server_reference="other", reason_string="bye")))
    assert wire.events() == [Disconnected(reasons.SERVER_MOVED, "the broker ended the connection: bye", True, "other")]


@both_versions
def test_garbage_ends_the_connection(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    wire.machine.receive(b"\xff\xff\xff\xff\xff\xff", wire.now)
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert event.message.startswith("the server broke the protocol")
    wire.machine.receive(b"more", wire.now)
    assert not wire.events()


def test_garbage_that_disconnect_has_no_code_for_ends_the_connection_in_order() -> None:
    wire = exchange()
    wire.connect()
    wire.machine.receive(b"\x10\x07\x00\x04MQTT\x63", wire.now)  # a CONNECT of MQTT 99: 0x84 is for CONNACK
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert event.reason_code == reasons.UNSUPPORTED_PROTOCOL_VERSION
    assert wire.sent() == [Disconnect(reasons.PROTOCOL_ERROR)]


def test_user_properties_beyond_the_bound_are_left_out() -> None:
    wire = exchange()
    wire.connect()
    wire.server(Publish("t", b"many", 1, packet_id=1, properties=Properties(user_properties=[("k", "v")] * 1_500)))
    (event,) = wire.events()
    assert isinstance(event, MessageReceived)
    assert event.message.properties == Properties(user_properties=[("k", "v")] * MAX_USER_PROPERTIES)
    assert wire.sent() == [PubAck(1)]


@both_versions
def test_good_packets_before_garbage_count(version: int) -> None:
    wire = exchange(version)
    wire.connect()
    wire.machine.receive(encode(Publish("t", b"good"), version) + b"\xff\xff\xff\xff\xff\xff", wire.now)
    first, last = wire.events()
    assert isinstance(first, MessageReceived)
    assert isinstance(last, Disconnected)


# -- enhanced authentication -----------------------------------------------------------------------------------------------


def test_authentication_exchange_and_again() -> None:
    scram = Scram()
    wire = Exchange(ClientSettings("c"), scram)
    wire.machine.connect(wire.now)
    (connect,) = wire.sent()
    assert isinstance(connect, Connect)
    assert connect.properties is not None
    assert (connect.properties.authentication_method, connect.properties.authentication_data) == ("COUNT", b"hello")
    wire.server(Auth(0x18, Properties(authentication_method="COUNT", authentication_data=b"one")))
    assert wire.sent() == [Auth(0x18, Properties(authentication_method="COUNT", authentication_data=b"one!"))]
    wire.server(ConnAck(0, False, Properties(authentication_method="COUNT", authentication_data=b"proof")))
    assert scram.finished == [b"proof"]
    wire.events()
    wire.machine.re_authenticate(wire.now)
    assert wire.sent() == [Auth(0x19, Properties(authentication_method="COUNT", authentication_data=b"hello"))]
    with pytest.raises(LocalProtocolError):
        wire.machine.re_authenticate(wire.now)
    wire.server(Auth(0x00, Properties(authentication_method="COUNT", authentication_data=b"again")))
    assert wire.events() == [ReAuthenticated()]
    assert scram.finished == [b"proof", b"again"]


def test_a_server_that_does_not_prove_itself() -> None:
    wire = Exchange(ClientSettings("c"), Scram(refuse=True))
    wire.machine.connect(wire.now)
    wire.server(ConnAck(0, False, Properties(authentication_method="COUNT", authentication_data=b"forged")))
    (event,) = wire.events()
    assert isinstance(event, Disconnected)
    assert event.message == "authentication failed: the server did not prove itself"


def test_an_auth_nobody_asked_for() -> None:
    wire = exchange()
    wire.connect()
    wire.server(Auth(0x18, Properties(authentication_method="OTHER")))
    assert wire.sent() == [Disconnect(reasons.PROTOCOL_ERROR)]


def test_enhanced_authentication_needs_version_5() -> None:
    with pytest.raises(LocalProtocolError, match="version=5"):
        ClientMachine(ClientSettings("c", version=4), Scram())

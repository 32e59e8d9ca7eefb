"""The codec against literal bytes: what the specification shows, and everything it forbids in a single packet."""

from __future__ import annotations

import pytest

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import codec
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
    Will,
)

MALFORMED = 0x81
PROTOCOL_ERROR = 0x82

LITERAL: list[tuple[int, Packet, str]] = [
    (3, Connect("c", 3, True, 10), "10 0f 0006 4d5149736470 03 02 000a 0001 63"),
    (4, Connect("c", 4, True, 10), "10 0d 0004 4d515454 04 02 000a 0001 63"),
    (5, Connect("c", 5, False, 10), "10 0e 0004 4d515454 05 00 000a 00 0001 63"),
    (
        4,
        Connect("c", 4, True, 60, "u", b"\x00p", Will("w", b"\xff", 2, True)),
        "10 1a 0004 4d515454 04 f6 003c 0001 63 0001 77 0001 ff 0001 75 0002 0070",
    ),
    (
        5,
        Connect(
            "",
            5,
            True,
            0,
            None,
            b"p",
            Will("w", b"", 1, properties=Properties(will_delay_interval=2)),
            Properties(receive_maximum=9),
        ),
        "10 1e 0004 4d515454 05 4e 0000 03 210009 0000 05 1800000002 0001 77 0000 0001 70",
    ),
    (3, ConnAck(0x86), "20 02 00 04"),
    (4, ConnAck(0, True), "20 02 01 00"),
    (4, ConnAck(0x84), "20 02 00 01"),
    (5, ConnAck(0x9C, False, Properties(server_reference="b")), "20 07 00 9c 04 1c 0001 62"),
    (4, Publish("a/b", b"hi"), "30 07 0003 612f62 6869"),
    (4, Publish("a", b"", 2, True, True, 0x1234), "3d 05 0001 61 1234"),
    (5, Publish("a", b"x", 1, packet_id=1), "32 07 0001 61 0001 00 78"),
    (5, Publish("", b"x", properties=Properties(topic_alias=7)), "30 07 0000 03 230007 78"),
    (4, PubAck(1), "40 02 0001"),
    (5, PubAck(1), "40 02 0001"),
    (5, PubAck(1, 0x10), "40 03 0001 10"),
    (5, PubAck(1, 0, Properties(reason_string="r")), "40 08 0001 00 04 1f 0001 72"),
    (4, PubRec(2), "50 02 0002"),
    (5, PubRec(2, 0x97), "50 03 0002 97"),
    (4, PubRel(3), "62 02 0003"),
    (5, PubRel(3, 0x92), "62 03 0003 92"),
    (4, PubComp(4), "70 02 0004"),
    (5, PubComp(4, 0x92), "70 03 0004 92"),
    (4, Subscribe(5, [SubscriptionRequest("a/#", 1), SubscriptionRequest("b", 2)]), "82 0c 0005 0003 612f23 01 0001 62 02"),
    (
        5,
        Subscribe(5, [SubscriptionRequest("+", 2, True, True, 2)], Properties(subscription_identifiers=[200])),
        "82 0a 0005 03 0bc801 0001 2b 2e",
    ),
    (4, SubAck(5, [0, 1, 2, 0x80]), "90 06 0005 00 01 02 80"),
    (5, SubAck(5, [0, 0x9E]), "90 05 0005 00 00 9e"),
    (4, Unsubscribe(6, ["a", "b"]), "a2 08 0006 0001 61 0001 62"),
    (5, Unsubscribe(6, ["a"]), "a2 06 0006 00 0001 61"),
    (4, UnsubAck(6), "b0 02 0006"),
    (5, UnsubAck(6, [0, 0x11]), "b0 05 0006 00 00 11"),
    (4, PingReq(), "c0 00"),
    (5, PingResp(), "d0 00"),
    (4, Disconnect(), "e0 00"),
    (5, Disconnect(), "e0 00"),
    (5, Disconnect(0x8E), "e0 01 8e"),
    (5, Disconnect(0x04, Properties(session_expiry_interval=1)), "e0 07 04 05 1100000001"),
    (5, Auth(), "f0 00"),
    (5, Auth(0x18, Properties(authentication_method="m", authentication_data=b"d")), "f0 0a 18 08 15 0001 6d 16 0001 64"),
]


def decode_hex(version: int, text: str) -> Packet:
    """The one packet of a hexadecimal wire form; the remaining length is checked by the reader."""
    [(first_byte, body)] = codec.FrameReader().feed(bytes.fromhex(text))
    return codec.decode(first_byte, body, version)


@pytest.mark.parametrize(("version", "packet", "text"), LITERAL, ids=lambda value: value if isinstance(value, str) else None)
def test_the_wire_form_is_exactly_this(version: int, packet: Packet, text: str) -> None:
    assert codec.encode(packet, version).hex() == text.replace(" ", "")
    assert decode_hex(version, text) == packet


@pytest.mark.parametrize(
    ("version", "text", "packet"),
    [
        pytest.param(5, "40 03 0001 00", PubAck(1), id="PUBACK with a needless reason code"),
        pytest.param(5, "40 04 0001 00 00", PubAck(1), id="PUBACK with needless properties"),
        pytest.param(5, "e0 01 00", Disconnect(), id="DISCONNECT with a needless reason code"),
        pytest.param(5, "e0 02 00 00", Disconnect(), id="DISCONNECT with needless properties"),
        pytest.param(5, "f0 01 00", Auth(), id="AUTH that ends after its reason code"),
        pytest.param(5, "f0 02 19 00", Auth(0x19), id="AUTH without properties"),
        pytest.param(3, "6a 02 0001", PubRel(1), id="3.1 PUBREL sent again"),
        pytest.param(3, "8a 06 0001 0001 61 01", Subscribe(1, [SubscriptionRequest("a", 1)]), id="3.1 SUBSCRIBE sent again"),
        pytest.param(3, "aa 05 0001 0001 61", Unsubscribe(1, ["a"]), id="3.1 UNSUBSCRIBE sent again"),
        pytest.param(3, "20 02 ff 00", ConnAck(), id="3.1 CONNACK with something in its unused byte"),
        pytest.param(3, "10 0f 0006 4d5149736470 03 03 000a 0001 63", Connect("c", 3, True, 10), id="3.1 unused flag"),
        pytest.param(3, "10 0f 0006 4d5149736470 03 c2 000a 0001 63", Connect("c", 3, True, 10), id="3.1 user name left out"),
        pytest.param(
            3, "10 12 0006 4d5149736470 03 c2 000a 0001 63 0001 75", Connect("c", 3, True, 10, "u"), id="3.1 password left out"
        ),
        pytest.param(4, "30 06 0004 f09f9880", Publish("\U0001f600"), id="four byte character"),
        pytest.param(4, "30 05 0003 efbbbf", Publish("\ufeff"), id="byte order mark is kept [MQTT-1.5.4-3]"),
    ],
)
def test_other_forms_that_are_read(version: int, text: str, packet: Packet) -> None:
    assert decode_hex(version, text) == packet


@pytest.mark.parametrize("version", [3, 4, 5])
def test_a_connect_brings_its_own_version(version: int) -> None:
    for sent in (3, 4, 5):
        first_byte, body = codec.FrameReader().feed(codec.encode(Connect("c", sent), version))[0]
        packet = codec.decode(first_byte, body, version)
        assert isinstance(packet, Connect)
        assert packet.version == sent == codec.claimed_version(body)


REFUSED: list[tuple[str, int, int, str]] = [
    # Fixed header, 2.1
    ("type 0", 5, MALFORMED, "00 00"),
    ("AUTH before MQTT 5", 4, MALFORMED, "f0 00"),
    ("CONNECT flags", 4, MALFORMED, "11 0d 0004 4d515454 04 02 000a 0001 63"),
    ("CONNACK flags", 4, MALFORMED, "21 02 00 00"),
    ("PUBACK flags", 4, MALFORMED, "42 02 0001"),
    ("PUBREC flags", 4, MALFORMED, "51 02 0001"),
    ("PUBREL flags", 4, MALFORMED, "60 02 0001"),
    ("PUBREL with DUP after 3.1", 4, MALFORMED, "6a 02 0001"),
    ("PUBCOMP flags", 4, MALFORMED, "72 02 0001"),
    ("SUBSCRIBE flags", 4, MALFORMED, "80 06 0001 0001 61 00"),
    ("SUBSCRIBE with DUP after 3.1", 5, MALFORMED, "8a 07 0001 00 0001 61 00"),
    ("SUBACK flags", 4, MALFORMED, "92 03 0001 00"),
    ("UNSUBSCRIBE flags", 4, MALFORMED, "a0 05 0001 0001 61"),
    ("UNSUBACK flags", 4, MALFORMED, "b2 02 0001"),
    ("PINGREQ flags", 4, MALFORMED, "c1 00"),
    ("PINGRESP flags", 4, MALFORMED, "d8 00"),
    ("DISCONNECT flags", 5, MALFORMED, "e2 00"),
    ("AUTH flags", 5, MALFORMED, "f1 00"),
    # CONNECT, 3.1
    ("CONNECT empty", 4, MALFORMED, "10 00"),
    ("CONNECT protocol name truncated", 4, MALFORMED, "10 04 0004 4d51"),
    ("CONNECT without version", 4, MALFORMED, "10 06 0004 4d515454"),
    ("CONNECT without flags", 4, MALFORMED, "10 07 0004 4d515454 04"),
    ("CONNECT other protocol", 4, 0x84, "10 0d 0004 41424344 04 02 000a 0001 63"),
    ("CONNECT name in lower case", 4, 0x84, "10 0d 0004 6d717474 04 02 000a 0001 63"),
    ("CONNECT version 6", 4, 0x84, "10 0d 0004 4d515454 06 02 000a 0001 63"),
    ("CONNECT version 3 under the newer name", 4, 0x84, "10 0d 0004 4d515454 03 02 000a 0001 63"),
    ("CONNECT version 4 under the older name", 4, 0x84, "10 0f 0006 4d5149736470 04 02 000a 0001 63"),
    ("CONNECT bridge bit", 4, 0x84, "10 0d 0004 4d515454 84 02 000a 0001 63"),
    ("CONNECT reserved flag", 4, MALFORMED, "10 0d 0004 4d515454 04 03 000a 0001 63"),
    ("CONNECT reserved flag", 5, MALFORMED, "10 0e 0004 4d515454 05 03 000a 00 0001 63"),
    ("CONNECT will QoS 3", 4, MALFORMED, "10 12 0004 4d515454 04 1e 000a 0001 63 0001 77 0000"),
    ("CONNECT will QoS without will", 4, MALFORMED, "10 0d 0004 4d515454 04 0a 000a 0001 63"),
    ("CONNECT will retain without will", 5, MALFORMED, "10 0e 0004 4d515454 05 22 000a 00 0001 63"),
    ("CONNECT password without user name", 4, MALFORMED, "10 10 0004 4d515454 04 42 000a 0001 63 0001 70"),
    ("CONNECT password without user name", 3, MALFORMED, "10 12 0006 4d5149736470 03 42 000a 0001 63 0001 70"),
    ("CONNECT user name left out after 3.1", 4, MALFORMED, "10 0d 0004 4d515454 04 82 000a 0001 63"),
    ("CONNECT keep alive truncated", 4, MALFORMED, "10 09 0004 4d515454 04 02 00"),
    ("CONNECT client identifier truncated", 4, MALFORMED, "10 0d 0004 4d515454 04 02 000a 0002 63"),
    ("CONNECT client identifier with NUL", 4, MALFORMED, "10 0d 0004 4d515454 04 02 000a 0001 00"),
    ("CONNECT user name not UTF-8", 4, MALFORMED, "10 10 0004 4d515454 04 82 000a 0001 63 0001 ff"),
    ("CONNECT will topic with wildcard", 4, 0x90, "10 12 0004 4d515454 04 06 000a 0001 63 0001 23 0000"),
    ("CONNECT will topic empty", 4, 0x90, "10 11 0004 4d515454 04 06 000a 0001 63 0000 0000"),
    ("CONNECT trailing bytes", 4, MALFORMED, "10 0e 0004 4d515454 04 02 000a 0001 63 00"),
    ("CONNECT without properties", 5, MALFORMED, "10 0a 0004 4d515454 05 02 000a"),
    ("CONNECT will property in its own", 5, MALFORMED, "10 13 0004 4d515454 05 02 000a 05 1800000001 0001 63"),
    # CONNACK, 3.2
    ("CONNACK truncated", 4, MALFORMED, "20 01 00"),
    ("CONNACK reserved flags", 4, MALFORMED, "20 02 02 00"),
    ("CONNACK session present when refused", 4, PROTOCOL_ERROR, "20 02 01 05"),
    ("CONNACK session present when refused", 5, PROTOCOL_ERROR, "20 03 01 87 00"),
    ("CONNACK return code", 4, PROTOCOL_ERROR, "20 02 00 06"),
    ("CONNACK reason code", 5, PROTOCOL_ERROR, "20 03 00 8e 00"),
    ("CONNACK trailing bytes", 4, MALFORMED, "20 03 00 00 00"),
    ("CONNACK without properties", 5, MALFORMED, "20 02 00 00"),
    # PUBLISH, 3.3
    ("PUBLISH QoS 3", 4, MALFORMED, "36 05 0001 61 0001"),
    ("PUBLISH DUP at QoS 0", 4, MALFORMED, "38 03 0001 61"),
    ("PUBLISH packet identifier 0", 4, PROTOCOL_ERROR, "32 05 0001 61 0000"),
    ("PUBLISH without packet identifier", 4, MALFORMED, "32 04 0001 61 00"),
    ("PUBLISH empty", 4, MALFORMED, "30 00"),
    ("PUBLISH topic truncated", 4, MALFORMED, "30 03 0002 61"),
    ("PUBLISH topic with #", 4, 0x90, "30 05 0003 612f23"),
    ("PUBLISH topic with +", 5, 0x90, "30 06 0003 612f2b 00"),
    ("PUBLISH topic empty", 4, MALFORMED, "30 02 0000"),
    ("PUBLISH topic empty without alias", 5, PROTOCOL_ERROR, "30 03 0000 00"),
    ("PUBLISH topic empty with other properties", 5, PROTOCOL_ERROR, "30 05 0000 02 0100"),
    ("PUBLISH topic with NUL", 4, MALFORMED, "30 05 0003 610062"),
    ("PUBLISH topic with a surrogate", 4, MALFORMED, "30 05 0003 eda080"),
    ("PUBLISH topic overlong", 4, MALFORMED, "30 04 0002 c0af"),
    ("PUBLISH topic beyond Unicode", 4, MALFORMED, "30 06 0004 f4908080"),
    ("PUBLISH topic cut inside a character", 4, MALFORMED, "30 04 0002 e282"),
    ("PUBLISH without properties", 5, MALFORMED, "30 03 0001 61"),
    # acknowledgements, 3.4 to 3.7
    ("PUBACK truncated", 4, MALFORMED, "40 01 00"),
    ("PUBACK packet identifier 0", 4, PROTOCOL_ERROR, "40 02 0000"),
    ("PUBACK reason code before MQTT 5", 4, MALFORMED, "40 03 0001 00"),
    ("PUBACK reason code of PUBREL", 5, PROTOCOL_ERROR, "40 03 0001 92"),
    ("PUBREC reason code of SUBACK", 5, PROTOCOL_ERROR, "50 03 0001 01"),
    ("PUBREL reason code of PUBACK", 5, PROTOCOL_ERROR, "62 03 0001 10"),
    ("PUBCOMP reason code of PUBACK", 5, PROTOCOL_ERROR, "70 04 0001 87 00"),
    ("PUBREC trailing bytes", 5, MALFORMED, "50 05 0001 00 00 00"),
    ("PUBCOMP properties truncated", 5, MALFORMED, "70 05 0001 00 04 1f"),
    # SUBSCRIBE and SUBACK, 3.8 and 3.9
    ("SUBSCRIBE packet identifier 0", 4, PROTOCOL_ERROR, "82 06 0000 0001 61 00"),
    ("SUBSCRIBE without filters", 4, PROTOCOL_ERROR, "82 02 0001"),
    ("SUBSCRIBE without filters", 5, PROTOCOL_ERROR, "82 03 0001 00"),
    ("SUBSCRIBE without options", 4, MALFORMED, "82 05 0001 0001 61"),
    ("SUBSCRIBE QoS 3", 4, PROTOCOL_ERROR, "82 06 0001 0001 61 03"),
    ("SUBSCRIBE options of MQTT 5 before it", 4, MALFORMED, "82 06 0001 0001 61 04"),
    ("SUBSCRIBE reserved options", 5, MALFORMED, "82 07 0001 00 0001 61 40"),
    ("SUBSCRIBE retain handling 3", 5, PROTOCOL_ERROR, "82 07 0001 00 0001 61 30"),
    ("SUBSCRIBE no-local and shared", 5, PROTOCOL_ERROR, "82 0f 0001 00 0009 2473686172652f672f 04"),
    ("SUBSCRIBE second filter truncated", 4, MALFORMED, "82 08 0001 0001 61 00 0001"),
    ("SUBACK without reason codes", 4, PROTOCOL_ERROR, "90 02 0001"),
    ("SUBACK reason code of MQTT 5 before it", 4, PROTOCOL_ERROR, "90 03 0001 87"),
    ("SUBACK reason code", 5, PROTOCOL_ERROR, "90 04 0001 00 03"),
    # UNSUBSCRIBE and UNSUBACK, 3.10 and 3.11
    ("UNSUBSCRIBE packet identifier 0", 5, PROTOCOL_ERROR, "a2 06 0000 00 0001 61"),
    ("UNSUBSCRIBE without filters", 4, PROTOCOL_ERROR, "a2 02 0001"),
    ("UNSUBSCRIBE without filters", 5, PROTOCOL_ERROR, "a2 03 0001 00"),
    ("UNSUBSCRIBE filter truncated", 4, MALFORMED, "a2 04 0001 0001"),
    ("UNSUBACK with a payload before MQTT 5", 4, MALFORMED, "b0 03 0001 00"),
    ("UNSUBACK without reason codes", 5, PROTOCOL_ERROR, "b0 03 0001 00"),
    ("UNSUBACK reason code", 5, PROTOCOL_ERROR, "b0 04 0001 00 01"),
    # the rest
    ("PINGREQ with a body", 4, MALFORMED, "c0 01 00"),
    ("PINGRESP with a body", 5, MALFORMED, "d0 01 00"),
    ("DISCONNECT with a body before MQTT 5", 4, MALFORMED, "e0 01 00"),
    ("DISCONNECT reason code", 5, PROTOCOL_ERROR, "e0 01 01"),
    ("DISCONNECT trailing bytes", 5, MALFORMED, "e0 03 00 00 00"),
    ("AUTH reason code", 5, PROTOCOL_ERROR, "f0 01 87"),
]


@pytest.mark.parametrize(
    ("version", "reason_code", "text"), [pytest.param(*row[1:], id=f"{row[0]} v{row[1]}") for row in REFUSED]
)
def test_refused(version: int, reason_code: int, text: str) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_hex(version, text)
    assert caught.value.reason_code == reason_code, caught.value.message


LONG = "x" * 65_536

UNENCODABLE: list[tuple[str, int, Packet]] = [
    ("packet identifier 0", 4, PubAck(0)),
    ("packet identifier too large", 5, Subscribe(65_536, [SubscriptionRequest("a")])),
    ("negative packet identifier", 4, Unsubscribe(-1, ["a"])),
    ("QoS 1 without packet identifier", 4, Publish("a", b"", 1)),
    ("QoS 3", 4, Publish("a", b"", 3, packet_id=1)),
    ("DUP at QoS 0", 4, Publish("a", dup=True)),
    ("topic with a wildcard", 4, Publish("a/+")),
    ("topic with NUL", 5, Publish("a\0b")),
    ("topic with a surrogate", 5, Publish("\ud800")),
    ("topic too long", 4, Publish(LONG)),
    ("topic too long in UTF-8", 4, Publish("é" * 32_768)),
    ("empty topic", 4, Publish("", properties=Properties(topic_alias=1))),
    ("empty topic without alias", 5, Publish("", properties=Properties())),
    ("unknown version", 5, Connect("c", 6)),
    ("password without user name", 4, Connect("c", 4, password=b"p")),
    ("keep alive too large", 4, Connect("c", 4, keep_alive=65_536)),
    ("client identifier too long", 4, Connect(LONG, 4)),
    ("will payload too long", 4, Connect("c", 4, will=Will("w", bytes(65_536)))),
    ("will QoS 3", 4, Connect("c", 4, will=Will("w", b"", 3))),
    ("will topic with a wildcard", 4, Connect("c", 4, will=Will("#", b""))),
    ("session present when refused", 4, ConnAck(0x87, True)),
    ("no filters", 4, Subscribe(1)),
    ("subscription QoS 3", 4, Subscribe(1, [SubscriptionRequest("a", 3)])),
    ("retain handling 3", 5, Subscribe(1, [SubscriptionRequest("a", retain_handling=3)])),
    ("no-local and shared", 5, Subscribe(1, [SubscriptionRequest("$share/g/a", no_local=True)])),
    ("no filters to leave", 5, Unsubscribe(1)),
    ("no reason codes", 5, SubAck(1)),
    ("reason code of another packet", 5, PubAck(1, 0x92)),
    ("reason code of another packet", 5, Disconnect(0x84)),
    ("reason code beyond a byte", 5, SubAck(1, [256])),
    ("property of another packet", 5, PubAck(1, 0, Properties(topic_alias=1))),
    ("AUTH before MQTT 5", 4, Auth()),
]


@pytest.mark.parametrize(
    ("version", "packet"), [pytest.param(row[1], row[2], id=f"{row[0]} v{row[1]}") for row in UNENCODABLE]
)
def test_not_encoded(version: int, packet: Packet) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(packet, version)


def test_a_packet_beyond_the_largest_remaining_length_is_not_encoded() -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode(Publish("a", bytes(268_435_456)), 4)


@pytest.mark.parametrize(
    ("packet", "text"),
    [
        pytest.param(PubRec(1, 0x97, Properties(reason_string="full")), "50020001", id="PUBREC"),
        pytest.param(SubAck(1, [1, 0x97]), "900400010180", id="SUBACK knows one failure only"),
        pytest.param(UnsubAck(1, [0x11]), "b0020001", id="UNSUBACK"),
        pytest.param(Disconnect(0x8E), "e000", id="DISCONNECT"),
        pytest.param(ConnAck(0x97), "20020003", id="CONNACK: server unavailable stands for what 3.1.1 cannot say"),
        pytest.param(Publish("a", properties=Properties(topic_alias=1)), "3003000161", id="PUBLISH"),
    ],
)
def test_what_mqtt_3_1_1_has_no_bytes_for_is_not_sent(packet: Packet, text: str) -> None:
    assert codec.encode(packet, 4).hex() == text


def test_claimed_version_of_something_else_is_zero() -> None:
    assert codec.claimed_version(b"") == 0
    assert codec.claimed_version(b"\x00\x04MQTT\x06") == 0
    assert codec.claimed_version(b"\x00\x06MQIsdp\x03\xff") == 3


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (16_383, "ff7f"),
        (16_384, "808001"),
        (2_097_151, "ffff7f"),
        (2_097_152, "80808001"),
        (268_435_455, "ffffff7f"),
    ],
)
def test_variable_byte_integers(number: int, text: str) -> None:
    """The bounds of table 1-1."""
    assert codec.encode_varint(number).hex() == text


@pytest.mark.parametrize("number", [-1, 268_435_456])
def test_variable_byte_integers_have_bounds(number: int) -> None:
    with pytest.raises(LocalProtocolError):
        codec.encode_varint(number)


class TestFrameReader:
    def test_frames_and_what_is_left_for_later(self) -> None:
        reader = codec.FrameReader()
        assert reader.feed(b"\xc0\x00\x30\x03\x00\x01a\x30\x06\x00") == [(0xC0, b""), (0x30, b"\x00\x01a")]
        assert reader.feed(b"\x01abc") == []
        assert reader.feed(b"") == []
        assert reader.feed(b"d\xd0") == [(0x30, b"\x00\x01abcd")]
        assert reader.feed(b"\x00") == [(0xD0, b"")]

    @pytest.mark.parametrize(
        "header",
        [pytest.param(b"\x30\xff\xff\xff\xff\x01", id="five bytes"), pytest.param(b"\x30\x80\x00", id="longer than needed")],
    )
    def test_a_bad_remaining_length_is_malformed(self, header: bytes) -> None:
        with pytest.raises(RemoteProtocolError) as caught:
            codec.FrameReader().feed(header)
        assert caught.value.reason_code == MALFORMED

    def test_the_bound_counts_the_whole_packet(self) -> None:
        packet = codec.encode(Publish("a", bytes(200)), 4)
        assert len(codec.FrameReader(len(packet)).feed(packet)) == 1
        with pytest.raises(RemoteProtocolError) as caught:
            codec.FrameReader(len(packet) - 1).feed(packet)
        assert caught.value.reason_code == 0x95

    def test_a_packet_that_is_too_large_is_refused_before_its_body_arrives(self) -> None:
        with pytest.raises(RemoteProtocolError) as caught:
            codec.FrameReader(1_000).feed(b"\x30\xff\xff\x7f")
        assert caught.value.reason_code == 0x95

    def test_what_precedes_a_fault_is_delivered_and_the_fault_stays(self) -> None:
        reader = codec.FrameReader(100)
        assert reader.feed(b"\xc0\x00\x30\x80\x00") == [(0xC0, b"")]
        assert isinstance(reader.failure, RemoteProtocolError)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError):
                reader.feed(b"\xc0\x00")

    def test_a_large_packet_in_many_chunks(self) -> None:
        """A million chunks: if each were to cost its predecessors again, this would not end."""
        packet = codec.encode(Publish("a", bytes(1_000_000)), 4)
        reader = codec.FrameReader()
        frames: list[tuple[int, bytes]] = []
        for index in range(len(packet)):
            frames += reader.feed(packet[index : index + 1])
        assert [(first_byte, len(body)) for first_byte, body in frames] == [(0x30, 1_000_003)]


class TestPacketReader:
    def test_the_version_follows_the_connect(self) -> None:
        reader = codec.PacketReader(4)
        packets: list[Packet] = [Connect("c", 5), Disconnect(0x04)]
        assert reader.feed(b"".join(codec.encode(packet, 5) for packet in packets)) == packets
        assert reader.version == 5

    def test_what_precedes_a_bad_packet_is_delivered_and_the_fault_stays(self) -> None:
        reader = codec.PacketReader(4)
        assert reader.feed(b"\xc0\x00\xc1\x00\xc0\x00") == [PingReq()]
        assert isinstance(reader.failure, RemoteProtocolError)
        for _ in range(2):
            with pytest.raises(RemoteProtocolError) as caught:
                reader.feed(b"")
            assert caught.value.reason_code == MALFORMED

    def test_a_bad_frame_is_known_at_once(self) -> None:
        reader = codec.PacketReader(4, 10)
        assert reader.feed(b"\xc0\x00\x30\x0b") == [PingReq()]
        assert isinstance(reader.failure, RemoteProtocolError)
        assert reader.failure.reason_code == 0x95

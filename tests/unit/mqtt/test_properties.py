"""Every row of the specification's property table (2-4), written out again here as bytes and by hand."""

from __future__ import annotations

import pytest

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt.packets import PROPERTY_NAMES, Properties
from nearcast.mqtt.properties import SPECS, WILL_PROPERTIES, decode_properties, encode_properties
from nearcast.mqtt.wire import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    encode_varint,
)

MALFORMED = 0x81
PROTOCOL_ERROR = 0x82

ANSWERS = {CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH}
CARRIERS = ANSWERS | {CONNECT, PUBLISH, SUBSCRIBE, UNSUBSCRIBE, WILL_PROPERTIES}

TABLE: list[tuple[str, str, Properties, set[int]]] = [
    ("payload_format_indicator", "01 01", Properties(payload_format_indicator=1), {PUBLISH, WILL_PROPERTIES}),
    ("message_expiry_interval", "02 ffffffff", Properties(message_expiry_interval=2**32 - 1), {PUBLISH, WILL_PROPERTIES}),
    ("content_type", "03 0001 63", Properties(content_type="c"), {PUBLISH, WILL_PROPERTIES}),
    ("response_topic", "08 0003 722f74", Properties(response_topic="r/t"), {PUBLISH, WILL_PROPERTIES}),
    ("correlation_data", "09 0002 00ff", Properties(correlation_data=b"\x00\xff"), {PUBLISH, WILL_PROPERTIES}),
    ("subscription_identifiers", "0b ffffff7f", Properties(subscription_identifiers=[268_435_455]), {PUBLISH, SUBSCRIBE}),
    ("session_expiry_interval", "11 00000000", Properties(session_expiry_interval=0), {CONNECT, CONNACK, DISCONNECT}),
    ("assigned_client_identifier", "12 0001 69", Properties(assigned_client_identifier="i"), {CONNACK}),
    ("server_keep_alive", "13 0000", Properties(server_keep_alive=0), {CONNACK}),
    ("authentication_method", "15 0001 6d", Properties(authentication_method="m"), {CONNECT, CONNACK, AUTH}),
    (
        "authentication_data",
        "15 0001 6d 16 0000",
        Properties(authentication_method="m", authentication_data=b""),
        {CONNECT, CONNACK, AUTH},
    ),
    ("request_problem_information", "17 00", Properties(request_problem_information=0), {CONNECT}),
    ("will_delay_interval", "18 00000102", Properties(will_delay_interval=258), {WILL_PROPERTIES}),
    ("request_response_information", "19 01", Properties(request_response_information=1), {CONNECT}),
    ("response_information", "1a 0001 69", Properties(response_information="i"), {CONNACK}),
    ("server_reference", "1c 0001 73", Properties(server_reference="s"), {CONNACK, DISCONNECT}),
    ("reason_string", "1f 0000", Properties(reason_string=""), ANSWERS),
    ("receive_maximum", "21 0001", Properties(receive_maximum=1), {CONNECT, CONNACK}),
    ("topic_alias_maximum", "22 0000", Properties(topic_alias_maximum=0), {CONNECT, CONNACK}),
    ("topic_alias", "23 ffff", Properties(topic_alias=65_535), {PUBLISH}),
    ("maximum_qos", "24 00", Properties(maximum_qos=0), {CONNACK}),
    ("retain_available", "25 00", Properties(retain_available=0), {CONNACK}),
    ("user_properties", "26 0001 6b 0001 76", Properties(user_properties=[("k", "v")]), CARRIERS),
    ("maximum_packet_size", "27 00000001", Properties(maximum_packet_size=1), {CONNECT, CONNACK}),
    ("wildcard_subscription_available", "28 01", Properties(wildcard_subscription_available=1), {CONNACK}),
    ("subscription_identifier_available", "29 00", Properties(subscription_identifier_available=0), {CONNACK}),
    ("shared_subscription_available", "2a 01", Properties(shared_subscription_available=1), {CONNACK}),
]


def wire_form(text: str) -> bytes:
    """Properties written in hexadecimal, behind their length."""
    body = bytes.fromhex(text)
    assert len(body) < 128
    return bytes([len(body)]) + body


def refusal(text: str, packet_type: int) -> int:
    """The reason code with which these properties are refused."""
    with pytest.raises(RemoteProtocolError) as caught:
        decode_properties(wire_form(text), 0, packet_type)
    return caught.value.reason_code


def test_the_table_is_complete() -> None:
    assert [row[0] for row in TABLE] == [spec.name for spec in SPECS]
    assert sorted(row[0] for row in TABLE) == sorted(PROPERTY_NAMES)
    assert len(TABLE) == 27


@pytest.mark.parametrize(("name", "text", "properties", "carriers"), TABLE, ids=[row[0] for row in TABLE])
def test_each_property_in_each_packet(name: str, text: str, properties: Properties, carriers: set[int]) -> None:
    data = wire_form(text)
    assert encode_properties(properties) == data
    for packet_type in CARRIERS:
        if packet_type in carriers:
            assert encode_properties(properties, packet_type) == data
            assert decode_properties(b"??" + data + b"!", 2, packet_type) == (properties, 2 + len(data))
        else:
            assert refusal(text, packet_type) == MALFORMED  # 2.2.2.2
            with pytest.raises(LocalProtocolError):
                encode_properties(properties, packet_type)


@pytest.mark.parametrize(("name", "text", "properties", "carriers"), TABLE, ids=[row[0] for row in TABLE])
def test_each_property_twice(name: str, text: str, properties: Properties, carriers: set[int]) -> None:
    for packet_type in carriers:
        if name == "user_properties" or (name == "subscription_identifiers" and packet_type == PUBLISH):
            found, _ = decode_properties(wire_form(text + text), 0, packet_type)
            assert found is not None
            assert len(found.user_properties or found.subscription_identifiers or []) == 2
        else:
            assert refusal(text + text, packet_type) == PROTOCOL_ERROR


@pytest.mark.parametrize(("name", "text", "properties", "carriers"), TABLE, ids=[row[0] for row in TABLE])
def test_each_property_cut_short(name: str, text: str, properties: Properties, carriers: set[int]) -> None:
    whole = bytes.fromhex(text)
    start = 4 if name == "authentication_data" else 0  # what precedes is a whole property of its own
    for packet_type in carriers:
        for length in range(start + 1, len(whole)):
            # What follows the properties must not be taken for their end.
            with pytest.raises(RemoteProtocolError) as caught:
                decode_properties(bytes([length]) + whole, 0, packet_type)
            assert caught.value.reason_code == MALFORMED


def test_none_and_empty_are_the_same() -> None:
    assert encode_properties(None) == encode_properties(Properties()) == b"\x00"
    assert encode_properties(Properties(user_properties=[], subscription_identifiers=[])) == b"\x00"
    assert decode_properties(b"\x00\x01", 0, CONNECT) == (None, 1)


def test_user_properties_keep_their_order_and_repeat() -> None:
    pairs = [("b", "2"), ("a", "1"), ("b", "2"), ("", "")]
    data = encode_properties(Properties(user_properties=pairs), PUBLISH)
    found, _ = decode_properties(data, 0, PUBLISH)
    assert found == Properties(user_properties=pairs)


def test_the_order_of_different_properties_does_not_matter() -> None:
    found, _ = decode_properties(wire_form("22 0005 26 0000 0000 11 00000001 26 0001 61 0000"), 0, CONNECT)
    expected = Properties(topic_alias_maximum=5, session_expiry_interval=1, user_properties=[("", ""), ("a", "")])
    assert found == expected


@pytest.mark.parametrize(
    ("packet_type", "text", "reason_code"),
    [
        pytest.param(CONNECT, "21 0000", PROTOCOL_ERROR, id="receive maximum 0"),
        pytest.param(CONNACK, "27 00000000", PROTOCOL_ERROR, id="maximum packet size 0"),
        pytest.param(PUBLISH, "23 0000", 0x94, id="topic alias 0"),
        pytest.param(SUBSCRIBE, "0b 00", PROTOCOL_ERROR, id="subscription identifier 0"),
        pytest.param(PUBLISH, "0b 01 0b 00", PROTOCOL_ERROR, id="second subscription identifier 0"),
        pytest.param(SUBSCRIBE, "0b 8000", MALFORMED, id="subscription identifier longer than needed"),
        pytest.param(SUBSCRIBE, "0b 8080808001", MALFORMED, id="subscription identifier of five bytes"),
        pytest.param(PUBLISH, "01 02", PROTOCOL_ERROR, id="payload format indicator 2"),
        pytest.param(CONNECT, "17 02", PROTOCOL_ERROR, id="request problem information 2"),
        pytest.param(CONNECT, "19 ff", PROTOCOL_ERROR, id="request response information 255"),
        pytest.param(CONNACK, "24 02", PROTOCOL_ERROR, id="maximum QoS 2"),
        pytest.param(CONNACK, "25 02", PROTOCOL_ERROR, id="retain available 2"),
        pytest.param(CONNACK, "28 02", PROTOCOL_ERROR, id="wildcard subscription available 2"),
        pytest.param(CONNACK, "29 02", PROTOCOL_ERROR, id="subscription identifier available 2"),
        pytest.param(CONNACK, "2a 02", PROTOCOL_ERROR, id="shared subscription available 2"),
        pytest.param(AUTH, "16 0001 00", PROTOCOL_ERROR, id="authentication data without method"),
        pytest.param(PUBLISH, "08 0003 612f23", PROTOCOL_ERROR, id="response topic with wildcard"),
        pytest.param(PUBLISH, "08 0000", PROTOCOL_ERROR, id="response topic empty"),
        pytest.param(PUBLISH, "03 0001 00", MALFORMED, id="string with U+0000"),
        pytest.param(PUBLISH, "03 0003 eda080", MALFORMED, id="string with a surrogate"),
        pytest.param(CONNECT, "26 0001 ff 0000", MALFORMED, id="user property name not UTF-8"),
        pytest.param(CONNECT, "26 0000 0001 ff", MALFORMED, id="user property value not UTF-8"),
        pytest.param(PUBLISH, "04 00", MALFORMED, id="identifier between two rows"),
        pytest.param(PUBLISH, "2b 00", MALFORMED, id="identifier behind the table"),
        pytest.param(PUBLISH, "ff7f 00", MALFORMED, id="identifier of two bytes"),
        pytest.param(PUBLISH, "8100 01", MALFORMED, id="identifier longer than needed"),
    ],
)
def test_values_that_are_refused(packet_type: int, text: str, reason_code: int) -> None:
    assert refusal(text, packet_type) == reason_code


@pytest.mark.parametrize("data", [b"", b"\x80", b"\x01", b"\x05\x11\x00", b"\x80\x00", b"\xff\xff\xff\xff\x01"])
def test_a_bad_length_is_malformed(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError) as caught:
        decode_properties(data, 0, CONNECT)
    assert caught.value.reason_code == MALFORMED


@pytest.mark.parametrize(
    "properties",
    [
        Properties(receive_maximum=0),
        Properties(receive_maximum=65_536),
        Properties(session_expiry_interval=2**32),
        Properties(session_expiry_interval=-1),
        Properties(maximum_qos=2),
        Properties(topic_alias=0),
        Properties(subscription_identifiers=[1, 0]),
        Properties(subscription_identifiers=[268_435_456]),
        Properties(authentication_data=b"d"),
        Properties(response_topic="a/+"),
        Properties(content_type="\0"),
        Properties(content_type="\udfff"),
        Properties(reason_string="x" * 65_536),
        Properties(correlation_data=bytes(65_536)),
        Properties(user_properties=[("k", "\0")]),
    ],
    ids=repr,
)
def test_values_that_are_not_encoded(properties: Properties) -> None:
    with pytest.raises(LocalProtocolError):
        encode_properties(properties)


def test_a_subscribe_carries_one_subscription_identifier() -> None:
    with pytest.raises(LocalProtocolError):
        encode_properties(Properties(subscription_identifiers=[1, 2]), SUBSCRIBE)


def test_the_number_of_user_properties_is_bounded() -> None:
    pair = b"\x26\x00\x01a\x00\x01b"
    properties, _ = decode_properties(encode_varint(len(pair) * 1_000) + pair * 1_000, 0, PUBLISH)
    assert properties is not None
    with pytest.raises(RemoteProtocolError) as raised:
        decode_properties(encode_varint(len(pair) * 1_001) + pair * 1_001, 0, PUBLISH)
    assert raised.value.reason_code == 0x97

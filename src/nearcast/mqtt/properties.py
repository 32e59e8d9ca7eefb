"""MQTT 5 properties on the wire (section 2.2.2), driven by one table.

Owns: which properties exist, their types and ranges, and which packets may carry them. Refuses to know anything that needs
more than the one packet: whether a topic alias is within the agreed maximum, which direction the packet travels, whether
an authentication method is the one of the CONNECT.
"""

from __future__ import annotations

from typing import Final, cast

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.wire import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PACKET_NAMES,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    encode_binary,
    encode_byte,
    encode_string,
    encode_u16,
    encode_u32,
    encode_varint,
    malformed,
    read_binary,
    read_string,
    read_u16,
    read_u32,
    read_varint,
    violation,
)

#: The properties of a will travel in a CONNECT but are not the CONNECT's own (3.1.3.2); packet type 0 stands for them.
WILL_PROPERTIES: Final = 0
#: For :func:`encode_properties`: do not check which packet they are for.
ANY_PACKET: Final = -1

BYTE: Final = 0
U16: Final = 1
U32: Final = 2
VARINT: Final = 3
BINARY: Final = 4
STRING: Final = 5
STRING_PAIR: Final = 6


class PropertySpec:
    """One row of table 2-4. ``lowest`` and ``highest`` bound numbers; ``range_code`` is the reason code beyond."""

    def __init__(
        self,
        identifier: int,
        name: str,
        kind: int,
        packet_types: list[int],
        lowest: int = 0,
        highest: int = 4_294_967_295,
        range_code: int = reasons.PROTOCOL_ERROR,
    ) -> None:
        self.identifier = identifier
        self.name = name
        self.kind = kind
        self.packet_mask = 0
        for packet_type in packet_types:
            self.packet_mask |= 1 << packet_type
        self.lowest = lowest
        self.highest = highest
        self.range_code = range_code


_MESSAGE: Final = [PUBLISH, WILL_PROPERTIES]
_ANSWER: Final = [CONNACK, PUBACK, PUBREC, PUBREL, PUBCOMP, SUBACK, UNSUBACK, DISCONNECT, AUTH]
_ALL: Final = [*_ANSWER, CONNECT, PUBLISH, WILL_PROPERTIES, SUBSCRIBE, UNSUBSCRIBE]

#: Table 2-4. A byte is 0 or 1 wherever one is used; the ranges are those of the property's own section. A topic alias of 0
#: has a reason code of its own (3.3.4).
SPECS: Final[list[PropertySpec]] = [
    PropertySpec(0x01, "payload_format_indicator", BYTE, _MESSAGE, highest=1),
    PropertySpec(0x02, "message_expiry_interval", U32, _MESSAGE),
    PropertySpec(0x03, "content_type", STRING, _MESSAGE),
    PropertySpec(0x08, "response_topic", STRING, _MESSAGE),
    PropertySpec(0x09, "correlation_data", BINARY, _MESSAGE),
    PropertySpec(0x0B, "subscription_identifiers", VARINT, [PUBLISH, SUBSCRIBE], lowest=1),
    PropertySpec(0x11, "session_expiry_interval", U32, [CONNECT, CONNACK, DISCONNECT]),
    PropertySpec(0x12, "assigned_client_identifier", STRING, [CONNACK]),
    PropertySpec(0x13, "server_keep_alive", U16, [CONNACK]),
    PropertySpec(0x15, "authentication_method", STRING, [CONNECT, CONNACK, AUTH]),
    PropertySpec(0x16, "authentication_data", BINARY, [CONNECT, CONNACK, AUTH]),
    PropertySpec(0x17, "request_problem_information", BYTE, [CONNECT], highest=1),
    PropertySpec(0x18, "will_delay_interval", U32, [WILL_PROPERTIES]),
    PropertySpec(0x19, "request_response_information", BYTE, [CONNECT], highest=1),
    PropertySpec(0x1A, "response_information", STRING, [CONNACK]),
    PropertySpec(0x1C, "server_reference", STRING, [CONNACK, DISCONNECT]),
    PropertySpec(0x1F, "reason_string", STRING, _ANSWER),
    PropertySpec(0x21, "receive_maximum", U16, [CONNECT, CONNACK], lowest=1),
    PropertySpec(0x22, "topic_alias_maximum", U16, [CONNECT, CONNACK]),
    PropertySpec(0x23, "topic_alias", U16, [PUBLISH], lowest=1, range_code=reasons.TOPIC_ALIAS_INVALID),
    PropertySpec(0x24, "maximum_qos", BYTE, [CONNACK], highest=1),
    PropertySpec(0x25, "retain_available", BYTE, [CONNACK], highest=1),
    PropertySpec(0x26, "user_properties", STRING_PAIR, _ALL),
    PropertySpec(0x27, "maximum_packet_size", U32, [CONNECT, CONNACK], lowest=1),
    PropertySpec(0x28, "wildcard_subscription_available", BYTE, [CONNACK], highest=1),
    PropertySpec(0x29, "subscription_identifier_available", BYTE, [CONNACK], highest=1),
    PropertySpec(0x2A, "shared_subscription_available", BYTE, [CONNACK], highest=1),
]

_HIGHEST_IDENTIFIER: Final = 0x2A


def _by_identifier() -> list[PropertySpec | None]:
    rows: list[PropertySpec | None] = [None] * (_HIGHEST_IDENTIFIER + 1)
    for spec in SPECS:
        rows[spec.identifier] = spec
    return rows


_BY_IDENTIFIER: Final[list[PropertySpec | None]] = _by_identifier()


def is_topic_name(topic: str) -> bool:
    """Whether something can be published there: at least one character, no wildcard [MQTT-4.7.1-1], [MQTT-4.7.3-1]."""
    return topic != "" and "#" not in topic and "+" not in topic


#: User properties read from one packet: there may be any number, and a CONNECT's are read before anyone is authenticated.
MAX_USER_PROPERTIES: Final = 1_000


def decode_properties(data: bytes, pos: int, packet_type: int, leaves_out: bool = False) -> tuple[Properties | None, int]:
    """The properties whose length prefix is at ``pos``, and the position behind them. ``None`` when there are none.
    ``leaves_out``: user properties beyond the bound are left out, and no error.

    A property that the packet type may not carry is malformed (2.2.2.2 says so); a repeated one is a protocol error, as
    each property's section says. A SUBSCRIBE has at most one subscription identifier (3.8.2.1.2); a PUBLISH may have many.
    """
    what = PACKET_NAMES[packet_type]
    size, pos = read_varint(data, pos, len(data), "property length")
    if size == 0:
        return None, pos
    end = pos + size
    if end > len(data):
        raise malformed(f"{what} property length: says {size} bytes, and {len(data) - pos} are left")
    properties = Properties()
    seen = 0
    while pos < end:
        identifier, pos = read_varint(data, pos, end, "property identifier")
        spec = _BY_IDENTIFIER[identifier] if identifier <= _HIGHEST_IDENTIFIER else None
        if spec is None:
            raise malformed(f"{what}: there is no property 0x{identifier:02x}")
        name = spec.name
        if not spec.packet_mask >> packet_type & 1:
            raise malformed(f"{what}: may not carry property {name}")
        kind = spec.kind
        if kind == STRING_PAIR:
            key, pos = read_string(data, pos, end, name)
            text, pos = read_string(data, pos, end, name)
            pairs = properties.user_properties
            if pairs is None:
                properties.user_properties = [(key, text)]
            elif len(pairs) < MAX_USER_PROPERTIES:
                pairs.append((key, text))
            elif not leaves_out:
                raise RemoteProtocolError(reasons.QUOTA_EXCEEDED, f"{what}: more than {MAX_USER_PROPERTIES} user properties")
            continue
        if seen >> identifier & 1 and not (kind == VARINT and packet_type == PUBLISH):
            raise violation(f"{what}: property {name} more than once")
        seen |= 1 << identifier
        if kind == STRING:
            text, pos = read_string(data, pos, end, name)
            setattr(properties, name, text)
            continue
        if kind == BINARY:
            raw, pos = read_binary(data, pos, end, name)
            setattr(properties, name, raw)
            continue
        if kind == BYTE:
            if pos >= end:
                raise malformed(f"{name}: the packet ends before it")
            number = data[pos]
            pos += 1
        elif kind == U16:
            number, pos = read_u16(data, pos, end, name)
        elif kind == U32:
            number, pos = read_u32(data, pos, end, name)
        else:
            number, pos = read_varint(data, pos, end, name)
        if number < spec.lowest or number > spec.highest:
            raise RemoteProtocolError(spec.range_code, f"{what}: property {name} may not be {number}")
        if kind != VARINT:
            setattr(properties, name, number)
        elif properties.subscription_identifiers is None:
            properties.subscription_identifiers = [number]
        else:
            properties.subscription_identifiers.append(number)
    complaint = _complaint(properties)
    if complaint is not None:
        raise violation(f"{what}: {complaint}")
    return properties, pos


def encode_properties(properties: Properties | None, packet_type: int = ANY_PACKET) -> bytes:
    """The wire form with its length prefix, in order of identifiers. Given a packet type, refuses what it may not carry."""
    if properties is None:
        return b"\x00"
    parts: list[bytes] = []
    for spec in SPECS:
        value = getattr(properties, spec.name)
        if value is None:
            continue
        if packet_type != ANY_PACKET and not spec.packet_mask >> packet_type & 1:
            raise LocalProtocolError(f"{PACKET_NAMES[packet_type]} may not carry property {spec.name}")
        if spec.kind == STRING_PAIR:
            for key, text in cast(list[tuple[str, str]], value):
                parts.append(b"\x26" + encode_string(key, spec.name) + encode_string(text, spec.name))
        elif spec.kind == VARINT:
            identifiers = cast(list[int], value)
            if packet_type == SUBSCRIBE and len(identifiers) > 1:
                raise LocalProtocolError("SUBSCRIBE may carry one subscription identifier only")
            for number in identifiers:
                _check_range(spec, number)
                parts.append(b"\x0b" + encode_varint(number))
        else:
            parts.append(bytes((spec.identifier,)))
            parts.append(_encode_single(spec, value))
    complaint = _complaint(properties)
    if complaint is not None:
        raise LocalProtocolError(complaint)
    body = b"".join(parts)
    return encode_varint(len(body)) + body


def _encode_single(spec: PropertySpec, value: object) -> bytes:
    if spec.kind == STRING:
        return encode_string(cast(str, value), spec.name)
    if spec.kind == BINARY:
        return encode_binary(cast(bytes, value), spec.name)
    number = cast(int, value)
    _check_range(spec, number)
    if spec.kind == BYTE:
        return encode_byte(number, spec.name)
    if spec.kind == U16:
        return encode_u16(number, spec.name)
    return encode_u32(number, spec.name)


def _check_range(spec: PropertySpec, number: int) -> None:
    if number < spec.lowest or number > spec.highest:
        raise LocalProtocolError(f"property {spec.name} may not be {number}")


def _complaint(properties: Properties) -> str | None:
    """What is wrong with the properties taken together, or with what a string says; the same in both directions."""
    if properties.authentication_data is not None and properties.authentication_method is None:
        return "authentication data without an authentication method"
    topic = properties.response_topic
    if topic is not None and not is_topic_name(topic):
        return "the response topic is not a topic name"  # [MQTT-3.3.2-14]
    return None

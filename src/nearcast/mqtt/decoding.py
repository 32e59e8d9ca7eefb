"""One frame to one packet, for MQTT 3.1, 3.1.1 and 5.0 (chapters 2 and 3 of each). See :mod:`nearcast.mqtt.codec`.

Raises ``RemoteProtocolError`` and nothing else: 0x81 for what cannot be parsed and 0x82 for what the protocol forbids, unless
the specification names a code of its own.
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import (
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
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
from nearcast.mqtt.properties import WILL_PROPERTIES, decode_properties, is_topic_name
from nearcast.mqtt.wire import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    PACKET_NAMES,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
    malformed,
    read_binary,
    read_string,
    read_u16,
    violation,
)

#: Reason codes by packet type: the tables of sections 3.2.2.2, 3.4.2.1 and so on to 3.15.2.1. DISCONNECT has 0x8C as well,
#: which only the overview (table 2-6) lists there.
REASON_CODES: Final[dict[int, frozenset[int]]] = {
    CONNACK: frozenset((0x00, *range(0x80, 0x8B), 0x8C, 0x90, 0x95, 0x97, *range(0x99, 0x9E), 0x9F)),
    PUBACK: frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)),
    PUBREC: frozenset((0x00, 0x10, 0x80, 0x83, 0x87, 0x90, 0x91, 0x97, 0x99)),
    PUBREL: frozenset((0x00, 0x92)),
    PUBCOMP: frozenset((0x00, 0x92)),
    SUBACK: frozenset((0x00, 0x01, 0x02, 0x80, 0x83, 0x87, 0x8F, 0x91, 0x97, 0x9E, 0xA1, 0xA2)),
    UNSUBACK: frozenset((0x00, 0x11, 0x80, 0x83, 0x87, 0x8F, 0x91)),
    DISCONNECT: frozenset((0x00, 0x04, *range(0x80, 0x84), 0x87, 0x89, *range(0x8B, 0x91), *range(0x93, 0xA3))),
    AUTH: frozenset((0x00, 0x18, 0x19)),
}

#: What a 3.x SUBACK can say.
_SUBACK_V4: Final = frozenset((0, 1, 2, 0x80))

#: Fixed header flags by packet type (table 2-2); PUBLISH has its own reading of them.
HEADER_FLAGS: Final = (0, 0, 0, 0, 0, 0, 2, 0, 2, 0, 2, 0, 0, 0, 0, 0)

CLEAN_START: Final = 0x02
WILL: Final = 0x04
WILL_RETAIN: Final = 0x20
PASSWORD: Final = 0x40
USERNAME: Final = 0x80


def decode(first_byte: int, body: bytes, version: int, by_server: bool = False) -> Packet:
    """The packet in one frame. A CONNECT brings its own version; ``version`` is that of the connection for all others.

    ``by_server``: a PUBLISH with more user properties than are read loses some. It is somebody else's, and a client that left
    the server for it would be sent it again for ever."""
    packet_type = first_byte >> 4
    flags = first_byte & 15
    if packet_type == PUBLISH:
        return _decode_publish(flags, body, version, by_server)
    if packet_type == 0:
        raise malformed("packet type 0 does not exist")
    if flags != HEADER_FLAGS[packet_type]:
        # In MQTT 3.1 a repeated PUBREL, SUBSCRIBE or UNSUBSCRIBE carries the DUP flag (its section 2.1).
        repeatable = packet_type in (PUBREL, SUBSCRIBE, UNSUBSCRIBE)
        if not (version == MQTT_3_1 and repeatable and flags == 10):
            raise malformed(f"{PACKET_NAMES[packet_type]}: reserved flags are {flags}")  # [MQTT-2.1.3-1]
    if packet_type == SUBSCRIBE:
        return _decode_subscribe(body, version)
    if packet_type == CONNECT:
        return _decode_connect(body)
    if packet_type == PUBACK:
        packet_id, code, properties = _decode_ack(body, PUBACK, version)
        return PubAck(packet_id, code, properties)
    if packet_type == PUBREC:
        packet_id, code, properties = _decode_ack(body, PUBREC, version)
        return PubRec(packet_id, code, properties)
    if packet_type == PUBREL:
        packet_id, code, properties = _decode_ack(body, PUBREL, version)
        return PubRel(packet_id, code, properties)
    if packet_type == PUBCOMP:
        packet_id, code, properties = _decode_ack(body, PUBCOMP, version)
        return PubComp(packet_id, code, properties)
    if packet_type == PINGREQ:
        _nothing_left(body, 0, PINGREQ)
        return PingReq()
    if packet_type == PINGRESP:
        _nothing_left(body, 0, PINGRESP)
        return PingResp()
    if packet_type == UNSUBSCRIBE:
        return _decode_unsubscribe(body, version)
    if packet_type == CONNACK:
        return _decode_connack(body, version)
    if packet_type == SUBACK:
        packet_id, codes, properties = _decode_reason_codes(body, SUBACK, version)
        return SubAck(packet_id, codes, properties)
    if packet_type == UNSUBACK:
        if version < MQTT_5:
            packet_id, pos = _read_packet_id(body, 0, UNSUBACK)
            _nothing_left(body, pos, UNSUBACK)
            return UnsubAck(packet_id)
        packet_id, codes, properties = _decode_reason_codes(body, UNSUBACK, version)
        return UnsubAck(packet_id, codes, properties)
    if packet_type == DISCONNECT:
        if version < MQTT_5:
            _nothing_left(body, 0, DISCONNECT)
            return Disconnect()
        code, properties = _decode_reason(body, DISCONNECT)
        return Disconnect(code, properties)
    if packet_type == AUTH and version >= MQTT_5:
        code, properties = _decode_reason(body, AUTH)
        return Auth(code, properties)
    raise malformed("AUTH exists in MQTT 5 only")


def claimed_version(body: bytes) -> int:
    """The protocol version a CONNECT body names, or 0 when it names none of ours; checks nothing else.

    For answering a CONNECT that ``decode`` refused: the form of a CONNACK depends on the version.
    """
    if body[:7] == b"\x00\x04MQTT\x05":
        return MQTT_5
    if body[:7] == b"\x00\x04MQTT\x04":
        return MQTT_3_1_1
    if body[:9] == b"\x00\x06MQIsdp\x03":
        return MQTT_3_1
    return 0


def _nothing_left(body: bytes, pos: int, packet_type: int) -> None:
    if pos != len(body):
        raise malformed(f"{PACKET_NAMES[packet_type]}: {len(body) - pos} bytes too many")


def _read_packet_id(body: bytes, pos: int, packet_type: int) -> tuple[int, int]:
    packet_id, pos = read_u16(body, pos, len(body), "packet identifier")
    if packet_id == 0:
        raise violation(f"{PACKET_NAMES[packet_type]}: packet identifier is 0")  # [MQTT-2.2.1-3]
    return packet_id, pos


def _check_reason_code(code: int, packet_type: int) -> None:
    if code not in REASON_CODES[packet_type]:
        raise violation(f"{PACKET_NAMES[packet_type]}: 0x{code:02x} is not one of its reason codes")


def _decode_connect(body: bytes) -> Connect:
    end = len(body)
    version = claimed_version(body)
    if version == 0:
        _, pos = read_binary(body, 0, end, "protocol name")
        if pos >= end:
            raise malformed("CONNECT: ends before the protocol version")
        raise RemoteProtocolError(
            reasons.UNSUPPORTED_PROTOCOL_VERSION, "CONNECT: the protocol is none of MQTT 3.1, 3.1.1 and 5.0"
        )  # [MQTT-3.1.2-1], [MQTT-3.1.2-2]
    pos = 9 if version == MQTT_3_1 else 7
    if pos >= end:
        raise malformed("CONNECT: ends before the flags")
    flags = body[pos]
    if flags & 1 and version != MQTT_3_1:
        raise malformed("CONNECT: the reserved flag is set")  # [MQTT-3.1.2-3]; MQTT 3.1 leaves the bit unused
    will_qos = flags >> 3 & 3
    if will_qos == 3:
        raise malformed("CONNECT: will QoS is 3")  # [MQTT-3.1.2-12]
    if not flags & WILL and (will_qos != 0 or flags & WILL_RETAIN):
        raise malformed("CONNECT: will QoS or will retain without a will")  # [MQTT-3.1.2-11], [MQTT-3.1.2-13]
    if flags & PASSWORD and not flags & USERNAME and version != MQTT_5:
        raise malformed("CONNECT: a password without a user name")  # [MQTT-3.1.2-22] of 3.1.1; MQTT 5 allows it
    keep_alive, pos = read_u16(body, pos + 1, end, "keep alive")
    properties: Properties | None = None
    if version == MQTT_5:
        properties, pos = decode_properties(body, pos, CONNECT)
    client_id, pos = read_string(body, pos, end, "client identifier")
    will: Will | None = None
    if flags & WILL:
        will_properties: Properties | None = None
        if version == MQTT_5:
            will_properties, pos = decode_properties(body, pos, WILL_PROPERTIES)
        topic, pos = read_string(body, pos, end, "will topic")
        payload, pos = read_binary(body, pos, end, "will payload")
        if not is_topic_name(topic):
            raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, "CONNECT: the will topic is not a topic name")
        will = Will(topic, payload, will_qos, flags & WILL_RETAIN != 0, will_properties)
    username: str | None = None
    password: bytes | None = None
    # MQTT 3.1 (its section 3.1) wants these to be optional even when their flags are set: the remaining length decides.
    if flags & USERNAME and not (version == MQTT_3_1 and pos == end):
        username, pos = read_string(body, pos, end, "user name")
    if flags & PASSWORD and not (version == MQTT_3_1 and pos == end):
        password, pos = read_binary(body, pos, end, "password")
    _nothing_left(body, pos, CONNECT)
    return Connect(client_id, version, flags & CLEAN_START != 0, keep_alive, username, password, will, properties)


def _decode_connack(body: bytes, version: int) -> ConnAck:
    if len(body) < 2:
        raise malformed("CONNACK: ends before its reason code")
    code = body[1]
    properties: Properties | None = None
    pos = 2
    if version >= MQTT_5:
        _check_reason_code(code, CONNACK)
        properties, pos = decode_properties(body, 2, CONNACK)
    elif code > 5:
        raise violation(f"CONNACK: {code} is not one of its return codes")
    else:
        code = reasons.from_connack_v4(code)
    _nothing_left(body, pos, CONNACK)
    if version == MQTT_3_1:  # its first byte is unused
        return ConnAck(code)
    if body[0] > 1:
        raise malformed("CONNACK: reserved flags are set")  # [MQTT-3.2.2-1]
    if body[0] == 1 and code != 0:
        raise violation("CONNACK: a session is present although the connection is refused")  # [MQTT-3.2.2-6]
    return ConnAck(code, body[0] == 1, properties)


def _decode_publish(flags: int, body: bytes, version: int, by_server: bool) -> Publish:
    qos = flags >> 1 & 3
    if qos == 3:
        raise malformed("PUBLISH: QoS is 3")  # [MQTT-3.3.1-4]
    if flags & 8 and qos == 0:
        raise malformed("PUBLISH: marked as duplicate at QoS 0")  # [MQTT-3.3.1-2]
    topic, pos = read_string(body, 0, len(body), "topic name")
    packet_id = 0
    if qos != 0:
        packet_id, pos = _read_packet_id(body, pos, PUBLISH)
    properties: Properties | None = None
    if version >= MQTT_5:
        properties, pos = decode_properties(body, pos, PUBLISH, by_server)
    if topic == "":
        if version < MQTT_5:
            raise malformed("PUBLISH: the topic name is empty")  # [MQTT-4.7.3-1]
        if properties is None or properties.topic_alias is None:
            raise violation("PUBLISH: neither a topic name nor a topic alias")
    elif not is_topic_name(topic):
        raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, "PUBLISH: wildcard in the topic name")  # [MQTT-3.3.2-2]
    return Publish(topic, body[pos:], qos, flags & 1 != 0, flags & 8 != 0, packet_id, properties)


def _decode_ack(body: bytes, packet_type: int, version: int) -> tuple[int, int, Properties | None]:
    """PUBACK, PUBREC, PUBREL and PUBCOMP: in MQTT 5 the reason code and the properties may be left out from the end."""
    packet_id, pos = _read_packet_id(body, 0, packet_type)
    if pos == len(body):
        return packet_id, 0, None
    if version < MQTT_5:
        raise malformed(f"{PACKET_NAMES[packet_type]}: {len(body) - pos} bytes too many")
    code = body[pos]
    _check_reason_code(code, packet_type)
    pos += 1
    if pos == len(body):
        return packet_id, code, None
    properties, pos = decode_properties(body, pos, packet_type)
    _nothing_left(body, pos, packet_type)
    return packet_id, code, properties


def _decode_reason(body: bytes, packet_type: int) -> tuple[int, Properties | None]:
    """DISCONNECT and AUTH of MQTT 5: both fields may be left out from the end."""
    if body == b"":
        return 0, None
    code = body[0]
    _check_reason_code(code, packet_type)
    if len(body) == 1:
        return code, None
    properties, pos = decode_properties(body, 1, packet_type)
    _nothing_left(body, pos, packet_type)
    return code, properties


def _decode_subscribe(body: bytes, version: int) -> Subscribe:
    end = len(body)
    packet_id, pos = _read_packet_id(body, 0, SUBSCRIBE)
    properties: Properties | None = None
    if version >= MQTT_5:
        properties, pos = decode_properties(body, pos, SUBSCRIBE)
    if pos == end:
        raise violation("SUBSCRIBE: no topic filter")  # [MQTT-3.8.3-2]
    subscriptions: list[SubscriptionRequest] = []
    while pos < end:
        topic_filter, pos = read_string(body, pos, end, "topic filter")
        if pos >= end:
            raise malformed("SUBSCRIBE: a topic filter without options")
        options = body[pos]
        pos += 1
        if options & (0xC0 if version >= MQTT_5 else 0xFC):
            raise malformed("SUBSCRIBE: reserved bits of the options are set")  # [MQTT-3.8.3-5]
        qos = options & 3
        if qos == 3:
            raise violation("SUBSCRIBE: QoS is 3")
        no_local = options & 4 != 0
        retain_handling = options >> 4
        if retain_handling == 3:
            raise violation("SUBSCRIBE: retain handling is 3")
        if no_local and topic_filter.startswith("$share/"):
            raise violation("SUBSCRIBE: no-local on a shared subscription")  # [MQTT-3.8.3-4]
        subscriptions.append(SubscriptionRequest(topic_filter, qos, no_local, options & 8 != 0, retain_handling))
    return Subscribe(packet_id, subscriptions, properties)


def _decode_unsubscribe(body: bytes, version: int) -> Unsubscribe:
    end = len(body)
    packet_id, pos = _read_packet_id(body, 0, UNSUBSCRIBE)
    properties: Properties | None = None
    if version >= MQTT_5:
        properties, pos = decode_properties(body, pos, UNSUBSCRIBE)
    if pos == end:
        raise violation("UNSUBSCRIBE: no topic filter")  # [MQTT-3.10.3-2]
    topic_filters: list[str] = []
    while pos < end:
        topic_filter, pos = read_string(body, pos, end, "topic filter")
        topic_filters.append(topic_filter)
    return Unsubscribe(packet_id, topic_filters, properties)


def _decode_reason_codes(body: bytes, packet_type: int, version: int) -> tuple[int, list[int], Properties | None]:
    """SUBACK, and UNSUBACK of MQTT 5: one reason code for each topic filter of the request."""
    packet_id, pos = _read_packet_id(body, 0, packet_type)
    properties: Properties | None = None
    valid = _SUBACK_V4
    if version >= MQTT_5:
        properties, pos = decode_properties(body, pos, packet_type)
        valid = REASON_CODES[packet_type]
    codes = list(body[pos:])
    if not codes:
        raise violation(f"{PACKET_NAMES[packet_type]}: no reason code")
    for code in codes:
        if code not in valid:
            raise violation(f"{PACKET_NAMES[packet_type]}: 0x{code:02x} is not one of its reason codes")
    return packet_id, codes, properties

"""One packet to its bytes, for MQTT 3.1, 3.1.1 and 5.0 (chapters 2 and 3 of each). See :mod:`nearcast.mqtt.codec`.

Raises ``LocalProtocolError`` for whatever :mod:`nearcast.mqtt.decoding` would refuse, so what it returns can be read back.
"""

from __future__ import annotations

from nearcast.errors import LocalProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.decoding import CLEAN_START, HEADER_FLAGS, PASSWORD, REASON_CODES, USERNAME, WILL, WILL_RETAIN
from nearcast.mqtt.packets import (
    MQTT_3_1,
    MQTT_3_1_1,
    MQTT_5,
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
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.properties import WILL_PROPERTIES, encode_properties, is_topic_name
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
    encode_string,
    encode_u16,
    encode_varint,
)


def encode(packet: Packet, version: int) -> bytes:
    """The whole packet, in its shortest form. A CONNECT is written in its own ``version``, whatever the argument says."""
    if isinstance(packet, Publish):
        return _encode_publish(packet, version)
    if isinstance(packet, PubAck):
        return _encode_ack(PUBACK, packet.packet_id, packet.reason_code, packet.properties, version)
    if isinstance(packet, PubRec):
        return _encode_ack(PUBREC, packet.packet_id, packet.reason_code, packet.properties, version)
    if isinstance(packet, PubRel):
        return _encode_ack(PUBREL, packet.packet_id, packet.reason_code, packet.properties, version)
    if isinstance(packet, PubComp):
        return _encode_ack(PUBCOMP, packet.packet_id, packet.reason_code, packet.properties, version)
    if isinstance(packet, PingReq):
        return b"\xc0\x00"
    if isinstance(packet, PingResp):
        return b"\xd0\x00"
    if isinstance(packet, Connect):
        return _frame(CONNECT, _encode_connect(packet))
    if isinstance(packet, ConnAck):
        return _frame(CONNACK, _encode_connack(packet, version))
    if isinstance(packet, Subscribe):
        return _frame(SUBSCRIBE, _encode_subscribe(packet, version))
    if isinstance(packet, SubAck):
        return _frame(SUBACK, _encode_reason_codes(SUBACK, packet.packet_id, packet.reason_codes, packet.properties, version))
    if isinstance(packet, Unsubscribe):
        return _frame(UNSUBSCRIBE, _encode_unsubscribe(packet, version))
    if isinstance(packet, UnsubAck):
        if version < MQTT_5:
            return _frame(UNSUBACK, _encode_packet_id(packet.packet_id))
        codes = packet.reason_codes
        return _frame(UNSUBACK, _encode_reason_codes(UNSUBACK, packet.packet_id, codes, packet.properties, version))
    if isinstance(packet, Disconnect):
        if version < MQTT_5:
            return b"\xe0\x00"
        return _frame(DISCONNECT, _encode_reason(DISCONNECT, packet.reason_code, packet.properties))
    if version < MQTT_5:
        raise LocalProtocolError("AUTH exists in MQTT 5 only")
    return _frame(AUTH, _encode_reason(AUTH, packet.reason_code, packet.properties))


def _frame(packet_type: int, body: bytes) -> bytes:
    return bytes((packet_type << 4 | HEADER_FLAGS[packet_type],)) + encode_varint(len(body)) + body


def _encode_packet_id(packet_id: int) -> bytes:
    if packet_id < 1 or packet_id > 65_535:
        raise LocalProtocolError(f"packet identifier {packet_id} is not within 1 and 65535")
    return bytes((packet_id >> 8, packet_id & 255))


def _encode_reason_code(code: int, packet_type: int) -> bytes:
    if code not in REASON_CODES[packet_type]:
        raise LocalProtocolError(f"{PACKET_NAMES[packet_type]} has no reason code 0x{code:02x}")
    return bytes((code,))


def _check_qos(qos: int) -> None:
    if qos < 0 or qos > 2:
        raise LocalProtocolError(f"QoS {qos} is not 0, 1 or 2")


def _encode_publish(packet: Publish, version: int) -> bytes:
    _check_qos(packet.qos)
    if packet.dup and packet.qos == 0:
        raise LocalProtocolError("PUBLISH: a QoS 0 message is never a duplicate")
    properties = packet.properties
    alias = properties.topic_alias if version >= MQTT_5 and properties is not None else None
    if not is_topic_name(packet.topic) and (packet.topic != "" or alias is None):
        raise LocalProtocolError(
            f"PUBLISH: {packet.topic!r} is not a topic name: it is empty, or has + or #, which only filters may"
        )
    body = encode_string(packet.topic, "topic name")
    if packet.qos != 0:
        body += _encode_packet_id(packet.packet_id)
    if version >= MQTT_5:
        body += encode_properties(properties, PUBLISH)
    first = PUBLISH << 4 | (8 if packet.dup else 0) | packet.qos << 1 | (1 if packet.retain else 0)
    return b"".join((bytes((first,)), encode_varint(len(body) + len(packet.payload)), body, packet.payload))


def _encode_ack(packet_type: int, packet_id: int, code: int, properties: Properties | None, version: int) -> bytes:
    body = _encode_packet_id(packet_id)
    if version >= MQTT_5:
        reason_code = _encode_reason_code(code, packet_type)
        encoded = encode_properties(properties, packet_type)
        if encoded != b"\x00":
            body += reason_code + encoded
        elif code != 0:
            body += reason_code
    return _frame(packet_type, body)


def _encode_reason(packet_type: int, code: int, properties: Properties | None) -> bytes:
    reason_code = _encode_reason_code(code, packet_type)
    encoded = encode_properties(properties, packet_type)
    if encoded != b"\x00":
        return reason_code + encoded
    if code == 0:
        return b""
    # 3.14.2.2.1 lets a DISCONNECT end here; 3.15.2.1 lets an AUTH leave out both fields or none.
    return reason_code if packet_type == DISCONNECT else reason_code + encoded


def _encode_connect(packet: Connect) -> bytes:
    version = packet.version
    if version in (MQTT_5, MQTT_3_1_1):
        header = b"\x00\x04MQTT"
    elif version == MQTT_3_1:
        header = b"\x00\x06MQIsdp"
    else:
        raise LocalProtocolError(f"CONNECT: protocol version {version} is none of 3, 4 and 5")
    flags = CLEAN_START if packet.clean_start else 0
    payload = [encode_string(packet.client_id, "client identifier")]
    will = packet.will
    if will is not None:
        _check_qos(will.qos)
        if not is_topic_name(will.topic):
            raise LocalProtocolError(f"CONNECT: will topic {will.topic!r} is not a topic name")
        flags |= WILL | will.qos << 3
        if will.retain:
            flags |= WILL_RETAIN
        if version == MQTT_5:
            payload.append(encode_properties(will.properties, WILL_PROPERTIES))
        payload.append(encode_string(will.topic, "will topic"))
        payload.append(encode_binary(will.payload, "will payload"))
    if packet.username is not None:
        flags |= USERNAME
        payload.append(encode_string(packet.username, "user name"))
    elif packet.password is not None and version != MQTT_5:
        raise LocalProtocolError("CONNECT: a password without a user name exists in MQTT 5 only")
    if packet.password is not None:
        flags |= PASSWORD
        payload.append(encode_binary(packet.password, "password"))
    header += bytes((version, flags)) + encode_u16(packet.keep_alive, "keep alive")
    if version == MQTT_5:
        header += encode_properties(packet.properties, CONNECT)
    return header + b"".join(payload)


def _encode_connack(packet: ConnAck, version: int) -> bytes:
    if packet.session_present and packet.reason_code != 0:
        raise LocalProtocolError("CONNACK: no session is present when the connection is refused")
    present = b"\x01" if packet.session_present and version != MQTT_3_1 else b"\x00"
    if version < MQTT_5:
        return present + bytes((reasons.connack_v4(packet.reason_code),))
    return present + _encode_reason_code(packet.reason_code, CONNACK) + encode_properties(packet.properties, CONNACK)


def _encode_subscribe(packet: Subscribe, version: int) -> bytes:
    if not packet.subscriptions:
        raise LocalProtocolError("SUBSCRIBE: no topic filter")
    parts = [_encode_packet_id(packet.packet_id)]
    if version >= MQTT_5:
        parts.append(encode_properties(packet.properties, SUBSCRIBE))
    for request in packet.subscriptions:
        _check_qos(request.qos)
        options = request.qos
        if version >= MQTT_5:
            if request.retain_handling < 0 or request.retain_handling > 2:
                raise LocalProtocolError(f"SUBSCRIBE: retain handling {request.retain_handling} is not 0, 1 or 2")
            if request.no_local and request.topic_filter.startswith("$share/"):
                raise LocalProtocolError("SUBSCRIBE: no-local on a shared subscription")
            options |= request.retain_handling << 4
            options |= (4 if request.no_local else 0) | (8 if request.retain_as_published else 0)
        parts.append(encode_string(request.topic_filter, "topic filter"))
        parts.append(bytes((options,)))
    return b"".join(parts)


def _encode_unsubscribe(packet: Unsubscribe, version: int) -> bytes:
    if not packet.topic_filters:
        raise LocalProtocolError("UNSUBSCRIBE: no topic filter")
    parts = [_encode_packet_id(packet.packet_id)]
    if version >= MQTT_5:
        parts.append(encode_properties(packet.properties, UNSUBSCRIBE))
    for topic_filter in packet.topic_filters:
        parts.append(encode_string(topic_filter, "topic filter"))
    return b"".join(parts)


def _encode_reason_codes(
    packet_type: int, packet_id: int, codes: list[int], properties: Properties | None, version: int
) -> bytes:
    if not codes:
        raise LocalProtocolError(f"{PACKET_NAMES[packet_type]}: no reason code")
    parts = [_encode_packet_id(packet_id)]
    if version >= MQTT_5:
        parts.append(encode_properties(properties, packet_type))
    for code in codes:
        encoded = _encode_reason_code(code, packet_type)
        parts.append(b"\x80" if code > 0x80 and version < MQTT_5 else encoded)
    return b"".join(parts)

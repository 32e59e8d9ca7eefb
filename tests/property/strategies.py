"""Hypothesis strategies for valid MQTT packets, for every test that wants "any packet".

``any_packet(version)`` draws what ``encode`` accepts and ``decode`` gives back unchanged: fields that a version has no bytes
for stay at their defaults. ``chunks(data)`` cuts bytes anywhere.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise
from typing import Any

from hypothesis import strategies as st

from nearcast.mqtt import codec, packets, wire
from nearcast.mqtt import properties as mqtt_properties
from nearcast.mqtt.packets import Packet, Properties

VERSIONS = (packets.MQTT_3_1, packets.MQTT_3_1_1, packets.MQTT_5)

versions = st.sampled_from(VERSIONS)
packet_ids = st.integers(1, 65_535)
qualities = st.integers(0, 2)
payloads = st.binary(max_size=40)

#: Any MQTT string: all of Unicode but surrogates and U+0000 (section 1.5.4).
strings = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)

_levels = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0+#/"), max_size=6)
topic_names = st.lists(_levels, min_size=1, max_size=4).map("/".join).filter(bool)
topic_filters = st.builds(
    lambda levels, rest: "/".join(levels + rest),
    st.lists(st.one_of(_levels, st.just("+")), min_size=1, max_size=4),
    st.sampled_from([[], ["#"]]),
).filter(bool)
shared_filters = st.builds(lambda group, rest: f"$share/{group}/{rest}", _levels.filter(bool), topic_filters)


def _numbers(spec: mqtt_properties.PropertySpec, highest: int) -> st.SearchStrategy[int]:
    return st.integers(spec.lowest, min(spec.highest, highest))


def _values(spec: mqtt_properties.PropertySpec, packet_type: int) -> st.SearchStrategy[Any]:
    if spec.name == "response_topic":
        return topic_names
    if spec.kind == mqtt_properties.STRING:
        return strings
    if spec.kind == mqtt_properties.BINARY:
        return payloads
    if spec.kind == mqtt_properties.STRING_PAIR:
        return st.lists(st.tuples(strings, strings), min_size=1, max_size=3)
    if spec.kind == mqtt_properties.VARINT:
        most = 1 if packet_type == wire.SUBSCRIBE else 3
        return st.lists(_numbers(spec, wire.MAX_VARINT), min_size=1, max_size=most)
    return _numbers(spec, {mqtt_properties.BYTE: 255, mqtt_properties.U16: 65_535}.get(spec.kind, 4_294_967_295))


@cache
def properties(packet_type: int) -> st.SearchStrategy[Properties | None]:
    """Properties that this packet type may carry; ``None`` in place of none, as ``decode`` has it."""
    allowed = {spec.name: _values(spec, packet_type) for spec in mqtt_properties.SPECS if spec.packet_mask >> packet_type & 1}
    chosen = st.fixed_dictionaries({}, optional=allowed).map(_sensible)
    return st.one_of(st.none(), chosen.map(lambda values: Properties(**values) if values else None))


def _sensible(values: dict[str, Any]) -> dict[str, Any]:
    if "authentication_data" in values:
        values.setdefault("authentication_method", "SCRAM-SHA-1")
    return values


def _properties_in(version: int, packet_type: int) -> st.SearchStrategy[Properties | None]:
    return properties(packet_type) if version == packets.MQTT_5 else st.none()


def _reason_codes(version: int, packet_type: int) -> st.SearchStrategy[int]:
    return st.sampled_from(sorted(codec.REASON_CODES[packet_type])) if version == packets.MQTT_5 else st.just(0)


@cache
def wills(version: int) -> st.SearchStrategy[packets.Will]:
    own = _properties_in(version, mqtt_properties.WILL_PROPERTIES)
    return st.builds(packets.Will, topic_names, payloads, qualities, st.booleans(), own)


@cache
def connects(version: int) -> st.SearchStrategy[packets.Connect]:
    def legal(packet: packets.Connect) -> packets.Connect:
        if packet.username is None and version != packets.MQTT_5:
            packet.password = None
        return packet

    return st.builds(
        packets.Connect,
        client_id=strings,
        version=st.just(version),
        clean_start=st.booleans(),
        keep_alive=st.integers(0, 65_535),
        username=st.none() | strings,
        password=st.none() | payloads,
        will=st.none() | wills(version),
        properties=_properties_in(version, wire.CONNECT),
    ).map(legal)


@cache
def connacks(version: int) -> st.SearchStrategy[packets.ConnAck]:
    codes = _reason_codes(version, wire.CONNACK)
    present = st.booleans()
    if version != packets.MQTT_5:
        codes = st.sampled_from([0x00, 0x84, 0x85, 0x86, 0x87, 0x88])
    if version == packets.MQTT_3_1:
        present = st.just(False)
    return st.builds(
        lambda code, session, own: packets.ConnAck(code, session and code == 0, own),
        codes,
        present,
        _properties_in(version, wire.CONNACK),
    )


@cache
def publishes(version: int) -> st.SearchStrategy[packets.Publish]:
    def build(
        topic: str, payload: bytes, qos: int, retain: bool, dup: bool, packet_id: int, own: Properties | None, short: bool
    ) -> packets.Publish:
        if short and own is not None and own.topic_alias is not None:
            topic = ""
        return packets.Publish(topic, payload, qos, retain, dup and qos > 0, packet_id if qos else 0, own)

    return st.builds(
        build,
        topic_names,
        payloads,
        qualities,
        st.booleans(),
        st.booleans(),
        packet_ids,
        _properties_in(version, wire.PUBLISH),
        st.booleans(),
    )


@cache
def subscription_requests(version: int) -> st.SearchStrategy[packets.SubscriptionRequest]:
    if version != packets.MQTT_5:
        return st.builds(packets.SubscriptionRequest, topic_filters, qualities)
    handling = st.integers(0, 2)
    plain = st.builds(packets.SubscriptionRequest, topic_filters, qualities, st.booleans(), st.booleans(), handling)
    shared = st.builds(packets.SubscriptionRequest, shared_filters, qualities, st.just(False), st.booleans(), handling)
    return plain.filter(lambda request: not request.topic_filter.startswith("$share/")) | shared


@cache
def subscribes(version: int) -> st.SearchStrategy[packets.Subscribe]:
    requests = st.lists(subscription_requests(version), min_size=1, max_size=4)
    return st.builds(packets.Subscribe, packet_ids, requests, _properties_in(version, wire.SUBSCRIBE))


@cache
def subacks(version: int) -> st.SearchStrategy[packets.SubAck]:
    codes = _reason_codes(version, wire.SUBACK) if version == packets.MQTT_5 else st.sampled_from([0, 1, 2, 0x80])
    return st.builds(packets.SubAck, packet_ids, st.lists(codes, min_size=1, max_size=4), _properties_in(version, wire.SUBACK))


@cache
def unsubscribes(version: int) -> st.SearchStrategy[packets.Unsubscribe]:
    filters = st.lists(topic_filters | shared_filters, min_size=1, max_size=4)
    return st.builds(packets.Unsubscribe, packet_ids, filters, _properties_in(version, wire.UNSUBSCRIBE))


@cache
def unsubacks(version: int) -> st.SearchStrategy[packets.UnsubAck]:
    if version != packets.MQTT_5:
        return st.builds(packets.UnsubAck, packet_ids)
    codes = st.lists(_reason_codes(version, wire.UNSUBACK), min_size=1, max_size=4)
    return st.builds(packets.UnsubAck, packet_ids, codes, properties(wire.UNSUBACK))


@cache
def acknowledgements(version: int) -> st.SearchStrategy[Packet]:
    """PUBACK, PUBREC, PUBREL and PUBCOMP."""
    fields = {
        packet_type: (packet_ids, _reason_codes(version, packet_type), _properties_in(version, packet_type))
        for packet_type in (wire.PUBACK, wire.PUBREC, wire.PUBREL, wire.PUBCOMP)
    }
    return st.one_of(
        st.builds(packets.PubAck, *fields[wire.PUBACK]),
        st.builds(packets.PubRec, *fields[wire.PUBREC]),
        st.builds(packets.PubRel, *fields[wire.PUBREL]),
        st.builds(packets.PubComp, *fields[wire.PUBCOMP]),
    )


@cache
def disconnects(version: int) -> st.SearchStrategy[packets.Disconnect]:
    return st.builds(packets.Disconnect, _reason_codes(version, wire.DISCONNECT), _properties_in(version, wire.DISCONNECT))


auths = st.builds(packets.Auth, _reason_codes(packets.MQTT_5, wire.AUTH), properties(wire.AUTH))


@cache
def packets_but_connect(version: int) -> st.SearchStrategy[Packet]:
    kinds: list[st.SearchStrategy[Packet]] = [
        connacks(version),
        publishes(version),
        acknowledgements(version),
        subscribes(version),
        subacks(version),
        unsubscribes(version),
        unsubacks(version),
        st.builds(packets.PingReq),
        st.builds(packets.PingResp),
        disconnects(version),
    ]
    if version == packets.MQTT_5:
        kinds.append(auths)
    return st.one_of(kinds)


@cache
def any_packet(version: int) -> st.SearchStrategy[Packet]:
    """Every packet of a version, CONNECT included."""
    return st.one_of(connects(version), packets_but_connect(version))


@st.composite
def chunks(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """``data`` cut at random places; some chunks may be empty."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=12)))
    edges = [0, *cuts, len(data)]
    return [data[start:stop] for start, stop in pairwise(edges)]

"""Publications: the unit in which the broker moves messages.

A :class:`Publication` is one or more PUBLISH packets that arrived back to back and differ in nothing but payload and packet
identifier. A busy publisher's read holds hundreds of those; handling them as one thing is what makes the broker fast: they are
routed once, queued once, and where a receiver speaks the same protocol version at the same QoS their bytes go out as they came
in, uncopied. Whatever else a receiver needs (another version or QoS, the retain flag, subscription identifiers, a topic alias,
what is left of the expiry interval) is a :class:`Form`, built once and shared by all receivers that need the same.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from nearcast.mqtt.wire import encode_varint, split_packets

#: Form flags: the low nibble is PUBLISH's own flags (DUP, QoS, RETAIN), this bit says MQTT 5.
V5_FLAG: Final = 16
DUP_FLAG: Final = 8
RETAIN_FLAG: Final = 1

#: High and low bytes of 0, 1, 2, ... 65535: consecutive packet identifiers are stamped into packets by slice assignment.
_HIGH: Final[bytes] = bytes([number >> 8 for number in range(65_536)])
_LOW: Final[bytes] = bytes(range(256)) * 256

#: Forms remembered per publication. A retained message with an expiry would otherwise gather one for every second it lives.
MAX_FORMS: Final = 8

#: Payload bytes in one publication of :func:`build_all`: a message that stays unacknowledged keeps all of it in memory.
MAX_BUILT_BYTES: Final = 65_536

_TOPIC_ALIAS: Final = b"\x23"
_MESSAGE_EXPIRY: Final = b"\x02"


class Form:
    """The packets of a publication in one wire form, back to back. ``stride`` is their size, 0 if they differ in size."""

    def __init__(self, packets: bytes, stride: int, id_at: int) -> None:
        self.packets = packets
        self.stride = stride
        self.id_at = id_at

    def slice(self, start: int, count: int) -> bytes:
        """``count`` packets from the ``start``-th on; forms of varying packet size can only be taken whole."""
        begin: i64 = start * self.stride
        end: i64 = begin + count * self.stride
        if begin == 0 and end == len(self.packets):
            return self.packets
        return self.packets[begin:end]

    def numbered(self, start: int, count: int, first_id: int) -> bytes:
        """``count`` packets from the ``start``-th on, carrying the packet identifiers ``first_id``, ``first_id + 1``, ..."""
        begin: i64 = start * self.stride
        stride: i64 = self.stride
        id_at: i64 = self.id_at
        if count == 1:
            packets = self.packets
            number = _HIGH[first_id : first_id + 1] + _LOW[first_id : first_id + 1]
            return packets[begin : begin + id_at] + number + packets[begin + id_at + 2 : begin + stride]
        stamped = bytearray(self.packets[begin : begin + count * stride])
        stamped[self.id_at :: self.stride] = _HIGH[first_id : first_id + count]
        stamped[self.id_at + 1 :: self.stride] = _LOW[first_id : first_id + count]
        return bytes(stamped)

    def duplicate(self, index: int, packet_id: int) -> bytes:
        """One packet as it is sent again: same identifier, DUP set [MQTT-3.3.1-1]."""
        packet = self.numbered(index, 1, packet_id)
        return bytes([packet[0] | DUP_FLAG]) + packet[1:]


class Terms:
    """How one receiver gets a publication: QoS, retain flag, encoded subscription ``identifiers``.

    ``via`` is the shared subscription that chose the receiver, as its whole filter, or empty. For another broker it says
    whom that one is to serve (:data:`nearcast.mqtt.routing.VIA_SEPARATOR`).
    """

    def __init__(self, qos: int, retain: bool, identifiers: bytes, via: str = "") -> None:
        self.qos = qos
        self.retain = retain
        self.identifiers = identifiers
        self.via = via
        #: The flags of a form at these terms, but for the protocol version.
        self.flags = (qos << 1) | (RETAIN_FLAG if retain else 0)


class Publication:
    """One or more messages of one topic that share QoS, retain flag and properties.

    ``packets`` is their wire form as received, in MQTT 5 if ``v5``. ``stride`` is the size of each packet, or 0 when sizes
    differ, which only QoS 0 allows. ``head_size`` counts the bytes from the topic's length to the payload, identifier
    excluded. ``properties`` are the MQTT 5 properties that every receiver gets, encoded, without their length.
    ``sequence`` is the identity of the first message at its ``origin``; the others count on from it.
    """

    def __init__(
        self,
        topic: bytes,
        packets: bytes,
        count: int,
        stride: int,
        v5: bool,
        head_size: int,
        properties: bytes,
        expires_at: float,
        forwardable: bool,
    ) -> None:
        self.topic = topic
        self.packets = packets
        self.count = count
        self.stride = stride
        self.v5 = v5
        self.head_size = head_size
        self.properties = properties
        self.expires_at = expires_at
        flags = packets[0] & 0x0F
        self.qos = (flags >> 1) & 3
        self.retain = (flags & RETAIN_FLAG) != 0
        self.sequence = 0
        #: Which broker received it from a client: 0 is this one.
        self.origin = 0
        #: Numbers of sessions that had it before they came here (nearcast.fabric.fences).
        self.fenced: set[int] | None = None
        #: The version of the retained message that the last of these became (:mod:`nearcast.mqtt.retained`); 0: none.
        self.stamp = 0
        #: Who gave it that stamp, where that is not its origin: :func:`nearcast.fabric.replication.origin_id`.
        self.author = ""
        # Where the journal has this publication: its name there, and the generation that holds it (0: not written yet).
        self.journal_key = 0
        self.journal_generation = 0
        # Packets that hold something meant for us alone (a topic alias, a running expiry) are never passed on as they are.
        self.raw_flags = (flags | (V5_FLAG if v5 else 0)) if forwardable else -1
        self._forms: dict[tuple[int, bytes, int, int], Form] | None = None
        self._raw: Form | None = None

    def expired(self, now: float) -> bool:
        return self.expires_at > 0 and now >= self.expires_at

    def payloads(self) -> list[bytes]:
        """The payload of each message."""
        skip = 1 + self.head_size + (2 if self.qos else 0)
        return [packet[skip + _varint_size(packet) :] for packet in split_packets(self.packets)]

    def single(self, index: int) -> Publication:
        """One of the messages as a publication of its own."""
        if self.count == 1:
            return self
        only = build(self.topic, self.payloads()[index], self.qos, self.retain, self.properties, self.expires_at)
        only.sequence = self.sequence + index
        only.origin = self.origin
        only.stamp = self.stamp
        only.author = self.author
        return only

    def parts(self, pieces: int) -> list[Publication]:
        """These messages as at most ``pieces`` publications of about equal size, in order."""
        if self.count == 1 or pieces == 1:
            return [self]
        if self.stride == 0:
            singles: list[Publication] = []
            for index, payload in enumerate(self.payloads()):
                one = build(self.topic, payload, self.qos, self.retain, self.properties, self.expires_at)
                one.sequence = self.sequence + index
                one.origin = self.origin
                one.stamp = self.stamp
                one.author = self.author
                singles.append(one)
            return singles
        found: list[Publication] = []
        pieces = min(pieces, self.count)
        start = 0
        for piece in range(pieces):
            stop = self.count * (piece + 1) // pieces
            found.append(self.cut(start, stop - start))
            start = stop
        return found

    def cut(self, start: int, count: int) -> Publication:
        """A copy of ``count`` of the messages, from the ``start``-th on; they must be of one size."""
        part = Publication(
            self.topic,
            self.packets[start * self.stride : (start + count) * self.stride],
            count,
            self.stride,
            self.v5,
            self.head_size,
            self.properties,
            self.expires_at,
            self.raw_flags >= 0,
        )
        part.sequence = self.sequence + start
        part.origin = self.origin
        part.stamp = self.stamp
        part.author = self.author
        return part

    def anew(self) -> Publication:
        """The same messages, to be numbered by this broker."""
        return Publication(
            self.topic,
            self.packets,
            self.count,
            self.stride,
            self.v5,
            self.head_size,
            self.properties,
            self.expires_at,
            self.raw_flags >= 0,
        )

    def form(self, flags: int, identifiers: bytes, alias: int, now: float) -> Form:
        """These packets with ``flags`` (QoS, retain, :data:`V5_FLAG`), encoded subscription ``identifiers``, topic ``alias``.

        A positive alias is being defined and goes out beside the topic; a negative one is known and replaces the topic.
        """
        if flags == self.raw_flags and alias == 0 and not identifiers:
            raw = self._raw
            if raw is None:
                id_at = 1 + _varint_size(self.packets) + 2 + len(self.topic)
                raw = Form(self.packets, self.stride, id_at)
                self._raw = raw
            return raw
        remaining = -1
        if self.expires_at > 0:
            remaining = max(1, int(self.expires_at - now + 0.999))
        key = (flags, identifiers, alias, remaining)
        forms = self._forms
        if forms is None:
            forms = {}
            self._forms = forms
        form = forms.get(key)
        if form is None:
            form = self._encode(flags, identifiers, alias, remaining)
            if len(forms) >= MAX_FORMS:
                forms.clear()
            forms[key] = form
        return form

    def forget_forms(self) -> None:
        """Drop what was built for receivers. Whatever keeps a publication calls this, because only its packets are counted."""
        self._forms = None

    def _encode(self, flags: int, identifiers: bytes, alias: int, remaining: int) -> Form:
        topic = b"" if alias < 0 else self.topic
        head = len(topic).to_bytes(2, "big") + topic
        id_at = len(head)
        if flags & 0x06:
            head += b"\x00\x00"
        if flags & V5_FLAG:
            properties = self.properties
            if remaining >= 0:
                properties += _MESSAGE_EXPIRY + remaining.to_bytes(4, "big")
            if alias != 0:
                properties += _TOPIC_ALIAS + abs(alias).to_bytes(2, "big")
            properties += identifiers
            head += encode_varint(len(properties)) + properties
        first = bytes([0x30 | (flags & 0x0F)])
        payloads = self.payloads()
        if self.stride > 0:
            lead = first + encode_varint(len(head) + len(payloads[0])) + head
            packets = lead + lead.join(payloads)
            return Form(packets, len(lead) + len(payloads[0]), len(lead) - len(head) + id_at)
        parts: list[bytes] = []
        for payload in payloads:
            parts.append(first + encode_varint(len(head) + len(payload)) + head + payload)
        return Form(b"".join(parts), 0, 0)


def build(
    topic: bytes,
    payload: bytes,
    qos: int,
    retain: bool,
    properties: bytes = b"",
    expires_at: float = 0.0,
) -> Publication:
    """A publication of one message from its parts."""
    v5 = bool(properties)
    head = len(topic).to_bytes(2, "big") + topic
    if qos:
        head += b"\x00\x00"
    if v5:
        head += encode_varint(len(properties)) + properties
    flags = (qos << 1) | (RETAIN_FLAG if retain else 0)
    packet = bytes([0x30 | flags]) + encode_varint(len(head) + len(payload)) + head + payload
    head_size = len(head) - (2 if qos else 0)
    return Publication(topic, packet, 1, len(packet), v5, head_size, properties, expires_at, expires_at == 0)


def build_all(topic: bytes, payloads: list[bytes], qos: int, retain: bool, properties: bytes = b"") -> list[Publication]:
    """Publications of many messages from their parts: as few as their sizes allow."""
    found: list[Publication] = []
    start = 0
    while start < len(payloads):
        stop = start + 1
        size = len(payloads[start])
        limit = start + MAX_BUILT_BYTES // (size + 1) + 1
        while stop < len(payloads) and stop < limit and len(payloads[stop]) == size:
            stop += 1
        one = build(topic, payloads[start], qos, retain, properties)
        if stop == start + 1:
            found.append(one)
        else:
            lead = one.packets[: len(one.packets) - size]
            packets = lead + lead.join(payloads[start:stop])
            found.append(Publication(topic, packets, stop - start, one.stride, one.v5, one.head_size, properties, 0.0, True))
        start = stop
    return found


def _varint_size(packet: bytes) -> int:
    if packet[1] < 0x80:
        return 1
    if packet[2] < 0x80:
        return 2
    if packet[3] < 0x80:
        return 3
    return 4

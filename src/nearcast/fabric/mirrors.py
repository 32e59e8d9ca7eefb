"""What a gateway learns of a client's session by watching both directions of its stream, so that it can be made again.

A :class:`Mirror` sees every packet once, at the moment it is passed on: ``outgoing`` towards the broker, ``incoming`` towards
the client. It keeps the CONNECT, the subscriptions that were granted, requests without an answer, messages that are not
acknowledged, and topic aliases; QoS 0 messages only pass by. When a broker is lost without a handover, :meth:`Mirror.facts` is
what the next one is told (RESUME), and :meth:`Mirror.unanswered` what the client still waits for and is sent again on its
behalf (section 4.4 of MQTT 5.0).

A mirror refuses nothing: whether a packet is right is the broker's to say. It never waits and knows no broker.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Connect,
    Publish,
    SubAck,
    Subscribe,
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.records import blob, number
from nearcast.mqtt.wire import (
    AUTH,
    CONNACK,
    DISCONNECT,
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
)

DUPLICATE: Final = 0x08
TOPIC_ALIAS: Final = b"\x23"
REFUSED: Final = 0x80

MAX_LOST: Final = 8
"""Brokers that a client was lost at and that are remembered, in case they come back with messages for it."""

# How far a message is that was sent to the client and is not acknowledged.
AT_LEAST_ONCE: Final = 1
EXACTLY_ONCE: Final = 2
RECORDED: Final = 3
"""PUBREC came, PUBREL is to come or came, PUBCOMP did not."""


def packet_end(data: bytes, position: i64, end: i64) -> i64:
    """Where the packet at ``position`` ends, which may be behind ``end``; 0 while its length is not complete."""
    length: i64 = 0
    shift: i64 = 0
    at: i64 = position + 1
    while at < end:
        byte: i64 = data[at]
        at += 1
        length |= (byte & 127) << shift
        if byte < 128:
            return at + length
        if shift == 21:
            raise malformed("remaining length is longer than four bytes")
        shift += 7
    return 0


def body_start(data: bytes, position: i64) -> i64:
    """Where the body of a whole packet begins."""
    at: i64 = position + 1
    while data[at] >= 128:
        at += 1
    return at + 1


class Cutter:
    """Cuts a stream at packet boundaries: bytes in, runs of whole packets out. What is not whole waits, up to one packet."""

    def __init__(self, max_packet_bytes: int) -> None:
        self.max_packet_bytes = max_packet_bytes
        self._kept: bytearray | None = None
        self._needed_bytes = 0

    @property
    def kept_bytes(self) -> int:
        """Bytes of a packet that is not whole."""
        kept = self._kept
        return 0 if kept is None else len(kept)

    def feed(self, data: bytes) -> bytes:
        """The packets that are whole now; RemoteProtocolError for one that is too large or has no length."""
        kept = self._kept
        if kept is not None:
            kept += data
            if len(kept) < self._needed_bytes:
                return b""
            data = bytes(kept)
            self._kept = None
        end: i64 = len(data)
        position: i64 = 0
        limit: i64 = self.max_packet_bytes
        needed: i64 = 0
        while position < end:
            stop = packet_end(data, position, end)
            if stop == 0:
                needed = end - position + 1
                break
            if stop - position > limit:
                message = f"a packet of {stop - position} bytes is more than the {limit} accepted"
                raise RemoteProtocolError(reasons.PACKET_TOO_LARGE, message)
            if stop > end:
                needed = stop - position
                break
            position = stop
        if position == end:
            return data
        self._kept = bytearray(data[position:])
        self._needed_bytes = needed
        return data[:position]


class Mirror:
    """See the module. ``connected`` from a CONNACK that let the client in; ``leaving`` once either side said DISCONNECT."""

    def __init__(self, connect: bytes) -> None:
        self.connect = connect
        self.version = 0
        self.client_id = ""
        self.username: str | None = None
        self.keep_alive_seconds = 0
        self.connected = False
        self.leaving = False
        self.authenticating = False
        #: Topic filter -> options as in journal records, subscription identifier.
        self.subscriptions: dict[str, tuple[int, int]] = {}
        #: What the client sent and has no answer to, by packet identifier, oldest first.
        self.requests: dict[int, bytes] = {}
        self.publishes: dict[int, bytes] = {}
        self.releases: dict[int, bytes] = {}
        #: QoS 2 messages of the client that the broker has and the client has not released.
        self.received: set[int] = set()
        self.pings = 0
        self.kept_bytes = 0
        #: What the client was sent and has not acknowledged.
        self.delivered: dict[int, int] = {}
        #: The same, of a broker that is lost: its acknowledgements concern nobody any more, or are given here.
        self.stale: set[int] = set()
        self.orphans: dict[int, int] = {}
        self.aliases: dict[int, bytes] = {}
        #: Brokers that the client was lost at, and which QoS 2 messages it had by then: each may come back with more of them.
        self.lost_at: dict[str, bytes] = {}
        self.alias_maximum = 0
        #: Aliases that the broker does not know, because the message that defined them went to another one.
        self.unknown_aliases: set[int] = set()
        #: Whether the client does not want its own messages of some topic.
        self.no_local = False
        self.messages_out = 0
        self.messages_in = 0
        self._answers: list[bytes] = []
        self._begin(connect)

    def _begin(self, connect: bytes) -> None:
        try:
            packet = decode(connect[0], connect[body_start(connect, 0) :], MQTT_5)
        except RemoteProtocolError:
            return  # the broker says what is wrong with it
        if isinstance(packet, Connect):
            self.version = packet.version
            self.client_id = packet.client_id
            self.username = packet.username
            self.keep_alive_seconds = packet.keep_alive
            self.authenticating = packet.properties is not None and packet.properties.authentication_method is not None

    @property
    def resumable(self) -> bool:
        """Whether another broker can go on with this client. Not in the middle of an authentication: its steps cannot be
        repeated without the client."""
        return self.connected and not self.leaving and not self.authenticating

    @property
    def at_rest(self) -> bool:
        """Whether no exchange between the client and its broker is under way."""
        waits = self.publishes or self.releases or self.requests or self.received or self.delivered
        return not waits and not self.pings

    # --- towards the broker ---------------------------------------------------------------------------------------------

    def outgoing(self, run: bytes) -> bytes:
        """Whole packets leave for the broker; returns them without those that are no business of this broker."""
        position: i64 = 0
        end: i64 = len(run)
        swallowed: list[tuple[int, int]] | None = None
        while position < end:
            stop = packet_end(run, position, end)
            kind = run[position] >> 4
            if kind == PUBLISH:
                self.messages_in += 1
                if run[position] & 6 or (self.alias_maximum and self.version >= MQTT_5):
                    self._published(run, position, stop)
            elif self._sent(kind, run, position, stop):
                if swallowed is None:
                    swallowed = []
                swallowed.append((position, stop))
            position = stop
        return run if swallowed is None else without(run, swallowed)

    def _published(self, run: bytes, position: i64, stop: i64) -> None:
        qos: i64 = run[position] >> 1 & 3
        at: i64 = body_start(run, position)
        if at + 2 > stop:
            return
        topic_size: i64 = run[at] << 8 | run[at + 1]
        topic_at: i64 = at + 2
        at = topic_at + topic_size
        packet_id = 0
        if qos:
            if at + 2 > stop:
                return
            packet_id = run[at] << 8 | run[at + 1]
            at += 2
        raw: bytes | None = None
        if self.alias_maximum and self.version >= MQTT_5 and at < stop and run[at]:
            properties_end: i64 = at + 1 + run[at] if run[at] < 128 else stop
            if run.find(TOPIC_ALIAS, at + 1, properties_end) >= 0:
                raw = self._aliased(run[position:stop], qos)
        if qos:
            if raw is None:
                raw = run[position:stop]
            before = self.publishes.get(packet_id)
            if before is not None:
                self.kept_bytes -= len(before)
            self.publishes[packet_id] = raw
            self.kept_bytes += len(raw)

    def _aliased(self, raw: bytes, qos: i64) -> bytes | None:
        """Learn a topic alias. Returns the packet with the topic in its place, because by the time it is sent again, the alias
        may stand for another one."""
        try:
            packet = decode(raw[0], raw[body_start(raw, 0) :], self.version)
        except RemoteProtocolError:
            return None
        if not isinstance(packet, Publish) or packet.properties is None or packet.properties.topic_alias is None:
            return None
        alias = packet.properties.topic_alias
        if packet.topic:
            if 0 < alias <= self.alias_maximum:
                self.aliases[alias] = packet.topic.encode("utf-8")
        elif alias not in self.aliases:
            return None
        if not qos:
            return None
        packet.topic = self.aliases[alias].decode("utf-8") if not packet.topic else packet.topic
        packet.properties.topic_alias = None
        return encode(packet, self.version)

    def has_alias(self, run: bytes, position: i64, stop: i64) -> bool:
        """Whether a PUBLISH may have a topic alias. A payload's bytes are not looked at."""
        if not self.alias_maximum or self.version < MQTT_5:
            return False
        at: i64 = body_start(run, position)
        if at + 2 > stop:
            return False
        at += 2 + (run[at] << 8 | run[at + 1]) + (2 if run[position] & 6 else 0)
        if at >= stop or not run[at]:
            return False
        properties_end: i64 = at + 1 + run[at] if run[at] < 128 else stop
        return run.find(TOPIC_ALIAS, at + 1, properties_end) >= 0

    def without_unreliable(self, run: bytes) -> bytes:
        """Packets without PUBLISH at QoS 0, but for those that may define a topic alias, which later ones use. The last packet
        stays if it is not whole: nobody can have acted on that."""
        kept: list[bytes] = []
        position: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            if stop == 0 or stop > end:
                kept.append(run[position:])
                break
            if run[position] & 0xF6 != PUBLISH << 4 or self.has_alias(run, position, stop):
                kept.append(run[position:stop])
            position = stop
        return b"".join(kept)

    def unaliased(self, raw: bytes) -> Publish | None:
        """A PUBLISH that uses or defines a topic alias, with the topic in its place; none if it is no such packet, or a wrong
        one."""
        try:
            packet = decode(raw[0], raw[body_start(raw, 0) :], self.version)
        except RemoteProtocolError:
            return None
        if not isinstance(packet, Publish) or packet.properties is None or packet.properties.topic_alias is None:
            return None
        alias = packet.properties.topic_alias
        if not 0 < alias <= self.alias_maximum or not (packet.topic or alias in self.aliases):
            return None
        if not packet.topic:
            packet.topic = self.aliases[alias].decode("utf-8")
        return packet

    def sent_aliased(self, packet: Publish, raw: bytes, to_home: bool) -> bytes:
        """What :meth:`unaliased` found leaves for the broker, or for another one, which is told no aliases: returns it as it
        is to leave, or nothing where that is as it came."""
        properties = packet.properties
        if properties is None or properties.topic_alias is None:
            return b""
        alias = properties.topic_alias
        at = body_start(raw, 0)
        defines = raw[at] != 0 or raw[at + 1] != 0
        if to_home:
            was_unknown = alias in self.unknown_aliases
            self.unknown_aliases.discard(alias)
            return encode(packet, self.version) if was_unknown and not defines else b""
        if defines:
            self.aliases[alias] = packet.topic.encode("utf-8")
            self.unknown_aliases.add(alias)
        properties.topic_alias = None
        return encode(packet, self.version)

    def _sent(self, kind: int, run: bytes, position: i64, stop: i64) -> bool:
        """Anything but a PUBLISH; true when it is not to be passed on."""
        at = body_start(run, position)
        if kind == PINGREQ:
            self.pings += 1
            return False
        if kind == DISCONNECT:
            self.leaving = True
            return False
        if kind == AUTH:
            self.authenticating = True
            return False
        if at + 2 > stop:
            return False
        packet_id = run[at] << 8 | run[at + 1]
        if kind == PUBACK:
            if packet_id in self.stale:
                self.stale.discard(packet_id)
                return True
            self.delivered.pop(packet_id, None)
        elif kind == PUBREC:
            return self._recorded(packet_id, at + 2 < stop and run[at + 2] >= REFUSED)
        elif kind == PUBCOMP:
            if packet_id in self.orphans:
                del self.orphans[packet_id]
                return True
            self.delivered.pop(packet_id, None)
        elif kind == PUBREL:
            self.received.discard(packet_id)
            self.releases[packet_id] = run[position:stop]
        elif kind in (SUBSCRIBE, UNSUBSCRIBE):
            before = self.requests.get(packet_id)
            if before is not None:
                self.kept_bytes -= len(before)
            self.requests[packet_id] = run[position:stop]
            self.kept_bytes += stop - position
        return False

    def _recorded(self, packet_id: int, refused: bool) -> bool:
        if packet_id in self.orphans:
            if refused:
                del self.orphans[packet_id]
            else:
                self.orphans[packet_id] = RECORDED
                self._answers.append(release(packet_id))
            return True
        if packet_id in self.delivered:
            if refused:
                del self.delivered[packet_id]
            else:
                self.delivered[packet_id] = RECORDED
        return False

    def take_answers(self) -> list[bytes]:
        """Packets for the client that the gateway says in the place of a broker that is lost."""
        answers = self._answers
        if answers:
            self._answers = []
        return answers

    # --- towards the client ---------------------------------------------------------------------------------------------

    def incoming(self, run: bytes) -> None:
        """Whole packets leave for the client."""
        position: i64 = 0
        end: i64 = len(run)
        while position < end:
            stop = packet_end(run, position, end)
            kind = run[position] >> 4
            if kind == PUBLISH:
                self.messages_out += 1
                if run[position] & 6:
                    self._delivered(run, position, stop)
            else:
                self._answered(kind, run, position, stop)
            position = stop

    def _delivered(self, run: bytes, position: i64, stop: i64) -> None:
        at: i64 = body_start(run, position)
        if at + 2 > stop:
            return
        at += 2 + (run[at] << 8 | run[at + 1])
        if at + 2 <= stop:
            packet_id = run[at] << 8 | run[at + 1]
            self.delivered[packet_id] = run[position] >> 1 & 3

    def _answered(self, kind: int, run: bytes, position: i64, stop: i64) -> None:
        at = body_start(run, position)
        if kind == PINGRESP:
            self.pings = max(0, self.pings - 1)
            return
        if kind == DISCONNECT:
            self.leaving = True
            return
        if kind == AUTH:
            self.authenticating = at < stop and run[at] != 0
            return
        if kind == CONNACK:
            self._accepted(run[position:stop])
            return
        if at + 2 > stop:
            return
        packet_id = run[at] << 8 | run[at + 1]
        refused = at + 2 < stop and run[at + 2] >= REFUSED
        if kind in (PUBACK, PUBREC):
            raw = self.publishes.pop(packet_id, None)
            if raw is not None:
                self.kept_bytes -= len(raw)
                if kind == PUBREC and not refused:
                    self.received.add(packet_id)
        elif kind == PUBCOMP:
            self.releases.pop(packet_id, None)
        elif kind == PUBREL:
            self.delivered[packet_id] = RECORDED  # perhaps of a message from before this connection
        elif kind in (SUBACK, UNSUBACK):
            request = self.requests.pop(packet_id, None)
            if request is not None:
                self.kept_bytes -= len(request)
                self.granted(request, run[position:stop])

    def _accepted(self, raw: bytes) -> None:
        try:
            packet = decode(raw[0], raw[body_start(raw, 0) :], self.version or MQTT_5)
        except RemoteProtocolError:
            return
        if not isinstance(packet, ConnAck) or packet.reason_code >= REFUSED:
            return
        self.connected = True
        self.authenticating = False
        properties = packet.properties
        if properties is not None:
            if properties.assigned_client_identifier is not None:
                self.client_id = properties.assigned_client_identifier
            if properties.topic_alias_maximum is not None:
                self.alias_maximum = properties.topic_alias_maximum

    def granted(self, request: bytes, answer: bytes) -> None:
        """A SUBACK or UNSUBACK came for a request."""
        version = self.version
        try:
            asked = decode(request[0], request[body_start(request, 0) :], version)
            told = decode(answer[0], answer[body_start(answer, 0) :], version)
        except RemoteProtocolError:
            return
        if isinstance(asked, Subscribe) and isinstance(told, SubAck):
            identifier = 0
            if asked.properties is not None and asked.properties.subscription_identifiers:
                identifier = asked.properties.subscription_identifiers[0]
            for item, code in zip(asked.subscriptions, told.reason_codes, strict=False):
                if code < REFUSED:
                    options = code | (4 if item.no_local else 0) | (8 if item.retain_as_published else 0)
                    self.no_local = self.no_local or item.no_local
                    self.subscriptions[item.topic_filter] = (options | item.retain_handling << 4, identifier)
        elif isinstance(asked, Unsubscribe) and isinstance(told, UnsubAck):
            codes = told.reason_codes or [0] * len(asked.topic_filters)
            for topic_filter, code in zip(asked.topic_filters, codes, strict=False):
                if code < REFUSED:
                    self.subscriptions.pop(topic_filter, None)

    def found(self, subscriptions: list[tuple[str, int, int]], received: list[int]) -> None:
        """What the client's session has from before its connection."""
        for topic_filter, options, identifier in subscriptions:
            self.subscriptions[topic_filter] = (options, identifier)
            self.no_local = self.no_local or (options & 4) != 0
        self.received.update(received)

    # --- when a broker is lost ------------------------------------------------------------------------------------------

    def facts(self) -> bytes:
        """The fields of RESUME behind the transport's: what the next broker needs to know."""
        self.unknown_aliases.clear()
        parts = [
            blob(self.connect),
            blob(self.client_id.encode("utf-8")),
            number(len(self.subscriptions)),
        ]
        for topic_filter, (options, identifier) in self.subscriptions.items():
            parts.append(blob(topic_filter.encode("utf-8")) + number(options) + number(identifier))
        # Those being released are sent again right behind; the broker is to answer them as ones it knows.
        parts.append(blob(identifiers([*self.received, *self.releases])))
        parts.append(blob(self._unreleased()))
        parts.append(number(len(self.aliases)))
        for alias, topic in self.aliases.items():
            parts.append(number(alias) + blob(topic))
        parts.append(number(len(self.lost_at)))
        for name, had in self.lost_at.items():
            parts.append(blob(name.encode("utf-8")) + blob(had))
        return b"".join(parts)

    def _unreleased(self) -> bytes:
        """Identifiers of QoS 2 messages that were passed on to the client and are not complete."""
        return identifiers([packet_id for packet_id, state in self.delivered.items() if state != AT_LEAST_ONCE])

    def remember_lost(self, broker: str) -> None:
        """The client was at this broker, or about to be, and goes on without it: call this before :meth:`lost`."""
        self.lost_at.pop(broker, None)
        self.lost_at[broker] = self._unreleased()
        if len(self.lost_at) > MAX_LOST:
            del self.lost_at[next(iter(self.lost_at))]

    def lost(self, complete_here: bool) -> None:
        """The broker is gone. What the client acknowledges of it from now on is not for the next one, except QoS 2 exchanges
        that the next one was told of; with ``complete_here`` those are brought to their end by the gateway itself."""
        for packet_id, state in self.delivered.items():
            if state == AT_LEAST_ONCE:
                self.stale.add(packet_id)
            elif complete_here:
                self.orphans[packet_id] = state
                if state == RECORDED:
                    self._answers.append(release(packet_id))
        if complete_here:
            self.delivered.clear()
        else:
            self.delivered = {identifier: state for identifier, state in self.delivered.items() if state != AT_LEAST_ONCE}

    def unanswered(self) -> list[bytes]:
        """What the client sent and waits to be answered, to be sent again: releases, messages (as duplicates), requests."""
        again = list(self.releases.values())
        for raw in self.publishes.values():
            again.append(bytes((raw[0] | DUPLICATE,)) + raw[1:])
        again.extend(self.requests.values())
        for _ in range(self.pings):
            again.append(b"\xc0\x00")
        return again


def identifiers(packet_ids: list[int]) -> bytes:
    """Packet identifiers as in journal records."""
    return b"".join([packet_id.to_bytes(2, "big") for packet_id in sorted(set(packet_ids))])


def release(packet_id: int) -> bytes:
    """A PUBREL."""
    return b"\x62\x02" + packet_id.to_bytes(2, "big")


def without(run: bytes, spans: list[tuple[int, int]]) -> bytes:
    """``run`` without these spans of it."""
    parts: list[bytes] = []
    position = 0
    for start, stop in spans:
        if start > position:
            parts.append(run[position:start])
        position = stop
    if position < len(run):
        parts.append(run[position:])
    return b"".join(parts)

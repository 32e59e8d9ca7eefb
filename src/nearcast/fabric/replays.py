"""EMMA's replay of control packets (section IV-C): a client's connection to a broker that is not part of a fabric, made again.

Such a broker knows nothing of handovers, so the gateway plays the client: it says CONNECT as the client did, subscribes to
what the client has subscribed to, and takes the answers for itself. A :class:`Replay` is that conversation: packets to send,
and a filter over what the broker sends until it is over. A PINGREQ behind the subscriptions marks its end.

Retained messages are not wanted again. MQTT 5 has a word for that (Retain Handling 2); for MQTT 3 those that carry the RETAIN
flag before the mark can only be an answer to the subscriptions here, and are acknowledged and left out.
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric.mirrors import REFUSED, Mirror, body_start, packet_end
from nearcast.mqtt.codec import decode, encode
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Disconnect,
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
from nearcast.mqtt.wire import CONNACK, PINGRESP, PUBLISH, PUBREL, SUBACK, UNSUBACK

FILTERS_PER_PACKET: Final = 50
PING: Final = b"\xc0\x00"

# States of a replay.
CONNECTING: Final = 0
SUBSCRIBING: Final = 1
DONE: Final = 2
FAILED: Final = 3


class Replay:
    """See the module. ``retained`` counts what was left out, ``refused`` the subscriptions that this broker does not grant."""

    def __init__(self, mirror: Mirror) -> None:
        self.state = CONNECTING
        self.failure = ""
        self.retained = 0
        self.refused = 0
        self._mirror = mirror
        self._version = mirror.version
        self._awaited: set[int] = set()
        self._releasing: set[int] = set()
        self._subscribed: dict[str, tuple[int, int]] = {}
        self._identifiers = FreeIdentifiers(mirror)
        self._to_send: list[bytes] = [mirror.connect]

    @property
    def over(self) -> bool:
        """Whether nothing that the broker sends can be part of this any more."""
        return self.state == DONE and not self._awaited and not self._releasing

    def take(self) -> list[bytes]:
        """What to send to the broker now."""
        taken, self._to_send = self._to_send, []
        return taken

    def filter(self, run: bytes) -> bytes:
        """Packets of the broker came; returns those that are the client's."""
        kept: list[bytes] = []
        position = 0
        end = len(run)
        while position < end:
            stop = int(packet_end(run, position, end))
            packet = run[position:stop]
            if self.state == FAILED or not self._takes(packet):
                kept.append(packet)
            position = stop
        return b"".join(kept)

    def _takes(self, raw: bytes) -> bool:
        """Whether a packet is part of this conversation."""
        kind = raw[0] >> 4
        if self.state == CONNECTING:
            if kind == CONNACK:
                self._connected(raw)
            return True
        if kind == PUBREL and self._releasing:
            packet = self._decoded(raw)
            if isinstance(packet, PubRel) and packet.packet_id in self._releasing:
                self._releasing.discard(packet.packet_id)
                self._to_send.append(encode(PubComp(packet.packet_id), self._version))
                return True
            return False
        if kind in (SUBACK, UNSUBACK) and self._awaited:
            answer = self._decoded(raw)
            if isinstance(answer, (SubAck, UnsubAck)) and answer.packet_id in self._awaited:
                self._awaited.discard(answer.packet_id)
                self.refused += len([code for code in answer.reason_codes if code >= REFUSED])
                return True
            return False
        if self.state == DONE:
            return False
        if kind == PINGRESP:
            self.state = DONE
            return True
        if kind == PUBLISH and self._version < MQTT_5 and raw[0] & 1:
            self._leave_out(raw)
            return True
        return False

    def _decoded(self, raw: bytes) -> object:
        try:
            return decode(raw[0], raw[int(body_start(raw, 0)) :], self._version)
        except RemoteProtocolError:
            return None

    def _connected(self, raw: bytes) -> None:
        answer = self._decoded(raw)
        if not isinstance(answer, ConnAck) or answer.reason_code >= REFUSED:
            self.state = FAILED
            self.failure = "the broker does not answer as MQTT"
            if isinstance(answer, ConnAck):
                self.failure = f"the broker refuses the client with reason code {answer.reason_code:#04x}"
            return
        self.state = SUBSCRIBING
        self._subscribed = dict(self._mirror.subscriptions)
        self._to_send.extend(self._subscriptions(self._subscribed))
        self._to_send.append(PING)

    def catch_up(self) -> None:
        """The client takes its place at this broker: subscriptions that changed since are brought up to date."""
        wanted = self._mirror.subscriptions
        gone = [topic_filter for topic_filter in self._subscribed if topic_filter not in wanted]
        for start in range(0, len(gone), FILTERS_PER_PACKET):
            packet_id = self._identifiers.take()
            self._awaited.add(packet_id)
            self._to_send.append(encode(Unsubscribe(packet_id, gone[start : start + FILTERS_PER_PACKET]), self._version))
        new = {topic_filter: how for topic_filter, how in wanted.items() if self._subscribed.get(topic_filter) != how}
        self._to_send.extend(self._subscriptions(new))

    def _subscriptions(self, wanted: dict[str, tuple[int, int]]) -> list[bytes]:
        by_identifier: dict[int, list[SubscriptionRequest]] = {}
        for topic_filter, (options, identifier) in wanted.items():
            request = SubscriptionRequest(topic_filter, options & 3, bool(options & 4), bool(options & 8), 2)
            by_identifier.setdefault(identifier, []).append(request)
        packets: list[bytes] = []
        for identifier, requests in by_identifier.items():
            properties = Properties(subscription_identifiers=[identifier]) if identifier else None
            for start in range(0, len(requests), FILTERS_PER_PACKET):
                packet_id = self._identifiers.take()
                self._awaited.add(packet_id)
                some = requests[start : start + FILTERS_PER_PACKET]
                packets.append(encode(Subscribe(packet_id, some, properties), self._version))
        return packets

    def _leave_out(self, raw: bytes) -> None:
        packet = self._decoded(raw)
        self.retained += 1
        if not isinstance(packet, Publish):
            return
        if packet.qos == 1:
            self._to_send.append(encode(PubAck(packet.packet_id), self._version))
        elif packet.qos == 2:
            self._releasing.add(packet.packet_id)
            self._to_send.append(encode(PubRec(packet.packet_id), self._version))


class Farewell:
    """The conversation with a broker that a client is moved away from: unsubscribe, wait for the mark, say DISCONNECT."""

    def __init__(self, mirror: Mirror) -> None:
        self.done = False
        self._version = mirror.version
        self._awaited: set[int] = set()
        self._pings_before = mirror.pings
        self.packets: list[bytes] = []
        filters = list(mirror.subscriptions)
        identifiers = FreeIdentifiers(mirror)
        for start in range(0, len(filters), FILTERS_PER_PACKET):
            packet_id = identifiers.take()
            self._awaited.add(packet_id)
            self.packets.append(encode(Unsubscribe(packet_id, filters[start : start + FILTERS_PER_PACKET]), self._version))
        self.packets.append(PING)

    def filter(self, run: bytes) -> bytes:
        """Packets of the broker came; returns those that are the client's."""
        kept: list[bytes] = []
        position = 0
        end = len(run)
        while position < end:
            stop = int(packet_end(run, position, end))
            packet = run[position:stop]
            if self.done or not self._takes(packet):
                kept.append(packet)
            position = stop
        return b"".join(kept)

    def _takes(self, raw: bytes) -> bool:
        kind = raw[0] >> 4
        if kind == UNSUBACK:
            try:
                answer = decode(raw[0], raw[int(body_start(raw, 0)) :], self._version)
            except RemoteProtocolError:
                return False
            if isinstance(answer, UnsubAck) and answer.packet_id in self._awaited:
                self._awaited.discard(answer.packet_id)
                return True
        elif kind == PINGRESP:
            if self._pings_before:
                self._pings_before -= 1  # the client's own come first
                return False
            self.done = True
            return True
        return False


def goodbye(version: int) -> bytes:
    """A DISCONNECT that publishes no will."""
    return encode(Disconnect(), version)


class FreeIdentifiers:
    """Packet identifiers that the client does not use now, from the top, where clients come last."""

    def __init__(self, mirror: Mirror) -> None:
        self._mirror = mirror
        self._next = 65_535

    def take(self) -> int:
        mirror = self._mirror
        while True:
            packet_id = self._next
            self._next -= 1
            used = packet_id in mirror.publishes or packet_id in mirror.releases or packet_id in mirror.received
            if not used and packet_id not in mirror.requests:
                return packet_id

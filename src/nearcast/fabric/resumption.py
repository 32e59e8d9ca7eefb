"""A client whose broker was lost without a handover goes on at another one, with what its gateway knows.

RESUME has the client's CONNECT, which is judged here as any CONNECT is, and what the gateway saw of the session: granted
subscriptions, QoS 2 exchanges that are not finished, topic aliases. If the session is found, here or at a broker that has it
(:mod:`nearcast.fabric.presence`), it goes on; else it is made of these facts. The client is told nothing: it gets no CONNACK
and no retained messages, and then from its gateway what it still waits for.

What the lost broker had queued for the client, or had not yet sent, follows when that broker is back with its journal
(:mod:`nearcast.fabric.leftovers`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt import records
from nearcast.mqtt.codec import decode
from nearcast.mqtt.connection import Connection, Resumption
from nearcast.mqtt.decoding import claimed_version
from nearcast.mqtt.packets import Connect
from nearcast.mqtt.records import Fields, number
from nearcast.mqtt.session import MAX_PACKET_ID, RELEASED, Session, packet_ids_of
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import filter_fault, parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.trunks import Channel


class Resumed(Resumption):
    """What RESUME says. ``connect`` is missing when its CONNECT is none."""

    def __init__(self, fabric: Fabric, channel: Channel, fields: Fields) -> None:
        self._fabric = fabric
        self._channel = channel
        self.connect = _connect(fields.blob())
        client_id = fields.blob().decode("utf-8")
        if self.connect is not None:
            self.connect.client_id = client_id
        self._subscriptions: list[tuple[str, int, int]] = []
        for _ in range(fields.number()):
            topic_filter = fields.blob().decode("utf-8")
            options = fields.number()
            self._subscriptions.append((topic_filter, options, fields.number()))
        self._received_ids = fields.blob()
        self._unreleased_ids = fields.blob()
        if len(self._received_ids) % 2 or len(self._unreleased_ids) % 2:
            raise ValueError("half a packet identifier")
        self._aliases: dict[int, bytes] = {}
        for _ in range(fields.number()):
            alias = fields.number()
            self._aliases[alias] = fields.blob()
        self._lost_at: list[tuple[str, bytes]] = []
        for _ in range(fields.number()):
            name = fields.blob().decode("utf-8")
            self._lost_at.append((name, fields.blob()))
            if len(self._lost_at[-1][1]) % 2:
                raise ValueError("half a packet identifier")

    def accepted(self, connection: Connection, session: Session, present: bool, now: float) -> None:
        if not present:
            # Identifiers of the lost broker may still be acknowledged: begin somewhere else.
            session.next_id = self._fabric.rng.randrange(1, MAX_PACKET_ID)
        before = list(session.subscriptions)
        self._subscribe(connection, session)
        self._fabric.leftovers.resumed(session, self._lost_at, before, now)
        known = session.received_ids or set()
        fresh = [packet_id for packet_id in packet_ids_of(self._received_ids) if packet_id not in known]
        if fresh:
            session.remember(b"".join([packet_id.to_bytes(2, "big") for packet_id in fresh]))
        self._release(session)
        connection.aliases_in = dict(self._aliases) or None
        self._channel.trunk.link.send_held(frame(frames.RESUMED, number(self._channel.number), number(1 if present else 0)))

    def _subscribe(self, connection: Connection, session: Session) -> None:
        engine = self._fabric.engine
        authorizer = engine.requests.authorizer
        limits = self._fabric.limits
        for topic_filter, options, identifier in self._subscriptions:
            _, inner = parse_shared(topic_filter)
            if topic_filter in session.subscriptions or filter_fault(inner, limits.max_topic_levels):
                continue
            if authorizer is not None and not authorizer.may_subscribe(session.client_id, connection.username, topic_filter):
                continue
            subscription = Subscription(
                session,
                topic_filter,
                min(options & 3, connection.max_qos),
                (options & 4) != 0,
                (options & 8) != 0,
                (options >> 4) & 3,
                identifier,
            )
            engine.sessions.subscribe(session, subscription)

    def _release(self, session: Session) -> None:
        """QoS 2 messages that the client was sent and this broker does not have: only their end is missing. Until then their
        identifiers are in use, because the client would take another message for the same one."""
        released: list[bytes] = []
        for packet_id in packet_ids_of(self._unreleased_ids):
            if packet_id and packet_id not in session.inflight:
                session.inflight[packet_id] = RELEASED
                released.append(packet_id.to_bytes(2, "big"))
        if released:
            session.effects.stats.inflight_messages += len(released)
            if session.durable:
                session.effects.records.append(records.released(session.number, b"".join(released)))


def _connect(raw: bytes) -> Connect | None:
    position = 1
    while position < len(raw) and raw[position] & 0x80:
        position += 1
    body = raw[position + 1 :]
    try:
        packet = decode(raw[0], body, claimed_version(body)) if raw else None
    except RemoteProtocolError:
        return None
    return packet if isinstance(packet, Connect) else None

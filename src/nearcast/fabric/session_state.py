"""A session, and what its client's connection agreed on, as bytes that another broker makes the same of.

All that MQTT calls session state goes along (section 4.1): subscriptions, messages in flight with their identifiers, the queue
in its order, identifiers of QoS 2 messages that were received, the will, the expiry. Messages keep their identity: origins are
written by name. Times are written as what is left of them, because the clocks of brokers differ.

The two parts are apart because a session may travel without a connection (its client is away).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric.trunks import peer_fields, read_peer
from nearcast.mqtt import records
from nearcast.mqtt.access import Peer as TransportPeer
from nearcast.mqtt.connection import Connection, form_flags
from nearcast.mqtt.packets import Will
from nearcast.mqtt.properties import WILL_PROPERTIES, decode_properties, encode_properties
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields, blob, number, terms_fields, text
from nearcast.mqtt.session import RELEASED, Pending, Sent, Session, Unsent, packet_ids_of
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import filter_fault, parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

VERSION: Final = 2

_V5: Final = 1
_FORWARDABLE: Final = 2


class _Table:
    """The publications that a session refers to, each once, and of each only the stretch that is needed."""

    def __init__(self) -> None:
        self.indexes: dict[int, int] = {}
        self.publications: list[Publication] = []
        self.first: list[int] = []
        self.last: list[int] = []

    def need(self, publication: Publication, start: int, count: int) -> None:
        index = self.indexes.get(id(publication))
        if index is None:
            self.indexes[id(publication)] = len(self.publications)
            self.publications.append(publication)
            self.first.append(start)
            self.last.append(start + count)
        else:
            self.first[index] = min(self.first[index], start)
            self.last[index] = max(self.last[index], start + count)

    def place(self, publication: Publication, start: int) -> bytes:
        """Where a message of a publication is found in the table."""
        index = self.indexes[id(publication)]
        return number(index) + number(start - self.first[index])


def encode_session(fabric: Fabric, session: Session, now: float) -> bytes:
    """Everything of a session."""
    table = _Table()
    for packet_id, sent in session.inflight.items():
        if sent is not RELEASED:
            table.need(sent.publication, sent.start + packet_id - sent.first_id, 1)
    if session.queue is not None:
        for pending in session.queue:
            table.need(pending.publication, pending.start, pending.count)
    parts = [number(VERSION), blob(session.client_id.encode("utf-8")), text(session.username)]
    parts.append(number(session.stamp))
    parts.append(number(session.expiry_seconds))
    parts.append(_left(session.expires_at, now))
    will = session.will
    if will is None:
        parts.append(b"\x00")
    else:
        parts.append(b"\x01")
        parts.append(_left(session.will_due_at, now))
        parts.append(blob(will.topic.encode("utf-8")))
        parts.append(blob(will.payload))
        parts.append(number(will.qos | (4 if will.retain else 0)))
        parts.append(blob(encode_properties(will.properties)))
    parts.append(number(session.next_id))
    parts.append(encode_subscriptions(session))
    parts.append(number(len(table.publications)))
    for index, publication in enumerate(table.publications):
        first = table.first[index]
        count = table.last[index] - first
        if count < publication.count:
            publication = publication.cut(first, count)
        parts.append(_publication_fields(fabric, publication, now))
    parts.append(number(len(session.inflight)))
    for packet_id, sent in session.inflight.items():
        parts.append(number(packet_id))
        if sent is RELEASED:
            parts.append(b"\x00")
        else:
            parts.append(b"\x01")
            parts.append(table.place(sent.publication, sent.start + packet_id - sent.first_id))
            parts.append(terms_fields(sent.terms))
    queue = session.queue
    parts.append(number(0 if queue is None else len(queue)))
    if queue is not None:
        for pending in queue:
            parts.append(table.place(pending.publication, pending.start))
            parts.append(number(pending.count))
            parts.append(terms_fields(pending.terms))
    parts.append(blob(pack_ids(sorted(session.received_ids or set()))))
    unkept = [packet_id for packet_id, mark in (session.marks or {}).items() if mark == 0]
    parts.append(blob(pack_ids(unkept)))
    unsent = session.unsent
    waiting: list[int] = []
    if unsent is not None:
        waiting = [packet_id for packet_id in unsent.order if packet_id in unsent.waiting]
    parts.append(blob(pack_ids(waiting)))
    parts.append(blob(session.lost))
    return b"".join(parts)


def decode_session(fabric: Fabric, data: bytes, now: float) -> Session:
    """The session as it was, not part of the engine yet (:func:`install`). Raises ``ValueError`` for what makes no sense."""
    fields = Fields(b"\x00" + data)
    version = fields.number()
    if version != VERSION:
        raise ValueError(f"a session in version {version}, {VERSION} is spoken here")
    session = _make(fabric, fields.blob().decode("utf-8"))
    session.username = fields.text()
    session.stamp = fields.number()
    session.expiry_seconds = fields.number()
    session.expires_at = _moment(fields, now)
    if fields.number():
        session.will_due_at = _moment(fields, now)
        topic = fields.blob().decode("utf-8")
        payload = fields.blob()
        flags = fields.number()
        properties, _ = decode_properties(fields.blob(), 0, WILL_PROPERTIES)
        session.will = Will(topic, payload, flags & 3, (flags & 4) != 0, properties)
    session.next_id = fields.number()
    for subscription in decode_subscriptions(fabric, fields, session):
        session.subscriptions[subscription.topic_filter] = subscription
    publications = [_read_publication(fabric, fields, now) for _ in range(fields.number())]
    for _ in range(fields.number()):
        packet_id = fields.number()
        if fields.number() == 0:
            session.inflight[packet_id] = RELEASED
            continue
        publication = _entry(publications, fields.number())
        index = fields.number()
        if index >= publication.count:
            raise ValueError("a message in flight that is not there")
        session.inflight[packet_id] = Sent(publication, index, packet_id, fields.terms())
        session.inflight_bytes += publication.stride
    queue: deque[Pending] = deque()
    for _ in range(fields.number()):
        publication = _entry(publications, fields.number())
        start = fields.number()
        count = fields.number()
        if start + count > publication.count:
            raise ValueError("messages in a queue that are not there")
        queue.append(Pending(publication, start, count, fields.terms()))
        session.queued_messages += count
        session.queued_bytes += count * publication.stride
    session.queue = queue if queue else None
    received = packet_ids_of(fields.blob())
    session.received_ids = set(received) if received else None
    unkept = packet_ids_of(fields.blob())
    session.marks = dict.fromkeys(unkept, 0) if unkept else None
    unsent = packet_ids_of(fields.blob())
    if unsent:
        session.unsent = Unsent(unsent)
    session.lost = fields.blob()
    return session


def install(fabric: Fabric, session: Session, now: float) -> None:
    """Make a decoded session one of this broker's; there must be none of its client. Subscriptions join, records are made."""
    engine = fabric.engine
    sessions = engine.sessions
    stats = engine.stats
    sessions.install(session)
    stats.inflight_messages += len(session.inflight)
    stats.queued_messages += session.queued_messages
    stats.queued_bytes += session.queued_bytes
    for subscription in list(session.subscriptions.values()):
        sessions.subscribe(session, subscription)
    if engine.effects.gated and session.expiry_seconds > 0:
        session.durable = True
        log = engine.effects.records
        referred = [sent.publication for sent in session.inflight.values() if sent is not RELEASED]
        referred.extend([pending.publication for pending in session.queue or []])
        for publication in referred:
            if publication.journal_generation != engine.effects.generation:
                log.append(records.stored(publication, engine.effects))
        log.append(records.session(session, engine.effects.wall_offset, True))
        log.append(records.state(session))
        if session.lost:
            log.append(records.lost(session.number, session.lost))
        for packet_id in session.marks or {}:
            log.append(records.kept(0, session.number, pack_ids([packet_id])))
    sessions.schedule(session, now)


def encode_subscriptions(session: Session) -> bytes:
    """Only a session's subscriptions."""
    parts = [number(len(session.subscriptions))]
    parts.extend([records.subscription_fields(subscription) for subscription in session.subscriptions.values()])
    return b"".join(parts)


def decode_subscriptions(fabric: Fabric, fields: Fields, session: Session) -> list[Subscription]:
    """The opposite, for this session."""
    found: list[Subscription] = []
    for _ in range(fields.number()):
        topic_filter = fields.blob().decode("utf-8")
        options = fields.number()
        identifier = fields.number()
        _, inner = parse_shared(topic_filter)
        fault = filter_fault(inner, fabric.limits.max_topic_levels)
        if fault:
            raise ValueError(fault)
        found.append(
            Subscription(
                session,
                topic_filter,
                options & 3,
                (options & 4) != 0,
                (options & 8) != 0,
                (options >> 4) & 3,
                identifier,
            )
        )
    return found


def encode_connection(connection: Connection) -> bytes:
    """What a client and its broker agreed on, and what of the client's stream is not processed yet."""
    aliases_in = connection.aliases_in or {}
    aliases_out = connection.aliases_out or {}
    parts = [
        peer_fields(connection.peer),
        number(connection.version),
        number(connection.keep_alive_seconds),
        number(connection.packet_limit_bytes),
        number(connection.receive_maximum),
        number(connection.alias_in_maximum),
        number(connection.max_qos),
        number(1 if connection.retain_available else 0),
        number(connection.send_maximum),
        number(connection.max_packet_bytes),
        number(1 if connection.wants_problem_information else 0),
        text(connection.auth_method),
        number(1 if connection.authenticating_again else 0),
        number(connection.alias_out_maximum),
        number(len(aliases_in)),
    ]
    for alias, topic in aliases_in.items():
        parts.append(number(alias) + blob(topic))
    parts.append(number(len(aliases_out)))
    for topic, alias in aliases_out.items():
        parts.append(blob(topic) + number(alias))
    partial = connection.partial
    parts.append(blob(b"" if partial is None else bytes(partial)))
    return b"".join(parts)


class Agreement:
    """What :func:`encode_connection` wrote."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.peer: TransportPeer = read_peer(Fields(b"\x00" + data))

    def apply(self, connection: Connection) -> bytes:
        """Make a new connection what the old one was; returns the bytes of the client that were not processed yet."""
        fields = Fields(b"\x00" + self._data)
        read_peer(fields)
        connection.version = fields.number()
        connection.form_flags = form_flags(connection.version)
        connection.keep_alive_seconds = fields.number()
        connection.packet_limit_bytes = fields.number()
        connection.receive_maximum = fields.number()
        connection.alias_in_maximum = fields.number()
        connection.max_qos = fields.number()
        connection.retain_available = fields.number() != 0
        connection.send_maximum = fields.number()
        connection.max_packet_bytes = fields.number()
        connection.wants_problem_information = fields.number() != 0
        connection.auth_method = fields.text()
        connection.authenticating_again = fields.number() != 0
        connection.alias_out_maximum = fields.number()
        aliases_in: dict[int, bytes] = {}
        for _ in range(fields.number()):
            alias = fields.number()
            aliases_in[alias] = fields.blob()
        connection.aliases_in = aliases_in or None
        aliases_out: dict[bytes, int] = {}
        for _ in range(fields.number()):
            topic = fields.blob()
            aliases_out[topic] = fields.number()
        connection.aliases_out = aliases_out or None
        return fields.blob()


def pack_ids(packet_ids: list[int]) -> bytes:
    """Packet identifiers in their wire form, two bytes each."""
    return b"".join([packet_id.to_bytes(2, "big") for packet_id in packet_ids])


def _left(moment: float, now: float) -> bytes:
    """A deadline as the milliseconds that are left, plus one; 0 when there is none."""
    return number(0 if not moment else max(0, int((moment - now) * 1e3)) + 1)


def _moment(fields: Fields, now: float) -> float:
    left = fields.number()
    return 0.0 if left == 0 else max(now + (left - 1) / 1e3, 1e-9)


def _make(fabric: Fabric, client_id: str) -> Session:
    engine = fabric.engine
    limits = fabric.limits
    session_number = engine.sessions.next_number
    engine.sessions.next_number += 1
    return Session(client_id, session_number, engine.effects, limits.max_queued_messages, limits.max_queued_bytes)


def origin_name(fabric: Fabric, origin: int) -> str:
    """The broker that an origin number means here."""
    return fabric.engine.effects.origin_names[origin] if origin else fabric.name


def origin_number(fabric: Fabric, name: str) -> int:
    """The number that a broker's name has here as an origin."""
    return 0 if name == fabric.name else fabric.engine.effects.origin_number(name)


def _entry(publications: list[Publication], index: int) -> Publication:
    if index >= len(publications):
        raise ValueError("a message that is not there")
    return publications[index]


def _publication_fields(fabric: Fabric, publication: Publication, now: float) -> bytes:
    flags = (_V5 if publication.v5 else 0) | (_FORWARDABLE if publication.raw_flags >= 0 else 0)
    return b"".join(
        (
            blob(origin_name(fabric, publication.origin).encode("utf-8")),
            number(publication.sequence),
            number(flags),
            number(publication.count),
            number(publication.stride),
            number(publication.head_size),
            _left(publication.expires_at, now),
            blob(publication.properties),
            blob(publication.topic),
            blob(publication.packets),
        )
    )


def _read_publication(fabric: Fabric, fields: Fields, now: float) -> Publication:
    origin = fields.blob().decode("utf-8")
    sequence = fields.number()
    flags = fields.number()
    count = fields.number()
    stride = fields.number()
    head_size = fields.number()
    expires_at = _moment(fields, now)
    properties = fields.blob()
    topic = fields.blob()
    packets = fields.blob()
    if not packets or count < 1 or stride * count != len(packets):
        raise ValueError("messages whose sizes do not fit")
    found = Publication(
        topic, packets, count, stride, (flags & _V5) != 0, head_size, properties, expires_at, (flags & _FORWARDABLE) != 0
    )
    found.sequence = sequence
    found.origin = origin_number(fabric, origin)
    return found

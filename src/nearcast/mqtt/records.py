"""Journal records: what a broker must remember to keep its word after a crash, as bytes.

The engine appends a record for every change of durable state, in order; replaying them in order gives the state back
(:mod:`nearcast.mqtt.recovery`). All records that one call into the engine produced are stored atomically: a PUBLISH that is
kept without the packet identifier it came with would be delivered twice.

A record is one kind byte and fields: unsigned LEB128 numbers, byte strings with their length, 8-byte floats for wall-clock
times. Unknown kinds are refused, not skipped: a journal written by a newer version says so instead of losing state.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from nearcast.mqtt.codec import encode_varint
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import Will
from nearcast.mqtt.properties import WILL_PROPERTIES, decode_properties, encode_properties
from nearcast.mqtt.publication import Publication, Terms

if TYPE_CHECKING:
    from nearcast.mqtt.retained import Version
    from nearcast.mqtt.session import Session, Spilled
    from nearcast.mqtt.subscriptions import Subscription

SESSION: Final = 1
SESSION_ENDED: Final = 2
SUBSCRIBED: Final = 3
UNSUBSCRIBED: Final = 4
PUBLISHED: Final = 5
SENT: Final = 6
ACKNOWLEDGED: Final = 7
RELEASED: Final = 8
REMEMBERED: Final = 9
FORGOTTEN: Final = 10
DROPPED: Final = 11
RETAINED: Final = 12
UNRETAINED: Final = 13
STORED: Final = 14
STATE: Final = 15
TARGETED: Final = 16
COMPLETE: Final = 17
KEPT: Final = 18
EPOCH: Final = 19
ORIGIN: Final = 20
ORIGIN_FORGOTTEN: Final = 21
SPILLED: Final = 22
UNSPILLED: Final = 23
RETAINED_SEEN: Final = 24
DEPARTING: Final = 25
ARRIVED: Final = 26
LOST: Final = 27

_KIND: Final[list[bytes]] = [bytes([kind]) for kind in range(28)]


def number(value: int) -> bytes:
    """An unsigned LEB128 number of any size."""
    if value < 268_435_456:
        return encode_varint(value)
    parts = bytearray()
    while value >= 0x80:
        parts.append((value & 0x7F) | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def blob(value: bytes) -> bytes:
    return number(len(value)) + value


def text(value: str | None) -> bytes:
    """An optional string: absent and empty differ."""
    if value is None:
        return b"\x00"
    return b"\x01" + blob(value.encode("utf-8"))


def moment(value: float) -> bytes:
    return struct.pack(">d", value)


def session(of: Session, wall_offset: float, whole: bool) -> bytes:
    """The session has these facts now. ``whole``: all else there is to know of it follows, nothing came before."""
    will = of.will
    parts = [
        _KIND[SESSION],
        number(of.number),
        number(1 if whole else 0),
        blob(of.client_id.encode("utf-8")),
        number(of.expiry_seconds),
        moment(of.expires_at + wall_offset if of.expires_at else 0.0),
        text(of.username),
    ]
    if will is None:
        parts.append(b"\x00")
    else:
        parts.append(b"\x01")
        parts.append(moment(of.will_due_at + wall_offset if of.will_due_at else 0.0))
        parts.append(blob(will.topic.encode("utf-8")))
        parts.append(blob(will.payload))
        parts.append(number(will.qos | (4 if will.retain else 0)))
        parts.append(encode_properties(will.properties))
    if of.stamp:
        parts.append(number(of.stamp))
    return b"".join(parts)


def session_ended(session_number: int) -> bytes:
    return _KIND[SESSION_ENDED] + number(session_number)


def subscription_fields(subscription: Subscription) -> bytes:
    options = (
        subscription.qos
        | (4 if subscription.no_local else 0)
        | (8 if subscription.retain_as_published else 0)
        | (subscription.retain_handling << 4)
    )
    return blob(subscription.topic_filter.encode("utf-8")) + number(options) + number(subscription.identifier)


def subscribed(session_number: int, subscription: Subscription) -> bytes:
    return _KIND[SUBSCRIBED] + number(session_number) + subscription_fields(subscription)


def unsubscribed(session_number: int, topic_filter: str) -> bytes:
    return _KIND[UNSUBSCRIBED] + number(session_number) + blob(topic_filter.encode("utf-8"))


def publication_fields(publication: Publication, wall_offset: float, origin_name: str = "") -> bytes:
    flags = (1 if publication.v5 else 0) | (2 if publication.raw_flags >= 0 else 0) | (4 if origin_name else 0)
    return b"".join(
        (
            number(publication.journal_key),
            number(publication.sequence),
            number(flags),
            number(publication.count),
            number(publication.stride),
            number(publication.head_size),
            blob(publication.properties),
            moment(publication.expires_at + wall_offset if publication.expires_at else 0.0),
            blob(publication.topic),
            blob(publication.packets),
            blob(origin_name.encode("utf-8")) if origin_name else b"",
        )
    )


def terms_fields(terms: Terms) -> bytes:
    return number(terms.qos | (4 if terms.retain else 0)) + blob(terms.identifiers) + blob(terms.via.encode("utf-8"))


def target(session_number: int, count: int, terms: Terms) -> bytes:
    """One session that took on the first ``count`` messages of a publication."""
    return number(session_number) + number(count) + terms_fields(terms)


def published(publication: Publication, targets: list[bytes], effects: Effects) -> bytes:
    """Messages were taken on for these sessions, each at the end of its queue. Content is written once per generation."""
    who = number(len(targets)) + b"".join(targets)
    if publication.journal_generation == effects.generation:
        return _KIND[TARGETED] + number(publication.journal_key) + who
    _enter(publication, effects)
    return _KIND[PUBLISHED] + publication_fields(publication, effects.wall_offset, _origin_name(publication, effects)) + who


def _origin_name(publication: Publication, effects: Effects) -> str:
    return effects.origin_names[publication.origin] if publication.origin else ""


def _enter(publication: Publication, effects: Effects) -> None:
    if publication.journal_key == 0:
        publication.journal_key = effects.next_journal_key
        effects.next_journal_key += 1
    publication.journal_generation = effects.generation


def sent(session_number: int, first_id: int, count: int) -> bytes:
    """The next ``count`` messages of the session's queue went out under identifiers from ``first_id`` on."""
    return _KIND[SENT] + number(session_number) + number(first_id) + number(count)


def dropped(session_number: int, count: int) -> bytes:
    """The next ``count`` messages of the session's queue were given up (expired, or too large for the client)."""
    return _KIND[DROPPED] + number(session_number) + number(count)


def acknowledged(session_number: int, packet_ids: bytes) -> bytes:
    """The client has these messages; they are no longer in flight."""
    return _KIND[ACKNOWLEDGED] + number(session_number) + blob(packet_ids)


def released(session_number: int, packet_ids: bytes) -> bytes:
    """PUBREC came for these: only PUBREL and PUBCOMP remain."""
    return _KIND[RELEASED] + number(session_number) + blob(packet_ids)


def remembered(session_number: int, packet_ids: bytes) -> bytes:
    """QoS 2 messages with these identifiers came in from the client."""
    return _KIND[REMEMBERED] + number(session_number) + blob(packet_ids)


def forgotten(session_number: int, packet_ids: bytes) -> bytes:
    """The client released these identifiers."""
    return _KIND[FORGOTTEN] + number(session_number) + blob(packet_ids)


def kept(mark: int, session_number: int, packet_ids: bytes) -> bytes:
    """QoS 2 messages with these identifiers are in the topic log with this ``mark``; 0: they are not, and are to be.

    Without a session (0): marks have come so far.
    """
    return _KIND[KEPT] + number(mark) + number(session_number) + blob(packet_ids)


def epoch(own: int, reserved: int) -> bytes:
    """This broker numbers messages in this epoch, all of them below ``reserved`` until the next such record."""
    return _KIND[EPOCH] + number(own) + number(reserved)


def origin(name: str, of_epoch: int, received: int) -> bytes:
    """Everything was taken on that another broker numbered in this epoch and sent reliably, up to ``received``."""
    return _KIND[ORIGIN] + blob(name.encode("utf-8")) + number(of_epoch) + number(received)


def origin_forgotten(name: str) -> bytes:
    """The other broker is known no more."""
    return _KIND[ORIGIN_FORGOTTEN] + blob(name.encode("utf-8"))


def spilled(session_number: int, file: Spilled, count: int) -> bytes:
    """The next ``count`` messages of the session's queue are in this file, which is on disk, and no longer in the queue."""
    return b"".join(
        (
            _KIND[SPILLED],
            number(session_number),
            number(file.number),
            number(file.last_sequence),
            number(file.messages),
            number(file.size),
            number(count),
        )
    )


def unspilled(session_number: int, file_number: int) -> bytes:
    """The session's receiver has all that is in this file."""
    return _KIND[UNSPILLED] + number(session_number) + number(file_number)


def departing(session_number: int, move: int, target: str) -> bytes:
    """The session is on its way to another broker, with this move, and may be there; with move 0 it is not, after all."""
    return _KIND[DEPARTING] + number(session_number) + number(move) + blob(target.encode("utf-8"))


def arrived(of: Session) -> bytes:
    """The session came from another broker, with the messages of its fences."""
    fences = of.fences or {}
    parts = [_KIND[ARRIVED], number(of.number), number(of.arrived_by), number(len(fences))]
    for name, reliable in fences.items():
        parts.append(blob(name.encode("utf-8")) + number(reliable))
    return b"".join(parts)


def lost(session_number: int, brokers: bytes) -> bytes:
    """The session goes on where these brokers lost it, and they may have more of it (nearcast.fabric.leftovers)."""
    return _KIND[LOST] + number(session_number) + blob(brokers)


def retained(publication: Publication, wall_offset: float, version: Version | None) -> bytes:
    return _KIND[RETAINED] + publication_fields(publication, wall_offset) + _version_fields(version)


def unretained(topic: bytes, version: Version | None) -> bytes:
    """The topic has no retained message; with a ``version`` this is a change like any other, and remembered."""
    return _KIND[UNRETAINED] + blob(topic) + _version_fields(version)


def _version_fields(version: Version | None) -> bytes:
    """The last fields of a record; a broker that is on its own writes none."""
    return b"" if version is None else number(version.stamp) + blob(version.origin.encode("utf-8"))


def retained_seen(origin: str, stamp: int) -> bytes:
    """Every change of retained messages that this origin made up to this stamp is known; 0: it is known no more."""
    return _KIND[RETAINED_SEEN] + blob(origin.encode("utf-8")) + number(stamp)


def stored(publication: Publication, effects: Effects) -> bytes:
    """A publication that STATE records after this one refer to by its key."""
    _enter(publication, effects)
    return _KIND[STORED] + publication_fields(publication, effects.wall_offset, _origin_name(publication, effects))


def state(of: Session) -> bytes:
    """Everything of a session but the facts in SESSION, for compaction; the publications it names were stored before it."""
    parts = [_KIND[STATE], number(of.number), number(of.next_id), number(len(of.subscriptions))]
    for subscription in of.subscriptions.values():
        parts.append(subscription_fields(subscription))
    parts.append(number(len(of.inflight)))
    for packet_id, entry in of.inflight.items():
        parts.append(number(packet_id))
        if entry.first_id == 0:  # session.RELEASED
            parts.append(b"\x00")
            continue
        parts.append(b"\x01")
        parts.append(number(entry.publication.journal_key))
        parts.append(number(entry.start + packet_id - entry.first_id))
        parts.append(terms_fields(entry.terms))
    queue = of.queue
    parts.append(number(0 if queue is None else len(queue)))
    if queue is not None:
        for pending in queue:
            parts.append(number(pending.publication.journal_key))
            parts.append(number(pending.start))
            parts.append(number(pending.count))
            parts.append(terms_fields(pending.terms))
    ids = of.received_ids
    parts.append(blob(b"" if ids is None else b"".join([packet_id.to_bytes(2, "big") for packet_id in sorted(ids)])))
    return b"".join(parts)


def complete() -> bytes:
    """Everything of earlier generations that is still needed has been written to this one. Alone in its frame."""
    return _KIND[COMPLETE]


class Fields:
    """Reads the fields of one record; raises ``ValueError`` when the record ends too early."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.position = 1

    def number(self) -> int:
        value = 0
        shift = 0
        while True:
            if self.position >= len(self.data):
                raise ValueError("record ends inside a number")
            byte = self.data[self.position]
            self.position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 70:
                raise ValueError("number too large")

    def blob(self) -> bytes:
        size = self.number()
        end = self.position + size
        if end > len(self.data):
            raise ValueError("record ends inside a byte string")
        value = self.data[self.position : end]
        self.position = end
        return value

    def text(self) -> str | None:
        if self.number() == 0:
            return None
        return self.blob().decode("utf-8")

    def moment(self) -> float:
        end = self.position + 8
        if end > len(self.data):
            raise ValueError("record ends inside a time")
        value: float = struct.unpack(">d", self.data[self.position : end])[0]
        self.position = end
        return value

    def will(self) -> Will:
        topic = self.blob().decode("utf-8")
        payload = self.blob()
        flags = self.number()
        properties, self.position = decode_properties(self.data, self.position, WILL_PROPERTIES)
        return Will(topic, payload, flags & 3, (flags & 4) != 0, properties)

    def terms(self) -> Terms:
        flags = self.number()
        identifiers = self.blob()
        return Terms(flags & 3, (flags & 4) != 0, identifiers, self.blob().decode("utf-8"))

    def publication(self, wall_offset: float, effects: Effects | None = None) -> Publication:
        journal_key = self.number()
        sequence = self.number()
        flags = self.number()
        count = self.number()
        stride = self.number()
        head_size = self.number()
        properties = self.blob()
        expires_wall = self.moment()
        topic = self.blob()
        packets = self.blob()
        origin_name = self.blob().decode("utf-8") if flags & 4 else ""
        if not packets or count < 1:
            raise ValueError("publication without packets")
        # A deadline that has passed must stay one: 0 means "never".
        expires_at = max(expires_wall - wall_offset, 1e-9) if expires_wall else 0.0
        found = Publication(
            topic, packets, count, stride, (flags & 1) != 0, head_size, properties, expires_at, (flags & 2) != 0
        )
        found.journal_key = journal_key
        found.sequence = sequence
        if origin_name and effects is not None:
            found.origin = effects.origin_number(origin_name)
        return found

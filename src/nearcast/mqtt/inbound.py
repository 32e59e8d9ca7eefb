"""The hot path: PUBLISH packets of one read, from bytes to routed publications and acknowledgements.

Packets that stand back to back and share flags, topic and properties become one publication (at QoS 0 their sizes may differ;
at QoS 1 and 2 they must not, so that identifiers can be stamped at a fixed distance).
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from nearcast.config import Limits
from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons, records
from nearcast.mqtt.access import Authorizer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.keeping import Keeping
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.pledges import Answer
from nearcast.mqtt.properties import decode_properties, encode_properties
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.retained import RetainedMessages
from nearcast.mqtt.routing import MAX_REMEMBERED_TOPIC_BYTES, Router
from nearcast.mqtt.session import Session
from nearcast.mqtt.topics import OWN_FIGURES, OWN_WORD, is_string, topic_fault
from nearcast.mqtt.wire import PUBLISH

OWN_FIGURES_BYTES: Final = OWN_FIGURES.encode("ascii")
OWN_WORD_BYTES: Final = OWN_WORD.encode("ascii")

_MESSAGE_EXPIRY: Final = b"\x02"
_NO_ROOM: Final = "the topic log has no room for another topic"

#: Encoded property sets whose meaning is remembered: most publishers send the same ones again and again.
MAX_REMEMBERED_PROPERTIES: Final = 4_096
#: Size of a publication at QoS 1 and 2 beyond which no further packet is added to it.
MAX_ACKNOWLEDGED_BYTES: Final = 65_536
#: Topics a connection is known to be allowed to publish to, before the authorizer is asked again.
MAX_ALLOWED_TOPICS: Final = 1_024


class PublishFacts:
    """What a PUBLISH's properties mean to the broker: what is passed on, how long it lives, which alias it uses."""

    def __init__(self, forwarded: bytes, expiry_seconds: int, alias: int, unchanged: bool) -> None:
        self.forwarded = forwarded
        self.expiry_seconds = expiry_seconds
        self.alias = alias
        self.unchanged = unchanged


NO_FACTS: Final = PublishFacts(b"", -1, 0, True)


def forwarded_properties(properties: Properties | None) -> bytes:
    """The properties every receiver of a message gets, unaltered and in order [MQTT-3.3.2-4 ff.], without their length."""
    if properties is None:
        return b""
    kept = Properties(
        payload_format_indicator=properties.payload_format_indicator,
        content_type=properties.content_type,
        response_topic=properties.response_topic,
        correlation_data=properties.correlation_data,
        user_properties=properties.user_properties,
    )
    encoded = encode_properties(kept)
    size_bytes = 1
    while encoded[size_bytes - 1] >= 0x80:
        size_bytes += 1
    return encoded[size_bytes:]


class Inbound:
    """Takes PUBLISH packets in. One per engine."""

    def __init__(
        self,
        limits: Limits,
        effects: Effects,
        router: Router,
        retained: RetainedMessages,
        authorizer: Authorizer | None,
    ) -> None:
        self.effects = effects
        self.router = router
        self.retained = retained
        self.authorizer = authorizer
        self.apply(limits)
        self._facts: dict[bytes, PublishFacts] = {}
        self.cut_end = 0
        self.cut_id_at = 0

    def apply(self, limits: Limits) -> None:
        """Use these limits from now on. Those that clients were told are the connection's."""
        self._max_topic_levels: int = limits.max_topic_levels
        self._max_retained: int = limits.max_retained_messages
        self._max_retained_bytes: int = limits.max_retained_bytes

    def take(self, connection: Connection, session: Session, data: bytes, start: int, now: float) -> int:
        """Handle the PUBLISH at ``start`` and those after it that are alike; returns where the next packet begins.

        The caller has made sure that the first packet is complete and within the size limit.
        """
        publication = self.cut(connection, data, start, now)
        next_at = self.cut_end
        id_at = self.cut_id_at
        stats = self.effects.stats
        stats.publishes_received[publication.qos] += publication.count
        stats.publish_bytes_received += len(publication.packets)
        connection.messages_in += publication.count
        if publication.qos == 0:
            self._accept(connection, session, publication, now)
        else:
            self._acknowledged(connection, session, publication, id_at, now)
        return next_at

    def cut(self, connection: Connection, data: bytes, start: int, now: float) -> Publication:
        """The PUBLISH at ``start`` and those after it that are alike, as one publication. ``cut_end`` is where the next packet
        begins then, ``cut_id_at`` where each of these has its identifier."""
        position: i64 = start
        end: i64 = len(data)
        first = data[position]
        qos = (first >> 1) & 3
        if qos == 3:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH with QoS 3")
        if qos == 0 and first & 8:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH with DUP set at QoS 0")
        cursor: i64 = position + 1
        size: i64 = 0
        shift: i64 = 0
        while True:
            byte: i64 = data[cursor]
            cursor += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        packet_end: i64 = cursor + size
        id_size: i64 = 2 if qos else 0
        if size < 2 + id_size:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH ends inside its header")
        topic_size: i64 = (i64(data[cursor]) << 8) | data[cursor + 1]
        id_at: i64 = cursor + 2 + topic_size
        payload_at: i64 = id_at + id_size
        if payload_at > packet_end:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH ends inside its header")
        facts = NO_FACTS
        v5 = connection.version == 5
        if v5:
            if payload_at >= packet_end:
                raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH ends before its properties")
            if data[payload_at] == 0:
                payload_at += 1
            else:
                properties_at = payload_at
                payload_at = self._properties_end(data, payload_at, packet_end)
                facts = self.facts_of(data[properties_at:payload_at])

        # How many of the packets that follow are the same but for payload and identifier?
        stride: i64 = packet_end - position
        count: i64 = 1
        next_at: i64 = packet_end
        equal = True
        if next_at < end and data[next_at] == first:
            if qos == 0:
                head_size: i64 = payload_at - cursor
                head = data[cursor:payload_at]
                while next_at + 2 < end and data[next_at] == first:
                    size = data[next_at + 1]
                    body_at: i64 = next_at + 2
                    if size >= 0x80:
                        byte = data[body_at]
                        if byte >= 0x80 or byte == 0:
                            break
                        size = (size & 0x7F) | (byte << 7)
                        body_at += 1
                    following: i64 = body_at + size
                    if following > end or size < head_size or data[body_at : body_at + head_size] != head:
                        break
                    if following - next_at != stride:
                        if following - next_at > connection.packet_limit_bytes:
                            break
                        equal = False
                    next_at = following
                    count += 1
            else:
                lead_size: i64 = id_at - position
                lead = data[position:id_at]
                tail_at: i64 = id_at + 2 - position
                tail_size: i64 = payload_at - id_at - 2
                tail = data[id_at + 2 : payload_at]
                # One message that stays unacknowledged keeps its whole publication in memory: bound that.
                last: i64 = min(int(end), int(position) + MAX_ACKNOWLEDGED_BYTES)
                while next_at + stride <= last and data[next_at : next_at + lead_size] == lead:
                    if tail_size and data[next_at + tail_at : next_at + tail_at + tail_size] != tail:
                        break
                    next_at += stride
                    count += 1

        topic = data[cursor + 2 : id_at]
        if v5 and (facts.alias or not topic_size):
            topic = self._resolve_alias(connection, topic, facts.alias)
        expires_at = 0.0
        if facts.expiry_seconds >= 0:
            expires_at = max(now + facts.expiry_seconds, 1e-9)
        if position == 0 and next_at == end:
            packets = data
        else:
            packets = data[position:next_at]
        publication = Publication(
            topic,
            packets,
            int(count),
            int(stride) if equal else 0,
            v5,
            int(payload_at - cursor - id_size),
            facts.forwarded,
            expires_at,
            facts.unchanged,
        )
        self.cut_end = int(next_at)
        self.cut_id_at = int(id_at - position)
        return publication

    def _properties_end(self, data: bytes, position: int, packet_end: int) -> int:
        size = 0
        shift = 0
        cursor = position
        while True:
            if cursor >= packet_end or shift > 21:
                raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH with a broken property length")
            byte = data[cursor]
            cursor += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        if cursor + size > packet_end:
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "PUBLISH ends inside its properties")
        return cursor + size

    def facts_of(self, encoded: bytes) -> PublishFacts:
        """What a PUBLISH's properties, with their length, mean; raises :class:`RemoteProtocolError`."""
        facts = self._facts.get(encoded)
        if facts is not None:
            return facts
        properties, _ = decode_properties(encoded, 0, PUBLISH)
        if properties is None:
            return NO_FACTS
        if properties.subscription_identifiers is not None:  # [MQTT-3.3.4-6]
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBLISH from a client with a subscription identifier")
        response_topic = properties.response_topic
        if response_topic is not None and ("+" in response_topic or "#" in response_topic):  # [MQTT-3.3.2-14]
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "a response topic must not contain wildcards")
        alias = properties.topic_alias
        expiry = properties.message_expiry_interval
        facts = PublishFacts(
            forwarded_properties(properties),
            -1 if expiry is None else expiry,
            0 if alias is None else alias,
            alias is None and expiry is None,
        )
        if len(self._facts) >= MAX_REMEMBERED_PROPERTIES:
            self._facts.clear()
        if len(encoded) <= 256:
            self._facts[encoded] = facts
        return facts

    def _resolve_alias(self, connection: Connection, topic: bytes, alias: int) -> bytes:
        if alias == 0:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBLISH with neither a topic nor a topic alias")
        if alias > connection.alias_in_maximum:  # [MQTT-3.3.2-9]
            raise RemoteProtocolError(reasons.TOPIC_ALIAS_INVALID, f"topic alias {alias} is above the agreed maximum")
        aliases = connection.aliases_in
        if topic:
            if aliases is None:
                aliases = {}
                connection.aliases_in = aliases
            aliases[alias] = topic
            return topic
        known = None if aliases is None else aliases.get(alias)
        if known is None:
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, f"topic alias {alias} was never defined")
        return known

    def _accept(self, connection: Connection, session: Session, publication: Publication, now: float) -> int:
        """Check, retain and route a publication; returns the reason code of its acknowledgement."""
        if publication.qos > connection.max_qos:  # [MQTT-3.2.2-11]
            raise RemoteProtocolError(reasons.QOS_NOT_SUPPORTED, f"QoS {publication.qos} is not served here")
        if publication.retain and not connection.retain_available:  # [MQTT-3.2.2-14]
            raise RemoteProtocolError(reasons.RETAIN_NOT_SUPPORTED, "messages are not retained here")
        route = self.router.remembered(publication.topic)
        if route is None:
            self.check_topic(publication.topic)
            route = self.router.route_for(publication.topic)
        if not self.may_publish(connection, publication.topic):
            self.effects.stats.dropped_not_authorized += publication.count
            return reasons.NOT_AUTHORIZED
        kept = route.kept
        if kept is not None and not self.keep(kept, publication, session, now):
            return self._refuse(connection, publication, _NO_ROOM)
        if publication.retain and route.way is None:
            self.retain(publication, now)
        self.effects.pledge = None
        if not self.router.publish(route, publication, session, now) and (kept is None or not kept.durable):
            return reasons.NO_MATCHING_SUBSCRIBERS
        if self._was_refused():
            return self._refuse(connection, publication, "the topic's replica set has no room for more at the moment")
        return reasons.SUCCESS

    def _was_refused(self) -> bool:
        pledge = self.effects.pledge
        if pledge is None or pledge.reason_code == reasons.SUCCESS:
            return False
        self.effects.pledge = None
        return True

    def _refuse(self, connection: Connection, publication: Publication, why: str) -> int:
        """There is no room for a publication. Told that all is well, a client of 3.1.1 would believe the message kept."""
        if publication.qos and not connection.is_v5:
            raise RemoteProtocolError(reasons.QUOTA_EXCEEDED, why)
        return reasons.QUOTA_EXCEEDED

    def keep(self, kept: Keeping, publication: Publication, session: Session, now: float) -> bool:
        """Hand a session's messages to the log; false when its topic is durable and the log has no room for it."""
        # A session that ends with its connection is not there to be asked after a crash whether it sent something before.
        marked = publication.qos == 2 and session.durable and kept.durable
        mark = self.effects.last_mark + 1 if marked else 0
        if not self.keep_from(kept, publication, session.client_id, mark, now):
            return not kept.durable
        if marked:
            self.effects.last_mark = mark
        return True

    def keep_from(self, kept: Keeping, publication: Publication, client_id: str, mark: int, now: float) -> bool:
        """Hand a client's messages to the log; false when that has no room for them."""
        properties = publication.properties
        if publication.expires_at > 0:
            remaining = max(0, int(publication.expires_at - now + 0.5))
            properties += _MESSAGE_EXPIRY + remaining.to_bytes(4, "big")
        publisher = client_id.encode("utf-8")
        if not kept.keep(publication.payloads(), publication.qos, publication.retain, properties, publisher, mark):
            self.effects.stats.not_kept += publication.count
            return False
        return True

    def check_topic(self, topic: bytes) -> None:
        """Refuse a name that no topic has; raises :class:`RemoteProtocolError`."""
        if not is_string(topic):  # [MQTT-3.3.2-1]
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "a topic name must be well-formed UTF-8 without U+0000")
        fault = topic_fault(topic, self._max_topic_levels)
        if fault:
            raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, fault)

    def may_publish(self, connection: Connection, topic: bytes) -> bool:
        """Whether a client may publish to a topic."""
        if topic[:1] == b"$" and topic.startswith(OWN_FIGURES_BYTES):
            return False
        authorizer = self.authorizer
        if authorizer is None:
            return not topic.startswith(OWN_WORD_BYTES)
        allowed = connection.allowed_topics
        if allowed is None:
            allowed = set()
            connection.allowed_topics = allowed
        if topic in allowed:
            return True
        if not authorizer.may_publish(connection.client_id, connection.username, topic.decode("utf-8")):
            return False
        if len(topic) <= MAX_REMEMBERED_TOPIC_BYTES:
            if len(allowed) >= MAX_ALLOWED_TOPICS:
                allowed.clear()
            allowed.add(topic)
        return True

    def retain(self, publication: Publication, now: float) -> None:
        """Keep the last message of a publication as its topic's retained one; an empty one clears it [MQTT-3.3.1-6, -7].

        Where there is no room for it the message is delivered all the same, and the topic keeps no message rather than an
        old one.
        """
        replica = self.retained.replica
        if replica is not None and publication.topic[:5] != b"$SYS/" and not replica.admit(publication, now):
            return
        self.store_retained(publication.single(publication.count - 1), now)

    def store_retained(self, message: Publication, now: float) -> None:
        """Keep one message as its topic's retained one, whose version is settled."""
        topic = message.topic
        stats = self.effects.stats
        if not message.payloads()[0]:
            self._unretain(topic, True, now)
        elif self._has_room(topic, len(message.packets)):
            self.retained.set(topic, message)
            # The broker's own figures are of no use after a restart.
            if self.effects.gated and topic[:5] != b"$SYS/":
                version = self.retained.versions.get(topic)
                self.effects.records.append(records.retained(message, self.effects.wall_offset, version))
        else:
            stats.not_retained += 1
            self._unretain(topic, False, now)
        stats.retained_messages = self.retained.count
        stats.retained_bytes = self.retained.bytes

    def clear_retained(self, topic: bytes, now: float) -> None:
        """The topic's retained message was cleared elsewhere; its version is settled."""
        self._unretain(topic, True, now)
        self.effects.stats.retained_messages = self.retained.count
        self.effects.stats.retained_bytes = self.retained.bytes

    def _unretain(self, topic: bytes, kept: bool, now: float) -> None:
        removed = self.retained.remove(topic)
        version = self.retained.versions.get(topic)
        if version is not None and self.retained.replica is not None:
            self.retained.replica.cleared(topic, kept, now)
        if (removed or version is not None) and self.effects.gated and topic[:5] != b"$SYS/":
            self.effects.records.append(records.unretained(topic, version))

    def _has_room(self, topic: bytes, size: int) -> bool:
        before = self.retained.get(topic)
        messages = self.retained.count + (0 if before is not None else 1)
        size += self.retained.bytes - (0 if before is None else len(before.packets))
        return messages <= self._max_retained and size <= self._max_retained_bytes

    def expire_retained(self, now: float) -> None:
        """Forget the retained messages whose time has passed."""
        stats = self.effects.stats
        for topic in self.retained.expire(now):
            stats.dropped_expired += 1
            version = self.retained.versions.get(topic)
            if version is not None and self.retained.replica is not None:
                self.retained.replica.cleared(topic, True, now)
            if self.effects.gated:
                self.effects.records.append(records.unretained(topic, version))
        stats.retained_messages = self.retained.count
        stats.retained_bytes = self.retained.bytes

    def _acknowledged(
        self, connection: Connection, session: Session, publication: Publication, id_at: int, now: float
    ) -> None:
        """QoS 1 and 2: route, then PUBACK or PUBREC. A QoS 2 identifier that is known already is only answered."""
        packets = publication.packets
        position: i64 = id_at
        stride: i64 = publication.stride
        end: i64 = len(packets)
        ids: list[bytes] = []
        while position < end:
            packet_id = packets[position : position + 2]
            if packet_id == b"\x00\x00":  # [MQTT-2.2.1-2]
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBLISH with packet identifier 0")
            ids.append(packet_id)
            position += stride
        if publication.qos == 1:
            self._answer(connection, 0x40, ids, self._accept(connection, session, publication, now))
            return
        held = session.received_ids
        again = len(ids) > 1 and len(set(ids)) != len(ids)
        if held:
            for packet_id in ids:
                again = again or ((packet_id[0] << 8) | packet_id[1]) in held
        if again:
            self._acknowledged_one_by_one(connection, session, publication, ids, now)
            return
        self._acknowledge_exactly_once(connection, session, publication, ids, now)

    def _acknowledged_one_by_one(
        self, connection: Connection, session: Session, publication: Publication, ids: list[bytes], now: float
    ) -> None:
        for part, packet_id in zip(publication.parts(publication.count), ids, strict=True):
            number = (packet_id[0] << 8) | packet_id[1]
            if session.is_received(number):
                if session.is_unkept(number):
                    self._keep_after_all(session, part, packet_id, now)
                self._answer_again(connection, session, packet_id)
            else:
                self._acknowledge_exactly_once(connection, session, part, [packet_id], now)

    def _acknowledge_exactly_once(
        self, connection: Connection, session: Session, publication: Publication, ids: list[bytes], now: float
    ) -> None:
        held = session.received_ids
        if (0 if held is None else len(held)) + len(ids) > connection.receive_maximum and connection.is_v5:
            raise RemoteProtocolError(reasons.RECEIVE_MAXIMUM_EXCEEDED, "more QoS 2 messages than the receive maximum")
        mark = self.effects.last_mark
        reason_code = self._accept(connection, session, publication, now)
        if reason_code < 0x80 or not connection.is_v5:
            packet_ids = b"".join(ids)
            session.remember(packet_ids)
            if self.effects.last_mark != mark:
                session.remember_mark(packet_ids, self.effects.last_mark)
        if self.effects.pledge is not None:
            session.awaits(self.effects.pledge)
        self._answer(connection, 0x50, ids, reason_code)

    def _keep_after_all(self, session: Session, publication: Publication, packet_id: bytes, now: float) -> None:
        """A message comes again that was delivered and that the log lost in a crash: see :mod:`nearcast.mqtt.keeping`."""
        if self.router.remembered(publication.topic) is None:
            self.check_topic(publication.topic)
        kept = self.router.route_for(publication.topic).kept
        if kept is None or not kept.durable:
            return
        mark = self.effects.last_mark
        if not self.keep(kept, publication, session, now):
            raise RemoteProtocolError(reasons.QUOTA_EXCEEDED, _NO_ROOM)
        if self.effects.last_mark != mark:
            session.remember_mark(packet_id, self.effects.last_mark)

    def _answer_again(self, connection: Connection, session: Session, packet_id: bytes) -> None:
        """PUBREC for a message that is known, but may not be kept yet by those who keep it."""
        if session.is_kept():
            self._answer(connection, 0x50, [packet_id], reasons.SUCCESS)
            return
        for pledge in (session.pledges or {}).values():
            connection.answer(Answer(0x50, [], reasons.SUCCESS, pledge))
        connection.answer(Answer(0x50, [packet_id], reasons.SUCCESS))

    def _answer(self, connection: Connection, kind: int, ids: list[bytes], reason_code: int) -> None:
        """PUBACKs or PUBRECs for ``ids``. 3.1.1 cannot say no: there the message is acknowledged and gone."""
        pledge = self.effects.pledge
        if pledge is not None or connection.answers is not None:
            self.effects.pledge = None
            connection.answer(Answer(kind, ids, reason_code, pledge))
        elif reason_code == reasons.SUCCESS or not connection.is_v5:
            lead = bytes([kind, 2])
            connection.push_held(lead + lead.join(ids))
        else:
            connection.push_held(Answer(kind, ids, reason_code).encode(True))

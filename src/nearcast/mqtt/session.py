"""A client's session: what the server owes it and what it owes the server, across connections (section 4.1).

Outbound QoS 1 and 2 is a window over a queue. Messages enter :meth:`Session.deliver`; as many as the window (the client's
Receive Maximum, our own bound, the connection's output bound) admits become *in flight* under a packet identifier, the rest
waits in order. The life of an identifier::

    PUBLISH sent ──QoS 1── PUBACK ───────────────────────────► free
         └──────── QoS 2 ── PUBREC ─► PUBREL sent ── PUBCOMP ─► free

``inflight`` maps the identifier to a :class:`Sent` (or to :data:`RELEASED` once PUBREL is out), in the order of sending,
which is the order of sending again after a reconnect [MQTT-4.6.0-1]. Inbound QoS 2 remembers the identifiers between PUBREC
and PUBREL.

When the session is durable every change goes to the records *in the order of the calls*, see :mod:`nearcast.mqtt.records`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import reasons, records
from nearcast.mqtt.codec import encode
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import PubComp, PubRel
from nearcast.mqtt.publication import Publication, Terms, build

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection
    from nearcast.mqtt.packets import Will
    from nearcast.mqtt.pledges import Pledge
    from nearcast.mqtt.subscriptions import Subscription

NEVER: Final = 0xFFFFFFFF
MAX_PACKET_ID: Final = 65_535


class Sent:
    """A stretch of a publication that went out under consecutive identifiers from ``first_id`` on."""

    def __init__(self, publication: Publication, start: int, first_id: int, terms: Terms) -> None:
        self.publication = publication
        self.start = start
        self.first_id = first_id
        self.terms = terms
        self.qos = terms.qos
        self.size = publication.stride


#: Stands in ``inflight`` for a QoS 2 message whose content the client has: only PUBREL and PUBCOMP remain.
RELEASED: Final = Sent(build(b"released", b"", 0, False), 0, 0, Terms(2, False, b""))
RELEASED.size = 0


class Pending:
    """A stretch of a publication that waits in the queue."""

    def __init__(self, publication: Publication, start: int, count: int, terms: Terms) -> None:
        self.publication = publication
        self.start = start
        self.count = count
        self.terms = terms


class Spilled:
    """Messages that left the front of a queue for a file: its number, the last message's sequence, how many, how large."""

    def __init__(self, number: int, last_sequence: int, messages: int, size: int) -> None:
        self.number = number
        self.last_sequence = last_sequence
        self.messages = messages
        self.size = size


class Unsent:
    """Identifiers in flight that the present connection was not sent again yet: its window or its room did not admit all."""

    def __init__(self, packet_ids: list[int]) -> None:
        self.order = deque(packet_ids)
        self.waiting = set(packet_ids)

    def settle(self, packet_ids: bytes) -> None:
        """The client has these already, from an earlier connection."""
        for packet_id in packet_ids_of(packet_ids):
            self.waiting.discard(packet_id)


class Session:
    """See the module. ``number`` is the session's name in the records; ``expiry_seconds`` of 0 ends it with its connection."""

    def __init__(self, client_id: str, number: int, effects: Effects, max_queued_messages: int, max_queued_bytes: int) -> None:
        self.client_id = client_id
        self.number = number
        self.effects = effects
        self.connection: Connection | None = None
        self.durable = False
        self.expiry_seconds = 0
        self.expires_at = 0.0
        self.timer_at = 0.0
        self.subscriptions: dict[str, Subscription] = {}
        self.will: Will | None = None
        self.will_due_at = 0.0
        self.username: str | None = None
        #: When a client took it up last, among several brokers (:mod:`nearcast.fabric.presence`); 0: there is only this one.
        self.stamp = 0
        self.inflight: dict[int, Sent] = {}
        self.inflight_bytes = 0
        self.next_id = 1
        self.queue: deque[Pending] | None = None
        self.queued_messages = 0
        self.queued_bytes = 0
        self.max_queued_messages = max_queued_messages
        self.max_queued_bytes = max_queued_bytes
        self.received_ids: set[int] | None = None
        # Of those whose messages belong in the topic log, the mark they have there; 0: the log lost them in a crash.
        self.marks: dict[int, int] | None = None
        self.unsent: Unsent | None = None
        #: What the last QoS 2 messages that came in wait for, by who keeps them: one that comes again is not answered before.
        self.pledges: dict[str, Pledge] | None = None
        # What precedes the queue and lies in files: only other brokers' sessions have that (nearcast.fabric.spool).
        self.spilled: list[Spilled] | None = None
        # The move with which the session came here, and with which it leaves, and whereto (nearcast.fabric.handover); 0: none.
        self.arrived_by = 0
        self.departing_by = 0
        self.departing_to = ""
        # By origin, the last reliable sequence that it had at the broker it came from and this one has yet to see pass.
        self.fences: dict[str, int] | None = None
        #: Brokers that lost the session while its client went on here, and what is known of that (nearcast.fabric.leftovers).
        self.lost = b""
        #: Whether this is another broker's session (:mod:`nearcast.fabric.channels`), and no client's.
        self.is_peer = False

    # --- outbound -------------------------------------------------------------------------------------------------------

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        """Take on the messages of a publication at QoS 1 or 2; returns how many of them, from the first on, were accepted."""
        sent = 0
        connection = self.connection
        if connection is not None and not self.queued_messages and self.unsent is None and connection.has_room():
            sent = self._send(connection, publication, 0, publication.count, terms, now)
        left = publication.count - sent
        if left == 0:
            return sent
        return sent + self._enqueue(publication, sent, left, terms)

    def forward(self, publication: Publication, via: str, now: float) -> None:
        """Pass a QoS 0 publication on to another broker, for ``via`` there (:class:`~nearcast.mqtt.publication.Terms`); one
        that is not there yet gets none."""
        self.effects.stats.dropped_slow_consumer += publication.count

    def _enqueue(self, publication: Publication, start: int, count: int, terms: Terms) -> int:
        stats = self.effects.stats
        room = self.max_queued_messages - self.queued_messages
        size = publication.stride
        if size > 0:
            room = min(room, (self.max_queued_bytes - self.queued_bytes) // size)
        if room < count:
            stats.dropped_queue_full += count - max(room, 0)
            if room <= 0:
                return 0
            count = room
        if count * 2 < publication.count:
            # A few messages must not keep all the others they came with in memory, uncounted.
            publication = publication.cut(start, count)
            start = 0
        queue = self.queue
        if queue is None:
            queue = deque()
            self.queue = queue
        queue.append(Pending(publication, start, count, terms))
        self.queued_messages += count
        self.queued_bytes += count * size
        stats.queued_messages += count
        stats.queued_bytes += count * size
        return count

    def _send(
        self,
        connection: Connection,
        publication: Publication,
        start: int,
        count: int,
        terms: Terms,
        now: float,
    ) -> int:
        """Put in flight as many messages as the window admits; returns how many are dealt with."""
        inflight = self.inflight
        room = connection.send_maximum - len(inflight)
        if room <= 0 or self.inflight_bytes >= self.max_queued_bytes:
            return 0
        stats = self.effects.stats
        alias = 0 if connection.alias_out_maximum == 0 else connection.alias_for(publication.topic, held=True)
        form = publication.form(connection.form_flags | terms.flags, terms.identifiers, alias, now)
        if form.stride > connection.max_packet_bytes:  # dropped as if it had been sent and acknowledged [MQTT-3.1.2-25]
            stats.dropped_too_large += count
            if alias > 0:
                connection.forget_alias(publication.topic)
            if self.durable:
                self.effects.records.append(records.dropped(self.number, count))
            return count
        # What a client takes and does not acknowledge is kept, so it is bounded like what waits.
        room = min(room, (self.max_queued_bytes - self.inflight_bytes) // form.stride + 1)
        if count > room:
            count = room
        done = 0
        while done < count:
            first_id = self._free_id()
            sent = Sent(publication, start + done, first_id, terms)
            inflight[first_id] = sent
            stretch: i64 = 1
            limit: i64 = min(count - done, MAX_PACKET_ID + 1 - first_id)
            while stretch < limit:
                packet_id = first_id + int(stretch)
                if packet_id in inflight:
                    break
                inflight[packet_id] = sent
                stretch += 1
            following = first_id + int(stretch)
            self.next_id = 1 if following > MAX_PACKET_ID else following
            connection.push_held(form.numbered(start + done, int(stretch), first_id))
            if self.durable:
                self.effects.records.append(records.sent(self.number, first_id, int(stretch)))
            done += int(stretch)
        stats.publishes_sent[terms.qos] += done
        stats.publish_bytes_sent += done * form.stride
        stats.inflight_messages += done
        self.inflight_bytes += done * publication.stride
        connection.messages_out += done
        return done

    def _free_id(self) -> int:
        """The next identifier that is not in use. There is one: the window is smaller than the space of identifiers."""
        packet_id = self.next_id
        while packet_id in self.inflight:
            packet_id = 1 if packet_id == MAX_PACKET_ID else packet_id + 1
        return packet_id

    def drain(self, now: float) -> None:
        """Send what waits in the queue, as far as the window admits."""
        connection = self.connection
        if connection is None:
            return
        if self.unsent is not None and not self._send_again(connection, self.unsent, now):
            return
        queue = self.queue
        if queue is None or not self.queued_messages:
            return
        stats = self.effects.stats
        while queue and connection.has_room():
            pending = queue[0]
            publication = pending.publication
            if publication.expired(now):  # [MQTT-3.3.2-5]
                stats.dropped_expired += pending.count
                done = pending.count
                if self.durable:
                    self.effects.records.append(records.dropped(self.number, done))
            else:
                done = self._send(connection, publication, pending.start, pending.count, pending.terms, now)
                if done == 0:
                    break
            size = done * publication.stride
            self.queued_messages -= done
            self.queued_bytes -= size
            stats.queued_messages -= done
            stats.queued_bytes -= size
            pending.start += done
            pending.count -= done
            if pending.count == 0:
                queue.popleft()
                publication.forget_forms()
        if not queue:
            self.queue = None

    def resume(self, now: float) -> None:
        """A new connection took over: send again what is in flight, in order, then go on with the queue [MQTT-4.4.0-1]."""
        connection = self.connection
        if connection is None:
            return
        self.unsent = Unsent(list(self.inflight)) if self.inflight else None
        self.drain(now)

    def _send_again(self, connection: Connection, unsent: Unsent, now: float) -> bool:
        """Send again what is in flight, as far as the connection's window and room admit; returns whether that was all."""
        inflight = self.inflight
        waiting = unsent.waiting
        while unsent.order:
            packet_id = unsent.order[0]
            if packet_id not in waiting:
                unsent.order.popleft()
                continue
            sent = inflight[packet_id]
            # What no longer waits here has been sent and counts against the client's Receive Maximum [MQTT-3.3.4-9].
            if not connection.has_room() or (sent is not RELEASED and len(inflight) - len(waiting) >= connection.send_maximum):
                return False
            unsent.order.popleft()
            waiting.remove(packet_id)
            if sent is RELEASED:
                connection.push_held(encode(PubRel(packet_id), connection.version))
                continue
            form = sent.publication.form(connection.form_flags | sent.terms.flags, sent.terms.identifiers, 0, now)
            if form.stride > connection.max_packet_bytes:
                self._forget(packet_id)
                self.effects.stats.dropped_too_large += 1
                continue
            index = sent.start + packet_id - sent.first_id
            connection.push_held(form.duplicate(index, packet_id))
            self.effects.stats.resent += 1
        self.unsent = None
        for sent in inflight.values():
            sent.publication.forget_forms()
        return True

    def orphans(self) -> list[tuple[str, Publication]]:
        """What came through shared subscriptions and this session never got, as (filter, messages): others may have it.

        A QoS 2 message that was sent is not among them: it may have arrived [MQTT-4.8.2-5].
        """
        found: list[tuple[str, Publication]] = []
        for packet_id, sent in self.inflight.items():
            if sent.terms.via and sent.qos == 1:
                found.append((sent.terms.via, sent.publication.cut(sent.start + packet_id - sent.first_id, 1)))
        if self.queue is not None:
            for pending in self.queue:
                if pending.terms.via:
                    found.append((pending.terms.via, pending.publication.cut(pending.start, pending.count)))
        return found

    def _forget(self, packet_id: int) -> None:
        self.inflight_bytes -= self.inflight.pop(packet_id).size
        self.effects.stats.inflight_messages -= 1
        if self.durable:
            self.effects.records.append(records.acknowledged(self.number, packet_id.to_bytes(2, "big")))

    # --- acknowledgements of what we sent -------------------------------------------------------------------------------

    def acknowledge(self, packet_ids: bytes, now: float) -> None:
        """PUBACKs arrived: ``packet_ids`` are their identifiers, two bytes each."""
        self._settle(packet_ids, False, now)

    def complete(self, packet_ids: bytes, now: float) -> None:
        """PUBCOMPs arrived."""
        self._settle(packet_ids, True, now)

    def _settle(self, packet_ids: bytes, released: bool, now: float) -> None:
        """The last word about messages in flight: QoS 1 messages, or QoS 2 messages that were ``released``."""
        inflight = self.inflight
        position: i64 = 0
        end: i64 = len(packet_ids)
        freed = 0
        while position < end:
            packet_id = (int(packet_ids[position]) << 8) | packet_ids[position + 1]
            position += 2
            sent = inflight.get(packet_id)
            if sent is None:
                continue
            if (sent is not RELEASED) if released else sent.qos != 1:
                self._freed(freed, packet_ids[: position - 2], now)
                fault = "PUBCOMP for a message that was not released" if released else "PUBACK for a message sent at QoS 2"
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, fault)
            del inflight[packet_id]
            self.inflight_bytes -= sent.size
            freed += 1
        self._freed(freed, packet_ids, now)

    def _freed(self, count: int, packet_ids: bytes, now: float) -> None:
        if count == 0:
            return
        self.effects.stats.inflight_messages -= count
        if self.durable:
            self.effects.records.append(records.acknowledged(self.number, packet_ids))
        if self.unsent is not None:
            self.unsent.settle(packet_ids)
        if self.queued_messages or self.unsent is not None:
            self.drain(now)

    def received(self, packet_ids: bytes) -> None:
        """PUBRECs arrived: the client has these QoS 2 messages; answer each with PUBREL [MQTT-4.3.3-4]."""
        connection = self.connection
        if connection is None:
            return
        inflight = self.inflight
        position: i64 = 0
        end: i64 = len(packet_ids)
        known: list[bytes] = []
        while position < end:
            packet_id = (int(packet_ids[position]) << 8) | packet_ids[position + 1]
            sent = inflight.get(packet_id)
            if sent is None:
                self._release(connection, known)
                known = []
                self._release_unknown(connection, packet_id)
            elif sent.qos != 2:
                self._release(connection, known)
                raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "PUBREC for a message that was sent at QoS 1")
            else:
                del inflight[packet_id]
                self.inflight_bytes -= sent.size
                inflight[packet_id] = RELEASED  # at the end: PUBRELs are sent in the order of PUBRECs [MQTT-4.6.0-4]
                known.append(packet_ids[position : position + 2])
            position += 2
        self._release(connection, known)

    def _release(self, connection: Connection, known: list[bytes]) -> None:
        if known:
            if self.durable:
                self.effects.records.append(records.released(self.number, b"".join(known)))
            if self.unsent is not None:
                self.unsent.settle(b"".join(known))
            connection.push_held(b"\x62\x02" + b"\x62\x02".join(known))

    def _release_unknown(self, connection: Connection, packet_id: int) -> None:
        # 3.1.1 has no reason codes: PUBREL, so that the client can finish. 5.0 says what is wrong.
        reason_code = reasons.PACKET_IDENTIFIER_NOT_FOUND if connection.is_v5 else reasons.SUCCESS
        connection.push_held(encode(PubRel(packet_id, reason_code), connection.version))

    def refused(self, packet_id: int, now: float) -> None:
        """PUBACK or PUBREC with an error code: the message is over, whatever became of it [MQTT-4.4.0-2]."""
        if packet_id in self.inflight:
            if self.unsent is not None:
                self.unsent.waiting.discard(packet_id)
            self._forget(packet_id)
            self.drain(now)

    # --- inbound QoS 2 --------------------------------------------------------------------------------------------------

    def is_received(self, packet_id: int) -> bool:
        """Whether a QoS 2 PUBLISH with this identifier was taken on and not yet released."""
        return self.received_ids is not None and packet_id in self.received_ids

    def remember(self, packet_ids: bytes) -> None:
        """QoS 2 PUBLISHes with these identifiers were taken on."""
        held = self.received_ids
        if held is None:
            held = set()
            self.received_ids = held
        held.update(packet_ids_of(packet_ids))
        if self.durable:
            self.effects.records.append(records.remembered(self.number, packet_ids))

    def awaits(self, pledge: Pledge) -> None:
        """QoS 2 messages that came in are kept elsewhere, once that is done; pledges of one keeper are settled in order."""
        if self.pledges is None:
            self.pledges = {}
        self.pledges[pledge.keeper] = pledge

    def is_kept(self) -> bool:
        """Whether every QoS 2 message that came in is kept, or refused, by those who were to keep it."""
        pledges = self.pledges
        if pledges is None:
            return True
        for keeper, pledge in list(pledges.items()):
            if pledge.is_settled:
                del pledges[keeper]
        if not pledges:
            self.pledges = None
        return not pledges

    def is_unkept(self, packet_id: int) -> bool:
        """Whether the message that was taken on with this identifier has yet to be kept in the topic log."""
        return self.marks is not None and self.marks.get(packet_id, 1) == 0

    def remember_mark(self, packet_ids: bytes, mark: int) -> None:
        """The messages that were taken on with these identifiers are in the topic log with this mark."""
        marks = self.marks
        if marks is None:
            marks = {}
            self.marks = marks
        for packet_id in packet_ids_of(packet_ids):
            marks[packet_id] = mark
        self.effects.records.append(records.kept(mark, self.number, packet_ids))

    def release(self, packet_ids: bytes) -> None:
        """PUBRELs arrived; answer each with PUBCOMP [MQTT-4.3.3-11]."""
        connection = self.connection
        if connection is None:
            return
        held = self.received_ids
        position: i64 = 0
        end: i64 = len(packet_ids)
        known: list[bytes] = []
        while position < end:
            packet_id = (int(packet_ids[position]) << 8) | packet_ids[position + 1]
            if held is not None and packet_id in held:
                held.remove(packet_id)
                known.append(packet_ids[position : position + 2])
            else:
                self._completed(connection, known)
                known = []
                reason_code = reasons.PACKET_IDENTIFIER_NOT_FOUND if connection.is_v5 else reasons.SUCCESS
                connection.push_held(encode(PubComp(packet_id, reason_code), connection.version))
            position += 2
        self._completed(connection, known)

    def _completed(self, connection: Connection, known: list[bytes]) -> None:
        if known:
            if self.marks is not None:
                for packet_id in packet_ids_of(b"".join(known)):
                    self.marks.pop(packet_id, None)
                if not self.marks:
                    self.marks = None
            if self.durable:
                self.effects.records.append(records.forgotten(self.number, b"".join(known)))
            connection.push_held(b"\x70\x02" + b"\x70\x02".join(known))


def packet_ids_of(packed: bytes) -> list[int]:
    """Packet identifiers out of their wire form, two bytes each."""
    return [(packed[at] << 8) | packed[at + 1] for at in range(0, len(packed), 2)]

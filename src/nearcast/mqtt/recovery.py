"""Durable state out of records, and back into them.

:class:`Recovery` replays a journal into a fresh engine. :class:`Snapshot` writes an engine's whole durable state as records, a
piece at a time, *while the engine goes on*: a session's records describe it at the moment they are taken, and whatever changes
later is journalled after them. Records about sessions that are not known (yet) are therefore passed over in a replay: their
STATE comes further on and includes them.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from nearcast.errors import UnknownRecord
from nearcast.mqtt import records
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields
from nearcast.mqtt.retained import Version
from nearcast.mqtt.session import NEVER, RELEASED, Pending, Sent, Session, Spilled, packet_ids_of
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import parse_shared

#: Records beyond those of MQTT itself that change one session.
_OF_SESSIONS: Final = (records.SPILLED, records.UNSPILLED, records.DEPARTING, records.ARRIVED, records.LOST)


class Recovery:
    """Replays records into an engine that has seen no client yet. Raises ``ValueError`` for a record that makes no sense."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wall_offset = engine.effects.wall_offset
        self._publications: dict[int, Publication] = {}
        self.records = 0

    def apply(self, record: bytes) -> None:
        """One record, in the order they were written."""
        if not record:
            raise ValueError("empty record")
        kind = record[0]
        fields = Fields(record)
        self.records += 1
        if kind == records.PUBLISHED:
            publication = fields.publication(self._wall_offset, self._engine.effects)
            self._know(publication)
            self._enqueue(publication, fields)
        elif kind == records.TARGETED:
            known = self._publications.get(fields.number())
            if known is None:
                raise ValueError("a publication is named that was not stored")
            self._enqueue(known, fields)
        elif kind == records.STORED:
            self._know(fields.publication(self._wall_offset, self._engine.effects))
        elif kind == records.RETAINED:
            message = fields.publication(self._wall_offset)
            self._engine.retained.set(message.topic, message)
            self._count_on(message)
            self._version(message.topic, fields)
        elif kind == records.UNRETAINED:
            topic = fields.blob()
            self._engine.retained.remove(topic)
            self._version(topic, fields)
        elif kind == records.RETAINED_SEEN:
            origin_id = fields.blob().decode("utf-8")
            self._engine.retained.seen[origin_id] = fields.number()
            if not self._engine.retained.seen[origin_id]:
                del self._engine.retained.seen[origin_id]
        elif kind == records.SESSION:
            self._session(fields)
        elif kind == records.KEPT:
            self._kept(fields)
        elif kind == records.EPOCH:
            origins = self._engine.origins
            origins.epoch = fields.number()
            origins.reserved = max(origins.reserved, fields.number())
        elif kind == records.ORIGIN:
            origin = self._engine.origins.of(fields.blob().decode("utf-8"))
            origin.epoch = fields.number()
            origin.received = fields.number()
        elif kind == records.ORIGIN_FORGOTTEN:
            self._engine.origins.by_name.pop(fields.blob().decode("utf-8"), None)
        elif records.SESSION < kind <= records.TARGETED or kind in _OF_SESSIONS:
            session = self._engine.sessions.by_number.get(fields.number())
            if session is not None:
                self._change(session, kind, fields)
        elif kind != records.COMPLETE:
            raise UnknownRecord(kind)

    def finish(self, now: float) -> None:
        """All records were replayed: put deadlines in place, and count what is there.

        A session whose client was connected when the broker stopped counts as left now: its expiry starts, its will is due.
        """
        engine = self._engine
        stats = engine.stats
        # A will that is published below is the next message, and must not get the number of one that the journal lost.
        engine.router.next_sequence = max(engine.router.next_sequence, engine.origins.reserved)
        stats.retained_messages = engine.retained.count
        stats.retained_bytes = engine.retained.bytes
        self._publications.clear()
        found = list(engine.sessions.by_client.values())
        for session in found:
            stats.inflight_messages += len(session.inflight)
            session.inflight_bytes = sum([sent.size for sent in session.inflight.values()])
            stats.queued_messages += session.queued_messages
            stats.queued_bytes += session.queued_bytes
        # Only now that everything is counted: wills that are due reach the sessions above.
        for session in found:
            if session.expires_at or session.will_due_at:
                engine.sessions.schedule(session, now)
            elif session.departing_by:
                pass  # its client may be at another broker by now: that one is asked (nearcast.fabric.departures)
            elif session.will is not None or session.expiry_seconds != NEVER:
                engine.sessions.leave(session, False, now, engine.sessions.recovered_will_delay_seconds)

    def _know(self, publication: Publication) -> None:
        self._publications[publication.journal_key] = publication
        self._count_on(publication)

    def _version(self, topic: bytes, fields: Fields) -> None:
        """The version behind a topic's retained message, which only brokers of a fabric write."""
        versions = self._engine.retained.versions
        if fields.position < len(fields.data):
            versions[topic] = Version(fields.number(), fields.blob().decode("utf-8"))
        else:
            versions.pop(topic, None)

    def _count_on(self, publication: Publication) -> None:
        # A retained message keeps its key, too: the next publication must not get the same one.
        effects = self._engine.effects
        effects.next_journal_key = max(effects.next_journal_key, publication.journal_key + 1)
        router = self._engine.router
        if not publication.origin:
            router.next_sequence = max(router.next_sequence, publication.sequence + publication.count)

    def _session(self, fields: Fields) -> None:
        sessions = self._engine.sessions
        number = fields.number()
        whole = fields.number() != 0
        client_id = fields.blob().decode("utf-8")
        session = sessions.by_number.get(number)
        if session is None:
            if not whole:
                return
            session = sessions.begin(client_id)
            del sessions.by_number[session.number]
            session.number = number
            sessions.by_number[number] = session
            sessions.next_number = max(sessions.next_number, number + 1)
        session.durable = True
        session.expiry_seconds = fields.number()
        session.expires_at = self._monotonic(fields.moment())
        session.username = fields.text()
        session.will = None
        session.will_due_at = 0.0
        if fields.number():
            session.will_due_at = self._monotonic(fields.moment())
            session.will = fields.will()
        session.stamp = fields.number() if fields.position < len(fields.data) else 0

    def _monotonic(self, wall: float) -> float:
        # A deadline in the past must stay a deadline; 0 means there is none.
        return max(wall - self._wall_offset, 1e-9) if wall else 0.0

    def _change(self, session: Session, kind: int, fields: Fields) -> None:
        if kind == records.SENT:
            self._send(session, fields.number(), fields.number())
        elif kind == records.DROPPED:
            self._take(session, fields.number())
        elif kind == records.ACKNOWLEDGED:
            for packet_id in _ids(fields.blob()):
                session.inflight.pop(packet_id, None)
        elif kind == records.RELEASED:
            for packet_id in _ids(fields.blob()):
                session.inflight.pop(packet_id, None)
                session.inflight[packet_id] = RELEASED
        elif kind == records.REMEMBERED:
            held = session.received_ids or set()
            held.update(_ids(fields.blob()))
            session.received_ids = held
        elif kind == records.FORGOTTEN:
            for packet_id in _ids(fields.blob()):
                if session.received_ids is not None:
                    session.received_ids.discard(packet_id)
                if session.marks is not None:
                    session.marks.pop(packet_id, None)
        elif kind == records.SUBSCRIBED:
            self._subscribe(session, fields)
        elif kind == records.UNSUBSCRIBED:
            self._unsubscribe(session, fields.blob().decode("utf-8"))
        elif kind == records.SESSION_ENDED:
            self._clear(session)
            del self._engine.sessions.by_client[session.client_id]
            del self._engine.sessions.by_number[session.number]
            self._engine.stats.sessions = len(self._engine.sessions.by_client)
        elif kind == records.STATE:
            self._state(session, fields)
        elif kind == records.DEPARTING:
            session.departing_by = fields.number()
            session.departing_to = fields.blob().decode("utf-8")
        elif kind == records.ARRIVED:
            session.arrived_by = fields.number()
            fences: dict[str, int] = {}
            for _ in range(fields.number()):
                name = fields.blob().decode("utf-8")
                fences[name] = fields.number()
            session.fences = fences or None
        elif kind == records.LOST:
            session.lost = fields.blob()
        elif kind == records.SPILLED:
            file = Spilled(fields.number(), fields.number(), fields.number(), fields.number())
            self._take(session, fields.number())
            if session.spilled is None:
                session.spilled = []
            session.spilled.append(file)
        elif kind == records.UNSPILLED:
            gone = fields.number()
            session.spilled = [file for file in session.spilled or [] if file.number != gone] or None

    def _kept(self, fields: Fields) -> None:
        mark = fields.number()
        effects = self._engine.effects
        effects.last_mark = max(effects.last_mark, mark)
        session = self._engine.sessions.by_number.get(fields.number())
        packet_ids = _ids(fields.blob())
        if session is not None and packet_ids:
            marks = session.marks or {}
            for packet_id in packet_ids:
                marks[packet_id] = mark
            session.marks = marks

    def reconcile(self, log_mark: int) -> None:
        """The log has messages up to this mark. What the journal has beyond it was lost, and is kept when it comes again.

        Whoever knows the log calls this between replay and :meth:`finish`.
        """
        effects = self._engine.effects
        effects.last_mark = max(effects.last_mark, log_mark)
        for session in self._engine.sessions.by_client.values():
            marks = session.marks
            if marks is not None:
                for packet_id, mark in marks.items():
                    if mark > log_mark:
                        marks[packet_id] = 0

    def _enqueue(self, publication: Publication, fields: Fields) -> None:
        for _ in range(fields.number()):
            session = self._engine.sessions.by_number.get(fields.number())
            count = fields.number()
            terms = fields.terms()
            if session is not None:
                _append(session, Pending(publication, 0, count, terms))

    def _take(self, session: Session, count: int) -> list[Pending]:
        """Remove ``count`` messages from the front of a queue."""
        taken: list[Pending] = []
        queue = session.queue
        while count > 0:
            if not queue:
                raise ValueError("more messages left a queue than were in it")
            front = queue[0]
            step = min(count, front.count)
            taken.append(Pending(front.publication, front.start, step, front.terms))
            front.start += step
            front.count -= step
            session.queued_messages -= step
            session.queued_bytes -= step * front.publication.stride
            count -= step
            if front.count == 0:
                queue.popleft()
        return taken

    def _send(self, session: Session, first_id: int, count: int) -> None:
        for stretch in self._take(session, count):
            sent = Sent(stretch.publication, stretch.start, first_id, stretch.terms)
            for packet_id in range(first_id, first_id + stretch.count):
                session.inflight[packet_id] = sent
            first_id += stretch.count
        session.next_id = 1 if first_id > 65_535 else first_id

    def _subscribe(self, session: Session, fields: Fields) -> None:
        topic_filter = fields.blob().decode("utf-8")
        options = fields.number()
        subscription = Subscription(
            session,
            topic_filter,
            options & 3,
            (options & 4) != 0,
            (options & 8) != 0,
            (options >> 4) & 3,
            fields.number(),
        )
        session.subscriptions[topic_filter] = subscription
        group, inner = parse_shared(topic_filter)
        self._engine.tree.add(group, inner, subscription)

    def _unsubscribe(self, session: Session, topic_filter: str) -> None:
        if session.subscriptions.pop(topic_filter, None) is not None:
            group, inner = parse_shared(topic_filter)
            self._engine.tree.remove(group, inner, session.client_id)

    def _clear(self, session: Session) -> None:
        for topic_filter in list(session.subscriptions):
            self._unsubscribe(session, topic_filter)
        session.inflight = {}
        session.queue = None
        session.queued_messages = 0
        session.queued_bytes = 0
        session.received_ids = None
        session.marks = None
        session.spilled = None

    def _state(self, session: Session, fields: Fields) -> None:
        self._clear(session)
        session.next_id = fields.number()
        for _ in range(fields.number()):
            self._subscribe(session, fields)
        for _ in range(fields.number()):
            packet_id = fields.number()
            if fields.number() == 0:
                session.inflight[packet_id] = RELEASED
                continue
            publication = self._publication(fields.number())
            index = fields.number()
            session.inflight[packet_id] = Sent(publication, index, packet_id, fields.terms())
        for _ in range(fields.number()):
            publication = self._publication(fields.number())
            start = fields.number()
            count = fields.number()
            _append(session, Pending(publication, start, count, fields.terms()))
        session.received_ids = set(_ids(fields.blob()))

    def _publication(self, key: int) -> Publication:
        publication = self._publications.get(key)
        if publication is None:
            raise ValueError("a publication is named that was not stored")
        return publication


def _append(session: Session, pending: Pending) -> None:
    queue = session.queue
    if queue is None:
        queue = deque()
        session.queue = queue
    queue.append(pending)
    session.queued_messages += pending.count
    session.queued_bytes += pending.count * pending.publication.stride


def _ids(packet_ids: bytes) -> list[int]:
    if len(packet_ids) % 2:
        raise ValueError("half a packet identifier")
    return packet_ids_of(packet_ids)


class Snapshot:
    """All durable state of an engine as records, a piece at a time. Making one begins a new journal generation."""

    def __init__(self, engine: Engine) -> None:
        engine.effects.generation += 1
        self._engine = engine
        self._begun = False
        self._sessions = [session.number for session in engine.sessions.by_client.values() if session.durable]
        self._topics = [message.topic for message in engine.retained.all() if message.topic[:5] != b"$SYS/"]
        self._topics += [topic for topic in engine.retained.versions if engine.retained.get(topic) is None]

    def step(self, max_bytes: int) -> list[bytes]:
        """The next records, somewhat more than ``max_bytes`` of them at the most; none when all is written."""
        found: list[bytes] = []
        size = 0
        effects = self._engine.effects
        if not self._begun:
            self._begun = True
            if effects.last_mark:
                found.append(records.kept(effects.last_mark, 0, b""))
            origins = self._engine.origins
            if origins.epoch:
                found.append(records.epoch(origins.epoch, origins.reserved))
            for origin in origins.by_name.values():
                found.append(records.origin(origin.name, origin.epoch, origin.received))
            for origin_id, stamp in self._engine.retained.seen.items():
                found.append(records.retained_seen(origin_id, stamp))
        while size < max_bytes and (self._sessions or self._topics):
            before = len(found)
            if self._sessions:
                session = self._engine.sessions.by_number.get(self._sessions.pop())
                if session is not None and session.durable:
                    self._describe(session, found)
            else:
                topic = self._topics.pop()
                message = self._engine.retained.get(topic)
                version = self._engine.retained.versions.get(topic)
                if message is not None:
                    found.append(records.retained(message, effects.wall_offset, version))
                elif version is not None:
                    found.append(records.unretained(topic, version))
            for record in found[before:]:
                size += len(record)
        return found

    def _describe(self, session: Session, found: list[bytes]) -> None:
        effects = self._engine.effects
        publications = [sent.publication for sent in session.inflight.values() if sent is not RELEASED]
        if session.queue is not None:
            publications.extend([pending.publication for pending in session.queue])
        for publication in publications:
            if publication.journal_generation != effects.generation:
                found.append(records.stored(publication, effects))
        found.append(records.session(session, effects.wall_offset, True))
        found.append(records.state(session))
        if session.spilled is not None:
            for file in session.spilled:
                found.append(records.spilled(session.number, file, 0))
        if session.arrived_by:
            found.append(records.arrived(session))
        if session.lost:
            found.append(records.lost(session.number, session.lost))
        if session.departing_by:
            found.append(records.departing(session.number, session.departing_by, session.departing_to))
        if session.marks is not None:
            for packet_id, mark in session.marks.items():
                found.append(records.kept(mark, session.number, packet_id.to_bytes(2, "big")))

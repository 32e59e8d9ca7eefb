"""Messages from broker to broker: in order, each once, whatever happens to the link.

Another broker is a session of the engine (:class:`~nearcast.fabric.outgoing.PeerSession`), whose subscriptions are that
broker's interest. QoS 1 and 2 messages for it stand in the session's queue, under the queue's bounds and, where there is a
journal, in the journal, until the other broker says that it has them (RECEIVED). A message's identity is (origin, sequence):
the broker that received it from a client, and the number it got there.

MESSAGES carries one publication, its packets unchanged, with the sequence of its first message and that of the last reliable
message sent before it (:mod:`nearcast.fabric.messages`). So the receiver sees what it has already (resent after a reconnect)
and what is missing between. When a link comes up, each side says what it has (CHANNEL); the sender drops that and goes on
behind it. A receiver that sees a gap says CHANNEL again; a sender that hears nothing for long goes back by itself. RECEIVED
leaves the receiver once what it confirms is durable there: the journal gets one ORIGIN record in the same frame as all that
the messages did.

QoS 0 messages go out at once or, when there is no link or no room, not at all; they have sequences of the same count. They may
overtake reliable ones, which wait for the disk: between two brokers there are two streams, each in order. BARRIER asks how far
they are; PROGRESS answers, once in each stream and in order with its messages: everything up to that sequence was sent before.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.errors import RemoteProtocolError, StorageUnavailable
from nearcast.fabric import frames
from nearcast.fabric.errands import is_errand, is_owned_errand, is_word
from nearcast.fabric.frames import frame
from nearcast.fabric.messages import Arrived
from nearcast.fabric.outgoing import PEER_PREFIX, RELIABLE_STREAM, UNRELIABLE_STREAM, PeerSession, for_groups
from nearcast.fabric.parking import PARKING_PREFIX, ParkingSession
from nearcast.fabric.relaying import RELAY_NAME, RelaySession
from nearcast.fabric.set_sessions import SET_PREFIX, SetSession
from nearcast.fabric.spool import SpoolStorage, stretches_of
from nearcast.mqtt import reasons, records
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields, number
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import is_string, parse_shared, topic_fault

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.parts import Peer

__all__ = ["PEER_PREFIX", "RELIABLE_STREAM", "UNRELIABLE_STREAM", "Channels", "PeerSession", "ProgressWatcher"]

#: How often sessions that catch up are looked at, and all others.
PACE_S: Final = 0.05
CHECK_S: Final = 1.0

#: A gap is told once for every so many seconds: what is on its way arrives behind it, too.
GAP_S: Final = 1.0


class ProgressWatcher(Protocol):
    """Who asked for PROGRESS."""

    def progressed(self, peer: Peer, token: int, stream: int, now: float) -> None:
        """All that was asked for with this token has arrived on one of the two streams."""


class Channels:
    """The messages of all peers, both ways."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._origins = fabric.engine.origins
        self._router = fabric.engine.router
        self._unconfirmed: dict[str, Peer] = {}
        self._max_topic_levels: int = fabric.limits.max_topic_levels
        self._max_packet_bytes: int = fabric.limits.max_packet_bytes
        self._gaps: dict[str, float] = {}
        self._next_check = 0.0
        self._next_pace = 0.0
        self.spool: SpoolStorage | None = None
        # Files of brokers that were forgotten, as (session, file): one is looked through at a time.
        self._ownerless: list[tuple[int, int]] = []
        self.watcher: ProgressWatcher | None = None
        #: Messages that came again, messages with a topic that is not allowed here, gaps that were seen.
        self.duplicates = 0
        self.refused = 0
        self.gaps = 0
        self.received_messages = 0

    # --- sessions -------------------------------------------------------------------------------------------------------

    def session_for(self, name: str) -> PeerSession:
        """The session of a peer: recovered from the journal, or new."""
        sessions = self._engine.sessions
        effects = self._engine.effects
        known = sessions.by_client.get(PEER_PREFIX + name)
        if isinstance(known, PeerSession):
            return known
        settings = self._fabric.settings
        session_number = sessions.next_number if known is None else known.number
        session: PeerSession
        if name == RELAY_NAME:
            session = RelaySession(session_number, effects, settings.max_queued_messages, settings.max_queued_bytes)
        elif name[:1] == PARKING_PREFIX:
            session = ParkingSession(name, session_number, effects, settings.max_queued_messages, settings.max_queued_bytes)
        elif name[:1] == SET_PREFIX:
            session = SetSession(name, session_number, effects, settings.max_queued_messages, settings.max_queued_bytes)
        else:
            session = PeerSession(name, session_number, effects, settings.max_queued_messages, settings.max_queued_bytes)
        session.max_unconfirmed_bytes = settings.max_unconfirmed_bytes
        session.bytes_per_second = settings.catch_up_bytes_per_second
        session.max_spilled_bytes = settings.max_spilled_bytes
        session.spool = self.spool
        session.spill()
        sessions.install(session)
        if known is not None:
            session.adopt(known)
            for old in known.subscriptions.values():
                subscription = Subscription(session, old.topic_filter, old.qos, retain_as_published=True)
                session.subscriptions[old.topic_filter] = subscription
                group, inner = parse_shared(old.topic_filter)
                self._engine.tree.add(group, inner, subscription)
            return session
        sessions.next_number += 1
        if effects.gated:
            session.durable = True
            effects.records.append(records.session(session, effects.wall_offset, True))
        return session

    def use_spool(self, spool: SpoolStorage) -> None:
        """Put there what is too much for memory. Files that the journal knows nothing of are removed."""
        self.spool = spool
        known: set[tuple[int, int]] = set()
        sessions = [peer.session for peer in self._fabric.peers.values()]
        if self._fabric.broadcast.relay is not None:
            sessions.append(self._fabric.broadcast.relay.session)
        sessions += self._fabric.ownership.parking_sessions()
        sessions += list(self._fabric.sets.sessions.values())
        for session in sessions:
            for file in session.spilled or ():
                known.add((session.number, file.number))
        for found in spool.files():
            if found not in known:
                spool.remove(found[0], found[1])
        # Not before: a file that is begun now is not known either, and may have the name of one that was left.
        for session in sessions:
            session.spool = spool
            session.spill()

    def spilled(self, session_number: int, file_number: int, failed: bool) -> None:
        """A file that was begun is on disk, or cannot be written."""
        session = self._engine.sessions.by_number.get(session_number)
        if not isinstance(session, PeerSession):
            if self.spool is not None:
                self.spool.remove(session_number, file_number)
        elif failed:
            session.spill_failed(file_number)
        else:
            session.spill_done(file_number)

    def forget(self, peer: Peer, now: float) -> None:
        """A broker left for good: nothing is kept for it any more. What one member of a group was to have, others get."""
        session = peer.session
        session.closed()
        self._unconfirmed.pop(peer.name, None)
        self._gaps.pop(peer.name, None)
        files = session.spilled or []
        session.spilled = None
        self._engine.sessions.end(session, now)
        self._origins.forget(peer.name)
        if self.spool is not None:
            self._ownerless += [(session.number, file.number) for file in files]
            for file_number in session.useless_files:
                self.spool.remove(session.number, file_number)

    def _share_out(self, spool: SpoolStorage, now: float) -> None:
        """A file of a broker that was forgotten: what it was to give to one member of a group, others get."""
        session_number, file_number = self._ownerless.pop(0)
        try:
            stretches = stretches_of(spool.read(session_number, file_number), self._engine.effects.wall_offset, 0)
        except (StorageUnavailable, ValueError):
            stretches = deque()
        for topic_filter, publication in for_groups(stretches):
            self._router.pass_on(topic_filter, publication, now)
        spool.remove(session_number, file_number)

    # --- frames ---------------------------------------------------------------------------------------------------------

    def handles(self, kind: int) -> bool:
        return frames.CHANNEL <= kind <= frames.BARRIER

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        kind = content[0]
        if kind == frames.MESSAGES:
            self._arrived(peer, Arrived(content, now), now)
            return
        fields = Fields(content)
        if kind == frames.RECEIVED:
            peer.session.confirmed(fields.number(), now)
        elif kind == frames.CHANNEL:
            last = fields.number()
            peer.session.max_packet_bytes = fields.number()
            peer.session.opened(last, now)
        elif kind == frames.BARRIER:
            self._barrier(peer, fields.number())
        else:
            self._progress(peer, fields.number(), fields.number(), fields.number(), now)

    def peer_up(self, peer: Peer, now: float) -> None:
        self._gaps.pop(peer.name, None)
        self._say_what_we_have(peer)

    def _say_what_we_have(self, peer: Peer) -> None:
        peer.send_held(frame(frames.CHANNEL, number(peer.origin.received), number(self._max_packet_bytes)))

    def peer_down(self, peer: Peer, now: float) -> None:
        peer.session.closed()

    def _arrived(self, peer: Peer, arrived: Arrived, now: float) -> None:
        origin = peer.origin
        publication = arrived.publication
        count = arrived.count
        last = arrived.last
        if arrived.reliable:
            self._unconfirmed[peer.name] = peer
            received = origin.received
            if last <= received:
                self.duplicates += count
                return
            if arrived.previous > received:
                self._gap(peer, now)
                return
            origin.received = last
            if arrived.sequence <= received and publication is not None:
                self.duplicates += received + 1 - arrived.sequence
                publication = publication.cut(received + 1 - arrived.sequence, last - received)
        elif last > peer.received_unreliable:
            peer.received_unreliable = last
        if publication is None:
            return
        topic = publication.topic
        if self._router.remembered(topic) is None:
            if not is_string(topic):
                raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, "messages with a topic that is none")
            if topic_fault(topic, self._max_topic_levels) or topic[:5] == b"$SYS/":
                # Allowed where it was published. Ending the link would bring it again, for ever.
                self.refused += publication.count
                return
        publication.origin = peer.number
        self.received_messages += publication.count
        witness = self._engine.effects.witness
        if witness is not None and not is_word(arrived.via):
            witness.processed(publication, now)
        if is_errand(arrived.via):
            self._fabric.broadcast.arrived(peer, publication, arrived.via, now)
        elif is_owned_errand(arrived.via):
            self._fabric.ownership.arrived(peer, publication, arrived.via, now)
        else:
            self.bridge(peer, publication, arrived.via, now)

    def bridge(self, peer: Peer, publication: Publication, via: str, now: float) -> None:
        """Hand messages of another broker to those of ours who want them and did not have them elsewhere."""
        if peer.fenced:
            self._fabric.handover.fences.bridge(peer, publication, via, now)
        else:
            self._engine.bridge(publication, via, now)

    def _gap(self, peer: Peer, now: float) -> None:
        """Something is missing in between, and what follows it is of no use: ask for all of it again."""
        if now - self._gaps.get(peer.name, -GAP_S) >= GAP_S:
            self._gaps[peer.name] = now
            self.gaps += 1
            self._say_what_we_have(peer)

    # --- how far the streams are ----------------------------------------------------------------------------------------

    def ask_progress(self, peer: Peer, token: int) -> bool:
        """Have :class:`ProgressWatcher` told when all has arrived that the peer numbered before this reaches it."""
        return peer.send(frame(frames.BARRIER, number(token)))

    def _barrier(self, peer: Peer, token: int) -> None:
        position = self._router.next_sequence - 1
        peer.send(frame(frames.PROGRESS, number(token), number(UNRELIABLE_STREAM), number(position)))
        peer.session.barrier(token, position)

    def _progress(self, peer: Peer, token: int, stream: int, position: int, now: float) -> None:
        if stream == UNRELIABLE_STREAM:
            peer.received_unreliable = max(peer.received_unreliable, position)
        elif position > peer.origin.received:
            # Whatever comes next has a higher sequence, so this is as good as a message.
            peer.origin.received = position
            self._unconfirmed[peer.name] = peer
        if self.watcher is not None:
            self.watcher.progressed(peer, token, stream, now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        """Confirm what came since the last time, once per peer, behind the records that keep it."""
        origins = self._origins
        if self._router.next_sequence > origins.reserved:
            origins.reserve(self._router.next_sequence)
        if self._unconfirmed:
            for peer in self._unconfirmed.values():
                origins.advanced(peer.origin)
                peer.send_held(frame(frames.RECEIVED, number(peer.origin.received)))
            self._unconfirmed = {}

    def tick(self, now: float) -> None:
        """Pace what gathered, send again what got lost on the way, give up files and brokers that are of no use any more."""
        settings = self._fabric.settings
        self._next_pace = now + PACE_S
        thorough = now >= self._next_check
        if thorough:
            self._next_check = now + CHECK_S
            if self._ownerless and self.spool is not None:
                self._share_out(self.spool, now)
        for peer in list(self._fabric.peers.values()):
            session = peer.session
            if session.catching_up:
                session.drain(now)
            if not thorough:
                continue
            stuck = session.stuck_since()
            if stuck and now - stuck > settings.fail_after_seconds:
                session.opened(session.last_confirmed, now)
            if session.useless_files and self.spool is not None:
                files, session.useless_files = session.useless_files, []
                for file_number in files:
                    self.spool.remove(session.number, file_number)
            session.try_files_again(now)
            if not peer.up and now - peer.last_seen > settings.keep_for_seconds:
                self._fabric.forget(peer, now)

    def next_deadline(self) -> float:
        for peer in self._fabric.peers.values():
            if peer.session.catching_up:
                return self._next_pace
        return self._next_check


def forget_peers(engine: Engine, now: float) -> None:
    """This broker is no longer part of a fabric: nothing is kept for those that were."""
    for session in list(engine.sessions.by_client.values()):
        if session.client_id[:1] == PEER_PREFIX:
            engine.sessions.end(session, now)
    for name in list(engine.origins.by_name):
        engine.origins.forget(name)

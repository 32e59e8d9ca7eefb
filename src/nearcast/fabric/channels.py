"""Messages from broker to broker: in order, each once, whatever happens to the link.

Another broker is a session of the engine (:class:`PeerSession`), whose subscriptions are that broker's interest. QoS 1 and 2
messages for it stand in the session's queue, under the queue's bounds and, where there is a journal, in the journal, until the
other broker says that it has them (RECEIVED). A message's identity is (origin, sequence): the broker that received it from a
client, and the number it got there.

MESSAGES carries one publication, its packets unchanged, with the sequence of its first message and that of the last reliable
message sent before it. So the receiver sees what it has already (resent after a reconnect) and what is missing between. When a
link comes up, each side says what it has (CHANNEL); the sender drops that and goes on behind it. RECEIVED leaves the receiver
once what it confirms is durable there.

QoS 0 messages go out at once or, when there is no link or no room, not at all; they have sequences of the same count.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt import reasons, records
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import NEVER, Pending, Session
from nearcast.mqtt.topics import is_string, topic_fault

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.parts import Peer

#: Begins the client identifier of another broker's session: no client can have such a one [MQTT-1.5.4-2].
PEER_PREFIX: Final = "\0"

_V5: Final = 1
_FORWARDABLE: Final = 2
_RELIABLE: Final = 4
_VIA: Final = 8


class PeerSession(Session):
    """What another broker is to get. Everything stays in ``queue`` until it is confirmed; ``waiting`` is what was not sent
    yet."""

    def __init__(self, name: str, session_number: int, effects: Effects, max_messages: int, max_bytes: int) -> None:
        super().__init__(PEER_PREFIX + name, session_number, effects, max_messages, max_bytes)
        self.is_peer = True
        self.expiry_seconds = NEVER
        self.peer: Peer | None = None
        self.ready = False
        self.waiting: deque[Pending] = deque()
        self.last_sent = 0
        self.unconfirmed_bytes = 0
        self.max_unconfirmed_bytes = 1

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        accepted = self._enqueue(publication, 0, publication.count, terms)
        if accepted and self.queue is not None:
            self.waiting.append(self.queue[-1])
            self.drain(now)
        return accepted

    def forward(self, publication: Publication, via: str, now: float) -> None:
        peer = self.peer
        link = None if peer is None else peer.link
        if link is None or not self.ready or not link.connection.has_room():
            self.effects.stats.dropped_slow_consumer += publication.count
            return
        link.send(_messages(publication, 0, via, now, reliable=False))

    def drain(self, now: float) -> None:
        peer = self.peer
        link = None if peer is None else peer.link
        if link is None or not self.ready:
            return
        waiting = self.waiting
        while waiting and self.unconfirmed_bytes < self.max_unconfirmed_bytes and link.connection.has_room():
            pending = waiting.popleft()
            publication = pending.publication
            if pending.count != publication.count:
                publication = publication.cut(pending.start, pending.count)
            link.send_held(_messages(publication, self.last_sent, pending.terms.via, now, reliable=True))
            self.last_sent = publication.sequence + publication.count - 1
            self.unconfirmed_bytes += pending.count * pending.publication.stride

    def opened(self, last: int, now: float) -> None:
        """The other broker says what it has: drop that, and send the rest (again)."""
        self.confirmed(last, now)
        self.waiting = deque(self.queue) if self.queue is not None else deque()
        self.unconfirmed_bytes = 0
        self.last_sent = last
        self.ready = True
        self.drain(now)

    def closed(self) -> None:
        """There is no link any more."""
        self.ready = False

    def confirmed(self, last: int, now: float) -> None:
        """The other broker has everything up to this sequence."""
        queue = self.queue
        done = 0
        size = 0
        while queue:
            pending = queue[0]
            if pending.publication.sequence + pending.start + pending.count - 1 > last:
                break
            queue.popleft()
            done += pending.count
            size += pending.count * pending.publication.stride
        if not done:
            return
        if not queue:
            self.queue = None
        stats = self.effects.stats
        self.queued_messages -= done
        self.queued_bytes -= size
        stats.queued_messages -= done
        stats.queued_bytes -= size
        self.unconfirmed_bytes = max(0, self.unconfirmed_bytes - size)
        if self.durable:
            self.effects.records.append(records.dropped(self.number, done))
        self.drain(now)


def _messages(publication: Publication, previous: int, via: str, now: float, *, reliable: bool) -> bytes:
    flags = (_V5 if publication.v5 else 0) | (_FORWARDABLE if publication.raw_flags >= 0 else 0)
    flags |= (_RELIABLE if reliable else 0) | (_VIA if via else 0)
    left_ms = 0
    if publication.expires_at > 0:
        left_ms = max(1, int((publication.expires_at - now) * 1e3) + 1)
    return frame(
        frames.MESSAGES,
        number(flags),
        number(publication.sequence),
        number(previous),
        number(publication.count),
        number(publication.stride),
        number(publication.head_size),
        number(left_ms),
        blob(publication.properties),
        blob(publication.topic),
        blob(publication.packets),
        blob(via.encode("utf-8")) if via else b"",
    )


class Channels:
    """The messages of all peers, both ways."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self._unconfirmed: dict[str, Peer] = {}
        self._max_topic_levels: int = fabric.limits.max_topic_levels

    def session_for(self, name: str) -> PeerSession:
        """The session of a peer: recovered from the journal, or new."""
        sessions = self._engine.sessions
        known = sessions.by_client.get(PEER_PREFIX + name)
        if isinstance(known, PeerSession):
            session = known
        else:
            settings = self._fabric.settings
            session = PeerSession(
                name, sessions.next_number, self._engine.effects, settings.max_queued_messages, settings.max_queued_bytes
            )
            sessions.next_number += 1
            sessions.install(session)
        session.max_unconfirmed_bytes = self._fabric.settings.max_unconfirmed_bytes
        return session

    def handles(self, kind: int) -> bool:
        return kind == frames.MESSAGES or kind == frames.RECEIVED or kind == frames.CHANNEL

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        kind = content[0]
        if kind == frames.MESSAGES:
            self._messages(peer, content, now)
        elif kind == frames.RECEIVED:
            peer.session.confirmed(Fields(content).number(), now)
        else:
            peer.session.opened(Fields(content).number(), now)

    def peer_up(self, peer: Peer, now: float) -> None:
        peer.send_held(frame(frames.CHANNEL, number(peer.received)))

    def peer_down(self, peer: Peer, now: float) -> None:
        peer.session.closed()

    def settle(self, now: float) -> None:
        """Confirm what came since the last time, once per peer, behind the records that keep it."""
        if self._unconfirmed:
            for peer in self._unconfirmed.values():
                peer.send_held(frame(frames.RECEIVED, number(peer.received)))
            self._unconfirmed = {}

    def tick(self, now: float) -> None:
        """Nothing yet."""

    def next_deadline(self) -> float:
        return float("inf")

    def _messages(self, peer: Peer, content: bytes, now: float) -> None:
        fields = Fields(content)
        flags = fields.number()
        sequence = fields.number()
        previous = fields.number()
        count = fields.number()
        stride = fields.number()
        head_size = fields.number()
        left_ms = fields.number()
        properties = fields.blob()
        topic = fields.blob()
        packets = fields.blob()
        via = fields.blob().decode("utf-8") if flags & _VIA else ""
        if not packets or count < 1 or (stride and stride * count != len(packets)):
            raise RemoteProtocolError(reasons.MALFORMED_PACKET, "messages whose sizes do not fit")
        last = sequence + count - 1
        if flags & _RELIABLE:
            self._unconfirmed[peer.name] = peer
            if last <= peer.received:
                self._fabric.duplicates += count
                return
            if previous > peer.received:
                return  # something is missing in between: RECEIVED says so, and the sender goes back
            peer.received = last
        else:
            peer.received_unreliable = last
        expires_at = now + left_ms / 1e3 if left_ms else 0.0
        publication = Publication(
            topic, packets, count, stride, (flags & _V5) != 0, head_size, properties, expires_at, (flags & _FORWARDABLE) != 0
        )
        publication.sequence = sequence
        publication.origin = peer.number
        if self._engine.router.remembered(topic) is None and (
            not is_string(topic) or topic_fault(topic, self._max_topic_levels)
        ):
            raise RemoteProtocolError(reasons.TOPIC_NAME_INVALID, "messages with a topic that is none")
        self._engine.bridge(publication, via, now)

"""One session on its way out of a broker: what is known of it, and what goes along with it.

Used by :mod:`nearcast.fabric.departures`, which decides.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.fences import Fences, Reached
from nearcast.fabric.frames import frame
from nearcast.fabric.interest import HeldAnswer
from nearcast.fabric.shadows import Buffer, Waiting
from nearcast.fabric.trunks import Channel
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.pledges import Answer
from nearcast.mqtt.records import blob, number
from nearcast.mqtt.session import Pending, Session

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

# How far it is; nearcast.fabric.departures draws it.
PREPARING: Final = 1
CATCHING_UP: Final = 2
READY: Final = 3
FROZEN: Final = 4

#: Of SHADOW: the client is away, so nobody will say FREEZE or ADOPT.
WITHOUT_CLIENT: Final = 1

#: Of SHADOW: the client went on there; this is what its session has here (nearcast.fabric.leftovers).
LEFTOVERS: Final = 2

NO_LIMIT_BYTES: Final = 1 << 62


class Departure:
    """One session on its way out."""

    def __init__(self, move: int, session: Session, target: str, channel: Channel | None, now: float) -> None:
        self.move = move
        self.session = session
        self.target = target
        self.channel = channel
        self.leftovers = False
        self.state = PREPARING
        self.deadline = now
        self.ask_again_at = now
        self.asked: set[str] = set()
        self.round = 0
        self.told = b""
        #: Every broker that knows of the new broker's interest, and its sequence when it did.
        self.members: dict[str, int] = {}
        self.said_ready = False
        self.freeze_asked = False
        # Once FROZEN: what the new broker gets, where the client's later messages are, how many were in the queue.
        self.agreement = b""
        self.content = b""
        self.buffer: Buffer | None = None
        self.waiting: Waiting | None = None
        self.queued_before = 0
        self.abandoned = False
        #: Answers to SUBSCRIBE that wait for other brokers, for when the client is back.
        self.answers: list[HeldAnswer] = []
        #: Acknowledgements that wait for replica sets, likewise.
        self.pledged: deque[Answer] | None = None
        #: Read from the journal: the new broker is to be asked what it has.
        self.recovered = False
        #: Until when that broker may be out of reach before the session counts as left here.
        self.ask_until = 0.0
        #: The channel on which the gateway brings the client back.
        self.returning: Channel | None = None

    @property
    def without_client(self) -> bool:
        return self.channel is None and not self.agreement


def reached_fields(fabric: Fabric, fences: Fences, session: Session) -> bytes:
    """How far the client's messages of every origin have come; what it had before it came here counts, too."""
    ours = fabric.engine.router.next_sequence - 1
    parts = [blob(fabric.name.encode("utf-8")) + number(ours) + number(ours)]
    for peer in fabric.peers.values():
        reliable = peer.received
        unreliable = peer.received_unreliable
        before: Reached | None = fences.of(peer.name, session.number)
        if before is not None:
            reliable = max(reliable, before.reliable)
            unreliable = max(unreliable, before.unreliable)
        parts.append(blob(peer.name.encode("utf-8")) + number(reliable) + number(unreliable))
    for name, place in fabric.sets.cursors.all():
        before = fences.of(name, session.number)
        place = place if before is None else max(place, before.reliable)
        parts.append(blob(name.encode("utf-8")) + number(place) + number(place))
    return number(len(parts)) + b"".join(parts)


def send_owed(engine: Engine, connection: Connection, session: Session, now: float) -> None:
    """Retained QoS 0 messages that waited for room go out now: the new broker does not know that they are owed."""
    if connection.owed_retained is not None:
        connection.congested = False
        connection.max_output_bytes = NO_LIMIT_BYTES
        engine.requests.send_owed(connection, session, now)


def discard(session: Session, queued_before: int) -> None:
    """Forget the messages that went along with the session, and those that the new broker gets by itself."""
    stats = session.effects.stats
    stats.inflight_messages -= len(session.inflight)
    session.inflight = {}
    session.inflight_bytes = 0
    queue = session.queue
    if queue is None:
        return
    kept: deque[Pending] = deque()
    messages = 0
    size = 0
    for index, pending in enumerate(queue):
        if index >= queued_before and pending.terms.via:
            kept.append(pending)
            messages += pending.count
            size += pending.count * pending.publication.stride
    stats.queued_messages -= session.queued_messages - messages
    stats.queued_bytes -= session.queued_bytes - size
    session.queue = kept
    session.queued_messages = messages
    session.queued_bytes = size


def turn_away(channel: Channel) -> None:
    """The session is another connection's: the gateway must close this one. It would take the session back otherwise."""
    if not channel.closed:
        channel.trunk.link.send(frame(frames.CLIENT_CLOSE, number(channel.number), blob(b"session taken over")))
        channel.trunk.end(channel)


def abandon_frame(move: int, reason: str) -> bytes:
    """The old broker's ABANDON: the new one is not to have the session; what does it have?"""
    return frame(frames.ABANDON, number(move), number(1), blob(reason.encode("utf-8")))

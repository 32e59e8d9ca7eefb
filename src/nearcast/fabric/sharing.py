"""Shared subscriptions over many brokers: each message goes to one member of the group, wherever it is, the nearest first.

That a broker has members at all is part of its interest (:mod:`nearcast.fabric.interest`); here brokers tell each other
which groups have a member that is *connected*, in GROUPS frames: everything when a link comes up, then what changed. The
broker that receives a message from a client decides who gets it, in this order:

1. its own members that are connected,
2. those of the nearest broker that has some; brokers that are about as near take turns,
3. its own members that are away, whose sessions keep the message,
4. another broker whose members are away.

The choice travels with the message (:data:`nearcast.mqtt.routing.VIA_SEPARATOR`). A broker that has no member left when it
comes passes it on, a few times at most. This is a preference and may be outdated by a round trip; that a message has one
receiver does not depend on it, because one broker decides and one other serves.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabric.outgoing import PeerSession
from nearcast.fabric.parts import Part, Peer
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

SHARE_PREFIX: Final = "$share/"

#: A broker counts as near as the nearest when its round-trip time is within this of it.
SAME_DISTANCE_RATIO: Final = 1.25
SAME_DISTANCE_MS: Final = 1.0

#: What is taken for the distance to a broker that was not measured yet.
UNKNOWN_MS: Final = 1_000.0

#: Bytes of one frame, beyond which another one is begun.
MAX_FRAME_BYTES: Final = 262_144


class Sharing(Part):
    """Knows where groups have members that are connected, and chooses among brokers. See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._tree = fabric.engine.tree
        #: Our groups that have a member which is connected.
        self._connected: dict[str, None] = {}
        self._changed: dict[str, None] = {}
        #: The same of every other broker, by the client identifier of its session.
        self._elsewhere: dict[str, set[str]] = {}
        self._turn = 0
        fabric.engine.router.sharing = self
        fabric.engine.sessions.watchers.append(self)
        fabric.add_part(self, [frames.GROUPS])

    # --- ours -----------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Count in the sessions that the journal had."""
        for session in self._fabric.engine.sessions.by_client.values():
            if not session.is_peer:
                self.attached(session)

    def attached(self, session: Session) -> None:
        for topic_filter in session.subscriptions:
            if topic_filter.startswith(SHARE_PREFIX):
                self._changed[topic_filter] = None

    def left(self, session: Session) -> None:
        self.attached(session)

    def ended(self, session: Session) -> None:
        self.attached(session)

    def shared(self, topic_filter: str) -> None:
        self._changed[topic_filter] = None

    def _has_connected(self, topic_filter: str) -> bool:
        group, inner = parse_shared(topic_filter)
        found = self._tree.find_group(group, inner)
        if found is not None:
            for member in found.members.values():
                if member.session.connection is not None:
                    return True
        return False

    def settle(self, now: float) -> None:
        if not self._changed:
            return
        changes: list[tuple[str, bool]] = []
        for name in self._changed:
            connected = self._has_connected(name)
            if connected == (name in self._connected):
                continue
            if connected:
                self._connected[name] = None
            else:
                del self._connected[name]
            changes.append((name, connected))
        self._changed = {}
        if changes:
            for data in _groups(changes, False):
                for peer in self._fabric.peers.values():
                    peer.send(data)

    # --- theirs ---------------------------------------------------------------------------------------------------------

    def peer_up(self, peer: Peer, now: float) -> None:
        self.settle(now)
        for data in _groups([(name, True) for name in self._connected], True):
            peer.send(data)

    def peer_gone(self, peer: Peer, now: float) -> None:
        self._elsewhere.pop(peer.session.client_id, None)

    def handle(self, peer: Peer, content: bytes, now: float) -> None:
        fields = Fields(content)
        known = self._elsewhere.setdefault(peer.session.client_id, set())
        if fields.number():
            known.clear()
        for _ in range(fields.number()):
            connected = fields.number()
            name = fields.blob().decode("utf-8")
            if connected:
                known.add(name)
            else:
                known.discard(name)

    # --- the choice -----------------------------------------------------------------------------------------------------

    def choose(self, members: list[Subscription], connected: bool) -> Subscription | None:
        """The broker to serve a group, as its membership; brokers without a link serve only when no other does."""
        if len(members) == 1 and not connected:
            return members[0]
        nearest_ms = float("inf")
        found: list[tuple[float, Subscription]] = []
        for member in members:
            session = member.session
            if not isinstance(session, PeerSession) or session.peer is None:
                continue
            if connected and not (session.peer.up and member.topic_filter in self._elsewhere.get(session.client_id, ())):
                continue
            distance_ms = distance_of(session.peer)
            nearest_ms = min(nearest_ms, distance_ms)
            found.append((distance_ms, member))
        limit_ms = nearest_ms * SAME_DISTANCE_RATIO + SAME_DISTANCE_MS
        near = [member for distance_ms, member in found if distance_ms <= limit_ms]
        if not near:
            return None
        self._turn += 1
        return near[self._turn % len(near)]


def distance_of(peer: Peer) -> float:
    """How far a broker is, as the round-trip time of its link; one without any is further than all others."""
    if not peer.up:
        return 1e9
    link = peer.link
    return UNKNOWN_MS if link is None or link.rtt_ms == 0.0 else link.rtt_ms


def _groups(changes: list[tuple[str, bool]], whole: bool) -> list[bytes]:
    """GROUPS frames, ready to be sent."""
    made: list[bytes] = []
    parts: list[bytes] = []
    size = 0
    for name, connected in changes:
        part = number(1 if connected else 0) + blob(name.encode("utf-8"))
        parts.append(part)
        size += len(part)
        if size >= MAX_FRAME_BYTES:
            made.append(frame(frames.GROUPS, number(1 if whole and not made else 0), number(len(parts)), *parts))
            parts = []
            size = 0
    made.append(frame(frames.GROUPS, number(1 if whole and not made else 0), number(len(parts)), *parts))
    return made

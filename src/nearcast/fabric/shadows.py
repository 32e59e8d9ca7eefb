"""Sessions between two brokers: what arrives for them is kept, with its identity, until it is known who delivers it.

A :class:`Shadow` stands at the broker that a client is about to come to. It has the client's subscriptions, so that the
broker's interest includes them and its routing finds it; whatever comes is buffered in order. A :class:`Waiting` connection
does the same for QoS 0 messages of the session that has left its client's old broker and has not arrived (its QoS 1 and 2
messages go to its queue).

Messages of shared subscriptions count as lagging members' (``has_room`` is false): given to a shadow only where nobody else
is, and then given to it alone. They are therefore nobody else's, whatever their number.
"""

from __future__ import annotations

from typing import Final

from nearcast.config import Limits
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import CONNECTED, Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.session import Session

#: Begins the name under which a shadow's subscriptions stand in the tree: no client can have such a one, and it is no
#: broker's (:data:`nearcast.fabric.channels.PEER_PREFIX`).
SHADOW_PREFIX: Final = "\1"


class Kept:
    """Messages that wait, and how their receiver is to get them."""

    def __init__(self, publication: Publication, terms: Terms) -> None:
        self.publication = publication
        self.terms = terms


class Buffer:
    """What is kept, in order, up to ``max_bytes``; beyond, messages are dropped and counted, and ``overflowed`` says so."""

    def __init__(self, effects: Effects, max_bytes: int) -> None:
        self.effects = effects
        self.max_bytes = max_bytes
        self.size = 0
        self.items: list[Kept] = []
        self.overflowed = False

    def add(self, publication: Publication, terms: Terms) -> int:
        """Keep the messages; returns how many of them were."""
        size = len(publication.packets)
        if self.size + size > self.max_bytes:
            self.overflowed = True
            if terms.qos:
                self.effects.stats.dropped_queue_full += publication.count
            else:
                self.effects.stats.dropped_slow_consumer += publication.count
            return 0
        self.size += size
        self.items.append(Kept(publication, terms))
        return publication.count

    def take(self) -> list[Kept]:
        """Everything, to be delivered or given up."""
        items = self.items
        self.items = []
        self.size = 0
        return items


class NoTransport:
    """The handle of a connection that leads nowhere. ``closed`` is told when the engine ends it: somebody took it over."""

    def __init__(self) -> None:
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self.closed = False

    def send(self, chunks: list[bytes]) -> None:
        """Nobody is there."""

    def close(self) -> None:
        self.closed = True


class Waiting(Connection):
    """Keeps the QoS 0 messages of a session whose client is between two brokers."""

    def __init__(self, effects: Effects, peer: Peer, now: float, limits: Limits, buffer: Buffer) -> None:
        super().__init__(effects, peer, NoTransport(), now, limits)
        self.buffer = buffer
        self.state = CONNECTED

    def has_room(self) -> bool:
        return False

    def send_qos0(self, publication: Publication, retain: bool, identifiers: bytes, now: float) -> None:
        self.buffer.add(publication, Terms(0, retain, identifiers))

    def send_qos0_on(self, publication: Publication, terms: Terms, now: float) -> None:
        self.buffer.add(publication, terms)


class Shadow(Session):
    """A session that is about to come here."""

    def __init__(self, client_id: str, move: int, effects: Effects, limits: Limits, now: float) -> None:
        super().__init__(f"{SHADOW_PREFIX}{move}", 0, effects, limits.max_queued_messages, limits.max_queued_bytes)
        self.buffer = Buffer(effects, limits.max_queued_bytes + limits.max_output_bytes)
        self.connection = Waiting(effects, Peer(client_id), now, limits, self.buffer)

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        return self.buffer.add(publication, terms)

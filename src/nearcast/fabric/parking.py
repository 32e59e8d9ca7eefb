"""Messages of an owned topic that have to wait at this broker: nobody knows the owner, or something has to come before them.

They wait in the queue of a session like that of another broker (journal, files and bounds are the same), one for each topic
and *source*: the broker or gateway that they came from, in whose order they stay. A source has a further queue, behind that
one, for what has to wait for more than what is in it. When the wait is over all of a queue is taken out at once, and the
session ends. QoS 0 messages wait in memory, a few of them: after a crash nobody misses them.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric import messages
from nearcast.fabric.outgoing import PeerSession
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import Target
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.ownership import Ownership

PARKING_PREFIX: Final = "\1"
"""Begins the name of such a session in the place of a broker's name, which is printable."""

_BETWEEN: Final = "\1"
_FURTHER: Final = "\3"

MAX_UNRELIABLE_BYTES: Final = 262_144
"""QoS 0 messages that wait, of one topic and source. Beyond, the oldest are dropped and counted."""


def further_queue(source: str, behind_epoch: int) -> str:
    """The name of a source's queue for what waits for its word CLOSED of this epoch, while it has another queue already."""
    return f"{source}{_FURTHER}{behind_epoch:x}"


def parking_name(topic: bytes, queue: str) -> str:
    return PARKING_PREFIX + queue + _BETWEEN + topic.decode("utf-8")


def parse_parking_name(name: str) -> tuple[bytes, str]:
    """(topic, queue) of a session's name."""
    queue, _, topic = name[1:].partition(_BETWEEN)
    return topic.encode("utf-8"), queue


def source_of(queue: str) -> str:
    """Whose queue it is."""
    return queue.partition(_FURTHER)[0]


class ParkingSession(PeerSession):
    """See the module. ``until``: when the wait ends, whatever has not come."""

    def __init__(self, name: str, session_number: int, effects: Effects, max_messages: int, max_bytes: int) -> None:
        super().__init__(name, session_number, effects, max_messages, max_bytes)
        self.topic, self.queue_name = parse_parking_name(name)
        self.source = source_of(self.queue_name)
        self.ownership: Ownership | None = None
        self.until = 0.0
        #: What must have come before: the word CLOSED of ``source``, in this epoch or a later one. 0: nothing.
        self.behind_epoch = 0
        #: Whether this broker's own word has to come round first.
        self.behind_own = False
        self.is_empty = False
        self.max_packet_bytes = 1 << 62  # what came in goes on: who gets it says what it takes
        self._unreliable: deque[tuple[Publication, str]] = deque()
        self._unreliable_bytes = 0
        self.target = Target(Subscription(self, "#", 2, retain_as_published=True))

    def takes(self) -> bool:
        return True

    def emptied(self, now: float) -> None:
        self.is_empty = True

    def send_reliable(self, publication: Publication, via: str, flags: int, now: float) -> None:
        if self.ownership is not None and not flags & messages.VOID:
            self.ownership.unparked(self, publication, via, now)

    def forward(self, publication: Publication, via: str, now: float) -> None:
        self._unreliable.append((publication, via))
        self._unreliable_bytes += len(publication.packets)
        while self._unreliable_bytes > MAX_UNRELIABLE_BYTES and self._unreliable:
            dropped, _ = self._unreliable.popleft()
            self._unreliable_bytes -= len(dropped.packets)
            self.dropped_messages += dropped.count
            self.effects.stats.dropped_slow_consumer += dropped.count

    def empty(self, now: float) -> bool:
        """Take out all of it; false while files cannot be read, and the rest has to wait for them."""
        unreliable, self._unreliable = self._unreliable, deque()
        self._unreliable_bytes = 0
        for publication, via in unreliable:
            if self.ownership is not None:
                self.ownership.unparked(self, publication, via, now)
        if not self.ready:
            self.bytes_per_second = 0
            self.max_unconfirmed_bytes = 1 << 62
            self.opened(0, now)
        else:
            self.drain(now)
        return self.is_empty

    def orphans(self) -> list[tuple[str, Publication]]:
        return []  # nobody was chosen for any of it yet

"""One owned topic, as one broker knows it: who owns it, and what this broker waits for before it acts on that.

========== =========================================================================================================
state      what becomes of messages here
========== =========================================================================================================
UNKNOWN    nobody knows the owner: they are parked, and the directory is asked
ELSEWHERE  they go to the owner
ACQUIRING  this broker is going to be the owner, once brokers with subscribers have all that the owner before it ordered
OWNER      this broker orders them
========== =========================================================================================================
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric.parking import ParkingSession
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import RouteWatch, Target
from nearcast.mqtt.session import Session

if TYPE_CHECKING:
    from nearcast.fabric.ownership import Ownership

UNKNOWN: Final = 0
ELSEWHERE: Final = 1
ACQUIRING: Final = 2
OWNER: Final = 3

STATES: Final = ("unknown", "elsewhere", "acquiring", "owner")

OWN: Final = ""
"""The source of what is published here, and of what others sent here in an earlier epoch."""

MAX_OWN_EPOCHS: Final = 16
"""Epochs of its own that a broker remembers: words about them may be on their way."""

GATEWAY_SOURCE: Final = "\2"
"""Before the name of a gateway that is a source, and behind it: brokers may have the same names."""

TOLD_AGAIN_S: Final = 30.0
"""A client that published nothing for so long counts as a new producer: its gateway may have forgotten the topic."""

MAX_WAITING_WORDS: Final = 10_000
"""One for each client of gateways that changed its way just now."""

MAX_REMEMBERED: Final = 4_096
"""Messages of clients that do not want their own ones back, until the owner has sent them."""


class WaitingWord:
    """The word CLOSED of ``source`` for the owner of an ``epoch``, behind what came the same way: what is in the queues
    ``by``, and what this broker passed on itself if it waits for its own word of the epoch ``own_behind``."""

    def __init__(self, by: list[str], own_behind: int, source: str, epoch: int, owner: str) -> None:
        self.by = by
        self.own_behind = own_behind
        self.source = source
        self.epoch = epoch
        self.owner = owner


class OwnedTopic(RouteWatch):
    """See the module."""

    def __init__(self, name: bytes, ownership: Ownership) -> None:
        self.name = name
        self._ownership = ownership
        self.epoch = 0
        self.owner = ""
        self.state = UNKNOWN
        #: Whether what is published here has to wait; where its route sends that, empty until there is something.
        self.parks = False
        self.way: list[Target] = []
        #: ELSEWHERE: whether anything was sent to the owner in this epoch; the broker that everything was sent to before it,
        #: if the owner waits for a word from there.
        self.sent = False
        self.behind = ""
        #: Who sent here in this epoch, and who was told of it.
        self.sources: set[str] = set()
        self.told: set[str] = set()
        #: By former owner: the epoch that its own one ended with.
        self.ended: dict[str, int] = {}
        #: ACQUIRING: whether the owner before has said so; who has to say READY; until when; who owned it before.
        self.is_expected = False
        self.waiting_for: set[str] = set()
        self.until = 0.0
        self.before = ""
        #: Words READY that came before ACQUIRE did, with their epoch.
        self.early_ready: dict[str, int] = {}
        #: The epochs that this broker was made the owner in, newest last.
        self.own_epochs: list[int] = []
        #: By source: the epoch of its last word CLOSED; and such words that have to wait for what is parked before them.
        self.closed: dict[str, int] = {}
        self.waiting_words: list[WaitingWord] = []
        #: The epoch in which this broker, as a source, waits for its own word to come round. 0: it does not.
        self.own_behind_epoch = 0
        self.own_until = 0.0
        #: Sources of what this broker has passed on, and what may thus come round: their words wait for its own one.
        self.passed: set[str] = set()
        #: What waits here, by name of the queue, oldest first; and by source the newest of its queues.
        self.parked: dict[str, ParkingSession] = {}
        self.newest: dict[str, ParkingSession] = {}
        self.asked_at = 0.0
        #: A hand-over under way: the order's number and when it came. -1: none.
        self.order = -1
        self.ordered_at = 0.0
        # For telemetry (:mod:`nearcast.fabric.telemetry`): who published here, how much, how many messages went to
        # subscribers here; and the same as of the last report.
        self.producers: dict[int, float] = {}
        self.gateway_producers: dict[tuple[str, str], tuple[float, float]] = {}
        self.messages = 0
        self.bytes = 0
        self.ordered = 0
        self.reported_at = 0.0
        self.reported_messages = 0
        self.reported_bytes = 0
        self.reported_ordered = 0
        self.used_at = 0.0
        #: Whether clients here do not want their own messages back; by number of the first message: how many, whose.
        self.has_no_local = False
        self._published: dict[int, tuple[int, int]] = {}

    @property
    def mine(self) -> bool:
        """Whether this broker is the owner, or going to be."""
        return self.state >= ACQUIRING

    @property
    def text(self) -> str:
        """Its name, as a string."""
        return self.name.decode("utf-8")

    def holds(self, word: WaitingWord) -> bool:
        """Whether something waits here that a word stands behind."""
        if word.own_behind and word.own_behind == self.own_behind_epoch:
            return True
        return any([queue in self.parked for queue in word.by])  # noqa: C419 - mypyc: no generators

    def wait_for(self, word: WaitingWord) -> None:
        """A word has to wait. Of too many the oldest are dropped: what waits for them does so for a while only."""
        self.waiting_words.append(word)
        if len(self.waiting_words) > MAX_WAITING_WORDS:
            del self.waiting_words[0]

    def came_round(self) -> None:
        """All that this broker passed on is here again, or nobody waits for it any more."""
        self.own_behind_epoch = 0
        self.passed = set()

    def queues_of(self, source: str) -> list[str]:
        """The queues in which something of a source waits here, oldest first."""
        if source not in self.newest:
            return []
        return [name for name, session in self.parked.items() if session.source == source]

    def waiting_from(self, gateway: str) -> list[str]:
        """The queues of what waits here and came from a gateway. What its clients published by way of this broker is among
        this broker's own."""
        prefix = GATEWAY_SOURCE + gateway + GATEWAY_SOURCE
        return [name for name, session in self.parked.items() if session.source == OWN or session.source.startswith(prefix)]

    def begins(self, epoch: int, owner: str, state: int) -> None:
        """Another epoch: what belonged to the one before is forgotten."""
        self.epoch = epoch
        self.owner = owner
        self.state = state
        self.sent = False
        self.behind = ""
        self.sources = set()
        self.told = set()
        self.is_expected = False
        self.waiting_for = set()
        self.before = ""
        self.own_behind_epoch = 0
        if state >= ACQUIRING:
            self.own_epochs = [*self.own_epochs[1 - MAX_OWN_EPOCHS :], epoch]

    def way_so_far(self) -> str:
        """The broker that messages went to from here, and may still be passed on by; nothing if there were none."""
        if self.state != ELSEWHERE:
            return ""
        return self.owner if self.sent else self.behind

    def published(self, publication: Publication, publisher: Session | None, now: float) -> None:
        """A client here published."""
        self.sent = True
        self.used_at = now
        self.messages += publication.count
        self.bytes += len(publication.packets)
        if self.state == OWNER and not self.parks:
            self.ordered += publication.count
        elif self.parks and not self.way:
            self._ownership.parks(self, now)
        if publisher is not None:
            if now - self.producers.get(publisher.number, -TOLD_AGAIN_S) >= TOLD_AGAIN_S:
                self._ownership.produced(self, publisher)
            self.producers[publisher.number] = now
            if self.has_no_local:
                self.remember(publication, publisher.number)

    def remember(self, publication: Publication, session_number: int) -> None:
        """Keep in mind whose messages these are, until they come back from the owner."""
        published = self._published
        published[publication.sequence] = (publication.count, session_number)
        if len(published) > MAX_REMEMBERED:
            del published[next(iter(published))]

    def publisher_of(self, sequence: int) -> int:
        """Who published a message that this broker numbered so; 0 if that is not known."""
        published = self._published
        if not published:
            return 0
        known = published.get(sequence)
        if known is not None:
            return known[1]
        for first, (count, session_number) in published.items():
            if first <= sequence < first + count:
                return session_number
        return 0

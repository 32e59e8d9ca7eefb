"""What a broker proposes to a replica set: messages that clients publish here in topics which the set keeps.

To the engine the set is another broker (:mod:`nearcast.fabric.outgoing`): its messages stand in the queue of a session, in the
journal where there is one, until the set has committed them, whoever leads it meanwhile. What a new leader says that the log
has of ours is dropped, and everything behind is sent again, in order. A message's number here is its number in the log as well
(``Mark.batch`` of this broker as a producer), so that none gets there twice (decision 0034).

Publishers hear of their messages when they are committed: each publication leaves a :class:`~nearcast.mqtt.pledges.Pledge`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from nearcast.fabric import messages
from nearcast.fabric.outgoing import PeerSession
from nearcast.mqtt import reasons
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.pledges import Pledge
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.routing import RouteWatch, Target
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.replica_sets import ReplicaSets

SET_PREFIX: Final = "\2"
"""Begins the name of such a session in the place of a broker's name, which is printable."""


class _Pledged:
    """Whom the commit of everything up to a number concerns."""

    def __init__(self, first: int, last: int, pledge: Pledge) -> None:
        self.first = first
        self.last = last
        self.pledge = pledge


class SetSession(PeerSession):
    """See the module."""

    def __init__(self, name: str, session_number: int, effects: Effects, max_messages: int, max_bytes: int) -> None:
        super().__init__(name, session_number, effects, max_messages, max_bytes)
        self.set_name = name[len(SET_PREFIX) :]
        self.sets: ReplicaSets | None = None
        self.refused_messages = 0
        self.target = Target(Subscription(self, "#", 2, retain_as_published=True))
        self._pledged: deque[_Pledged] = deque()
        self._indexes: dict[int, int] = {}
        # The last number that must not leave before the journal has it.
        self._held_up_to = 0

    def takes(self) -> bool:
        return self.sets is not None and self.sets.takes(self.set_name)

    def deliver(self, publication: Publication, terms: Terms, now: float) -> int:
        pledge = Pledge(self.set_name)
        self.effects.pledge = pledge
        if self._has_no_room(publication):
            self.refused_messages += publication.count
            pledge.settle(reasons.QUOTA_EXCEEDED)
            return 0
        last = publication.sequence + publication.count - 1
        self._pledged.append(_Pledged(publication.sequence, last, pledge))
        return super().deliver(publication, terms, now)

    def _has_no_room(self, publication: Publication) -> bool:
        """All of it is taken on, or nothing."""
        messages_left = self.max_queued_messages - self.queued_messages
        bytes_left = self.max_queued_bytes - self.queued_bytes
        return publication.count > messages_left or publication.count * publication.stride > bytes_left

    def send_reliable(self, publication: Publication, via: str, flags: int, now: float) -> None:
        if self.sets is None:
            return
        head = messages.head(publication, self.last_sent, via, now, flags)[4:]
        content = head if flags & messages.VOID else head + publication.packets
        last = publication.sequence + publication.count - 1
        # Whoever sent a QoS 2 message asks for it again after a crash that forgot it, and would get another number.
        if self.effects.gated and publication.qos == 2:
            self._held_up_to = last
        self.sets.propose(self.set_name, content, self._held_up_to > self.last_confirmed)

    def forward(self, publication: Publication, via: str, now: float) -> None:
        if self.sets is None or not self.ready or not self.takes():
            self.effects.stats.dropped_slow_consumer += publication.count
            self.dropped_messages += publication.count
            return
        head = messages.head(publication, 0, via, now, 0)[4:]
        self.sets.propose(self.set_name, head + publication.packets, False)

    def committed(self, last: int, indexes: dict[int, int], now: float) -> None:
        """The set has everything up to this number. ``indexes``: of messages among them, by number, their place in their
        topic's log."""
        self._indexes = indexes
        self.confirmed(last, now)
        self._indexes = {}

    def confirmed(self, last: int, now: float) -> None:
        super().confirmed(last, now)
        pledged = self._pledged
        while pledged and pledged[0].last <= last:
            done = pledged.popleft()
            done.pledge.settle(reasons.SUCCESS, self._indexes.get(done.first, 0))

    def unanswered(self) -> dict[str, int]:
        """Of what a restart found here: whose it is, and the last number that each of them has."""
        found: dict[str, int] = {}
        if self.spilled:
            # What is in files is not looked through: it may be anybody's.
            clients = [] if self.sets is None else list(self.sets.fabric.engine.sessions.by_client)
            found = dict.fromkeys(clients, self.spilled[-1].last_sequence)
        for pending in self.queue or ():
            found[pending.terms.via] = pending.publication.sequence + pending.start + pending.count - 1
        return found

    def promise(self, last: int) -> Pledge:
        """Settled when everything up to a number is committed. Asked for before anything new is taken on."""
        pledge = Pledge(self.set_name)
        at = len(self._pledged)
        while at and self._pledged[at - 1].last > last:
            at -= 1
        self._pledged.insert(at, _Pledged(last, last, pledge))
        return pledge

    def orphans(self) -> list[tuple[str, Publication]]:
        return []  # `via` says who published

    def abandon(self) -> None:
        """The topics of this set are not kept by it any more: nobody says what becomes of what is on its way."""
        while self._pledged:
            self._pledged.popleft().pledge.settle(reasons.UNSPECIFIED_ERROR)


class SetWatch(RouteWatch):
    """The route of a topic that a replica set keeps: all that is published goes there, with the publisher's name."""

    def __init__(self, session: SetSession) -> None:
        self.session = session
        self.way: list[Target] = [session.target.with_via("")]
        #: Who publishes what no session does.
        self.sponsor = ""
        self._publisher = ""

    def published(self, publication: Publication, publisher: Session | None, now: float) -> None:
        name = self.sponsor if publisher is None else publisher.client_id
        if name != self._publisher:
            self._publisher = name
            self.way[0] = self.session.target.with_via(name)

"""How a topic changes hands (ePulsar, section 3.6): what brokers say to each other about it, and what they make of it.

From O to N, with source S and subscribers at B::

    O   stops ordering; says END_OF to B, ACQUIRE (with B's name) to N, OWNED_BY to S; passes on to N what still arrives
    B   has everything that O ordered when END_OF is there, and says READY to N
    N   orders nothing before B is ready; then it says IN_CHARGE to O
    S   sends to N from now on; says CLOSING to O behind its last message there, and O says CLOSED to N behind that
    N   lets nothing pass that came straight from S before CLOSED of S is there

A word is a message without content in the topic's own channels: reliable, in order with the topic's messages, in the journal.
So the messages of one publisher stay in order at every subscriber, nothing waits for the controller, and what a subscriber
notices is at most the time from its broker to N and back.

Epochs rise. Of two words about a topic's owner the one with the higher epoch is true, and whoever hears it obeys: also an
owner that was given up for dead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import owner_errands as errands
from nearcast.fabric.owned_topics import ACQUIRING, ELSEWHERE, OWNER, UNKNOWN, OwnedTopic, WaitingWord
from nearcast.fabric.owner_errands import OwnerErrand
from nearcast.fabric.owner_records import Migrated, MigrateOrder
from nearcast.fabric.parts import Peer
from nearcast.mqtt.publication import build

if TYPE_CHECKING:
    from nearcast.fabric.ownership import Ownership

WAIT_S: Final = 5.0
"""How long messages wait for what should come before them. Too low gives up order when the network hesitates; too high makes a
broker that dies in the middle of a hand-over hold up the topic."""

EXPECTED_S: Final = 2.0
"""How long one that hears from others that it is the owner waits for the word of the owner before it."""


class Words:
    """See the module."""

    def __init__(self, ownership: Ownership) -> None:
        self._ownership = ownership
        self._fabric = ownership.fabric
        self._router = ownership.fabric.engine.router
        #: Counters since the start.
        self.handed_over = 0
        self.acquired = 0
        self.refused_orders = 0

    def say(self, topic: OwnedTopic, name: str, via: str, now: float) -> None:
        """Say something to another broker, behind all of the topic's messages that are on their way to it."""
        self._router.carry(build(topic.name, b"", 1, False), [self._ownership.target(name, via)], None, now)

    def heard(self, peer: Peer, topic: OwnedTopic, errand: OwnerErrand, now: float) -> None:
        """Another broker said something about a topic."""
        what = errand.word
        if what == errands.OWNED_BY:
            self._ownership.told(topic.text, errand.epoch, errand.name, now)
        elif what == errands.END_OF:
            topic.ended[peer.name] = max(errand.epoch, topic.ended.get(peer.name, 0))
            self._ownership.told(topic.text, errand.epoch, errand.name, now)
            if errand.name and errand.name != self._fabric.name:
                self.say(topic, errand.name, errands.word(errands.READY, errand.epoch), now)
        elif what == errands.ACQUIRE:
            self._acquire(peer, topic, errand, now)
        elif what == errands.READY:
            self._ready(topic, peer.name, errand.epoch, now)
        elif what == errands.IN_CHARGE:
            if topic.order >= 0 and errand.epoch >= topic.epoch:
                self._done(topic, "", now)
        elif what == errands.CLOSING:
            self._ownership.told(topic.text, errand.epoch, errand.name, now)
            self.closed(topic, self._word_of(peer, topic, errand), now)
        elif what == errands.CLOSED:
            word = self._word_of(peer, topic, errand)
            if topic.state == ELSEWHERE and topic.owner == peer.name and word.epoch not in topic.own_epochs:
                # Each takes the other for the owner, until one hears the truth. Meanwhile it must not go to and fro.
                topic.wait_for(word)
                self._ownership.ask(topic, now)
            else:
                self.closed(topic, word, now)
        elif what == errands.COME_THROUGH:
            self._come_through(topic, errand.other, errand.epoch, now)
        else:
            raise ValueError("an unknown word about an owned topic")

    def _word_of(self, peer: Peer, topic: OwnedTopic, errand: OwnerErrand) -> WaitingWord:
        """CLOSING or CLOSED. What it stands behind may be among what this broker passed on before it owned the topic again."""
        behind_own = topic.own_behind_epoch if errand.other != self._fabric.name and peer.name in topic.passed else 0
        by = topic.queues_of(peer.name)  # what waits in further ones came behind it
        return WaitingWord(by, behind_own, errand.other, errand.epoch, errand.name)

    def closed(self, topic: OwnedTopic, word: WaitingWord, now: float) -> None:
        """All is on its way that a source sent by the way it used before an epoch: the owner of that epoch has to know.

        What the source sent straight to that one waits for this there, also if it has handed the topic on meanwhile. The word
        goes the way of the messages it stands behind, to whoever orders them, and from there to the one who waits.
        """
        if topic.state == UNKNOWN or topic.holds(word):
            topic.wait_for(word)
        elif word.epoch in topic.own_epochs:
            self._come_through(topic, word.source, word.epoch, now)
        elif topic.state == ELSEWHERE:
            self.say(topic, topic.owner, errands.word(errands.CLOSED, word.epoch, word.owner, word.source), now)
        elif word.owner and word.owner != self._fabric.name:
            self.say(topic, word.owner, errands.word(errands.COME_THROUGH, word.epoch, "", word.source), now)

    def _come_through(self, topic: OwnedTopic, source: str, epoch: int, now: float) -> None:
        if source == self._fabric.name:
            if topic.own_behind_epoch and epoch >= topic.own_behind_epoch:
                topic.came_round()
                self._ownership.changed(topic)
        else:
            topic.closed[source] = max(epoch, topic.closed.get(source, 0))
        self._ownership.release(topic, now)

    # --- handing over ---------------------------------------------------------------------------------------------------

    def migrate(self, order: MigrateOrder, now: float) -> None:
        """The controller wants a topic handed over; refused, with a reason, where that cannot be done now."""
        topic = self._ownership.topic(order.topic.encode("utf-8"))
        peer = self._fabric.peers.get(order.target)
        if topic.state != OWNER:
            self._refuse(order, topic, f"{self._fabric.name} does not own it")
        elif topic.epoch != order.epoch:
            self._refuse(order, topic, "it changed hands meanwhile")
        elif order.target == self._fabric.name:
            self._refuse(order, topic, f"{order.target} owns it already")
        elif order.new_epoch <= topic.epoch:
            self._refuse(order, topic, "the order is older than the present owner")
        elif peer is None or not peer.up:
            self._refuse(order, topic, f"there is no link from {self._fabric.name} to {order.target}")
        elif topic.parked or topic.own_behind_epoch:
            self._refuse(order, topic, "it has only just been taken over")
        elif order.workflow == "release":
            self._release(topic, order, now)
        else:
            self._hand_over(topic, order.new_epoch, order.target, order.number, now)

    def _refuse(self, order: MigrateOrder, topic: OwnedTopic, reason: str) -> None:
        self.refused_orders += 1
        self._report(
            Migrated(number=order.number, topic=order.topic, epoch=topic.epoch, owner=topic.owner, done=False, reason=reason)
        )

    def _report(self, record: Migrated) -> None:
        if self._ownership.directory is not None:
            self._ownership.directory.migrated(record)

    def hand_to_anyone(self, topic: OwnedTopic, now: float) -> None:
        """This broker stops: a topic goes to a broker with subscribers, or to the nearest."""
        if topic.parked or topic.own_behind_epoch:
            return
        subscribers = self._subscribers(topic)
        best = ""
        nearest_ms = 0.0
        for peer in self._fabric.peers.values():
            if peer.up and peer.link is not None:
                away_ms = peer.link.rtt_ms - (1e6 if peer.name in subscribers else 0.0)
                if not best or away_ms < nearest_ms:
                    best = peer.name
                    nearest_ms = away_ms
        if best:
            self._hand_over(topic, max(topic.epoch + 1, self._fabric.stamp(now)), best, 0, now)

    def _subscribers(self, topic: OwnedTopic) -> dict[str, None]:
        """The brokers that get its messages."""
        route = self._router.route_for(topic.name)
        found: dict[str, None] = {}
        for target in route.peers:
            found[target.session.client_id[1:]] = None
        for group in route.groups:
            for client_id, member in group.members.items():
                if member.session.is_peer:
                    found[client_id[1:]] = None
        return found

    def _hand_over(self, topic: OwnedTopic, epoch: int, target: str, number: int, now: float) -> None:
        before = topic.epoch
        sources = topic.sources
        ready = self._say_end(topic, epoch, target, now)
        # What is retained there comes after what was retained here, whatever the clocks say.
        stamp = f"{self._fabric.last_stamp:x}"
        self.say(topic, target, errands.word(errands.ACQUIRE, epoch, target, stamp, ready), now)
        topic.begins(epoch, target, ELSEWHERE)
        topic.order = number
        topic.ordered_at = now
        self.handed_over += 1
        if self._ownership.directory is not None:
            self._ownership.directory.owned(topic.text, before, False)
        self._ownership.changed(topic)
        self._tell_sources(topic, sources, ready, now)
        self._ownership.watch(topic, now)

    def _say_end(self, topic: OwnedTopic, epoch: int, target: str, now: float) -> list[str]:
        """Tell brokers with subscribers that nothing more comes in this order; returns those who will say that they heard."""
        ready: list[str] = []
        for name in self._subscribers(topic):
            if name == target:
                continue
            self.say(topic, name, errands.word(errands.END_OF, epoch, target), now)
            peer = self._fabric.peers.get(name)
            if peer is not None and peer.up:
                ready.append(name)
        return ready

    def _tell_sources(self, topic: OwnedTopic, sources: set[str], told: list[str], now: float) -> None:
        for name in sorted(sources):
            if name in self._fabric.peers and name not in told and name != topic.owner:
                topic.told.add(name)
                self.say(topic, name, errands.word(errands.OWNED_BY, topic.epoch, topic.owner), now)

    def give_up(self, topic: OwnedTopic, epoch: int, owner: str, now: float) -> None:
        """Somebody else is the owner, by the directory's word: those who took this one for it are to know."""
        ready = self._say_end(topic, epoch, owner, now) if topic.state == OWNER and owner else []
        sources = topic.sources
        before = topic.epoch
        topic.begins(epoch, owner, ELSEWHERE)
        if self._ownership.directory is not None:
            self._ownership.directory.owned(topic.text, before, False)
        self._tell_sources(topic, sources, ready, now)

    def _release(self, topic: OwnedTopic, order: MigrateOrder, now: float) -> None:
        """The baseline: nobody owns it until the directory is asked; order is not looked after."""
        sources = topic.sources
        topic.begins(order.new_epoch, "", UNKNOWN)
        self._ownership.changed(topic)
        for name in sorted(sources):
            if name in self._fabric.peers:
                self.say(topic, name, errands.word(errands.OWNED_BY, order.new_epoch, ""), now)
        self._report(
            Migrated(number=order.number, topic=order.topic, epoch=order.new_epoch, owner="", done=True, duration_ms=0.0)
        )

    def _done(self, topic: OwnedTopic, reason: str, now: float) -> None:
        number, topic.order = topic.order, -1
        self._report(
            Migrated(
                number=number,
                topic=topic.text,
                epoch=topic.epoch,
                owner=topic.owner,
                done=True,
                reason=reason,
                duration_ms=(now - topic.ordered_at) * 1e3,
            )
        )

    # --- taking over ----------------------------------------------------------------------------------------------------

    def _acquire(self, peer: Peer, topic: OwnedTopic, errand: OwnerErrand, now: float) -> None:
        topic.ended[peer.name] = max(errand.epoch, topic.ended.get(peer.name, 0))
        self._fabric.seen_stamp(int(errand.other or "0", 16))
        if errand.epoch < topic.epoch or (topic.state == OWNER and errand.epoch == topic.epoch):
            return  # somebody else has it by now, or this broker did not wait for so long
        self._ownership.expect(topic, errand.epoch, now)
        if topic.state != ACQUIRING:
            return
        topic.is_expected = False
        topic.before = peer.name
        topic.until = now + WAIT_S
        for name in errand.names:
            other = self._fabric.peers.get(name)
            if name != self._fabric.name and other is not None and other.up and topic.early_ready.get(name) != errand.epoch:
                topic.waiting_for.add(name)
        topic.early_ready = {}
        if not topic.waiting_for:
            self.in_charge(topic, now)

    def _ready(self, topic: OwnedTopic, name: str, epoch: int, now: float) -> None:
        if topic.state == ACQUIRING and epoch == topic.epoch and not topic.is_expected:
            topic.waiting_for.discard(name)
            if not topic.waiting_for:
                self.in_charge(topic, now)
        elif epoch >= topic.epoch and topic.state != OWNER:
            topic.early_ready[name] = epoch

    def in_charge(self, topic: OwnedTopic, now: float) -> None:
        """This broker orders a topic's messages from now on."""
        topic.state = OWNER
        topic.is_expected = False
        self.acquired += 1
        if topic.before:
            self.say(topic, topic.before, errands.word(errands.IN_CHARGE, topic.epoch), now)
        if self._ownership.directory is not None:
            self._ownership.directory.owned(topic.text, topic.epoch, True)
        self._ownership.changed(topic)
        self._ownership.release(topic, now)

    def lost(self, topic: OwnedTopic, name: str, now: float) -> None:
        """The link to a broker is down: it is not waited for."""
        if topic.state == ACQUIRING and name in topic.waiting_for:
            topic.waiting_for.discard(name)
            if not topic.waiting_for and not topic.is_expected:
                self.in_charge(topic, now)

    def look(self, topic: OwnedTopic, now: float) -> None:
        """Time passed: a new owner that says nothing has the topic all the same, by its epoch."""
        if topic.order >= 0 and now - topic.ordered_at > 2 * WAIT_S:
            self._done(topic, "the new owner has not answered", now)

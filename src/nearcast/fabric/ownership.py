"""Topics that have an owner: one broker at a time orders a topic's messages, and the ownership moves (ePulsar, section 3.6).

Whoever receives a message of such a topic from a client is its *source*, and sends it to the owner only; the owner numbers it
and hands it to its subscribers and to every broker that has some. Which of the two this broker is for a topic is compiled into
the topic's route, so that it costs nothing per message. What brokers say to each other about a topic are *words*
(:mod:`nearcast.fabric.owner_words`), in the same channels as the topic's messages and in order with them.

Messages that must not go on yet are parked (:mod:`nearcast.fabric.parking`), by the source they came from: while nobody knows
the owner, while brokers with subscribers lack what the owner before ordered, and while something older of the same source is
still on its way by that one. They wait :data:`WAIT_S` at most: order is given up before messages are.

An owner that dies is replaced by the directory. Sources then send again, to the new one, what the dead one has not confirmed;
every message's identity goes with it, and :class:`~nearcast.fabric.identities.Seen` stops what comes twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

from nearcast.fabric import owner_errands as errands
from nearcast.fabric.classes import OWNED
from nearcast.fabric.fences import stretch
from nearcast.fabric.identities import Identity, Seen
from nearcast.fabric.outgoing import PEER_PREFIX
from nearcast.fabric.owned_topics import ACQUIRING, ELSEWHERE, GATEWAY_SOURCE, OWN, OWNER, UNKNOWN, OwnedTopic, WaitingWord
from nearcast.fabric.owner_errands import AGAIN, NO_IDENTITY, OwnerErrand
from nearcast.fabric.owner_records import Migrated, MigrateOrder
from nearcast.fabric.owner_words import EXPECTED_S, WAIT_S, Words
from nearcast.fabric.parking import PARKING_PREFIX, ParkingSession, further_queue, parking_name, parse_parking_name
from nearcast.fabric.parts import FOREVER, Part, Peer
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.routing import Route, Target
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric

ASK_S: Final = 1.0
"""How often the directory is asked again while messages wait for an answer."""

LOOK_S: Final = 0.25
"""How often waits are looked at."""

IDLE_S: Final = 600.0
"""A topic of another broker that nobody used here for so long is forgotten."""

SWEEP_S: Final = 60.0


class DirectoryClient(Protocol):
    """The directory of owners, as a broker sees it. Answers come through :meth:`Ownership.told`."""

    def ask(self, topics: list[tuple[str, int]], now: float) -> None:
        """Who owns these? With each the highest epoch known here."""

    def owned(self, topic: str, epoch: int, mine: bool) -> None:
        """This broker owns a topic since ``epoch``, or no longer does."""

    def migrated(self, record: Migrated) -> None:
        """How an order to hand over went."""


class Ownership(Part):
    """See the module."""

    def __init__(self, fabric: Fabric) -> None:
        self.fabric = fabric
        self._engine = fabric.engine
        self._router = fabric.engine.router
        self.directory: DirectoryClient | None = None
        self.on_owner: Callable[[bytes, int, str], None] | None = None
        self.on_producer: Callable[[OwnedTopic, Session], None] | None = None
        self.topics: dict[bytes, OwnedTopic] = {}
        self.words = Words(self)
        #: Identities of what was ordered here, and of what was delivered here in others' order.
        self.ordered = Seen()
        self.delivered = Seen()
        self._asking: dict[bytes, OwnedTopic] = {}
        # Topics in which something waits, or is waited for.
        self._waiting: dict[bytes, OwnedTopic] = {}
        # Brokers whose link was lost, and until when they may come back before others do what they were to do.
        self._lost: dict[str, float] = {}
        # Those whose link was lost just now, unless another one has taken its place.
        self._down: list[str] = []
        self._look_at = FOREVER
        self._sweep_at = 0.0
        self._reclassed = False
        self.leaving = False
        #: Counters since the start.
        self.parked_messages = 0
        self.passed_on_messages = 0
        self.late_gates = 0
        self.stale_messages = 0
        fabric.classes.owners = self
        fabric.add_part(self, [])

    def begin(self, now: float) -> None:
        """Go on with what the journal had parked."""
        for client_id in list(self._engine.sessions.by_client):
            if client_id[:1] == PEER_PREFIX and client_id[1:2] == PARKING_PREFIX:
                name, queue = parse_parking_name(client_id[1:])
                topic = self.topic(name)
                # What should have come before it did so before the crash, or nobody waits for it any more.
                self._parking(topic, queue, 0, now)
                self.ask(topic, now)

    def topic(self, name: bytes) -> OwnedTopic:
        """The topic of this name, known from now on."""
        found = self.topics.get(name)
        if found is None:
            found = OwnedTopic(name, self)
            self.topics[name] = found
        return found

    def owned(self) -> list[OwnedTopic]:
        """What this broker owns."""
        return [topic for topic in self.topics.values() if topic.state == OWNER]

    def owner_of(self, name: bytes) -> tuple[str, int]:
        """A topic's owner and epoch as they are known here; nothing and 0 if they are not."""
        topic = self.topics.get(name)
        return ("", 0) if topic is None else (topic.owner, topic.epoch)

    def parking_sessions(self) -> list[ParkingSession]:
        """The queues of all that waits."""
        return [session for topic in self.topics.values() for session in topic.parked.values()]

    # --- routes ---------------------------------------------------------------------------------------------------------

    def direct(self, route: Route) -> None:
        """Make the route of an owned topic: this broker orders what is published here, or it goes to the owner, or waits."""
        topic = self.topic(route.topic)
        route.watch = topic
        topic.has_no_local = False
        for target in route.targets:
            if target.no_local:
                topic.has_no_local = True
        if topic.state == OWNER:
            via = errands.ordered(topic.epoch, NO_IDENTITY)
            route.peers = [target.with_via(via) for target in route.peers]
        topic.parks = not self._passes(topic, OWN, 0, True)
        if not topic.parks:
            if topic.state == OWNER:
                return
            topic.way = [self.target(topic.owner, errands.to_owner(topic.epoch, topic.behind, 0, NO_IDENTITY))]
            if not self.fabric.peer(topic.owner).up:
                self._asking[topic.name] = topic  # this broker may be behind, and wait for one that is not the owner any more
        else:
            session = topic.parked.get(OWN)
            topic.way = [] if session is None else [self._parking_target(topic, session)]
        route.way = topic.way

    def target(self, name: str, via: str) -> Target:
        """Another broker as the receiver of an errand."""
        return Target(Subscription(self.fabric.peer(name).session, "#", 2, retain_as_published=True), via)

    def _parking_target(self, topic: OwnedTopic, session: ParkingSession) -> Target:
        return session.target.with_via(errands.parked(topic.epoch, "", 0, NO_IDENTITY))

    def parks(self, topic: OwnedTopic, now: float) -> None:
        """Something is about to be published here that has to wait."""
        topic.way.append(self._parking_target(topic, self._parking(topic, OWN, 0, now)))
        if topic.state == UNKNOWN:
            self.ask(topic, now)

    def classes_changed(self) -> None:
        self._reclassed = True

    def changed(self, topic: OwnedTopic) -> None:
        """A topic's state is another one: its route has to follow, and gateways want to know."""
        self._router.forget(topic.name)
        if self.on_owner is not None:
            self.on_owner(topic.name, topic.epoch, topic.owner)

    def produced(self, topic: OwnedTopic, publisher: Session) -> None:
        """A client here publishes a topic that it did not publish lately: its gateway wants to know who owns it."""
        if self.on_producer is not None:
            self.on_producer(topic, publisher)

    # --- who owns a topic -----------------------------------------------------------------------------------------------

    def ask(self, topic: OwnedTopic, now: float) -> None:
        """Have the directory say who owns a topic."""
        self._asking[topic.name] = topic
        self.watch(topic, now)

    def told(self, name: str, epoch: int, owner: str, now: float, appointed: bool = False) -> None:
        """Who owns a topic. ``appointed``: by the directory's own decision, so that no owner before has anything to say."""
        topic = self.topic(name.encode("utf-8"))
        self._asking.pop(topic.name, None)
        if epoch < topic.epoch or (epoch == topic.epoch and topic.owner and (owner != topic.owner or not appointed)):
            if topic.state == OWNER and epoch < topic.epoch and self.directory is not None:
                self.directory.owned(name, topic.epoch, True)
            return
        if epoch == topic.epoch and topic.owner and not topic.mine:
            return
        if owner == self.fabric.name:
            if topic.epoch != epoch or topic.state < ACQUIRING:
                self._become(topic, epoch, now)
            if appointed and topic.state == ACQUIRING and not topic.waiting_for:
                self.words.in_charge(topic, now)
        else:
            self.follow(topic, epoch, owner, now)

    def _become(self, topic: OwnedTopic, epoch: int, now: float) -> None:
        """This broker is going to be the owner: for the word of the one before it waits a little."""
        former = topic.way_so_far()
        topic.begins(epoch, self.fabric.name, ACQUIRING)
        topic.is_expected = True
        topic.until = now + EXPECTED_S
        self.changed(topic)
        if former:
            peer = self.fabric.peer(former)
            # Also to one that is lost: it is to know when it is back, before it takes for its own what it finds there.
            self.words.say(topic, former, errands.word(errands.CLOSING, epoch, topic.owner, self.fabric.name), now)
            if peer.up:
                topic.own_behind_epoch = epoch
                topic.own_until = now + WAIT_S
            else:
                self._send_again(topic, peer, now)
        self.watch(topic, now)

    def expect(self, topic: OwnedTopic, epoch: int, now: float) -> None:
        """Somebody knows that this broker owns a topic from this epoch on; the word of the owner before is on its way."""
        if epoch > topic.epoch:
            self._become(topic, epoch, now)
            # A broker that was away hears this of those who have not heard since that somebody else does.
            self._asking[topic.name] = topic

    def follow(self, topic: OwnedTopic, epoch: int, owner: str, now: float) -> None:
        """Another broker owns a topic; or nobody, and then the directory is asked."""
        former = topic.way_so_far()
        if topic.mine:
            self.words.give_up(topic, epoch, owner, now)
        topic.begins(epoch, owner, ELSEWHERE if owner else UNKNOWN)
        self.changed(topic)
        if former and owner:
            peer = self.fabric.peer(former)
            self.words.say(topic, former, errands.word(errands.CLOSING, epoch, owner, self.fabric.name), now)
            if peer.up or former == owner:  # what it was sent before it was lost is on its way there as ever
                topic.behind = former
            else:
                self._send_again(topic, peer, now)
        if owner:
            self.release(topic, now)
        elif topic.parked:
            self.ask(topic, now)

    def _send_again(self, topic: OwnedTopic, peer: Peer, now: float) -> None:
        """What an owner that is gone has not confirmed goes to the new one, too."""
        for pending in list(peer.session.queue or ()):
            publication = pending.publication
            via = pending.terms.via
            if publication.topic != topic.name or via[:1] != errands.TO_OWNER:
                continue
            if pending.count != publication.count:
                publication = publication.cut(pending.start, pending.count)
            errand = errands.parse(via)
            if errand.origin:
                who = Identity(errand.origin, errand.origin_epoch, errand.sequence)
            else:
                who = Identity(self.fabric.name, self.fabric.epoch, publication.sequence)
            self._intake(topic, OWN, _SENT_AGAIN, who, publication, now)

    # --- messages -------------------------------------------------------------------------------------------------------

    def arrived(self, peer: Peer, publication: Publication, via: str, now: float) -> None:
        """Messages of class ``owned``, or a word about such a topic, came from another broker."""
        errand = errands.parse(via)
        topic = self.topic(publication.topic)
        topic.used_at = now
        if errand.kind == errands.WORD:
            self.words.heard(peer, topic, errand, now)
        elif errand.kind == errands.ORDERED:
            self._deliver(peer, topic, publication, errand, now)
        elif errand.kind == errands.TO_OWNER:
            self._take_in(peer, topic, publication, errand, now)
        else:
            raise ValueError("messages of an owned topic with an errand that does not travel")

    def _deliver(self, peer: Peer, topic: OwnedTopic, publication: Publication, errand: OwnerErrand, now: float) -> None:
        """The owner ordered messages: they go to subscribers here."""
        if errand.epoch > topic.epoch:
            self.told(topic.text, errand.epoch, peer.name, now)
        elif errand.epoch < topic.epoch:
            self._correct(peer, topic, now)
        who = _identity(peer, publication, errand)
        if errand.epoch < topic.ended.get(peer.name, 0):
            # An owner that went on after its own end: nobody may have these in its order. The present one decides.
            self.stale_messages += publication.count
            self._intake(topic, OWN, _SENT_AGAIN, who, publication, now)
            return
        for first, length in self.delivered.take(who.origin, who.epoch, who.sequence, publication.count):
            # What this broker ordered itself before another did, its subscribers had then.
            for begin, count in self.ordered.absent(who.origin, who.epoch, first, length):
                for part in stretch(publication, begin - who.sequence, count):
                    if topic.has_no_local and who.origin == self.fabric.name:
                        part.fenced = _only(topic.publisher_of(begin))
                    topic.ordered += part.count
                    self.fabric.channels.bridge(peer, part, errand.rest, now)

    def _take_in(self, peer: Peer, topic: OwnedTopic, publication: Publication, errand: OwnerErrand, now: float) -> None:
        """A source takes this broker for the owner."""
        who = _identity(peer, publication, errand)
        if errand.epoch > topic.epoch:
            self.expect(topic, errand.epoch, now)
        if topic.mine and errand.epoch == topic.epoch:
            topic.sources.add(peer.name)
            self._intake(topic, peer.name, errand, who, publication, now)
            return
        if errand.epoch < topic.epoch:
            self._correct(peer, topic, now)
        elif topic.state == ELSEWHERE and topic.owner == peer.name:
            # Each takes the other for the owner of the same epoch. Messages must not go to and fro until somebody decides.
            topic.begins(topic.epoch, "", UNKNOWN)
            self.changed(topic)
        self._intake(topic, peer.name, errand, who, publication, now)

    def _correct(self, peer: Peer, topic: OwnedTopic, now: float) -> None:
        """Another broker acts on an epoch that is over: tell it so, once."""
        if topic.owner and peer.name not in topic.told:
            topic.told.add(peer.name)
            self.words.say(topic, peer.name, errands.word(errands.OWNED_BY, topic.epoch, topic.owner), now)

    def submit(
        self,
        publication: Publication,
        gateway: str,
        client: str,
        latency_ms: float,
        behind: str,
        now: float,
        epoch: int = 0,
        closing: int = 0,
    ) -> None:
        """A gateway's client published, straight to the owner as of ``epoch``; the topic is checked, the client allowed to.

        ``behind``: the broker that its messages of this topic went to before; ``closing`` names the word that comes from there
        (:meth:`close_source`). A gateway changes the ways of its clients at different times: each is a source of its own.
        """
        topic = self.topic(publication.topic)
        topic.used_at = now
        topic.gateway_producers[gateway, client] = (now, latency_ms)
        topic.messages += publication.count
        topic.bytes += len(publication.packets)
        if epoch > topic.epoch:
            self.expect(topic, epoch, now)
        witness = self._engine.effects.witness
        if witness is not None:
            witness.processed(publication, now)
        errand = OwnerErrand(errands.TO_OWNER, epoch or topic.epoch, "")
        source = gateway_source(gateway, closing)
        gated = behind != "" and topic.closed.get(source, 0) < errand.epoch
        errand.behind = behind if gated else ""
        if not gated and source not in topic.newest and not (topic.mine and errand.epoch == topic.epoch):
            source = OWN
        self._intake(topic, source, errand, None, publication, now)

    def close_source(self, name: bytes, gateway: str, now: float, epoch: int = 0, owner: str = "", closing: int = 0) -> None:
        """A gateway sends a topic's messages to its ``owner`` of ``epoch`` from now on, which may be the one known here."""
        topic = self.topic(name)
        source = gateway_source(gateway, closing)
        by = topic.waiting_from(gateway)
        word = WaitingWord(by, topic.own_behind_epoch, source, epoch or topic.epoch, owner or topic.owner)
        self.words.closed(topic, word, now)

    def _intake(
        self,
        topic: OwnedTopic,
        source: str,
        errand: OwnerErrand,
        who: Identity | None,
        publication: Publication,
        now: float,
    ) -> None:
        """Messages that are to be ordered go on from here, or wait."""
        behind_epoch = errand.epoch if errand.behind else 0
        # Sent in an earlier epoch: what came so before was passed on, and is to come round first.
        behind_own = errand.epoch < topic.epoch and (source in topic.passed or source not in self.fabric.peers)
        session = topic.newest.get(source)
        if session is None:
            if self._passes(topic, source, behind_epoch, behind_own):
                if topic.state == ELSEWHERE:
                    topic.passed.add(source)
                self._take(topic, publication.anew(), publication.sequence, errand.flags, who, now)
                return
            session = self._parking(topic, source, behind_epoch, now)
        elif behind_epoch > max(session.behind_epoch, topic.closed.get(source, 0)):
            # What waits there may be what this waits for, and is to go on without it.
            session = self._parking(topic, further_queue(source, behind_epoch), behind_epoch, now)
        session.behind_own = session.behind_own or behind_own
        said = NO_IDENTITY if who is None else errands.identity(who.origin, who.epoch, who.sequence)
        via = errands.parked(topic.epoch, "", errand.flags, said)
        self.parked_messages += publication.count
        self._router.carry(publication.anew(), [session.target.with_via(via)], None, now)
        if topic.state == UNKNOWN:
            self.ask(topic, now)

    def _passes(self, topic: OwnedTopic, source: str, behind_epoch: int, behind_own: bool) -> bool:
        """Whether messages of a source need not wait: for its word CLOSED of ``behind_epoch``; or, as ``behind_own``, for that
        of this broker itself."""
        if topic.state == UNKNOWN or topic.state == ACQUIRING:
            return False
        if behind_own and topic.own_behind_epoch:
            return False
        return behind_epoch == 0 or topic.closed.get(source, 0) >= behind_epoch

    def _take(
        self, topic: OwnedTopic, publication: Publication, was: int, flags: int, who: Identity | None, now: float
    ) -> None:
        """Order messages, or send them to the owner. ``was`` is the number they were published or parked under."""
        if topic.state == OWNER:
            self._order(topic, publication, was, flags, who, now)
            return
        said = NO_IDENTITY if who is None else errands.identity(who.origin, who.epoch, who.sequence)
        via = errands.to_owner(topic.epoch, topic.behind, flags, said)
        topic.sent = True
        self.passed_on_messages += publication.count
        publisher = topic.publisher_of(was) if who is None else 0
        self._router.carry(publication, [self.target(topic.owner, via)], None, now)
        if publisher:
            topic.remember(publication, publisher)

    def _order(
        self, topic: OwnedTopic, publication: Publication, was: int, flags: int, who: Identity | None, now: float
    ) -> None:
        route = self._router.route_for(topic.name)
        topic.ordered += publication.count
        if who is None:
            if topic.has_no_local:
                publication.fenced = _only(topic.publisher_of(was))
            if publication.retain:
                self._engine.inbound.retain(publication, now)
            self._router.order(route, publication, errands.ordered(topic.epoch, NO_IDENTITY), True, now)
            return
        for begin, count in self.ordered.take(who.origin, who.epoch, who.sequence, publication.count):
            if flags & AGAIN:  # the owner before may have ordered it, and its copy be here or on its way
                runs = _runs(begin, count, self.delivered.take(who.origin, who.epoch, begin, count))
            else:
                runs = [(begin, count, True)]
            for first, length, here in runs:
                said_from = first
                for part in stretch(publication, first - who.sequence, length):
                    if topic.has_no_local and who.origin == self.fabric.name:
                        part.fenced = _only(topic.publisher_of(said_from))
                    if part.retain and here:  # else others may have been retained since
                        self._engine.inbound.retain(part, now)
                    said = errands.identity(who.origin, who.epoch, said_from)
                    said_from += part.count
                    self._router.order(route, part, errands.ordered(topic.epoch, said), here, now)

    # --- waiting --------------------------------------------------------------------------------------------------------

    def _parking(self, topic: OwnedTopic, queue: str, behind_epoch: int, now: float) -> ParkingSession:
        session = topic.parked.get(queue)
        if session is None:
            made = self.fabric.channels.session_for(parking_name(topic.name, queue))
            if not isinstance(made, ParkingSession):
                raise TypeError("a parking queue with the name of a broker")
            session = made
            session.ownership = self
            session.behind_epoch = behind_epoch
            session.behind_own = session.source == OWN
            session.until = now + WAIT_S
            topic.parked[queue] = session
            topic.newest[session.source] = session
        self.watch(topic, now)
        return session

    def unparked(self, session: ParkingSession, publication: Publication, via: str, now: float) -> None:
        """Parked messages go on."""
        errand = errands.parse(via)
        who: Identity | None = None
        if errand.origin:
            who = Identity(errand.origin, errand.origin_epoch, errand.sequence)
        topic = self.topic(session.topic)
        if self._is_owned(topic):
            self._take(topic, publication.anew(), publication.sequence, errand.flags, who, now)
        else:
            anew = publication.anew()
            if anew.retain:
                self._engine.inbound.retain(anew, now)
            self._router.publish(self._router.route_for(topic.name), anew, None, now)

    def release(self, topic: OwnedTopic, now: float) -> None:
        """Let go on what need not wait any more, and hear the words that were waiting behind it."""
        waiting: set[str] = set()
        for session in list(topic.parked.values()):
            source = session.source
            if source not in waiting and self._passes(topic, source, session.behind_epoch, session.behind_own):
                self._empty(topic, session, now)
            if session.queue_name in topic.parked:
                waiting.add(source)
        if topic.waiting_words:
            words, topic.waiting_words = topic.waiting_words, []
            for word in words:
                self.words.closed(topic, word, now)

    def _empty(self, topic: OwnedTopic, session: ParkingSession, now: float) -> None:
        if topic.state == ELSEWHERE:
            topic.passed.add(session.source)
        if session.empty(now):
            topic.parked.pop(session.queue_name, None)
            if topic.newest.get(session.source) is session:
                del topic.newest[session.source]
            self._engine.sessions.end(session, now)
            for file_number in session.useless_files:
                if session.spool is not None:
                    session.spool.remove(session.number, file_number)
            if session.source == OWN:
                self._router.forget(topic.name)

    def watch(self, topic: OwnedTopic, now: float) -> None:
        """Something in a topic has a time limit."""
        self._waiting[topic.name] = topic
        self._look_at = min(self._look_at, now + LOOK_S)

    def _look(self, topic: OwnedTopic, now: float) -> bool:
        """End waits whose time is over; returns whether there are more."""
        if topic.own_behind_epoch and topic.own_until <= now:
            topic.came_round()
            self.late_gates += 1
            self.changed(topic)
        for session in topic.parked.values():
            if session.behind_epoch and session.until <= now:
                topic.closed[session.source] = max(session.behind_epoch, topic.closed.get(session.source, 0))
                session.behind_epoch = 0
                self.late_gates += 1
        if topic.state == ACQUIRING and topic.until <= now:
            self.late_gates += 1
            topic.waiting_for.clear()
            self.words.in_charge(topic, now)
        if topic.state == UNKNOWN and topic.parked and now - topic.asked_at >= ASK_S:
            self._asking[topic.name] = topic
        self.words.look(topic, now)
        if topic.parked:
            for session in topic.parked.values():
                session.try_files_again(now)
            self.release(topic, now)
        return bool(topic.parked) or topic.state == ACQUIRING or topic.own_behind_epoch > 0 or topic.order >= 0

    # --- brokers come and go --------------------------------------------------------------------------------------------

    def migrate(self, order: MigrateOrder, now: float) -> None:
        """The controller wants a topic handed over."""
        self.words.migrate(order, now)

    def peer_down(self, peer: Peer, now: float) -> None:
        self._down.append(peer.name)
        self._lost[peer.name] = now + WAIT_S
        for topic in self.topics.values():
            if topic.state == ELSEWHERE and topic.owner == peer.name:
                # Others may know of a later owner. Who publishes here next asks, too (:meth:`direct`).
                self._router.forget(topic.name)
                if topic.sent:
                    self._asking[topic.name] = topic

    def _give_up(self, name: str, now: float) -> None:
        """A broker has not come back for so long: what it was to pass on to topics' new owners goes there from here. Should it
        come back, that is known by its identity."""
        peer = self.fabric.peers.get(name)
        if peer is None or peer.up:
            return
        former: dict[bytes, OwnedTopic] = {}
        for pending in peer.session.queue or ():
            topic = self.topics.get(pending.publication.topic)
            if topic is not None and pending.terms.via[:1] == errands.TO_OWNER and topic.owner and topic.owner != name:
                former[topic.name] = topic
        for topic in former.values():
            if topic.behind == name:  # its word does not come either
                topic.behind = ""
                self._router.forget(topic.name)
            self._send_again(topic, peer, now)

    def forgets(self, peer: Peer, now: float) -> None:
        """A broker is about to be forgotten, with what is kept for it: what it was to order has to be kept otherwise."""
        for topic in list(self.topics.values()):
            if topic.state == ELSEWHERE and topic.owner == peer.name:
                topic.begins(topic.epoch, "", UNKNOWN)
                self.changed(topic)
                self._send_again(topic, peer, now)

    def leave(self, now: float) -> None:
        self.leaving = True
        self._hand_out(now)

    def _hand_out(self, now: float) -> None:
        """This broker stops: others get its topics."""
        for topic in self.owned():
            self.words.hand_to_anyone(topic, now)

    def has_left(self) -> bool:
        if not any(peer.up for peer in self.fabric.peers.values()):
            return True
        return not any(topic.mine or topic.parked for topic in self.topics.values())

    # --- time -----------------------------------------------------------------------------------------------------------

    def settle(self, now: float) -> None:
        if self._down:
            down, self._down = self._down, []
            for name in down:
                peer = self.fabric.peers.get(name)
                if peer is None or not peer.up:
                    for topic in list(self._waiting.values()):
                        self.words.lost(topic, name, now)
        if self._reclassed:
            self._reclassed = False
            self._reclass(now)
        if self._asking and self.directory is not None:
            asked = list(self._asking.values())
            self._asking = {}
            for topic in asked:
                topic.asked_at = now
            self.directory.ask([(topic.text, topic.epoch) for topic in asked], now)

    def _is_owned(self, topic: OwnedTopic) -> bool:
        return self.fabric.classes.class_of(topic.name) == OWNED

    def _reclass(self, now: float) -> None:
        """Rules changed. A topic that has no owner any more is forgotten; what waited for one goes the way of its class."""
        for topic in list(self.topics.values()):
            if self._is_owned(topic):
                continue
            if topic.mine and self.directory is not None:
                self.directory.owned(topic.text, topic.epoch, False)
            for session in list(topic.parked.values()):
                self._empty(topic, session, now)
            if not topic.parked:
                del self.topics[topic.name]
                self._asking.pop(topic.name, None)
                self._waiting.pop(topic.name, None)

    def tick(self, now: float) -> None:
        if now >= self._look_at:
            self._look_at = FOREVER
            for topic in list(self._waiting.values()):
                if not self._look(topic, now):
                    self._waiting.pop(topic.name, None)
            if self._waiting:
                self._look_at = now + LOOK_S
            if self.leaving:
                self._hand_out(now)
        if self._lost:
            for name, until in list(self._lost.items()):
                if until <= now:
                    del self._lost[name]
                    self._give_up(name, now)
        if now >= self._sweep_at:
            self._sweep_at = now + SWEEP_S
            for topic in list(self.topics.values()):
                if not topic.mine and now - topic.used_at > IDLE_S and topic.name not in self._waiting:
                    del self.topics[topic.name]
                    self._router.forget(topic.name)

    def next_deadline(self) -> float:
        deadline = min(self._look_at, self._sweep_at) if self.topics else FOREVER
        return min(deadline, min(self._lost.values())) if self._lost else deadline


_SENT_AGAIN: Final = OwnerErrand(errands.TO_OWNER, 0, "", AGAIN)


def _runs(first: int, count: int, fresh: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """All of a stretch of numbers in order, as (first, how many, whether they are among the ``fresh`` ones) each."""
    runs: list[tuple[int, int, bool]] = []
    at = first
    for begin, length in fresh:
        if at < begin:
            runs.append((at, begin - at, False))
        runs.append((begin, length, True))
        at = begin + length
    if at < first + count:
        runs.append((at, first + count - at, False))
    return runs


def _identity(peer: Peer, publication: Publication, errand: OwnerErrand) -> Identity:
    if errand.origin:
        return Identity(errand.origin, errand.origin_epoch, errand.sequence)
    return Identity(peer.name, peer.epoch, publication.sequence)


def gateway_source(gateway: str, closing: int) -> str:
    """The name of a gateway as a source. With every change of the way it is another one."""
    return f"{GATEWAY_SOURCE}{gateway}{GATEWAY_SOURCE}{closing:x}"


def _only(session_number: int) -> set[int] | None:
    return {session_number} if session_number else None

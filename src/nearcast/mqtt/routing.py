"""From a publication to its receivers.

The answer of the subscription tree for a topic is compiled once into a :class:`Route`, together with whether and how the topic
is kept, and used until any subscription or rule changes: a busy topic costs one dictionary look-up per publication, which may
be hundreds of messages.
"""

from __future__ import annotations

from typing import Final, Protocol

from mypy_extensions import mypyc_attr

from nearcast.mqtt import records
from nearcast.mqtt.codec import encode_varint
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.keeping import Keeper, Keeping
from nearcast.mqtt.publication import Publication, Terms
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import SharedGroup, Subscription, SubscriptionTree
from nearcast.mqtt.topics import parse_shared

#: Topics whose routes are remembered. The whole memory is dropped when it is full: it refills at the cost of one match each.
MAX_ROUTES: Final = 50_000
#: A longer topic name is looked up anew each time: names are the client's to choose, and 64 KiB long if it likes.
MAX_REMEMBERED_TOPIC_BYTES: Final = 256

_SUBSCRIPTION_IDENTIFIER: Final = b"\x0b"

#: Another broker's copy of a message says which shared subscriptions it is to serve there: their filters, with this between
#: them. An empty one stands for the plain subscribers, who are meant when nothing is said.
VIA_SEPARATOR: Final = "\0"
#: Stands before such a filter, once for every broker that had nobody left to give the message to.
PASSED_ON: Final = "\1"
MAX_PASSES: Final = 3
#: Stands before such a filter that somebody else serves: said to those who pass the message on beyond this broker's knowledge.
SERVED: Final = "\6"


class Sharing(Protocol):
    """Which of several brokers serves a shared subscription when this one has nobody connected to."""

    def choose(self, members: list[Subscription], connected: bool) -> Subscription | None:
        """One of the brokers' memberships: of those with members that are ``connected``, or of all."""


#: How far messages of a topic go: to every broker with a subscriber, to none, to this broker's group, or there to those with
#: a subscriber only; or to the topic's owner, which passes them on.
FABRIC: Final = 0
HERE: Final = 1
GROUP: Final = 2
GROUP_FILTERED: Final = 3
OWNED_REACH: Final = 4


class Classes(Protocol):
    """What becomes of topics in the fabric (:mod:`nearcast.fabric.classes`)."""

    def reach(self, topic: bytes) -> int:
        """How far messages of a topic go."""

    def flooded(self, matched: list[Target], reach: int) -> list[Target]:
        """Who gets messages that go to the group, given the brokers with a subscriber."""

    def direct(self, route: Route) -> None:
        """Make the route of a topic that has an owner."""

    def serves(self, session: Session) -> bool:
        """Whether another broker may serve a shared subscription of such messages."""


class Target:
    """One session's share in a topic: its overlapping subscriptions as one, at the highest QoS [MQTT-3.3.4-2]."""

    def __init__(self, subscription: Subscription, via: str = "") -> None:
        self.session: Session = subscription.session
        self.via = via
        self.qos = subscription.qos
        # Whether some of the subscriptions do not want the session's own messages, and what the others make of those.
        self.no_local = subscription.no_local
        self.own: Target | None = None
        self.retain_as_published = subscription.retain_as_published
        self.identifiers = encode_identifier(subscription.identifier)
        self._terms = Terms(self.qos, False, self.identifiers, via)
        self._subscription = subscription
        #: Whether it is to know which shared subscriptions were served (:mod:`nearcast.fabric.relaying`).
        self.informed = False

    def telling(self, names: list[str], served: list[str]) -> Target:
        """The same for plain subscribers and these shared subscriptions; ``served`` are all that are served somewhere."""
        if self.informed:
            names = names + [SERVED + name for name in served if name not in names]
        return Target(self._subscription, self.via + VIA_SEPARATOR + VIA_SEPARATOR.join(names)) if names else self

    def with_via(self, via: str) -> Target:
        """The same, for something else."""
        return Target(self._subscription, via)

    def merge(self, subscription: Subscription) -> None:
        self.qos = max(self.qos, subscription.qos)
        self.no_local = self.no_local or subscription.no_local
        self.retain_as_published = self.retain_as_published or subscription.retain_as_published
        self.identifiers += encode_identifier(subscription.identifier)
        self._terms = Terms(self.qos, False, self.identifiers)

    def terms_for(self, publication: Publication) -> Terms:
        """How this session gets a publication. The last answer is remembered: mostly it is the next one too."""
        terms = self._terms
        qos = min(publication.qos, self.qos)
        retain = publication.retain and self.retain_as_published
        if terms.qos != qos or terms.retain != retain:
            terms = Terms(qos, retain, self.identifiers, self.via)
            self._terms = terms
        return terms


NO_TARGETS: Final[list[Target]] = []


@mypyc_attr(allow_interpreted_subclasses=True)
class RouteWatch:
    """Who is told what is published in a topic."""

    def published(self, publication: Publication, publisher: Session | None, now: float) -> None:
        """A client of this broker published; the messages are numbered and about to be handed out."""


class Route:
    """Everything that wants a topic, what keeps it, and how much went through it."""

    def __init__(self, topic: bytes) -> None:
        self.topic = topic
        self.generation = -1
        self.kept: Keeping | None = None
        self.targets: list[Target] = []
        # Other brokers with subscribers; they get what clients publish here, not what came from another broker.
        self.peers: list[Target] = []
        self.groups: list[SharedGroup] = []
        #: Where somebody else decides who gets the topic's messages (:mod:`nearcast.fabric.ownership`): what is published here
        #: goes there and nowhere else. The rest of the route is for what comes back.
        self.way: list[Target] | None = None
        self.watch: RouteWatch | None = None
        self.messages = 0
        self.messages_at_sweep = 0
        self.bytes = 0


def encode_identifier(identifier: int) -> bytes:
    """A Subscription Identifier property, or nothing for 0."""
    return _SUBSCRIPTION_IDENTIFIER + encode_varint(identifier) if identifier else b""


def _limited(group: SharedGroup, classes: Classes, reach: int) -> SharedGroup:
    """A shared subscription's members as far as messages go."""
    ours = SharedGroup(group.name, group.inner_filter)
    for client_id, member in group.members.items():
        session = member.session
        if not session.is_peer or (reach != HERE and classes.serves(session)):
            ours.members[client_id] = member
    return ours


class Router:
    """Routes publications over one subscription tree. ``next_sequence`` numbers messages: their identity at this origin."""

    def __init__(self, effects: Effects, tree: SubscriptionTree) -> None:
        self.effects = effects
        self.tree = tree
        self.keeper: Keeper | None = None
        self.sharing: Sharing | None = None
        self.classes: Classes | None = None
        self.next_sequence = 1
        #: Who wants to know what clients publish in a topic, whatever becomes of it.
        self.watches: dict[bytes, RouteWatch] = {}
        self._routes: dict[bytes, Route] = {}

    def remembered(self, topic: bytes) -> Route | None:
        """The route of a topic that was published lately, and whose name was therefore checked."""
        route = self._routes.get(topic)
        if route is not None and route.generation != self.tree.generation:
            self._compile(route)
        return route

    def route_for(self, topic: bytes) -> Route:
        """The route of a topic, whose name has been checked."""
        route = self._routes.get(topic)
        if route is None:
            route = Route(topic)
            if len(topic) <= MAX_REMEMBERED_TOPIC_BYTES:
                if len(self._routes) >= MAX_ROUTES:
                    self._routes.clear()
                self._routes[topic] = route
        if route.generation != self.tree.generation:
            self._compile(route)
        return route

    def _compile(self, route: Route) -> None:
        match = self.tree.match(route.topic)
        merged: dict[str, Target] = {}
        for subscription in match.subscriptions:
            target = merged.get(subscription.session.client_id)
            if target is None:
                merged[subscription.session.client_id] = Target(subscription)
            else:
                target.merge(subscription)
        for subscription in match.subscriptions:
            target = merged[subscription.session.client_id]
            if target.no_local and not subscription.no_local:
                if target.own is None:
                    target.own = Target(subscription)
                else:
                    target.own.merge(subscription)
        route.targets = [target for target in merged.values() if not target.session.is_peer]
        route.peers = [target for target in merged.values() if target.session.is_peer]
        route.groups = match.groups
        classes = self.classes
        reach = FABRIC if classes is None else classes.reach(route.topic)
        route.way = None
        route.watch = self.watches.get(route.topic)
        if classes is not None and reach == OWNED_REACH:
            classes.direct(route)
        elif classes is not None and reach != FABRIC:
            route.peers = NO_TARGETS if reach == HERE else classes.flooded(route.peers, reach)
            limited = [_limited(group, classes, reach) for group in match.groups]
            route.groups = [group for group in limited if group.members]
        # The broker's own figures are of no use later on.
        keeper = None if route.topic[:5] == b"$SYS/" else self.keeper
        route.kept = None if keeper is None else keeper.keeping(route.topic)
        route.generation = self.tree.generation

    def forget(self, topic: bytes) -> None:
        """Compile a topic's route anew, because its owner changed."""
        route = self._routes.get(topic)
        if route is not None:
            route.generation = -1

    def keep_with(self, keeper: Keeper | None) -> None:
        """Ask this one from now on which topics are kept. Also called when its answers may have changed."""
        self.keeper = keeper
        self.tree.generation += 1

    def sweep(self) -> None:
        """Forget routes that are out of date, so that they keep no ended session in memory, and those nobody used since."""
        generation = self.tree.generation
        useless: list[bytes] = []
        for topic, route in self._routes.items():
            if route.generation != generation or route.messages == route.messages_at_sweep:
                useless.append(topic)
            route.messages_at_sweep = route.messages
        for topic in useless:
            del self._routes[topic]

    def topic_counts(self) -> list[tuple[str, int, int]]:
        """(topic, messages, bytes) of every remembered route but the broker's own."""
        return [
            (topic.decode("utf-8"), route.messages, route.bytes)
            for topic, route in self._routes.items()
            if topic[:5] != b"$SYS/"
        ]

    def publish(self, route: Route, publication: Publication, publisher: Session | None, now: float) -> bool:
        """Number a publication and hand it to everyone who wants it; returns whether anyone did."""
        count = publication.count
        publication.sequence = self.next_sequence
        self.next_sequence += count
        route.messages += count
        route.bytes += len(publication.packets)
        witness = self.effects.witness
        if witness is not None:
            witness.processed(publication, now)
        if route.watch is not None:
            route.watch.published(publication, publisher, now)
        if route.way is not None:
            self._hand_out(NO_TARGETS, route.way, publication, publisher, now)
            publication.forget_forms()
            return True
        peers = route.peers
        if not route.targets and not route.groups and not peers:
            self.effects.stats.unmatched += count
            return False
        if route.groups:
            peers = self._share(route, peers, publication, now)
        self._hand_out(route.targets, peers, publication, publisher, now)
        publication.forget_forms()
        return True

    def order(self, route: Route, publication: Publication, errand: str, here: bool, now: float) -> None:
        """Hand what another broker's client published to everyone who wants it: it is ours from here on, and numbered so.

        ``errand`` is what other brokers are told (:mod:`nearcast.fabric.owner_errands`); not ``here``: our plain subscribers
        had it.
        """
        count = publication.count
        publication.sequence = self.next_sequence
        self.next_sequence += count
        route.messages += count
        route.bytes += len(publication.packets)
        peers = [target.with_via(errand) for target in route.peers]
        if route.groups:
            peers = self._share(route, peers, publication, now)
        self._hand_out(route.targets if here else NO_TARGETS, peers, publication, None, now)
        publication.forget_forms()

    def publish_bridged(self, route: Route, publication: Publication, via: str, now: float) -> None:
        """Hand on what another broker received and numbered: to whom it says (see :data:`VIA_SEPARATOR`)."""
        route.messages += publication.count
        route.bytes += len(publication.packets)
        if not via:
            self._hand_out(route.targets, NO_TARGETS, publication, None, now)
        else:
            for name in via.split(VIA_SEPARATOR):
                if name[:1] == SERVED:
                    continue
                if name:
                    self._serve(name, publication, now)
                else:
                    self._hand_out(route.targets, NO_TARGETS, publication, None, now)
        publication.forget_forms()

    def carry(self, publication: Publication, peers: list[Target], route: Route | None, now: float) -> None:
        """Hand on what another broker, or somebody beyond all brokers, received: it is ours from here on, and numbered so.

        To other brokers, and, with a route, to our plain subscribers.
        """
        publication.sequence = self.next_sequence
        self.next_sequence += publication.count
        targets = NO_TARGETS
        if route is not None:
            route.messages += publication.count
            route.bytes += len(publication.packets)
            targets = route.targets
        self._hand_out(targets, peers, publication, None, now)
        publication.forget_forms()

    def serve(self, name: str, publication: Publication, now: float) -> None:
        """Messages for one member of a shared subscription, here or at a broker that has some; numbered by :meth:`carry`."""
        self._serve(name, publication, now)

    def _hand_out(
        self, targets: list[Target], peers: list[Target], publication: Publication, publisher: Session | None, now: float
    ) -> None:
        """To plain subscribers, and to brokers that are to serve theirs."""
        fenced = publication.fenced
        if fenced is not None:
            targets = [target for target in targets if target.session.number not in fenced]
        if publication.qos == 0:
            retain = publication.retain
            for target in targets:
                session = target.session
                connection = session.connection
                if connection is None:
                    continue
                if target.no_local and session is publisher:
                    if target.own is None:
                        continue
                    target = target.own
                connection.send_qos0(publication, retain and target.retain_as_published, target.identifiers, now)
            for target in peers:
                target.session.forward(publication, target.via, now)
        elif peers:
            self._publish_acknowledged(targets + peers, publication, publisher, now)
        elif targets:
            self._publish_acknowledged(targets, publication, publisher, now)

    def _publish_acknowledged(
        self, targets: list[Target], publication: Publication, publisher: Session | None, now: float
    ) -> None:
        log = self.effects.records
        gated = self.effects.gated
        # The publication's record must stand before those of its sending, and is complete only after them: keep its place.
        place = len(log)
        if gated:
            log.append(b"")
        durable: list[bytes] = []
        for target in targets:
            session = target.session
            if target.no_local and session is publisher:
                if target.own is None:
                    continue
                target = target.own
            terms = target.terms_for(publication)
            if terms.qos == 0:
                connection = session.connection
                if connection is not None:
                    connection.send_qos0(publication, terms.retain, terms.identifiers, now)
                continue
            accepted = session.deliver(publication, terms, now)
            if accepted and session.durable:
                durable.append(records.target(session.number, accepted, terms))
        if durable:
            log[place] = records.published(publication, durable, self.effects)
        elif gated:
            del log[place]

    def deliver(self, session: Session, publication: Publication, terms: Terms, now: float) -> None:
        """Hand a publication to one session (retained messages, shared subscriptions)."""
        if terms.qos == 0:
            connection = session.connection
            if connection is not None:
                connection.send_qos0_on(publication, terms, now)
            return
        log = self.effects.records
        place = len(log)
        if session.durable:
            log.append(b"")
        accepted = session.deliver(publication, terms, now)
        if session.durable:
            if accepted:
                target = records.target(session.number, accepted, terms)
                log[place] = records.published(publication, [target], self.effects)
            else:
                del log[place]

    def share(self, route: Route, publication: Publication, now: float) -> None:
        """Have one member of each shared subscription get messages that somebody else kept: ours from here on, and numbered
        so."""
        publication.sequence = self.next_sequence
        self.next_sequence += publication.count
        self._hand_out(NO_TARGETS, self._share(route, NO_TARGETS, publication, now), publication, None, now)
        publication.forget_forms()

    def _share(self, route: Route, plain: list[Target], publication: Publication, now: float) -> list[Target]:
        """Serve the shared subscriptions; returns which brokers get the publication, for those and their ``plain`` ones."""
        members: dict[str, Subscription] = {}
        names: dict[str, list[str]] = {}
        served: list[str] = []
        for group in route.groups:
            taker = self._publish_shared(group, publication, False, now)
            if taker is None:
                continue
            served.append(taker.topic_filter)
            if taker.session.is_peer:
                client_id = taker.session.client_id
                members[client_id] = taker
                names.setdefault(client_id, []).append(taker.topic_filter)
        if not served:
            return plain
        peers: list[Target] = []
        for target in plain:
            client_id = target.session.client_id
            members.pop(client_id, None)
            peers.append(target.telling(names.get(client_id, []), served))
        for client_id, member in members.items():
            peers.append(Target(member, VIA_SEPARATOR.join(names[client_id])))
        return peers

    def _publish_shared(
        self, group: SharedGroup, publication: Publication, here_first: bool, now: float
    ) -> Subscription | None:
        """Spread the messages over the members in turn: who is connected and keeps up, else who lags, else who is away.

        Returns one of those who got them, or none. Where another broker's members are to have them instead, it is that
        broker's membership, and giving them is the caller's business: those that are connected come before ours that are
        away, unless it is to be ``here_first``.
        """
        ready: list[Subscription] = []
        lagging: list[Subscription] = []
        away: list[Subscription] = []
        elsewhere: list[Subscription] = []
        for member in group.members.values():
            session = member.session
            connection = session.connection
            if session.is_peer:
                elsewhere.append(member)
            elif connection is None:
                if publication.qos and member.qos:
                    away.append(member)
            elif session.queued_messages or not connection.has_room():
                lagging.append(member)
            else:
                ready.append(member)
        chosen = ready or lagging
        sharing = self.sharing
        if not chosen and elsewhere and sharing is not None and not (here_first and away):
            nearest = sharing.choose(elsewhere, True)
            if nearest is None and not away and publication.qos:
                nearest = sharing.choose(elsewhere, False)
            if nearest is not None:
                return nearest
        if not chosen:
            chosen = away
        if not chosen:
            return None
        turn = group.turn % len(chosen)
        for part in publication.parts(len(chosen)):
            member = chosen[turn]
            turn = (turn + 1) % len(chosen)
            terms = Terms(
                min(publication.qos, member.qos),
                publication.retain and member.retain_as_published,
                encode_identifier(member.identifier),
                member.topic_filter,
            )
            self.deliver(member.session, part, terms, now)
        group.turn = turn
        return chosen[0]

    def _serve(self, name: str, publication: Publication, now: float) -> None:
        """Another broker chose this one for a shared subscription; its members may have left meanwhile."""
        passes = len(name) - len(name.lstrip(PASSED_ON))
        group, inner = parse_shared(name[passes:])
        shared = self.tree.find_group(group, inner)
        taker = None if shared is None else self._publish_shared(shared, publication, True, now)
        if taker is None:
            if shared is None:
                self.effects.stats.unmatched += publication.count
        elif not taker.session.is_peer:
            return
        elif passes < MAX_PASSES:
            self._pass_to(taker, PASSED_ON * (passes + 1) + taker.topic_filter, publication, now)
        else:
            self.effects.stats.unmatched += publication.count

    def _pass_to(self, member: Subscription, name: str, publication: Publication, now: float) -> None:
        """Give messages of a shared subscription to another broker's members. They are ours from here on, and numbered so."""
        anew = publication.anew()
        anew.sequence = self.next_sequence
        self.next_sequence += anew.count
        if anew.qos == 0:
            member.session.forward(anew, name, now)
        else:
            self.deliver(member.session, anew, Terms(anew.qos, anew.retain, b"", name), now)

    def pass_on(self, topic_filter: str, publication: Publication, now: float) -> None:
        """Messages of a shared subscription whose receiver ended: give them to another member, if there is one."""
        group, inner = parse_shared(topic_filter)
        shared = self.tree.find_group(group, inner)
        if publication.expired(now):  # [MQTT-3.3.2-5]
            self.effects.stats.dropped_expired += publication.count
        elif shared is not None:
            classes = self.classes
            reach = FABRIC if classes is None else classes.reach(publication.topic)
            if classes is not None and reach != FABRIC and reach != OWNED_REACH:
                shared = _limited(shared, classes, reach)
            taker = self._publish_shared(shared, publication, False, now)
            if taker is not None and taker.session.is_peer:
                self._pass_to(taker, taker.topic_filter, publication, now)

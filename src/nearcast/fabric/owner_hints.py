"""Which broker a client would be served best by: the owner of all that it is subscribed to, if that is one broker.

Gateways are told (FOLLOW), and move such clients (:mod:`nearcast.fabric.following`). A client without a gateway that said in
its CONNECT that it follows Server References (user property ``nearcast`` = ``redirect``, MQTT 5) is sent to the owner's
address (DISCONNECT 0x9C, section 4.11) once all owned topics it subscribed to or publishes have one other owner. It is not
sent away where that would have its will published: the session goes on at the other broker, and the client is not gone.

All of this is advice: it is looked at a little later than things happen, a number of clients at a time, and a client that
nobody advises is served all the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.fabric import frames
from nearcast.fabric.channels import PEER_PREFIX
from nearcast.fabric.classes import OWNED, TopicClasses
from nearcast.fabric.frames import frame
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.trunks import Channel
from nearcast.mqtt import reasons
from nearcast.mqtt.connection import CONNECTED
from nearcast.mqtt.records import blob, number
from nearcast.mqtt.session import Session
from nearcast.mqtt.topics import covers, matches, overlaps, parse_shared

if TYPE_CHECKING:
    from nearcast.fabric.fabric import Fabric
    from nearcast.fabric.owned_topics import OwnedTopic

LOOK_S: Final = 0.2
LOOKED_AT_ONCE: Final = 256
MAX_MATCHED: Final = 10_000
"""Owned topics that a filter with wildcards is compared with. Where this broker knows more, such clients are not advised."""

SETTLED_S: Final = 2.0
"""A client is sent to another address when the advice has stood for so long, and the client has been here for as long."""

MAX_PUBLISHED: Final = 1_024
"""Topics of one client that wants to be redirected; of others it does not matter where they are owned."""

NOBODY: Final = ""


class OwnerHints:
    """See the module. ``addresses`` are where clients reach other brokers, by name."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._engine = fabric.engine
        self.addresses: dict[str, str] = {}
        self.next_look = 0.0
        self.redirected = 0
        # Clients to look at; those that were advised; what those publish that may be redirected, and where to, since when.
        self._changed: dict[str, None] = {}
        self._advised: dict[str, None] = {}
        self._published: dict[str, dict[bytes, None]] = {}
        self._redirects: dict[str, tuple[str, float]] = {}
        self._rules: list[tuple[str, str]] = fabric.classes.rules

    # --- what may change the advice -------------------------------------------------------------------------------------

    def changed(self, client_id: str) -> None:
        """A client came, or subscribed to something else."""
        if self._fabric.ownership.topics or client_id in self._advised:
            self._changed[client_id] = None

    def owner_changed(self, name: bytes, epoch: int, owner: str) -> None:
        """A topic has another owner, or its owner another state."""
        self._fabric.branches.owner_changed(name, epoch, owner)
        match = self._engine.tree.match(name)
        for subscription in match.subscriptions:
            self._note(subscription.session)
        for group in match.groups:
            for member in group.members.values():
                self._note(member.session)
        for client_id, topics in self._published.items():
            if name in topics:
                self._changed[client_id] = None

    def _note(self, session: Session) -> None:
        if not session.is_peer and session.connection is not None:
            self._changed[session.client_id] = None

    def published(self, topic: OwnedTopic, session: Session) -> None:
        """A client published an owned topic, for the first time in a while."""
        connection = session.connection
        if connection is None:
            return
        channel = connection.handle
        if isinstance(channel, Channel):
            self._fabric.branches.published(topic, channel, session)
        elif connection.wants_redirect:
            topics = self._published.setdefault(session.client_id, {})
            if len(topics) < MAX_PUBLISHED:
                topics[topic.name] = None
            self._changed[session.client_id] = None

    # --- looking --------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Look at some of the clients for which something changed."""
        if now < self.next_look:
            return
        self.next_look = now + LOOK_S
        if self._rules is not self._fabric.classes.rules:
            self._rules = self._fabric.classes.rules
            self._changed.update(self._advised)
            self._changed.update(dict.fromkeys(self._published))
        for client_id in list(self._changed)[:LOOKED_AT_ONCE]:
            del self._changed[client_id]
            self._look(client_id, now)
        for client_id, (target, since) in list(self._redirects.items()):
            if now - since >= SETTLED_S:
                self._redirect(client_id, target, now)

    def next_deadline(self) -> float:
        return self.next_look if self._changed or self._redirects or self._advised else FOREVER

    def _look(self, client_id: str, now: float) -> None:
        session = self._engine.sessions.by_client.get(client_id)
        connection = None if session is None else session.connection
        if session is None or connection is None or client_id[:1] == PEER_PREFIX:
            self._forget(client_id)
            return
        channel = connection.handle
        if isinstance(channel, Channel):
            self._advise(session, channel)
        elif connection.wants_redirect:
            target = self._owner_for(session)
            if not target or target == self._fabric.name:
                self._redirects.pop(client_id, None)
            elif self._redirects.get(client_id, ("", 0.0))[0] != target:
                self._redirects[client_id] = (target, max(now, connection.opened_at))

    def _forget(self, client_id: str) -> None:
        self._advised.pop(client_id, None)
        self._published.pop(client_id, None)
        self._redirects.pop(client_id, None)

    def _advise(self, session: Session, channel: Channel) -> None:
        owner = self._sole_owner(session)
        if channel.advised == owner:
            return
        channel.advised = owner
        channel.trunk.link.send(frame(frames.FOLLOW, number(channel.number), blob(owner.encode("utf-8"))))
        if owner:
            self._advised[session.client_id] = None
        else:
            self._advised.pop(session.client_id, None)

    def _sole_owner(self, session: Session) -> str:
        """Who owns all that a client is subscribed to; nobody, where a part of it has no owner or another one."""
        found = NOBODY
        for topic_filter in session.subscriptions:
            _, inner = parse_shared(topic_filter)
            if not all_owned(self._fabric.classes, inner):
                return NOBODY
            for topic in self._matched(inner):
                if topic.owner and topic.owner != found:
                    if found:
                        return NOBODY
                    found = topic.owner
        return found

    def _matched(self, inner_filter: str) -> list[OwnedTopic]:
        topics = self._fabric.ownership.topics
        if "+" not in inner_filter and "#" not in inner_filter:
            topic = topics.get(inner_filter.encode("utf-8"))
            return [] if topic is None else [topic]
        if len(topics) > MAX_MATCHED:
            return []
        return [topic for topic in topics.values() if matches(inner_filter, topic.text)]

    # --- clients without a gateway --------------------------------------------------------------------------------------

    def _owner_for(self, session: Session) -> str:
        """The one broker that owns all owned topics of a client, be they subscribed to or published; empty: there is none."""
        found: dict[str, None] = {}
        for topic_filter in session.subscriptions:
            for topic in self._matched(parse_shared(topic_filter)[1]):
                found[topic.owner] = None
        topics = self._fabric.ownership.topics
        for name in self._published.get(session.client_id, {}):
            published = topics.get(name)
            if published is not None:
                found[published.owner] = None
        return next(iter(found)) if len(found) == 1 else NOBODY

    def _redirect(self, client_id: str, target: str, now: float) -> None:
        session = self._engine.sessions.by_client.get(client_id)
        connection = None if session is None else session.connection
        peer = self._fabric.peers.get(target)
        address = self.addresses.get(target, "")
        if session is None or connection is None or connection.state != CONNECTED:
            self._forget(client_id)
        elif address and peer is not None and peer.up and not will_is_due(session) and self._owner_for(session) == target:
            self._forget(client_id)
            self.redirected += 1
            connection.close_reason = f"sent to {target}, which owns its topics"
            self._engine.disconnect(connection, reasons.USE_ANOTHER_SERVER, now, address)
        else:
            self._redirects[client_id] = (target, now)


def all_owned(classes: TopicClasses, topic_filter: str) -> bool:
    """Whether every topic that a filter matches is of class ``owned``."""
    for rule_filter, topic_class in classes.rules:
        if topic_class == OWNED:
            if covers(rule_filter, topic_filter):
                return True
        elif overlaps(rule_filter, topic_filter):
            return False
    return False


def will_is_due(session: Session) -> bool:
    """Whether a client that is sent away has its will published before it can be back."""
    will = session.will
    if will is None:
        return False
    properties = will.properties
    return properties is None or not properties.will_delay_interval or not session.expiry_seconds

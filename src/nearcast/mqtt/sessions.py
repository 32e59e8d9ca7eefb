"""The life of sessions: begun, taken over, left, expired; and the wills that speak for clients that vanish.

Sections 3.1.2.4 (clean start), 3.1.2.5 and 3.1.3.2.2 (wills and their delay), 3.1.2.11.2 (session expiry), 3.1.4 (takeover).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from nearcast.config import Limits
from nearcast.mqtt import records
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.inbound import Inbound, forwarded_properties
from nearcast.mqtt.packets import Will
from nearcast.mqtt.publication import build
from nearcast.mqtt.routing import Router
from nearcast.mqtt.session import NEVER, Session
from nearcast.mqtt.subscriptions import Subscription, SubscriptionTree
from nearcast.mqtt.timers import Timers
from nearcast.mqtt.topics import parse_shared

if TYPE_CHECKING:
    from nearcast.mqtt.connection import Connection


class SessionWatcher(Protocol):
    """Who is told where the clients of an engine are. Other brokers' sessions are no clients."""

    def attached(self, session: Session) -> None:
        """A connection took the session up."""

    def left(self, session: Session) -> None:
        """Its connection is gone; the session stays."""

    def ended(self, session: Session) -> None:
        """The session is about to be forgotten; it still has its subscriptions."""

    def shared(self, topic_filter: str) -> None:
        """A shared subscription was made or taken back."""


class Sessions:
    """All sessions of an engine, by client identifier."""

    def __init__(
        self,
        limits: Limits,
        effects: Effects,
        tree: SubscriptionTree,
        router: Router,
        inbound: Inbound,
        timers: Timers,
    ) -> None:
        self.by_client: dict[str, Session] = {}
        self.by_number: dict[int, Session] = {}
        self.next_number = 1
        self.watchers: list[SessionWatcher] = []
        #: How long after a restart wills wait at least: among several brokers, a client may be at another one by now.
        self.recovered_will_delay_seconds = 0.0
        #: How long a session is kept whose connection was cut between here and the client's gateway (:meth:`suspend`).
        self.suspended_seconds = 0.0
        self._effects = effects
        self._tree = tree
        self._router = router
        self._inbound = inbound
        self._timers = timers
        self.apply(limits)

    def apply(self, limits: Limits) -> None:
        """Use these limits for sessions that begin from now on."""
        self._max_sessions: int = limits.max_sessions
        self._max_queued_messages: int = limits.max_queued_messages
        self._max_queued_bytes: int = limits.max_queued_bytes

    def is_full(self) -> bool:
        return len(self.by_client) >= self._max_sessions

    def begin(self, client_id: str) -> Session:
        """A new session; there must be none with this client identifier."""
        number = self.next_number
        self.next_number += 1
        session = Session(client_id, number, self._effects, self._max_queued_messages, self._max_queued_bytes)
        self.install(session)
        return session

    def install(self, session: Session) -> None:
        self.by_client[session.client_id] = session
        self.by_number[session.number] = session
        self._effects.stats.sessions = len(self.by_client)

    def attach(
        self, session: Session, connection: Connection, expiry_seconds: int, will: Will | None, username: str | None
    ) -> None:
        """A connection takes the session up."""
        session.connection = connection
        session.username = username
        session.will = will
        session.will_due_at = 0.0
        session.expires_at = 0.0
        session.expiry_seconds = expiry_seconds
        connection.session = session
        for watcher in self.watchers:
            watcher.attached(session)
        self._remember(session)

    def set_expiry(self, session: Session, expiry_seconds: int) -> None:
        session.expiry_seconds = expiry_seconds
        self._remember(session)

    def _remember(self, session: Session) -> None:
        """Record the session's facts; a session that ends with its connection leaves no trace."""
        if not self._effects.gated:
            return
        if session.expiry_seconds > 0:
            newly = not session.durable
            session.durable = True
            self._effects.records.append(records.session(session, self._effects.wall_offset, newly))
        elif session.durable:
            session.durable = False
            self._effects.records.append(records.session_ended(session.number))

    def suspend(self, session: Session, now: float) -> None:
        """The session's connection ended, and the client may have noticed nothing: for a while the session neither ends nor
        speaks through its will, so that the client can go on with it wherever its gateway brings it."""
        self.leave(session, False, now, self.suspended_seconds, self.suspended_seconds)

    def leave(
        self,
        session: Session,
        clean: bool,
        now: float,
        least_will_delay_seconds: float = 0.0,
        least_expiry_seconds: float = 0.0,
    ) -> None:
        """The session's connection ended: ``clean`` when the client said goodbye and wants no will published."""
        connection = session.connection
        if connection is not None:
            connection.session = None
        session.connection = None
        if clean:
            session.will = None
        expiry = max(float(session.expiry_seconds), least_expiry_seconds)
        if expiry == 0.0:
            self.end(session, now)
            return
        will = session.will
        if will is not None:
            delay = least_will_delay_seconds
            if will.properties is not None and will.properties.will_delay_interval is not None:
                delay = max(delay, will.properties.will_delay_interval)
            delay = min(delay, expiry)
            if delay == 0.0:
                self.publish_will(session, now)
            else:
                session.will_due_at = now + delay
        if session.expiry_seconds != NEVER:
            session.expires_at = now + expiry
        self.schedule(session, now)
        self._remember(session)
        for watcher in self.watchers:
            watcher.left(session)

    def schedule(self, session: Session, now: float) -> None:
        """Be woken for the next deadline of a session that has no connection."""
        if session.will_due_at:
            self._timers.schedule(session, session.will_due_at, now)
        if session.expires_at:
            self._timers.schedule(session, session.expires_at, now)

    def wake(self, session: Session, now: float) -> None:
        """It is time to look at a session: its will or its end may be due."""
        if session.connection is not None or self.by_client.get(session.client_id) is not session:
            return
        if session.will_due_at and now >= session.will_due_at:
            self.publish_will(session, now)
            self._remember(session)
        if session.expires_at and now >= session.expires_at:
            self._effects.stats.sessions_expired += 1
            self.end(session, now)
            return
        self.schedule(session, now)

    def end(self, session: Session, now: float) -> None:
        """Forget the session; a will that still waits is published now [MQTT-3.1.2-8]."""
        stats = self._effects.stats
        self.publish_will(session, now)
        if not session.is_peer:
            for watcher in self.watchers:
                watcher.ended(session)
        orphans = session.orphans()
        for subscription in session.subscriptions.values():
            group, inner = parse_shared(subscription.topic_filter)
            self._tree.remove(group, inner, session.client_id)
        session.subscriptions = {}
        if self.by_client.get(session.client_id) is session:
            del self.by_client[session.client_id]
        self.by_number.pop(session.number, None)
        stats.sessions = len(self.by_client)
        stats.inflight_messages -= len(session.inflight)
        stats.queued_messages -= session.queued_messages
        stats.queued_bytes -= session.queued_bytes
        session.inflight = {}
        session.inflight_bytes = 0
        session.queue = None
        session.queued_messages = 0
        session.queued_bytes = 0
        if session.durable:
            session.durable = False
            self._effects.records.append(records.session_ended(session.number))
        for topic_filter, messages in orphans:
            self._router.pass_on(topic_filter, messages, now)

    def publish_will(self, session: Session, now: float) -> None:
        """Publish the session's will, once."""
        will = session.will
        if will is None:
            return
        session.will = None
        session.will_due_at = 0.0
        expires_at = 0.0
        if will.properties is not None and will.properties.message_expiry_interval is not None:
            expires_at = now + will.properties.message_expiry_interval
        topic = will.topic.encode("utf-8")
        message = build(topic, will.payload, will.qos, will.retain, forwarded_properties(will.properties), expires_at)
        route = self._router.route_for(topic)
        kept = route.kept
        if kept is not None:
            mark = self._effects.last_mark
            if not self._inbound.keep(kept, message, session, now):
                return
            if self._effects.last_mark != mark:
                self._effects.records.append(records.kept(self._effects.last_mark, 0, b""))
        self._effects.stats.wills_published += 1
        if will.retain and route.way is None:
            self._inbound.retain(message, now)
        self._router.publish(route, message, session, now)

    def subscribe(self, session: Session, subscription: Subscription) -> bool:
        """Add or replace a subscription; returns whether it is new. The filter has been checked."""
        group, inner = parse_shared(subscription.topic_filter)
        is_new = self._tree.add(group, inner, subscription)
        session.subscriptions[subscription.topic_filter] = subscription
        if session.durable:
            self._effects.records.append(records.subscribed(session.number, subscription))
        if group and not session.is_peer:
            for watcher in self.watchers:
                watcher.shared(subscription.topic_filter)
        return is_new

    def unsubscribe(self, session: Session, topic_filter: str) -> bool:
        """Remove a subscription; returns whether there was one."""
        if topic_filter not in session.subscriptions:
            return False
        del session.subscriptions[topic_filter]
        group, inner = parse_shared(topic_filter)
        self._tree.remove(group, inner, session.client_id)
        if session.durable:
            self._effects.records.append(records.unsubscribed(session.number, topic_filter))
        if group and not session.is_peer:
            for watcher in self.watchers:
                watcher.shared(topic_filter)
        return True

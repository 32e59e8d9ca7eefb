"""SUBSCRIBE and UNSUBSCRIBE, and the retained messages that answer a new subscription (sections 3.8 to 3.11)."""

from __future__ import annotations

from typing import Final, Protocol

from nearcast.config import Limits
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Authorizer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.packets import SubAck, Subscribe, SubscriptionRequest, UnsubAck, Unsubscribe
from nearcast.mqtt.publication import Terms
from nearcast.mqtt.retained import RetainedMessages
from nearcast.mqtt.routing import Router, encode_identifier
from nearcast.mqtt.session import Session
from nearcast.mqtt.sessions import Sessions
from nearcast.mqtt.subscriptions import Subscription
from nearcast.mqtt.topics import filter_fault, parse_shared

#: Filters of one SUBSCRIBE that are looked at; a packet of a megabyte has room for a quarter of a million.
MAX_FILTERS: Final = 10_000


class Gate(Protocol):
    """What a subscription has to be known to before it counts: other brokers (:mod:`nearcast.fabric.interest`)."""

    def hold(self, connection: Connection, names: list[str], answer: bytes, now: float) -> bool:
        """Whether the answer is kept back, to be sent once these filters are known everywhere."""


class Requests:
    """Answers SUBSCRIBE and UNSUBSCRIBE. One per engine."""

    def __init__(
        self,
        limits: Limits,
        effects: Effects,
        sessions: Sessions,
        router: Router,
        retained: RetainedMessages,
        authorizer: Authorizer | None,
    ) -> None:
        self._effects = effects
        self._sessions = sessions
        self._router = router
        self._retained = retained
        self.authorizer = authorizer
        self.gate: Gate | None = None
        self.apply(limits)

    def apply(self, limits: Limits) -> None:
        self._max_subscriptions: int = limits.max_subscriptions
        self._max_topic_levels: int = limits.max_topic_levels
        self._max_qos: int = limits.max_qos

    def subscribe(self, connection: Connection, session: Session, packet: Subscribe, now: float) -> None:
        identifier = 0
        if packet.properties is not None and packet.properties.subscription_identifiers:
            identifier = packet.properties.subscription_identifiers[0]
        codes: list[int] = []
        # By filter, because a filter that stands in the packet twice is one subscription.
        made: dict[str, tuple[Subscription, bool]] = {}
        for request in packet.subscriptions:
            if len(codes) >= MAX_FILTERS:
                codes.append(reasons.QUOTA_EXCEEDED if connection.is_v5 else reasons.UNSPECIFIED_ERROR)
                continue
            code = self._fault(connection, session, request)
            if code == reasons.SUCCESS:
                subscription = Subscription(
                    session,
                    request.topic_filter,
                    min(request.qos, self._max_qos),
                    request.no_local,
                    request.retain_as_published,
                    request.retain_handling,
                    identifier,
                )
                is_new = self._sessions.subscribe(session, subscription)
                if request.topic_filter in made:
                    is_new = made[request.topic_filter][1]
                made[request.topic_filter] = (subscription, is_new)
                code = subscription.qos
            elif not connection.is_v5:
                code = reasons.UNSPECIFIED_ERROR  # the only failure 3.1.1 can say
            codes.append(code)
        self._answer(connection, list(made), encode(SubAck(packet.packet_id, codes), connection.version), now)
        # These need not wait for SUBACK (section 3.8.4), and are those of this moment: later ones come as they are published.
        for subscription, is_new in made.values():
            handling = subscription.retain_handling
            if handling == 0 or (handling == 1 and is_new):
                self._send_retained(connection, session, subscription, now)
        if connection.owed_retained is not None:
            self.send_owed(connection, session, now)

    def _fault(self, connection: Connection, session: Session, request: SubscriptionRequest) -> int:
        """Why a subscription is refused, as a reason code; SUCCESS when it is not."""
        try:
            _, inner = parse_shared(request.topic_filter)
        except ValueError:
            return reasons.TOPIC_FILTER_INVALID
        if filter_fault(inner, self._max_topic_levels):
            return reasons.TOPIC_FILTER_INVALID
        authorizer = self.authorizer
        if authorizer is not None and not authorizer.may_subscribe(
            connection.client_id, connection.username, request.topic_filter
        ):
            return reasons.NOT_AUTHORIZED
        if len(session.subscriptions) >= self._max_subscriptions and request.topic_filter not in session.subscriptions:
            return reasons.QUOTA_EXCEEDED
        return reasons.SUCCESS

    def _send_retained(self, connection: Connection, session: Session, subscription: Subscription, now: float) -> None:
        """Give a subscription the retained messages it matches: QoS 1 and 2 into the session, QoS 0 as room comes."""
        group, inner = parse_shared(subscription.topic_filter)
        if group:  # no retained messages on shared subscriptions (section 4.8.2)
            return
        identifiers = encode_identifier(subscription.identifier)
        owed: list[bytes] = []
        for message in self._retained.match(inner):
            if message.expired(now):
                continue
            qos = min(message.qos, subscription.qos)
            if qos == 0:
                owed.append(message.topic)
            else:
                self._router.deliver(session, message, Terms(qos, True, identifiers), now)
                message.forget_forms()
        if owed:
            owed.reverse()
            if connection.owed_retained is None:
                connection.owed_retained = {}
            connection.owed_retained[subscription.topic_filter] = owed

    def send_owed(self, connection: Connection, session: Session, now: float) -> None:
        """Send retained QoS 0 messages that a connection is owed, as many as it has room for.

        What is sent is what the topic retains by then; a subscription that is gone is owed nothing.
        """
        owed = connection.owed_retained
        while owed:
            topic_filter, topics = next(iter(owed.items()))
            subscription = session.subscriptions.get(topic_filter)
            if subscription is None or not topics:
                del owed[topic_filter]
                continue
            terms = Terms(0, True, encode_identifier(subscription.identifier))
            while topics:
                if not connection.has_room():
                    return
                message = self._retained.get(topics.pop())
                if message is not None and not message.expired(now):
                    self._router.deliver(session, message, terms, now)
                    message.forget_forms()
        connection.owed_retained = None

    def _answer(self, connection: Connection, names: list[str], answer: bytes, now: float) -> None:
        gate = self.gate
        if gate is None or not gate.hold(connection, names, answer, now):
            connection.push_held(answer)

    def unsubscribe(self, connection: Connection, session: Session, packet: Unsubscribe, now: float) -> None:
        codes: list[int] = []
        for topic_filter in packet.topic_filters:
            existed = self._sessions.unsubscribe(session, topic_filter)
            codes.append(reasons.SUCCESS if existed else reasons.NO_SUBSCRIPTION_EXISTED)
        self._answer(connection, [], encode(UnsubAck(packet.packet_id, codes), connection.version), now)

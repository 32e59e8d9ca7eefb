"""The client's subscriptions: requests that wait for their answers, what the server granted, how to ask for it again.

A SUBSCRIBE or UNSUBSCRIBE is kept until its answer comes, and repeated on every new connection until then. What was granted is
kept too: a server that lost the session is asked again, by requests of token 0, which no caller waits for. Nothing here
encodes or sends.
"""

from __future__ import annotations

from nearcast.errors import RemoteProtocolError, RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import ServerLimits, SubscribeCompleted, UnsubscribeCompleted, reason_string
from nearcast.mqtt.client_outgoing import PacketIdentifiers
from nearcast.mqtt.packets import Properties, SubAck, Subscribe, SubscriptionRequest, UnsubAck, Unsubscribe


class _Request:
    """A SUBSCRIBE or UNSUBSCRIBE that waits for its answer."""

    def __init__(self, token: int, packet: Subscribe | Unsubscribe) -> None:
        self.token = token
        self.packet = packet


class _Subscription:
    """A subscription the server granted, so that it can be made again."""

    def __init__(self, request: SubscriptionRequest, properties: Properties | None) -> None:
        self.request = request
        self.properties = properties


class Requests:
    """See the module's essay."""

    def __init__(self, identifiers: PacketIdentifiers) -> None:
        self._identifiers = identifiers
        self._requests: dict[int, _Request] = {}
        self._subscriptions: dict[str, _Subscription] = {}

    def add(self, token: int, packet: Subscribe | Unsubscribe) -> None:
        self._requests[packet.packet_id] = _Request(token, packet)

    def unanswered(self) -> list[Subscribe | Unsubscribe]:
        """What a new connection must send, in the order it was asked for."""
        return [request.packet for request in self._requests.values()]

    def restore(self) -> None:
        """The server kept nothing: ask again for all that it had granted."""
        unfinished = [packet_id for packet_id, request in self._requests.items() if request.token == 0]
        for packet_id in unfinished:
            self._finish(packet_id)
        for subscription in self._subscriptions.values():
            self.add(0, Subscribe(self._identifiers.take(), [subscription.request], subscription.properties))

    def forget(self) -> None:
        """The server kept nothing, and nothing is to be asked for again."""
        self._subscriptions.clear()

    def subscribed(self, packet: SubAck) -> SubscribeCompleted | None:
        """SUBACK; returns what to tell the caller, if one waits."""
        request = self._requests.get(packet.packet_id)
        if request is None:
            return None
        asked = request.packet
        if not isinstance(asked, Subscribe) or len(packet.reason_codes) != len(asked.subscriptions):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "SUBACK does not fit the SUBSCRIBE it answers")
        self._finish(packet.packet_id)
        for subscription, reason_code in zip(asked.subscriptions, packet.reason_codes, strict=True):
            if reason_code < 0x80:
                self._subscriptions[subscription.topic_filter] = _Subscription(subscription, asked.properties)
        if request.token == 0:
            return None
        return SubscribeCompleted(request.token, packet.reason_codes, reason_string(packet.properties))

    def unsubscribed(self, packet: UnsubAck) -> UnsubscribeCompleted | None:
        """UNSUBACK; returns what to tell the caller."""
        request = self._requests.get(packet.packet_id)
        if request is None:
            return None
        asked = request.packet
        if not isinstance(asked, Unsubscribe):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "UNSUBACK for a SUBSCRIBE")
        codes = packet.reason_codes or [reasons.SUCCESS] * len(asked.topic_filters)
        if len(codes) != len(asked.topic_filters):
            raise RemoteProtocolError(reasons.PROTOCOL_ERROR, "UNSUBACK does not fit the UNSUBSCRIBE it answers")
        self._finish(packet.packet_id)
        for topic_filter, reason_code in zip(asked.topic_filters, codes, strict=True):
            if reason_code < 0x80:
                self._subscriptions.pop(topic_filter, None)
        return UnsubscribeCompleted(request.token, codes, reason_string(packet.properties))

    def _finish(self, packet_id: int) -> None:
        del self._requests[packet_id]
        self._identifiers.give_back(packet_id)


def check_subscription(subscription: SubscriptionRequest, properties: Properties | None, limits: ServerLimits) -> None:
    """Refuse here what the server said it does not offer: sending it would end the connection."""
    topic_filter = subscription.topic_filter
    code = 0
    if topic_filter.startswith("$share/") and not limits.shared_subscription_available:
        code = reasons.SHARED_SUBSCRIPTIONS_NOT_SUPPORTED
    elif not limits.wildcard_subscription_available and ("+" in topic_filter or "#" in topic_filter):
        code = reasons.WILDCARD_SUBSCRIPTIONS_NOT_SUPPORTED
    elif properties is not None and properties.subscription_identifiers and not limits.subscription_identifier_available:
        code = reasons.SUBSCRIPTION_IDENTIFIERS_NOT_SUPPORTED
    if code:
        raise RequestRefused(code, f"cannot subscribe to {topic_filter!r} on this broker: {reasons.name(code)}")

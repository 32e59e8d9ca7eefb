"""The client's publishes as bytes: what the server takes at all, and the topic aliases defined towards it.

Owns the aliases of the present connection. It refuses to know windows and acknowledgements, which are
:mod:`nearcast.mqtt.client_outgoing`'s.
"""

from __future__ import annotations

from nearcast.errors import RequestRefused
from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import ClientSettings, ServerLimits
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Properties, Publish


class PublishEncoder:
    """Publishes for one server: :meth:`opened` begins a connection."""

    def __init__(self, settings: ClientSettings) -> None:
        self._settings = settings
        self._aliases = TopicAliases()

    def opened(self) -> None:
        self._aliases.clear()

    def encode(self, message: Publish, limits: ServerLimits) -> bytes:
        """Raises ``RequestRefused`` for what this server cannot be sent, ``LocalProtocolError`` for what no server can."""
        if message.qos > limits.maximum_qos:
            raise RequestRefused(
                reasons.QOS_NOT_SUPPORTED,
                f"this broker serves QoS {limits.maximum_qos} at most: publish to {message.topic!r} with a lower one",
            )
        if message.retain and not limits.retain_available:
            raise RequestRefused(
                reasons.RETAIN_NOT_SUPPORTED,
                f"this broker keeps no retained messages: publish to {message.topic!r} without retain",
            )
        packet = message
        if self._settings.use_topic_aliases and limits.topic_alias_maximum > 0 and not message.dup:
            packet = self._aliases.apply(message, limits.topic_alias_maximum)
        fits = False
        try:
            data = encode(packet, self._settings.version)
            fits = len(data) <= limits.maximum_packet_bytes
        finally:
            if not fits and packet is not message and packet.topic:
                self._aliases.forget(message.topic)  # the packet that would have defined it
        if not fits:
            raise RequestRefused(
                reasons.PACKET_TOO_LARGE,
                f"the message to {message.topic!r} is larger than the {limits.maximum_packet_bytes} bytes this broker accepts",
            )
        return data


class TopicAliases:
    """Aliases this side defined on the present connection: first come, first served, until the server's maximum is used."""

    def __init__(self) -> None:
        self._aliases: dict[str, int] = {}

    def clear(self) -> None:
        self._aliases.clear()

    def apply(self, message: Publish, maximum: int) -> Publish:
        """The message as it goes out: with its topic's alias if it has one or gets one, else unchanged."""
        alias = self._aliases.get(message.topic, 0)
        topic = ""
        if alias == 0:
            if len(self._aliases) >= maximum:
                return message
            alias = len(self._aliases) + 1
            self._aliases[message.topic] = alias
            topic = message.topic
        original = message.properties or Properties()
        properties = Properties(
            payload_format_indicator=original.payload_format_indicator,
            message_expiry_interval=original.message_expiry_interval,
            content_type=original.content_type,
            response_topic=original.response_topic,
            correlation_data=original.correlation_data,
            user_properties=original.user_properties,
            topic_alias=alias,
        )
        return Publish(topic, message.payload, message.qos, message.retain, message.dup, message.packet_id, properties)

    def forget(self, topic: str) -> None:
        """The newest alias was not sent after all."""
        del self._aliases[topic]

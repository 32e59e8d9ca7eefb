"""What a client asks with CONNECT, and what a CONNACK grants it.

Pure translation between settings, packets and limits. When to connect, and what follows from the answer, is
:mod:`nearcast.mqtt.client_machine`'s.
"""

from __future__ import annotations

from nearcast.mqtt.client_events import Authentication, ClientSettings, ServerLimits
from nearcast.mqtt.packets import MQTT_5, Connect, Properties


def connect_packet(
    settings: ClientSettings, client_id: str, clean_start: bool, authentication: Authentication | None
) -> Connect:
    """The CONNECT of one connection: ``client_id`` may be one that the server assigned to an earlier one."""
    properties = None
    if settings.version == MQTT_5:
        properties = Properties(
            session_expiry_interval=settings.session_expiry_seconds or None,
            receive_maximum=settings.receive_maximum,
            maximum_packet_size=settings.max_packet_bytes,
            topic_alias_maximum=settings.topic_alias_maximum or None,
            request_response_information=1 if settings.request_response_information else None,
            user_properties=settings.user_properties,
            authentication_method=None if authentication is None else authentication.method,
            authentication_data=None if authentication is None else authentication.start(),
        )
    return Connect(
        client_id=client_id,
        version=settings.version,
        clean_start=clean_start,
        keep_alive=settings.keep_alive_seconds,
        username=settings.username,
        password=settings.password,
        will=settings.will,
        properties=properties,
    )


def granted(settings: ClientSettings, properties: Properties | None) -> ServerLimits:
    """What a CONNACK with these properties grants to a client that asked with these settings."""
    limits = ServerLimits()
    limits.keep_alive_seconds = settings.keep_alive_seconds
    limits.session_expiry_seconds = settings.session_expiry_seconds if settings.version == MQTT_5 else 0
    if properties is None:
        return limits
    if properties.receive_maximum is not None:
        limits.receive_maximum = properties.receive_maximum
    if properties.maximum_qos is not None:
        limits.maximum_qos = properties.maximum_qos
    if properties.maximum_packet_size is not None:
        limits.maximum_packet_bytes = properties.maximum_packet_size
    if properties.topic_alias_maximum is not None:
        limits.topic_alias_maximum = properties.topic_alias_maximum
    if properties.server_keep_alive is not None:
        limits.keep_alive_seconds = properties.server_keep_alive
    if properties.session_expiry_interval is not None:
        limits.session_expiry_seconds = properties.session_expiry_interval
    limits.retain_available = properties.retain_available != 0
    limits.wildcard_subscription_available = properties.wildcard_subscription_available != 0
    limits.subscription_identifier_available = properties.subscription_identifier_available != 0
    limits.shared_subscription_available = properties.shared_subscription_available != 0
    return limits

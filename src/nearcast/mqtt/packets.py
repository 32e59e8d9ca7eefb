"""The control packets of MQTT 3.1.1 and 5.0 as plain values, in the specification's words.

This module knows no bytes: :mod:`nearcast.mqtt.codec` turns these into wire form and back. One set of classes serves both
versions; what 3.1.1 has no field for (properties, most reason codes) is left at its default and not sent there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Union

MQTT_3_1: Final = 3
MQTT_3_1_1: Final = 4
MQTT_5: Final = 5


class Properties:
    """MQTT 5 properties (section 2.2.2). ``None`` means absent; lists hold what may occur more than once.

    One class holds the properties of every packet: which of them a packet may carry is the codec's business.
    """

    def __init__(
        self,
        *,
        payload_format_indicator: int | None = None,
        message_expiry_interval: int | None = None,
        content_type: str | None = None,
        response_topic: str | None = None,
        correlation_data: bytes | None = None,
        subscription_identifiers: list[int] | None = None,
        session_expiry_interval: int | None = None,
        assigned_client_identifier: str | None = None,
        server_keep_alive: int | None = None,
        authentication_method: str | None = None,
        authentication_data: bytes | None = None,
        request_problem_information: int | None = None,
        will_delay_interval: int | None = None,
        request_response_information: int | None = None,
        response_information: str | None = None,
        server_reference: str | None = None,
        reason_string: str | None = None,
        receive_maximum: int | None = None,
        topic_alias_maximum: int | None = None,
        topic_alias: int | None = None,
        maximum_qos: int | None = None,
        retain_available: int | None = None,
        user_properties: list[tuple[str, str]] | None = None,
        maximum_packet_size: int | None = None,
        wildcard_subscription_available: int | None = None,
        subscription_identifier_available: int | None = None,
        shared_subscription_available: int | None = None,
    ) -> None:
        self.payload_format_indicator = payload_format_indicator
        self.message_expiry_interval = message_expiry_interval
        self.content_type = content_type
        self.response_topic = response_topic
        self.correlation_data = correlation_data
        self.subscription_identifiers = subscription_identifiers
        self.session_expiry_interval = session_expiry_interval
        self.assigned_client_identifier = assigned_client_identifier
        self.server_keep_alive = server_keep_alive
        self.authentication_method = authentication_method
        self.authentication_data = authentication_data
        self.request_problem_information = request_problem_information
        self.will_delay_interval = will_delay_interval
        self.request_response_information = request_response_information
        self.response_information = response_information
        self.server_reference = server_reference
        self.reason_string = reason_string
        self.receive_maximum = receive_maximum
        self.topic_alias_maximum = topic_alias_maximum
        self.topic_alias = topic_alias
        self.maximum_qos = maximum_qos
        self.retain_available = retain_available
        self.user_properties = user_properties
        self.maximum_packet_size = maximum_packet_size
        self.wildcard_subscription_available = wildcard_subscription_available
        self.subscription_identifier_available = subscription_identifier_available
        self.shared_subscription_available = shared_subscription_available

    def present(self) -> dict[str, object]:
        """The properties that are set, by name; for comparing and for showing."""
        found: dict[str, object] = {}
        for key in PROPERTY_NAMES:
            value = getattr(self, key)
            if value is not None:
                found[key] = value
        return found

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Properties):
            return NotImplemented
        return self.present() == other.present()

    def __repr__(self) -> str:
        return f"Properties({', '.join(f'{key}={value!r}' for key, value in self.present().items())})"


PROPERTY_NAMES: Final[tuple[str, ...]] = (
    "payload_format_indicator",
    "message_expiry_interval",
    "content_type",
    "response_topic",
    "correlation_data",
    "subscription_identifiers",
    "session_expiry_interval",
    "assigned_client_identifier",
    "server_keep_alive",
    "authentication_method",
    "authentication_data",
    "request_problem_information",
    "will_delay_interval",
    "request_response_information",
    "response_information",
    "server_reference",
    "reason_string",
    "receive_maximum",
    "topic_alias_maximum",
    "topic_alias",
    "maximum_qos",
    "retain_available",
    "user_properties",
    "maximum_packet_size",
    "wildcard_subscription_available",
    "subscription_identifier_available",
    "shared_subscription_available",
)


@dataclass
class Will:
    """What the server publishes for a client that vanishes (section 3.1.2.5)."""

    topic: str
    payload: bytes
    qos: int = 0
    retain: bool = False
    properties: Properties | None = None


@dataclass
class Connect:
    client_id: str = ""
    version: int = MQTT_5
    clean_start: bool = True
    keep_alive: int = 0
    username: str | None = None
    password: bytes | None = None
    will: Will | None = None
    properties: Properties | None = None


@dataclass
class ConnAck:
    reason_code: int = 0
    session_present: bool = False
    properties: Properties | None = None


@dataclass
class Publish:
    topic: str
    payload: bytes = b""
    qos: int = 0
    retain: bool = False
    dup: bool = False
    packet_id: int = 0
    properties: Properties | None = None


@dataclass
class PubAck:
    packet_id: int
    reason_code: int = 0
    properties: Properties | None = None


@dataclass
class PubRec:
    packet_id: int
    reason_code: int = 0
    properties: Properties | None = None


@dataclass
class PubRel:
    packet_id: int
    reason_code: int = 0
    properties: Properties | None = None


@dataclass
class PubComp:
    packet_id: int
    reason_code: int = 0
    properties: Properties | None = None


@dataclass
class SubscriptionRequest:
    """One topic filter of a SUBSCRIBE with its options (section 3.8.3.1)."""

    topic_filter: str
    qos: int = 0
    no_local: bool = False
    retain_as_published: bool = False
    retain_handling: int = 0


@dataclass
class Subscribe:
    packet_id: int
    subscriptions: list[SubscriptionRequest] = field(default_factory=list)
    properties: Properties | None = None


@dataclass
class SubAck:
    packet_id: int
    reason_codes: list[int] = field(default_factory=list)
    properties: Properties | None = None


@dataclass
class Unsubscribe:
    packet_id: int
    topic_filters: list[str] = field(default_factory=list)
    properties: Properties | None = None


@dataclass
class UnsubAck:
    packet_id: int
    reason_codes: list[int] = field(default_factory=list)
    properties: Properties | None = None


@dataclass
class PingReq:
    pass


@dataclass
class PingResp:
    pass


@dataclass
class Disconnect:
    reason_code: int = 0
    properties: Properties | None = None


@dataclass
class Auth:
    reason_code: int = 0
    properties: Properties | None = None


Packet = Union[
    Connect,
    ConnAck,
    Publish,
    PubAck,
    PubRec,
    PubRel,
    PubComp,
    Subscribe,
    SubAck,
    Unsubscribe,
    UnsubAck,
    PingReq,
    PingResp,
    Disconnect,
    Auth,
]

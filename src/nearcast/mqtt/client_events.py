"""What goes into and comes out of the client machine: settings, what it tells the application, enhanced authentication.

Values only. :mod:`nearcast.mqtt.client_machine` owns the behaviour.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Union

from nearcast.mqtt.packets import MQTT_5, Properties, Publish, Will


class Authentication(Protocol):
    """The client's half of an enhanced authentication exchange (MQTT 5.0 section 4.12), SCRAM for example.

    One object serves the first authentication of every connection and each re-authentication: ``start`` begins anew.
    Whatever it raises as :class:`~nearcast.errors.NearcastError` ends the connection attempt with that error.
    """

    @property
    def method(self) -> str:
        """The Authentication Method, as the server knows it."""

    def start(self) -> bytes | None:
        """The first Authentication Data, sent with CONNECT (or with AUTH when re-authenticating)."""

    def respond(self, challenge: bytes | None) -> bytes | None:
        """The answer to a challenge of the server."""

    def finish(self, data: bytes | None) -> None:
        """The server accepted; ``data`` is its last word, which proves the server in mutual methods."""


@dataclass
class ClientSettings:
    """What a client asks of a server, and the bounds it keeps itself."""

    client_id: str = ""
    """Empty: the server assigns one (MQTT 5), or the session ends with the connection (3.1.1)."""

    version: int = MQTT_5
    """4 for MQTT 3.1.1, 5 for MQTT 5.0."""

    clean_start: bool = True
    """Whether the first connection discards the session that the server may still keep for this client identifier. Later
    connections of the same machine try to resume, unless the session ends with its connection anyway."""

    keep_alive_seconds: int = 60
    """Longest silence before a PINGREQ; 0 sends none. Too low costs traffic, too high notices a dead link late."""

    ping_timeout_seconds: float = 10.0
    """Wait for any byte after a PINGREQ before the connection counts as dead."""

    connect_timeout_seconds: float = 10.0
    """Wait for CONNACK."""

    username: str | None = None
    password: bytes | None = None
    will: Will | None = None

    session_expiry_seconds: int = 0
    """How long the server keeps the session without a connection (MQTT 5). 0 ends it with the connection, so that nothing can
    be resumed; 4,294,967,295 keeps it for ever."""

    end_session_on_disconnect: bool = False
    """Whether a DISCONNECT of ours also ends the session: it then serves reconnection only, and nothing stays behind."""

    receive_maximum: int = 1_000
    """QoS 1 and 2 messages the server may have unacknowledged towards us. Bounds the QoS 2 identifiers kept."""

    enforce_receive_maximum: bool = True
    """Whether an MQTT 5 server that exceeds ``receive_maximum`` is disconnected (0x93), as section 4.9 allows. Otherwise only
    the number of packet identifiers bounds it."""

    acknowledge_on_receipt: bool = True
    """Whether QoS 1 and 2 messages are acknowledged as they arrive. Otherwise the driver calls ``acknowledge`` when the
    application took one, so that ``receive_maximum`` bounds what an MQTT 5 server has sent and nobody took."""

    max_packet_bytes: int = 1_048_576
    """Largest packet accepted; announced to an MQTT 5 server."""

    topic_alias_maximum: int = 16
    """Topic aliases the server may define towards us; 0 turns them off."""

    use_topic_aliases: bool = False
    """Whether publishes use the aliases that the server allows; worthwhile for long topics and short payloads."""

    max_inflight: int = 1_000
    """QoS 1 and 2 publishes sent and not yet acknowledged; the server's Receive Maximum lowers it."""

    max_waiting: int = 10_000
    """QoS 1 and 2 publishes waiting for a place in the window. A further publish is refused: wait for completions first."""

    resubscribe: bool = True
    """Whether subscriptions are made again when a reconnection finds that the server kept no session."""

    max_packet_identifier: int = 65_535
    """Largest packet identifier used. It bounds what is unanswered at once, and what ``releases_forgotten`` sends."""

    releases_forgotten: bool = False
    """Whether a machine that is new and finds a session at the server first releases (PUBREL) every identifier it may use, and
    publishes at QoS 1 and 2 once that is answered. Without its own half of the session it cannot know which of them the server
    holds of QoS 2 messages that an earlier machine sent: the server would take a new message with one of those for a
    repetition, and drop it."""

    lowers_publishes: bool = False
    """Whether a publish that was made for more than the server of the present connection serves (QoS, retain flag) goes at
    what it serves. Otherwise it is refused."""

    request_response_information: bool = False
    """Whether to ask the server for a prefix for response topics."""

    user_properties: list[tuple[str, str]] | None = None
    """User properties of CONNECT."""


@dataclass
class ServerLimits:
    """What CONNACK said the server takes; the defaults are those of a server that says nothing."""

    receive_maximum: int = 65_535
    maximum_qos: int = 2
    retain_available: bool = True
    maximum_packet_bytes: int = 268_435_460
    topic_alias_maximum: int = 0
    wildcard_subscription_available: bool = True
    subscription_identifier_available: bool = True
    shared_subscription_available: bool = True
    keep_alive_seconds: int = 0
    session_expiry_seconds: int = 0


def reason_string(properties: Properties | None) -> str | None:
    """What the server said about its reason code, if it did."""
    return None if properties is None else properties.reason_string


@dataclass
class Connected:
    """CONNACK accepted us. What had to be resent is already in the output."""

    client_id: str
    session_present: bool
    limits: ServerLimits
    properties: Properties | None


@dataclass
class Refused:
    """CONNACK refused us; the transport must be closed."""

    reason_code: int
    message: str
    server_reference: str | None


@dataclass
class MessageReceived:
    """A message for the application, delivered once at QoS 2. Its topic is complete even when the server used an alias."""

    message: Publish


@dataclass
class PublishCompleted:
    """A QoS 1 or 2 publish is acknowledged to its end, or refused (``reason_code`` of 0x80 and above)."""

    token: int
    reason_code: int
    reason_string: str | None


@dataclass
class SubscribeCompleted:
    """One reason code for each topic filter asked for."""

    token: int
    reason_codes: list[int]
    reason_string: str | None


@dataclass
class UnsubscribeCompleted:
    """One reason code for each topic filter (3.1.1 has none: all are success there)."""

    token: int
    reason_codes: list[int]
    reason_string: str | None


@dataclass
class ReAuthenticated:
    """A re-authentication ended well."""


@dataclass
class Disconnected:
    """The connection is over; the transport must be closed after the remaining output. ``reason_code`` is ``None`` when no
    DISCONNECT was involved; ``by_server`` says whose it was."""

    reason_code: int | None
    message: str
    by_server: bool
    server_reference: str | None


ClientEvent = Union[
    Connected,
    Refused,
    MessageReceived,
    PublishCompleted,
    SubscribeCompleted,
    UnsubscribeCompleted,
    ReAuthenticated,
    Disconnected,
]

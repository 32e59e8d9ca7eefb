"""Configuration: frozen, typed, read from TOML.

Every field has a paragraph: what it means, its unit, what too low and too high cost. Whatever cannot be used is refused with
the file, the line and the key at fault (:class:`~nearcast.errors.ConfigError`).
"""

from __future__ import annotations

import msgspec


class Limits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one broker accepts, so that no client can exhaust it."""

    max_connections: int = 100_000
    """Connections at once, over all listeners. A further one is closed before its CONNECT is read. Too low turns clients away;
    too high lets the process run into its file-descriptor limit, which then refuses clients less politely."""

    connect_timeout_seconds: float = 10.0
    """Time from accept to a complete CONNECT (and, with authentication, to its end). Too low drops clients on slow links; too
    high lets silent connections hold descriptors."""

    max_packet_bytes: int = 1_048_576
    """Largest MQTT packet accepted, header included; announced to MQTT 5 clients. Memory per connection that is in the middle
    of a packet grows up to this. The protocol's own ceiling is 268,435,460."""

    receive_maximum: int = 1_000
    """QoS 1 and 2 publishes a client may have unacknowledged towards us (1 to 65,535); announced to MQTT 5 clients. Too low
    throttles distant publishers; too high lets one client occupy memory with unreleased QoS 2 identifiers."""

    max_inflight: int = 1_000
    """QoS 1 and 2 messages sent to one client and not yet acknowledged (1 to 65,535); a client's own Receive Maximum lowers
    it. Too low makes throughput follow round-trip time; too high makes a reconnect resend much."""

    max_queued_messages: int = 100_000
    """QoS 1 and 2 messages waiting in one session, connected or not. When full, new messages for that session are dropped and
    counted (``queue_full``). Too low loses messages of sleeping clients; too high costs memory."""

    max_queued_bytes: int = 67_108_864
    """The same bound in bytes of wire form; whichever is reached first holds."""

    max_output_bytes: int = 1_048_576
    """Bytes kept for a connected client that reads too slowly. Above it QoS 0 messages for that client are dropped and counted
    (``slow_consumer``), and QoS 1 and 2 wait in its session queue. Too low drops on short stalls; too high costs that much
    memory per stalled client."""

    stall_timeout_seconds: float = 60.0
    """A client whose socket took no byte for so long while output was waiting is disconnected. 0 waits for ever."""

    max_subscriptions: int = 1_000
    """Subscriptions of one session. A further one is refused with reason code 0x97 (quota exceeded)."""

    topic_alias_maximum: int = 64
    """Topic aliases a client may define towards us, and the most we define towards it. 0 turns aliases off. Each costs the
    length of its topic in memory."""

    max_topic_levels: int = 128
    """Levels in a topic name or filter. More is refused as an invalid topic: the cost of matching grows with levels."""

    max_session_expiry_seconds: int = 4_294_967_295
    """Upper bound for the Session Expiry Interval a client asks for; 4,294,967,295 means sessions may be kept for ever."""

    max_sessions: int = 1_000_000
    """Sessions kept, connected or not. A CONNECT that would need one more is refused with 0x97 (quota exceeded)."""

    max_retained_messages: int = 1_000_000
    """Retained messages kept. A further topic is not retained; the publisher is told 0x97 (quota exceeded) where it can be."""

    keep_alive_seconds: int = 0
    """Upper bound on the keep-alive a client may choose, imposed as Server Keep Alive on MQTT 5 clients; 0 leaves the choice
    to the client."""

    max_qos: int = 2
    """Highest QoS served (0, 1 or 2); announced to MQTT 5 clients."""

    retain_available: bool = True
    """Whether messages may be retained."""


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the broker's pure machine needs to know."""

    limits: Limits = Limits()
    """Bounds on everything a client can make the broker keep or do."""

    durable: bool = False
    """Whether session and retained state is journalled. The driver sets it when a data directory is given."""

    server_reference: str | None = None
    """When set, every MQTT 5 CONNECT is answered "use another server" (0x9C) with this reference: for emptying a broker."""

    response_information: str | None = None
    """Prefix for response topics, given to MQTT 5 clients that ask for Response Information. Unset: none is given."""

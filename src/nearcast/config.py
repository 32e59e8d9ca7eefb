"""Configuration: frozen and typed. :mod:`nearcast.configfile` reads it from TOML.

Every field has a paragraph: what it means, its unit, what too low and too high cost. A value that cannot be used raises
``ValueError``, which names the field in backticks.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from nearcast.fabricconfig import Fabric


def _require(condition: bool, field: str, message: str) -> None:
    """Refuse a value. The backticked field name is what :mod:`nearcast.configfile` finds the line by."""
    if not condition:
        raise ValueError(f"`{field}` {message}")


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
    """The same bound in bytes of wire form; whichever is reached first holds. Messages in flight are bounded by as many bytes
    again: a client that takes messages and does not acknowledge them gets no more until it does."""

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
    """Retained messages kept. A message for which there is no room is delivered but not retained, and counted."""

    max_retained_bytes: int = 1_073_741_824
    """The same bound in bytes of wire form; whichever is reached first holds."""

    keep_alive_seconds: int = 0
    """Upper bound on the keep-alive a client may choose, imposed as Server Keep Alive on MQTT 5 clients; 0 leaves the choice
    to the client."""

    max_qos: int = 2
    """Highest QoS served (0, 1 or 2); announced to MQTT 5 clients."""

    retain_available: bool = True
    """Whether messages may be retained."""

    def __post_init__(self) -> None:
        for field in ("max_connections", "max_queued_messages", "max_queued_bytes", "max_output_bytes", "max_subscriptions"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")
        for field in ("max_topic_levels", "max_sessions"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")
        for field in ("receive_maximum", "max_inflight"):
            _require(1 <= getattr(self, field) <= 65_535, field, "must be between 1 and 65,535")
        for field in ("topic_alias_maximum", "keep_alive_seconds"):
            _require(0 <= getattr(self, field) <= 65_535, field, "must be between 0 and 65,535")
        _require(self.connect_timeout_seconds > 0, "connect_timeout_seconds", "must be above 0")
        _require(64 <= self.max_packet_bytes <= 268_435_460, "max_packet_bytes", "must be between 64 and 268,435,460")
        _require(self.stall_timeout_seconds >= 0, "stall_timeout_seconds", "must not be negative")
        expiry = self.max_session_expiry_seconds
        _require(0 <= expiry <= 4_294_967_295, "max_session_expiry_seconds", "must be between 0 and 4,294,967,295")
        for field in ("max_retained_messages", "max_retained_bytes"):
            _require(getattr(self, field) >= 0, field, "must not be negative")
        _require(self.max_qos in (0, 1, 2), "max_qos", "must be 0, 1 or 2")


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


DEFAULT_PORTS = {
    "tcp": 1883,
    "tls": 8883,
    "ws": 8083,
    "wss": 8084,
    "unix": 0,
    "bulk": 7883,
    "bulk-tls": 7884,
    "link": 1884,
    "link-tls": 8885,
}

SECURE_KINDS = ("tls", "wss", "bulk-tls", "link-tls")
"""Kinds of listeners that speak TLS."""

LINK_KINDS = ("link", "link-tls")
"""Kinds of listeners where other nodes of the fabric connect, not clients."""

BULK_PORT_DISTANCE = 6_000
"""How far above its MQTT port a broker's bulk port is, where nothing else is said: 7883 for 1883."""

LINK_PORT_DISTANCE = 1
"""The same for the port of links: 1884 for 1883."""


class Listener(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One place where clients connect. A broker has any number of them."""

    kind: Literal["tcp", "tls", "ws", "wss", "unix", "bulk", "bulk-tls", "link", "link-tls"] = "tcp"
    """MQTT over plain TCP, TLS, WebSocket, WebSocket over TLS, or a Unix socket; the bulk port, plain or over TLS, where
    topic logs are read by index and written in batches; or the port where other nodes of the fabric connect, plain or over
    TLS."""

    host: str = "127.0.0.1"
    """Address to listen on. The default is reachable from this machine only; "0.0.0.0" and "::" mean every interface, and then
    clients need credentials unless ``allow_anonymous`` says otherwise."""

    port: int | None = None
    """Port to listen on. Unset: 1883 (tcp), 8883 (tls), 8083 (ws), 8084 (wss), 7883 (bulk), 7884 (bulk-tls), 1884 (link),
    8885 (link-tls). 0 takes a free one; the log says which."""

    path: str | None = None
    """For ``unix`` the socket's file. For ``ws`` and ``wss`` the only URL path that is served ("/mqtt"); unset serves any."""

    origins: tuple[str, ...] | None = None
    """For ``ws`` and ``wss``: the web origins ("https://example.org") whose pages may connect. Unset allows pages served by
    the same host only, so that a foreign page in a local user's browser cannot reach a broker that trusts loopback. "*" allows
    all. Clients that are no browsers send no origin and are not concerned."""

    certificate_file: str | None = None
    """PEM file with the server's certificate chain, leaf first. Needed by ``tls`` and ``wss``. Read again at SIGHUP."""

    key_file: str | None = None
    """PEM file with the certificate's private key, without a passphrase. Needed and read again as ``certificate_file``."""

    ca_file: str | None = None
    """PEM file with the authorities that sign client certificates. Needed unless ``client_certificates`` is "none"."""

    client_certificates: Literal["none", "optional", "required"] = "none"
    """Whether clients are asked for a certificate ("optional") and turned away in the TLS handshake without one ("required").
    A certificate that is shown is always verified against ``ca_file``."""

    certificate_username: bool = False
    """Whether the common name of a client's certificate becomes its user name. Such a client needs no password, and the user
    name in its CONNECT is ignored."""

    mode: int = 0o660
    """Permission bits of a Unix socket (in TOML ``mode = 0o660``). Wider lets more local users in."""

    allow_anonymous: bool | None = None
    """Overrides ``security.allow_anonymous`` for this listener."""

    backlog: int = 4_096
    """Connections the kernel completes before we accept them. Too low resets clients in a reconnect storm; the kernel caps it
    at net.core.somaxconn."""

    def __post_init__(self) -> None:
        secure = self.kind in SECURE_KINDS
        _require(self.port is None or 0 <= self.port <= 65_535, "port", "must be between 0 and 65,535")
        _require(self.kind != "unix" or bool(self.path), "path", "is needed by a unix listener: the socket's file")
        if self.kind in ("ws", "wss"):
            _require(self.path is None or self.path.startswith("/"), "path", 'of a WebSocket listener must start with "/"')
        _require(not secure or self.certificate_file is not None, "certificate_file", f"is needed by a {self.kind} listener")
        _require(not secure or self.key_file is not None, "key_file", f"is needed by a {self.kind} listener")
        if self.client_certificates != "none":
            _require(secure, "client_certificates", f"mean nothing on a {self.kind} listener; use tls or wss")
            _require(self.ca_file is not None, "ca_file", "is needed to verify client certificates")
        if self.certificate_username:
            _require(self.client_certificates != "none", "certificate_username", "needs client_certificates")
        _require(0 <= self.mode <= 0o777, "mode", "must be permission bits between 0o000 and 0o777")
        _require(self.backlog >= 1, "backlog", "must be at least 1")

    @property
    def effective_port(self) -> int:
        """The port asked for, or the kind's usual one."""
        return DEFAULT_PORTS[self.kind] if self.port is None else self.port

    @property
    def name(self) -> str:
        """What this listener is called in logs and in :class:`~nearcast.mqtt.access.Peer`; unique within a broker."""
        if self.kind == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}:{host}:{self.effective_port}"


DEFAULT_LISTENERS = (Listener(),)
"""What a broker listens on when nothing is said about it: this very object, so that saying the same is something else."""


class AccessRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One line of the access control list; :mod:`nearcast.broker.access_rules` says how a list of them decides."""

    action: Literal["allow", "deny"]
    """What happens when the rule applies."""

    access: Literal["publish", "subscribe", "manage", "all"] = "all"
    """Which requests the rule speaks about. "manage" is making and deleting the rules of durable topics and taps: an *allow*
    of "all" does not include it, a *deny* of "all" does."""

    topic: str
    """Topic filter. ``%c`` stands for the client identifier, ``%u`` for the user name; either must be a whole level or part of
    one, and a client whose name holds ``+``, ``#`` or ``/`` is never served by such a rule."""

    user: str | None = None
    """User name the rule applies to; ``*`` matches any run of characters, and alone any user but no anonymous client. Unset:
    everybody. "" is a client without a name."""

    client: str | None = None
    """Client identifier the rule applies to; ``*`` as above. Unset: every client. Clients choose their identifier, so a rule
    by identifier alone protects nothing from a client that lies."""


class Security(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gets in, and what they may do there."""

    password_file: str | None = None
    """Users and their scrypt hashes, as ``nearcast passwd`` writes them. Unset: a user name proves nothing, so a client that
    gives one counts as anonymous. Read again at SIGHUP."""

    allow_anonymous: bool | None = None
    """Whether clients without credentials are let in. Unset: from this machine only (loopback, Unix socket), and not even
    there once a password file is given. A listener can override it."""

    acl: tuple[AccessRule, ...] = ()
    """Access rules, first match wins. Once there is any rule, here or in ``acl_file``, whatever no rule allows is denied."""

    acl_file: str | None = None
    """File with one rule per line, appended to ``acl``. Read again at SIGHUP."""

    connect_rate_per_second: float = 500.0
    """Connections accepted from one source address per second, in the long run. Above it a connection is closed before a byte
    of it is read. Too low hurts fleets behind one NAT address after a broker restart; 0 turns the limit off."""

    connect_burst: int = 5_000
    """Connections one source address may open at once before ``connect_rate_per_second`` bites."""

    connect_rate_exempts_loopback: bool = True
    """Whether this machine's own clients are free of the connect rate."""

    max_pending_verifications: int = 256
    """Password checks waiting or running at once. A further CONNECT is answered 0x89 (server busy). Each check costs tens of
    milliseconds of one core, by design of scrypt: too high lets clients wait past their time-out."""

    verification_threads: int = 2
    """Threads that check passwords, beside the event loop. More serve a reconnect storm faster and take the loop's core."""

    verification_cache_size: int = 10_000
    """Recent successful password checks remembered (as a digest keyed with a secret of this process, for ten minutes), so
    that a client that reconnects costs no scrypt. 0 remembers none."""

    def __post_init__(self) -> None:
        _require(self.connect_rate_per_second >= 0, "connect_rate_per_second", "must not be negative")
        for field in ("connect_burst", "max_pending_verifications", "verification_threads"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")
        _require(self.verification_cache_size >= 0, "verification_cache_size", "must not be negative")


class Persistence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What survives the process."""

    directory: str | None = None
    """Where sessions, queued and in-flight QoS 1/2 messages and retained messages are journalled. Unset: all of that lives in
    memory and ends with the process."""

    sync: Literal["os", "fsync"] = "fsync"
    """When an acknowledgement may leave. "os": once what it promises is written to the kernel, which survives ``kill -9`` of
    the process but not a power cut or a kernel crash. "fsync": once it is on the disk (fdatasync, one for all that came
    together), which survives power loss on hardware that honours flushes, and adds a disk flush to the latency of QoS 1
    and 2."""

    snapshot_bytes: int = 67_108_864
    """Bytes of journal after which the state is written anew into a fresh file and the old one removed; at least twice the
    state's own size is always waited for. Too low copies the state all the time; too high makes a restart replay more and
    keeps more on disk."""

    def __post_init__(self) -> None:
        _require(self.snapshot_bytes >= 65_536, "snapshot_bytes", "must be at least 65,536")


MAX_KEPT = 9_000_000_000_000_000_000
MAX_KEPT_SECONDS = 100_000_000_000.0
"""Beyond these, "no bound" (0) is meant; and infinity has no place in the files that keep such bounds."""


class Retention(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How much of a topic is kept. Whichever bound is reached first holds; 0 is no bound. The newest record always stays."""

    max_records: int = 0
    """Records kept of each topic."""

    max_bytes: int = 0
    """Bytes kept of each topic, headers in the log included."""

    max_age_seconds: float = 0.0
    """How long a record is kept."""

    def __post_init__(self) -> None:
        for field in ("max_records", "max_bytes"):
            _require(0 <= getattr(self, field) <= MAX_KEPT, field, f"must be between 0 and {MAX_KEPT:,}")
        age = self.max_age_seconds
        _require(0 <= age <= MAX_KEPT_SECONDS, "max_age_seconds", f"must be between 0 and {MAX_KEPT_SECONDS:,.0f}")


class TopicRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which topics are kept in the log, and how. The first rule whose filter matches a topic decides about it."""

    topic: str
    """A topic name, or a filter with ``+`` and ``#``: every topic that it matches is kept, each with its own index."""

    mode: Literal["durable", "tap"] = "durable"
    """"durable": a message is acknowledged once the log has it on disk. "tap": messages are copied into the log as they pass;
    their acknowledgements do not wait for it, and a crash may cost the log the last of them."""

    retention: Retention = Retention()
    """How much is kept of each topic."""


class TopicLogSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The log that keeps durable topics, in the data directory."""

    segment_bytes: int = 67_108_864
    """Size at which a file of the log is closed and the next begins. Old messages are removed a file at a time: too high keeps
    them longer than asked for, too low makes many files. Recovery after a crash reads one such file."""

    max_topics: int = 1_000_000
    """Topics the log keeps, each of which takes about 1 KB of memory. A message to a further one is refused with 0x97 (quota
    exceeded) and counted."""

    max_readers: int = 256
    """Streams open at once over all bulk connections. A further one is refused."""

    max_batch_bytes: int = 1_048_576
    """Most that is sent to a bulk reader in one piece, and about what one stream makes the broker hold for it."""

    max_staged_bytes: int = 8_589_934_592
    """Bytes of batches that were handed in on the bulk port and not yet published. They wait on disk, not in memory. A
    further one is refused until some are published or given up."""

    def __post_init__(self) -> None:
        _require(65_536 <= self.segment_bytes <= 2_147_483_648, "segment_bytes", "must be between 65,536 and 2,147,483,648")
        for field in ("max_topics", "max_readers"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")
        _require(4_096 <= self.max_batch_bytes <= 67_108_864, "max_batch_bytes", "must be between 4,096 and 67,108,864")
        _require(self.max_staged_bytes >= 0, "max_staged_bytes", "must not be negative")


class Observability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the broker can be watched."""

    http_port: int | None = None
    """Port of /metrics, /healthz and /rates. Unset: not served. 0 takes a free one and says which in the log."""

    http_host: str = "127.0.0.1"
    """Address they are served on. They name topics and clients and know no password: think before leaving loopback."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe event logged. "debug" adds what happens to single connections before CONNECT. Reloaded at SIGHUP."""

    log_format: Literal["text", "json"] = "text"
    """One line per event: readable ``key=value`` text, or a JSON object."""

    log_events_per_second: float = 200.0
    """Connection events logged per second, per kind of event, before the rest are counted instead ("suppressed=..."); 0 logs
    all. A reconnect storm must not be slowed by its own log."""

    sys_interval_seconds: float = 10.0
    """How often the ``$SYS/broker/...`` topics are published; 0 turns them off. Each round costs one retained message per
    topic and subscriber."""

    top_n: int = 20
    """Topics and clients listed in /rates and /metrics. Every one is a label in Prometheus, so keep it small; 0 lists none."""

    def __post_init__(self) -> None:
        _require(self.http_port is None or 0 <= self.http_port <= 65_535, "http_port", "must be between 0 and 65,535")
        _require(self.log_events_per_second >= 0, "log_events_per_second", "must not be negative")
        _require(self.sys_interval_seconds >= 0, "sys_interval_seconds", "must not be negative")
        _require(0 <= self.top_n <= 1_000, "top_n", "must be between 0 and 1,000")


class Recording(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """For experiments: an event for every message of a workload (``nearcast.load``) that the broker processes. Each costs
    some microseconds, and a disk that does not keep up holds the broker up."""

    directory: str | None = None
    """Where the events go, as Parquet files that several processes may share. Unset: nothing is recorded."""

    run: str = "broker"
    """What the run is called in the events: the name that the clients' events have, so that they are evaluated together."""

    name: str | None = None
    """What this broker is called in the events: the host that clients' events name as theirs. Unset: its name in the fabric,
    or the machine's host name and the port of its first MQTT listener."""

    cloud: str = "cloud"
    """What the cloud of broadcast groups is called in the events: it records nothing itself, so whoever gives it a message
    does."""

    def __post_init__(self) -> None:
        for field in ("run", "name", "cloud"):
            _require(getattr(self, field) != "", field, "must not be empty")


class BrokerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything ``nearcast broker`` can be told."""

    listeners: tuple[Listener, ...] = DEFAULT_LISTENERS
    """Where clients connect. Unset: plain TCP on 127.0.0.1:1883, and with a data directory the bulk port on 7883."""

    limits: Limits = Limits()
    """Bounds on everything a client can make the broker keep or do."""

    security: Security = Security()
    """Who gets in, and what they may do."""

    persistence: Persistence = Persistence()
    """What survives the process."""

    topics: tuple[TopicRule, ...] = ()
    """Topics that are kept in the log from the start; ``nearcast topic create`` adds others at run time, which come after
    these. Any needs ``persistence.directory``."""

    topic_log: TopicLogSettings = TopicLogSettings()
    """The log that keeps them."""

    fabric: Fabric = Fabric()
    """Other brokers that this one forms a fabric with."""

    observability: Observability = Observability()
    """Metrics, health, logs, ``$SYS``."""

    recording: Recording = Recording()
    """What the broker records of single messages."""

    server_reference: str | None = None
    """As in :class:`EngineSettings`."""

    response_information: str | None = None
    """As in :class:`EngineSettings`."""

    shutdown_timeout_seconds: float = 5.0
    """Time a graceful shutdown gives clients to take what is still to be sent. Too low cuts off slow ones, which then learn of
    the shutdown by a lost connection; nothing acknowledged is lost either way."""

    def __post_init__(self) -> None:
        _require(len(self.listeners) > 0, "listeners", "must name at least one")
        seen: set[str] = set()
        for listener in self.listeners:
            _require(listener.effective_port == 0 or listener.name not in seen, "listeners", f"repeat {listener.name}")
            seen.add(listener.name)
        links = [listener.name for listener in self.listeners if listener.kind in LINK_KINDS]
        _require(
            not links or self.fabric.secret_file is not None,
            "listeners",
            f"names {links[0] if links else ''}, which needs fabric.secret_file: `nearcast secret FILE` makes one",
        )
        _require(self.shutdown_timeout_seconds >= 0, "shutdown_timeout_seconds", "must not be negative")

    def engine_settings(self) -> EngineSettings:
        """The part of this that the pure machine needs."""
        return EngineSettings(
            limits=self.limits,
            durable=self.persistence.directory is not None,
            server_reference=self.server_reference,
            response_information=self.response_information,
        )

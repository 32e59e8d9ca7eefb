"""What a broker has to know to be part of a fabric: who it is, whom it trusts, where it finds others.

Part of :mod:`nearcast.config`, which includes it in a broker's configuration; written by the same rules.
"""

from __future__ import annotations

from typing import Literal

import msgspec


def _require(condition: bool, field: str, message: str) -> None:
    """Refuse a value, as in :mod:`nearcast.config`."""
    if not condition:
        raise ValueError(f"`{field}` {message}")


class TopicClass(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What becomes of topics in the fabric. The first rule whose filter matches a topic decides; a topic that none matches is
    ``bridged``."""

    topic: str
    """A topic name, or a filter with ``+`` and ``#``."""

    topic_class: Literal["bridged", "local", "broadcast", "broadcast-filtered", "owned"]
    """"bridged": messages go to every broker with a subscriber. "local": messages stay at the broker that received them.
    "broadcast": messages go to every broker of this one's group, and to other groups by way of the cloud.
    "broadcast-filtered": the same, but inside the group only to brokers with a subscriber. "owned": one broker at a time, the
    topic's owner, orders its messages; the controller places it, and moves it where the latency bound holds."""

    max_latency_ms: float = 0.0
    """Class "owned": how long a message may take from its publisher to its farthest subscriber, in milliseconds. The owner is
    placed and moved to keep it. 0: no bound; the owner moves only when it is overloaded or stops."""

    replica_set: str = ""
    """Class "owned": the replica set that keeps these topics, each as a log; its leader is the owner. Empty: the owner keeps
    nothing but what it has to send."""

    @property
    def effective_class(self) -> str:
        """The class as brokers tell each other."""
        return f"set:{self.replica_set}" if self.replica_set else self.topic_class

    def __post_init__(self) -> None:
        _require(0 <= self.max_latency_ms <= 3_600_000, "max_latency_ms", "must be between 0 and 3,600,000")
        _require(not self.replica_set or self.topic_class == "owned", "replica_set", 'is for topics of class "owned"')


class ReplicaSet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Brokers that keep topics together, as one log: whatever one of them acknowledges, a quorum has on disk."""

    name: str
    """What the set is called: the same at all brokers."""

    members: tuple[str, ...]
    """Names of the brokers that keep the log: an odd number of them. Brokers of one site answer fast; brokers of several
    outlive a site."""

    preferred: str = ""
    """The member that leads while it is there and has everything. Empty: whichever was elected."""

    write_quorum: int = 0
    """On how many members' disks a message must be before it is acknowledged. A majority at least, which 0 means; more costs
    latency, and the set stops when fewer are there."""

    def __post_init__(self) -> None:
        _require(0 < len(self.name.encode()) <= 128 and self.name.isprintable(), "name", "must be 1 to 128 characters")
        _require(1 <= len(self.members) <= 15, "members", "must be 1 to 15 brokers")
        _require(len(set(self.members)) == len(self.members), "members", "names a broker twice")
        _require(all(self.members), "members", "names a broker without a name")
        _require(not self.preferred or self.preferred in self.members, "preferred", "is not a member")
        _require(0 <= self.write_quorum <= len(self.members), "write_quorum", "is more than there are members")


class Groups(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How this broker joins others in a group that messages of class ``broadcast`` are flooded in."""

    cloud: str | None = None
    """URL of the MQTT broker through which groups find each other and exchange messages: ``mqtt://host:1883``,
    ``mqtts://host:8883``. Any MQTT broker will do. Unset: there are no groups, and messages of class ``broadcast`` go to all
    brokers of the fabric."""

    cloud_version: Literal["5", "3.1.1"] = "5"
    """Which MQTT is spoken with the cloud. With 3.1.1 messages cannot carry their identity, so one that comes back is known by
    its content."""

    cloud_username: str | None = None
    """User name at the cloud."""

    cloud_password_file: str | None = None
    """File whose first line is the password there."""

    cloud_ca_file: str | None = None
    """PEM file with the authorities that vouch for the cloud's certificate. Unset: the system's."""

    cloud_certificate_file: str | None = None
    """PEM file with the certificate this broker shows to the cloud, where that asks for one."""

    cloud_key_file: str | None = None
    """PEM file with that certificate's private key."""

    threshold_ms: float = 5.0
    """Brokers nearer than this, one way, end up in one group. 0 makes every broker its own group (all goes through the cloud),
    a very large value puts all in one (all is flooded). Too low costs latency, too high sends what nobody wants."""

    leave_threshold_ms: float | None = None
    """A broker farther than this from its leader leaves. Unset: a quarter above ``threshold_ms``. Too near to it and brokers
    come and go with every change of the weather."""

    region: str = "world"
    """Which part of a large deployment this broker announces itself in ("europe"): one topic level. Brokers of other regions
    never join it in a group; messages go to and fro through the cloud."""

    prefix: str = "nearcast"
    """First topic level(s) of all that brokers say to each other through the cloud. Two fabrics at one cloud need two."""

    lcm: float | None = None
    """Leadership capability measure: of two leaders that merge, the one with the higher leads. Unset: messages a second that
    this broker could relay, as measured from its processor and its way to the cloud."""

    position: tuple[float, float] | None = None
    """Latitude and longitude in degrees. Brokers that light in fibre could not reach within the threshold need not be
    measured."""

    announce_interval_seconds: float = 0.5
    """How often a leader announces itself. Many leaders do it less often. Too low costs the cloud messages, too high finds
    neighbours late."""

    ping_interval_seconds: float = 1.0
    """How often near brokers are measured."""

    ping_window: int = 20
    """Measurements that the moving average goes over. Too few and groups follow the weather; too many and they follow late."""

    links: Literal["auto", "group", "all"] = "auto"
    """Which brokers this one keeps links to: those of its "group", or "all" that it hears of. "auto": the group, unless a
    controller or peers are configured."""

    adaptive: bool = False
    """Whether each group moves its threshold by itself, so that its excess data stays near ``excess_budget``."""

    excess_budget: float = 0.3
    """Share of messages that a group's brokers may get for nobody."""

    least_threshold_ms: float = 1.0
    """Below this an adaptive threshold does not fall."""

    largest_threshold_ms: float = 50.0
    """Above this an adaptive threshold does not rise."""

    flow_aware: bool = False
    """Whether a member goes over to another group, within the threshold, that most of what its clients want comes from."""

    @property
    def effective_leave_threshold_ms(self) -> float:
        return 1.25 * self.threshold_ms if self.leave_threshold_ms is None else self.leave_threshold_ms

    def __post_init__(self) -> None:
        for field in ("threshold_ms", "excess_budget", "least_threshold_ms"):
            _require(getattr(self, field) >= 0, field, "must not be negative")
        leave = self.leave_threshold_ms
        _require(leave is None or leave >= self.threshold_ms, "leave_threshold_ms", "must not be below threshold_ms")
        _require(self.excess_budget <= 1, "excess_budget", "is a share: between 0 and 1")
        _require(self.largest_threshold_ms >= self.least_threshold_ms, "largest_threshold_ms", "is below least_threshold_ms")
        for field in ("announce_interval_seconds", "ping_interval_seconds"):
            _require(0.01 <= getattr(self, field) <= 3_600, field, "must be between 0.01 and 3,600")
        _require(1 <= self.ping_window <= 1_000, "ping_window", "must be between 1 and 1,000")
        _require(self.lcm is None or self.lcm >= 0, "lcm", "must not be negative")
        _require(
            0 < len(self.region.encode()) <= 128 and self.region.isprintable() and not set(self.region) & set("+#/"),
            "region",
            "must be one topic level of 1 to 128 characters",
        )
        prefix_fits = 0 < len(self.prefix.encode()) <= 256 and self.prefix.isprintable() and not set(self.prefix) & set("+#")
        _require(prefix_fits and self.prefix[0] != "$", "prefix", "must be a topic name of 1 to 256 characters, without $")
        if self.cloud is not None:
            scheme, separator, _ = self.cloud.partition("://")
            _require(separator != "" and scheme in ("mqtt", "mqtts"), "cloud", "must be mqtt://host:port or mqtts://host:port")
        if self.position is not None:
            latitude, longitude = self.position
            fits = -90 <= latitude <= 90 and -180 <= longitude <= 180
            _require(fits, "position", "must be a latitude (-90 to 90) and a longitude (-180 to 180)")


class Telemetry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What this broker reports of itself and of the topics that are owned, on topics under ``$nearcast/telemetry/``."""

    interval_seconds: float = 5.0
    """Seconds between reports. Too high finds violated latency bounds late; too low costs messages."""

    raw: bool = False
    """Whether the coordinate of every client is reported, too. Costs bytes with the number of clients; for studies, and for
    planning with Spark."""

    network_bytes_per_second: float = 125_000_000.0
    """What this broker's network carries each way, against which its traffic is judged. The default is 1 Gbit/s."""

    def __post_init__(self) -> None:
        _require(0.05 <= self.interval_seconds <= 3_600, "interval_seconds", "must be between 0.05 and 3,600")
        _require(self.network_bytes_per_second > 0, "network_bytes_per_second", "must be above 0")


class Fabric(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One broker's place in a fabric of brokers. Without ``secret_file`` a broker is on its own."""

    name: str | None = None
    """What this broker is called in the fabric: unique there, and the same after a restart. Unset: the machine's host name and
    the port of its first MQTT listener."""

    site: str = ""
    """Where this broker is, in a word of your choice ("eu-west"); shown beside its name. It decides nothing."""

    secret_file: str | None = None
    """File with the secret that all nodes of a fabric share (``nearcast secret FILE`` makes one). Whoever has it is part of
    the fabric; nodes prove to each other that they do, and never send it. Setting it makes the broker part of a fabric."""

    controller: str | None = None
    """``host:port`` of the controller, which tells brokers of each other. Unset: only ``peers`` are known."""

    peers: tuple[str, ...] = ()
    """Link addresses (``host:port``) of brokers that are dialled from the start, with or without a controller."""

    advertise: str | None = None
    """``host:port`` at which other nodes reach this broker's link listener. Unset: the listener's own address."""

    tls: bool = False
    """Whether links that this broker opens are TLS. The other end needs a ``link-tls`` listener then."""

    ca_file: str | None = None
    """PEM file with the authorities that vouch for other nodes' certificates. Unset: the system's."""

    certificate_file: str | None = None
    """PEM file with the certificate this broker shows when it opens a link, where the other end asks for one."""

    key_file: str | None = None
    """PEM file with that certificate's private key."""

    classes: tuple[TopicClass, ...] = ()
    """Classes of topics, until a controller says otherwise."""

    replica_sets: tuple[ReplicaSet, ...] = ()
    """Replica sets, the same at every broker."""

    ring: bool = False
    """Whether the replica sets form a ring that keeps a directory of topics. The same at every broker. Costs each set a small
    message a second, and an entry of its log when its neighbours change."""

    groups: Groups = Groups()
    """Broadcast groups."""

    telemetry: Telemetry = Telemetry()
    """Reports of this broker and its owned topics."""

    max_queued_messages: int = 100_000
    """QoS 1 and 2 messages kept in memory for one other broker until it has them. With a data directory, further ones wait on
    disk (and, while they are being written, up to 100,000 or 64 MiB more in memory); without one they are dropped and
    counted. Too low loses messages of a short outage; too high costs memory."""

    max_queued_bytes: int = 67_108_864
    """The same bound in bytes; whichever is reached first holds."""

    max_spilled_bytes: int = 8_589_934_592
    """Bytes that may wait on disk for one other broker. Beyond, messages for it are dropped and counted."""

    max_unconfirmed_bytes: int = 4_194_304
    """Bytes sent to another broker and not yet confirmed by it. Too low makes throughput follow the distance; too high makes a
    reconnect send much again."""

    catch_up_bytes_per_second: int = 16_777_216
    """How fast what gathered during an outage is sent once a link is back, so that live messages keep their latency. 0: as
    fast as the link takes it."""

    keep_for_seconds: float = 86_400.0
    """How long messages are kept for a broker that is away, and its interest counts. Then it is forgotten, as if it had
    left."""

    probe_interval_seconds: float = 1.0
    """How often a silent link is probed."""

    fail_after_seconds: float = 5.0
    """A link that answers no probe for so long is given up, whatever TCP says. Too low takes a slow network for a dead one;
    too high keeps messages waiting for a dead broker."""

    retained_interval_seconds: float = 2.0
    """How often retained messages that changed are copied to brokers where nobody subscribes to them; only the last one of
    each topic is. Too low sends what nobody wants; too high lets new subscribers find an old one."""

    subscribe_timeout_seconds: float = 2.0
    """How long a client's SUBACK waits at most for other brokers to know of the subscription, so that nothing published there
    afterwards is missed. Too low misses messages of slow brokers; too high waits long for dead ones. 0: not at all."""

    takeover_timeout_seconds: float = 5.0
    """How long a client that connects waits at most for its session from the broker that has it. Too low loses sessions that
    are large or far; too high lets clients wait that could begin anew."""

    move_timeout_seconds: float = 10.0
    """How long preparing to move a client may take before it is given up; the client stays where it is."""

    def __post_init__(self) -> None:
        name = self.name
        _require(name is None or (0 < len(name.encode()) <= 128 and name.isprintable()), "name", "must be 1 to 128 characters")
        for field in ("max_queued_messages", "max_queued_bytes", "max_unconfirmed_bytes"):
            _require(getattr(self, field) >= 1, field, "must be at least 1")
        for field in ("max_spilled_bytes", "catch_up_bytes_per_second", "subscribe_timeout_seconds"):
            _require(getattr(self, field) >= 0, field, "must not be negative")
        for field in (
            "keep_for_seconds",
            "probe_interval_seconds",
            "retained_interval_seconds",
            "takeover_timeout_seconds",
            "move_timeout_seconds",
        ):
            _require(getattr(self, field) > 0, field, "must be above 0")
        _require(
            self.fail_after_seconds > self.probe_interval_seconds, "fail_after_seconds", "must be above probe_interval_seconds"
        )
        if self.controller is not None or self.peers or self.groups.cloud is not None:
            _require(
                self.secret_file is not None,
                "secret_file",
                "(--fabric-secret) is needed to be part of a fabric: `nearcast secret FILE`",
            )

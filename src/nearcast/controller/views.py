"""What the HTTP API shows, as records: each a picture of the controller's state at one moment."""

from __future__ import annotations

import heapq
from typing import Literal

import msgspec

from nearcast import __version__
from nearcast.config import Retention
from nearcast.fabric.control import ClientFacts
from nearcast.fabric.controlling import Controller
from nearcast.fabric.group_facts import CloudState, GroupFacts, RelayState
from nearcast.fabric.moves import Move
from nearcast.fabric.registry import Entry, NodeState


class Status(msgspec.Struct, kw_only=True):
    """The fabric at a glance."""

    controller: str
    version: str
    uptime_seconds: float
    brokers: int
    gateways: int
    nodes_not_up: list[str]
    draining: list[str]
    clients: int
    pending_moves: int
    moves: dict[str, int]
    """Moves that ended since the start, by how."""
    owned_topics: int
    """Topics that have an owner."""
    pending_migrations: int
    migrations: dict[str, int]
    """Migrations of topics that ended since the start, by how."""
    planner: str
    """Who decides about owners: own, spark or none."""
    reconfigurations: int
    reconfigured_seconds_ago: float | None
    monitoring_bytes_per_second: float
    """What monitoring costs the controller itself, UDP headers included, since its start."""


class NodeView(msgspec.Struct, kw_only=True):
    """A broker or gateway."""

    name: str
    role: str
    state: NodeState
    site: str
    draining: bool
    link: str
    monitoring: str
    mqtt: str
    version: str
    connections: int
    gateway_connections: int
    sessions: int
    home: str
    """Gateways: the broker that new clients are connected to."""
    brokers: dict[str, int]
    """Gateways: clients by broker."""
    ranking: list[str]
    """Gateways: brokers, best first."""
    rates: dict[str, float]
    """Per second, over the last report: messages_received, messages_sent, bytes_received, ..."""
    registered_seconds_ago: float
    reported_seconds_ago: float | None
    clients_to_move: int
    """Brokers: clients of gateways that are there. 0 and draining: it can be stopped."""
    topics_owned: int
    """Brokers: topics that they own."""


class LinkView(msgspec.Struct, kw_only=True):
    """A path between two nodes, as the first one measures it."""

    origin: str
    target: str
    kind: str
    """``monitored`` (a gateway's measurement) or ``link`` (between brokers)."""
    latency_ms: float | None
    jitter_ms: float
    loss: float
    queued_messages: int = 0
    hops: int = 1
    in_use: bool = True
    """Gateways: whether it is the broker in use."""


class ClientView(msgspec.Struct, kw_only=True):
    """A client that is connected."""

    client: str
    gateway: str | None
    broker: str
    username: str | None
    connected_since: float


class Page(msgspec.Struct, kw_only=True):
    """Clients, in the order of their names; ``next`` goes into ``after`` for the following ones."""

    clients: list[ClientView]
    total: int
    next: str | None


class MoveView(msgspec.Struct, kw_only=True):
    """A move, pending or past. Times are seconds since the Unix epoch."""

    number: int
    gateway: str
    client: str | None
    origin: str | None
    target: str
    kind: str
    reason: str
    state: str
    created_at: float
    ordered_at: float | None
    ended_at: float | None
    moved_clients: int
    failed_clients: int
    longest_gap_ms: float
    detail: str


class ClassView(msgspec.Struct, kw_only=True):
    """A rule: topics of this filter are of this class. The first one that matches holds; without one, ``bridged``."""

    topic_filter: str
    topic_class: str
    max_latency_ms: float = 0.0
    """Class ``owned``: the bound from a publisher to its farthest subscriber; 0: none."""
    retention: Retention | msgspec.UnsetType = msgspec.UNSET
    """Class ``set:NAME``: how much the replica set keeps of each topic."""


class SetView(msgspec.Struct, kw_only=True):
    """A replica set: brokers that keep topics together."""

    name: str
    members: list[str]
    preferred: str = ""
    write_quorum: int = 0
    """On how many members' disks a message must be; 0: a majority."""
    topics: list[str] = []
    """The filters of the topics it keeps."""


class SetRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A new replica set: named members, or as many as ``replicas``, chosen by where brokers are."""

    name: str
    members: list[str] = []
    replicas: int = 3
    placement: Literal["colocated", "distributed"] = "distributed"
    site: str = ""
    preferred: str = ""
    write_quorum: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= 15:
            raise ValueError("`replicas` must be between 1 and 15")


def sets(controller: Controller) -> list[SetView]:
    """All replica sets, by name."""
    return [
        SetView(
            name=each.name,
            members=list(each.members),
            preferred=each.preferred,
            write_quorum=each.write_quorum,
            topics=[rule.topic_filter for rule in controller.rules.rules if rule.topic_class == f"set:{each.name}"],
        )
        for each in sorted(controller.rules.sets, key=lambda each: each.name)
    ]


class FunctionView(msgspec.Struct, kw_only=True):
    """A deployed function; its code is not shown."""

    name: str
    topic: str
    entry: str
    version: int
    native: bool
    from_start: bool
    timeout_seconds: float
    retries: int
    batch: int
    bytes: int
    """Of its code."""


def functions(controller: Controller) -> list[FunctionView]:
    """All functions, by name."""
    return [
        FunctionView(
            name=each.name,
            topic=each.topic,
            entry=each.entry,
            version=each.version,
            native=each.native,
            from_start=each.from_start,
            timeout_seconds=each.timeout_seconds,
            retries=each.retries,
            batch=each.batch,
            bytes=sum(map(len, each.files.values())),
        )
        for each in sorted(controller.rules.functions, key=lambda each: each.name)
    ]


class GroupMemberView(msgspec.Struct, kw_only=True):
    """A broker of a broadcast group, by its own report."""

    name: str
    leads: bool
    state: NodeState
    site: str
    latency_ms: float | None
    """To the leader, one way, as this broker measures it."""
    lcm: float
    relay: RelayState
    """How its messages get to the cloud."""
    cloud_state: CloudState
    cloud_problem: str
    """Why it has no connection to the cloud, in words."""
    waiting_messages: int
    """Messages of its clients that the cloud has not confirmed."""


class GroupView(msgspec.Struct, kw_only=True):
    """A broadcast group, its leader first. ``threshold_ms`` and the like are the leader's word."""

    leader: str
    region: str
    cloud: str
    threshold_ms: float
    leave_threshold_ms: float
    settled: bool
    """Whether the leader is known here and leads, and says so of the same brokers that say so of it."""
    members: list[GroupMemberView]


class MoveRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Move one client, or all clients of a gateway, to a broker. A gateway moved by hand stays for ten minutes."""

    target: str
    client: str = ""
    gateway: str = ""


class DrainRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """How fast a broker is to be drained; unset: 100 clients a second."""

    clients_per_second: float | None = None


def status(controller: Controller, name: str, started_at: float, now: float) -> Status:
    entries = controller.entries.values()
    gateways = controller.gateways()
    monitor = controller.monitor
    wire_bytes = monitor.bytes_sent + monitor.bytes_received + 48 * (monitor.packets_sent + monitor.packets_received)
    direct = sum(max(0, entry.report.connections - entry.report.gateway_connections) for entry in controller.brokers())
    return Status(
        controller=name,
        version=__version__,
        uptime_seconds=round(now - started_at, 1),
        brokers=len(controller.brokers()),
        gateways=len(gateways),
        nodes_not_up=sorted(entry.name for entry in entries if entry.state in ("suspect", "down")),
        draining=sorted(entry.name for entry in entries if entry.draining),
        clients=direct + sum(entry.report.connections for entry in gateways),
        pending_moves=len(controller.moves.pending),
        owned_topics=len(controller.topics.directory),
        pending_migrations=len(controller.topics.migrations.pending),
        migrations=dict(controller.topics.migrations.counts),
        planner=controller.topics.settings.planner,
        moves=dict(controller.moves.counts),
        reconfigurations=controller.reconfigurations,
        reconfigured_seconds_ago=round(now - controller.last_reconfigured_at, 1) if controller.reconfigurations else None,
        monitoring_bytes_per_second=round(wire_bytes / max(now - started_at, 1.0), 1),
    )


def node(controller: Controller, entry: Entry, now: float) -> NodeView:
    facts = entry.node
    return NodeView(
        name=entry.name,
        role=facts.role,
        state=entry.state,
        site=facts.site,
        draining=entry.draining,
        link=facts.link,
        monitoring=facts.monitoring,
        mqtt=facts.mqtt,
        version=facts.version,
        connections=entry.report.connections,
        gateway_connections=entry.report.gateway_connections,
        sessions=entry.report.sessions,
        home=entry.home,
        brokers=entry.report.brokers,
        ranking=list(entry.ranking),
        rates={name: round(rate, 1) for name, rate in entry.rates.items()},
        registered_seconds_ago=round(now - entry.registered_at, 1),
        reported_seconds_ago=round(now - entry.report_at, 1) if entry.report_at else None,
        clients_to_move=controller.drained(entry) if entry.is_broker else 0,
        topics_owned=controller.topics.directory.count_of(entry.name),
    )


def graph(controller: Controller) -> list[LinkView]:
    """All paths that are known."""
    found = []
    for entry in controller.entries.values():
        if not entry.usable:
            continue
        for target, measured in sorted(entry.measured.items()):
            quality = measured.quality
            found.append(
                LinkView(
                    origin=entry.name,
                    target=target,
                    kind="monitored",
                    latency_ms=None if quality.loss >= 1.0 else round(quality.latency_ms, 3),
                    jitter_ms=round(quality.jitter_ms, 3),
                    loss=round(quality.loss, 3),
                    in_use=target == entry.home,
                )
            )
        for target, link in sorted(entry.links.items()):
            found.append(
                LinkView(
                    origin=entry.name,
                    target=target,
                    kind="link",
                    latency_ms=round(link.latency_ms, 3),
                    jitter_ms=round(link.jitter_ms, 3),
                    loss=0.0,
                    queued_messages=link.queued_messages,
                    hops=link.hops,
                )
            )
    return found


def groups(controller: Controller) -> list[GroupView]:
    """All broadcast groups, the largest first; brokers that are not there are in none."""
    found: dict[str, list[tuple[Entry, GroupFacts]]] = {}
    for entry in controller.brokers():
        facts = entry.report.group
        if facts is not None and entry.usable:
            found.setdefault(facts.leader, []).append((entry, facts))
    made = [_group(leader, of) for leader, of in found.items()]
    return sorted(made, key=lambda group: (-len(group.members), group.leader))


def _group(leader: str, of: list[tuple[Entry, GroupFacts]]) -> GroupView:
    told = next((facts for entry, facts in of if entry.name == leader), None)
    names = {entry.name for entry, _ in of}
    by_leader = {leader, *(fellow.name for fellow in told.fellows)} if told is not None else set()
    word = told if told is not None else of[0][1]
    members = [_group_member(entry, facts) for entry, facts in of]
    return GroupView(
        leader=leader,
        region=word.region,
        cloud=word.cloud,
        threshold_ms=word.threshold_ms,
        leave_threshold_ms=word.leave_threshold_ms,
        settled=names == by_leader,
        members=sorted(members, key=lambda member: (not member.leads, member.name)),
    )


def _group_member(entry: Entry, facts: GroupFacts) -> GroupMemberView:
    return GroupMemberView(
        name=entry.name,
        leads=facts.leader == entry.name,
        state=entry.state,
        site=entry.node.site,
        latency_ms=facts.latency_ms,
        lcm=facts.lcm,
        relay=facts.relay,
        cloud_state=facts.cloud_state,
        cloud_problem=facts.cloud_problem,
        waiting_messages=facts.waiting_messages,
    )


def clients(controller: Controller, node_name: str, after: str, limit: int) -> Page:
    """Connected clients, of one node or of all. Those that a gateway reports are its, whatever its broker says of them."""
    found: dict[str, Entry] = {}
    for entry in (*controller.brokers(), *controller.gateways()):
        if not node_name or node_name == entry.name:
            found.update(dict.fromkeys(entry.clients, entry))
        elif not entry.is_broker:
            found.update({name: entry for name, facts in entry.clients.items() if facts.broker == node_name})
    # There may be a million: only those of the page are put in order and made into records.
    names = heapq.nsmallest(limit + 1, (name for name in found if name > after))
    shown = names[:limit]
    return Page(
        clients=[_client(found[name], found[name].clients[name]) for name in shown],
        total=len(found),
        next=shown[-1] if len(names) > limit else None,
    )


def _client(entry: Entry, facts: ClientFacts) -> ClientView:
    return ClientView(
        client=facts.client,
        gateway=None if entry.is_broker else entry.name,
        broker=entry.name if entry.is_broker else facts.broker,
        username=facts.username,
        connected_since=facts.since,
    )


def move(of: Move) -> MoveView:
    return MoveView(
        number=of.number,
        gateway=of.gateway,
        client=of.client or None,
        origin=of.origin or None,
        target=of.target,
        kind=of.kind,
        reason=of.reason,
        state=of.state,
        created_at=round(of.created_at, 3),
        ordered_at=round(of.ordered_at, 3) or None,
        ended_at=round(of.ended_at, 3) or None,
        moved_clients=of.moved_clients,
        failed_clients=of.failed_clients,
        longest_gap_ms=round(of.longest_gap_ms, 3),
        detail=of.detail,
    )

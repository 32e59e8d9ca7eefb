"""A broker in the eyes of the controller: what it registers with and reports, and what it makes of the controller's word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nearcast.config import Retention
from nearcast.errors import ConfigError
from nearcast.fabric.classes import SET
from nearcast.fabric.control import (
    MAX_CLIENTS_PER_REPORT,
    ClassRule,
    ClassRules,
    ClientFacts,
    Departure,
    LinkFacts,
    Member,
    Node,
    Registrant,
    Registration,
    Report,
)
from nearcast.fabric.directory_client import ControllerDirectory
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.group_facts import group_facts
from nearcast.fabric.owner_records import MigrateOrder, Owner
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.trunks import Channel

MAX_SESSIONS_LISTED: Final = 20_000
"""A broker with more sessions reports how many clients it has, not which: looking at all of them would hold up messages."""

NO_GROUP: Final = ("", 0, False)


class BrokerNode(Registrant):
    """See the module. ``describe`` says what to register with; ``durable``, whether sessions wait for the broker to return."""

    def __init__(self, fabric: Fabric, describe: Callable[[], Node], *, durable: bool) -> None:
        self._fabric = fabric
        self._directory: ControllerDirectory | None = None
        self._describe = describe
        self._durable = durable
        self._addresses: dict[str, str] = {}
        self._reported: dict[str, ClientFacts] = {}
        self._whole = True
        self._reported_group = NO_GROUP
        self.is_draining = False
        self.on_rules: Callable[[ClassRules], None] | None = None
        """Called with rules that are in use from now on."""
        self.classes_fault = ""
        """Why the controller's topic classes cannot be used here, if so: it may be of a later version."""

    def attached(self, registration: Registration) -> None:
        self._directory = ControllerDirectory(registration, self._fabric.ownership, self._fabric.name)
        self._fabric.ownership.directory = self._directory

    def node(self) -> Node:
        return self._describe()

    def leaves_for_good(self) -> bool:
        return not self._durable

    def registered(self, controller: str, now: float) -> None:
        self._reported.clear()
        self._whole = True
        if self._directory is not None:
            self._directory.registered(now)

    def owners(self, owners: tuple[Owner, ...], now: float) -> None:
        if self._directory is not None:
            self._directory.owners(owners, now)

    def migrate(self, order: MigrateOrder, now: float) -> None:
        self._fabric.ownership.migrate(order, now)

    def settle(self, now: float) -> None:
        if self._directory is not None:
            self._directory.settle(now)

    def tick(self, now: float) -> None:
        if self._directory is not None:
            self._directory.tick(now)

    def next_deadline(self) -> float:
        return FOREVER if self._directory is None else self._directory.next_deadline()

    def members(self, changed: tuple[Member, ...], gone: tuple[Departure, ...], now: float) -> None:
        fabric = self._fabric
        for member in changed:
            before = self._addresses.get(member.name)
            if before != member.link:
                if before:
                    fabric.forget_address(before, _wanted_by(member.name))
                self._addresses[member.name] = member.link
                fabric.dial(member.link, now, member.name, _wanted_by(member.name))
        for departure in gone:
            if not departure.left:
                continue  # it may come back for what is kept for it, and its link says whether it is there
            fabric.forget_address(self._addresses.pop(departure.name, ""), _wanted_by(departure.name))
            peer = fabric.peers.get(departure.name)
            if peer is not None:
                fabric.forget(peer, now)

    def classes(self, rules: ClassRules, now: float) -> None:
        try:
            self._fabric.classes.replace(
                [(rule.topic_filter, rule.topic_class) for rule in rules.rules],
                rules.stamp,
                {rule.topic_filter: rule.max_latency_ms for rule in reversed(rules.rules) if rule.max_latency_ms},
                {rule.topic_filter: rule.retention for rule in reversed(rules.rules) if rule.topic_class.startswith(SET)},
            )
            self._fabric.sets.replace(rules.sets, now)
            self._fabric.sets.deploy(rules.functions)
            self.classes_fault = ""
            if self.on_rules is not None:
                self.on_rules(rules)
        except ConfigError as error:
            self.classes_fault = str(error)

    def class_rules(self) -> ClassRules:
        """The rules in use, to register with."""
        classes = self._fabric.classes
        bounds = classes.bounds
        kept = classes.retentions
        rules = [
            ClassRule(topic, topic_class, bounds.get(topic, 0.0), kept.get(topic, Retention()))
            for topic, topic_class in classes.rules
        ]
        return ClassRules(
            classes.stamp, tuple(rules), tuple(self._fabric.sets.definitions.values()), self._fabric.sets.functions
        )

    def draining(self, draining: bool, now: float) -> None:
        self.is_draining = draining

    def has_news(self) -> bool:
        return self._group() != self._reported_group

    def _group(self) -> tuple[str, int, bool]:
        """What of the broadcast group a controller is to know soon."""
        broadcast = self._fabric.broadcast
        cloud = broadcast.cloud
        if cloud is None:
            return NO_GROUP
        view = broadcast.formation.view
        return view.leader, view.version, cloud.connected

    def report(self, now: float) -> Report:
        self._reported_group = self._group()
        fabric = self._fabric
        stats = fabric.engine.stats
        report = Report(
            connections=stats.connected_clients,
            gateway_connections=fabric.trunks.clients(),
            sessions=stats.sessions,
            figures={
                "messages_received": float(sum(stats.publishes_received)),
                "messages_sent": float(sum(stats.publishes_sent)),
                "bytes_received": float(stats.bytes_received),
                "bytes_sent": float(stats.bytes_sent),
            },
            links=[
                LinkFacts(
                    peer.name,
                    peer.link.rtt_ms,
                    peer.link.rtt_deviation_ms,
                    peer.session.queued_messages,
                    2 if peer.link.relayed else 1,
                )
                for peer in fabric.peers.values()
                if peer.link is not None and peer.up
            ],
            group=group_facts(fabric.broadcast, leaders=False),
        )
        self._report_clients(report)
        return report

    def _report_clients(self, report: Report) -> None:
        """Clients that came without a gateway, as changes; those of gateways are the gateways' to report."""
        engine = self._fabric.engine
        wall_offset = engine.effects.wall_offset
        present: dict[str, ClientFacts] = {}
        if len(engine.sessions.by_client) <= MAX_SESSIONS_LISTED:
            for client, session in engine.sessions.by_client.items():
                connection = session.connection
                if connection is not None and connection.version and not isinstance(connection.handle, Channel):
                    known = self._reported.get(client)
                    since = round(connection.opened_at + wall_offset, 3)
                    if known is None or known.since != since:
                        known = ClientFacts(client, "", since, connection.username)
                    present[client] = known
        for client, facts in present.items():
            if self._reported.get(client) is not facts and len(report.clients) < MAX_CLIENTS_PER_REPORT:
                self._reported[client] = facts
                report.clients.append(facts)
        report.clients_gone = [client for client in self._reported if client not in present]
        for client in report.clients_gone:
            del self._reported[client]
        report.clients_whole, self._whole = self._whole, False


def _wanted_by(name: str) -> str:
    """Who wants an address dialled that the controller knows of a broker."""
    return f"controller {name}"

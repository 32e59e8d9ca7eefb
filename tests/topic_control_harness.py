"""Brokers that own topics, for tests of the controller: the shipped conversation with it, and what a broker does played.

:class:`OwningBroker` hands topics over as it is told, at once; how brokers really do that among themselves is
:mod:`nearcast.fabric.ownership`'s and tested there.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from nearcast.fabric import frames, links
from nearcast.fabric.control import ClassRule, ClassRules, LinkFacts, Node, Registration, Report
from nearcast.fabric.controlling import ControlSettings
from nearcast.fabric.directory_client import ControllerDirectory
from nearcast.fabric.frames import frame
from nearcast.fabric.owner_records import Migrated, MigrateOrder, Owner
from nearcast.fabric.planning import BROKER_REPORT, TOPIC_REPORT
from nearcast.fabric.topic_manager import TopicManager
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.telemetry.records import BrokerReport, Crowd, Place, TopicReport, TopicSummary
from tests.control_harness import FakeRegistrant, Net

OWNED_RULES = ClassRules(1, (ClassRule("swarm/#", "owned", 40.0),))


@dataclass
class KnownTopic:
    name: bytes
    epoch: int
    owner: str
    mine: bool


class OwningBroker(FakeRegistrant):
    """Does as it is told, unless ``stubborn`` (says nothing), ``unable`` (says why not) or ``ignorant`` (knows no topic)."""

    def __init__(self, net: Net, node: Node) -> None:
        super().__init__(net, node)
        self.topics: dict[bytes, KnownTopic] = {}
        self.directory: ControllerDirectory | None = None
        self.orders: list[MigrateOrder] = []
        self.stubborn = False
        self.unable = ""
        self.ignorant = False
        self.linked: list[str] = []
        self._round = 0

    def attached(self, registration: Registration) -> None:
        self.registration = registration
        self.directory = ControllerDirectory(registration, self, self.facts.name)

    @property
    def desk(self) -> ControllerDirectory:
        assert self.directory is not None
        return self.directory

    def registered(self, controller: str, now: float) -> None:
        self.desk.registered(now)

    def owners(self, owners: tuple[Owner, ...], now: float) -> None:
        self.desk.owners(owners, now)

    def settle(self, now: float) -> None:
        self.desk.settle(now)

    def tick(self, now: float) -> None:
        self.desk.tick(now)

    def next_deadline(self) -> float:
        return self.desk.next_deadline()

    def report(self, now: float) -> Report:
        return Report(links=[LinkFacts(name, 10.0) for name in self.linked])

    # --- as ownership does ----------------------------------------------------------------------------------------------

    def told(self, name: str, epoch: int, owner: str, now: float, appointed: bool = False) -> None:
        known = self.topics.get(name.encode())
        if known is not None and known.epoch >= epoch:
            return
        mine = owner == self.facts.name
        self.topics[name.encode()] = KnownTopic(name.encode(), epoch, owner, mine)
        if mine:
            self.desk.owned(name, epoch, True)
        elif known is not None and known.mine:
            self.desk.owned(name, known.epoch, False)

    def migrate(self, order: MigrateOrder, now: float) -> None:
        self.orders.append(order)
        if self.stubborn:
            return
        known = self.topics.get(order.topic.encode())
        if self.ignorant or known is None:
            self.desk.migrated(Migrated(number=order.number, topic=order.topic, epoch=0, owner="", done=False, reason="?"))
            return
        if self.unable or known.epoch != order.epoch or not known.mine:
            reason = self.unable or "not the owner"
            self.desk.migrated(
                Migrated(
                    number=order.number, topic=order.topic, epoch=known.epoch, owner=known.owner, done=False, reason=reason
                )
            )
            return
        self.told(order.topic, order.new_epoch, order.target, now)
        target = self.net.registrants[order.target]
        assert isinstance(target, OwningBroker)
        target.told(order.topic, order.new_epoch, order.target, now)
        self.desk.migrated(
            Migrated(
                number=order.number,
                topic=order.topic,
                epoch=order.new_epoch,
                owner=order.target,
                done=True,
                duration_ms=12.5,
            )
        )

    # --- what a test makes it do ----------------------------------------------------------------------------------------

    def ask(self, *topics: str) -> None:
        """Somebody publishes here."""
        known = [(topic, self.topics[topic.encode()].epoch if topic.encode() in self.topics else 0) for topic in topics]
        self.desk.ask(known, self.net.now)

    def owner_of(self, topic: str) -> str:
        known = self.topics.get(topic.encode())
        return "" if known is None else known.owner

    def telemetry(
        self, place: Place | None, topics: list[TopicSummary] | None = None, *, cpu: float = 0.0, out_rate: float = 0.0
    ) -> None:
        """A whole round."""
        now = self.net.now
        self.report_self(BrokerReport(self.facts.name, now, place, cpu=cpu, messages_out_per_second=out_rate))
        self._round += 1
        self.report_topics(TopicReport(self.facts.name, now, self._round, 0, 1, topics or []))

    def report_self(self, report: BrokerReport) -> None:
        self.registration.send(frame(frames.TELEMETRY, bytes([BROKER_REPORT]), msgspec.json.encode(report)))

    def report_topics(self, report: TopicReport) -> None:
        self.registration.send(frame(frames.TELEMETRY, bytes([TOPIC_REPORT]), msgspec.json.encode(report)))


class OwningNet(Net):
    """A controller and such brokers."""

    @property
    def manager(self) -> TopicManager:
        return self.controller.topics

    def add_owning(self, *names: str, rules: ClassRules = OWNED_RULES) -> list[OwningBroker]:
        """Brokers that know each other."""
        made = []
        for name in names:
            node = Node(
                name=name,
                role="broker",
                epoch=self.rng.getrandbits(60),
                link=f"{name}:1884",
                monitoring=f"{name}:1884",
                classes=rules,
            )
            broker = OwningBroker(self, node)
            broker.linked = [other for other in names if other != name]
            self._add(node, broker, links.BROKER, standing=False)
            made.append(broker)
        return made

    def owning(self, name: str) -> OwningBroker:
        found = self.registrants[name]
        assert isinstance(found, OwningBroker)
        return found

    def owner_of(self, topic: str) -> str:
        known = self.manager.directory.find(topic)
        return "" if known is None else known.owner

    def agreed(self, topic: str) -> str:
        """Whom the directory and every broker that lives and knows the topic hold for the owner; empty if they differ."""
        known = self.manager.directory.find(topic)
        if known is None:
            return ""
        for name, registrant in self.registrants.items():
            if isinstance(registrant, OwningBroker) and self.machines[name].alive and topic.encode() in registrant.topics:
                theirs = registrant.topics[topic.encode()]
                if (theirs.epoch, theirs.owner) != (known.epoch, known.owner):
                    return ""
        return known.owner


def settings(**topics: object) -> ControlSettings:
    return ControlSettings(topics=msgspec.convert(topics, TopicSettings))


def place(x_ms: float, y_ms: float = 0.0, height_ms: float = 1.0) -> Place:
    """Milliseconds of round-trip time on a plane."""
    return Place((x_ms, y_ms, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0), height_ms, 0.0, 0.1)


def crowd(at: Place, count: int, worst_ms: float, deviation_ms: float = 0.0) -> Crowd:
    return Crowd(count, at, deviation_ms, worst_ms)

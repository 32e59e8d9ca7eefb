"""Counts, reports and what comes of them, beside a formation that a test moves by hand."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest

from nearcast.groups import adaptation, flows
from nearcast.groups.adaptation import Adaptation
from nearcast.groups.flows import Flows
from nearcast.groups.formation import Formation
from nearcast.groups.messages import Found, Message, Report, Seek
from nearcast.groups.settings import FormationSettings
from nearcast.groups.thresholds import AdaptiveThresholds, Thresholds


class Near:
    """Everybody is 3 ms away."""

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        return "leader" if below_ms > 3.0 and "leader" not in avoid else ""

    def latency_ms(self, name: str) -> float:
        return 3.0

    def address(self, name: str) -> str:
        return f"{name}:1884"


class Broker:
    """A formation and what is beside it."""

    def __init__(self, name: str, lcm: float, *, adaptive: bool = True, flow_aware: bool = False) -> None:
        rng = random.Random(name)
        self.thresholds = Thresholds(10.0, 12.5)
        if adaptive:
            self.thresholds = AdaptiveThresholds(10.0, 12.5, 0.3, 1.0, 50.0, 0.0)
        self.formation = Formation(name, f"{name}:1884", FormationSettings(), Near(), self.thresholds, lcm, rng, 0.0)
        self.flows = Flows(0.0) if flow_aware else None
        self.beside = Adaptation(self.formation, self.thresholds, self.flows, adaptive=adaptive, rng=rng, now=0.0)
        self.reports = 0


class Brokers:
    """Some of them, with messages that arrive at once."""

    def __init__(self, *brokers: Broker) -> None:
        self.now = 0.0
        self.brokers = {broker.formation.name: broker for broker in brokers}

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for name, broker in self.brokers.items():
                broker.formation.tick(self.now)
                broker.beside.tick(self.now)
                self.deliver(name)

    def deliver(self, name: str) -> None:
        broker = self.brokers[name]
        if broker.formation.take_changes():
            broker.beside.regrouped(self.now)
        for to, message in [*broker.formation.take_outgoing(), *broker.beside.take_outgoing()]:
            if to in self.brokers:
                self.handle(to, name, Message.decode(message.encode()))

    def handle(self, to: str, sender: str, message: Message) -> None:
        broker = self.brokers[to]
        if isinstance(message, (Report, Seek, Found)):
            broker.reports += isinstance(message, Report)
            broker.beside.handle(sender, message, self.now)
        else:
            broker.formation.handle(sender, message, self.now)
        self.deliver(to)


def test_members_report_and_the_leaders_threshold_follows_the_sum() -> None:
    leader, member = Broker("leader", 2.0), Broker("member", 1.0)
    brokers = Brokers(leader, member)
    brokers.run(5.0)
    assert member.formation.leader == "leader"
    for _ in range(200):
        brokers.run(0.5)
        for _ in range(20):
            member.beside.arrived(False, "")
        for _ in range(15):
            leader.beside.arrived(True, "")
    # 20 of 35 are for nobody: the threshold falls below what keeps the member.
    assert leader.reports > 5
    assert leader.thresholds.join_ms < 10.0
    assert member.formation.leads


def test_a_member_has_its_leaders_threshold() -> None:
    leader, member = Broker("leader", 2.0), Broker("member", 1.0)
    brokers = Brokers(leader, member)
    brokers.run(5.0)
    for _ in range(600):
        brokers.run(0.5)
        for _ in range(20):
            leader.beside.published()
    assert leader.thresholds.join_ms > 15.0
    assert member.formation.leader == "leader"
    assert member.thresholds.join_ms == pytest.approx(member.formation.view.join_ms)
    assert member.formation.view.join_ms == pytest.approx(leader.thresholds.join_ms)


def test_reports_of_strangers_do_not_count() -> None:
    leader = Broker("leader", 2.0)
    for second in range(0, 1_000, 5):
        leader.beside.reported("stranger", Report(0, 1_000_000), float(second))
    assert leader.thresholds.join_ms == 10.0
    assert math.isnan(leader.thresholds.excess)  # type: ignore[attr-defined]


def test_nothing_is_reported_of_nothing() -> None:
    leader, member = Broker("leader", 2.0), Broker("member", 1.0)
    brokers = Brokers(leader, member)
    brokers.run(60.0)
    assert leader.reports == 0


def test_without_either_rule_nothing_is_due() -> None:
    broker = Broker("leader", 2.0, adaptive=False)
    assert broker.beside.next_deadline() == math.inf
    broker.beside.published()
    broker.beside.arrived(False, "")
    broker.beside.arrived(True, "other")
    broker.beside.tick(1_000.0)
    assert (broker.beside.correct, broker.beside.redundant) == (2, 1)
    assert broker.beside.take_outgoing() == []


def test_a_member_goes_where_its_messages_come_from() -> None:
    leader = Broker("leader", 3.0, adaptive=False)
    member = Broker("member", 1.0, adaptive=False, flow_aware=True)
    brokers = Brokers(leader, member)
    brokers.run(5.0)
    assert member.formation.leader == "leader"
    brokers.brokers["other"] = other = Broker("other", 2.0, adaptive=False)
    other.formation._neighbours = Far()
    for _ in range(3 * flows.PERIODS * int(flows.PERIOD_S)):
        brokers.run(1.0)
        for _ in range(20):
            member.beside.arrived(True, "other" if member.formation.leader == "leader" else "")
    assert member.formation.leader == "other"
    assert member.flows is not None
    assert member.flows.changes == 1
    assert sorted(other.formation.view.members) == ["member", "other"]
    assert sorted(leader.formation.view.members) == ["leader"]


class Known:
    """What a member, or its leader, knows of others: one leader, ``other``, of which the former has to be told."""

    def __init__(self, threshold_ms: float, announced: bool) -> None:
        self.threshold_ms = threshold_ms
        self.announced = announced
        self.learned: list[tuple[str, str, str]] = []

    def latency_ms(self, name: str) -> float:
        return 3.0 if self.learned else math.inf

    def announced_place(self, name: str) -> tuple[str, str, float] | None:
        return ("other:1884", "other:7", self.threshold_ms) if self.announced and name == "other" else None

    def learn(self, name: str, address: str, probe_address: str, now: float) -> None:
        self.learned.append((name, address, probe_address))


@pytest.mark.parametrize(("threshold_ms", "announced", "goes"), [(10.0, True, True), (3.0, True, False), (10.0, False, False)])
def test_a_member_asks_its_leader_where_another_one_is_and_goes_where_it_can_stay(
    threshold_ms: float, announced: bool, goes: bool
) -> None:
    leader = Broker("leader", 3.0, adaptive=False)
    leader.beside.surroundings = Known(threshold_ms, announced)
    member = Broker("member", 1.0, adaptive=False, flow_aware=True)
    member.beside.surroundings = told = Known(threshold_ms, announced=False)
    brokers = Brokers(leader, member)
    brokers.run(5.0)
    brokers.brokers["other"] = other = Broker("other", 2.0, adaptive=False)
    other.formation._neighbours = Far()
    for _ in range(4 * flows.PERIODS * int(flows.PERIOD_S)):
        brokers.run(1.0)
        for _ in range(20):
            member.beside.arrived(True, "other" if member.formation.leader == "leader" else "")
    assert member.formation.leader == ("other" if goes else "leader")
    assert set(told.learned) == ({("other", "other:1884", "other:7")} if announced else set())


def test_only_our_own_leader_finds_and_only_for_its_members() -> None:
    leader, member = Broker("leader", 3.0, adaptive=False), Broker("member", 1.0, adaptive=False, flow_aware=True)
    leader.beside.surroundings = Known(10.0, announced=True)
    member.beside.surroundings = told = Known(10.0, announced=False)
    brokers = Brokers(leader, member)
    brokers.run(5.0)
    leader.beside.handle("stranger", Seek("other"), brokers.now)
    leader.beside.handle("member", Seek("nobody"), brokers.now)
    assert leader.beside.take_outgoing() == []
    member.beside.handle("stranger", Found("other", "other:1884", "", 10.0), brokers.now)
    assert told.learned == []
    for message in (Seek("other"), Found("other", "a:1", "b:2", 5.0)):
        again = Message.decode(message.encode())
        assert type(again) is type(message)
        assert vars_of(again) == vars_of(message)


def vars_of(message: Message) -> list[object]:
    names = ("leader", "address", "probe_address", "threshold_ms")
    return [getattr(message, name, None) for name in names]


class Far(Near):
    """Nobody is near."""

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        return ""


def test_a_report_counts_from_zero() -> None:
    assert adaptation.REPORT_S > 0.0
    with pytest.raises(ValueError, match="no message about groups"):
        Message.decode(Report(-1, 0).encode())
    report = Message.decode(Report(3, 4).encode())
    assert isinstance(report, Report)
    assert (report.correct, report.redundant) == (3, 4)

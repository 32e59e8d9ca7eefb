"""The built-in protocol ``groups``: brokers that organise themselves into broadcast groups, with the code that is shipped.

Every host of the topology is a broker with a :class:`~nearcast.groups.formation.Formation`; one may be the cloud. Messages of
the formation travel through the simulated network; announcements and latencies are known as
:mod:`nearcast.simulation.group_knowledge` says. No message of a client is sent: who is in which group is all this is about,
and the protocol ``fabric`` has the rest. The paper's conditions for the end of group formation (Hasenburg et al., section
II-C) must hold whenever nothing changes any more, and in the end; and all brokers of a group must have the same view of it.
A run ends when they do. Settings:

``threshold_ms``, ``leave_threshold_ms``
    As in a broker's configuration (5, and a quarter above it).
``lcm``
    Leadership capability measures: a table by host, or a list in the order of the hosts. Others have 1.
``cloud``
    The host that announcements go through, which is no broker. Without one they take ``announce_delay_s`` (0.1).
``announce_interval_s``
    How often a leader announces itself (0.5): who has not been heard for three of them, or 2 s, leads no more.
``measure_s``
    How long after the first announcement of a leader its latency is known (1).
``start_spread_s``
    Brokers start within so many seconds of each other (1).
``detect_s``
    How long links and pings take to tell that a broker is gone (3).
``quiet_s``, ``stuck_s``
    Without any change for ``quiet_s`` (5) groups are looked at; if the conditions do not hold for ``stuck_s`` (30) without any
    change, or not in the end, that is a violation.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np

from nearcast.errors import ConfigError
from nearcast.groups.formation import Formation
from nearcast.groups.messages import Message, Welcome
from nearcast.groups.settings import FormationSettings
from nearcast.groups.thresholds import Thresholds
from nearcast.groups.views import Member, View
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.timeline import timeline
from nearcast.simulation.group_failures import Detector
from nearcast.simulation.group_invariants import Termination
from nearcast.simulation.group_knowledge import Board, Floats, Known, Surroundings, address_of, stays, unit_vectors
from nearcast.simulation.hosts import Host, Node
from nearcast.simulation.invariants import Invariant, Protocol
from nearcast.simulation.world import World

LEAST_EXPIRY_S = 2.0


class GroupSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    threshold_ms: float = 5.0
    leave_threshold_ms: float | None = None
    lcm: dict[str, float] | list[float] = {}
    cloud: str | None = None
    announce_delay_s: float = 0.1
    announce_interval_s: float = 0.5
    measure_s: float = 1.0
    start_spread_s: float = 1.0
    detect_s: float = 3.0
    quiet_s: float = 5.0
    stuck_s: float = 30.0

    def __post_init__(self) -> None:
        for field in ("threshold_ms", "announce_delay_s", "announce_interval_s", "measure_s", "start_spread_s", "detect_s"):
            if not 0.0 <= getattr(self, field) <= 1e9:
                raise ValueError(f"`{field}` must be 0 or more, and at most a billion")
        if self.leave_threshold_ms is not None and not self.threshold_ms <= self.leave_threshold_ms <= 1e9:
            raise ValueError("`leave_threshold_ms` must not be below `threshold_ms`")
        for field in ("quiet_s", "stuck_s"):
            if not 0.0 < getattr(self, field) <= 1e6:
                raise ValueError(f"`{field}` must be above 0, and at most a million")


class Membership(msgspec.Struct, frozen=True):
    """What a broker tells in the end."""

    broker: str
    leader: str
    members: int
    """Of its group, as it knows it."""


class GroupNode(Node):
    """A broker, as far as groups are concerned."""

    def __init__(self, host: Host, groups: Groups) -> None:
        super().__init__(host)
        self._groups = groups
        self.formation = groups.formation_of(host)

    @property
    def leads(self) -> bool:
        return self.formation.leads

    def start(self) -> None:
        self._groups.changed(self)
        self._act()

    def received(self, source: int, message: object) -> None:
        if isinstance(message, Message):
            self.formation.handle(self._groups.surroundings.names[source], message, self.host.now)
            self._act()

    def woken(self) -> None:
        self.formation.tick(self.host.now)
        self._act()

    def lost(self, other: int) -> None:
        """There is no way to this broker any more."""
        self.formation.lost(self._groups.surroundings.names[other], self.host.now)
        self._act()

    def partners(self) -> Iterable[int]:
        """Whom it has a link to: its leader, or its members."""
        numbers = self._groups.surroundings.numbers
        formation = self.formation
        names = formation.view.members if formation.leads else (formation.leader,)
        return [numbers[name] for name in names if name != formation.name and name in numbers]

    def stop(self) -> None:
        formation = self.formation
        self.host.observe(Membership(self.host.name, formation.leader, len(formation.view.members)))

    def _act(self) -> None:
        formation, host, groups = self.formation, self.host, self._groups
        for receiver, message in formation.take_outgoing():
            groups.sent += 1
            number = groups.surroundings.numbers.get(receiver)
            if number is not None:
                host.send(number, message, groups.size_of(message))
        changes = formation.take_changes()
        if changes:
            groups.changed(self)
        host.wake_at(formation.next_deadline())


class Groups(Protocol):
    """Brokers that form groups."""

    board: Board
    surroundings: Surroundings

    def __init__(self) -> None:
        self.settings = GroupSettings()
        self.sent = 0
        self.changed_s = 0.0
        """When somebody last had another leader."""
        self.viewed_s = 0.0
        """When somebody last heard of another group."""
        self.formations: list[Formation] = []
        """All that there ever were: a broker that starts again makes another."""
        self._world: World | None = None
        self._lcm: dict[str, float] = {}
        self._leaders: dict[int, str] = {}
        self._brokers: list[Host] = []
        self._cloud: int | None = None
        self._termination: Termination | None = None
        self._entry_bytes = 0.0
        self._last_sized: Message | None = None
        self._last_size = 0

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        settings = self.settings = _settings(scenario)
        names = [host.name for host in world.hosts]
        if settings.cloud is not None and settings.cloud not in names:
            raise ConfigError(f"`settings.cloud`: there is no host {settings.cloud}", key="settings.cloud")
        self._world = world
        self._lcm = _lcm(settings, [name for name in names if name != settings.cloud])
        self._brokers = [host for host in world.hosts if host.name != settings.cloud]
        if not self._brokers:
            raise ConfigError("the protocol groups needs a topology with at least one host beside the cloud")
        everybody = {host.name: Member(host.name, address_of(host.name), 1_000) for host in self._brokers}
        whole = Welcome(1, View(self._brokers[0].name, 1, 0.0, 0.0, everybody))
        self._entry_bytes = len(whole.encode()) / len(everybody)
        self._cloud = None if settings.cloud is None else names.index(settings.cloud)
        events = timeline(scenario, world.seed)
        eventful = bool(events)
        self.surroundings = Surroundings(world.network, names, steady=not eventful and stays(scenario))
        self.board = Board(self._delays_s(world), unit_vectors(scenario, settings.cloud))
        rng = random.Random(f"{world.seed}/starts")
        for host in self._brokers:
            world.place(host.name, lambda host: GroupNode(host, self), rng.random() * settings.start_spread_s)
        if self._cloud is not None:
            world.place(world.hosts[self._cloud].name, Node)
        if eventful:
            expire_s = max(LEAST_EXPIRY_S, 3.0 * settings.announce_interval_s)
            detector = Detector(
                world,
                self.board,
                self.surroundings,
                self._running,
                self.reaches_cloud,
                detect_s=settings.detect_s,
                expire_s=expire_s,
            )
            detector.begin()
        last_event_s = max((_end_s(event) for event in events), default=0.0)
        self._termination = Termination(
            self,
            world,
            quiet_s=settings.quiet_s,
            stuck_s=settings.stuck_s,
            last_event_s=max(last_event_s, settings.start_spread_s),
        )
        return [self._termination]

    def formation_of(self, host: Host) -> Formation:
        """A new one, for a broker that starts."""
        settings = self.settings
        cloud = None if self.surroundings.steady else self._cloud
        known = Known(host.index, self.board, self.surroundings, host.world, settings.measure_s, cloud)
        leave_ms = 1.25 * settings.threshold_ms if settings.leave_threshold_ms is None else settings.leave_threshold_ms
        formation = Formation(
            host.name,
            address_of(host.name),
            FormationSettings(),
            known,
            Thresholds(settings.threshold_ms, leave_ms),
            self._lcm.get(host.name, 1.0),
            host.rng,
            host.now,
        )
        self.formations.append(formation)
        return formation

    def changed(self, node: GroupNode) -> None:
        """A broker has started, has another leader, or its group other members."""
        now = node.host.world.now
        number = node.host.index
        leader = node.formation.leader
        if self._leaders.get(number) != leader:
            self._leaders[number] = leader
            self.changed_s = now
            if not node.leads:
                self.board.withdraw(number, now)
            elif self.surroundings.steady or self.reaches_cloud(number):
                self.board.post(number, now)
        self.viewed_s = now

    def reaches_cloud(self, number: int) -> bool:
        """Whether what it announces gets there."""
        return self._cloud is None or self.surroundings.latency_ms(number, self._cloud) < math.inf

    def size_of(self, message: Message) -> int:
        """Bytes on the wire; leaders send one message to many, so the last one's is remembered. A Welcome holds the whole
        group, and is the one that goes to one only: with a mean length for each of its members it is known to 1 % or so."""
        if isinstance(message, Welcome):
            return int(len(message.view.members) * self._entry_bytes)
        if message is not self._last_sized:
            self._last_sized = message
            self._last_size = len(message.encode())
        return self._last_size

    def running(self) -> list[Formation]:
        return [node.formation for node in self._running().values()]

    def done(self) -> bool:
        return self._termination is not None and self._termination.is_over

    def report(self) -> dict[str, Any]:
        if self._world is None:
            return {}
        sizes = sorted(len(formation.view.members) for formation in self.running() if formation.leads)
        made = self.formations
        leader_joins = sum(formation.leader_joins for formation in made)
        member_joins = sum(formation.member_joins for formation in made)
        notifications = sum(formation.notifications for formation in made)
        return {
            "brokers": len(self._brokers),
            "groups": len(sizes),
            "largest_group": sizes[-1] if sizes else 0,
            "median_group": sizes[len(sizes) // 2] if sizes else 0,
            "stable": self._termination is not None and self._termination.holds,
            "stable_s": round(self.changed_s, 3),
            "views_s": round(self.viewed_s, 3),
            "leader_joins": leader_joins,
            "member_joins": member_joins,
            "notifications": notifications,
            **{name: sum(getattr(formation, name) for formation in made) for name in ("asks", "refusals", "leaves", "splits")},
            "paper_messages": 3 * leader_joins + notifications + member_joins,
            "messages": self.sent,
            "megabytes": round(float(self._world.network.bytes) / 1e6, 3),
        }

    def _running(self) -> dict[int, GroupNode]:
        return {host.index: node for host in self._brokers if host.running and isinstance(node := host.node, GroupNode)}

    def _delays_s(self, world: World) -> Floats:
        if self._cloud is None:
            return np.full(len(world.hosts), self.settings.announce_delay_s / 2.0)
        return np.array([self.surroundings.latency_ms(host.index, self._cloud) / 1000.0 for host in world.hosts])


def _settings(scenario: Scenario) -> GroupSettings:
    try:
        return msgspec.convert(scenario.settings, GroupSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`settings` of protocol groups: {error}", key="settings") from None


def _lcm(settings: GroupSettings, brokers: list[str]) -> dict[str, float]:
    given = settings.lcm
    if isinstance(given, list):
        if len(given) != len(brokers):
            raise ConfigError(f"`settings.lcm` has {len(given)} numbers for {len(brokers)} brokers", key="settings.lcm")
        given = dict(zip(brokers, given, strict=True))
    known = set(brokers)
    for name, value in given.items():
        if name not in known:
            raise ConfigError(f"`settings.lcm`: there is no broker {name}", key="settings.lcm")
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"`settings.lcm` of {name} must be 0 or more", key="settings.lcm")
    return given


def _end_s(event: Any) -> float:
    """When the last of an event's consequences comes."""
    return float(event.at_s + (getattr(event, "for_s", None) or 0.0) + (getattr(event, "restart_after_s", None) or 0.0))

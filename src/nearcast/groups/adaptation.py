"""The rules past the paper that a broker may follow, each switchable: its group's own threshold, and going where its messages
come from.

Sits beside a broker's :class:`~nearcast.groups.formation.Formation`: whoever disseminates messages counts them here, this has
members report to their leader, has the leader's thresholds follow the sum
(:class:`~nearcast.groups.thresholds.AdaptiveThresholds`), and has the formation go over to another leader when
:class:`~nearcast.groups.flows.Flows` says so. The paper's definitions hold: a message is *correct* at a broker that has a
subscriber for it or whose client published it, and *redundant* at any other.
"""

from __future__ import annotations

import math
import random
from typing import Final, Protocol

from nearcast.groups.flows import Flows
from nearcast.groups.formation import Formation
from nearcast.groups.messages import Found, Message, Report, Seek
from nearcast.groups.thresholds import Thresholds

FOREVER: Final = math.inf

REPORT_S: Final = 5.0
"""How often counts are added up and members report."""

FOUND_FOR_S: Final = 12.0
"""How long what our leader said of another one is believed: until after the next look, which finds it measured."""

MAX_COUNT: Final = 1 << 48
"""More messages than this in a report are somebody's mistake."""


class Surroundings(Protocol):
    """What is known of other leaders (:class:`~nearcast.groups.latencies.Latencies`)."""

    def latency_ms(self, name: str) -> float: ...
    def announced_place(self, name: str) -> tuple[str, str, float] | None: ...
    def learn(self, name: str, address: str, probe_address: str, now: float) -> None: ...


class Adaptation:
    """See the module. ``flows``: none without flow-aware membership. What it wants to be sent comes from :meth:`take_outgoing`
    and is sent like the formation's; Reports, Seeks and Founds that arrive go to :meth:`handle`."""

    def __init__(
        self,
        formation: Formation,
        thresholds: Thresholds,
        flows: Flows | None,
        *,
        adaptive: bool,
        rng: random.Random,
        now: float,
    ) -> None:
        self.surroundings: Surroundings | None = None
        """Who knows other leaders, and measures them. Without it every leader is taken to be where the formation knows."""
        self.flows = flows
        self.adaptive = adaptive
        self.correct = 0
        """Broadcast messages since the start that somebody here wanted or published,"""
        self.redundant = 0
        """and that nobody did."""
        self._formation = formation
        self._thresholds = thresholds
        self._told_correct = 0
        self._told_redundant = 0
        self._outgoing: list[tuple[str, Message]] = []
        self._leader = formation.name
        self._group: set[str] = {formation.name}
        # The leader that ours found for us last, when, and the threshold that it announced.
        self._found = ""
        self._found_at = -FOREVER
        self._found_threshold_ms = 0.0
        self._due_at = now + REPORT_S * rng.random() if adaptive or flows is not None else FOREVER

    # --- what whoever disseminates says ---------------------------------------------------------------------------------

    def published(self, messages: int = 1) -> None:
        """A client of this broker published messages."""
        self.correct += messages

    def arrived(self, wanted: bool, relayed_by: str, messages: int = 1) -> None:
        """Messages of another broker came, for the first time; ``relayed_by``: the leader that brought it to the cloud, empty
        if it was flooded in the group."""
        if not wanted:
            self.redundant += messages
            return
        self.correct += messages
        if self.flows is not None:
            self.flows.relevant(relayed_by, messages)

    # --- what the driver says -------------------------------------------------------------------------------------------

    def regrouped(self, now: float) -> None:
        """The formation had changes."""
        formation = self._formation
        leader = formation.leader
        if self.flows is not None and leader != self._leader:
            self.flows.belongs_to(leader, now)
        if self.adaptive:
            group = set(formation.view.members)
            if leader != formation.name:
                self._thresholds.followed(formation.view.join_ms, now)
            elif group != self._group or leader != self._leader:
                self._thresholds.regrouped(now)
            self._group = group
            if leader != self._leader:
                # What came before belongs to the former group.
                self._told_correct, self._told_redundant = self.correct, self.redundant
        self._leader = leader

    def handle(self, sender: str, message: Message, now: float) -> None:
        """A Report, Seek or Found arrived."""
        formation, surroundings = self._formation, self.surroundings
        if isinstance(message, Report):
            self.reported(sender, message, now)
        elif isinstance(message, Seek):
            place = None if surroundings is None else surroundings.announced_place(message.leader)
            if place is not None and formation.leads and sender in formation.view.members:
                self._outgoing.append((sender, Found(message.leader, place[0], place[1], place[2])))
        elif isinstance(message, Found) and sender == formation.leader and surroundings is not None:
            self._found, self._found_at, self._found_threshold_ms = message.leader, now, message.threshold_ms
            surroundings.learn(message.leader, message.address, message.probe_address, now)
            surroundings.latency_ms(message.leader)  # being asked is a reason to measure it

    def reported(self, sender: str, report: Report, now: float) -> None:
        """A member says what came there."""
        formation = self._formation
        if self.adaptive and formation.leads and sender in formation.view.members:
            self._thresholds.observed(min(report.correct, MAX_COUNT), min(report.redundant, MAX_COUNT), now)

    def tick(self, now: float) -> None:
        """Time passed."""
        if now < self._due_at:
            return
        self._due_at = now + REPORT_S
        formation = self._formation
        if self.adaptive:
            correct, redundant = self.correct - self._told_correct, self.redundant - self._told_redundant
            self._told_correct, self._told_redundant = self.correct, self.redundant
            if formation.leads:
                self._thresholds.observed(correct, redundant, now)
            elif correct or redundant:
                self._outgoing.append((formation.leader, Report(correct, redundant)))
        if self.flows is not None and not formation.leads:
            leader = self.flows.preferred(now)
            if leader and self._is_welcome(leader, now):
                formation.join(leader, now)

    def _is_welcome(self, leader: str, now: float) -> bool:
        """Whether another leader is known to lead, and to be nearer than its own threshold: else we would leave it again at
        once. A member hears no announcements; its leader does, and is asked."""
        surroundings = self.surroundings
        if surroundings is None:
            return True
        if leader == self._found and now - self._found_at < FOUND_FOR_S:
            return surroundings.latency_ms(leader) < self._found_threshold_ms
        self._outgoing.append((self._formation.leader, Seek(leader)))
        return False

    def next_deadline(self) -> float:
        """When :meth:`tick` is needed next."""
        return self._due_at

    def take_outgoing(self) -> list[tuple[str, Message]]:
        """What is to be sent to whom."""
        taken, self._outgoing = self._outgoing, []
        return taken

"""Where a broker stands among others: whether it leads or follows, what it is in the middle of, and what it has to say.

The state behind :class:`~nearcast.groups.formation.Formation`, and what others read of it. What moves it is there.
"""

from __future__ import annotations

import random

from nearcast.groups import views
from nearcast.groups.avoidance import Avoidance
from nearcast.groups.changes import Change
from nearcast.groups.memberships import Membership
from nearcast.groups.messages import Message
from nearcast.groups.neighbours import Neighbours
from nearcast.groups.rosters import Roster
from nearcast.groups.settings import FormationSettings
from nearcast.groups.steps import MEASURING, Step
from nearcast.groups.thresholds import Thresholds
from nearcast.groups.views import Member, View


class Standing:
    """See the module."""

    def __init__(
        self,
        name: str,
        address: str,
        settings: FormationSettings,
        neighbours: Neighbours,
        thresholds: Thresholds,
        lcm: float,
        rng: random.Random,
        now: float,
    ) -> None:
        self.name = name
        self.address = address
        self.probe_address = ""
        """Where this broker answers probes, if not where it takes links. Like ``lcm`` it may be set at any time."""
        self.lcm = lcm
        self.retired = False
        """Whether it is about to stop, and nobody is to follow it any more."""
        self.asks = 0
        """Mergers proposed."""
        self.leader_joins = 0
        """Times it gave up leading for another."""
        self.member_joins = 0
        """Times it went from one leader to another."""
        self.notifications = 0
        """Members told so when it gave up leading."""
        self.refusals = 0
        """Mergers and joins that came to nothing."""
        self.leaves = 0
        """Times its leader was too far, or did not answer."""
        self.splits = 0
        """Times its leader followed another that was too far."""
        self.messages_sent = 0
        self._settings = settings
        self._neighbours = neighbours
        self._thresholds = thresholds
        self._rng = rng
        self._outgoing: list[tuple[str, Message]] = []
        self._changes: list[Change] = []
        self._number = rng.getrandbits(30)
        self._step = Step()
        # Leading, or what was left of it.
        self._roster = self._alone(1)
        self._ask_at = now + rng.random() * settings.ask_interval_s
        self._idle_s = settings.ask_interval_s
        self._avoidance = Avoidance(settings.retry_s)
        # Following; none while this broker leads.
        self._membership: Membership | None = None

    def begin(self, address: str, probe_address: str, version: int) -> None:
        """Where this broker is reached, as is known once its sockets are open, and a version above those of its earlier lives:
        messages that were flooded then may still be under way."""
        self.address = address
        self.probe_address = probe_address
        self._roster = self._alone(version)

    def _alone(self, version: int) -> Roster:
        leader = Member(self.name, self.address, version, self.probe_address)
        reign = self._rng.getrandbits(48) + 1
        return Roster(views.alone(leader, self._thresholds.join_ms, self._thresholds.leave_ms, reign), self._settings)

    @property
    def view(self) -> View:
        """The group this broker is in, as far as it knows."""
        membership = self._membership
        return self._roster.view if membership is None else membership.view

    @property
    def leader(self) -> str:
        """Who leads it: this broker itself, or another."""
        membership = self._membership
        return self.name if membership is None else membership.view.leader

    @property
    def leads(self) -> bool:
        return self._membership is None

    @property
    def number(self) -> int:
        """Of what was said last. A Leave with it does not count for whoever hears from us again."""
        return self._number

    @property
    def candidate(self) -> Member | None:
        """The leader that this broker is about to join, or thinks of joining, if there is one: it should be measured."""
        return self._step.target if self._step.kind >= MEASURING else None

    def place_of(self, name: str) -> Member:
        """Where a broker takes links and answers probes, as far as is known."""
        if self._step.is_with(name) and self._step.target.address:
            return self._step.target
        member = self.view.members.get(name)
        return member if member is not None else Member(name, self._neighbours.address(name), 0)

    def take_outgoing(self) -> list[tuple[str, Message]]:
        """What is to be sent to whom, in order."""
        if not self._outgoing:
            return []
        taken, self._outgoing = self._outgoing, []
        return taken

    def take_changes(self) -> list[Change]:
        """What happened since the last call, in order."""
        if not self._changes:
            return []
        taken, self._changes = self._changes, []
        return taken

    def _send(self, to: str, message: Message) -> None:
        self.messages_sent += 1
        self._outgoing.append((to, message))

"""Where topics belong, by what the controller knows: Algorithm 1 over telemetry, and why (ePulsar §3.3).

Making a plan takes a second or two for a hundred thousand topics, in which a controller should hear its nodes. So it is a
:class:`PlanJob`: everything it needs is taken along at once and never changed, and whoever drives the controller may run it
elsewhere (:attr:`TopicPlanner.elsewhere`). A plan that comes back late is checked against the directory like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import Final

from nearcast.fabric.directory import OwnerDirectory
from nearcast.fabric.owner_records import Owner
from nearcast.fabric.planning import Telemetry
from nearcast.fabric.roster import Roster
from nearcast.fabric.topic_rules import TopicRules
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.placement.deciding import Plan, decide
from nearcast.placement.explanations import Explanation, explain
from nearcast.placement.gathering import Held
from nearcast.placement.topics import Fleet, Topics

MANY_TOPICS: Final = 2_000
"""With fewer, a plan takes milliseconds and is made at once."""


_topic: Final = attrgetter("topic")


class PlanJob:
    """A plan to be made."""

    def __init__(self, make: Callable[[], Plan]) -> None:
        self._make = make
        self.plan: Plan | None = None

    def run(self) -> None:
        """Make it; in any thread."""
        self.plan = self._make()


class TopicPlanner:
    """See the module."""

    def __init__(self, settings: TopicSettings, directory: OwnerDirectory, roster: Roster) -> None:
        self.rules = TopicRules()
        self.telemetry = Telemetry()
        self.moved_at: dict[str, float] = {}
        """When topics changed hands, or failed to."""
        self.elsewhere: Callable[[PlanJob], None] | None = None
        """Runs a job without holding up anything else, and calls the manager's ``planned`` with it afterwards."""
        self._settings = settings
        self._directory = directory
        self._roster = roster

    def job(self, now: float) -> PlanJob | None:
        """A plan for all topics; none while no broker can get any."""
        fleet = self._fleet(now)
        if not len(self._directory) or not fleet.usable.any():
            return None
        owners = self._directory.owners()
        rows = self.telemetry.fresh_rows(now)
        return PlanJob(lambda: self._decide(rows.topics(fleet, self._held(owners), self.rules.bound_of), fleet, now))

    def _decide(self, topics: Topics, fleet: Fleet, now: float) -> Plan:
        return decide(topics, fleet, self._settings.placement, now)

    def places_for(self, topics: list[str], now: float) -> dict[str, str]:
        """Where topics go that cannot stay where they are; without those for which there is no broker."""
        if not topics:
            return {}
        fleet = self._fleet(now)
        found: dict[str, str] = {}
        if fleet.usable.any():
            known = [owner for owner in map(self._directory.find, topics) if owner is not None]
            plan = self._decide(self._topics(fleet, known, now), fleet, now)
            found = {move.topic: move.target for move in plan.moves if move.reason in ("gone", "leaving")}
        # Without coordinates: each to whoever has least.
        counts = {name: self._directory.count_of(name) for name in fleet.names if self._roster.may_own(name)}
        for topic in topics:
            if topic not in found and counts:
                found[topic] = min(counts, key=lambda name: (counts[name], name))
                counts[found[topic]] += 1
        return found

    def picture(self, owners: Iterable[Owner], now: float) -> Topics:
        """These topics as reports show them."""
        return self._topics(self._fleet(now), owners, now)

    def explain(self, owner: Owner, now: float) -> Explanation | None:
        """What there is to say of a topic now, whoever decides; nothing while no broker is placed."""
        fleet = self._fleet(now)
        if not fleet.usable.any():
            return None
        return explain(self._decide(self._topics(fleet, [owner], now), fleet, now), 0)

    def _topics(self, fleet: Fleet, owners: Iterable[Owner], now: float) -> Topics:
        held = self._held(owners)
        return self.telemetry.fresh_rows(now).picked(held).topics(fleet, held, self.rules.bound_of)

    def _fleet(self, now: float) -> Fleet:
        brokers = self._roster.brokers()
        leaving = {entry.name for entry in brokers if entry.shunned}
        unusable = {entry.name for entry in brokers if not self._roster.may_own(entry.name)}
        return self.telemetry.fleet([entry.name for entry in brokers], leaving, unusable, now)

    def _held(self, owners: Iterable[Owner]) -> dict[str, Held]:
        """By name: of topics that are alike, whoever plans takes the same ones."""
        moved_at = self.moved_at
        owners = sorted(owners, key=_topic)
        return {owner.topic: Held(owner.owner, owner.epoch, moved_at.get(owner.topic, 0.0)) for owner in owners}

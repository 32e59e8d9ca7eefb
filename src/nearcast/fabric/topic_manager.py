"""The controller's part in owned topics: who owns what, and who should (ePulsar's Topic Manager, §3.3 and §3.6).

It answers brokers that ask for an owner (:mod:`nearcast.fabric.owner_desk`), plans on telemetry
(:mod:`nearcast.fabric.topic_planner`) and orders migrations. No message ever waits for it but the first ones of a topic that
nobody owns yet, and those of a topic whose owner died.

::

    ask for a topic that nobody owns      the asker owns it from now on
    a plan (own, or somebody's)           MIGRATE to the owner, MIGRATED back; the directory follows
    a broker is drained, or stops         the same for each of its topics
    a broker dies                         its topics get other owners at once, and every broker is told
"""

from __future__ import annotations

import random
from typing import Final

from nearcast.errors import ConfigError
from nearcast.fabric import frames
from nearcast.fabric.control import ClassRules, pack, unpack
from nearcast.fabric.directory import OwnerDirectory
from nearcast.fabric.migrations import Migration, MigrationKind, Migrations
from nearcast.fabric.owner_desk import OwnerDesk
from nearcast.fabric.owner_records import Migrated, Owned, Owner, OwnersAsk
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.refusals import Refused
from nearcast.fabric.registry import Entry
from nearcast.fabric.roster import Roster
from nearcast.fabric.topic_planner import MANY_TOPICS, PlanJob, TopicPlanner
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.placement.deciding import Move, Plan
from nearcast.placement.explanations import Explanation, explain
from nearcast.placement.plans import PlannedMove, PlanRecord, decode_plan

LOOK_S: Final = 1.0
"""How often what could not be decided is looked at again: asks that wait for a broker, topics of a broker that is drained."""

MAX_PLANNED: Final = 1_000
"""Migrations that a plan may have waiting. Those behind them are decided anew when there is room, on newer knowledge."""

MAX_PLANNERS: Final = 1_000


class TopicManager:
    """See the module. ``entries`` are the controller's nodes, which it changes and this only looks at."""

    def __init__(
        self, settings: TopicSettings, entries: dict[str, Entry], wall_offset: float, rng: random.Random, now: float
    ) -> None:
        self.settings = settings
        self.directory = OwnerDirectory()
        self.roster = Roster(entries)
        self.migrations = Migrations(rng.getrandbits(31) + 1, settings.executors, settings.migration_timeout_s)
        self.planner = TopicPlanner(settings, self.directory, self.roster)
        self.telemetry = self.planner.telemetry
        self.rules = self.planner.rules
        settle_at = now + settings.settle_s
        self.desk = OwnerDesk(self.directory, self.roster, self.planner, self.migrations, wall_offset, settle_at)
        self.plan: Plan | None = None
        """The last one made here."""
        self.plans = 0
        self.plans_taken = 0
        self.plans_refused = 0
        self.last_plan: PlanRecord | None = None
        """The last one that somebody else made."""
        self.last_refusal = ""
        self.last_ordered = 0
        """Moves of the last plan taken that became migrations; the others' topics had moved on, or cannot go there."""
        self._wall_offset = wall_offset
        self._plan_numbers: dict[str, int] = {}
        self._news = False
        self._planning = False
        self._plan_at = now
        self._look_at = now + LOOK_S

    @property
    def settled(self) -> bool:
        """Whether all owners there are were heard of."""
        return self.desk.settled

    def wall(self, now: float) -> float:
        """Wall-clock seconds."""
        return now + self._wall_offset

    def use_rules(self, rules: ClassRules) -> None:
        """Topic classes changed."""
        self.rules.replace(rules)
        self._news = True

    # --- brokers --------------------------------------------------------------------------------------------------------

    def frame(self, entry: Entry, content: bytes, now: float) -> bool:
        """A frame about owned topics; false if it is of another kind."""
        kind = content[0]
        if kind == frames.TELEMETRY:
            if self.telemetry.take(entry.name, content, now):
                self._news = True
        elif kind == frames.OWNERS_ASK:
            self.desk.asked(entry, unpack(content, OwnersAsk), now)
        elif kind == frames.OWNED:
            self.desk.owned(entry, unpack(content, Owned), now)
            if entry.shunned:
                self._look_at = min(self._look_at, now)
        elif kind == frames.MIGRATED:
            self._migrated(entry, unpack(content, Migrated), now)
        elif kind == frames.PLAN:
            self._take_plan(content[1:], now)
        else:
            return False
        return True

    def registered(self, entry: Entry, now: float) -> None:
        """A broker's link is new: what was said on the one before may be lost. It says next what it owns."""
        self.desk.forget(entry.name)
        self.migrations.order_again(entry.name)
        self._news = True

    def reported(self, now: float) -> None:
        """A broker said whom it has links to."""
        self.desk.settle(now)

    def shunned(self, entry: Entry, now: float) -> None:
        """A broker is being emptied, or stops; or not any more."""
        if entry.shunned:
            self._evacuate(now)
            return
        for migration in self.migrations.of_broker(entry.name):
            if migration.kind == "draining" and migration.origin == entry.name and migration.state == "waiting":
                self.migrations.end(migration, "superseded", self.wall(now), "the drain was ended")

    def departed(self, entry: Entry, now: float) -> None:
        """A broker is dead, or has left."""
        self.telemetry.forget(entry.name)
        self.desk.forget(entry.name)
        self.desk.replace(entry.name, now)
        for migration in self.migrations.of_broker(entry.name):
            under_way = migration.state == "ordered"
            self.migrations.end(migration, "failed", self.wall(now), f"{entry.name} is gone")
            if under_way and migration.target == entry.name and self.roster.is_up(migration.origin):
                # Its owner may have let go of it for one that will never take it: it goes back to where everything of it is.
                known = self.directory.find(migration.topic)
                if known is not None and known.owner in (migration.origin, entry.name):
                    self.desk.give({migration.topic: migration.origin}, "gone", f"{entry.name} is gone", now)
        self.desk.settle(now)

    # --- what people ask for --------------------------------------------------------------------------------------------

    def owner_of(self, topic: str) -> Owner:
        """Who owns a topic; Refused if nobody does."""
        known = self.directory.find(topic)
        if known is not None:
            return known
        if not self.rules.is_owned(topic):
            raise Refused(f"{topic} is not owned: `nearcast topic create {topic} --class owned` makes it so", missing=True)
        raise Refused(f"nobody owns {topic} yet: nothing was published to it since it is of class owned", missing=True)

    def move(self, topic: str, target: str, now: float) -> Migration:
        """Move a topic by hand."""
        known = self.owner_of(topic)
        self.roster.check_target(target)
        if known.owner == target:
            raise Refused(f"{target} owns {topic} already")
        if self.roster.is_dead(known.owner):
            raise Refused(f"{known.owner}, which owns {topic}, is gone")
        migration = self._wanted(known, target, "manual", "asked for by hand", now)
        if not self.migrations.add(migration):
            pending = self.migrations.pending.get(topic)
            raise Refused(f"{topic} is on its way to {pending.target if pending is not None else target} already")
        self._order_due(now)
        return migration

    def explain(self, topic: str, now: float) -> Explanation | None:
        """What there is to say of where a topic is; nothing while no broker is placed."""
        return self.planner.explain(self.owner_of(topic), now)

    def words(self, explanation: Explanation | None) -> str:
        """The same in words."""
        if explanation is None:
            return "No broker has reported its coordinate and load yet, so nothing can be planned."
        text = explanation.text()
        if self.settings.planner == "own" or explanation.outcome != "moves":
            return text
        return f"{text} But the planner is {self.settings.planner!r}, so the controller does not move it by itself."

    # --- migrations -----------------------------------------------------------------------------------------------------

    def _wanted(self, known: Owner, target: str, kind: MigrationKind, reason: str, now: float) -> Migration:
        return Migration(
            topic=known.topic,
            epoch=known.epoch,
            origin=known.owner,
            target=target,
            kind=kind,
            reason=reason,
            workflow=self.settings.workflow,
            created_at=self.wall(now),
        )

    def _order_due(self, now: float) -> None:
        for migration in self.migrations.due(now, self.wall(now), self._can_order):
            known = self.directory.find(migration.topic)
            entry = self.roster.get(migration.origin)
            if known is None or known.owner != migration.origin or entry is None or not self.roster.may_own(migration.target):
                self.migrations.end(migration, "superseded", self.wall(now), "things have changed since it was decided")
                continue
            migration.epoch = known.epoch
            if migration.new_epoch <= known.epoch:
                migration.new_epoch = self.directory.next_epoch(self.wall(now), known.epoch)
            if entry.link is not None:
                entry.link.send(pack(frames.MIGRATE, migration.order()))

    def _can_order(self, migration: Migration) -> bool:
        entry = self.roster.get(migration.origin)
        return entry is None or not entry.usable or entry.link is not None

    def _migrated(self, entry: Entry, record: Migrated, now: float) -> None:
        migration = self.migrations.outcome(record, self.wall(now))
        self.planner.moved_at[record.topic] = now
        if migration is not None and migration.workflow == "release" and record.done:
            self.desk.released(migration)
        elif record.owner and record.epoch:
            held = self.directory.learn(Owner(record.topic, record.epoch, record.owner))
            if held.epoch > record.epoch:
                self.roster.tell(entry.name, [held])
            elif record.done:
                self.desk.in_charge(held)
        elif migration is not None and not record.done:
            # It knows nothing of the topic: so nobody has it, and the target may.
            known = self.directory.find(migration.topic)
            if known is not None and known.owner == entry.name and self.roster.may_own(migration.target):
                self.desk.give({migration.topic: migration.target}, migration.kind, migration.reason, now)
        self._order_due(now)

    def _evacuate(self, now: float) -> None:
        """Topics of brokers that are drained or stop go elsewhere."""
        for entry in self.roster.brokers():
            if not entry.shunned:
                continue
            topics = [topic for topic in self.directory.topics_of(entry.name) if topic not in self.migrations.pending]
            reason = f"{entry.name} is {'stopping' if entry.leaving else 'being drained'}"
            for topic, target in self.planner.places_for(topics, now).items():
                known = self.directory.find(topic)
                if known is not None and target != entry.name and now - self.planner.moved_at.get(topic, 0.0) > LOOK_S:
                    self.migrations.add(self._wanted(known, target, "draining", reason, now))
        self._order_due(now)

    # --- plans ----------------------------------------------------------------------------------------------------------

    def _make_plan(self, now: float) -> None:
        """Algorithm 1 over what is known; here, or elsewhere if it takes long."""
        self._news = False
        self._plan_at = now + self.settings.plan_interval_s
        job = self.planner.job(now)
        if job is None:
            return
        elsewhere = self.planner.elsewhere
        if elsewhere is not None and len(self.directory) >= MANY_TOPICS:
            self._planning = True
            elsewhere(job)
            return
        job.run()
        self.planned(job, now)

    def planned(self, job: PlanJob, now: float) -> None:
        """A plan is made: order what it says."""
        self._planning = False
        plan = job.plan
        if plan is None:
            return
        self.plan = plan
        self.plans += 1
        for move in plan.moves:
            if len(self.migrations.pending) >= MAX_PLANNED:
                break
            known = self.directory.find(move.topic)
            if known is None or known.epoch != move.epoch or move.reason not in ("latency", "overload"):
                continue  # owners that are gone or leave are replaced whoever plans
            if not self.roster.may_own(move.target):
                continue
            kind: MigrationKind = "overload" if move.reason == "overload" else "latency"
            migration = self._wanted(known, move.target, kind, _reason(plan, move), now)
            if self.migrations.add(migration):
                migration.explanation = explain(plan, move.row)
        self._order_due(now)

    def _take_plan(self, data: bytes, now: float) -> None:
        """Somebody's plan. It is carried out if the configuration says so, as far as the world is still as it was then."""
        try:
            record = decode_plan(data)
        except ConfigError as error:
            self.plans_refused += 1
            self.last_refusal = str(error)
            return
        if self.settings.planner != "spark":
            self.plans_refused += 1
            self.last_refusal = f"plans of others are not carried out: planner is {self.settings.planner!r}, not 'spark'"
            return
        if record.number <= self._plan_numbers.get(record.planner, -1):
            return  # it came over another broker as well
        if len(self._plan_numbers) >= MAX_PLANNERS:
            del self._plan_numbers[next(iter(self._plan_numbers))]
        self._plan_numbers[record.planner] = record.number
        self.plans_taken += 1
        self.last_plan = record
        self.last_ordered = sum(self._take_move(record.planner, move, now) for move in record.moves)
        self._order_due(now)

    def _take_move(self, planner: str, move: PlannedMove, now: float) -> bool:
        """One move of somebody's plan; whether it is made."""
        known = self.directory.find(move.topic)
        if known is None or known.owner == move.target or not self.roster.may_own(move.target):
            return False
        if move.epoch not in (0, known.epoch) or move.origin not in ("", known.owner):
            return False
        reason = f"{planner}: {move.reason or 'no reason given'}"
        return self.migrations.add(self._wanted(known, move.target, "plan", reason, now))

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for migration in self.migrations.expire(now, self.wall(now)):
            self.planner.moved_at[migration.topic] = now
        if now >= self.desk.settle_at:
            self.desk.settle(now)
        if self._plans and now >= self._plan_at:
            self._make_plan(now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self.desk.look(now)
            for name in self.roster.dead():
                self.desk.replace(name, now)
            self._evacuate(now)

    @property
    def _plans(self) -> bool:
        return self._news and not self._planning and self.settings.planner == "own"

    def next_deadline(self) -> float:
        deadline = min(self._look_at, self.migrations.next_deadline(), FOREVER if self.settled else self.desk.settle_at)
        return min(deadline, self._plan_at) if self._plans else deadline


def _reason(plan: Plan, move: Move) -> str:
    """Why a topic moves, in one line."""
    expected = f"at most {move.expected_ms:.1f} ms at {move.target}"
    if move.reason == "overload":
        return f"{move.origin} is overloaded; {expected}"
    return f"{move.worst_ms:.1f} ms, above its bound of {plan.topics.bound_ms[move.row]:g} ms; {expected}"

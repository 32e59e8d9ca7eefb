"""The controller's part in owned topics: who owns what, and who should (ePulsar's Topic Manager, §3.3 and §3.6).

It answers brokers that ask for an owner, keeps the directory, plans on telemetry, orders migrations and replaces owners that
died. No message ever waits for it but the first ones of a topic that nobody owns yet, and those of a topic whose owner died.

::

    ask for a topic that nobody owns      the asker owns it from now on
    a plan (own, or somebody's)           MIGRATE to the owner, MIGRATED back; the directory follows
    a broker is drained, or stops         the same for each of its topics
    a broker dies                         its topics get other owners at once, and every broker is told

A controller that has just started knows no owner, and must not make one while the real one is about to register: it waits
until every broker that any registered one has a link to has said what it owns, or ``settle_s``.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from nearcast.config import TopicRule
from nearcast.errors import ConfigError
from nearcast.fabric import frames
from nearcast.fabric.control import ClassRule, ClassRules, pack, unpack
from nearcast.fabric.directory import OwnerDirectory
from nearcast.fabric.directory_client import parts
from nearcast.fabric.migrations import Migration, MigrationKind, Migrations, Workflow
from nearcast.fabric.owner_records import Migrated, Owned, Owner, Owners, OwnersAsk
from nearcast.fabric.parts import FOREVER
from nearcast.fabric.planning import Telemetry
from nearcast.fabric.refusals import Refused
from nearcast.fabric.registry import Entry
from nearcast.placement.deciding import Move, Plan, decide
from nearcast.placement.explanations import Explanation, explain
from nearcast.placement.gathering import Held
from nearcast.placement.plans import PlanRecord, decode_plan
from nearcast.placement.topics import Fleet, PlacementSettings, Topics
from nearcast.topiclog.rules import RuleTable

OWNED_CLASS: Final = "owned"

LOOK_S: Final = 1.0
"""How often what could not be decided is looked at again: asks that wait for a broker, topics of a broker that is drained."""

HEARD_S: Final = 3.0
"""How long an owner may stay unheard of that a broker knows a later epoch from than the directory: it is about to say so."""

MAX_RULES_REMEMBERED: Final = 1_000_000
MAX_ASKS: Final = 1_000_000
MAX_EXPLAINED: Final = 1_000
"""Decisions of one plan that are kept in figures; beyond, each keeps its reason in words."""


class TopicSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a controller looks after owned topics."""

    planner: Literal["own", "spark", "none"] = "own"
    """Who decides where topics belong: the controller itself, from telemetry; "spark", whoever publishes plans on
    ``$nearcast/plan``; or "none". Owners that die or stop are replaced in any case, and a person may move topics."""

    executors: int = 16
    """Migrations under way at once. Too low takes long when many topics have to move; more than some dozens gains little, for
    the brokers do the work one after the other."""

    plan_interval_s: float = 1.0
    """Least seconds between plans. A plan is made when telemetry came, so the brokers' ``fabric.telemetry.interval_seconds``
    says how often that is."""

    migration_timeout_s: float = 30.0
    """How long an owner may say nothing of a migration before it counts as failed."""

    settle_s: float = 10.0
    """How long a controller that was just started waits for brokers that others know, before it makes new owners."""

    workflow: Workflow = "handover"
    """How topics change hands. "release" is the baseline of ePulsar's figure 7, for comparison only."""

    placement: PlacementSettings = PlacementSettings()

    def __post_init__(self) -> None:
        for name, least, most in (
            ("executors", 1, 10_000),
            ("plan_interval_s", 0.01, 3_600),
            ("migration_timeout_s", 0.1, 3_600),
            ("settle_s", 0, 3_600),
        ):
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"`{name}` must be between {least:g} and {most:,}")


class TopicManager:
    """See the module. ``entries`` are the controller's nodes, which it changes and this only looks at."""

    def __init__(
        self, settings: TopicSettings, entries: dict[str, Entry], wall_offset: float, rng: random.Random, now: float
    ) -> None:
        self.settings = settings
        self.directory = OwnerDirectory()
        self.telemetry = Telemetry()
        self.migrations = Migrations(rng.getrandbits(31) + 1, settings.executors, settings.migration_timeout_s)
        self.plan: Plan | None = None
        """The last one made here."""
        self.planned_at = 0.0
        self.plans = 0
        self.failovers = 0
        self.plans_taken = 0
        self.plans_refused = 0
        self.last_plan: PlanRecord | None = None
        """The last one that somebody else made."""
        self.last_refusal = ""
        self.settled = False
        self.moved_at: dict[str, float] = {}
        self._entries = entries
        self._wall_offset = wall_offset
        self._rules = ClassRules()
        self._table = RuleTable()
        self._rule_of: dict[str, ClassRule | None] = {}
        self._settle_at = now + settings.settle_s
        self._claimed: dict[str, set[str]] = {}
        self._told_all: set[str] = set()
        self._asks: dict[str, dict[str, tuple[int, float]]] = {}
        self._plan_numbers: dict[str, int] = {}
        self._news = False
        self._plan_at = now
        self._look_at = now + LOOK_S

    def wall(self, now: float) -> float:
        """Wall-clock seconds."""
        return now + self._wall_offset

    # --- rules ----------------------------------------------------------------------------------------------------------

    def use_rules(self, rules: ClassRules) -> None:
        """Topic classes changed."""
        self._rules = rules
        self._table = RuleTable([TopicRule(topic=rule.topic_filter) for rule in rules.rules])
        self._rule_of.clear()
        self._news = True

    def rule_of(self, topic: str) -> ClassRule | None:
        """The rule that decides the class of a topic."""
        try:
            return self._rule_of[topic]
        except KeyError:
            found = self._table.match(topic.encode("utf-8"))
            rule = None
            if found is not None:
                rule = next((rule for rule in self._rules.rules if rule.topic_filter == found.topic), None)
            if len(self._rule_of) >= MAX_RULES_REMEMBERED:
                self._rule_of.clear()
            self._rule_of[topic] = rule
            return rule

    def bound_of(self, topic: str) -> float:
        """The latency bound of a topic, in milliseconds; 0: none."""
        rule = self.rule_of(topic)
        return rule.max_latency_ms if rule is not None and rule.topic_class == OWNED_CLASS else 0.0

    # --- brokers --------------------------------------------------------------------------------------------------------

    def frame(self, entry: Entry, content: bytes, now: float) -> bool:
        """A frame about owned topics; false if it is of another kind."""
        kind = content[0]
        if kind == frames.TELEMETRY:
            if self.telemetry.take(entry.name, content, now):
                self._news = True
        elif kind == frames.OWNERS_ASK:
            self._asked(entry, unpack(content, OwnersAsk), now)
        elif kind == frames.OWNED:
            self._owned(entry, unpack(content, Owned), now)
        elif kind == frames.MIGRATED:
            self._migrated(entry, unpack(content, Migrated), now)
        elif kind == frames.PLAN:
            self._take_plan(content[1:], now)
        else:
            return False
        return True

    def registered(self, entry: Entry, now: float) -> None:
        """A broker's link is new: what was said on the one before may be lost. It says next what it owns."""
        self._told_all.discard(entry.name)
        self._claimed.pop(entry.name, None)
        self.migrations.order_again(entry.name)
        self._news = True

    def reported(self, now: float) -> None:
        """A broker said whom it has links to."""
        if not self.settled:
            self._settle(now)

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
        self._told_all.discard(entry.name)
        self._claimed.pop(entry.name, None)
        self._replace(entry.name, now)
        for migration in self.migrations.of_broker(entry.name):
            under_way = migration.state == "ordered"
            self.migrations.end(migration, "failed", self.wall(now), f"{entry.name} is gone")
            if under_way and migration.target == entry.name:
                # Its owner may have let go of it for one that will never take it: it goes back to where everything of it is.
                self._give({migration.topic: migration.origin}, "gone", f"{entry.name} is gone", now)
        if not self.settled:
            self._settle(now)

    def _is_up(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.is_broker and entry.usable

    def _may_own(self, name: str) -> bool:
        entry = self._entries.get(name)
        return entry is not None and entry.is_broker and entry.usable and not entry.shunned and entry.link is not None

    def _is_dead(self, name: str) -> bool:
        """Whether a broker is known to be gone; one that never registered here may be there."""
        entry = self._entries.get(name)
        return entry is not None and not entry.usable

    def _fleet(self, now: float) -> Fleet:
        brokers = [entry for entry in self._entries.values() if entry.is_broker and entry.usable]
        leaving = {entry.name for entry in brokers if entry.shunned}
        unusable = {entry.name for entry in brokers if not self._may_own(entry.name)}
        return self.telemetry.fleet([entry.name for entry in brokers], leaving, unusable, now)

    def _held(self, owners: Iterable[Owner]) -> dict[str, Held]:
        moved_at = self.moved_at
        return {owner.topic: Held(owner.owner, owner.epoch, moved_at.get(owner.topic, 0.0)) for owner in owners}

    # --- the directory --------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Whether all brokers that there seem to be have said what they own."""
        brokers = [entry for entry in self._entries.values() if entry.is_broker and entry.usable]
        if now < self._settle_at:
            names = {entry.name for entry in brokers}
            for entry in brokers:
                if entry.name not in self._told_all or not entry.report_at or not names.issuperset(entry.links):
                    return
            if not brokers:
                return
        self.settled = True
        self._ask_again(now)

    def _ask_again(self, now: float) -> None:
        """Answer what had to wait."""
        asks, self._asks = self._asks, {}
        for topic, askers in asks.items():
            for name, (epoch, since) in askers.items():
                entry = self._entries.get(name)
                if entry is not None and entry.link is not None:
                    self._send(entry, self._answer(entry, topic, epoch, since, now))

    def _asked(self, entry: Entry, ask: OwnersAsk, now: float) -> None:
        answers: list[Owner] = []
        for topic, epoch in ask.topics:
            waiting = self._asks.get(topic)
            since = now if waiting is None or entry.name not in waiting else waiting[entry.name][1]
            answers += self._answer(entry, topic, epoch, since, now)
        self._send(entry, answers)

    def _answer(self, entry: Entry, topic: str, epoch: int, since: float, now: float) -> list[Owner]:
        """Who owns a topic, for a broker that knows it up to ``epoch``. Nothing, if that has to wait."""
        known = self.directory.find(topic)
        if known is not None and known.epoch >= epoch and not self._is_dead(known.owner):
            return [known]
        pending = self.migrations.pending.get(topic)
        if pending is not None and pending.state == "ordered" and pending.new_epoch >= epoch and self._is_up(pending.target):
            return [Owner(topic, pending.new_epoch, pending.target)]
        patient = known is None or now - since >= HEARD_S or epoch <= known.epoch
        if not self.settled or not patient:
            if topic in self._asks or len(self._asks) < MAX_ASKS:
                self._asks.setdefault(topic, {})[entry.name] = (epoch, since)
            return []
        made = self._decide(topic, self._first_owner(entry), now, above=epoch)
        others = [name for name in self._asks.pop(topic, ()) if name != entry.name]
        for name in [*others, made.owner]:
            other = self._entries.get(name)
            if other is not None and other is not entry:
                self._send(other, [made])
        return [made]

    def _first_owner(self, asker: Entry) -> str:
        """Who gets a topic that nobody owns: whoever asks, for that is where it is used. One that is being emptied does not;
        then the nearest of the others does."""
        if self._may_own(asker.name):
            return asker.name
        others = [entry for entry in self._entries.values() if self._may_own(entry.name)]
        if not others:
            return asker.name
        far = float("inf")
        return min(others, key=lambda entry: (_latency_ms(asker, entry.name, far), entry.name)).name

    def _decide(self, topic: str, owner: str, now: float, *, above: int = 0) -> Owner:
        """A new owner by the controller's word alone."""
        known = self.directory.find(topic)
        held = 0 if known is None else known.epoch
        epoch = self.directory.next_epoch(self.wall(now), max(held, above))
        if held:
            self.moved_at[topic] = now
        return self.directory.compare_and_set(held, Owner(topic, epoch, owner, appointed=True))

    def _owned(self, entry: Entry, owned: Owned, now: float) -> None:
        """What a broker owns, by its own word."""
        truths: list[Owner] = []
        if owned.whole:
            self._claimed[entry.name] = set()
        listed = self._claimed.get(entry.name)
        for claim in owned.owners:
            if not claim.owner:
                # One that is on its way has an owner in a moment: nobody else must get it meanwhile.
                if claim.topic not in self.migrations.pending and self.directory.give_up(claim.topic, entry.name, claim.epoch):
                    self.moved_at.pop(claim.topic, None)
                continue
            if claim.owner != entry.name:
                # A broker speaks for itself; but who hands a topic over says to whom.
                before = self.directory.find(claim.topic)
                if before is not None and before.owner == entry.name and before.epoch < claim.epoch:
                    self.directory.learn(Owner(claim.topic, claim.epoch, claim.owner))
                    self.moved_at[claim.topic] = now
                continue
            if listed is not None:
                listed.add(claim.topic)
            held = self.directory.learn(claim)
            if held.owner and (held.epoch, held.owner) != (claim.epoch, claim.owner):
                truths.append(held)
            elif claim.topic in self._asks:
                for name in self._asks.pop(claim.topic):
                    other = self._entries.get(name)
                    if other is not None:
                        self._send(other, [held])
        self._send(entry, truths)
        if listed is not None and not owned.more:
            del self._claimed[entry.name]
            self._told_all.add(entry.name)
            self._reclaim(entry, listed, now)
            if not self.settled:
                self._settle(now)
        if entry.shunned:
            self._look_at = min(self._look_at, now)

    def _reclaim(self, entry: Entry, listed: set[str], now: float) -> None:
        """A broker was started again, or never heard that it owns some topics. It gets them (again): what is meant for them is
        on its way there. If one was on its way to another broker, that has it by now, or is to."""
        lost: dict[str, str] = {}
        for topic in self.directory.topics_of(entry.name):
            if topic not in listed:
                pending = self.migrations.pending.get(topic)
                moving = pending is not None and self._may_own(pending.target)
                lost[topic] = pending.target if pending is not None and moving else entry.name
                if pending is not None:
                    self.migrations.end(pending, "failed", self.wall(now), f"{entry.name} was started again")
        if lost:
            self._give(lost, "gone", f"{entry.name} was started again", now)

    def _give(self, owners: dict[str, str], kind: MigrationKind, reason: str, now: float) -> None:
        """New owners by the controller's word, told to all: whoever has messages for a topic must know."""
        news: list[Owner] = []
        wall = self.wall(now)
        for topic, target in owners.items():
            before = self.directory.find(topic)
            news.append(self._decide(topic, target, now))
            self._asks.pop(topic, None)
            self.failovers += 1
            self.migrations.note(
                Migration(
                    topic=topic,
                    epoch=0 if before is None else before.epoch,
                    new_epoch=news[-1].epoch,
                    origin="" if before is None else before.owner,
                    target=target,
                    kind=kind,
                    reason=reason,
                    created_at=wall,
                    ended_at=wall,
                )
            )
        for entry in self._entries.values():
            if entry.is_broker:
                self._send(entry, news)

    def _replace(self, dead: str, now: float) -> None:
        """New owners for the topics of a broker that is gone, at once."""
        topics = self.directory.topics_of(dead)
        if not topics:
            return
        owners: dict[str, str] = {}
        for topic in topics:
            pending = self.migrations.pending.get(topic)
            if pending is not None and pending.state == "ordered" and self._may_own(pending.target):
                owners[topic] = pending.target  # which may have it already
        rest = [topic for topic in topics if topic not in owners]
        owners |= self._places_for(rest, now)
        self._give(owners, "gone", f"{dead} is gone", now)

    def _places_for(self, topics: list[str], now: float) -> dict[str, str]:
        """Where topics belong that cannot stay where they are; without those for which there is no broker."""
        if not topics:
            return {}
        fleet = self._fleet(now)
        found: dict[str, str] = {}
        if fleet.usable.any():
            held = self._held(owner for owner in map(self.directory.find, topics) if owner is not None)
            arrays = self.telemetry.topics(fleet, held, self.bound_of, now, only=True)
            plan = decide(arrays, fleet, self.settings.placement, now)
            found = {move.topic: move.target for move in plan.moves if move.reason in ("gone", "leaving")}
        # Without coordinates: each to whoever has least.
        counts = {name: self.directory.count_of(name) for name in fleet.names if self._may_own(name)}
        for topic in topics:
            if topic not in found and counts:
                found[topic] = min(counts, key=lambda name: (counts[name], name))
                counts[found[topic]] += 1
        return found

    def _send(self, entry: Entry, owners: Iterable[Owner]) -> None:
        if entry.link is None:
            return
        for part, _ in parts(list(owners)):
            entry.link.send(pack(frames.OWNERS, Owners(part)))

    # --- migrations -----------------------------------------------------------------------------------------------------

    def move(self, topic: str, target: str, now: float) -> Migration:
        """Move a topic by hand."""
        known = self.owner_of(topic)
        self.check_target(target)
        if known.owner == target:
            raise Refused(f"{target} owns {topic} already")
        if self._is_dead(known.owner):
            raise Refused(f"{known.owner}, which owns {topic}, is gone")
        migration = self._wanted(known, target, "manual", "asked for by hand", now)
        if not self.migrations.add(migration):
            pending = self.migrations.pending.get(topic)
            raise Refused(f"{topic} is on its way to {pending.target if pending is not None else target} already")
        self._order_due(now)
        return migration

    def why_unowned(self, topic: str) -> str:
        """Why nobody owns a topic, in one line."""
        rule = self.rule_of(topic)
        if rule is None or rule.topic_class != OWNED_CLASS:
            return f"{topic} is not owned: `nearcast topic create {topic} --class owned` makes it so"
        return f"nobody owns {topic} yet: nothing was published to it since it is of class owned"

    def check_target(self, name: str) -> None:
        """Raises Refused for a broker that cannot own topics."""
        entry = self._entries.get(name)
        if entry is None:
            raise Refused(f"there is no broker {name!r}; `nearcast nodes` lists them", missing=True)
        if not entry.is_broker:
            raise Refused(f"{name} is a gateway; brokers own topics")
        if not entry.usable:
            raise Refused(f"broker {name} is {entry.state}")
        if entry.leaving:
            raise Refused(f"broker {name} is stopping")
        if entry.draining:
            raise Refused(f"broker {name} is being drained; `nearcast drain {name} --stop` ends that")

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
            entry = self._entries.get(migration.origin)
            if known is None or known.owner != migration.origin or entry is None or not self._may_own(migration.target):
                self.migrations.end(migration, "superseded", self.wall(now), "things have changed since it was decided")
                continue
            migration.epoch = known.epoch
            if migration.new_epoch <= known.epoch:
                migration.new_epoch = self.directory.next_epoch(self.wall(now), known.epoch)
            if entry.link is not None:
                entry.link.send(pack(frames.MIGRATE, migration.order()))

    def _can_order(self, migration: Migration) -> bool:
        entry = self._entries.get(migration.origin)
        return entry is None or not entry.usable or entry.link is not None

    def _migrated(self, entry: Entry, record: Migrated, now: float) -> None:
        migration = self.migrations.outcome(record, self.wall(now))
        self.moved_at[record.topic] = now
        released = migration is not None and migration.workflow == "release" and record.done
        if released and migration is not None:
            # Nobody has it now: the new owner learns from the directory that it does, and so does everybody who asks.
            made = Owner(record.topic, migration.new_epoch, migration.target, appointed=True)
            held = self.directory.compare_and_set(migration.epoch, made)
            target = self._entries.get(held.owner)
            if target is not None:
                self._send(target, [held])
            for name in self._asks.pop(record.topic, ()):
                other = self._entries.get(name)
                if other is not None:
                    self._send(other, [held])
        elif record.owner and record.epoch:
            held = self.directory.learn(Owner(record.topic, record.epoch, record.owner))
            if held.epoch > record.epoch:
                self._send(entry, [held])
        elif migration is not None and not record.done:
            self._unowned(entry, migration, now)
        self._order_due(now)

    def _unowned(self, entry: Entry, migration: Migration, now: float) -> None:
        """A broker was to hand over a topic that it knows nothing of: so nobody has it, and the target may."""
        known = self.directory.find(migration.topic)
        if known is not None and known.owner == entry.name and self._may_own(migration.target):
            self._give({migration.topic: migration.target}, migration.kind, migration.reason, now)

    def _evacuate(self, now: float) -> None:
        """Topics of brokers that are drained or stop go elsewhere."""
        for entry in list(self._entries.values()):
            if not (entry.is_broker and entry.usable and entry.shunned):
                continue
            topics = [topic for topic in self.directory.topics_of(entry.name) if topic not in self.migrations.pending]
            if not topics:
                continue
            reason = f"{entry.name} is {'stopping' if entry.leaving else 'being drained'}"
            for topic, target in self._places_for(topics, now).items():
                known = self.directory.find(topic)
                if known is not None and target != entry.name and now - self.moved_at.get(topic, 0.0) > LOOK_S:
                    self.migrations.add(self._wanted(known, target, "draining", reason, now))
        self._order_due(now)

    # --- plans ----------------------------------------------------------------------------------------------------------

    def _make_plan(self, now: float) -> None:
        """Algorithm 1 over what is known."""
        self._news = False
        self._plan_at = now + self.settings.plan_interval_s
        fleet = self._fleet(now)
        if not len(self.directory) or not fleet.usable.any():
            return
        topics = self.telemetry.topics(fleet, self._held(self.directory.owners()), self.bound_of, now)
        plan = decide(topics, fleet, self.settings.placement, now)
        self.plan = plan
        self.planned_at = now
        self.plans += 1
        explained = 0
        for move in plan.moves:
            known = self.directory.find(move.topic)
            if known is None or move.reason not in ("latency", "overload"):
                continue  # owners that are gone or leave are replaced whoever plans
            migration = self._wanted(known, move.target, _kind(move.reason), _reason(plan, move), now)
            if self.migrations.add(migration) and explained < MAX_EXPLAINED:
                explained += 1
                migration.explanation = explain(plan, move.row)
        self._order_due(now)

    def picture(self, owners: Iterable[Owner], now: float) -> Topics:
        """These topics as reports show them."""
        return self.telemetry.topics(self._fleet(now), self._held(owners), self.bound_of, now, only=True)

    def explain(self, topic: str, now: float) -> Explanation | None:
        """What the planner thinks of a topic now, whether or not it decides; nothing while no broker is placed."""
        fleet = self._fleet(now)
        if not fleet.usable.any():
            return None
        topics = self.telemetry.topics(fleet, self._held([self.owner_of(topic)]), self.bound_of, now, only=True)
        return explain(decide(topics, fleet, self.settings.placement, now), 0)

    def words(self, explanation: Explanation | None) -> str:
        """The same in words."""
        if explanation is None:
            return "No broker has reported its coordinate and load yet, so nothing can be planned."
        text = explanation.text()
        if self.settings.planner == "own" or explanation.outcome != "moves":
            return text
        return f"{text} But the planner is {self.settings.planner!r}, so the controller does not move it by itself."

    def owner_of(self, topic: str) -> Owner:
        """Who owns a topic; Refused if nobody does."""
        known = self.directory.find(topic)
        if known is None:
            raise Refused(self.why_unowned(topic), missing=True)
        return known

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
        if len(self._plan_numbers) >= 1_000:
            self._plan_numbers.clear()
        self._plan_numbers[record.planner] = record.number
        self.plans_taken += 1
        self.last_plan = record
        for move in record.moves:
            known = self.directory.find(move.topic)
            if known is None or known.owner == move.target or not self._may_own(move.target):
                continue
            if move.epoch not in (0, known.epoch) or move.origin not in ("", known.owner):
                continue
            reason = f"{record.planner}: {move.reason or 'no reason given'}"
            self.migrations.add(self._wanted(known, move.target, "plan", reason, now))
        self._order_due(now)

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        for migration in self.migrations.expire(now, self.wall(now)):
            self.moved_at[migration.topic] = now
        if not self.settled and now >= self._settle_at:
            self._settle(now)
        if self._news and now >= self._plan_at and self.settings.planner == "own":
            self._make_plan(now)
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            if self._asks:
                self._ask_again(now)
            for name in [name for name in self._entries if self._is_dead(name)]:
                self._replace(name, now)
            self._evacuate(now)

    def next_deadline(self) -> float:
        deadline = min(self._look_at, self.migrations.next_deadline(), FOREVER if self.settled else self._settle_at)
        return min(deadline, self._plan_at) if self._news and self.settings.planner == "own" else deadline


def _kind(reason: str) -> MigrationKind:
    return "overload" if reason == "overload" else "latency"


def _reason(plan: Plan, move: Move) -> str:
    """Why a topic moves, in one line."""
    expected = f"at most {move.expected_ms:.1f} ms at {move.target}"
    if move.reason == "overload":
        return f"{move.origin} is overloaded; {expected}"
    return f"{move.worst_ms:.1f} ms, above its bound of {plan.topics.bound_ms[move.row]:g} ms; {expected}"


def _latency_ms(entry: Entry, name: str, otherwise: float) -> float:
    link = entry.links.get(name)
    return otherwise if link is None else link.latency_ms

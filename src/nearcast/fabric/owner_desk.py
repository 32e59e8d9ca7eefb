"""Where brokers ask a controller who owns a topic, and say what they own; and where a new owner is appointed.

A controller that has just started knows no owner, and must not make one while the real one is about to register: it waits
until every broker that any registered one has a link to has said what it owns, or ``settle_s``. Questions wait meanwhile.

An owner is made here in three cases: nobody owns a topic and a broker asks for it; its owner is dead; its owner was started
again and knows nothing of it. Everything else is the brokers' to say: who hands a topic over says to whom. Brokers that use a
topic hear of its new owner from the one before; those that only asked once are told here, when the new one is in charge.
"""

from __future__ import annotations

from typing import Final

from nearcast.fabric.directory import OwnerDirectory
from nearcast.fabric.migrations import Migration, MigrationKind, Migrations
from nearcast.fabric.owner_records import Owned, Owner, OwnersAsk
from nearcast.fabric.registry import Entry
from nearcast.fabric.roster import Roster
from nearcast.fabric.topic_planner import TopicPlanner

HEARD_S: Final = 3.0
"""How long an owner may stay unheard of, whose epoch a broker knows and the directory does not: it is about to say so."""

MAX_ASKS: Final = 1_000_000


class OwnerDesk:
    """See the module. ``appointed`` counts owners made in the place of others."""

    def __init__(
        self,
        directory: OwnerDirectory,
        roster: Roster,
        planner: TopicPlanner,
        migrations: Migrations,
        wall_offset: float,
        settle_at: float,
    ) -> None:
        self.settled = False
        self.settle_at = settle_at
        self.appointed = 0
        self._directory = directory
        self._roster = roster
        self._planner = planner
        self._migrations = migrations
        self._wall_offset = wall_offset
        self._claimed: dict[str, set[str]] = {}
        self._told_all: set[str] = set()
        self._asks: dict[str, dict[str, tuple[int, float]]] = {}
        self._askers: dict[str, dict[str, int]] = {}
        """By topic: the brokers that asked for it, and the epoch that they were told."""

    def forget(self, name: str) -> None:
        """A broker's link is new, or it is gone: what it owns is to be heard from it again, and it asks again."""
        self._told_all.discard(name)
        self._claimed.pop(name, None)
        for askers in self._askers.values():
            askers.pop(name, None)

    def settle(self, now: float) -> None:
        """Whether all brokers that there seem to be have said what they own; if so, answer what had to wait."""
        if self.settled:
            return
        if now < self.settle_at:
            brokers = self._roster.brokers()
            names = {entry.name for entry in brokers}
            for entry in brokers:
                if entry.name not in self._told_all or not entry.report_at or not names.issuperset(entry.links):
                    return
            if not brokers:
                return
        self.settled = True
        self.look(now)

    def look(self, now: float) -> None:
        """Answer what had to wait, as far as that can be answered now."""
        asks, self._asks = self._asks, {}
        for topic, askers in asks.items():
            for name, (epoch, since) in askers.items():
                entry = self._roster.get(name)
                if entry is not None and entry.link is not None:
                    self._tell(name, self._answer(entry, topic, epoch, since, now))

    # --- questions ------------------------------------------------------------------------------------------------------

    def asked(self, entry: Entry, ask: OwnersAsk, now: float) -> None:
        """A broker asks for owners."""
        answers: list[Owner] = []
        for topic, epoch in ask.topics:
            waiting = self._asks.get(topic)
            since = now if waiting is None or entry.name not in waiting else waiting[entry.name][1]
            answers += self._answer(entry, topic, epoch, since, now)
        self._tell(entry.name, answers)

    def _answer(self, entry: Entry, topic: str, epoch: int, since: float, now: float) -> list[Owner]:
        """Who owns a topic, for a broker that knows it up to ``epoch``. Nothing, if that has to wait."""
        known = self._directory.find(topic)
        if known is not None and known.epoch >= epoch and not self._roster.is_dead(known.owner):
            return [known]
        pending = self._migrations.pending.get(topic)
        moving = pending is not None and pending.state == "ordered" and pending.new_epoch >= epoch
        if pending is not None and moving and self._roster.is_up(pending.target):
            return [Owner(topic, pending.new_epoch, pending.target)]
        # Whoever knows a later epoch knows that there is an owner, also if the directory has never heard of any: a broker that
        # is new knows no others, and the controller took it for all there are.
        is_behind = epoch > (0 if known is None else known.epoch)
        if not self.settled or (is_behind and (now - since < HEARD_S or now < self.settle_at)):
            if topic in self._asks or len(self._asks) < MAX_ASKS:
                self._asks.setdefault(topic, {})[entry.name] = (epoch, since)
            return []
        made = self._appoint(topic, self._first_owner(entry), now, above=epoch)
        self._answer_others(topic, made)
        if made.owner != entry.name:
            self._tell(made.owner, [made])
        return [made]

    def _tell(self, name: str, owners: list[Owner]) -> None:
        self._roster.tell(name, owners)
        for owner in owners:
            if owner.owner:  # what the directory has no room for is not remembered here either
                self._askers.setdefault(owner.topic, {})[name] = owner.epoch

    def _answer_others(self, topic: str, owner: Owner) -> None:
        for name in self._asks.pop(topic, ()):
            self._tell(name, [owner])

    def in_charge(self, owner: Owner) -> None:
        """A topic has changed hands: whoever asked for it, and may not have heard of that from the owner before, is told."""
        for name, epoch in list(self._askers.get(owner.topic, {}).items()):
            if epoch < owner.epoch:
                self._tell(name, [owner])

    def _first_owner(self, asker: Entry) -> str:
        """Who gets a topic that nobody owns: whoever asks, for that is where it is used. One that is being emptied does not;
        then the nearest of the others does."""
        if self._roster.may_own(asker.name):
            return asker.name
        others = [entry.name for entry in self._roster.brokers() if self._roster.may_own(entry.name)]
        return min(others, key=lambda name: (_latency_ms(asker, name), name), default=asker.name)

    # --- what brokers say -----------------------------------------------------------------------------------------------

    def owned(self, entry: Entry, owned: Owned, now: float) -> None:
        """What a broker owns, by its own word."""
        truths: list[Owner] = []
        if owned.whole:
            self._claimed[entry.name] = set()
        listed = self._claimed.get(entry.name)
        for claim in owned.owners:
            if not claim.owner:
                self._given_up(entry, claim)
            elif claim.owner != entry.name:
                self._handed_over(entry, claim, now)
            else:
                if listed is not None:
                    listed.add(claim.topic)
                held = self._directory.learn(claim)
                if held.owner and (held.epoch, held.owner) != (claim.epoch, claim.owner):
                    truths.append(held)
                else:
                    self._answer_others(claim.topic, held)
                    self._askers.setdefault(claim.topic, {})[entry.name] = claim.epoch
                    self.in_charge(held)
        self._tell(entry.name, truths)
        if listed is not None and not owned.more:
            del self._claimed[entry.name]
            self._told_all.add(entry.name)
            self._reclaim(entry, listed, now)
            self.settle(now)

    def _given_up(self, entry: Entry, claim: Owner) -> None:
        # One that is on its way has an owner in a moment: nobody else must get it meanwhile.
        if claim.topic not in self._migrations.pending and self._directory.give_up(claim.topic, entry.name, claim.epoch):
            self._planner.moved_at.pop(claim.topic, None)
            self._askers.pop(claim.topic, None)

    def _handed_over(self, entry: Entry, claim: Owner, now: float) -> None:
        """A broker speaks for itself; but who hands a topic over says to whom."""
        before = self._directory.find(claim.topic)
        if before is not None and before.owner == entry.name and before.epoch < claim.epoch:
            self._directory.learn(Owner(claim.topic, claim.epoch, claim.owner))
            self._askers.setdefault(claim.topic, {})[entry.name] = claim.epoch
            self._planner.moved_at[claim.topic] = now

    def _reclaim(self, entry: Entry, listed: set[str], now: float) -> None:
        """A broker was started again, or never heard that it owns some topics. It gets them (again): what is meant for them is
        on its way there. If one was on its way to another broker, that has it by now, or is to."""
        lost: dict[str, str] = {}
        for topic in self._directory.topics_of(entry.name):
            if topic in listed:
                continue
            lost[topic] = entry.name
            pending = self._migrations.pending.get(topic)
            if pending is not None:
                if self._roster.may_own(pending.target):
                    lost[topic] = pending.target
                self._migrations.end(pending, "failed", now + self._wall_offset, f"{entry.name} was started again")
        if lost:
            self.give(lost, "gone", f"{entry.name} was started again", now)

    # --- new owners -----------------------------------------------------------------------------------------------------

    def replace(self, dead: str, now: float) -> None:
        """New owners for the topics of a broker that is gone, at once."""
        topics = self._directory.topics_of(dead)
        if not topics:
            return
        owners: dict[str, str] = {}
        for topic in topics:
            pending = self._migrations.pending.get(topic)
            if pending is not None and pending.state == "ordered" and self._roster.may_own(pending.target):
                owners[topic] = pending.target  # which may have it already
        owners |= self._planner.places_for([topic for topic in topics if topic not in owners], now)
        self.give(owners, "gone", f"{dead} is gone", now)

    def give(self, owners: dict[str, str], kind: MigrationKind, reason: str, now: float) -> None:
        """New owners by the controller's word, told to all: whoever has messages for a topic must know."""
        news: list[Owner] = []
        wall = now + self._wall_offset
        for topic, target in owners.items():
            before = self._directory.find(topic)
            made = self._appoint(topic, target, now)
            news.append(made)
            self._asks.pop(topic, None)
            self.appointed += 1
            self._migrations.note(
                Migration(
                    topic=topic,
                    epoch=0 if before is None else before.epoch,
                    new_epoch=made.epoch,
                    origin="" if before is None else before.owner,
                    target=target,
                    kind=kind,
                    reason=reason,
                    created_at=wall,
                    ended_at=wall,
                )
            )
            askers = self._askers.get(topic, {})
            askers.update(dict.fromkeys(askers, made.epoch))
        self._roster.tell_all(news)

    def _appoint(self, topic: str, owner: str, now: float, *, above: int = 0) -> Owner:
        known = self._directory.find(topic)
        held = 0 if known is None else known.epoch
        epoch = self._directory.next_epoch(now + self._wall_offset, max(held, above))
        if held:
            self._planner.moved_at[topic] = now
        return self._directory.compare_and_set(held, Owner(topic, epoch, owner, appointed=True))

    def released(self, migration: Migration) -> None:
        """The baseline's workflow: nobody has the topic now. The new owner learns from the directory that it does, and so does
        everybody who asks."""
        made = Owner(migration.topic, migration.new_epoch, migration.target, appointed=True)
        held = self._directory.compare_and_set(migration.epoch, made)
        self._tell(held.owner, [held])
        self._answer_others(migration.topic, held)


def _latency_ms(entry: Entry, name: str) -> float:
    link = entry.links.get(name)
    return float("inf") if link is None else link.latency_ms

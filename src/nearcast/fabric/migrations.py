"""Migrations of owned topics that a controller wants: waiting, under way and past, each with its reason (ePulsar §3.6).

A topic has at most one that is not over. ``executors`` of them are under way at once: each is one order to the topic's owner
and its answer, nobody's thread; more only means that more topics change hands at the same moment. What empties a broker and
what a person asks for goes before what improves things.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final, Literal

import msgspec

from nearcast.fabric.owner_records import Migrated, MigrateOrder
from nearcast.placement.explanations import Explanation

MAX_PAST: Final = 10_000
MAX_PENDING: Final = 1_000_000

MAX_LOOKED_AT: Final = 1_000
"""Waiting ones that are looked at in one go: a hundred thousand of a broker that cannot be told must not take all the time."""

MigrationState = Literal["waiting", "ordered", "done", "failed", "superseded"]
MigrationKind = Literal["manual", "draining", "gone", "latency", "overload", "plan"]
Workflow = Literal["handover", "release"]

_URGENT: Final = ("manual", "draining")


class Migration(msgspec.Struct, kw_only=True):
    """One topic from one owner to another. Times are wall-clock seconds; ``0`` is not yet."""

    number: int = 0
    topic: str
    epoch: int
    """Of the owner that hands it over."""
    new_epoch: int = 0
    origin: str
    target: str
    kind: MigrationKind
    """latency, overload (the planner's reasons), plan (somebody else's plan), draining (the owner is emptied or stops), gone
    (the owner died: there was nobody to hand it over) or manual."""
    reason: str = ""
    state: MigrationState = "waiting"
    workflow: Workflow = "handover"
    created_at: float = 0.0
    ordered_at: float = 0.0
    ended_at: float = 0.0
    duration_ms: float = 0.0
    """By the old owner: from the order's arrival to the new owner's word that it is in charge."""
    detail: str = ""
    explanation: Explanation | None = None
    """The decision behind it, where it was made here."""

    @property
    def pending(self) -> bool:
        return self.state in ("waiting", "ordered")

    def order(self) -> MigrateOrder:
        return MigrateOrder(
            number=self.number,
            topic=self.topic,
            epoch=self.epoch,
            new_epoch=self.new_epoch,
            target=self.target,
            workflow=self.workflow,
        )


class Migrations:
    """All of them; see the module. Whoever drives this sends the orders that :meth:`due` returns."""

    def __init__(self, first_number: int, executors: int, timeout_s: float) -> None:
        self.executors = executors
        self.pending: dict[str, Migration] = {}
        self.past: deque[Migration] = deque(maxlen=MAX_PAST)
        self.counts: dict[str, int] = {}
        self.ended = 0
        self._timeout_s = timeout_s
        self._next_number = first_number
        self._urgent: deque[Migration] = deque()
        self._waiting: deque[Migration] = deque()
        self._under_way: dict[int, Migration] = {}
        self._deadlines: dict[int, float] = {}

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    def add(self, migration: Migration) -> bool:
        """One that is wanted; its number is given here. False when the same one is pending, when one is under way, which has
        to end first, or when there are too many. One that only waits gives way to a later decision, but not what a person
        wants to what improves things."""
        before = self.pending.get(migration.topic)
        if before is not None:
            if before.state == "ordered" or before.target == migration.target:
                return False
            if before.kind in _URGENT and migration.kind not in _URGENT:
                return False
            self._end(before, "superseded", migration.created_at, "a newer decision took its place")
        elif len(self.pending) >= MAX_PENDING:
            return False
        migration.number = self._next_number
        self._next_number = self._next_number % 0xFFFF_FFFF + 1
        self.pending[migration.topic] = migration
        (self._urgent if migration.kind in _URGENT else self._waiting).append(migration)
        return True

    def due(self, now: float, wall: float, can_order: Callable[[Migration], bool]) -> list[Migration]:
        """Those to order now. One whose broker cannot be told now waits behind the others, and keeps nobody from going."""
        found: list[Migration] = []
        for queue in (self._urgent, self._waiting):
            for _ in range(min(len(queue), MAX_LOOKED_AT)):
                if len(self._under_way) >= self.executors:
                    break
                migration = queue.popleft()
                if migration.state != "waiting":
                    continue
                if not can_order(migration):
                    queue.append(migration)
                    continue
                migration.state = "ordered"
                migration.ordered_at = wall
                self._under_way[migration.number] = migration
                self._deadlines[migration.number] = now + self._timeout_s
                found.append(migration)
        return found

    def outcome(self, record: Migrated, wall: float) -> Migration | None:
        """The old owner said how it went; the migration, if it is one of ours."""
        migration = self._under_way.get(record.number)
        if migration is None or migration.topic != record.topic:
            return None
        migration.duration_ms = record.duration_ms
        self._end(migration, "done" if record.done else "failed", wall, record.reason)
        return migration

    def note(self, migration: Migration) -> None:
        """One that is over already: a topic of an owner that died."""
        migration.number = self._next_number
        self._next_number = self._next_number % 0xFFFF_FFFF + 1
        self._end(migration, "done", migration.ended_at, migration.detail)

    def expire(self, now: float, wall: float) -> list[Migration]:
        """Those of which nothing was heard for too long; they have failed now."""
        expired = [self._under_way[number] for number, at in self._deadlines.items() if at <= now]
        for migration in expired:
            self._end(migration, "failed", wall, "the owner did not say in time how it went")
        return expired

    def order_again(self, origin: str) -> None:
        """A broker's link is new: what it was told or said on the one before may be lost. It carries out an order once."""
        for migration in [one for one in self._under_way.values() if one.origin == origin]:
            migration.state = "waiting"
            del self._under_way[migration.number]
            self._deadlines.pop(migration.number, None)
            self._urgent.append(migration)

    def end(self, migration: Migration, state: MigrationState, wall: float, detail: str) -> None:
        """It is over for a reason that only the caller knows."""
        if migration.pending:
            self._end(migration, state, wall, detail)

    def of_broker(self, name: str) -> list[Migration]:
        """Those from or to a broker that are not over."""
        return [one for one in self.pending.values() if name in (one.origin, one.target)]

    def history(self, topic: str) -> list[Migration]:
        """What became of a topic, newest first."""
        pending = self.pending.get(topic)
        found = [] if pending is None else [pending]
        return [*found, *(one for one in reversed(self.past) if one.topic == topic)]

    def find(self, number: int) -> Migration | None:
        under_way = self._under_way.get(number)
        if under_way is not None:
            return under_way
        for migration in (*self.pending.values(), *reversed(self.past)):
            if migration.number == number:
                return migration
        return None

    def next_deadline(self) -> float:
        return min(self._deadlines.values(), default=float("inf"))

    def _end(self, migration: Migration, state: MigrationState, wall: float, detail: str) -> None:
        migration.state = state
        migration.ended_at = wall
        migration.detail = detail
        if self.pending.get(migration.topic) is migration:
            del self.pending[migration.topic]
        self._under_way.pop(migration.number, None)
        self._deadlines.pop(migration.number, None)
        self.past.append(migration)
        self.ended += 1
        self.counts[state] = self.counts.get(state, 0) + 1

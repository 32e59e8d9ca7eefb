"""Which topics move, and where: ePulsar's Algorithm 1 over arrays.

::

    Tmigr = topics that violate their bound, those that overloaded brokers shed, those whose owner leaves or is gone
    for t in Tmigr, in order of ever more brokers that keep its bound:
        the first of these brokers, by increasing W(t, b), that can host t

Past the paper: a topic that only violates its bound stays where it is unless the move gains something (``hysteresis``), more
if it moved lately (``move_cost``), and for a while it is not moved at all (``min_seconds_between_moves``). A topic whose owner
leaves is placed in any case, at a full broker if there is no other.

Nothing here is carried out, and nothing remembered: a :class:`Plan` is moves, and why
(:mod:`nearcast.placement.explanations`).

The order matters, so topics are placed one after the other. What makes that fast: W(t, b) comes for a block of topics at a
time, and since load only grows within a plan, a broker that cannot host a topic when its block begins cannot later. What is
left is one look at each topic's best broker, and a second only where that has filled up within the block.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.telemetry.places import Floats, Indices, Mask

from .plans import PlannedMove, PlanRecord
from .policies import Policies
from .topics import UNOWNED, Fleet, PlacementSettings, Topics

Trigger = Literal["", "gone", "leaving", "latency", "overload"]
Outcome = Literal["", "moves", "best", "borderline", "settling", "full", "nowhere"]

TRIGGERS: Final[tuple[Trigger, ...]] = ("", "gone", "leaving", "latency", "overload")
"""Why a topic was looked at, in order of urgency."""
GONE, LEAVING, LATENCY, OVERLOAD = 1, 2, 3, 4

OUTCOMES: Final[tuple[Outcome, ...]] = ("", "moves", "best", "borderline", "settling", "full", "nowhere")
"""What became of it: it moves; its present owner is the best; a move would gain too little; it moved a moment ago; every
broker that it could move to is full; there is no usable broker."""
MOVES, BEST, BORDERLINE, SETTLING, FULL, NOWHERE = 1, 2, 3, 4, 5, 6

BLOCK: Final = 2048
"""Topics whose worst cases are computed at once: with 200 brokers 3 MB, which stays in the processor's cache."""

_NOT_CALCULATED: Final = np.nan


class Move(msgspec.Struct, frozen=True, omit_defaults=True):
    """A topic belongs elsewhere. ``row``: of the topics that were decided on. ``origin`` is empty where nobody owns it."""

    topic: str
    row: int
    origin: str
    target: str
    reason: Trigger
    epoch: int = 0
    worst_ms: float = 0.0
    """E(t), now."""
    expected_ms: float = 0.0
    """W(t, target): not more than this, as far as coordinates go."""


class Plan:
    """What :func:`decide` found. Moves come in order of urgency. Of each topic, by row: ``trigger`` and ``outcome`` (numbers
    of :data:`TRIGGERS` and :data:`OUTCOMES`) and ``target`` (row of the fleet; the present owner where it stays)."""

    def __init__(
        self,
        topics: Topics,
        fleet: Fleet,
        settings: PlacementSettings,
        now: float,
        policies: Policies,
        *,
        trigger: npt.NDArray[np.int8],
        outcome: npt.NDArray[np.int8],
        target: Indices,
        considered: Indices,
        expected_ms: Floats,
    ) -> None:
        self.topics = topics
        self.fleet = fleet
        self.settings = settings
        self.now = now
        self.policies = policies
        self.trigger = trigger
        self.outcome = outcome
        self.target = target
        self.considered = considered
        """The best broker that was found, also where the topic stays."""
        self.expected_ms = expected_ms
        self.moves = self._moves()

    @property
    def overloaded(self) -> Mask:
        """Which brokers were overloaded."""
        return self.policies.overloaded(self.fleet, self.settings)

    def _moves(self) -> list[Move]:
        topics, names = self.topics, self.fleet.names
        rows = np.flatnonzero(self.outcome == MOVES)
        excess = topics.worst_ms[rows] / np.maximum(topics.bound_ms[rows], 1e-9)
        rows = rows[np.lexsort((rows, -excess, self.trigger[rows]))]
        return [
            Move(topics.names[row], row, "" if origin < 0 else names[origin], names[target], TRIGGERS[trigger], *rest)
            for row, origin, target, trigger, *rest in zip(
                rows.tolist(),
                topics.owner[rows].tolist(),
                self.target[rows].tolist(),
                self.trigger[rows].tolist(),
                topics.epochs[rows].tolist(),
                topics.worst_ms[rows].tolist(),
                self.expected_ms[rows].tolist(),
                strict=True,
            )
        ]

    def record(self, number: int, time: float, planner: str) -> PlanRecord:
        """The plan for the wire."""
        moves = [PlannedMove(move.topic, move.target, move.origin, move.epoch, move.reason) for move in self.moves]
        return PlanRecord(number, time, planner, tuple(moves))


def decide(topics: Topics, fleet: Fleet, settings: PlacementSettings, now: float, policies: Policies | None = None) -> Plan:
    """See the module. ``now`` is compared with ``topics.moved_at``."""
    policies = policies if policies is not None else Policies()
    trigger = _triggers(topics, fleet, settings, policies)
    outcome = np.zeros(len(topics), np.int8)
    settling = ((trigger == LATENCY) | (trigger == OVERLOAD)) & (now - topics.moved_at < settings.min_seconds_between_moves)
    outcome[settling] = SETTLING
    plan = _Placing(topics, fleet, settings, now, policies, trigger, outcome)
    plan.place(np.flatnonzero((trigger > 0) & ~settling))
    return Plan(
        topics,
        fleet,
        settings,
        now,
        policies,
        trigger=trigger,
        outcome=outcome,
        target=plan.target,
        considered=plan.considered,
        expected_ms=plan.expected_ms,
    )


def _triggers(topics: Topics, fleet: Fleet, settings: PlacementSettings, policies: Policies) -> npt.NDArray[np.int8]:
    """Why each topic is to be looked at; of several reasons the most pressing, and of a violation and an overload the latter,
    since its owner is then no candidate."""
    trigger = np.zeros(len(topics), np.int8)
    trigger[policies.latency_violated(topics)] = LATENCY
    unowned = topics.owner == UNOWNED
    leaving = np.zeros(len(topics), np.bool_)
    leaving[~unowned] = fleet.leaving[topics.owner[~unowned]]
    over = policies.overloaded(fleet, settings) & ~fleet.leaving
    if over.any():
        by_owner = np.argsort(topics.owner, kind="stable")
        owners = topics.owner[by_owner]
        for broker in np.flatnonzero(over).tolist():
            begin, end = np.searchsorted(owners, (broker, broker + 1))
            trigger[policies.topics_to_shed(broker, by_owner[begin:end], topics, fleet, settings)] = OVERLOAD
    trigger[leaving] = LEAVING
    trigger[unowned] = GONE
    return trigger


def margins_ms(topics: Topics, settings: PlacementSettings, now: float) -> Floats:
    """What a move has to gain, for each topic: the hysteresis, and what is left of the cost of the last move."""
    hysteresis = np.maximum(settings.hysteresis_ms, settings.hysteresis_share * topics.worst_ms)
    fresh = np.clip(1.0 - (now - topics.moved_at) / settings.move_cost_seconds, 0.0, 1.0)
    margins: Floats = hysteresis + settings.move_cost_share * topics.worst_ms * fresh
    return margins


class _Placing:
    """PlaceTopics: one plan's work. Brokers are in the order in which ties go: the one that passes on least comes first."""

    def __init__(
        self,
        topics: Topics,
        fleet: Fleet,
        settings: PlacementSettings,
        now: float,
        policies: Policies,
        trigger: npt.NDArray[np.int8],
        outcome: npt.NDArray[np.int8],
    ) -> None:
        self.topics = topics
        self.policies = policies
        self.trigger = trigger
        self.outcome = outcome
        self.target = topics.owner.copy()
        self.considered = np.full(len(topics), UNOWNED, np.int64)
        self.expected_ms = np.full(len(topics), _NOT_CALCULATED)
        self._order = np.lexsort((np.arange(len(fleet)), fleet.out_rate))
        self._position = np.empty(len(fleet) + 1, np.int64)
        self._position[self._order] = np.arange(len(fleet))
        self._position[UNOWNED] = UNOWNED
        self._fleet = ordered(fleet, self._order)
        self._capacity = policies.capacities(self._fleet, settings)
        self._margin_ms = margins_ms(topics, settings, now)

    def place(self, rows: Indices) -> None:
        if not self._fleet.usable.any():
            self.outcome[rows] = NOWHERE
            return
        silent = self.topics.silent()[rows]
        self._spread(rows[silent])
        rows = rows[~silent]
        counts = np.empty(len(rows), np.int64)
        for begin in range(0, len(rows), BLOCK):
            block = rows[begin : begin + BLOCK]
            expected = self.policies.worst_cases(self.topics, block, self._fleet)
            candidates = self.policies.feasible(expected, self.topics.bound_ms[block], self._fleet.usable)
            counts[begin : begin + BLOCK] = candidates.sum(axis=1)
        rows = rows[np.argsort(counts, kind="stable")]
        for begin in range(0, len(rows), BLOCK):
            self._place_block(rows[begin : begin + BLOCK])

    def _place_block(self, rows: Indices) -> None:
        topics, capacity, usable = self.topics, self._capacity, self._fleet.usable
        expected = self.policies.worst_cases(topics, rows, self._fleet)
        bounds = topics.bound_ms[rows]
        candidates = self.policies.feasible(expected, bounds, usable)
        trigger = self.trigger[rows]
        owners = self._position[topics.owner[rows]]
        rates = topics.rate[rows]
        violating = np.flatnonzero(trigger == LATENCY)
        leaving = np.flatnonzero((trigger == OVERLOAD) | (trigger == LEAVING))
        # One that is shed goes elsewhere or nowhere.
        candidates[leaving, owners[leaving]] = False
        tight = np.flatnonzero(capacity < rates.max())
        if len(tight):
            hostable = np.ones_like(candidates)
            hostable[:, tight] = rates[:, None] <= capacity[None, tight]
            # Where it is, it is counted already.
            hostable[violating, owners[violating]] = True
            candidates &= hostable
        # What there is now, of the same kind as what is expected elsewhere, if the owner's place is known.
        present_ms = topics.worst_ms[rows]
        known = violating[usable[owners[violating]]]
        present_ms[known] = expected[known, owners[known]]
        ranked = np.where(candidates, expected, np.inf)
        best = ranked.argmin(axis=1)
        lines = zip(rows.tolist(), best.tolist(), owners.tolist(), rates.tolist(), trigger.tolist(), strict=True)
        for index, (row, broker, owner, rate, why) in enumerate(lines):
            stays = owner if why == LATENCY else UNOWNED
            if broker != stays and not rate <= capacity[broker]:
                broker = self._next(ranked[index], rate, stays)
            if ranked[index, broker] == np.inf:
                broker = self._forced(expected[index], rate, owner) if why <= LEAVING else UNOWNED
                if broker == UNOWNED:
                    self.outcome[row] = FULL if why > LEAVING else NOWHERE
                    continue
            worst = expected[index, broker]
            self.expected_ms[row] = worst
            self.considered[row] = self._order[broker]
            if broker == stays:
                self.outcome[row] = BEST
                continue
            if why == LATENCY:
                # A bound that will be kept is compared with what is; where none can be, like with like.
                gain = (topics.worst_ms[row] if worst <= bounds[index] else present_ms[index]) - worst
                if gain <= 0.0 or gain < self._margin_ms[row]:
                    self.outcome[row] = BORDERLINE
                    continue
            self._move(row, broker, rate)

    def _next(self, line: Floats, rate: float, stays: int) -> int:
        """The best broker of a line of which some have filled up since its block began."""
        full = rate > self._capacity
        if stays != UNOWNED:
            full[stays] = False
        line[full] = np.inf
        return int(line.argmin())

    def _forced(self, expected: Floats, rate: float, owner: int) -> int:
        """Where a topic goes whose owner leaves and for which no broker that keeps its bound has room: one that has room,
        since an overloaded broker harms all its topics; and if none has, the nearest."""
        usable = self._fleet.usable.copy()
        if owner != UNOWNED:
            usable[owner] = False
        roomy = usable & (rate <= self._capacity)
        allowed = roomy if roomy.any() else usable
        return int(np.where(allowed, expected, np.inf).argmin()) if allowed.any() else UNOWNED

    def _spread(self, rows: Indices) -> None:
        """Topics without clients belong nowhere in particular: to each broker in turn."""
        hosts = np.flatnonzero(self._fleet.usable & (self._capacity >= 0.0))
        if len(hosts) == 0:
            hosts = np.flatnonzero(self._fleet.usable)
        turn = 0
        for row in rows.tolist():
            owner = self._position[self.topics.owner[row]]
            if hosts[turn % len(hosts)] == owner:
                turn += 1
            broker = int(hosts[turn % len(hosts)])
            if broker == owner:
                self.outcome[row] = FULL if self.trigger[row] > LEAVING else NOWHERE
                continue
            self.expected_ms[row] = 0.0
            self.considered[row] = self._order[broker]
            self._move(row, broker, float(self.topics.rate[row]))
            turn += 1

    def _move(self, row: int, broker: int, rate: float) -> None:
        self.outcome[row] = MOVES
        self.target[row] = self._order[broker]
        self._capacity[broker] -= rate


def ordered(fleet: Fleet, order: Indices) -> Fleet:
    """The same brokers in another order."""
    return Fleet(
        [fleet.names[index] for index in order.tolist()],
        fleet.places.rows(order),
        cpu=fleet.cpu[order],
        memory=fleet.memory[order],
        network=fleet.network[order],
        out_rate=fleet.out_rate[order],
        usable=fleet.usable[order],
        leaving=fleet.leaving[order],
    )

"""Why a topic is where it is, or goes where it goes: a plan's decision about one topic, in numbers and in words.

Explanations are made when somebody asks; a plan keeps what they need. The words follow from the way topics are placed: of the
brokers that keep the bound, one that ranks before the chosen one was full, and one behind it is farther.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec
import numpy as np

from .deciding import OUTCOMES, TRIGGERS, Outcome, Plan, Trigger, margins_ms
from .topics import UNOWNED

Verdict = Literal["chosen", "present owner", "full", "farther", "breaks the bound", "leaving", "not usable", "overloaded"]


class Alternative(msgspec.Struct, frozen=True):
    """A broker that was considered, and what became of it."""

    broker: str
    expected_ms: float
    """W(t, b)."""
    verdict: Verdict


class Explanation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A decision about one topic. Latencies are one way, end to end."""

    topic: str
    time: float
    """When it was decided: seconds, of the planner's clock."""
    trigger: Trigger = ""
    outcome: Outcome = ""
    bound_ms: float = 0.0
    worst_ms: float = 0.0
    """E(t): now, through the present owner."""
    deviation_ms: float = 0.0
    """W(t)."""
    owner: str = ""
    owner_expected_ms: float | None = None
    """W(t, owner): at least E(t)."""
    target: str = ""
    target_expected_ms: float | None = None
    margin_ms: float = 0.0
    """What a move for latency had to gain."""
    rate: float = 0.0
    producers: int = 0
    consumers: int = 0
    keeping: int = 0
    """How many usable brokers keep the bound."""
    brokers: int = 0
    """How many were usable."""
    alternatives: tuple[Alternative, ...] = ()
    """The best brokers by W(t, b), the chosen one and the present owner among them."""

    def text(self) -> str:
        """In words, one sentence or two."""
        return f"{self._state()} {self._decision()}".strip()

    def _state(self) -> str:
        if not self.owner:
            return "It has no owner."
        if self.producers == 0 or self.consumers == 0:
            missing = "clients" if self.producers == self.consumers else "producers" if self.producers == 0 else "consumers"
            return f"{self.owner} owns it; it has no {missing}, so no latency."
        if self.bound_ms <= 0.0:
            return f"{self.owner} owns it, at {self.worst_ms:.1f} ms in the worst case; it has no bound."
        relation = "above" if self.worst_ms > self.bound_ms else "within"
        return f"{self.owner} owns it, at {self.worst_ms:.1f} ms in the worst case, {relation} its {self.bound_ms:g} ms."

    def _decision(self) -> str:
        expected = "" if self.target_expected_ms is None else f" (at most {self.target_expected_ms:.1f} ms expected)"
        hopeless = self.bound_ms > 0.0 and self.keeping == 0
        none = f"No broker is sure to keep {self.bound_ms:g} ms. " if hopeless else ""
        if self.outcome == "moves":
            reasons = {"gone": "nobody owns it", "leaving": f"{self.owner} leaves", "overload": f"{self.owner} is overloaded"}
            because = f" because {reasons[self.trigger]}" if self.trigger in reasons else ""
            choice = "the least of all" if hopeless else "the least of those with room" if self._passed_over() else "the least"
            return f"{none}It moves to {self.target}{because}: {choice}{expected}."
        if self.outcome == "best":
            return f"{none}It stays: no other is nearer."
        if self.outcome == "borderline":
            return f"{none}It stays: {self.target or 'another broker'} would gain less than {self.margin_ms:.1f} ms{expected}."
        if self.outcome == "settling":
            return "It stays for now: it was moved a moment ago."
        if self.outcome == "full":
            return f"{none}It stays: every broker it could move to is full."
        if self.outcome == "nowhere":
            return "There is no usable broker to move it to."
        return "Nothing to do."

    def _passed_over(self) -> bool:
        return any(alternative.verdict == "full" for alternative in self.alternatives)


def explain(plan: Plan, row: int) -> Explanation:
    """Why topic ``row`` of the plan moves, or stays."""
    topics, fleet, settings = plan.topics, plan.fleet, plan.settings
    rows = np.array([row])
    expected = plan.policies.worst_cases(topics, rows, fleet)
    keeps = plan.policies.feasible(expected, topics.bound_ms[rows], fleet.usable)[0]
    line = expected[0]
    bound = float(topics.bound_ms[row])
    owner = int(topics.owner[row])
    trigger = TRIGGERS[plan.trigger[row]]
    outcome = OUTCOMES[plan.outcome[row]]
    chosen = int(plan.considered[row])
    keeping = int((fleet.usable & (line <= bound)).sum()) if bound > 0.0 else int(fleet.usable.sum())
    return Explanation(
        topic=topics.names[row],
        time=plan.now,
        trigger=trigger,
        outcome=outcome,
        bound_ms=bound,
        worst_ms=float(topics.worst_ms[row]),
        deviation_ms=float(topics.deviation_ms[row]),
        owner="" if owner == UNOWNED else fleet.names[owner],
        owner_expected_ms=None if owner == UNOWNED else float(line[owner]),
        target="" if chosen == UNOWNED else fleet.names[chosen],
        target_expected_ms=None if chosen == UNOWNED else float(line[chosen]),
        margin_ms=float(margins_ms(topics, settings, plan.now)[row]) if trigger == "latency" else 0.0,
        rate=float(topics.rate[row]),
        producers=int(topics.producer_counts[row]),
        consumers=int(topics.consumer_counts[row]),
        keeping=keeping,
        brokers=int(fleet.usable.sum()),
        alternatives=_alternatives(plan, row, line, keeps, chosen),
    )


def explanations(plan: Plan) -> Iterator[Explanation]:
    """Of every topic that was looked at, most pressing first."""
    rows = np.flatnonzero(plan.trigger)
    for row in rows[np.argsort(plan.trigger[rows], kind="stable")].tolist():
        yield explain(plan, row)


def _alternatives(plan: Plan, row: int, line: np.ndarray, keeps: np.ndarray, chosen: int) -> tuple[Alternative, ...]:
    fleet = plan.fleet
    owner = int(plan.topics.owner[row])
    order = np.lexsort((fleet.out_rate, line, ~keeps)).tolist()
    rank = {broker: place for place, broker in enumerate(order)}
    shown = order[: plan.settings.alternatives + 1]
    shown.extend(broker for broker in (chosen, owner) if broker != UNOWNED and broker not in shown)
    over = plan.overloaded
    placed = plan.trigger[row] > 0 and chosen != UNOWNED
    result = []
    for broker in sorted(shown, key=lambda each: (line[each], rank[each])):
        verdict: Verdict
        if broker == chosen and placed and broker != owner:
            verdict = "chosen"
        elif broker == owner:
            verdict = "present owner"
        elif fleet.leaving[broker]:
            verdict = "leaving"
        elif not fleet.usable[broker]:
            verdict = "not usable"
        elif over[broker]:
            verdict = "overloaded"
        elif not keeps[broker]:
            verdict = "breaks the bound"
        elif (placed and rank[broker] < rank[chosen]) or OUTCOMES[plan.outcome[row]] == "full":
            verdict = "full"
        else:
            verdict = "farther"
        result.append(Alternative(fleet.names[broker], float(line[broker]), verdict))
    return tuple(result)

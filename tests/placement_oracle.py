"""Algorithm 1 of ePulsar in plain Python, one topic and one broker at a time: slow, and short enough to read beside the
paper.

What the vectorised one is tested against. It shares with it the types of the input and nothing else.
"""

from __future__ import annotations

import math

from nearcast.placement.topics import UNOWNED, Fleet, PlacementSettings, Topics
from nearcast.telemetry.places import Places


def distance_ms(first: Places, one: int, second: Places, other: int) -> float:
    """d(): round trip between a row of each."""
    squares = sum((a - b) ** 2 for a, b in zip(first.vectors[one], second.vectors[other], strict=True))
    plain = math.sqrt(squares) + first.heights[one] + second.heights[other]
    adjusted = plain + first.adjustments[one] + second.adjustments[other]
    return float(adjusted if adjusted > 0 else plain)


class Oracle:
    """One decision. ``target``: the owner of each topic afterwards."""

    def __init__(self, topics: Topics, fleet: Fleet, settings: PlacementSettings, now: float) -> None:
        self.topics, self.fleet, self.settings, self.now = topics, fleet, settings, now
        self.brokers = sorted(range(len(fleet)), key=lambda b: (fleet.out_rate[b], b))
        """In the order in which ties go."""
        self.usable = [b for b in self.brokers if fleet.usable[b]]
        self.taken = dict.fromkeys(self.brokers, 0.0)
        self.target = [int(owner) for owner in topics.owner]
        self.turn = 0

    # --- policies, sections 3.4.1 to 3.4.3 --------------------------------------------------------------------------------

    def worst_case(self, t: int, b: int) -> float:
        """W(t, b), to the microsecond."""
        topics = self.topics
        total = 0.0
        if topics.producer_counts[t] > 0:
            total += distance_ms(topics.producers, t, self.fleet.places, b)
        if topics.consumer_counts[t] > 0:
            total += distance_ms(topics.consumers, t, self.fleet.places, b)
        return float(round((total / 2 + topics.deviation_ms[t]) * 1000) / 1000)

    def feasible(self, t: int) -> list[int]:
        bound = self.topics.bound_ms[t]
        ranked = sorted(self.usable, key=lambda b: (self.worst_case(t, b), self.brokers.index(b)))
        keeping = [b for b in ranked if bound <= 0 or self.worst_case(t, b) <= bound]
        return keeping or ranked

    def overloaded(self, b: int) -> bool:
        fleet, settings = self.fleet, self.settings
        over = max(fleet.cpu[b], fleet.memory[b], fleet.network[b]) > settings.high_watermark
        return bool(over or (settings.out_rate_limit > 0 and fleet.out_rate[b] > settings.out_rate_limit))

    def can_host(self, b: int, t: int) -> bool:
        """Whether ``b`` is not overloaded with ``t`` and all that this plan gives it."""
        fleet, settings, limit = self.fleet, self.settings, self.settings.out_rate_limit
        if not fleet.usable[b] or self.overloaded(b):
            return False
        if limit <= 0:
            return True
        more = self.taken[b] + self.topics.rate[t]
        if fleet.out_rate[b] + more > limit:
            return False
        passed_on = sum(fleet.out_rate[each] for each in self.usable)
        for shares in (fleet.cpu, fleet.network):
            cost = settings.high_watermark / limit
            if passed_on > 0:
                cost = min(cost, sum(shares[each] for each in self.usable) / passed_on)
            if cost > 0 and more > (settings.high_watermark - shares[b]) / cost:
                return False
        return True

    def topics_to_shed(self, b: int) -> list[int]:
        rate, limit, mark = self.fleet.out_rate[b], self.settings.out_rate_limit, self.settings.high_watermark
        target = min(rate, limit) if limit > 0 else rate
        busiest = max(self.fleet.cpu[b], self.fleet.memory[b], self.fleet.network[b])
        if busiest > mark:
            target = min(target, rate * mark / busiest)
        owned = [t for t in range(len(self.topics)) if self.topics.owner[t] == b and self.topics.rate[t] > 0]
        shed = []
        for t in sorted(owned, key=lambda t: -self.topics.rate[t]):
            if rate <= target:
                break
            shed.append(t)
            rate -= self.topics.rate[t]
        return shed

    # --- Algorithm 1 ------------------------------------------------------------------------------------------------------

    def repartition(self) -> list[int]:
        topics, fleet = self.topics, self.fleet
        why: dict[int, str] = {}
        for t in range(len(topics)):
            if topics.bound_ms[t] > 0 and topics.worst_ms[t] > topics.bound_ms[t]:
                why[t] = "latency"
        for b in self.brokers:
            if self.overloaded(b) and not fleet.leaving[b]:
                why.update(dict.fromkeys(self.topics_to_shed(b), "overload"))
        for t in list(why):
            if self.now - topics.moved_at[t] < self.settings.min_seconds_between_moves:
                del why[t]
        for t in range(len(topics)):
            if topics.owner[t] == UNOWNED or fleet.leaving[topics.owner[t]]:
                why[t] = "leaving"
        if not self.usable:
            return self.target
        silent = [t for t in sorted(why) if topics.producer_counts[t] == 0 and topics.consumer_counts[t] == 0]
        for t in silent:
            self.spread(t)
        for t in sorted((t for t in why if t not in silent), key=lambda t: (len(self.feasible(t)), t)):
            self.place(t, why[t])
        return self.target

    def place(self, t: int, why: str) -> None:
        owner = int(self.topics.owner[t])
        for b in self.feasible(t):
            if b == owner:
                if why == "latency":
                    return
                continue
            if self.can_host(b, t):
                if why == "latency" and not self.worthwhile(t, b):
                    return
                self.move(t, b)
                return
        if why == "leaving":
            nearest = sorted(self.usable, key=lambda b: (self.worst_case(t, b), self.brokers.index(b)))
            nearest = [b for b in nearest if b != owner]
            roomy = [b for b in nearest if self.can_host(b, t)]
            if roomy or nearest:
                self.move(t, (roomy or nearest)[0])

    def worthwhile(self, t: int, b: int) -> bool:
        """Past the paper: the move gains something."""
        topics, settings, expected = self.topics, self.settings, self.worst_case(t, b)
        owner = int(topics.owner[t])
        now = topics.worst_ms[t]
        if expected > topics.bound_ms[t] and self.fleet.usable[owner]:
            now = self.worst_case(t, owner)
        left = min(1.0, max(0.0, 1 - (self.now - topics.moved_at[t]) / settings.move_cost_seconds))
        margin = max(settings.hysteresis_ms, settings.hysteresis_share * topics.worst_ms[t])
        margin += settings.move_cost_share * topics.worst_ms[t] * left
        return bool(now - expected > 0 and now - expected >= margin)

    def spread(self, t: int) -> None:
        hosts = [b for b in self.usable if not self.overloaded(b) and self.room(b) >= 0] or self.usable
        owner = int(self.topics.owner[t])
        if hosts[self.turn % len(hosts)] == owner:
            self.turn += 1
        if hosts[self.turn % len(hosts)] != owner:
            self.move(t, hosts[self.turn % len(hosts)])
            self.turn += 1

    def room(self, b: int) -> float:
        """What is left of its rate, before this plan; enough to know whether there is any."""
        limit = self.settings.out_rate_limit
        return float(limit - self.fleet.out_rate[b]) if limit > 0 else math.inf

    def move(self, t: int, b: int) -> None:
        self.target[t] = b
        self.taken[b] += float(self.topics.rate[t])

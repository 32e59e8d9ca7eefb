"""Thresholds that follow a budget of excess data."""

from __future__ import annotations

import math

import pytest

from nearcast.groups import thresholds
from nearcast.groups.thresholds import AdaptiveThresholds, Thresholds

STEP_S = 5.0


def adaptive(join_ms: float = 10.0, budget: float = 0.3) -> AdaptiveThresholds:
    return AdaptiveThresholds(join_ms, 1.25 * join_ms, budget, 1.0, 50.0, 0.0)


class Group:
    """A leader and neighbours at given latencies, of which each adds excess while it is a member.

    ``wanted`` and ``unwanted`` messages arrive at each member in a step, and ``wanted`` ones at the leader.
    """

    def __init__(self, rule: AdaptiveThresholds, neighbours_ms: list[float], wanted: int, unwanted: int) -> None:
        self.rule = rule
        self.neighbours_ms = neighbours_ms
        self.wanted = wanted
        self.unwanted = unwanted
        self.members: set[int] = set()
        self.now = 0.0
        self.changes: list[float] = []

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.now += STEP_S
            for number, latency_ms in enumerate(self.neighbours_ms):
                if number in self.members and latency_ms > self.rule.leave_ms:
                    self.members.discard(number)
                elif number not in self.members and latency_ms < self.rule.join_ms:
                    self.members.add(number)
                else:
                    continue
                self.changes.append(self.now)
                self.rule.regrouped(self.now)
            self.rule.observed(self.wanted, 0, self.now)
            for _ in self.members:
                self.rule.observed(self.wanted, self.unwanted, self.now)


def test_the_fixed_rule_stays_as_it_is() -> None:
    rule = Thresholds(5.0, 6.25)
    rule.observed(0, 1_000_000, 1e6)
    rule.regrouped(1e6)
    rule.followed(50.0, 1e6)
    assert (rule.join_ms, rule.leave_ms, rule.largest_ms) == (5.0, 6.25, 5.0)


def test_with_room_in_the_budget_the_threshold_rises_to_the_largest() -> None:
    group = Group(adaptive(), [], wanted=1_000, unwanted=0)
    group.run(3_600.0)
    assert group.rule.join_ms == 50.0
    assert group.rule.leave_ms == 62.5


def test_above_the_budget_it_falls_until_enough_have_left() -> None:
    rule = adaptive(40.0)
    group = Group(rule, [2.0, 3.0, 20.0, 30.0, 35.0], wanted=100, unwanted=100)
    group.run(600.0)
    # The leader and n members have n / (1 + 2n) of excess: one is 0.33, which is too much, and none 0.
    assert group.members == set()
    assert rule.lowered > 0


def test_near_members_stay_when_those_that_are_far_are_enough() -> None:
    rule = adaptive(40.0, budget=0.45)
    group = Group(rule, [2.0, 3.0, 20.0, 30.0, 35.0], wanted=100, unwanted=100)
    group.run(600.0)
    # 4 members: 0.44; 5: 0.4545.
    assert group.members == {0, 1, 2, 3}
    assert rule.excess == pytest.approx(400 / 900)


def test_between_room_and_budget_nothing_happens() -> None:
    rule = adaptive()
    for step in range(200):
        rule.observed(73, 27, step * STEP_S)
    assert (rule.raised, rule.lowered, rule.join_ms) == (0, 0, 10.0)


def test_few_messages_are_no_evidence() -> None:
    rule = adaptive()
    for step in range(19):
        rule.observed(0, 5, step * STEP_S)
    assert rule.lowered == 0
    assert math.isnan(rule.excess)


def test_one_bad_period_is_no_evidence() -> None:
    rule = adaptive()
    now = 0.0
    for period in range(100):
        now += thresholds.PERIOD_S
        rule.observed(100, 1_000 if period % 3 == 0 else 40, now)
    assert rule.lowered == 0


def test_what_was_seen_of_another_group_does_not_count() -> None:
    rule = adaptive()
    now = 0.0
    for _ in range(50):
        now += thresholds.PERIOD_S
        rule.observed(0, 1_000, now)
        rule.regrouped(now)
    assert rule.lowered == 0


def test_who_left_because_of_the_budget_does_not_come_back_at_once() -> None:
    group = Group(adaptive(20.0), [9.0, 15.0], wanted=100, unwanted=100)
    group.run(thresholds.FIRST_CEILING_S)
    changes = len(group.changes)
    assert group.members == set()
    assert changes == 4  # both came, both left
    assert group.rule.join_ms <= 9.0
    assert group.rule.ceiling_ms <= 9.0


def test_a_group_whose_surroundings_stay_changes_ever_more_rarely() -> None:
    group = Group(adaptive(20.0), [9.0, 15.0], wanted=100, unwanted=100)
    changes = []
    for _ in range(4):
        before = len(group.changes)
        group.run(86_400.0)
        changes.append(len(group.changes) - before)
    assert changes[0] <= 40
    assert changes[3] <= 8
    assert changes == sorted(changes, reverse=True)


def test_when_the_excess_is_gone_the_group_grows_again() -> None:
    group = Group(adaptive(20.0), [9.0, 15.0], wanted=100, unwanted=100)
    group.run(600.0)
    assert group.members == set()
    group.unwanted = 0
    group.run(3_600.0)
    assert group.members == {0, 1}
    assert group.rule.join_ms == 50.0


def test_it_stays_within_its_bounds() -> None:
    rule = adaptive(join_ms=500.0)
    assert rule.join_ms == 50.0
    now = 0.0
    for _ in range(1_000):
        now += thresholds.PERIOD_S
        rule.observed(0, 1_000, now)
    assert rule.join_ms == 1.0
    assert rule.leave_ms == 1.25


@pytest.mark.parametrize("join_ms", [0.0, math.inf])
def test_it_can_begin_at_either_end(join_ms: float) -> None:
    rule = AdaptiveThresholds(join_ms, join_ms, 0.3, 1.0, 50.0, 0.0)
    assert rule.join_ms == (1.0 if join_ms == 0.0 else 50.0)
    assert rule.leave_ms == 1.25 * rule.join_ms


def test_a_member_has_the_threshold_of_its_group_and_begins_with_it_alone() -> None:
    rule = adaptive(10.0)
    rule.followed(4.0, 100.0)
    assert (rule.join_ms, rule.leave_ms) == (4.0, 5.0)
    rule.regrouped(200.0)
    assert rule.join_ms == 4.0
    assert rule.largest_ms == 50.0

"""Plans reach whom they should, judged by a naive matcher."""

from __future__ import annotations

import pytest

from nearcast.bench.patterns import CURVE_MATCHES, CURVE_TOPICS, Pattern, Plan, curve_filters, make_curve_plan, make_plan
from nearcast.errors import ConfigError


def naive_match(topic_filter: str, topic: str) -> bool:
    wanted, levels = topic_filter.removeprefix("$share/bench/").split("/"), topic.split("/")
    for index, level in enumerate(wanted):
        if level == "#":
            return True
        if index >= len(levels) or level not in ("+", levels[index]):
            return False
    return len(wanted) == len(levels)


def sources(plan: Plan) -> list[list[int]]:
    return [
        [
            publisher
            for publisher, topics in enumerate(plan.topics)
            if all(any(naive_match(each, topic.decode()) for each in filters) for topic in topics)
        ]
        for filters in plan.filters
    ]


@pytest.mark.parametrize(
    ("pattern", "publishers", "subscribers", "copies"),
    [
        (Pattern.ONE_TO_ONE, 1, 1, 1),
        (Pattern.PAIRS, 10, 10, 1),
        (Pattern.FANOUT, 1, 50, 50),
        (Pattern.WILDCARD, 10, 10, 10),
        (Pattern.SHARED_TOPIC, 10, 5, 5),
        (Pattern.SHARED_SUBSCRIPTION, 4, 6, 1),
    ],
)
def test_filters_reach_the_stated_publishers(pattern: Pattern, publishers: int, subscribers: int, copies: int) -> None:
    plan = make_plan(pattern, publishers, subscribers, "x")
    assert sources(plan) == plan.sources
    assert plan.copies == [copies] * publishers
    assert len({len(topic) for topics in plan.topics for topic in topics}) == 1


@pytest.mark.parametrize(
    ("pattern", "publishers", "subscribers"), [(Pattern.ONE_TO_ONE, 1, 2), (Pattern.PAIRS, 2, 3), (Pattern.FANOUT, 0, 1)]
)
def test_impossible_plans_are_refused(pattern: Pattern, publishers: int, subscribers: int) -> None:
    with pytest.raises(ConfigError):
        make_plan(pattern, publishers, subscribers, "x")


def test_the_curve_matches_a_constant_number() -> None:
    plan = make_curve_plan("x")
    others = curve_filters("x", 200)
    assert len(plan.topics[0]) == CURVE_TOPICS
    assert len(set(others)) == 200
    for topic in plan.topics[0][:150]:
        name = topic.decode()
        assert sum(naive_match(each, name) for filters in plan.filters for each in filters) == CURVE_MATCHES
        assert not any(naive_match(each, name) for each in others)

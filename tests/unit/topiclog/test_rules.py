"""The first rule whose filter matches a topic decides about it."""

from __future__ import annotations

import pytest

from nearcast.config import TopicRule
from nearcast.topiclog.rules import RuleTable


def decided(rules: list[str], topic: str) -> str | None:
    rule = RuleTable(TopicRule(topic=item) for item in rules).match(topic.encode())
    return None if rule is None else rule.topic


@pytest.mark.parametrize(
    ("rules", "topic", "expected"),
    [
        ([], "a", None),
        (["a"], "a", "a"),
        (["a"], "a/b", None),
        (["a/b", "a/#"], "a/b", "a/b"),
        (["a/b", "a/#"], "a/c", "a/#"),
        (["a/#", "a/b"], "a/b", "a/#"),
        (["a/#"], "a", "a/#"),
        (["+/b", "a/+"], "a/b", "+/b"),
        (["a/+", "+/b"], "a/b", "a/+"),
        (["a/+/c", "a/b/#"], "a/b/c", "a/+/c"),
        (["+"], "a/b", None),
        (["#"], "a/b", "#"),
        (["#", "+/x"], "$SYS/x", None),
        (["#", "$own/#"], "$own/x", "$own/#"),
        (["+/x", "$own/x"], "$own/x", "$own/x"),
        (["+/+"], "/", "+/+"),
        (["ä/+"], "ä/ö", "ä/+"),
    ],
)
def test_the_first_that_matches_decides(rules: list[str], topic: str, expected: str | None) -> None:
    assert decided(rules, topic) == expected


def test_many_names_and_patterns() -> None:
    rules = [f"device/{number}" for number in range(10_000)] + [f"site/{number}/#" for number in range(10_000)]
    table = RuleTable(TopicRule(topic=rule) for rule in rules)
    assert len(table) == 20_000
    for topic, expected in (("device/9999", "device/9999"), ("site/1234/x/y", "site/1234/#"), ("device/10000", None)):
        found = table.match(topic.encode())
        assert (None if found is None else found.topic) == expected

"""Rules of topics: the table agrees with trying one rule after the other, and rules made at run time keep their promises."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.broker.topics import Definitions, TopicRules
from nearcast.config import Retention, TopicRule
from nearcast.errors import NearcastError
from nearcast.mqtt import topics
from nearcast.mqtt.topics import covers
from nearcast.topiclog.rules import RuleTable

LEVELS = ("a", "b", "", "$c")
names = st.lists(st.sampled_from(LEVELS), min_size=1, max_size=4).map("/".join).filter(bool)
filters = st.builds(
    lambda levels, ends: "/".join([*levels, *ends]),
    st.lists(st.sampled_from((*LEVELS, "+")), min_size=1, max_size=4),
    st.sampled_from(([], ["#"])),
).filter(bool) | st.just("#")


def first_match(rules: list[TopicRule], topic: str) -> TopicRule | None:
    """The plain reading."""
    return next((rule for rule in rules if topics.matches(rule.topic, topic)), None)


@given(st.lists(filters, max_size=12), st.lists(names, min_size=1, max_size=12))
def test_the_table_agrees_with_trying_one_by_one(rule_filters: list[str], asked: list[str]) -> None:
    rules = [TopicRule(topic=topic, retention=Retention(max_records=place)) for place, topic in enumerate(rule_filters)]
    table = RuleTable(rules)
    for topic in asked:
        assert table.match(topic.encode()) is first_match(rules, topic)


changes = st.lists(
    st.tuples(st.just("create"), filters, st.integers(0, 2)) | st.tuples(st.just("delete"), filters, st.just(0)), max_size=15
)


@settings(max_examples=40, deadline=None)
@given(changes, names)
def test_rules_made_at_run_time(steps: list[tuple[str, str, int]], topic: str) -> None:
    """One rule a filter; none that could never decide; what is on disk is what is in memory."""

    async def main(directory: Path) -> None:
        definitions = Definitions(directory)
        rules = TopicRules([], definitions)
        told: dict[str, TopicRule] = {}
        for verb, topic_filter, bound in steps:
            rule = TopicRule(topic=topic_filter, retention=Retention(max_records=bound))
            before, generation = told.get(topic_filter), rules.generation
            try:
                if verb == "create":
                    outcome = await rules.create(rule)
                    told[topic_filter] = rule
                    assert outcome == ("created" if before is None else "unchanged" if before == rule else "changed")
                    assert (rules.generation == generation) == (outcome == "unchanged")
                else:
                    assert await rules.delete(topic_filter) == told.pop(topic_filter)
            except NearcastError:
                assert verb == "delete"
                assert before is None
        assert {rule.topic: rule for rule in rules.rules} == told
        for place, rule in enumerate(rules.rules):
            assert not any(covers(other.topic, rule.topic) for other in rules.rules[:place]), "a rule that never decides"
        assert rules.rule_for(topic.encode()) is first_match(list(rules.rules), topic)
        assert TopicRules([], Definitions(directory)).rules == rules.rules

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(main(Path(directory)))

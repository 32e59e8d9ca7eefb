"""Class rules as a controller asks them: the rule of a topic, and its latency bound."""

from __future__ import annotations

from typing import Final

from nearcast.config import TopicRule
from nearcast.fabric.classes import OWNED
from nearcast.fabric.control import ClassRule, ClassRules
from nearcast.topiclog.rules import RuleTable

MAX_REMEMBERED: Final = 1_000_000


class TopicRules:
    """The rules in use. Of several that match a topic, the first one holds."""

    def __init__(self) -> None:
        self._by_filter: dict[str, ClassRule] = {}
        self._table = RuleTable()
        self._found: dict[str, ClassRule | None] = {}

    def replace(self, rules: ClassRules) -> None:
        """Use these."""
        self._by_filter = {rule.topic_filter: rule for rule in reversed(rules.rules)}
        self._table = RuleTable([TopicRule(topic=rule.topic_filter) for rule in rules.rules])
        self._found = {}

    def rule_of(self, topic: str) -> ClassRule | None:
        """The rule that decides the class of a topic."""
        found = self._found
        if topic in found:
            return found[topic]
        match = self._table.match(topic.encode("utf-8"))
        rule = None if match is None else self._by_filter[match.topic]
        if len(found) < MAX_REMEMBERED:
            found[topic] = rule
        return rule

    def is_owned(self, topic: str) -> bool:
        """Whether a topic is to have an owner."""
        rule = self.rule_of(topic)
        return rule is not None and rule.topic_class == OWNED

    def bound_of(self, topic: str) -> float:
        """The latency bound of a topic, in milliseconds; 0: none."""
        rule = self.rule_of(topic)
        return rule.max_latency_ms if rule is not None and rule.topic_class == OWNED else 0.0

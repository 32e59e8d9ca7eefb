"""Topic classes: which behaviour a topic has in the fabric, decided by the first rule whose filter matches it.

====================  ==================================================================================================
``bridged``           the default: a message goes once to every broker with a matching subscriber
``local``             a message never leaves the broker that received it: its subscribers elsewhere, its retained copies
                      elsewhere and members of its shared subscriptions elsewhere get nothing
====================  ==================================================================================================

The class is the receiving broker's to decide, and compiled into routes, so that it costs nothing per message. Rules come from
the configuration; the controller may replace them while brokers run (CLASSES), and the newest ones hold. Interest does not
depend on classes: a filter may match topics of several.
"""

from __future__ import annotations

from typing import Final

from nearcast.config import TopicRule
from nearcast.errors import ConfigError
from nearcast.mqtt.routing import Router
from nearcast.mqtt.topics import filter_fault
from nearcast.topiclog.rules import RuleTable

BRIDGED: Final = "bridged"
LOCAL: Final = "local"
CLASSES: Final = (BRIDGED, LOCAL)

MAX_LEVELS: Final = 1_000


def class_fault(topic_filter: str, topic_class: str) -> str:
    """What is wrong with a rule, in words; empty when nothing is."""
    fault = filter_fault(topic_filter, MAX_LEVELS)
    if fault:
        return fault
    if topic_class not in CLASSES:
        return f"there is no class {topic_class!r}: " + ", ".join(CLASSES)
    return ""


class TopicClasses:
    """The rules of one broker. ``stamp`` is when they were decided, in microseconds; the configuration's have 0."""

    def __init__(self, router: Router, rules: list[tuple[str, str]]) -> None:
        self._router = router
        self.stamp = 0
        self._table = RuleTable()
        self._class_of: dict[str, str] = {}
        self.rules: list[tuple[str, str]] = []
        self.replace(rules, 0)
        router.classes = self

    def replace(self, rules: list[tuple[str, str]], stamp: int) -> bool:
        """Use these rules, (filter, class) in their order, unless newer ones are in use. Raises :class:`ConfigError`."""
        if stamp < self.stamp:
            return False
        for topic_filter, topic_class in rules:
            fault = class_fault(topic_filter, topic_class)
            if fault:
                raise ConfigError(f"topic class of {topic_filter!r}: {fault}", key="fabric.classes")
        class_of: dict[str, str] = {}
        for topic_filter, topic_class in rules:
            class_of.setdefault(topic_filter, topic_class)
        self.stamp = stamp
        self.rules = list(rules)
        self._class_of = class_of
        self._table = RuleTable([TopicRule(topic=topic_filter) for topic_filter in class_of])
        self._router.tree.generation += 1
        return True

    def class_of(self, topic: bytes) -> str:
        """The class of a topic."""
        rule = self._table.match(topic)
        return BRIDGED if rule is None else self._class_of[rule.topic]

    def crosses(self, topic: bytes) -> bool:
        """Whether messages of a topic go to other brokers at all."""
        return topic[:5] != b"$SYS/" and (not self.rules or self.class_of(topic) != LOCAL)

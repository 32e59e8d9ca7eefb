"""Which rule decides about a topic: the first whose filter matches it, found without trying them one by one.

The filters stand in a tree by levels, each with the rule's place in the order. A look-up visits only prefixes that match the
topic, so that ten thousand rules cost what one does. The table never changes: whoever changes rules makes a new one.

This module knows rules and names; it knows neither where rules come from nor what is kept of a topic.
"""

from __future__ import annotations

from collections.abc import Iterable

from nearcast.config import TopicRule

_NONE = 1 << 62


class _Level:
    """One prefix of filter levels. ``here`` and ``below`` are the places of rules that end here: exactly, or with ``#``."""

    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.plus: _Level | None = None
        self.here = _NONE
        self.below = _NONE


class RuleTable:
    """Rules in their order, ready to be asked for each new topic."""

    def __init__(self, rules: Iterable[TopicRule] = ()) -> None:
        self.rules = tuple(rules)
        self._root = _Level()
        # Most rules name one topic. A name is found at once, unless a pattern before it in the order matches as well.
        self._names: dict[bytes, int] = {}
        self._first_pattern = _NONE
        for place, rule in enumerate(self.rules):
            topic = rule.topic.encode("utf-8")
            if b"+" in topic or b"#" in topic:
                self._first_pattern = min(self._first_pattern, place)
                self._insert(topic, place)
            else:
                self._names.setdefault(topic, place)

    def __len__(self) -> int:
        return len(self.rules)

    def match(self, topic: bytes) -> TopicRule | None:
        """The rule that decides about ``topic``; ``None`` when none does."""
        best = self._names.get(topic, _NONE)
        if self._first_pattern < best:
            best = min(best, self._first_match(topic))
        return None if best == _NONE else self.rules[best]

    def _insert(self, topic_filter: bytes, place: int) -> None:
        levels = topic_filter.split(b"/")
        ends_in_hash = levels[-1] == b"#"
        node = self._root
        for level in levels[:-1] if ends_in_hash else levels:
            if level == b"+":
                if node.plus is None:
                    node.plus = _Level()
                node = node.plus
            else:
                node = node.children.setdefault(level, _Level())
        if ends_in_hash:
            node.below = min(node.below, place)
        else:
            node.here = min(node.here, place)

    def _first_match(self, topic: bytes) -> int:
        best = _NONE
        # Wildcards of the first level do not match topics that begin with $ [MQTT-4.7.2-1].
        hidden = topic[:1] == b"$"
        frontier = [self._root]
        for level in topic.split(b"/"):
            following: list[_Level] = []
            for node in frontier:
                if not hidden:
                    best = min(best, node.below)
                    if node.plus is not None:
                        following.append(node.plus)
                child = node.children.get(level)
                if child is not None:
                    following.append(child)
            hidden = False
            if not following:
                return best
            frontier = following
        for node in frontier:
            best = min(best, node.here, node.below)  # "a/#" also matches "a" [MQTT-4.7.1-2]
        return best

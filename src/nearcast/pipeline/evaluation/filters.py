"""Topic filters by the many: which of them match a topic, without trying each.

Filters with their wildcards in the same places have the same *shape*; there are few shapes. For each, a topic has one key (its
levels where the shape has no wildcard), and filters are looked up by it (MQTT 5.0, section 4.7).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from nearcast.errors import ConfigError
from nearcast.mqtt.topics import filter_fault

MAX_LEVELS = 200
_LITERAL = "="


def pattern(topic_filter: str) -> str:
    """A regular expression, in the words that Java and Python share, for the topics that a filter matches."""
    fault = filter_fault(topic_filter, MAX_LEVELS)
    if fault:
        raise ConfigError(f"the filter {topic_filter!r} cannot be used: {fault}")
    levels = topic_filter.split("/")
    guard = "(?!\\$)" if levels[0] in ("+", "#") else ""
    text = ""
    for position, level in enumerate(levels):
        if level == "#":
            # The level above is matched too: a/# matches a.
            text += "(?:/.*)?" if position else ".*"
        else:
            text += ("/" if position else "") + ("[^/]*" if level == "+" else re.sub(r"([^A-Za-z0-9_/ ])", r"\\\1", level))
    return f"(?s)^{guard}{text}\\z"


class FilterIndex:
    """Which of many filters match a topic."""

    def __init__(self, filters: Iterable[str]) -> None:
        self._shapes: dict[tuple[str, ...], dict[str, str]] = {}
        for topic_filter in filters:
            levels = topic_filter.split("/")
            shape = tuple(level if level in ("+", "#") else _LITERAL for level in levels)
            key = "/".join(level for level in levels if level not in ("+", "#"))
            self._shapes.setdefault(shape, {})[key] = topic_filter

    def matching(self, topic: str) -> list[str]:
        """The filters that match it."""
        levels = topic.split("/")
        found = []
        for shape, filters in self._shapes.items():
            rest = shape[-1] == "#"
            if len(levels) != len(shape) and not (rest and len(levels) >= len(shape) - 1):
                continue
            if topic.startswith("$") and shape[0] in ("+", "#"):
                continue
            key = "/".join(level for level, place in zip(levels, shape, strict=False) if place == _LITERAL)
            if key in filters:
                found.append(filters[key])
        return found

"""Topic filters at the cloud: what two filters have in common, which one makes another superfluous, who needs which.

A leader subscribes at the cloud for all clients of its group. What it asks for is, for each of their filters, what that has in
common with each rule that makes topics ``broadcast`` (:func:`intersection`: two MQTT filters have one filter in common, or
none). Many of those collapse (:mod:`nearcast.fabric.cloud_collapse`).

Filters that overlap without covering each other (``a/+`` and ``+/b``) are a trap: a server may send a message that matches
both once or twice [MQTT-3.3.5-1]. Where copies cannot be told apart, :func:`disjoint` asks for more instead (``+/+``), so that
no two filters overlap.

Nothing here knows of a connection.
"""

from __future__ import annotations

import zlib
from typing import Final

from nearcast.mqtt.topics import SHARE_PREFIX, parse_shared


def intersection(one: str, other: str) -> str:
    """The filter of the topics that both of two plain filters match; empty when there are none."""
    if (one[:1] == "$") != (other[:1] == "$"):  # wildcards do not match it [MQTT-4.7.2-1]
        return ""
    ones = one.split("/")
    others = other.split("/")
    common: list[str] = []
    position = 0
    while True:
        first = ones[position] if position < len(ones) else None
        second = others[position] if position < len(others) else None
        if first is None and second is None:
            return "/".join(common)
        # What ends with # also matches the level above it: "a/#" matches "a".
        if first == "#":
            return "/".join(common + others[position:])
        if second == "#":
            return "/".join(common + ones[position:])
        if first is None or second is None:
            return ""
        if first == "+":
            common.append(second)
        elif second == "+" or first == second:
            common.append(first)
        else:
            return ""
        position += 1


def shared_intersection(topic_filter: str, rule: str) -> str:
    """The same for a filter of a client, which may be a shared subscription, and a rule, which is none."""
    if not topic_filter.startswith(SHARE_PREFIX):
        return intersection(topic_filter, rule)
    return next(iter(shared_intersections(topic_filter, [rule])), "")


def shared_intersections(topic_filter: str, rules: list[str]) -> list[str]:
    """The same for a shared subscription and all rules. No two of them overlap: the cloud would serve each of them with its
    own copy of a message, and so two members would get it."""
    group, inner = parse_shared(topic_filter)
    common = dict.fromkeys(sorted(filter(None, [intersection(inner, rule) for rule in rules])), 0)
    if inner in common:
        return [topic_filter]
    # Groups of the same name with different filters are different groups, and must not become one by this.
    group = f"{group}.{zlib.crc32(inner.encode('utf-8')):08x}"
    return [f"{SHARE_PREFIX}{group}/{each}" for each in disjoint(common)]


def generalization(one: str, other: str) -> str:
    """The narrowest filter that covers both of two that overlap."""
    ones = one.split("/")
    others = other.split("/")
    levels: list[str] = []
    for position in range(max(len(ones), len(others))):
        first = ones[position] if position < len(ones) else "#"
        second = others[position] if position < len(others) else "#"
        if "#" in (first, second):
            levels.append("#")
            break
        levels.append(first if first == second else "+")
    return "/".join(levels)


class FilterTree:
    """A set of plain filters that can be asked which of them cover or overlap another one, or match a topic."""

    def __init__(self) -> None:
        self._root = _Level()

    def add(self, topic_filter: str) -> None:
        level = self._root
        for name in topic_filter.split("/"):
            below = level.below.get(name)
            if below is None:
                below = _Level()
                level.below[name] = below
            level = below
        level.topic_filter = topic_filter

    def remove(self, topic_filter: str) -> None:
        level = self._root
        path: list[tuple[_Level, str]] = []
        for name in topic_filter.split("/"):
            below = level.below.get(name)
            if below is None:
                return
            path.append((level, name))
            level = below
        level.topic_filter = ""
        for above, name in reversed(path):
            if above.below[name].topic_filter or above.below[name].below:
                return
            del above.below[name]

    def matches(self, topic: str) -> bool:
        """Whether a filter matches a topic."""
        return bool(self.covering(topic, ""))

    def covering(self, topic_filter: str, other_than: str) -> str:
        """A filter that matches all that another one matches; empty when there is none but ``other_than``."""
        return _find(self._root, topic_filter.split("/"), 0, other_than, False)

    def overlapping(self, topic_filter: str) -> str:
        """A filter, other than this one, that has topics in common with it; empty when there is none."""
        return _find(self._root, topic_filter.split("/"), 0, topic_filter, True)

    def all_overlapping(self, topic_filter: str) -> list[str]:
        """All such filters."""
        found: list[str] = []
        _collect(self._root, topic_filter.split("/"), 0, True, found)
        return [one for one in found if one != topic_filter]

    def covered_by(self, topic_filter: str) -> list[str]:
        """All filters, other than this one, that match nothing that it does not match."""
        found: list[str] = []
        _collect(self._root, topic_filter.split("/"), 0, False, found)
        return [one for one in found if one != topic_filter]


class _Level:
    def __init__(self) -> None:
        self.below: dict[str, _Level] = {}
        self.topic_filter = ""


def _find(level: _Level, names: list[str], position: int, other_than: str, overlap: bool) -> str:
    reserved = position == 0 and names[0][:1] == "$"
    rest = None if reserved else level.below.get("#")
    if rest is not None and rest.topic_filter and rest.topic_filter != other_than:
        return rest.topic_filter
    if position == len(names):
        return level.topic_filter if level.topic_filter != other_than else ""
    name = names[position]
    if overlap and name == "#":
        return _any(level, other_than, position == 0)
    if overlap and name == "+":
        for child, below in level.below.items():
            if child != "#" and not (position == 0 and child[:1] == "$"):
                found = _find(below, names, position + 1, other_than, overlap)
                if found:
                    return found
        return ""
    if name == "#":
        return ""
    below_it = level.below.get(name)
    if below_it is not None:
        found = _find(below_it, names, position + 1, other_than, overlap)
        if found:
            return found
    if name != "+" and not reserved:
        any_one = level.below.get("+")
        if any_one is not None:
            return _find(any_one, names, position + 1, other_than, overlap)
    return ""


def _collect(level: _Level, names: list[str], position: int, overlap: bool, found: list[str]) -> None:
    """The filters from here on down that a filter overlaps, or covers."""
    top = position == 0
    rest = level.below.get("#")
    if overlap and rest is not None and rest.topic_filter and not (top and names[0][:1] == "$"):
        found.append(rest.topic_filter)
    if position == len(names):
        if level.topic_filter:
            found.append(level.topic_filter)
        return
    name = names[position]
    for child, below in level.below.items():
        reserved = top and child[:1] == "$"
        if name == "#":
            if not reserved and not (overlap and child == "#"):
                _collect_all(below, found)
        elif child == "#":
            continue
        elif name == child or (name == "+" and not reserved) or (overlap and child == "+" and not (top and name[:1] == "$")):
            _collect(below, names, position + 1, overlap, found)
    if name == "#" and level.topic_filter:
        found.append(level.topic_filter)


def _collect_all(level: _Level, found: list[str]) -> None:
    if level.topic_filter:
        found.append(level.topic_filter)
    for below in level.below.values():
        _collect_all(below, found)


def _any(level: _Level, other_than: str, top: bool) -> str:
    """Any filter from here on down, this level included."""
    if level.topic_filter and level.topic_filter != other_than:
        return level.topic_filter
    for name, below in level.below.items():
        if not (top and name[:1] == "$"):
            found = _any(below, other_than, False)
            if found:
                return found
    return ""


def disjoint(filters: dict[str, int]) -> dict[str, int]:
    """Collapsed filters, made wider where they overlap until none does."""
    found: dict[str, int] = {}
    tree = FilterTree()
    waiting = list(filters.items())
    while waiting:
        topic_filter, qos = waiting.pop()
        if topic_filter.startswith(SHARE_PREFIX):
            found[topic_filter] = qos
            continue
        other = topic_filter if topic_filter in found else tree.overlapping(topic_filter)
        if not other:
            found[topic_filter] = qos
            tree.add(topic_filter)
            continue
        tree.remove(other)
        waiting.append((generalization(topic_filter, other), max(qos, found.pop(other))))
    return found


MAX_SHARED: Final = 100_000
"""Shared subscriptions whose names at the cloud are remembered, also for what may still come by those that are gone."""


class CloudFilters:
    """Who needs which filters at the cloud, counted: each filter of clients, times the rules that it meets.

    A filter is wanted at the highest QoS of those that want it. ``version`` rises when what is :meth:`wanted` may change. A
    change costs the same however many filters there are.
    """

    def __init__(self, rules: list[str]) -> None:
        self.version = 0
        self._rules = rules
        self._counts: dict[str, list[int]] = {}
        self._common: dict[str, list[str]] = {}
        self._wanted_counts: dict[str, list[int]] = {}
        self._wanted: dict[str, int] = {}
        self._changed: dict[str, None] = {}
        self._shared: dict[str, str] = {}

    def set_rules(self, rules: list[str]) -> None:
        """Other topics are ``broadcast`` from now on."""
        if rules == self._rules:
            return
        self._rules = rules
        self.version += 1
        self._common.clear()
        self._wanted_counts.clear()
        self._changed.update(dict.fromkeys(self._wanted))
        self._wanted.clear()
        for topic_filter, counts in self._counts.items():
            for qos in range(3):
                if counts[qos]:
                    self._want(topic_filter, qos, 1)

    def add(self, topic_filter: str, qos: int) -> None:
        """Somebody wants this filter."""
        counts = self._counts.get(topic_filter)
        if counts is None:
            counts = [0, 0, 0]
            self._counts[topic_filter] = counts
        counts[qos] += 1
        if counts[qos] == 1:
            self.version += 1
            self._want(topic_filter, qos, 1)

    def remove(self, topic_filter: str, qos: int) -> None:
        """Somebody does not want it any more. :meth:`add` was called with the same before."""
        counts = self._counts[topic_filter]
        counts[qos] -= 1
        if counts[qos] == 0:
            self.version += 1
            self._want(topic_filter, qos, -1)
            if counts == [0, 0, 0]:
                del self._counts[topic_filter]
                del self._common[topic_filter]

    def _want(self, topic_filter: str, qos: int, change: int) -> None:
        for common in self._common_of(topic_filter):
            counts = self._wanted_counts.get(common)
            if counts is None:
                counts = [0, 0, 0]
                self._wanted_counts[common] = counts
            counts[qos] += change
            self._changed[common] = None
            if counts == [0, 0, 0]:
                del self._wanted_counts[common]
                del self._wanted[common]
            else:
                self._wanted[common] = 2 if counts[2] else 1 if counts[1] else 0

    def _common_of(self, topic_filter: str) -> list[str]:
        """What a filter has in common with the rules."""
        found = self._common.get(topic_filter)
        if found is None:
            if topic_filter.startswith(SHARE_PREFIX):
                found = shared_intersections(topic_filter, self._rules)
                for common in found:
                    if common != topic_filter:
                        if len(self._shared) >= MAX_SHARED:
                            del self._shared[next(iter(self._shared))]
                        self._shared[common] = topic_filter
            else:
                met = [intersection(topic_filter, rule) for rule in self._rules]
                found = list(dict.fromkeys(filter(None, met)))
            self._common[topic_filter] = found
        return found

    def wanted(self) -> dict[str, int]:
        """What to subscribe to at the cloud, with its QoS; not collapsed. It changes with the next change here."""
        return self._wanted

    def take_changes(self) -> dict[str, int]:
        """What may have changed in that since the last call: the QoS at which each is wanted now, -1 for what is not."""
        changes = {topic_filter: self._wanted.get(topic_filter, -1) for topic_filter in self._changed}
        self._changed.clear()
        return changes

    def shared_as(self, topic_filter: str) -> str:
        """The shared subscription of clients that is this one at the cloud."""
        return self._shared.get(topic_filter, topic_filter)

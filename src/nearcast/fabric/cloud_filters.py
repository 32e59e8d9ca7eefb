"""Topic filters at the cloud: what two filters have in common, which one makes another superfluous, who needs which.

A leader subscribes at the cloud for all clients of its group. What it asks for is, for each of their filters, what that has in
common with each rule that makes topics ``broadcast`` (:func:`intersection`: two MQTT filters have one filter in common, or
none). Many of those collapse: :func:`collapsed` leaves out what another filter covers.

Filters that overlap without covering each other (``a/+`` and ``+/b``) are a trap: a server may send a message that matches
both once or twice [MQTT-3.3.5-1]. :func:`overlapping` finds them; where copies cannot be told apart, :func:`disjoint` asks for
more instead (``+/+``), so that no two filters overlap.

Pure functions on text; nothing here knows of a connection.
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
    group, inner = parse_shared(topic_filter)
    common = intersection(inner, rule)
    if common != inner:
        # Groups of the same name with different filters are different groups, and must not become one by this.
        group = f"{group}.{zlib.crc32(inner.encode('utf-8')):08x}"
    return f"{SHARE_PREFIX}{group}/{common}" if common else ""


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


def collapsed(filters: dict[str, int]) -> dict[str, int]:
    """Filters with their QoS, without those that another one covers; that one gets the highest QoS of all it stands for.

    Shared subscriptions stay as they are: each is a group of its own.
    """
    plain: dict[str, int] = {}
    found: dict[str, int] = {}
    tree = FilterTree()
    for topic_filter, qos in filters.items():
        if topic_filter.startswith(SHARE_PREFIX):
            found[topic_filter] = qos
            continue
        if topic_filter == "+/#":  # the same topics, and each would cover the other
            topic_filter = "#"
        plain[topic_filter] = max(qos, plain.get(topic_filter, 0))
        if topic_filter[-1] in "+#" or "+" in topic_filter:
            tree.add(topic_filter)
    for topic_filter, qos in plain.items():
        cover = topic_filter
        while True:
            wider = tree.covering(cover, cover)
            if not wider:
                break
            cover = wider
        found[cover] = max(qos, found.get(cover, 0))
    return found


def overlapping(filters: dict[str, int]) -> set[str]:
    """Those of collapsed filters that have topics in common with another one. Only filters with wildcards can."""
    tree = FilterTree()
    wild = [one for one in filters if not one.startswith(SHARE_PREFIX) and ("+" in one or "#" in one)]
    for topic_filter in wild:
        tree.add(topic_filter)
    return {topic_filter for topic_filter in wild if tree.overlapping(topic_filter)}


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


MAX_FORMER: Final = 10_000
"""Names of shared subscriptions at the cloud that are remembered for what may still come by them."""


class CloudFilters:
    """Who needs which filters at the cloud, counted: each of ``filters`` of clients, times the rules that they meet.

    A filter is wanted at the highest QoS of those that want it. ``version`` rises when what is :meth:`wanted` may change.
    """

    def __init__(self, rules: list[str]) -> None:
        self.version = 0
        self._rules = rules
        self._counts: dict[str, list[int]] = {}
        self._wanted: dict[str, int] | None = None
        self._shared: dict[str, str] = {}

    def set_rules(self, rules: list[str]) -> None:
        """Other topics are ``broadcast`` from now on."""
        if rules != self._rules:
            self._rules = rules
            self._changed()

    def add(self, topic_filter: str, qos: int) -> None:
        """Somebody wants this filter."""
        counts = self._counts.get(topic_filter)
        if counts is None:
            counts = [0, 0, 0]
            self._counts[topic_filter] = counts
        counts[qos] += 1
        if counts[qos] == 1:
            self._changed()

    def remove(self, topic_filter: str, qos: int) -> None:
        """Somebody does not want it any more. :meth:`add` was called with the same before."""
        counts = self._counts[topic_filter]
        counts[qos] -= 1
        if counts[qos] == 0:
            if counts == [0, 0, 0]:
                del self._counts[topic_filter]
                if len(self._shared) > MAX_FORMER:
                    self._shared.clear()  # what is wanted enters itself again
            self._changed()

    def _changed(self) -> None:
        self.version += 1
        self._wanted = None

    def wanted(self) -> dict[str, int]:
        """What to subscribe to at the cloud, with its QoS; not collapsed."""
        wanted = self._wanted
        if wanted is None:
            wanted = {}
            for topic_filter, counts in self._counts.items():
                qos = 2 if counts[2] else 1 if counts[1] else 0
                for rule in self._rules:
                    common = shared_intersection(topic_filter, rule)
                    if common:
                        wanted[common] = max(qos, wanted.get(common, 0))
                        if common != topic_filter and common.startswith(SHARE_PREFIX):
                            self._shared[common] = topic_filter
            self._wanted = wanted
        return wanted

    def shared_as(self, topic_filter: str) -> str:
        """The shared subscription of clients that is this one at the cloud."""
        return self._shared.get(topic_filter, topic_filter)

"""Retained messages: the last one of each topic, found again by wildcard without looking at the others.

Where brokers have them in common (:mod:`nearcast.fabric.replication`), each topic's message also has a :class:`Version`, and a
topic keeps its version for a while after its message was cleared.
"""

from __future__ import annotations

import heapq
from typing import Protocol

from nearcast.mqtt.publication import Publication


class Version:
    """Which change of a topic's retained message this is: of two, the later ``stamp`` holds, then the greater ``origin``.

    ``origin`` names the broker a client published it at, and that broker's epoch.
    """

    def __init__(self, stamp: int, origin: str) -> None:
        self.stamp = stamp
        self.origin = origin

    def is_before(self, stamp: int, origin: str) -> bool:
        return (self.stamp, self.origin) < (stamp, origin)


class Replica(Protocol):
    """Who has retained messages in common with other brokers."""

    def admit(self, publication: Publication, now: float) -> bool:
        """A publication is to be retained: give it a version; false when it came from elsewhere and a later one is there."""

    def cleared(self, topic: bytes, kept: bool, now: float) -> None:
        """The topic has no message any more: it was cleared or expired, or, not ``kept``, there is no room for it."""


class _Level:
    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.message: Publication | None = None


class RetainedMessages:
    """A tree by topic level."""

    def __init__(self) -> None:
        self._root = _Level()
        # (deadline, topic) of messages that expire, soonest first; those that were replaced meanwhile are passed over.
        self._deadlines: list[tuple[float, bytes]] = []
        self.replica: Replica | None = None
        #: By topic; by origin, the stamp up to which everything it changed is known here.
        self.versions: dict[bytes, Version] = {}
        self.seen: dict[str, int] = {}
        self.count = 0
        self.bytes = 0

    def get(self, topic: bytes) -> Publication | None:
        level = self._root
        for name in topic.split(b"/"):
            below = level.children.get(name)
            if below is None:
                return None
            level = below
        return level.message

    def set(self, topic: bytes, message: Publication) -> None:
        level = self._root
        for name in topic.split(b"/"):
            below = level.children.get(name)
            if below is None:
                below = _Level()
                level.children[name] = below
            level = below
        before = level.message
        if before is None:
            self.count += 1
        else:
            self.bytes -= len(before.packets)
        level.message = message
        self.bytes += len(message.packets)
        if message.expires_at:
            heapq.heappush(self._deadlines, (message.expires_at, topic))
            if len(self._deadlines) > 2 * self.count + 1_000:
                self._deadlines = [(kept.expires_at, kept.topic) for kept in self.all() if kept.expires_at]
                heapq.heapify(self._deadlines)

    def expire(self, now: float) -> list[bytes]:
        """Remove the messages whose time has passed; returns their topics."""
        expired: list[bytes] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            topic = heapq.heappop(self._deadlines)[1]
            message = self.get(topic)
            if message is not None and message.expired(now):
                self.remove(topic)
                expired.append(topic)
        return expired

    def remove(self, topic: bytes) -> bool:
        """Forget the topic's message and the levels that only led to it; returns whether there was one."""
        names = topic.split(b"/")
        path = [self._root]
        for name in names:
            below = path[-1].children.get(name)
            if below is None:
                return False
            path.append(below)
        message = path[-1].message
        if message is None:
            return False
        path[-1].message = None
        self.count -= 1
        self.bytes -= len(message.packets)
        for depth in range(len(names), 0, -1):
            level = path[depth]
            if level.children or level.message is not None:
                break
            del path[depth - 1].children[names[depth - 1]]
        return True

    def match(self, topic_filter: str) -> list[Publication]:
        """The messages whose topics a filter matches."""
        levels = topic_filter.encode("utf-8").split(b"/")
        found: list[Publication] = []
        frontier = [self._root]
        first = True
        for name in levels:
            following: list[_Level] = []
            for level in frontier:
                if name == b"#":
                    self._everything(level, found, first)
                elif name == b"+":
                    for key, below in level.children.items():
                        if not (first and key[:1] == b"$"):  # [MQTT-4.7.2-1]
                            following.append(below)
                else:
                    exact = level.children.get(name)
                    if exact is not None:
                        following.append(exact)
            if name == b"#":
                return found
            first = False
            frontier = following
        for level in frontier:
            if level.message is not None:
                found.append(level.message)
        return found

    def all(self) -> list[Publication]:
        found: list[Publication] = []
        self._everything(self._root, found, False)
        return found

    def _everything(self, start: _Level, found: list[Publication], skip_dollar: bool) -> None:
        # The level itself counts too: "a/#" matches "a".
        stack = [start]
        while stack:
            level = stack.pop()
            if level.message is not None:
                found.append(level.message)
            for name, below in level.children.items():
                if not (skip_dollar and level is start and name[:1] == b"$"):
                    stack.append(below)

"""Retained messages: the last one of each topic, found again by wildcard without looking at the others."""

from __future__ import annotations

from nearcast.mqtt.publication import Publication


class _Level:
    def __init__(self) -> None:
        self.children: dict[bytes, _Level] = {}
        self.message: Publication | None = None


class RetainedMessages:
    """A tree by topic level. Expired messages are removed when met."""

    def __init__(self) -> None:
        self._root = _Level()
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

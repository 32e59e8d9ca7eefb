"""Who wants which topics: a tree of filter levels. Matching costs what the topic's depth asks, however many subscribe.

Each node stands for one prefix of filter levels. Plain children sit in a dict; the ``+`` child and the subscriptions that end
in ``#`` below a node have their own places, so that matching a topic visits only nodes whose filter prefix matches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nearcast.mqtt.session import Session


class Subscription:
    """One session's interest in one topic filter, with the options it asked for (section 3.8.3.1)."""

    def __init__(
        self,
        session: Session,
        topic_filter: str,
        qos: int,
        no_local: bool = False,
        retain_as_published: bool = False,
        retain_handling: int = 0,
        identifier: int = 0,
    ) -> None:
        self.session = session
        self.topic_filter = topic_filter
        self.qos = qos
        self.no_local = no_local
        self.retain_as_published = retain_as_published
        self.retain_handling = retain_handling
        self.identifier = identifier


class SharedGroup:
    """The members of one shared subscription: each message goes to exactly one of them (section 4.8.2).

    ``turn`` is the member whose turn it is; it lives here and not in a route so that fairness survives changes of interest.
    """

    def __init__(self, name: str, inner_filter: str) -> None:
        self.name = name
        self.inner_filter = inner_filter
        self.members: dict[str, Subscription] = {}
        self.turn = 0


class Watcher(Protocol):
    """Who is told of every subscription that comes or goes; one that is replaced stays."""

    def subscribed(self, group: str, inner_filter: str, client_id: str) -> None: ...

    def unsubscribed(self, group: str, inner_filter: str, client_id: str) -> None: ...


class Node:
    """One level of the tree. Containers are made when first needed: most nodes hold one thing."""

    def __init__(self) -> None:
        self.children: dict[bytes, Node] | None = None
        self.plus: Node | None = None
        self.subscribers: dict[str, Subscription] | None = None
        self.hash_subscribers: dict[str, Subscription] | None = None
        self.groups: dict[str, SharedGroup] | None = None
        self.hash_groups: dict[str, SharedGroup] | None = None

    def is_empty(self) -> bool:
        return not (self.children or self.plus or self.subscribers or self.hash_subscribers or self.groups or self.hash_groups)


class Match:
    """What a topic matched: the subscriptions, each session possibly several times, and the shared groups."""

    def __init__(self) -> None:
        self.subscriptions: list[Subscription] = []
        self.groups: list[SharedGroup] = []


class SubscriptionTree:
    """All subscriptions of a broker. ``generation`` changes whenever an answer of :meth:`match` may have changed."""

    def __init__(self) -> None:
        self._root = Node()
        self.generation = 0
        self.count = 0
        self.watcher: Watcher | None = None

    def add(self, group: str, inner_filter: str, subscription: Subscription) -> bool:
        """Add or replace a session's subscription; returns whether it is new [MQTT-3.8.4-3]."""
        self.generation += 1
        levels = inner_filter.encode("utf-8").split(b"/")
        node = self._root
        ends_in_hash = levels[-1] == b"#"
        for level in levels[:-1] if ends_in_hash else levels:
            node = _descend(node, level)
        members = _members(node, group, inner_filter, ends_in_hash)
        client_id = subscription.session.client_id
        is_new = client_id not in members
        members[client_id] = subscription
        if is_new:
            self.count += 1
            if self.watcher is not None:
                self.watcher.subscribed(group, inner_filter, client_id)
        return is_new

    def remove(self, group: str, inner_filter: str, client_id: str) -> bool:
        """Remove a session's subscription and every node that is left empty; returns whether there was one."""
        levels = inner_filter.encode("utf-8").split(b"/")
        ends_in_hash = levels[-1] == b"#"
        if ends_in_hash:
            levels = levels[:-1]
        path: list[Node] = [self._root]
        for level in levels:
            child = _child(path[-1], level)
            if child is None:
                return False
            path.append(child)
        if not _remove_member(path[-1], group, client_id, ends_in_hash):
            return False
        self.generation += 1
        self.count -= 1
        for depth in range(len(levels), 0, -1):
            if not path[depth].is_empty():
                break
            parent = path[depth - 1]
            if levels[depth - 1] == b"+":
                parent.plus = None
            elif parent.children is not None:
                del parent.children[levels[depth - 1]]
                if not parent.children:
                    parent.children = None
        if self.watcher is not None:
            self.watcher.unsubscribed(group, inner_filter, client_id)
        return True

    def find_group(self, group: str, inner_filter: str) -> SharedGroup | None:
        """The shared subscription of this name and filter, if it has members."""
        levels = inner_filter.encode("utf-8").split(b"/")
        ends_in_hash = levels[-1] == b"#"
        node: Node | None = self._root
        for level in levels[:-1] if ends_in_hash else levels:
            if node is None:
                return None
            node = _child(node, level)
        if node is None:
            return None
        groups = node.hash_groups if ends_in_hash else node.groups
        return None if groups is None else groups.get(group)

    def match(self, topic: bytes) -> Match:
        """Everything that wants ``topic``."""
        found = Match()
        levels = topic.split(b"/")
        # Wildcards of the first level do not match topics that begin with $ [MQTT-4.7.2-1].
        hidden = topic[:1] == b"$"
        frontier: list[Node] = [self._root]
        first = True
        for level in levels:
            following: list[Node] = []
            for node in frontier:
                if not (first and hidden):
                    if node.hash_subscribers is not None or node.hash_groups is not None:
                        _collect(found, node.hash_subscribers, node.hash_groups)
                    plus = node.plus
                    if plus is not None:
                        following.append(plus)
                children = node.children
                if children is not None:
                    child = children.get(level)
                    if child is not None:
                        following.append(child)
            first = False
            frontier = following
            if not frontier:
                return found
        for node in frontier:
            _collect(found, node.subscribers, node.groups)
            _collect(found, node.hash_subscribers, node.hash_groups)  # "a/#" also matches "a" [MQTT-4.7.1-2]
        return found


def _descend(node: Node, level: bytes) -> Node:
    if level == b"+":
        if node.plus is None:
            node.plus = Node()
        return node.plus
    if node.children is None:
        node.children = {}
    child = node.children.get(level)
    if child is None:
        child = Node()
        node.children[level] = child
    return child


def _child(node: Node, level: bytes) -> Node | None:
    if level == b"+":
        return node.plus
    if node.children is None:
        return None
    return node.children.get(level)


def _members(node: Node, group: str, inner_filter: str, ends_in_hash: bool) -> dict[str, Subscription]:
    if group:
        groups = node.hash_groups if ends_in_hash else node.groups
        if groups is None:
            groups = {}
            if ends_in_hash:
                node.hash_groups = groups
            else:
                node.groups = groups
        shared = groups.get(group)
        if shared is None:
            shared = SharedGroup(group, inner_filter)
            groups[group] = shared
        return shared.members
    members = node.hash_subscribers if ends_in_hash else node.subscribers
    if members is None:
        members = {}
        if ends_in_hash:
            node.hash_subscribers = members
        else:
            node.subscribers = members
    return members


def _remove_member(node: Node, group: str, client_id: str, ends_in_hash: bool) -> bool:
    if group:
        groups = node.hash_groups if ends_in_hash else node.groups
        shared = None if groups is None else groups.get(group)
        if groups is None or shared is None or client_id not in shared.members:
            return False
        del shared.members[client_id]
        if not shared.members:
            del groups[group]
        return True
    members = node.hash_subscribers if ends_in_hash else node.subscribers
    if members is None or client_id not in members:
        return False
    del members[client_id]
    return True


def _collect(found: Match, members: dict[str, Subscription] | None, groups: dict[str, SharedGroup] | None) -> None:
    if members is not None:
        found.subscriptions.extend(members.values())
    if groups is not None:
        found.groups.extend(groups.values())

"""Topic classes: which behaviour a topic has in the fabric, decided by the first rule whose filter matches it.

====================  ==================================================================================================
``bridged``           the default: a message goes once to every broker with a matching subscriber
``local``             a message never leaves the broker that received it: its subscribers elsewhere, its retained copies
                      elsewhere and members of its shared subscriptions elsewhere get nothing
``broadcast``         a message goes to every broker of this one's group, and to other groups through the cloud
                      (:mod:`nearcast.fabric.broadcast`)
``broadcast-``        the same, but inside the group only to brokers with a subscriber, who is thus served a moment after
``filtered``          it subscribed, not at once
``owned``             a message goes to the topic's owner, one broker at a time, which orders it and sends it to every broker
                      with a matching subscriber (:mod:`nearcast.fabric.ownership`)
``set:NAME``          class ``owned`` for topics that are durable: the leader of a replica set orders a message once the set
                      has it on disk, and every broker with a matching subscriber reads it there
                      (:mod:`nearcast.fabric.replica_sets`)
====================  ==================================================================================================

The class is the receiving broker's to decide, and compiled into routes, so that it costs nothing per message. Rules come from
the configuration; the controller may replace them while brokers run (CLASSES), and the newest ones hold. Interest does not
depend on classes: a filter may match topics of several.
"""

from __future__ import annotations

from typing import Final, Protocol

from nearcast.config import Retention, TopicRule
from nearcast.errors import ConfigError
from nearcast.mqtt.routing import FABRIC, GROUP, GROUP_FILTERED, HERE, OWNED_REACH, Route, Router, Target
from nearcast.mqtt.session import Session
from nearcast.mqtt.topics import covers, filter_fault, overlaps
from nearcast.topiclog.rules import RuleTable

BRIDGED: Final = "bridged"
LOCAL: Final = "local"
BROADCAST: Final = "broadcast"
BROADCAST_FILTERED: Final = "broadcast-filtered"
OWNED: Final = "owned"
CLASSES: Final = (BRIDGED, LOCAL, BROADCAST, BROADCAST_FILTERED, OWNED)

_REACH: Final = {
    BRIDGED: FABRIC,
    LOCAL: HERE,
    BROADCAST: GROUP,
    BROADCAST_FILTERED: GROUP_FILTERED,
    OWNED: OWNED_REACH,
}

SET: Final = "set:"
"""Begins the class of topics that a replica set keeps; its name follows."""

MAX_LEVELS: Final = 1_000


def class_fault(topic_filter: str, topic_class: str) -> str:
    """What is wrong with a rule, in words; empty when nothing is."""
    fault = filter_fault(topic_filter, MAX_LEVELS)
    if fault:
        return fault
    if topic_class.startswith(SET) and len(topic_class) > len(SET):
        return ""
    if topic_class not in CLASSES:
        return f"there is no class {topic_class!r}: " + ", ".join(CLASSES)
    return ""


class GroupTargets(Protocol):
    """Whom messages of class ``broadcast`` go to (:class:`nearcast.fabric.broadcast.Broadcast`)."""

    def flooded(self, matched: list[Target], filtered: bool) -> list[Target]:
        """The brokers of the group, or those of them that matched, and the way to other groups."""

    def is_fellow(self, session: Session) -> bool:
        """Whether another broker is of this one's group."""

    def classes_changed(self) -> None:
        """Other topics are of class ``broadcast`` now."""


class Owners(Protocol):
    """Where messages of class ``owned`` go (:class:`nearcast.fabric.ownership.Ownership`)."""

    def direct(self, route: Route) -> None:
        """Make a route that is compiled so far as the topic's state here wants it."""

    def classes_changed(self) -> None:
        """Other topics are of class ``owned`` now."""


class Sets(Protocol):
    """Where messages of topics go that a replica set keeps (:class:`nearcast.fabric.replica_sets.ReplicaSets`)."""

    def direct(self, route: Route, set_name: str) -> None:
        """Make the route of such a topic."""


class TopicClasses:
    """The rules of one broker. ``stamp`` is when they were decided, in microseconds; the configuration's have 0."""

    def __init__(self, router: Router, rules: list[tuple[str, str]], bounds: dict[str, float] | None = None) -> None:
        self._router = router
        self.stamp = 0
        self._table = RuleTable()
        self._class_of: dict[str, str] = {}
        self.rules: list[tuple[str, str]] = []
        self.bounds: dict[str, float] = {}
        self.retentions: dict[str, Retention] = {}
        self.group: GroupTargets | None = None
        self.owners: Owners | None = None
        self.sets: Sets | None = None
        self.replace(rules, 0, bounds)
        router.classes = self

    def replace(
        self,
        rules: list[tuple[str, str]],
        stamp: int,
        bounds: dict[str, float] | None = None,
        retentions: dict[str, Retention] | None = None,
    ) -> bool:
        """Use these rules, (filter, class) in their order, unless newer ones are in use. By filter: ``bounds``, the latency
        bounds of class ``owned`` in ms; ``retentions``, how much a replica set keeps. Raises :class:`ConfigError`."""
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
        self.bounds = {} if bounds is None else bounds
        self.retentions = {} if retentions is None else retentions
        self._class_of = class_of
        self._table = RuleTable([TopicRule(topic=topic_filter) for topic_filter in class_of])
        self._router.tree.generation += 1
        if self.group is not None:
            self.group.classes_changed()
        if self.owners is not None:
            self.owners.classes_changed()
        return True

    def class_of(self, topic: bytes) -> str:
        """The class of a topic."""
        rule = self._table.match(topic)
        return BRIDGED if rule is None else self._class_of[rule.topic]

    def set_of(self, topic: bytes) -> str:
        """The replica set that keeps a topic; empty if none does."""
        topic_class = self.class_of(topic)
        return topic_class[len(SET) :] if topic_class.startswith(SET) else ""

    def keepers(self, topic_filter: str) -> tuple[list[str], bool]:
        """The replica sets that may keep topics which a filter matches, by name, and whether others match it as well."""
        found: set[str] = set()
        for rule_filter, topic_class in self.rules:
            if overlaps(rule_filter, topic_filter):
                if topic_class.startswith(SET):
                    found.add(topic_class[len(SET) :])
                    if covers(rule_filter, topic_filter):
                        return sorted(found), False
                elif covers(rule_filter, topic_filter):
                    break
        return sorted(found), True

    def max_latency_ms(self, topic: bytes) -> float:
        """How long a message of an owned topic may take; 0: as long as it takes."""
        rule = self._table.match(topic)
        return 0.0 if rule is None or self._class_of[rule.topic] != OWNED else self.bounds.get(rule.topic, 0.0)

    def retention(self, topic: bytes) -> Retention | None:
        """How much a replica set keeps of a topic, if a rule says so."""
        rule = self._table.match(topic)
        return None if rule is None else self.retentions.get(rule.topic)

    def crosses(self, topic: bytes) -> bool:
        """Whether messages of a topic go to other brokers at all."""
        return self.reach(topic) != HERE

    def reach(self, topic: bytes) -> int:
        if topic[:5] == b"$SYS/":
            return HERE
        return _REACH.get(self.class_of(topic), OWNED_REACH) if self.rules else FABRIC

    def flooded(self, matched: list[Target], reach: int) -> list[Target]:
        return matched if self.group is None else self.group.flooded(matched, reach == GROUP_FILTERED)

    def direct(self, route: Route) -> None:
        topic_class = self.class_of(route.topic)
        if topic_class.startswith(SET):
            if self.sets is not None:
                self.sets.direct(route, topic_class[len(SET) :])
        elif self.owners is not None:
            self.owners.direct(route)

    def serves(self, session: Session) -> bool:
        return self.group is None or self.group.is_fellow(session)

    def broadcast_filters(self) -> list[str]:
        """The filters of rules that make topics ``broadcast``. A rule before them may make some of those something else."""
        return [
            topic_filter
            for topic_filter, topic_class in self._class_of.items()
            if GROUP <= _REACH.get(topic_class, OWNED_REACH) <= GROUP_FILTERED
        ]

"""Filters without those that another one covers, kept up to date change by change.

A leader with ten thousand devices has ten thousand filters, and one of them changes with every device that comes or goes: that
must not cost a look at all the others. :class:`Collapsed` therefore keeps, for each filter that is to be subscribed to (a
*top*), the filters that it stands for, and a tree of the tops; a change touches the filter itself, its top, and, where a top
with wildcards comes or goes, those that it covers.

A top's QoS is the highest of those it stands for. Tops with wildcards that overlap others are in ``overlapping``: copies of a
message may come by each of them (:mod:`nearcast.fabric.cloud_copies`). Shared subscriptions are tops, each for itself.
"""

from __future__ import annotations

from nearcast.fabric.cloud_filters import FilterTree
from nearcast.mqtt.topics import SHARE_PREFIX


class _Top:
    """A filter to subscribe to: what it stands for, itself included, and how many of those want which QoS."""

    def __init__(self) -> None:
        self.members: dict[str, None] = {}
        self.counts = [0, 0, 0]

    @property
    def qos(self) -> int:
        return 2 if self.counts[2] else 1 if self.counts[1] else 0


class Collapsed:
    """See the module. ``changed`` are the tops that came, went, or are to be subscribed to in another way; it is the user's to
    clear."""

    def __init__(self) -> None:
        self.changed: dict[str, None] = {}
        self.overlapping: set[str] = set()
        self._qos: dict[str, int] = {}
        self._top_of: dict[str, str] = {}
        self._tops: dict[str, _Top] = {}
        # All plain tops, and those with wildcards.
        self._tree = FilterTree()
        self._wild = FilterTree()

    def tops(self) -> dict[str, int]:
        """What to subscribe to, with its QoS."""
        return {name: top.qos for name, top in self._tops.items()}

    def qos(self, topic_filter: str) -> int:
        """The QoS of a top; -1 for what is none."""
        top = self._tops.get(topic_filter)
        return -1 if top is None else top.qos

    def put(self, topic_filter: str, qos: int) -> None:
        """Want a filter, or want it at another QoS."""
        if topic_filter in self._qos:
            if self._qos[topic_filter] != qos:
                self._count(self._top_of[topic_filter], self._qos[topic_filter], -1)
                self._count(self._top_of[topic_filter], qos, 1)
                self._qos[topic_filter] = qos
            return
        self._qos[topic_filter] = qos
        self._place(topic_filter)

    def drop(self, topic_filter: str) -> None:
        """Do not want a filter any more, if it was wanted."""
        qos = self._qos.pop(topic_filter, -1)
        if qos < 0:
            return
        name = self._top_of.pop(topic_filter)
        top = self._tops[name]
        del top.members[topic_filter]
        if name != topic_filter:
            self._count(name, qos, -1)
            return
        self._remove_top(name)
        for orphan in sorted(top.members, key=_is_exact):  # those with wildcards first: they may take in others
            self._place(orphan)

    def _count(self, name: str, qos: int, change: int) -> None:
        top = self._tops[name]
        before = top.qos
        top.counts[qos] += change
        if top.qos != before:
            self.changed[name] = None

    def _place(self, topic_filter: str) -> None:
        """Find the top of a filter, or make it one."""
        shared = topic_filter.startswith(SHARE_PREFIX)
        name = "" if shared else self._wild.covering(topic_filter, topic_filter)
        if not name:
            name = topic_filter
            top = _Top()
            if not shared and not _is_exact(topic_filter):
                for covered in self._tree.covered_by(topic_filter):
                    former = self._tops[covered]
                    self._remove_top(covered)
                    for place in range(3):
                        top.counts[place] += former.counts[place]
                    for member in former.members:
                        top.members[member] = None
                        self._top_of[member] = name
            self._tops[name] = top
            self.changed[name] = None
            if not shared:
                self._add_top(name)
        self._tops[name].members[topic_filter] = None
        self._top_of[topic_filter] = name
        self._count(name, self._qos[topic_filter], 1)

    def _add_top(self, name: str) -> None:
        self._tree.add(name)
        if _is_exact(name):
            return
        others = self._wild.all_overlapping(name)
        self._wild.add(name)
        if others:
            self._number(name, True)
            for other in others:
                self._number(other, True)

    def _remove_top(self, name: str) -> None:
        del self._tops[name]
        self.changed[name] = None
        if name.startswith(SHARE_PREFIX):
            return
        self._tree.remove(name)
        if _is_exact(name):
            return
        self._wild.remove(name)
        self.overlapping.discard(name)
        for other in self._wild.all_overlapping(name):
            if not self._wild.overlapping(other):
                self._number(other, False)

    def _number(self, name: str, overlaps: bool) -> None:
        if overlaps != (name in self.overlapping):
            self.changed[name] = None
            if overlaps:
                self.overlapping.add(name)
            else:
                self.overlapping.discard(name)


def _is_exact(topic_filter: str) -> bool:
    return "+" not in topic_filter and "#" not in topic_filter

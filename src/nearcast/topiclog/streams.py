"""The broker's side of a stream: which records a reader still has to get, in bounded steps, by credit.

A :class:`ReadStream` goes through the same states whoever reads::

    opening ──► reading ◄──► caught up ──► finished
                                │ with `follow`, until more is committed

Opening looks at every topic of the log once, some at a time, and names those that a filter matches. A stream over one topic
then reads along that topic's index. A stream over several reads the log in its own order and takes out what it wants. Either
way :meth:`ReadStream.plan` says which bytes are next and touches no file; a driver reads them, in a thread or not, and hands
them to :meth:`ReadStream.take`, which cuts off what was not asked for and knows what to tell the reader.

Retention may remove records before they are read. The reader is told so (:class:`~nearcast.topiclog.wire.Gap`), never left to
find out. No sockets, no threads, no clock here; the log is asked from the thread that owns it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from nearcast.config import TopicRule
from nearcast.topiclog import wire
from nearcast.topiclog.batches import Block
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.rules import RuleTable
from nearcast.topiclog.sifting import sift
from nearcast.topiclog.topics import Extents, Topic

MAX_CREDIT: Final = 1 << 40

MAX_NAMED_BYTES: Final = 1_048_576
"""Bytes of topic names in one :class:`~nearcast.topiclog.wire.Names`."""

MAX_SEARCHED: Final = 100
"""Topics in which one step looks for a time: that may have to read a file."""

_NO_END: Final = (1 << 63) - 1


class Batch:
    """What a stream sends next: chunks of whole blocks, and how far the reader has come with them."""

    __slots__ = ("bytes", "chunks", "progress")

    def __init__(self, chunks: list[bytes | memoryview], progress: list[tuple[int, int]]) -> None:
        self.chunks = chunks
        self.bytes = sum(map(len, chunks))
        self.progress = wire.Progress(progress)


class ReadStream:
    """One stream of one reader. The driver calls :meth:`look` until it is ``opened`` and before each :meth:`plan`."""

    def __init__(self, number: int, asked: wire.Open, log: TopicLog, hidden: Callable[[bytes], bool] | None = None) -> None:
        self.number = number
        self.credit = 0
        self.opened = False
        self._asked = asked
        self._log = log
        self._hidden = hidden
        """Topics that a filter with wildcards does not find here: another log keeps them."""
        self._table = RuleTable(TopicRule(topic=topic_filter) for topic_filter in asked.filters)
        self._wild = any("+" in topic_filter or "#" in topic_filter for topic_filter in asked.filters)
        self._topics: dict[int, Topic] = {}
        self._wanted: set[int] = set()
        self._next: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._unfinished = 0
        """Topics that have not reached their end."""
        self._missing_ends = set(asked.end_indexes)
        self._looked_at = 0
        """The number of the last topic that was compared with the filters."""
        self._last_at_opening = log.last_number()
        self._position_at_opening = log.committed_position
        """Topics above that number have all of their records behind this position, also those that come during the opening."""
        self._gaps: list[wire.Gap] = []
        self._cursor = -1
        """Where in the log it is; -1 for a stream that goes along one topic's index."""
        self._lowest_position = -1
        self._stop_position = 0
        self._extents: Extents | None = None
        self._over = False
        self.grant(asked.credit)

    def grant(self, credit: int) -> None:
        """The reader takes so many bytes more."""
        self.credit = min(MAX_CREDIT, self.credit + max(0, credit))

    @property
    def listed_count(self) -> int:
        """Indexes by topic that its reader gave."""
        return len(self._asked.start_indexes) + len(self._asked.end_indexes)

    # --- opening ------------------------------------------------------------------------------------------------------------

    def look(self, max_topics: int) -> list[wire.Name]:
        """Compare the next topics with the filters; those that are going to be read, to be named to the reader."""
        log = self._log
        if self.opened and not self._asked.follow:
            return []
        if not self._wild and not self.opened:
            named = [log.topic(topic_filter.encode(), create=False) for topic_filter in self._asked.filters]
            names = self._add([topic for topic in dict.fromkeys(named) if topic is not None])
            self._looked_at = self._last_at_opening
            self._open()
            return names
        last = log.last_number() if self.opened else self._last_at_opening
        upto = min(last, self._looked_at + max_topics)
        matching = []
        name_bytes = 0
        by_time = self._asked.start == "time" or self._asked.end_time_us is not None
        for number in range(self._looked_at + 1, upto + 1):
            topic = log.numbered(number)
            if (
                topic is not None
                and number not in self._topics
                and self._table.match(topic.name) is not None
                and not (self._hidden is not None and self._hidden(topic.name))
            ):
                matching.append(topic)
                name_bytes += len(topic.name)
                if name_bytes >= MAX_NAMED_BYTES or (by_time and len(matching) >= MAX_SEARCHED):
                    upto = number
                    break
        self._looked_at = upto
        names = self._add(matching)
        if not self.opened and upto >= last:
            self._open()
        return names

    def _open(self) -> None:
        """All topics that are there are known: choose the way to read them."""
        self.opened = True
        asked, log = self._asked, self._log
        self._stop_position = log.committed_position
        may_grow = asked.follow and (self._wild or len(asked.filters) > 1)
        if may_grow or len(self._topics) > 1 or (asked.follow and asked.end_time_us is not None):
            self._cursor = log.committed_position if self._lowest_position < 0 else self._lowest_position
            if may_grow:
                self._cursor = min(self._cursor, self._position_at_opening)

    def _add(self, topics: list[Topic]) -> list[wire.Name]:
        asked = self._asked
        names = []
        for topic in topics:
            name = topic.text()
            if asked.listed_only and name not in asked.start_indexes:
                continue
            start, end = self._start_of(topic, name), self._end_of(topic, name)
            number = topic.number
            if not self.opened:
                position = self._log.position_of(topic, start)
                self._lowest_position = position if self._lowest_position < 0 else min(position, self._lowest_position)
            self._topics[number] = topic
            self._wanted.add(number)
            self._next[number] = start
            self._ends[number] = end
            self._unfinished += start < end
            self._missing_ends.discard(name)
            names.append(wire.Name(number, name, start, None if end == _NO_END else end))
        return names

    def _start_of(self, topic: Topic, name: str) -> int:
        asked = self._asked
        listed = asked.start_indexes.get(name)
        if listed is not None:
            start = listed
        elif topic.number > self._last_at_opening:
            start = 1  # it appeared later: all of it is new
        elif asked.start == "latest":
            start = topic.committed_index
        elif asked.start == "index":
            start = asked.start_value
        elif asked.start == "time":
            start = self._log.index_at(topic, asked.start_value)
        else:
            start = topic.first_index
        return min(max(1, start), _NO_END)

    def _end_of(self, topic: Topic, name: str) -> int:
        asked = self._asked
        end = asked.end_indexes.get(name, _NO_END if asked.end_index is None else asked.end_index)
        end = min(max(1, end), _NO_END)
        if asked.follow:
            return end
        end = min(end, topic.committed_index)
        if asked.end_time_us is not None:
            end = min(end, self._log.index_at(topic, asked.end_time_us))
        return end

    # --- reading ------------------------------------------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        """Whether everything up to the end was sent."""
        if self._over:
            return True
        if not self.opened or self._gaps or self._extents is not None:
            return False
        if self._asked.follow:
            bounded = self._asked.end_index is not None or len(self._asked.end_indexes) > 0
            return bounded and not self._unfinished and not self._missing_ends and len(self._topics) > 0
        return not self._unfinished or (self._cursor >= 0 and self._cursor >= self._stop_position)

    def plan(self, max_bytes: int) -> Extents | None:
        """Which bytes to read next, to be handed to :meth:`take`; ``None`` when there are none (yet)."""
        found = self._scan(max_bytes) if self._cursor >= 0 else self._read(max_bytes)
        if found is not None and not found.bytes:
            if self._cursor >= 0:
                self._cursor = found.cursor
            else:
                # What the index says is there is not: damage took it.
                self._skip_to(next(iter(self._topics)), found.next_index)
            found = None
        self._extents = found
        return found

    def _read(self, max_bytes: int) -> Extents | None:
        for number, topic in self._topics.items():
            self._skip_to(number, min(topic.first_index, self._ends[number]))
            start, end = self._next[number], self._ends[number]
            if start < min(end, topic.committed_index):
                return self._log.read(topic, start, end, max_bytes)
        return None

    def _scan(self, max_bytes: int) -> Extents | None:
        log = self._log
        if self._cursor >= log.committed_position or self._over or self._unlooked:
            return None
        return log.scan(self._wanted, self._cursor, max_bytes)

    @property
    def _unlooked(self) -> bool:
        """Whether topics appeared that :meth:`look` has not come to: nothing may be read past them."""
        return self._asked.follow and self._looked_at < self._log.last_number()

    @property
    def waiting(self) -> bool:
        """Whether there is nothing to do before more is committed."""
        if self.finished or self._unlooked:
            return False
        log = self._log
        if self._cursor >= 0:
            return self._cursor >= log.committed_position
        return all(self._next[number] >= topic.committed_index for number, topic in self._topics.items())

    def take(self, data: memoryview) -> Batch | None:
        """The bytes of the plan were read; what to send of them, if anything."""
        extents, self._extents = self._extents, None
        if extents is None:
            return None
        batch = self._take_scanned(data, extents) if self._cursor >= 0 else self._take_read(data, extents)
        if batch is not None:
            self.credit -= batch.bytes
        return batch

    def drop_plan(self) -> None:
        """The bytes could not be read: they are planned again."""
        self._extents = None

    def take_gaps(self) -> list[wire.Gap]:
        """What to tell of missing records, before anything else is sent."""
        if not self._gaps and self.finished and self._cursor >= 0 and self._unfinished and not self._asked.follow:
            # All was looked at, and some never came.
            for number, end in self._ends.items():
                self._skip_to(number, end)
        gaps, self._gaps = self._gaps, []
        return gaps

    def _take_read(self, data: memoryview, extents: Extents) -> Batch | None:
        ((number, end),) = self._ends.items()
        upto = min(extents.next_index, end)
        first = Block(data, 0).first_index
        if first >= self._next[number] and (upto < end or end >= self._topics[number].committed_index):
            # Blocks as they lie there. They are looked into only where reading begins or ends inside of one.
            self._skip_to(number, min(first, end))
            self._advance(number, upto)
            return Batch([data], [(number, upto)])
        return self._sifted(data)

    def _take_scanned(self, data: memoryview, extents: Extents) -> Batch | None:
        self._cursor = extents.cursor
        return self._sifted(data)

    def _sifted(self, data: memoryview) -> Batch | None:
        end_time_us = _NO_END if self._asked.end_time_us is None else min(self._asked.end_time_us, _NO_END)
        found = sift(data, self._next, self._ends, self._topics, end_time_us)
        self._gaps += [wire.Gap(*gap) for gap in found.gaps]
        for number, index in found.next_indexes.items():
            self._advance(number, index)
        self._over = found.reached_end_time
        return Batch(found.chunks, list(found.next_indexes.items())) if found.chunks else None

    def _skip_to(self, number: int, index: int) -> None:
        """Records up to ``index`` are gone."""
        following = self._next[number]
        if following < index:
            self._gaps.append(wire.Gap(number, following, index))
            self._advance(number, index)

    def _advance(self, number: int, index: int) -> None:
        end = self._ends[number]
        if self._next[number] < end <= index:
            self._unfinished -= 1
        self._next[number] = index

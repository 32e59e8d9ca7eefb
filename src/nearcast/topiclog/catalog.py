"""What the log holds: its segments, its topics, how far it is committed, and the way to the bytes of each.

Indexes of sealed segments are mapped while they are in use, the last ``MAX_MAPPED`` of them; what stays in memory for a sealed
segment is its place in the list and, for each topic in it, one entry.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from mypy_extensions import i64

from nearcast.errors import StorageCorrupt, StorageUnavailable
from nearcast.topiclog.indexes import MappedRuns
from nearcast.topiclog.runs import Part, RunColumns
from nearcast.topiclog.segments import Segment, index_name, scan
from nearcast.topiclog.storage import Storage
from nearcast.topiclog.topics import Topic

OFFSET_BITS: Final = 32
OFFSET_MASK: Final = (1 << OFFSET_BITS) - 1
MAX_MAPPED: Final = 64
"""Sealed segments whose index and file are mapped at a time."""
MAX_DAMAGE: Final = 1_000
"""Broken places that are remembered while the log is open."""


class Catalog:
    """See the module."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.damage: list[StorageCorrupt] = []
        self.topics: dict[bytes, Topic] = {}
        self.numbered: dict[int, Topic] = {}
        self.segments: list[Segment] = []
        """Oldest first; the last one grows."""
        self.sequences: list[int] = []
        self.committed_position: int = 0
        self._mapped: dict[int, Segment] = {}

    def clear(self) -> None:
        """Forget all; topics that somebody holds become empty ones."""
        for topic in self.topics.values():
            topic.reset()
        self.topics = {}
        self.numbered = {}
        self.segments = []
        self.sequences = []
        self._mapped = {}

    def report(self, damage: StorageCorrupt) -> None:
        """Take note of damage, once however often it is met."""
        known = any(other.path == damage.path and other.offset == damage.offset for other in self.damage)
        if not known and len(self.damage) < MAX_DAMAGE:
            self.damage.append(damage)

    def add(self, segment: Segment) -> None:
        """One more segment, younger than all others."""
        self.segments.append(segment)
        self.sequences.append(segment.sequence)

    def drop(self, segment: Segment) -> None:
        """A segment that is not part of the log any more."""
        at = self.segments.index(segment)
        del self.segments[at]
        del self.sequences[at]
        self.unmap(segment)

    def sealed(self, segment: Segment) -> None:
        """A segment has an index file now: it need not be in memory."""
        segment.runs = None
        segment.has_index = True
        self.unmap(segment)

    def unmap(self, segment: Segment) -> None:
        """Let go of a segment's mappings."""
        self._mapped.pop(segment.sequence, None)
        segment.view = memoryview(b"")
        if segment.has_index:
            segment.runs = None

    def runs_of(self, segment: Segment) -> RunColumns:
        """A segment's runs, up to date."""
        runs = segment.runs
        if runs is None:
            runs = self._map(segment)
        try:
            runs.settle()
        except (StorageCorrupt, StorageUnavailable) as error:
            return self._rebuild(segment, error)
        return runs

    def part_of(self, segment: Segment, number: int) -> Part:
        """What a segment has of a topic that is known to be there, perhaps without its postings: cheaper than all its runs."""
        runs = segment.runs
        if runs is None:
            runs = self._map(segment)
        return runs.need(number)

    def _map(self, segment: Segment) -> RunColumns:
        mapped = self._mapped
        while len(mapped) >= MAX_MAPPED:
            self.unmap(next(iter(mapped.values())))
        try:
            segment.runs = MappedRuns(self.storage, index_name(segment.name))
        except (StorageCorrupt, StorageUnavailable) as error:
            return self._rebuild(segment, error)
        mapped[segment.sequence] = segment
        return segment.runs

    def _rebuild(self, segment: Segment, error: StorageCorrupt | StorageUnavailable) -> RunColumns:
        """The index file cannot be used: the runs are found in the segment, as when it had none."""
        if not isinstance(error, StorageCorrupt):
            error = StorageCorrupt(self.storage.path(index_name(segment.name)), 0, str(error))
        self.report(error)
        found = scan(self.storage, segment.name, is_last=False)
        found.apply_floors(segment.size)  # it was sealed: all of it is committed
        self._mapped.pop(segment.sequence, None)
        segment.has_index = False  # made anew by the next job
        found.runs.settle()
        segment.runs = found.runs
        return found.runs

    def bytes_at(self, segment: Segment, offset: i64, size: i64) -> tuple[memoryview, i64]:
        """Bytes of a segment, and where in them the asked for begin."""
        if len(segment.view) >= offset + size:
            return segment.view, offset
        if segment is self.segments[-1]:
            # Mapping it again after every append would cost more than this copy.
            return memoryview(self.storage.read(segment.name, offset, size)), 0
        segment.view = self.storage.view(segment.name, segment.size)
        return segment.view, offset

    def committed_in(self, segment: Segment) -> i64:
        """How much of a segment's file readers may see."""
        sequence = self.committed_position >> OFFSET_BITS
        if segment.sequence == sequence:
            return self.committed_position & OFFSET_MASK
        return segment.size if segment.sequence < sequence else 0

    def place_of(self, topic: Topic, index: int) -> Segment:
        """The segment with a committed record of a topic; the caller sees whether it has a gap there."""
        if index < topic.first_index or index >= topic.committed_index or not topic.places:
            raise topic.unavailable(index)
        place: i64 = bisect_right(topic.place_firsts, index) - 1
        return topic.places[place if place > 0 else 0]

    def is_live(self, number: int, end_index: int) -> bool:
        """Whether a topic still has a record below this index."""
        topic = self.numbered.get(number)
        return topic is not None and end_index > topic.first_index

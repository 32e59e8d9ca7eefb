"""Opening the log: from files to a catalog.

Sealed segments are known by the tables of their index files and are not read; the one that grew last is read whole. Whatever
is broken there ends the log, and is kept aside. An index that is missing or damaged is made from its segment again.
"""

from __future__ import annotations

from typing import Final

from nearcast.errors import StorageCorrupt
from nearcast.topiclog import indexes
from nearcast.topiclog.catalog import OFFSET_BITS, Catalog
from nearcast.topiclog.marks import RAFT, Mark, remember
from nearcast.topiclog.retention import advance
from nearcast.topiclog.runs import Part, Runs
from nearcast.topiclog.segments import (
    Scanned,
    Segment,
    check_version,
    index_name,
    linked_size,
    log_name,
    parse_log_name,
    repeated_marks,
    scan,
)
from nearcast.topiclog.storage import Storage
from nearcast.topiclog.topics import Topic

DAMAGED: Final = ".damaged"
MAX_DAMAGED_FILES: Final = 3
"""Pieces of damaged files that are kept for whoever wants to look."""


class Recovery:
    """Fills a catalog with what the storage holds; ``runs`` are those of the segment that grows."""

    def __init__(self, catalog: Catalog, first_sequence: int) -> None:
        self.runs = Runs()
        self.last_time_us = 0
        self.marks: dict[str, Mark] = {}
        self.last_number = 0
        self.group_floors: list[tuple[int, int, int]] = []
        """Topics that groups emptied: (position behind the group, topic, floor). They count when the group is committed."""
        self._catalog = catalog
        self._first_sequence = first_sequence
        self._storage: Storage = catalog.storage
        self._known: dict[bytes, Topic] = {}
        self._floors: dict[int, int] = {}
        self._names: set[str] = set()
        self._last_hole = 0
        """The last segment so far that retention took something from: it is gone, or was written anew."""

    def run(self) -> None:
        """Open the files, or make the first."""
        catalog = self._catalog
        found = self._connected(self._find_segments())
        self._known = catalog.topics
        catalog.clear()
        # One that was written anew does not grow: its groups lost their marks, so that an unfinished one would not show.
        grows = bool(found) and found[-1][1] == 0
        for sequence, generation in found[:-1] if grows else found:
            segment = Segment(sequence, generation)
            self._add(segment, self._open_sealed(segment))
        if grows:
            segment = Segment(found[-1][0], 0)
            self._add(segment, self._open_last(segment))
        else:
            segment = Segment(found[-1][0] + 1 if found else self._first_sequence, 0)
            self._storage.create(segment.name)
            segment.runs = self.runs
            catalog.add(segment)
        for part in self.runs.parts():
            catalog.numbered[part.number].declared_in = segment.sequence
        for topic in catalog.numbered.values():
            self._count(topic)
        for segment in catalog.segments:
            if segment.generation:  # what is still dead in it could not be left out
                segment.whole_bytes = segment.live_bytes

    def _find_segments(self) -> list[tuple[int, int]]:
        """(sequence, generation) of the log's files, oldest first. Of one that was written anew the newest counts."""
        storage = self._storage
        newest: dict[int, int] = {}
        names = storage.names()
        self._names = set(names)
        for name in names:
            parsed = parse_log_name(name)
            if parsed is not None:
                # Before anything is touched: damage elsewhere must not take a newer version's file along.
                check_version(storage, name)
                newest[parsed[0]] = max(parsed[1], newest.get(parsed[0], 0))
        used = {log_name(sequence, generation) for sequence, generation in newest.items()}
        used |= {index_name(name) for name in used}
        for name in names:
            if name not in used and (parse_log_name(name) is not None or name.endswith(".index")):
                storage.remove(name)  # a crash came before it could be
        return sorted(newest.items())

    def _connected(self, found: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The segments without those that lie behind a gap.

        A power cut may take the end of one segment and leave what was written behind it, in the next. Nothing there was ever
        committed, because that waits for a flush of both. A segment that has an index, was written anew, or is gone, was
        committed as a whole; and one that is damaged further up, but has its end, did not lose it in a power cut.
        """
        storage = self._storage
        at = len(found) - 1
        while at > 0 and found[at - 1][1] == 0 and index_name(log_name(*found[at - 1])) not in self._names:
            at -= 1
        for place in range(at, len(found) - 1):
            if found[place][0] + 1 != found[place + 1][0]:
                continue
            name = log_name(*found[place])
            size = linked_size(storage, log_name(*found[place + 1]))
            scanned = scan(storage, name, is_last=False)
            end = scanned.end
            follows = _last_entry([mark for _, mark in scanned.marks]) == _last_entry(
                repeated_marks(storage, log_name(*found[place + 1]))
            )
            if size < 0 or end < size or not follows:
                if size >= 0:
                    reason = f"the last {size - end} bytes are missing; what was written behind them is left out"
                    if end >= size:
                        reason = "what is behind it was cut off, and is left out"
                    self._catalog.damage.append(StorageCorrupt(storage.path(name), end, reason, torn=True))
                for later in reversed(found[place + 1 :]):
                    left_out = log_name(*later)
                    self._keep_aside(left_out, 0)
                    storage.remove(index_name(left_out))
                    storage.remove(left_out)
                return found[: place + 1]
        return found

    def _open_sealed(self, segment: Segment) -> list[Part]:
        storage = self._storage
        size = storage.size(segment.name)
        tables: indexes.Tables | None = None
        try:
            if index_name(segment.name) in self._names:
                tables = indexes.read_tables(storage, index_name(segment.name))
        except StorageCorrupt as damage:
            self._catalog.damage.append(damage)
        if tables is not None and tables.log_bytes == size:
            segment.size = size
            segment.logical_size = tables.logical_bytes
            segment.last_time_us = tables.last_time_us
            segment.marks = tables.marks
            segment.has_index = True
            self._take_marks(tables.marks, True)
            return tables.parts()
        if tables is not None:
            self._is_shortened(segment, tables)
        found = scan(storage, segment.name, is_last=False)
        self._catalog.damage.extend(found.damage)
        # The damaged part stays in the file: it is nobody's way, and whoever wants to look finds it.
        segment.size = segment.logical_size = size
        segment.last_time_us = found.last_time_us
        segment.runs = found.runs
        self._take_floors(segment, found)
        self._take_marks([mark for _, mark in found.marks], found.is_begun)
        segment.marks = list(self.marks.values())
        return found.runs.parts()

    def _open_last(self, segment: Segment) -> list[Part]:
        storage = self._storage
        found = scan(storage, segment.name, is_last=True, known=self._known_part(segment))
        if not found.is_begun:  # nothing else can be in it, and it has to begin as a whole
            found.end = 0
            found.runs = Runs()
        self._catalog.damage.extend(found.damage)
        segment.size = segment.logical_size = found.end
        segment.last_time_us = found.last_time_us
        segment.runs = self.runs = found.runs
        self._take_floors(segment, found)
        self._take_marks([mark for _, mark in found.marks], found.is_begun)
        self._keep_aside(segment.name, found.end)
        storage.remove(index_name(segment.name))  # of before it was cut back and grew again
        storage.resume(segment.name, found.end)
        return found.runs.parts()

    def _known_part(self, segment: Segment) -> Scanned | None:
        """What the index says that was made when the log was closed, if it was."""
        storage = self._storage
        name = index_name(segment.name)
        if name not in self._names:
            return None
        try:
            tables = indexes.read_tables(storage, name)
            runs = indexes.MappedRuns(storage, name)
            runs.settle()
        except StorageCorrupt as damage:
            self._catalog.damage.append(damage)
            return None
        if self._is_shortened(segment, tables):
            return None
        known = Scanned()
        known.runs.restore(runs)
        known.end = tables.log_bytes
        known.last_time_us = tables.last_time_us
        known.marks = [(0, mark) for mark in tables.marks]
        known.repeated_marks = 0
        return known

    def _is_shortened(self, segment: Segment, tables: indexes.Tables) -> bool:
        """Whether a segment lost its end after its index was made, which a cut between two blocks does not show by itself."""
        size = self._storage.size(segment.name)
        missing = tables.log_bytes - size
        if missing > 0:
            reason = f"the last {missing} bytes, which were on disk once, are missing"
            self._catalog.damage.append(StorageCorrupt(self._storage.path(segment.name), size, reason))
        return missing > 0

    def _keep_aside(self, name: str, begin: int) -> None:
        """Keep what is cut off for whoever wants to look, but not all of a broker that crashes again and again."""
        storage = self._storage
        rest = storage.read(name, begin, storage.size(name) - begin)
        if not rest:
            return
        earlier = sorted(kept for kept in storage.names() if kept.endswith(DAMAGED))
        for kept in earlier[: 1 - MAX_DAMAGED_FILES]:
            storage.remove(kept)
        storage.put(f"{name}.{begin}{DAMAGED}", [rest], False)

    def _take_floors(self, segment: Segment, found: Scanned) -> None:
        base = segment.sequence << OFFSET_BITS
        self.group_floors += [(base + end, number, floor) for end, number, floor in found.floors if end <= found.end]

    def _take_marks(self, marks: list[Mark], is_complete: bool) -> None:
        """Marks of a segment, which begins with those that are remembered from before, if its beginning is whole."""
        if is_complete:
            self.marks = {}
        for mark in marks:
            remember(self.marks, mark)

    def _add(self, segment: Segment, parts: list[Part]) -> None:
        """A segment, and what it says about topics."""
        catalog = self._catalog
        before = catalog.segments[-1].sequence if catalog.segments else segment.sequence - 1
        if before != segment.sequence - 1:
            self._last_hole = segment.sequence - 1
        catalog.add(segment)
        self.last_time_us = max(self.last_time_us, segment.last_time_us)
        for part in parts:
            topic = catalog.numbered.get(part.number)
            if topic is None:
                topic = self._named(part)
            topic.declared_in = segment.sequence
            if part.floor > self._floors.get(part.number, 0):
                self._floors[part.number] = part.floor
            # Whoever wrote a segment anew noted a floor for each topic that it kept.
            if part.floor and (segment.generation == 0 or part.next == part.first):
                segment.has_deletions = True
            if part.next > part.first:
                if not topic.places:
                    topic.first_time_us = part.first_time_us
                elif part.first > topic.next_index and self._last_hole > topic.places[-1].sequence:
                    # Retention had removed all up to here, and not all of it is gone from the disk.
                    self._floors[part.number] = max(part.first, self._floors.get(part.number, 0))
                topic.places.append(segment)
                topic.place_firsts.append(part.first)
                topic.last_time_us = part.last_time_us
                topic.bytes += part.bytes
                segment.live_bytes += part.bytes
            topic.next_index = max(topic.next_index, part.next)
        segment.whole_bytes = segment.live_bytes
        if segment.generation:
            self._last_hole = segment.sequence

    def _named(self, part: Part) -> Topic:
        """A topic that is met for the first time."""
        catalog = self._catalog
        held = catalog.topics.get(part.name)
        if held is not None:
            # It was forgotten once, when it was empty, and then came again under another number.
            self._forget(held)
        topic = self._known.get(part.name)
        if topic is None or held is not None:
            topic = Topic(part.name, part.number)
        topic.number = part.number
        topic.next_index = part.first
        catalog.numbered[part.number] = catalog.topics[part.name] = topic
        self.last_number = max(self.last_number, part.number)
        return topic

    def _forget(self, topic: Topic) -> None:
        for segment in topic.places:
            held = self._catalog.runs_of(segment).part(topic.number)
            segment.live_bytes -= held.bytes if held is not None else 0
        del self._catalog.numbered[topic.number]

    def _count(self, topic: Topic) -> None:
        """All segments are known: where the topic begins and ends."""
        topic.first_index = topic.place_firsts[0] if topic.places else topic.next_index
        floor = self._floors.get(topic.number, 0)
        if floor > topic.first_index:
            advance(self._catalog, topic, min(floor, topic.next_index))
        topic.committed_index = topic.next_index


def _last_entry(marks: list[Mark]) -> tuple[int, int]:
    """Index and term of a replica's last entry among these; (0, 0) if there is none. A segment that was removed when the log
    was cut may be there again after a power cut, behind one that has grown differently since."""
    for mark in reversed(marks):
        if mark.producer == RAFT:
            return mark.batch, mark.part
    return 0, 0

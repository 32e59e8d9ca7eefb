"""Work on sealed segments that takes long: making index files, writing segments anew without what is dead, removing files.

A job is prepared by the log, run wherever there is time (a thread: it only reads what the log holds), and then finished by the
log. A crash at any moment leaves files that recovery understands: a segment that was written anew has a file of its own, which
gets its name once it is on disk, and only then the old one goes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from nearcast.topiclog import indexes
from nearcast.topiclog.blocks import FLOOR, SEGMENT_HEADER, TIME_AT, TOPIC, encode
from nearcast.topiclog.catalog import Catalog
from nearcast.topiclog.marks import Mark
from nearcast.topiclog.runs import RunColumns, Runs
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES, Segment, index_name, log_name
from nearcast.topiclog.storage import Storage

_READ_BYTES: Final = 1 << 20


class Job:
    """Something to do about files."""

    def run(self) -> None:
        """Do it, in any thread. Raises :class:`~nearcast.errors.StorageUnavailable`."""
        raise NotImplementedError


class Seal(Job):
    """Give a segment that is full, or whose index was lost, an index file."""

    def __init__(self, storage: Storage, segment: Segment, runs: RunColumns) -> None:
        self.segment = segment
        self._storage = storage
        self._runs = runs

    def run(self) -> None:
        segment = self.segment
        pieces = indexes.encode(
            self._runs, segment.size, segment.logical_size, segment.last_time_us, segment.marks, has_logical=False
        )
        self._storage.put(index_name(segment.name), pieces, True)


class Remove(Job):
    """Remove segments that are not part of the log any more."""

    def __init__(self, storage: Storage, names: list[str]) -> None:
        self.names = list(names)
        self._storage = storage

    def run(self) -> None:
        for name in self.names:
            # A crash in between leaves an index without a segment, which recovery removes.
            self._storage.remove(name)
            self._storage.remove(index_name(name))


class Rewrite(Job):
    """Write a segment anew, without the runs that are dead."""

    def __init__(self, catalog: Catalog, segment: Segment, runs: RunColumns) -> None:
        self.segment = segment
        self.generation = segment.generation + 1
        self.size = 0
        self._catalog = catalog
        self._storage = catalog.storage
        self._runs = runs
        self.floors: dict[int, int] = {}
        """First index of each topic that has something to keep, or of which it is to be kept that it was deleted."""
        self._last_times: dict[int, int] = {}
        self._new = Runs()
        self._logical: list[int] = []

    def run(self) -> None:
        name = log_name(self.segment.sequence, self.generation)
        self._find_floors()
        head = self._head()
        self._storage.put(name, self._pieces(head), True)
        runs = self._new
        runs.settle()
        runs.set_logical(self._logical)
        segment = self.segment
        marks: list[Mark] = segment.marks
        pieces = indexes.encode(runs, self.size, segment.logical_size, segment.last_time_us, marks, has_logical=True)
        self._storage.put(index_name(name), pieces, True)

    def _find_floors(self) -> None:
        """Which topics have something to keep. A first index may rise meanwhile: then a little more is kept than needed."""
        for part in self._runs.parts():
            topic = self._catalog.numbered.get(part.number)
            if topic is not None and part.next > max(part.first, topic.first_index):
                self.floors[part.number] = topic.first_index
            elif self.segment.has_deletions and part.floor:  # older segments may have what it says is removed
                self.floors[part.number] = max(part.floor, part.next)

    def _head(self) -> list[bytes]:
        """Header and names."""
        pieces = [SEGMENT_HEADER]
        offset = SEGMENT_HEADER_BYTES
        for number in sorted(self.floors):
            old = self._runs.need(number)
            floor = self.floors[number]
            part = self._new.declare(number, old.name, max(floor, old.first), offset)
            part.floor = floor
            self._last_times[number] = old.last_time_us
            block = encode(TOPIC, FLOOR, number, floor, old.first_time_us, b"", old.name, [])
            pieces.append(block)
            offset += len(block)
        self.size = offset
        return pieces

    def _pieces(self, head: list[bytes]) -> Iterator[bytes]:
        """The new file, while its index is taken note of."""
        yield from head
        old = self._runs
        pending_at = 0
        pending = 0
        for run in range(old.count):
            number = old.topics[run]
            floor = self.floors.get(number)
            first = old.firsts[run]
            if floor is None or first + old.counts[run] <= floor:
                continue
            offset, length = old.offsets[run], old.lengths[run]
            part = self._new.need(number)
            time_us = self._last_times[number]
            if part.first == part.next:  # its first one here
                time_us = self._time_at(offset)
            self._new.add_run(part, first, self.size, length, old.counts[run], time_us, self._last_times[number])
            self._logical.append(old.logical[run])
            self.size += length
            if pending and (pending_at + pending != offset or pending >= _READ_BYTES):
                yield self._storage.read(self.segment.name, pending_at, pending)
                pending = 0
            if not pending:
                pending_at = offset
            pending += length
        if pending:
            yield self._storage.read(self.segment.name, pending_at, pending)

    def _time_at(self, offset: int) -> int:
        return int.from_bytes(self._storage.read(self.segment.name, offset + TIME_AT, 8), "little", signed=True)

"""Reading a replicated log by entries: giving them to others as they came, and finding those that are not committed yet.

Owns the way from an entry's index to its blocks and back to its wire form. What comes of it is the replica's business.
"""

from __future__ import annotations

from nearcast.errors import LocalProtocolError, StorageCorrupt
from nearcast.topiclog.catalog import OFFSET_BITS, Catalog
from nearcast.topiclog.divisions import Division
from nearcast.topiclog.marks import Mark, remember
from nearcast.topiclog.places import Places
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES
from nearcast.topiclog.walking import DATA, contents_of, find_entries, kind_of, make_again, payload_of


class StoredEntry:
    """An entry as it came. ``pieces`` are its payload."""

    def __init__(self, index: int, term: int, kind: int, pieces: list[bytes]) -> None:
        self.index = index
        self.term = term
        self.kind = kind
        self.pieces = pieces
        size = 0
        for piece in pieces:
            size += len(piece)
        self.size = size


def remake(catalog: Catalog, places: Places, first: int, last: int, max_bytes: int) -> list[StoredEntry]:
    """Entries from ``first`` on, as many as one piece of one segment has: about ``max_bytes``, but at least one."""
    segment = places.segment_of(first)
    if segment is None:
        raise LocalProtocolError(f"no segment has entry {first}")
    path = catalog.storage.path(segment.name)
    index, begin = places.near(segment, first)
    size = max(max_bytes, 65_536)
    numbered = catalog.numbered
    while True:
        size = min(size, segment.size - begin)
        data = memoryview(catalog.storage.read(segment.name, begin, size))
        found = find_entries(data, 0, len(data), index - 1, path)
        for entry in found:
            places.note(segment.sequence, entry.index, begin + entry.begin)
        if found and found[-1].index >= first:
            break
        if begin + size >= segment.size:
            raise StorageCorrupt(path, begin, f"entry {first} is not there")
        if found:
            index, begin = found[-1].index + 1, begin + found[-1].end
        else:
            size *= 4
    entries: list[StoredEntry] = []
    left = max_bytes
    for entry in found:
        if entry.index < first:
            continue
        if entry.index > last or (entries and left <= 0):
            break
        kind = kind_of(entry.mark)
        pieces = [payload_of(entry.mark)]
        if kind == DATA:
            pieces = make_again(data, entry.begin, entry.end, numbered, path)
        stored = StoredEntry(entry.index, entry.term, kind, pieces)
        left -= stored.size
        entries.append(stored)
    return entries


class Tail:
    """What is behind the last entry that is committed."""

    def __init__(self) -> None:
        self.position: int = -1
        """Where it begins."""
        self.divisions: list[Division] = []
        """One for each entry."""
        self.marks: dict[str, Mark] = {}
        """The latest of each producer before it."""
        self.time_us: int = 0
        """Of the youngest block before it."""


def uncommitted_tail(catalog: Catalog, places: Places, committed_index: int) -> Tail:
    """The entries behind one, which is not the last."""
    first = places.segment_of(committed_index + 1)
    if first is None:
        raise LocalProtocolError(f"the log does not have entry {committed_index + 1}")
    tail = Tail()
    for segment in catalog.segments[catalog.segments.index(first) :]:
        if not segment.size:
            break  # it was just begun
        path = catalog.storage.path(segment.name)
        data = catalog.storage.view(segment.name, segment.size)
        base = segment.sequence << OFFSET_BITS
        for entry in find_entries(data, SEGMENT_HEADER_BYTES, segment.size, places.start_of(segment), path):
            places.note(segment.sequence, entry.index, entry.begin)
            if entry.index <= committed_index:
                continue
            if tail.position < 0:
                tail.position = base + entry.begin
                before = contents_of(data, SEGMENT_HEADER_BYTES, entry.begin, path)
                tail.time_us = before.time_us
                for mark in before.marks:
                    remember(tail.marks, mark)
            found = contents_of(data, entry.begin, entry.end, path)
            topics = [catalog.numbered[number] for number in found.numbers]
            floors = [(catalog.numbered[number], floor) for number, floor in found.floors]
            end = base + entry.end
            tail.divisions.append(
                Division(end, topics, found.first_indexes, found.next_indexes, found.marks, floors, found.time_us)
            )
    return tail

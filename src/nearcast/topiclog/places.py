"""Where entries of a replicated log lie: from an entry's index to the segment that has it, and to an offset a little before.

Each segment begins with the marks as they stood, so the index before its first entry is known without reading on; inside, one
entry in :data:`SPACING_BYTES` is remembered, and from there somebody walks (:mod:`nearcast.topiclog.walking`). What is not
remembered any more, or was not yet since the log was opened, is found by walking from the segment's beginning.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from typing import Final

from nearcast.errors import StorageCorrupt
from nearcast.topiclog.blocks import HEADER, HEADER_BYTES, LINK
from nearcast.topiclog.catalog import Catalog
from nearcast.topiclog.marks import RAFT
from nearcast.topiclog.segments import SEGMENT_HEADER_BYTES, Segment
from nearcast.topiclog.walking import mark_at

SPACING_BYTES: Final = 262_144


class _Points:
    """Some of a segment's entries: indexes, and where the ones before them end."""

    def __init__(self) -> None:
        self.indexes: array[int] = array("Q")
        self.offsets: array[int] = array("I")


class Places:
    """See the module."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._starts: dict[int, int] = {}
        self._points: dict[int, _Points] = {}

    def clear(self) -> None:
        """Forget all."""
        self._starts = {}
        self._points = {}

    def note(self, sequence: int, index: int, begin: int) -> None:
        """Entry ``index`` lies behind an offset of a segment, and nothing but names between."""
        points = self._points.get(sequence)
        if points is None:
            points = self._points[sequence] = _Points()
        at = bisect_left(points.indexes, index)
        before = points.offsets[at - 1] if at else 0
        after = points.offsets[at] if at < len(points.offsets) else 1 << 40
        if begin - before >= SPACING_BYTES and after - begin >= SPACING_BYTES:
            points.indexes.insert(at, index)
            points.offsets.insert(at, begin)

    def cut(self, position_sequence: int, last_index: int) -> None:
        """Entries behind an index, which ends in this segment, are gone."""
        for sequence in [sequence for sequence in self._starts if sequence > position_sequence]:
            del self._starts[sequence]
        for sequence in [sequence for sequence in self._points if sequence >= position_sequence]:
            points = self._points[sequence]
            at = bisect_right(points.indexes, last_index)
            del points.indexes[at:]
            del points.offsets[at:]

    def segment_of(self, index: int) -> Segment | None:
        """The segment with an entry, if its index is above the one before the log's first segment."""
        for segment in reversed(self._catalog.segments):
            if segment.size and self.start_of(segment) < index:
                return segment
        return None

    def near(self, segment: Segment, index: int) -> tuple[int, int]:
        """(entry, offset) to walk from, to meet an entry of this segment."""
        points = self._points.get(segment.sequence)
        at = bisect_right(points.indexes, index) - 1 if points is not None else -1
        if points is None or at < 0:
            return self.start_of(segment) + 1, SEGMENT_HEADER_BYTES
        return points.indexes[at], points.offsets[at]

    def start_of(self, segment: Segment) -> int:
        """The last entry before a segment, which its beginning tells; 0 if there was none."""
        found = self._starts.get(segment.sequence)
        if found is None:
            found = self._starts[segment.sequence] = self._read_start(segment)
        return found

    def _read_start(self, segment: Segment) -> int:
        storage = self._catalog.storage
        path = storage.path(segment.name)
        data = storage.view(segment.name, segment.size)
        at = SEGMENT_HEADER_BYTES
        fields = HEADER.unpack_from(data, at)
        if fields[2] != LINK:
            raise StorageCorrupt(path, at, "the segment does not say what was before it")
        left = fields[5]
        at += fields[0]
        start = 0
        while left:
            left -= 1
            if at + HEADER_BYTES + 4 > segment.size:
                raise StorageCorrupt(path, at, "the segment ends inside its beginning")
            mark = mark_at(data, at, path)
            if mark.producer == RAFT:
                start = mark.batch
            at += int.from_bytes(data[at : at + 4], "little")
        return start

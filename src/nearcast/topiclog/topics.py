"""A topic of the log, and a stretch of what it holds, as readers get it.

This module knows where things are; the bytes themselves belong to whoever keeps the files.
"""

from __future__ import annotations

from array import array
from typing import Final

from mypy_extensions import i64

from nearcast.config import Retention
from nearcast.errors import RecordUnavailable
from nearcast.topiclog.segments import Segment
from nearcast.topiclog.storage import Storage

NO_RETENTION: Final = Retention()


class Topic:
    """One topic of the log.

    Its records are ``first_index`` .. ``committed_index`` - 1; from there to ``next_index`` they are not committed yet.
    """

    def __init__(self, name: bytes, number: int) -> None:
        self.name = name
        self.number = number
        self.first_index: int = 1
        self.next_index: int = 1
        self.committed_index: int = 1
        self.bytes: i64 = 0
        """Bytes of its blocks that are kept, headers included."""
        self.first_time_us: i64 = 0
        self.last_time_us: i64 = 0
        self.retention: Retention = NO_RETENTION
        # The segments that have records of it, and the first index in each.
        self.places: list[Segment] = []
        self.place_firsts: array[int] = array("Q")
        # How much of the oldest place is removed: whole runs, bytes of the run that follows, and bytes in all.
        self.dead_runs: i64 = 0
        self.dead_in_run: i64 = 0
        self.dead_bytes: i64 = 0
        # What is gathered and not written yet.
        self.declared_in: i64 = -1
        self.touched = False
        self.touched_in: i64 = 0
        self.saved_next: int = 1
        self.saved_declared: i64 = -1

    def text(self) -> str:
        """The name in front of people."""
        return self.name.decode("utf-8", "replace")

    def unavailable(self, index: int) -> RecordUnavailable:
        """What to say about a record that is not there."""
        return RecordUnavailable(self.text(), index, self.first_index, self.committed_index)

    def reset(self) -> None:
        """Forget all records; whoever holds the topic sees what is found next."""
        self.first_index = self.next_index = self.committed_index = 1
        self.bytes = 0
        self.places = []
        self.place_firsts = array("Q")
        self.dead_runs = 0
        self.dead_in_run = 0
        self.dead_bytes = 0
        self.declared_in = -1
        self.touched = False


class Extents:
    """Whole blocks, where they lie: ``pieces`` of (file, offset, size), in order.

    The first and last block may hold records beyond what was asked for, which the reader leaves out. ``next_index`` (of a
    read) or ``cursor`` (of a scan) is where to go on.
    """

    def __init__(self, storage: Storage) -> None:
        self.pieces: list[tuple[str, int, int]] = []
        self.bytes: int = 0
        self.next_index: int = 0
        self.cursor: int = 0
        self._storage = storage
        self._name = ""
        self._begin: i64 = 0
        self._end: i64 = -1

    def add(self, segment: Segment, offset: i64, size: i64) -> None:
        """One more stretch of blocks."""
        self.bytes += size
        if offset == self._end and segment.name is self._name:
            self._end = offset + size
            return
        self.close()
        self._name = segment.name
        self._begin = offset
        self._end = offset + size

    def close(self) -> None:
        """No stretch will be added that touches the last."""
        if self._end >= 0:
            self.pieces.append((self._name, self._begin, self._end - self._begin))
            self._end = -1

    def views(self) -> list[memoryview]:
        """The blocks without a copy. What is not in memory is read from the disk as it is touched."""
        found: list[memoryview] = []
        held = ""
        view = memoryview(b"")
        for name, offset, size in self.pieces:
            end = offset + size
            if name != held or len(view) < end:
                view = self._storage.view(name, end)
                held = name
            found.append(view[offset:end])
        return found

    def gather(self) -> memoryview:
        """The blocks in one piece: a view if they lie in one, a copy if not."""
        views = self.views()
        return views[0] if len(views) == 1 else memoryview(b"".join(views))

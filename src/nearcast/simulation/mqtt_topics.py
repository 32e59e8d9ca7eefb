"""The topic log of a simulated broker: the same log and keeper as ``nearcast broker``, on a simulated disk."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from nearcast.config import TopicRule
from nearcast.simulation.disks import Disk
from nearcast.simulation.folders import DiskFolder
from nearcast.topiclog.keeper import TopicKeeper
from nearcast.topiclog.log import TopicLog
from nearcast.topiclog.rules import RuleTable

_PARTIAL = ".partial"


class TopicDisk(DiskFolder):
    """A folder of a simulated disk, as a :class:`~nearcast.topiclog.storage.Storage`."""

    def __init__(self, disk: Disk, folder: str) -> None:
        super().__init__(disk, folder)
        self._active = ""

    def view(self, name: str, size: int) -> memoryview:
        return memoryview(self._disk.read(self.path(name)))

    def create(self, name: str) -> None:
        self._active = self.path(name)
        self._disk.write(self._active, b"")

    def resume(self, name: str, size: int) -> None:
        self._active = self.path(name)
        self._disk.truncate(self._active, size)

    def append(self, pieces: list[bytes]) -> None:
        self._disk.append(self._active, b"".join(pieces))

    def put(self, name: str, pieces: Iterable[bytes], flush: bool) -> None:
        partial = self.path(name + _PARTIAL)
        self._disk.write(partial, b"".join(pieces))
        if flush:
            self._disk.flush_file(partial)
        self._disk.rename(partial, self.path(name))

    def remove(self, name: str) -> None:
        if self._disk.exists(self.path(name)):
            self._disk.remove(self.path(name))


class SimulatedTopics:
    """What a scenario says about kept topics, for one broker. ``on_commit`` is called when readers can see more."""

    def __init__(self, rules: tuple[TopicRule, ...], segment_bytes: int, max_topics: int) -> None:
        self.table = RuleTable(rules)
        self._segment_bytes = segment_bytes
        self._max_topics = max_topics

    def keeper(self, disk: Disk, folder: str, wall: Callable[[], float], on_commit: Callable[[], None]) -> TopicKeeper:
        """A log that has not been recovered yet, for a broker's process."""
        storage = TopicDisk(disk, folder)
        for name in storage.names():
            if name.endswith(_PARTIAL):
                storage.remove(name)
        log = TopicLog(storage, self._segment_bytes, self._max_topics)
        log.on_commit = on_commit
        return TopicKeeper(log, storage, self.table.match, wall)

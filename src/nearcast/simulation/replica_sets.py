"""The disks of replica sets on a simulated host: the files of each replica's log, and those with its term and vote.

The order of things is that of :mod:`nearcast.broker.replicating`: what a set wrote is flushed, and while one flush runs, what
is written meanwhile gathers for the next.
"""

from __future__ import annotations

import struct
import zlib
from typing import Final

from nearcast.errors import StorageUnavailable
from nearcast.fabric.replica_sets import ReplicaSets, replica_number
from nearcast.fabric.set_logs import ReplicaSetLog
from nearcast.fabricconfig import ReplicaSet
from nearcast.raft.configuration import Configuration
from nearcast.raft.entries import HardState
from nearcast.simulation.disks import Disk
from nearcast.simulation.mqtt_topics import TopicDisk
from nearcast.topiclog.replica import ReplicaLog

SEGMENT_BYTES: Final = 65_536
MAX_TOPICS: Final = 10_000

_STATE: Final = struct.Struct("<QQQQI")


class DiskState:
    """Term and vote in two files, written in turns: a torn write leaves the other one."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._names = (f"{folder}/0", f"{folder}/1")
        self._number = 0
        self._state = HardState()
        self._dirty = False
        for name in self._names:
            data = disk.read(name) if disk.exists(name) else b""
            if len(data) != _STATE.size:
                continue
            number, term, vote, commit, checksum = _STATE.unpack(data)
            if checksum == zlib.crc32(data[:-4]) and number > self._number:
                self._number = number
                self._state = HardState(term, vote, commit)

    def load(self) -> HardState:
        return self._state

    def store(self, state: HardState) -> None:
        self._state = state
        self._dirty = True

    def write(self) -> None:
        """Before a flush: what is stored now is to be part of it."""
        if self._dirty:
            self._dirty = False
            self._number += 1
            body = struct.pack("<QQQQ", self._number, self._state.term, self._state.vote, self._state.commit)
            self._disk.write(self._names[self._number % 2], body + struct.pack("<I", zlib.crc32(body)))


class SimulatedSets:
    """What a broker's process does for its sets (:class:`~nearcast.fabric.replica_sets.SetDriver`); ``token`` is that of its
    flushes."""

    def __init__(self, sets: ReplicaSets, disk: Disk, folder: str, token: int) -> None:
        self._sets = sets
        self._disk = disk
        self._folder = folder
        self._token = token
        self._states: dict[str, DiskState] = {}
        self._asked: dict[str, int] = {}
        self._flushing: dict[str, int] = {}
        self.error: StorageUnavailable | None = None
        sets.driver = self

    def open_log(self, definition: ReplicaSet, members: dict[int, str]) -> ReplicaSetLog:
        """See :class:`~nearcast.fabric.replica_sets.SetDriver`."""
        folder = f"{self._folder}/{definition.name}"
        state = self._states[definition.name] = DiskState(self._disk, f"{folder}-state")
        storage = TopicDisk(self._disk, f"{folder}/")
        voters = tuple(replica_number(name) for name in definition.members)
        log = ReplicaLog(storage, SEGMENT_BYTES, MAX_TOPICS)
        return ReplicaSetLog(log, state, Configuration(voters, (), definition.write_quorum))

    def close_log(self, set_name: str) -> None:
        """What is on disk stays."""
        self._states.pop(set_name, None)
        self._asked.pop(set_name, None)

    def request_sync(self, set_name: str, ready: int) -> None:
        self._asked[set_name] = ready

    def begin_flush(self) -> None:
        """After every event: flush what sets have written, one flush at a time."""
        if self._flushing or not self._asked or self.error is not None:
            return
        try:
            for set_name in self._asked:
                self._states[set_name].write()
        except StorageUnavailable as error:
            self.failed(error)
            return
        self._flushing, self._asked = self._asked, {}
        self._disk.sync(self._token)

    def flushed(self, now: float) -> None:
        """A flush is done."""
        done, self._flushing = self._flushing, {}
        for set_name, ready in done.items():
            if set_name in self._states:
                self._sets.synced(set_name, ready, now)

    @property
    def is_busy(self) -> bool:
        """Whether something that was written waits for the disk."""
        return bool(self._flushing or self._asked)

    def looped(self) -> None:
        """Whoever settles looks by itself."""

    def failed(self, error: StorageUnavailable) -> None:
        self.error = error

    def function_has_work(self, set_name: str, function: str) -> None:
        """No functions run in simulations."""

    def functions_changed(self) -> None:
        """No functions run in simulations."""

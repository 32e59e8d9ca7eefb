"""The journal as a machine: generations of files, snapshots, recovery, and what to do about damage.

A journal is a set of files, one per *generation*, of the form in :mod:`nearcast.mqtt.frames`. When enough has been written
since the last time, the next generation begins: a new file that the engine's whole durable state is copied into, a step at a
time between other work (:class:`~nearcast.mqtt.recovery.Snapshot`). A COMPLETE record says that all of it is there; once that
is on disk, older files are of no use and removed.

Recovery begins with the youngest file that is complete, or with the oldest one there is, and replays from there on, oldest
first. A crash at any moment is therefore harmless, also one that brings back some of the files that were being removed, and so
is damage in a file that a complete one has replaced. (Journals of before there were COMPLETE records are replayed whole.)

Damage (a torn tail, a flipped bit) is reported with path and offset. What precedes it is recovered; the damaged file and any
younger one are kept aside with the suffix ``.damaged`` (the last few of them), and the recovered state is written anew at
once. Where there is a topic log, the two agree on what came last before that (:mod:`nearcast.mqtt.keeping`). A journal of a
newer version is no damage: nothing of it is touched, and the journal does not open.

It knows neither disks nor threads. A driver (:mod:`nearcast.broker.journal`, the simulator's broker) provides the
:class:`~nearcast.mqtt.frames.Storage`, flushes it, and keeps the order that :class:`~nearcast.mqtt.effects.Effects` asks for::

    recover() ── what replace() began is done ──► replaced() ──► opened(now) ──► append(records) ...
                                                                     replaced(), each time replace() is done
"""

from __future__ import annotations

import struct
from typing import Final

from nearcast.errors import StorageCorrupt, StorageUnavailable, UnknownRecord
from nearcast.mqtt import frames, records
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.frames import HEADER, Storage, frame_of
from nearcast.mqtt.keeping import MarkedLog
from nearcast.mqtt.recovery import Recovery, Snapshot

#: A snapshot is copied in steps of about this size, so that no client waits long for one. A session is never split, because
#: its copy must describe one moment: one with a long queue (``limits.max_queued_bytes``) is one step and one frame, whatever
#: its size, and clients wait for all of it.
SNAPSHOT_STEP_BYTES: Final = 262_144
DAMAGED: Final = ".damaged"
#: Damaged files of earlier starts that are kept.
MAX_DAMAGED_FILES: Final = 3

_PREFIX: Final = "journal-"
_COMPLETE_FRAME: Final = frame_of([records.complete()])
_COMPLETE_BODY: Final = _COMPLETE_FRAME[frames.FRAME.size :]


def file_name(generation: int) -> str:
    """The name of a generation's file."""
    return f"{_PREFIX}{generation:010d}"


def generation_of(name: str) -> int:
    """The generation whose file has this name; -1 for any other file."""
    digits = name[len(_PREFIX) :]
    return int(digits) if name.startswith(_PREFIX) and digits.isdigit() else -1


class Journaling:
    """See the module. ``damage`` lists what recovery found broken; ``recovered_records`` what it replayed."""

    def __init__(
        self,
        engine: Engine,
        storage: Storage,
        snapshot_bytes: int,
        snapshot_step_bytes: int = SNAPSHOT_STEP_BYTES,
        log: MarkedLog | None = None,
    ) -> None:
        self.damage: list[StorageCorrupt] = []
        self.recovered_records = 0
        self.bytes_written = 0
        self.snapshots = 0
        self.replacing = False
        self._engine = engine
        self._storage = storage
        self._log = log
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_step_bytes = snapshot_step_bytes
        self._snapshot_due = snapshot_bytes
        self._snapshot: Snapshot | None = None
        self._snapshot_size = 0
        self._generation_bytes = 0
        # The files there are, oldest first; the last one is being written.
        self._names: list[str] = []
        self._recovery: Recovery | None = None

    @property
    def copying(self) -> bool:
        """Whether a snapshot is under way."""
        return self._snapshot is not None

    # --- opening --------------------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Read what the storage holds into the engine, and begin to replace it by a generation that holds just that."""
        storage = self._storage
        self._recovery = recovery = Recovery(self._engine)
        found = [name for name in storage.names() if generation_of(name) >= 0]
        found.sort(key=generation_of)
        # Before anything is set aside: damage to an older file must not take a newer version's along.
        for name in found:
            if frames.is_newer(storage, name):
                raise self._too_new(name)
        for index in range(self._first_to_replay(found), len(found)):
            try:
                self._replay(recovery, found[index])
            except StorageCorrupt as damage:
                self.damage.append(damage)
                self._set_aside(found[index:])
                break
        self.recovered_records = recovery.records
        if self._log is not None:
            recovery.reconcile(self._log.reconcile(self._engine.effects.last_mark if found else -1))
        self._names = found
        self._engine.effects.generation = generation_of(found[-1]) if found else 0
        # Whatever was read is written anew at once: the state is checked, old files go, and damage does not stay in the way.
        self._start_snapshot()
        while self._snapshot is not None:
            self._step(self._snapshot)

    def opened(self, now: float) -> None:
        """The new generation stands alone: clients may come. What that means for sessions and wills is journalled, too."""
        if self._recovery is not None:
            self._recovery.finish(now)
            self._recovery = None
        pending = self._engine.take_records()
        if pending:
            self._write(frame_of(pending))

    def _first_to_replay(self, found: list[str]) -> int:
        """Where in ``found`` replay begins."""
        for index in range(len(found) - 1, 0, -1):
            if self._is_complete(found[index]):
                return index
        return 0

    def _is_complete(self, name: str) -> bool:
        try:
            for _, body in frames.read_bodies(self._storage, name):
                if body == _COMPLETE_BODY:
                    return True
        except StorageCorrupt:
            pass  # it is met again, and reported, if the file is replayed
        return False

    def _replay(self, recovery: Recovery, name: str) -> None:
        for offset, found in frames.read_frames(self._storage, name):
            for record in found:
                try:
                    recovery.apply(record)
                except UnknownRecord as error:
                    # The frame is whole, so this was meant: damage would not have passed the checksum.
                    raise self._too_new(name) from error
                except (ValueError, KeyError, IndexError, struct.error) as error:
                    path = self._storage.path(name)
                    raise StorageCorrupt(path, offset, f"a record makes no sense: {error}") from error

    def _too_new(self, name: str) -> StorageUnavailable:
        reason = "was written by a newer version of nearcast: use that version, or another directory"
        return StorageUnavailable(self._storage.path(name), reason)

    def _set_aside(self, names: list[str]) -> None:
        """Keep damaged files for whoever wants to look, but not every one of a broker that crashes again and again."""
        storage = self._storage
        earlier = [name for name in storage.names() if name.startswith(_PREFIX) and name.endswith(DAMAGED)]
        for name in sorted(earlier)[:-MAX_DAMAGED_FILES]:
            storage.remove(name)
        for name in names:
            # The journal keeps its name until the recovered state is on disk: a crash in between must find it again.
            storage.keep_aside(name, name + DAMAGED)

    # --- writing --------------------------------------------------------------------------------------------------------

    def append(self, batch: list[bytes]) -> None:
        """Write records as one frame; raises :class:`StorageUnavailable`, and then nothing of them is there."""
        self._write(frame_of(batch))
        if self._snapshot is None and not self.replacing and self._generation_bytes >= self._snapshot_due:
            self._start_snapshot()
        if self._snapshot is not None:
            self._step(self._snapshot)

    def replaced(self) -> None:
        """The files that a snapshot made useless are gone."""
        self.replacing = False
        if self._recovery is None:
            self.snapshots += 1

    def _write(self, data: bytes) -> None:
        self._storage.append(data)
        self._generation_bytes += len(data)
        self.bytes_written += len(data)

    def _start_snapshot(self) -> None:
        self._snapshot = Snapshot(self._engine)
        self._snapshot_size = 0
        name = file_name(self._engine.effects.generation)
        self._storage.create(name)
        self._names.append(name)
        self._generation_bytes = 0
        self._write(HEADER)

    def _step(self, snapshot: Snapshot) -> None:
        """Go on with a snapshot."""
        found = snapshot.step(self._snapshot_step_bytes)
        if found:
            frame = frame_of(found)
            self._snapshot_size += len(frame)
            self._write(frame)
            return
        self._write(_COMPLETE_FRAME)
        self._snapshot = None
        # State that does not shrink must not be copied again for every few bytes: wait until as much has been added.
        self._snapshot_due = max(self._snapshot_bytes, 2 * self._snapshot_size) + self._generation_bytes
        useless = self._names[:-1]
        self._names = self._names[-1:]
        self.replacing = True
        self._storage.replace(useless)

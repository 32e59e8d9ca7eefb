"""The journal on disk: what the broker promised, in files that survive ``kill -9`` and, when flushed, a power cut.

A journal is a directory with one file per *generation*. A file is a header and frames; a frame is everything one call into the
engine produced, so that it is there entirely or not at all::

    header   "nearcast journal 1\\n"
    frame    length u32 | crc32 of the body u32 | body: records, each with its length as LEB128

When enough has been written since the last time, the next generation begins: a new file that the engine's whole durable state
is copied into, a step at a time between other work (:class:`~nearcast.mqtt.recovery.Snapshot`). Once that is complete and on
disk, older files are of no use and removed. Recovery replays all files, oldest first, so a crash at any moment is harmless.

Damage (a torn tail, a flipped bit) is reported with path and offset. What precedes it is recovered; the damaged file and any
younger one are kept aside with the suffix ``.damaged`` (the last few of them), and the recovered state is written anew at
once. A journal of a newer version is no damage: nothing of it is touched, and the broker does not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import mmap
import os
import re
import shutil
import struct
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Final

from nearcast.broker import logs
from nearcast.errors import StorageCorrupt, StorageUnavailable, UnknownRecord
from nearcast.mqtt import records as record_fields
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.recovery import Recovery, Snapshot

VERSION: Final = 1
HEADER: Final = b"nearcast journal %d\n" % VERSION
_ANY_HEADER: Final = re.compile(rb"nearcast journal ([1-9]\d{0,8})\n")
FRAME: Final = struct.Struct(">II")
#: A snapshot is copied in steps of about this size, so that no client waits long for one. A session is never split, because
#: its copy must describe one moment: one with a long queue (``limits.max_queued_bytes``) is one step and one frame, whatever
#: its size, and clients wait for all of it.
SNAPSHOT_STEP_BYTES: Final = 262_144
DAMAGED: Final = ".damaged"
#: Damaged files of earlier starts that are kept.
MAX_DAMAGED_FILES: Final = 3


def journal_path(directory: Path, generation: int) -> Path:
    return directory / f"journal-{generation:010d}"


def frame_of(records: list[bytes]) -> bytes:
    """The frame that holds ``records``."""
    parts: list[bytes] = []
    for record in records:
        parts.append(record_fields.number(len(record)))
        parts.append(record)
    body = b"".join(parts)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def read_frames(path: Path) -> Iterator[tuple[int, list[bytes]]]:
    """(offset, records) of every frame in a file; raises :class:`StorageCorrupt` at the first that is not whole."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size < len(HEADER):
            raise StorageCorrupt(str(path), 0, "the file ends inside its header", torn=True)
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[: len(HEADER)] != HEADER:
                raise StorageCorrupt(str(path), 0, "this is not a journal")
            offset = len(HEADER)
            while offset < size:
                if offset + FRAME.size > size:
                    raise StorageCorrupt(str(path), offset, "the file ends inside a frame", torn=True)
                length, checksum = FRAME.unpack_from(data, offset)
                begin = offset + FRAME.size
                if length == 0:  # nobody writes an empty frame; zeros are what a file system leaves after a power cut
                    raise StorageCorrupt(str(path), offset, "zeros where a frame should be")
                if begin + length > size:
                    raise StorageCorrupt(str(path), offset, "the file ends inside a frame", torn=True)
                body = data[begin : begin + length]
                if zlib.crc32(body) != checksum:
                    raise StorageCorrupt(str(path), offset, "the checksum does not match")
                yield offset, _split(path, offset, body)
                offset = begin + length


def is_newer(path: Path) -> bool:
    """Whether a file says that it is a journal of a version after this one."""
    with path.open("rb") as file:
        found = _ANY_HEADER.match(file.read(64))
    return found is not None and int(found[1]) > VERSION


def _too_new(path: Path) -> StorageUnavailable:
    return StorageUnavailable(str(path), "was written by a newer version of nearcast: use that version, or another directory")


def _split(path: Path, offset: int, body: bytes) -> list[bytes]:
    fields = record_fields.Fields(body)
    fields.position = 0
    found: list[bytes] = []
    try:
        while fields.position < len(body):
            found.append(fields.blob())
    except ValueError as error:
        raise StorageCorrupt(str(path), offset, str(error)) from None
    return found


class Journal:
    """The open journal of one broker. ``damage`` lists what recovery found broken; ``recovered_records`` what it replayed."""

    def __init__(self, directory: Path, engine: Engine, *, fsync: bool, snapshot_bytes: int) -> None:
        self.directory = directory
        self.needs_sync = fsync
        self.damage: list[StorageCorrupt] = []
        self.recovered_records = 0
        self.bytes_written = 0
        self.snapshots = 0
        self._engine = engine
        self._snapshot_bytes = snapshot_bytes
        self._snapshot_due = snapshot_bytes
        self._snapshot: Snapshot | None = None
        self._snapshot_size = 0
        self._finishing: Future[None] | None = None
        self._generation_bytes = 0
        self._unsynced = False
        self._retired: list[int] = []
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="journal-flush")
        self._lock = self._acquire()
        self._descriptor = -1

    @classmethod
    def open(cls, directory: str, engine: Engine, now: float, *, fsync: bool, snapshot_bytes: int) -> Journal:
        """Lock the directory, recover what it holds into ``engine``, and be ready to append."""
        path = Path(directory)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageUnavailable(directory, f"cannot be made: {error.strerror}") from error
        journal = cls(path, engine, fsync=fsync, snapshot_bytes=snapshot_bytes)
        try:
            journal._recover(now)
        except OSError as error:
            journal.close()
            raise StorageUnavailable(str(error.filename or directory), f"cannot be used: {error.strerror}") from error
        except BaseException:
            journal.close()
            raise
        return journal

    @property
    def unsynced(self) -> bool:
        """Whether something was appended that :meth:`sync` has not yet covered."""
        return self._unsynced

    def append(self, records: list[bytes]) -> None:
        """Write records to the kernel as one frame; raises :class:`StorageUnavailable`, and then nothing of them is there."""
        self._write(frame_of(records))
        self._maintain()

    async def sync(self) -> None:
        """Return once everything appended before the call is on the disk."""
        retired, self._retired = self._retired, []
        self._unsynced = False
        await asyncio.wrap_future(self._flusher.submit(self._flush, [*retired, self._descriptor], retired))

    def close(self) -> None:
        """Flush, close and unlock. A disk that fails even now is logged: whatever was acknowledged has been flushed before."""
        self._flusher.shutdown(wait=True)
        descriptors = [*self._retired, self._descriptor] if self._descriptor >= 0 else self._retired
        self._descriptor = -1
        self._retired = []
        try:
            self._flush(descriptors, descriptors)
        except StorageUnavailable as error:
            logs.event(logging.ERROR, "the journal could not be flushed at the end", path=error.path, reason=str(error))
        finally:
            os.close(self._lock)

    # --- writing --------------------------------------------------------------------------------------------------------

    def _write(self, frame: bytes) -> None:
        view = memoryview(frame)
        written = 0
        try:
            while written < len(frame):
                written += os.write(self._descriptor, view[written:])
        except OSError as error:
            if written:
                # Half a frame would read as damage. If it has to stay: that damage is all it does.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._generation_bytes)
            raise StorageUnavailable(str(self._path()), f"cannot be written: {error.strerror}") from error
        self._generation_bytes += len(frame)
        self.bytes_written += len(frame)
        self._unsynced = True

    def _path(self) -> Path:
        return journal_path(self.directory, self._engine.effects.generation)

    def _begin_generation(self) -> None:
        """Begin a file for the engine's current generation. The one before is flushed and closed with the next flush."""
        if self._descriptor >= 0:
            self._retired.append(self._descriptor)
            self._descriptor = -1
        path = self._path()
        self._generation_bytes = 0
        try:
            self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._descriptor, 0)
            self._write(HEADER)
            self._sync_directory()
        except OSError as error:
            raise StorageUnavailable(str(path), f"cannot be made: {error.strerror}") from error

    def _maintain(self) -> None:
        """Go on with a snapshot, or begin one when it is due; a step at a time."""
        if self._snapshot is None and self._finishing is None and self._generation_bytes >= self._snapshot_due:
            self._start_snapshot()
        if self._snapshot is not None:
            self._step()
        elif self._finishing is not None and self._finishing.done():
            self._finishing.result()
            self._finishing = None
            self.snapshots += 1

    def _start_snapshot(self) -> None:
        self._snapshot = Snapshot(self._engine)
        self._snapshot_size = 0
        self._begin_generation()

    def _step(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        records = snapshot.step(SNAPSHOT_STEP_BYTES)
        if records:
            frame = frame_of(records)
            self._snapshot_size += len(frame)
            self._write(frame)
            return
        self._snapshot = None
        # State that does not shrink must not be copied again for every few bytes: wait until as much has been added.
        self._snapshot_due = max(self._snapshot_bytes, 2 * self._snapshot_size) + self._generation_bytes
        retired, self._retired = self._retired, []
        self._finishing = self._flusher.submit(self._finish_snapshot, [*retired, self._descriptor], retired)

    # --- in the flusher's thread ----------------------------------------------------------------------------------------

    def _flush(self, descriptors: list[int], to_close: list[int]) -> None:
        try:
            for descriptor in descriptors:
                os.fdatasync(descriptor)
        except OSError as error:
            # After a failed flush the kernel may have dropped the pages: trying again would report success for lost data.
            raise StorageUnavailable(str(self.directory), f"cannot be flushed: {error.strerror}") from error
        finally:
            for descriptor in to_close:
                # Flushed or failed by now; what closing may add is no news, and the descriptor is gone in any case.
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _finish_snapshot(self, descriptors: list[int], to_close: list[int]) -> None:
        self._flush(descriptors, to_close)
        current = self._path()
        try:
            for path in _generations(self.directory):
                if path < current:
                    path.unlink()
            self._sync_directory()
        except OSError as error:
            raise StorageUnavailable(str(self.directory), f"old files cannot be removed: {error.strerror}") from error

    def _sync_directory(self) -> None:
        descriptor = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    # --- opening --------------------------------------------------------------------------------------------------------

    def _acquire(self) -> int:
        path = self.directory / "lock"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StorageUnavailable(str(path), f"cannot be made: {error.strerror}") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise StorageUnavailable(str(self.directory), "another broker uses this directory; give each its own") from None
        except OSError as error:
            os.close(descriptor)
            raise StorageUnavailable(str(path), f"cannot be locked: {error.strerror}") from error
        return descriptor

    def _recover(self, now: float) -> None:
        engine = self._engine
        recovery = Recovery(engine)
        found = _generations(self.directory)
        # Before anything is set aside: damage to an older file must not take a newer version's along.
        for path in found:
            if is_newer(path):
                raise _too_new(path)
        newest = 0
        for index, path in enumerate(found):
            newest = _generation_of(path)
            try:
                self._replay(recovery, path)
            except StorageCorrupt as damage:
                self.damage.append(damage)
                newest = _generation_of(found[-1])
                self._set_aside(found[index:])
                break
        self.recovered_records = recovery.records
        engine.effects.generation = newest
        # Whatever was read is written anew at once: the state is checked, old files go, and damage does not stay in the way.
        self._start_snapshot()
        while self._snapshot is not None:
            self._step()
        if self._finishing is not None:
            self._finishing.result()
            self._finishing = None
        recovery.finish(now)
        pending = engine.take_records()
        if pending:
            self._write(frame_of(pending))

    def _replay(self, recovery: Recovery, path: Path) -> None:
        for offset, records in read_frames(path):
            for record in records:
                try:
                    recovery.apply(record)
                except UnknownRecord as error:
                    # The frame is whole, so this was meant: damage would not have passed the checksum.
                    raise _too_new(path) from error
                except (ValueError, KeyError, IndexError, struct.error) as error:
                    raise StorageCorrupt(str(path), offset, f"a record makes no sense: {error}") from error

    def _set_aside(self, paths: list[Path]) -> None:
        """Keep damaged files for whoever wants to look, but not every one of a broker that crashes again and again."""
        for path in sorted(self.directory.glob(f"journal-*{DAMAGED}"))[:-MAX_DAMAGED_FILES]:
            path.unlink()
        for path in paths:
            aside = path.with_name(path.name + DAMAGED)
            aside.unlink(missing_ok=True)
            # The journal keeps its name until the recovered state is on disk: a crash in between must find it again.
            try:
                aside.hardlink_to(path)
            except OSError:  # no hard links here
                shutil.copyfile(path, aside)


def _generations(directory: Path) -> list[Path]:
    return sorted(path for path in directory.glob("journal-*") if path.name[8:].isdigit())


def _generation_of(path: Path) -> int:
    return int(path.name[8:])

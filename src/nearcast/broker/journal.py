"""The journal on a real disk: a locked directory, descriptors, and a thread that flushes.

What is in the files, when the next one begins and how they are read again is :class:`~nearcast.mqtt.journaling.Journaling`'s
business, which the simulator runs as well. Here its files survive ``kill -9`` and, when flushed, a power cut. The topic log,
if there is one, is flushed before them, in the same step of the same thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

from nearcast.broker.files import failing, sync_directory
from nearcast.config import Persistence
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.journaling import SNAPSHOT_STEP_BYTES, Journaling
from nearcast.mqtt.keeping import MarkedLog
from nearcast.serving import logs


class Journal:
    """The open journal of one broker."""

    def __init__(self, files: Files, machine: Journaling, *, fsync: bool) -> None:
        self.files = files
        self.needs_sync = fsync
        self._machine = machine
        self._flushed_bytes = 0
        self.damage = machine.damage

    @classmethod
    def open(
        cls,
        directory: str,
        engine: Engine,
        now: float,
        *,
        fsync: bool,
        snapshot_bytes: int,
        snapshot_step_bytes: int = SNAPSHOT_STEP_BYTES,
        log: FlushedLog | None = None,
    ) -> Journal:
        """Lock the directory, recover what it holds into ``engine``, and be ready to append.

        The lock covers the topic log as well, so ``log`` is opened in here, before the journal and with its agreement.
        """
        files = Files(Path(directory))
        machine = Journaling(engine, files, snapshot_bytes, snapshot_step_bytes, log)
        journal = cls(files, machine, fsync=fsync)
        try:
            if log is not None:
                log.open()
                files.log = log
            machine.recover()
            journal.await_replaced()
            machine.opened(now)
        except BaseException:
            if log is not None:
                log.close()
            journal.close()
            raise
        return journal

    @property
    def unsynced(self) -> bool:
        """Whether something was appended that no :meth:`sync` has covered and ended since."""
        return self.files.written_bytes > self._flushed_bytes

    @property
    def recovered_records(self) -> int:
        """How many records were replayed."""
        return self._machine.recovered_records

    @property
    def snapshots(self) -> int:
        """How many times the state was written anew since the start."""
        return self._machine.snapshots

    @property
    def copying(self) -> bool:
        """Whether the state is being written anew."""
        return self._machine.copying

    def append(self, records: list[bytes]) -> None:
        """Write records to the kernel as one frame; raises :class:`StorageUnavailable`, and then nothing of them is there."""
        if self.files.is_replaced():
            self.await_replaced()
        self._machine.append(records)

    async def sync(self) -> None:
        """Return once everything that was written before the call is on the disk, the topic log's part included."""
        covered_bytes = self.files.written_bytes
        await asyncio.wrap_future(self.files.flush())
        self._flushed_bytes = covered_bytes

    def await_replaced(self) -> None:
        """Wait until the files that a snapshot replaced are gone, if any are on their way."""
        if self._machine.replacing:
            self.files.await_replaced()
            self._machine.replaced()

    def close(self) -> None:
        """Flush, close and unlock. A disk that fails even now is logged: whatever was acknowledged has been flushed before."""
        try:
            self.files.close()
        except StorageUnavailable as error:
            logs.event(logging.ERROR, "the journal could not be flushed at the end", path=error.path, reason=str(error))


def open_journal(persistence: Persistence, engine: Engine, log: FlushedLog, now: float) -> Journal | None:
    """Recover journal and topic log of the data directory, if there is one, and say what was found."""
    if persistence.directory is None:
        return None
    journal = Journal.open(
        persistence.directory,
        engine,
        now,
        fsync=persistence.sync == "fsync",
        snapshot_bytes=persistence.snapshot_bytes,
        log=log,
    )
    for damage in journal.damage:
        logs.event(
            logging.WARNING if damage.torn else logging.ERROR,
            "the journal is damaged; what precedes the damage was recovered, the file was kept as *.damaged",
            path=damage.path,
            offset=damage.offset,
            reason=str(damage),
        )
    stats = engine.stats
    logs.event(
        logging.INFO,
        "state recovered",
        directory=persistence.directory,
        sessions=stats.sessions,
        queued=stats.queued_messages,
        inflight=stats.inflight_messages,
        retained=stats.retained_messages,
        topics=log.topic_count,
    )
    return journal


class FlushedLog(MarkedLog, Protocol):
    """The topic log as the journal's thread meets it."""

    @property
    def topic_count(self) -> int:
        """Topics it has."""

    def open(self) -> None:
        """Get ready to be recovered; the directory is locked by now."""

    def close(self) -> None:
        """It is needed no more."""

    def flush_step(self) -> Callable[[], None] | None:
        """What brings everything written by now to the disk, for another thread to call; ``None`` when it is there."""


class Files:
    """A directory that one process uses at a time, as a :class:`~nearcast.mqtt.frames.Storage`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log: FlushedLog | None = None
        self.written_bytes = 0
        self._submitted_bytes = -1
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise StorageUnavailable(str(directory), f"cannot be made: {error.strerror}") from error
        self._lock = self._acquire()
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="journal-flush")
        self._replacing: Future[None] | None = None
        self._flush_failed: StorageUnavailable | None = None
        # The file that is written, and those before it that no flush has covered yet.
        self._name = ""
        self._descriptor = -1
        self._size = 0
        self._retired: list[int] = []

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

    def close(self) -> None:
        """Flush, close and unlock, in any case; then raise what went wrong."""
        self._flusher.shutdown(wait=True)
        descriptors = [*self._retired, self._descriptor] if self._descriptor >= 0 else self._retired
        self._descriptor = -1
        self._retired = []
        try:
            self._flush(None if self.log is None else self.log.flush_step(), descriptors, descriptors)
        finally:
            os.close(self._lock)

    # --- reading --------------------------------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def names(self) -> list[str]:
        with self._failing("cannot be used"):
            return os.listdir(self.directory)

    def size(self, name: str) -> int:
        with self._failing("cannot be used", name):
            return os.stat(self.path(name)).st_size

    def read(self, name: str, offset: int, size: int) -> bytes:
        with self._failing("cannot be used", name), open(self.path(name), "rb") as file:
            file.seek(offset)
            return file.read(size)

    # --- writing --------------------------------------------------------------------------------------------------------

    def create(self, name: str) -> None:
        if self._descriptor >= 0:
            self._retired.append(self._descriptor)
            self._descriptor = -1
        self._name = name
        self._size = 0
        with self._failing("cannot be made", name):
            self._descriptor = os.open(self.path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._descriptor, 0)
            sync_directory(self.directory)

    def append(self, data: bytes) -> None:
        written = 0
        try:
            written = os.write(self._descriptor, data)
            while written < len(data):
                written += os.write(self._descriptor, memoryview(data)[written:])
        except OSError as error:
            if written:
                # Half a frame would read as damage. If it has to stay: that damage is all it does.
                with contextlib.suppress(OSError):
                    os.ftruncate(self._descriptor, self._size)
            raise StorageUnavailable(self.path(self._name), f"cannot be written: {error.strerror}") from error
        self._size += written
        self.written_bytes += written

    def keep_aside(self, name: str, aside: str) -> None:
        source, target = self.directory / name, self.directory / aside
        with self._failing("cannot be used", name):
            target.unlink(missing_ok=True)
            try:
                target.hardlink_to(source)
            except OSError:  # no hard links here
                shutil.copyfile(source, target)

    def remove(self, name: str) -> None:
        with self._failing("cannot be used", name):
            os.unlink(self.path(name))

    def flush(self) -> Future[None]:
        """Have the disk take everything that was written before the call."""
        first, descriptors, to_close = self._to_flush()
        return self._flusher.submit(self._flush, first, descriptors, to_close)

    def replace(self, names: list[str]) -> None:
        first, descriptors, to_close = self._to_flush()
        self._replacing = self._flusher.submit(self._replace, first, descriptors, to_close, names)

    def _to_flush(self) -> tuple[Callable[[], None] | None, list[int], list[int]]:
        """The log's step, the descriptors to flush after it, and those of them to close."""
        retired, self._retired = self._retired, []
        first = None if self.log is None else self.log.flush_step()
        # One thread does all flushes, in order: what an earlier one covers needs no other.
        clean = self._submitted_bytes == self.written_bytes and not retired
        self._submitted_bytes = self.written_bytes
        return first, [] if clean else [*retired, self._descriptor], retired

    def is_replaced(self) -> bool:
        """Whether what :meth:`replace` began is done, well or not."""
        return self._replacing is not None and self._replacing.done()

    def await_replaced(self) -> None:
        """Wait for what :meth:`replace` began; raises what went wrong."""
        replacing, self._replacing = self._replacing, None
        if replacing is not None:
            replacing.result()

    # --- in the flusher's thread ----------------------------------------------------------------------------------------

    def _flush(self, first: Callable[[], None] | None, descriptors: list[int], to_close: list[int]) -> None:
        try:
            if self._flush_failed is not None:
                # After a failed flush the kernel may have dropped the pages: trying again would report success for lost data.
                # And a flush that has nothing left to do relies on those before it.
                raise self._flush_failed
            if first is not None:
                first()
            for descriptor in descriptors:
                os.fdatasync(descriptor)
        except OSError as error:
            self._flush_failed = StorageUnavailable(str(self.directory), f"cannot be flushed: {error.strerror}")
            raise self._flush_failed from error
        except StorageUnavailable as error:
            self._flush_failed = error
            raise
        finally:
            for descriptor in to_close:
                # Flushed or failed by now; what closing may add is no news, and the descriptor is gone in any case.
                with contextlib.suppress(OSError):
                    os.close(descriptor)

    def _replace(
        self, first: Callable[[], None] | None, descriptors: list[int], to_close: list[int], names: list[str]
    ) -> None:
        self._flush(first, descriptors, to_close)
        with self._failing("old files cannot be removed"):
            for name in names:
                os.unlink(self.path(name))
            sync_directory(self.directory)

    def _failing(self, how: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return failing(self.path(name), how)

"""The topic log on a real disk: descriptors, mappings, a thread that flushes, and threads that read what is not in memory.

What is in the files is :class:`~nearcast.topiclog.log.TopicLog`'s business, which the simulator runs as well. Here its files
survive ``kill -9`` and, when flushed, a power cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from nearcast.broker.files import failing, sync_directory
from nearcast.errors import StorageUnavailable
from nearcast.topiclog.log import Extents, TopicLog

DIRECTORY = "topics"
"""Of the log, below the broker's data directory."""

_PARTIAL = ".partial"
_IOV_MAX = 1_024
_JOINED_BYTES = 4_096
"""Pieces smaller than this on average are joined before they are written: a copy costs less than a long list."""
_SKIPPED_BYTES = 4_096
"""Pieces closer together than this are read at once."""
_SPAN_BYTES = 4 << 20
"""Most that is read at once for the sake of several pieces."""
_MAX_OPEN = 128
"""Files that are kept open, beside those that somebody reads."""
_CANNOT_NOW = {errno.EAGAIN, errno.EOPNOTSUPP}
"""What is not in memory; and what a file system says that does not tell what is (tmpfs, NFS and others)."""
_READERS = 4
"""Threads that read what is not in memory."""


class _File:
    """An open file. Closed when the last one who reads it lets go: a file may be removed while it is read."""

    __slots__ = ("descriptor", "mapping", "name")

    def __init__(self, name: str, descriptor: int) -> None:
        self.name = name
        self.descriptor = descriptor
        self.mapping = memoryview(b"")

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self.descriptor)


class TopicFiles:
    """A directory of segments and indexes, as a :class:`~nearcast.topiclog.storage.Storage`.

    Whoever opens it has locked the data directory before (:class:`nearcast.broker.journal.Files`).
    """

    def __init__(self, directory: Path, *, fsync: bool = True) -> None:
        self.directory = directory
        self.fsync = fsync
        self.unsynced = False
        self._active: _File | None = None
        self._size = 0
        # Open files, those used last at the end. Threads read, too.
        self._open: dict[str, _File] = {}
        self._opening = threading.Lock()
        # Files before the active one that no flush has covered yet, and whether the directory changed since the last.
        self._retired: list[_File] = []
        self._names_changed = False
        self._flusher = ThreadPoolExecutor(1, thread_name_prefix="topics-flush")
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="topics-read")
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            sync_directory(directory.parent)
            for name in os.listdir(directory):
                if name.endswith(_PARTIAL):
                    os.unlink(directory / name)
        except OSError as error:
            raise StorageUnavailable(str(directory), f"cannot be made: {error.strerror}") from error

    def close(self) -> None:
        """Flush and close, in any case; then raise what went wrong."""
        try:
            if self._active is not None:
                self.flush().result()
        finally:
            self._flusher.shutdown(wait=True)
            self._readers.shutdown(wait=True, cancel_futures=True)
            self._active = None
            self._retired = []
            self._open = {}

    # --- reading --------------------------------------------------------------------------------------------------------

    def path(self, name: str) -> str:
        return str(self.directory / name)

    def names(self) -> list[str]:
        with self._failing("cannot be read"):
            return os.listdir(self.directory)

    def size(self, name: str) -> int:
        with self._failing("cannot be read", name):
            return os.stat(self.path(name)).st_size

    def read(self, name: str, offset: int, size: int) -> bytes:
        with self._failing("cannot be read", name):
            return _read_fully(self._file(name).descriptor, offset, size)

    def view(self, name: str, size: int) -> memoryview:
        with self._failing("cannot be read", name):
            file = self._file(name)
            if len(file.mapping) < size:
                held = os.fstat(file.descriptor).st_size
                if held == 0:
                    return memoryview(b"")
                file.mapping = memoryview(mmap.mmap(file.descriptor, held, mmap.MAP_SHARED, mmap.PROT_READ))
            return file.mapping

    async def load(self, extents: Extents) -> memoryview:
        """The blocks of a read in one piece. What is not in memory is read in a thread: the event loop does not wait."""
        if not extents.pieces:
            return memoryview(b"")
        with self._failing("cannot be read", extents.pieces[0][0]):
            files = {name: self._file(name) for name, _, _ in extents.pieces}
            # Held by descriptors from here on: the files may be removed meanwhile.
            found = _read_pieces(files, extents.pieces, os.RWF_NOWAIT)
            if found is None:
                loop = asyncio.get_running_loop()
                found = await loop.run_in_executor(self._readers, _read_pieces, files, extents.pieces, 0)
        if found is None:
            raise StorageUnavailable(self.path(extents.pieces[0][0]), "cannot be read: the file is too short")
        return found

    # --- writing --------------------------------------------------------------------------------------------------------

    def create(self, name: str) -> None:
        with self._failing("cannot be made", name):
            flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
            self._activate(_File(name, os.open(self.path(name), flags, 0o600)), 0)

    def resume(self, name: str, size: int) -> None:
        with self._failing("cannot be written", name):
            file = _File(name, os.open(self.path(name), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC))
            os.ftruncate(file.descriptor, size)
            self._activate(file, size)

    def _activate(self, file: _File, size: int) -> None:
        if self._active is not None:
            self._retired.append(self._active)
        self._active = file
        with self._opening:
            self._open[file.name] = file
        self._size = size
        self._names_changed = True
        self.unsynced = True

    def append(self, pieces: list[bytes]) -> None:
        file = self._active
        if file is None:
            raise StorageUnavailable(str(self.directory), "cannot be written: it is closed")
        size = sum(map(len, pieces))
        if size < len(pieces) * _JOINED_BYTES:
            pieces = [b"".join(pieces)]
        try:
            for begin in range(0, len(pieces), _IOV_MAX):
                _write_fully(file.descriptor, pieces[begin : begin + _IOV_MAX])
        except OSError as error:
            # Half a block would read as damage. If it has to stay: that damage is all it does.
            with contextlib.suppress(OSError):
                os.ftruncate(file.descriptor, self._size)
            raise StorageUnavailable(self.path(file.name), f"cannot be written: {error.strerror}") from error
        self._size += size
        self.unsynced = True

    def put(self, name: str, pieces: Iterable[bytes], flush: bool) -> None:
        partial = self.path(name + _PARTIAL)
        with self._failing("cannot be written", name):
            try:
                descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                try:
                    for piece in pieces:
                        _write_fully(descriptor, [piece])
                    if flush:
                        os.fdatasync(descriptor)
                finally:
                    os.close(descriptor)
                os.replace(partial, self.path(name))
                if flush:
                    sync_directory(self.directory)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial)
                raise
        self._forget(name)

    def remove(self, name: str) -> None:
        self._forget(name)
        with self._failing("cannot be removed", name), contextlib.suppress(FileNotFoundError):
            os.unlink(self.path(name))

    def flush(self, before: Callable[[], None] | None = None) -> Future[None]:
        """Have the disk take everything that was appended before the call, and the names of its files; ``before`` is called in
        the same thread."""
        retired, self._retired = self._retired, []
        files = retired if self._active is None else [*retired, self._active]
        names_changed, self._names_changed = self._names_changed, False
        self.unsynced = False
        return self._flusher.submit(self._flush, files, names_changed, before)

    def _flush(self, files: list[_File], names_changed: bool, before: Callable[[], None] | None) -> None:
        if before is not None:
            before()
        try:
            for file in files:
                os.fdatasync(file.descriptor)
            if names_changed:
                sync_directory(self.directory)
        except OSError as error:
            # After a failed flush the kernel may have dropped the pages: trying again would report success for lost data.
            raise StorageUnavailable(str(self.directory), f"cannot be flushed: {error.strerror}") from error

    # --- helpers --------------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> _File:
        with self._opening:
            found = self._open.pop(name, None)
            if found is None:
                found = _File(name, os.open(self.path(name), os.O_RDONLY | os.O_CLOEXEC))
                while len(self._open) >= _MAX_OPEN:
                    del self._open[next(iter(self._open))]
            self._open[name] = found
            return found

    def _forget(self, name: str) -> None:
        with self._opening:
            self._open.pop(name, None)

    def _failing(self, how: str, name: str = "") -> contextlib.AbstractContextManager[None]:
        return failing(self.path(name), how)


def open_log(directory: Path, *, segment_bytes: int, max_topics: int, fsync: bool = True) -> tuple[TopicFiles, TopicLog]:
    """Open the log below a broker's (locked) data directory, recover it, and flush it: what it has now is committed."""
    files = TopicFiles(directory / DIRECTORY, fsync=fsync)
    try:
        log = TopicLog(files, segment_bytes, max_topics)
        log.recover()
        if fsync:
            files.flush().result()
    except BaseException:
        files.close()
        raise
    return files, log


def _read_fully(descriptor: int, offset: int, size: int) -> bytes:
    data = os.pread(descriptor, size, offset)
    if len(data) == size:
        return data
    parts = [data]
    got = len(data)
    while data and got < size:
        data = os.pread(descriptor, size - got, offset + got)
        parts.append(data)
        got += len(data)
    return b"".join(parts)


def _write_fully(descriptor: int, pieces: list[bytes]) -> None:
    written = os.writev(descriptor, pieces)
    total = sum(map(len, pieces))
    if written == total:
        return
    rest = memoryview(b"".join(pieces))
    while written < total:
        written += os.write(descriptor, rest[written:])


def _read_pieces(files: dict[str, _File], pieces: list[tuple[str, int, int]], flags: int) -> memoryview | None:
    """Pieces of files, one behind the other; None when a file is too short or, with RWF_NOWAIT, is not in memory.

    Pieces that lie close together are read at once, with what lies between them: a call costs more than a few bytes.
    """
    found: list[memoryview] = []
    at = 0
    try:
        while at < len(pieces):
            name, begin, size = pieces[at]
            end = begin + size
            after = at + 1
            while after < len(pieces):
                next_name, next_begin, next_size = pieces[after]
                far = next_name != name or not 0 <= next_begin - end <= _SKIPPED_BYTES
                if far or next_begin + next_size - begin > _SPAN_BYTES:
                    break
                end = next_begin + next_size
                after += 1
            span = memoryview(bytearray(end - begin))
            if not _read_into(files[name].descriptor, span, begin, flags):
                return None
            if after == at + 1:
                found.append(span)
            else:
                found += [span[offset - begin : offset - begin + length] for _, offset, length in pieces[at:after]]
            at = after
    except OSError as error:
        if flags and error.errno in _CANNOT_NOW:
            return None
        raise
    return found[0] if len(found) == 1 else memoryview(b"".join(found))


def _read_into(descriptor: int, target: memoryview, offset: int, flags: int) -> bool:
    got = 0
    while got < len(target):
        count = os.preadv(descriptor, [target[got:]], offset + got, flags)
        if count == 0:
            return False
        got += count
    return True

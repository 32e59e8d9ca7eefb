"""The spool on a real disk: one folder of files that are written once by a thread, and read and removed on the spot.

What is in them and when they count is :mod:`nearcast.fabric.spool`'s business. A file counts once the journal says so, which
it does after the file is on disk; so one that a crash left half written is removed at the next start.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from nearcast.broker.files import failing, sync_directory
from nearcast.errors import StorageUnavailable

SPOOL = "spool"
"""The folder's name in a data directory."""

_NAME = re.compile(r"(\d{1,18})-(\d{1,18})")

Done = Callable[[int, int, StorageUnavailable | None], None]


class SpoolFiles:
    """A :class:`~nearcast.fabric.spool.SpoolStorage`. ``on_written`` is called in the writer's thread."""

    def __init__(self, directory: Path, on_written: Done, *, fsync: bool) -> None:
        self.directory = directory
        self._on_written = on_written
        self._fsync = fsync
        with failing(str(directory), "cannot be made"):
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="spool-write")

    def _path(self, session_number: int, file_number: int) -> Path:
        return self.directory / f"{session_number}-{file_number}"

    def write(self, session_number: int, file_number: int, data: bytes) -> None:
        try:
            self._writer.submit(self._write, session_number, file_number, data)
        except RuntimeError as error:  # closed: the broker is stopping, and the journal has the messages
            raise StorageUnavailable(str(self.directory), "is closed") from error

    def _write(self, session_number: int, file_number: int, data: bytes) -> None:
        path = self._path(session_number, file_number)
        failed: StorageUnavailable | None = None
        try:
            with failing(str(path), "cannot be written"):
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
                    file.flush()
                    if self._fsync:
                        os.fsync(descriptor)
                if self._fsync:
                    sync_directory(self.directory)
        except StorageUnavailable as error:
            failed = error
        self._on_written(session_number, file_number, failed)

    def read(self, session_number: int, file_number: int) -> bytes:
        path = self._path(session_number, file_number)
        with failing(str(path), "cannot be read"):
            return path.read_bytes()

    def remove(self, session_number: int, file_number: int) -> None:
        # One that cannot be removed costs its place on the disk until the next start, which tries again.
        with contextlib.suppress(OSError):
            self._path(session_number, file_number).unlink(missing_ok=True)

    def files(self) -> list[tuple[int, int]]:
        with failing(str(self.directory), "cannot be read"):
            names = os.listdir(self.directory)
        found = [_NAME.fullmatch(name) for name in names]
        return [(int(match[1]), int(match[2])) for match in found if match is not None]

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.shutdown(wait=True)


def clear_spool(data_directory: str | None) -> None:
    """This broker is no longer part of a fabric: nobody will ask for these files."""
    if data_directory is not None:
        with contextlib.suppress(OSError):
            for path in (Path(data_directory) / SPOOL).iterdir():
                if _NAME.fullmatch(path.name) is not None:
                    path.unlink(missing_ok=True)

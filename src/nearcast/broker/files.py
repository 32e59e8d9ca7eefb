"""What everything in the data directory needs of a disk: names that survive a power cut, files that are whole or not there,
and the operating system's complaints as our error."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from nearcast.errors import StorageUnavailable


def sync_directory(directory: Path) -> None:
    """Have the disk take the names in a directory: of files that were made, renamed or removed."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, temporary: Path, content: bytes) -> None:
    """Give a file this content; returns once the disk has it. After :class:`StorageUnavailable` the old one is there.

    ``temporary`` lies beside it and is what a crash may leave.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        os.replace(temporary, path)
        sync_directory(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise StorageUnavailable(str(path), f"cannot be written: {error.strerror}") from error


@contextlib.contextmanager
def failing(path: str, how: str) -> Iterator[None]:
    """What the operating system says against it, as our error."""
    try:
        yield
    except OSError as error:
        raise StorageUnavailable(path, f"{how}: {error.strerror}") from error

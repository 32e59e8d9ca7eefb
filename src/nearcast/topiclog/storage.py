"""What the log needs of whatever keeps its files, and a keeper in memory for tests.

Real files are :class:`nearcast.broker.topic_files.TopicFiles`; the simulator has its own, on a disk that loses power.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from nearcast.errors import StorageUnavailable


class Storage(Protocol):
    """A directory of files, one of which grows at its end. Failures are :class:`~nearcast.errors.StorageUnavailable`.

    Nothing here waits for a flush; when what was appended is safe is between the storage's owner and its disk, and the owner
    then calls :meth:`nearcast.topiclog.log.TopicLog.commit`. Such a flush also covers the names of new files.
    A name is never used for a second file with other content, except for index files.
    """

    def path(self, name: str) -> str:
        """How a file is called in front of people."""

    def names(self) -> list[str]:
        """All files, in any order."""

    def size(self, name: str) -> int:
        """In bytes."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Less than ``size`` bytes only where the file ends. Any thread may call it."""

    def view(self, name: str, size: int) -> memoryview:
        """The file's first ``size`` bytes, or more, without a copy if possible. Stays good after the file is removed."""

    def create(self, name: str) -> None:
        """An empty file that :meth:`append` writes to from now on. The next flush covers its name and the file before it."""

    def resume(self, name: str, size: int) -> None:
        """Cut a file to ``size`` bytes; :meth:`append` writes to its end from now on."""

    def append(self, pieces: list[bytes]) -> None:
        """Write to the end of that file, all of it or, when this raises, nothing."""

    def put(self, name: str, pieces: Iterable[bytes], flush: bool) -> None:
        """A file with this content, there whole or not at all; flushed before it gets its name, where asked for.

        Replaces what had the name. Any thread may call it, and it may wait for the disk.
        """

    def remove(self, name: str) -> None:
        """Remove a file; it is no error if it is gone. Any thread may call it."""


class MemoryStorage:
    """Files in memory. ``capacity_bytes`` makes a disk that gets full."""

    def __init__(self) -> None:
        self.files: dict[str, bytearray] = {}
        self.capacity_bytes = 1 << 62
        self._active = ""
        self._views: dict[str, memoryview] = {}

    def path(self, name: str) -> str:
        return f"memory/{name}"

    def names(self) -> list[str]:
        return list(self.files)

    def size(self, name: str) -> int:
        return len(self._find(name))

    def read(self, name: str, offset: int, size: int) -> bytes:
        return bytes(self._find(name)[offset : offset + size])

    def view(self, name: str, size: int) -> memoryview:
        held = self._views.get(name)
        if held is None or len(held) < size:
            # A view of the growing file itself would forbid it to grow.
            held = self._views[name] = memoryview(bytes(self._find(name)))
        return held

    def create(self, name: str) -> None:
        self._check_room(name, 0)
        self.files[name] = bytearray()
        self._views.pop(name, None)
        self._active = name

    def resume(self, name: str, size: int) -> None:
        del self._find(name)[size:]
        self._views.pop(name, None)
        self._active = name

    def append(self, pieces: list[bytes]) -> None:
        data = b"".join(pieces)
        self._check_room(self._active, len(data))
        self._find(self._active).extend(data)

    def put(self, name: str, pieces: Iterable[bytes], flush: bool) -> None:
        data = b"".join(pieces)
        self._check_room(name, len(data))
        self.files[name] = bytearray(data)
        self._views.pop(name, None)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)
        self._views.pop(name, None)

    def _find(self, name: str) -> bytearray:
        if name not in self.files:
            raise StorageUnavailable(self.path(name), "no such file")
        return self.files[name]

    def _check_room(self, name: str, more_bytes: int) -> None:
        if sum(map(len, self.files.values())) + more_bytes > self.capacity_bytes:
            raise StorageUnavailable(self.path(name), "cannot be written: no space left")

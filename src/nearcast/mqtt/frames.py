"""The format of a journal file: a header and frames; and what the journal needs of whatever keeps its files.

A frame is everything one call into the engine produced, so that it is there entirely or not at all::

    header   "nearcast journal 1\\n"
    frame    length u32 | crc32 of the body u32 | body: records, each with its length as LEB128

Reading stops at the first frame that is not whole. A header with a higher number is a newer version's file, and no damage.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from typing import Final, Protocol

from nearcast.errors import StorageCorrupt
from nearcast.mqtt import records as record_fields

VERSION: Final = 1
HEADER: Final = b"nearcast journal %d\n" % VERSION
FRAME: Final = struct.Struct(">II")

_ANY_HEADER: Final = re.compile(rb"nearcast journal ([1-9]\d{0,8})\n")
#: Files are read in pieces of this size, or of a frame's where that is larger.
_WINDOW_BYTES: Final = 1_048_576


class Storage(Protocol):
    """A directory of files with one that grows at its end. Failures are :class:`~nearcast.errors.StorageUnavailable`.

    Nothing here waits for the disk but :meth:`create`, where the directory itself may have to be flushed.
    """

    def path(self, name: str) -> str:
        """How a file is called in front of people."""

    def names(self) -> list[str]:
        """All files, in any order."""

    def size(self, name: str) -> int:
        """In bytes."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Less than ``size`` bytes only where the file ends."""

    def create(self, name: str) -> None:
        """An empty file that :meth:`append` writes to from now on; whatever had that name is gone.

        Once something in the file survives a power cut, its name does, too. The next flush also covers the file before it.
        """

    def append(self, data: bytes) -> None:
        """Write to the end of the file created last, all of it or, when this raises, if at all possible nothing."""

    def keep_aside(self, name: str, aside: str) -> None:
        """Give a file a second name, replacing what had it. The file stays under its own name."""

    def remove(self, name: str) -> None:
        """Remove a file."""

    def replace(self, names: list[str]) -> None:
        """Begin to flush all that was appended and, when that is on disk, to remove these files.

        Whoever owns the storage calls :meth:`nearcast.mqtt.journaling.Journaling.replaced` when both are done.
        """


def frame_of(records: list[bytes]) -> bytes:
    """The frame that holds ``records``."""
    parts: list[bytes] = []
    for record in records:
        parts.append(record_fields.number(len(record)))
        parts.append(record)
    body = b"".join(parts)
    return FRAME.pack(len(body), zlib.crc32(body)) + body


def is_newer(storage: Storage, name: str) -> bool:
    """Whether a file says that it is a journal of a version after this one."""
    found = _ANY_HEADER.match(storage.read(name, 0, 64))
    return found is not None and int(found.group(1)) > VERSION


def read_frames(storage: Storage, name: str) -> Iterator[tuple[int, list[bytes]]]:
    """(offset, records) of every frame in a file; raises :class:`StorageCorrupt` at the first that is not whole."""
    for offset, body in read_bodies(storage, name):
        yield offset, _split(storage, name, offset, body)


def read_bodies(storage: Storage, name: str) -> Iterator[tuple[int, bytes]]:
    """(offset, body) of every frame in a file; raises :class:`StorageCorrupt` at the first that is not whole."""
    path = storage.path(name)
    window = _Window(storage, name)
    if window.file_bytes < len(HEADER):
        raise StorageCorrupt(path, 0, "the file ends inside its header", torn=True)
    if window.take(0, len(HEADER)) != HEADER:
        raise StorageCorrupt(path, 0, "this is not a journal")
    offset = len(HEADER)
    while offset < window.file_bytes:
        if offset + FRAME.size > window.file_bytes:
            raise StorageCorrupt(path, offset, "the file ends inside a frame", torn=True)
        length, checksum = FRAME.unpack(window.take(offset, FRAME.size))
        begin = offset + FRAME.size
        if length == 0:  # nobody writes an empty frame; zeros are what a file system leaves after a power cut
            raise StorageCorrupt(path, offset, "zeros where a frame should be")
        if begin + length > window.file_bytes:
            raise StorageCorrupt(path, offset, "the file ends inside a frame", torn=True)
        body = window.take(begin, length)
        if zlib.crc32(body) != checksum:
            raise StorageCorrupt(path, offset, "the checksum does not match")
        yield offset, body
        offset = begin + length


def _split(storage: Storage, name: str, offset: int, body: bytes) -> list[bytes]:
    fields = record_fields.Fields(body)
    fields.position = 0
    found: list[bytes] = []
    try:
        while fields.position < len(body):
            found.append(fields.blob())
    except ValueError as error:
        raise StorageCorrupt(storage.path(name), offset, str(error)) from None
    return found


class _Window:
    """A file, read a large piece at a time."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self.file_bytes = storage.size(name)
        self._data = b""
        self._at = 0

    def take(self, offset: int, size: int) -> bytes:
        """The bytes at ``offset``; the caller has seen that the file has so many."""
        start = offset - self._at
        if start + size > len(self._data):
            wanted = min(max(size, _WINDOW_BYTES), self.file_bytes - offset)
            self._data = self._storage.read(self._name, offset, wanted)
            self._at = offset
            start = 0
        return self._data[start : start + size]

"""A small value that must not be forgotten, such as a replica's term and vote: one append and one flush for each new one.

The file grows by a record for each value; the last whole one counts. When it is large, the next file is begun with the value,
and the one before is removed once the next is on disk. A record that is cut off at the end is a write that a crash cut short:
nobody was told of it. Anything else that is broken is damage, and is reported: then the value may be older than one that was
on disk, and whoever voted by it has to be careful.

The storage is one of its own: its growing file is this one. What the value means is the caller's business.
"""

from __future__ import annotations

import re
import struct
import zlib
from typing import Final

from nearcast.errors import LocalProtocolError, StorageCorrupt
from nearcast.topiclog.storage import Storage

MAX_VALUE_BYTES: Final = 1 << 20
MAX_FILE_BYTES: Final = 65_536
"""Size from which on the next file is begun."""

_FRAME: Final = struct.Struct("<II")
_NAME: Final = re.compile(r"state-(\d{10})")


def _name(number: int) -> str:
    return f"state-{number:010d}"


class StateFile:
    """See the module. The owner of the storage flushes it after :meth:`save`, before it acts on the value."""

    def __init__(self, storage: Storage) -> None:
        self.value = b""
        """The latest one; empty if there never was one."""
        self.damage: list[StorageCorrupt] = []
        """What was found broken; that a write was cut short is told by ``torn``."""
        self._storage = storage
        self._number = 0
        self._size = 0
        self._needless: list[str] = []

    def load(self) -> bytes:
        """Find the latest value. Raises :class:`~nearcast.errors.StorageUnavailable`."""
        storage = self._storage
        self.value = b""
        self.damage = []
        numbers = sorted(int(found.group(1)) for found in map(_NAME.fullmatch, storage.names()) if found is not None)
        end = 0
        for number in numbers:
            values, end = self._read(_name(number))
            if values:
                self.value = values[-1]
        self._needless = [_name(number) for number in numbers[:-1]]
        if not numbers:
            self._number, self._size = 1, 0
            storage.create(_name(1))
        else:
            self._number, self._size = numbers[-1], end
            storage.resume(_name(self._number), end)
            if self.value and not end:
                self.save(self.value)  # a file that was begun and lost what it began with
        return self.value

    def _read(self, name: str) -> tuple[list[bytes], int]:
        """Values in a file, and where the last one ends."""
        storage = self._storage
        data = storage.read(name, 0, storage.size(name))
        values: list[bytes] = []
        end = at = 0
        while at < len(data):
            broken = "the file ends inside a value"
            torn = True
            if at + _FRAME.size <= len(data):
                size, checksum = _FRAME.unpack_from(data, at)
                begin = at + _FRAME.size
                if size and begin + size <= len(data):
                    if zlib.crc32(data[begin : begin + size]) == checksum:
                        values.append(data[begin : begin + size])
                        at = end = begin + size
                        continue
                    broken, torn = "the checksum does not match", False
                elif not any(data[at:]):
                    broken = "zeros where a value should be"
                elif size > MAX_VALUE_BYTES:
                    broken, torn = "no value begins here", False
            self.damage.append(StorageCorrupt(storage.path(name), at, broken, torn=torn))
            break
        return values, end

    def save(self, value: bytes) -> None:
        """Write a value behind the one before. Raises :class:`~nearcast.errors.StorageUnavailable`; then the old one stays."""
        if not 0 < len(value) <= MAX_VALUE_BYTES:
            raise LocalProtocolError(f"a value has 1 to {MAX_VALUE_BYTES:,} bytes, not {len(value):,}")
        record = _FRAME.pack(len(value), zlib.crc32(value)) + value
        if self._size >= MAX_FILE_BYTES:
            self._storage.create(_name(self._number + 1))
            self._number += 1
            self._size = 0
        self._storage.append([record])
        if not self._size and self._number > 1:
            self._needless.append(_name(self._number - 1))  # it had the value until now
        self._size += len(record)
        self.value = value

    def flushed(self) -> None:
        """The disk has what was saved up to now: files before this one are not needed any more."""
        needless, self._needless = self._needless, []
        for name in needless:
            self._storage.remove(name)

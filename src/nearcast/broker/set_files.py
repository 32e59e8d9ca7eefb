"""A replica's files: those of its log, and the one with its term and vote."""

from __future__ import annotations

import os
import struct
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Final

from nearcast.broker.files import failing
from nearcast.broker.topic_files import TopicFiles
from nearcast.errors import StorageCorrupt
from nearcast.raft.entries import HardState

STATE: Final = "state"

_SLOT: Final = struct.Struct("<QQQQI")
"""Number of the writing, term, vote, commit, checksum."""
_SLOT_BYTES: Final = 4_096
"""Apart, so that no torn write takes both."""


class SetFiles:
    """The directory of one replica. Its log's files are ``topics``; term and vote stand in two slots, written in turns.

    A flush covers both. What only tells how far the log is committed is written with the next flush, and waits for none.
    """

    def __init__(self, directory: Path, *, fsync: bool) -> None:
        self.topics = TopicFiles(directory, fsync=fsync)
        self._path = str(directory / STATE)
        self._fsync = fsync
        self._number = 0
        self._state = HardState()
        self._flushed = HardState()
        self._dirty = False
        with failing(self._path, "cannot be opened"):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._read()

    def _read(self) -> None:
        with failing(self._path, "cannot be read"):
            data = os.pread(self._descriptor, 2 * _SLOT_BYTES, 0)
        found = [slot for slot in (_slot(data, 0), _slot(data, _SLOT_BYTES)) if slot is not None]
        if not found:
            if data.strip(b"\0"):
                raise StorageCorrupt(self._path, 0, "neither of its two copies is whole: this replica has forgotten its votes")
            return
        self._number, term, vote, commit = max(found)
        self._state = self._flushed = HardState(term, vote, commit)

    def load(self) -> HardState:
        return self._state

    def store(self, state: HardState) -> None:
        self._state = state
        self._dirty = True

    def flush(self) -> Future[None]:
        """Have the disk take everything that was written and stored before."""
        if not self._dirty:
            return self.topics.flush()
        self._dirty = False
        self._number += 1
        state = self._state
        needs_sync = (state.term, state.vote) != (self._flushed.term, self._flushed.vote)
        self._flushed = state
        number = self._number
        return self.topics.flush(lambda: self._write(number, state, needs_sync))

    def _write(self, number: int, state: HardState, needs_sync: bool) -> None:
        body = struct.pack("<QQQQ", number, state.term, state.vote, state.commit)
        with failing(self._path, "cannot be written"):
            os.pwrite(self._descriptor, body + struct.pack("<I", zlib.crc32(body)), number % 2 * _SLOT_BYTES)
            if needs_sync and self._fsync:
                os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Flush and close."""
        try:
            self.flush().result()
        finally:
            try:
                self.topics.close()
            finally:
                os.close(self._descriptor)


def _slot(data: bytes, at: int) -> tuple[int, int, int, int] | None:
    if len(data) < at + _SLOT.size:
        return None
    number, term, vote, commit, checksum = _SLOT.unpack_from(data, at)
    if checksum != zlib.crc32(data[at : at + _SLOT.size - 4]) or not number:
        return None
    return number, term, vote, commit

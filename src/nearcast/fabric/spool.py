"""Queues that are too long for memory: their oldest part lies in files until the link is back.

What is queued for another broker is in the journal first, like every queue. When it grows too long, the front of it is copied
into a file of its own; once that file is on disk, a SPILLED record says that these messages are there now and no longer in the
queue, and memory and journal let go of them. So at every moment each message is in one place that counts: before the record in
the journal (and the file, if there is one, is not known to it and removed at the next start), after it in the file. Files are
written once and whole, in order, and read again in order; a file is given up once the other broker has confirmed all of it.

Files are named by the session's number and a number of their own, both the journal's. Reading and removing are done on the
spot, writing is begun here and reported to :meth:`~nearcast.fabric.channels.Channels.spilled` when the disk has it.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Iterable
from typing import Final, Protocol

from nearcast.fabric.messages import spooled, unspooled
from nearcast.mqtt.frames import FRAME
from nearcast.mqtt.records import Fields, blob
from nearcast.mqtt.session import Pending

HEADER: Final = b"nearcast spool 1\n"

FILE_BYTES: Final = 4_194_304
"""Size of a file, about. Smaller ones make more flushes, larger ones longer pauses: one is read in one go."""

SPILL_ABOVE_BYTES: Final = 16_777_216
"""What stays in memory although it could go to a file, unless the configured bound is less than twice that."""


SPILL_HEADROOM_BYTES: Final = 67_108_864
SPILL_HEADROOM_MESSAGES: Final = 100_000
"""How far a queue may be above its bound while its front is being written to a file."""


class SpoolStorage(Protocol):
    """Where the files are. Failures are :class:`~nearcast.errors.StorageUnavailable`."""

    def write(self, session_number: int, file_number: int, data: bytes) -> None:
        """Begin to write a file. Whoever owns the storage says when it is on disk, or that it cannot be."""

    def read(self, session_number: int, file_number: int) -> bytes:
        """All of it."""

    def remove(self, session_number: int, file_number: int) -> None:
        """It is needed no more; one that is not there is no fault."""

    def files(self) -> list[tuple[int, int]]:
        """(session, file) of every file there is."""


def file_of(stretches: Iterable[Pending], wall_offset: float) -> bytes:
    """A file with these stretches of a queue."""
    body = b"".join([blob(spooled(pending, wall_offset)) for pending in stretches])
    return HEADER + FRAME.pack(len(body), zlib.crc32(body)) + body


def stretches_of(data: bytes, wall_offset: float, after: int) -> deque[Pending]:
    """The stretches in a file that end after this sequence. Raises ``ValueError`` for a file that is not whole."""
    begin = len(HEADER) + FRAME.size
    if data[: len(HEADER)] != HEADER or len(data) < begin:
        raise ValueError("this is not a spool file")
    size, checksum = FRAME.unpack(data[len(HEADER) : begin])
    body = data[begin:]
    if len(body) != size or zlib.crc32(body) != checksum:
        raise ValueError("the file is not whole")
    fields = Fields(body)
    fields.position = 0
    found: deque[Pending] = deque()
    while fields.position < size:
        pending = unspooled(fields.blob(), wall_offset)
        if last_of(pending) > after:
            found.append(pending)
    return found


def last_of(pending: Pending) -> int:
    """The sequence of the last message of a stretch."""
    return pending.publication.sequence + pending.start + pending.count - 1

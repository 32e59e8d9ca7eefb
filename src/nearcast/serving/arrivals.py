"""Datagrams with the time that they waited to be read.

A busy event loop reads late, and a round trip that counts this takes work for distance. Linux notes when each datagram came in
(``SO_TIMESTAMPNS``, socket(7)); elsewhere a datagram counts as read when it came.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import sys
import time
from typing import Any, Final

SO_TIMESTAMPNS: Final = 35
"""Of Linux, on all of its common architectures; Python has no name for it. The message beside a datagram has the same type."""

_TIMESPEC: Final = struct.Struct("@ll")
_ROOM: Final = socket.CMSG_SPACE(_TIMESPEC.size)

LONGEST_WAIT_S: Final = 10.0
"""More than that is no wait: the wall clock was set in between."""


def note_arrivals(bound: socket.socket) -> None:
    """Have the kernel note when datagrams come in, where it can."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            bound.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)


def receive(bound: socket.socket, most: int) -> tuple[bytes, Any, float]:
    """The next datagram, whose it is, and for how many seconds it waited."""
    data, beside, _, address = bound.recvmsg(most, _ROOM)
    for level, kind, content in beside:
        if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS and len(content) == _TIMESPEC.size:
            seconds, nanoseconds = _TIMESPEC.unpack(content)
            waited_s = (time.time_ns() - seconds * 1_000_000_000 - nanoseconds) / 1e9
            return data, address, waited_s if 0.0 < waited_s <= LONGEST_WAIT_S else 0.0
    return data, address, 0.0

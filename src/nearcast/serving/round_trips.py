"""How far away the other end of a TCP connection is, as the kernel measured it: no packet is sent for it.

The kernel times acknowledgements. Their smoothed mean is of no use here: a client that is only sent messages delays its
acknowledgements by up to 40 ms, and a path whose buffers are full looks longer than it is. So the *least* time counts that was
seen lately (Linux: within ``net.ipv4.tcp_min_rtt_wlen``, five minutes). The first is that of the handshake, which nobody
delays; a client that moves away without a new connection is therefore noticed after those minutes, one that comes nearer at
once.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from typing import Final

# Where Linux keeps it, struct tcp_info: u32 each, microseconds.
_SMOOTHED_AT: Final = 68
_LEAST_AT: Final = 148
_INFO_BYTES: Final = 152
_NONE_YET: Final = 0xFFFF_FFFF


def tcp_round_trip_ms(transport: asyncio.BaseTransport | None) -> float:
    """Milliseconds; 0 where the kernel does not say: no TCP, not Linux, nothing acknowledged yet."""
    if transport is None or sys.platform != "linux":
        return 0.0
    connection = transport.get_extra_info("socket")
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0.0
    try:
        return read_round_trip_ms(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES))
    except OSError:  # closed meanwhile
        return 0.0


def read_round_trip_ms(info: bytes) -> float:
    """The same from a ``struct tcp_info``; a kernel before 4.6 gives a shorter one without the least time."""
    least_us = _field(info, _LEAST_AT)
    if least_us == _NONE_YET:
        least_us = _field(info, _SMOOTHED_AT)
    return 0.0 if least_us == _NONE_YET else least_us / 1e3


def _field(info: bytes, at: int) -> int:
    return _NONE_YET if len(info) < at + 4 else int.from_bytes(info[at : at + 4], sys.byteorder)

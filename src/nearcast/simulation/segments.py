"""What streams put on the network: packets, their flags and sizes; and bytes put in order again where they arrive."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from mypy_extensions import i64

if TYPE_CHECKING:
    from nearcast.simulation.streams import Stream

HEADER_BYTES: Final = 52
"""IPv4 and TCP with timestamps."""

# What a packet carries besides data, acknowledgement and window
NOTHING: Final = 0
SYN: Final = 1
FIN: Final = 2
RST: Final = 4
PROBE: Final = 8  # asks for an acknowledgement


class Packet:
    """One packet of a stream, on its way to the other end."""

    def __init__(self, sender: Stream, flags: i64, sequence: i64, data: bytes, acknowledged: i64, window_end: i64) -> None:
        self.sender = sender
        self.flags = flags
        self.sequence = sequence
        self.data = data
        self.acknowledged = acknowledged
        self.window_end = window_end


class Reassembly:
    """Segments in any order, some twice, become bytes in order."""

    def __init__(self, max_early: int) -> None:
        self.expected: i64 = 0
        """Everything before this byte has arrived."""
        self._max_early: i64 = max_early
        self._early: dict[int, bytes] = {}

    def add(self, sequence: i64, data: bytes) -> bytes:
        """Take a segment in; returns the bytes that are in order now, often none, often just these."""
        if sequence > self.expected:
            if len(self._early) < self._max_early:
                self._early[sequence] = data
            return b""
        found = data[self.expected - sequence :] if sequence < self.expected else data
        self.expected += len(found)
        if found and self._early:
            return found + self._caught_up()
        return found

    def clear(self) -> None:
        self._early.clear()

    def _caught_up(self) -> bytes:
        """What waited for the gap to close. Retransmissions may divide the bytes otherwise, so segments may overlap."""
        parts: list[bytes] = []
        for sequence in sorted(self._early):
            if sequence > self.expected:
                break
            data = self._early.pop(sequence)
            fresh = sequence + len(data) - self.expected
            if fresh > 0:
                parts.append(data[len(data) - fresh :])
                self.expected += fresh
        return b"".join(parts)

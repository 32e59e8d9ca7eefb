"""A simulated stream as the ``handle`` of a :class:`~nearcast.mqtt.connection.Connection`, whoever is at its other end."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from nearcast.mqtt.connection import Connection
from nearcast.simulation.streams import Stream


def round_trip_ms(stream: Stream) -> float:
    """Round-trip time between the ends of a stream, as the network has it now; 0 while nothing gets through."""
    here, there = stream.host, stream.remote_host
    network = here.world.network
    both_ways_ms = network.one_way_ms(here.index, there.index) + network.one_way_ms(there.index, here.index)
    return both_ways_ms if math.isfinite(both_ways_ms) else 0.0


class StreamHandle:
    """See the module. ``on_close`` hears of a close that comes from here."""

    def __init__(self, stream: Stream, on_close: Callable[[Any], None]) -> None:
        self.stream = stream
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self._on_close = on_close

    def send(self, chunks: list[bytes]) -> None:
        self.stream.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if self.stream.congested and self.connection is not None:
            self.connection.congested = True

    def rtt_ms(self) -> float:
        """Round-trip time to the other end, as the network has it: what a kernel would have measured by now."""
        return round_trip_ms(self.stream)

    def close(self) -> None:
        self.stream.close()
        self._on_close(self)

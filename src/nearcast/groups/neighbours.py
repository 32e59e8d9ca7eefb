"""What a broker knows of others when it forms a group."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Neighbours(Protocol):
    """Latencies are one way, in milliseconds; addresses are ``host:port``, where a broker takes links."""

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        """The announced leader with the least measured latency strictly below, other than this broker and those to ``avoid``;
        "" if there is none. One that announces a lower threshold of its own must be below that."""

    def latency_ms(self, name: str) -> float:
        """Measured; ``math.inf`` while it is unknown or the broker does not answer. Being asked is a reason to measure."""

    def address(self, name: str) -> str:
        """As announced, or as a view said; "" if unknown."""

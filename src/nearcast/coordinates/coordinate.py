"""A place in the space of round-trip times.

The distance of two coordinates estimates the round-trip time between their nodes, in milliseconds: the distance of their
vectors, plus both heights (the access links that every path has to climb down and up), plus both adjustments (what the space
is wrong by around a node, Lee et al.) as long as that leaves something.
"""

from __future__ import annotations

import math
from typing import Final

DIMENSIONS: Final = 8
LEAST_HEIGHT_MS: Final = 0.01
"""A node without an access link does not exist, and Vivaldi's heights must not reach zero."""
WORST_ERROR: Final = 1.5
"""The error estimate of a node that knows nothing yet."""


class Coordinate:
    """See the module. ``error`` is the node's own estimate of its relative error, 0 to :data:`WORST_ERROR`."""

    def __init__(self, vector: list[float], height: float, adjustment: float = 0.0, error: float = WORST_ERROR) -> None:
        self.vector = vector
        self.height = height
        self.adjustment = adjustment
        self.error = error

    def distance_ms(self, other: Coordinate) -> float:
        """The estimated round-trip time."""
        total = 0.0
        for mine, theirs in zip(self.vector, other.vector, strict=True):
            total += (mine - theirs) * (mine - theirs)
        plain = math.sqrt(total) + self.height + other.height
        adjusted = plain + self.adjustment + other.adjustment
        return adjusted if adjusted > 0.0 else plain

    def raised(self, by_ms: float) -> Coordinate:
        """The coordinate of a client at this node: the round-trip time between the two goes into the height (ePulsar §4)."""
        return Coordinate(self.vector, self.height + by_ms, self.adjustment, self.error)


def origin(dimensions: int = DIMENSIONS) -> Coordinate:
    """Where every node begins."""
    return Coordinate([0.0] * dimensions, LEAST_HEIGHT_MS)

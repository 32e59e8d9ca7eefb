"""Many clients of a topic as one crowd, at the cost of a few additions each (ePulsar §3.2).

Clients have the coordinate of what they are connected through, this broker or a gateway, raised by their own latency to it. So
there are few vectors among many clients, and a crowd is kept by these *anchors*: how many clients each has, the sum and the
largest of their latencies. That is enough for the crowd's centroid, deviation and worst case, exactly as
:func:`nearcast.telemetry.summaries.crowd` makes them of the clients one by one, but for one thing: a client of this very
broker is no farther from it than its own latency, where the coordinate would count this broker's access link twice.

Owns arithmetic only. Milliseconds of round-trip time in, one way out.
"""

from __future__ import annotations

import math
from typing import Final

from nearcast.coordinates.coordinate import Coordinate

_UNKNOWN: Final = -1.0

DIGITS: Final = 3
"""Microseconds are finer than any of this is known."""


class Anchor:
    """Where clients are connected, for as long as one round of reports: this broker (``here``) or a gateway."""

    def __init__(self, name: str, coordinate: Coordinate, here: bool) -> None:
        self.name = name
        self.coordinate = coordinate
        self.here = here
        self.vector: tuple[float, ...] = tuple([round(value, DIGITS) for value in coordinate.vector])
        self._plain_ms: dict[str, float] = {}
        self._adjustments_ms: dict[str, float] = {}

    def worst_ms(self, owner: str, place: Coordinate, is_here: bool, latency_ms: float) -> float:
        """One way from a client with this latency to the owner of a topic, who is this broker if ``is_here``."""
        if is_here and self.here:
            return latency_ms / 2
        plain = self._plain_ms.get(owner, _UNKNOWN)
        if plain == _UNKNOWN:
            total = 0.0
            for mine, theirs in zip(self.coordinate.vector, place.vector, strict=True):
                total += (mine - theirs) * (mine - theirs)
            plain = math.sqrt(total) + self.coordinate.height + place.height
            self._plain_ms[owner] = plain
            self._adjustments_ms[owner] = self.coordinate.adjustment + place.adjustment
        plain += latency_ms
        adjusted = plain + self._adjustments_ms[owner]
        return (adjusted if adjusted > 0.0 else plain) / 2


class Share:
    """The clients of a crowd at one anchor."""

    def __init__(self, anchor: Anchor) -> None:
        self.anchor = anchor
        self.count = 0
        self.sum_ms = 0.0
        self.largest_ms = 0.0


class Gathering:
    """A crowd that clients are added to. One with clients whose place is not known has no place itself (``placed``)."""

    def __init__(self) -> None:
        self.count = 0
        self.placed = True
        self.vector: tuple[float, ...] = ()
        self.height = 0.0
        self.adjustment = 0.0
        self.error = 0.0
        self.deviation_ms = 0.0
        self.worst_ms = 0.0
        self._shares: list[Share] = []

    def add(self, anchor: Anchor | None, latency_ms: float) -> None:
        """One more client; without an anchor, at a place that is not known."""
        self.count += 1
        if anchor is None:
            self.placed = False
            return
        for share in self._shares:
            if share.anchor is anchor:
                break
        else:
            share = Share(anchor)
            self._shares.append(share)
        share.count += 1
        share.sum_ms += latency_ms
        if latency_ms > share.largest_ms:
            share.largest_ms = latency_ms

    def sum_up(self, owner: str, place: Coordinate | None, is_here: bool) -> None:
        """All clients are in: fill in the rest. ``place`` is the owner's; without it nobody is far from it."""
        if not self.count or not self.placed:
            return
        if len(self._shares) == 1:
            self._sum_up_one(self._shares[0])
        else:
            self._sum_up_several()
        if place is not None:
            for share in self._shares:
                self.worst_ms = max(self.worst_ms, share.anchor.worst_ms(owner, place, is_here, share.largest_ms))

    def _sum_up_one(self, share: Share) -> None:
        coordinate = share.anchor.coordinate
        mean_ms = share.sum_ms / share.count
        self.vector = share.anchor.vector
        self.height = coordinate.height + mean_ms
        self.adjustment = coordinate.adjustment
        self.error = coordinate.error
        self.deviation_ms = max(0.0, (share.largest_ms - mean_ms) / 2)

    def _sum_up_several(self) -> None:
        dimensions = len(self._shares[0].anchor.vector)
        centroid = [0.0] * dimensions
        for share in self._shares:
            coordinate = share.anchor.coordinate
            weight = share.count / self.count
            vector = coordinate.vector
            for axis in range(dimensions):
                centroid[axis] += weight * vector[axis]
            self.height += weight * coordinate.height + share.sum_ms / self.count
            self.adjustment += weight * coordinate.adjustment
            self.error += weight * coordinate.error
        for share in self._shares:
            coordinate = share.anchor.coordinate
            vector = coordinate.vector
            away = 0.0
            for axis in range(dimensions):
                away += (vector[axis] - centroid[axis]) * (vector[axis] - centroid[axis])
            above = coordinate.height + share.largest_ms - self.height + coordinate.adjustment - self.adjustment
            self.deviation_ms = max(self.deviation_ms, (math.sqrt(away) + above) / 2)
        self.vector = tuple([round(value, DIGITS) for value in centroid])

"""Vivaldi for one node: from round-trip times to other nodes, and their coordinates, to a coordinate of its own.

A sample is a spring between two nodes, as long as the round-trip time; the node moves a little to where it is at rest. With a
height, the part of a path that is the access link; with confidence, so that who knows more moves less (Dabek et al., SIGCOMM
2004); with a median over the last samples of each path, and a weak pull to the origin (Ledlie et al., NSDI 2007); with an
adjustment for what the space is wrong by around the node (Lee et al., ToN 2010). These are what ePulsar §3.2 names.

Samples come from others, who may be broken or hostile. What is no number, absurdly far or of other dimensions is refused.
No peer is believed to be surer than :attr:`~nearcast.coordinates.settings.VivaldiSettings.least_error`; and a sample that is
off by more than several times the median of all peers' samples pulls no harder than one that is just so far off. One liar
among many has therefore the influence of one honest node on a bad path, whatever it says. When everything is off, because the
node itself has moved, the median is high and everything counts. How far off is counted in milliseconds: a neighbour at half a
millisecond that the space has at thirty is off by a factor of sixty, and right.

Heights are the access link's part of a path, and no path is shorter than its parts: a node's height is at most its shortest
round trip. That nobody can forge. Without it, sites that are all equally far from each other are explained by heights alone,
and the nodes of one site are as far from each other as from everybody else.

Owns no sockets, clocks or names beyond those it is handed.
"""

from __future__ import annotations

import math
import random
from typing import Final

from nearcast.coordinates.coordinate import LEAST_HEIGHT_MS, WORST_ERROR, Coordinate, origin
from nearcast.coordinates.filters import MovingMedian
from nearcast.coordinates.settings import VivaldiSettings

LEAST_RTT_MS: Final = 0.01
"""Round trips on one machine take about that long; relative errors below are noise."""

LEAST_OFF_MS: Final = 5.0
"""Samples that are off by less are never outliers, however good the rest is."""

RESTORED_ERROR: Final = 0.5
"""A restored coordinate is a good guess: the node may have moved while it was away."""


class _Peer:
    """What is remembered of one peer."""

    def __init__(self, filter_samples: int) -> None:
        self.filter = MovingMedian(filter_samples)
        self.off_ms = 0.0
        self.rtt_ms = math.inf


class Vivaldi:
    """See the module. ``rng`` only breaks ties: two nodes at the same place have to part in some direction."""

    def __init__(self, rng: random.Random, settings: VivaldiSettings | None = None) -> None:
        self.settings = settings if settings is not None else VivaldiSettings()
        self.coordinate = origin(self.settings.dimensions)
        self.samples = 0
        self.refused = 0
        self._rng = rng
        self._peers: dict[str, _Peer] = {}
        self._residuals: list[float] = []
        self._next_residual = 0

    def restore(self, coordinate: Coordinate) -> bool:
        """Begin where the node was before, if that makes sense; with less confidence."""
        if not self._is_sane(coordinate):
            return False
        self.coordinate = Coordinate(
            list(coordinate.vector), coordinate.height, coordinate.adjustment, max(coordinate.error, RESTORED_ERROR)
        )
        return True

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        self._peers.pop(peer, None)

    def observe(self, peer: str, theirs: Coordinate, rtt_ms: float) -> bool:
        """A round trip to ``peer``, which says to be at ``theirs``, took so long. False: the sample was refused."""
        settings = self.settings
        if not (0.0 < rtt_ms <= settings.max_rtt_ms) or not self._is_sane(theirs):
            self.refused += 1
            return False
        known = self._peers.get(peer)
        if known is None:
            if len(self._peers) >= settings.max_peers:
                del self._peers[next(iter(self._peers))]
            known = self._peers[peer] = _Peer(settings.filter_samples)
        self.samples += 1
        known.rtt_ms = known.filter.add(max(rtt_ms, LEAST_RTT_MS))
        self._move(known, theirs)
        return True

    def _move(self, peer: _Peer, theirs: Coordinate) -> None:
        settings = self.settings
        mine = self.coordinate
        rtt_ms = peer.rtt_ms
        peer.off_ms = abs(mine.distance_ms(theirs) - rtt_ms)
        limit_ms = self._believable_ms()
        doubt = 1.0 if peer.off_ms <= limit_ms else limit_ms / peer.off_ms
        their_error = min(max(theirs.error, settings.least_error), WORST_ERROR)
        weight = mine.error / (mine.error + their_error)
        step = settings.error_timestep * weight
        error = min(mine.error * (1.0 - step) + min(peer.off_ms, limit_ms) / rtt_ms * step, WORST_ERROR)
        plain = _plain_distance(mine, theirs)
        vector, height = self._pushed(mine, theirs, settings.timestep * weight * doubt * (rtt_ms - plain))
        vector, height = self._pulled(vector, height)
        moved = Coordinate(vector, height, mine.adjustment, max(error, 1e-3))
        moved.adjustment = self._adjusted((rtt_ms - _plain_distance(moved, theirs)) * doubt)
        if self._is_sane(moved):
            self.coordinate = moved
        else:  # cannot be by what was checked; a node that was nowhere would be so for ever
            self.coordinate = origin(settings.dimensions)
            self._residuals.clear()

    def _believable_ms(self) -> float:
        """How far off a sample may be to count in full."""
        factor = self.settings.outlier_factor
        if factor <= 0.0 or len(self._peers) < 3:
            return math.inf
        ordered = sorted([peer.off_ms for peer in self._peers.values()])
        return max(factor * ordered[len(ordered) // 2], LEAST_OFF_MS)

    def _pushed(self, mine: Coordinate, theirs: Coordinate, force_ms: float) -> tuple[list[float], float]:
        """Move by ``force_ms`` away from a peer: in the plane and in height, in proportion to how far it is in both."""
        difference = [here - there for here, there in zip(mine.vector, theirs.vector, strict=True)]
        flat = math.sqrt(sum([part * part for part in difference]))
        heights = mine.height + theirs.height
        if flat < 1e-6:
            difference = [self._rng.gauss(0.0, 1.0) for _ in mine.vector]
            flat = max(math.sqrt(sum([part * part for part in difference])), 1e-6)
            along = force_ms / flat * 0.5
            upwards = force_ms * 0.5
        else:
            total = flat + heights
            along = force_ms / total
            upwards = force_ms * heights / total
        vector = [here + part * along for here, part in zip(mine.vector, difference, strict=True)]
        shortest = min([peer.rtt_ms for peer in self._peers.values()])
        return vector, max(min(mine.height + upwards, shortest), LEAST_HEIGHT_MS)

    def _pulled(self, vector: list[float], height: float) -> tuple[list[float], float]:
        """A little back to the origin."""
        away = math.sqrt(sum([part * part for part in vector]))
        if away < 1e-6:
            return vector, height
        share = min(away / (self.settings.gravity_ms * self.settings.gravity_ms), 1.0)
        return [part * (1.0 - share) for part in vector], height

    def _adjusted(self, residual_ms: float) -> float:
        window = self.settings.adjustment_samples
        if not window:
            return 0.0
        residuals = self._residuals
        if len(residuals) < window:
            residuals.append(residual_ms)
        else:
            residuals[self._next_residual] = residual_ms
            self._next_residual = (self._next_residual + 1) % window
        return sum(residuals) / (2.0 * window)

    def _is_sane(self, coordinate: Coordinate) -> bool:
        limit = self.settings.max_rtt_ms
        if len(coordinate.vector) != self.settings.dimensions or not 0.0 <= coordinate.height <= limit:
            return False
        if not (abs(coordinate.adjustment) <= limit and 0.0 <= coordinate.error <= WORST_ERROR):
            return False
        return all(abs(part) <= limit for part in coordinate.vector)  # false for what is no number, too


def _plain_distance(mine: Coordinate, theirs: Coordinate) -> float:
    """Without adjustments: what moving can set right."""
    total = 0.0
    for here, there in zip(mine.vector, theirs.vector, strict=True):
        total += (here - there) * (here - there)
    return math.sqrt(total) + mine.height + theirs.height

"""Where one node is: Vivaldi, from round-trip times to other nodes and their coordinates.

A measured path is a spring between two nodes, as long as the round-trip time; a node moves to where its springs are at rest.
It has a height, the part of every path that is the access link (Dabek et al., SIGCOMM 2004). ePulsar §3.2 adds a median over
the last samples of each path and a weak pull to the origin (Ledlie et al., NSDI 2007), and an adjustment (Lee et al., ToN
2010).

Five things are done in another way than there, each because it measured better:

- *All springs pull at once.* Vivaldi moves along the one spring that was just measured. A node remembers the others, and knows
  where they end, so that a sample moves it a step of least squares over all of them. Coordinates find their place with a
  fraction of the samples, and then stand still.
- *Near nodes count more* (:attr:`~nearcast.coordinates.settings.VivaldiSettings.nearness`).
- *Steps are of all sizes.* The nodes of one site, a fraction of a millisecond apart, hold each other so fast that a site that
  is tens of milliseconds wrong would need thousands of samples: each node that follows the far springs is held back by those
  that have not done so yet. So a step has a scale, the length of one of the springs, and much shorter ones are no stiffer than
  one of that scale. Large steps move sites, small ones put nodes right within them
  (:attr:`~nearcast.coordinates.settings.VivaldiSettings.coarseness`). Only sideways: a height is each node's own, and one that
  follows far springs at the cost of near ones takes the nodes of a site apart.
- *What does not fit counts less.* A spring's pull grows no more where it is several times as wrong as the median of all
  springs. So paths that no space has room for do not spoil the rest, and a liar has no more influence than an honest node on a
  bad path, whatever it says and however sure it claims to be. It does not end there: a node on the wrong side of all others
  has one spring that is wrong, the one to its neighbour, and has to follow it. When everything is wrong, because the node
  itself has moved, the median is high and everything counts.
- *A peer is as sure as it has shown.* Vivaldi believes what a node says its error is. Here it is at least what this node found
  by its own measurements, so that a liar gains nothing by claiming to be certain, nor by changing its tale
  (:attr:`~nearcast.coordinates.settings.VivaldiSettings.record_rate`).

Samples that are no numbers, absurdly far or of other dimensions are refused. Owns no sockets, clocks or names beyond those it
is handed.
"""

from __future__ import annotations

import math
import random
from operator import mul
from typing import Final

from nearcast.coordinates.coordinate import LEAST_HEIGHT_MS, WORST_ERROR, Coordinate, origin
from nearcast.coordinates.filters import MovingMedian
from nearcast.coordinates.settings import VivaldiSettings

LEAST_RTT_MS: Final = 0.01
SAME_PLACE_MS: Final = 1e-6
LEAST_ERROR: Final = 1e-3
UPWARDS: Final = 1.0
"""How much easier it is to move sideways than to change one's height: the share of the way up or down in a step."""

LONGEST_STEP: Final = 4.0
"""In units of the mean pull; springs that all point another way have a mean of almost nothing."""

FIRST_STEP: Final = 0.3
"""How far a node goes from the origin, in any direction, before its first spring pulls: a share of that one's length."""

RESTORED_ERROR: Final = 0.5
"""A restored coordinate is a good guess: the node may have moved while it was away."""


class _Spring:
    """The path to one peer, and what the present step makes of it."""

    def __init__(self, filter_samples: int, coordinate: Coordinate) -> None:
        self.filter = MovingMedian(filter_samples)
        self.rtt_ms = 0.0
        self.coordinate = coordinate
        self.flat_ms = 0.0
        """Distance without heights."""
        self.short_ms = 0.0
        """By how much the estimate is below the measurement."""
        self.wrong = 0.0
        """The same as a share, without sign."""
        self.weight = 0.0
        self.record = 0.0
        """How wrong the peer has been lately, as a share: what it says of itself, held against what was measured."""


class Vivaldi:
    """See the module. ``rng`` parts two nodes at the same place in some direction, and draws scales."""

    def __init__(self, rng: random.Random, settings: VivaldiSettings | None = None) -> None:
        self.settings = settings if settings is not None else VivaldiSettings()
        self.coordinate = origin(self.settings.dimensions)
        self.samples = 0
        self.refused = 0
        self._rng = rng
        self._springs: dict[str, _Spring] = {}

    def restore(self, coordinate: Coordinate) -> bool:
        """Begin where the node was before, if that makes sense; with less confidence."""
        if not self._is_sane(coordinate):
            return False
        error = max(coordinate.error, RESTORED_ERROR)
        self.coordinate = Coordinate(list(coordinate.vector), coordinate.height, coordinate.adjustment, error)
        return True

    def forget(self, peer: str) -> None:
        """A peer is gone."""
        self._springs.pop(peer, None)

    def observe(self, peer: str, theirs: Coordinate, rtt_ms: float) -> bool:
        """A round trip to ``peer``, which says to be at ``theirs``, took so long. False: the sample was refused."""
        settings = self.settings
        if not (0.0 < rtt_ms <= settings.max_rtt_ms) or not self._is_sane(theirs):
            self.refused += 1
            return False
        spring = self._springs.get(peer)
        if spring is None:
            if len(self._springs) >= settings.max_peers:
                del self._springs[next(iter(self._springs))]
            spring = _Spring(settings.filter_samples, theirs)
        else:
            del self._springs[peer]  # the one heard longest ago comes first
        self._springs[peer] = spring
        if not any(self.coordinate.vector):
            self._leave_origin(rtt_ms)
        spring.coordinate = theirs
        spring.rtt_ms = spring.filter.add(max(rtt_ms, LEAST_RTT_MS))
        self.samples += 1
        springs = list(self._springs.values())
        self._judge(spring, springs)
        self._move(springs, spring.rtt_ms)
        self._move(springs, self._rng.choice(springs).rtt_ms)
        self._rise(springs)
        return True

    def _leave_origin(self, rtt_ms: float) -> None:
        """Where every node begins is on a line with the first two that moved, and springs to those pull along it for ever."""
        away = [self._rng.gauss(0.0, 1.0) for _ in self.coordinate.vector]
        share = FIRST_STEP * rtt_ms / max(math.hypot(*away), SAME_PLACE_MS)
        self.coordinate.vector = [share * part for part in away]

    def _judge(self, spring: _Spring, springs: list[_Spring]) -> None:
        """Remember how well what a peer says fits what is measured. A peer that is nearer than most has less of a record the
        nearer it is: nobody can answer early, so it is where it was measured to be, and whoever finds it far away is as likely
        to be in the wrong place himself."""
        ordered = sorted([each.rtt_ms for each in springs])
        usual_ms = ordered[len(ordered) // 2]
        short_ms = spring.rtt_ms - self.coordinate.distance_ms(spring.coordinate)
        wrong = abs(short_ms) / max(spring.rtt_ms, usual_ms, self.settings.noise_ms) * min(spring.rtt_ms / usual_ms, 1.0)
        spring.record += self.settings.record_rate * (min(wrong, WORST_ERROR) - spring.record)

    # --- one step -------------------------------------------------------------------------------------------------------

    def _move(self, springs: list[_Spring], scale_ms: float) -> None:
        """A step sideways to where the springs are at rest: along the mean of their pulls, as far as least squares has it."""
        self._weigh(springs, scale_ms)
        pull = self._pull(springs)
        step = self._step(springs, pull)
        mine = self.coordinate
        vector = [here + step * part for here, part in zip(mine.vector, pull, strict=True)]
        away = math.hypot(*vector)
        share = max(1.0 - away / (self.settings.gravity_ms * self.settings.gravity_ms), 0.0)
        self._be_at(Coordinate([part * share for part in vector], mine.height, mine.adjustment, mine.error))

    def _rise(self, springs: list[_Spring]) -> None:
        """A step up or down, with every spring as stiff as it is; and how wrong the node is then."""
        settings = self.settings
        wrong = self._weigh(springs, 0.0)
        upwards = sum([spring.weight * spring.short_ms for spring in springs])
        mine = self.coordinate
        height = max(mine.height + settings.timestep * UPWARDS * upwards, LEAST_HEIGHT_MS)
        # A height takes in whatever all springs have in common, as long as that leaves one; the adjustment takes the rest.
        rest = upwards if height <= LEAST_HEIGHT_MS else 0.0
        adjustment = mine.adjustment + settings.adjustment_rate * (rest - mine.adjustment)
        error = mine.error + settings.error_timestep * (wrong - mine.error)
        self._be_at(Coordinate(mine.vector, height, adjustment, min(max(error, LEAST_ERROR), WORST_ERROR)))

    def _be_at(self, place: Coordinate) -> None:
        # Cannot be otherwise by what was checked; but a node that was nowhere would stay there for ever.
        self.coordinate = place if self._is_sane(place) else origin(self.settings.dimensions)

    def _weigh(self, springs: list[_Spring], scale_ms: float) -> float:
        """How long each spring is and how much it counts, together 1; returns how wrong they are, near or far."""
        settings = self.settings
        mine = self.coordinate
        for spring in springs:
            theirs = spring.coordinate
            spring.flat_ms = math.dist(mine.vector, theirs.vector)
            spring.short_ms = spring.rtt_ms - (spring.flat_ms + mine.height + theirs.height + theirs.adjustment)
            spring.wrong = abs(spring.short_ms) / max(spring.rtt_ms, settings.noise_ms)
        ordered = sorted([spring.wrong for spring in springs])
        limit = max(settings.outlier_factor * ordered[len(ordered) // 2], settings.tolerance)
        shortest_ms = max(settings.coarseness * scale_ms, settings.noise_ms)
        weights = 0.0
        believed = 0.0
        wrong = 0.0
        for spring in springs:
            their_error = max(spring.coordinate.error, settings.least_error, spring.record)
            belief = mine.error / (mine.error + their_error)
            if settings.outlier_factor > 0.0:
                belief /= 1.0 + spring.wrong / limit
            believed += belief
            wrong += belief * min(spring.wrong, WORST_ERROR)
            spring.weight = belief / math.pow(max(spring.rtt_ms, shortest_ms), settings.nearness)
            weights += spring.weight
        for spring in springs:
            spring.weight /= weights
        return wrong / believed

    def _pull(self, springs: list[_Spring]) -> list[float]:
        """The mean pull of all springs, sideways."""
        vector = self.coordinate.vector
        forces = [
            spring.weight * spring.short_ms / spring.flat_ms if spring.flat_ms > SAME_PLACE_MS else 0.0 for spring in springs
        ]
        together = sum(forces)
        columns = zip(*[spring.coordinate.vector for spring in springs], strict=True)
        pull = [here * together - sum(map(mul, forces, column)) for here, column in zip(vector, columns, strict=True)]
        for spring in springs:
            if spring.flat_ms <= SAME_PLACE_MS:  # away in any direction
                away = [self._rng.gauss(0.0, 1.0) for _ in pull]
                force = spring.weight * spring.short_ms / max(math.hypot(*away), SAME_PLACE_MS)
                pull = [part + force * sideways for part, sideways in zip(pull, away, strict=True)]
        return pull

    def _step(self, springs: list[_Spring], pull: list[float]) -> float:
        """How far to go along the pull: least squares along that line, of springs that are as stiff as they count."""
        gained = sum(map(mul, pull, pull))
        here = sum(map(mul, pull, self.coordinate.vector))
        stiffness = 0.0
        for spring in springs:
            if spring.flat_ms > SAME_PLACE_MS:
                longer = (here - sum(map(mul, pull, spring.coordinate.vector))) / spring.flat_ms
                stiffness += spring.weight * longer * longer
        return min(self.settings.timestep * gained / stiffness, LONGEST_STEP) if stiffness > 1e-12 else 0.0

    def _is_sane(self, coordinate: Coordinate) -> bool:
        limit = self.settings.max_rtt_ms
        if len(coordinate.vector) != self.settings.dimensions or not 0.0 <= coordinate.height <= limit:
            return False
        if not (abs(coordinate.adjustment) <= limit and 0.0 <= coordinate.error <= WORST_ERROR):
            return False
        return all(abs(part) <= limit for part in coordinate.vector)  # false for what is no number, too

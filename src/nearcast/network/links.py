"""What one direction of a link does to one packet: :class:`~nearcast.network.conditions.Conditions`, put to work.

Owns the arithmetic of latency, jitter, loss, reordering and duplication, and the counters of a link. It does not know where
the link leads, and decides nothing about paths or cuts. Randomness comes from the :class:`Dice` that is handed in; the numbers
are the same compiled and plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Final

from mypy_extensions import i64

from nearcast.network.conditions import Conditions
from nearcast.network.queueing import Sequencer, Transmitter

LOST: Final = -1.0
FULL: Final = -2.0
UNREACHABLE: Final = -3.0

IDEAL: Final = Conditions()

_NONE: Final[i64] = 0
_UNIFORM: Final[i64] = 1
_NORMAL: Final[i64] = 2
_LOGNORMAL: Final[i64] = 3
_PARETO: Final[i64] = 4

LOGNORMAL_SIGMA: Final = 1.0
"""Of the logarithm: the 99th percentile is 10 times the median."""

PARETO_SHAPE: Final = 3.0
"""Pareto type II (it begins at 0): the 99th percentile is 14 times the median, the 99.99th 79 times; the variance is
finite."""

_PARETO_SCALE: Final = 1.0 / (2.0 ** (1.0 / PARETO_SHAPE) - 1.0)
_TWO_PI: Final = 2.0 * math.pi
_HALF_ROOT: Final = math.sqrt(0.5)

MEMORY: Final = 40.0
"""Time constant of a link's jitter, in multiples of ``jitter_ms``: packets closer together are delayed alike.

Independent jitter for each packet and keeping their order cannot both be had: whoever is late holds back all that follow, so
at 1,000 packets per second a standard deviation of 5 ms would raise the mean by 4.5 ms. A state that wanders lets order keep
itself most of the time, and the law that was asked for holds at any packet rate (tests/unit/network/test_links.py)."""


class Dice:
    """Draws from one generator; all links of a network share it, so that one seed decides everything."""

    def __init__(self, rng: Random) -> None:
        self.uniform: Callable[[], float] = rng.random
        self._spare = 0.0
        self._has_spare = False

    def normal(self) -> float:
        """Standard normal, by Box and Muller's transform: exact, and each pair of uniform numbers makes two."""
        if self._has_spare:
            self._has_spare = False
            return self._spare
        radius = math.sqrt(-2.0 * math.log(1.0 - self.uniform()))
        angle = _TWO_PI * self.uniform()
        self._spare = radius * math.sin(angle)
        self._has_spare = True
        return radius * math.cos(angle)


class Link:
    """One direction of a link, with what is on it and what it has carried."""

    def __init__(self, conditions: Conditions, latency_ms: float) -> None:
        self.packets: i64 = 0
        """Packets that came to the link, those it lost or refused included."""
        self.bytes: i64 = 0
        self.lost: i64 = 0
        self.full: i64 = 0
        self._transmitter: Transmitter | None = None
        self._sequencer: Sequencer | None = None
        self._state = 0.0
        self._state_at = -1e30
        self.conditions = conditions
        self.latency_ms = latency_ms
        self.configure(conditions, latency_ms)

    def configure(self, conditions: Conditions, latency_ms: float) -> None:
        """Takes on other conditions; ``latency_ms`` stands in for theirs. What is on the way arrives as it would have.

        Packets of before and after are not kept in order when latency or jitter changes: those that are announced for later at
        the old speed would pull slower ones of now along.
        """
        if latency_ms != self.latency_ms or conditions.jitter_ms != self.conditions.jitter_ms:
            self._sequencer = None
        self.conditions = conditions
        self.latency_ms = latency_ms
        self.latency_s = latency_ms / 1000.0
        self._jitter_s = conditions.jitter_ms / 1000.0
        self._jitter = _jitter_number(conditions)
        self._memory_s = MEMORY * self._jitter_s
        self._loss = conditions.loss
        self._byte_s = 0.0 if conditions.bandwidth_mbps == 0.0 else 8e-6 / conditions.bandwidth_mbps
        self._queue_s = conditions.queue_ms / 1000.0
        self._reorder = conditions.reorder
        self.duplicate = conditions.duplicate
        self.fixed = self._jitter == _NONE and self._loss == 0.0 and self._byte_s == 0.0 and self._reorder == 0.0
        """Nothing but latency: every packet takes exactly as long, and order keeps itself."""

    def carry(self, size_bytes: i64, entry: float, now: float, dice: Dice) -> float:
        """When a packet that gets to the link at ``entry`` is at its end; :data:`LOST` or :data:`FULL`."""
        self.packets += 1
        self.bytes += size_bytes
        if self.fixed:
            return entry + self.latency_s
        departure = entry
        if self._byte_s > 0.0:
            transmitter = self._transmitter
            if transmitter is None:
                transmitter = self._transmitter = Transmitter()
            departure = transmitter.book(entry, float(size_bytes) * self._byte_s, self._queue_s, now)
            if departure < 0.0:
                self.full += 1
                return FULL
        # A lost packet has used its share of the bandwidth: it was sent, and did not get there.
        if self._loss > 0.0 and dice.uniform() < self._loss:
            self.lost += 1
            return LOST
        delay = self.latency_s
        if self._jitter != _NONE:
            delay = self._delay(delay, self._wander(departure, dice))
        arrival = departure + delay
        if self._reorder > 0.0 and dice.uniform() < self._reorder:
            return arrival + self._holdback(self.latency_s, dice)
        if self._jitter != _NONE:
            sequencer = self._sequencer
            if sequencer is None:
                sequencer = self._sequencer = Sequencer()
            return sequencer.order(departure, arrival, now)
        return arrival

    def scatter(self, size_bytes: i64, entry: float, latency_s: float, dice: Dice) -> float:
        """Like :meth:`carry` for one of many pairs that share this object: no order, no bandwidth (both need a memory)."""
        self.packets += 1
        self.bytes += size_bytes
        if self._loss > 0.0 and dice.uniform() < self._loss:
            self.lost += 1
            return LOST
        delay = latency_s
        if self._jitter != _NONE:
            delay = self._delay(delay, dice.normal())
        arrival = entry + delay
        if self._reorder > 0.0 and dice.uniform() < self._reorder:
            arrival += self._holdback(latency_s, dice)
        return arrival

    def _wander(self, departure: float, dice: Dice) -> float:
        """The link's state for a packet that leaves at ``departure``: standard normal, and near the one before if that left
        shortly before (an Ornstein-Uhlenbeck process)."""
        gap = abs(departure - self._state_at)
        if gap > 0.0:
            kept = math.exp(-gap / self._memory_s)
            self._state = kept * self._state + math.sqrt(1.0 - kept * kept) * dice.normal()
            self._state_at = departure
        return self._state

    def _delay(self, latency_s: float, state: float) -> float:
        """Latency with jitter: the quantile of the jitter's law that ``state`` is of the normal law."""
        jitter = self._jitter
        if jitter == _NORMAL:
            delay = latency_s + self._jitter_s * state
        elif jitter == _UNIFORM:
            delay = latency_s + self._jitter_s * math.erf(state * _HALF_ROOT)
        elif jitter == _LOGNORMAL:
            return latency_s + self._jitter_s * math.exp(LOGNORMAL_SIGMA * state)
        else:
            above = 0.5 * math.erfc(state * _HALF_ROOT)
            return latency_s + self._jitter_s * _PARETO_SCALE * (math.exp(math.log(above) / -PARETO_SHAPE) - 1.0)
        shortest = 0.1 * latency_s
        return delay if delay > shortest else shortest

    def _holdback(self, latency_s: float, dice: Dice) -> float:
        longest = 2.0 * latency_s
        return dice.uniform() * (longest if longest > 0.001 else 0.001)


def _jitter_number(conditions: Conditions) -> i64:
    if conditions.jitter_ms == 0.0:
        return _NONE
    if conditions.jitter == "uniform":
        return _UNIFORM
    if conditions.jitter == "normal":
        return _NORMAL
    if conditions.jitter == "lognormal":
        return _LOGNORMAL
    return _PARETO

"""What the placement of topics is decided on: the topics, the brokers, and how (ePulsar §3.3). Types only.

Everything is a column of an array, so that a hundred thousand topics are decided at once. Latencies are one way, in
milliseconds; coordinates are milliseconds of round-trip time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from nearcast.errors import ConfigError, InvalidValue
from nearcast.telemetry.places import Floats, Indices, Mask, Places
from nearcast.telemetry.summaries import Summaries

UNOWNED: Final = -1
"""The owner of a topic that nobody owns, or whose owner is not in the fleet (any more)."""

DEFAULT_OUT_RATE_LIMIT: Final = 51_000.0
"""Messages a second that a broker may pass on: 0.8 of the rate up to which latency stayed where it is in an idle broker, as
``nearcast bench profile`` measured it of the compiled broker (docs/benchmarks.md). At twice that rate its 95th percentile was
ten times as long. It finds the figure for another machine, too."""


def _require(holds: bool, name: str, what: str) -> None:
    if not holds:
        raise InvalidValue(f"`{name}` {what}", key=name)


class PlacementSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How topics are placed. :data:`PAPER` is ePulsar's Algorithm 1 to the letter."""

    high_watermark: float = 0.85
    """Share of its CPU, memory or network above which a broker is overloaded: it gets no topics and gives some away. Too low
    leaves brokers idle; too high lets messages queue before anything is done."""

    out_rate_limit: float = DEFAULT_OUT_RATE_LIMIT
    """Messages a second that a broker may pass on; above it is overloaded. 0: no limit. The default is what ``nearcast bench
    profile`` measured of the compiled broker on one core (docs/benchmarks.md); it finds that of another machine, too. Too low
    moves topics away from brokers that have room; too high lets latency grow before anything is done."""

    hysteresis_ms: float = 0.5
    """Milliseconds that a move has to gain at least, one way. Too low follows the noise of measurements; too high lets small
    violations stand."""

    hysteresis_share: float = 0.02
    """The same as a share of the topic's worst case; the larger of the two holds."""

    move_cost_share: float = 0.1
    """What a move costs, as a share of the topic's worst case, that a move soon after another has to gain in addition. It
    falls to nothing within ``move_cost_seconds``, so that a topic whose bound can be kept in the end is helped in the end."""

    move_cost_seconds: float = 60.0
    """Seconds in which the cost of a move is forgotten. Too low lets a topic between two brokers go back and forth; too high
    leaves it at the wrong one."""

    min_seconds_between_moves: float = 5.0
    """Seconds for which a topic stays where it was moved to, unless its owner stops: reports of the time before the move are
    still on their way. Not less than the interval of telemetry."""

    alternatives: int = 4
    """Brokers beside the chosen one that an explanation names."""

    def __post_init__(self) -> None:
        _require(0 < self.high_watermark <= 1, "high_watermark", "must be above 0 and at most 1")
        for name in ("out_rate_limit", "hysteresis_ms", "hysteresis_share", "move_cost_share", "min_seconds_between_moves"):
            _require(getattr(self, name) >= 0, name, "must not be negative")
        _require(self.move_cost_seconds > 0, "move_cost_seconds", "must be above 0")
        _require(0 <= self.alternatives <= 1000, "alternatives", "must be between 0 and 1000")


PAPER: Final = PlacementSettings(hysteresis_ms=0, hysteresis_share=0, move_cost_share=0, min_seconds_between_moves=0)
"""Every violation moves at once, for any gain (ePulsar §3.3)."""


class Fleet:
    """The brokers, by row.

    ``usable``: may get topics: it is up, not draining, and its coordinate is known. ``leaving``: must give away what it has:
    it drains, or it is down for good. One that is neither keeps what it has and gets no more (it has just begun, say).
    """

    __slots__ = ("cpu", "leaving", "memory", "names", "network", "out_rate", "places", "usable")

    def __init__(
        self,
        names: Sequence[str],
        places: Places,
        *,
        cpu: Floats | None = None,
        memory: Floats | None = None,
        network: Floats | None = None,
        out_rate: Floats | None = None,
        usable: Mask | None = None,
        leaving: Mask | None = None,
    ) -> None:
        number = len(names)
        self.names = list(names)
        self.places = places
        self.cpu = _column(cpu, number)
        self.memory = _column(memory, number)
        self.network = _column(network, number)
        self.out_rate = _column(out_rate, number)
        self.leaving = np.zeros(number, np.bool_) if leaving is None else leaving
        self.usable = ~self.leaving if usable is None else usable & ~self.leaving
        _lengths("fleet", number, self.places, self.cpu, self.memory, self.network, self.out_rate, self.usable, self.leaving)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def vectors(self) -> Floats:
        return self.places.vectors

    @property
    def heights(self) -> Floats:
        return self.places.heights

    @property
    def adjustments(self) -> Floats:
        return self.places.adjustments


class Topics:
    """The owned topics, by row.

    ``producers``, ``consumers``: centroids, and how many clients they stand for (0: the centroid means nothing).
    ``deviation_ms`` is W(t), ``worst_ms`` is E(t) through the present owner, ``rate`` is Rout(t): messages a second in and out
    together. ``bound_ms`` 0: none. ``owner`` is a row of the fleet, or :data:`UNOWNED`. ``moved_at``: seconds, of the clock
    that ``decide`` is given; 0 for long ago. ``epochs`` go into the plan as they are.
    """

    __slots__ = (
        "bound_ms",
        "consumer_counts",
        "consumers",
        "deviation_ms",
        "epochs",
        "moved_at",
        "names",
        "owner",
        "producer_counts",
        "producers",
        "rate",
        "worst_ms",
    )

    def __init__(
        self,
        names: Sequence[str],
        producers: Places,
        producer_counts: Indices,
        consumers: Places,
        consumer_counts: Indices,
        *,
        deviation_ms: Floats,
        worst_ms: Floats,
        bound_ms: Floats,
        owner: Indices,
        rate: Floats | None = None,
        moved_at: Floats | None = None,
        epochs: Indices | None = None,
    ) -> None:
        number = len(names)
        self.names = names
        self.producers = producers
        self.producer_counts = producer_counts
        self.consumers = consumers
        self.consumer_counts = consumer_counts
        self.deviation_ms = deviation_ms
        self.worst_ms = worst_ms
        self.bound_ms = bound_ms
        self.owner = owner
        self.rate = _column(rate, number)
        self.moved_at = _column(moved_at, number)
        self.epochs = np.zeros(number, np.int64) if epochs is None else epochs
        _lengths("topics", number, producers, producer_counts, consumers, consumer_counts, deviation_ms, worst_ms, bound_ms)
        _lengths("topics", number, owner, self.rate, self.moved_at, self.epochs)

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        summaries: Summaries,
        *,
        bound_ms: Floats,
        owner: Indices,
        rate: Floats | None = None,
        moved_at: Floats | None = None,
        epochs: Indices | None = None,
    ) -> Topics:
        """From merged telemetry (:mod:`nearcast.telemetry.summaries`)."""
        return cls(
            names,
            summaries.producers.centroids,
            summaries.producers.counts,
            summaries.consumers.centroids,
            summaries.consumers.counts,
            deviation_ms=summaries.deviation_ms,
            worst_ms=summaries.worst_ms,
            bound_ms=bound_ms,
            owner=owner,
            rate=rate,
            moved_at=moved_at,
            epochs=epochs,
        )

    def __len__(self) -> int:
        return len(self.names)

    def silent(self) -> Mask:
        """Topics without any client: nothing says where they belong."""
        silent: Mask = (self.producer_counts == 0) & (self.consumer_counts == 0)
        return silent


def _column(values: Floats | None, number: int) -> Floats:
    return np.zeros(number) if values is None else values


def _lengths(what: str, number: int, *columns: Places | Floats | Indices | Mask) -> None:
    for column in columns:
        if len(column) != number:
            raise ConfigError(f"{what}: {number} names, but a column of {len(column)}")

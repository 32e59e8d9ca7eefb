"""From brokers' reports to what is decided on: :class:`~nearcast.placement.topics.Topics` and
:class:`~nearcast.placement.topics.Fleet`.

A report becomes arrays when it arrives (:func:`rows_of`), so that planning, every few seconds, only puts arrays together. What
a report says of the worst case holds for the owner that its broker knew then; if the topic has another by now, the row counts
with the bound by its centroid instead. Coordinates that are none (not finite, of other dimensions) count as no clients:
what a broker reports must not spoil the plan for others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from nearcast.coordinates.coordinate import DIMENSIONS
from nearcast.telemetry.places import Floats, Indices, Places, joined
from nearcast.telemetry.records import BrokerReport, Crowd, Place, TopicSummary
from nearcast.telemetry.summaries import Crowds, Summaries, merge_rows

from .topics import UNOWNED, Fleet, Topics

MAX_COORDINATE_MS: Final = 600_000.0
"""Ten minutes: no coordinate is that far out."""


class Held(NamedTuple):
    """What the directory says of a topic. ``moved_at``: seconds, 0 for long ago."""

    owner: str
    epoch: int
    moved_at: float = 0.0


class Rows:
    """What one broker said of some topics, by row."""

    __slots__ = ("bounds_ms", "consumers", "epochs", "names", "owners", "producers", "rates")

    def __init__(
        self,
        names: list[str],
        owners: list[str],
        epochs: Indices,
        producers: Crowds,
        consumers: Crowds,
        rates: Floats,
        bounds_ms: Floats | None = None,
    ) -> None:
        self.names = names
        self.owners = owners
        self.epochs = epochs
        self.producers = producers
        self.consumers = consumers
        self.rates = rates
        self.bounds_ms = np.zeros(len(names)) if bounds_ms is None else bounds_ms

    def __len__(self) -> int:
        return len(self.names)


def rows_of(topics: Sequence[TopicSummary], dimensions: int = DIMENSIONS) -> Rows:
    """The topics of a report as arrays."""
    rates = np.array([topic.in_per_second + topic.out_per_second for topic in topics], np.float64)
    bounds_ms = np.array([topic.max_latency_ms for topic in topics], np.float64)
    return Rows(
        [topic.topic for topic in topics],
        [topic.owner for topic in topics],
        np.array([topic.epoch for topic in topics], np.int64),
        _crowds([topic.producers for topic in topics], dimensions),
        _crowds([topic.consumers for topic in topics], dimensions),
        np.where(np.isfinite(rates) & (rates > 0.0), rates, 0.0),
        np.where(np.isfinite(bounds_ms) & (bounds_ms > 0.0), bounds_ms, 0.0),
    )


def credible(place: Place | None, dimensions: int = DIMENSIONS) -> bool:
    """Whether a record is a coordinate of this space."""
    if place is None or len(place.vector) != dimensions:
        return False
    # The comparisons are false for what is not a number.
    for value in place.vector:
        if not -MAX_COORDINATE_MS < value < MAX_COORDINATE_MS:
            return False
    return 0.0 <= place.height < MAX_COORDINATE_MS and -MAX_COORDINATE_MS < place.adjustment < MAX_COORDINATE_MS


def _crowds(crowds: list[Crowd], dimensions: int) -> Crowds:
    kept = [
        (index, crowd, crowd.centroid)
        for index, crowd in enumerate(crowds)
        if crowd.count > 0
        and crowd.centroid is not None
        and credible(crowd.centroid, dimensions)
        and _finite(crowd.deviation_ms)
        and _finite(crowd.worst_ms)
    ]
    result = Crowds.empty(len(crowds), dimensions)
    if kept:
        rows = np.array([index for index, _, _ in kept], np.int64)
        result.counts[rows] = [min(crowd.count, 1_000_000_000) for _, crowd, _ in kept]
        result.centroids.vectors[rows] = [centroid.vector for _, _, centroid in kept]
        result.centroids.heights[rows] = [centroid.height for _, _, centroid in kept]
        result.centroids.adjustments[rows] = [centroid.adjustment for _, _, centroid in kept]
        result.deviation_ms[rows] = [crowd.deviation_ms for _, crowd, _ in kept]
        result.worst_ms[rows] = [crowd.worst_ms for _, crowd, _ in kept]
    return result


def _finite(value: float) -> bool:
    return 0.0 <= value < MAX_COORDINATE_MS


def fleet_of(
    reports: Iterable[BrokerReport],
    *,
    leaving: Collection[str] = (),
    unusable: Collection[str] = (),
    dimensions: int = DIMENSIONS,
) -> Fleet:
    """The brokers that reported. ``leaving`` ones drain or are dead; ``unusable`` ones keep what they have and get no more."""
    kept = sorted(reports, key=lambda report: report.broker)
    number = len(kept)
    places = Places.empty(number, dimensions)
    usable = np.zeros(number, np.bool_)
    for row, report in enumerate(kept):
        place = report.coordinate
        if place is not None and credible(place, dimensions):
            places.vectors[row] = place.vector
            places.heights[row] = place.height
            places.adjustments[row] = place.adjustment
            usable[row] = report.broker not in unusable
    return Fleet(
        [report.broker for report in kept],
        places,
        cpu=np.array([_share(report.cpu) for report in kept]),
        memory=np.array([_share(report.memory) for report in kept]),
        network=np.array([_share(report.network) for report in kept]),
        out_rate=np.array([_share(report.messages_out_per_second) for report in kept]),
        usable=usable,
        leaving=np.array([report.broker in leaving for report in kept], np.bool_),
    )


def _share(value: float) -> float:
    return value if math.isfinite(value) and value > 0.0 else 0.0


def topics_of(
    rows: Iterable[Rows], fleet: Fleet, held: Mapping[str, Held], bound_ms: Callable[[str], float] | None = None
) -> Topics:
    """All topics that are held by somebody or reported by anybody.

    ``rows`` are the newest of each broker. A topic that nobody holds has the owner of the highest epoch that was reported.
    Without ``bound_ms``, bounds are as reported; where brokers differ, the lowest.
    """
    parts = [part for part in rows if len(part)]
    names = list(held)
    index = {name: row for row, name in enumerate(names)}
    keys = _keys(parts, names, index)
    number = len(names)
    positions = {name: row for row, name in enumerate(fleet.names)}
    owner = np.full(number, UNOWNED, np.int64)
    epochs = np.zeros(number, np.int64)
    moved_at = np.zeros(number)
    if held:
        owner[: len(held)] = [positions.get(holder.owner, UNOWNED) for holder in held.values()]
        epochs[: len(held)] = [holder.epoch for holder in held.values()]
        moved_at[: len(held)] = [holder.moved_at for holder in held.values()]
    for part, rows_there in zip(parts, keys, strict=True):
        for place in np.flatnonzero((rows_there >= len(held)) & (part.epochs > epochs[rows_there])).tolist():
            topic = rows_there[place]
            # Rows of several brokers may come as one, with a topic more than once.
            if part.epochs[place] > epochs[topic]:
                epochs[topic] = part.epochs[place]
                owner[topic] = positions.get(part.owners[place], UNOWNED)
    summaries = _summaries(parts, keys, number, fleet, owner, epochs)
    rate = np.zeros(number)
    for part, rows_there in zip(parts, keys, strict=True):
        np.add.at(rate, rows_there, part.rates)
    return Topics.of(
        names,
        summaries,
        bound_ms=_reported_bounds(parts, keys, number)
        if bound_ms is None
        else np.array([bound_ms(name) for name in names], np.float64),
        owner=owner,
        rate=rate,
        moved_at=moved_at,
        epochs=epochs,
    )


def _reported_bounds(parts: list[Rows], keys: list[Indices], number: int) -> Floats:
    bounds = np.full(number, np.inf)
    for part, rows_there in zip(parts, keys, strict=True):
        np.minimum.at(bounds, rows_there, np.where(part.bounds_ms > 0.0, part.bounds_ms, np.inf))
    return np.where(bounds < np.inf, bounds, 0.0)


def _keys(parts: list[Rows], names: list[str], index: dict[str, int]) -> list[Indices]:
    """Each part's rows as rows of all topics; those that are new are added to ``names``."""
    keys: list[Indices] = []
    for part in parts:
        there = np.empty(len(part), np.int64)
        for place, name in enumerate(part.names):
            row = index.get(name)
            if row is None:
                row = len(names)
                index[name] = row
                names.append(name)
            there[place] = row
        keys.append(there)
    return keys


def _summaries(
    parts: list[Rows], keys: list[Indices], number: int, fleet: Fleet, owner: Indices, epochs: Indices
) -> Summaries:
    if not parts:
        return Summaries(Crowds.empty(number, fleet.places.dimensions), Crowds.empty(number, fleet.places.dimensions))
    key = np.concatenate(keys)
    stale = np.concatenate([part.epochs for part in parts]) != epochs[key]
    owners = owner[key]
    sides = []
    for side in ([part.producers for part in parts], [part.consumers for part in parts]):
        crowds = Crowds(
            np.concatenate([part.counts for part in side]),
            joined(part.centroids for part in side),
            np.concatenate([part.deviation_ms for part in side]),
            np.concatenate([part.worst_ms for part in side]),
        )
        # Measured to an owner that is none any more: bounded by the centroid. Nobody is far from no owner.
        crowds.worst_ms[owners == UNOWNED] = 0.0
        again = np.flatnonzero(stale & (owners != UNOWNED))
        if len(again):
            latency = crowds.centroids.rows(again).paired_ms(fleet.places.rows(owners[again])) / 2
            crowds.worst_ms[again] = latency + crowds.deviation_ms[again]
        sides.append(merge_rows(key, number, crowds))
    return Summaries(sides[0], sides[1])

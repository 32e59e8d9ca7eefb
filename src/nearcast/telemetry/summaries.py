"""From clients to crowds, and from crowds to one crowd: centroids, deviations, worst cases (ePulsar §3.2).

Everything here is one way and in milliseconds: half of the round-trip time that coordinates estimate.

A crowd stands for its clients by three numbers. Its *centroid* is the mean of their coordinates (vector, height and
adjustment each). Its *deviation* is the least number for which ::

    latency(client, broker)  ≤  latency(centroid, broker) + deviation        for each client and every broker,

by the triangle inequality: half of |v − c| + (h − h̄) + (a − ā), the largest over the clients. ePulsar takes d(client,
centroid) instead, a distance of its space, in which both heights count once more although no path from the client to a broker
climbs the centroid's. That is a bound as well, too high by the heights; ``paper=True`` gives it, for comparison. Its *worst
case* is the farthest client from the topic's present owner, exactly.

The deviation bounds what it should wherever adjustments leave a positive distance (:class:`~nearcast.coordinates.coordinate.
Coordinate`: where they would not, they are left out, and no triangle holds).

Crowds of one topic from several brokers are merged: centroid and worst case as exactly as if their clients had been one crowd,
the deviation as a bound: a crowd's own, plus that of its centroid from the common one. A client is a crowd of one, which is
why the summary of a million clients (:func:`summarise_samples`) and the merging of a thousand reports (:func:`merge_rows`) are
one function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

import numpy as np
import numpy.typing as npt

from nearcast.coordinates.coordinate import DIMENSIONS, Coordinate

from .places import Floats, Indices, Places
from .records import Crowd, Place

PRODUCER: Final = 0
CONSUMER: Final = 1

_BLOCK: Final = 262_144
"""Rows that are worked on at once: 17 MB of differences in 8 dimensions."""


def place_of(coordinate: Coordinate) -> Place:
    """A coordinate as a record."""
    return Place(tuple(coordinate.vector), coordinate.height, coordinate.adjustment, coordinate.error)


def coordinate_of(place: Place) -> Coordinate:
    return Coordinate(list(place.vector), place.height, place.adjustment, place.error)


def latency_ms(first: Place, second: Place) -> float:
    """One way between two places, as their coordinates estimate it."""
    plain = math.dist(first.vector, second.vector) + first.height + second.height
    adjusted = plain + first.adjustment + second.adjustment
    return (adjusted if adjusted > 0.0 else plain) / 2


def deviation_ms(centroid: Place, place: Place, *, paper: bool = False) -> float:
    """By how much a client at ``place`` may be farther from any broker than its crowd's centroid; see the module."""
    if paper:
        return latency_ms(centroid, place)
    above = (place.height - centroid.height) + (place.adjustment - centroid.adjustment)
    return (math.dist(centroid.vector, place.vector) + above) / 2


def crowd(places: Iterable[Place], owner: Place | None, *, paper: bool = False) -> Crowd:
    """The clients at ``places`` as one crowd; without an owner nobody is far from it."""
    kept = list(places)
    if not kept:
        return Crowd()
    centroid = _mean([(1, place) for place in kept])
    return Crowd(
        count=len(kept),
        centroid=centroid,
        deviation_ms=max(0.0, max(deviation_ms(centroid, place, paper=paper) for place in kept)),
        worst_ms=0.0 if owner is None else max(latency_ms(place, owner) for place in kept),
    )


def merge(crowds: Iterable[Crowd]) -> Crowd:
    """One crowd of several: count, centroid and worst case exact, the deviation an upper bound."""
    kept = [(each, each.centroid) for each in crowds if each.count > 0 and each.centroid is not None]
    if not kept:
        return Crowd()
    if len(kept) == 1:
        return kept[0][0]
    centroid = _mean([(each.count, place) for each, place in kept])
    return Crowd(
        count=sum(each.count for each, _ in kept),
        centroid=centroid,
        deviation_ms=max(0.0, max(deviation_ms(centroid, place) + each.deviation_ms for each, place in kept)),
        worst_ms=max(each.worst_ms for each, _ in kept),
    )


def _mean(weighted: list[tuple[int, Place]]) -> Place:
    total = sum(weight for weight, _ in weighted)
    vector = [0.0] * len(weighted[0][1].vector)
    height = adjustment = error = 0.0
    for weight, place in weighted:
        for index, value in enumerate(place.vector):
            vector[index] += weight * value
        height += weight * place.height
        adjustment += weight * place.adjustment
        error += weight * place.error
    return Place(tuple(value / total for value in vector), height / total, adjustment / total, error / total)


class Crowds:
    """A crowd by row: ``counts`` (n,), centroids, ``deviation_ms`` (n,), ``worst_ms`` (n,). A row with count 0 is at the
    origin and counts for nothing."""

    __slots__ = ("centroids", "counts", "deviation_ms", "worst_ms")

    def __init__(self, counts: Indices, centroids: Places, deviation_ms: Floats, worst_ms: Floats) -> None:
        self.counts = counts
        self.centroids = centroids
        self.deviation_ms = deviation_ms
        self.worst_ms = worst_ms

    def __len__(self) -> int:
        return len(self.counts)

    @classmethod
    def empty(cls, rows: int, dimensions: int = DIMENSIONS) -> Crowds:
        return cls(np.zeros(rows, np.int64), Places.empty(rows, dimensions), np.zeros(rows), np.zeros(rows))

    def rows(self, which: Indices | slice) -> Crowds:
        return Crowds(self.counts[which], self.centroids.rows(which), self.deviation_ms[which], self.worst_ms[which])

    def crowd(self, row: int) -> Crowd:
        """One row as a record."""
        if self.counts[row] == 0:
            return Crowd()
        return Crowd(
            count=int(self.counts[row]),
            centroid=self.centroids.place(row),
            deviation_ms=float(self.deviation_ms[row]),
            worst_ms=float(self.worst_ms[row]),
        )


class Summaries:
    """Topics by row: the crowd of their producers, and that of their consumers."""

    __slots__ = ("consumers", "producers")

    def __init__(self, producers: Crowds, consumers: Crowds) -> None:
        self.producers = producers
        self.consumers = consumers

    def __len__(self) -> int:
        return len(self.producers)

    @property
    def deviation_ms(self) -> Floats:
        """W(t): by how much a producer and a consumer may be farther than their centroids, together."""
        return self.producers.deviation_ms + self.consumers.deviation_ms

    @property
    def worst_ms(self) -> Floats:
        """E(t): the worst case end to end through the present owner. A topic without producers or without consumers has no
        end to end, and none."""
        both = (self.producers.counts > 0) & (self.consumers.counts > 0)
        return np.where(both, self.producers.worst_ms + self.consumers.worst_ms, 0.0)


def merge_rows(keys: npt.NDArray[np.integer], number: int, crowds: Crowds) -> Crowds:
    """:func:`merge` for many: the rows with key ``k`` become row ``k`` of ``number``. In the time of a few passes over them,
    in any order."""
    weights = crowds.counts.astype(np.float64)
    counts = np.bincount(keys, crowds.counts, number).astype(np.int64)
    divisor = np.maximum(counts, 1).astype(np.float64)
    source = crowds.centroids
    centroids = Places.empty(number, source.dimensions)
    for column in range(source.dimensions):
        centroids.vectors[:, column] = np.bincount(keys, weights * source.vectors[:, column], number) / divisor
    filled = counts > 0
    np.copyto(centroids.heights, np.bincount(keys, weights * source.heights, number) / divisor, where=filled)
    centroids.adjustments[:] = np.bincount(keys, weights * source.adjustments, number) / divisor
    deviation = np.zeros(number)
    worst = np.zeros(number)
    for begin in range(0, len(keys), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        key = keys[block]
        differences = source.vectors[block] - centroids.vectors[key]
        away = np.sqrt(np.einsum("ij,ij->i", differences, differences))
        away += source.heights[block] - centroids.heights[key]
        away += source.adjustments[block] - centroids.adjustments[key]
        away *= 0.5
        away += crowds.deviation_ms[block]
        counted = crowds.counts[block] > 0
        np.maximum.at(deviation, key, np.where(counted, away, 0.0))
        np.maximum.at(worst, key, np.where(counted, crowds.worst_ms[block], 0.0))
    return Crowds(counts, centroids, deviation, worst)


def summarise_samples(
    topic_ids: npt.NDArray[np.integer],
    roles: npt.NDArray[np.integer],
    places: Places,
    owners: Places,
    owner_known: npt.NDArray[np.bool_] | None = None,
) -> Summaries:
    """Every client's part in every topic, exactly: row ``i`` is a client in role ``roles[i]`` of topic ``topic_ids[i]``.

    ``owners`` has the coordinate of each topic's present owner, and so says how many topics there are; where ``owner_known``
    is false nobody is far from it. Linear in the samples; works on blocks, so that it needs little more memory than its input.
    """
    number = len(owners)
    worst = np.empty(len(topic_ids))
    for begin in range(0, len(topic_ids), _BLOCK):
        block = slice(begin, begin + _BLOCK)
        topics = topic_ids[block]
        worst[block] = places.rows(block).paired_ms(owners.rows(topics.astype(np.int64, copy=False)))
        if owner_known is not None:
            worst[block][~owner_known[topics]] = 0.0
    worst *= 0.5
    samples = Crowds(np.ones(len(topic_ids), np.int64), places, np.zeros(len(topic_ids)), worst)
    # One pass for both roles: consumers of topic k are row number + k.
    keys = topic_ids.astype(np.int64) + np.where(roles == CONSUMER, number, 0)
    both = merge_rows(keys, 2 * number, samples)
    return Summaries(both.rows(slice(0, number)), both.rows(slice(number, 2 * number)))

"""What groups, once they have formed, mean for messages: excess data and latency of a stated workload, computed.

The workload: clients at :data:`PUBLISHERS` brokers, drawn by the seed, publish on topics of their own, equally often.
Messages of each are wanted by clients at all brokers within :data:`NEAR_KM`, and at :data:`FAR` others, drawn from all. So
most interest is regional, which is what groups are for, and some is not.

Who processes a message follows from section II-B: all brokers of the publisher's group, the cloud, and all brokers of each
other group in which somebody wants it. As in section IV-D it is *correct* at a broker with a matching subscriber and at the
one where it was published, and *redundant* elsewhere; *excess* is the redundant share. The cloud has no clients of its own.
Latency is the network's alone: direct within a group, and otherwise by way of the publisher's leader, the cloud and the
subscriber's leader.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from nearcast.network.latency import EARTH_RADIUS_KM

PUBLISHERS = 1_000
NEAR_KM = 250.0
FAR = 1

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Traffic(NamedTuple):
    """What the workload costs."""

    correct: int
    redundant: int
    delivery_mean_ms: float
    delivery_median_ms: float
    delivery_p99_ms: float
    in_group_share: float
    """Of the deliveries to other brokers, those that did not need the cloud."""

    @property
    def excess_share(self) -> float:
        processed = self.correct + self.redundant
        return self.redundant / processed if processed else 0.0


def carried(
    places: Sequence[tuple[float, float]],
    groups: Sequence[int],
    cloud: tuple[float, float],
    ms_per_km: float,
    seed: int,
) -> Traffic:
    """``places`` are latitudes and longitudes; ``groups`` says of each broker which one leads it."""
    vectors = _vectors([*places, cloud])
    brokers = len(places)
    at_cloud = brokers
    leaders = np.asarray(groups, dtype=np.int64)
    sizes = np.bincount(leaders, minlength=brokers)
    rng = np.random.default_rng(seed)
    publishers = np.sort(rng.choice(brokers, size=min(PUBLISHERS, brokers), replace=False))
    sources, targets = _wanted(vectors[:brokers], publishers, rng)

    # One entry for each (message, other group) that it goes to by way of the cloud.
    outside = leaders[sources] != leaders[targets]
    visits = np.unique(sources[outside] * brokers + leaders[targets[outside]])
    processed = int(sizes[leaders[publishers]].sum() + len(publishers) + sizes[visits % brokers].sum())
    correct = len(publishers) + len(sources)

    def way_ms(one: Integers | int, other: Integers | int) -> Floats:
        return _ways_ms(vectors[one], vectors[other], ms_per_km)

    direct = way_ms(sources, targets)
    from_, to = leaders[sources], leaders[targets]
    relayed = way_ms(sources, from_) + way_ms(from_, at_cloud) + way_ms(to, at_cloud) + way_ms(to, targets)
    latencies = np.where(outside, relayed, direct)
    if not len(latencies):
        return Traffic(correct, processed - correct, 0.0, 0.0, 0.0, 1.0)
    median_ms, p99_ms = np.percentile(latencies, [50, 99]).tolist()
    return Traffic(
        correct, processed - correct, float(latencies.mean()), median_ms, p99_ms, in_group_share=float(1.0 - outside.mean())
    )


def _wanted(vectors: Floats, publishers: Integers, rng: np.random.Generator) -> tuple[Integers, Integers]:
    """Pairs of publishing and subscribing broker; each once, none with itself."""
    brokers = len(vectors)
    near = np.cos(NEAR_KM / EARTH_RADIUS_KM)
    targets = []
    for publisher in publishers:
        nearby = np.flatnonzero(vectors @ vectors[publisher] >= near)
        others = rng.integers(0, brokers, FAR)
        both = np.unique(np.concatenate((nearby, others)))
        targets.append(both[both != publisher])
    sources = np.repeat(publishers, [len(each) for each in targets])
    return sources, np.concatenate(targets).astype(np.int64)


def _vectors(places: Sequence[tuple[float, float]]) -> Floats:
    """On the unit sphere."""
    degrees = np.radians(np.asarray(places, dtype=float))
    north, east = degrees[:, 0], degrees[:, 1]
    return np.stack((np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)), axis=1)


def _ways_ms(ones: Floats, others: Floats, ms_per_km: float) -> Floats:
    chords = np.sqrt(((ones - others) ** 2).sum(axis=-1))
    angles: Floats = 2.0 * np.arcsin(np.minimum(1.0, chords / 2.0))
    return angles * EARTH_RADIUS_KM * ms_per_km

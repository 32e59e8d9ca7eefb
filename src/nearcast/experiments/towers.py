"""A city's cell towers, made up, and its edge zones: clusters of towers (ePulsar §5.1.1).

The paper clusters the towers of Atlanta and lists neither towers nor zones. Here towers stand where people are: half of them
around a few centres, half anywhere in the city's box. k-means (Lloyd) then finds the zones. The same seed, the same city.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Points = npt.NDArray[np.float64]

TOWERS = 400
CENTRES = 6
SPREAD_KM = 2.0
MAX_ROUNDS = 200

_KM_PER_DEGREE = 111.19


class Box(NamedTuple):
    """A city: degrees."""

    south: float
    west: float
    north: float
    east: float


ATLANTA = Box(33.65, -84.55, 33.89, -84.29)


def towers(box: Box, rng: np.random.Generator, count: int = TOWERS) -> Points:
    """Places of towers: rows of kilometres east and north of the box's corner."""
    size = _size_km(box)
    centres = rng.uniform((0.2, 0.2), (0.8, 0.8), (CENTRES, 2)) * size
    crowded = count // 2
    around = centres[rng.integers(0, CENTRES, crowded)] + rng.normal(0.0, SPREAD_KM, (crowded, 2))
    anywhere = rng.uniform((0.0, 0.0), size, (count - crowded, 2))
    return np.asarray(np.clip(np.concatenate([around, anywhere]), 0.0, size), dtype=np.float64)


def cluster(points: Points, count: int, rng: np.random.Generator) -> Points:
    """Centres of ``count`` clusters: k-means with far-apart first guesses (k-means++)."""
    centres: Points = points[rng.integers(0, len(points))][None, :]
    while len(centres) < count:
        nearest = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).min(axis=1)
        chosen = rng.choice(len(points), p=nearest / nearest.sum())
        centres = np.concatenate([centres, points[chosen][None, :]])
    for _ in range(MAX_ROUNDS):
        owner = ((points[:, None, :] - centres[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        moved = np.array(
            [points[owner == each].mean(axis=0) if (owner == each).any() else centres[each] for each in range(count)],
            dtype=np.float64,
        )
        if np.array_equal(moved, centres):
            break
        centres = moved
    return centres


def zones(count: int, seed: int, box: Box = ATLANTA) -> list[tuple[float, float]]:
    """Latitude and longitude of the edge sites of a city, from north to south."""
    rng = np.random.default_rng(seed)
    centres = cluster(towers(box, rng), count, rng)
    north_km = _KM_PER_DEGREE
    east_km = _KM_PER_DEGREE * math.cos(math.radians((box.south + box.north) / 2))
    places = [(round(box.south + y / north_km, 5), round(box.west + x / east_km, 5)) for x, y in centres.tolist()]
    return sorted(places, reverse=True)


def _size_km(box: Box) -> Points:
    east_km = _KM_PER_DEGREE * math.cos(math.radians((box.south + box.north) / 2))
    return np.array([(box.east - box.west) * east_km, (box.north - box.south) * _KM_PER_DEGREE])

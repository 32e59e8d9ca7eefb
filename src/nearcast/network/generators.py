"""Made-up networks: matrices of round-trip times in milliseconds, from a shape or from a seed.

Every function returns a symmetric matrix with a 0 diagonal. ``rtt[a, b]`` is the time there and back on idle links;
:func:`~nearcast.network.matrices.one_way_ms` halves it. The same arguments give the same matrix (with one version of NumPy,
which does not promise the same draws for ever).

``internet`` breaks the triangle inequality as measurements do: some detours are shorter than the direct way. The others keep
it.
"""

from __future__ import annotations

import math
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from nearcast.errors import ConfigError

Matrix = npt.NDArray[np.float64]

_REGIONS: Final = np.array([[0.0, 0.0], [80.0, 15.0], [120.0, -80.0]])
_REGION_OF_CITY: Final = np.array([0, 1, 0, 2, 0, 1, 0, 1, 0, 0])


def star(size: int, leg_rtt_ms: float) -> Matrix:
    """Site 0 in the middle, ``leg_rtt_ms`` from each of the others, which are two legs apart."""
    _check(size, leg_rtt_ms=leg_rtt_ms)
    matrix = np.full((size, size), 2.0 * leg_rtt_ms)
    if size:
        matrix[0, :] = matrix[:, 0] = leg_rtt_ms
    np.fill_diagonal(matrix, 0.0)
    return matrix


def line(size: int, step_rtt_ms: float) -> Matrix:
    """Sites in a row; each step costs ``step_rtt_ms``."""
    _check(size, step_rtt_ms=step_rtt_ms)
    place = np.arange(size, dtype=np.float64)
    return np.abs(place[:, None] - place[None, :]) * step_rtt_ms


def ring(size: int, step_rtt_ms: float) -> Matrix:
    """Sites in a circle; each step costs ``step_rtt_ms``, and the shorter way round is taken."""
    _check(size, step_rtt_ms=step_rtt_ms)
    place = np.arange(size, dtype=np.float64)
    steps = np.abs(place[:, None] - place[None, :])
    return cast(Matrix, np.minimum(steps, size - steps) * step_rtt_ms)


def grid(rows: int, columns: int, step_rtt_ms: float) -> Matrix:
    """``rows`` × ``columns`` sites, row by row, joined to their up to four neighbours; each step costs ``step_rtt_ms``."""
    _check(rows, step_rtt_ms=step_rtt_ms)
    _check(columns)
    row, column = np.divmod(np.arange(rows * columns), max(columns, 1))
    steps = np.abs(row[:, None] - row[None, :]) + np.abs(column[:, None] - column[None, :])
    return cast(Matrix, steps * step_rtt_ms)


def euclidean(size: int, seed: int, width_rtt_ms: float = 100.0, dimensions: int = 2, height_rtt_ms: float = 0.0) -> Matrix:
    """Points spread evenly over a square (cube, ...) that is ``width_rtt_ms`` wide; distance is round-trip time.

    ``height_rtt_ms`` is the mean of an exponential share that each site adds to all of its pairs: its access network.
    """
    _check(size, width_rtt_ms=width_rtt_ms, height_rtt_ms=height_rtt_ms)
    if dimensions < 1:
        raise ConfigError(f"{dimensions} dimensions: there must be at least one")
    rng = np.random.default_rng(seed)
    points = rng.uniform(0.0, width_rtt_ms, (size, dimensions))
    return _with_heights(_distances(points), rng.exponential(height_rtt_ms, size))


def cities(
    size: int,
    seed: int,
    clusters: int = 10,
    width_rtt_ms: float = 150.0,
    spread_rtt_ms: float = 3.0,
    height_rtt_ms: float = 1.0,
) -> Matrix:
    """Sites in ``clusters`` cities of unlike size.

    City centres are spread evenly over a square ``width_rtt_ms`` wide; the k-th largest city has a share proportional to 1/k
    (Zipf). Sites lie around their centre with the standard deviation
    ``spread_rtt_ms`` in each direction and add an exponential height with mean ``height_rtt_ms``. :func:`city_of` says which
    site is where.
    """
    _check(size, width_rtt_ms=width_rtt_ms, spread_rtt_ms=spread_rtt_ms, height_rtt_ms=height_rtt_ms)
    city = city_of(size, clusters)
    rng = np.random.default_rng(seed)
    centres = rng.uniform(0.0, width_rtt_ms, (clusters, 2))
    points = centres[city] + rng.normal(0.0, spread_rtt_ms, (size, 2))
    return _with_heights(_distances(points), rng.exponential(height_rtt_ms, size))


def city_of(size: int, clusters: int) -> npt.NDArray[np.int64]:
    """The city of each site of :func:`cities` and :func:`internet`, largest first; sites of one city have adjacent numbers."""
    _check(size)
    if clusters < 1:
        raise ConfigError(f"{clusters} clusters: there must be at least one")
    shares = 1.0 / np.arange(1, clusters + 1)
    # Cut points instead of rounded shares: the counts add up, and come out in falling order.
    ends = np.cumsum(shares) / shares.sum() * size
    city = np.searchsorted(ends, np.arange(size) + 0.5)
    return cast("npt.NDArray[np.int64]", np.minimum(city, clusters - 1).astype(np.int64))


def internet(
    size: int,
    seed: int,
    clusters: int = 40,
    median_rtt_ms: float = 100.0,
    inflation_sigma: float = 0.1,
    poor_share: float = 0.04,
) -> Matrix:
    """Round-trip times that look like measurements between Internet hosts (King, PlanetLab): not a metric.

    Cities in three regions, an ocean apart: of ten cities, largest first, six are in the first, three in the second, one in
    the third. Heights follow a log-normal law: most are a few milliseconds, some are tens. Each pair's way is longer than the
    straight one by a log-normal factor of its own (``inflation_sigma`` is the standard deviation of the logarithm; never below
    1), and a share ``poor_share`` of the pairs of cities is routed badly, at 1.5 to 3 times the distance. These two make some
    detours shorter than the direct way. Last, everything is scaled to ``median_rtt_ms``.

    With the defaults and 300 sites, over 60 seeds: 8 to 21 % of all triples of sites break the triangle inequality
    (:func:`triangle_violations`; median 11 %), and the 99th percentile is 2.4 to 6.3 times the median (3.1).
    """
    _check(size, median_rtt_ms=median_rtt_ms, inflation_sigma=inflation_sigma, poor_share=poor_share)
    city = city_of(size, clusters)
    rng = np.random.default_rng(seed)
    centres = _REGIONS[_REGION_OF_CITY[np.arange(clusters) % 10]] + rng.normal(0.0, 15.0, (clusters, 2))
    points = centres[city] + rng.normal(0.0, 1.5, (size, 2))
    poor = np.triu(rng.random((clusters, clusters)) < poor_share, 1)
    detour = np.where(poor, rng.uniform(1.5, 3.0, (clusters, clusters)), 1.0)
    detour = np.maximum(detour, detour.T)
    inflation = np.exp(np.triu(rng.normal(0.0, inflation_sigma, (size, size)), 1))
    inflation = np.maximum(np.maximum(inflation, inflation.T), 1.0)
    distances = _distances(points) * inflation * detour[np.ix_(city, city)]
    matrix = _with_heights(distances, rng.lognormal(math.log(4.0), 0.9, size))
    if size > 1:
        matrix *= median_rtt_ms / np.median(matrix[np.triu_indices(size, 1)])
    return matrix


def generated(shape: str, size: int, scale_rtt_ms: float, seed: int) -> Matrix:
    """One of these by its name, of a given scale: a leg, a step, the side of the square, the median."""
    if shape == "star":
        return star(size, scale_rtt_ms)
    if shape == "line":
        return line(size, scale_rtt_ms)
    if shape == "ring":
        return ring(size, scale_rtt_ms)
    if shape == "euclidean":
        return euclidean(size, seed, width_rtt_ms=scale_rtt_ms)
    if shape == "cities":
        return cities(size, seed, width_rtt_ms=scale_rtt_ms)
    if shape == "internet":
        return internet(size, seed, median_rtt_ms=scale_rtt_ms)
    raise ConfigError(f"there is no shape {shape!r}")


def triangle_violations(rtt_ms: Matrix, seed: int = 0, samples: int = 100_000) -> float:
    """Share of triples of sites in which the way over the third is shorter than the longest side; estimated from a sample."""
    size = len(rtt_ms)
    if size < 3:
        return 0.0
    rng = np.random.default_rng(seed)
    a, b, c = rng.integers(0, size, (3, samples))
    apart = (a != b) & (b != c) & (a != c)
    sides = np.sort(np.stack([rtt_ms[a, b], rtt_ms[b, c], rtt_ms[a, c]])[:, apart], axis=0)
    broken = sides[2] > (sides[0] + sides[1]) * (1.0 + 1e-9)
    return float(broken.mean()) if len(broken) else 0.0


def _check(size: int, **amounts: float) -> None:
    if size < 0:
        raise ConfigError(f"{size} sites: there cannot be fewer than none")
    for name, value in amounts.items():
        if not 0.0 <= value < math.inf:
            raise ConfigError(f"`{name}` is {value}: it must be 0 or more, and finite", key=name)


def _distances(points: Matrix) -> Matrix:
    """Between all pairs; one dimension at a time, so that 10,000 points need two matrices and not one per dimension."""
    squares = np.zeros((len(points), len(points)))
    for axis in range(points.shape[1]):
        difference = points[:, axis, None] - points[None, :, axis]
        difference *= difference
        squares += difference
    return cast(Matrix, np.sqrt(squares))


def _with_heights(distances: Matrix, heights: Matrix) -> Matrix:
    matrix = distances + (heights[:, None] + heights[None, :])
    np.fill_diagonal(matrix, 0.0)
    return matrix

"""Matrices of round-trip times to try coordinates on: symmetric, milliseconds, zero on the diagonal.

Some have an exact place in the space (:func:`star`, :func:`line`, :func:`grid`, :func:`scattered`), one cannot have one
(:func:`circle`), and :func:`internet` has what makes the Internet hard: continents, access links of all kinds, and routes by
policy, which break the triangle inequality.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

Matrix = npt.NDArray[np.float64]

EARTH_RADIUS_KM: Final = 6371.0
KM_PER_MS: Final = 200.0
"""Light in fibre, one way."""


def star(nodes: int, rtt_ms: float) -> Matrix:
    """ePulsar §5.3: every node has the same link to one switch in the middle, so every pair the same round-trip time."""
    matrix = np.full((nodes, nodes), float(rtt_ms))
    np.fill_diagonal(matrix, 0.0)
    return matrix


def line(nodes: int, spacing_ms: float) -> Matrix:
    """Nodes one after another."""
    return _distances(np.arange(nodes, dtype=np.float64)[:, np.newaxis] * spacing_ms)


def grid(nodes: int, spacing_ms: float) -> Matrix:
    """Nodes on a square."""
    side = int(np.ceil(np.sqrt(nodes)))
    places = np.array([(index % side, index // side) for index in range(nodes)], dtype=np.float64)
    return _distances(places * spacing_ms)


def circle(nodes: int, rtt_ms: float) -> Matrix:
    """Node 0 in the middle; the others around it, so that each is as far from every other as it is from the middle twice.
    Impossible in a plane, and just what heights are for."""
    matrix = star(nodes, 2 * rtt_ms)
    matrix[0, 1:] = matrix[1:, 0] = rtt_ms
    return matrix


def clusters(nodes: int, near_ms: float, far_ms: float) -> Matrix:
    """Two sites: near inside, far between."""
    site = np.arange(nodes) % 2
    matrix = np.where(site[:, np.newaxis] == site[np.newaxis, :], float(near_ms), float(far_ms))
    np.fill_diagonal(matrix, 0.0)
    return matrix


def scattered(nodes: int, size_ms: float, height_ms: float, rng: np.random.Generator) -> Matrix:
    """Nodes anywhere on a square of this size, each behind an access link, exponential with this mean."""
    return with_heights(_distances(rng.random((nodes, 2)) * size_ms), rng.exponential(height_ms, nodes))


def with_heights(matrix: Matrix, heights_ms: npt.NDArray[np.float64]) -> Matrix:
    """The same nodes, each behind an access link."""
    raised = matrix + heights_ms[:, np.newaxis] + heights_ms[np.newaxis, :]
    np.fill_diagonal(raised, 0.0)
    return raised


# --- the Internet ---------------------------------------------------------------------------------------------------------

METROPOLES: Final = (
    # latitude, longitude, share of nodes. Of the King data's name servers half were in North America, a third in Europe.
    (40.7, -74.0, 9.0),
    (38.9, -77.0, 7.0),
    (41.9, -87.6, 6.0),
    (37.4, -122.1, 9.0),
    (34.1, -118.2, 6.0),
    (47.6, -122.3, 3.0),
    (32.8, -96.8, 4.0),
    (33.7, -84.4, 3.0),
    (39.7, -105.0, 2.0),
    (43.7, -79.4, 3.0),
    (51.5, -0.1, 6.0),
    (52.4, 4.9, 4.0),
    (50.1, 8.7, 6.0),
    (48.9, 2.4, 4.0),
    (52.5, 13.4, 2.0),
    (59.3, 18.1, 2.0),
    (45.5, 9.2, 2.0),
    (40.4, -3.7, 2.0),
    (52.2, 21.0, 1.5),
    (55.8, 37.6, 2.0),
    (41.0, 29.0, 1.0),
    (35.7, 139.7, 4.0),
    (37.6, 127.0, 2.0),
    (22.3, 114.2, 1.5),
    (31.2, 121.5, 1.5),
    (1.4, 103.8, 1.5),
    (19.1, 72.9, 1.5),
    (-33.9, 151.2, 1.5),
    (-23.6, -46.6, 1.5),
    (-34.6, -58.4, 0.7),
    (19.4, -99.1, 0.8),
    (-26.2, 28.0, 0.7),
)
HUBS: Final = (0, 1, 2, 3, 4, 6, 10, 11, 12, 13, 21, 23, 25, 27, 28)
"""Metropoles where providers meet."""


def internet(nodes: int, rng: np.random.Generator, *, providers: int = 12, detour: float = 0.09) -> Matrix:
    """Round-trip times like those of the King data set, on which Vivaldi was evaluated: not its numbers, but its kind.

    Nodes are around metropoles, each with one of several providers, behind an access link (log-normal, a few with tens of
    milliseconds). A message travels in the sender's provider to the nearest place where that meets the receiver's, and in the
    receiver's from there; each direction by its sender's choice, as hot-potato routing has it. Paths are about twice as
    long as the great circle, more in some providers than in others, and each path differs from that by a little (log-normal,
    ``detour``). So near nodes may be far from each other, and the triangle inequality does not hold. ``detour`` is set such
    that Vivaldi as published, in two dimensions with height, does as well here as on the King data: a median relative error
    of 11 %.
    """
    weights = np.array([weight for _, _, weight in METROPOLES])
    home = rng.choice(len(METROPOLES), nodes, p=weights / weights.sum())
    degrees = np.array([(latitude, longitude) for latitude, longitude, _ in METROPOLES])
    places = degrees[home] + rng.normal(0.0, 1.5, (nodes, 2))
    hubs = degrees[list(HUBS)]
    provider = rng.choice(providers, nodes, p=_shares(providers))
    stretch = rng.uniform(1.6, 2.4, providers)
    meets = _meeting_places(providers, hubs, rng)
    to_hub = _great_circles_km(places, hubs) * stretch[provider][:, np.newaxis] / KM_PER_MS
    inside = _great_circles_km(places, places) / KM_PER_MS
    one_way = np.empty((nodes, nodes))
    for mine in range(providers):
        sources = np.flatnonzero(provider == mine)
        for theirs in range(providers):
            targets = np.flatnonzero(provider == theirs)
            block = np.ix_(sources, targets)
            if mine == theirs:
                one_way[block] = inside[block] * stretch[mine]
                continue
            points = meets[mine][theirs]
            leaving = points[np.argmin(to_hub[np.ix_(sources, points)], axis=1)]
            one_way[block] = to_hub[sources, leaving][:, np.newaxis] + to_hub[np.ix_(targets, leaving)].T
    round_trip = one_way + one_way.T
    noise = rng.normal(0.0, detour, (nodes, nodes))
    round_trip *= np.exp(np.triu(noise, 1) + np.triu(noise, 1).T)
    return with_heights(round_trip, rng.lognormal(1.5, 1.0, nodes))


def _shares(providers: int) -> npt.NDArray[np.float64]:
    shares = 1.0 / np.arange(1, providers + 1)
    return np.asarray(shares / shares.sum(), np.float64)


def _meeting_places(
    providers: int, hubs: npt.NDArray[np.float64], rng: np.random.Generator
) -> list[list[npt.NDArray[np.int64]]]:
    """Where each two providers exchange traffic: five to eleven of the hubs."""
    meets = [[np.empty(0, np.int64)] * providers for _ in range(providers)]
    for mine in range(providers):
        for theirs in range(mine):
            points = np.sort(rng.choice(len(hubs), int(rng.integers(5, 12)), replace=False))
            meets[mine][theirs] = meets[theirs][mine] = points
    return meets


def _great_circles_km(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> Matrix:
    one, other = np.radians(first)[:, np.newaxis, :], np.radians(second)[np.newaxis, :, :]
    half = (
        np.sin((one[..., 0] - other[..., 0]) / 2) ** 2
        + np.cos(one[..., 0]) * np.cos(other[..., 0]) * np.sin((one[..., 1] - other[..., 1]) / 2) ** 2
    )
    return np.asarray(2 * EARTH_RADIUS_KM * np.arcsin(np.sqrt(np.clip(half, 0.0, 1.0))), np.float64)


def _distances(places: npt.NDArray[np.float64]) -> Matrix:
    return np.asarray(np.sqrt(((places[:, np.newaxis, :] - places[np.newaxis, :, :]) ** 2).sum(axis=-1)), np.float64)

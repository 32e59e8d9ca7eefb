"""A made-up city and its zones."""

from __future__ import annotations

import numpy as np
import pytest

from nearcast.experiments.towers import ATLANTA, cluster, towers, zones


def test_the_same_seed_is_the_same_city() -> None:
    assert zones(4, 1) == zones(4, 1)
    assert zones(4, 1) != zones(4, 2)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("count", [1, 4, 9])
def test_zones_are_apart_and_in_the_city(seed: int, count: int) -> None:
    found = zones(count, seed)
    assert len(set(found)) == count
    assert all(ATLANTA.south <= north <= ATLANTA.north and ATLANTA.west <= east <= ATLANTA.east for north, east in found)
    assert found == sorted(found, reverse=True)


def test_clusters_are_where_the_points_are() -> None:
    rng = np.random.default_rng(1)
    corners = np.array([[0.0, 0.0], [0.0, 100.0], [100.0, 0.0]])
    points = np.concatenate([corner + rng.normal(0, 1, (50, 2)) for corner in corners])
    found = cluster(points, 3, rng)
    for corner in corners:
        assert np.linalg.norm(found - corner, axis=1).min() < 1.0


def test_every_tower_is_nearest_to_the_middle_of_its_cluster() -> None:
    """Lloyd's rounds ended because nothing moved any more."""
    rng = np.random.default_rng(3)
    points = towers(ATLANTA, rng)
    centres = cluster(points, 4, rng)
    owner = ((points[:, None] - centres[None]) ** 2).sum(axis=2).argmin(axis=1)
    for number, centre in enumerate(centres):
        assert points[owner == number].mean(axis=0) == pytest.approx(centre)

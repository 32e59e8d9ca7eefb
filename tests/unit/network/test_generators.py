"""Generated networks: what they promise about distances, seeds and the triangle inequality."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from nearcast.errors import ConfigError
from nearcast.network.generators import cities, city_of, euclidean, grid, internet, line, ring, star, triangle_violations

Matrix = npt.NDArray[np.float64]

ALL: dict[str, Callable[[int, int], Matrix]] = {
    "star": lambda size, seed: star(size, 10.0),
    "line": lambda size, seed: line(size, 3.0),
    "ring": lambda size, seed: ring(size, 3.0),
    "grid": lambda size, seed: grid(size, 1, 3.0),
    "euclidean": lambda size, seed: euclidean(size, seed, height_rtt_ms=2.0),
    "cities": lambda size, seed: cities(size, seed),
    "internet": lambda size, seed: internet(size, seed),
}


@pytest.mark.parametrize("size", [0, 1, 2, 30])
@pytest.mark.parametrize("name", ALL)
def test_every_matrix_is_one(name: str, size: int) -> None:
    matrix = ALL[name](size, 1)
    assert matrix.shape == (size, size)
    assert matrix.dtype == np.float64
    assert (matrix == matrix.T).all()
    assert (np.diag(matrix) == 0.0).all()
    assert np.isfinite(matrix).all()
    assert (matrix[~np.eye(size, dtype=bool)] > 0.0).all()


@pytest.mark.parametrize("name", ["euclidean", "cities", "internet"])
def test_a_seed_decides(name: str) -> None:
    assert (ALL[name](20, 1) == ALL[name](20, 1)).all()
    assert (ALL[name](20, 1) != ALL[name](20, 2)).any()


@pytest.mark.parametrize("name", sorted(set(ALL) - {"internet"}))
def test_all_but_the_internet_keep_the_triangle_inequality(name: str) -> None:
    matrix = ALL[name](25, 3)
    for a, b, c in itertools.permutations(range(25), 3):
        assert matrix[a, b] <= matrix[a, c] + matrix[c, b] + 1e-9
    assert triangle_violations(matrix) == 0.0


def test_shapes() -> None:
    assert star(4, 10.0)[0].tolist() == [0, 10, 10, 10]
    assert star(4, 10.0)[1].tolist() == [10, 0, 20, 20]
    assert line(4, 2.0)[1].tolist() == [2, 0, 2, 4]
    assert ring(5, 2.0)[0].tolist() == [0, 2, 4, 4, 2]
    assert grid(2, 3, 1.0)[0].tolist() == [0, 1, 2, 1, 2, 3]
    assert grid(2, 3, 1.0)[4].tolist() == [2, 1, 2, 1, 0, 1]


def test_euclidean_is_as_wide_as_it_says() -> None:
    matrix = euclidean(400, 5, width_rtt_ms=100.0)
    assert matrix.max() <= 100 * 2**0.5
    # Mean distance in a unit square: 0.5214.
    assert matrix[np.triu_indices(400, 1)].mean() == pytest.approx(52.14, rel=0.05)
    assert euclidean(50, 5, width_rtt_ms=100.0, dimensions=1).max() <= 100.0


def test_cities_are_near_within_and_far_between() -> None:
    matrix = cities(300, 7, clusters=6)
    city = city_of(300, 6)
    same = city[:, None] == city[None, :]
    apart = ~np.eye(300, dtype=bool)
    assert np.median(matrix[same & apart]) < 10.0 < 30.0 < np.median(matrix[~same])


def test_city_sizes_fall() -> None:
    for size, clusters in ((100, 10), (1_000, 40), (7, 7), (5, 10), (10, 1)):
        sizes = np.bincount(city_of(size, clusters), minlength=clusters)
        assert sizes.sum() == size
        assert len(sizes) == clusters
        # By at most one site out of order: cities have whole numbers of sites.
        assert all(second <= first + 1 for first, second in itertools.pairwise(sizes.tolist()))
        assert sizes[0] == sizes.max()


@pytest.mark.parametrize("seed", range(5))
def test_the_internet_looks_like_one(seed: int) -> None:
    matrix = internet(300, seed)
    pairs = matrix[np.triu_indices(300, 1)]
    assert np.median(pairs) == pytest.approx(100.0)
    assert 0.05 < triangle_violations(matrix) < 0.3
    assert 1.7 < np.percentile(pairs, 99) / np.median(pairs) < 7.0
    assert np.percentile(pairs, 5) < 30.0


def test_the_internet_without_detours_is_a_metric() -> None:
    assert triangle_violations(internet(100, 1, inflation_sigma=0.0, poor_share=0.0)) == 0.0


def test_triangle_violations_finds_them() -> None:
    bent = np.array([[0.0, 1.0, 10.0], [1.0, 0.0, 1.0], [10.0, 1.0, 0.0]])
    assert triangle_violations(bent) == 1.0
    assert triangle_violations(bent[:2, :2]) == 0.0


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: star(-1, 1.0), "-1 sites"),
        (lambda: ring(3, -1.0), "`step_rtt_ms` is -1.0"),
        (lambda: line(3, float("nan")), "`step_rtt_ms` is nan"),
        (lambda: grid(3, -1, 1.0), "-1 sites"),
        (lambda: euclidean(3, 1, dimensions=0), "0 dimensions"),
        (lambda: cities(3, 1, clusters=0), "0 clusters"),
        (lambda: internet(3, 1, median_rtt_ms=float("inf")), "`median_rtt_ms` is inf"),
    ],
)
def test_arguments_that_make_no_sense(make: Callable[[], Matrix], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        make()

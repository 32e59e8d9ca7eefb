"""Latency models: distances people can check, and inputs that are refused."""

from __future__ import annotations

import math
from array import array

import numpy as np
import pytest

from nearcast.errors import ConfigError
from nearcast.network.latency import Euclidean, GreatCircle, Latency, MatrixLatency, fibre_ms_per_km

VIENNA = (48.2082, 16.3738)
NEW_YORK = (40.7128, -74.0060)
SYDNEY = (-33.8688, 151.2093)


def haversine_km(a: tuple[float, float], b: tuple[float, float]) -> float:
    """The textbook formula, which the model does not use."""
    north_a, east_a, north_b, east_b = map(math.radians, (*a, *b))
    square = (
        math.sin((north_b - north_a) / 2) ** 2 + math.cos(north_a) * math.cos(north_b) * math.sin((east_b - east_a) / 2) ** 2
    )
    return 2 * 6371.0088 * math.asin(math.sqrt(square))


def great_circle(*places: tuple[float, float], ms_per_km: float = 1.0, base_ms: float = 0.0) -> GreatCircle:
    return GreatCircle([place[0] for place in places], [place[1] for place in places], ms_per_km, base_ms)


def test_great_circle_distances() -> None:
    model = great_circle(VIENNA, NEW_YORK, SYDNEY)
    assert model.between_ms(0, 1) == pytest.approx(6810, rel=0.005)  # published: about 6,800 km
    assert model.between_ms(1, 2) == pytest.approx(15_990, rel=0.005)
    for a, one in enumerate((VIENNA, NEW_YORK, SYDNEY)):
        for b, other in enumerate((VIENNA, NEW_YORK, SYDNEY)):
            assert model.between_ms(a, b) == pytest.approx(haversine_km(one, other), abs=1e-6)
            assert model.between_ms(a, b) == model.between_ms(b, a)


def test_great_circle_at_its_extremes() -> None:
    half_way_round = math.pi * 6371.0088
    model = great_circle((90, 0), (-90, 0), (0, 0), (0, 180), (0, -180), (1e-7, 0), (0.0, 360.0))
    assert model.between_ms(0, 1) == pytest.approx(half_way_round)
    assert model.between_ms(2, 3) == pytest.approx(half_way_round)
    assert model.between_ms(3, 4) == pytest.approx(0.0, abs=1e-6)
    assert model.between_ms(2, 6) == pytest.approx(0.0, abs=1e-6)
    # A centimetre: the arc cosine of a dot product would say 0 or 90.
    assert model.between_ms(2, 5) == pytest.approx(1.112e-5, rel=0.001)


def test_fibre_speed_inflation_and_base() -> None:
    assert fibre_ms_per_km() == pytest.approx(0.0049, rel=0.01)
    straight = great_circle(VIENNA, NEW_YORK, ms_per_km=fibre_ms_per_km())
    inflated = great_circle(VIENNA, NEW_YORK, ms_per_km=fibre_ms_per_km(1.8), base_ms=2.0)
    assert straight.between_ms(0, 1) == pytest.approx(33.3, rel=0.01)
    assert inflated.between_ms(0, 1) == pytest.approx(1.8 * straight.between_ms(0, 1) + 2.0)
    assert inflated.between_ms(1, 1) == 0.0


def test_a_place_that_is_not_known_is_far_from_everything_known() -> None:
    model = great_circle(VIENNA, (math.nan, math.nan))
    assert math.isnan(model.between_ms(0, 1))


@pytest.mark.parametrize(
    ("latitudes", "longitudes", "ms_per_km", "base_ms", "complaint"),
    [
        ([0.0], [0.0, 1.0], 1.0, 0.0, "1 latitudes and 2 longitudes"),
        ([91.0], [0.0], 1.0, 0.0, "site 0: 91.0° north"),
        ([0.0, 0.0], [0.0, -361.0], 1.0, 0.0, "site 1"),
        ([0.0], [0.0], -1.0, 0.0, "`ms_per_km` is -1.0"),
        ([0.0], [0.0], math.nan, 0.0, "`ms_per_km` is nan"),
        ([0.0], [0.0], 1.0, math.inf, "`base_ms` is inf"),
    ],
)
def test_great_circle_refuses(
    latitudes: list[float], longitudes: list[float], ms_per_km: float, base_ms: float, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        GreatCircle(latitudes, longitudes, ms_per_km, base_ms)


@pytest.mark.parametrize("form", [list, np.array])
def test_matrix_is_from_row_to_column(form: type) -> None:
    model = MatrixLatency(form([[0.0, 10.0], [30.0, 0.0]]))
    assert model.between_ms(0, 1) == 10.0
    assert model.between_ms(1, 0) == 30.0


def test_matrix_keeps_unknown_pairs_and_its_own_copy() -> None:
    values = np.array([[0.0, math.nan], [5.0, 0.0]])
    model = MatrixLatency(values)
    values[1, 0] = 99.0
    assert math.isnan(model.between_ms(0, 1))
    assert model.between_ms(1, 0) == 5.0


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([[0.0, 1.0]], "must be square"),
        ([0.0, 1.0], "must be square"),
        ([[0.0, 1.0], [1.0]], "all equally long"),
        ([[0.0, -1.0], [1.0, 0.0]], "from site 0 to site 1 is -1.0"),
        ([[0.0, 1.0], [math.inf, 0.0]], "from site 1 to site 0 is inf"),
    ],
)
def test_matrix_refuses(rows: list[list[float]], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        MatrixLatency(rows)


def test_euclidean_adds_both_heights() -> None:
    model = Euclidean([[0.0, 0.0], [3.0, 4.0]], [1.0, 2.0])
    assert model.between_ms(0, 1) == 8.0
    assert model.between_ms(0, 0) == 0.0
    assert Euclidean([[0.0], [7.0]]).between_ms(1, 0) == 7.0
    assert Euclidean(np.array([[0.0, 0.0, 0.0], [2.0, 3.0, 6.0]]), np.zeros(2)).between_ms(0, 1) == 7.0


@pytest.mark.parametrize(
    ("points", "heights", "complaint"),
    [
        ([[0.0], [1.0]], [1.0], "2 coordinates and 1 heights"),
        ([[0.0], [1.0, 2.0]], None, "site 1 has 2 coordinates"),
        ([[0.0]], [-1.0], "site 0"),
        ([[math.inf]], None, "site 0"),
    ],
)
def test_euclidean_refuses(points: list[list[float]], heights: list[float] | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        Euclidean(points, heights)


def test_anyone_can_write_a_model() -> None:
    class Constant(Latency):
        def between_ms(self, a: int, b: int) -> float:
            return 12.5

    assert Constant().between_ms(0, 1) == 12.5
    with pytest.raises(NotImplementedError):
        Latency().between_ms(0, 1)


def test_a_large_matrix_is_kept_compactly() -> None:
    model = MatrixLatency(np.zeros((1_000, 1_000)))
    assert isinstance(model._values, array)
    assert model._values.itemsize == 8

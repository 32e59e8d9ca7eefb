"""How far apart two sites are, in one-way milliseconds: by distance over ground, by a matrix, by coordinates in a plane.

Owns the formulas. It does not know links, jitter or traffic, and nothing here changes once it is made. A latency that is not
known is NaN; the network treats such a pair as unreachable.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from mypy_extensions import i64, mypyc_attr

from nearcast.errors import ConfigError

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

EARTH_RADIUS_KM: Final = 6371.0088
"""Mean radius (IUGG). A sphere is within 0.6 % of the ellipsoid, far less than what a path's detours add."""

FIBRE_KM_PER_MS: Final = 299.792458 / 1.468
"""Light in single-mode fibre (group index 1.468 at 1,550 nm, ITU-T G.652): 204.2 km per millisecond."""


def fibre_ms_per_km(inflation: float = 1.0) -> float:
    """One-way milliseconds per kilometre of great circle, over fibre that is ``inflation`` times as long."""
    return inflation / FIBRE_KM_PER_MS


@mypyc_attr(allow_interpreted_subclasses=True)
class Latency:
    """One-way latency between sites, by index. Subclass it for a model of your own."""

    def between_ms(self, a: i64, b: i64) -> float:
        """Milliseconds from site ``a`` to site ``b``; NaN where unknown. Must give the same answer each time."""
        raise NotImplementedError


class _Place:
    """A point on the unit sphere."""

    def __init__(self, latitude: float, longitude: float) -> None:
        north = math.radians(latitude)
        east = math.radians(longitude)
        self.x = math.cos(north) * math.cos(east)
        self.y = math.cos(north) * math.sin(east)
        self.z = math.sin(north)


class GreatCircle(Latency):
    """Distance over ground times ``ms_per_km``, plus ``base_ms``; 0 from a site to itself.

    Degrees north and east. Coordinates that are NaN (a site whose place is not known) make every pair with it unknown.
    """

    def __init__(
        self, latitudes: Sequence[float], longitudes: Sequence[float], ms_per_km: float, base_ms: float = 0.0
    ) -> None:
        if len(latitudes) != len(longitudes):
            raise ConfigError(f"{len(latitudes)} latitudes and {len(longitudes)} longitudes: there must be as many")
        if not 0.0 <= ms_per_km < math.inf:
            raise ConfigError(f"`ms_per_km` is {ms_per_km}: it must be 0 or more, and finite", key="ms_per_km")
        if not 0.0 <= base_ms < math.inf:
            raise ConfigError(f"`base_ms` is {base_ms}: it must be 0 or more, and finite", key="base_ms")
        self._diameter_ms = 2.0 * EARTH_RADIUS_KM * ms_per_km
        self._base_ms = base_ms
        self._places: list[_Place] = []
        for position in range(len(latitudes)):
            latitude = float(latitudes[position])
            longitude = float(longitudes[position])
            if abs(latitude) > 90.0 or abs(longitude) > 360.0:
                raise ConfigError(f"site {position}: {latitude}° north, {longitude}° east is no place on Earth")
            self._places.append(_Place(latitude, longitude))

    def between_ms(self, a: i64, b: i64) -> float:
        if a == b:
            return 0.0
        one = self._places[a]
        other = self._places[b]
        # Through the chord, because the arc cosine of a product loses all digits for near pairs.
        x = one.x - other.x
        y = one.y - other.y
        z = one.z - other.z
        half_chord = 0.5 * math.sqrt(x * x + y * y + z * z)
        if half_chord > 1.0:  # rounding, at antipodes
            half_chord = 1.0
        return self._diameter_ms * math.asin(half_chord) + self._base_ms


class MatrixLatency(Latency):
    """One-way milliseconds from row to column: a square ndarray or rows of numbers; NaN where unknown."""

    def __init__(self, one_way_ms: NDArray[float64] | Sequence[Sequence[float]]) -> None:
        import numpy  # here, so that a network without matrices does not load it

        try:
            matrix = numpy.ascontiguousarray(one_way_ms, dtype=numpy.float64)
        except ValueError:
            raise ConfigError("a latency matrix needs rows of numbers, all equally long") from None
        if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
            raise ConfigError(f"a latency matrix must be square; this one has the shape {matrix.shape}")
        wrong = numpy.argwhere((matrix < 0.0) | numpy.isinf(matrix))
        if len(wrong):
            row, column = int(wrong[0][0]), int(wrong[0][1])
            raise ConfigError(
                f"latency from site {row} to site {column} is {matrix[row, column]}: it must be 0 or more, or nan if unknown"
            )
        self._size: i64 = matrix.shape[0]
        # An array and not a list: 10,000 sites are 100 million numbers.
        self._values: array[float] = array("d", matrix.tobytes())

    def between_ms(self, a: i64, b: i64) -> float:
        return self._values[a * self._size + b]


class Euclidean(Latency):
    """Distance between points in any number of dimensions, plus the heights of both; 0 from a site to itself.

    Units are one-way milliseconds. A height is what every packet pays to get from the site to the network core, as in Vivaldi
    (Dabek et al., SIGCOMM 2004, section 5.4).
    """

    def __init__(
        self,
        coordinates: NDArray[float64] | Sequence[Sequence[float]],
        heights: NDArray[float64] | Sequence[float] | None = None,
    ) -> None:
        self._points: list[list[float]] = []
        self._heights: list[float] = [0.0] * len(coordinates) if heights is None else [float(height) for height in heights]
        if len(self._heights) != len(coordinates):
            raise ConfigError(f"{len(coordinates)} coordinates and {len(self._heights)} heights: there must be as many")
        for position in range(len(coordinates)):
            point = [float(value) for value in coordinates[position]]
            if self._points and len(point) != len(self._points[0]):
                raise ConfigError(f"site {position} has {len(point)} coordinates, the first one has {len(self._points[0])}")
            if (
                self._heights[position] < 0.0
                or math.isinf(self._heights[position])
                or any(math.isinf(value) for value in point)
            ):
                raise ConfigError(f"site {position}: coordinates must be finite, and the height 0 or more")
            self._points.append(point)

    def between_ms(self, a: i64, b: i64) -> float:
        if a == b:
            return 0.0
        one = self._points[a]
        other = self._points[b]
        squares = 0.0
        for dimension in range(len(one)):
            difference = one[dimension] - other[dimension]
            squares += difference * difference
        return math.sqrt(squares) + self._heights[a] + self._heights[b]

"""What ``coordinates`` measures: matrices of files, how good coordinates are on one, and the published Vivaldi to compare."""

from __future__ import annotations

import csv
import math
import random
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.coordinates.arrays import as_arrays, distances_ms
from nearcast.coordinates.coordinate import LEAST_HEIGHT_MS, Coordinate
from nearcast.errors import ConfigError

Matrix = npt.NDArray[np.float64]
KEY = "rtt_ms"
LEAST_NODES = 2
MOST_NODES = 4_096


class Accuracy(msgspec.Struct, frozen=True, kw_only=True):
    """Errors over all pairs whose round-trip time is known; and what comes of choosing a broker by coordinates."""

    median_error: float
    """Of |estimate - truth| / truth."""
    p90_error: float
    p95_error: float
    mean_error_ms: float
    median_error_ms: float
    p90_error_ms: float
    brokers: int
    hit_rate: float | None
    """Share of the other nodes whose nearest broker by coordinates is the nearest; none where all nodes are brokers."""
    added_ms: float | None
    """Mean round-trip time by which the chosen broker is farther than the nearest."""


def accuracy(coordinates: list[Coordinate], rtt_ms: Matrix, *, every: int = 10) -> Accuracy:
    """How good coordinates are. Every ``every``-th node is a broker, the rest choose among those."""
    places = as_arrays(coordinates)
    estimated = distances_ms(places, places)
    pairs = np.triu(np.isfinite(rtt_ms) & (rtt_ms > 0.0), 1)
    wrong_ms = np.abs(estimated - rtt_ms)[pairs]
    wrong = wrong_ms / rtt_ms[pairs]
    brokers = np.arange(0, len(rtt_ms), every)
    others = np.setdiff1d(np.arange(len(rtt_ms)), brokers)
    truth = rtt_ms[np.ix_(others, brokers)]
    usable = np.isfinite(truth).all(axis=1) if len(others) else np.zeros(0, bool)
    hit_rate: float | None = None
    added_ms: float | None = None
    if usable.any():
        truth = truth[usable]
        chosen = np.argmin(estimated[np.ix_(others, brokers)][usable], axis=1)
        added = truth[np.arange(len(truth)), chosen] - truth.min(axis=1)
        hit_rate = float((added <= 1e-9).mean())
        added_ms = float(added.mean())
    return Accuracy(
        median_error=_percentile(wrong, 50),
        p90_error=_percentile(wrong, 90),
        p95_error=_percentile(wrong, 95),
        mean_error_ms=float(wrong_ms.mean()),
        median_error_ms=_percentile(wrong_ms, 50),
        p90_error_ms=_percentile(wrong_ms, 90),
        brokers=len(brokers),
        hit_rate=hit_rate,
        added_ms=added_ms,
    )


def relative_errors(coordinates: list[Coordinate], rtt_ms: Matrix) -> npt.NDArray[np.float64]:
    """Of all pairs whose round-trip time is known."""
    places = as_arrays(coordinates)
    pairs = np.triu(np.isfinite(rtt_ms) & (rtt_ms > 0.0), 1)
    return np.asarray((np.abs(distances_ms(places, places) - rtt_ms)[pairs]) / rtt_ms[pairs], np.float64)


def _percentile(values: npt.NDArray[np.float64], share: float) -> float:
    return float(np.percentile(values, share))


# --- the published algorithm ----------------------------------------------------------------------------------------------


def published_vivaldi(
    rtt_ms: Matrix, *, samples: int, seed: int, neighbours: int = 64, dimensions: int = 2
) -> list[Coordinate]:
    """Vivaldi as published (Dabek et al., SIGCOMM 2004), with height vectors and an adaptive timestep, c_c = c_e = 0.25. Each
    node samples its neighbours, half of them its nearest and half any, as is recommended there, and each sample is exact."""
    rng = random.Random(f"published {seed}")
    nodes = len(rtt_ms)
    vectors = [[0.0] * dimensions for _ in range(nodes)]
    heights = [LEAST_HEIGHT_MS] * nodes
    errors = [1.0] * nodes
    known = [_neighbours(rtt_ms, node, neighbours, rng) for node in range(nodes)]
    for _ in range(samples):
        for node in range(nodes):
            if not known[node]:
                continue
            other = rng.choice(known[node])
            rtt = float(rtt_ms[node, other])
            difference = [here - there for here, there in zip(vectors[node], vectors[other], strict=True)]
            flat = math.hypot(*difference)
            if flat < 1e-6:
                difference = [rng.gauss(0.0, 1e-3) for _ in range(dimensions)]
                flat = math.hypot(*difference)
            distance = flat + heights[node] + heights[other]
            weight = errors[node] / (errors[node] + errors[other])
            wrong = abs(distance - rtt) / rtt
            errors[node] = max(wrong * 0.25 * weight + errors[node] * (1.0 - 0.25 * weight), 1e-3)
            force = 0.25 * weight * (rtt - distance) / distance
            vectors[node] = [here + force * part for here, part in zip(vectors[node], difference, strict=True)]
            heights[node] = max(heights[node] + force * (heights[node] + heights[other]), LEAST_HEIGHT_MS)
    return [Coordinate(vectors[node], heights[node], 0.0, min(errors[node], 1.5)) for node in range(nodes)]


def _neighbours(rtt_ms: Matrix, node: int, count: int, rng: random.Random) -> list[int]:
    row = rtt_ms[node]
    others = [other for other in np.argsort(row).tolist() if other != node and row[other] > 0.0]
    if len(others) <= count:
        return others
    near, far = others[: count // 2], others[count // 2 :]
    return near + rng.sample(far, count - len(near))


# --- matrices from files --------------------------------------------------------------------------------------------------


def read_matrix(path: Path) -> Matrix:
    """Round-trip times from a file: NumPy's ``.npz`` with the key ``rtt_ms`` (or ``.npy``), or CSV with a row for each node;
    NaN, or nothing, where one is not known. Where only one direction is known it counts for both, else their mean."""
    try:
        matrix = _read_numpy(path) if path.suffix in (".npz", ".npy") else _read_csv(path)
    except OSError as error:
        raise ConfigError(f"cannot read the matrix {path}: {error.strerror or error}") from error
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        shape = " × ".join(str(size) for size in matrix.shape)
        raise ConfigError(f"the matrix {path} is {shape}; it needs a row and a column for each node")
    if not LEAST_NODES <= len(matrix) <= MOST_NODES:
        raise ConfigError(f"the matrix {path} has {len(matrix):,} nodes; {LEAST_NODES} to {MOST_NODES:,} can be run")
    np.fill_diagonal(matrix, 0.0)
    if np.nanmin(matrix) < 0.0 or np.isinf(matrix).any():
        raise ConfigError(f"the matrix {path} has times that are negative or endless; write NaN for what is not known")
    matrix = np.where(np.isnan(matrix), matrix.T, matrix)
    matrix = np.where(np.isnan(matrix.T), matrix, (matrix + matrix.T) / 2)
    if not np.triu(np.isfinite(matrix) & (matrix > 0.0), 1).any():
        raise ConfigError(f"the matrix {path} knows no round-trip time at all")
    return np.asarray(matrix, np.float64)


def _read_numpy(path: Path) -> Matrix:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.ndarray):
            with loaded:
                if KEY not in loaded:
                    raise ConfigError(f"{path} has no key `{KEY}`; it has {', '.join(loaded.files) or 'none'}")
                loaded = loaded[KEY]
        return np.array(loaded, np.float64)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{path} is not a NumPy file of numbers: {error}") from error


def _read_csv(path: Path) -> Matrix:
    rows: list[list[float]] = []
    with path.open(newline="", encoding="utf-8", errors="replace") as file:
        for number, cells in enumerate(csv.reader(file), 1):
            if not cells:
                continue
            try:
                rows.append([float(cell) if cell.strip() else math.nan for cell in cells])
            except ValueError as error:
                raise ConfigError(f"{path}, line {number}: {error}; a row is numbers, separated by commas") from None
            if len(cells) != len(rows[0]):
                raise ConfigError(f"{path}, line {number}: {len(cells)} numbers, the first row has {len(rows[0])}")
    return np.array(rows, np.float64).reshape(len(rows), -1 if rows else 0)

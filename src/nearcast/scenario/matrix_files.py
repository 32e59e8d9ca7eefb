"""Round-trip times between sites from a file: ``.npz`` with key ``rtt_ms``, or ``.csv``.

A CSV file has a row for each site and in it a column for each site. With a header of site names, rows and columns may be more
than the topology's sites and in any order; the first column may repeat the names. ``nan`` or an empty cell is a pair that
cannot reach each other. The diagonal is not used.
"""

from __future__ import annotations

import csv
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from nearcast.errors import ConfigError
from nearcast.scenario.rules import shown

MAX_SITES = 5_000
"""Rows of a matrix. A larger one would be hundreds of megabytes; models by distance have no such bound."""

Matrix = npt.NDArray[np.float64]


def read_rtt_ms(path: str | Path, sites: list[str]) -> Matrix:
    """The matrix of a file in the order of ``sites``, in milliseconds."""
    location = str(path)
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".npz":
            matrix, names = _npz(Path(path), location), None
        elif suffix == ".csv":
            matrix, names = _csv(Path(path), location)
        else:
            raise ConfigError(f"a matrix is a .npz or .csv file, not {shown(suffix)}", path=location)
    except OSError as error:
        raise ConfigError(f"cannot read the latency matrix: {error.strerror or error}", path=location) from error
    if names is not None:
        matrix = _selected(matrix, names, sites, location)
    if matrix.shape != (len(sites), len(sites)):
        shape = " × ".join(map(str, matrix.shape))
        raise ConfigError(f"the matrix is {shape}; the topology has {len(sites)} sites", path=location)
    bad = np.argwhere((matrix < 0) | np.isinf(matrix))
    if len(bad):
        row, column = (int(index) for index in bad[0])
        message = f"{matrix[row, column]} ms from {sites[row]} to {sites[column]}: must be 0 or more, or nan (no way)"
        raise ConfigError(message, path=location)
    return matrix


def _npz(path: Path, location: str) -> Matrix:
    try:
        with zipfile.ZipFile(path) as archive:
            # Before unpacking: what claims to be small may not be.
            size = archive.getinfo("rtt_ms.npy").file_size
        if size > 8 * MAX_SITES**2 + 4096:
            raise ConfigError(f"the matrix has more than {MAX_SITES:,} rows", path=location)
        with np.load(path, allow_pickle=False) as content:
            loaded: npt.NDArray[Any] = content["rtt_ms"]
        if loaded.ndim != 2 or loaded.dtype.kind not in "fiu":
            raise ConfigError("`rtt_ms` must be a square matrix of numbers", path=location)
        return loaded.astype(np.float64)
    except KeyError:
        raise ConfigError("the file has no array `rtt_ms`", path=location) from None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ConfigError(f"not a .npz file: {error}", path=location) from error


def _csv(path: Path, location: str) -> tuple[Matrix, list[str] | None]:
    names: list[str] | None = None
    rows: list[list[float]] = []
    labels: list[str] = []
    try:
        with path.open(encoding="utf-8", newline="") as file:
            for cells in csv.reader(line for line in file if line.strip() and not line.startswith("#")):
                if names is None and not rows and any(_number(cell) is None for cell in cells):
                    names = [cell.strip() for cell in cells]
                    continue
                if len(rows) == MAX_SITES:
                    raise ConfigError(f"the matrix has more than {MAX_SITES:,} rows", path=location)
                if names is not None and _number(cells[0]) is None:
                    labels.append(cells[0].strip())
                    cells = cells[1:]
                row = len(rows) + 1
                values = [_number(cell) for cell in cells]
                if None in values:
                    cell = cells[values.index(None)]
                    raise ConfigError(f"row {row} of the matrix has {shown(cell)} where a number belongs", path=location)
                rows.append([value for value in values if value is not None])
                if len(rows[-1]) != len(rows[0]):
                    raise ConfigError(f"row {row} of the matrix has {len(values)} numbers, not {len(rows[0])}", path=location)
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"not a CSV file: {error}", path=location) from error
    if names is not None and labels:
        names = names[-len(labels) :] if len(names) == len(labels) + 1 else names
        if names != labels:
            raise ConfigError("the names in the first column must be those of the header, in the same order", path=location)
    if not rows:
        raise ConfigError("the matrix is empty", path=location)
    return np.array(rows, dtype=np.float64), names


def _number(cell: str) -> float | None:
    try:
        return float(cell) if cell.strip() else np.nan
    except ValueError:
        return None


def _selected(matrix: Matrix, names: list[str], sites: list[str], location: str) -> Matrix:
    if matrix.shape != (len(names), len(names)):
        shape = " × ".join(map(str, matrix.shape))
        raise ConfigError(f"the header names {len(names)} sites, the matrix is {shape}", path=location)
    position = {name: index for index, name in enumerate(names)}
    if len(position) != len(names):
        raise ConfigError("the header names a site twice", path=location)
    for site in sites:
        if site not in position:
            raise ConfigError(f"the matrix does not name the site {shown(site)}", path=location)
    order = [position[site] for site in sites]
    return matrix[np.ix_(order, order)]

"""Matrices of round-trip times: from CSV text or arrays to something a network can be built on, and back to text.

Owns what such a matrix has to be: square, in milliseconds, NaN where unknown, the same both ways, 0 on the diagonal (what
happens within a site is :meth:`Network.set_local`'s). Reads no files; whoever does adds the file's name to the errors.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from nearcast.errors import ConfigError

Matrix = npt.NDArray[np.float64]

MAX_SITES: Final = 5_000
"""Rows of a matrix: 200 MB, and several times that while it is read. Models by distance have no such bound."""

MAX_RTT_MS: Final = 60_000.0
"""Nothing on Earth takes a minute; a file that says so is in microseconds."""

_BLANK: Final = frozenset({"", "-", "nan", "NaN", "NAN", "null", "None", "NA", "N/A"})


def rtt_from_csv(text: str, sites: Sequence[str] | None = None) -> Matrix:
    """A symmetric matrix in the order of ``sites`` from comma-separated text, one row a line.

    A first line that is not all numbers names the columns; each row may then begin with its own name, and the file may hold
    more sites than are wanted, in any order. An empty cell, ``-`` or ``nan`` is unknown. Empty lines and lines that begin with
    ``#`` are passed over. Without ``sites``, rows stay as they are.
    """
    names: list[str] | None = None
    header: list[str] | None = None
    labels: list[str] = []
    rows: list[Matrix] = []
    reader = csv.reader(text.splitlines(), strict=True)
    while True:
        try:
            cells = [cell.strip() for cell in next(reader)]
        except StopIteration:
            break
        except csv.Error as error:
            raise ConfigError(f"not comma-separated values: {error}", line=reader.line_num) from error
        # A row of nothing but commas is not empty: it is a site of which nothing is known.
        if not cells or cells == [""] or cells[0].startswith("#"):
            continue
        if header is None and not rows and any(_number(cell) is None for cell in cells):
            header = cells
            continue
        if header is not None and not rows:
            names = _column_names(header, cells)
        labelled = names is not None and len(cells) == len(names) + 1
        if labelled:
            labels.append(cells[0])
            cells = cells[1:]
        if len(rows) == MAX_SITES or len(cells) > MAX_SITES:
            raise ConfigError(f"the matrix has more than {MAX_SITES:,} rows or columns", line=reader.line_num)
        rows.append(_values(cells, len(rows[0]) if rows else len(cells), reader.line_num))
    if not rows:
        raise ConfigError("the matrix is empty: it needs a row of round-trip times for each site")
    if names is not None and labels and labels != names:
        raise ConfigError("the names at the beginning of the rows must be those of the first line, in the same order")
    return rtt_from_array(np.stack(rows), sites, names)


def rtt_from_array(values: npt.ArrayLike, sites: Sequence[str] | None = None, names: Sequence[str] | None = None) -> Matrix:
    """A symmetric matrix in the order of ``sites`` from an array whose rows and columns are ``names`` (None: ``sites``).

    Where only one direction is known, the other is taken to be the same; where both are and they differ, as measured ones do,
    both become the mean. The diagonal becomes 0.
    """
    try:
        matrix = np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise ConfigError("a matrix needs rows of numbers, all equally long") from None
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"the matrix is {_shape(matrix)}: it must have as many rows as columns")
    if len(matrix) > MAX_SITES:
        raise ConfigError(f"the matrix has more than {MAX_SITES:,} rows")
    if names is None:
        names = sites if sites is not None else [f"row {row}" for row in range(1, len(matrix) + 1)]
        if len(names) != len(matrix):
            raise ConfigError(f"the matrix is {_shape(matrix)}, and there are {len(names)} sites")
    elif len(names) != len(matrix):
        raise ConfigError(f"the matrix is {_shape(matrix)}, and {len(names)} sites are named")
    elif sites is not None:
        matrix = _selected(matrix, names, sites)
        names = sites
    np.fill_diagonal(matrix, 0.0)
    _check_values(matrix, names)
    return _symmetric(matrix, names)


def one_way_ms(rtt_ms: Matrix) -> Matrix:
    """Half of each round trip: what :class:`~nearcast.network.latency.MatrixLatency` takes."""
    return rtt_ms / 2.0


def to_csv(rtt_ms: Matrix, names: Sequence[str]) -> str:
    """Text that :func:`rtt_from_csv` reads, with names; to a thousandth of a millisecond."""
    if rtt_ms.shape != (len(names), len(names)):
        raise ConfigError(f"the matrix is {_shape(rtt_ms)}, and there are {len(names)} names")
    for name in names:
        if any(character in name for character in ',"\r\n#') or _number(name) is not None:
            raise ConfigError(f"{name!r} cannot be the name of a column")
    lines = [",".join(["", *names])]
    for name, row in zip(names, rtt_ms.tolist(), strict=True):
        lines.append(",".join([name, *("" if math.isnan(value) else f"{value:.3f}" for value in row)]))
    return "\n".join(lines) + "\n"


def _number(cell: str) -> float | None:
    if cell in _BLANK:
        return math.nan
    try:
        return float(cell)
    except ValueError:
        return None


def _column_names(header: list[str], first_row: list[str]) -> list[str]:
    """The names a first line gives to columns: all of its cells, or all but the one above the rows' own names."""
    corner = header[0] in _BLANK or (len(first_row) == len(header) and _number(first_row[0]) is None)
    return header[1:] if corner else header


def _values(cells: list[str], width: int, line: int) -> Matrix:
    if len(cells) != width:
        raise ConfigError(f"this row has {len(cells)} values, the first one has {width}", line=line)
    values = np.empty(width)
    for position, cell in enumerate(cells):
        value = _number(cell)
        if value is None:
            raise ConfigError(f"value {position + 1} of this row is {cell[:40]!r}, not a number", line=line)
        values[position] = value
    return values


def _selected(matrix: Matrix, names: Sequence[str], sites: Sequence[str]) -> Matrix:
    position = {name: index for index, name in enumerate(names)}
    if len(position) != len(names):
        twice = next(name for index, name in enumerate(names) if position[name] != index)
        raise ConfigError(f"the matrix names {twice!r} twice")
    for site in sites:
        if site not in position:
            raise ConfigError(f"the matrix has no row for the site {site!r}")
    order = [position[site] for site in sites]
    return matrix[np.ix_(order, order)]


def _check_values(matrix: Matrix, names: Sequence[str]) -> None:
    wrong = np.argwhere((matrix < 0.0) | (matrix > MAX_RTT_MS))
    if not len(wrong):
        return
    row, column = (int(index) for index in wrong[0])
    value = matrix[row, column]
    between = f"{value:g} ms from {names[row]} to {names[column]}"
    if value < 0.0:
        raise ConfigError(f"{between}: a round-trip time is 0 or more; leave the cell empty if it is unknown")
    if math.isinf(value):
        raise ConfigError(f"{between}: a round-trip time is finite; leave the cell empty if there is no way")
    raise ConfigError(f"{between}: a round-trip time is at most {MAX_RTT_MS:,.0f} ms; is the file in microseconds?")


def _symmetric(matrix: Matrix, names: Sequence[str]) -> Matrix:
    back = matrix.T
    half_filled = np.argwhere((matrix > 1.0) & (back == 0.0))
    if len(half_filled):
        row, column = (int(index) for index in half_filled[0])
        raise ConfigError(
            f"{matrix[row, column]:g} ms from {names[row]} to {names[column]}, and 0 back: "
            "if only one half of the matrix is filled in, leave the other half's cells empty"
        )
    known = np.where(np.isnan(matrix), back, matrix)
    return (known + known.T) / 2.0


def _shape(matrix: Matrix) -> str:
    return " × ".join(str(length) for length in matrix.shape)

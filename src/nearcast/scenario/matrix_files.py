"""Round-trip times between sites from a file: ``.csv``, or ``.npz`` with the array ``rtt_ms``.

Reads the file and gives errors its name; what a matrix has to be is :mod:`nearcast.network.matrices`'s.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from nearcast.errors import ConfigError
from nearcast.network.matrices import MAX_SITES, Matrix, rtt_from_array, rtt_from_csv
from nearcast.scenario.rules import shown

MAX_FILE_BYTES = 16 * MAX_SITES**2
"""What a file may hold: a full matrix, with a number of 16 characters for each pair."""


def read_rtt_ms(path: str | Path, sites: Sequence[str]) -> Matrix:
    """The matrix of a file in the order of ``sites``, in milliseconds."""
    location = str(path)
    suffix = Path(path).suffix.lower()
    try:
        if suffix == ".csv":
            return rtt_from_csv(_text(Path(path)), sites)
        if suffix == ".npz":
            return rtt_from_array(_array(Path(path)), sites)
        raise ConfigError(f"a matrix is a .npz or .csv file, not {shown(suffix)}")
    except OSError as error:
        raise ConfigError(f"cannot read the latency matrix: {error.strerror or error}", path=location) from error
    except ConfigError as error:
        message = str(error).removeprefix(f":{error.line}: ")
        raise ConfigError(message, path=location, line=error.line) from None


def _text(path: Path) -> str:
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"the file is larger than a matrix of {MAX_SITES:,} sites")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError("not a CSV file: it is not UTF-8") from None


def _array(path: Path) -> Matrix:
    try:
        with zipfile.ZipFile(path) as archive:
            # Before unpacking: a small archive may hold a large array.
            if archive.getinfo("rtt_ms.npy").file_size > MAX_FILE_BYTES:
                raise ConfigError(f"the array is larger than a matrix of {MAX_SITES:,} sites")
        with np.load(path, allow_pickle=False) as content:
            loaded: Matrix = content["rtt_ms"]
            return loaded
    except KeyError:
        raise ConfigError("the file has no array `rtt_ms`") from None
    except (zipfile.BadZipFile, ValueError, EOFError) as error:
        raise ConfigError(f"not a .npz file: {error}") from error

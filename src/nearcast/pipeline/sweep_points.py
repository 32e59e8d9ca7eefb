"""What a sweep is made of: points of a grid, seeds, and the rows that come of them. Pure: no Spark, no files."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from nearcast.errors import ConfigError

Value = bool | int | float | str | None
Grid = Mapping[str, Sequence[Value]] | Sequence[Mapping[str, Value]]
"""Values of each parameter, of which every combination is a point; or the points themselves."""

OWN_COLUMNS = ("seed", "seconds", "error_type", "error_message", "error_traceback")

MAX_POINTS = 10_000_000


class Point(msgspec.Struct, frozen=True):
    """One thing to compute."""

    parameters: dict[str, Value]
    seed: int

    @property
    def key(self) -> str:
        """The same for the same point, whatever the order of its parameters."""
        return f"{json.dumps(self.parameters, sort_keys=True)}#{self.seed}"


class Failure(msgspec.Struct, frozen=True):
    """What a point raised."""

    type: str
    message: str
    traceback: str


class Row(msgspec.Struct, frozen=True):
    """What came of a point: figures, or a failure."""

    parameters: dict[str, Value]
    seed: int
    seconds: float
    figures: dict[str, Value] = {}
    error: Failure | None = None

    @property
    def point(self) -> Point:
        return Point(self.parameters, self.seed)


def points(grid: Grid, seeds: int | Iterable[int]) -> list[Point]:
    """Every combination with every seed, in the order of the grid: the last parameter runs fastest, then the seed."""
    combinations = _combinations(grid)
    numbers = list(range(1, seeds + 1)) if isinstance(seeds, int) else list(seeds)
    if not numbers:
        raise ConfigError("a sweep needs at least one seed")
    if len(combinations) * len(numbers) > MAX_POINTS:
        raise ConfigError(
            f"{len(combinations):,} combinations with {len(numbers):,} seeds are more than {MAX_POINTS:,} points"
        )
    found = [Point(dict(combination), seed) for combination in combinations for seed in numbers]
    if len({point.key for point in found}) != len(found):
        raise ConfigError("the grid has the same point twice: a value or a seed is named more than once")
    return found


def _combinations(grid: Grid) -> list[dict[str, Value]]:
    if isinstance(grid, Mapping):
        for name, values in grid.items():
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ConfigError(f"parameter {name}: give a list of values")
            if not values:
                raise ConfigError(f"parameter {name} has no value")
        combinations = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    else:
        combinations = [dict(point) for point in grid]
        if not combinations:
            raise ConfigError("the grid is empty")
    for combination in combinations:
        for name, value in combination.items():
            if name in OWN_COLUMNS:
                raise ConfigError(f"a parameter cannot be called {name}: the results have a column of that name")
            if not isinstance(value, (bool, int, float, str, type(None))):
                raise ConfigError(f"parameter {name}: {type(value).__name__} is none of bool, int, float, str")
            if isinstance(value, float) and not math.isfinite(value):
                raise ConfigError(f"parameter {name}: {value} is no value to compute with")
    return combinations


def parse_values(text: str) -> list[Value]:
    """``1,2,3``, ``a,b``, ``true,false``, ``0.1,1e3``; ``1..5`` is 1,2,3,4,5."""
    values: list[Value] = []
    for word in text.split(","):
        word = word.strip()
        first, dots, last = word.partition("..")
        if dots and _is_int(first) and _is_int(last):
            if int(last) < int(first):
                raise ConfigError(f"{word}: write the smaller number first")
            if int(last) - int(first) >= MAX_POINTS:
                raise ConfigError(f"{word}: more than {MAX_POINTS:,} values")
            values.extend(range(int(first), int(last) + 1))
        else:
            values.append(_value(word))
    return values


def parse_grid(settings: Iterable[str]) -> dict[str, list[Value]]:
    """``name=values``, each name once."""
    grid: dict[str, list[Value]] = {}
    for setting in settings:
        name, equals, values = setting.partition("=")
        name = name.strip()
        if not equals or not name or not values.strip():
            raise ConfigError(f"--set {setting}: write NAME=VALUE,VALUE,...")
        if name in grid:
            raise ConfigError(f"--set {setting}: {name} is set twice; name all its values at once")
        grid[name] = parse_values(values)
    return grid


def parse_seeds(text: str) -> list[int]:
    """``100`` is 1 to 100; ``5..20`` and ``3,7,9`` are themselves."""
    if _is_int(text):
        if int(text) < 1:
            raise ConfigError(f"--seeds {text}: at least 1")
        return parse_seeds(f"1..{int(text)}")
    values = parse_values(text)
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise ConfigError(f"--seeds {text}: write how many, FIRST..LAST, or numbers with commas")
    return [value for value in values if isinstance(value, int)]


def figures_of(answer: object) -> dict[str, Value]:
    """What a function returned as columns: nested mappings become ``a.b``, sequences JSON, NumPy's scalars Python's."""
    if answer is None:
        return {}
    if not isinstance(answer, Mapping):
        raise TypeError(f"a sweep's function returns a dict of figures, not {type(answer).__name__}")
    figures: dict[str, Value] = {}
    for key, value in answer.items():
        name = str(key)
        if isinstance(value, Mapping):
            figures.update({f"{name}.{inner}": each for inner, each in figures_of(value).items()})
        else:
            figures[name] = _figure(name, value)
    return figures


def _figure(name: str, value: Any) -> Value:
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if hasattr(value, "item") and getattr(value, "shape", None) == ():
        return _figure(name, value.item())
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        try:
            return json.dumps(value)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"figure {name} is a {type(value).__name__}: give numbers, text, or lists and dicts of them")


def _is_int(text: str) -> bool:
    text = text.strip()
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()


def _value(word: str) -> Value:
    if word in ("true", "false"):
        return word == "true"
    if _is_int(word):
        return int(word)
    try:
        number = float(word)
    except ValueError:
        return word
    return number if math.isfinite(number) else word

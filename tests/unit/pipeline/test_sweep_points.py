"""Grids, seeds and figures of sweeps."""

from __future__ import annotations

from typing import Any

import numpy
import pytest

from nearcast.errors import ConfigError
from nearcast.pipeline.sweep import run_point
from nearcast.pipeline.sweep_points import Point, figures_of, parse_grid, parse_seeds, parse_values, points


def test_every_combination_with_every_seed_in_the_grids_order() -> None:
    found = points({"a": [1, 2], "b": ["x", "y"]}, 2)
    assert [(point.parameters["a"], point.parameters["b"], point.seed) for point in found] == [
        (1, "x", 1), (1, "x", 2), (1, "y", 1), (1, "y", 2), (2, "x", 1), (2, "x", 2), (2, "y", 1), (2, "y", 2),
    ]  # fmt: skip


def test_points_may_be_listed() -> None:
    assert points([{"a": 1}, {"b": 2}], [7]) == [Point({"a": 1}, 7), Point({"b": 2}, 7)]


def test_no_parameters_is_one_point() -> None:
    assert points({}, 2) == [Point({}, 1), Point({}, 2)]


def test_a_points_key_does_not_depend_on_the_order_of_its_parameters() -> None:
    assert Point({"a": 1, "b": 2}, 3).key == Point({"b": 2, "a": 1}, 3).key
    assert Point({"a": 1}, 3).key != Point({"a": 1.0}, 3).key != Point({"a": True}, 3).key


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1,2,3", [1, 2, 3]),
        ("1..4", [1, 2, 3, 4]),
        ("-2..0,9", [-2, -1, 0, 9]),
        ("0.5,1e3", [0.5, 1000.0]),
        ("true,false,True", [True, False, "True"]),
        ("x, y ,z", ["x", "y", "z"]),
        ("1..", ["1.."]),
        ("nan,inf", ["nan", "inf"]),
        ("", [""]),
    ],
)
def test_values(text: str, values: list[Any]) -> None:
    found = parse_values(text)
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["a"], "--set a: write NAME=VALUE"),
        (["=1"], "write NAME=VALUE"),
        (["a="], "write NAME=VALUE"),
        (["a=1", "a=2"], "a is set twice"),
        (["a=4..1"], "the smaller number first"),
        (["a=0..99999999999"], "more than"),
    ],
)
def test_grids_that_are_none(settings: list[str], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_grid(settings)


@pytest.mark.parametrize(
    ("grid", "seeds", "complaint"),
    [
        ({"seed": [1]}, 1, "cannot be called seed"),
        ({"error_type": [1]}, 1, "cannot be called error_type"),
        ({"a": []}, 1, "a has no value"),
        ({"a": "text"}, 1, "a list of values"),
        ({"a": [object()]}, 1, "none of bool, int, float, str"),
        ({"a": [float("nan")]}, 1, "no value to compute with"),
        ({"a": [1, 1]}, 1, "same point twice"),
        ({"a": [1]}, [], "at least one seed"),
        ({"a": [1]}, [3, 3], "same point twice"),
        ([], 1, "the grid is empty"),
        ({"a": list(range(100_000))}, 1_000, "more than 10,000,000 points"),
    ],
)
def test_sweeps_that_are_none(grid: Any, seeds: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        points(grid, seeds)


def test_seeds() -> None:
    assert parse_seeds("3") == [1, 2, 3]
    assert parse_seeds("5..7") == [5, 6, 7]
    assert parse_seeds("9,2") == [9, 2]
    for text in ("0", "-1", "x", "1.5", "true", ""):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)


def test_figures() -> None:
    answer = {"n": numpy.int64(3), "f": numpy.float32(0.5), "deep": {"a": 1, "b": {"c": "x"}}, "list": [1, 2], 7: None}
    array = {"array": numpy.arange(3)}
    assert figures_of(answer | array) == {
        "n": 3, "f": 0.5, "deep.a": 1, "deep.b.c": "x", "list": "[1, 2]", "7": None, "array": "[0, 1, 2]",
    }  # fmt: skip
    assert figures_of(None) == {}


@pytest.mark.parametrize("answer", [3, [1], {"x": object()}, {"x": {1, 2}}, {"x": [object()]}])
def test_answers_that_are_no_figures_are_failures_of_the_point(answer: Any) -> None:
    row = run_point(lambda parameters, seed: answer, Point({"a": 1}, 5))
    assert row.error is not None
    assert row.error.type == "TypeError"
    assert row.figures == {}


def test_what_a_function_raises_is_kept_with_its_traceback() -> None:
    def broken(parameters: Any, seed: int) -> Any:
        raise SystemExit(f"seed {seed}")

    row = run_point(broken, Point({"a": 1}, 5))
    assert row.error is not None
    assert (row.error.type, row.error.message, row.seed) == ("SystemExit", "seed 5", 5)
    assert "in broken" in row.error.traceback
    assert row.seconds >= 0


def test_a_function_cannot_change_the_point_it_was_given() -> None:
    def greedy(parameters: Any, seed: int) -> Any:
        parameters.clear()
        return {}

    assert run_point(greedy, Point({"a": 1}, 5)).parameters == {"a": 1}

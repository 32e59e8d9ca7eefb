"""Matrices of round-trip times: every form people write them in, and a clear line for every mistake."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest

from nearcast.errors import ConfigError
from nearcast.network import matrices
from nearcast.network.matrices import one_way_ms, rtt_from_array, rtt_from_csv, to_csv

EXPECTED = [[0.0, 10.0, 20.0], [10.0, 0.0, 30.0], [20.0, 30.0, 0.0]]
SITES = ["a", "b", "c"]


@pytest.mark.parametrize(
    "text",
    [
        "0,10,20\n10,0,30\n20,30,0\n",
        "0, 10 ,20\r\n10,0,30\r\n20,30,0",
        "# measured in May\n\n0,10,20\n10,0,30\n\n20,30,0\n",
        "a,b,c\n0,10,20\n10,0,30\n20,30,0\n",
        ",a,b,c\na,0,10,20\nb,10,0,30\nc,20,30,0\n",
        "site,a,b,c\na,0,10,20\nb,10,0,30\nc,20,30,0\n",
        "a,b,c\na,0,10,20\nb,10,0,30\nc,20,30,0\n",
        '"a","b","c"\n0,10,20\n10,0,30\n20,30,0\n',
        "c,a,b\n0,20,30\n20,0,10\n30,10,0\n",
        "c,a,x,b\n0,20,1,30\n20,0,1,10\n1,1,0,1\n30,10,1,0\n",
        ",10,20\n,,30\n,,\n",
        "nan,10,20\nNaN,5,30\n-,-,\n",
    ],
    ids=range(12),
)
def test_forms(text: str) -> None:
    assert rtt_from_csv(text, SITES).tolist() == EXPECTED


def test_a_pair_that_nobody_measured_is_unknown() -> None:
    matrix = rtt_from_csv("0,10,\n10,0,\n,,0\n")
    assert math.isnan(matrix[0, 2])
    assert math.isnan(matrix[2, 1])
    assert matrix[0, 1] == 10.0


def test_two_directions_become_their_mean_and_one_stands_for_both() -> None:
    matrix = rtt_from_array([[0.0, 10.0, math.nan], [12.0, 0.0, 7.0], [3.0, math.nan, 0.0]])
    assert matrix.tolist() == [[0.0, 11.0, 3.0], [11.0, 0.0, 7.0], [3.0, 7.0, 0.0]]


@pytest.mark.parametrize(
    ("text", "line", "complaint"),
    [
        ("", None, "the matrix is empty"),
        ("a,b\n", None, "the matrix is empty"),
        ("0,1\n1\n", 2, "this row has 1 values, the first one has 2"),
        ("0,1\n\n1,x\n", 3, "value 2 of this row is 'x', not a number"),
        ("0,1,2\n1,0,2\n", None, "2 × 3: it must have as many rows as columns"),
        ("0,1\n1,0\n", None, "the matrix is 2 × 2, and there are 3 sites"),
        ("a,b\n0,1\n1,0\n", None, "has no row for the site 'c'"),
        ("a,b,c,a\n0,1,1,1\n1,0,1,1\n1,1,0,1\n1,1,1,0\n", None, "names 'a' twice"),
        ("a,b,c\n0,1\n1,0\n", None, "2 × 2, and 3 sites are named"),
        (",a,b,c\na,0,1,2\nc,1,0,2\nb,2,2,0\n", None, "must be those of the first line"),
        ("0,-1,1\n-1,0,1\n1,1,0\n", None, "-1 ms from a to b: a round-trip time is 0 or more; leave the cell empty"),
        ("0,inf,1\n1,0,1\n1,1,0\n", None, "inf ms from a to b: a round-trip time is finite"),
        ("0,120000,1\n1,0,1\n1,1,0\n", None, "is the file in microseconds"),
        ("0,10,20\n0,0,30\n0,0,0\n", None, "10 ms from a to b, and 0 back: if only one half"),
        ('0,"1\n1,0\n', 2, "not comma-separated values"),
    ],
)
def test_mistakes(text: str, line: int | None, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        rtt_from_csv(text, SITES)
    assert caught.value.line == line
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        (np.zeros((2, 3)), "2 × 3"),
        (np.zeros(4), "as many rows as columns"),
        (np.zeros((2, 2, 2)), "2 × 2 × 2"),
        ([[0.0, 1.0], [1.0]], "all equally long"),
        ([["x", "y"], ["z", "w"]], "rows of numbers"),
        ([[0, {}], [1, 0]], "rows of numbers"),
    ],
)
def test_arrays_that_are_no_matrix(values: npt.ArrayLike, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        rtt_from_array(values)


def test_too_many_rows_are_refused_while_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrices, "MAX_SITES", 3)
    with pytest.raises(ConfigError, match="more than 3 rows") as caught:
        rtt_from_csv("0\n" * 5)
    assert caught.value.line == 4
    with pytest.raises(ConfigError, match="more than 3 rows or columns") as caught:
        rtt_from_csv("0,1,2,3\n")
    assert caught.value.line == 1
    with pytest.raises(ConfigError, match="more than 3 rows"):
        rtt_from_array(np.zeros((4, 4)))


def test_the_array_handed_in_stays_as_it_is() -> None:
    values = np.array([[5.0, 10.0], [12.0, 5.0]])
    rtt_from_array(values)
    assert values.tolist() == [[5.0, 10.0], [12.0, 5.0]]


def test_halves() -> None:
    assert one_way_ms(np.array(EXPECTED)).tolist() == [[0.0, 5.0, 10.0], [5.0, 0.0, 15.0], [10.0, 15.0, 0.0]]


def test_text_and_back() -> None:
    matrix = rtt_from_csv("0,10.1234,\n10.1234,0,5\n,5,0\n")
    again = rtt_from_csv(to_csv(matrix, ["x", "y-1", "z z"]), ["z z", "x", "y-1"])
    assert again[1, 2] == 10.123
    assert math.isnan(again[0, 1])
    assert again[0, 2] == 5.0


@pytest.mark.parametrize("name", ["a,b", 'say "a"', "7", "nan", "", "#a"])
def test_names_that_text_cannot_hold(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be the name of a column"):
        to_csv(np.zeros((1, 1)), [name])
    with pytest.raises(ConfigError, match="1 × 1, and there are 2 names"):
        to_csv(np.zeros((1, 1)), ["a", "b"])

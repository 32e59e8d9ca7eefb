"""Filters from Spark: what they become, and which are left to Spark."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
    StringStartsWith,
)

from nearcast.pipeline.filters import Wanted, push

TOPIC, INDEX, TIME = ("topic",), ("index",), ("time",)
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)
NOON_US = 1_777_636_800_000_000


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (EqualTo(TOPIC, "a"), Wanted(topics=frozenset({"a"}))),
        (EqualNullSafe(TOPIC, "a"), Wanted(topics=frozenset({"a"}))),
        (In(TOPIC, ("a", "b")), Wanted(topics=frozenset({"a", "b"}))),
        (StringStartsWith(TOPIC, "a/"), Wanted(prefixes=("a/",))),
        (EqualTo(INDEX, 7), Wanted(start_index=7, end_index=8)),
        (GreaterThan(INDEX, 7), Wanted(start_index=8)),
        (GreaterThanOrEqual(INDEX, 7), Wanted(start_index=7)),
        (LessThan(INDEX, 7), Wanted(end_index=7)),
        (LessThanOrEqual(INDEX, 7), Wanted(end_index=8)),
        (EqualTo(TIME, NOON), Wanted(start_us=NOON_US, end_us=NOON_US + 1)),
        (GreaterThan(TIME, NOON), Wanted(start_us=NOON_US + 1)),
        (LessThan(TIME, NOON), Wanted(end_us=NOON_US)),
        (IsNotNull(TOPIC), Wanted()),
        (IsNotNull(("payload",)), Wanted()),
    ],
)
def test_answered_exactly(given: Filter, wanted: Wanted) -> None:
    assert push([given]) == (wanted, [])


@pytest.mark.parametrize(
    "given",
    [
        Not(EqualTo(TOPIC, "a")),
        StringContains(TOPIC, "a"),
        IsNull(TOPIC),
        IsNotNull(("content_type",)),
        EqualTo(TOPIC, 3),
        In(TOPIC, ("a", None)),
        EqualTo(INDEX, None),
        EqualTo(INDEX, True),
        GreaterThan(INDEX, 1.5),
        LessThan(TIME, NOON.replace(tzinfo=None)),
        EqualTo(("qos",), 1),
        EqualTo(("topic", "nested"), "a"),
        In(INDEX, ()),
    ],
)
def test_left_to_spark(given: Filter) -> None:
    assert push([given]) == (Wanted(), [given])


def test_values_of_in_narrow_and_stay_with_spark() -> None:
    given = In(INDEX, (9, 3, 5))
    assert push([given]) == (Wanted(start_index=3, end_index=10), [given])


def test_several_filters_are_all_meant() -> None:
    wanted, rest = push(
        [GreaterThan(INDEX, 3), GreaterThan(INDEX, 1), LessThan(INDEX, 9), In(TOPIC, ("a", "b")), EqualTo(TOPIC, "b")]
    )
    assert (wanted, rest) == (Wanted(topics=frozenset({"b"}), start_index=4, end_index=9), [])


@pytest.mark.parametrize(
    ("wanted", "filters", "listing"),
    [
        (Wanted(), ["a/#", "b"], ["a/#", "b"]),
        (Wanted(topics=frozenset({"a/x", "c", "a/#", ""})), ["a/#", "b"], ["a/x"]),
        (Wanted(topics=frozenset({"a/\u2028x"})), ["a/#"], ["a/\u2028x"]),
        (Wanted(topics=frozenset(f"a/{number}" for number in range(65))), ["a/#"], ["a/#"]),
        (Wanted(prefixes=("a/b/c",)), ["#", "a/#", "a/b", "+/#", "x/#"], ["a/b/#", "a/b", "+/#", "x/#"]),
        (Wanted(prefixes=("ab",)), ["#"], ["#"]),
        (Wanted(prefixes=("ab/c",)), ["a/#"], ["a/#"]),
        (Wanted(prefixes=("a/+/c",)), ["#"], ["#"]),
    ],
)
def test_the_broker_is_asked_for_no_more_than_needed(wanted: Wanted, filters: list[str], listing: list[str]) -> None:
    assert list(wanted.listing(filters)) == listing


def test_what_is_listed_is_selected_by_all_conditions() -> None:
    wanted = Wanted(topics=frozenset({"a/x", "a/y", "$SYS/x"}), prefixes=("a/x",))
    assert wanted.selects("a/x", ["a/#"])
    assert not wanted.selects("a/y", ["a/#"])
    assert not wanted.selects("a/x", ["b/#"])
    assert not Wanted().selects("$SYS/x", ["#"])

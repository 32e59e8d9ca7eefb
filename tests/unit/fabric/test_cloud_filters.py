"""Filters at the cloud, by example; :mod:`tests.property.test_cloud_filters` has the rest."""

from __future__ import annotations

import zlib

import pytest

from nearcast.fabric.cloud_collapse import Collapsed
from nearcast.fabric.cloud_filters import CloudFilters, disjoint, intersection, shared_intersection


@pytest.mark.parametrize(
    ("one", "other", "common"),
    [
        ("a/b", "a/b", "a/b"),
        ("a/b", "a/c", ""),
        ("a/+", "+/b", "a/b"),
        ("a/#", "a", "a"),
        ("a/#", "+", "a"),
        ("a/+/#", "a", ""),
        ("#", "a/+/c", "a/+/c"),
        ("#", "$SYS/load", ""),
        ("$SYS/#", "$SYS/load", "$SYS/load"),
        ("+/+", "#", "+/+"),
        ("a/b/#", "a/+/c/#", "a/b/c/#"),
        ("/a", "+/a", "/a"),
    ],
)
def test_what_two_filters_have_in_common(one: str, other: str, common: str) -> None:
    assert intersection(one, other) == common
    assert intersection(other, one) == common


def collapsed(filters: dict[str, int]) -> Collapsed:
    made = Collapsed()
    for topic_filter, qos in filters.items():
        made.put(topic_filter, qos)
    return made


def test_what_another_filter_covers_is_left_out() -> None:
    assert collapsed({"a/b": 2, "a/#": 0, "a/+": 1, "b": 1}).tops() == {"a/#": 2, "b": 1}
    assert collapsed({"$share/g/a/b": 1, "a/#": 1}).tops() == {"$share/g/a/b": 1, "a/#": 1}
    assert collapsed({"#": 1, "$SYS/load": 1}).tops() == {"#": 1, "$SYS/load": 1}
    both = collapsed({"+/#": 1, "#": 0})  # the same topics
    assert both.tops() == {"#": 1}
    both.drop("+/#")
    assert both.tops() == {"#": 0}


def test_what_a_filter_covered_is_back_when_it_goes() -> None:
    made = collapsed({"a/b": 2, "a/#": 0, "a/+": 1, "a/+/c": 1})
    made.changed.clear()
    made.drop("a/#")
    assert made.tops() == {"a/+": 2, "a/+/c": 1}
    assert set(made.changed) == {"a/#", "a/+", "a/+/c"}
    made.changed.clear()
    made.put("a/b", 0)
    assert made.tops() == {"a/+": 1, "a/+/c": 1}
    assert set(made.changed) == {"a/+"}


def test_what_overlaps_and_what_it_is_widened_to() -> None:
    made = collapsed({"a/+": 1, "+/b": 2, "c/d": 0, "$share/g/#": 1})
    assert made.overlapping == {"a/+", "+/b"}
    assert disjoint(made.tops()) == {"+/+": 2, "$share/g/#": 1}
    made.changed.clear()
    made.drop("+/b")
    assert made.overlapping == set()
    assert set(made.changed) == {"+/b", "a/+"}


def test_a_shared_subscription_that_a_rule_narrows_stays_a_group_of_its_own() -> None:
    assert shared_intersection("$share/g/cars/#", "cars/#") == "$share/g/cars/#"
    assert shared_intersection("$share/g/bikes/#", "cars/#") == ""
    narrowed = shared_intersection("$share/g/#", "cars/#")
    assert narrowed.startswith("$share/g.")
    assert narrowed.endswith("/cars/#")


@pytest.mark.parametrize(
    ("rules", "at_cloud"),
    [
        (["cars/+/a", "cars/#"], ["$share/g/cars/#"]),
        (["cars/#", "cars/+/a"], ["$share/g/cars/#"]),
        (["cars/1/a", "cars/+/a"], ["$share/{own}/cars/+/a"]),
        (["cars/1/+", "cars/+/a"], ["$share/{own}/cars/+/+"]),
        (["cars/1", "cars/2"], ["$share/{own}/cars/1", "$share/{own}/cars/2"]),
    ],
)
def test_a_message_comes_by_one_of_the_filters_that_a_shared_subscription_has_at_the_cloud(
    rules: list[str], at_cloud: list[str]
) -> None:
    filters = CloudFilters(rules)
    filters.add("$share/g/cars/#", 1)
    own = f"g.{zlib.crc32(b'cars/#'):08x}"
    assert set(filters.wanted()) == {each.replace("{own}", own) for each in at_cloud}
    assert {filters.shared_as(each) for each in filters.wanted()} == {"$share/g/cars/#"}


def test_filters_are_counted() -> None:
    filters = CloudFilters(["cars/#"])
    filters.add("cars/1", 1)
    filters.add("cars/1", 1)
    version = filters.version
    filters.remove("cars/1", 1)
    assert filters.version == version
    assert filters.wanted() == {"cars/1": 1}
    filters.add("cars/1", 2)
    assert filters.wanted() == {"cars/1": 2}
    filters.remove("cars/1", 1)
    filters.remove("cars/1", 2)
    assert filters.wanted() == {}


def test_other_rules_make_other_filters() -> None:
    filters = CloudFilters(["cars/#"])
    filters.add("#", 1)
    filters.add("bikes/1", 1)
    filters.add("$share/g/#", 1)
    shared = shared_intersection("$share/g/#", "cars/#")
    assert filters.wanted() == {"cars/#": 1, shared: 1}
    assert filters.shared_as(shared) == "$share/g/#"
    filters.set_rules(["bikes/+", "cars/1"])
    assert set(filters.wanted()) >= {"bikes/+", "cars/1", "bikes/1"}
    version = filters.version
    filters.set_rules(["bikes/+", "cars/1"])
    assert filters.version == version
    assert filters.shared_as("$share/g/x") == "$share/g/x"

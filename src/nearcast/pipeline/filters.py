"""Filters that Spark hands down: which of them the source answers exactly, and what they say about topics and indexes.

Owns the meaning of a filter on the columns topic, index and time; whatever else is asked stays with Spark. A filter that is
answered here is not looked at again by Spark, so it is either exact or left alone; some that are left alone still narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    StringStartsWith,
)

from nearcast.mqtt.topics import filter_fault, matches
from nearcast.pipeline.options import MAX_FILTERS, microseconds

ALWAYS_THERE = frozenset({"topic", "index", "time", "publisher", "qos", "retain", "payload", "user_properties"})
"""Columns that are never null."""


@dataclass(frozen=True)
class Wanted:
    """What is left to read: topics by name and prefix; records by index and by time, from the first to before the last."""

    topics: frozenset[str] | None = None
    prefixes: tuple[str, ...] = ()
    start_index: int | None = None
    end_index: int | None = None
    start_us: int | None = None
    end_us: int | None = None

    def has_topic(self, topic: str) -> bool:
        return (self.topics is None or topic in self.topics) and all(topic.startswith(prefix) for prefix in self.prefixes)

    def listing(self, filters: Sequence[str]) -> Sequence[str]:
        """Topic filters for asking the broker, as narrow as they can be had. :meth:`selects` decides about what it answers."""
        if self.topics is not None:
            names = sorted(topic for topic in self.topics if _is_name(topic) and any(matches(each, topic) for each in filters))
            if len(names) <= MAX_FILTERS:
                return names
        parents = [prefix.rpartition("/")[0] for prefix in self.prefixes]
        deepest = max((parent for parent in parents if _is_name(parent)), key=len, default="")
        return list(dict.fromkeys(_narrowed(each, deepest) for each in filters)) if deepest else filters

    def selects(self, topic: str, filters: Sequence[str]) -> bool:
        """Whether a topic that the broker named is to be read."""
        return self.has_topic(topic) and any(matches(each, topic) for each in filters)

    def _indexes(self, start: int | None, end: int | None) -> Wanted:
        return replace(self, start_index=_larger(self.start_index, start), end_index=_smaller(self.end_index, end))

    def _times(self, start: int | None, end: int | None) -> Wanted:
        return replace(self, start_us=_larger(self.start_us, start), end_us=_smaller(self.end_us, end))

    def _names(self, topics: Iterable[str]) -> Wanted:
        found = frozenset(topics)
        return replace(self, topics=found if self.topics is None else self.topics & found)


def push(filters: Sequence[Filter]) -> tuple[Wanted, list[Filter]]:
    """What the filters say, and those of them that Spark has to apply itself."""
    wanted = Wanted()
    rest = []
    for each in filters:
        wanted, exact = _apply(wanted, each)
        if not exact:
            rest.append(each)
    return wanted, rest


def _apply(wanted: Wanted, given: Filter) -> tuple[Wanted, bool]:
    attribute: tuple[str, ...] = getattr(given, "attribute", ())
    if len(attribute) != 1:
        return wanted, False
    column = attribute[0]
    if isinstance(given, IsNotNull):
        return wanted, column in ALWAYS_THERE
    if column == "topic":
        return _apply_topic(wanted, given)
    if column == "index":
        return _apply_range(wanted, given, _index, wanted._indexes)
    if column == "time":
        return _apply_range(wanted, given, _time, wanted._times)
    return wanted, False


def _apply_topic(wanted: Wanted, given: Filter) -> tuple[Wanted, bool]:
    if isinstance(given, EqualTo | EqualNullSafe) and isinstance(given.value, str):
        return wanted._names([given.value]), True
    if isinstance(given, In) and all(isinstance(value, str) for value in given.value):
        return wanted._names(given.value), True
    if isinstance(given, StringStartsWith) and isinstance(given.value, str):
        return replace(wanted, prefixes=(*wanted.prefixes, given.value)), True
    return wanted, False


def _apply_range(wanted: Wanted, given: Filter, number: Any, narrowed: Any) -> tuple[Wanted, bool]:
    if isinstance(given, In):
        values = [number(value) for value in given.value]
        if values and None not in values:
            # The ends narrow; the holes between the values are Spark's.
            return narrowed(min(values), max(values) + 1), False
        return wanted, False
    value = number(getattr(given, "value", None))
    if value is None:
        return wanted, False
    if isinstance(given, EqualTo | EqualNullSafe):
        return narrowed(value, value + 1), True
    if isinstance(given, GreaterThan):
        return narrowed(value + 1, None), True
    if isinstance(given, GreaterThanOrEqual):
        return narrowed(value, None), True
    if isinstance(given, LessThan):
        return narrowed(None, value), True
    if isinstance(given, LessThanOrEqual):
        return narrowed(None, value + 1), True
    return wanted, False


def _index(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _time(value: object) -> int | None:
    # A timestamp without a zone is another type in Spark; it would not reach this column without a cast.
    return microseconds(value) if isinstance(value, datetime) and value.tzinfo is not None else None


def _narrowed(topic_filter: str, level: str) -> str:
    """The filter, or a narrower one when it takes all that is below some level above this one."""
    above = topic_filter.removesuffix("#")
    if topic_filter.endswith("#") and "+" not in above and f"{level}/".startswith(above):
        return f"{level}/#"
    return topic_filter


def _is_name(topic: str) -> bool:
    return "+" not in topic and "#" not in topic and not filter_fault(topic, 1 << 16)


def _larger(one: int | None, other: int | None) -> int | None:
    return max(one, other) if one is not None and other is not None else (one if other is None else other)


def _smaller(one: int | None, other: int | None) -> int | None:
    return min(one, other) if one is not None and other is not None else (one if other is None else other)

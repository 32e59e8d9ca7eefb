"""Topic filters inside Spark: which of many filters match which of many topics, without trying every pair.

Filters with their wildcards in the same places have the same *shape*; there are few shapes. For each, a topic has one key (its
levels where the shape has no wildcard), and filters match by an ordinary join on shape and key (MQTT 5.0, section 4.7).
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

from nearcast.errors import ConfigError
from nearcast.mqtt.topics import filter_fault

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

MAX_LEVELS = 200
_LITERAL = "="


def pattern(topic_filter: str) -> str:
    """A regular expression, in the words that Java and Python share, for the topics that a filter matches."""
    fault = filter_fault(topic_filter, MAX_LEVELS)
    if fault:
        raise ConfigError(f"the filter {topic_filter!r} cannot be used: {fault}")
    levels = topic_filter.split("/")
    guard = "(?!\\$)" if levels[0] in ("+", "#") else ""
    text = ""
    for position, level in enumerate(levels):
        if level == "#":
            # The level above is matched too: a/# matches a.
            text += "(?:/.*)?" if position else ".*"
        else:
            text += ("/" if position else "") + ("[^/]*" if level == "+" else re.sub(r"([^A-Za-z0-9_/ ])", r"\\\1", level))
    return f"(?s)^{guard}{text}\\z"


def match(filters: DataFrame, topics: DataFrame) -> DataFrame:
    """Pairs of ``run, filter`` and ``run, topic`` that match, as ``run, filter, topic``."""
    shaped = filters.select("run", "filter").distinct().select("*", *_shape_and_key(F.col("filter")))
    shapes = shaped.select("shape").distinct()
    candidates = (
        topics.select("run", "topic")
        .distinct()
        .crossJoin(F.broadcast(shapes))
        .select("run", "topic", "shape", F.split("topic", "/", -1).alias("t"), F.split("shape", "/", -1).alias("s"))
        .where(
            F.when(F.col("shape").endswith("#"), F.size("t") >= F.size("s") - 1).otherwise(F.size("t") == F.size("s"))
            & ~(F.col("topic").startswith("$") & F.substring("shape", 1, 1).isin("+", "#"))
        )
        .select("run", "topic", "shape", F.expr(_TOPIC_KEY).alias("key"))
    )
    return shaped.join(candidates, ["run", "shape", "key"]).select("run", "filter", "topic")


_TOPIC_KEY = f"array_join(filter(transform(s, (l, i) -> if(l = '{_LITERAL}', t[i], null)), l -> l is not null), '/')"


def _shape_and_key(topic_filter: Column) -> tuple[Column, Column]:
    levels = F.split(topic_filter, "/", -1)
    shape = F.array_join(F.transform(levels, lambda level: F.when(level.isin("+", "#"), level).otherwise(_LITERAL)), "/")
    key = F.array_join(F.filter(levels, lambda level: ~level.isin("+", "#")), "/")
    return shape.alias("shape"), key.alias("key")

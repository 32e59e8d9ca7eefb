"""Latencies as counts in buckets that grow by a hundredth: one pass, merges over groups, every percentile to within 0.5 %.

Owns the buckets and what is read from them. A percentile is the nearest rank: the smallest latency that at least this share of
all does not exceed. It is told as the middle of its bucket, which is at most ``RELATIVE_ERROR`` off; below a microsecond, half
a microsecond. Smallest, largest and mean are exact, and no percentile lies outside of them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql.window import Window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import Column, DataFrame

RELATIVE_ERROR = 0.005
GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
LOWEST_NS = 1_000
PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}

BELOW_ZERO = -1
"""The bucket of deliveries before they were sent: clocks that disagree."""

_LOG_GROWTH = math.log(GROWTH)


def bucket(latency_ns: Column) -> Column:
    """The number of a latency's bucket; null for null."""
    grown = F.floor(F.log(latency_ns / F.lit(float(LOWEST_NS))) / F.lit(_LOG_GROWTH)).cast("int") + 1
    return F.when(latency_ns < 0, BELOW_ZERO).when(latency_ns < LOWEST_NS, 0).otherwise(grown)


def lower_ms(number: Column) -> Column:
    """Where a bucket begins, in milliseconds."""
    return F.when(number <= 0, 0.0).otherwise(F.pow(F.lit(GROWTH), number - 1) * (LOWEST_NS / 1e6))


def middle_ms(number: Column) -> Column:
    """What a bucket's latencies are told as; null for those below zero, which the group's smallest stands for."""
    return (
        F.when(number == BELOW_ZERO, F.lit(None))
        .when(number == 0, LOWEST_NS / 2e6)
        .otherwise(lower_ms(number) * (2 * GROWTH / (1 + GROWTH)))
    )


def distribution(cells: DataFrame, keys: Sequence[str], sums: Sequence[str] = ()) -> DataFrame:
    """Count, mean, percentiles and extremes of each group, from ``bucket, samples, latency_ms, min_ns, max_ns``; ``sums``
    names further columns to add up. Cells without a bucket count for ``sums`` alone."""
    merged = cells.groupBy(*keys, "bucket").agg(
        F.sum("samples").alias("samples"),
        F.sum("latency_ms").alias("latency_ms"),
        F.min("min_ns").alias("min_ns"),
        F.max("max_ns").alias("max_ns"),
        *(F.sum(name).alias(name) for name in sums),
    )
    group = Window.partitionBy(*keys)
    ranked = merged.select(
        "*",
        F.sum("samples").over(group.orderBy("bucket").rowsBetween(Window.unboundedPreceding, 0)).alias("_rank"),
        F.sum("samples").over(group).alias("_all"),
    )
    smallest, largest = F.min("min_ns") / 1e6, F.max("max_ns") / 1e6
    quantiles = []
    for name, share in PERCENTILES.items():
        # A hair less, so that 0.9 of 10 is 9 and not, by the last bit of a double, 10.
        reached = (F.col("samples") > 0) & (F.col("_rank") >= F.ceil(F.col("_all") * share - 1e-9))
        at = F.min(F.when(reached, F.col("bucket")))
        quantiles.append(
            F.when(at == BELOW_ZERO, smallest).otherwise(F.greatest(F.least(middle_ms(at), largest), smallest)).alias(name)
        )
    return ranked.groupBy(*keys).agg(
        F.sum("samples").alias("samples"),
        (F.sum("latency_ms") / F.sum("samples")).alias("mean_ms"),
        smallest.alias("min_ms"),
        *quantiles,
        largest.alias("max_ms"),
        *(F.sum(name).alias(name) for name in sums),
    )

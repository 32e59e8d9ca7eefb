"""Latencies as counts in buckets that grow by a hundredth: one pass, merges over groups, every percentile to within 0.5 %.

Owns the buckets and what is read from them. A percentile is the nearest rank: the smallest latency that at least this share of
all does not exceed. It is told as the middle of its bucket, which is at most ``RELATIVE_ERROR`` off; below a microsecond, half
a microsecond. Smallest, largest and mean are exact, and no percentile lies outside of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

RELATIVE_ERROR = 0.005
GROWTH = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
LOWEST_NS = 1_000
PERCENTILES = {"p50_ms": 0.5, "p90_ms": 0.9, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}

BELOW_ZERO = -1
"""The bucket of deliveries before they were sent: clocks that disagree."""

NO_BUCKET = -2
"""Of deliveries that are no sample: they count for sums alone."""

BUCKETS = 4_096
"""More than there are: the largest latency that 64 bits hold is in bucket 3,683."""

_LOG_GROWTH = math.log(GROWTH)

Numbers = npt.NDArray[Any]


def bucket(latency_ns: Numbers) -> Numbers:
    """The numbers of latencies' buckets."""
    grown = np.floor(np.log(np.maximum(latency_ns, LOWEST_NS) / LOWEST_NS) / _LOG_GROWTH).astype(np.int32) + 1
    return np.where(latency_ns < 0, BELOW_ZERO, np.where(latency_ns < LOWEST_NS, 0, grown))


def lower_ms(number: Numbers) -> Numbers:
    """Where buckets begin, in milliseconds."""
    return np.where(number <= 0, 0.0, GROWTH ** (np.maximum(number, 1) - 1.0) * (LOWEST_NS / 1e6))


def middle_ms(number: Numbers) -> Numbers:
    """What a bucket's latencies are told as."""
    return np.where(number <= 0, LOWEST_NS / 2e6, lower_ms(number) * (2 * GROWTH / (1 + GROWTH)))


def distributions(group: Numbers, groups: int, cells: dict[str, Numbers]) -> dict[str, Numbers]:
    """Count, mean, percentiles and extremes of each group from cells of ``bucket, samples, latency_ms, min_ns, max_ns``; NaN
    for groups without samples. A group may have several cells of one bucket."""
    order = np.lexsort((cells["bucket"], group))
    order = order[cells["samples"][order] > 0]
    group, number, samples = group[order], cells["bucket"][order], cells["samples"][order]
    total = np.bincount(group, samples, groups).astype(np.int64)
    some = total > 0
    upto = np.cumsum(samples)
    base = np.cumsum(total) - total
    smallest, largest = np.full(groups, np.inf), np.full(groups, -np.inf)
    np.minimum.at(smallest, group, cells["min_ns"][order] / 1e6)
    np.maximum.at(largest, group, cells["max_ns"][order] / 1e6)
    smallest[~some] = largest[~some] = np.nan
    latency_ms = np.bincount(group, cells["latency_ms"][order], groups)
    found: dict[str, Numbers] = {"samples": total, "mean_ms": np.full(groups, np.nan), "min_ms": smallest}
    found["mean_ms"][some] = latency_ms[some] / total[some]
    for name, share in PERCENTILES.items():
        # A hair less, so that 0.9 of 10 is 9 and not, by the last bit of a double, 10.
        rank = base[some] + np.maximum(1, np.ceil(total[some] * share - 1e-9)).astype(np.int64)
        at = number[np.searchsorted(upto, rank)]
        told = np.clip(middle_ms(at), smallest[some], largest[some])
        values = np.full(groups, np.nan)
        values[some] = np.where(at == BELOW_ZERO, smallest[some], told)
        found[name] = values
    return found | {"max_ms": largest}

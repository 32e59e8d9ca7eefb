"""What a load process counts, against dumb counterparts."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from nearcast.load.tally import Histogram, Received, Times


@given(st.lists(st.integers(0, 60), max_size=80))
def test_received_agrees_with_a_set(sequences: list[int]) -> None:
    received = Received()
    seen: set[int] = set()
    for sequence in sequences:
        assert received.add(sequence) == (sequence not in seen)
        seen.add(sequence)
    assert received.missing == (max(seen) - min(seen) + 1 - len(seen) if seen else 0)


def test_a_huge_sequence_costs_nothing() -> None:
    received = Received()
    received.add(0)
    received.add(2**63)
    assert received.missing == 2**63 - 1


def test_percentiles_are_right_to_a_hundredth() -> None:
    rng = random.Random(1)
    values = [int(rng.lognormvariate(16, 1.5)) for _ in range(20_000)]
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    for share in (0.01, 0.5, 0.9, 0.99, 0.999):
        exact = float(np.quantile(values, share, method="inverted_cdf"))
        assert abs(histogram.percentile_ns(share) / exact - 1) < 0.01
    times = histogram.times()
    assert times.count == len(values)
    assert times.max_ms is not None
    assert abs(times.max_ms - max(values) / 1e6) < 1e-4
    assert times.mean_ms is not None
    assert abs(times.mean_ms - sum(values) / len(values) / 1e6) < 1e-3


def test_times_below_and_above_all_buckets_are_counted() -> None:
    histogram = Histogram()
    for value in (-5, 0, 10**16):
        histogram.add(value)
    assert histogram.times().count == 3
    assert histogram.percentile_ns(0.5) == 1_000


def test_no_times_at_all() -> None:
    assert Histogram().times() == Times()

"""Progress and verdict over all subscribers of a plan."""

from __future__ import annotations

import numpy as np

from nearcast.bench.deliveries import Deliveries
from nearcast.bench.patterns import Plan
from nearcast.bench.traffic import Sequences


def numbers(*sequences: int) -> Sequences:
    return np.array(sequences, dtype=np.uint64)


def two_publishers(*, group: bool = False) -> Deliveries:
    """Subscriber 0 hears both publishers, subscriber 1 only the second."""
    sources = [[0, 1], [0, 1]] if group else [[0, 1], [1]]
    return Deliveries(Plan([[b"a"], [b"b"]], [["a", "b"], ["b"]], sources, group))


def test_the_slowest_subscriber_that_hears_a_publisher_is_its_progress() -> None:
    deliveries = two_publishers()
    deliveries.checker(0).take(0, numbers(0, 1, 2))
    deliveries.checker(0).take(1, numbers(0, 1))
    assert deliveries.progress() == [3, 0]
    deliveries.checker(1).take(1, numbers(0))
    assert deliveries.progress() == [3, 1]


def test_what_is_written_off_counts_as_progress_and_as_lost() -> None:
    deliveries = two_publishers()
    deliveries.checker(0).take(0, numbers(0, 1, 2))
    deliveries.checker(0).take(1, numbers(0, 1))
    deliveries.write_off([3, 2])
    assert deliveries.progress() == [3, 2]
    assert deliveries.lost([3, 2]) == 2  # both of publisher 1, at subscriber 1


def test_a_group_shares_its_progress() -> None:
    deliveries = two_publishers(group=True)
    deliveries.checker(0).take(0, numbers(0, 2))
    deliveries.checker(1).take(0, numbers(1))
    assert deliveries.progress() == [3, 0]
    assert deliveries.lost([4, 0]) == 1
    assert (deliveries.duplicates, deliveries.order_violations) == (0, 0)


def test_duplicates_and_order_are_summed_over_subscribers() -> None:
    deliveries = two_publishers()
    deliveries.checker(0).take(0, numbers(0, 2, 1))
    deliveries.checker(1).take(1, numbers(0, 0))
    assert (deliveries.duplicates, deliveries.order_violations) == (1, 1)
    group = two_publishers(group=True)
    group.checker(0).take(0, numbers(1, 0))
    group.checker(1).take(0, numbers(1))
    assert (group.duplicates, group.order_violations) == (1, 1)

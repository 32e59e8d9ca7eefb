"""What keeping a bound means, in numbers that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from nearcast.experiments.bounds import Kept, Violation, after_changes, kept, recoveries, share_kept, slots, violations


def topic(*latencies_ms: float, width_s: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """A message in the middle of each slot."""
    return np.arange(len(latencies_ms)) * width_s + width_s / 2, np.array(latencies_ms)


def test_a_slot_is_as_slow_as_its_slowest_delivery() -> None:
    found = slots(np.array([0.01, 0.02, 0.35, 0.11]), np.array([5.0, 7.0, 1.0, 2.0]), 0.1)
    assert found.begin_s == pytest.approx([0.0, 0.1, 0.3])
    assert found.worst_ms.tolist() == [7.0, 2.0, 1.0]
    nothing = slots(np.zeros(0), np.zeros(0))
    assert len(nothing.begin_s) == 0


def test_violations_and_what_belongs_together() -> None:
    found = slots(*topic(10, 50, 60, 10, 10, 50, 10, 70), 1.0)
    assert violations(found, 40.0, 1.0, merge_s=1.0) == [
        Violation(1.0, 3.0, 60.0),
        Violation(5.0, 6.0, 50.0),
        Violation(7.0, 8.0, 70.0),
    ]
    [first, second] = violations(found, 40.0, 1.0, merge_s=1.5)
    assert (first.length_s, second.begin_s, second.end_s) == (2.0, 5.0, 8.0), "one slot between them is no end"
    assert violations(found, 70.0, 1.0) == [], "as slow as the bound is not over it"


def test_the_grace_after_a_change() -> None:
    begin_s = np.arange(10.0)
    assert after_changes(begin_s, [], 2.0, 1.0).tolist() == [False] * 10
    # 3.5 is in slot 3, which counts from its beginning; its grace ends at 5.5, in slot 5.
    flags = after_changes(begin_s, [3.5], 2.0, 1.0)
    assert np.flatnonzero(flags).tolist() == [3, 4, 5]
    flags = after_changes(begin_s, [8.0, 3.5], 2.0, 1.0)
    assert np.flatnonzero(flags).tolist() == [3, 4, 5, 8, 9]


def test_how_much_of_the_time() -> None:
    found = slots(*topic(10, 50, 60, 10, 10, 50), 1.0)
    whole = kept(found, 40.0, [1.0], 2.0, 1.0)
    assert whole == Kept(slots=6, late=3, counted=4, late_counted=1)
    in_all, outside = share_kept([whole, whole])
    assert (in_all, outside) == (50.0, 75.0)
    assert share_kept([]) == (None, None)


def test_how_long_a_change_is_felt() -> None:
    found = [Violation(1.0, 3.5, 50.0), Violation(6.0, 9.0, 50.0), Violation(20.0, 21.0, 50.0)]
    result = recoveries(found, [5.0, 1.0, 8.0, 12.0], 30.0)
    assert [(each.at_s, each.took_s) for each in result] == [
        (1.0, 2.5),
        (5.0, 3.0),  # until the next change: what follows is that one's
        (8.0, 1.0),
        (12.0, 0.0),  # the last violation begins long after
    ]


def test_without_a_change_nothing_is_felt() -> None:
    assert recoveries([Violation(1.0, 3.5, 50.0)], [], 30.0) == []

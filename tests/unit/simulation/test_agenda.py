"""The event queue: order of time, then of planning, compared with a heap."""

from __future__ import annotations

import heapq
import math
import random

import pytest

from nearcast.errors import SimulationLimit
from nearcast.simulation.agenda import KINDS, Agenda


def test_events_come_in_order_of_time_then_of_planning() -> None:
    agenda = Agenda()
    for when, name in ((2.0, "c"), (1.0, "a"), (1.0, "b"), (2.0, "d")):
        agenda.plan(when, 0, name, None, None)
    found = []
    while (entry := agenda.pop(10.0)) is not None:
        found.append(entry[2])
    assert found == ["a", "b", "c", "d"]


def test_nothing_beyond_the_limit_comes() -> None:
    agenda = Agenda()
    agenda.plan(1.0005, 0, "later in the same bucket", None, None)
    agenda.plan(1.0001, 0, "now", None, None)
    entry = agenda.pop(1.0002)
    assert entry is not None
    assert entry[2] == "now"
    assert agenda.pop(1.0002) is None
    assert len(agenda) == 1
    # Planned after its bucket was opened, and before the one that waits there.
    agenda.plan(1.0003, 0, "between", None, None)
    assert [agenda.pop(2.0)[2], agenda.pop(2.0)[2]] == ["between", "later in the same bucket"]  # type: ignore[index]


def test_never_can_be_written_in_many_ways() -> None:
    agenda = Agenda()
    for when in (math.inf, 1e300, 2.0**63, 1e12, 5.0):
        agenda.plan(when, 0, when, None, None)
    found = [agenda.pop(math.inf)[0] for _ in range(5)]  # type: ignore[index]
    assert found == [5.0, 1e12, 2.0**63, 1e300, math.inf]


def test_a_number_says_the_kind() -> None:
    agenda = Agenda()
    number = agenda.plan(0.5, 3, None, None, None)
    entry = agenda.pop(1.0)
    assert entry is not None
    assert (entry[1] // KINDS, entry[1] % KINDS) == (number, 3)


@pytest.mark.parametrize("seed", range(20))
def test_like_a_heap(seed: int) -> None:
    rng = random.Random(seed)
    agenda = Agenda()
    oracle: list[tuple[float, int]] = []
    now = 0.0
    for _ in range(2000):
        if rng.random() < 0.55:
            when = now + rng.choice((0.0, rng.random() * 0.002, rng.random() * 0.1, rng.random() * 100.0))
            heapq.heappush(oracle, (when, agenda.plan(when, 0, None, None, None)))
        else:
            until = now + rng.random() * 0.5
            entry = agenda.pop(until)
            if oracle and oracle[0][0] <= until:
                assert entry is not None
                assert (entry[0], entry[1] // KINDS) == heapq.heappop(oracle)
                now = entry[0]
            else:
                assert entry is None
                now = until
        assert len(agenda) == len(oracle)


def test_the_number_of_planned_events_is_bounded() -> None:
    agenda = Agenda(max_entries=10)
    for _ in range(10):
        agenda.plan(1.0, 0, None, None, None)
    with pytest.raises(SimulationLimit, match="more than 10 events are planned"):
        agenda.plan(1.0, 0, None, None, None)
    agenda.clear()
    assert agenda.pop(10.0) is None

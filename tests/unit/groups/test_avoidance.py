"""Whom not to ask for a while."""

from __future__ import annotations

from nearcast.groups import avoidance
from nearcast.groups.avoidance import Avoidance


def _avoided_s(avoids: Avoidance, name: str, now: float) -> float:
    """How long from now on."""
    seconds = 0.0
    while name in avoids.names(now + seconds):
        seconds += 0.25
    return seconds


def test_each_failure_in_a_row_doubles_the_time() -> None:
    avoids = Avoidance(1.0)
    assert list(avoids.names(0.0)) == []
    now, found = 0.0, []
    for _ in range(9):
        avoids.failed("a", now)
        found.append(_avoided_s(avoids, "a", now))
        now += 100.0
    assert found == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 32.0, 32.0, 32.0]


def test_success_starts_anew() -> None:
    avoids = Avoidance(1.0)
    for _ in range(5):
        avoids.failed("a", 0.0)
    avoids.succeeded("a")
    assert list(avoids.names(0.0)) == []
    avoids.failed("a", 0.0)
    assert _avoided_s(avoids, "a", 0.0) == 1.0


def test_one_that_leads_no_more_has_not_failed() -> None:
    avoids = Avoidance(1.0)
    for now in range(10):
        avoids.is_no_leader("a", now)
        assert _avoided_s(avoids, "a", now) == 0.5


def test_it_remembers_a_bounded_number() -> None:
    avoids = Avoidance(1.0)
    for number in range(2 * avoidance.MAX_NAMES):
        avoids.failed(f"b{number}", 0.0)
    assert len(avoids.names(0.0)) == avoidance.MAX_NAMES
    assert len(avoids._failures) == avoidance.MAX_NAMES

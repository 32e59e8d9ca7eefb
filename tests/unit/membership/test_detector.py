"""Failure detection from several sides, in virtual time."""

from __future__ import annotations

from nearcast.membership.detector import Decisions, Detector


def run(
    detector: Detector, start: float, end: float, *, speaks: tuple[str, ...] = (), answers: bool = False
) -> list[Decisions]:
    """Tick every 50 ms; ``speaks`` name nodes whose links do; with ``answers`` whoever is pinged does."""
    found = []
    now = start
    while now < end:
        for name in speaks:
            detector.spoke(name, now)
        decisions = detector.tick(now)
        if answers:
            for name in decisions.ping:
                detector.heard(name, now + 0.01)
        found.append(decisions)
        now += 0.05
    return found


def names(found: list[Decisions], field: str) -> list[str]:
    return [name for decisions in found for name in getattr(decisions, field)]


def test_a_node_whose_link_speaks_is_left_alone() -> None:
    detector = Detector()
    detector.watch("b", 0.0)
    found = run(detector, 0.0, 20.0, speaks=("b",))
    assert not any(names(found, field) for field in ("ping", "ask", "suspected", "failed"))


def test_a_lost_link_and_no_answer_is_a_failure_within_a_second() -> None:
    detector = Detector()
    detector.watch("b", 0.0)
    detector.link_lost("b", 10.0)
    found = run(detector, 10.0, 10.9)
    assert names(found, "suspected") == ["b"]
    assert names(found, "ask") == ["b"]
    assert len(names(found, "ping")) >= 4
    assert names(found, "failed") == []
    assert names(run(detector, 10.9, 11.2), "failed")[0] == "b"


def test_a_lost_link_of_a_node_that_answers_is_no_failure() -> None:
    detector = Detector()
    detector.watch("b", 0.0)
    detector.link_lost("b", 10.0)
    found = run(detector, 10.0, 60.0, answers=True)
    assert names(found, "failed") == []
    assert len(names(found, "ask")) >= 8, "it has to answer again and again"
    detector.watch("b", 60.0)
    assert names(run(detector, 60.0, 61.0, speaks=("b",)), "cleared") == ["b"]


def test_a_node_that_stops_answering_later_fails_then() -> None:
    detector = Detector()
    detector.watch("b", 0.0)
    detector.link_lost("b", 10.0)
    run(detector, 10.0, 20.0, answers=True)
    assert "b" in names(run(detector, 20.0, 30.0), "failed")


def test_a_silent_link_takes_longer_and_one_word_clears_it() -> None:
    detector = Detector()
    for name in ("b", "c", "d"):
        detector.watch(name, 0.0)
    found = run(detector, 0.0, 5.0, speaks=("c", "d"))
    assert names(found, "suspected") == ["b"]
    detector.spoke("b", 5.0)
    assert names(run(detector, 5.0, 5.2, speaks=("c", "d")), "cleared") == ["b"]
    found = run(detector, 5.2, 14.0, speaks=("c", "d"))
    assert "b" in names(found, "failed")


def test_a_witness_is_enough() -> None:
    detector = Detector()
    for name in ("b", "c", "d"):
        detector.watch(name, 0.0)
    run(detector, 0.0, 4.0, speaks=("c", "d"))
    detector.heard("b", 4.0)
    assert names(run(detector, 4.0, 8.5, speaks=("c", "d")), "failed") == []


def test_when_most_fall_silent_at_once_the_listener_is_deaf() -> None:
    detector = Detector()
    for name in ("a", "b", "c", "d"):
        detector.watch(name, 0.0)
    found = run(detector, 0.0, 60.0)
    assert names(found, "failed") == []
    assert set(names(found, "suspected")) == {"a", "b", "c", "d"}


def test_links_that_are_lost_as_well_change_nothing_until_somebody_is_heard() -> None:
    detector = Detector()
    for name in ("a", "b", "c", "d"):
        detector.watch(name, 0.0)
    run(detector, 0.0, 10.0)
    for name in ("a", "b", "c", "d"):
        detector.link_lost(name, 10.0)
    assert names(run(detector, 10.0, 60.0), "failed") == []
    detector.watch("d", 60.0)
    assert set(names(run(detector, 60.0, 66.0, speaks=("d",)), "failed")) == {"a", "b", "c"}


def test_a_lost_link_counts_while_others_are_only_silent() -> None:
    detector = Detector()
    for name in ("a", "b", "c", "d"):
        detector.watch(name, 0.0)
    run(detector, 0.0, 10.0, speaks=("d",))
    detector.link_lost("a", 10.0)
    assert set(names(run(detector, 10.0, 12.0, speaks=("d",)), "failed")) == {"a"}


def test_deadlines_say_when_it_wants_to_be_asked() -> None:
    detector = Detector()
    assert detector.next_deadline() == float("inf")
    detector.watch("b", 0.0)
    assert detector.next_deadline() == 3.0
    detector.link_lost("b", 1.0)
    assert detector.next_deadline() <= 1.0
    detector.tick(1.0)
    assert detector.next_deadline() == 1.2
    detector.forget("b")
    assert detector.next_deadline() == float("inf")

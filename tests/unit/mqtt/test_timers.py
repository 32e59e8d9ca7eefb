"""Planned looks at connections and sessions."""

from __future__ import annotations

from nearcast.mqtt.effects import Effects
from nearcast.mqtt.session import Session
from nearcast.mqtt.timers import FURTHEST_SECONDS, Timers


def session(name: str) -> Session:
    return Session(name, 1, Effects(False), 10, 10)


def test_the_soonest_comes_first() -> None:
    timers = Timers()
    first, second, third = session("1"), session("2"), session("3")
    timers.schedule(second, 20.0, 0.0)
    timers.schedule(first, 10.0, 0.0)
    timers.schedule(third, 20.0, 0.0)
    assert timers.next_deadline() == 10.0
    assert timers.due(9.9) == []
    assert timers.due(25.0) == [first, second, third]
    assert timers.next_deadline() == float("inf")


def test_an_earlier_look_replaces_a_later_one_and_a_later_one_changes_nothing() -> None:
    timers = Timers()
    subject = session("1")
    timers.schedule(subject, 20.0, 0.0)
    timers.schedule(subject, 30.0, 0.0)
    assert len(timers) == 1
    timers.schedule(subject, 10.0, 0.0)
    assert timers.due(15.0) == [subject]
    assert timers.due(25.0) == [], "the look that was replaced wakes nobody"


def test_no_look_is_planned_far_ahead() -> None:
    timers = Timers()
    subject = session("1")
    timers.schedule(subject, 1e9, 100.0)
    assert timers.next_deadline() == 100.0 + FURTHEST_SECONDS
    assert timers.due(100.0 + FURTHEST_SECONDS) == [subject]
    timers.schedule(subject, 1e9, 500.0)
    assert len(timers) == 1

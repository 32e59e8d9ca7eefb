"""Backoff grows, stays bounded, and spreads clients."""

from __future__ import annotations

import random

from nearcast.mqtt import reasons
from nearcast.mqtt.client_events import Disconnected
from nearcast.mqtt.client_reconnection import STABLE_SECONDS, Backoff, Reconnection, is_final, is_temporary


def test_delays_double_up_to_the_bound() -> None:
    backoff = Backoff(initial_seconds=1.0, max_seconds=10.0)
    rng = random.Random(1)
    for attempt, ceiling in enumerate((1.0, 2.0, 4.0, 8.0, 10.0, 10.0)):
        delays = [backoff.delay_seconds(attempt, rng) for _ in range(200)]
        assert ceiling / 2 <= min(delays) < ceiling * 0.6
        assert ceiling * 0.9 < max(delays) <= ceiling


def test_many_attempts_do_not_overflow() -> None:
    assert Backoff(max_seconds=30.0).delay_seconds(100_000, random.Random(1)) <= 30.0


def test_a_stable_connection_starts_the_delays_anew() -> None:
    attempts = Reconnection(Backoff(initial_seconds=1.0, max_seconds=100.0), random.Random(1))
    for ceiling in (1.0, 2.0, 4.0):
        assert ceiling / 2 <= attempts.next_delay_seconds() <= ceiling
    attempts.connected(50.0)
    attempts.lost(50.0 + STABLE_SECONDS / 2)
    assert 4.0 <= attempts.next_delay_seconds() <= 8.0
    attempts.connected(60.0)
    attempts.lost(60.0 + STABLE_SECONDS)
    assert attempts.next_delay_seconds() <= 1.0


def test_another_broker_is_tried_at_once_and_then_like_any() -> None:
    attempts = Reconnection(Backoff(initial_seconds=1.0), random.Random(1))
    assert attempts.next_delay_seconds(elsewhere=True) == 0.0
    assert attempts.next_delay_seconds(elsewhere=True) > 0.0


def test_what_is_worth_another_attempt() -> None:
    assert is_final(Disconnected(reasons.SESSION_TAKEN_OVER, "", True, None))
    assert not is_final(Disconnected(reasons.SESSION_TAKEN_OVER, "", False, None))
    assert not is_final(Disconnected(None, "", False, None))
    assert is_temporary(reasons.SERVER_BUSY)
    assert not is_temporary(reasons.NOT_AUTHORIZED)

"""Backoff grows, stays bounded, and spreads clients."""

from __future__ import annotations

import random

from nearcast.client.reconnection import Backoff


def test_delays_double_up_to_the_bound() -> None:
    backoff = Backoff(initial_seconds=1.0, max_seconds=10.0)
    rng = random.Random(1)
    for attempt, ceiling in enumerate((1.0, 2.0, 4.0, 8.0, 10.0, 10.0)):
        delays = [backoff.delay_seconds(attempt, rng) for _ in range(200)]
        assert ceiling / 2 <= min(delays) < ceiling * 0.6
        assert ceiling * 0.9 < max(delays) <= ceiling


def test_many_attempts_do_not_overflow() -> None:
    assert Backoff(max_seconds=30.0).delay_seconds(100_000, random.Random(1)) <= 30.0

"""Bytes put in order again, and the pace of a stream, each by itself."""

from __future__ import annotations

import random

import pytest

from nearcast.simulation.pacing import MAX_TIMEOUT_S, MIN_TIMEOUT_S, Pace
from nearcast.simulation.segments import Reassembly

SEGMENT = 1000


@pytest.mark.parametrize("seed", range(50))
def test_any_order_any_division_any_repetition(seed: int) -> None:
    rng = random.Random(seed)
    whole = rng.randbytes(5000)
    segments: list[tuple[int, bytes]] = []
    for _ in range(3):  # divided three times, differently, as retransmissions may
        position = 0
        while position < len(whole):
            size = rng.randrange(1, 400)
            segments.append((position, whole[position : position + size]))
            position += size
    rng.shuffle(segments)
    arrived = Reassembly(10_000)
    assert b"".join(arrived.add(sequence, data) for sequence, data in segments) == whole
    assert arrived.expected == len(whole)


def test_early_segments_are_bounded() -> None:
    arrived = Reassembly(3)
    for sequence in range(1, 10):
        assert arrived.add(sequence, b"x") == b""
    assert arrived.add(0, b"0") == b"0xxx"
    arrived.add(100, b"late")
    arrived.clear()
    assert arrived.add(4, bytes(96)) == bytes(96)


class TestPace:
    def test_slow_start_then_a_segment_per_round_trip(self) -> None:
        pace = Pace(SEGMENT)
        assert pace.window_bytes == 10 * SEGMENT
        for _ in range(10):
            pace.grow(SEGMENT)
        assert pace.window_bytes == 20 * SEGMENT
        pace.lost_one(pace.window_bytes)
        assert pace.window_bytes == 10 * SEGMENT
        for _ in range(10):
            pace.grow(SEGMENT)
        assert 10 * SEGMENT + 500 < pace.window_bytes <= 11 * SEGMENT

    def test_after_silence_it_begins_again(self) -> None:
        pace = Pace(SEGMENT)
        pace.heard_nothing(40 * SEGMENT)
        assert pace.window_bytes == SEGMENT
        for _ in range(100):
            pace.grow(SEGMENT)
        assert 20 * SEGMENT < pace.window_bytes < 30 * SEGMENT

    def test_the_timeout_follows_the_round_trips(self) -> None:
        pace = Pace(SEGMENT)
        assert pace.wait_s() == 1.0
        for _ in range(50):
            pace.measured(0.1)
        assert pace.wait_s() == pytest.approx(0.1 + MIN_TIMEOUT_S)
        pace.measured(1.0)
        assert pace.wait_s() > 1.0

    def test_it_doubles_up_to_a_bound(self) -> None:
        pace = Pace(SEGMENT)
        waits = []
        for _ in range(30):
            waits.append(pace.wait_s())
            pace.wait_longer()
        assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
        assert waits[-1] == MAX_TIMEOUT_S

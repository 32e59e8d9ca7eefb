"""Bandwidth and order for packets that are announced out of turn, in literal cases; the oracles are in tests/property."""

from __future__ import annotations

import pytest

from nearcast.network.queueing import REFUSED, Sequencer, Transmitter

FOREVER = 1e9


def test_packets_wait_for_the_ones_before_them() -> None:
    transmitter = Transmitter()
    assert transmitter.book(1.0, 2.0, FOREVER, 1.0) == 3.0
    assert transmitter.book(1.0, 2.0, FOREVER, 1.0) == 5.0
    assert transmitter.book(4.0, 2.0, FOREVER, 4.0) == 7.0
    assert transmitter.book(10.0, 2.0, FOREVER, 10.0) == 12.0
    assert transmitter.busy_until() == 12.0


def test_a_packet_that_would_wait_too_long_is_refused_and_books_nothing() -> None:
    transmitter = Transmitter()
    assert transmitter.book(0.0, 5.0, 3.0, 0.0) == 5.0
    assert transmitter.book(1.0, 1.0, 3.0, 1.0) == REFUSED
    assert transmitter.book(2.0, 1.0, 3.0, 2.0) == 6.0  # waits exactly 3


def test_a_packet_heard_of_later_may_be_there_earlier() -> None:
    transmitter = Transmitter()
    assert transmitter.book(100.0, 10.0, FOREVER, 0.0) == 110.0
    assert transmitter.book(2.0, 10.0, FOREVER, 1.0) == 12.0
    # Between the two, and next to one of them.
    assert transmitter.book(11.0, 10.0, FOREVER, 1.0) == 22.0
    assert transmitter.book(90.0, 10.0, FOREVER, 1.0) == 100.0


def test_a_packet_uses_the_gap_and_goes_on_behind_what_is_booked() -> None:
    transmitter = Transmitter()
    assert transmitter.book(100.0, 10.0, FOREVER, 0.0) == 110.0
    assert transmitter.book(120.0, 10.0, FOREVER, 0.0) == 130.0
    # 5 before 100, 10 between 110 and 120, 3 from 130 on.
    assert transmitter.book(95.0, 18.0, FOREVER, 0.0) == 133.0
    # All is one busy time from 95 on.
    assert transmitter.book(95.0, 1.0, FOREVER, 0.0) == 134.0
    assert transmitter.book(94.5, 1.0, FOREVER, 0.0) == 134.5


def test_waiting_counts_also_in_pieces() -> None:
    transmitter = Transmitter()
    transmitter.book(100.0, 10.0, FOREVER, 0.0)
    assert transmitter.book(95.0, 8.0, 9.0, 0.0) == REFUSED
    assert transmitter.book(95.0, 8.0, 10.0, 0.0) == 113.0


def test_what_is_still_being_sent_is_not_forgotten() -> None:
    transmitter = Transmitter()
    transmitter.book(5.0, 4.0, FOREVER, 0.0)
    transmitter.book(20.0, 1.0, FOREVER, 0.0)
    transmitter.book(40.0, 1.0, FOREVER, 8.5)
    assert transmitter.book(8.5, 1.0, FOREVER, 8.5) == 10.0


def test_a_busy_transmitter_forgets_what_is_past() -> None:
    transmitter = Transmitter()
    for step in range(10_000):
        now = float(step)
        transmitter.book(now + 5.0, 0.1, FOREVER, now)
        transmitter.book(now + 2.5, 0.1, FOREVER, now)
    assert len(transmitter._starts) < 200


def test_later_packets_do_not_overtake() -> None:
    sequencer = Sequencer()
    assert sequencer.order(0.0, 10.0, 0.0) == 10.0
    assert sequencer.order(1.0, 5.0, 1.0) == 10.0
    assert sequencer.order(2.0, 12.0, 2.0) == 12.0


def test_a_packet_heard_of_later_is_put_between() -> None:
    sequencer = Sequencer()
    assert sequencer.order(100.0, 110.0, 0.0) == 110.0
    assert sequencer.order(2.0, 12.0, 1.0) == 12.0
    assert sequencer.order(3.0, 9.0, 1.0) == 12.0
    assert sequencer.order(50.0, 200.0, 1.0) == 110.0
    assert sequencer.order(101.0, 105.0, 1.0) == 110.0


def test_what_is_past_still_holds_back_what_follows() -> None:
    sequencer = Sequencer()
    sequencer.order(1.0, 50.0, 0.0)
    sequencer.order(100.0, 110.0, 0.0)
    sequencer.order(101.0, 111.0, 2.0)  # forgets the first two as places, not as a bound
    assert sequencer.order(3.0, 4.0, 3.0) == 50.0


def test_what_set_out_just_now_holds_back_what_is_heard_of_later() -> None:
    sequencer = Sequencer()
    sequencer.order(1.0, 50.0, 1.0)
    sequencer.order(100.0, 110.0, 1.0)
    assert sequencer.order(3.0, 4.0, 3.0) == 50.0


def test_a_busy_sequencer_forgets_what_is_past() -> None:
    sequencer = Sequencer()
    for step in range(10_000):
        now = float(step)
        sequencer.order(now + 5.0, now + 6.0, now)
        sequencer.order(now + 2.5, now + 3.0, now)
    assert len(sequencer._departures) < 200


@pytest.mark.parametrize("count", [1, 63, 64, 65, 1_000])
def test_equal_times_keep_the_order_of_hearing(count: int) -> None:
    sequencer = Sequencer()
    sequencer.order(10.0, 30.0, 0.0)
    arrivals = [sequencer.order(5.0, 20.0 - index * 0.01, 0.0) for index in range(count)]
    assert arrivals == [20.0] * count

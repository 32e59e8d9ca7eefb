"""Connect rate per source address."""

from __future__ import annotations

import pytest

from nearcast.clock import ManualClock
from nearcast.serving import admission
from nearcast.serving.admission import ConnectRate, is_loopback, source_of


def test_burst_then_rate() -> None:
    clock = ManualClock()
    rate = ConnectRate(clock, per_second=2, burst=3, exempt_loopback=True)
    assert [rate.admits("10.0.0.1") for _ in range(5)] == [True, True, True, False, False]
    assert rate.admits("10.0.0.2"), "other addresses are not concerned"
    clock.advance(0.5)
    assert [rate.admits("10.0.0.1") for _ in range(2)] == [True, False]
    clock.advance(100)
    assert [rate.admits("10.0.0.1") for _ in range(4)] == [True, True, True, False]


def test_loopback_can_be_exempt_or_not() -> None:
    exempt = ConnectRate(ManualClock(), per_second=1, burst=1, exempt_loopback=True)
    assert all(exempt.admits("127.0.0.1") for _ in range(10))
    assert all(exempt.admits("") for _ in range(10))
    held = ConnectRate(ManualClock(), per_second=1, burst=1, exempt_loopback=False)
    assert [held.admits("127.0.0.1") for _ in range(2)] == [True, False]


def test_zero_turns_it_off() -> None:
    rate = ConnectRate(ManualClock(), per_second=0, burst=1, exempt_loopback=False)
    assert all(rate.admits("10.0.0.1") for _ in range(100))


def test_full_buckets_are_forgotten() -> None:
    clock = ManualClock()
    rate = ConnectRate(clock, per_second=10, burst=5, exempt_loopback=True)
    for number in range(50):
        rate.admits(f"10.0.0.{number}")
    assert len(rate) == 50
    clock.advance(1)
    rate.sweep()
    assert len(rate) == 0


def test_the_table_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SOURCES", 3)
    clock = ManualClock()
    rate = ConnectRate(clock, per_second=1, burst=5, exempt_loopback=True)
    assert [rate.admits(f"10.0.0.{number}") for number in range(5)] == [True, True, True, False, False]
    assert rate.admits("10.0.0.1")
    clock.advance(10)
    assert rate.admits("10.0.0.9"), "full buckets made room"


def test_sources() -> None:
    assert source_of("10.1.2.3") == "10.1.2.3"
    assert source_of("2001:db8:1:2:aaaa::1") == source_of("2001:db8:1:2:bbbb::2")
    assert source_of("2001:db8:1:2::1") != source_of("2001:db8:1:3::1")
    assert source_of("::ffff:10.1.2.3") == "10.1.2.3"
    assert source_of("fe80::1%eth0") == source_of("fe80::2")
    assert source_of("not:an:address") == "not:an:address"


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", ""])
def test_loopback(address: str) -> None:
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["10.0.0.1", "128.0.0.1", "2001:db8::1", "::", "0.0.0.0", "?"])
def test_not_loopback(address: str) -> None:
    assert not is_loopback(address)

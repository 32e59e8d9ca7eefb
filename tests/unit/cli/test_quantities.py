"""Sizes, durations, counts and times as people write and read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
import typer

from nearcast.cli import quantities as q

NOW = datetime(2026, 11, 16, 9, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512", 512),
        ("512B", 512),
        ("1k", 1_000),
        ("10GB", 10_000_000_000),
        ("10 gb", 10_000_000_000),
        ("1.5 MB", 1_500_000),
        ("2GiB", 2_147_483_648),
        ("1_000_000", 1_000_000),
        ("1,000 kB", 1_000_000),
        ("3T", 3_000_000_000_000),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert q.parse_size(text) == size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("7d", 604_800),
        ("36h", 129_600),
        ("1h30m", 5_400),
        ("1h 30min", 5_400),
        ("2 weeks", 1_209_600),
        ("1 day 1 second", 86_401),
        ("500ms", 0.5),
        ("0.25 h", 900),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    assert q.parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(("text", "count"), [("1000", 1_000), ("10k", 10_000), ("2.5M", 2_500_000), ("1_000", 1_000)])
def test_counts(text: str, count: int) -> None:
    assert q.parse_count(text) == count


@pytest.mark.parametrize("text", ["", "x", "10XB", "-5", "1..2", "GB", "10ib", "1h30", "5 parsecs", "1e9", "nan", "inf"])
def test_what_cannot_be_understood_is_refused_with_examples(text: str) -> None:
    for parse, example in ((q.parse_size, "10GB"), (q.parse_duration, "7d"), (q.parse_count, "10k")):
        with pytest.raises(typer.BadParameter, match=example):
            parse(text)


def test_times() -> None:
    assert q.parse_time("2026-11-16T09:30:00Z", NOW) == NOW
    assert q.parse_time("2026-11-16T10:30:00+01:00", NOW) == NOW
    local = q.parse_time("2026-11-16 09:30", NOW)
    assert local is not None
    assert local.astimezone().strftime("%Y-%m-%d %H:%M") == "2026-11-16 09:30"
    assert q.parse_time("10m", NOW) == NOW - timedelta(minutes=10)
    assert q.parse_time("-1h30m", NOW) == NOW - timedelta(minutes=90)
    assert q.parse_time("2d ago", NOW) == NOW - timedelta(days=2)
    assert q.parse_time("yesterday", NOW) is None
    assert q.parse_time("1000y", NOW) == datetime(1970, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("size", "shown"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (12_345, "12.3 kB"),
        (999_600, "1 MB"),
        (1.2e9, "1.2 GB"),
        (5e15, "5,000 TB"),
    ],
)
def test_sizes_shown(size: float, shown: str) -> None:
    assert q.show_size(size) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.5, "500 ms"),
        (59.9, "59.9 s"),
        (60, "1 min"),
        (90, "1 min 30 s"),
        (3_600, "1 h"),
        (5_400, "1 h 30 min"),
        (604_800, "7 d"),
        (648_000, "7 d 12 h"),
    ],
)
def test_durations_shown(seconds: float, shown: str) -> None:
    assert q.show_duration(seconds) == shown
    if seconds >= 60:
        assert q.parse_duration(shown) == seconds


@pytest.mark.parametrize(
    ("rate", "shown"), [(0, "0/s"), (1_234.5, "1,234/s"), (2.5, "2.5/s"), (0.5, "30/min"), (0.01, "36/h"), (1e-5, "0.864/d")]
)
def test_rates_shown(rate: float, shown: str) -> None:
    assert q.show_rate(rate) == shown


def test_moments_shown() -> None:
    micros = int(NOW.timestamp() * 1_000_000)
    local = NOW.astimezone()
    assert q.show_time(micros + 1_500, NOW) == local.strftime("%H:%M:%S.001")
    assert q.show_time(micros - 86_400_000_000, NOW).endswith(local.strftime(" %H:%M:%S.000"))
    assert q.show_ago(micros, NOW) == "just now"
    assert q.show_ago(micros + 5_000_000, NOW) == "just now", "clocks differ"
    assert q.show_ago(micros - 90_000_000, NOW) == "1 min 30 s ago"

"""What the demo counts."""

from __future__ import annotations

from nearcast.cli.demo_statistics import DemoStatistics, percentile, sparkline


def test_loss_duplicates_rates_and_latency() -> None:
    statistics = DemoStatistics(started=10.0)
    statistics.sent = 4
    for number, latency_ms in ((0, 1.0), (1, 2.0), (1, 2.5), (2, 3.0)):
        statistics.on_received(number, latency_ms, f"#{number}")
    sample = statistics.sample(now=11.0)
    assert (sample.received, sample.duplicated, sample.rate, sample.lost) == (3, 1, 3.0, 0)
    assert (sample.p50_ms, sample.p99_ms) == (2.0, 3.0)
    assert statistics.sample(now=12.0).lost == 1, "overdue by now"
    statistics.finished = True
    total = statistics.total(now=13.0)
    assert (total.lost, total.rate) == (1, 1.0)
    assert total.as_dict()["latency_p50_ms"] == 2.0
    complete = [statistics.complete]
    statistics.on_received(3, 9.0, "#3")
    complete.append(statistics.complete)
    assert complete == [False, True]
    assert statistics.total(now=14.0).lost == 0


def test_percentiles_are_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert percentile(values, 0.50) == 50.0
    assert percentile(values, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) is None


def test_sparkline() -> None:
    assert sparkline([0.0, 5.0, 10.0]) == "▁▅█"
    assert sparkline([0.0, 0.0]) == "▁▁"
    assert sparkline([]) == ""

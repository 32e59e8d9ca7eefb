"""The benchmark of the topic log, on little data: every bar is measured and judged."""

from __future__ import annotations

from pathlib import Path

from nearcast.bench.topic_log import Bar, measure
from nearcast.broker.topic_files import TopicFiles, open_log
from nearcast.topiclog.log import TopicLog


def opened(directory: Path, segment_bytes: int) -> tuple[TopicFiles, TopicLog]:
    directory.mkdir(exist_ok=True)
    return open_log(directory, segment_bytes=segment_bytes, max_topics=1_000)


def test_every_bar_is_measured_and_nothing_is_left(tmp_path: Path) -> None:
    bars = list(measure(tmp_path, opened, rounds=1, round_bytes=2 << 20, open_bytes=3 << 20, segment_bytes=1 << 20))
    assert [bar.unit for bar in bars] == ["records/s"] * 2 + ["MB/s"] * 2 + ["records/s", "records/s", "µs"] * 2 + ["s"]
    assert all(bar.value > 0 for bar in bars)
    assert all((bar.ratio or 0) > 0 for bar in bars[:4])
    assert list(tmp_path.iterdir()) == []


def test_a_bar_is_met_by_the_lower_of_two() -> None:
    assert Bar(name="", unit="", value=80, bar=100, rounds=[80], disk=110, alternative=77).is_met
    assert not Bar(name="", unit="", value=80, bar=100, rounds=[80]).is_met
    assert Bar(name="", unit="", value=80, bar=100, higher_is_better=False, rounds=[80]).is_met

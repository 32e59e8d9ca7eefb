"""The threshold of a profile, from points that are made up; and one short load against a broker."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nearcast.bench.brokers import BROKERS
from nearcast.bench.paced import Workload, plan_of, run_paced
from nearcast.bench.profile import LADDER, MOST_IN, SHAPES, Point, evaluate, ladder, point_of
from nearcast.bench.profile_report import profile_lines, profile_table
from nearcast.errors import ConfigError


def point(out_rate: float, p95_ms: float, *, consumers: int = 1, kept_up: bool = True, late: float = 0.0) -> Point:
    workload = Workload(topics=1, producers=1, consumers=consumers, payload_bytes=100, rate=out_rate / consumers)
    return Point(
        workload=workload,
        out_rate=out_rate if kept_up else 0.6 * out_rate,
        p50_ms=p95_ms / 2,
        p95_ms=p95_ms,
        p99_ms=2 * p95_ms,
        cpu_share=0.5,
        kept_up=kept_up,
        late_share=late,
    )


def test_the_threshold_is_the_highest_good_rate_below_every_bad_one() -> None:
    points = [
        point(1_000, 1),
        point(8_000, 2),
        point(16_000, 9),
        point(4_000, 1.5, consumers=8),
        point(32_000, 3, consumers=8),
    ]
    profile = evaluate("nearcast", 0, 5.0, points)
    assert profile.threshold == 8_000
    assert profile.out_rate_limit == 6_400
    assert profile.reached


def test_a_broker_that_does_not_keep_up_is_bad_whatever_its_latency() -> None:
    profile = evaluate("nearcast", 0, 5.0, [point(1_000, 1), point(2_000, 1, kept_up=False, late=0.5), point(4_000, 1)])
    assert profile.threshold == 1_000


def test_what_the_generator_sent_late_says_nothing() -> None:
    profile = evaluate("nearcast", 0, 5.0, [point(1_000, 1), point(2_000, 50, late=0.2), point(4_000, 1)])
    assert profile.threshold == 4_000
    assert not profile.reached
    assert any("1 loads were sent late" in line for line in profile_lines(profile))


def test_without_a_good_point_there_is_no_threshold() -> None:
    profile = evaluate("nearcast", 0, 5.0, [point(1_000, 9), point(2_000, 1)])
    assert profile.threshold is None
    assert profile.out_rate_limit is None
    assert "no threshold" in profile_lines(profile)[-1]


def test_the_output_rate_is_found_to_be_what_latency_goes_with() -> None:
    points = [
        point(rate, 0.5 + rate / 10_000, consumers=consumers)
        for rate, consumers in ((1_000, 8), (2_000, 1), (4_000, 4), (8_000, 16), (16_000, 2), (32_000, 8), (64_000, 4))
    ]
    found = evaluate("nearcast", 0, 5.0, points).correlations
    assert next(iter(found)) == "output messages/s"
    assert found["output messages/s"] == 1.0
    assert found["topics"] == 0.0  # there is one in every load
    assert evaluate("nearcast", 0, 5.0, points[:2]).correlations == {}


def test_what_is_printed() -> None:
    profile = evaluate("nearcast", 1, 5.0, [point(1_000, 1), point(8_000, 2), point(16_000, 9)])
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(profile_table(profile))
    for line in profile_lines(profile):
        console.print(line)
    text = console.export_text()
    assert "p95 above 5 ms" in text
    assert "8,000 messages/s passed on with p95 within 5 ms (QoS 1)" in text
    assert "[controller.placement]\nout_rate_limit = 6400" in text


def test_ladders_climb_and_ask_no_more_of_the_generator_than_it_can() -> None:
    for shape in SHAPES:
        rates = [workload.out_rate for workload in ladder(shape)]
        assert rates == sorted(rates)
        assert set(rates) <= set(LADDER)
        assert len(rates) >= 5
        assert all(workload.in_rate <= MOST_IN and workload.rate >= 1.0 for workload in ladder(shape))


def test_every_topic_has_its_own_producers_and_consumers() -> None:
    plan = plan_of(Workload(topics=2, producers=2, consumers=3, payload_bytes=100, rate=10))
    assert plan.topics[0] == plan.topics[1] != plan.topics[2] == plan.topics[3]
    assert plan.sources == [[0, 1]] * 3 + [[2, 3]] * 3
    assert plan.copies == [3, 3, 3, 3]


@pytest.mark.parametrize("qos", [0, 1])
def test_a_paced_load_delivers_everything_and_times_it(qos: int) -> None:
    workload = Workload(topics=3, producers=2, consumers=2, payload_bytes=200, rate=40)
    [broker] = [each for each in BROKERS if each.name == "nearcast"]
    with broker.running() as running:
        measured = run_paced(running.address, workload, qos=qos, seconds=0.5, broker_pid=running.pid)
    assert measured.load.lost == measured.load.duplicates == measured.load.order_violations == measured.load.unexpected == 0
    assert measured.load.delivered_total == 2 * measured.load.published_total > 0
    assert 0 < measured.p50_ms <= measured.p95_ms <= measured.p99_ms
    assert point_of(workload, measured).workload is workload


def test_a_load_without_anybody_is_refused() -> None:
    with pytest.raises(ConfigError):
        run_paced(("127.0.0.1", 1), Workload(topics=0, producers=1, consumers=1, payload_bytes=100, rate=1), qos=0, seconds=1)


def test_of_several_tries_the_one_that_says_most_about_the_broker_counts() -> None:
    stalled, late, slow, good = point(1_000, 1, kept_up=False), point(1_000, 1, late=0.2), point(1_000, 9), point(1_000, 2)
    assert min([stalled, late, slow, good], key=Point.rank) is good
    assert min([stalled, late, slow], key=Point.rank) is slow
    assert min([stalled, late], key=Point.rank) is late

"""Random faults keep what their description promises, for every seed."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.drawing import draw
from nearcast.scenario.events import ChangeAccess, Crash, Cut, Event, Kill, Pause, RandomFaults, SkewClock

HOSTS = [f"h{number}" for number in range(10)]
ALL = RandomFaults(
    kills_per_minute=6,
    crashes_per_minute=6,
    pauses_per_minute=6,
    cuts_per_minute=6,
    slow_links_per_minute=6,
    skews_per_minute=6,
)


def lasting_s(event: Event) -> float:
    if isinstance(event, Kill | Crash):
        assert event.restart_after_s is not None
        return event.restart_after_s
    assert isinstance(event, Pause | Cut | ChangeAccess)
    assert event.for_s is not None
    return event.for_s


@pytest.mark.parametrize("seed", range(20))
def test_every_fault_ends_before_the_quiet_time(seed: int) -> None:
    events = draw(ALL, HOSTS, 100.0, Random(seed))
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    for event in events:
        if not isinstance(event, SkewClock):
            assert event.at_s >= 0
            assert event.at_s + lasting_s(event) <= 90
            assert 0.1 - 1e-5 <= lasting_s(event) <= 10
        assert event.at_s <= 90


@pytest.mark.parametrize("seed", range(20))
def test_faults_that_would_undo_each_other_do_not_overlap(seed: int) -> None:
    events = draw(RandomFaults(kills_per_minute=40, crashes_per_minute=40, pauses_per_minute=40), HOSTS, 100.0, Random(seed))
    until: dict[str, float] = {}
    for event in events:
        assert isinstance(event, Kill | Crash | Pause)
        assert event.at_s > until.get(event.host, -1)
        until[event.host] = event.at_s + lasting_s(event)


def test_clocks_are_set_right_again() -> None:
    events = draw(RandomFaults(skews_per_minute=60, max_skew_s=3), HOSTS, 300.0, Random(5))
    assert len(events) > 100
    ahead: dict[str, float] = dict.fromkeys(HOSTS, 0.0)
    rate: dict[str, float] = dict.fromkeys(HOSTS, 1.0)
    since: dict[str, float] = dict.fromkeys(HOSTS, 0.0)
    for event in events:
        assert isinstance(event, SkewClock)
        ahead[event.host] += (rate[event.host] - 1) * (event.at_s - since[event.host]) + event.offset_s
        rate[event.host], since[event.host] = event.rate, event.at_s
        assert abs(ahead[event.host]) <= 3.1
        assert 0.99 <= event.rate <= 1.01
    assert all(abs(seconds) < 1e-5 for seconds in ahead.values())
    assert set(rate.values()) == {1.0}


def test_there_are_as_many_as_asked_for_on_average() -> None:
    counts: Counter[type] = Counter()
    for seed in range(200):
        counts.update(type(event) for event in draw(ALL, HOSTS, 70.0, Random(seed)))
    # 200 runs of one minute (70 s less 10 s of quiet) with 6 each; the standard deviation of their sum is 35.
    for kind in (Kill, Crash, Pause, Cut, ChangeAccess):
        assert counts[kind] == pytest.approx(1200, abs=140), kind
    assert counts[SkewClock] == pytest.approx(2400, abs=280)


def test_durations_are_even_on_a_log_scale() -> None:
    events = draw(RandomFaults(cuts_per_minute=1000, max_fault_s=10), HOSTS, 610.0, Random(1))
    lengths = sorted(lasting_s(event) for event in events)
    assert lengths[len(lengths) // 2] == pytest.approx(1.0, rel=0.1), "the middle of 0.1 and 10"


def test_cuts_are_of_all_four_kinds() -> None:
    events = draw(RandomFaults(cuts_per_minute=1000), HOSTS, 130.0, Random(1))
    kinds: Counter[tuple[bool, bool]] = Counter()
    for event in events:
        assert isinstance(event, Cut)
        alone = event.target == () or 1 in (len(event.source), len(event.target))
        assert len({*event.source, *event.target}) == len(event.source) + len(event.target)
        if not alone:
            assert len(event.source) == len(event.target) == 5
        kinds[alone, event.one_way] += 1
    for share in kinds.values():
        assert share / len(events) == pytest.approx(0.25, abs=0.04)
    assert any(len(event.source) == 9 for event in events if isinstance(event, Cut)), "a host that hears nobody"


def test_slow_links_go_by_the_link_they_slow() -> None:
    access = {"h1": Conditions(latency_ms=20, loss=0.5, bandwidth_mbps=7)}
    faults = RandomFaults(hosts=("h1", "h2"), slow_links_per_minute=30)
    seen = set()
    for event in draw(faults, HOSTS, 200.0, Random(3), access):
        assert isinstance(event, ChangeAccess)
        seen.add(event.host)
        if event.host == "h1":
            assert 200 <= event.conditions.latency_ms <= 2000
            assert (event.conditions.loss, event.conditions.bandwidth_mbps) == (0.5, 7)
        else:
            assert event.conditions.latency_ms == 50
            assert 0.01 <= event.conditions.loss <= 0.2
    assert seen == {"h1", "h2"}


def test_only_the_hosts_named_are_hit() -> None:
    hosts = ["broker-1", "broker-2", "car-1", "car-2"]
    events = draw(RandomFaults(hosts=("broker-*", "broker-1", "car-2"), kills_per_minute=60), hosts, 100.0, Random(1))
    assert {event.host for event in events if isinstance(event, Kill)} == {"broker-1", "broker-2", "car-2"}
    with pytest.raises(ConfigError, match=r"`random_faults\.hosts`: no host 'x\*'"):
        draw(RandomFaults(hosts=("x*",)), hosts, 100.0, Random(1))


def test_one_seed_gives_one_schedule() -> None:
    assert draw(ALL, HOSTS, 100.0, Random("7")) == draw(ALL, HOSTS, 100.0, Random("7"))
    assert draw(ALL, HOSTS, 100.0, Random("7")) != draw(ALL, HOSTS, 100.0, Random("8"))


def test_the_edges() -> None:
    assert draw(RandomFaults(), HOSTS, 100.0, Random(1)) == ()
    assert draw(ALL, HOSTS, 10.0, Random(1)) == (), "no time before the quiet"
    assert draw(ALL, [], 100.0, Random(1)) == ()
    alone = draw(RandomFaults(cuts_per_minute=60), ["h"], 30.0, Random(1))
    assert all(isinstance(event, Cut) and event.source == ("h",) for event in alone)
    short = draw(RandomFaults(kills_per_minute=600, max_fault_s=1000, quiet_s=0), HOSTS, 2.0, Random(1))
    assert all(event.at_s + lasting_s(event) <= 2 for event in short), "a fault is never longer than the run"
    with pytest.raises(ConfigError, match=r"about 1,666,667 random faults: at most 1,000,000"):
        draw(RandomFaults(kills_per_minute=100_000, quiet_s=0), HOSTS, 1000.0, Random(1))

"""When clients publish: evenly or at random, from when to when, the same in every process."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import pytest

from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.schedule import Schedule, publication_times
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.scenario.workload import Clients, Publishing


def test_evenly_from_a_random_first_moment() -> None:
    moments = list(Schedule(Publishing(topic="t", rate_hz=10), 5.0, 65.0, Random(1)))
    assert 5 <= moments[0] < 5.1
    assert len(moments) == 600
    assert all(later - earlier == pytest.approx(0.1, abs=1e-9) for earlier, later in pairwise(moments))
    assert moments[-1] < 65


def test_long_streams_do_not_drift() -> None:
    schedule = Schedule(Publishing(topic="t", rate_hz=3), 0.0, math.inf, Random(1))
    first = schedule.next_s
    for _ in range(30_000):
        schedule.advance()
    assert schedule.next_s == first + 10_000
    assert schedule.sequence == 30_000


def test_at_random_as_many_on_average() -> None:
    moments = list(Schedule(Publishing(topic="t", rate_hz=100, poisson=True), 0.0, 100.0, Random(1)))
    assert len(moments) == pytest.approx(10_000, abs=400)
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    mean = sum(gaps) / len(gaps)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert deviation == pytest.approx(mean, rel=0.05), "exponential gaps spread as wide as they are"


def test_clients_do_not_start_together() -> None:
    firsts = [Schedule(Publishing(topic="t"), 0.0, 10.0, Random(seed)).next_s for seed in range(1000)]
    assert sum(firsts) / 1000 == pytest.approx(0.5, abs=0.05)
    assert max(firsts) > 0.95


def test_nothing_after_the_end() -> None:
    schedule = Schedule(Publishing(topic="t", rate_hz=0.001), 0.0, 0.001, Random(1))
    assert schedule.next_s == math.inf
    assert list(schedule) == []


def test_a_late_driver_is_told_what_it_missed() -> None:
    schedule = Schedule(Publishing(topic="t", rate_hz=10), 0.0, 60.0, Random(1))
    sent = 0
    while schedule.next_s <= 30:
        schedule.advance()
        sent += 1
    assert sent == 300


def test_moments_depend_on_seed_client_and_stream_alone() -> None:
    topology = Topology(name="t", sites=(Site(name="a"),), hosts=(Host(name="h", site="a"),))
    streams = (Publishing(topic="x"), Publishing(topic="y"))
    group = Clients(name="c", host="h", broker="h", count=2, publish=streams)
    one, other = expand_clients(Scenario(name="s", topology=topology, clients=(group,)))
    firsts = {publication_times(client, stream, 7).next_s for client in (one, other) for stream in (0, 1)}
    assert len(firsts) == 4
    assert list(publication_times(one, 0, 7)) == list(publication_times(one, 0, 7))
    assert publication_times(one, 0, 7).next_s != publication_times(one, 0, 8).next_s
    assert publication_times(one, 0, 7).next_s == pytest.approx(0.0509703, abs=1e-7), "in any process, whatever PYTHONHASHSEED"

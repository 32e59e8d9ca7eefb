"""What the measurement assumes about its own topologies and makes of its numbers."""

from __future__ import annotations

import random

import pytest

from nearcast.emulation.measurement import (
    MAX_PAIRS,
    PairResult,
    Rung,
    Spread,
    _some_pairs,
    line_topology,
    reference_topology,
)
from nearcast.emulation.probing import Circumstances
from nearcast.scenario.assembly import build_network


def test_the_reference_topology_has_delays_of_all_sizes() -> None:
    network, names = build_network(reference_topology(), random.Random(0))
    assert len(names) == 20
    delays = {network.one_way_ms(a, b) for a in range(20) for b in range(20) if a != b}
    assert delays == {0.5, 1.0, 5.0, 6.0, 24.0, 29.0, 30.0, 70.0, 94.0, 99.0, 100.0}


@pytest.mark.parametrize(("hosts", "sites"), [(2, 2), (7, 5), (40, 12)])
def test_it_scales(hosts: int, sites: int) -> None:
    network, names = build_network(reference_topology(hosts, sites), random.Random(0))
    assert len(names) == hosts
    assert all(network.one_way_ms(a, b) < 1000.0 for a in range(hosts) for b in range(hosts))


def test_a_line_has_two_ends() -> None:
    network, _ = build_network(line_topology(7.0, hosts=4), random.Random(0))
    assert [network.one_way_ms(0, other) for other in range(4)] == [0.0, 7.0, 0.0, 7.0]


@pytest.mark.parametrize("hosts", [2, 20, 21, 300, 1000])
def test_of_many_pairs_some_are_measured_and_every_host_sends(hosts: int) -> None:
    pairs = _some_pairs(hosts)
    assert len(set(pairs)) == len(pairs) <= max(MAX_PAIRS, hosts)
    assert {source for source, _ in pairs} == set(range(hosts))
    assert all(source != target for source, target in pairs)


def spread(median_ms: float) -> Spread:
    return Spread(median_ms=median_ms, p95_ms=0.0, p99_ms=0.0, max_ms=0.0)


@pytest.mark.parametrize(("error_ms", "within"), [(0.0, True), (2.5, True), (-2.5, True), (2.6, False), (-2.6, False)])
def test_a_pair_may_be_off_by_half_a_millisecond_and_two_percent(error_ms: float, within: bool) -> None:
    pair = PairResult(
        source="a", target="b", configured_ms=100.0, sent=1, received=1, median_ms=100.0 + error_ms, error=spread(error_ms)
    )
    assert pair.within is within


@pytest.mark.parametrize(
    ("inflation_ms", "missing_share", "sustained"), [(0.9, 0.0, True), (1.1, 0.0, False), (0.0, 0.002, False)]
)
def test_a_rate_is_sustained_without_delay_and_loss(inflation_ms: float, missing_share: float, sustained: bool) -> None:
    rung = Rung(
        offered_pps=1.0,
        sent_pps=1.0,
        received_pps=1.0,
        missing_share=missing_share,
        error=spread(0.0),
        inflation_ms=inflation_ms,
        inflation_p99_ms=0.0,
        circumstances=Circumstances(stolen_share=0.0),
    )
    assert rung.sustained is sustained

"""The whole network: which way a packet goes, cuts, moves, changes, what is counted, and what one seed gives."""

from __future__ import annotations

import math
from random import Random

import msgspec
import pytest

from nearcast.errors import LocalProtocolError
from nearcast.network.conditions import Conditions
from nearcast.network.latency import GreatCircle, Latency, MatrixLatency
from nearcast.network.network import FULL, LOST, UNREACHABLE, Network
from nearcast.network.statistics import NetworkFigures

SEED = 3


def names(count: int) -> list[str]:
    return [f"site-{index}" for index in range(count)]


def linked(*links: tuple[int, int, float], sites: int = 3) -> Network:
    network = Network(names(sites), None, Random(SEED))
    for a, b, latency_ms in links:
        network.connect(a, b, Conditions(latency_ms=latency_ms))
    for site in range(sites):
        network.join(site)
    return network


def modelled(rows: list[list[float]], model: Conditions = Conditions()) -> Network:  # noqa: B008 - frozen
    network = Network(names(len(rows)), MatrixLatency(rows), Random(SEED), model)
    for site in range(len(rows)):
        network.join(site)
    return network


class TestWays:
    def test_access_path_access(self) -> None:
        network = Network(names(2), None, Random(SEED))
        network.connect(0, 1, Conditions(latency_ms=30))
        near, far = network.join(0, Conditions(latency_ms=1)), network.join(1, Conditions(latency_ms=4))
        assert network.transit(near, far, 100, 10.0) == pytest.approx(10.035, abs=1e-12)
        assert network.one_way_ms(near, far) == 35.0

    def test_within_a_site_access_local_access(self) -> None:
        network = Network(names(1), None, Random(SEED))
        a, b = network.join(0, Conditions(latency_ms=1)), network.join(0, Conditions(latency_ms=2))
        assert network.one_way_ms(a, b) == 3.0
        network.set_local(0, Conditions(latency_ms=0.5))
        assert network.transit(a, b, 100, 0.0) == pytest.approx(0.0035, abs=1e-12)
        assert network.one_way_ms(a, b) == 3.5

    def test_to_itself_at_once_whatever_the_access_link(self) -> None:
        network = Network(names(1), None, Random(SEED))
        a = network.join(0, Conditions(latency_ms=10, loss=1.0))
        assert network.transit(a, a, 100, 7.0) == 7.0
        assert network.one_way_ms(a, a) == 0.0

    def test_least_latency_over_links(self) -> None:
        network = linked((0, 1, 10.0), (1, 2, 10.0), (0, 2, 50.0))
        assert network.one_way_ms(0, 2) == 20.0
        assert network.transit(0, 2, 100, 0.0) == pytest.approx(0.02)

    def test_links_before_the_model_even_if_longer(self) -> None:
        network = modelled([[0, 1, 1], [1, 0, 1], [1, 1, 0]])
        network.connect(0, 1, Conditions(latency_ms=40))
        assert network.one_way_ms(0, 1) == 40.0
        assert network.one_way_ms(0, 2) == 1.0

    def test_the_model_where_links_lead_only_one_way(self) -> None:
        network = modelled([[0, 7], [7, 0]])
        network.connect(0, 1, Conditions(latency_ms=40), one_way=True)
        assert network.one_way_ms(0, 1) == 40.0
        assert network.one_way_ms(1, 0) == 7.0

    def test_no_way(self) -> None:
        network = linked((0, 1, 5.0))
        assert network.transit(0, 2, 100, 0.0) == UNREACHABLE
        assert network.one_way_ms(0, 2) == math.inf
        assert network.between_sites_ms(0, 2) == math.inf
        assert network.unreachable == 1

    @pytest.mark.parametrize("unknown", [math.nan, -1.0, math.inf])
    def test_what_a_model_does_not_know_is_unreachable(self, unknown: float) -> None:
        class Unknown(Latency):
            def between_ms(self, a: int, b: int) -> float:
                return unknown

        for sites in (2, 600):
            network = Network(names(sites), Unknown(), Random(SEED))
            a, b = network.join(0), network.join(1)
            assert network.transit(a, b, 1, 0.0) == UNREACHABLE
            assert network.one_way_ms(a, b) == math.inf

    def test_ends_count_a_loss_once_and_stop_there(self) -> None:
        network = Network(names(2), None, Random(SEED))
        network.connect(0, 1, Conditions(loss=1.0))
        a, b = network.join(0), network.join(1, Conditions(loss=1.0))
        assert network.transit(a, b, 1, 0.0) == LOST
        assert (network.lost, network.full) == (1, 0)
        assert [row.kind for row in network.figures().links] == ["link", "up"]


class TestSharing:
    def test_pairs_routed_over_one_link_share_its_bandwidth(self) -> None:
        network = Network(names(4), None, Random(SEED))
        slow = Conditions(bandwidth_mbps=8)  # a byte a microsecond
        for a, b, conditions in ((0, 1, Conditions()), (2, 1, Conditions()), (1, 3, slow)):
            network.connect(a, b, conditions)
        hosts = [network.join(site) for site in range(4)]
        assert network.transit(hosts[0], hosts[3], 1_000, 0.0) == pytest.approx(0.001)
        assert network.transit(hosts[2], hosts[3], 1_000, 0.0) == pytest.approx(0.002)
        # The other direction is its own.
        assert network.transit(hosts[3], hosts[2], 1_000, 0.0) == pytest.approx(0.001)

    def test_pairs_of_the_model_do_not(self) -> None:
        network = modelled([[0, 0, 0], [0, 0, 0], [0, 0, 0]], Conditions(bandwidth_mbps=8, queue_ms=1.5))
        assert network.transit(0, 1, 1_000, 0.0) == pytest.approx(0.001)
        assert network.transit(0, 2, 1_000, 0.0) == pytest.approx(0.001)
        assert network.transit(0, 1, 1_000, 0.0) == pytest.approx(0.002)
        assert network.transit(0, 1, 1_000, 0.0) == FULL
        assert network.full == 1

    def test_a_near_sender_does_not_wait_for_a_far_one(self) -> None:
        """The far packet is announced first and gets to the shared last link much later."""
        network = modelled([[0, 100, 1], [100, 0, 100], [1, 100, 0]])
        network.set_access(0, Conditions(bandwidth_mbps=8, jitter_ms=0.001))
        assert network.transit(1, 0, 1_000, 0.0) == pytest.approx(0.101, abs=1e-4)
        assert network.transit(2, 0, 1_000, 0.001) == pytest.approx(0.003, abs=1e-4)


class TestCuts:
    def test_both_ways(self) -> None:
        network = linked((0, 1, 1.0), (1, 2, 1.0))
        handle = network.cut([0], [1])
        assert network.transit(0, 1, 1, 0.0) == UNREACHABLE
        assert network.transit(1, 0, 1, 0.0) == UNREACHABLE
        assert network.one_way_ms(0, 1) == math.inf
        # Cuts are between endpoints: what passes through the site of one still passes.
        assert network.transit(0, 2, 1, 0.0) == pytest.approx(0.002)
        network.heal(handle)
        assert network.transit(0, 1, 1, 0.0) == pytest.approx(0.001)

    def test_one_way(self) -> None:
        network = linked((0, 1, 1.0))
        network.cut([0], [1], one_way=True)
        assert network.transit(0, 1, 1, 0.0) == UNREACHABLE
        assert network.transit(1, 0, 1, 0.0) == pytest.approx(0.001)

    def test_halves(self) -> None:
        network = Network(["here"], None, Random(SEED))
        hosts = [network.join(0) for _ in range(10)]
        network.cut(hosts[:5], hosts[5:])
        for a in hosts:
            for b in hosts:
                assert (network.transit(a, b, 1, 0.0) == UNREACHABLE) is ((a < 5) != (b < 5))

    def test_a_group_cut_from_itself_leaves_everyone_alone_with_themselves(self) -> None:
        network = Network(["here"], None, Random(SEED))
        hosts = [network.join(0) for _ in range(3)]
        network.cut(hosts, hosts)
        for a in hosts:
            for b in hosts:
                assert (network.transit(a, b, 1, 0.0) == UNREACHABLE) is (a != b)

    def test_overlapping_cuts_add_up(self) -> None:
        network = linked((0, 1, 1.0))
        first, second = network.cut([0], [1]), network.cut([0], [1, 2], one_way=True)
        network.heal(first)
        assert network.transit(0, 1, 1, 0.0) == UNREACHABLE
        assert network.transit(1, 0, 1, 0.0) == pytest.approx(0.001)
        network.heal(second)
        assert network.transit(0, 1, 1, 0.0) == pytest.approx(0.001)

    def test_hundreds_at_once(self) -> None:
        network = Network(["here"], None, Random(SEED))
        hosts = [network.join(0) for _ in range(200)]
        handles = {host: network.cut([host], [host + 1]) for host in hosts[:-1]}
        for host in hosts[:-1]:
            assert network.transit(host, host + 1, 1, 0.0) == UNREACHABLE
            assert network.transit(host + 1, host, 1, 0.0) == UNREACHABLE
        assert network.transit(0, 2, 1, 0.0) == 0.0
        for host in hosts[:-1:2]:
            network.heal(handles[host])
        for host in hosts[:-1]:
            assert (network.transit(host, host + 1, 1, 0.0) == UNREACHABLE) is (host % 2 == 1)

    def test_healing_twice_or_after_all_does_nothing(self) -> None:
        network = linked((0, 1, 1.0))
        handle = network.cut([0], [1])
        network.heal_all()
        later = network.cut([0], [1])
        network.heal(handle)
        network.heal(12_345)
        assert network.transit(0, 1, 1, 0.0) == UNREACHABLE
        network.heal(later)
        assert network.transit(0, 1, 1, 0.0) == pytest.approx(0.001)

    def test_bits_are_used_again(self) -> None:
        network = linked((0, 1, 1.0))
        for _ in range(1_000):
            network.heal(network.cut([0], [1]))
        assert network._cuts.bits == 0
        network.cut([0], [1])
        assert network._cuts.bits == 0b11

    def test_the_lists_handed_in_may_change_afterwards(self) -> None:
        network = linked((0, 1, 1.0))
        sources = [0]
        handle = network.cut(sources, [1])
        sources.clear()
        network.heal(handle)
        assert network.transit(0, 1, 1, 0.0) == pytest.approx(0.001)

    def test_a_cut_moves_with_its_host(self) -> None:
        network = linked((0, 1, 1.0), (1, 2, 1.0))
        network.cut([0], [2])
        network.move(0, 1)
        assert network.transit(0, 2, 1, 0.0) == UNREACHABLE


class TestChanges:
    def test_a_move_is_another_way_for_the_next_packet(self) -> None:
        network = linked((0, 1, 10.0), (1, 2, 10.0))
        assert network.transit(0, 2, 1, 0.0) == pytest.approx(0.02)
        network.move(0, 1)
        assert network.site_of(0) == 1
        assert network.transit(0, 2, 1, 0.0) == pytest.approx(0.01)
        network.move(0, 2)
        assert network.transit(0, 2, 1, 0.0) == 0.0

    def test_a_slower_link_makes_traffic_go_round_it(self) -> None:
        network = linked((0, 1, 10.0), (1, 2, 10.0), (0, 2, 30.0))
        assert network.one_way_ms(0, 2) == 20.0
        network.connect(0, 1, Conditions(latency_ms=100))
        assert network.one_way_ms(0, 2) == 30.0
        assert network.one_way_ms(0, 1) == 40.0
        network.connect(0, 1, Conditions(latency_ms=1))
        assert network.one_way_ms(0, 2) == 11.0

    def test_one_direction_of_a_link(self) -> None:
        network = linked((0, 1, 10.0))
        network.connect(0, 1, Conditions(latency_ms=25), one_way=True)
        assert (network.one_way_ms(0, 1), network.one_way_ms(1, 0)) == (25.0, 10.0)

    def test_a_link_over_the_model_and_back(self) -> None:
        network = modelled([[0, 5], [5, 0]])
        assert network.link_conditions(0, 1) is None
        network.connect(0, 1, Conditions(latency_ms=50, loss=0.5))
        assert network.link_conditions(1, 0) == Conditions(latency_ms=50, loss=0.5)
        assert network.one_way_ms(0, 1) == 50.0
        network.disconnect(0, 1)
        network.disconnect(0, 1)
        assert network.one_way_ms(0, 1) == 5.0

    def test_access(self) -> None:
        network = linked((0, 1, 10.0))
        assert network.access_conditions(0) == Conditions()
        network.set_access(0, Conditions(latency_ms=3))
        assert network.one_way_ms(0, 1) == 13.0
        assert network.one_way_ms(1, 0) == 13.0
        assert network.access_conditions(0) == Conditions(latency_ms=3)

    def test_links_that_start_or_stop_doubling_packets(self) -> None:
        network = linked((0, 1, 10.0))
        for duplicate in (1.0, 0.0, 1.0):
            network.connect(0, 1, Conditions(latency_ms=10, duplicate=duplicate))
            network.transit(0, 1, 1, 0.0)
            assert (network.take_duplicate() > 0.0) is (duplicate == 1.0)

    @pytest.mark.parametrize(
        "misuse",
        [
            lambda network: network.connect(0, 3, Conditions()),
            lambda network: network.connect(-1, 0, Conditions()),
            lambda network: network.connect(1, 1, Conditions()),
            lambda network: network.join(3),
            lambda network: network.move(0, 3),
            lambda network: network.move(3, 0),
            lambda network: network.move(-1, 0),
            lambda network: network.cut([0], [3]),
            lambda network: network.set_access(3, Conditions()),
            lambda network: network.set_local(-1, Conditions()),
            lambda network: network.one_way_ms(0, 3),
            lambda network: network.between_sites_ms(0, 3),
        ],
    )
    def test_indices_that_do_not_exist_are_refused(self, misuse: object) -> None:
        network = linked()
        with pytest.raises(LocalProtocolError):
            misuse(network)  # type: ignore[operator]
        assert network._cuts.bits == 0


class TestDuplicates:
    def test_the_second_packet_comes_once_per_question(self) -> None:
        network = Network(names(2), None, Random(SEED))
        network.connect(0, 1, Conditions(latency_ms=10, duplicate=1.0))
        a, b = network.join(0), network.join(1)
        assert network.transit(a, b, 1, 0.0) == pytest.approx(0.01)
        assert network.take_duplicate() == pytest.approx(0.01)
        assert network.take_duplicate() < 0.0
        network.transit(a, b, 1, 0.0)
        network.transit(a, a, 1, 0.0)
        assert network.take_duplicate() < 0.0
        assert network.duplicated == 2

    def test_it_uses_bandwidth_like_any_other(self) -> None:
        network = Network(names(2), None, Random(SEED))
        network.connect(0, 1, Conditions())
        a, b = network.join(0, Conditions(duplicate=1.0)), network.join(1, Conditions(bandwidth_mbps=8))
        assert network.transit(a, b, 1_000, 0.0) == pytest.approx(0.001)
        assert network.take_duplicate() == pytest.approx(0.002)

    def test_there_is_one_at_most(self) -> None:
        twice = Conditions(duplicate=1.0)
        network = Network(names(1), None, Random(SEED))
        network.set_local(0, twice)
        a, b = network.join(0, twice), network.join(0, twice)
        network.transit(a, b, 1, 0.0)
        assert network.figures().links[-1].packets == 2
        assert network.duplicated == 1

    def test_if_only_the_second_arrives_it_is_the_packet(self) -> None:
        network = Network(names(2), None, Random(SEED))
        network.connect(0, 1, Conditions(latency_ms=10, duplicate=1.0))
        a, b = network.join(0), network.join(1, Conditions(loss=0.5))
        outcomes = []
        for now in range(4_000):
            first = network.transit(a, b, 1, float(now))
            outcomes.append((first >= 0.0, network.take_duplicate() >= 0.0))
        assert (False, True) not in outcomes
        assert outcomes.count((True, True)) == pytest.approx(1_000, abs=120)
        assert outcomes.count((False, False)) == pytest.approx(1_000, abs=120)
        assert network.lost == outcomes.count((False, False))


class TestManySites:
    """Beyond 512 sites, pairs of the model have no memory."""

    def network(self, model: Conditions) -> Network:
        rng = Random(SEED)
        places = [(rng.uniform(-60, 60), rng.uniform(-180, 180)) for _ in range(600)]
        latency = GreatCircle([place[0] for place in places], [place[1] for place in places], 0.01)
        network = Network(names(600), latency, Random(SEED), model)
        for site in range(600):
            network.join(site)
        return network

    def test_latencies_are_those_of_the_model(self) -> None:
        network = self.network(Conditions())
        for a, b in ((0, 1), (5, 599), (599, 5)):
            assert network.transit(a, b, 1, 0.0) == pytest.approx(network.one_way_ms(a, b) / 1000)
        assert network.one_way_ms(5, 599) == network.one_way_ms(599, 5) > 0.0

    def test_jitter_loss_and_duplicates_apply(self) -> None:
        network = self.network(Conditions(jitter_ms=1, loss=0.1, duplicate=0.1))
        arrivals = []
        for index in range(3_000):
            arrivals.append(network.transit(index % 600, (index * 7 + 1) % 600, 1, float(index)))
        assert network.lost == pytest.approx(300 - 30, abs=60)  # some are saved by their copy
        assert network.duplicated == pytest.approx(270, abs=60)
        assert len(set(arrivals)) > 2_000

    def test_nothing_grows(self) -> None:
        network = self.network(Conditions(jitter_ms=1, bandwidth_mbps=1))
        for index in range(5_000):
            network.transit(index % 600, (index * 13 + 1) % 600, 1_000, 0.0)
        assert not network._model_links
        assert not network._routes
        assert [row.source for row in network.figures().links if row.kind == "model"] == ["*"]

    def test_links_work_beside_it(self) -> None:
        network = self.network(Conditions())
        far = network.one_way_ms(0, 2)
        network.connect(0, 1, Conditions(latency_ms=500))
        network.connect(1, 3, Conditions(latency_ms=500))
        for _ in range(2):
            assert network.one_way_ms(0, 1) == 500.0
            assert network.one_way_ms(0, 3) == 1000.0
            assert network.one_way_ms(0, 2) == far
            assert network.transit(0, 3, 1, 0.0) == 1.0
        network.connect(0, 1, Conditions(latency_ms=400))
        assert network.transit(0, 3, 1, 0.0) == 0.9


class TestFigures:
    def test_a_table_of_links_that_goes_over_a_wire(self) -> None:
        network = linked((0, 1, 1.0), (1, 2, 1.0))
        network.transit(0, 2, 100, 0.0)
        network.transit(0, 1, 50, 0.0)
        network.transit(0, 0, 7, 0.0)
        network.cut([2], [0])
        network.transit(2, 0, 5, 0.0)
        figures = network.figures()
        assert (figures.packets, figures.bytes, figures.unreachable) == (4, 162, 1)
        table = {(row.kind, row.source, row.target): (row.packets, row.bytes) for row in figures.links}
        assert table == {
            ("link", "site-0", "site-1"): (2, 150),
            ("link", "site-1", "site-2"): (1, 100),
            ("up", "0", "site-0"): (2, 150),
            ("down", "site-1", "1"): (1, 50),
            ("down", "site-2", "2"): (1, 100),
        }
        assert msgspec.json.decode(msgspec.json.encode(figures), type=NetworkFigures) == figures

    def test_model_and_local_rows(self) -> None:
        network = modelled([[0, 5], [5, 0]])
        other = network.join(0)
        network.transit(0, 1, 10, 0.0)
        network.transit(0, other, 10, 0.0)
        assert len(network) == 3
        assert {(row.kind, row.source, row.target) for row in network.figures().links if row.kind in ("model", "local")} == {
            ("model", "site-0", "site-1"),
            ("local", "site-0", "site-0"),
        }

    def test_counters_survive_other_conditions(self) -> None:
        network = linked((0, 1, 1.0))
        network.transit(0, 1, 100, 0.0)
        network.connect(0, 1, Conditions(latency_ms=9))
        network.transit(0, 1, 100, 0.0)
        assert network.figures().links[0].packets == 2


def busy_run(seed: int) -> list[float]:
    """Everything at once, from one seed: all shapes of jitter, loss, queues, reordering, copies, links and model."""
    rows = [[abs(a - b) * 3.0 + (a > b) for b in range(6)] for a in range(6)]
    network = Network(names(6), MatrixLatency(rows), Random(seed), Conditions(jitter_ms=0.7, jitter="lognormal", loss=0.02))
    network.connect(0, 1, Conditions(latency_ms=4, jitter_ms=1, bandwidth_mbps=5, queue_ms=20, duplicate=0.05))
    network.connect(1, 2, Conditions(latency_ms=2, jitter_ms=1, jitter="pareto", reorder=0.05))
    for endpoint in range(12):
        network.join(endpoint % 6, Conditions(latency_ms=0.5, jitter_ms=0.2, jitter="uniform", bandwidth_mbps=20))
    choice = Random(99)
    answers = []
    for index in range(3_000):
        answers.append(network.transit(choice.randrange(12), choice.randrange(12), choice.randrange(40, 1500), index * 0.0003))
        answers.append(network.take_duplicate())
    return answers


def test_one_seed_gives_one_run() -> None:
    assert busy_run(5) == busy_run(5)
    assert busy_run(5) != busy_run(6)


def test_the_numbers_are_these_compiled_and_plain() -> None:
    """Runs in both builds; a difference between them, or to an earlier version's replays, shows here."""
    answers = [answer for answer in busy_run(5) if answer != LOST]
    assert len(answers) == GOLDEN_COUNT
    assert answers[::400] == pytest.approx(GOLDEN, abs=1e-12)


GOLDEN_COUNT = 2_985
GOLDEN = [
    0.0,
    0.12271810195689037,
    0.24029999999999999,
    0.36792104332482006,
    0.48987646515263245,
    0.6014999999999999,
    0.7302228180721072,
    0.855163563399412,
]

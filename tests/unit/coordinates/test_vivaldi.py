"""The agent's mathematics: accuracy bounds on topologies whose truth is known, and samples that are refused."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from nearcast.coordinates import topologies
from nearcast.coordinates.arrays import as_arrays, distances_ms
from nearcast.coordinates.coordinate import DIMENSIONS, LEAST_HEIGHT_MS, Coordinate, origin
from nearcast.coordinates.filters import MovingMedian
from nearcast.coordinates.vivaldi import RESTORED_ERROR, Vivaldi


def settled(rtt_ms: np.ndarray, rounds: int, seed: int = 1) -> list[Vivaldi]:
    """Every node samples a random other one, round by round."""
    rng = random.Random(seed)
    agents = [Vivaldi(random.Random(f"{seed} {node}")) for node in range(len(rtt_ms))]
    for _ in range(rounds):
        for node, agent in enumerate(agents):
            other = rng.choice([index for index in range(len(agents)) if index != node])
            agent.observe(str(other), agents[other].coordinate, float(rtt_ms[node, other]))
    return agents


def errors(agents: list[Vivaldi], rtt_ms: np.ndarray) -> np.ndarray:
    places = as_arrays([agent.coordinate for agent in agents])
    pairs = np.triu_indices(len(rtt_ms), 1)
    relative: np.ndarray = np.abs(distances_ms(places, places) - rtt_ms)[pairs] / rtt_ms[pairs]
    return relative


@pytest.mark.parametrize(
    ("rtt_ms", "mean"),
    [
        (topologies.star(2, 50.0), 0.001),
        (topologies.star(16, 100.0), 0.04),
        (topologies.line(10, 10.0), 0.02),
        (topologies.grid(16, 10.0), 0.02),
        (topologies.scattered(16, 100.0, 5.0, np.random.default_rng(1)), 0.05),
    ],
    ids=["pair", "star", "line", "grid", "scattered"],
)
def test_known_topologies_are_found_again(rtt_ms: np.ndarray, mean: float) -> None:
    assert errors(settled(rtt_ms, 120), rtt_ms).mean() <= mean


def of_sites(near_ms: float, far_ms: float, agents: list[Vivaldi], rtt_ms: np.ndarray) -> tuple[float, float]:
    """Mean estimates within sites and between them."""
    places = as_arrays([agent.coordinate for agent in agents])
    found = distances_ms(places, places)
    near, far = found[np.triu(rtt_ms == near_ms, 1)], found[np.triu(rtt_ms == far_ms, 1)]
    return float(near.mean()), float(far.mean())


def test_two_sites_are_two_places() -> None:
    rtt_ms = topologies.clusters(12, 2.0, 80.0)
    near, far = of_sites(2.0, 80.0, settled(rtt_ms, 200), rtt_ms)
    assert near < 10.0
    assert abs(far - 80.0) < 8.0


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize("near_ms", [0.2, 2.0])
def test_sites_are_moved_as_a_whole_however_fast_their_nodes_hold_each_other(near_ms: float, seed: int) -> None:
    rtt_ms = topologies.clusters(20, near_ms, 80.0)
    near, far = of_sites(near_ms, 80.0, settled(rtt_ms, 200, seed), rtt_ms)
    assert near == pytest.approx(near_ms, abs=0.2)
    assert far == pytest.approx(80.0, rel=0.02)


def test_nodes_of_one_site_stay_together_where_the_space_has_no_room_for_all_sites() -> None:
    """Sixteen sites, equally far from each other: eight dimensions have room for nine, and heights of 15 ms would have it for
    all at the cost of every pair within a site."""
    site = np.arange(32) % 16
    rtt_ms = np.where(site[:, np.newaxis] == site[np.newaxis, :], 0.5, 30.0) * (1 - np.eye(32))
    agents = settled(rtt_ms, 500)
    near, far = of_sites(0.5, 30.0, agents, rtt_ms)
    assert near == pytest.approx(0.5, abs=0.25)
    assert far == pytest.approx(30.0, rel=0.1)


def test_a_site_follows_when_its_path_to_others_changes() -> None:
    before, after = topologies.clusters(12, 1.0, 80.0), topologies.clusters(12, 1.0, 40.0)
    rng = random.Random(2)
    agents = settled(before, 150, 2)
    for _ in range(100):
        for node, agent in enumerate(agents):
            other = rng.choice([index for index in range(12) if index != node])
            agent.observe(str(other), agents[other].coordinate, float(after[node, other]))
    assert of_sites(1.0, 40.0, agents, after)[1] == pytest.approx(40.0, rel=0.03)


def test_a_node_knows_how_wrong_it_is_about_far_nodes_too() -> None:
    """Near springs count more when nodes move. Were they to count more here, a site in the wrong place would feel certain."""
    agent = Vivaldi(random.Random(1))
    agent.restore(Coordinate([0.0] * DIMENSIONS, LEAST_HEIGHT_MS))
    beside = Coordinate([0.4] + [0.0] * (DIMENSIONS - 1), 0.3, 0.0, 0.05)
    away = Coordinate([120.0] + [0.0] * (DIMENSIONS - 1), 0.3, 0.0, 0.05)
    for _ in range(3):
        for number in range(10):
            agent.observe(f"beside-{number}", beside, 0.7)
        for number in range(10):
            agent.observe(f"away-{number}", away, 80.0)
    assert agent.coordinate.error > 0.1


def test_coordinates_come_to_rest_on_the_internet() -> None:
    rtt_ms = topologies.internet(48, np.random.default_rng(3))
    agents = settled(rtt_ms, 200)
    before = as_arrays([agent.coordinate for agent in agents])
    rng = random.Random(9)
    for node, agent in enumerate(agents):
        other = rng.choice([index for index in range(48) if index != node])
        agent.observe(str(other), agents[other].coordinate, float(rtt_ms[node, other]))
    after = as_arrays([agent.coordinate for agent in agents])
    assert np.abs(distances_ms(before, before) - distances_ms(after, after)).mean() < 1.5


def test_heights_are_for_what_no_plane_has_room_for() -> None:
    rtt_ms = topologies.circle(12, 50.0)
    agents = settled(rtt_ms, 150)
    heights = [agent.coordinate.height for agent in agents]
    assert min(heights[1:]) > heights[0]
    assert errors(agents, rtt_ms).mean() <= 0.1


@pytest.mark.parametrize("rtt_ms", [math.nan, math.inf, -1.0, 0.0, 1e9])
def test_absurd_round_trips_are_refused(rtt_ms: float) -> None:
    agent = Vivaldi(random.Random(1))
    before = agent.coordinate
    assert not agent.observe("other", origin(), rtt_ms)
    assert agent.coordinate is before
    assert agent.refused == 1


@pytest.mark.parametrize(
    "theirs",
    [
        Coordinate([math.nan] * DIMENSIONS, 1.0),
        Coordinate([math.inf] * DIMENSIONS, 1.0),
        Coordinate([1e9] * DIMENSIONS, 1.0),
        Coordinate([0.0] * (DIMENSIONS - 1), 1.0),
        Coordinate([0.0] * DIMENSIONS, math.nan),
        Coordinate([0.0] * DIMENSIONS, -1.0),
        Coordinate([0.0] * DIMENSIONS, 1.0, math.nan),
        Coordinate([0.0] * DIMENSIONS, 1.0, 0.0, math.nan),
        Coordinate([0.0] * DIMENSIONS, 1.0, 0.0, -1.0),
    ],
)
def test_absurd_coordinates_are_refused(theirs: Coordinate) -> None:
    agent = Vivaldi(random.Random(1))
    assert not agent.observe("other", theirs, 10.0)
    assert agent.samples == 0
    assert not agent.restore(theirs)


def test_whatever_comes_the_coordinate_stays_a_place() -> None:
    rng = random.Random(7)
    agent = Vivaldi(random.Random(1))
    for number in range(2_000):
        vector = [rng.uniform(-1e4, 1e4) for _ in range(DIMENSIONS)]
        theirs = Coordinate(vector, rng.uniform(0.0, 1e4), rng.uniform(-1e4, 1e4), rng.uniform(0.0, 1.5))
        agent.observe(str(number % 40), theirs, rng.choice([0.001, 1.0, 100.0, 9_999.0]))
        mine = agent.coordinate
        assert all(math.isfinite(part) for part in mine.vector)
        assert LEAST_HEIGHT_MS <= mine.height <= 1e4
        assert 0.0 < mine.error <= 1.5


def test_peers_are_remembered_up_to_a_number() -> None:
    agent = Vivaldi(random.Random(1))
    for number in range(agent.settings.max_peers + 50):
        agent.observe(str(number), origin(), 10.0)
    assert len(agent._springs) == agent.settings.max_peers


def test_one_slow_answer_is_no_distance() -> None:
    median = MovingMedian(3)
    assert [median.add(value) for value in (10.0, 11.0, 500.0, 10.0, 12.0)] == [10.0, 10.0, 11.0, 11.0, 12.0]


def test_a_restored_coordinate_is_less_certain() -> None:
    agent = Vivaldi(random.Random(1))
    assert agent.restore(Coordinate([3.0] * DIMENSIONS, 2.0, 0.5, 0.01))
    assert agent.coordinate.vector == [3.0] * DIMENSIONS
    assert agent.coordinate.error == RESTORED_ERROR


def test_arrays_tell_the_distances_that_coordinates_tell() -> None:
    rng = random.Random(3)
    places = [Coordinate([rng.gauss(0, 50) for _ in range(DIMENSIONS)], rng.random() * 9, rng.gauss(0, 20)) for _ in range(20)]
    together = distances_ms(as_arrays(places), as_arrays(places[:7]))
    one_by_one = [[one.distance_ms(other) for other in places[:7]] for one in places]
    assert np.allclose(together, one_by_one, atol=1e-5)


def test_the_generated_internet_is_like_the_king_data() -> None:
    """Of which is published: 1,740 nodes, median 159 ms, at most 800 ms (Dabek et al. 2004), and that 85 % of the pairs have a
    shorter way by a third node (Ledlie et al. 2007, figure 3). With fewer nodes there are fewer ways around: 512 here."""
    rtt_ms = topologies.internet(512, np.random.default_rng(1))
    assert np.allclose(rtt_ms, rtt_ms.T)
    assert (np.diag(rtt_ms) == 0.0).all()
    pairs = np.triu_indices(512, 1)
    assert 140.0 < np.median(rtt_ms[pairs]) < 180.0
    assert 400.0 < rtt_ms.max() < 1_000.0
    around = np.full_like(rtt_ms, np.inf)
    for third in range(512):
        way = rtt_ms[:, third, np.newaxis] + rtt_ms[np.newaxis, third, :]
        way[third], way[:, third] = np.inf, np.inf
        np.minimum(around, way, out=around)
    assert 0.65 < (around < rtt_ms)[pairs].mean() < 0.9


def test_three_sites_do_not_stay_on_a_line() -> None:
    """Whoever begins between nodes that have moved already is pushed along their line only; that it has to leave."""
    between_ms = np.array([[4.0, 84.0, 150.0], [84.0, 4.0, 120.0], [150.0, 120.0, 4.0]])
    rtt_ms = between_ms[np.arange(6) // 2][:, np.arange(6) // 2] * (1 - np.eye(6))
    far = rtt_ms[np.triu_indices(6, 1)] > 4.0
    assert max(float(errors(settled(rtt_ms, 150, seed), rtt_ms)[far].max()) for seed in range(8)) <= 0.2

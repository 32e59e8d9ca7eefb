"""What simulated brokers know of leaders: the board's delays, and the nearest leader by place and by asking the network."""

from __future__ import annotations

import math
import random
from typing import Any

import msgspec
import numpy as np
import pytest

from nearcast.network.conditions import Conditions
from nearcast.scenario.assembly import build_network
from nearcast.scenario.events import ChangeAccess, Crash
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, LatencyModel, Site, SiteLink, Topology
from nearcast.simulation.group_knowledge import Board, Known, Surroundings, unit_vectors
from nearcast.simulation.world import World


def heard(board: Board, reader: int, now: float, known_for_s: float = 0.0) -> set[int]:
    mask = board.heard(reader, now, known_for_s)
    return set(board.who[: board.listed][mask].tolist())


def test_an_announcement_takes_its_way_to_the_cloud_and_on() -> None:
    board = Board(np.array([0.1, 0.2, 0.4]), None)
    board.post(0, 1.0)
    assert heard(board, 1, 1.25) == set()
    assert heard(board, 1, 1.31) == {0}
    assert heard(board, 2, 1.45) == set()
    assert heard(board, 2, 1.51) == {0}
    assert heard(board, 2, 1.51, known_for_s=1.0) == set()
    assert heard(board, 2, 2.51, known_for_s=1.0) == {0}


def test_so_does_its_end() -> None:
    board = Board(np.array([0.1, 0.2, 0.4]), None)
    board.post(0, 0.0)
    board.withdraw(0, 1.0)
    assert not board.is_listed(0)
    assert heard(board, 1, 1.25) == {0}
    assert heard(board, 1, 1.35) == set()
    assert heard(board, 2, 1.45) == {0}
    assert heard(board, 2, 1.55) == set()
    assert board.listed == 0


def test_a_leader_again() -> None:
    board = Board(np.zeros(3), None)
    board.post(0, 0.0)
    board.withdraw(0, 1.0)
    board.post(0, 1.0)
    board.post(0, 1.5)  # said again: nothing new
    assert heard(board, 1, 2.0) == {0}
    assert board.latest == 1.0
    board.withdraw(2, 2.0)  # never was one
    assert heard(board, 1, 3.0) == {0}


def test_entries_are_kept_together() -> None:
    rng = random.Random(5)
    board = Board(np.zeros(40), None)
    leaders: set[int] = set()
    for moment in range(2_000):
        who = rng.randrange(39)
        if who in leaders:
            leaders.discard(who)
            board.withdraw(who, float(moment))
        else:
            leaders.add(who)
            board.post(who, float(moment))
        assert heard(board, 39, float(moment)) == leaders
    assert board.listed <= 40


def scenario(rng: random.Random, brokers: int = 60, **fields: Any) -> Scenario:
    """Brokers anywhere, one at each place."""
    sites = tuple(
        Site(name=f"site-{number}", latitude=math.degrees(math.asin(rng.uniform(-1, 1))), longitude=rng.uniform(-180, 180))
        for number in range(brokers)
    )
    hosts = tuple(Host(name=f"broker-{number}", site=f"site-{number}") for number in range(brokers))
    topology = Topology(name="anywhere", sites=sites, hosts=hosts, model=LatencyModel(kind="linear", base_ms=1.0))
    return Scenario(name="anywhere", topology=topology, protocol="groups", **fields)


@pytest.mark.parametrize("seed", range(5))
def test_the_nearest_by_place_is_the_nearest(seed: int) -> None:
    rng = random.Random(seed)
    described = scenario(rng)
    assert isinstance(described.topology, Topology)
    network, names = build_network(described.topology, rng)
    world = World(network, seed, None, names)
    vectors = unit_vectors(described, None)
    assert vectors is not None
    surroundings = Surroundings(network, names, steady=False)
    network.cut([0, 1, 2, 3], [4, 5, 6, 7, 8, 9])
    surroundings.silent = {10, 11}
    boards = [Board(np.zeros(len(names)), given) for given in (vectors, None)]
    for who in rng.sample(range(len(names)), 30):
        for board in boards:
            board.post(who, 0.0)
    world.now = 1.0
    answers = 0
    for number in range(len(names)):
        for below_ms in (10.0, 40.0, 100.0, 1e9):
            found = [Known(number, board, surroundings, world, 0.5, None).nearest_leader(below_ms, 1.0) for board in boards]
            assert found[0] == found[1], (number, below_ms)
            answers += found[0] != ""
    assert answers > 60


def test_nobody_is_remembered_as_long_as_nobody_comes() -> None:
    rng = random.Random(1)
    described = scenario(rng, 3)
    assert isinstance(described.topology, Topology)
    network, names = build_network(described.topology, rng)
    world = World(network, 1, None, names)
    board = Board(np.zeros(3), unit_vectors(described, None))
    known = Known(0, board, Surroundings(network, names, steady=True), world, 0.0, None)
    world.now = 1.0
    assert known.nearest_leader(1e9, 1.0) == ""
    board.post(1, 1.5)
    assert known.nearest_leader(1e9, 1.0) == "", "not yet: it is said later"
    world.now = 2.0
    assert known.nearest_leader(1e9, 2.0) == "broker-1"
    assert known.latency_ms("broker-1") == pytest.approx(network.one_way_ms(0, 1))
    assert known.latency_ms("nobody") == math.inf
    assert (known.address("broker-1"), known.address("nobody")) == ("broker-1:1884", "")


@pytest.mark.parametrize(
    "fields",
    [
        {"events": (ChangeAccess(at_s=1.0, host="broker-1", conditions=Conditions(latency_ms=5.0)),)},
        {"topology": {"links": (SiteLink(between=("site-0", "site-1"), latency_ms=1.0),)}},
        {"topology": {"model": LatencyModel(kind="generated")}},
        {"topology": {"hosts": (Host(name="broker", site="site-1", count=2),)}},
        {
            "topology": {
                "hosts": (Host(name="a", site="site-1", access=Conditions(latency_ms=1.0)), Host(name="b", site="site-2"))
            }
        },
    ],
)
def test_where_places_do_not_tell(fields: dict[str, Any]) -> None:
    described = scenario(random.Random(1), 3)
    assert isinstance(described.topology, Topology)
    changed = {**fields}
    if "topology" in fields:
        changed["topology"] = msgspec.structs.replace(described.topology, **fields["topology"])
    assert unit_vectors(msgspec.structs.replace(described, **changed), None) is None
    crash = Crash(at_s=1.0, host="broker-1")
    assert unit_vectors(msgspec.structs.replace(described, events=(crash,)), None) is not None

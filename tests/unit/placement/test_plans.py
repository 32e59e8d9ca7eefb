"""Plans on the wire, and the baselines that placement is compared with."""

from __future__ import annotations

import numpy as np
import pytest

from nearcast.errors import ConfigError
from nearcast.placement.baselines import Clients, all_pairs, hashed
from nearcast.placement.deciding import decide
from nearcast.placement.plans import MAX_PLAN_BYTES, PlannedMove, PlanRecord, decode_plan, encode_plan, split_plan
from nearcast.placement.topics import PAPER
from nearcast.telemetry.places import Places
from tests.placement_stories import Topic, at, line, topics_on


def test_a_plan_comes_back_as_it_was() -> None:
    moves = (PlannedMove("t", "b", "a", 7, "latency"), PlannedMove("u", "c"))
    record = PlanRecord(3, 1.5, "spark", moves)
    assert decode_plan(encode_plan(record)) == record


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"\xff",
        b'{"number":1,"time":0,"planner":"x","moves":[{"topic":"","target":"b"}]}',
        b'{"number":1,"time":0,"planner":"x","moves":[{"topic":"t","target":""}]}',
        b"[" * 100_000,
    ],
)
def test_what_is_no_plan_is_refused_in_one_line(data: bytes) -> None:
    with pytest.raises(ConfigError, match="not a plan") as caught:
        decode_plan(data)
    assert "\n" not in str(caught.value)


def test_a_plan_that_is_too_large_is_refused() -> None:
    with pytest.raises(ConfigError, match="fewer moves"):
        decode_plan(b" " * (MAX_PLAN_BYTES + 1))


def test_a_large_plan_can_be_several() -> None:
    record = PlanRecord(3, 1.5, "spark", tuple(PlannedMove(f"t{number}", "b") for number in range(5)))
    parts = split_plan(record, 2)
    assert [(part.number, len(part.moves)) for part in parts] == [(3, 2), (4, 2), (5, 1)]
    assert tuple(move for part in parts for move in part.moves) == record.moves
    assert split_plan(PlanRecord(1, 0.0, "x", ()), 2) == [PlanRecord(1, 0.0, "x", ())]


def test_all_pairs_knows_what_centroids_hide() -> None:
    """Two producers on either side of the consumers: by their centroid, in the middle, all three brokers are as good."""
    fleet = line({"left": 0, "middle": 50, "right": 100})
    topics = topics_on(fleet, Topic("t", [0, 100], [50, 50], bound_ms=60), Topic("one", [100], [100]))
    ids, roles = np.array([0, 0, 0, 0, 1, 1]), np.array([0, 0, 1, 1, 0, 1])
    clients = Clients(ids, roles, Places.of([at(0), at(100), at(50), at(50), at(100), at(100)]), 2)
    exact = clients.worst_cases(topics, np.array([1, 0]), fleet)
    assert exact.tolist() == [[100.0, 50.0, 0.0], [75.0, 25.0, 75.0]]
    plan = decide(topics, fleet, PAPER, 0.0, all_pairs(clients))
    assert [move.target for move in plan.moves] == ["middle", "right"]
    assert clients.worst_cases(topics, np.array([], np.int64), fleet).shape == (0, 3)


def test_hashing_divides_names_evenly_among_usable_brokers_and_always_alike() -> None:
    fleet = line({"a": 0, "b": 1, "c": 2, "d": 3}, usable={"c": 0})
    names = [f"sensors/{number}/value" for number in range(30_000)]
    owners = hashed(names, fleet)
    counts = np.bincount(owners, minlength=4)
    assert counts[2] == 0
    assert all(abs(counts[broker] - 10_000) < 500 for broker in (0, 1, 3))
    assert (hashed(names, fleet) == owners).all()
    assert hashed(["t"], line({"a": 0}, usable={"a": 0})).tolist() == [-1]

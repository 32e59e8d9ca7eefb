"""The broadcast-groups paper's formation study (section IV-A): its own simulation, in rounds, beside ours, on the same cities.

``nearcast experiment groups`` has other cities than the paper's stored runs, so its numbers of groups are others, too. Here
the rule of the paper's simulation runs on our cities: what is left of the difference then would be the formation's.
"""

from __future__ import annotations

import random

import numpy as np
import numpy.typing as npt
import pytest

from nearcast.experiments.group_rules_model import distances_ms
from nearcast.experiments.groups_runs import (
    MS_PER_KM,
    Formed,
    Place,
    chosen,
    city_pool,
    formation_scenario,
    host_name,
    latency_model,
)
from nearcast.simulation.runs import simulate

ASKING = 0.6
"""Of the leaders, in each round."""


@pytest.fixture(scope="module")
def places() -> list[Place]:
    """None as capable as another: with equals, who leads would be up to chance."""
    return list({place.population: place for place in chosen(city_pool(), 500, 1)}.values())


def in_rounds(
    apart_ms: npt.NDArray[np.float64], lcm: list[int], threshold_ms: float, rng: random.Random
) -> tuple[set[int], int]:
    """Who leads in the end, and how many leaders joined another meanwhile. In a round some leaders ask the nearest one; who
    asks is not asked; each of the others joins the best that asked it, or all those join it. Members follow, or lead."""
    members: dict[int, set[int]] = {leader: set() for leader in range(len(lcm))}
    leader_joins = 0
    while True:
        leaders = sorted(members)
        between = apart_ms[np.ix_(leaders, leaders)]
        nearest, least_ms = between.argmin(axis=1), between.min(axis=1)
        if least_ms.min() >= threshold_ms:
            return set(leaders), leader_joins
        asked = {
            leader: leaders[nearest[place]]
            for place, leader in enumerate(leaders)
            if least_ms[place] < threshold_ms and rng.random() < ASKING
        }
        askers: dict[int, list[int]] = {}
        for one, other in asked.items():
            if other not in asked:
                askers.setdefault(other, []).append(one)
        for other, ones in askers.items():
            best = max(ones, key=lambda one: lcm[one])
            for joining, leader in [(other, best)] if lcm[best] > lcm[other] else [(one, other) for one in ones]:
                leader_joins += 1
                members[leader].add(joining)
                for member in members.pop(joining):
                    if apart_ms[member, leader] < threshold_ms:
                        members[leader].add(member)
                    else:
                        members[member] = set()


@pytest.mark.parametrize("threshold_ms", [10.0, 40.0])
def test_the_papers_simulation_has_the_same_leaders_on_the_same_cities(places: list[Place], threshold_ms: float) -> None:
    """IV-A and II-C. Both end with the same leaders, whatever happened on the way: members are less capable than their
    leaders, so a broker leads if and only if no leader below the threshold is more capable."""
    positions = [(place.latitude, place.longitude) for place in places]
    apart_ms = distances_ms(positions, positions, MS_PER_KM)
    np.fill_diagonal(apart_ms, np.inf)
    formed = Formed()
    outcome = simulate(formation_scenario(places, threshold_ms, latency_model(fibre=False)), 1, observers=[formed])
    assert outcome.violation is None, outcome.violation
    leaders, leader_joins = in_rounds(apart_ms, [place.population for place in places], threshold_ms, random.Random(1))
    assert set(formed.leaders.values()) == {host_name(places[number]) for number in leaders}
    # On the way there chance decides; every merger is a leader that joined, in both.
    assert outcome.figures["leader_joins"] == pytest.approx(leader_joins, rel=0.2)

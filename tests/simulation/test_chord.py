"""Rings of replica sets in the simulator: nothing that clients saw contradicts one register per topic, no key has two owners,
and in the end there is the one ring that there should be. By hand, more of it::

    nearcast simulate chord --seeds 100
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nearcast.errors import InvariantViolated
from nearcast.scenario.events import Cut, RandomFaults
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.simulation.chord_histories import Began, Ended, History
from nearcast.simulation.runs import simulate


def scenario(hosts: int = 4, events: tuple[Cut, ...] = (), faults: RandomFaults | None = None, **settings: Any) -> Scenario:
    links = tuple(
        SiteLink(between=pair, latency_ms=latency_ms, jitter_ms=1.0, loss=0.01)
        for pair, latency_ms in ((("a", "b"), 5.0), (("a", "c"), 12.0), (("b", "c"), 14.0))
    )
    topology = Topology(
        name="three-sites",
        sites=tuple(Site(name=name) for name in "abc"),
        links=links,
        hosts=tuple(Host(name=name, site=name, count=hosts) for name in "abc"),
    )
    return Scenario(
        name="ring",
        protocol="chord",
        topology=topology,
        duration_s=40.0,
        settle_s=120.0,
        events=events,
        random_faults=faults,
        settings={"topics": 20, "operations_hz": 3.0} | settings,
    )


@pytest.mark.parametrize("seed", range(1, 5))
def test_sets_that_come_leave_are_lost_and_get_other_leaders(seed: int) -> None:
    churn: dict[str, Any] = {
        "leaves_per_minute": 4.0,
        "losses_per_minute": 2.0,
        "elections_per_minute": 10.0,
        "away_s": 10.0,
        "late": 1,
    }
    outcome = simulate(scenario(hosts=6, replicas=3, placement="distributed", **churn), seed)
    assert outcome.ok, f"seed {seed}: {outcome.violation}"
    assert outcome.figures["writes"] > 30


@pytest.mark.parametrize("seed", range(1, 5))
def test_machines_that_die_and_links_that_break(seed: int) -> None:
    faults = RandomFaults(kills_per_minute=6, crashes_per_minute=6, cuts_per_minute=3, pauses_per_minute=3, skews_per_minute=3)
    outcome = simulate(scenario(faults=faults, replicas=1), seed)
    assert outcome.ok, f"seed {seed}: {outcome.violation}"
    assert outcome.figures["writes"] > 30


@pytest.mark.parametrize("seed", range(1, 4))
def test_a_site_is_cut_off_and_comes_back(seed: int) -> None:
    cut = Cut(at_s=10.0, source=("c",), for_s=20.0)
    outcome = simulate(scenario(events=(cut,), replicas=1), seed)
    assert outcome.ok, f"seed {seed}: {outcome.violation}"


def test_the_ready_scenario_loads_and_one_seed_is_one_run() -> None:
    ready = msgspec.structs.replace(load_scenario("chord"), duration_s=15.0, settle_s=5.0, events=(), random_faults=None)
    ready = msgspec.structs.replace(
        ready, settings={**ready.settings, "late": 0, "losses_per_minute": 0, "leaves_per_minute": 0}
    )
    first, second = simulate(ready, 3), simulate(ready, 3)
    assert first.ok, first.violation
    assert first.digest == second.digest
    assert first.figures == second.figures


# --- the check itself -----------------------------------------------------------------------------------------------------


def history(*facts: Began | Ended) -> None:
    checked = History()
    for fact in facts:
        if isinstance(fact, Began):
            checked.began(fact)
        else:
            checked.ended(fact, "somebody")


def test_a_history_that_can_be() -> None:
    history(
        Began(1, "t", 0),
        Began(2, "t", None),
        Ended(1, 10, "a", True),
        Ended(2, 0, "", True),  # it overlapped the write
        Began(3, "t", 10),
        Began(4, "t", 10),
        Ended(3, 11, "b", True),
        Ended(4, 11, "b", False),
    )


@pytest.mark.parametrize(
    "facts",
    [
        (Began(1, "t", 0), Ended(1, 10, "a", True), Began(2, "t", None), Ended(2, 0, "", True)),
        (Began(1, "t", 0), Began(2, "t", 0), Ended(1, 10, "a", True), Ended(2, 11, "b", True)),
        (Began(1, "t", 0), Began(2, "t", None), Ended(1, 10, "a", True), Ended(2, 10, "b", True)),
        (Began(1, "t", 0), Began(2, "t", 5), Began(3, "t", 10), Ended(1, 10, "a", True), Ended(2, 12, "b", True)),
    ],
    ids=["older after newer", "both were first", "two writers", "something in between"],
)
def test_a_history_that_cannot_be(facts: tuple[Began | Ended, ...]) -> None:
    with pytest.raises(InvariantViolated):
        history(*facts)

"""The protocol ``groups``: the shipped formation on simulated hosts, and what is held against it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.groups.formation import Formation
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeAccess, Crash, Cut, Event, Kill, Pause, RandomFaults
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.simulation.groups import Groups, Membership
from nearcast.simulation.hosts import Host as SimulatedHost
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.runs import Outcome, simulate

NEAR_MS, FAR_MS = 2.0, 20.0


class Leaders(Invariant):
    """Who follows whom in the end."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def observed(self, host: SimulatedHost, fact: object) -> None:
        if isinstance(fact, Membership):
            self.of[fact.broker] = fact.leader


def scenario(*events: Event, **settings: Any) -> Scenario:
    """Two towns with three brokers each, 20 ms apart, and a cloud; within a town it is 2 ms."""
    near = Conditions(latency_ms=NEAR_MS)
    topology = Topology(
        name="two-towns",
        sites=(Site(name="east", local=near), Site(name="west", local=near), Site(name="middle")),
        links=(
            SiteLink(between=("east", "middle"), latency_ms=FAR_MS / 2),
            SiteLink(between=("west", "middle"), latency_ms=FAR_MS / 2),
        ),
        hosts=(Host(name="e", site="east", count=3), Host(name="w", site="west", count=3), Host(name="cloud", site="middle")),
    )
    lcm = {"e-1": 5, "e-2": 9, "w-3": 2, "w-1": 1, "w-2": 1, "e-3": 0}
    return Scenario(
        name="towns",
        topology=topology,
        protocol="groups",
        settings={"threshold_ms": 5.0, "cloud": "cloud", "lcm": lcm, **settings},
        duration_s=100.0,
        settle_s=0.0,
        events=events,
    )


def formed(described: Scenario, seed: int = 1) -> tuple[Outcome, dict[str, str]]:
    leaders = Leaders()
    outcome = simulate(described, seed, observers=[leaders])
    assert outcome.violation is None, outcome.violation
    return outcome, leaders.of


def test_the_most_capable_of_a_town_leads_it() -> None:
    outcome, leaders = formed(scenario())
    assert leaders == {"e-1": "e-2", "e-2": "e-2", "e-3": "e-2", "w-1": "w-3", "w-2": "w-3", "w-3": "w-3"}
    assert outcome.figures["groups"] == 2
    assert outcome.figures["largest_group"] == 3
    assert outcome.figures["stable"] is True
    assert outcome.virtual_s < 20.0, "it ends when nothing happens any more"


@pytest.mark.parametrize(("threshold_ms", "groups"), [(0.0, 6), (2.0, 6), (2.1, 2), (20.0, 2), (21.0, 1), (1e9, 1)])
def test_the_threshold_is_strict_and_has_two_ends(threshold_ms: float, groups: int) -> None:
    outcome, leaders = formed(scenario(threshold_ms=threshold_ms))
    assert outcome.figures["groups"] == groups == len(set(leaders.values()))
    assert outcome.figures["leaves"] == 0
    if groups == 1:
        assert set(leaders.values()) == {"e-2"}


def test_messages_are_counted_as_the_paper_does() -> None:
    figures = formed(scenario(threshold_ms=1e9))[0].figures
    assert figures["leader_joins"] + figures["member_joins"] >= 5
    assert figures["paper_messages"] == 3 * figures["leader_joins"] + figures["notifications"] + figures["member_joins"]
    assert figures["messages"] >= figures["paper_messages"]
    assert figures["megabytes"] > 0


@pytest.mark.parametrize("seed", range(1, 6))
@pytest.mark.parametrize(
    "event",
    [
        Crash(at_s=12.0, host="e-2", restart_after_s=10.0),
        Crash(at_s=2.0, host="e-2", restart_after_s=1.0),
        Kill(at_s=12.0, host="w-3", restart_after_s=0.0),
        Pause(at_s=12.0, host="e-2", for_s=8.0),
        Cut(at_s=12.0, source=("e-2",), for_s=10.0),
        Cut(at_s=12.0, source=("e-1", "w-1"), target=("cloud",), for_s=10.0),
        Crash(at_s=0.5, host="cloud", restart_after_s=20.0),
        ChangeAccess(at_s=12.0, host="e-2", conditions=Conditions(latency_ms=10.0), for_s=10.0),
    ],
    ids=lambda event: event.__struct_config__.tag,
)
def test_groups_are_the_same_after_a_fault(event: Event, seed: int) -> None:
    outcome, leaders = formed(scenario(event), seed)
    assert len(outcome.applied) == 1
    groups = {leader: frozenset(name for name in leaders if leaders[name] == leader) for leader in set(leaders.values())}
    assert set(groups.values()) == {frozenset({"e-1", "e-2", "e-3"}), frozenset({"w-1", "w-2", "w-3"})}
    assert all(leader in group for leader, group in groups.items())


def test_one_that_stays_away_is_missed() -> None:
    outcome, leaders = formed(scenario(Crash(at_s=12.0, host="e-2")))
    assert leaders == {"e-1": "e-1", "e-3": "e-1", "w-1": "w-3", "w-2": "w-3", "w-3": "w-3"}
    assert outcome.figures["groups"] == 2


@pytest.mark.parametrize("seed", range(1, 9))
def test_whatever_goes_wrong_it_ends(seed: int) -> None:
    faults = RandomFaults(
        kills_per_minute=6.0,
        crashes_per_minute=6.0,
        pauses_per_minute=6.0,
        cuts_per_minute=6.0,
        slow_links_per_minute=6.0,
        skews_per_minute=6.0,
        quiet_s=40.0,
    )
    described = msgspec.structs.replace(scenario(threshold_ms=5.0), random_faults=faults, duration_s=160.0)
    outcome, _ = formed(described, seed)
    assert outcome.applied


def test_one_seed_is_one_run() -> None:
    first, second = (formed(scenario(), 3)[0] for _ in range(2))
    assert (first.digest, first.figures) == (second.digest, second.figures)
    assert formed(scenario(), 4)[0].digest != first.digest


class Deaf(Groups):
    """Nobody hears of anybody."""

    def formation_of(self, host: SimulatedHost) -> Formation:
        self.board.post = lambda who, now: None  # type: ignore[method-assign]
        return super().formation_of(host)


def test_leaders_that_should_have_merged_are_found() -> None:
    described = msgspec.structs.replace(scenario(), protocol=f"{__file__}:Deaf")
    violation = simulate(described, 1).violation
    assert violation is not None
    assert violation.message.startswith("nothing has changed for 30 s, and e-1 and e-2 both lead, 2 ms apart: below 5 ms; ")
    assert violation.message.endswith("; and 1 more")
    short = msgspec.structs.replace(described, duration_s=3.0)
    violation = simulate(short, 1).violation
    assert violation is not None
    assert violation.message.startswith("group formation has not ended: e-1 and e-2 both lead")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"threshold_ms": -1}, "`settings` of protocol groups: `threshold_ms` must be 0 or more"),
        ({"leave_threshold_ms": 4.0}, "`leave_threshold_ms` must not be below `threshold_ms`"),
        ({"quiet_s": 0}, "`quiet_s` must be above 0"),
        ({"thresold_ms": 5}, "unknown field `thresold_ms`"),
        ({"cloud": "sky"}, "`settings.cloud`: there is no host sky"),
        ({"lcm": [1, 2]}, "`settings.lcm` has 2 numbers for 6 brokers"),
        ({"lcm": {"nobody": 1}}, "`settings.lcm`: there is no broker nobody"),
        ({"lcm": {"e-1": -1}}, "`settings.lcm` of e-1 must be 0 or more"),
    ],
)
def test_refusals(settings: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        simulate(scenario(**settings))
    assert complaint in str(caught.value)


def test_the_ready_scenario() -> None:
    outcome, leaders = formed(load_scenario("groups"))
    assert len(leaders) == 48
    assert leaders["vienna"] == leaders["bratislava"]
    assert outcome.virtual_s > 170.0

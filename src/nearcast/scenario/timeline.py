"""All that happens in a scenario, in one list: its events, its moves, its random faults. Both runtimes play this list."""

from __future__ import annotations

from random import Random

from nearcast.scenario.drawing import draw
from nearcast.scenario.events import Event
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.mobility import moves
from nearcast.scenario.scenario import Scenario


def timeline(scenario: Scenario, seed: int) -> tuple[Event, ...]:
    """Every event of a loaded scenario in the order of its time; at the same time, in the order of the file, then moves, then
    random faults. The same seed gives the same list, and faults do not change with how hosts move."""
    topology = topology_of(scenario)
    found: list[Event] = list(scenario.events)
    for position, mobility in enumerate(scenario.mobility):
        found += moves(topology, mobility, scenario.duration_s, Random(f"{seed}/mobility/{position}"))
    if scenario.random_faults is not None:
        access = {name: host.access for host in topology.hosts for name in host.names()}
        hosts = topology.host_names()
        found += draw(scenario.random_faults, hosts, scenario.duration_s, Random(f"{seed}/faults"), access)
    return tuple(sorted(found, key=lambda event: event.at_s))

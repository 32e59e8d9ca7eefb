"""How long a Chord ring takes to be whole again after a set of it was lost (Canal, section IV-E), with the shipped machine in
virtual time: eight sets of three replicas at one site, as Canal had on its campus.

*Whole*: all sets that are left have their true neighbours and leases again. Nobody else may answer for the lost range before:
whoever takes it over waits until the lost set's lease has run out.
"""

from __future__ import annotations

import random
from typing import Any

from nearcast.errors import InvariantViolated
from nearcast.network.conditions import Conditions
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.files import resolve
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.simulation.chord import Chord
from nearcast.simulation.chord_invariants import TrueRing
from nearcast.simulation.world import World

SETS = 8
REPLICAS = 3
LOOK_S = 0.02
"""How often it is looked whether the ring is whole."""

PATIENCE_S = 300.0
REST_S = 3.0


def restabilisations(losses: int, seed: int, ring: dict[str, float] | None = None) -> list[float]:
    """Seconds from the loss of a set, all of its replicas, until the ring is whole without it; one after the other, each after
    the set was back."""
    scenario = resolve(
        Scenario(
            name="canal-ring",
            protocol="chord",
            topology=Topology(
                name="campus",
                sites=(Site(name="campus", local=Conditions(latency_ms=0.1)),),
                hosts=(Host(name="node", site="campus", count=SETS * REPLICAS),),
            ),
            duration_s=1e6,
            settings={"replicas": REPLICAS, "operations_hz": 0.01, "ring": ring or {}},
        )
    )
    network, host_names = build_network(topology_of(scenario), random.Random(f"{seed}/network"))
    world = World(network, seed, None, host_names)
    chord = Chord()
    whole = next(each for each in chord.build(world, scenario) if isinstance(each, TrueRing))
    rng = random.Random(f"{seed}/losses")
    _until_whole(world, whole)
    found: list[float] = []
    for _ in range(losses):
        world.run(world.now + REST_S * (1.0 + rng.random()))
        lost = chord.sets[rng.randrange(SETS)]
        began = world.now
        for host in lost.hosts:
            host.crash()
        _until_whole(world, whole)
        found.append(world.now - began)
        for host in lost.hosts:
            host.boot()
        _until_whole(world, whole)
    return found


def _until_whole(world: World, whole: TrueRing) -> None:
    until = world.now + PATIENCE_S
    world.run(world.now + LOOK_S)
    problem: Any = whole.problem()
    while problem is not None:
        if world.now >= until:
            raise InvariantViolated(*problem)
        world.run(world.now + LOOK_S)
        problem = whole.problem()

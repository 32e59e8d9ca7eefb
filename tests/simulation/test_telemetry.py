"""Telemetry in virtual time: places that gossip found, latencies that gateways told, worst cases near the network's truth."""

from __future__ import annotations

import random

import msgspec
import pytest

from nearcast.fabric.audience import Audience
from nearcast.fabric.crowds import Gathering
from nearcast.scenario.assembly import build_network
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.fabric import Fabric
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_controller import SimulatedController
from nearcast.simulation.programs import Program, ProgramNode
from nearcast.simulation.world import World

SEED = 7

#: One way between the network's parts: a home and its gateway, a gateway or broker and another one of its site, two sites.
HOME_MS = 7.0
SITE_MS = 2.0
BETWEEN_MS = {("europe", "america"): 42.0, ("america", "asia"): 60.0, ("europe", "asia"): 75.0}
SITE_OF = {"frankfurt": "europe", "ashburn": "america", "tokyo": "asia"}


def scenario(planner: str) -> Scenario:
    """The game of the ready scenario, whose topics stay with their first owner."""
    loaded = load_scenario("owned")
    assert loaded.controller is not None
    controller = msgspec.structs.replace(loaded.controller, settings={**loaded.controller.settings, "planner": planner})
    return msgspec.structs.replace(loaded, controller=controller)


@pytest.fixture(scope="module")
def world() -> World:
    """At a time when those of Europe and of America play."""
    described = scenario("none")
    network, names = build_network(topology_of(described), random.Random(f"{SEED}/network"))
    made = World(network, SEED, None, names)
    made.invariants = Fabric().build(made, described)
    made.run(38.0)
    return made


def programs(world: World, host: str) -> list[Program]:
    node = world.host(host).node
    assert isinstance(node, ProgramNode)
    return node.programs


def broker(world: World, host: str) -> FabricBroker:
    (found,) = [program for program in programs(world, host) if isinstance(program, FabricBroker)]
    return found


def one_way_ms(site: str, owner: str) -> float:
    """The truth: from a player's home by its gateway to a broker."""
    there = SITE_OF[owner]
    if site == there:
        return HOME_MS + SITE_MS
    between = BETWEEN_MS.get((site, there)) or BETWEEN_MS[there, site]
    return HOME_MS + between


def crowds(world: World, host: str) -> dict[str, tuple[str, Gathering, Gathering]]:
    """By topic: its owner, and the crowds of producers and of consumers that a broker would report now."""
    fabric = broker(world, host).fabric
    now = world.host(host).now
    audience = Audience(fabric, broker(world, host).gossip)
    audience.begin(None, now)
    audience.may_measure()
    found = {}
    for topic in fabric.ownership.topics.values():
        producers, consumers = Gathering(), Gathering()
        audience.producers(topic, producers, now)
        audience.consumers(topic, consumers)
        for crowd in (producers, consumers):
            crowd.sum_up(topic.owner, audience.place_of(topic.owner), topic.owner == fabric.name)
        found[topic.text] = (topic.owner, producers, consumers)
    return found


def test_every_player_is_counted_once_whichever_way_its_messages_go(world: World) -> None:
    for topic in ("game/moves", "game/trades"):
        found = [crowds(world, host)[topic] for host in SITE_OF if topic in crowds(world, host)]
        assert sum(producers.count for _, producers, _ in found) == 5
        assert sum(consumers.count for _, _, consumers in found) == 5


def test_the_worst_case_is_near_the_truth(world: World) -> None:
    """Clients are by their gateway in the space, at their own latency; coordinates have had half a minute."""
    owner = crowds(world, "frankfurt")["game/moves"][0]
    truth = max(one_way_ms(site, owner) for site in ("europe", "america"))
    for role in (1, 2):
        worst = max(crowds(world, host)["game/moves"][role].worst_ms for host in ("frankfurt", "ashburn"))  # type: ignore[union-attr]
        assert worst == pytest.approx(truth, rel=0.15)


def test_no_client_is_farther_than_its_crowd_says(world: World) -> None:
    owner, _, consumers = crowds(world, "frankfurt")["game/moves"]
    assert consumers.placed
    assert consumers.worst_ms >= 0.85 * min(one_way_ms("europe", owner), one_way_ms("america", owner))
    assert consumers.height > 2 * HOME_MS * 0.9, "the way home is in the height, there and back"


def test_the_controller_gets_whole_rounds_of_all_brokers_and_nothing_else(world: World) -> None:
    (controller,) = [program for program in programs(world, "controller") if isinstance(program, SimulatedController)]
    telemetry = controller.machine.topics.telemetry
    assert telemetry.refused == 0
    assert telemetry.reports >= 3 * 30
    assert telemetry.rounds >= 3 * 30

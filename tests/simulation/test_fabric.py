"""The shipped fabric in virtual time: links, gateways, controller and moves, under every fault the simulator has."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.scenario.events import Crash, Cut, Event, FailDisk, Kill, RandomFaults
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.fabric import Fabric
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.runs import Outcome, simulate
from nearcast.simulation.shrinking import shrink
from nearcast.simulation.streams import Stream
from tests.simulation.fabrics import fabric

#: How many seeds of each scenario, and how many random fabrics, the suite runs. By hand: thousands.
SEEDS = 2
FABRICS = 6

TOPOLOGY = Topology(
    name="test",
    sites=(Site(name="near"), Site(name="far")),
    links=(SiteLink(between=("near", "far"), latency_ms=10.0, jitter_ms=1.0),),
    hosts=(
        Host(name="one", site="near"),
        Host(name="two", site="far"),
        Host(name="three", site="near"),
        Host(name="gate", site="near"),
        Host(name="door", site="far"),
        Host(name="phone", site="far"),
        Host(name="watch", site="near"),
    ),
)

CHAIN = [["one", "two"], ["three", "two"]]


def scenario(
    *,
    durable: bool = True,
    gateways: bool = False,
    controller: bool = False,
    moves_per_minute: float = 0.0,
    links: list[list[str]] | None = None,
    faults: RandomFaults | None = None,
    events: tuple[Event, ...] = (),
    protocol: str = "fabric",
    duration_s: float = 5.0,
    settle_s: float = 12.0,
    settings: dict[str, Any] | None = None,
) -> Scenario:
    """Three brokers, and clients of every kind at each or behind two gateways."""
    publish = tuple(Publishing(topic="{client}/" + str(qos), rate_hz=5.0, qos=qos, retain=qos == 1) for qos in (0, 1, 2))
    doors = ("gate", "door", "gate") if gateways else ("one", "two", "three")
    versions: tuple[Any, ...] = ("5.0", "3.1.1", "5.0")
    chosen: dict[str, Any] = {
        "snapshot_bytes": 2_000,
        "snapshot_step_bytes": 300,
        "fabric": {"probe_interval_seconds": 0.5, "fail_after_seconds": 2.0},
        "moves_per_minute": moves_per_minute,
        **(settings or {}),
    }
    if links is not None:
        chosen["links"] = links
    return Scenario(
        name="test",
        topology=TOPOLOGY,
        protocol=protocol,
        settings=chosen,
        duration_s=duration_s,
        settle_s=settle_s,
        brokers=tuple(Broker(host=name, fabric=True, durable=durable) for name in ("one", "two", "three")),
        gateways=(Gateway(host="gate"), Gateway(host="door")) if gateways else (),
        controller=Controller(host="watch", interval_s=2.0, ping_interval_ms=50.0) if controller else None,
        clients=(
            *(
                Clients(
                    name=f"c{index}",
                    host="phone",
                    broker=door,
                    clean_start=index == 2,
                    keepalive_s=2,
                    protocol=versions[index],
                    publish=publish,
                    subscribe=(Subscribing(filter="+/0", qos=index), Subscribing(filter="+/+", qos=2 - index)),
                )
                for index, door in enumerate(doors)
            ),
        ),
        random_faults=faults,
        events=events,
    )


def faults(*hosts: str, per_minute: float = 20.0) -> RandomFaults:
    return RandomFaults(
        hosts=hosts,
        kills_per_minute=per_minute,
        crashes_per_minute=per_minute,
        pauses_per_minute=per_minute / 2,
        cuts_per_minute=per_minute / 2,
        slow_links_per_minute=per_minute / 4,
        skews_per_minute=per_minute / 4,
        max_fault_s=1.0,
        quiet_s=1.0,
    )


def run(described: Scenario, seed: int) -> Outcome:
    outcome = simulate(described, seed)
    assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
    return outcome


CASES = {
    "durable": scenario(faults=faults("one", "two", "three")),
    "durable, in a chain": scenario(links=CHAIN, faults=faults("one", "two", "three")),
    "not durable": scenario(durable=False, faults=faults("one", "two", "three")),
    "clients and brokers, a slow disk": scenario(
        faults=faults(), events=tuple(FailDisk(at_s=0.0, host=name, sync_s=0.1) for name in ("one", "three"))
    ),
    "gateways and moves": scenario(gateways=True, moves_per_minute=240.0, faults=faults("gate", "door", per_minute=10.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_promised_holds_under_random_faults(name: str) -> None:
    delivered = sum(run(CASES[name], seed).figures["delivered"] for seed in range(1, SEEDS + 1))
    assert delivered > 100 * SEEDS, "the faults left something to look at"


def test_what_is_promised_holds_in_random_fabrics() -> None:
    for number in range(1, FABRICS + 1):
        run(fabric(number, settle_s=15.0), number)


@pytest.mark.parametrize("links", [None, CHAIN])
def test_without_faults_everything_arrives_once(links: list[list[str]] | None) -> None:
    figures = run(scenario(links=links), 1).figures
    assert figures["expected"] > 300
    assert (figures["lost"], figures["pending"], figures["duplicated"], figures["crossed_again"]) == (0, 0, 0, 0)
    assert figures["crossed"] > 100, "clients of one broker get what those of others publish"


@pytest.mark.parametrize("durable", [False, True])
def test_clients_that_are_moved_all_the_time_miss_nothing_and_get_nothing_twice(durable: bool) -> None:
    figures = run(scenario(durable=durable, gateways=True, moves_per_minute=1_200.0), 1).figures
    assert figures["moved"] > 30
    assert figures["moves_failed"] == 0
    assert (figures["lost"], figures["pending"], figures["duplicated"]) == (0, 0, 0)


def test_a_controller_brings_clients_to_near_brokers() -> None:
    figures = run(scenario(gateways=True, controller=True, duration_s=8.0), 1).figures
    assert (figures["lost"], figures["pending"], figures["duplicated"]) == (0, 0, 0)
    assert figures["gateway_brokers"]["gateway-door"] == "two"
    assert figures["gateway_brokers"]["gateway-gate"] in ("one", "three")


def test_a_broker_that_stops_hands_over_what_it_has() -> None:
    described = scenario(gateways=True)
    brokers = tuple(
        msgspec.structs.replace(broker, stop_s=3.0) if broker.host == "two" else broker for broker in described.brokers
    )
    figures = run(msgspec.structs.replace(described, brokers=brokers), 1).figures
    assert (figures["lost"], figures["pending"], figures["duplicated"]) == (0, 0, 0)
    assert figures["moved"] >= 1


def test_queues_that_are_too_long_for_memory_go_on_in_files() -> None:
    described = scenario(
        events=(Cut(at_s=1.0, source=("two",), target=("one", "three"), for_s=3.0),),
        settings={"fabric": {"probe_interval_seconds": 0.5, "fail_after_seconds": 2.0, "max_queued_messages": 10}},
    )
    for seed in (1, 2):
        figures = run(described, seed).figures
        assert figures["pending"] == 0


def test_a_power_cut_of_two_brokers_at_once() -> None:
    described = scenario(
        links=CHAIN,
        events=tuple(Crash(at_s=at_s, host=name, restart_after_s=0.5) for at_s in (1.0, 2.5) for name in ("one", "two")),
    )
    for seed in range(1, SEEDS + 1):
        assert run(described, seed).figures["pending"] == 0


@pytest.mark.parametrize("name", ["fabric", "emma"])
def test_the_ready_scenarios(name: str) -> None:
    described = load_scenario(name)
    if name == "fabric":
        described = msgspec.structs.replace(described, duration_s=15.0, settle_s=15.0)
    figures = run(described, 1).figures
    assert figures["delivered"] > 300
    assert figures["pending"] == 0


def test_one_seed_is_one_run() -> None:
    described = scenario(gateways=True, controller=True, moves_per_minute=240.0, faults=faults(), duration_s=3.0, settle_s=3.0)
    first, second = simulate(described, 7), simulate(described, 7)
    assert first.digest == second.digest
    assert first.violation == second.violation


# --- planted faults: the invariants find them -----------------------------------------------------------------------------


class RepeatingBroker(FabricBroker):
    """Forgets, whenever a link is lost, what it has of the other broker's messages."""

    def lost(self, stream: Stream, reason: str) -> None:
        for peer in self.fabric.peers.values():
            peer.origin.received = 0
        super().lost(stream, reason)


class ForgettingBroker(FabricBroker):
    """Confirms messages of other brokers before it has them on disk."""

    def request_sync(self) -> None:
        while self.commits.begin_sync():
            self.commits.synced()


class DeafBroker(FabricBroker):
    """Forgets, all the time, what is wanted at other brokers."""

    def tick(self) -> None:
        for peer in self.fabric.peers.values():
            for name in list(peer.session.subscriptions):
                self.engine.sessions.unsubscribe(peer.session, name)
        super().tick()


class Repeating(Fabric):
    fabric_broker_class = RepeatingBroker


class Forgetting(Fabric):
    fabric_broker_class = ForgettingBroker


class Deaf(Fabric):
    fabric_broker_class = DeafBroker


@pytest.mark.parametrize(
    ("mutant", "said", "faulty"),
    [
        (Repeating, "twice", faults("one", "two", "three", per_minute=60.0)),
        (Forgetting, "lost|session|subscription|twice|gone", faults("one", "two", "three", per_minute=40.0)),
        (Deaf, "believes|does not know", None),
    ],
)
def test_a_planted_fault_is_found(mutant: type[Fabric], said: str, faulty: RandomFaults | None) -> None:
    described = scenario(
        protocol=f"{mutant.__module__}:{mutant.__name__}",
        faults=faulty,
        events=tuple(FailDisk(at_s=0.0, host=name, sync_s=0.1) for name in ("one", "two", "three")),
    )
    sys.modules.setdefault(mutant.__module__, sys.modules[__name__])
    for seed in range(1, 16):
        outcome = simulate(described, seed)
        if outcome.violation is not None:
            assert any(word in outcome.violation.message for word in said.split("|")), outcome.violation
            return
    pytest.fail("no seed found it")


def test_a_failing_schedule_is_shrunk() -> None:
    described = scenario(
        protocol=f"{Deaf.__module__}:Deaf",
        events=(Kill(at_s=1.0, host="phone", restart_after_s=0.5), Cut(at_s=2.0, source=("one",), for_s=0.5)),
        duration_s=3.0,
        settle_s=5.0,
    )
    sys.modules.setdefault(Deaf.__module__, sys.modules[__name__])
    failed = simulate(described, 1)
    assert failed.violation is not None
    assert shrink(described, failed).applied == ()


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"links": [["one", "four"]]}, "no broker is called four"),
        ({"moves_per_minute": -1.0}, "moves_per_minute"),
        ({"fabric": {"probe_interval_seconds": 0}}, "probe_interval_seconds"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        simulate(scenario(settings=settings), 1)


def test_a_broker_on_its_own_is_refused() -> None:
    described = scenario()
    lonely = msgspec.structs.replace(described, brokers=(*described.brokers[:2], Broker(host="three")))
    with pytest.raises(ConfigError, match="three needs `fabric = true`"):
        simulate(lonely, 1)

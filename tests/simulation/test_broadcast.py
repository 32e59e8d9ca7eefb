"""Broadcast groups with the shipped machines, in virtual time: churn, partitions, loss of the cloud, leaders that die."""

from __future__ import annotations

import sys
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.fabric import errands
from nearcast.fabric.broadcast import Broadcast
from nearcast.mqtt.routing import Target
from nearcast.mqtt.session import Session
from nearcast.mqtt.subscriptions import Subscription
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeLink, Crash, Cut, Event, Kill, RandomFaults
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.fabric import Fabric
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.runs import Outcome, simulate
from tests.simulation.group_fabrics import group_fabric

#: How many seeds of each scenario, and how many random fabrics, the suite runs. By hand: thousands.
SEEDS = 1
FABRICS = 3

BROKERS = ("w1", "w2", "e1", "e2")


def topology(apart_ms: float) -> Topology:
    """Two brokers in the west, two in the east, and a cloud."""
    return Topology(
        name="test",
        sites=(
            Site(name="west", local=Conditions(latency_ms=0.5)),
            Site(name="east", local=Conditions(latency_ms=0.5)),
            Site(name="sky"),
        ),
        links=(
            SiteLink(between=("west", "east"), latency_ms=apart_ms),
            SiteLink(between=("west", "sky"), latency_ms=20.0),
            SiteLink(between=("east", "sky"), latency_ms=20.0),
        ),
        hosts=(
            *(Host(name=name, site="west" if name[0] == "w" else "east") for name in BROKERS),
            Host(name="cloud", site="sky"),
            Host(name="here", site="west"),
            Host(name="there", site="east"),
        ),
    )


def scenario(
    *,
    threshold_ms: float = 5.0,
    apart_ms: float = 15.0,
    topic_class: str = "broadcast",
    events: tuple[Event, ...] = (),
    faults: RandomFaults | None = None,
    merge_kills: float = 0.0,
    protocol: str = "fabric",
    duration_s: float = 5.0,
    settle_s: float = 10.0,
    groups: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Scenario:
    """Each broker has a client that publishes at every QoS and wants everything, and so has the cloud."""
    publish = tuple(Publishing(topic="t/{client}/" + str(qos), rate_hz=3.0, qos=qos) for qos in (0, 1, 2))
    chosen: dict[str, Any] = {
        "snapshot_bytes": 3_000,
        "snapshot_step_bytes": 300,
        "merge_kills": merge_kills,
        "lcm": {"w1": 2.0, "e1": 3.0},
        "fabric": {
            "probe_interval_seconds": 0.5,
            "fail_after_seconds": 1.5,
            "classes": [{"topic": "t/#", "topic_class": topic_class}],
            "groups": {
                "cloud": "mqtt://cloud",
                "threshold_ms": threshold_ms,
                "ping_interval_seconds": 0.2,
                "ping_window": 5,
                **(groups or {}),
            },
        },
        **(settings or {}),
    }
    return Scenario(
        name="test",
        topology=topology(apart_ms),
        protocol=protocol,
        settings=chosen,
        duration_s=duration_s,
        settle_s=settle_s,
        brokers=(Broker(host="cloud", durable=True), *(Broker(host=name, fabric=True, durable=True) for name in BROKERS)),
        clients=tuple(
            Clients(
                name=f"c-{broker}",
                host="here" if broker[0] == "w" else "there",
                broker=broker,
                clean_start=False,
                keepalive_s=2,
                publish=publish,
                subscribe=(Subscribing(filter="t/#", qos=2),),
                start_s=3.0 if broker == "cloud" else 0.0,
            )
            for broker in (*BROKERS, "cloud")
        ),
        events=events,
        random_faults=faults,
    )


def run(described: Scenario, seed: int = 1) -> Outcome:
    outcome = simulate(described, seed)
    assert outcome.violation is None, f"seed {seed}: {outcome.violation}"
    return outcome


FAULTS = RandomFaults(
    hosts=(*BROKERS, "cloud"),
    kills_per_minute=15.0,
    crashes_per_minute=15.0,
    pauses_per_minute=10.0,
    cuts_per_minute=10.0,
    max_fault_s=3.0,
    quiet_s=1.0,
)

LONG: dict[str, Any] = {"duration_s": 8.0, "settle_s": 28.0}
"""Until groups must have ended."""

CASES = {
    "brokers and the cloud die and are cut off": scenario(faults=FAULTS, **LONG),
    "leaders die while groups merge": scenario(apart_ms=3.0, merge_kills=0.5, **LONG),
    "sites lose each other and find each other": scenario(
        **LONG,
        apart_ms=3.0,
        events=(
            Cut(at_s=2.0, source=("west",), target=("east",), for_s=3.0),
            Cut(at_s=6.0, source=("w1",), target=("w2", "e1", "e2"), for_s=1.0),
        ),
    ),
    "the cloud is lost to one site, then dies": scenario(
        **LONG,
        events=(
            Cut(at_s=2.0, source=("sky",), target=("west",), for_s=3.0),
            Crash(at_s=5.5, host="cloud", restart_after_s=1.0),
        ),
    ),
    "leaders are near, then far, then near": scenario(
        **LONG,
        apart_ms=3.0,
        events=(ChangeLink(at_s=3.0, between=("west", "east"), conditions=Conditions(latency_ms=30.0), for_s=3.0),),
    ),
    "all brokers lose power at once": scenario(
        events=tuple(Crash(at_s=2.5, host=name, restart_after_s=0.5) for name in (*BROKERS, "cloud"))
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_promised_holds(name: str) -> None:
    for seed in range(1, SEEDS + 1):
        figures = run(CASES[name], seed).figures
        assert figures["pending"] == 0
        assert figures["delivered"] > 200, "the faults left something to look at"


def test_what_is_promised_holds_in_random_groups() -> None:
    for number in range(1, FABRICS + 1):
        run(group_fabric(number), number)


# --- what groups are for --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold_ms", "groups", "largest"),
    [(0.0, 4, 1), (5.0, 2, 2), (1_000.0, 1, 4)],
    ids=["relay", "groups", "flooding"],
)
def test_flooding_and_relay_are_two_ends_of_one_threshold(threshold_ms: float, groups: int, largest: int) -> None:
    figures = run(scenario(threshold_ms=threshold_ms)).figures
    assert (figures["groups"], figures["largest_group"]) == (groups, largest)
    assert (figures["lost"], figures["pending"]) == (0, 0)
    assert (figures["flooded"] == 0) == (groups == 4)


def test_messages_inside_a_group_need_no_cloud() -> None:
    """Section II-D: local and in-group delivery goes on."""
    described = scenario(
        events=(Cut(at_s=3.0, source=("cloud",), for_s=5.0),), threshold_ms=1_000.0, duration_s=6.0, settle_s=20.0
    )
    brokers = tuple(client for client in described.clients if client.broker != "cloud")
    figures = run(msgspec.structs.replace(described, clients=brokers)).figures
    assert figures["latency_p99_ms"] < 100.0, "virtual time: nothing waited for the cloud"
    assert figures["pending"] == 0


def test_what_was_published_without_a_cloud_arrives_once_it_is_back() -> None:
    described = scenario(events=(Kill(at_s=3.0, host="cloud", restart_after_s=4.0),), settle_s=20.0)
    figures = run(described).figures
    assert figures["latency_max_ms"] > 1_000.0, "between groups it waited"
    assert figures["pending"] == 0


@pytest.mark.parametrize("version", ["5", "3.1.1"])
@pytest.mark.parametrize("links", ["group", "all"])
def test_any_cloud_and_any_links(version: str, links: str) -> None:
    figures = run(scenario(groups={"cloud_version": version, "links": links})).figures
    assert (figures["groups"], figures["lost"], figures["pending"]) == (2, 0, 0)


def test_filtered_topics_cross_only_to_subscribers() -> None:
    described = scenario(topic_class="broadcast-filtered", threshold_ms=1_000.0)
    silent = tuple(
        msgspec.structs.replace(client, subscribe=()) if client.broker == "w2" else client for client in described.clients
    )
    filtered = run(msgspec.structs.replace(described, clients=silent)).figures
    flooded = run(msgspec.structs.replace(scenario(threshold_ms=1_000.0), clients=silent)).figures
    assert filtered["pending"] == flooded["pending"] == 0
    assert filtered["flooded"] < flooded["flooded"]


def test_the_ready_scenario() -> None:
    described = msgspec.structs.replace(load_scenario("broadcast"), duration_s=20.0, settle_s=20.0)
    events = tuple(event for event in described.events if event.at_s < 20.0)
    figures = run(msgspec.structs.replace(described, events=events)).figures
    assert figures["delivered"] > 1_000
    assert figures["pending"] == 0


def test_one_seed_is_one_run() -> None:
    described = scenario(apart_ms=3.0, faults=FAULTS, merge_kills=0.3, duration_s=3.0, settle_s=3.0)
    first, second = simulate(described, 7), simulate(described, 7)
    assert (first.digest, first.violation) == (second.digest, second.violation)


# --- planted faults: the invariants find them -----------------------------------------------------------------------------


class ForgetfulBroker(FabricBroker):
    """Believes its leader that the cloud has everything, whatever it said."""

    def tick(self) -> None:
        relay = self.fabric.broadcast.relay
        if relay is not None and relay.session.queued_messages:
            relay.told_relayed(1 << 62, self.host.now)
        super().tick()


class HastyBroker(FabricBroker):
    """Stops covering a member as soon as it goes."""

    def tick(self) -> None:
        coverage = self.fabric.broadcast.coverage
        for name in [name for name in coverage.covered if name not in self.fabric.broadcast.formation.view.members]:
            coverage.forget(name)
        super().tick()


class LonelyBroker(FabricBroker):
    """Never finds anybody."""

    def datagram(self, source: str, data: bytes) -> None:
        pass


class GreedyBroker(FabricBroker):
    """Takes whatever comes as if it had never been there."""

    def tick(self) -> None:
        self.fabric.broadcast.seen = type(self.fabric.broadcast.seen)()
        super().tick()


class Forgetful(Fabric):
    fabric_broker_class = ForgetfulBroker


class Hasty(Fabric):
    fabric_broker_class = HastyBroker


class Lonely(Fabric):
    fabric_broker_class = LonelyBroker


class Greedy(Fabric):
    fabric_broker_class = GreedyBroker


@pytest.mark.parametrize(
    ("mutant", "said", "changes"),
    [
        (Forgetful, "lost", {"events": (Cut(at_s=2.5, source=("sky",), target=("west",), for_s=2.0),)}),
        (Hasty, "lost", {"faults": FAULTS, **LONG}),
        (Lonely, "both lead", LONG),
        (Greedy, "twice", {"apart_ms": 3.0, "merge_kills": 0.0}),
    ],
)
def test_a_planted_fault_is_found(mutant: type[Fabric], said: str, changes: dict[str, Any]) -> None:
    described = scenario(protocol=f"{mutant.__module__}:{mutant.__name__}", **changes)
    sys.modules.setdefault(mutant.__module__, sys.modules[__name__])
    for seed in range(1, 11):
        outcome = simulate(described, seed)
        if outcome.violation is not None:
            assert said in outcome.violation.message
            return
    pytest.fail("no seed found it")


class Everybody:
    """Floods to all brokers it knows, not to its group."""

    def __init__(self, broadcast: Broadcast) -> None:
        self._broadcast = broadcast

    def flooded(self, matched: list[Target], filtered: bool) -> list[Target]:
        right = self._broadcast.flooded(matched, filtered)
        known = {target.session.client_id for target in right}
        via = errands.flooded(self._broadcast.formation.view.version)
        others = [peer for peer in self._broadcast.fabric.peers.values() if peer.session.client_id not in known]
        return right + [Target(Subscription(peer.session, "#", 2), via) for peer in others]

    def is_fellow(self, session: Session) -> bool:
        return self._broadcast.is_fellow(session)

    def classes_changed(self) -> None:
        self._broadcast.classes_changed()


def test_a_message_that_leaves_its_group_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = FabricBroker._let_in

    def let_in(broker: FabricBroker) -> None:
        right(broker)
        broker.fabric.classes.group = Everybody(broker.fabric.broadcast)

    monkeypatch.setattr(FabricBroker, "_let_in", let_in)
    outcome = simulate(scenario(groups={"links": "all"}), 1)
    assert outcome.violation is not None
    assert "not of its group" in outcome.violation.message


# --- what is refused ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"lcm": {"w9": 1.0}}, "no broker is called w9"),
        ({"lcm": {"w1": -1.0}}, "lcm"),
        ({"merge_kills": 1.5}, "merge_kills"),
        ({"fabric": {"groups": {"cloud": "mqtt://here"}}}, "no broker without `fabric` is on here at port 1883"),
    ],
)
def test_settings_that_make_no_sense_are_named(settings: dict[str, Any], said: str) -> None:
    described = scenario(settings=settings)
    if "fabric" in settings:
        described = msgspec.structs.replace(described, brokers=described.brokers[1:])
    with pytest.raises(ConfigError, match=said):
        simulate(described, 1)

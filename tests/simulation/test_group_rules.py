"""The rules past the paper in whole brokers: what they count is what really arrives, and nothing is lost when members move."""

from __future__ import annotations

from nearcast.network.conditions import Conditions
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.hosts import Host as SimulatedHost
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt_facts import GroupChanged
from nearcast.simulation.runs import simulate

CLOUD_MS = 20.0


class Watch(Invariant):
    """Who follows whom, and how often that changed."""

    def __init__(self) -> None:
        self.leaders: dict[str, str] = {}
        self.story: list[tuple[str, str]] = []

    def observed(self, host: SimulatedHost, fact: object) -> None:
        if isinstance(fact, GroupChanged) and self.leaders.get(fact.broker) != fact.leader:
            self.leaders[fact.broker] = fact.leader
            self.story.append((fact.broker, fact.leader))


def scenario(
    apart_ms: dict[tuple[str, str], float],
    lcm: dict[str, float],
    clients: tuple[Clients, ...],
    duration_s: float,
    **groups: object,
) -> Scenario:
    """Each broker at a site of its own."""
    names = list(lcm)
    links = [SiteLink(between=(f"at-{one}", f"at-{other}"), latency_ms=latency) for (one, other), latency in apart_ms.items()]
    links += [SiteLink(between=(f"at-{name}", "sky"), latency_ms=CLOUD_MS) for name in names]
    return Scenario(
        name="rules",
        topology=Topology(
            name="rules",
            sites=(*(Site(name=f"at-{name}", local=Conditions(latency_ms=0.1)) for name in names), Site(name="sky")),
            links=tuple(links),
            hosts=(
                *(Host(name=name, site=f"at-{name}") for name in names),
                *(Host(name=f"clients-{name}", site=f"at-{name}") for name in names),
                Host(name="cloud", site="sky"),
            ),
        ),
        protocol="fabric",
        settings={
            "lcm": lcm,
            "fabric": {
                "classes": [{"topic": "#", "topic_class": "broadcast"}],
                "groups": {"cloud": "mqtt://cloud", "ping_interval_seconds": 0.5, "ping_window": 4, **groups},
            },
        },
        duration_s=duration_s,
        settle_s=15.0,
        brokers=(Broker(host="cloud"), *(Broker(host=name, fabric=True) for name in names)),
        clients=clients,
    )


def partner(name: str, wants: str) -> Clients:
    return Clients(
        name=name,
        host=f"clients-{name}",
        broker=name,
        publish=(Publishing(topic="t/{client}", rate_hz=8.0, qos=1),),
        subscribe=(Subscribing(filter=f"t/{wants}", qos=1),) if wants else (),
    )


def test_a_member_goes_over_to_the_group_its_messages_come_from_and_loses_none() -> None:
    apart_ms = {
        ("b0", "b1"): 8.0,
        ("b0", "b2"): 4.5,
        ("b0", "b3"): 11.0,
        ("b1", "b2"): 5.0,
        ("b1", "b3"): 3.0,
        ("b2", "b3"): 6.0,
    }
    lcm = {"b0": 4.0, "b1": 3.0, "b2": 2.0, "b3": 1.0}
    clients = (partner("b2", "b3"), partner("b3", "b2"))
    for aware, leader in ((False, "b0"), (True, "b1")):
        watch = Watch()
        described = scenario(apart_ms, lcm, clients, 70.0, threshold_ms=7.0, flow_aware=aware)
        outcome = simulate(described, 1, observers=[watch])
        assert outcome.violation is None, outcome.violation
        assert watch.leaders == {"b0": "b0", "b1": "b1", "b2": leader, "b3": "b1"}


def test_brokers_that_want_nothing_of_each_other_part_and_those_that_do_stay() -> None:
    lcm = {"b0": 2.0, "b1": 1.0}
    for wanted, together in ((True, True), (False, False)):
        clients = (partner("b0", "b1" if wanted else ""), partner("b1", "b0" if wanted else ""))
        watch = Watch()
        described = scenario(
            {("b0", "b1"): 4.0},
            lcm,
            clients,
            110.0,
            threshold_ms=5.0,
            adaptive=True,
            excess_budget=0.3,
            least_threshold_ms=1.0,
        )
        outcome = simulate(described, 1, observers=[watch])
        assert outcome.violation is None, outcome.violation
        assert ("b1", "b0") in watch.story  # they found each other first
        assert watch.leaders["b1"] == ("b0" if together else "b1")

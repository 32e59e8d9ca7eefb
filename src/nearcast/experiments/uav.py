"""``uav``: drone swarms over a city on the emulated WAN; the owners of their topics follow them (ePulsar, section 5.8.1).

Four zones of a city, each with a broker and a gateway, which is the coordinate proxy of the drones connected to it. A swarm is
one host: when it flies into another zone, its network changes and its drones reconnect to that zone's gateway, with their
sessions. Leader and followers exchange messages on two topics with a bound of 40 ms, which holds when the owner is in the
swarm's zone (20 ms) and not when it is in another (50 ms). What becomes of it is in :mod:`.owned_results`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, ClassVar

import msgspec

from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.owned_runs import Told, check_machine, run_owned
from nearcast.experiments.run import Run
from nearcast.experiments.towers import zones
from nearcast.scenario.events import Event, Move
from nearcast.scenario.files import load_topology, resolve
from nearcast.scenario.mobility import random_waypoint
from nearcast.scenario.movement import Waypoints
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing

ZONES = 4
RATE_HZ = 200.0
PAYLOAD_BYTES = 1_000
SETTLE_S = 3.0
STEP_S = 0.5
PREFIX = "uav"


class UavParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 200 messages a second of each drone; ``duration_s`` is how long swarms fly."""

    duration_s: float = 600.0
    swarms: int = 8
    drones: int = 8
    """In each swarm, the leader among them."""

    speed_mps: float = 50.0
    bound_ms: float = 40.0
    telemetry_s: float = 5.0
    """Between the reports of brokers, and between the controller's plans."""

    warm_s: float = 30.0
    """Before swarms begin to fly: coordinates settle. Not judged."""

    qos: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(1 <= self.swarms <= 64, "swarms", "must be between 1 and 64")
        self.require(2 <= self.drones <= 1_000, "drones", "must be between 2 and 1,000: a leader and its followers")
        self.require(0.1 <= self.speed_mps <= 10_000, "speed_mps", "must be between 0.1 and 10,000")
        self.require(0.1 <= self.telemetry_s <= 600, "telemetry_s", "must be between 0.1 and 600")
        self.require(1 <= self.bound_ms <= 60_000, "bound_ms", "must be between 1 and 60,000")
        self.require(0 <= self.warm_s <= 3_600, "warm_s", "must be between 0 and 3,600")
        self.require(self.qos in (0, 1, 2), "qos", "must be 0, 1 or 2")


class Uav(Experiment[UavParameters]):
    name = "uav"
    summary = "Drone swarms that change zones: the owners of their topics follow, and 40 ms hold (ePulsar, figure 8)."
    parameters = UavParameters
    quick: ClassVar[Mapping[str, Any]] = {
        "scale": 0.02,
        "duration_s": 18.0,
        "speed_mps": 800.0,
        "telemetry_s": 1.0,
        "warm_s": 10.0,
        "swarms": 4,
        "drones": 4,
    }

    def bars(self, parameters: UavParameters) -> Sequence[Bar]:
        return [
            at_least(
                "within_bound_percent",
                99.0,
                f"of the time, each topic kept {parameters.bound_ms:g} ms, outside the 2 s after a zone change",
            ),
            at_most(
                "longest_violation_s",
                2 * parameters.telemetry_s,
                "from a zone change to the end of the violation it caused; the longest: two telemetry periods",
            ),
            at_least("zone_changes", 1, "of swarms, while they are judged"),
            at_least("migrations", 1, "of owners, by the controller's plan"),
            *([at_most("lost", 0, "deliveries that should have been and were not")] if parameters.qos else []),
        ]

    def check(self, parameters: UavParameters) -> None:
        check_machine()
        scenario_of(parameters)

    def run(self, run: Run[UavParameters]) -> None:
        parameters = run.parameters
        scenario = scenario_of(parameters)
        run.keep("scenario.json", scenario)
        evaluate(run, scenario, run_owned(run, scenario, PREFIX))


def evaluate(run: Run[UavParameters], scenario: Scenario, told: Told) -> None:
    """Everything, from what was recorded."""
    # NumPy and pyarrow are loaded where they are needed: `list` imports this module.
    from nearcast.experiments import owned_results

    parameters = run.parameters
    changes = changes_of(scenario.events)
    hosts = swarm_hosts(parameters)
    question = owned_results.Judged(
        bound_ms=parameters.bound_ms,
        begin_s=parameters.warm_s,
        changes={topic: changes.get(host, []) for host in hosts for topic in (leader_topic(host), sensor_topic(host))},
        change="zone change",
    )
    findings = owned_results.judge(run, scenario, told, question)
    run.figure("zone_changes", changes)
    run.measured("zone_changes", sum(map(len, changes.values())))
    if parameters.qos:
        run.measured("lost", findings.lost)
    title = "Latency of each swarm's sensor data (figure 8)"
    owned_results.draw_topics(run, findings, "latency", title, {host: sensor_topic(host) for host in hosts})


def leader_topic(host: str) -> str:
    """On which a swarm's leader commands."""
    return f"{PREFIX}/{host}/follow_leader"


def sensor_topic(host: str) -> str:
    """On which its followers answer."""
    return f"{PREFIX}/{host}/sensor_data"


def swarm_hosts(parameters: UavParameters) -> list[str]:
    """A host for each swarm."""
    return [f"swarm-{number}" for number in range(1, parameters.swarms + 1)]


def changes_of(events: Sequence[Event]) -> dict[str, list[float]]:
    """By host, when it came to another zone."""
    found: dict[str, list[float]] = {}
    for event in events:
        if isinstance(event, Move):
            found.setdefault(event.host, []).append(event.at_s)
    return found


def scenario_of(parameters: UavParameters) -> Scenario:
    """The scenario, as data; the ways of the swarms are spelt out in it."""
    topology = topology_of(parameters)
    rate_hz = RATE_HZ * parameters.scale
    stream = Publishing(
        topic=leader_topic("{host}"),
        rate_hz=rate_hz,
        payload_bytes=PAYLOAD_BYTES,
        qos=parameters.qos,
        bound_ms=parameters.bound_ms,
    )
    leader = Clients(
        name="leader",
        host="swarm-*",
        broker="gate-*",
        roam=True,
        clean_start=False,
        publish=(stream,),
        subscribe=(Subscribing(filter=sensor_topic("{host}"), qos=parameters.qos),),
    )
    follower = msgspec.structs.replace(
        leader,
        name="follower",
        count=parameters.drones - 1,
        publish=(msgspec.structs.replace(stream, topic=sensor_topic("{host}")),),
        subscribe=(Subscribing(filter=leader_topic("{host}"), qos=parameters.qos),),
    )
    waypoints = Waypoints(
        hosts=("swarm-*",), min_speed_mps=parameters.speed_mps, max_speed_mps=parameters.speed_mps, step_s=STEP_S
    )
    # The same seed, the same ways; all of them begin when coordinates have settled.
    flown = random_waypoint(topology, waypoints, parameters.duration_s, Random(f"{parameters.seed}/mobility"))
    return resolve(
        Scenario(
            name="uav",
            description="ePulsar's drone swarms (section 5.8.1): the owners of topics follow swarms from zone to zone.",
            topology=topology,
            protocol="fabric",
            duration_s=parameters.warm_s + parameters.duration_s,
            settle_s=SETTLE_S,
            settings={
                "fabric": {
                    "classes": [{"topic": f"{PREFIX}/#", "topic_class": "owned", "max_latency_ms": parameters.bound_ms}],
                    "telemetry": {"interval_seconds": parameters.telemetry_s},
                },
            },
            controller=Controller(host="cloud-broker"),
            brokers=tuple(Broker(host=f"broker-{zone}", fabric=True) for zone in range(1, ZONES + 1)),
            gateways=(Gateway(host="gate-*"),),
            clients=(leader, follower),
            events=tuple(msgspec.structs.replace(move, at_s=move.at_s + parameters.warm_s) for move in flown),
        )
    )


def topology_of(parameters: UavParameters) -> Topology:
    """The ready-made one with zones around the towers of a made-up city, a gateway in each, and as many swarms as wanted."""
    topology = load_topology("uav")
    places = dict(zip((f"zone-{zone}" for zone in range(1, ZONES + 1)), zones(ZONES, parameters.seed), strict=True))
    sites = tuple(
        msgspec.structs.replace(site, latitude=places[site.name][0], longitude=places[site.name][1])
        if site.name in places
        else site
        for site in topology.sites
    )
    swarm = next(host for host in topology.hosts if host.name == "swarm-1")
    gateways = [Host(name=f"gate-{zone}", site=f"zone-{zone}", ports=(1883,)) for zone in range(1, ZONES + 1)]
    swarms = [
        Host(name=name, site=f"zone-{number % ZONES + 1}", access=swarm.access)
        for number, name in enumerate(swarm_hosts(parameters))
    ]
    fixed = [host for host in topology.hosts if not host.name.startswith("swarm-")]
    return msgspec.structs.replace(topology, sites=sites, hosts=(*fixed, *gateways, *swarms))

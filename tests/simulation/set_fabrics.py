"""Fabrics with replica sets, drawn at random: brokers, gateways, clients that publish to the same topics from everywhere, and
what goes wrong meanwhile. Each number is one; by hand, run thousands, and shrink what fails::

    python -m tests.simulation.set_fabrics 1 1000
    python -m tests.simulation.set_fabrics 17
"""

from __future__ import annotations

import random
import sys
from typing import Any, Literal

from nearcast.errors import SimulationLimit
from nearcast.scenario.events import Crash, Cut, Event, FailDisk, Kill, RandomFaults
from nearcast.scenario.scenario import Broker, Gateway, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.runs import simulate
from nearcast.simulation.shrinking import shrink

#: Several clients publish to each of the first four; the others have one publisher each.
TOPICS = ("o/a", "o/b", "o/c", "p/a", "o/{client}/d", "t/{client}/e")
FILTERS = ("#", "o/#", "o/a", "o/+", "o/+/d", "p/a", "t/#")
VERSIONS: tuple[Literal["5.0", "3.1.1"], ...] = ("5.0", "3.1.1")

CLASSES = (
    [{"topic": "#", "topic_class": "owned", "replica_set": "eu"}],
    [{"topic": "o/#", "topic_class": "owned", "replica_set": "eu"}],
    [
        {"topic": "o/a", "topic_class": "owned", "replica_set": "eu"},
        {"topic": "#", "topic_class": "owned", "replica_set": "us"},
    ],
    [{"topic": "p/#", "topic_class": "bridged"}, {"topic": "+/+", "topic_class": "owned", "replica_set": "us"}],
)


def set_fabric(number: int, settle_s: float = 30.0) -> Scenario:
    """A few brokers, some of which are in one or two sets, clients at all of them, and what goes wrong."""
    rng = random.Random(f"sets {number}")
    names = [f"b-{index + 1}" for index in range(rng.randint(1, 5))]
    durable = rng.choice(("all", "all", "all", "none", "some"))
    calm = rng.random() < 0.3
    sets = [{"name": name, "members": rng.sample(names, rng.randint(1, len(names)))} for name in ("eu", "us")]
    for each in sets:
        if rng.random() < 0.3:
            each["preferred"] = rng.choice(each["members"])
    settings: dict[str, Any] = {
        "snapshot_bytes": rng.choice((500, 3_000, 50_000)),
        "snapshot_step_bytes": rng.choice((1, 200, 4_096)),
        "fabric": {
            "probe_interval_seconds": 0.5,
            "fail_after_seconds": rng.choice((1.5, 3.0)),
            "classes": rng.choice(CLASSES),
            "replica_sets": sets,
        },
    }
    if rng.random() < 0.15:
        settings["fabric"]["max_queued_messages"] = 20
    doors = list(names)
    gateways: tuple[Gateway, ...] = ()
    if rng.random() < 0.5:
        settings["moves_per_minute"] = rng.choice((0.0, 60.0, 600.0))
        gateways = tuple(Gateway(host=host, controller=False) for host in ("g-1", "g-2"))
        doors += ["g-1", "g-2", "g-*"]
    return Scenario(
        name="random-sets",
        topology=_topology(rng, names),
        protocol="fabric",
        settings=settings,
        duration_s=8.0,
        settle_s=settle_s,
        brokers=tuple(
            Broker(host=name, fabric=True, durable=durable == "all" or (durable == "some" and rng.random() < 0.5))
            for name in names
        ),
        gateways=gateways,
        clients=tuple(_clients(rng, f"c{index}", doors) for index in range(rng.randint(2, 6))),
        random_faults=None if calm or rng.random() < 0.2 else _faults(rng),
        events=(
            *(FailDisk(at_s=0.0, host=name, sync_s=rng.choice((0.001, 0.01, 0.03, 0.1))) for name in names),
            *(() if calm or len(names) < 2 else _events(rng, names)),
        ),
    )


def _topology(rng: random.Random, brokers: list[str]) -> Topology:
    sites = ("region", "edge", "far")
    links = tuple(
        SiteLink(
            between=between,
            latency_ms=latency_ms,
            jitter_ms=latency_ms / rng.choice((5, 20)),
            loss=rng.choice((0.0, 0.0, 0.0, 0.02)),
            bandwidth_mbps=rng.choice((0.0, 0.0, 0.0, 10.0)),
        )
        for between in (("region", "edge"), ("region", "far"), ("edge", "far"))
        for latency_ms in (rng.choice((1.0, 10.0, 40.0)),)
    )
    hosts = tuple(Host(name=name, site=rng.choice(sites)) for name in brokers)
    return Topology(
        name="random",
        sites=tuple(Site(name=site) for site in sites),
        links=links,
        hosts=(
            *hosts,
            Host(name="g-1", site="edge"),
            Host(name="g-2", site="far"),
            Host(name="d", site="edge", count=2),
            Host(name="p", site="far", count=2),
        ),
    )


def _clients(rng: random.Random, name: str, doors: list[str]) -> Clients:
    publish = tuple(
        Publishing(
            topic=topic,
            rate_hz=rng.choice((1.0, 5.0, 20.0)),
            qos=rng.choice((0, 1, 2)),
            retain=rng.random() < 0.2,
            poisson=rng.random() < 0.5,
            payload_bytes=rng.choice((32, 100, 100, 2_000)),
        )
        for topic in rng.sample(TOPICS, rng.randint(0, 3))
    )
    wanted = rng.sample(FILTERS, rng.randint(1, 3)) if rng.random() < 0.7 else []
    return Clients(
        name=name,
        host=rng.choice(("d*", "p*", "d-1", "p-1")),
        broker=rng.choice(("b-*", rng.choice(doors), rng.choice(doors))),
        clean_start=rng.random() < 0.4,
        keepalive_s=rng.choice((1, 3, 10)),
        protocol=rng.choice(VERSIONS),
        publish=publish,
        subscribe=tuple(Subscribing(filter=each, qos=rng.choice((0, 1, 2))) for each in wanted),
        start_s=rng.choice((0.0, 0.0, 2.0, 5.0)),
    )


def _faults(rng: random.Random) -> RandomFaults:
    rate = rng.choice((5.0, 20.0, 60.0))
    return RandomFaults(
        hosts=rng.choice(((), ("b-*",), ("b-*",), ("b-*", "g*"), ("b-*", "p*"), ("d*", "p*"))),
        kills_per_minute=rate * rng.random() * rng.choice((0, 1)),
        crashes_per_minute=rate * rng.random() * rng.choice((0, 1)),
        pauses_per_minute=rate * rng.random() / 2,
        cuts_per_minute=rate * rng.random() / 2,
        slow_links_per_minute=rate * rng.random() / 4,
        skews_per_minute=rate * rng.random() / 4,
        max_fault_s=rng.choice((0.3, 1.0, 5.0)),
        max_skew_s=rng.choice((1.0, 100.0)),
        quiet_s=1.0,
    )


def _events(rng: random.Random, brokers: list[str]) -> list[Event]:
    """What a schedule of independent faults hardly ever hits: two brokers at once, an outage longer than anybody waits."""
    found: list[Event] = []
    if rng.random() < 0.2:
        at_s = rng.uniform(1.0, 6.0)
        for name in rng.sample(brokers, 2):
            found.append(Crash(at_s=at_s + rng.uniform(0.0, 0.1), host=name, restart_after_s=rng.uniform(0.2, 1.0)))
    if rng.random() < 0.2:
        found.append(Kill(at_s=rng.uniform(1.0, 4.0), host=rng.choice(brokers), restart_after_s=rng.uniform(5.0, 12.0)))
    if rng.random() < 0.2:
        one, other = rng.sample(brokers, 2)
        found.append(Cut(at_s=rng.uniform(1.0, 4.0), source=(one,), target=(other,), for_s=rng.uniform(1.0, 9.0)))
    return found


def _hunt(first: int, last: int) -> None:
    for number in range(first, last):
        try:
            violation = simulate(set_fabric(number), number).violation
        except SimulationLimit as error:
            print(number, error)  # noqa: T201 - run by hand
            continue
        if violation is not None:
            print(number, f"{violation.at_s:.3f}", violation.message)  # noqa: T201 - run by hand


def _show(number: int) -> None:
    described = set_fabric(number)
    outcome = simulate(described, number)
    print(outcome.violation)  # noqa: T201 - run by hand
    if outcome.violation is not None:
        smallest = shrink(described, outcome)
        print(smallest.violation, [smallest.faults[index] for index in smallest.applied])  # noqa: T201 - run by hand


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[1:]]
    if len(numbers) == 1:
        _show(numbers[0])
    else:
        _hunt(numbers[0], numbers[1])

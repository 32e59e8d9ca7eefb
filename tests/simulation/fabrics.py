"""Fabrics drawn at random: brokers, links, clients, faults. Each number is one; by hand, run thousands::

python -m tests.simulation.fabrics 1 1000
"""

from __future__ import annotations

import random
import sys
from typing import Any, Literal

from nearcast.scenario.events import FailDisk, RandomFaults
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.runs import simulate

FILTERS = ("#", "t/#", "+/+/a", "t/+/b", "t/+/c", "t/+/+")
VERSIONS: tuple[Literal["5.0", "3.1.1"], ...] = ("5.0", "3.1.1")


def fabric(number: int, settle_s: float = 30.0) -> Scenario:
    """A few brokers, linked somehow; a few clients at each; and what goes wrong."""
    rng = random.Random(f"fabric {number}")
    brokers = rng.randint(2, 5)
    durable = rng.choice(("all", "all", "none", "some"))
    settings: dict[str, Any] = {
        "snapshot_bytes": rng.choice((500, 3_000, 50_000)),
        "snapshot_step_bytes": rng.choice((1, 200, 4_096)),
        "fabric": {"probe_interval_seconds": 0.5, "fail_after_seconds": rng.choice((1.5, 3.0))},
    }
    names = [f"b-{index + 1}" for index in range(brokers)]
    doors = list(names)
    gateways: tuple[Gateway, ...] = ()
    controller = None
    if rng.random() < 0.5:
        settings["links"] = links(rng, names)
    elif rng.random() < 0.4:
        controller = Controller(host="k", interval_s=2.0, ping_interval_ms=50.0)
    if rng.random() < 0.7:
        settings["moves_per_minute"] = rng.choice((0.0, 60.0, 600.0))
        gateways = tuple(Gateway(host=host, controller=rng.random() < 0.8) for host in ("g-1", "g-2"))
        doors += ["g-1", "g-2", "g-*"]
    return Scenario(
        name="random",
        topology=_topology(rng, brokers),
        protocol="fabric",
        settings=settings,
        duration_s=8.0,
        settle_s=settle_s,
        brokers=tuple(
            Broker(host=name, fabric=True, durable=durable == "all" or (durable == "some" and rng.random() < 0.5))
            for name in names
        ),
        gateways=gateways,
        controller=controller,
        clients=tuple(_clients(rng, f"c{index}", doors) for index in range(rng.randint(2, 6))),
        random_faults=None if rng.random() < 0.2 else _faults(rng),
        events=tuple(FailDisk(at_s=0.0, host=name, sync_s=rng.choice((0.001, 0.01, 0.1, 0.4))) for name in names),
    )


def links(rng: random.Random, names: list[str]) -> list[tuple[str, str]]:
    """A connected graph, by chance a chain, a star or anything in between and beyond."""
    found = []
    for index in range(1, len(names)):
        pair = [names[index], names[rng.randrange(index)]]
        rng.shuffle(pair)
        found.append((pair[0], pair[1]))
    for _ in range(rng.randint(0, len(names))):
        one, other = rng.sample(names, 2)
        found.append((one, other))
    return found


def _topology(rng: random.Random, brokers: int) -> Topology:
    latency_ms = rng.choice((1.0, 20.0, 80.0))
    link = SiteLink(
        between=("region", "edge"),
        latency_ms=latency_ms,
        jitter_ms=latency_ms / rng.choice((5, 20)),
        loss=rng.choice((0.0, 0.0, 0.01, 0.03)),
        bandwidth_mbps=rng.choice((0.0, 0.0, 5.0, 20.0)),
    )
    hosts = tuple(Host(name=f"b-{index + 1}", site=rng.choice(("region", "edge"))) for index in range(brokers))
    return Topology(
        name="random",
        sites=(Site(name="region"), Site(name="edge")),
        links=(link,),
        hosts=(
            *hosts,
            Host(name="g-1", site="edge"),
            Host(name="g-2", site="region"),
            Host(name="k", site="region"),
            Host(name="d", site="edge", count=2),
            Host(name="p", site="region", count=2),
        ),
    )


def _clients(rng: random.Random, name: str, doors: list[str]) -> Clients:
    publish = tuple(
        Publishing(
            topic="t/{client}/" + level,
            rate_hz=rng.choice((1.0, 3.0, 10.0)),
            qos=rng.choice((0, 1, 2)),
            retain=rng.random() < 0.3,
            poisson=rng.random() < 0.5,
            payload_bytes=rng.choice((32, 100, 100, 2_000)),
        )
        for level in rng.sample("abcd", rng.randint(0, 3))
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
        hosts=rng.choice(((), ("b-*",), ("b-*", "g*", "k"), ("b-*", "p*"), ("d*", "p*"))),
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


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        violation = simulate(fabric(number), number).violation
        if violation is not None:
            print(number, f"{violation.at_s:.3f}", violation.message)  # noqa: T201 - run by hand

"""Deployments drawn at random: links, limits, clients, faults. Each number is one; by hand, run thousands::

python -m tests.simulation.deployments 1 1000
"""

from __future__ import annotations

import random
import sys
from typing import Literal

from nearcast.scenario.events import FailDisk, RandomFaults
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.runs import simulate

FILTERS = ("#", "t/#", "+/+/a", "t/+/b", "t/+/c")
VERSIONS: tuple[Literal["5.0", "3.1.1"], ...] = ("5.0", "3.1.1")


def deployment(number: int, settle_s: float = 60.0) -> Scenario:
    """A broker, a few clients, and what goes wrong."""
    rng = random.Random(f"deployment {number}")
    limits = {
        "max_inflight": rng.choice((1, 2, 10, 1_000, 1_000)),
        "receive_maximum": rng.choice((1, 2, 10, 1_000, 1_000)),
        "max_output_bytes": rng.choice((200, 5_000, 100_000, 1_000_000, 1_000_000)),
        "topic_alias_maximum": rng.choice((0, 2, 10)),
    }
    return Scenario(
        name="random",
        topology=_topology(rng),
        settings={
            "snapshot_bytes": rng.choice((500, 3_000, 50_000)),
            "snapshot_step_bytes": rng.choice((1, 200, 4_096)),
            "limits": limits,
        },
        duration_s=8.0,
        settle_s=settle_s,
        brokers=(Broker(host="broker", durable=rng.random() < 0.75),),
        clients=tuple(_clients(rng, f"c{index}") for index in range(rng.randint(2, 5))),
        random_faults=_faults(rng),
        events=(FailDisk(at_s=0.0, host="broker", sync_s=rng.choice((0.001, 0.01, 0.1, 0.4))),),
    )


def _topology(rng: random.Random) -> Topology:
    latency_ms = rng.choice((0.5, 5.0, 20.0, 80.0))
    link = SiteLink(
        between=("region", "edge"),
        latency_ms=latency_ms,
        jitter_ms=latency_ms / rng.choice((5, 20)),
        loss=rng.choice((0.0, 0.0, 0.01, 0.05)),
        bandwidth_mbps=rng.choice((0.0, 0.0, 1.0, 20.0)),
    )
    hosts = (Host(name="broker", site="region"), Host(name="d", site="edge", count=2), Host(name="p", site="edge", count=2))
    return Topology(name="random", sites=(Site(name="region"), Site(name="edge")), links=(link,), hosts=hosts)


def _clients(rng: random.Random, name: str) -> Clients:
    publish = tuple(
        Publishing(
            topic="t/{client}/" + level,
            rate_hz=rng.choice((1.0, 5.0, 20.0)),
            qos=rng.choice((0, 1, 2)),
            retain=rng.random() < 0.3,
            poisson=rng.random() < 0.5,
            payload_bytes=rng.choice((32, 100, 2_000, 20_000)),
        )
        for level in rng.sample("abcd", rng.randint(0, 3))
    )
    wanted = rng.sample(FILTERS, rng.randint(1, 3)) if rng.random() < 0.7 else []
    return Clients(
        name=name,
        host=rng.choice(("d*", "p*", "d-1", "p-1")),
        broker="broker",
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
        hosts=rng.choice(((), ("broker",), ("broker", "p*"), ("d*", "p*"))),
        kills_per_minute=rate * rng.random(),
        crashes_per_minute=rate * rng.random(),
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
        violation = simulate(deployment(number), number).violation
        if violation is not None:
            print(number, violation.message)  # noqa: T201 - run by hand

"""Fabrics with broadcast groups, drawn at random: sites near and far, a cloud, clients, and what goes wrong between brokers or
with the cloud. Each number is one; by hand, run thousands, and shrink what fails::

    python -m tests.simulation.group_fabrics 1 1000
    python -m tests.simulation.group_fabrics 17
"""

from __future__ import annotations

import random
import sys
from typing import Any, Literal

from nearcast.network.conditions import Conditions
from nearcast.scenario.events import ChangeLink, Crash, Cut, Event, FailDisk, Kill, Move, RandomFaults
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.scenario.topology import Host, Site, SiteLink, Topology
from nearcast.scenario.workload import Clients, Publishing, Subscribing
from nearcast.simulation.runs import simulate
from nearcast.simulation.shrinking import shrink

FILTERS = ("#", "t/#", "+/+/a", "t/+/b", "t/+/c", "t/+/+")
VERSIONS: tuple[Literal["5.0", "3.1.1"], ...] = ("5.0", "3.1.1")

THRESHOLDS_MS = (0.0, 3.3, 6.2, 12.7, 25.7, 1_000.0)
#: Sums of these are no threshold, nor a quarter above one.
LATENCIES_MS = (0.5, 1.0, 2.0, 4.5, 9.0, 18.0, 40.0)

CLASSES = (
    [{"topic": "#", "topic_class": "broadcast"}],
    [{"topic": "t/#", "topic_class": "broadcast"}],
    [{"topic": "t/+/a", "topic_class": "broadcast-filtered"}, {"topic": "t/#", "topic_class": "broadcast"}],
    [{"topic": "t/+/b", "topic_class": "broadcast"}, {"topic": "#", "topic_class": "broadcast-filtered"}],
)


def group_fabric(number: int, settle_s: float = 30.0) -> Scenario:
    """A few sites with brokers, a cloud, clients at all of them; and what goes wrong."""
    rng = random.Random(f"groups {number}")
    sites = [f"s{index + 1}" for index in range(rng.randint(1, 4))]
    brokers = {f"b-{index + 1}": rng.choice(sites) for index in range(rng.randint(2, 6))}
    durable = rng.choice(("all", "all", "all", "none", "some"))
    calm = rng.random() < 0.2
    duration_s = rng.choice((8.0, 15.0))
    settings: dict[str, Any] = {
        "snapshot_bytes": rng.choice((500, 3_000, 50_000)),
        "snapshot_step_bytes": rng.choice((1, 200, 4_096)),
        "fabric": {
            "probe_interval_seconds": 0.5,
            "fail_after_seconds": rng.choice((1.5, 3.0)),
            "classes": rng.choice(CLASSES),
            "groups": {
                "cloud": "mqtt://cloud",
                "cloud_version": rng.choice(("5", "5", "5", "3.1.1")),
                "threshold_ms": rng.choice(THRESHOLDS_MS),
                "announce_interval_seconds": rng.choice((0.2, 0.5)),
                "ping_interval_seconds": 0.2,
                "ping_window": rng.choice((3, 5, 10)),
                "links": rng.choice(("group", "group", "all")),
            },
        },
        "lcm": {name: float(rng.randint(1, 3)) for name in brokers},
        "merge_kills": 0.0 if calm else rng.choice((0.0, 0.0, 0.2, 0.6)),
    }
    if rng.random() < 0.2:
        settings["fabric"]["max_queued_messages"] = 20
        settle_s *= 2  # so few at a time take long to get to a cloud that is far
    return Scenario(
        name="random-groups",
        topology=_topology(rng, sites, brokers),
        protocol="fabric",
        settings=settings,
        duration_s=duration_s,
        settle_s=settle_s,
        brokers=(
            Broker(host="cloud", durable=durable == "all" or rng.random() < 0.7),
            *(
                Broker(
                    host=name,
                    fabric=True,
                    durable=durable == "all" or (durable == "some" and rng.random() < 0.5),
                    start_s=rng.choice((0.0, 0.0, 0.0, rng.uniform(0.0, 5.0))),
                )
                for name in brokers
            ),
        ),
        clients=(
            *(_clients(rng, f"c{index}", list(brokers)) for index in range(rng.randint(2, 6))),
            *_sharing(random.Random(f"sharing {number}"), list(brokers)),
        ),
        random_faults=None if calm or rng.random() < 0.3 else _faults(rng),
        events=() if calm else _events(rng, sites, list(brokers), duration_s),
    )


def _topology(rng: random.Random, sites: list[str], brokers: dict[str, str]) -> Topology:
    links = [
        _link(rng, (one, other), rng.choice(LATENCIES_MS)) for index, one in enumerate(sites) for other in sites[index + 1 :]
    ]
    links += [_link(rng, (site, "sky"), rng.choice((5.0, 20.0, 60.0))) for site in sites]
    return Topology(
        name="random",
        sites=(*(Site(name=site, local=Conditions(latency_ms=0.2)) for site in sites), Site(name="sky")),
        links=tuple(links),
        hosts=(
            *(Host(name=name, site=site) for name, site in brokers.items()),
            Host(name="cloud", site="sky"),
            Host(name="d", site=sites[0], count=2),
            Host(name="p", site=sites[-1], count=2),
        ),
    )


def _link(rng: random.Random, between: tuple[str, str], latency_ms: float) -> SiteLink:
    return SiteLink(
        between=between,
        latency_ms=latency_ms,
        jitter_ms=rng.choice((0.0, latency_ms / 50)),
        loss=rng.choice((0.0, 0.0, 0.0, 0.01)),
        bandwidth_mbps=rng.choice((0.0, 0.0, 0.0, 10.0)),
    )


def _clients(rng: random.Random, name: str, brokers: list[str]) -> Clients:
    publish = tuple(
        Publishing(
            topic="t/{client}/" + level,
            rate_hz=rng.choice((1.0, 3.0, 10.0)),
            qos=rng.choice((0, 1, 1, 2)),
            retain=rng.random() < 0.2,
            poisson=rng.random() < 0.5,
            payload_bytes=rng.choice((32, 100, 100, 2_000)),
        )
        for level in rng.sample("abcd", rng.randint(0, 3))
    )
    wanted = rng.sample(FILTERS, rng.randint(1, 3)) if rng.random() < 0.7 else []
    return Clients(
        name=name,
        host=rng.choice(("d*", "p*", "d-1", "p-1")),
        broker=rng.choice(("b-*", rng.choice(brokers), rng.choice(brokers), rng.choice((*brokers, "cloud")))),
        clean_start=rng.random() < 0.4,
        keepalive_s=rng.choice((1, 3, 10)),
        protocol=rng.choice(VERSIONS),
        publish=publish,
        subscribe=tuple(Subscribing(filter=each, qos=rng.choice((0, 1, 2))) for each in wanted),
        start_s=rng.choice((0.0, 0.0, 2.0, 5.0)),
    )


def _sharing(rng: random.Random, brokers: list[str]) -> tuple[Clients, ...]:
    """Members of shared subscriptions, beside subscribers of all kinds."""
    if rng.random() < 0.6:
        return ()
    return tuple(
        Clients(
            name=f"m{index}",
            host=rng.choice(("d-1", "p-1")),
            broker=rng.choice(brokers),
            clean_start=rng.random() < 0.4,
            keepalive_s=rng.choice((1, 3, 10)),
            subscribe=(Subscribing(filter=rng.choice(("$share/g/t/#", "$share/h/t/+/a")), qos=rng.choice((1, 2))),),
            start_s=rng.choice((0.0, 0.0, 2.0)),
        )
        for index in range(rng.randint(1, 3))
    )


def _faults(rng: random.Random) -> RandomFaults:
    rate = rng.choice((5.0, 20.0, 40.0))
    return RandomFaults(
        hosts=rng.choice((("b-*",), ("b-*", "cloud"), ("cloud",), ("b-*", "p*"), ())),
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


def _events(rng: random.Random, sites: list[str], brokers: list[str], duration_s: float) -> tuple[Event, ...]:
    """What groups in particular have to live with."""
    syncs_s = {name: rng.choice((0.001, 0.01, 0.1)) for name in (*brokers, "cloud")}
    # What all publish is to be through the cloud before the end; a tenth of a second for each window of messages is too slow.
    syncs_s["cloud"] = min(syncs_s["cloud"], 0.01)
    found: list[Event] = [FailDisk(at_s=0.0, host=name, sync_s=sync_s) for name, sync_s in syncs_s.items()]
    last_s = duration_s - 1.0

    def moment() -> float:
        return round(rng.uniform(0.5, last_s), 3)

    for _ in range(rng.choice((0, 0, 1, 2))):  # the weather changes
        if len(sites) > 1:
            one, other = rng.sample(sites, 2)
            conditions = Conditions(latency_ms=rng.choice(LATENCIES_MS))
            found.append(ChangeLink(at_s=moment(), between=(one, other), conditions=conditions, for_s=rng.choice((None, 3.0))))
    for _ in range(rng.choice((0, 0, 1, 2))):  # sites lose each other
        if len(sites) > 1:
            one, other = rng.sample(sites, 2)
            found.append(Cut(at_s=moment(), source=(one,), target=(other,), one_way=rng.random() < 0.2, for_s=_span(rng)))
    for _ in range(rng.choice((0, 0, 1, 2))):  # or the cloud
        targets = tuple(rng.sample(sites, rng.randint(1, len(sites))))
        found.append(Cut(at_s=moment(), source=("sky",), target=targets, for_s=_span(rng)))
    for _ in range(rng.choice((0, 0, 1))):
        fault = rng.choice((Kill, Crash))
        found.append(fault(at_s=moment(), host="cloud", restart_after_s=rng.choice((0.1, 1.0, 4.0))))
    if rng.random() < 0.15 and len(sites) > 1:  # brokers on wheels
        found.append(Move(at_s=moment(), host=rng.choice(brokers), site=rng.choice(sites)))
    return tuple(found)


def _span(rng: random.Random) -> float:
    return rng.choice((0.3, 1.0, 4.0, 8.0))


def _by_hand(first: int, last: int) -> None:
    for number in range(first, last):
        violation = simulate(group_fabric(number), number).violation
        if violation is not None:
            print(number, f"{violation.at_s:.3f}", violation.message, flush=True)  # noqa: T201 - run by hand


def _shrink_by_hand(number: int) -> None:
    described = group_fabric(number)
    failed = simulate(described, number)
    if failed.violation is None:
        print(number, "holds")  # noqa: T201
        return
    smaller = shrink(described, failed)
    print(smaller.violation, smaller.applied)  # noqa: T201
    for position in smaller.applied:
        print(" ", smaller.faults[position])  # noqa: T201


if __name__ == "__main__":
    if len(sys.argv) > 2:
        _by_hand(int(sys.argv[1]), int(sys.argv[2]))
    else:
        _shrink_by_hand(int(sys.argv[1]))

"""How exact the emulated WAN is on this machine: delays between hosts against the configured ones, and packets per second.

Real UDP packets between real sockets inside the hosts; :mod:`nearcast.emulation.probes` sends and receives them. One-way delay
is from just before the sender's system call to the moment the receiving host's kernel had the packet. Results are records that
turn into JSON. The bars that they are held to, and what was measured, are in docs/emulation-accuracy.md.

:func:`measure_pairs` works on any hosts that a router joins, a running WAN's as well; :func:`measure_accuracy`,
:func:`measure_throughput`, :func:`measure_echo` and :func:`measure_transfer` make a WAN of their own.
"""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.emulation.namespaces import HostNamespace, create_hosts
from nearcast.emulation.probes import Echoing, Transferred, Transferring
from nearcast.emulation.probing import PORT, Circumstances, exchange, open_receiver, open_sender, run_probe
from nearcast.emulation.router import Router, RouterSettings
from nearcast.errors import EmulationError
from nearcast.network.conditions import Conditions
from nearcast.network.network import Network
from nearcast.scenario.assembly import build_network
from nearcast.scenario.topology import Host, Site, SiteLink, Topology

ALLOWANCE_MS: Final = 0.5
ALLOWANCE_SHARE: Final = 0.02
"""The accuracy bar: a delay may be off by so many milliseconds plus this share of it."""

INFLATION_MS: Final = 1.0
LOSS_SHARE: Final = 0.001
"""A rate is sustained while the median delay is within 1 ms of the lowest rate's and at most 1 packet in 1,000 is missing."""

RATES: Final = (1_000, 5_000, 10_000, 20_000, 30_000, 40_000, 50_000, 60_000, 80_000, 100_000)
ATTEMPTS: Final = 3
"""Times that something is measured before a bad result is believed: a neighbour on the machine may have had the moment."""

DISTURBED_SHARE: Final = 0.02
MAX_PAIRS: Final = 400
"""Pairs that are measured unless said otherwise; each needs a socket."""

_POSITIONS_MS: Final = (0.0, 1.0, 6.0, 30.0, 100.0)
"""Where the sites of the reference topology are, on a line."""


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """A distribution, in milliseconds."""

    median_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float


class PairResult(msgspec.Struct, frozen=True, kw_only=True):
    """From one host to another."""

    source: str
    target: str
    configured_ms: float
    sent: int
    received: int
    median_ms: float
    """Measured one-way delay."""

    error: Spread
    """Measured minus configured."""

    @property
    def allowance_ms(self) -> float:
        return ALLOWANCE_MS + ALLOWANCE_SHARE * self.configured_ms

    @property
    def within(self) -> bool:
        """Whether the median is where the bar wants it."""
        return abs(self.error.median_ms) <= self.allowance_ms


class AccuracyResult(msgspec.Struct, frozen=True, kw_only=True):
    """Delays between hosts at one rate."""

    hosts: int
    packets_per_s: float
    duration_s: float
    sent: int
    received: int
    error: Spread
    """Over all packets: measured minus configured."""

    within_share: float
    """Share of packets that were within 0.5 ms + 2 % of the configured delay."""

    worst_share: float
    """Of the pair whose median is worst: its error as a share of what the bar allows; above 1 the bar is missed."""

    pairs: tuple[PairResult, ...]
    circumstances: Circumstances


class Rung(msgspec.Struct, frozen=True, kw_only=True):
    """One rate of the ladder."""

    offered_pps: float
    sent_pps: float
    """What the sender managed."""

    received_pps: float
    missing_share: float
    error: Spread
    """One-way delay minus the configured one."""

    inflation_ms: float
    """Median delay above that of the lowest rate."""

    inflation_p99_ms: float
    """The same of the 99th percentile."""

    circumstances: Circumstances

    @property
    def sustained(self) -> bool:
        """Whether the router kept up with what was sent, which may be less than what was wanted."""
        return self.inflation_ms < INFLATION_MS and self.missing_share <= LOSS_SHARE


class ThroughputResult(msgspec.Struct, frozen=True, kw_only=True):
    """How many packets per second the router takes before delays grow."""

    hosts: int
    payload_bytes: int
    rungs: tuple[Rung, ...]
    sustained_pps: float
    """Measured rate of the highest rung that, like all below it, was sustained."""


class EchoResult(msgspec.Struct, frozen=True, kw_only=True):
    """A packet there and back, one after the other, received by a waiting process each time."""

    configured_ms: float
    round_trip: Spread


class TransferResult(msgspec.Struct, frozen=True, kw_only=True):
    """One TCP connection that sends as fast as it may."""

    configured_ms: float
    mtu_bytes: int
    megabits_per_s: float


@contextmanager
def running(
    topology: Topology, *, seed: int = 0, settings: RouterSettings | None = None
) -> Iterator[tuple[list[HostNamespace], Router, Network]]:
    """A topology's hosts and router without its processes, and its network to ask for what is expected."""
    network, names = build_network(topology, random.Random(seed))
    hosts = create_hosts(names, topology.mtu_bytes)
    try:
        router = Router.start(topology, hosts, seed=seed, settings=settings)
        try:
            yield hosts, router, network
        finally:
            router.close()
    finally:
        for host in hosts:
            host.close()


def reference_topology(hosts: int = 20, sites: int = 5) -> Topology:
    """Hosts at sites that are 1 to 100 ms apart, 0.5 ms within a site: delays of all sizes at once."""
    names = [f"site-{number + 1}" for number in range(sites)]
    positions_ms = [*_POSITIONS_MS, *(_POSITIONS_MS[-1] + 20.0 * number for number in range(1, sites))][:sites]
    return Topology(
        name="accuracy",
        sites=tuple(Site(name=name, local=Conditions(latency_ms=0.5)) for name in names),
        links=tuple(
            SiteLink(between=(names[a], names[b]), latency_ms=positions_ms[b] - positions_ms[a])
            for a in range(sites)
            for b in range(a + 1, sites)
        ),
        hosts=tuple(Host(name=f"host-{number + 1}", site=names[number % sites]) for number in range(hosts)),
    )


def line_topology(latency_ms: float, hosts: int = 2, mtu_bytes: int = 1500) -> Topology:
    """Two sites with one link; hosts at both in turn."""
    return Topology(
        name="line",
        sites=(Site(name="left"), Site(name="right")),
        links=(SiteLink(between=("left", "right"), latency_ms=latency_ms),),
        hosts=tuple(Host(name=f"host-{number + 1}", site=("left", "right")[number % 2]) for number in range(hosts)),
        mtu_bytes=mtu_bytes,
    )


def measure_accuracy(
    *,
    topology: Topology | None = None,
    packets_per_s: float = 1_000.0,
    duration_s: float = 20.0,
    seed: int = 0,
    settings: RouterSettings | None = None,
) -> AccuracyResult:
    """Delays between all hosts of a topology; by default the reference one with 20 hosts, which is what the bar is about.

    When the hypervisor took over 2 % of the cores meanwhile, up to two more attempts follow and the least disturbed counts.
    """
    with running(topology or reference_topology(), seed=seed, settings=settings) as (hosts, router, network):
        results: list[AccuracyResult] = []
        while len(results) < ATTEMPTS and all(one.circumstances.stolen_share > DISTURBED_SHARE for one in results):
            results.append(measure_pairs(hosts, network, packets_per_s=packets_per_s, duration_s=duration_s, router=router))
    return min(results, key=lambda one: one.circumstances.stolen_share)


def measure_pairs(
    hosts: Sequence[HostNamespace],
    network: Network,
    *,
    pairs: Sequence[tuple[int, int]] | None = None,
    packets_per_s: float = 1_000.0,
    duration_s: float = 10.0,
    payload_bytes: int = 100,
    router: Router | None = None,
) -> AccuracyResult:
    """Delays between pairs of hosts against what ``network`` expects on idle links without jitter. Unless said which, all
    pairs, or of very many so many that every host sends.

    Blocks for the duration and the longest delay. Pairs that cannot reach each other are left out.
    """
    chosen = [pair for pair in pairs or _some_pairs(len(hosts)) if network.one_way_ms(*pair) < float("inf")]
    if not chosen:
        raise EmulationError("no host reaches another one: nothing to measure")
    # Neighbours in time are strangers in space: the sender goes round in this order.
    random.Random(len(chosen)).shuffle(chosen)
    expected_ms = np.array([network.one_way_ms(*pair) for pair in chosen])
    sent, records, circumstances = exchange(
        hosts, chosen, packets_per_s, duration_s, payload_bytes, float(expected_ms.max()), router=router
    )
    numbers = records[:, 0]
    delays_ms = (records[:, 2] - records[:, 1]) / 1e6
    errors_ms = delays_ms - expected_ms[numbers]
    results = []
    for number, (source, target) in enumerate(chosen):
        mine = numbers == number
        if not mine.any():
            continue
        results.append(
            PairResult(
                source=hosts[source].name,
                target=hosts[target].name,
                configured_ms=float(expected_ms[number]),
                sent=sent.packets // len(chosen) + (number < sent.packets % len(chosen)),
                received=int(mine.sum()),
                median_ms=float(np.median(delays_ms[mine])),
                error=_spread(errors_ms[mine]),
            )
        )
    within = np.abs(errors_ms) <= ALLOWANCE_MS + ALLOWANCE_SHARE * expected_ms[numbers]
    return AccuracyResult(
        hosts=len(hosts),
        packets_per_s=packets_per_s,
        duration_s=duration_s,
        sent=sent.packets,
        received=len(records),
        error=_spread(errors_ms),
        within_share=float(within.mean()),
        worst_share=max(abs(result.error.median_ms) / result.allowance_ms for result in results),
        pairs=tuple(sorted(results, key=lambda result: (result.source, result.target))),
        circumstances=circumstances,
    )


def _some_pairs(hosts: int) -> list[tuple[int, int]]:
    if hosts * (hosts - 1) <= MAX_PAIRS:
        return [(a, b) for a in range(hosts) for b in range(hosts) if a != b]
    each = max(1, MAX_PAIRS // hosts)
    rng = random.Random(hosts)
    return [(a, (a + step) % hosts) for a in range(hosts) for step in rng.sample(range(1, hosts), each)]


def measure_throughput(
    *,
    rates: Sequence[float] = RATES,
    duration_s: float = 3.0,
    hosts: int = 20,
    latency_ms: float = 10.0,
    payload_bytes: int = 100,
    settings: RouterSettings | None = None,
) -> ThroughputResult:
    """Climb a ladder of rates over pairs of hosts until one is not sustained in three attempts."""
    rungs: list[Rung] = []
    with running(line_topology(latency_ms, hosts), settings=settings) as (namespaces, router, network):
        pairs = [(a, (a + 1) % hosts) for a in range(hosts)]
        for rate in rates:
            for _ in range(ATTEMPTS):
                rung = _climb(namespaces, network, router, pairs, rate, duration_s, payload_bytes, rungs)
                if rung.sustained:
                    break
            rungs.append(rung)
            if not rung.sustained:
                break
    sustained = [rung.received_pps for rung in rungs if rung.sustained]
    return ThroughputResult(
        hosts=hosts, payload_bytes=payload_bytes, rungs=tuple(rungs), sustained_pps=max(sustained, default=0.0)
    )


def _climb(
    hosts: Sequence[HostNamespace],
    network: Network,
    router: Router,
    pairs: Sequence[tuple[int, int]],
    rate: float,
    duration_s: float,
    payload_bytes: int,
    below: Sequence[Rung],
) -> Rung:
    expected_ms = np.array([network.one_way_ms(*pair) for pair in pairs])
    sent, records, circumstances = exchange(
        hosts, pairs, rate, duration_s, payload_bytes, float(expected_ms.max()), router=router
    )
    if not len(records):
        raise EmulationError("not one packet came through: is something wrong with this machine's TUN devices?")
    errors_ms = (records[:, 2] - records[:, 1]) / 1e6 - expected_ms[records[:, 0]]
    error = _spread(errors_ms)
    lowest = below[0].error if below else error
    return Rung(
        offered_pps=rate,
        sent_pps=sent.packets / sent.elapsed_s,
        received_pps=len(records) / sent.elapsed_s,
        missing_share=1.0 - len(records) / max(sent.packets, 1),
        error=error,
        inflation_ms=error.median_ms - lowest.median_ms,
        inflation_p99_ms=error.p99_ms - lowest.p99_ms,
        circumstances=circumstances,
    )


def measure_echo(*, latency_ms: float = 10.0, count: int = 300, settings: RouterSettings | None = None) -> EchoResult:
    """Round-trip time as a program sees it: two waits for the network, two wake-ups of a process."""
    with running(line_topology(latency_ms), settings=settings) as (hosts, _, _):
        there, back = open_sender(hosts[0], hosts[1].address), open_receiver(hosts[1])
        with there, back:
            output = run_probe("echo", Echoing(there=there.fileno(), back=back.fileno(), count=count), [there, back], 60.0)
    return EchoResult(
        configured_ms=2 * latency_ms, round_trip=_spread(np.array(msgspec.json.decode(output, type=list[float])))
    )


def measure_transfer(
    *, latency_ms: float = 1.0, mtu_bytes: int = 1500, duration_s: float = 5.0, settings: RouterSettings | None = None
) -> TransferResult:
    """Throughput of one TCP connection: what the router lets through in bulk, acknowledgements included."""
    with running(line_topology(latency_ms, mtu_bytes=mtu_bytes), settings=settings) as (hosts, _, _):

        def listen() -> socket.socket:
            return socket.create_server((hosts[1].address, PORT))

        with hosts[1].call(listen) as listener:
            source = hosts[0].call(lambda: socket.create_connection((hosts[1].address, PORT), 10.0))
            target, _ = listener.accept()
        with source, target:
            source.settimeout(None)
            work = Transferring(source=source.fileno(), target=target.fileno(), duration_s=duration_s)
            result = msgspec.json.decode(run_probe("transfer", work, [source, target], duration_s + 30.0), type=Transferred)
    return TransferResult(
        configured_ms=latency_ms, mtu_bytes=mtu_bytes, megabits_per_s=result.bytes * 8 / 1e6 / result.elapsed_s
    )


def _spread(values: npt.NDArray[Any]) -> Spread:
    if not len(values):
        return Spread(median_ms=0.0, p95_ms=0.0, p99_ms=0.0, max_ms=0.0)
    median, p95, p99, largest = (float(value) for value in np.percentile(values, [50, 95, 99, 100]))
    return Spread(median_ms=median, p95_ms=p95, p99_ms=p99, max_ms=largest)

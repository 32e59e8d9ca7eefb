"""What the EMMA paper (Rausch, Nastic, Dustdar, IC2E 2018) says, a claim per test, with its section."""

from __future__ import annotations

import heapq
import random
import sys

import pytest

from nearcast.fabric import frames
from nearcast.fabric.control import Measurement, Report, _differs, pack
from nearcast.membership import packets
from nearcast.membership.monitoring import UDP_OVERHEAD_BYTES, Measured, Monitor, MonitorSettings
from nearcast.membership.packets import Quality, Reconnect
from nearcast.placement.assignment import (
    PAPER,
    BrokerState,
    GatewayState,
    Network,
    Policy,
    group_of,
    reconfigure,
)

# --- section V-A: monitoring ----------------------------------------------------------------------------------------------


def test_table_1_packets_have_the_papers_sizes() -> None:
    """Table I."""
    name = packets.name_hash("node")
    key = packets.monitoring_key(b"secret")
    reconnect = Reconnect(1, name, name, 1)
    assert len(packets.qosreq(1, name)) == 13
    assert len(packets.qosresp(1, Quality(98.0))) == 9
    assert len(packets.pingreq(1)) == 5
    assert len(packets.pingresp(1)) == 5
    assert len(packets.reconnect(packets.RECONNREQ, reconnect, key)) == 47
    assert len(packets.reconnect(packets.RECONNACK, reconnect, key)) == 47


def test_a_measurement_is_ten_pings_at_250_ms() -> None:
    """Section V-A: "sends 10 PINGREQ packets to the broker in an interval of 250 ms"."""
    assert MonitorSettings().pings == 10
    assert MonitorSettings().ping_interval_s == 0.25


# --- section VI-D: bandwidth ----------------------------------------------------------------------------------------------

BROKERS = 100
PERIOD_S = 15.0
EMMA_MEASUREMENT_BYTES = 22 * UDP_OVERHEAD_BYTES + 13 + 9 + 10 * (5 + 5)
"""A request, a response, ten pings, ten answers."""


def traffic(settings: MonitorSettings, seconds: float = 600.0) -> tuple[float, float]:
    """Bytes a second of one gateway and 100 brokers in steady state, both directions, headers included, and the age in seconds
    that values have at most. Paths of 1 to 250 ms, with jitter of a fiftieth and one loss in a thousand."""
    rng = random.Random(11)
    distance_ms = {f"b{number}": 1.0 * 250.0 ** rng.random() for number in range(BROKERS)}
    gateway = Monitor("g", b"secret", random.Random(5), settings, standing=True)
    now = 0.0
    for name in distance_ms:
        gateway.know(name, name, now)
    last: dict[str, float] = {}
    reported: dict[str, Measurement] = {}
    oldest_s = 0.0
    wire_bytes = report_bytes = 0
    answers: list[tuple[float, bytes]] = []
    warm_s = 60.0
    while now <= warm_s + seconds:
        now = max(now, min(gateway.next_deadline(), answers[0][0] if answers else gateway.next_deadline()))
        while answers and answers[0][0] <= now:
            _, data = heapq.heappop(answers)
            wire_bytes += (len(data) + UDP_OVERHEAD_BYTES) if now > warm_s else 0
            gateway.handle(data, "b", now)
        gateway.tick(now)
        for address, data in gateway.take_outgoing():
            wire_bytes += (len(data) + UDP_OVERHEAD_BYTES) if now > warm_s else 0
            if rng.random() >= 0.001:
                rtt_ms = distance_ms[address] * rng.gauss(1.0, 0.02)
                heapq.heappush(answers, (now + rtt_ms / 1e3, packets.pingresp(packets.id_of(data))))
        changed = []
        for event in gateway.take_events():
            assert isinstance(event, Measured)
            if event.target in last and now > warm_s:
                oldest_s = max(oldest_s, now - last[event.target])
            last[event.target] = now
            found = Measurement(event.target, event.quality.latency_ms, event.quality.jitter_ms, event.quality.loss)
            if event.target not in reported or _differs(reported[event.target], found):
                reported[event.target] = found
                changed.append(found)
        if changed and now > warm_s:
            report_bytes += len(pack(frames.REPORT, Report(measurements=changed))) + 54  # Ethernet, IPv4, TCP
    return (wire_bytes + report_bytes) / seconds, oldest_s


def test_monitoring_100_brokers_costs_a_fraction_of_the_papers_at_the_same_freshness(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Section VI-D: "In a network of 100 brokers, this would mean roughly 7.9 kB/s network usage for a gateway"."""
    emma = BROKERS * EMMA_MEASUREMENT_BYTES / PERIOD_S
    assert emma == pytest.approx(7_900, rel=0.01)
    same, same_age_s = traffic(MonitorSettings(near_ms=0.0))
    adaptive, adaptive_age_s = traffic(MonitorSettings())
    with capsys.disabled():
        sys.stdout.write(
            f"\nmonitoring, 100 brokers, one gateway: EMMA {emma / 1e3:.2f} kB/s (values up to {PERIOD_S:.0f} s old); "
            f"here {same / 1e3:.2f} kB/s at the same freshness (up to {same_age_s:.1f} s), "
            f"{adaptive / 1e3:.2f} kB/s with near paths at half the rate (up to {adaptive_age_s:.1f} s)\n"
        )
    assert same < emma / 5
    assert same_age_s < PERIOD_S + 3.5, "one period, and a burst where a check did not agree"
    assert adaptive < same


# --- section V-C: Algorithm 1 ---------------------------------------------------------------------------------------------


def network(*gateways: GatewayState, brokers: tuple[str, ...] = ("b1", "b2", "b3")) -> Network:
    return Network(tuple(BrokerState(name) for name in brokers), gateways)


def gateways(count: int, broker: str, **latency_ms: float) -> list[GatewayState]:
    return [GatewayState(f"{broker}-{number}", broker, 1, latency_ms) for number in range(count)]


def test_latency_groups_are_the_papers_intervals() -> None:
    """Section V-C: I = {[0, 2), [2, 5), [5, 10), ...}; "a latency of 4 … would fall into the interval I2"."""
    edges = (0.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0)
    for group, low in enumerate(edges):
        assert group_of(low) == group
        if group:
            assert group_of(low - 1e-9) == group - 1
    assert group_of(4.0) == 1, "the paper counts from one"
    assert group_of(1e9) == 9


def test_figure_3_clients_move_to_the_broker_in_a_lower_group() -> None:
    """Figure 3: c1 and c2 are migrated from b1 to b2, which is nearer; others stay."""
    found = reconfigure(
        network(
            GatewayState("c1", "b1", 1, {"b1": 60.0, "b2": 3.0}),
            GatewayState("c2", "b1", 1, {"b1": 30.0, "b2": 8.0}),
            GatewayState("c3", "b1", 1, {"b1": 3.0, "b2": 60.0}),
            brokers=("b1", "b2"),
        ),
        PAPER,
    )
    assert [(move.gateway, move.origin, move.target, move.reason) for move in found] == [
        ("c1", "b1", "b2", "nearer"),
        ("c2", "b1", "b2", "nearer"),
    ]


def test_a_small_difference_of_latency_moves_nobody() -> None:
    """Section V-C: "(i) avoid migrating clients due to slight variability of latency"."""
    assert reconfigure(network(*gateways(1, "b1", b1=4.9, b2=2.1)), Policy()) == []


def test_load_is_balanced_within_a_group() -> None:
    """Lines 4 and 8 to 12."""
    found = reconfigure(network(*gateways(10, "b1", b1=1.0, b2=1.0), brokers=("b1", "b2")), PAPER)
    assert {move.reason for move in found} == {"balance"}
    assert len(found) in (4, 5), "until connCnt(b2) + 0.1 · 10 ≥ connCnt(b1)"


def test_the_threshold_keeps_clients_that_hardly_matter() -> None:
    """Line 10: connCnt(b') + δ ≥ connCnt(b): continue, with δ = θ · 10."""
    even = [*gateways(6, "b1", b1=1.0, b2=1.0), *gateways(4, "b2", b1=1.0, b2=1.0)]
    assert len(reconfigure(network(*even, brokers=("b1", "b2")), PAPER)) == 1
    nearly = [*gateways(11, "b1", b1=1.0, b2=1.0), *gateways(10, "b2", b1=1.0, b2=1.0)]
    assert reconfigure(network(*nearly, brokers=("b1", "b2")), PAPER) == []
    assert reconfigure(network(*nearly, brokers=("b1", "b2")), Policy(threshold=0.0, strict_balance=False))


def test_event_8_clients_of_a_broker_that_is_gone_spread_over_the_lowest_group() -> None:
    """Section VI-C1: after the us-east broker stops, "load is balanced between the three brokers" of the same group."""
    left = [
        GatewayState(f"c{number}", "us-east", 1, {"eu-west-1": 85.0, "eu-west-2": 86.0, "eu-central": 98.0})
        for number in range(12)
    ]
    found = reconfigure(network(*left, brokers=("eu-west-1", "eu-west-2", "eu-central")), PAPER)
    assert {move.reason for move in found} == {"gone"}
    targets = [move.target for move in found]
    assert [targets.count(name) for name in ("eu-west-1", "eu-west-2", "eu-central")] == [4, 4, 4]


def test_as_printed_a_lone_client_wanders_for_ever_and_here_it_does_not() -> None:
    """Line 10 with one client and two equal brokers: 0 + 0.1 · 1 < 1."""
    lone = network(*gateways(1, "b1", b1=1.0, b2=1.0), brokers=("b1", "b2"))
    assert len(reconfigure(lone, PAPER)) == 1
    assert reconfigure(lone, Policy()) == []

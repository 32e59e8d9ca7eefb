"""What is compared: each scenario, the figures it gives, and the bar each figure is held against.

Owns the list of scenarios and how one measurement of one is made against a running broker. Which brokers, how often and in
what order is the comparison's business.
"""

from __future__ import annotations

import enum
import os
import socket
from typing import Any

import msgspec

from nearcast.bench.brokers import RunningBroker
from nearcast.bench.connections import measure_connects, measure_idle
from nearcast.bench.loop import LoadOptions, run_load
from nearcast.bench.patterns import CURVE_MATCHES, Pattern, curve_filters, make_curve_plan
from nearcast.bench.results import LoadResult
from nearcast.bench.wire import open_session, subscribe

WINDOW = 100
CURVE_CLIENTS = 100


class Direction(enum.Enum):
    HIGHER = "higher"
    LOWER = "lower"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One number of a scenario, and what it is held against.

    ``bar`` and ``goal`` are ratios to the baseline broker, or with ``absolute`` values in the figure's own unit.
    """

    key: str
    title: str
    unit: str
    better: Direction
    bar: float | None = None
    goal: float | None = None
    absolute: bool = False

    def meets(self, value: float, limit: float) -> bool:
        return value >= limit if self.better is Direction.HIGHER else value <= limit


class Scenario(msgspec.Struct, frozen=True, kw_only=True):
    """A named measurement. Exactly one of ``load``, ``connects``, ``idle`` and ``subscriptions`` says which kind."""

    name: str
    title: str
    figures: tuple[Figure, ...]
    load: LoadOptions | None = None
    connects: int = 0
    idle: int = 0
    subscriptions: int = 0
    durable: bool = False
    """Whether brokers that keep their state on disk take part."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of one scenario against one broker."""

    figures: dict[str, float]
    cpu_us: float | None = None
    """CPU microseconds of the broker per delivered message, or per connection."""
    lost: int = 0
    duplicates: int = 0
    order_violations: int = 0
    unexpected: int = 0
    generator_idle: float | None = None
    wait_share: float | None = None
    """Cores the broker wanted and others had."""
    raw: dict[str, Any]


def _rate(bar: float | None, goal: float | None) -> tuple[Figure, ...]:
    return (Figure(key="messages_per_second", title="throughput", unit="msg/s", better=Direction.HIGHER, bar=bar, goal=goal),)


def _delay() -> tuple[Figure, ...]:
    # The goal of both is to be below the baseline, which is what a ratio under one says.
    return (
        Figure(key="p50_us", title="p50", unit="µs", better=Direction.LOWER, bar=1.5, goal=0.999),
        Figure(key="p99_us", title="p99", unit="µs", better=Direction.LOWER, bar=1.0, goal=0.999),
        Figure(key="p999_us", title="p99.9", unit="µs", better=Direction.LOWER),
    )


def _load(pattern: Pattern, publishers: int, subscribers: int, *, qos: int = 0, persistent: bool = False) -> LoadOptions:
    # With QoS the load speaks MQTT 5: its Receive Maximum is the only way for a client to bound what a broker has in flight
    # towards it, so it is the only way to give every broker the same window.
    return LoadOptions(
        pattern=pattern,
        publishers=publishers,
        subscribers=subscribers,
        qos=qos,
        window=WINDOW,
        persistent=persistent,
        version=5 if qos else 4,
    )


def _scenarios() -> list[Scenario]:
    qos0, acknowledged = _rate(8, 20), _rate(5, 15)
    scenarios = [
        Scenario(
            name="qos0-one-to-one",
            title="QoS 0, 1→1",
            figures=qos0,
            load=_load(Pattern.ONE_TO_ONE, 1, 1),
            durable=True,
        ),
        Scenario(name="qos0-pairs", title="QoS 0, 10→10", figures=qos0, load=_load(Pattern.PAIRS, 10, 10)),
        Scenario(name="qos0-fanout", title="QoS 0, fan-out 1→50", figures=qos0, load=_load(Pattern.FANOUT, 1, 50)),
        Scenario(name="qos0-wildcard", title="QoS 0, wildcards 10→10", figures=qos0, load=_load(Pattern.WILDCARD, 10, 10)),
        Scenario(
            name="qos0-shared-topic",
            title="QoS 0, shared topic 10→10",
            figures=qos0,
            load=_load(Pattern.SHARED_TOPIC, 10, 10),
        ),
        Scenario(
            name="qos0-shared-subscription",
            title="QoS 0, shared subscription 10→10",
            figures=_rate(None, None),
            load=_load(Pattern.SHARED_SUBSCRIPTION, 10, 10),
        ),
    ]
    for persistent in (False, True):
        for qos in (1, 2):
            scenarios.append(
                Scenario(
                    name=f"qos{qos}-persistent" if persistent else f"qos{qos}-pairs",
                    title=f"QoS {qos}, 10→10, window {WINDOW}" + (", persistent sessions" if persistent else ""),
                    figures=acknowledged,
                    load=_load(Pattern.PAIRS, 10, 10, qos=qos, persistent=persistent),
                    durable=True,
                )
            )
    for rate in (1_000, 10_000):
        scenarios.append(
            Scenario(
                name=f"latency-{rate // 1000}k",
                title=f"latency at {rate:,} msg/s",
                figures=_delay(),
                load=msgspec.structs.replace(_load(Pattern.ONE_TO_ONE, 1, 1), rate=float(rate)),
            )
        )
    for count in (1_000, 10_000):
        scenarios.append(
            Scenario(
                name=f"idle-{count // 1000}k",
                title=f"memory per idle connection, {count:,}",
                figures=(
                    Figure(
                        key="kib_per_connection",
                        title="memory",
                        unit="KiB",
                        better=Direction.LOWER,
                        bar=10.0,
                        absolute=True,
                    ),
                ),
                idle=count,
            )
        )
    scenarios.append(
        Scenario(
            name="connects",
            title="connections made and ended",
            figures=(
                Figure(key="connects_per_second", title="connects", unit="/s", better=Direction.HIGHER, bar=0.3, goal=0.8),
            ),
            connects=10_000,
        )
    )
    for count in (1_000, 10_000, 100_000):
        scenarios.append(
            Scenario(
                name=f"subscriptions-{count // 1000}k",
                title=f"{count:,} wildcard subscriptions, {CURVE_MATCHES} match",
                figures=_rate(None, None),
                subscriptions=count,
            )
        )
    return scenarios


SCENARIOS = _scenarios()


def _from_load(result: LoadResult) -> Sample:
    figures = {"messages_per_second": result.messages_per_second}
    if result.latency is not None:
        latency = result.latency
        figures |= {"p50_us": latency.p50_us, "p99_us": latency.p99_us, "p999_us": latency.p999_us}
    return Sample(
        figures=figures,
        cpu_us=result.cpu_us_per_message,
        lost=result.lost,
        duplicates=result.duplicates,
        order_violations=result.order_violations,
        unexpected=result.unexpected + result.refused,
        generator_idle=result.generator_idle,
        wait_share=result.wait_share,
        raw=msgspec.to_builtins(result),
    )


def measure(scenario: Scenario, broker: RunningBroker, seconds: float, *, mqtt5: bool = True) -> Sample:
    """One measurement; ``seconds`` is the measured interval of a load."""
    if scenario.load is not None:
        options = msgspec.structs.replace(scenario.load, seconds=seconds, version=scenario.load.version if mqtt5 else 4)
        return _from_load(run_load(broker.address, options, broker_pid=broker.pid))
    if scenario.subscriptions:
        return _measure_curve(scenario.subscriptions, broker, seconds)
    if scenario.connects:
        connects = measure_connects(broker.address, scenario.connects, 50, broker_pid=broker.pid)
        return Sample(
            figures={"connects_per_second": connects.connects_per_second},
            cpu_us=connects.cpu_us_per_connect,
            unexpected=connects.refused,
            raw=msgspec.to_builtins(connects),
        )
    idle = measure_idle(broker.address, scenario.idle, broker.pid)
    return Sample(figures={"kib_per_connection": idle.bytes_per_connection / 1024}, raw=msgspec.to_builtins(idle))


def _measure_curve(subscriptions: int, broker: RunningBroker, seconds: float) -> Sample:
    """Traffic that four subscriptions match, while others hold ``subscriptions`` more that do not."""
    prefix = f"c{os.getpid() % 100_000:05d}"
    filters = curve_filters(prefix, subscriptions)
    each = -(-len(filters) // CURVE_CLIENTS)
    peers: list[socket.socket] = []
    try:
        for number in range(CURVE_CLIENTS):
            peer = open_session(broker.address, f"bench-holder-{number}", 4)
            peers.append(peer)
            subscribe(peer, filters[number * each : (number + 1) * each], 0, 4)
        options = LoadOptions(seconds=seconds)
        return _from_load(run_load(broker.address, options, broker_pid=broker.pid, plan=make_curve_plan(prefix)))
    finally:
        for peer in peers:
            peer.close()

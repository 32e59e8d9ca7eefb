"""``wan-accuracy``: how close the emulated WAN's delays are to the configured ones, and how many packets its router takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from nearcast.emulation import namespaces
from nearcast.emulation.measurement import (
    AccuracyResult,
    ThroughputResult,
    measure_accuracy,
    measure_throughput,
    reference_topology,
)
from nearcast.errors import EmulationUnavailable
from nearcast.experiments import plots
from nearcast.experiments.experiment import Bar, Experiment, Parameters, at_least, at_most
from nearcast.experiments.run import Run

HOSTS = 20
MAX_HOSTS = 1_000
"""Each is a namespace of its own; beyond so many, making them takes longer than measuring."""

SUSTAINED_PPS = 40_000
WITHIN_SHARE = 0.95
"""Of all packets; the rest are late because something else had the core, which no router in user space can help."""

RATES = (1_000, 10_000, 20_000, 30_000, 40_000, 45_000, 50_000, 60_000, 80_000, 100_000)
QUICK_RATES = (1_000, 20_000, 42_000)


class AccuracyParameters(Parameters, frozen=True, kw_only=True):
    """``scale`` multiplies the 20 hosts; ``duration_s`` is how long delays are measured."""

    duration_s: float = 20.0
    packets_per_s: float = 1_000.0
    rung_s: float = 3.0
    """Seconds at each rate when looking for the highest."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require(HOSTS * self.scale <= MAX_HOSTS, "scale", f"must be at most {MAX_HOSTS / HOSTS:g}: {MAX_HOSTS:,} hosts")
        self.require(0.0 < self.packets_per_s <= 1e6, "packets_per_s", "must be above 0, and at most a million")
        self.require(0.0 < self.rung_s <= 3_600.0, "rung_s", "must be above 0, and at most an hour")


class WanAccuracy(Experiment[AccuracyParameters]):
    name = "wan-accuracy"
    summary = "One-way delays of the emulated WAN against the configured ones, and packets per second of its router."
    parameters = AccuracyParameters
    quick: ClassVar[Mapping[str, Any]] = {"duration_s": 8.0, "rung_s": 1.5}

    def bars(self, parameters: AccuracyParameters) -> Sequence[Bar]:
        return [
            at_most("worst_pair_error_share", 1.0, "median error of the worst pair of hosts, as a share of 0.5 ms + 2 %"),
            at_least("packets_within_share", WITHIN_SHARE, "packets delayed by what was configured, within 0.5 ms + 2 %"),
            at_least(
                "sustained_packets_per_second", SUSTAINED_PPS, "through the router with delays inflated by less than 1 ms"
            ),
        ]

    def check(self, parameters: AccuracyParameters) -> None:
        plots.require()
        missing = namespaces.available()
        if missing is not None:
            raise EmulationUnavailable(f"{missing}; loopback mode delays connections, not packets, so it cannot stand in")

    def run(self, run: Run[AccuracyParameters]) -> None:
        parameters = run.parameters
        hosts = max(2, round(HOSTS * parameters.scale))
        topology = reference_topology(hosts, sites=min(5, hosts))
        run.keep("topology.json", topology)
        run.step(f"delays between {hosts} hosts at {parameters.packets_per_s:g} packets/s for {parameters.duration_s:g} s")
        accuracy = measure_accuracy(
            topology=topology,
            packets_per_s=parameters.packets_per_s,
            duration_s=parameters.duration_s,
            seed=parameters.seed,
        )
        run.measured("worst_pair_error_share", round(accuracy.worst_share, 4))
        run.figure("accuracy", accuracy)
        run.measured("packets_within_share", round(accuracy.within_share, 4))
        _draw_accuracy(run, accuracy)
        run.step("packets per second")
        rates = QUICK_RATES if run.quick else RATES
        throughput = measure_throughput(rates=rates, duration_s=parameters.rung_s, hosts=hosts)
        run.measured("sustained_packets_per_second", round(throughput.sustained_pps))
        run.figure("throughput", throughput)
        if throughput.rungs[-1].sustained:
            run.note(f"{rates[-1]:,} packets/s, the highest rate tried, was sustained: the limit is above it")
        _draw_throughput(run, throughput)


def _draw_accuracy(run: Run[AccuracyParameters], accuracy: AccuracyResult) -> None:
    with run.plot("accuracy", "Error of the one-way delay, by pair of hosts", "configured delay (ms)", "error (ms)") as axes:
        pairs = sorted(accuracy.pairs, key=lambda pair: pair.configured_ms)
        configured = [pair.configured_ms for pair in pairs]
        axes.plot(configured, [pair.error.median_ms for pair in pairs], ".", label="median")
        axes.plot(configured, [pair.error.p99_ms for pair in pairs], ".", label="99th percentile", alpha=0.5)
        allowed = [pair.allowance_ms for pair in pairs]
        axes.plot(configured, allowed, "k--", linewidth=1, label="bar: 0.5 ms + 2 %")
        axes.plot(configured, [-value for value in allowed], "k--", linewidth=1)


def _draw_throughput(run: Run[AccuracyParameters], throughput: ThroughputResult) -> None:
    with run.plot("throughput", "Delay of the router under load", "packets per second", "inflation of the delay (ms)") as axes:
        rates = [rung.sent_pps for rung in throughput.rungs]
        axes.plot(rates, [rung.inflation_ms for rung in throughput.rungs], "o-", label="median")
        axes.plot(rates, [rung.inflation_p99_ms for rung in throughput.rungs], "o-", label="99th percentile")
        axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="bar: 1 ms")
        axes.axvline(SUSTAINED_PPS, color="black", linestyle=":", linewidth=1)

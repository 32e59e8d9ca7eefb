"""How much a broker passes on before its latency suffers: the threshold that placement calls overload (ePulsar §5.4).

The method is the paper's: the latency of deliveries is measured under many workloads, with more and fewer topics, producers
and consumers of each, message sizes and rates; the traffic parameter that the 95th percentile goes with best is found by rank
correlation; and the rate above which it deteriorates is the threshold. Only the numbers are ours.

Rates climb a ladder for each shape of workload, until the broker no longer keeps up. A point counts as good while its p95 is
within a limit; the threshold is the highest good rate below every bad one, so that it holds for every shape, and what is
recommended keeps some distance. Points that the generator itself could not send in time say nothing and are left out. One
that is not good is measured again, and the best of its tries counts: what else the machine does makes a broker look worse,
never better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import numpy as np

from nearcast.bench.brokers import Broker
from nearcast.bench.paced import Paced, Workload, run_paced
from nearcast.bench.process import core_split, on_cores

HEADROOM: Final = 0.8
"""Of the threshold is recommended: a broker has more to do than pass on messages."""

KEPT_UP: Final = 0.95
"""Share of what should have been delivered below which a broker did not keep up, whatever its latency."""

LATE: Final = 0.05
"""Share of messages that the generator may send late."""

TRIES: Final = 3
"""Of a load that was not good."""

SHAPES: Final = (
    # topics, producers and consumers of each, payload
    (1, 1, 1, 100),
    (1, 1, 32, 100),
    (8, 1, 1, 1_000),
    (8, 4, 4, 100),
    (32, 1, 4, 100),
    (32, 1, 4, 1_000),
    (64, 1, 1, 100),
    (16, 1, 16, 1_000),
)
QUICK_SHAPES: Final = ((1, 1, 16, 100), (16, 1, 4, 1_000))

LADDER: Final = (1_000.0, 2_000.0, 4_000.0, 8_000.0, 16_000.0, 32_000.0, 64_000.0, 128_000.0, 256_000.0, 512_000.0)
"""Messages a second that the broker is to pass on."""

MOST_IN: Final = 60_000.0
"""Messages a second that one generator publishes at most."""


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement."""

    workload: Workload
    out_rate: float
    """Messages a second that were delivered."""
    p50_ms: float
    p95_ms: float
    p99_ms: float
    cpu_share: float | None
    kept_up: bool
    late_share: float

    @property
    def meaningful(self) -> bool:
        """Whether it says something about the broker: the generator was in time, or the broker is why it was not."""
        return self.late_share <= LATE or not self.kept_up

    def is_good(self, within_ms: float) -> bool:
        """Whether the broker bore it."""
        return self.kept_up and self.p95_ms <= within_ms

    def rank(self) -> tuple[bool, bool, float]:
        """Of several tries of a load, the least says most about the broker."""
        return not self.kept_up, not self.meaningful, self.p95_ms


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """What a broker was found to be capable of."""

    broker: str
    qos: int
    within_ms: float
    points: list[Point]
    correlations: dict[str, float]
    """Spearman's rank correlation of each traffic parameter with p95, strongest first."""
    threshold: float | None
    """Messages a second passed on: none of these deteriorates up to here. None: already the lowest did."""
    reached: bool
    """Whether there was a rate that deteriorated; if not, the threshold is only the highest that was tried."""
    out_rate_limit: float | None
    """What is recommended for ``placement.out_rate_limit``."""


def ladder(shape: tuple[int, int, int, int]) -> list[Workload]:
    """The workloads of a shape, slowest first."""
    topics, producers, consumers, payload_bytes = shape
    found = []
    for out_rate in LADDER:
        in_rate = out_rate / consumers
        if topics <= in_rate <= MOST_IN:
            found.append(
                Workload(
                    topics=topics,
                    producers=producers,
                    consumers=consumers,
                    payload_bytes=payload_bytes,
                    rate=in_rate / topics,
                )
            )
    return found


def measure_profile(
    broker: Broker,
    *,
    qos: int,
    seconds: float,
    within_ms: float,
    shapes: Sequence[tuple[int, int, int, int]] = SHAPES,
    say: Callable[[str], None],
) -> Profile:
    """Climb the ladder of each shape, on a fresh broker each."""
    broker_cores, generator_cores = core_split()
    points: list[Point] = []
    for shape in shapes:
        with broker.running(broker_cores) as running, on_cores(generator_cores):
            for workload in ladder(shape):
                say(
                    f"{workload.topics} topics, {workload.producers} producers and {workload.consumers} consumers of each, "
                    f"{workload.payload_bytes} bytes: {workload.out_rate:,.0f} messages/s out"
                )
                tries: list[Point] = []
                while len(tries) < TRIES and not (tries and tries[-1].meaningful and tries[-1].is_good(within_ms)):
                    measured = run_paced(running.address, workload, qos=qos, seconds=seconds, broker_pid=running.pid)
                    tries.append(point_of(workload, measured))
                point = min(tries, key=Point.rank)
                points.append(point)
                if not point.kept_up or point.p95_ms > 4 * within_ms or not point.meaningful:
                    break
    return evaluate(broker.name, qos, within_ms, points)


def point_of(workload: Workload, measured: Paced) -> Point:
    load = measured.load
    return Point(
        workload=workload,
        out_rate=load.messages_per_second,
        p50_ms=round(measured.p50_ms, 3),
        p95_ms=round(measured.p95_ms, 3),
        p99_ms=round(measured.p99_ms, 3),
        cpu_share=load.cpu_share,
        kept_up=load.messages_per_second >= KEPT_UP * workload.out_rate and load.lost == 0,
        late_share=round(measured.late_share, 4),
    )


def evaluate(broker: str, qos: int, within_ms: float, points: Sequence[Point]) -> Profile:
    """The parameter that latency goes with, and the threshold."""
    meaningful = [point for point in points if point.meaningful]
    good = [point.out_rate for point in meaningful if point.is_good(within_ms)]
    bad = [point.workload.out_rate for point in meaningful if not point.is_good(within_ms)]
    below = [rate for rate in good if rate < min(bad, default=np.inf)]
    threshold = round(max(below)) if below else None
    return Profile(
        broker=broker,
        qos=qos,
        within_ms=within_ms,
        points=list(points),
        correlations=correlations(meaningful),
        threshold=threshold,
        reached=bool(bad),
        out_rate_limit=None if threshold is None else float(f"{HEADROOM * threshold:.2g}"),
    )


def correlations(points: Sequence[Point]) -> dict[str, float]:
    """Spearman's rank correlation of traffic parameters with p95, strongest first; nothing for fewer than three points."""
    if len(points) < 3:
        return {}
    latency = _ranks([point.p95_ms for point in points])
    parameters = {
        "output messages/s": [point.workload.out_rate for point in points],
        "input messages/s": [point.workload.in_rate for point in points],
        "output bytes/s": [point.workload.out_rate * point.workload.payload_bytes for point in points],
        "messages/s of a topic": [point.workload.rate for point in points],
        "topics": [float(point.workload.topics) for point in points],
        "clients": [float(point.workload.clients) for point in points],
        "consumers of a topic": [float(point.workload.consumers) for point in points],
        "payload bytes": [float(point.workload.payload_bytes) for point in points],
    }
    found = {name: _correlation(_ranks(values), latency) for name, values in parameters.items()}
    return dict(sorted(found.items(), key=lambda item: -abs(item[1])))


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Ranks; equal values share the mean of theirs."""
    array = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    shared = (ends - 1) - (counts - 1) / 2
    ranks: np.ndarray[tuple[int], np.dtype[np.float64]] = shared[inverse]
    return ranks


def _correlation(
    first: np.ndarray[tuple[int], np.dtype[np.float64]], second: np.ndarray[tuple[int], np.dtype[np.float64]]
) -> float:
    if first.std() == 0.0 or second.std() == 0.0:
        return 0.0
    return round(float(np.corrcoef(first, second)[0, 1]), 3)

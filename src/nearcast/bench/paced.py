"""A load at a given rate from many publishers at once, with the latency of every delivery: for profiles.

Open loop: each publisher's messages leave at their due times, whatever happened to the others, and are timed from then on, so
that a broker that holds the generator up is charged for it. Publishers take turns; several messages of one that are due leave
in one write.
"""

from __future__ import annotations

import heapq
import os
import time

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.bench.loop import Load, LoadOptions, _difference, _no_collections
from nearcast.bench.patterns import Plan
from nearcast.bench.results import LoadResult
from nearcast.errors import ConfigError

LATE_NS = 2_000_000
"""A message that leaves so much after it was due was held up by the generator, or by a broker that does not read."""

RETRY_NS = 500_000
"""When one that is held up is asked again."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """Topics with producers and consumers each, and messages a second of each topic."""

    topics: int
    producers: int
    consumers: int
    payload_bytes: int
    rate: float

    @property
    def in_rate(self) -> float:
        return self.topics * self.rate

    @property
    def out_rate(self) -> float:
        return self.in_rate * self.consumers

    @property
    def clients(self) -> int:
        return self.topics * (self.producers + self.consumers)


class Paced(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a load. Latencies are from the due time to the subscriber's read."""

    load: LoadResult
    p50_ms: float
    p95_ms: float
    p99_ms: float
    late_share: float
    """Of messages that left late."""


def plan_of(workload: Workload) -> Plan:
    """Who publishes and subscribes: every topic's producers and consumers are connections of their own."""
    prefix = f"p{os.getpid() % 100_000:05d}"
    names = [f"{prefix}/{number:04d}" for number in range(workload.topics)]
    numbers = range(workload.producers)
    return Plan(
        [[name.encode()] for name in names for _ in numbers],
        [[name] for name in names for _ in range(workload.consumers)],
        [
            [topic * workload.producers + number for number in numbers]
            for topic in range(workload.topics)
            for _ in range(workload.consumers)
        ],
    )


class PacedLoad(Load):
    """One run. Use :func:`run_paced`."""

    def run_paced(self, period_ns: int) -> Paced:
        """``period_ns``: between two messages of one publisher."""
        options = self._options
        for stream in self._streams.values():
            stream.times = []
        begin = time.monotonic_ns()
        start = begin + int(options.warmup_seconds * 1e9)
        end = start + int(options.seconds * 1e9)
        # Spread over one period, so that topics do not publish in step.
        due = [begin + period_ns * number // len(self._publishers) for number in range(len(self._publishers))]
        wake = [(at, number) for number, at in enumerate(due)]
        heapq.heapify(wake)
        mark: tuple[int, int, tuple[float, float]] | None = None
        samples: list[npt.NDArray[np.int64]] = []
        sent = late = 0
        now = begin
        while now < end:
            if mark is None and now >= start:
                mark = (now, self._received, self._usage())
                samples.clear()
                sent = late = 0
            while wake[0][0] <= now:
                number = wake[0][1]
                count = self._send(number, 1 + (now - due[number]) // period_ns, due[number])
                sent += count
                late += count if now - due[number] > LATE_NS else 0
                due[number] += count * period_ns
                heapq.heapreplace(wake, (due[number] if count else now + RETRY_NS, number))
            if self._turn(0.0)[0]:
                arrived = time.monotonic_ns()
                for stream in self._streams.values():
                    if stream.times:
                        samples += [arrived - times.astype(np.int64) for times in stream.times]
                        stream.times.clear()
            now = time.monotonic_ns()
        first_now, first_received, first_usage = mark or (begin, 0, (0.0, 0.0))
        usage = _difference(self._usage(), first_usage)
        received = self._received
        self._drain()
        result = self._result((now - first_now) / 1e9, received - first_received, usage, 1.0)
        latencies = np.concatenate(samples) if samples else np.zeros(1, np.int64)
        p50, p95, p99 = (float(value) / 1e6 for value in np.percentile(latencies, [50, 95, 99]))
        return Paced(load=result, p50_ms=p50, p95_ms=p95, p99_ms=p99, late_share=late / max(1, sent))

    def _send(self, number: int, wanted: int, due_ns: int) -> int:
        """Let a publisher write up to ``wanted`` messages; returns how many it could."""
        publisher = self._publishers[number]
        if publisher.wire.blocked:
            return 0
        acks = publisher.acks
        count = min(wanted, self._most, self._kept - acks.sent % self._kept)
        if self._options.qos:
            count = min(count, self._options.window - acks.in_flight)
        if count <= 0:
            return 0
        publisher.wire.write(publisher.batch.build(acks.sent, count, due_ns))
        acks.sent += count
        self._watch(publisher.wire)
        return count


def run_paced(
    address: tuple[str, int], workload: Workload, *, qos: int, seconds: float, broker_pid: int | None = None
) -> Paced:
    """Connect, send at the workload's rate, receive, check, disconnect."""
    if workload.rate <= 0 or min(workload.topics, workload.producers, workload.consumers) < 1:
        raise ConfigError("a load needs topics, producers, consumers and a rate above 0")
    options = LoadOptions(qos=qos, payload_bytes=workload.payload_bytes, seconds=seconds, version=5 if qos else 4)
    load = PacedLoad(address, options, plan_of(workload), broker_pid)
    try:
        load.open()
        with _no_collections():
            return load.run_paced(max(1, int(1e9 * workload.producers / workload.rate)))
    finally:
        load.close()

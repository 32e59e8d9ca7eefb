"""What measurements say: plain records that turn into JSON, and the arithmetic on them."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution of one-way times, publisher's write to subscriber's read, in microseconds."""

    count: int
    p50_us: float
    p90_us: float
    p99_us: float
    p999_us: float
    max_us: float
    late_sends: int = 0
    """Messages that the generator itself sent more than a millisecond after they were due: a sign of a busy machine."""


def summarise(nanoseconds: npt.NDArray[np.int64], late_sends: int = 0) -> Latency:
    if not len(nanoseconds):
        return Latency(count=0, p50_us=0.0, p90_us=0.0, p99_us=0.0, p999_us=0.0, max_us=0.0, late_sends=late_sends)
    p50, p90, p99, p999, top = (float(value) / 1000 for value in np.percentile(nanoseconds, [50, 90, 99, 99.9, 100]))
    return Latency(count=len(nanoseconds), p50_us=p50, p90_us=p90, p99_us=p99, p999_us=p999, max_us=top, late_sends=late_sends)


class LoadResult(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the load generator."""

    seconds: float
    """Length of the measured interval."""
    delivered: int
    """Messages that subscribers received in it."""
    messages_per_second: float
    published_total: int
    """Messages written in the whole run, warm-up and drain included; loss, duplicates and order are over all of it."""
    delivered_total: int
    lost: int
    duplicates: int
    order_violations: int
    refused: int
    """Acknowledgements with an error reason code."""
    unexpected: int
    """Packets that nobody asked for: wrong size, wrong topic, wrong flags, unknown acknowledgements."""
    generator_idle: float
    """Share of the interval in which the generator had nothing to do. Near zero says that it was the bottleneck."""
    cpu_us_per_message: float | None = None
    """CPU time of the broker's processes per delivered message, when its process is known."""
    cpu_share: float | None = None
    """Cores the broker used."""
    wait_share: float | None = None
    """Cores the broker wanted and did not get, because others used them. Well above zero says that rates are too low and
    latencies too high, whatever the broker."""
    latency: Latency | None = None


class ConnectResult(msgspec.Struct, frozen=True, kw_only=True):
    connections: int
    seconds: float
    connects_per_second: float
    refused: int
    cpu_us_per_connect: float | None = None


class IdleResult(msgspec.Struct, frozen=True, kw_only=True):
    connections: int
    base_rss_bytes: int
    full_rss_bytes: int
    bytes_per_connection: float

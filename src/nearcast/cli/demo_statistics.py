"""What the demo counts: loss, duplicates, rates and latency. Pure: readings of a clock come in, figures come out."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

SPARKS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class Figures:
    """The state of affairs at one moment. Latencies are milliseconds, ``None`` before the first message."""

    seconds: float
    sent: int
    received: int
    lost: int
    duplicated: int
    rate: float
    p50_ms: float | None
    p99_ms: float | None

    def as_dict(self) -> dict[str, float | int | None]:
        return {
            "seconds": round(self.seconds, 3),
            "sent": self.sent,
            "received": self.received,
            "lost": self.lost,
            "duplicated": self.duplicated,
            "messages_per_second": round(self.rate, 1),
            "latency_p50_ms": None if self.p50_ms is None else round(self.p50_ms, 3),
            "latency_p99_ms": None if self.p99_ms is None else round(self.p99_ms, 3),
        }


class DemoStatistics:
    """Counts messages by number. ``received`` remembers every number: a demo is short."""

    def __init__(self, started: float) -> None:
        self.sent = 0
        self.received = 0
        self.duplicated = 0
        self.recent: deque[str] = deque(maxlen=6)
        self.rates: deque[float] = deque(maxlen=60)
        self.tails_ms: deque[float] = deque(maxlen=60)
        self.finished = False
        self._started = started
        self._seen: set[int] = set()
        self._latencies_ms: list[float] = []
        self._sampled_at = started
        self._sampled_sent = 0
        self._sampled_received = 0
        self._sampled_latencies = 0

    def on_received(self, number: int, latency_ms: float, shown: str) -> None:
        if number in self._seen:
            self.duplicated += 1
            return
        self._seen.add(number)
        self.received += 1
        self._latencies_ms.append(latency_ms)
        self.recent.append(shown)

    @property
    def complete(self) -> bool:
        """Whether sending has ended and everything has arrived."""
        return self.finished and self.received >= self.sent

    def sample(self, now: float) -> Figures:
        """The figures since the last sample. What was sent before that and is not here yet counts as lost, for now."""
        span = max(now - self._sampled_at, 1e-9)
        rate = (self.received - self._sampled_received) / span
        latencies = sorted(self._latencies_ms[self._sampled_latencies :])
        missing = max(0, self._sampled_sent - self.received)
        self._sampled_at = now
        self._sampled_sent = self.sent
        self._sampled_received = self.received
        self._sampled_latencies = len(self._latencies_ms)
        figures = self._figures(now, rate, latencies, missing)
        self.rates.append(rate)
        self.tails_ms.append(figures.p99_ms or 0.0)
        return figures

    def total(self, now: float) -> Figures:
        """The figures of the whole run, when nothing is on its way any more."""
        rate = self.received / max(now - self._started, 1e-9)
        return self._figures(now, rate, sorted(self._latencies_ms), self.sent - self.received)

    def _figures(self, now: float, rate: float, ordered_ms: list[float], lost: int) -> Figures:
        return Figures(
            seconds=now - self._started,
            sent=self.sent,
            received=self.received,
            lost=lost,
            duplicated=self.duplicated,
            rate=rate,
            p50_ms=percentile(ordered_ms, 0.50),
            p99_ms=percentile(ordered_ms, 0.99),
        )


def percentile(ordered: list[float], fraction: float) -> float | None:
    """The smallest value that at least this fraction of all do not exceed (nearest rank)."""
    if not ordered:
        return None
    rank = max(1, -(-int(fraction * 10_000) * len(ordered) // 10_000))
    return ordered[min(rank, len(ordered)) - 1]


def sparkline(values: list[float]) -> str:
    """Values as bars, the largest as the highest."""
    top = max(values, default=0.0)
    if top <= 0:
        return SPARKS[0] * len(values)
    return "".join(SPARKS[min(len(SPARKS) - 1, int(value / top * (len(SPARKS) - 1) + 0.5))] for value in values)

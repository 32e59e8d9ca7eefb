"""A program beside a node of a fabric: reads its figures again and again, and keeps them with the time.

``python -m nearcast.experiments.sampling URL FILE --every S`` reads Prometheus metrics of ``URL`` until SIGTERM, and writes a
line of JSON for each time: ``at_ns`` (nanoseconds since 1970) and the sums over all labels of the metrics named. A node that
is not there is passed over. Only the standard library: it must cost next to nothing beside what it watches.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

METRICS = (
    "nearcast_messages_received_total",
    "nearcast_messages_sent_total",
    "nearcast_connected_clients",
    "process_cpu_seconds_total",
)
"""What is kept."""

_PATIENCE_S = 2.0
_MOST_BYTES = 16 * 1024 * 1024


class Sample(NamedTuple):
    """The figures of a node at a moment."""

    at_ns: int
    values: dict[str, float]


def parse(text: str, wanted: Iterable[str] = METRICS) -> dict[str, float]:
    """Sums over all labels, of the metrics that are there."""
    names = frozenset(wanted)
    sums: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        described, _, value = line.rpartition(" ")
        name = described.partition("{")[0]
        if name in names:
            sums[name] = sums.get(name, 0.0) + float(value)
    return sums


def read_samples(path: Path) -> list[Sample]:
    """What a sampler wrote; a last line that it could not finish is left out."""
    samples = []
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        if line.endswith("\n"):
            fields = json.loads(line)
            samples.append(Sample(fields.pop("at_ns"), fields))
    return samples


def rates(samples: list[Sample], metric: str) -> list[tuple[int, float]]:
    """``at_ns, per second`` between each two samples; a counter that went back began anew."""
    found = []
    for earlier, later in itertools.pairwise(samples):
        before, after = earlier.values.get(metric), later.values.get(metric)
        if before is not None and after is not None and later.at_ns > earlier.at_ns:
            count = after - before if after >= before else after
            found.append((later.at_ns, count / (later.at_ns - earlier.at_ns) * 1e9))
    return found


def sample(url: str, path: Path, every_s: float, stop: threading.Event) -> None:
    """Read and write until ``stop``."""
    with path.open("a") as file:
        due = time.monotonic()
        while not stop.wait(max(0.0, due - time.monotonic())):
            due = max(due + every_s, time.monotonic())
            try:
                with urllib.request.urlopen(url, timeout=_PATIENCE_S) as answer:  # noqa: S310  # made by nearcast.experiments
                    text = answer.read(_MOST_BYTES).decode()
                at_ns = time.time_ns()
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                continue
            file.write(json.dumps({"at_ns": at_ns, **parse(text)}) + "\n")
            file.flush()


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description="Keep the figures of a node, again and again.")
    parser.add_argument("url")
    parser.add_argument("file", type=Path)
    parser.add_argument("--every", type=float, default=1.0, metavar="S")
    options = parser.parse_args()
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    sample(options.url, options.file, options.every, stop)


if __name__ == "__main__":
    main()

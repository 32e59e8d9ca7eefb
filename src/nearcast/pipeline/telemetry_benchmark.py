"""What planning costs here: the figures of ``nearcast bench telemetry``, in a process of its own.

- **placement**: Algorithm 1 on arrays, once with one topic in twenty at the wrong broker and once with every one, median of
  five, on one core;
- **the job**: tables of clients are made up (:mod:`nearcast.pipeline.telemetry_files`), and ``nearcast pipeline run
  telemetry`` plans on them, a process each, Spark's start included; ten clients a topic. The memory is that of all its
  processes together, shared pages counted once (Linux; elsewhere it is left out).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from nearcast.errors import PipelineError
from nearcast.pipeline.session import build_session, stop_session
from nearcast.pipeline.telemetry_files import Synthesis, generate
from nearcast.placement.deciding import decide
from nearcast.placement.topics import Fleet, PlacementSettings, Topics
from nearcast.telemetry.places import Places

CLIENTS_PER_TOPIC = 10
SAMPLE_SECONDS = 0.25
REPETITIONS = 5
DIMENSIONS = 8


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, from the command line as JSON. ``samples`` in millions; none leaves the job out."""

    samples: tuple[float, ...] = (1.0, 2.5, 5.0, 10.0)
    topics: int = 100_000
    brokers: int = 200
    master: str = "local[2]"


def snapshot(topics: int, brokers: int, misplaced: float, seed: int = 7) -> tuple[Topics, Fleet]:
    """Topics around cities, this share of them owned anywhere, and brokers of which one in fifty is overloaded."""
    rng = np.random.default_rng(seed)
    cities = np.zeros((64, DIMENSIONS))
    cities[:, :3] = rng.normal(0.0, 45.0, (64, 3))

    def around(home: np.ndarray, spread: float, least: float, most: float) -> Places:
        number = len(home)
        vectors = cities[home] + rng.normal(0.0, spread, (number, DIMENSIONS))
        return Places(vectors, rng.uniform(least, most, number), rng.normal(0.0, 0.05, number))

    places = around(np.arange(brokers) % 64, 1.5, 0.2, 2.0)
    nearest = Places(cities, np.full(64, 0.01), np.zeros(64)).matrix_ms(places).argmin(axis=1)
    home = rng.integers(0, 64, topics)
    owner = np.where(rng.random(topics) < misplaced, rng.integers(0, brokers, topics), nearest[home])
    producers, consumers = (around(home, 2.0, 1.0, 9.0) for _ in range(2))
    rate = rng.lognormal(1.0, 1.0, topics)
    cpu = rng.uniform(0.1, 0.6, brokers)
    cpu[: max(1, brokers // 50)] = 0.93
    at = places.rows(owner)
    found = Topics(
        [f"game/{number >> 10}/zone/{number}" for number in range(topics)],
        producers,
        rng.integers(1, 4, topics),
        consumers,
        rng.integers(1, 8, topics),
        deviation_ms=np.full(topics, 4.0),
        worst_ms=(producers.paired_ms(at) + consumers.paired_ms(at)) / 2 + 4.0,
        bound_ms=np.full(topics, 40.0),
        owner=owner,
        rate=rate,
    )
    names = [f"b{row}" for row in range(brokers)]
    return found, Fleet(names, places, cpu=cpu, out_rate=np.bincount(owner, 0.75 * rate, brokers).astype(np.float64))


def measure_placement(settings: Settings) -> dict[str, float]:
    """Seconds to decide, by the share of topics that are elsewhere than they should be."""
    figures: dict[str, float] = {}
    # Asked for on one core; threads of the matrix product count as well.
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    if cores is not None:
        os.sched_setaffinity(0, {min(cores)})
    try:
        figures |= _placements(settings)
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
    return figures


def _placements(settings: Settings) -> dict[str, float]:
    figures: dict[str, float] = {}
    for name, misplaced in (("few", 0.05), ("all", 1.0)):
        topics, fleet = snapshot(settings.topics, settings.brokers, misplaced)
        took = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            plan = decide(topics, fleet, PlacementSettings(), 1e6)
            took.append(time.perf_counter() - started)
        figures[f"placement_{name}_seconds"] = statistics.median(took)
        figures[f"placement_{name}_moves"] = float(len(plan.moves))
    return figures


def measure_job(directory: Path, samples: int, settings: Settings) -> dict[str, float]:
    """One run of the job: seconds, start to end; and the most memory."""
    command = [sys.executable, "-m", "nearcast", "pipeline", "run", "telemetry", "--master", settings.master, "--json"]
    command += ["--tables", str(directory)]
    started = time.perf_counter()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)  # noqa: S603 - ourselves
    with _watched(process.pid) as memory:
        output, _ = process.communicate()
    took = time.perf_counter() - started
    last = json.loads(output.splitlines()[-1])
    if last["event"] != "finished" or last["result"]["samples"] != samples:
        raise PipelineError(f"the job did not plan on {samples:,} samples: {output.splitlines()[-1]}")
    name = f"job_{samples / 1e6:g}m"
    figures = {f"{name}_seconds": took, f"{name}_moves": float(last["result"]["moves"])}
    if memory:
        figures[f"{name}_gigabytes"] = max(memory) / 1e9
    return figures


@contextlib.contextmanager
def _watched(pid: int) -> Iterator[list[int]]:
    """What a process and all that it started occupy, now and then."""
    found: list[int] = []
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(SAMPLE_SECONDS):
            size = sum(_proportional_bytes(each) for each in _family(pid))
            if size:
                found.append(size)

    watching = threading.Thread(target=watch, name="memory")
    watching.start()
    try:
        yield found
    finally:
        ended.set()
        watching.join()


def _family(pid: int) -> Iterator[int]:
    yield pid
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            for child in Path(f"/proc/{pid}/task/{task}/children").read_text().split():
                yield from _family(int(child))


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def run(settings: Settings) -> dict[str, float]:
    """All figures, by name."""
    figures = measure_placement(settings)
    for millions in settings.samples:
        samples = round(millions * 1e6)
        with tempfile.TemporaryDirectory(prefix="nearcast-bench-telemetry-") as name:
            directory = Path(name) / "tables"
            made_up = Synthesis(samples=samples, topics=max(1, samples // CLIENTS_PER_TOPIC), brokers=settings.brokers)
            if shutil.disk_usage(name).free < 200 * samples:
                raise PipelineError(f"{name}: {samples:,} samples need {200 * samples / 1e9:.1f} GB of disk")
            spark = build_session("nearcast bench telemetry", master=settings.master)
            try:
                generate(spark, directory, made_up)
            finally:
                stop_session(spark)
            figures |= measure_job(directory, samples, settings)
    return figures


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1].encode(), type=Settings) if len(sys.argv) > 1 else Settings()
    try:
        sys.stdout.write(json.dumps(run(given)) + "\n")
    except PipelineError as error:
        sys.exit(f"error: {error}")

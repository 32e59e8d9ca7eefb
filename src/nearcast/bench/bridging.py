"""What it costs that a message crosses from one broker to another: two brokers of a fabric, the same load both ways.

*local*: publishers and subscribers are at the first broker. *bridged*: publishers are at the first, subscribers at the second.
Both are measured in turn, round by round, so that whatever else the machine does meets both. A bridged message passes two
brokers, so that on enough cores its rate can come close to the local one, and its CPU time cannot: that is given of both
brokers together.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import msgspec
from rich.table import Table

from nearcast.bench.brokers import BrokerNotStarted, RunningBroker, free_port, stop_group
from nearcast.bench.loop import LoadOptions, run_load
from nearcast.bench.patterns import Pattern
from nearcast.bench.process import core_split, cpu_seconds, on_cores
from nearcast.bench.wire import open_session, subscribe
from nearcast.errors import ConnectionClosed, ConnectionRefused

_START_SECONDS = 20.0
_PROBE_TOPIC = b"bench/linked"


class Bridging(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement. ``cpu_us`` is of all brokers together, per delivered message."""

    load: str
    bridged: bool
    messages_per_second: float
    cpu_us: float
    p50_us: float
    p99_us: float
    lost: int
    duplicates: int


LOADS: dict[str, LoadOptions] = {
    "QoS 0, one to one": LoadOptions(pattern=Pattern.ONE_TO_ONE, publishers=1, subscribers=1, qos=0, version=4),
    "QoS 1, 4 pairs": LoadOptions(pattern=Pattern.PAIRS, publishers=4, subscribers=4, qos=1, window=100, version=5),
    "QoS 2, 4 pairs": LoadOptions(pattern=Pattern.PAIRS, publishers=4, subscribers=4, qos=2, window=100, version=5),
    "QoS 1, 500 msg/s": LoadOptions(
        pattern=Pattern.ONE_TO_ONE, publishers=1, subscribers=1, qos=1, window=100, rate=500.0, version=5
    ),
}


@contextmanager
def linked_brokers(cores: set[int] | None) -> Iterator[list[RunningBroker]]:
    """Two brokers of one fabric, linked."""
    with tempfile.TemporaryDirectory(prefix="nearcast-bench-") as directory:
        home = Path(directory)
        secret = home / "secret"
        subprocess.run([sys.executable, "-m", "nearcast", "secret", str(secret)], check=True, stdout=subprocess.DEVNULL)
        running: list[RunningBroker] = []
        processes: list[subprocess.Popen[bytes]] = []
        link_ports = [free_port(), free_port()]
        try:
            for number, link_port in enumerate(link_ports):
                port = free_port()
                command = [sys.executable, "-m", "nearcast", "broker", "--port", str(port), "--name", f"bench-{number}"]
                command += ["--fabric-secret", str(secret), "--link-port", str(link_port)]
                if number:
                    command += ["--peer", f"127.0.0.1:{link_ports[0]}"]
                log_path = home / f"{number}.log"
                with on_cores(cores), log_path.open("wb") as log:
                    process = subprocess.Popen(
                        command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )
                processes.append(process)
                running.append(RunningBroker(process.pid, ("127.0.0.1", port), log_path))
            _await_link(running)
            yield running
        finally:
            for process in processes:
                stop_group(process)


def _await_link(running: list[RunningBroker]) -> None:
    """Return once a message that was published at the first broker arrives at the second."""
    probe = b"\x30" + bytes([2 + len(_PROBE_TOPIC)]) + len(_PROBE_TOPIC).to_bytes(2, "big") + _PROBE_TOPIC
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        try:
            with (
                open_session(running[1].address, "bench-probe-b", 4) as listener,
                open_session(running[0].address, "bench-probe-a", 4) as speaker,
            ):
                subscribe(listener, [_PROBE_TOPIC.decode()], 0, 4)
                listener.settimeout(0.1)
                while time.monotonic() < deadline:
                    speaker.sendall(probe)
                    try:
                        if listener.recv(4_096):
                            return
                    except TimeoutError:
                        continue
        except (ConnectionClosed, ConnectionRefused, OSError):
            time.sleep(0.05)
    raise BrokerNotStarted("nearcast", "two brokers did not find each other; does `nearcast broker --peer` work here?")


def measure_bridging(rounds: int, seconds: float, say: Callable[[str], None]) -> list[Bridging]:
    """All loads, local and bridged in turn."""
    broker_cores, generator_cores = core_split()
    found: list[Bridging] = []
    with linked_brokers(broker_cores) as running, on_cores(generator_cores):
        for round_number in range(rounds):
            for title, options in LOADS.items():
                for bridged in (False, True):
                    say(f"round {round_number + 1}: {title}, {'bridged' if bridged else 'local'}")
                    found.append(_measure(running, title, options, bridged, seconds))
    return found


def _measure(running: list[RunningBroker], title: str, options: LoadOptions, bridged: bool, seconds: float) -> Bridging:
    first, second = running
    before = sum(cpu_seconds(broker.pid) for broker in running)
    result = run_load(
        second.address if bridged else first.address,
        msgspec.structs.replace(options, seconds=seconds),
        publish_at=first.address,
    )
    used = sum(cpu_seconds(broker.pid) for broker in running) - before
    latency = result.latency
    return Bridging(
        load=title,
        bridged=bridged,
        messages_per_second=result.messages_per_second,
        cpu_us=1e6 * used / max(1, result.delivered_total),
        p50_us=0.0 if latency is None else latency.p50_us,
        p99_us=0.0 if latency is None else latency.p99_us,
        lost=result.lost,
        duplicates=result.duplicates,
    )


def bridging_table(measured: list[Bridging]) -> Table:
    """Medians of all rounds, local beside bridged."""
    table = Table("load", "", "local", "bridged", "ratio")
    for title in LOADS:
        sides = [[one for one in measured if one.load == title and one.bridged == bridged] for bridged in (False, True)]
        if not all(sides):
            continue
        rows: list[tuple[str, Callable[[Bridging], float]]]
        if LOADS[title].rate:
            rows = [("p50 µs", lambda one: one.p50_us), ("p99 µs", lambda one: one.p99_us)]
        else:
            rows = [("msg/s", lambda one: one.messages_per_second), ("CPU µs/msg", lambda one: one.cpu_us)]
        for unit, figure in rows:
            local, bridged = (median([figure(one) for one in side]) for side in sides)
            table.add_row(title, unit, f"{local:,.2f}", f"{bridged:,.2f}", f"{bridged / local:.2f}" if local else "")
        wrong = sum(one.lost + one.duplicates for side in sides for one in side)
        if wrong:
            table.add_row(title, "lost or doubled", "", f"{wrong:,}", "")
    return table

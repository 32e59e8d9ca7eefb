"""What a replica set takes: three brokers on this machine, each with its own log on its disk, and publishers at QoS 1.

A PUBACK says that two of three disks have the message. Measured are how many a second are acknowledged, with and without a
function that handles each, and how long one waits at a low rate. The disk's own limit is taken in the same rounds: as many
files as there are replicas, written and flushed at the same time, each by a thread of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import msgspec
from rich.table import Table

from nearcast.bench.brokers import BrokerNotStarted, free_port, stop_group
from nearcast.bench.persisted import PersistedLoad, PersistedResult, publish_persisted
from nearcast.bench.process import cpu_seconds

REPLICAS = 3
TOPIC = "bench/kept"
LARGE_BYTES = 8_192
SMALL_BYTES = 100
LOW_RATE = 100.0

FUNCTION = """\
def count(topic, index, data, ctx):
    ctx.state["bytes"] = ctx.state.get("bytes", 0) + len(data)
"""

BARS = {"publish_8k": 10_000.0, "function_8k": 5_000.0}
"""Messages a second; or what the disk takes, where that is less."""

_START_SECONDS = 30.0
_HANDLE_SECONDS = 60.0
_DISK_PIECE_BYTES = 1 << 20
_HOST = "127.0.0.1"
_NEARCAST = (sys.executable, "-m", "nearcast")


class ReplicatedFabric:
    """A controller and brokers, the first three of which keep ``bench/kept/#`` together. All processes end with the block.

    ``brokers`` above three are witnesses: they keep nothing. With ``preferred`` the first one leads while it can.
    """

    def __init__(self, stack: ExitStack, home: Path, brokers: int) -> None:
        self._stack = stack
        self._home = home
        self._control_port, self._api_port = free_port(), free_port()
        self._ports = [(free_port(), free_port(), free_port()) for _ in range(brokers)]
        self.names = [f"bench-{number}" for number in range(brokers)]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._controller = ("--api", f"http://{_HOST}:{self._api_port}", "--fabric-secret", str(home / "secret"))
        subprocess.run([*_NEARCAST, "secret", str(home / "secret")], check=True, stdout=subprocess.DEVNULL)
        self._begin("controller", ["--port", str(self._control_port), "--http-port", str(self._api_port)])
        for broker in range(brokers):
            self.start(broker)

    def _begin(self, name: str, words: list[str]) -> subprocess.Popen[bytes]:
        what = "controller" if name == "controller" else "broker"
        with (self._home / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [*_NEARCAST, what, *words, "--fabric-secret", str(self._home / "secret")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._stack.callback(stop_group, process)
        return process

    def start(self, broker: int) -> None:
        """Start a broker (again), with the ports and data that it had."""
        name = self.names[broker]
        port, link_port, http_port = self._ports[broker]
        words = ["--name", name, "--port", str(port), "--link-port", str(link_port), "--http-port", str(http_port)]
        words += ["--controller", f"{_HOST}:{self._control_port}", "--no-bulk-port"]
        words += ["--data", str(self._home / name), "--sync", "fsync"]
        self.processes[broker] = self._begin(name, words)

    def make_set(self, *, preferred: bool) -> None:
        """Make the first brokers a replica set."""
        members = ["--members", ",".join(self.names[:REPLICAS]), *(["--preferred", self.names[0]] if preferred else [])]
        until("the brokers were not there", lambda: bool(self.command("set", "create", "bench", *members)))
        self.command("topic", "create", f"{TOPIC}/#", "--class", "owned", "--durable", "--set", "bench")
        wanted = self.names[:1] if preferred else self.names[:REPLICAS]
        until("the set has no leader", lambda: all(self.leader(at) in wanted for at in range(len(self.names))))

    @property
    def addresses(self) -> list[tuple[str, int]]:
        return [(_HOST, port) for port, _, _ in self._ports]

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.processes.values()]

    def command(self, *words: str) -> str:
        """A command of an operator; what it prints."""
        done = subprocess.run([*_NEARCAST, *words, *self._controller], capture_output=True, text=True, check=False)
        if done.returncode:
            raise BrokerNotStarted("nearcast", (done.stderr or done.stdout).strip() or f"`nearcast {words[0]}` failed")
        return done.stdout

    def facts(self, broker: int = 0) -> dict[str, Any]:
        """What a broker says of its part in the fabric."""
        with urllib.request.urlopen(f"http://{_HOST}:{self._ports[broker][2]}/healthz", timeout=5) as answer:
            found: dict[str, Any] = json.loads(answer.read())["fabric"]
            return found

    def leader(self, broker: int) -> str:
        """Who leads the set, as a broker has it; empty: it knows of nobody."""
        sets = self.facts(broker)["sets"]
        return str(sets[0]["leader"] or "") if sets else ""

    def handled(self) -> int:
        """Messages that functions have handled at the leader."""
        return sum(int(each["handled"]) for each in self.facts()["functions"])


@contextmanager
def replicated_fabric(
    directory: Path | None = None, *, brokers: int = REPLICAS, preferred: bool = True
) -> Iterator[ReplicatedFabric]:
    """A fabric with a replica set that has a leader, below a directory of its own."""
    with ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="nearcast-bench-", dir=directory)))
        fabric = ReplicatedFabric(stack, home, brokers)
        fabric.make_set(preferred=preferred)
        yield fabric


def until(what: str, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    reason = ""
    while time.monotonic() < deadline:
        try:
            if is_so():
                return
        except (BrokerNotStarted, OSError, ValueError, KeyError) as error:
            reason = f": {error}"
        time.sleep(0.1)
    raise BrokerNotStarted("nearcast", f"after {_START_SECONDS:.0f} s, {what}{reason}")


def disk_rate(directory: Path, total_bytes: int, copies: int = REPLICAS) -> float:
    """Bytes a second that this disk takes of each of so many files at a time, flushed after every megabyte."""
    seconds = [0.0] * copies

    def write(number: int) -> None:
        data = Random(number).randbytes(_DISK_PIECE_BYTES)
        path = directory / f"disk-{number}.bench"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            begin = time.perf_counter()
            for _ in range(max(1, total_bytes // _DISK_PIECE_BYTES)):
                os.write(descriptor, data)
                os.fdatasync(descriptor)
            seconds[number] = time.perf_counter() - begin
        finally:
            os.close(descriptor)
            path.unlink()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return total_bytes / max(seconds)


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """One load of one round. ``disk`` is in messages a second, where the disk was measured beside it."""

    load: str
    messages_per_second: float
    disk: float = 0.0
    cpu_us: float = 0.0
    """Of all brokers together, per message."""

    p50_ms: float = 0.0
    p99_ms: float = 0.0
    wrong: int = 0


def measure_replicated(rounds: int, seconds: float, directory: Path | None, say: Callable[[str], None]) -> list[Measured]:
    """All loads, round by round; those with a function last, since it stays."""
    found: list[Measured] = []
    with replicated_fabric(directory) as fabric:
        for payload_bytes in (LARGE_BYTES, SMALL_BYTES):
            for number in range(rounds):
                name = f"publish_{_size(payload_bytes)}"
                say(f"round {number + 1}: {name}")
                found.append(_publish(fabric, name, payload_bytes, seconds, directory))
        say("latency")
        for payload_bytes in (LARGE_BYTES, SMALL_BYTES):
            load = PersistedLoad(
                publishers=1, window=16, payload_bytes=payload_bytes, seconds=seconds, rate=LOW_RATE, prefix=TOPIC
            )
            result = publish_persisted(fabric.addresses[:1], load)
            found.append(_measured(f"latency_{_size(payload_bytes)}", result))
        path = Path(tempfile.mkdtemp(prefix="nearcast-bench-")) / "count.py"
        path.write_text(FUNCTION)
        fabric.command("function", "deploy", f"{path}:count", "--topic", f"{TOPIC}/#")
        until("the function does not run", lambda: bool(fabric.facts()["functions"]))
        for payload_bytes in (LARGE_BYTES, SMALL_BYTES):
            for number in range(rounds):
                name = f"function_{_size(payload_bytes)}"
                say(f"round {number + 1}: {name}")
                found.append(_with_function(fabric, name, payload_bytes, seconds))
    return found


def _size(payload_bytes: int) -> str:
    return "8k" if payload_bytes == LARGE_BYTES else f"{payload_bytes}b"


def _load(payload_bytes: int, seconds: float) -> PersistedLoad:
    small = payload_bytes < 1_024
    return PersistedLoad(
        publishers=16, window=1_024 if small else 128, payload_bytes=payload_bytes, seconds=seconds, prefix=TOPIC
    )


def _measured(name: str, result: PersistedResult, cpu_us: float = 0.0, disk: float = 0.0) -> Measured:
    return Measured(
        load=name,
        messages_per_second=result.messages_per_second,
        disk=disk,
        cpu_us=cpu_us,
        p50_ms=result.p50_ms,
        p99_ms=result.p99_ms,
        wrong=result.unexpected,
    )


def _publish(fabric: ReplicatedFabric, name: str, payload_bytes: int, seconds: float, directory: Path | None) -> Measured:
    disk = 0.0
    if payload_bytes == LARGE_BYTES:
        with tempfile.TemporaryDirectory(prefix="nearcast-bench-", dir=directory) as place:
            disk = disk_rate(Path(place), 256 << 20) / payload_bytes
    before = sum(map(cpu_seconds, fabric.pids))
    result = publish_persisted(fabric.addresses[:1], _load(payload_bytes, seconds))
    used = sum(map(cpu_seconds, fabric.pids)) - before
    return _measured(name, result, 1e6 * used / max(1, result.total), disk)


def _with_function(fabric: ReplicatedFabric, name: str, payload_bytes: int, seconds: float) -> Measured:
    """Published for a while, and handled to the last: the rate is that of both together."""
    before = fabric.handled()
    begin = time.monotonic()
    load = msgspec.structs.replace(_load(payload_bytes, seconds), warmup_seconds=0.0)
    used = sum(map(cpu_seconds, fabric.pids))
    result = publish_persisted(fabric.addresses[:1], load)
    deadline = time.monotonic() + _HANDLE_SECONDS
    while (handled := fabric.handled() - before) < result.total:
        if time.monotonic() > deadline:
            break
        time.sleep(0.02)
    took = time.monotonic() - begin
    used = sum(map(cpu_seconds, fabric.pids)) - used
    done = msgspec.structs.replace(result, messages_per_second=handled / took, unexpected=max(0, result.total - handled))
    return _measured(name, done, 1e6 * used / max(1, handled))


def medians(measured: list[Measured]) -> dict[str, Measured]:
    """By load, the medians of its rounds; what was wrong is added up."""
    by_load: dict[str, list[Measured]] = {}
    for one in measured:
        by_load.setdefault(one.load, []).append(one)
    return {
        name: Measured(
            load=name,
            wrong=sum(one.wrong for one in ones),
            **{
                field: median(getattr(one, field) for one in ones)
                for field in ("messages_per_second", "disk", "cpu_us", "p50_ms", "p99_ms")
            },
        )
        for name, ones in by_load.items()
    }


def bar_of(one: Measured) -> float:
    """What it is held to, in messages a second; 0: nothing."""
    bar = BARS.get(one.load, 0.0)
    return min(bar, one.disk) if one.disk else bar


def replicated_table(measured: list[Measured]) -> Table:
    """Medians of all rounds, beside the disk and the bars."""
    table = Table("load", "msg/s", "the disk's", "bar", "p50 ms", "p99 ms", "CPU µs/msg", "")
    for one in medians(measured).values():
        bar = bar_of(one)
        verdict = "" if not bar else "[green]met[/]" if one.messages_per_second >= bar else "[bold red]below[/]"
        table.add_row(
            one.load,
            f"{one.messages_per_second:,.0f}",
            f"{one.disk:,.0f}" if one.disk else "",
            f"≥ {bar:,.0f}" if bar else "",
            f"{one.p50_ms:.2f}",
            f"{one.p99_ms:.2f}",
            f"{one.cpu_us:.1f}" if one.cpu_us else "",
            verdict if not one.wrong else f"[bold red]{one.wrong:,} wrong[/]",
        )
    return table

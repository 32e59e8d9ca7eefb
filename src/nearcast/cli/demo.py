"""``nearcast demo``: a broker, a publisher and a subscriber at work, shown live; ends by itself.

The broker is a process of its own, started as a user would start it, and ended whatever happens. In a terminal the display is
redrawn; elsewhere a line per second is printed; with ``--json`` only the summary.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from nearcast.cli import connection as shared
from nearcast.cli.demo_statistics import DemoStatistics, Figures, sparkline
from nearcast.client import Client, Message
from nearcast.errors import ConnectionClosed, NearcastError

START_TIMEOUT_SECONDS = 8.0
DRAIN_TIMEOUT_SECONDS = 3.0
STOP_TIMEOUT_SECONDS = 4.0

#: Sending in small batches keeps the pace when timers are coarse.
TICK_SECONDS = 0.005
REDRAW_SECONDS = 0.25

ROOMS = ("kitchen", "hall", "attic", "garage", "cellar")


def demo(
    seconds: Annotated[float, typer.Option("--seconds", "-s", min=1.0, max=15.0, help="How long to run.")] = 12.0,
    rate: Annotated[float, typer.Option("--rate", min=1.0, max=20_000.0, help="Messages a second.")] = 1_000.0,
    qos: shared.Qos = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print only a summary, as JSON.")] = False,
    url: Annotated[str | None, typer.Option("--url", "-u", help="Use this broker instead of starting one.")] = None,
) -> None:
    """Show a broker and two clients at work, live; ends by itself.

    Example: nearcast demo --seconds 5 --rate 5000
    """
    console = Console()
    with _broker(url) as (address, process, log):
        total = shared.run(_run(address, process, log, seconds, rate, qos, None if as_json else console))
    if as_json:
        print(json.dumps(total.as_dict()))
    else:
        _summarise(console, total)
    if total.lost:
        raise NearcastError(f"{total.lost} messages were lost; please report this with the output of nearcast --version")


def register(app: typer.Typer) -> None:
    app.command("demo")(demo)


# -- the broker ------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _broker(url: str | None) -> Iterator[tuple[str, subprocess.Popen[bytes] | None, IO[bytes] | None]]:
    """A broker's URL; with the process and its output when we started it."""
    if url is not None:
        yield url, None, None
        return
    port = _free_port()
    with tempfile.TemporaryFile() as log:
        command = [sys.executable, "-m", "nearcast", "broker", "--port", str(port)]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        # A polite kill must end the broker too: turned into an exception, it runs the `finally` below.
        before = signal.signal(signal.SIGTERM, _terminated)
        try:
            yield f"mqtt://127.0.0.1:{port}", process, log
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _terminated(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def _wait_ready(address: str, process: subprocess.Popen[bytes] | None, log: IO[bytes] | None) -> None:
    """Until a client can connect; raises with the broker's last words when it ends instead."""
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while True:
        try:
            async with Client(address, reconnect=False, connect_timeout_seconds=2.0):
                return
        except ConnectionClosed:
            if process is None or time.monotonic() > deadline:
                raise
        if process.poll() is not None:
            raise NearcastError(f"the broker did not start: {_last_line(log)}")
        await asyncio.sleep(0.02)


def _last_line(log: IO[bytes] | None) -> str:
    if log is None:
        return "it said nothing"
    log.seek(0)
    lines = log.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


# -- the clients -----------------------------------------------------------------------------------------------------------


async def _run(
    address: str,
    process: subprocess.Popen[bytes] | None,
    log: IO[bytes] | None,
    seconds: float,
    rate: float,
    qos: int,
    console: Console | None,
) -> Figures:
    await _wait_ready(address, process, log)
    async with (
        Client(address, client_id="demo-subscriber") as subscriber,
        Client(address, client_id="demo-publisher") as publisher,
    ):
        await subscriber.subscribe("demo/#", qos=qos)
        statistics = DemoStatistics(time.perf_counter())
        async with asyncio.TaskGroup() as group:
            drained = asyncio.Event()
            receiving = group.create_task(_receive(subscriber, statistics, drained), name="demo subscriber")
            showing = group.create_task(_show(console, statistics, seconds, rate), name="demo display")
            await _send(publisher, statistics, seconds, rate, qos)
            statistics.finished = True
            if not statistics.complete:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(drained.wait(), DRAIN_TIMEOUT_SECONDS)
            total = statistics.total(time.perf_counter())
            receiving.cancel()
            showing.cancel()
    return total


async def _send(client: Client, statistics: DemoStatistics, seconds: float, rate: float, qos: int) -> None:
    """Publish at an even pace; every message is acknowledged before this returns."""
    started = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        while (elapsed := time.perf_counter() - started) < seconds:
            while statistics.sent < elapsed * rate:
                number = statistics.sent
                topic = f"demo/{ROOMS[number % len(ROOMS)]}/temperature"
                celsius = round(20 + 5 * math.sin(number / 500) + number % len(ROOMS), 2)
                payload = json.dumps({"n": number, "celsius": celsius, "sent_ns": time.perf_counter_ns()})
                statistics.sent += 1
                if qos == 0:
                    await client.publish(topic, payload)
                else:
                    group.create_task(client.publish(topic, payload, qos), name="demo publish")
            await asyncio.sleep(TICK_SECONDS)


async def _receive(client: Client, statistics: DemoStatistics, drained: asyncio.Event) -> None:
    """Count until cancelled; ``drained`` is set when the last message is there."""
    async for message in client.messages:
        _count(message, statistics)
        if statistics.complete:
            drained.set()


def _count(message: Message, statistics: DemoStatistics) -> None:
    arrived_ns = time.perf_counter_ns()
    try:
        content = json.loads(message.payload)
        number, celsius, sent_ns = int(content["n"]), float(content["celsius"]), int(content["sent_ns"])
    except (ValueError, KeyError, TypeError):
        return  # with --url, others may publish below demo/ too
    latency_ms = (arrived_ns - sent_ns) / 1e6
    statistics.on_received(number, latency_ms, f"{message.topic:<26}{celsius:>6.2f} °C  #{number:<8}{latency_ms:>7.2f} ms")


# -- the display -----------------------------------------------------------------------------------------------------------


async def _show(console: Console | None, statistics: DemoStatistics, seconds: float, rate: float) -> None:
    """Redraw until cancelled."""
    if console is None:
        return
    if not console.is_terminal:
        console.print(
            f"a broker, a publisher and a subscriber, {rate:,.0f} messages a second for {seconds:g} s", highlight=False
        )
        while True:
            await asyncio.sleep(1.0)
            print(_line(statistics.sample(time.perf_counter())), flush=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            await asyncio.sleep(REDRAW_SECONDS)
            live.update(_panel(statistics, statistics.sample(time.perf_counter()), seconds), refresh=True)


def _line(figures: Figures) -> str:
    return (
        f"{figures.seconds:5.1f} s  {figures.rate:>8,.0f} msg/s  p50 {_milliseconds(figures.p50_ms)}  "
        f"p99 {_milliseconds(figures.p99_ms)}  received {figures.received:,}  "
        f"lost {figures.lost}  duplicated {figures.duplicated}"
    )


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} ms"


def _panel(statistics: DemoStatistics, figures: Figures, seconds: float) -> Panel:
    grid = Table.grid(padding=(0, 3))
    grid.add_row("sent", "received", "rate", "p50", "p99", "lost", "duplicated", style="dim")
    grid.add_row(
        f"{figures.sent:,}",
        f"{figures.received:,}",
        f"{figures.rate:,.0f} msg/s",
        _milliseconds(figures.p50_ms),
        _milliseconds(figures.p99_ms),
        str(figures.lost),
        str(figures.duplicated),
        style="bold",
    )
    messages = Text("\n".join(statistics.recent), style="cyan")
    rates = Text.assemble(("rate  ", "dim"), (sparkline(list(statistics.rates)), "green"))
    tails = Text.assemble(("p99   ", "dim"), (sparkline(list(statistics.tails_ms)), "yellow"))
    left = max(0.0, seconds - figures.seconds)
    title = "publisher → nearcast broker → subscriber"
    content = Group(grid, Text(), rates, tails, Text(), messages)
    return Panel(content, title=title, subtitle=f"{left:.0f} s left", width=78)


def _summarise(console: Console, total: Figures) -> None:
    good = total.lost == 0 and total.duplicated == 0
    console.print(
        f"{total.received:,} messages in {total.seconds:.1f} s ({total.rate:,.0f} a second), "
        f"[{'green' if good else 'red'}]{total.lost} lost, {total.duplicated} duplicated[/]\n"
        f"latency p50 {_milliseconds(total.p50_ms)}, p99 {_milliseconds(total.p99_ms)}",
        highlight=False,
    )
    console.print(
        "next: [bold]nearcast broker[/]; [bold]nearcast sub '#' -v[/]; [bold]nearcast pub -t hello -m world[/]",
        highlight=False,
    )

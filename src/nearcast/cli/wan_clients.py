"""A scenario's clients on the WAN that ``nearcast wan up`` brought up: run to their end, and what became of their messages."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from nearcast.cli import wan_display as display
from nearcast.emulation.control import Happening
from nearcast.emulation.wan import Wan
from nearcast.errors import ConfigError, StorageUnavailable
from nearcast.experiments.emulated import doubts, run_load
from nearcast.experiments.measures import Delivery, measure
from nearcast.load.tally import LoadSummary, Times
from nearcast.scenario.events import Event
from nearcast.scenario.expansion import expand_clients
from nearcast.scenario.scenario import Scenario

MAX_EVALUATED = 2_000_000
"""Recorded events that are looked through in memory; beyond that, loss is what the load processes see of it themselves."""


@dataclass
class ClientsResult:
    """What the clients did."""

    complete: bool
    """False: ended before the scenario did."""

    hosts: dict[str, LoadSummary]
    delivery: Delivery | None
    """None when there is too much of it to look through here."""

    lost: dict[str, int]
    """By host of the subscriber; at QoS 1 and 2, where that can be told apart."""

    lost_at_qos_0: dict[str, int]
    """The others, which nobody promised."""

    latency: Times
    """Of all deliveries."""

    notes: list[str] = field(default_factory=list)
    """What qualifies the figures."""

    events: str | None = None
    """Directory of recorded events, where they are kept."""


class Told:
    """Passes on what a load has to say: to the picture, or as lines."""

    def __init__(self, recent: display.Recent, show: display.Show, began: float, total_s: float) -> None:
        self._recent = recent
        self._show = show
        self._began = began
        self._total_s = total_s
        self.notes: list[str] = []

    def step(self, text: str) -> None:
        self._show(Happening(at_s=round(time.monotonic() - self._began, 3), kind="clients", text=text))

    def advance(self, share: float) -> None:
        self._recent.progress = f"clients: {share * self._total_s:.0f} of {self._total_s:g} s"

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def check_output(output: Path | None) -> None:
    """Events of two runs do not mix."""
    if output is not None:
        for name in ("events", "load"):
            if (output / name).exists():
                raise ConfigError(f"{output} has the {name} of a run already: name another directory with --out")


async def run_clients(
    wan: Wan,
    scenario: Scenario,
    happens: Sequence[Event],
    notes: Sequence[str],
    *,
    seed: int,
    output: Path | None,
    stop: asyncio.Event,
    recent: display.Recent,
    show: display.Show,
) -> ClientsResult:
    """Run the clients to the end of the scenario, or until ``stop``."""
    now = await wan.status()
    told = Told(recent, show, time.monotonic() - now.uptime_s, scenario.duration_s + scenario.settle_s)
    for note in notes:
        told.note(note)
    load, events = _directories(Path(now.output))
    name = events.absolute().parent.name
    summaries = await run_load(wan, scenario, happens, told, seed=seed, directory=load, events=events, name=name, stop=stop)
    recent.progress = None
    doubts(told, summaries)
    result = await asyncio.to_thread(_evaluate, scenario, summaries, events, told)
    result.complete = not stop.is_set() and all(summary.complete for summary in summaries.values())
    result.events = None if output is None else str(output / events.name)
    return result


def _directories(base: Path) -> tuple[Path, Path]:
    """Where load processes meet, and where they record: beside the WAN's logs, so that they stay or go with them."""
    load, events = base / "load", base / "events"
    try:
        load.mkdir()
        events.mkdir()
    except OSError as error:
        where = str(error.filename or base)
        raise StorageUnavailable(where, f"cannot be written: {error.strerror}; name another directory with --out") from error
    return load, events


def _evaluate(scenario: Scenario, summaries: dict[str, LoadSummary], events: Path, told: Told) -> ClientsResult:
    if sum(summary.recorded for summary in summaries.values()) > MAX_EVALUATED:
        told.note(
            f"more than {MAX_EVALUATED:,} events: losses are those between the first and the last message of a subscriber"
        )
        lost = {host: summary.lost for host, summary in summaries.items()}
        return ClientsResult(False, summaries, None, lost, {}, Times(), told.notes)
    measured = measure(events, scenario)
    host_of = {client.name: client.host for client in expand_clients(scenario)}
    unpromised: Counter[str] = Counter()
    for subscriber, count in measured.lost_at_qos_0.items():
        unpromised[host_of[subscriber]] += count
    lost_of: Counter[str] = Counter()
    for subscriber, count in measured.lost.items():
        lost_of[host_of[subscriber]] += count
    latency = _times(list(measured.latencies_ms.values()))
    lost_of.subtract(unpromised)
    return ClientsResult(False, summaries, measured.delivery, dict(lost_of), dict(unpromised), latency, told.notes)


def _times(latencies_ms: Sequence[Any]) -> Times:
    together = np.concatenate(latencies_ms) if latencies_ms else np.array([])
    if not together.size:
        return Times()
    p50, p90, p99 = (round(float(value), 3) for value in np.percentile(together, (50, 90, 99)))
    mean, largest = round(float(together.mean()), 3), round(float(together.max()), 3)
    return Times(count=int(together.size), mean_ms=mean, p50_ms=p50, p90_ms=p90, p99_ms=p99, max_ms=largest)


def print_result(console: Console, scenario: Scenario, result: ClientsResult) -> None:
    """A table of hosts, and what to know about it."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("host", "clients", "sent", "delivered", "lost", "twice", "p50 ms", "p99 ms", "max ms"):
        table.add_column(heading, justify="left" if heading == "host" else "right", no_wrap=True, overflow="ellipsis")
    for host, load in list(result.hosts.items())[: display.MAX_ROWS]:
        table.add_row(host, *_row([load], result.lost.get(host, 0), load.latency))
    if len(result.hosts) > display.MAX_ROWS:
        table.add_row(f"and {len(result.hosts) - display.MAX_ROWS} more", style="dim")
    everyone = list(result.hosts.values())
    table.add_row("all", *_row(everyone, sum(result.lost.values()), result.latency), style="bold")
    console.print(table)
    unpromised = sum(result.lost_at_qos_0.values())
    if unpromised:
        console.print(
            f"besides, {unpromised:,} were lost at QoS 0, which promises nothing when connections break", highlight=False
        )
    for note in result.notes:
        console.print(f"note: {note}", style="yellow", highlight=False, markup=False)
    if not result.complete:
        console.print(
            f"incomplete: {scenario.name} ended early; what was on its way counts as lost", style="yellow", highlight=False
        )
    if result.events is not None:
        console.print(f"recorded events: {result.events}", highlight=False, soft_wrap=True)


def _row(loads: Sequence[LoadSummary], lost: int, latency: Times) -> list[str]:
    counts = (
        sum(load.clients for load in loads),
        sum(load.sent for load in loads),
        sum(load.delivered for load in loads),
        lost,
        sum(load.duplicated for load in loads),
    )
    return [f"{count:,}" for count in counts] + [
        display.milliseconds(value) for value in (latency.p50_ms, latency.p99_ms, latency.max_ms)
    ]

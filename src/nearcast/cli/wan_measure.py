"""``nearcast wan measure``: the emulated WAN's own accuracy on this machine, as a table or as JSON."""

from __future__ import annotations

import msgspec
from rich.console import Console
from rich.table import Table

from nearcast.emulation import namespaces
from nearcast.emulation.measurement import measure_accuracy
from nearcast.errors import EmulationUnavailable
from nearcast.scenario.files import load_topology

SHOWN_PAIRS = 10


def show_accuracy(topology: str | None, packets_per_s: float, duration_s: float, as_json: bool) -> None:
    """Measure, and show the pairs of hosts that are furthest off."""
    loaded = load_topology(topology) if topology is not None else None
    obstacle = namespaces.available()
    if obstacle is not None:
        raise EmulationUnavailable(obstacle)
    result = measure_accuracy(topology=loaded, packets_per_s=packets_per_s, duration_s=duration_s)
    if as_json:
        print(msgspec.json.encode(result).decode())
        return
    console = Console()
    table = Table(box=None, header_style="dim", pad_edge=False, title=f"the {SHOWN_PAIRS} pairs that are furthest off")
    table.add_column("from")
    table.add_column("to")
    for heading in ("configured ms", "median ms", "allowed ±", "packets"):
        table.add_column(heading, justify="right")
    worst = sorted(result.pairs, key=lambda pair: abs(pair.error.median_ms) / pair.allowance_ms, reverse=True)
    for pair in worst[:SHOWN_PAIRS]:
        table.add_row(
            pair.source,
            pair.target,
            f"{pair.configured_ms:.3f}",
            f"{pair.median_ms:.3f}",
            f"{pair.allowance_ms:.2f}",
            f"{pair.received}/{pair.sent}",
        )
    console.print(table)
    error = result.error
    console.print(
        f"{result.hosts} hosts, {result.packets_per_s:,.0f} packets/s for {result.duration_s:g} s: "
        f"off by {error.median_ms:.3f} ms (median), {error.p99_ms:.3f} ms (p99); {result.within_share:.1%} of packets within "
        f"0.5 ms + 2 %",
        highlight=False,
    )
    if result.circumstances.stolen_share > 0.01:
        stolen = result.circumstances.stolen_share
        console.print(f"the hypervisor gave {stolen:.0%} of the cores to others meanwhile: the tail is theirs", style="yellow")

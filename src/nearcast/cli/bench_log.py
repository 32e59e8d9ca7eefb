"""``nearcast bench log``: what the topic log does on this disk. Adds itself to the other benchmarks.

Composes the measuring (``bench``) with the broker's own files (``broker``), which know nothing of each other.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from nearcast import compiled
from nearcast.bench import topic_log
from nearcast.bench.commands import app
from nearcast.bench.comparison import busy_machine
from nearcast.broker.topic_files import TopicFiles, open_log
from nearcast.config import TopicLogSettings
from nearcast.errors import NearcastError
from nearcast.topiclog.log import TopicLog

__all__ = ["app"]


def _open(directory: Path, segment_bytes: int) -> tuple[TopicFiles, TopicLog]:
    directory.mkdir(parents=True, exist_ok=True)
    return open_log(directory, segment_bytes=segment_bytes, max_topics=1_000_000)


@app.command("log")
def log(
    directory: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; default: the one for temporary files.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds, in turns with the disk's own; the table shows medians.")] = 3,
    megabytes: Annotated[int, typer.Option(min=8, help="Payload appended in each round.")] = 256,
    open_gigabytes: Annotated[float, typer.Option(min=0.1, help="Size of the log that is opened.")] = 5.0,
    quick: Annotated[bool, typer.Option("--quick", help="One round of 64 MB, and a log of 0.5 GB to open.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure the topic log on this disk: appending, reading, opening; against the disk itself."""
    if quick:
        rounds, megabytes, open_gigabytes = 1, 64, 0.5
    errors = Console(stderr=True, highlight=False)
    if directory is not None and not directory.is_dir():
        errors.print(f"[bold red]error:[/] {directory} is no directory")
        raise typer.Exit(1)
    place = Path(tempfile.mkdtemp(prefix="nearcast-bench-", dir=directory))
    bars: list[topic_log.Bar] = []
    try:
        free = shutil.disk_usage(place).free
        if free < open_gigabytes * 1.5e9 + 1e9:
            errors.print(
                f"[bold red]error:[/] {place.parent} has {free / 1e9:.1f} GB free: use --open-gigabytes or --directory"
            )
            raise typer.Exit(1)
        measuring = topic_log.measure(
            place,
            _open,
            rounds=rounds,
            round_bytes=megabytes << 20,
            open_bytes=int(open_gigabytes * 1e9),
            segment_bytes=TopicLogSettings().segment_bytes,
        )
        for bar in measuring:
            bars.append(bar)
            errors.print(f"{bar.name}: {_figure(bar.value, bar.unit)}", style="dim")
    except NearcastError as error:
        errors.print(f"[bold red]error:[/] {error}")
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)
    if json:
        facts = {"compiled": compiled.is_compiled(), "directory": str(place.parent), "rounds": rounds, "megabytes": megabytes}
        found = [{**msgspec.to_builtins(bar), "ratio": bar.ratio, "met": bar.is_met} for bar in bars]
        typer.echo(msgspec.json.encode({**facts, "bars": found}).decode())
    else:
        _print(bars)
    if not all(bar.is_met for bar in bars):
        raise typer.Exit(2)


def _print(bars: list[topic_log.Bar]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, 130)
    table = Table("measured", "figure", "rounds", "bar", "the disk itself", "of it", "", box=None, header_style="bold")
    for bar in bars:
        sign = "≥" if bar.higher_is_better else "≤"
        wanted = f"{sign} {_figure(bar.bar, bar.unit)}" if bar.bar else ""
        if bar.alternative is not None:
            wanted += " or 70 %"
        table.add_row(
            bar.name,
            _figure(bar.value, bar.unit),
            f"{_number(min(bar.rounds))} to {_number(max(bar.rounds))}",
            wanted,
            "" if bar.disk is None else _figure(bar.disk, bar.unit),
            "" if bar.ratio is None else f"{bar.ratio:.0%}",
            "" if not bar.bar else "[green]met[/]" if bar.is_met else "[bold red]below[/]",
        )
    console.print(table)
    build = "compiled" if compiled.is_compiled() else "plain, several times slower"
    console.print(f"hot modules: {build}; flushed every {topic_log.GROUP_BYTES >> 20} MB", style="dim")
    warning = busy_machine()
    if warning:
        console.print(f"[yellow]note:[/] {warning}")


def _figure(value: float, unit: str) -> str:
    return f"{_number(value)} {unit}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"

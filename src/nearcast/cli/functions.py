"""``nearcast function``: code that reacts to messages of replica sets, next to where they are kept."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Annotated, Any

import typer

from nearcast.cli.controller_client import DEFAULT_API, Api, AsJson, CaFile, ControllerClient, Secret, TokenFile, quoted
from nearcast.cli.tables import new_table, open_console, plain, print_json
from nearcast.errors import NearcastError
from nearcast.functionconfig import MAX_FILES

app = typer.Typer(no_args_is_help=True)


@app.command("deploy")
def deploy(
    what: Annotated[
        str, typer.Argument(metavar="FILE:NAME", help="A Python file, or a directory with main.py, and the function in it.")
    ],
    topic: Annotated[str, typer.Option(metavar="FILTER", help="Which topics of replica sets it reacts to.")],
    name: Annotated[str | None, typer.Option(help="What it is called in the fabric; else as the function.")] = None,
    native: Annotated[
        bool,
        typer.Option("--native", help="FILE is a program, called as `FILE TOPIC INDEX` with the message on standard input."),
    ] = False,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="Begin with the oldest messages there are, not with those to come.")
    ] = False,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long one message may take.")] = 5.0,
    retries: Annotated[int, typer.Option(help="How often a message that fails is tried again before it is put aside.")] = 2,
    batch: Annotated[int, typer.Option(help="Messages at a time at most.")] = 256,
    memory: Annotated[int, typer.Option(metavar="BYTES", help="Address space of its process; 0: no bound.")] = 536_870_912,
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a function handle every message of topics that replica sets keep: in order, each once.

    `def f(topic, index, data, ctx)`: ctx.publish(topic, payload), ctx.get(topic, index), ctx.latest_index(topic), ctx.state (a
    dict that is kept). What it publishes, its state and how far it is become part of the log together. A message that fails
    again and again goes to $nearcast/functions/NAME/dead. Deployed again, it goes on where it was.

    Example: nearcast function deploy alarms.py:watch --topic 'sensors/+/temperature'

    Example: nearcast function deploy ./count-words --native --topic 'texts/#'
    """
    path, separator, entry = what.rpartition(":")
    if native:
        path, entry = what, "program"
    elif not separator or not path:
        raise typer.BadParameter("say which function: FILE:NAME", param_hint="FILE:NAME")
    files = _files(Path(path), native)
    request = {
        "name": name or (Path(path).stem if native else entry),
        "topic": topic,
        "entry": entry,
        "files": {name: base64.b64encode(content).decode("ascii") for name, content in files.items()},
        "native": native,
        "from_start": from_start,
        "timeout_seconds": timeout,
        "retries": retries,
        "batch": batch,
        "max_memory_bytes": memory,
    }
    made = ControllerClient(api, fabric_secret, token_file, ca).send("POST", "/functions", request)
    if as_json:
        print_json(made)
    else:
        typer.echo(f"{made['name']}, version {made['version']}, handles {made['topic']}")


def _files(path: Path, native: bool) -> dict[str, bytes]:
    """The code, by path."""
    try:
        if native:
            return {"program": path.read_bytes()}
        if path.is_file():
            return {"main.py": path.read_bytes()}
        if not path.is_dir():
            raise NearcastError(f"there is no {path}")
        found = sorted(each for each in path.rglob("*.py") if "__pycache__" not in each.parts)
        if len(found) > MAX_FILES:
            raise NearcastError(f"{path} has {len(found):,} Python files, and {MAX_FILES} are the most")
        return {each.relative_to(path).as_posix(): each.read_bytes() for each in found}
    except OSError as error:
        raise NearcastError(f"cannot read {path}: {error.strerror}") from error


@app.command("list")
def list_functions(
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Show what is deployed.

    Example: nearcast function list
    """
    found: list[dict[str, Any]] = ControllerClient(api, fabric_secret, token_file, ca).get("/functions")
    if as_json:
        print_json(found)
        return
    if not found:
        typer.echo("no functions: `nearcast function deploy FILE:NAME --topic FILTER` makes one")
        return
    table = new_table("Function", "Version", "Topics", "Timeout", "Retries", numbers=("Version", "Timeout", "Retries"))
    for each in found:
        table.add_row(
            plain(each["name"]),
            str(each["version"]),
            plain(each["topic"]),
            f"{each['timeout_seconds']:g} s",
            str(each["retries"]),
        )
    open_console().print(table)


@app.command("remove")
def remove(
    name: Annotated[str, typer.Argument(help="Which function.")],
    api: Api = DEFAULT_API,
    fabric_secret: Secret = None,
    token_file: TokenFile = None,
    ca: CaFile = None,
    as_json: AsJson = False,
) -> None:
    """Take a function out of service. Its state and how far it came are kept, for one of that name that is deployed later.

    Example: nearcast function remove watch
    """
    left = ControllerClient(api, fabric_secret, token_file, ca).send("DELETE", f"/functions/{quoted(name)}")
    if as_json:
        print_json(left)
    else:
        typer.echo(f"{name} handles nothing any more")

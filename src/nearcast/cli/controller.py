"""``nearcast controller``."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from nearcast.errors import ConfigError

CLIENTS = "Where clients are"
TOPICS = "Who owns topics"


def controller(
    fabric_secret: Annotated[
        str | None, typer.Option(metavar="FILE", help="The fabric's secret (`nearcast secret FILE`). Needed.")
    ] = None,
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="FILE", help="TOML file whose `controller` table says the same and more."),
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="Address for brokers and gateways, TCP and UDP.", show_default="127.0.0.1")
    ] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port of both (0: any).", show_default="1885")] = None,
    name: Annotated[str | None, typer.Option(help="What it is called (default: after its machine).")] = None,
    certificate: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate (PEM): links over TLS.")] = None,
    key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key.")] = None,
    http_host: Annotated[str | None, typer.Option(help="Address of the HTTP API.", show_default="127.0.0.1")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of the HTTP API (0: any).", show_default="8885")] = None,
    no_http: Annotated[bool, typer.Option("--no-http", help="No HTTP API.")] = False,
    http_certificate: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate (PEM) of the API.")] = None,
    http_key: Annotated[str | None, typer.Option(metavar="FILE", help="Its private key.")] = None,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Further tokens for the API, one per line; `read TOKEN` may only look.")
    ] = None,
    interval: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Time between reconfigurations.", show_default="15", rich_help_panel=CLIENTS),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="How uneven brokers of a group must be to move clients (θ).", show_default="0.1", rich_help_panel=CLIENTS
        ),
    ] = None,
    ping_interval_ms: Annotated[
        float | None, typer.Option(help="Between the pings of a measurement.", show_default="250", rich_help_panel=CLIENTS)
    ] = None,
    pings: Annotated[
        int | None, typer.Option(help="Pings of a measurement.", show_default="10", rich_help_panel=CLIENTS)
    ] = None,
    period: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="How old a measured path may get.", show_default="15", rich_help_panel=CLIENTS),
    ] = None,
    planner: Annotated[
        str | None,
        typer.Option(
            metavar="own|spark|none",
            help="Who decides which broker owns a topic: the controller, plans on $nearcast/plan, or nobody.",
            show_default="own",
            rich_help_panel=TOPICS,
        ),
    ] = None,
    executors: Annotated[
        int | None, typer.Option(help="Topics that change owners at the same time.", show_default="16", rich_help_panel=TOPICS)
    ] = None,
    plan_interval: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Least time between plans.", show_default="1", rich_help_panel=TOPICS),
    ] = None,
    log_level: Annotated[str, typer.Option(help="Least severe event to log: debug, info, warning or error.")] = "info",
    log_format: Annotated[str, typer.Option(help="Form of the log: text or json.")] = "text",
    ready_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the real ports here, as JSON, once nodes can come.")
    ] = None,
) -> None:
    """Run the controller of a fabric until SIGTERM or Ctrl-C.

    Brokers and gateways register with it; it tells them of each other, moves clients to better brokers, and decides who owns
    topics of class owned. Nothing is kept on disk: restarted, it learns everything anew.

    Example: nearcast controller --fabric-secret secret
    """
    # Imported here, so that `--help` of other commands does not load a server.
    import uvloop

    from nearcast.controller.config import ControllerConfig, load_controller_config, with_options
    from nearcast.controller.process import ControllerProcess, ready_report
    from nearcast.serving import logs

    if log_level not in logs.LEVELS:
        raise typer.BadParameter(f"--log-level cannot be {log_level!r}: use debug, info, warning or error")
    if log_format not in ("text", "json"):
        raise typer.BadParameter(f"--log-format cannot be {log_format!r}: use text or json")
    if planner not in (None, "own", "spark", "none"):
        raise typer.BadParameter(f"--planner cannot be {planner!r}: use own, spark or none")
    logs.configure(log_level, log_format)
    read = ControllerConfig() if config is None else load_controller_config(config)
    made = with_options(
        read,
        {
            "secret_file": fabric_secret,
            "name": name,
            "host": host,
            "port": port,
            "certificate_file": certificate,
            "key_file": key,
            "http_host": http_host,
            "http_port": http_port,
            "http_certificate_file": http_certificate,
            "http_key_file": http_key,
            "token_file": token_file,
            "interval_seconds": interval,
            "threshold": threshold,
            "ping_interval_ms": ping_interval_ms,
            "pings": pings,
            "period_seconds": period,
            "planner": planner,
            "executors": executors,
            "plan_interval_seconds": plan_interval,
        },
    )
    if no_http:
        made = msgspec.structs.replace(made, http_port=None)

    def announce(started: ControllerProcess) -> None:
        if ready_file is not None:
            _write_whole(Path(ready_file), ready_report(started, os.getpid()))

    async def main() -> int:
        return await ControllerProcess(made).serve(announce)

    exit_code = uvloop.run(main())
    if exit_code:
        raise typer.Exit(exit_code)


def _write_whole(path: Path, content: bytes) -> None:
    """Write a file that nobody ever sees half written."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"cannot write the ready file: {error.strerror}", path=str(path)) from error


def register(app: typer.Typer) -> None:
    """Add the command to the command line."""
    app.command("controller")(controller)

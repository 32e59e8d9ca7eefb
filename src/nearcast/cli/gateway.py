"""``nearcast gateway``: options into a :class:`~nearcast.gateway.config.GatewayConfig`, and a process that runs it."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import typer

from nearcast.config import Listener
from nearcast.errors import ConfigError
from nearcast.gateway.config import GatewayConfig, load_gateway_config

S = TypeVar("S", bound=msgspec.Struct)

_CHOICES = {"log_level": "debug, info, warning or error", "log_format": "text or json"}


def gateway(
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="TOML file; options on the command line come on top of it.")
    ] = None,
    broker: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS",
            help="A broker: HOST:PORT of its link listener, or mqtt://HOST:PORT of any MQTT broker; may be repeated.",
        ),
    ] = None,
    controller: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="The controller, which knows the brokers and says which is best.")
    ] = None,
    fabric_secret: Annotated[str | None, typer.Option(metavar="FILE", help="The secret that the brokers have.")] = None,
    name: Annotated[str | None, typer.Option(help="What this gateway is called in the fabric; unique there.")] = None,
    site: Annotated[str | None, typer.Option(help="Where this gateway is, in a word; shown beside its name.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the TCP listener (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port of the TCP listener (default 1883; 0: any).")] = None,
    websocket_port: Annotated[int | None, typer.Option(help="Port of a WebSocket listener (default: none; 0: any).")] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /metrics and /healthz (default: not served; 0: any).")] = None,
    log_level: Annotated[str | None, typer.Option(help=f"Least severe event to log: {_CHOICES['log_level']}.")] = None,
    log_format: Annotated[str | None, typer.Option(help=f"Form of the log: {_CHOICES['log_format']}.")] = None,
    ready_file: Annotated[
        str | None, typer.Option(help="Write addresses and real ports here, as JSON, once clients can come.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check the configuration.")] = False,
) -> None:
    """Run a gateway until SIGTERM or Ctrl-C: MQTT clients connect to it, and brokers can change behind it. SIGHUP reads the
    configuration again.

    Example: nearcast gateway --port 1893 --broker 127.0.0.1:1884 --fabric-secret secret
    """
    # Imported here, so that `nearcast --help` does not load a gateway.
    from nearcast.gateway import running
    from nearcast.gateway.process import GatewayProcess
    from nearcast.serving import logs

    def configured() -> GatewayConfig:
        try:
            effective = load_gateway_config(config) if config is not None else GatewayConfig()
            effective = _replaced(
                effective,
                listeners=_with_ports(effective.listeners, host, port, websocket_port),
                brokers=tuple(broker) if broker else None,
                fabric=_replaced(
                    effective.fabric, controller=controller, secret_file=fabric_secret, name=name, site=site, peers=None
                ),
                observability=_replaced(
                    effective.observability, http_port=http_port, log_level=log_level, log_format=log_format
                ),
            )
        except msgspec.ValidationError as error:
            raise ConfigError(_explained(str(error))) from error
        except ValueError as error:
            raise ConfigError(str(error).replace("`", "")) from error
        return effective

    def announce(started: GatewayProcess) -> None:
        if ready_file is not None:
            _write_whole(Path(ready_file), running.ready_report(started))

    effective = configured()
    logs.configure(effective.observability.log_level, effective.observability.log_format)
    if check:
        running.check(effective)
        typer.echo("the configuration is good")
        return
    exit_code = running.run(effective, configured, announce)
    if exit_code:
        raise typer.Exit(exit_code)


def _with_ports(
    listeners: tuple[Listener, ...], host: str | None, port: int | None, websocket_port: int | None
) -> tuple[Listener, ...]:
    changed = list(listeners)
    kinds = [listener.kind for listener in changed]
    if host is not None or port is not None:
        if "tcp" in kinds:
            place = kinds.index("tcp")
            changed[place] = _replaced(changed[place], host=host, port=port)
        else:
            changed.insert(0, _replaced(Listener(), host=host, port=port))
    if websocket_port is not None:
        changed.append(_replaced(Listener(kind="ws"), host=host, port=websocket_port))
    return tuple(changed)


def _replaced(struct: S, **values: object) -> S:
    """The struct with the given values, checked as those of a file are; ``None`` changes nothing."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return struct
    changed = msgspec.structs.replace(struct, **given)
    return msgspec.convert(msgspec.to_builtins(changed), type(struct))


def _explained(message: str) -> str:
    """msgspec's words about a value of the command line, with the option at fault and what it may be."""
    for key, choices in _CHOICES.items():
        if f".{key}`" in message:
            return f"--{key.replace('_', '-')} must be {choices}"
    return message


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
    app.command("gateway")(gateway)

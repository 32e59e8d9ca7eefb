"""``nearcast broker``, ``nearcast passwd``, ``nearcast secret``. :mod:`nearcast.cli` adds them to the command line."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Annotated, TypeVar, cast

import msgspec
import typer

from nearcast.broker.passwords import MAX_PASSWORD_BYTES, ScramVerifier, ScryptVerifier, store_user, username_fault
from nearcast.config import (
    BULK_PORT_DISTANCE,
    DEFAULT_LISTENERS,
    LINK_KINDS,
    LINK_PORT_DISTANCE,
    BrokerConfig,
    Listener,
    TopicRule,
)
from nearcast.configfile import load_broker_config
from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric, Groups, TopicClass
from nearcast.mqtt.topics import covers

S = TypeVar("S", bound=msgspec.Struct)

#: What the options that are one word out of a few may be, for their help and for whoever mistypes one.
_CHOICES = {"sync": "os or fsync", "log_level": "debug, info, warning or error", "log_format": "text or json"}


_FABRIC = "Fabric: many brokers as one"
_GROUPS = "Broadcast groups: near brokers directly, far ones through a cloud broker"


class Overrides(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says beside, or instead of, the file. ``None`` leaves the file's word."""

    host: str | None = None
    port: int | None = None
    bulk_port: int | None = None
    no_bulk_port: bool = False
    durable: tuple[str, ...] = ()
    data: str | None = None
    sync: str | None = None
    http_port: int | None = None
    record: str | None = None
    log_level: str | None = None
    log_format: str | None = None
    password_file: str | None = None
    acl_file: str | None = None
    allow_anonymous: bool | None = None
    name: str | None = None
    site: str | None = None
    fabric_secret: str | None = None
    link_host: str | None = None
    link_port: int | None = None
    advertise: str | None = None
    controller: str | None = None
    peers: tuple[str, ...] = ()
    broadcast: tuple[str, ...] = ()
    cloud: str | None = None
    cloud_username: str | None = None
    cloud_password_file: str | None = None
    group_threshold: float | None = None
    region: str | None = None
    lcm: float | None = None


def effective_config(path: str | None, overrides: Overrides) -> BrokerConfig:
    """The file's configuration, or the defaults, with the command line's words on top.

    ``--host`` and ``--port`` speak of plain TCP: they replace the file's first tcp listener, or add one if it has none. A
    broker with a data directory whose file names no listeners has a bulk port as well, beside the MQTT port; one that is part
    of a fabric, a port for links. The topics of ``--durable`` and ``--broadcast`` stand behind the file's, which say more of
    theirs.
    """
    config = load_broker_config(path) if path is not None else BrokerConfig()
    try:
        # Whether the file names listeners: one that names the very default is meant as it stands, without a bulk port.
        named = config.listeners is not DEFAULT_LISTENERS
        if overrides.host is not None or overrides.port is not None:
            config = msgspec.structs.replace(config, listeners=_with_tcp(config.listeners, overrides))
        directory = overrides.data if overrides.data is not None else config.persistence.directory
        fabric = _replaced(
            config.fabric,
            name=overrides.name,
            site=overrides.site,
            secret_file=overrides.fabric_secret,
            advertise=overrides.advertise,
            controller=overrides.controller,
            peers=(*config.fabric.peers, *overrides.peers) if overrides.peers else None,
            classes=_with_broadcast(config.fabric.classes, overrides.broadcast) if overrides.broadcast else None,
            groups=_with_groups(config.fabric.groups, overrides),
        )
        _refuse_what_means_nothing(fabric, overrides)
        listeners = _with_bulk(config.listeners, overrides, by_default=directory is not None and not named)
        return msgspec.structs.replace(
            config,
            listeners=_with_link(listeners, overrides, by_default=fabric.secret_file is not None and not named),
            fabric=fabric,
            topics=_with_durable(config.topics, overrides.durable),
            persistence=_replaced(config.persistence, directory=overrides.data, sync=overrides.sync),
            observability=_replaced(
                config.observability,
                http_port=overrides.http_port,
                log_level=overrides.log_level,
                log_format=overrides.log_format,
            ),
            recording=_replaced(config.recording, directory=overrides.record),
            security=_replaced(
                config.security,
                password_file=overrides.password_file,
                acl_file=overrides.acl_file,
                allow_anonymous=overrides.allow_anonymous,
            ),
        )
    except msgspec.ValidationError as error:
        raise ConfigError(_explain_option(str(error))) from error
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _explain_option(message: str) -> str:
    """msgspec's words about a value of the command line, with the option at fault and what it may be."""
    found = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(\w+)`", message)
    if found is None:
        return message
    value, key = found.groups()
    return f"--{key.replace('_', '-')} cannot be {value!r}: use {_CHOICES[key]}"


def _with_tcp(listeners: tuple[Listener, ...], overrides: Overrides) -> tuple[Listener, ...]:
    changed = list(listeners)
    for number, listener in enumerate(listeners):
        if listener.kind == "tcp":
            changed[number] = _replaced(listener, host=overrides.host, port=overrides.port)
            return tuple(changed)
    return (_replaced(Listener(), host=overrides.host, port=overrides.port), *changed)


def _with_bulk(listeners: tuple[Listener, ...], overrides: Overrides, *, by_default: bool) -> tuple[Listener, ...]:
    """With the bulk port that was asked for, or with the usual one: so far above the MQTT port, on the same address."""
    changed = list(listeners)
    kinds = [listener.kind for listener in listeners]
    if overrides.no_bulk_port:
        return tuple(listener for listener in listeners if not listener.kind.startswith("bulk"))
    if overrides.bulk_port is not None:
        if "bulk" in kinds:
            place = kinds.index("bulk")
            changed[place] = _replaced(changed[place], port=overrides.bulk_port)
        else:
            host = overrides.host or next((listener.host for listener in listeners if listener.kind == "tcp"), None)
            changed.append(_replaced(Listener(kind="bulk"), host=host, port=overrides.bulk_port))
    elif by_default:
        beside = listeners[kinds.index("tcp")]
        port = beside.effective_port + BULK_PORT_DISTANCE if beside.effective_port else 0
        if port <= 65_535:
            changed.append(_replaced(Listener(kind="bulk"), host=beside.host, port=port))
    return tuple(changed)


def _with_link(listeners: tuple[Listener, ...], overrides: Overrides, *, by_default: bool) -> tuple[Listener, ...]:
    """With the link port that was asked for, or with the usual one, right above the MQTT port on the same address."""
    changed = list(listeners)
    host, port = overrides.link_host, overrides.link_port
    for number, listener in enumerate(listeners):
        if listener.kind in LINK_KINDS:
            changed[number] = _replaced(listener, host=host, port=port)
            return tuple(changed)
    if by_default or host is not None or port is not None:
        beside = next((listener for listener in listeners if listener.kind == "tcp"), Listener(kind="link"))
        if port is None and beside.kind == "tcp":
            port = beside.effective_port + LINK_PORT_DISTANCE if beside.effective_port else 0
        changed.append(_replaced(Listener(kind="link"), host=host or beside.host, port=port))
    return tuple(changed)


def _with_durable(topics: tuple[TopicRule, ...], durable: tuple[str, ...]) -> tuple[TopicRule, ...]:
    """With the topics of the command line, as far as they are not durable anyway."""
    rules = list(topics)
    for topic in durable:
        if not any(rule.mode == "durable" and covers(rule.topic, topic) for rule in rules):
            rules.append(TopicRule(topic=topic))
    return tuple(rules)


def _with_broadcast(classes: tuple[TopicClass, ...], broadcast: tuple[str, ...]) -> tuple[TopicClass, ...]:
    """With the topics of the command line, behind the file's rules: the first that matches holds."""
    return (*classes, *(TopicClass(topic=topic_filter, topic_class="broadcast") for topic_filter in broadcast))


def _with_groups(groups: Groups, overrides: Overrides) -> Groups:
    """With what the command line says of broadcast groups. A threshold that is given there takes the file's other one along
    if that would be below it."""
    threshold, leave = overrides.group_threshold, groups.leave_threshold_ms
    if threshold is not None and leave is not None and leave < threshold:
        groups = msgspec.structs.replace(groups, leave_threshold_ms=None)
    return _replaced(
        groups,
        cloud=overrides.cloud,
        cloud_username=overrides.cloud_username,
        cloud_password_file=overrides.cloud_password_file,
        threshold_ms=threshold,
        region=overrides.region,
        lcm=overrides.lcm,
    )


def _refuse_what_means_nothing(fabric: Fabric, overrides: Overrides) -> None:
    """An option that changes nothing is a mistake of whoever gave it."""
    if overrides.broadcast and fabric.secret_file is None:
        raise ConfigError("--broadcast is for brokers of a fabric: add --fabric-secret FILE (see `nearcast secret`)")
    if fabric.groups.cloud is None:
        for option in ("group_threshold", "region", "lcm", "cloud_username", "cloud_password_file"):
            if getattr(overrides, option) is not None:
                raise ConfigError(f"--{option.replace('_', '-')} says nothing without a cloud: add --cloud mqtt://HOST:PORT")


def _replaced(struct: S, **values: object) -> S:
    """The struct with the given values, checked as those of a file are; ``None`` changes nothing."""
    given = {key: value for key, value in values.items() if value is not None}
    if not given:
        return struct
    # Through plain data and back: ``replace`` alone would not check that a level is one of the four.
    plain = {field.name: getattr(struct, field.name) for field in msgspec.structs.fields(struct)}
    return msgspec.convert(plain | given, type(struct))


def broker(
    config: Annotated[str | None, typer.Option("--config", "-c", help="TOML file; without it, defaults.")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the TCP listener (default 127.0.0.1).")] = None,
    port: Annotated[int | None, typer.Option("--port", "-p", help="Port of the TCP listener (default 1883; 0: any).")] = None,
    data: Annotated[str | None, typer.Option(help="Directory where sessions and messages survive a crash.")] = None,
    durable: Annotated[
        list[str] | None,
        typer.Option(metavar="FILTER", help="With --data: keep these topics in the log; may be repeated."),
    ] = None,
    bulk_port: Annotated[
        int | None,
        typer.Option(help="Port where topic logs are read (default: with --data, the TCP port + 6000; 0: any)."),
    ] = None,
    no_bulk_port: Annotated[bool, typer.Option("--no-bulk-port", help="No such port.")] = False,
    sync: Annotated[
        str | None, typer.Option(help="With --data: os (survives kill -9) or fsync (survives power loss).")
    ] = None,
    http_port: Annotated[int | None, typer.Option(help="Port of /metrics, /healthz and /rates (default: not served).")] = None,
    record: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="For experiments: record every message of a workload that is processed, as Parquet."),
    ] = None,
    password_file: Annotated[str | None, typer.Option(help="Users, as `nearcast passwd` writes them.")] = None,
    acl_file: Annotated[str | None, typer.Option(help="Access rules, one per line.")] = None,
    allow_anonymous: Annotated[
        bool | None,
        typer.Option("--allow-anonymous/--no-anonymous", help="Clients without credentials (default: loopback only)."),
    ] = None,
    fabric_secret: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Be part of the fabric that has this secret (`nearcast secret FILE`).",
            rich_help_panel=_FABRIC,
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="This broker's name in the fabric (default: host name and port).", rich_help_panel=_FABRIC),
    ] = None,
    site: Annotated[
        str | None, typer.Option(help="Where it is, in a word; shown beside its name.", rich_help_panel=_FABRIC)
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Link address of another broker to connect to; may be repeated.",
            rich_help_panel=_FABRIC,
        ),
    ] = None,
    controller: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Link address of the controller, which knows the others.", rich_help_panel=_FABRIC
        ),
    ] = None,
    link_host: Annotated[
        str | None,
        typer.Option(
            help="Address where other nodes of the fabric connect (default: that of the TCP listener).",
            rich_help_panel=_FABRIC,
        ),
    ] = None,
    link_port: Annotated[
        int | None,
        typer.Option(help="Port where they connect (default: the TCP port + 1; 0: any).", rich_help_panel=_FABRIC),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where they reach that port, if not at its own address.", rich_help_panel=_FABRIC
        ),
    ] = None,
    broadcast: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILTER", help="Topics of class broadcast (see --cloud); may be repeated.", rich_help_panel=_GROUPS
        ),
    ] = None,
    cloud: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Any MQTT broker: mqtt://HOST:PORT or mqtts://HOST:PORT. Through it groups find each other and exchange"
            " messages; without it, broadcast topics go to all brokers of the fabric.",
            rich_help_panel=_GROUPS,
        ),
    ] = None,
    cloud_username: Annotated[str | None, typer.Option(help="User name there.", rich_help_panel=_GROUPS)] = None,
    cloud_password_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="File with the password there.", rich_help_panel=_GROUPS)
    ] = None,
    group_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="MS",
            help="Brokers nearer than this, one way, form a group (default 5; 0: none do).",
            rich_help_panel=_GROUPS,
        ),
    ] = None,
    region: Annotated[
        str | None,
        typer.Option(help="Only brokers of the same region form groups (default world).", rich_help_panel=_GROUPS),
    ] = None,
    lcm: Annotated[
        float | None,
        typer.Option(
            help="Of a group's brokers the one with the highest leads (default: as measured).", rich_help_panel=_GROUPS
        ),
    ] = None,
    log_level: Annotated[str | None, typer.Option(help=f"Least severe event to log: {_CHOICES['log_level']}.")] = None,
    log_format: Annotated[str | None, typer.Option(help=f"Form of the log: {_CHOICES['log_format']}.")] = None,
    ready_file: Annotated[
        str | None, typer.Option(help="Write addresses and real ports here, as JSON, once clients can come.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Only check the configuration.")] = False,
) -> None:
    """Run an MQTT broker until SIGTERM or Ctrl-C. SIGHUP reads the configuration again.

    Example: nearcast broker --data data --durable 'sensors/#' --http-port 9100
    """
    if no_bulk_port and bulk_port is not None:
        raise typer.BadParameter("--bulk-port and --no-bulk-port do not go together")
    overrides = Overrides(
        host=host,
        port=port,
        bulk_port=bulk_port,
        no_bulk_port=no_bulk_port,
        durable=tuple(durable or ()),
        data=data,
        sync=sync,
        http_port=http_port,
        record=record,
        log_level=log_level,
        log_format=log_format,
        password_file=password_file,
        acl_file=acl_file,
        allow_anonymous=allow_anonymous,
        name=name,
        site=site,
        fabric_secret=fabric_secret,
        link_host=link_host,
        link_port=link_port,
        advertise=advertise,
        controller=controller,
        peers=tuple(peer or ()),
        broadcast=tuple(broadcast or ()),
        cloud=cloud,
        cloud_username=cloud_username,
        cloud_password_file=cloud_password_file,
        group_threshold=group_threshold,
        region=region,
        lcm=lcm,
    )
    # Imported here, so that `nearcast pub` does not load a broker.
    from nearcast.broker import running
    from nearcast.broker.process import Broker
    from nearcast.serving import logs

    def announce(started: Broker) -> None:
        if ready_file is not None:
            _write_whole(Path(ready_file), running.ready_report(started))

    effective = effective_config(config, overrides)
    logs.configure(effective.observability.log_level, effective.observability.log_format)
    if check:
        running.check(effective)
        typer.echo("the configuration is good")
        return
    exit_code = running.run(effective, lambda: effective_config(config, overrides), announce)
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


def passwd(
    file: Annotated[str, typer.Argument(help="Password file; made if it is not there.")],
    user: Annotated[str, typer.Argument(help="User name.")],
    delete: Annotated[bool, typer.Option("--delete", help="Remove the user.")] = False,
    password_stdin: Annotated[
        bool, typer.Option("--password-stdin", help="Read the password from the first line of stdin.")
    ] = False,
    scram: Annotated[
        bool, typer.Option("--scram", help="Keep SCRAM-SHA-256 keys: the user can log in without sending the password.")
    ] = False,
) -> None:
    """Add a user to a broker's password file, change a password, or remove a user. Send the broker SIGHUP afterwards.

    Example: nearcast passwd users alice
    """
    fault = username_fault(user)
    if fault:
        raise ConfigError(fault)
    try:
        if delete:
            if not Path(file).exists() or not store_user(file, user, None):
                raise ConfigError(f"there is no user {user}", path=file)
            typer.echo(f"removed {user}")
            return
        password = _read_password(password_stdin)
        verifier = ScramVerifier.create(password) if scram else ScryptVerifier.create(password)
        existed = store_user(file, user, verifier)
    except OSError as error:
        raise ConfigError(f"cannot write the password file: {error.strerror}", path=file) from error
    typer.echo(f"changed the password of {user}" if existed else f"added {user}")


def _read_password(from_stdin: bool) -> bytes:
    if from_stdin:
        password = sys.stdin.buffer.readline().rstrip(b"\r\n")
    else:
        password = cast(str, typer.prompt("Password", hide_input=True, confirmation_prompt=True)).encode("utf-8")
    if not password:
        raise ConfigError("a password must not be empty")
    if len(password) > MAX_PASSWORD_BYTES:
        raise ConfigError("a password has at most 65,535 bytes")
    return password


def secret(file: Annotated[str, typer.Argument(help="The file to make; nobody else can read it.")]) -> None:
    """Make the secret of a new fabric. Copy the file to every machine that is to be part of it, and to no other.

    Example: nearcast secret fabric.secret
    """
    from nearcast.serving.secrets import make_secret

    make_secret(file)
    typer.echo(f"made {file}: give it to the nodes of one fabric (--fabric-secret {file})")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("broker")(broker)
    app.command("passwd")(passwd)
    app.command("secret")(secret)

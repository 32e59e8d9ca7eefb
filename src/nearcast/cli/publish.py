"""``nearcast pub``: publish what is given on the command line, in a file, or line by line on standard input."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from nearcast.cli import connection as shared
from nearcast.cli.connection import ConnectionOptions
from nearcast.client import Client, Properties
from nearcast.errors import ConfigError, NearcastError

#: Publishes at QoS 1 and 2 that wait for their acknowledgement at once.
WINDOW = 100

MAX_LINE_BYTES = 16_777_216


@dataclass(frozen=True)
class PublishPlan:
    """What is to be published, and how."""

    topic: str
    payload: bytes | None
    """``None``: each line of standard input."""
    qos: int
    retain: bool
    count: int
    rate: float | None
    properties: Properties | None


def pub(
    topic: Annotated[str, typer.Option("--topic", "-t", help="Topic to publish to.", rich_help_panel=shared.MESSAGES)],
    message: Annotated[
        str | None, typer.Option("--message", "-m", help="The message.", rich_help_panel=shared.MESSAGES)
    ] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", help="File to send as one message.", rich_help_panel=shared.MESSAGES)
    ] = None,
    stdin_lines: Annotated[
        bool, typer.Option("--stdin-lines", "-l", help="Each line of standard input.", rich_help_panel=shared.MESSAGES)
    ] = False,
    empty: Annotated[
        bool,
        typer.Option("--empty", "-n", help="An empty message; with --retain it clears.", rich_help_panel=shared.MESSAGES),
    ] = False,
    qos: shared.Qos = 0,
    retain: Annotated[
        bool, typer.Option("--retain", "-r", help="Keep as the topic's last message.", rich_help_panel=shared.MESSAGES)
    ] = False,
    count: Annotated[
        int, typer.Option("--count", "-c", min=1, help="Publish it so many times.", rich_help_panel=shared.MESSAGES)
    ] = 1,
    rate: Annotated[
        float | None,
        typer.Option("--rate", min=0.001, help="At most so many messages a second.", rich_help_panel=shared.MESSAGES),
    ] = None,
    user_property: Annotated[
        list[str] | None,
        typer.Option("--property", "-p", metavar="KEY=VALUE", help="User property.", rich_help_panel=shared.MESSAGES),
    ] = None,
    content_type: Annotated[
        str | None, typer.Option("--content-type", help="MIME type of the payload.", rich_help_panel=shared.MESSAGES)
    ] = None,
    expiry: Annotated[
        int | None,
        typer.Option("--expiry", min=0, help="Seconds until the message expires.", rich_help_panel=shared.MESSAGES),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print a summary as JSON.")] = False,
    url: shared.Url = shared.DEFAULT_URL,
    user: shared.User = None,
    password_file: shared.PasswordFile = None,
    version: shared.Version = 5,
    client_id: shared.ClientId = "",
    ca: shared.CaFile = None,
    certificate: shared.CertificateFile = None,
    key: shared.KeyFile = None,
    insecure: shared.Insecure = False,
) -> None:
    """Publish messages.

    Example: nearcast pub -t sensors/door -m open -q 1 --retain
    """
    payload = _payload(message, file, stdin_lines, empty)
    if stdin_lines and count != 1:
        raise typer.BadParameter("--count does not go with --stdin-lines: the lines decide how many")
    options = ConnectionOptions(url, user, password_file, version, client_id, ca, certificate, key, insecure)
    properties = _properties(user_property or [], content_type, expiry, version)
    plan = PublishPlan(topic, payload, qos, retain, count, rate, properties)
    published, seconds = shared.run(_publish(options, plan))
    if as_json:
        print(json.dumps({"topic": topic, "published": published, "qos": qos, "seconds": round(seconds, 6)}))


def register(app: typer.Typer) -> None:
    app.command("pub", no_args_is_help=True)(pub)


def _payload(message: str | None, file: Path | None, stdin_lines: bool, empty: bool) -> bytes | None:
    if sum((message is not None, file is not None, stdin_lines, empty)) != 1:
        raise typer.BadParameter("say what to publish: one of --message, --file, --stdin-lines or --empty")
    if message is not None:
        return message.encode("utf-8", "surrogateescape")
    if file is not None:
        try:
            return file.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    return None if stdin_lines else b""


def _properties(pairs: list[str], content_type: str | None, expiry: int | None, version: int) -> Properties | None:
    if not pairs and content_type is None and expiry is None:
        return None
    if version != 5:
        raise typer.BadParameter("--property, --content-type and --expiry need MQTT 5: leave --version at 5")
    user_properties = []
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals:
            raise typer.BadParameter(f"--property {pair!r}: write it as KEY=VALUE")
        user_properties.append((name, value))
    return Properties(user_properties=user_properties or None, content_type=content_type, message_expiry_interval=expiry)


async def _publish(options: ConnectionOptions, plan: PublishPlan) -> tuple[int, float]:
    """Publish all; returns how many and how long it took from the first to the last acknowledgement."""
    loop = asyncio.get_running_loop()
    published = 0
    # Standard input may go on for ever, and so must we. One message that the broker hangs up on would do so again: a 3.1.1
    # broker has no other way to say that it is too large.
    async with options.client(reconnect=plan.payload is None) as client:
        started = loop.time()
        window = asyncio.Semaphore(WINDOW)
        async with asyncio.TaskGroup() as group:
            async for payload in _payloads(plan):
                if plan.rate is not None:
                    await asyncio.sleep(started + published / plan.rate - loop.time())
                if plan.qos == 0:
                    await client.publish(plan.topic, payload, 0, plan.retain, properties=plan.properties)
                else:
                    await window.acquire()
                    group.create_task(_acknowledged(client, plan, payload, window), name="publish")
                published += 1
        return published, loop.time() - started


async def _acknowledged(client: Client, plan: PublishPlan, payload: bytes, window: asyncio.Semaphore) -> None:
    try:
        await client.publish(plan.topic, payload, plan.qos, plan.retain, properties=plan.properties)
    finally:
        window.release()


async def _payloads(plan: PublishPlan) -> AsyncIterator[bytes]:
    if plan.payload is not None:
        for _ in range(plan.count):
            yield plan.payload
        return
    descriptor = sys.stdin.fileno()
    mode = os.fstat(descriptor).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or os.isatty(descriptor)):
        for line in sys.stdin.buffer:  # a file never keeps us waiting
            yield line.rstrip(b"\r\n")
        return
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(descriptor), "rb")
    )
    try:
        while True:
            try:
                line = await reader.readline()
            except ValueError:
                raise NearcastError(f"a line on standard input is longer than {MAX_LINE_BYTES} bytes: use --file") from None
            if not line:
                return
            yield line.rstrip(b"\r\n")
    finally:
        transport.close()

"""``nearcast sub``: subscribe and write what arrives to standard output."""

from __future__ import annotations

import asyncio
import base64
import json
import sys
from typing import Annotated

import typer

from nearcast.cli import connection as shared
from nearcast.cli.connection import ConnectionOptions
from nearcast.client import Client, Message
from nearcast.errors import NearcastError


def sub(
    topics: Annotated[list[str], typer.Argument(help="Topic filters, such as 'sensors/#'.", metavar="TOPIC...")],
    qos: shared.Qos = 0,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show the topic before each message.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object per message.")] = False,
    count: Annotated[int | None, typer.Option("--count", "-c", min=1, help="Stop after so many messages.")] = None,
    timeout: Annotated[
        float | None,
        typer.Option("--timeout", "-W", min=0.0, help="Stop after so many seconds; an error if --count is not reached."),
    ] = None,
    no_retained: Annotated[
        bool, typer.Option("--no-retained", help="Leave out retained messages.", rich_help_panel=shared.MESSAGES)
    ] = False,
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
    """Subscribe and show messages.

    Example: nearcast sub 'sensors/#' 'alarms/+' -v --count 10
    """
    options = ConnectionOptions(url, user, password_file, version, client_id, ca, certificate, key, insecure)
    received = shared.run(_receive(options, topics, qos, verbose, as_json, count, timeout, no_retained))
    if count is not None and received < count:
        raise NearcastError(f"only {received} of {count} messages came within {timeout:g} s")


def register(app: typer.Typer) -> None:
    app.command("sub", no_args_is_help=True)(sub)


async def _receive(
    options: ConnectionOptions,
    topics: list[str],
    qos: int,
    verbose: bool,
    as_json: bool,
    count: int | None,
    timeout: float | None,
    no_retained: bool,
) -> int:
    """Show messages until enough came or time is up; returns how many came."""
    received = 0
    async with options.client() as client:
        # With 3.1.1 retain handling does not exist: there the retain flag of the message decides.
        await client.subscribe(*topics, qos=qos, retain_handling=2 if no_retained and options.version == 5 else 0)
        try:
            async with asyncio.timeout(timeout):
                async for message in client.messages:
                    if no_retained and message.retain:
                        continue
                    received += 1
                    _show(client, message, verbose, as_json)
                    if received == count:
                        break
        except TimeoutError:
            pass
        sys.stdout.buffer.flush()
    return received


def _show(client: Client, message: Message, verbose: bool, as_json: bool) -> None:
    output = sys.stdout.buffer
    if as_json:
        output.write(json.dumps(_as_dict(message), ensure_ascii=False).encode() + b"\n")
    elif verbose:
        output.write(message.topic.encode() + b" " + message.payload + b"\n")
    else:
        output.write(message.payload + b"\n")
    if len(client.messages) == 0:
        output.flush()  # once for all that came together


def _as_dict(message: Message) -> dict[str, object]:
    """A message for JSON; a payload that is no UTF-8 goes as ``payload_base64``."""
    found: dict[str, object] = {"topic": message.topic}
    try:
        found["payload"] = message.payload.decode("utf-8")
    except UnicodeDecodeError:
        found["payload_base64"] = base64.b64encode(message.payload).decode()
    found["qos"] = message.qos
    found["retain"] = message.retain
    if message.properties is not None:
        found["properties"] = {
            name: base64.b64encode(value).decode() if isinstance(value, bytes) else value
            for name, value in message.properties.present().items()
            if name != "topic_alias"
        }
    return found

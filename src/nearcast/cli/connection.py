"""Options that every command with a client has, and the client they make."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from nearcast.client import Client, TlsOptions, Will
from nearcast.errors import ConfigError

Result = TypeVar("Result")

CONNECTION = "Connection"
MESSAGES = "Messages"

Url = Annotated[
    str,
    typer.Option(
        "--url",
        "-u",
        envvar="NEARCAST_URL",
        help="Broker: mqtt://, mqtts://, ws://, wss:// or unix:///path.",
        rich_help_panel=CONNECTION,
    ),
]
User = Annotated[str | None, typer.Option("--user", envvar="NEARCAST_USER", help="User name.", rich_help_panel=CONNECTION)]
PasswordFile = Annotated[
    Path | None,
    typer.Option(
        "--password-file",
        help="File whose first line is the password; or set NEARCAST_PASSWORD.",
        rich_help_panel=CONNECTION,
    ),
]
Version = Annotated[
    int, typer.Option("--version", "-V", help="4 for MQTT 3.1.1, 5 for MQTT 5.0.", min=4, max=5, rich_help_panel=CONNECTION)
]
ClientId = Annotated[str, typer.Option("--client-id", "-i", help="Client identifier.", rich_help_panel=CONNECTION)]
CaFile = Annotated[
    str | None, typer.Option("--ca", help="CA certificates to trust (PEM).", rich_help_panel=CONNECTION, metavar="FILE")
]
CertificateFile = Annotated[
    str | None, typer.Option("--cert", help="Our certificate (PEM).", rich_help_panel=CONNECTION, metavar="FILE")
]
KeyFile = Annotated[
    str | None, typer.Option("--key", help="Its private key (PEM).", rich_help_panel=CONNECTION, metavar="FILE")
]
Insecure = Annotated[
    bool, typer.Option("--insecure", help="Do not check the broker's certificate.", rich_help_panel=CONNECTION)
]
Qos = Annotated[int, typer.Option("--qos", "-q", min=0, max=2, help="Quality of service.", rich_help_panel=MESSAGES)]

DEFAULT_URL = "mqtt://127.0.0.1:1883"


@dataclass(frozen=True)
class ConnectionOptions:
    """What the options above say."""

    url: str = DEFAULT_URL
    user: str | None = None
    password_file: Path | None = None
    version: int = 5
    client_id: str = ""
    ca: str | None = None
    certificate: str | None = None
    key: str | None = None
    insecure: bool = False

    def client(self, *, will: Will | None = None, max_queued_messages: int = 1_000, reconnect: bool = True) -> Client:
        return Client(
            self.url,
            client_id=self.client_id,
            version=self.version,
            username=self.user,
            password=password(self.password_file),
            will=will,
            tls=TlsOptions(ca_file=self.ca, certificate_file=self.certificate, key_file=self.key, verify=not self.insecure),
            max_queued_messages=max_queued_messages,
            reconnect=reconnect,
        )


def password(file: Path | None) -> str | None:
    """From the file, else from the environment: never from the command line, where other users could see it."""
    if file is None:
        return os.environ.get("NEARCAST_PASSWORD")
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the password file {file}: {reason}") from error
    return lines[0] if lines else ""


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run on uvloop where it is installed, else on asyncio's own loop."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)

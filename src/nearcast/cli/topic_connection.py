"""What all commands of ``nearcast topic`` share: the options of the connection, making it, and the words around results."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from nearcast.cli import connection as shared
from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.endpoints import TlsOptions
from nearcast.errors import ConnectionClosed, NearcastError
from nearcast.topiclog.rules import RuleTable

DEFAULT_URL = "nearcast://127.0.0.1:7883"

FILE_COLUMNS = 120
"""Width of tables where no terminal says one."""

Url = Annotated[
    str,
    typer.Option(
        "--url",
        "-u",
        envvar="NEARCAST_BULK_URL",
        help="The broker's bulk port: nearcast://HOST:PORT, or nearcasts:// for TLS.",
        rich_help_panel=shared.CONNECTION,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


@contextmanager
def connected(
    url: str,
    user: str | None,
    password_file: Path | None,
    ca: str | None,
    certificate: str | None,
    key: str | None,
    insecure: bool,
    *,
    reconnect_seconds: float = 10.0,
) -> Iterator[BlockingTopics]:
    """A connection; an error on the way there says what to do."""
    given = bool(ca or certificate or key or insecure)
    tls = TlsOptions(ca_file=ca, certificate_file=certificate, key_file=key, verify=not insecure) if given else None
    topics = BlockingTopics(
        url,
        username=user,
        password=shared.password(password_file),
        tls=tls,
        reconnect_seconds=reconnect_seconds,
    )
    try:
        topics.open()
    except ConnectionClosed as error:
        if isinstance(error.__cause__, ConnectionRefusedError):
            where = str(error).partition(": ")[0]
            hint = "start a broker with `nearcast broker --data DIR`, or name its bulk port with --url"
            raise NearcastError(f"{where}: nothing listens there; {hint}") from error
        if not isinstance(error.__cause__, OSError):
            # It was reached, and hung up on us.
            hint = "is it a bulk port? That is 6,000 above the MQTT port, unless configured"
            raise NearcastError(f"{error}; {hint}") from error
        raise
    try:
        yield topics
    finally:
        topics.close()


def refuse_wildcards(topic: str, command: str, instead: str) -> None:
    if "+" in topic or "#" in topic:
        raise typer.BadParameter(f"{command} is about one topic, and {topic!r} is a filter: {instead}")


def nothing_of(topics: BlockingTopics, topic: str) -> str:
    rule = RuleTable(topics.rules()).match(topic.encode())
    if rule is None:
        return not_kept(topic)
    return f"nothing was published to {topic} since the rule `{rule.topic}` keeps it"


def not_kept(topic: str) -> str:
    return f"no rule keeps {topic}: `nearcast topic create {_quoted(topic)} --durable` makes one"


def _quoted(topic: str) -> str:
    return topic if all(letter.isalnum() or letter in "/_-.+" for letter in topic) else f"'{topic}'"


def counted(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def print_json(value: Any) -> None:
    sys.stdout.buffer.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace") + b"\n")
    sys.stdout.buffer.flush()


def console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=FILE_COLUMNS)


def now() -> datetime:
    return datetime.now(UTC)

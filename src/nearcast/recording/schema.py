"""What is recorded about messages: one row per event, one schema for every runtime.

Owns the columns, their types and their meaning. It refuses to know files. The types are those that Parquet readers agree on:
times are plain 64-bit integers, because Spark refuses Parquet's nanosecond timestamps; every integer is signed, because Spark
reads 64-bit unsigned ones as decimals; strings are plain strings (dictionary encoding is the file's business).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from nearcast.errors import ConfigError

VERSION = 1
"""Of the schema. A reader takes files of its own version; any column added, removed or changed in meaning makes a new one."""

VERSION_KEY = b"nearcast.schema_version"
RUN_KEY = b"nearcast.run"

Kind = Literal[
    "published",
    "acknowledged",
    "refused",
    "skipped",
    "delivered",
    "processed",
    "connected",
    "subscribed",
    "unsubscribed",
    "disconnected",
    "unconnected",
]

KINDS: dict[str, str] = {
    "published": "a publisher gave a message to its MQTT client, which was connected or will send it once it is",
    "acknowledged": "the broker took responsibility for it (PUBACK, PUBCOMP); QoS 1 and 2 only",
    "refused": "the broker answered with an error, named in `reason`",
    "skipped": "a message was due and not sent: no connection at QoS 0, or too many waiting; `reason` says which",
    "delivered": "a subscriber got a message, possibly not for the first time",
    "processed": "a broker got a message: from a client, from another broker, or out of the cloud; or gave it to the cloud, "
    "and then it is the cloud that processed it",
    "connected": "a client has a connection (again)",
    "subscribed": "the broker confirmed a subscription of a client; `topic` is the filter, `qos` what was asked for",
    "unsubscribed": "a client is about to give a subscription up; `topic` is the filter",
    "disconnected": "a client has lost its connection, or left for good; `reason` says why",
    "unconnected": "a client tried to connect for the first time, in vain; `reason` says why",
}


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One row. Which fields an event of a kind has is in :data:`COLUMNS`."""

    kind: Kind
    at_ns: int
    client: str
    message_id: int | None = None
    stream: int | None = None
    sequence: int | None = None
    topic: str | None = None
    publisher: str | None = None
    subscriber: str | None = None
    due_ns: int | None = None
    sent_ns: int | None = None
    received_ns: int | None = None
    qos: int | None = None
    retained: bool | None = None
    size_bytes: int | None = None
    path: tuple[str, ...] = ()
    reason: str | None = None


def message_id(publisher_number: int, sequence: int) -> int:
    """One signed number for a message: within a stream never the same twice, across streams as good as never (for ten million
    messages, with a probability of 3e-6). Two columns would say it exactly; one is what joins and counts are quick on."""
    mixed = (publisher_number + sequence * 0x9E37_79B9_7F4A_7C15) & 0xFFFF_FFFF_FFFF_FFFF
    return mixed - (1 << 64) if mixed >= 1 << 63 else mixed


@dataclass(frozen=True)
class Column:
    """A column: its name, its type in Arrow's and in Spark's words, and what it means."""

    name: str
    arrow: str
    spark: str
    nullable: bool
    meaning: str


COLUMNS = (
    Column(
        "run",
        "string",
        "string",
        False,
        "Which run the event belongs to (for an experiment, `FOLDER/PART`); several may be read together.",
    ),
    Column("kind", "string", "string", False, "What happened; see below. Readers pass over kinds they do not know."),
    Column("at_ns", "int64", "bigint", False, "When it happened: nanoseconds since 1970 on the run's shared clock."),
    Column("client", "string", "string", False, "The client that saw it; for `processed`, the broker."),
    Column("message_id", "int64", "bigint", True, "The message's identity, unique in the run; null for connections."),
    Column("stream", "int32", "int", True, "Which of the publisher's streams of messages it belongs to, from 0."),
    Column("sequence", "int64", "bigint", True, "Its number in that stream, from 0; `skipped` ones have numbers too."),
    Column("topic", "string", "string", True, "The message's topic; for `subscribed`, the filter."),
    Column("publisher", "string", "string", True, "The client that published it."),
    Column("subscriber", "string", "string", True, "The client that got it; only `delivered`."),
    Column("due_ns", "int64", "bigint", True, "When the workload wanted it sent; known to the publisher only."),
    Column("sent_ns", "int64", "bigint", True, "When it was sent; null for `skipped`."),
    Column("received_ns", "int64", "bigint", True, "When the subscriber had it; only `delivered`."),
    Column("qos", "int8", "tinyint", True, "Quality of service: as published, as delivered, as asked for."),
    Column("retained", "bool", "boolean", True, "Published with, or delivered because of, the retain flag."),
    Column("size_bytes", "int32", "int", True, "Size of the payload, without topic and headers."),
    Column(
        "path",
        "list<element: string>",
        "array<string>",
        False,
        "Brokers on the message's way, in order, as far as the client knows them; for a connection, its broker; for "
        "`processed`, the broker that did.",
    ),
    Column("reason", "string", "string", True, "Why, for `refused`, `skipped`, `disconnected` and `unconnected`."),
)


def arrow() -> Any:
    """The module ``pyarrow``, or the one line that says how to get it."""
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            "recorded events are Parquet files, which need pyarrow: install the extra `lab` (pip install 'nearcast[lab]')"
        ) from None
    return pyarrow


def arrow_schema(run: str) -> Any:
    """The Arrow schema of a file, with this run's name and the version in its metadata."""
    pyarrow = arrow()
    types = {
        "string": pyarrow.string(),
        "int64": pyarrow.int64(),
        "int32": pyarrow.int32(),
        "int8": pyarrow.int8(),
        "bool": pyarrow.bool_(),
        "list<element: string>": pyarrow.list_(pyarrow.field("element", pyarrow.string(), nullable=False)),
    }
    fields = [pyarrow.field(column.name, types[column.arrow], nullable=column.nullable) for column in COLUMNS]
    return pyarrow.schema(fields, metadata={VERSION_KEY: str(VERSION).encode(), RUN_KEY: run.encode()})


def reference() -> str:
    """The schema as two Markdown tables; docs/reference/recording.md holds them."""
    lines = ["| column | Arrow type | Spark type | null | meaning |", "| --- | --- | --- | --- | --- |"]
    for column in COLUMNS:
        null = "yes" if column.nullable else "no"
        lines.append(f"| `{column.name}` | `{column.arrow}` | `{column.spark}` | {null} | {column.meaning} |")
    lines += ["", "| kind | what happened |", "| --- | --- |"]
    lines += [f"| `{kind}` | {meaning} |" for kind, meaning in KINDS.items()]
    return "\n".join(lines) + "\n"

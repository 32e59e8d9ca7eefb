"""Arrow batches as messages: which columns the sink takes, and which rows it cannot publish.

Pure: batches in, (topic, payload, encoded properties, flags) out. Rows of a batch are put together by topic, which lets them
share blocks on their way to the log; within a topic their order is that of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import Any

import pyarrow as pa
from pyspark.sql import types as spark

from nearcast.client.records import encoded_properties
from nearcast.errors import NearcastError, PipelineError
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.topics import topic_fault
from nearcast.topiclog import blocks

Message = tuple[str, bytes, bytes, int]
"""Topic, payload, MQTT 5 properties as the log has them, flags of the block."""

_TEXT = (spark.StringType, spark.VarcharType, spark.CharType)
_INTEGER = (spark.ByteType, spark.ShortType, spark.IntegerType, spark.LongType)
COLUMNS: dict[str, tuple[tuple[type[spark.DataType], ...], str]] = {
    "topic": (_TEXT, "string"),
    "payload": ((spark.BinaryType, *_TEXT), "binary or string"),
    "content_type": (_TEXT, "string"),
    "response_topic": (_TEXT, "string"),
    "correlation_data": ((spark.BinaryType,), "binary"),
    "payload_format": (_INTEGER, "tinyint"),
    "user_properties": ((spark.MapType,), "map<string,string>"),
    "qos": (_INTEGER, "tinyint"),
    "retain": ((spark.BooleanType,), "boolean"),
}
IGNORED = ("index", "time", "publisher")
"""Columns of the source that the log itself fills in: rows that were read can be written as they are."""

PROPERTIES = ("content_type", "response_topic", "correlation_data", "payload_format", "user_properties")
MAX_TOPIC_LEVELS = 1 << 16
"""The broker knows its own limit, and refuses a batch that exceeds it."""

MAX_REMEMBERED = 100_000
"""Distinct topics and sets of properties whose checks are remembered."""


def check_schema(schema: spark.StructType, topic: str | None) -> None:
    """Refuse a DataFrame that cannot be published; ``topic`` is the option of that name."""
    found = {}
    for field in schema.fields:
        name = field.name.lower()
        if name in COLUMNS:
            kinds, wanted = COLUMNS[name]
            if not isinstance(field.dataType, kinds) or not _is_text_map(field.dataType):
                raise PipelineError(f"column {field.name} is {field.dataType.simpleString()} and has to be {wanted}")
            found[name] = field.name
        elif name not in IGNORED:
            raise PipelineError(
                f"column {field.name} is no part of a message: drop it, or pack it into the payload "
                f"(nearcast.pipeline.payloads.to_json); the sink takes {', '.join(COLUMNS)}"
            )
    if "payload" not in found:
        raise PipelineError("there is no column payload: pack columns into one with nearcast.pipeline.payloads.to_json")
    if "topic" not in found and topic is None:
        raise PipelineError('there is no column topic: add one, or write everything to one topic with .option("topic", ...)')


def _is_text_map(data_type: spark.DataType) -> bool:
    if not isinstance(data_type, spark.MapType):
        return True
    return isinstance(data_type.keyType, _TEXT) and isinstance(data_type.valueType, _TEXT)


class Messages:
    """Makes messages of the rows of one partition. ``skipped`` counts those left out, if that is what is asked for."""

    def __init__(self, partition: int, *, topic: str | None, qos: int, max_message_bytes: int, skip_invalid: bool) -> None:
        self._partition = partition
        self._topic = topic
        self._flags = qos
        self._max_message_bytes = max_message_bytes
        self._skip_invalid = skip_invalid
        self._row = 0
        self._faults: dict[str, str] = {}
        self._known_properties: dict[tuple[Any, ...], bytes] = {}
        self.skipped = 0

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[Message]:
        """The messages of all batches."""
        for batch in batches:
            for messages in self.by_topic(batch).values():
                yield from messages

    def by_topic(self, batch: pa.RecordBatch) -> dict[str, list[Message]]:
        """The messages of one batch, put together by topic."""
        columns = {name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        topics = repeat(self._topic) if self._topic is not None else columns["topic"].to_pylist()
        payloads = columns["payload"].cast(pa.binary()).to_pylist()
        properties = self._properties(columns, len(payloads))
        flags = self._flag_values(columns, len(payloads))
        limit = self._max_message_bytes
        faults = self._faults
        found: dict[str, list[Message]] = {}
        first = self._row
        self._row += len(payloads)
        for number, (topic, payload, encoded, flag) in enumerate(
            zip(topics, payloads, properties, flags, strict=False), first
        ):
            if (
                topic is None
                or payload is None
                or isinstance(encoded, str)
                or flag < 0
                or faults.get(topic) != ""
                or len(payload) + len(encoded) + 3 * len(topic) > limit
            ):
                fault = self._fault(topic, payload, encoded, flag)
                if fault:
                    self._refuse(number, topic, fault)
                    continue
            message: Message = (topic, payload, encoded, flag)  # type: ignore[assignment]  # a fault in words ended above
            if topic in found:
                found[topic].append(message)
            else:
                found[topic] = [message]
        return found

    def _refuse(self, number: int, topic: str | None, fault: str) -> None:
        if not self._skip_invalid:
            where = f" (topic {topic[:100]!r})" if topic else ""
            raise PipelineError(
                f"row {number} of partition {self._partition} cannot be published{where}: {fault}; "
                'correct or drop such rows, or leave them out with .option("onInvalid", "skip")'
            )
        self.skipped += 1

    def _fault(self, topic: str | None, payload: bytes | None, properties: bytes | str, flag: int) -> str:
        """What is wrong with a row, in words; empty when nothing is."""
        if topic is None:
            return "its topic is null"
        if payload is None:
            return "its payload is null (an empty one is allowed)"
        if isinstance(properties, str):
            return properties
        if flag < 0:
            return "its qos is not 0, 1 or 2"
        name = topic.encode("utf-8", "surrogatepass")
        fault = self._faults.get(topic)
        if fault is None:
            fault = topic_fault(name, MAX_TOPIC_LEVELS)
            if len(self._faults) < MAX_REMEMBERED:
                self._faults[topic] = fault
        if fault:
            return fault
        size = len(payload) + len(properties) + len(name)
        if size > self._max_message_bytes:
            allowed = f"{self._max_message_bytes:,} are allowed (option maxMessageBytes)"
            return f"it has {size:,} bytes, and {allowed}"
        return ""

    def _flag_values(self, columns: dict[str, pa.Array], count: int) -> Iterable[int]:
        """Flags of the block for each row; -1 where the row has no valid QoS."""
        qos, retain = columns.get("qos"), columns.get("retain")
        if qos is None and retain is None:
            return repeat(self._flags, count)
        levels = qos.to_pylist() if qos is not None else repeat(None, count)
        kept = retain.to_pylist() if retain is not None else repeat(False, count)
        return [self._flag(level, keep) for level, keep in zip(levels, kept, strict=True)]

    def _flag(self, level: int | None, keep: bool | None) -> int:
        if level is None:
            level = self._flags
        if not 0 <= level <= 2:
            return -1
        return level | (blocks.RETAIN if keep else 0)

    def _properties(self, columns: dict[str, pa.Array], count: int) -> Iterable[bytes | str]:
        """The encoded properties of each row, or what is wrong with them."""
        given = {name: columns[name] for name in PROPERTIES if name in columns and columns[name].null_count < count}
        if not given:
            return repeat(b"", count)
        lists = [given[name].to_pylist() if name in given else repeat(None, count) for name in PROPERTIES]
        remembered = self._known_properties
        found: list[bytes | str] = []
        for key in zip(*lists, strict=True):
            if key[2] is not None or key[4] is not None:
                # Of its own in most rows: remembering would only fill memory.
                found.append(_encode(*key))
                continue
            encoded = remembered.get(key)
            if encoded is None:
                made = _encode(*key)
                if isinstance(made, bytes) and len(remembered) < MAX_REMEMBERED:
                    remembered[key] = made
                found.append(made)
            else:
                found.append(encoded)
        return found


def _encode(
    content_type: str | None,
    response_topic: str | None,
    correlation_data: bytes | None,
    payload_format: int | None,
    user_properties: list[tuple[str, str | None]] | None,
) -> bytes | str:
    pairs = []
    for name, value in user_properties or ():
        if value is None:
            return f"its user property {name[:100]!r} is null"
        pairs.append((name, value))
    fault = (
        topic_fault(response_topic.encode("utf-8", "surrogatepass"), MAX_TOPIC_LEVELS) if response_topic is not None else ""
    )
    if fault:
        return f"its response_topic cannot be used: {fault}"
    properties = Properties(
        content_type=content_type,
        response_topic=response_topic,
        correlation_data=correlation_data,
        payload_format_indicator=payload_format,
        user_properties=pairs or None,
    )
    try:
        return encoded_properties(properties)
    except (NearcastError, ValueError, OverflowError) as error:
        return f"its properties cannot be sent: {error}"

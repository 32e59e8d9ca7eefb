"""The sink: rows of a DataFrame published to topics, exactly once per batch.

Every task hands its rows in at the broker's bulk port, where they wait on disk under (producer, batch, partition, attempt) and
nobody sees them. When all tasks are done, the driver has the broker commit the batch with the attempts that Spark chose; the
broker decides once, durably, and remembers the last batch of each producer, so that a batch that Spark repeats after a crash
publishes nothing. Owns the writers of PySpark's data source API; what a row has to look like is in
:mod:`nearcast.pipeline.sink_rows`, keeping and publishing batches is the broker's part.

Name: ``nearcast``

Schema: ``topic string, payload binary`` (or string); if wanted ``content_type string, response_topic string, correlation_data
binary, payload_format tinyint, user_properties map<string,string>, qos tinyint, retain boolean``. Columns index, time and
publisher of the source are passed over; others are refused.

Options for writing:

- url, username, password, caFile, certificateFile, keyFile, reconnectSeconds: as for reading.
- topic: one topic for all rows, instead of the column; ``.save("alerts")`` and ``.start("alerts")`` say the same.
- qos: of rows without one. Default: 1.
- onInvalid: what becomes of a row that cannot be published: ``fail``, or ``skip``. Default: ``fail``.
- maxMessageBytes: most that topic, properties and payload of a row may have together. Default: 1,048,576.
- producer, batch: a name and a number under which this write is done once, however often it is run; ``df.write`` only.
  Default: every write is one of its own.
- checkpointLocation, queryName: Spark's own, for streams.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import uuid4

from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from nearcast.errors import ConnectionClosed, NearcastError, PipelineError
from nearcast.mqtt.topics import topic_fault
from nearcast.pipeline.connections import borrowed
from nearcast.pipeline.options import CONNECTION_OPTIONS, Connection, known_options, parse_connection
from nearcast.pipeline.sink_rows import MAX_TOPIC_LEVELS, Messages, check_schema
from nearcast.pipeline.spool import Spool
from nearcast.topiclog.wire import ONCE_PREFIX

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from nearcast.client.blocking_topics import BlockingTopics

logger = logging.getLogger(__name__)

BATCH_ID = "streaming.sql.batchId"
QUERY_ID = "sql.streaming.queryId"
"""Local properties that Spark gives the tasks of a micro-batch."""

WRITE_OPTIONS = (
    *CONNECTION_OPTIONS,
    "topic",
    "path",
    "qos",
    "onInvalid",
    "maxMessageBytes",
    "producer",
    "batch",
    "checkpointLocation",
    "queryName",
)
BATCH_ONLY = ("producer", "batch")
DEFAULT_MAX_MESSAGE_BYTES = 1_048_576
MAX_MESSAGE_BYTES = 268_435_455
MAX_PRODUCER_BYTES = 200
UPLOADS = 3
"""How often one task hands its rows in, when the connection is lost meanwhile."""


@dataclass(frozen=True)
class SinkOptions:
    """All options of writing."""

    connection: Connection
    topic: str | None = None
    qos: int = 1
    skip_invalid: bool = False
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    producer: str | None = None
    batch: int = 0


def parse_write(options: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """The options of ``df.write`` or, ``streaming``, of ``df.writeStream``."""
    given = known_options(options, WRITE_OPTIONS, "writing")
    for name in BATCH_ONLY if streaming else ():
        if name in given:
            raise PipelineError(f"option {name} is for df.write: a streaming query is its own producer, by its checkpoint")
    topic = given.get("topic", given.get("path"))
    if topic is not None:
        fault = topic_fault(topic.encode("utf-8", "surrogatepass"), MAX_TOPIC_LEVELS)
        if fault:
            raise PipelineError(f"option topic: {topic[:100]!r}: {fault}")
    invalid = given.get("onInvalid", "fail").lower()
    if invalid not in ("fail", "skip"):
        raise PipelineError(f"option onInvalid must be fail or skip, not {given['onInvalid']!r}")
    producer = given.get("producer")
    if producer is not None and not 0 < len(producer.encode()) <= MAX_PRODUCER_BYTES:
        raise PipelineError(f"option producer must have 1 to {MAX_PRODUCER_BYTES} bytes")
    if "batch" in given and producer is None:
        raise PipelineError("option batch numbers the batches of a producer: give the option producer too")
    return SinkOptions(
        connection=parse_connection(options),
        topic=topic,
        qos=_whole(given, "qos", 1, 0, 2),
        skip_invalid=invalid == "skip",
        max_message_bytes=_whole(given, "maxMessageBytes", DEFAULT_MAX_MESSAGE_BYTES, 1, MAX_MESSAGE_BYTES),
        producer=producer,
        batch=_whole(given, "batch", 0, 0, (1 << 63) - 1),
    )


def _whole(given: Mapping[str, str], name: str, default: int, lowest: int, highest: int) -> int:
    try:
        number = int(given.get(name, default))
    except ValueError:
        number = lowest - 1
    if not lowest <= number <= highest:
        raise PipelineError(f"option {name} must be a whole number from {lowest:,} to {highest:,}, not {given[name]!r}")
    return number


@dataclass(frozen=True)
class Staged(WriterCommitMessage):
    """What a task handed in."""

    producer: str
    batch: int
    partition: int
    attempt: int
    rows: int
    skipped: int


class _Sink:
    """What the two writers share. They are copied to every task, so they hold nothing but settings."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool, *, streaming: bool) -> None:
        self._options = parse_write(options, streaming=streaming)
        if overwrite:
            raise PipelineError('topics are logs and cannot be overwritten: use .mode("append"), or outputMode("append")')
        check_schema(schema, self._options.topic)

    def _topics(self) -> AbstractContextManager[BlockingTopics]:
        """A connection. A broker that restarts is waited for: a query that fails has to be started again by someone."""
        return borrowed(self._options.connection, patient=True)

    def _stage(self, batches: Iterator[pa.RecordBatch], partition: int, producer: str, batch: int) -> Staged:
        """Hand in the rows of one task. A connection that is lost on the way costs an upload, not the task."""
        options = self._options
        with Spool(batches) as spool, self._topics() as topics:
            last = topics.last_batch(producer)
            if last is not None and last >= batch:
                # Spark repeats a batch that was committed: it needs no rows, only the same answer.
                for _ in batches:
                    pass
                return Staged(producer, batch, partition, 0, 0, 0)
            for upload in range(1, UPLOADS + 1):
                # Random, because numbers of Spark's start again with each driver: a task of one that is dead, and does not
                # know it, must not touch what another task handed in.
                attempt = secrets.randbits(48)
                messages = Messages(
                    partition,
                    topic=options.topic,
                    qos=options.qos,
                    max_message_bytes=options.max_message_bytes,
                    skip_invalid=options.skip_invalid,
                )
                try:
                    rows = topics.stage_encoded(producer, batch, partition, attempt, messages.of(spool.batches()))
                except ConnectionClosed:
                    if upload == UPLOADS:
                        raise
                else:
                    return Staged(producer, batch, partition, attempt, rows, messages.skipped)
        raise AssertionError("the loop above returns or raises")

    def _commit(self, messages: list[Staged]) -> None:
        if not messages:
            return
        producer, batch = messages[0].producer, messages[0].batch
        with self._topics() as topics:
            fresh = topics.commit_batch(producer, batch, {message.partition: message.attempt for message in messages})
        skipped = sum(message.skipped for message in messages)
        if skipped and fresh:
            logger.warning("%d rows of batch %d could not be published and were left out (onInvalid=skip)", skipped, batch)

    def _abort(self, producer: str, batch: int) -> None:
        try:
            with self._topics() as topics:
                topics.abort_batch(producer, batch)
        except NearcastError as error:
            # Why the batch failed matters more; what was handed in for it expires.
            logger.warning("rows handed in for batch %d stay at the broker until they expire: %s", batch, error)


class SinkWriter(_Sink, DataSourceArrowWriter):
    """Writes a DataFrame. Without the option ``producer`` every write is a producer of its own, and publishes."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=False)
        # Made once, on the driver: all tasks and the commit get it with the writer.
        self._producer = self._options.producer or f"{ONCE_PREFIX}spark-write/{uuid4()}"
        # A mistake in the options shows here, at once, and not in a task that waits for a broker.
        with borrowed(self._options.connection) as topics:
            topics.last_batch(self._producer)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._stage(iterator, _task().partitionId(), self._producer, self._options.batch)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._commit([message for message in messages if isinstance(message, Staged)])

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        self._abort(self._producer, self._options.batch)


class StreamSinkWriter(_Sink, DataSourceStreamArrowWriter):
    """Writes the micro-batches of a streaming query; the query's id, which lives in its checkpoint, is the producer."""

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        super().__init__(options, schema, overwrite, streaming=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        task = _task()
        query, batch = task.getLocalProperty(QUERY_ID), task.getLocalProperty(BATCH_ID)
        if query is None or batch is None:
            raise PipelineError("Spark did not say which micro-batch this is: the streaming sink needs Spark 4.3")
        return self._stage(iterator, task.partitionId(), f"spark-query/{query}", int(batch))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        self._commit([message for message in messages if isinstance(message, Staged)])

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        # Runs in a process that only knows the query through what tasks reported; without any, what is there expires.
        for message in messages:
            if isinstance(message, Staged):
                self._abort(message.producer, batchId)
                return


def _task() -> TaskContext:
    task = TaskContext.get()
    if task is None:
        raise PipelineError("rows are written by Spark's tasks, and this is none")
    return task


def batch_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> SinkWriter:
    """What ``df.write.format("nearcast")`` writes with."""
    return SinkWriter(options, schema, overwrite)


def stream_writer(options: Mapping[str, str], schema: StructType, overwrite: bool) -> StreamSinkWriter:
    """What ``df.writeStream.format("nearcast")`` writes with."""
    return StreamSinkWriter(options, schema, overwrite)

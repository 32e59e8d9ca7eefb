"""The data source ``nearcast``: topics as DataFrames, and rows as messages.

:class:`NearcastDataSource` is what Spark sees; this module has its batch reader, :mod:`.stream_source` the streaming one and
:mod:`.sink` the writers. Importing ``pyspark_nearcast`` is not needed: Spark finds that package and registers the source.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
    Filter,
    InputPartition,
)
from pyspark.sql.types import (
    BinaryType,
    BooleanType,
    ByteType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from nearcast.errors import PipelineError, RecordUnavailable
from nearcast.pipeline.filters import Wanted, push
from nearcast.pipeline.options import Positions, ReadOptions, parse_read
from nearcast.pipeline.plan import TopicRange, divide

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nearcast.client.blocking_topics import BlockingTopics
    from nearcast.client.records import TopicState

SCHEMA = StructType(
    [
        StructField("topic", StringType()),
        StructField("index", LongType()),
        StructField("time", TimestampType()),
        StructField("publisher", StringType()),
        StructField("qos", ByteType()),
        StructField("retain", BooleanType()),
        StructField("content_type", StringType()),
        StructField("response_topic", StringType()),
        StructField("correlation_data", BinaryType()),
        StructField("payload_format", ByteType()),
        StructField("payload", BinaryType()),
        StructField("user_properties", MapType(StringType(), StringType())),
    ]
)

_log = logging.getLogger("nearcast.pipeline")


class NearcastDataSource(DataSource):
    """Durable topics of a Nearcast broker as rows, and rows as messages.

    Name: ``nearcast``

    Schema: ``topic string, index bigint, time timestamp, publisher string, qos tinyint, retain boolean, content_type string,
    response_topic string, correlation_data binary, payload_format tinyint, payload binary, user_properties
    map<string,string>``. ``.schema(...)`` with some of these columns reads only those, which is faster: Spark does not tell a
    Python source which columns a query uses. ``index`` counts from 1 per topic; ``time`` is when the broker took the message.
    Of a user property that was given twice, the last value is in the map.

    Options for reading:

    - url: the broker's bulk port, ``nearcast://HOST:7883`` or, encrypted, ``nearcasts://HOST:7884``. Required.
    - username, password: credentials; or in the url. They are in no plan, log or message.
    - caFile, certificateFile, keyFile: PEM files for ``nearcasts://``. Default: the system's authorities, no own certificate.
    - topics: MQTT topic filters, separated by commas, or as a JSON list. Required; ``.load("sensors/#")`` says the same.
    - startingOffsets: where to begin: ``earliest``, ``latest``, or JSON with the first index of some topics,
      ``{"sensors/a": 17}`` (others: earliest). Default: ``earliest``; streaming: ``latest``.
    - startingTime: the same by time, ISO 8601, UTC where no zone is given.
    - endingOffsets, endingTime: where to end, exclusively; batch only. Default: ``latest``, what is committed at planning.
    - minPartitions: at least so many partitions (tasks). Default: by size, 128 MiB each at most.
    - rowsPerPartition: at most so many rows in each. Default: by size.
    - failOnDataLoss: whether records that retention removed before they were read fail the query; otherwise they are
      passed over and logged. Default: ``true``.
    - reconnectSeconds: how long to try to reach a broker that went away, before the query fails. Default: 60.
    - maxRecordsPerTrigger: most records of one micro-batch, shared fairly among the topics; streaming only. Default: no limit.
    - maxBytesPerTrigger: the same in bytes (``64m``), by the average record of each topic. Default: no limit.

    Filters on topic (equality, IN, prefix), index and time are answered by the broker; they need
    ``spark.sql.python.filterPushdown.enabled=true``, which sessions of ``nearcast pipeline`` have.

    A streaming read keeps the next index of every topic in the checkpoint: restarted, it goes on with the very next record.
    Topics that appear later are read from their first record on.

    Options for writing are those of :mod:`nearcast.pipeline.sink`.
    """

    @classmethod
    def name(cls) -> str:
        return "nearcast"

    def schema(self) -> StructType:
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        return NearcastReader(check_schema(schema), parse_read(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        from nearcast.pipeline.stream_source import NearcastStreamReader

        return NearcastStreamReader(check_schema(schema), parse_read(self.options, streaming=True))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from nearcast.pipeline import sink

        return sink.batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        from nearcast.pipeline import sink

        return sink.stream_writer(self.options, schema, overwrite)


def check_schema(schema: StructType) -> StructType:
    """A schema that the user gave may leave columns out and order them; it cannot add or retype any."""
    known: dict[str, DataType] = {field.name: field.dataType for field in SCHEMA}
    for field in schema:
        if field.name not in known:
            raise PipelineError(f"column {field.name} is none of this source; there are {', '.join(known)}")
        if field.dataType != known[field.name]:
            wanted = known[field.name].simpleString()
            raise PipelineError(
                f"column {field.name} is {wanted} and not {field.dataType.simpleString()}: cast it after loading"
            )
    return schema


class RangesPartition(InputPartition):
    """Records that one task reads: ranges of some topics."""

    def __init__(self, ranges: Sequence[TopicRange]) -> None:
        # Plain values: they travel to the executors pickled, for some reads in the thousands.
        super().__init__([(each.topic, each.start, each.end) for each in ranges])


class NearcastReader(DataSourceReader):
    """A batch read. Planned once, in a process beside the driver; ``read`` runs on the executors and keeps nothing."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = schema
        self._options = options
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        self._wanted, rest = push(filters)
        return iter(rest)

    def partitions(self) -> Sequence[InputPartition]:
        from nearcast.pipeline.connections import borrowed

        with borrowed(self._options.connection) as topics:
            ranges = plan_ranges(topics, self._options, self._wanted)
        divided = divide(
            ranges, min_partitions=self._options.min_partitions, rows_per_partition=self._options.rows_per_partition
        )
        return [RangesPartition(each) for each in divided]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return read_partition(self._schema, self._options, partition)


def plan_ranges(topics: BlockingTopics, options: ReadOptions, wanted: Wanted) -> list[TopicRange]:
    """Which records of which topics a batch read is about, as the broker stands now."""
    listing = list(wanted.listing(options.filters))
    if not listing:
        return []
    states = [state for state in topics.topics(*listing, newest=True) if wanted.selects(state.topic, options.filters)]
    starts = _places(topics, listing, states, options.start, "startingOffsets")
    ends = _places(topics, listing, states, options.end, "endingOffsets")
    first_by_time = {} if wanted.start_us is None else topics.indexes_at(listing, wanted.start_us)
    last_by_time = {} if wanted.end_us is None else topics.indexes_at(listing, wanted.end_us)
    ranges = []
    for state in states:
        start, end = starts[state.topic], ends[state.topic]
        if start < state.first_index:
            lost(options, RecordUnavailable(state.topic, start, state.first_index, state.next_index))
            start = state.first_index
        # Filters only choose among what the options name; they cannot miss anything.
        start = max(start, wanted.start_index or 1, first_by_time.get(state.topic, 1))
        end = min(end, state.next_index if wanted.end_index is None else wanted.end_index, last_by_time.get(state.topic, end))
        if start < end:
            ranges.append(TopicRange(state.topic, start, end, max(1, state.bytes // state.count)))
    return ranges


def _places(
    topics: BlockingTopics, listing: list[str], states: Sequence[TopicState], positions: Positions, option: str
) -> dict[str, int]:
    """The index that a start or end means for each topic."""
    if positions.time_us is not None:
        found = topics.indexes_at(listing, positions.time_us)
        # A record that came between the two questions is not older than those the first answer saw.
        return {state.topic: min(max(found.get(state.topic, 1), state.first_index), state.next_index) for state in states}
    places = {}
    for state in states:
        position = positions.topics.get(state.topic, positions.default)
        if position == "earliest":
            place = state.first_index
        elif position == "latest":
            place = state.next_index
        else:
            place = position
        if place > state.next_index:
            raise PipelineError(
                f"option {option}: topic {state.topic!r} has no record {place}: its next one gets index {state.next_index}"
            )
        places[state.topic] = place
    return places


def read_partition(schema: StructType, options: ReadOptions, partition: InputPartition) -> Iterator[RecordBatch]:
    """The records of a partition; runs on executors."""
    ranges: Mapping[str, tuple[int, int]] = {topic: (start, end) for topic, start, end in partition.value or ()}
    if not ranges:
        return
    from pyspark.sql.pandas.types import to_arrow_schema

    from nearcast.pipeline.arrow import Extractor
    from nearcast.pipeline.connections import borrowed

    extractor = Extractor(to_arrow_schema(schema, timezone="UTC"), ranges, losses(options))
    with borrowed(options.connection, patient=True) as topics:
        for data, names in _gathered(topics.read_ranges(list(options.filters), ranges, on_gap=_ignore)):
            yield from extractor.extract(data, names)
    extractor.finish()


GATHERED_BYTES = 2_097_152
"""Small pieces are put together up to this before they become a record batch: each costs some 0.3 ms, however small."""


def _gathered(batches: Iterator[Any]) -> Iterator[tuple[bytes, Mapping[int, str]]]:
    """The batches of a stream in larger pieces. Numbers of topics are those of one connection, so a new table ends a piece."""
    pieces: list[memoryview] = []
    size = 0
    names: Mapping[int, str] = {}
    for batch in batches:
        if pieces and (batch.topics is not names or size + len(batch.data) > GATHERED_BYTES):
            yield b"".join(pieces), names
            pieces, size = [], 0
        names = batch.topics
        if len(batch.data):
            pieces.append(batch.data)
            size += len(batch.data)
    if pieces:
        yield b"".join(pieces), names


def _ignore(_: object) -> None:
    """The extractor counts for itself."""


def lost(options: ReadOptions, error: RecordUnavailable) -> None:
    """Records are gone that had to be read: the end of the query, or a line in the log."""
    if options.fail_on_data_loss:
        raise PipelineError(f"{error}. To go on without what is lost, set the option failOnDataLoss to false") from error
    _log.warning("%s; reading goes on without", error)


def losses(options: ReadOptions) -> Callable[[RecordUnavailable], None]:
    return lambda error: lost(options, error)

"""Streaming reads: micro-batches of topics, exact and repeatable.

:class:`NearcastStreamReader` lives twice: on the driver, in one process for the whole query, it says how far each micro-batch
goes (:mod:`.offsets` decides); on the executors its ``read`` fetches partitions. Only the driver's keeps a connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from nearcast.errors import PipelineError, RecordUnavailable
from nearcast.pipeline import offsets
from nearcast.pipeline.offsets import Advance, Limit, Offset, TopicState
from nearcast.pipeline.options import ReadOptions
from nearcast.pipeline.plan import divide
from nearcast.pipeline.source import RangesPartition, lost, read_partition

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    from nearcast.client.blocking_topics import BlockingTopics


MAX_LISTING_AGE_SECONDS = 5.0


class NearcastStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """One streaming read. Offsets are described in :mod:`nearcast.pipeline.offsets`."""

    def __init__(self, schema: StructType, options: ReadOptions) -> None:
        self._schema = schema
        self._options = options
        self._advance = Advance(options.start)
        self._topics: BlockingTopics | None = None
        self._target: dict[str, TopicState] | None = None
        self._latest: dict[str, TopicState] = {}
        self._listed_at = 0.0
        self._listing_seconds = 0.0

    def __getstate__(self) -> dict[str, Any]:
        # It travels to the executors; a connection does not.
        return self.__dict__ | {"_topics": None, "_target": None, "_latest": {}}

    # --- on the driver ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        # Spark asks twice for the first batch, and again when that is repeated after a crash: only a constant is safe. What
        # "latest" means is decided in latestOffset and kept in the first batch's end.
        return dict(offsets.INITIAL)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        if self._options.max_records_per_trigger is not None:
            return ReadMaxRows(self._options.max_records_per_trigger)
        if self._options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(self._options.max_bytes_per_trigger)
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        before = offsets.unpack(start)
        if self._target is None and (before.next is None or not self._listed_lately()):
            self._latest = self._states()
        by_time = None
        if before.next is None and self._options.start.time_us is not None:
            by_time = self._connection().indexes_at(list(self._options.filters), self._options.start.time_us)
            # Asked after the listing: what was published between the two is in this answer and not in that one.
            self._latest = {
                topic: replace(state, next_index=max(state.next_index, by_time.get(topic, 0)))
                for topic, state in self._latest.items()
            }
        after = self._advance.advance(before, self._latest.values(), self._limit(limit), by_time)
        for loss in self._advance.losses:
            self._lost(loss)
        return start if after is before else after.pack()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802 - Spark's name
        if not self._latest or len(self._latest) > offsets.PLAIN_TOPICS:
            return None
        return Offset({topic: state.next_index for topic, state in self._latest.items()}).pack()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._target = self._latest = self._states()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        sizes = {topic: state.record_bytes for topic, state in self._latest.items()}
        ranges = offsets.ranges_between(offsets.unpack(start), offsets.unpack(end), sizes)
        divided = divide(
            ranges, min_partitions=self._options.min_partitions, rows_per_partition=self._options.rows_per_partition
        )
        return [RangesPartition(each) for each in divided]

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: the log is kept by its own rules, not by who has read it."""

    def stop(self) -> None:
        if self._topics is not None:
            self._topics.close()
            self._topics = None

    def _limit(self, limit: ReadLimit) -> Limit:
        if isinstance(limit, ReadAllAvailable):
            return Limit()
        # Spark can name one limit and the options may set two.
        records, size = self._options.max_records_per_trigger, self._options.max_bytes_per_trigger
        if isinstance(limit, ReadMaxRows):
            records = limit.max_rows
        elif isinstance(limit, ReadMaxBytes):
            size = limit.max_bytes
        return Limit(records, size)

    def _listed_lately(self) -> bool:
        """Whether to do with the last listing. Spark asks 100 times a second while nothing comes; where there are so many
        topics that listing them takes long, a tenth of the time goes to it and not all."""
        age = time.monotonic() - self._listed_at
        return age < min(MAX_LISTING_AGE_SECONDS, 10 * self._listing_seconds)

    def _states(self) -> dict[str, TopicState]:
        connection = self._connection()
        started = time.monotonic()
        found = connection.topics(*self._options.filters, newest=True)
        self._listed_at = time.monotonic()
        self._listing_seconds = self._listed_at - started
        return {each.topic: TopicState(each.topic, each.first_index, each.next_index, each.bytes) for each in found}

    def _connection(self) -> BlockingTopics:
        if self._topics is None:
            from nearcast.pipeline.connections import connect

            topics = connect(self._options.connection)
            topics.open()
            self._topics = topics
        return self._topics

    def _lost(self, loss: RecordUnavailable) -> None:
        if loss.index > loss.next_index and self._options.fail_on_data_loss:
            raise PipelineError(
                f"topic {loss.topic!r} was read up to index {loss.index - 1} and now ends at {loss.next_index - 1}: it was "
                "deleted and made anew, or the broker's data is an older copy. To begin again with its first record, set the "
                "option failOnDataLoss to false"
            ) from loss
        lost(self._options, loss)

    # --- on the executors ---------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return read_partition(self._schema, self._options, partition)

"""The data source of the job ``telemetry``: the telemetry topics of many brokers as one stream.

Each broker keeps what it reports itself (docs/semantics.md, A2), and every topic below ``$nearcast/telemetry/`` has the name
of its broker: so records of several logs stand beside each other, and an offset is one for each broker. One process beside
the driver asks them all, at the same time.

Brokers come and go, and telemetry is for the moment: one that does not answer is left out, asked again after
:data:`RETRY_SECONDS`, and what it said meanwhile is read when it is back. Nothing here fails for one broker.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, Filter, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from nearcast.errors import NearcastError
from nearcast.pipeline import offsets
from nearcast.pipeline.connections import borrowed
from nearcast.pipeline.filters import Wanted, push
from nearcast.pipeline.options import ReadOptions, parse_read
from nearcast.pipeline.plan import divide
from nearcast.pipeline.source import RangesPartition, plan_ranges, read_partition
from nearcast.pipeline.stream_source import NearcastStreamReader
from nearcast.pipeline.telemetry_records import RECORDS

if TYPE_CHECKING:
    from pyarrow import RecordBatch

NAME: Final = "nearcast_telemetry"

RETRY_SECONDS: Final = 10.0
"""How long a broker that did not answer is left alone."""

RECONNECT_SECONDS: Final = 2.0
"""How long a task tries to reach a broker again that went away while it read."""

MAX_ASKED_AT_ONCE: Final = 32

T = TypeVar("T")
_log = logging.getLogger("nearcast.pipeline")


class TelemetrySource(DataSource):
    """Topics of several brokers. Options: ``urls``, a JSON list of bulk ports, and those of the data source ``nearcast`` but
    for ``url``. Schema: :data:`~nearcast.pipeline.telemetry_records.RECORDS`."""

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> str:
        return RECORDS

    def reader(self, schema: StructType) -> DataSourceReader:
        return BrokersReader(schema, options_each(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        return BrokersStreamReader(schema, options_each(self.options, streaming=True))


def options_each(options: Mapping[str, str], *, streaming: bool) -> list[ReadOptions]:
    """The options of reading each broker; raises :class:`~nearcast.errors.PipelineError` for what is wrong with them."""
    common = {name: options[name] for name in options if name != "urls"}
    found = [parse_read({**common, "url": url}, streaming=streaming) for url in json.loads(options["urls"])]
    return [replace(each, connection=replace(each.connection, reconnect_seconds=RECONNECT_SECONDS)) for each in found]


class BrokerPartition(InputPartition):
    """What one task reads, all of it at one broker: ``value`` is the number of that broker, and its ranges."""


def _read(schema: StructType, options: Sequence[ReadOptions], partition: InputPartition) -> Iterator[RecordBatch]:
    number, ranges = partition.value or (0, ())
    asked = RangesPartition(())
    asked.value = ranges
    try:
        yield from read_partition(schema, options[number], asked)
    except (NearcastError, OSError) as error:
        _unanswered(options[number], error)


def _unanswered(options: ReadOptions, error: Exception) -> None:
    _log.warning("%s does not answer: %s; its telemetry is left out", options.connection.url, error)


class _Asking:
    """Asks all brokers the same at once, and leaves those alone that did not answer lately."""

    def __init__(self, brokers: Sequence[ReadOptions]) -> None:
        self._brokers = brokers
        self._again_at = [0.0] * len(brokers)

    def each(self, question: Callable[[int], T], missing: Callable[[int], T]) -> list[T]:
        """What ``question`` answers for each broker by number, or ``missing`` for one that is not to be reached."""
        with ThreadPoolExecutor(min(MAX_ASKED_AT_ONCE, max(1, len(self._brokers))), "brokers") as threads:
            return list(threads.map(lambda number: self._one(number, question, missing), range(len(self._brokers))))

    def _one(self, number: int, question: Callable[[int], T], missing: Callable[[int], T]) -> T:
        if time.monotonic() < self._again_at[number]:
            return missing(number)
        try:
            return question(number)
        except (NearcastError, OSError) as error:
            self._again_at[number] = time.monotonic() + RETRY_SECONDS
            _unanswered(self._brokers[number], error)
            return missing(number)


class BrokersReader(DataSourceReader):
    """A batch read of all brokers that answer."""

    def __init__(self, schema: StructType, brokers: Sequence[ReadOptions]) -> None:
        self._schema = schema
        self._brokers = brokers
        self._wanted = Wanted()

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        self._wanted, rest = push(filters)
        return iter(rest)

    def partitions(self) -> Sequence[InputPartition]:
        parts = _Asking(self._brokers).each(self._partitions_of, lambda _: [])
        return [each for some in parts for each in some]

    def _partitions_of(self, number: int) -> list[BrokerPartition]:
        options = self._brokers[number]
        with borrowed(options.connection) as topics:
            ranges = plan_ranges(topics, options, self._wanted)
        divided = divide(ranges, min_partitions=options.min_partitions, rows_per_partition=options.rows_per_partition)
        return [BrokerPartition((number, RangesPartition(each).value)) for each in divided]

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return _read(self._schema, self._brokers, partition)


class BrokersStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A streaming read. An offset has the offset of each broker's log by the broker's number."""

    def __init__(self, schema: StructType, brokers: Sequence[ReadOptions]) -> None:
        self._schema = schema
        self._brokers = brokers
        self._readers = [NearcastStreamReader(schema, options) for options in brokers]
        self._asking = _Asking(brokers)

    def __getstate__(self) -> dict[str, Any]:
        # It travels to the executors, which only read.
        return self.__dict__ | {"_readers": [], "_asking": None}

    # --- on the driver ------------------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        return {}

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        return ReadAllAvailable()

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 - Spark's name
        def before(number: int) -> dict[str, Any]:
            return dict(start.get(str(number), offsets.INITIAL))

        after = self._asking.each(lambda number: self._readers[number].latestOffset(before(number), limit), before)
        found = {str(number): offset for number, offset in enumerate(after) if offset != offsets.INITIAL}
        return start if found == start else found

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        def prepare(number: int) -> None:
            self._readers[number].prepareForTriggerAvailableNow()

        self._asking.each(prepare, lambda _: None)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        found: list[BrokerPartition] = []
        for number, reader in enumerate(self._readers):
            begin, stop = (side.get(str(number), dict(offsets.INITIAL)) for side in (start, end))
            if begin != stop:
                found += [BrokerPartition((number, each.value)) for each in reader.partitions(begin, stop)]
        return found

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do, as for one broker."""

    def stop(self) -> None:
        for reader in self._readers:
            reader.stop()

    # --- on the executors ---------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[RecordBatch]:
        return _read(self._schema, self._brokers, partition)

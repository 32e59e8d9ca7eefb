"""How fast Spark reads topics here: the figures of ``nearcast bench spark``, in a process of its own.

A broker with its data in a temporary directory is started, filled and read by a session on ``local[2]``; nothing else should
run on the machine. Three measures:

- **batch**: rows of 100 bytes a second, all columns, ``count`` and the sum of the payloads' lengths, once with messages that
  were published many at a time and once with messages that came one by one (a block of the log each);
- **rows**: the same through a reader that yields Python tuples instead of Arrow batches, which is here for this comparison
  and nowhere else;
- **streaming**: time from just before a message is published until it is in the hands of ``foreachBatch``, at 1,000 a second.
"""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it
from pyspark.sql.datasource import DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.errors import PipelineError
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect, Publish
from nearcast.pipeline.connections import borrowed
from nearcast.pipeline.options import parse_read
from nearcast.pipeline.session import build_session, stop_session
from nearcast.pipeline.source import NearcastDataSource, NearcastReader, check_schema

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAYLOAD_BYTES = 100
TOPICS = 4
PER_PUBLICATION = 1_000
FEW_ROWS = 200_000
"""What the reader that yields tuples is measured on: it would take a minute for more."""
WARM_UP_ROUNDS = 3
START_SECONDS = 30.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What is measured, from the command line as JSON."""

    rows: int = 2_000_000
    single_rows: int = 500_000
    repetitions: int = 5
    messages_per_second: int = 1_000
    warm_up_seconds: float = 15.0
    stream_seconds: float = 20.0
    master: str = "local[2]"


class RowReader(NearcastReader):
    """The same records as tuples, one Python object after the other."""

    def read(self, partition: InputPartition) -> Iterator[Any]:
        ranges = {topic: (start, end) for topic, start, end in partition.value or ()}
        with borrowed(self._options.connection) as topics:
            for batch in topics.read_ranges(list(self._options.filters), ranges):
                for record in batch.records():
                    start, end = ranges[record.topic]
                    if start <= record.index < end:
                        yield (
                            record.topic,
                            record.index,
                            record.time,
                            record.publisher,
                            record.qos,
                            record.retain,
                            record.content_type,
                            record.response_topic,
                            record.correlation_data,
                            record.payload_format,
                            record.payload,
                            dict(record.user_properties),
                        )


class RowSource(NearcastDataSource):
    @classmethod
    def name(cls) -> str:
        return "nearcast_rows"

    def reader(self, schema: StructType) -> DataSourceReader:
        return RowReader(check_schema(schema), parse_read(self.options, streaming=False))


@contextlib.contextmanager
def _broker(directory: Path) -> Iterator[tuple[str, int]]:
    """A broker that keeps all topics; its bulk port's URL and its MQTT port."""
    ready = directory / "ready.json"
    command = [sys.executable, "-m", "nearcast", "broker", "--port", "0", "--bulk-port", "0", "--http-port", "0"]
    command += ["--data", str(directory / "data"), "--durable", "#", "--ready-file", str(ready)]
    with (directory / "broker.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)  # noqa: S603 - ourselves
    try:
        give_up_at = time.monotonic() + START_SECONDS
        while not ready.exists():
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise PipelineError(f"the broker did not start: {(directory / 'broker.log').read_text()[-500:]}")
            time.sleep(0.05)
        ports = {listener["kind"]: listener["port"] for listener in json.loads(ready.read_bytes())["listeners"]}
        yield f"nearcast://127.0.0.1:{ports['bulk']}", ports["tcp"]
    finally:
        process.terminate()
        process.wait()


def _fill(url: str, prefix: str, rows: int) -> None:
    """Messages that were published many at a time."""
    payloads = [b"%0*d" % (PAYLOAD_BYTES, number) for number in range(PER_PUBLICATION)]
    with BlockingTopics(url) as topics:
        for publication in range(-(-rows // PER_PUBLICATION)):
            topics.publish_many(f"{prefix}/{publication % TOPICS}", payloads)


def _fill_singly(url: str, port: int, rows: int) -> None:
    """Messages that came one by one over MQTT, at QoS 0 and as fast as the broker reads them."""
    with socket.create_connection(("127.0.0.1", port)) as connection, BlockingTopics(url) as topics:
        connection.sendall(encode(Connect(client_id="publisher", keep_alive=0), 5))
        chunk = 1_000
        for first in range(0, rows, chunk):
            packets = [
                encode(Publish(topic=f"single/{number % TOPICS}", payload=b"%0*d" % (PAYLOAD_BYTES, number)), 5)
                for number in range(first, min(first + chunk, rows))
            ]
            connection.sendall(b"".join(packets))
        give_up_at = time.monotonic() + 120
        while sum(state.count for state in topics.topics("single/#")) < rows:
            if time.monotonic() > give_up_at:
                raise PipelineError("the broker did not take the messages to be read")
            time.sleep(0.1)


def _rows_per_second(frame: DataFrame, rows: int) -> float:
    started = time.perf_counter()
    count, size = frame.agg(F.count("*"), F.sum(F.length("payload"))).collect()[0]
    seconds = time.perf_counter() - started
    if (count, size) != (rows, rows * PAYLOAD_BYTES):
        raise PipelineError(f"{rows} rows were written and {count} were read")
    return rows / seconds


def measure_batch(spark: SparkSession, url: str, settings: Settings) -> dict[str, float]:
    """Each variant once in every round, in turns; medians, without the rounds in which the JVM still compiles."""
    spark.dataSource.register(RowSource)

    def frame(source: str, topics: str, schema: str | None = None) -> DataFrame:
        reader = spark.read.format(source).option("url", url).option("topics", topics)
        return (reader if schema is None else reader.schema(schema)).load()

    few = min(settings.rows, FEW_ROWS)
    variants = {
        "batch": (frame("nearcast", "many/#"), settings.rows),
        "batch_payload_only": (frame("nearcast", "many/#", "payload binary"), settings.rows),
        "batch_single": (frame("nearcast", "single/#"), settings.single_rows),
        "row_yielding": (frame("nearcast_rows", "few/#"), few),
    }
    rates: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(WARM_UP_ROUNDS + settings.repetitions):
        for name, (source, rows) in variants.items():
            rates[name].append(_rows_per_second(source, rows))
    figures = {f"{name}_rows_per_second": statistics.median(found[WARM_UP_ROUNDS:]) for name, found in rates.items()}
    figures["times_row_yielding"] = figures["batch_rows_per_second"] / figures["row_yielding_rows_per_second"]
    return figures


def measure_stream(spark: SparkSession, url: str, settings: Settings, directory: Path) -> dict[str, float]:
    delays: list[tuple[float, float]] = []
    stop = threading.Event()

    def publish() -> None:
        """A few at a time, at even intervals; each carries the moment before it was handed over."""
        interval = 0.01
        each = max(1, round(settings.messages_per_second * interval))
        following = time.monotonic()
        with BlockingTopics(url) as topics:
            while not stop.is_set():
                now = time.time_ns()
                topics.publish_many("stream/x", [b"%0*d" % (PAYLOAD_BYTES, now)] * each)
                following += interval
                stop.wait(max(0.0, following - time.monotonic()))

    def take(frame: DataFrame, _: int) -> None:
        rows = frame.collect()
        now = time.time_ns()
        delays.extend((time.monotonic(), (now - int(row.payload)) / 1e6) for row in rows)

    publisher = threading.Thread(target=publish, name="publisher")
    publisher.start()
    query = None
    try:
        frame = spark.readStream.format("nearcast").option("url", url).schema("payload binary").load("stream/#")
        writer = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(directory / "checkpoint"))
        query = writer.trigger(processingTime="0 seconds").start()
        time.sleep(settings.warm_up_seconds)
        warm = time.monotonic()
        time.sleep(settings.stream_seconds)
    finally:
        stop.set()
        publisher.join()
        if query is not None:
            query.stop()
    measured = sorted(delay for moment, delay in delays if moment >= warm)
    if not measured:
        raise PipelineError("no micro-batch came through; the machine is too busy to measure")
    return {
        "stream_messages_per_second": len(measured) / settings.stream_seconds,
        "stream_delay_median_ms": statistics.median(measured),
        "stream_delay_p95_ms": measured[int(len(measured) * 0.95)],
    }


def run(settings: Settings) -> dict[str, float]:
    """All figures, by name."""
    with tempfile.TemporaryDirectory(prefix="nearcast-bench-spark-") as name:
        directory = Path(name)
        with _broker(directory) as (url, port):
            spark = build_session("nearcast bench spark", master=settings.master)
            try:
                figures: dict[str, float] = {}
                if settings.rows:
                    _fill(url, "many", settings.rows)
                    _fill(url, "few", min(settings.rows, FEW_ROWS))
                    _fill_singly(url, port, settings.single_rows)
                    figures |= measure_batch(spark, url, settings)
                if settings.stream_seconds:
                    figures |= measure_stream(spark, url, settings, directory)
                return figures
            finally:
                stop_session(spark)


if __name__ == "__main__":
    given = msgspec.json.decode(sys.argv[1].encode(), type=Settings) if len(sys.argv) > 1 else Settings()
    try:
        sys.stdout.write(json.dumps(run(given)) + "\n")
    except PipelineError as error:
        sys.exit(f"error: {error}")

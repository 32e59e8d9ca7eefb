"""Streaming reads against a live broker: every record once, through limits, new topics, restarts, losses and kills."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from pyspark.errors import PySparkException, StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.pipeline.offsets import describe
from tests.integration.broker.running import wait_for
from tests.integration.spark import stream_copy
from tests.integration.spark.conftest import LogBroker

pytestmark = pytest.mark.integration

PATIENCE_SECONDS = 300.0
"""A JVM, its first Python workers, and a machine that does other things too."""

Rows = list[tuple[str, int, str]]


class Stream:
    """Runs of one streaming query over one checkpoint. ``batches`` has the rows of each batch, as it was seen last."""

    def __init__(self, spark: SparkSession, url: str, topics: str, checkpoint: Path) -> None:
        self.batches: dict[int, Rows] = {}
        self.fail_at: int | None = None
        self._spark = spark
        self._checkpoint = checkpoint
        self._options = {"url": url, "topics": topics}

    @property
    def rows(self) -> Rows:
        return sorted(row for rows in self.batches.values() for row in rows)

    def start(self, *, available_now: bool = False, **options: str) -> StreamingQuery:
        frame = self._spark.readStream.format("nearcast").options(**(self._options | options)).load()
        writer = frame.writeStream.foreachBatch(self._take).option("checkpointLocation", str(self._checkpoint))
        return (writer.trigger(availableNow=True) if available_now else writer).start()

    def run(self, **options: str) -> StreamingQuery:
        """All that there is now."""
        query = self.start(available_now=True, **options)
        query.awaitTermination()
        return query

    def _take(self, frame: DataFrame, batch: int) -> None:
        rows = frame.select("topic", "index", "payload").collect()
        self.batches[batch] = [(row.topic.rpartition("/")[2], row["index"], row.payload.decode()) for row in rows]
        if batch == self.fail_at:
            self.fail_at = None
            raise RuntimeError("this batch fails on purpose")


@pytest.fixture
def root() -> str:
    return f"stream/{uuid.uuid4().hex}"


def publish(broker: LogBroker, topic: str, first: int, count: int) -> None:
    """Payload = index."""
    with BlockingTopics(broker.bulk_url) as topics:
        assert topics.publish_many(topic, [str(number) for number in range(first, first + count)]) == first


def expected(**counts: int) -> Rows:
    return sorted((name, index, str(index)) for name, count in counts.items() for index in range(1, count + 1))


def test_limits_new_topics_and_restarts(spark: SparkSession, log_broker: LogBroker, root: str, tmp_path: Path) -> None:
    publish(log_broker, f"{root}/a", 1, 40)
    publish(log_broker, f"{root}/b", 1, 10)
    stream = Stream(spark, log_broker.bulk_url, f"{root}/#", tmp_path)
    stream.run(startingOffsets="earliest", maxRecordsPerTrigger="20")
    assert [len(stream.batches[batch]) for batch in sorted(stream.batches)] == [20, 20, 10]
    assert {topic for topic, _, _ in stream.batches[0]} == {"a", "b"}, "each topic gets its share"
    assert stream.rows == expected(a=40, b=10)

    # Restarted, with more of one topic, and one that appeared; a batch fails and is repeated by the next start.
    publish(log_broker, f"{root}/b", 11, 5)
    publish(log_broker, f"{root}/c", 1, 8)
    stream.fail_at = 3
    with pytest.raises(StreamingQueryException, match="on purpose"):
        stream.run(startingOffsets="earliest")
    failed = stream.batches[3]
    publish(log_broker, f"{root}/c", 9, 3)
    last = stream.run(startingOffsets="earliest").lastProgress
    assert sorted(stream.batches[3]) == sorted(failed)
    assert stream.rows == expected(a=40, b=15, c=11)
    assert last is not None
    assert describe(last.sources[0].endOffset) == {f"{root}/a": 41, f"{root}/b": 16, f"{root}/c": 12}

    # Nothing new: nothing happens.
    batches = len(stream.batches)
    stream.run()
    assert len(stream.batches) == batches


def test_latest_means_when_the_query_was_started_first(
    spark: SparkSession, log_broker: LogBroker, root: str, tmp_path: Path
) -> None:
    publish(log_broker, f"{root}/a", 1, 30)
    stream = Stream(spark, log_broker.bulk_url, f"{root}/#", tmp_path)
    stream.run()
    assert stream.rows == []
    publish(log_broker, f"{root}/a", 31, 2)
    publish(log_broker, f"{root}/new", 1, 2)
    stream.run()
    assert stream.rows == [("a", 31, "31"), ("a", 32, "32"), ("new", 1, "1"), ("new", 2, "2")]


def test_a_gap_by_retention(spark: SparkSession, own_broker: Callable[..., LogBroker], tmp_path: Path) -> None:
    broker = own_broker('[[topics]]\ntopic = "#"\nretention = { max_records = 5 }\n')
    stream = Stream(spark, broker.bulk_url, "kept", tmp_path / "checkpoint")
    publish(broker, "kept", 1, 1)
    stream.run(startingOffsets="earliest")
    for number in range(2, 21):
        publish(broker, "kept", number, 1)
    with BlockingTopics(broker.bulk_url) as topics:
        wait_for("retention", lambda: topics.topics("kept")[0].first_index == 16)
    with pytest.raises(PySparkException, match=r"topic 'kept' has no record 2: .* the oldest there is 16.*failOnDataLoss"):
        stream.run()
    stream.run(failOnDataLoss="false")
    assert [index for _, index, _ in stream.rows] == [1, 16, 17, 18, 19, 20]


@contextlib.contextmanager
def running(stream: Stream, **options: str) -> Iterator[StreamingQuery]:
    query = stream.start(available_now=False, **options)
    try:
        yield query
    finally:
        query.stop()


def test_the_broker_is_killed(spark: SparkSession, own_broker: Callable[..., LogBroker], tmp_path: Path) -> None:
    """The query waits for it to come back, and goes on where it was."""
    broker = own_broker()
    stream = Stream(spark, broker.bulk_url, "a/#", tmp_path / "checkpoint")
    publish(broker, "a/x", 1, 100)
    with running(stream, startingOffsets="earliest", maxRecordsPerTrigger="60") as query:
        wait_for("rows", lambda: stream.rows, PATIENCE_SECONDS)
        broker.kill()
        broker.start()
        publish(broker, "a/x", 101, 100)
        wait_for("all rows", lambda: len(stream.rows) >= 200 or query.exception(), PATIENCE_SECONDS)
        assert query.exception() is None
    assert stream.rows == expected(x=200)


def test_python_workers_are_killed(spark: SparkSession, log_broker: LogBroker, root: str, tmp_path: Path) -> None:
    """In local mode Spark gives up when a task's process dies; started again, the query has neither lost nor doubled."""
    publish(log_broker, f"{root}/x", 1, 100)
    stream = Stream(spark, log_broker.bulk_url, f"{root}/#", tmp_path)
    options = {"startingOffsets": "earliest", "maxRecordsPerTrigger": "20"}
    jvm = psutil.Process(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    with running(stream, **options) as query:
        wait_for("rows", lambda: stream.rows, PATIENCE_SECONDS)
        workers = []
        for each in jvm.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                if "python" in each.name() and not each.children():
                    workers.append(each)
        assert workers
        for worker in workers:
            with contextlib.suppress(psutil.NoSuchProcess):
                worker.kill()
        publish(log_broker, f"{root}/x", 101, 100)
        wait_for("an end or all rows", lambda: not query.isActive or len(stream.rows) >= 200, PATIENCE_SECONDS)
    # Spark keeps idle workers for later, and learns that one is dead by giving it a task: a start for each of them.
    for _ in range(len(workers)):
        with contextlib.suppress(StreamingQueryException):
            stream.run(**options)
            break
    else:
        stream.run(**options)
    assert stream.rows == expected(x=200)


def test_a_password_is_in_no_checkpoint_plan_or_progress(
    spark: SparkSession, log_broker: LogBroker, root: str, tmp_path: Path
) -> None:
    secret = "s3cr3t-of-a-stream"
    url = log_broker.bulk_url.replace("://", f"://someone:{secret}@")
    publish(log_broker, f"{root}/a", 1, 5)
    frame = spark.readStream.format("nearcast").options(url=url, password=secret, startingOffsets="earliest").load(f"{root}/a")
    writer = frame.writeStream.format("nearcast").options(url=url, password=secret, checkpointLocation=str(tmp_path))
    query = writer.trigger(availableNow=True).start(f"{root}/copy")
    query.awaitTermination()
    java: Any = query._jsq
    shown = [str(query.lastProgress), java.explainInternal(True), java.lastProgress().json(), str(java.status())]
    shown += [path.read_text(errors="replace") for path in tmp_path.rglob("*") if path.is_file()]
    failing = spark.readStream.format("nearcast").options(url="nearcast://someone:" + secret + "@127.0.0.1:9").load("a")
    broken = failing.writeStream.format("noop").option("checkpointLocation", str(tmp_path / "other")).start()
    with pytest.raises(StreamingQueryException, match="nothing listens there") as caught:
        broken.awaitTermination()
    shown += [str(caught.value), str(broken.exception())]
    assert len(shown) > 8
    assert [text for text in shown if secret in text] == []


def test_the_driver_is_killed(spark: SparkSession, log_broker: LogBroker, tmp_path: Path) -> None:
    """In the middle of a batch; its JVM and all that belongs to it ends, and the next driver goes on from the checkpoint."""
    publish(log_broker, "copied/x", 1, 400)
    publish(log_broker, "copied/y", 1, 100)
    output = tmp_path / "output"
    command = [sys.executable, "-m", "tests.integration.spark.stream_copy", log_broker.bulk_url, str(tmp_path)]
    log = tmp_path / "driver.log"
    with log.open("ab") as file:
        driver = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True)
    try:
        wait_for("two batches", lambda: len(list(output.glob("*.json"))) >= 2 or driver.poll() is not None, PATIENCE_SECONDS)
    finally:
        family = psutil.Process(driver.pid).children(recursive=True)
        driver.kill()
        driver.wait()
        _, alive = psutil.wait_procs(family, timeout=60)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
    assert not alive, "the JVM and its workers notice that nobody is there"
    before = len(list(output.glob("*.json")))
    assert 2 <= before < 10, f"killed too late: {log.read_text()}"
    stream_copy.run(spark, log_broker.bulk_url, tmp_path)
    rows = [(topic.rpartition("/")[2], index, payload) for topic, index, payload in stream_copy.read_copies(output)]
    assert sorted(rows) == expected(x=400, y=100)

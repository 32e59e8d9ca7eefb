"""The sink: what is written is in the topics, exactly once, whatever is killed on the way."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

from nearcast.client.blocking_topics import BlockingTopics
from tests.integration.spark import sink_crash
from tests.integration.spark.conftest import LogBroker
from tests.integration.spark.publishing import publish, records

pytestmark = pytest.mark.integration


def write(df: DataFrame, broker: LogBroker, **options: str) -> None:
    df.write.format("nearcast").mode("append").option("url", broker.bulk_url).options(**options).save()


def payloads(broker: LogBroker, topic: str) -> list[str]:
    return [record.payload.decode() for record in records(broker, topic)]


def numbers(spark: SparkSession, count: int) -> DataFrame:
    return spark.range(0, count, 1, 3).select(F.col("id").cast("string").alias("payload"))


def test_rows_are_published_with_everything_a_message_has(spark: SparkSession, log_broker: LogBroker) -> None:
    rows = spark.createDataFrame(
        [
            ("sink/all/a", b"\x00", "image/png", "answers/here", b"\x07", 1, {"k": "v", "l": "w"}, 2, True),
            ("sink/all/b", b"", None, None, None, None, None, None, None),
        ],
        "topic string, payload binary, content_type string, response_topic string, correlation_data binary, "
        "payload_format tinyint, user_properties map<string,string>, qos int, retain boolean",
    )
    write(rows, log_broker)
    (first,) = records(log_broker, "sink/all/a")
    assert (first.payload, first.qos, first.retain) == (b"\x00", 2, True)
    assert (first.content_type, first.response_topic, first.correlation_data) == ("image/png", "answers/here", b"\x07")
    assert sorted(first.properties.user_properties or ()) == [("k", "v"), ("l", "w")]
    (second,) = records(log_broker, "sink/all/b")
    assert (second.payload, second.qos, second.retain, second.encoded_properties) == (b"", 1, False, b"")


def test_what_was_read_can_be_written_elsewhere(spark: SparkSession, log_broker: LogBroker) -> None:
    publish(log_broker, [("sink/copied", f"{number}") for number in range(50)])
    read = spark.read.format("nearcast").option("url", log_broker.bulk_url).load("sink/copied")
    write(read, log_broker, topic="sink/copy")
    assert payloads(log_broker, "sink/copy") == [f"{number}" for number in range(50)], "in order: it was one partition"


def test_a_producer_publishes_a_batch_once(spark: SparkSession, log_broker: LogBroker) -> None:
    for _ in range(2):
        write(numbers(spark, 20), log_broker, topic="sink/named", producer="nightly", batch="7")
    assert len(payloads(log_broker, "sink/named")) == 20
    write(numbers(spark, 5), log_broker, topic="sink/named", producer="nightly", batch="8")
    assert len(payloads(log_broker, "sink/named")) == 25
    for _ in range(2):
        write(numbers(spark, 20), log_broker, topic="sink/unnamed")
    assert len(payloads(log_broker, "sink/unnamed")) == 40, "without a name, every write is one of its own"


def test_rows_that_cannot_be_published(spark: SparkSession, log_broker: LogBroker) -> None:
    rows = spark.createDataFrame([("sink/valid", "1"), ("sink/+", "2"), (None, "3")], "topic string, payload string").coalesce(
        1
    )
    with pytest.raises(PySparkException, match=r"row 1 of partition 0 cannot be published \(topic 'sink/\+'\)"):
        write(rows, log_broker)
    with BlockingTopics(log_broker.bulk_url) as topics:
        assert topics.topics("sink/valid") == [], "all or nothing"
    write(rows, log_broker, onInvalid="skip")
    assert payloads(log_broker, "sink/valid") == ["1"]


def test_mistakes_are_told_before_anything_runs(spark: SparkSession, log_broker: LogBroker) -> None:
    with pytest.raises(PySparkException, match="column id is no part of a message"):
        write(spark.range(1).withColumn("payload", F.lit("x")), log_broker, topic="t")
    with pytest.raises(PySparkException, match="cannot be overwritten"):
        numbers(spark, 1).write.format("nearcast").mode("overwrite").option("url", log_broker.bulk_url).save("t")
    with pytest.raises(PySparkException, match="nothing listens there"):
        numbers(spark, 1).write.format("nearcast").mode("append").option("url", "nearcast://127.0.0.1:1").save("t")


def stream(spark: SparkSession, broker: LogBroker, directory: Path, topic: str) -> None:
    """One run over the files in a directory, one micro-batch for each."""
    source = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 1).parquet(str(directory / "in"))
    query = (
        source.writeStream.format("nearcast")
        .option("url", broker.bulk_url)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start(topic)
    )
    query.awaitTermination()


def write_files(spark: SparkSession, directory: Path, count: int, rows: int) -> None:
    (directory / "in").mkdir()
    frame = spark.range(0, count * rows, 1, count).select(F.col("id").cast("string").alias("payload"))
    frame.write.mode("append").parquet(str(directory / "in"))


def test_a_stream_publishes_each_row_once_across_runs_and_repeated_batches(
    spark: SparkSession, log_broker: LogBroker, tmp_path: Path
) -> None:
    write_files(spark, tmp_path, 3, 100)
    stream(spark, log_broker, tmp_path, "sink/stream")
    expected = Counter(str(number) for number in range(300))
    assert Counter(payloads(log_broker, "sink/stream")) == expected
    # What a driver leaves that was killed after the sink's commit and before Spark's own: Spark repeats the batch. And what
    # one leaves that was killed before the sink's commit, when its batch had more partitions than it has this time.
    (tmp_path / "checkpoint" / "commits" / "2").unlink()
    query = json.loads((tmp_path / "checkpoint" / "metadata").read_text())["id"]
    with BlockingTopics(log_broker.bulk_url) as topics:
        for partition in range(4):
            topics.stage(f"spark-query/{query}", 3, partition, 0, [("sink/stream", b"of a dead driver", None)])
    numbers(spark, 10).coalesce(1).write.mode("append").parquet(str(tmp_path / "in"))
    stream(spark, log_broker, tmp_path, "sink/stream")
    assert (tmp_path / "checkpoint" / "commits" / "2").exists(), "the batch was repeated"
    assert Counter(payloads(log_broker, "sink/stream")) == expected + Counter(str(number) for number in range(10))


def test_a_broker_killed_again_and_again_loses_and_doubles_nothing(
    spark: SparkSession, own_broker: Callable[[], LogBroker], tmp_path: Path
) -> None:
    broker = own_broker()
    write_files(spark, tmp_path, 8, 5_000)
    kills = [1, 12_000, 22_000]
    ended = threading.Event()

    def kill() -> None:
        for rows in kills:
            with BlockingTopics(broker.bulk_url) as topics:
                # As soon as so many rows are in, while the next batch is on its way.
                while not ended.is_set() and not any(state.next_index > rows for state in topics.topics("sink/killed")):
                    ended.wait(0.005)
            if ended.is_set():
                return
            broker.kill()
            broker.start()

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        stream(spark, broker, tmp_path, "sink/killed")
    finally:
        ended.set()
        killer.join()
    assert broker.launches == 1 + len(kills)
    assert Counter(payloads(broker, "sink/killed")) == Counter(str(number) for number in range(40_000))


@pytest.mark.slow
def test_a_driver_killed_between_the_two_commits_publishes_nothing_twice(
    spark: SparkSession, log_broker: LogBroker, tmp_path: Path
) -> None:
    """Each task of the driver that dies fails at its first attempt as well, after it has handed in rows."""
    write_files(spark, tmp_path, 3, 200)
    command = [sys.executable, "-m", "tests.integration.spark.sink_crash", log_broker.bulk_url, str(tmp_path)]
    killed = subprocess.run(command, capture_output=True, timeout=300, check=False)
    assert killed.returncode == -9, killed.stderr.decode()[-2_000:]
    commits = tmp_path / "checkpoint" / "commits"
    assert (commits / "0").exists()
    assert not (commits / "1").exists()
    assert len(payloads(log_broker, "once")) == 400, "batches 0 and 1 are committed at the broker"
    sink_crash.run(spark, log_broker.bulk_url, tmp_path, kill=False)
    assert (commits / "2").exists()
    assert Counter(payloads(log_broker, "once")) == Counter(str(number) for number in range(600))

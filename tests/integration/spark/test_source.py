"""Batch reads of the data source against a live broker: what is there comes, once, whole, however it is asked for."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - as all of Spark's users call it

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.mqtt.packets import Properties
from tests.integration.broker.running import wait_for
from tests.integration.spark.conftest import LogBroker

pytestmark = pytest.mark.integration

COUNTS = {"one": 1, "few": 7, "many": 400}
BURST = 40


@pytest.fixture(scope="module")
def root(log_broker: LogBroker) -> str:
    """Three topics of different sizes below a name that no other test uses; payload = index as text."""
    root = f"source/{uuid.uuid4().hex}"
    with BlockingTopics(log_broker.bulk_url) as topics:
        # Turn by turn and in bursts, so that blocks of many and of one record, of all topics, lie between each other.
        written = dict.fromkeys(COUNTS, 0)
        while written != COUNTS:
            for name, count in COUNTS.items():
                size = min(BURST, count - written[name])
                payloads = [str(number).encode() for number in range(written[name] + 1, written[name] + size + 1)]
                if size > 1 and written[name] % 80 == 0:
                    topics.publish_many(f"{root}/{name}", payloads)
                else:
                    for payload in payloads:
                        topics.publish(f"{root}/{name}", payload)
                written[name] += size
    return root


@pytest.fixture
def load(spark: SparkSession, log_broker: LogBroker, root: str) -> Callable[..., DataFrame]:
    def load(**options: str) -> DataFrame:
        given = {"url": log_broker.bulk_url, "topics": f"{root}/#"} | options
        return spark.read.format("nearcast").options(**given).load()

    return load


def found(frame: DataFrame) -> list[tuple[str, int, int]]:
    """(last level of the topic, index, payload as a number) of every row, sorted."""
    rows = frame.select("topic", "index", F.col("payload").cast("string").cast("int").alias("value")).collect()
    return sorted((row.topic.rpartition("/")[2], row["index"], row.value) for row in rows)


EVERYTHING = sorted((name, index, index) for name, count in COUNTS.items() for index in range(1, count + 1))


def test_every_record_once_however_it_is_divided(load: Callable[..., DataFrame]) -> None:
    assert found(load()) == EVERYTHING
    frame = load(minPartitions="5")
    assert frame.rdd.getNumPartitions() >= 5
    assert found(frame) == EVERYTHING


def test_all_columns_of_a_message(spark: SparkSession, log_broker: LogBroker) -> None:
    topic = f"columns/{uuid.uuid4().hex}"
    before = datetime.now(UTC)
    with BlockingTopics(log_broker.bulk_url, client_id="the-publisher") as topics:
        properties = Properties(
            content_type="application/json",
            response_topic="answers/1",
            correlation_data=b"\x00\x01",
            payload_format_indicator=1,
            user_properties=[("unit", "K"), ("unit", "C"), ("å", "ü")],
        )
        topics.publish(topic, b'{"x": 1}', properties=properties, qos=2)
        topics.publish(topic, b"\xff\x00", qos=0)
    full, plain = spark.read.format("nearcast").option("url", log_broker.bulk_url).load(topic).orderBy("index").collect()
    assert full.asDict() == {
        "topic": topic,
        "index": 1,
        "time": full.time,
        "publisher": "the-publisher",
        "qos": 2,
        "retain": False,
        "content_type": "application/json",
        "response_topic": "answers/1",
        "correlation_data": bytearray(b"\x00\x01"),
        "payload_format": 1,
        "payload": bytearray(b'{"x": 1}'),
        "user_properties": {"unit": "C", "å": "ü"},
    }
    # Spark gives times back as local ones, without a zone.
    assert before - timedelta(seconds=2) < full.time.astimezone(UTC) < datetime.now(UTC) + timedelta(seconds=2)
    assert (plain.payload, plain.content_type, plain.payload_format, plain.user_properties) == (b"\xff\x00", None, None, {})


def test_only_the_columns_that_are_asked_for(spark: SparkSession, log_broker: LogBroker, root: str) -> None:
    reader = spark.read.format("nearcast").option("url", log_broker.bulk_url).option("topics", f"{root}/many")
    frame = reader.schema("payload binary, index bigint").load()
    assert frame.columns == ["payload", "index"]
    assert frame.where("index > 10").agg(F.count("*"), F.sum(F.length("payload"))).collect()[0][0] == 390
    with pytest.raises(PySparkException, match="column payload is binary and not string: cast it after loading"):
        reader.schema("payload string").load().collect()
    with pytest.raises(PySparkException, match="column body is none of this source"):
        reader.schema("body binary").load().collect()


def test_start_and_end_by_index(load: Callable[..., DataFrame], root: str) -> None:
    many = f"{root}/many"
    assert found(load(topics=many, startingOffsets=f'{{"{many}": 390}}')) == [
        ("many", index, index) for index in range(390, 401)
    ]
    frame = load(startingOffsets=f'{{"{many}": 395, "{root}/few": "latest"}}', endingOffsets=f'{{"{many}": 398}}')
    assert found(frame) == [("many", 395, 395), ("many", 396, 396), ("many", 397, 397), ("one", 1, 1)]
    assert found(load(endingOffsets="earliest")) == []
    with pytest.raises(PySparkException, match="has no record 402: its next one gets index 401"):
        load(startingOffsets=f'{{"{many}": 402}}').collect()


def test_start_and_end_by_time(load: Callable[..., DataFrame]) -> None:
    times = {
        (row.topic, row["index"]): row.us for row in load().selectExpr("topic", "index", "unix_micros(time) us").collect()
    }
    middle = sorted(times.values())[len(times) // 2]
    text = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=middle)).isoformat()
    late, early = load(startingTime=text), load(endingTime=text)
    assert {(row.topic, row["index"]) for row in late.collect()} == {key for key, us in times.items() if us >= middle}
    assert {(row.topic, row["index"]) for row in early.collect()} == {key for key, us in times.items() if us < middle}


def test_filters_are_answered_exactly(load: Callable[..., DataFrame], root: str) -> None:
    rows = load().selectExpr("topic", "index", "time", "qos").collect()
    middle = sorted(row.time for row in rows)[len(rows) // 2]
    when = f"TIMESTAMP '{middle.isoformat(sep=' ')}'"
    many = f"{root}/many"
    conditions: dict[str, Callable[[Row], bool]] = {
        f"topic = '{root}/few' AND index <> 2": lambda row: row.topic == f"{root}/few" and row["index"] != 2,
        f"topic IN ('{root}/few', '{root}/one', 'elsewhere')": lambda row: row.topic != many,
        f"topic LIKE '{root}/m%' AND index IN (1, 3, 100000)": lambda row: row.topic == many and row["index"] in (1, 3),
        "index = 5 OR index > 9223372036854775806": lambda row: row["index"] == 5,
        "index > 5 AND index <= 9 AND topic <> 'a/#'": lambda row: 5 < row["index"] <= 9,
        f"time >= {when} AND index < 300": lambda row: row.time >= middle and row["index"] < 300,
        f"time > {when} AND qos = 1": lambda row: row.time > middle,
        f"time < {when}": lambda row: row.time < middle,
        f"time <= {when} AND topic = '{many}'": lambda row: row.time <= middle and row.topic == many,
        f"time = {when}": lambda row: row.time == middle,
        "topic = 'a/#'": lambda row: False,
        "payload IS NOT NULL AND content_type IS NOT NULL": lambda row: False,
    }
    for condition, expected in conditions.items():
        answer = load().where(condition).select("topic", "index").collect()
        assert sorted((row.topic, row["index"]) for row in answer) == sorted(
            (row.topic, row["index"]) for row in rows if expected(row)
        ), condition


def test_filters_reach_the_broker(load: Callable[..., DataFrame], root: str) -> None:
    """Three records are left of all: partitions of at most one row are three."""
    frame = load(rowsPerPartition="1").where(f"topic = '{root}/many' AND index BETWEEN 7 AND 9")
    assert frame.rdd.getNumPartitions() == 3
    newest = load().where(f"topic = '{root}/many'").agg(F.max("time")).collect()[0][0]
    late = load(rowsPerPartition="1").where(f"time > TIMESTAMP '{newest.isoformat(sep=' ')}' AND topic = '{root}/many'")
    assert late.rdd.getNumPartitions() <= 1, "times are asked of the broker, to the microsecond"
    assert late.collect() == []
    early = load().where("time >= TIMESTAMP '0001-01-01' AND time < TIMESTAMP '9999-12-31' AND topic <=> NULL").count()
    assert early == 0
    assert load().where("time >= TIMESTAMP '0001-01-02' AND time < TIMESTAMP '9999-12-30'").count() == len(EVERYTHING)


def test_many_topics_are_few_tasks(spark: SparkSession, log_broker: LogBroker) -> None:
    root = f"crowd/{uuid.uuid4().hex}"
    with BlockingTopics(log_broker.bulk_url) as topics:
        for number in range(300):
            topics.publish(f"{root}/{number}", str(number))
    frame = spark.read.format("nearcast").option("url", log_broker.bulk_url).load(f"{root}/+")
    assert frame.rdd.getNumPartitions() == 1
    assert frame.where("index = 1").select("topic").distinct().count() == 300


def test_nothing_there_is_an_empty_frame(load: Callable[..., DataFrame]) -> None:
    assert load(topics="nobody/ever/published/here/#").collect() == []


def test_what_retention_removed_is_told(spark: SparkSession, own_broker: Callable[..., LogBroker]) -> None:
    broker = own_broker('[[topics]]\ntopic = "#"\nretention = { max_records = 10 }\n')
    with BlockingTopics(broker.bulk_url) as topics:
        for number in range(1, 31):
            topics.publish("kept", str(number))
        wait_for("retention", lambda: topics.topics("kept")[0].first_index == 21)
    asked = spark.read.format("nearcast").option("url", broker.bulk_url).option("startingOffsets", '{"kept": 1}')
    with pytest.raises(PySparkException, match=r"topic 'kept' has no record 1: .* the oldest there is 21"):
        asked.load("kept").collect()
    assert found(asked.option("failOnDataLoss", "false").load("kept")) == [("kept", index, index) for index in range(21, 31)]


def test_mistakes_get_one_clear_line(spark: SparkSession, log_broker: LogBroker) -> None:
    reader = spark.read.format("nearcast")
    with pytest.raises(PySparkException, match="option url is missing"):
        reader.load("a").collect()
    with pytest.raises(PySparkException, match="unknown option topic for reading: did you mean topics"):
        reader.option("url", log_broker.bulk_url).option("topic", "a").load().collect()
    with pytest.raises(PySparkException, match="nothing listens there"):
        spark.read.format("nearcast").option("url", "nearcast://127.0.0.1:9").load("a").collect()


def test_a_password_is_shown_nowhere(spark: SparkSession, log_broker: LogBroker, capfd: pytest.CaptureFixture[str]) -> None:
    port = log_broker.port("bulk")
    secret = "s3cr3t-of-the-test"
    frame = (
        spark.read.format("nearcast")
        .option("url", f"nearcast://someone:{secret}@127.0.0.1:{port}")
        .option("password", secret)
        .load("nobody/#")
    )
    assert frame.collect() == []
    frame.explain(extended=True)
    shown = [str(frame._jdf.queryExecution().toString()), str(frame), *capfd.readouterr()]
    with pytest.raises(PySparkException) as caught:
        spark.read.format("nearcast").option("url", f"nearcast://someone:{secret}@127.0.0.1:9").load("a").collect()
    shown.append(str(caught.value))
    assert not any(secret in text for text in shown)

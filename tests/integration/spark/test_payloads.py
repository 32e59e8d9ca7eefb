"""Payload helpers on DataFrames, in a real Spark session."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.errors import PythonException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

from nearcast.errors import PipelineError
from nearcast.pipeline import payloads

pytestmark = pytest.mark.integration

READING = "sensor string, celsius double, at timestamp, tags map<string,string>, history array<struct<t:int,c:decimal(10,2)>>"
AVRO = """{"type": "record", "name": "Reading", "fields": [
    {"name": "sensor", "type": ["null", "string"]},
    {"name": "celsius", "type": ["null", "double"]},
    {"name": "at", "type": ["null", {"type": "long", "logicalType": "timestamp-micros"}]},
    {"name": "tags", "type": ["null", {"type": "map", "values": ["null", "string"]}]},
    {"name": "history", "type": ["null", {"type": "array", "items": ["null", {"type": "record", "name": "Past", "fields": [
        {"name": "t", "type": ["null", "int"]},
        {"name": "c", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 10, "scale": 2}]}]}]}]}]}"""


@pytest.fixture(scope="module")
def readings(spark: SparkSession) -> DataFrame:
    return spark.range(200).select(
        F.concat(F.lit("sensors/"), F.col("id") % 3).alias("topic"),
        F.col("id").alias("index"),
        F.concat(F.lit("s"), F.col("id")).alias("sensor"),
        F.expr("if(id % 7 = 0, null, id / 3.0d)").alias("celsius"),
        F.expr("timestamp_micros(1700000000123456 + id)").alias("at"),
        F.expr("if(id % 5 = 0, null, map('room', concat('r', id)))").alias("tags"),
        F.expr(
            "transform(sequence(0, cast(id % 4 as int)), i -> named_struct('t', i, 'c', cast(id / 100 as decimal(10, 2))))"
        ).alias("history"),
    )


FIELDS = ["sensor", "celsius", "at", "tags", "history"]
CODINGS: dict[str, tuple[Callable[[DataFrame], DataFrame], Callable[[DataFrame], DataFrame]]] = {
    "json": (lambda df: payloads.to_json(df, FIELDS), lambda df: payloads.from_json(df, READING, mode="fail")),
    "msgpack": (lambda df: payloads.to_msgpack(df, FIELDS), lambda df: payloads.from_msgpack(df, READING, mode="fail")),
    "cbor": (lambda df: payloads.to_cbor(df, FIELDS), lambda df: payloads.from_cbor(df, READING, mode="fail")),
    "avro": (lambda df: payloads.to_avro(df, AVRO), lambda df: payloads.from_avro(df, AVRO, mode="fail")),
    "avro single objects": (
        lambda df: payloads.to_avro(df, AVRO, framing="single"),
        lambda df: payloads.from_avro(df, AVRO, mode="fail", framing="single"),
    ),
}


@pytest.mark.parametrize("coding", CODINGS)
def test_columns_become_payloads_and_columns_again(readings: DataFrame, coding: str) -> None:
    pack, unpack = CODINGS[coding]
    packed = pack(readings)
    assert packed.columns == ["topic", "index", "payload", "content_type"]
    unpacked = unpack(packed)
    assert unpacked.columns == ["topic", "index", "content_type", *FIELDS]
    assert unpacked.drop("content_type").sort("index").collect() == readings.sort("index").collect()


def messages(spark: SparkSession, *contents: bytes | None) -> DataFrame:
    rows = [("t", number, content) for number, content in enumerate(contents)]
    return spark.createDataFrame(rows, "topic string, index bigint, payload binary")


def test_corrupt_payloads_are_kept_with_the_reason_dropped_or_fail_the_query(spark: SparkSession) -> None:
    mixed = messages(spark, b'{"n": 1}', b'{"n": "x"}', None, b"\xff", b'{"m": 2}')
    kept = payloads.from_json(mixed, "n int").sort("index").collect()
    assert [row.n for row in kept] == [1, None, None, None, None]
    assert [row.corrupt and bytes(row.corrupt.payload) for row in kept] == [None, b'{"n": "x"}', None, b"\xff", None]
    assert "Expected `int | null`, got `str` - at `$.n`" in kept[1].corrupt.reason
    assert payloads.from_json(mixed, "n int", corrupt=None).columns == ["topic", "index", "n"]
    dropped = payloads.from_json(mixed, "n int", mode="drop").sort("index").collect()
    assert [(row["index"], row.n) for row in dropped] == [(0, 1), (2, None), (4, None)]
    with pytest.raises(PythonException, match=r"corrupt json payload of topic 't' index 1: Expected `int \| null`"):
        # In one task: of two, either could be the first to fail.
        payloads.from_json(mixed.coalesce(1), "n int", mode="fail").collect()


def test_a_payload_may_be_one_value_and_go_into_one_column(spark: SparkSession) -> None:
    numbers = payloads.from_json(messages(spark, b"21.5", b"{}"), "double", mode="drop")
    assert [tuple(row) for row in numbers.collect()] == [("t", 0, 21.5)]
    gathered = payloads.from_json(messages(spark, b'{"topic": "x"}'), "topic string", into="body")
    assert gathered.select("topic", "body.topic").collect()[0] == ("t", "x")


def test_strings_are_payloads_too(spark: SparkSession) -> None:
    text = spark.createDataFrame([('{"n": 1}',)], "payload string")
    assert payloads.from_json(text, "n int", mode="fail").collect()[0].n == 1


def test_a_filter_on_a_field_decodes_once(spark: SparkSession) -> None:
    plan = payloads.from_json(messages(spark, b"1"), "double").filter("value > 1")
    text = plan._jdf.queryExecution().executedPlan().toString()
    assert text.count("ArrowEvalPython") == 1


def test_misuse_is_one_clear_line(spark: SparkSession) -> None:
    rows = messages(spark, b"1")
    with pytest.raises(PipelineError, match="columns topic would be there twice"):
        payloads.from_json(rows, "topic string")
    with pytest.raises(PipelineError, match="no column 'body' to decode; there are topic, index, payload"):
        payloads.from_json(rows, "n int", "body")
    with pytest.raises(PipelineError, match="mode is 'permissive', 'drop' or 'fail', not 'strict'"):
        payloads.from_json(rows, "n int", mode="strict")  # type: ignore[arg-type]
    with pytest.raises(PipelineError, match="'n int int' is no schema"):
        payloads.from_json(rows, "n int int")
    with pytest.raises(PipelineError, match="cannot have the type interval"):
        payloads.from_msgpack(rows, "n interval day to second")
    with pytest.raises(PipelineError, match="there is no column x to encode"):
        payloads.to_json(rows, ["x"])
    with pytest.raises(PipelineError, match="to_avro packs columns into a record"):
        payloads.to_avro(rows, '"int"')


def test_helpers_work_on_streams(spark: SparkSession, tmp_path: Path) -> None:
    source = tmp_path / "in"
    messages(spark, b'{"n": 1}', b"?", b'{"n": 3}').write.parquet(str(source))
    stream = spark.readStream.schema("topic string, index bigint, payload binary").parquet(str(source))
    packed = payloads.to_json(payloads.from_json(stream, "n int", mode="drop"), ["index", "n"])
    query = packed.writeStream.format("memory").queryName("helpers").trigger(availableNow=True).start()
    query.awaitTermination()
    found = sorted(bytes(row.payload) for row in spark.sql("select payload from helpers").collect())
    assert [json.loads(payload) for payload in found] == [{"index": 0, "n": 1}, {"index": 2, "n": 3}]

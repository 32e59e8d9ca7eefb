"""What the sink takes: columns, rows, options; and rows that can be sent again. Publishing is tested in tests/integration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark

from nearcast.client.records import Record
from nearcast.errors import PipelineError
from nearcast.pipeline import spool
from nearcast.pipeline.sink import parse_write
from nearcast.pipeline.sink_rows import Message, Messages, check_schema
from nearcast.pipeline.spool import Spool
from nearcast.topiclog import blocks

URL = {"url": "nearcast://localhost"}


def schema(**columns: spark.DataType) -> spark.StructType:
    return spark.StructType([spark.StructField(name, data_type) for name, data_type in columns.items()])


TEXT, BYTES = spark.StringType(), spark.BinaryType()


def test_rows_that_were_read_can_be_written() -> None:
    from nearcast.pipeline.source import SCHEMA

    check_schema(SCHEMA, None)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"topic": TEXT}, "no column payload"),
        ({"payload": BYTES}, "no column topic"),
        ({"topic": BYTES, "payload": BYTES}, "column topic is binary and has to be string"),
        ({"topic": TEXT, "payload": spark.LongType()}, "column payload is bigint and has to be binary or string"),
        ({"topic": TEXT, "payload": BYTES, "celsius": spark.DoubleType()}, "column celsius is no part of a message"),
        (
            {"topic": TEXT, "payload": BYTES, "user_properties": spark.MapType(TEXT, spark.LongType())},
            "user_properties is map<string,bigint> and has to be map<string,string>",
        ),
    ],
)
def test_other_columns_are_refused(columns: dict[str, spark.DataType], message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        check_schema(schema(**columns), None)


def test_the_option_topic_stands_in_for_the_column() -> None:
    check_schema(schema(payload=TEXT), "a")
    assert messages({"payload": ["x", "y"]}, topic="a") == [("a", b"x", b"", 1), ("a", b"y", b"", 1)]
    assert messages({"topic": ["b"], "payload": ["x"]}, topic="a") == [("a", b"x", b"", 1)]


def messages(columns: dict[str, list[Any]], **options: Any) -> list[Message]:
    return list(maker(**options).of([pa.RecordBatch.from_pydict(columns)]))


def maker(**options: Any) -> Messages:
    chosen: dict[str, Any] = {"topic": None, "qos": 1, "max_message_bytes": 1_000, "skip_invalid": False} | options
    return Messages(3, **chosen)


def test_rows_become_messages_by_topic_in_their_order() -> None:
    found = messages(
        {"topic": ["b", "a", "b"], "payload": [b"1", b"2", b"3"], "qos": [0, None, 2], "retain": [True, None, False]}
    )
    assert found == [("b", b"1", b"", blocks.RETAIN), ("b", b"3", b"", 2), ("a", b"2", b"", 1)]


def test_properties_are_those_of_mqtt() -> None:
    maps = pa.array([[("k", "v"), ("k2", "é")], None], pa.map_(pa.string(), pa.string()))
    batch = pa.RecordBatch.from_arrays(
        [
            pa.array(["t", "t"]),
            pa.array([b"1", b"2"]),
            pa.array(["application/json", "application/json"]),
            pa.array(["answers", None]),
            pa.array([b"\0\1", None]),
            pa.array([1, None], pa.int8()),
            maps,
        ],
        names=["Topic", "payload", "content_type", "response_topic", "correlation_data", "payload_format", "user_properties"],
    )
    first, second = maker().of([batch])
    properties = Record("t", 1, 0, "", 1, first[2], b"").properties
    assert properties.content_type == "application/json"
    assert properties.response_topic == "answers"
    assert properties.correlation_data == b"\0\1"
    assert properties.payload_format_indicator == 1
    assert properties.user_properties == [("k", "v"), ("k2", "é")]
    assert Record("t", 1, 0, "", 1, second[2], b"").properties.content_type == "application/json"


INVALID: list[tuple[dict[str, list[Any]], str]] = [
    ({"topic": [None], "payload": [b""]}, "its topic is null"),
    ({"topic": ["a/#"], "payload": [b""]}, r"\(topic 'a/#'\): a topic name must not contain \+ or #"),
    ({"topic": [""], "payload": [b""]}, "must not be empty"),
    ({"topic": ["a\0"], "payload": [b""]}, "without U\\+0000"),
    ({"topic": ["x" * 65_536], "payload": [b""]}, "at most 65,535 bytes"),
    ({"topic": ["a"], "payload": [None]}, "payload is null"),
    ({"topic": ["a"], "payload": [b"x" * 1_000]}, "it has 1,001 bytes, and 1,000 are allowed"),
    ({"topic": ["a"], "payload": [b""], "qos": [3]}, "its qos is not 0, 1 or 2"),
    ({"topic": ["a"], "payload": [b""], "response_topic": ["+"]}, "its response_topic cannot be used"),
    ({"topic": ["a"], "payload": [b""], "content_type": ["\0"]}, "its properties cannot be sent"),
    ({"topic": ["a"], "payload": [b""], "payload_format": [7]}, "its properties cannot be sent"),
    ({"topic": ["a"], "payload": [b""], "correlation_data": [bytes(65_536)]}, "its properties cannot be sent"),
]


@pytest.mark.parametrize(("columns", "fault"), INVALID, ids=[fault for _, fault in INVALID])
def test_a_row_that_cannot_be_published_is_named_or_skipped(columns: dict[str, list[Any]], fault: str) -> None:
    good = {"topic": ["a"], "payload": [b"good"]}
    for maximum in ({"max_message_bytes": 100_000},) if "65" in fault or "sent" in fault else ({},):
        making = maker(**maximum)
        with pytest.raises(PipelineError, match=f"row 1 of partition 3 cannot be published.*{fault}.*onInvalid"):
            list(making.of([pa.RecordBatch.from_pydict(good), pa.RecordBatch.from_pydict(columns)]))
        making = maker(skip_invalid=True, **maximum)
        batches = [pa.RecordBatch.from_pydict(columns), pa.RecordBatch.from_pydict(good)]
        assert [message[1] for message in making.of(batches)] == [b"good"]
        assert making.skipped == 1


def test_a_user_property_without_value_is_refused() -> None:
    batch = pa.RecordBatch.from_arrays(
        [pa.array(["t"]), pa.array([b"1"]), pa.array([[("k", None)]], pa.map_(pa.string(), pa.string()))],
        names=["topic", "payload", "user_properties"],
    )
    with pytest.raises(PipelineError, match="its user property 'k' is null"):
        list(maker().of([batch]))


def test_options() -> None:
    options = parse_write(URL | {"TOPIC": "a", "qos": "0", "oninvalid": "Skip", "maxMessageBytes": "10"}, streaming=True)
    assert (options.topic, options.qos, options.skip_invalid, options.max_message_bytes) == ("a", 0, True, 10)
    assert parse_write(URL | {"path": "alerts", "checkpointLocation": "x"}, streaming=True).topic == "alerts"
    options = parse_write(URL | {"producer": "nightly", "batch": "7"}, streaming=False)
    assert (options.producer, options.batch) == ("nightly", 7)


@pytest.mark.parametrize(
    ("options", "streaming", "message"),
    [
        ({"topic": "a/#"}, False, "option topic: 'a/#': a topic name must not contain"),
        ({"qos": "3"}, False, "option qos must be a whole number from 0 to 2, not '3'"),
        ({"onInvalid": "ignore"}, False, "option onInvalid must be fail or skip"),
        ({"maxMessageBytes": "1m"}, False, "option maxMessageBytes must be a whole number"),
        ({"producer": "x"}, True, "option producer is for df.write"),
        ({"batch": "1"}, False, "give the option producer too"),
        ({"producer": ""}, False, "option producer must have 1 to"),
        ({"topics": "a"}, False, "unknown option topics for writing: did you mean topic"),
    ],
)
def test_wrong_options_are_one_clear_line(options: dict[str, str], streaming: bool, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        parse_write(URL | options, streaming=streaming)


@given(sizes=st.lists(st.integers(0, 300), max_size=12), stops=st.lists(st.integers(0, 12), max_size=4))
@settings(max_examples=50, deadline=None)
def test_a_spool_gives_all_batches_again_wherever_the_last_pass_ended(sizes: list[int], stops: list[int]) -> None:
    one_column = pa.schema([("n", pa.int64())])
    batches = [pa.RecordBatch.from_pydict({"n": [number] * size}, one_column) for number, size in enumerate(sizes)]
    kept = spool.MEMORY_BYTES
    spool.MEMORY_BYTES = 2_000  # some of it goes to a file
    try:
        with Spool(iter(batches)) as spooled:
            for stop in stops:
                taken: Iterator[pa.RecordBatch] = spooled.batches()
                for expected in batches[:stop]:
                    assert next(taken).equals(expected)
            assert list(spooled.batches()) == batches
            assert list(spooled.batches()) == batches
    finally:
        spool.MEMORY_BYTES = kept

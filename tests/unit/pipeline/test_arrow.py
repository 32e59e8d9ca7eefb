"""Blocks to Arrow columns: every field, any mixture of blocks, ranges that must come whole, and bytes that are none."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from nearcast.errors import NearcastError, RecordUnavailable, RemoteProtocolError
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.properties import encode_properties
from nearcast.mqtt.wire import PUBLISH
from nearcast.pipeline import arrow
from nearcast.pipeline.arrow import COLUMNS, Extractor
from nearcast.pipeline.source import SCHEMA
from nearcast.topiclog import blocks

ALL = pa.schema(list(COLUMNS.items()))
TIME_US = 1_780_000_000_123_456


def block(
    topic: int, first_index: int, payloads: list[bytes], publisher: bytes = b"p", properties: bytes = b"", flags: int = 0
) -> bytes:
    return blocks.encode(blocks.RECORDS, flags, topic, first_index, TIME_US + first_index, publisher, properties, payloads)


def encoded(**properties: object) -> bytes:
    found = encode_properties(Properties(**properties), PUBLISH)  # type: ignore[arg-type]
    assert found[0] < 0x80, "one byte of length"
    return found[1:]


def raise_it(error: RecordUnavailable) -> None:
    raise error


def rows(data: bytes, names: Mapping[int, str], ranges: Mapping[str, tuple[int, int]]) -> list[dict[str, object]]:
    extractor = Extractor(ALL, ranges, raise_it)
    found = [row for batch in extractor.extract(data, names) for row in batch.to_pylist()]
    extractor.finish()
    return found


def test_the_columns_are_those_of_the_spark_schema_exactly() -> None:
    assert to_arrow_schema(SCHEMA, timezone="UTC").equals(ALL)


def test_every_column() -> None:
    properties = encoded(
        content_type="text/plain",
        response_topic="answers",
        correlation_data=b"\x00\xff",
        payload_format_indicator=1,
        user_properties=[("unit", "K"), ("unit", "C"), ("at", "roof")],
    )
    data = block(4, 17, [b"21.5", b""], b"probe-1", properties, flags=2 | blocks.RETAIN)
    data += block(4, 19, [b"x"], "prøbe".encode())
    first, second, third = rows(data, {4: "räume/a"}, {"räume/a": (17, 20)})
    assert first == {
        "topic": "räume/a",
        "index": 17,
        "time": first["time"],
        "publisher": "probe-1",
        "qos": 2,
        "retain": True,
        "content_type": "text/plain",
        "response_topic": "answers",
        "correlation_data": b"\x00\xff",
        "payload_format": 1,
        "payload": b"21.5",
        "user_properties": [("unit", "C"), ("at", "roof")],
    }
    assert pa.scalar(first["time"], arrow.TIMESTAMP).value == TIME_US + 17
    assert (second["index"], second["payload"], second["publisher"]) == (18, b"", "probe-1")
    assert third["publisher"] == "prøbe"
    assert (third["qos"], third["retain"], third["content_type"], third["user_properties"]) == (0, False, None, [])


def test_blocks_that_are_no_records_are_passed_over() -> None:
    data = blocks.encode(blocks.TOPIC, 0, 1, 1, 0, b"", b"a", []) + block(1, 1, [b"x"])
    data += blocks.encode(blocks.MARK, 0, 0, 0, 0, b"", b"\x90", [])
    assert [row["payload"] for row in rows(data, {1: "a"}, {"a": (1, 2)})] == [b"x"]
    assert rows(blocks.encode(blocks.TOPIC, 0, 1, 1, 0, b"", b"a", []), {}, {}) == []
    assert rows(b"", {}, {}) == []


def test_only_what_was_asked_for_is_given() -> None:
    data = block(1, 1, [b"1", b"2", b"3", b"4"]) + block(2, 1, [b"other"]) + block(3, 8, [b"8"])
    found = rows(data, {1: "a", 2: "not asked for", 3: "c"}, {"c": (8, 9), "a": (2, 4)})
    assert [(row["topic"], row["index"], row["payload"]) for row in found] == [("a", 2, b"2"), ("a", 3, b"3"), ("c", 8, b"8")]


def test_a_stream_that_was_taken_up_again_repeats_nothing() -> None:
    extractor = Extractor(ALL, {"a": (1, 7)}, raise_it)
    first = list(extractor.extract(block(1, 1, [b"1", b"2", b"3"]), {1: "a"}))
    assert extractor.remaining == {"a": (4, 7)}
    # Another connection, other numbers; the block holds more than what is still wanted.
    second = list(extractor.extract(block(9, 2, [b"2", b"3", b"4", b"5", b"6", b"7"]), {9: "a"}))
    extractor.finish()
    assert [index for batch in first + second for index in batch.column("index").to_pylist()] == [1, 2, 3, 4, 5, 6]


def test_numbers_belong_to_a_connection() -> None:
    extractor = Extractor(ALL, {"a": (1, 3), "b": (1, 3)}, raise_it)
    before = list(extractor.extract(block(1, 1, [b"a1"]) + block(2, 1, [b"b1"]), {1: "a", 2: "b"}))
    after = list(extractor.extract(block(1, 2, [b"b2"]) + block(2, 2, [b"a2"]), {1: "b", 2: "a"}))
    extractor.finish()
    pairs = [(row["topic"], row["payload"]) for batch in before + after for row in batch.to_pylist()]
    assert pairs == [("a", b"a1"), ("b", b"b1"), ("b", b"b2"), ("a", b"a2")]


@pytest.mark.parametrize(
    ("data", "missing", "oldest"),
    [
        (block(1, 3, [b"3", b"4", b"5"]), 1, 3),
        (block(1, 1, [b"1"]) + block(1, 3, [b"3", b"4", b"5"]), 2, 3),
        (block(1, 1, [b"1", b"2"]), 3, 6),
        (b"", 1, 6),
    ],
)
def test_a_gap_is_noticed(data: bytes, missing: int, oldest: int) -> None:
    with pytest.raises(RecordUnavailable) as caught:
        rows(data, {1: "a"}, {"a": (1, 6)})
    assert (caught.value.topic, caught.value.index, caught.value.first_index) == ("a", missing, oldest)


def test_a_gap_of_one_topic_among_others_is_noticed() -> None:
    lost: list[RecordUnavailable] = []
    extractor = Extractor(ALL, {"a": (1, 4), "b": (1, 4)}, lost.append)
    data = block(1, 1, [b"1"]) + block(2, 1, [b"1", b"2"]) + block(1, 3, [b"3"]) + block(2, 3, [b"3"])
    assert sum(batch.num_rows for batch in extractor.extract(data, {1: "a", 2: "b"})) == 5
    extractor.finish()
    assert [(each.topic, each.index, each.first_index) for each in lost] == [("a", 2, 3)]


def test_a_repetition_inside_a_stream_is_noticed() -> None:
    with pytest.raises(RecordUnavailable):
        rows(block(1, 1, [b"1", b"2"]) + block(1, 2, [b"2", b"3"]), {1: "a"}, {"a": (1, 4)})


def test_large_blocks_come_in_several_batches() -> None:
    count = arrow.MAX_ROWS + 10
    extractor = Extractor(pa.schema([("payload", pa.binary()), ("index", pa.int64())]), {"a": (1, count + 1)}, raise_it)
    batches = list(extractor.extract(block(1, 1, [b"%d" % number for number in range(count)]), {1: "a"}))
    assert [batch.num_rows for batch in batches] == [arrow.MAX_ROWS, 10]
    assert batches[1].column("payload").to_pylist() == [b"%d" % number for number in range(arrow.MAX_ROWS, count)]
    for batch in batches:
        batch.validate(full=True)


def test_many_topics_with_high_numbers() -> None:
    topics = {number * 1_000: f"t/{number}" for number in range(200)}
    data = b"".join(block(number, 5, [name.encode()]) for number, name in topics.items())
    found = rows(data, topics, dict.fromkeys(reversed(topics.values()), (5, 6)))
    assert [row["payload"] for row in found] == [str(row["topic"]).encode() for row in found]
    assert len(found) == 200


def test_a_number_without_a_name_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="topic number 7"):
        rows(block(7, 1, [b"x"]), {}, {"a": (1, 2)})


WHOLE = block(1, 1, [b"abc", b"defg"], b"someone", encoded(content_type="x")) + block(1, 3, [b"z"])


def test_damage_is_noticed() -> None:
    whole = WHOLE
    for position in range(len(whole)):
        for value in (0x01, 0xFF):
            damaged = bytearray(whole)
            damaged[position] = value
            if damaged != whole:
                with pytest.raises(RemoteProtocolError):
                    rows(bytes(damaged), {1: "a"}, {"a": (1, 4)})
    for length in range(len(whole)):
        with pytest.raises(NearcastError):
            rows(whole[:length], {1: "a"}, {"a": (1, 4)})


def test_well_checksummed_nonsense_raises_and_never_crashes() -> None:
    """A broker that is not ours, or has gone mad: whatever it says, no memory outside of what it sent is touched."""
    first = WHOLE[: int.from_bytes(WHOLE[:4], "little")]
    for position in range(8, len(first)):
        for value in (0x00, 0x01, 0x7F, 0xFF):
            changed = bytearray(first)
            changed[position] = value
            changed[4:8] = zlib.crc32(changed[8:]).to_bytes(4, "little")
            extractor = Extractor(ALL, {"a": (1, 3)}, lambda _: None)
            try:
                batches = list(extractor.extract(bytes(changed), {1: "a"}))
            except NearcastError:
                continue
            for batch in batches:
                # All but the publisher, whose text is passed on as it is.
                batch.drop_columns(["publisher"]).validate(full=True)

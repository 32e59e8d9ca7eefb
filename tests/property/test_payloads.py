"""Payload formats against plain Python: what is encoded comes back as the same columns, and garbage only gives reasons."""

from __future__ import annotations

import datetime
import io
import json
import string
from decimal import Decimal
from typing import Any

import cbor2
import fastavro
import msgspec
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import types as spark

from nearcast.pipeline.avro_schemas import AvroSchema
from nearcast.pipeline.payload_columns import arrow_type
from nearcast.pipeline.payload_formats import Format, avro_decoder, avro_encoder, decoder, encode_rows, encoder

MICROSECOND = datetime.timedelta(microseconds=1)
FORMATS: list[Format] = ["json", "msgpack", "cbor"]

INSTANTS = st.integers(-(2**51), 2**52).map(lambda us: datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + us * MICROSECOND)
"""The years 1898 to 2112, to the microsecond."""
NAMES = st.text(string.ascii_letters + "_é .", min_size=1, max_size=8)


def integers(bits: int) -> st.SearchStrategy[int]:
    return st.integers(-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


LEAVES: list[tuple[spark.DataType, st.SearchStrategy[Any]]] = [
    (spark.BooleanType(), st.booleans()),
    (spark.ByteType(), integers(8)),
    (spark.ShortType(), integers(16)),
    (spark.IntegerType(), integers(32)),
    (spark.LongType(), integers(64)),
    (spark.FloatType(), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    (spark.DoubleType(), st.floats(allow_nan=False, allow_infinity=False)),
    (spark.StringType(), st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    (spark.BinaryType(), st.binary(max_size=20)),
    (spark.DecimalType(20, 4), st.decimals(-(10**15), 10**15, places=4)),
    (spark.DateType(), st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    (spark.TimestampType(), INSTANTS),
]


@st.composite
def typed(draw: st.DrawFn, depth: int = 2) -> tuple[spark.DataType, st.SearchStrategy[Any]]:
    """A Spark type and the values it takes."""
    kinds = ["leaf"] if depth == 0 else ["leaf", "leaf", "struct", "array", "map"]
    kind = draw(st.sampled_from(kinds))
    if kind == "leaf":
        leaf: tuple[spark.DataType, st.SearchStrategy[Any]] = draw(st.sampled_from(LEAVES))
        return leaf
    if kind == "array":
        element, values = draw(typed(depth - 1))
        nullable = draw(st.booleans())
        return spark.ArrayType(element, nullable), st.lists(or_null(values, nullable), max_size=4)
    if kind == "map":
        value, values = draw(typed(depth - 1))
        nullable = draw(st.booleans())
        keys = st.text(string.ascii_letters, max_size=5)
        return spark.MapType(spark.StringType(), value, nullable), st.dictionaries(keys, or_null(values, nullable), max_size=4)
    return draw(structs(depth))


@st.composite
def structs(draw: st.DrawFn, depth: int = 2) -> tuple[spark.StructType, st.SearchStrategy[Any]]:
    fields = []
    values = {}
    for name in draw(st.lists(NAMES, min_size=1, max_size=4, unique=True)):
        data_type, strategy = draw(typed(depth - 1))
        nullable = draw(st.booleans())
        fields.append(spark.StructField(name, data_type, nullable))
        values[name] = or_null(strategy, nullable)
    return spark.StructType(fields), st.fixed_dictionaries(values)


def or_null(values: st.SearchStrategy[Any], nullable: bool) -> st.SearchStrategy[Any]:
    return st.none() | values if nullable else values


def plain(array: pa.Array) -> Any:
    return array.to_pylist(maps_as_pydicts="strict")


def plain_encode(kind: Format, value: Any) -> bytes:
    """A row as bytes, without any of our code."""
    if kind == "json":
        return msgspec.json.encode(value)
    if kind == "msgpack":
        return msgspec.msgpack.encode(value)
    return cbor2.dumps(value)


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_decoding_gives_what_python_encoded(kind: Format, data: st.DataObject) -> None:
    schema, values = data.draw(structs())
    rows = data.draw(st.lists(values, max_size=6))
    array, reasons = decoder(kind, schema).decode([plain_encode(kind, row) for row in rows])
    assert reasons == {}
    assert array.type == arrow_type(schema)
    array.validate(full=True)
    assert plain(array) == rows


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_encoding_gives_what_is_decoded_again(kind: Format, data: st.DataObject) -> None:
    schema, values = data.draw(structs())
    rows = data.draw(st.lists(values, max_size=6))
    reading = decoder(kind, schema)
    array, _ = reading.decode([plain_encode(kind, row) for row in rows])
    again, reasons = reading.decode(encode_rows(array, encoder(kind)).to_pylist())
    assert reasons == {}
    assert again.equals(array)


@pytest.mark.parametrize("kind", FORMATS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_garbage_among_good_payloads_is_all_that_is_missing(kind: Format, data: st.DataObject) -> None:
    """Cut, spoilt and random payloads never raise; a good neighbour is never touched; what is given a reason is null."""
    schema, values = data.draw(structs())
    good = plain_encode(kind, data.draw(values))
    position = data.draw(st.integers(0, max(0, len(good) - 1)))
    bad = data.draw(
        st.sampled_from([good[:position], good[:position] + b"\xff" + good[position + 1 :], good + b"\x01"])
        | st.binary(max_size=40)
    )
    reading = decoder(kind, schema)
    expected, _ = reading.decode([good])
    array, reasons = reading.decode([good, bad, None, good])
    array.validate(full=True)
    assert array[0].equals(expected[0])
    assert array[3].equals(expected[0])
    assert not array[2].is_valid
    assert set(reasons) <= {1}
    assert array[1].is_valid == (1 not in reasons)
    if bad == good + b"\x01":
        assert 1 in reasons, "something follows the payload"


AVRO_LEAVES: list[tuple[Any, st.SearchStrategy[Any]]] = [
    ("boolean", st.booleans()),
    ("int", integers(32)),
    ("long", integers(64)),
    ("float", st.floats(width=32, allow_nan=False)),
    ("double", st.floats(allow_nan=False)),
    ("string", st.text(st.characters(exclude_categories=["Cs"]), max_size=20)),
    ("bytes", st.binary(max_size=20)),
    ({"type": "int", "logicalType": "date"}, st.dates(datetime.date(1900, 1, 1), datetime.date(2200, 1, 1))),
    ({"type": "long", "logicalType": "timestamp-micros"}, INSTANTS),
    ({"type": "bytes", "logicalType": "decimal", "precision": 20, "scale": 4}, st.decimals(-(10**15), 10**15, places=4)),
]


@st.composite
def avro_records(draw: st.DrawFn, depth: int = 2) -> tuple[Any, st.SearchStrategy[Any]]:
    fields = []
    values = {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=4, unique=True)):
        schema, strategy = draw(avro_types(depth - 1))
        if draw(st.booleans()):
            schema, strategy = ["null", schema], st.none() | strategy
        fields.append({"name": name, "type": schema})
        values[name] = strategy
    number = draw(st.integers(0, 10**9))
    return {"type": "record", "name": f"r{number}", "fields": fields}, st.fixed_dictionaries(values)


@st.composite
def avro_types(draw: st.DrawFn, depth: int) -> tuple[Any, st.SearchStrategy[Any]]:
    kind = draw(st.sampled_from(["leaf"] if depth == 0 else ["leaf", "record", "array", "map"]))
    if kind == "leaf":
        leaf: tuple[Any, st.SearchStrategy[Any]] = draw(st.sampled_from(AVRO_LEAVES))
        return leaf
    if kind == "record":
        return draw(avro_records(depth))
    schema, values = draw(avro_types(depth - 1))
    if kind == "array":
        return {"type": "array", "items": schema}, st.lists(values, max_size=4)
    return {"type": "map", "values": schema}, st.dictionaries(st.text(string.ascii_letters, max_size=5), values, max_size=4)


def names_differ(schema: Any) -> bool:
    names = [part for part in json.dumps(schema).split('"') if part.startswith("r") and part[1:].isdigit()]
    return len(names) == len(set(names))


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_avro_data_come_back(data: st.DataObject) -> None:
    raw, values = data.draw(avro_records().filter(lambda drawn: names_differ(drawn[0])))
    rows = data.draw(st.lists(values, max_size=5))
    schema = AvroSchema(json.dumps(raw))
    payloads = []
    for row in rows:
        target = io.BytesIO()
        fastavro.schemaless_writer(target, fastavro.parse_schema(raw), row)
        payloads.append(target.getvalue())
    array, reasons = avro_decoder(schema, "raw").decode(payloads)  # type: ignore[arg-type]
    assert reasons == {}
    array.validate(full=True)
    assert plain(array) == rows
    single = encode_rows(array, avro_encoder(schema, "single")).to_pylist()
    assert [payload[10:] for payload in single] == payloads
    again, reasons = avro_decoder(schema, "single").decode(single)
    assert reasons == {}
    assert again.equals(array)


@given(bad=st.binary(max_size=60))
@settings(max_examples=200, deadline=None)
def test_garbage_is_no_avro_datum_or_some_datum(bad: bytes) -> None:
    schema = AvroSchema(
        '{"type": "record", "name": "r", "fields": [{"name": "a", "type": {"type": "array", "items": ["null", "string"]}},'
        ' {"name": "d", "type": ["null", {"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}]},'
        ' {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}}]}'
    )
    good = encode_rows(
        pa.array([{"a": ["x", None], "d": Decimal("1.25"), "t": datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)}]),
        avro_encoder(schema, "raw"),
    )[0].as_py()
    reading = avro_decoder(schema, "raw")
    array, reasons = reading.decode([good, bad, good])
    assert set(reasons) <= {1}
    assert array[0].equals(array[2])
    assert array[1].is_valid == (1 not in reasons)

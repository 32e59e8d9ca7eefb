"""What payload formats take and refuse, case by case; the properties are in tests/property/test_payloads.py."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import cbor2
import msgspec
import pytest
from pyspark.sql import types as spark

from nearcast.errors import PipelineError
from nearcast.pipeline.avro_schemas import AvroSchema
from nearcast.pipeline.payload_formats import Format, avro_decoder, avro_encoder, decoder, encode_rows, encoder


def struct(**fields: spark.DataType) -> spark.StructType:
    return spark.StructType([spark.StructField(name, data_type) for name, data_type in fields.items()])


def one(kind: Format, schema: spark.DataType, payload: bytes) -> Any:
    """The value of one payload; the reason, as an exception, if it is corrupt."""
    array, reasons = decoder(kind, schema).decode([payload])
    if reasons:
        raise ValueError(reasons[0])
    return array.to_pylist(maps_as_pydicts="strict")[0]


NUMBER = struct(n=spark.ByteType())
REFUSED: list[tuple[Format, spark.DataType, bytes, str]] = [
    ("json", NUMBER, b"", "truncated"),
    ("json", NUMBER, b"null", "Expected `object`"),
    ("json", NUMBER, b'{"n": 1} {"n": 2}', "trailing"),
    ("json", NUMBER, b'{"n": 128}', "<= 127"),
    ("json", NUMBER, b'{"n": 1.5}', "Expected `int | null`"),
    ("json", NUMBER, b'{"n": "1"}', "$.n"),
    ("json", NUMBER, b'{"n": true}', "Expected `int | null`"),
    ("json", NUMBER, b'{"n": NaN}', "invalid"),
    ("json", struct(s=spark.StringType()), b'{"s": "\xff"}', "utf-8"),
    ("json", struct(b=spark.BinaryType()), b'{"b": "!"}', "base64"),
    ("json", struct(d=spark.DecimalType(4, 2)), b'{"d": 1.005}', "data loss"),
    ("json", struct(d=spark.DecimalType(4, 2)), b'{"d": 1000}', "precision"),
    ("json", struct(d=spark.DecimalType(4, 2)), b'{"d": "NaN"}', "NaN"),
    ("json", struct(t=spark.TimestampType()), b'{"t": "yesterday"}', "RFC3339"),
    ("json", spark.ArrayType(spark.LongType(), False), b"[1, null]", "Expected `int`"),
    ("json", NUMBER, b'{"unknown":' + b"[" * 100_000, "recursion"),
    ("msgpack", NUMBER, b"\xdf\xff\xff\xff\xff", "truncated"),
    ("msgpack", NUMBER, msgspec.msgpack.encode({"n": 300}), "<= 127"),
    ("cbor", NUMBER, cbor2.dumps({"n": 300}), "<= 127"),
    ("cbor", NUMBER, cbor2.dumps({"n": 1}) * 2, "exactly one"),
    ("cbor", NUMBER, cbor2.dumps({"n": 1})[:-1], ""),
    ("cbor", NUMBER, b"\x9b\x7f\xff\xff\xff\xff\xff\xff\xff", ""),
    ("cbor", NUMBER, cbor2.dumps({7: 1}), ""),
    ("cbor", spark.ArrayType(spark.ArrayType(spark.LongType())), b"\xd8\x1c\x81\xd8\x1d\x00", "tag"),
    ("cbor", struct(s=spark.StringType()), cbor2.dumps({"s": cbor2.CBORTag(35, "(a+)+$")}), "tag"),
    ("cbor", struct(d=spark.DecimalType(4, 2)), cbor2.dumps({"d": Decimal("1E+68719476")}), ""),
]


@pytest.mark.parametrize(("kind", "schema", "payload", "reason"), REFUSED)
def test_a_payload_that_the_schema_does_not_describe_is_refused(
    kind: Format, schema: spark.DataType, payload: bytes, reason: str
) -> None:
    with pytest.raises(ValueError, match="(?i)" + reason.replace("$", r"\$").replace("|", r"\|")) as caught:
        one(kind, schema, payload)
    assert 0 < len(str(caught.value)) <= 200


NOON = datetime.datetime(2026, 7, 1, 12, tzinfo=datetime.UTC)
TAKEN: list[tuple[Format, spark.DataType, bytes, Any]] = [
    ("json", NUMBER, b' {"other": [1, {}], "n": -128} ', {"n": -128}),
    ("json", NUMBER, b"{}", {"n": None}),
    ("json", spark.DoubleType(), b"21", 21.0),
    ("json", spark.DecimalType(30, 5), b"1234567890123456789012345.12345", Decimal("1234567890123456789012345.12345")),
    ("json", spark.TimestampType(), b'"2026-07-01T14:00:00+02:00"', NOON),
    ("json", spark.TimestampType(), b'"2026-07-01T12:00:00"', NOON),
    ("json", spark.TimestampNTZType(), b'"2026-07-01T12:00:00"', NOON.replace(tzinfo=None)),
    ("json", spark.MapType(spark.LongType(), spark.StringType()), b'{"7": "x"}', {7: "x"}),
    ("json", struct(s=spark.StringType()), '{"s": "日\\u00e9"}'.encode(), {"s": "日é"}),
    ("msgpack", spark.TimestampType(), msgspec.msgpack.encode(NOON), NOON),
    ("msgpack", spark.BinaryType(), msgspec.msgpack.encode(b"\0"), b"\0"),
    ("cbor", spark.MapType(spark.LongType(), spark.StringType()), cbor2.dumps({7: "x"}), {7: "x"}),
    ("cbor", spark.DoubleType(), cbor2.dumps(2), 2.0),
    ("cbor", spark.DecimalType(4, 2), cbor2.dumps(Decimal("1.25")), Decimal("1.25")),
    ("cbor", spark.TimestampType(), cbor2.dumps(NOON, datetime_as_timestamp=True), NOON),
    ("cbor", spark.DateType(), cbor2.dumps(NOON.date()), NOON.date()),
]


@pytest.mark.parametrize(("kind", "schema", "payload", "expected"), TAKEN)
def test_a_payload_becomes_a_value(kind: Format, schema: spark.DataType, payload: bytes, expected: Any) -> None:
    assert one(kind, schema, payload) == expected


def test_among_many_payloads_each_corrupt_one_has_its_reason() -> None:
    schema = struct(d=spark.DecimalType(4, 2))
    payloads: list[bytes | None] = [b'{"d": "%d.00"}' % (number % 90) for number in range(1_000)]
    payloads[17] = b'{"d": 1.234}'
    payloads[500] = b'{"d": '
    payloads[999] = b'{"d": 123456}'
    array, reasons = decoder("json", schema).decode(payloads)
    assert sorted(reasons) == [17, 500, 999]
    assert array.null_count == 3
    assert array[998].as_py() == {"d": Decimal("8.00")}


@pytest.mark.parametrize("kind", ["json", "msgpack", "cbor"])
def test_types_that_no_payload_has_are_refused_at_once(kind: Format) -> None:
    with pytest.raises(PipelineError, match=r"payload\.x: a payload cannot have the type interval"):
        decoder(kind, struct(x=spark.DayTimeIntervalType()))


def test_a_value_that_a_format_cannot_hold_is_named() -> None:
    schema = AvroSchema('{"type": "record", "name": "r", "fields": [{"name": "n", "type": "int"}]}')
    array, _ = decoder("json", struct(n=spark.LongType())).decode([b'{"n": 1}', b'{"n": null}'])
    with pytest.raises(PipelineError, match=r"row 1 of its batch cannot be encoded.*{'n': None}"):
        encode_rows(array, avro_encoder(schema, "raw"))


def test_nan_is_null_in_json() -> None:
    array, _ = decoder("msgpack", struct(x=spark.DoubleType())).decode([msgspec.msgpack.encode({"x": float("nan")})])
    assert encode_rows(array, encoder("json")).to_pylist() == [b'{"x":null}']


def test_single_objects_name_their_schema() -> None:
    schema = AvroSchema('"int"')
    assert schema.header == bytes.fromhex("c3018f5c393f1ad57572"), "Avro's own value for int, lowest byte first"
    array, reasons = avro_decoder(schema, "single").decode([schema.header + b"\x02", b"\xc3\x01" + bytes(8) + b"\x02"])
    assert array[0].as_py() == 1
    assert reasons == {1: "no Avro single object of this schema"}


def test_avro_types_become_columns() -> None:
    schema = AvroSchema(
        """{"type": "record", "name": "all", "fields": [
            {"name": "e", "type": {"type": "enum", "name": "state", "symbols": ["ON", "OFF"]}},
            {"name": "again", "type": ["null", "state"]},
            {"name": "u", "type": {"type": "string", "logicalType": "uuid"}},
            {"name": "time", "type": {"type": "int", "logicalType": "time-millis"}},
            {"name": "n", "type": ["int", "null", "long"]},
            {"name": "f", "type": {"type": "fixed", "name": "two", "size": 2}},
            {"name": "local", "type": {"type": "long", "logicalType": "local-timestamp-micros"}}]}"""
    )
    assert schema.data_type.simpleString() == (
        "struct<e:string,again:string,u:string,time:int,n:bigint,f:binary,local:timestamp_ntz>"
    )
    value = {
        "e": "ON",
        "again": None,
        "u": "6b7d8d0e-2a3a-4c1f-9a52-111111111111",
        "time": 1,
        "n": 1 << 40,
        "f": b"ab",
        "local": NOON.replace(tzinfo=None),
    }
    array, reasons = avro_decoder(schema, "raw").decode([avro_encoder(schema, "raw")(value)])
    assert reasons == {}
    assert array.to_pylist() == [value]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be used"),
        ('"nothing"', "cannot be used"),
        ('{"type": "array", "items": "null"}', r"payload\[\]: the Avro type 'null' has no column"),
        ('["int", "string"]', "union of several types"),
        ('{"type": "record", "name": "r", "fields": []}', "has no fields"),
        ('{"type": "record", "name": "r", "fields": [{"name": "next", "type": ["null", "r"]}]}', "contains itself"),
        ('{"type": "bytes", "logicalType": "decimal", "precision": 40}', "at most 38 digits"),
    ],
)
def test_schemas_without_columns_are_refused(text: str, message: str) -> None:
    with pytest.raises(PipelineError, match=message):
        AvroSchema(text)

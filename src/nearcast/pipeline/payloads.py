"""Payloads as typed columns and back: JSON, MessagePack, CBOR and Avro, by schema, in Arrow batches.

``from_*`` replaces a DataFrame's payload column by the columns of a schema; ``to_*`` packs columns into a payload for the
sink. Both run as Arrow functions on the payload column alone: the other columns stay where they are. They work on batch and
streaming DataFrames alike::

    readings = from_json(messages, "sensor string, celsius double")
    to_msgpack(readings.select("topic", "sensor", "celsius")).write.format("nearcast")...

A payload that the schema does not describe is corrupt: not decodable, a value of another type or out of its range, a field
missing that cannot be null, digits a decimal has no room for. ``mode`` says what becomes of it:

- ``permissive`` (default): its columns are null and the column named by ``corrupt`` holds its bytes and the reason;
- ``drop``: the row is left out;
- ``fail``: the query fails with the reason.

A null payload gives null columns. Fields that the schema does not name are ignored; nullable fields may be missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import pyarrow as pa
from pyspark.errors import ParseException
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention
from pyspark.sql import types as spark
from pyspark.sql.pandas import functions

from nearcast.errors import PipelineError
from nearcast.pipeline.avro_schemas import AvroSchema
from nearcast.pipeline.payload_columns import python_type
from nearcast.pipeline.payload_formats import (
    Format,
    Framing,
    PayloadDecoder,
    avro_decoder,
    avro_encoder,
    decoder,
    encode_rows,
    encoder,
)
from nearcast.pipeline.sink_rows import COLUMNS

Mode = Literal["permissive", "drop", "fail"]
Schema = spark.DataType | str

SINK_COLUMNS = tuple(name for name in COLUMNS if name != "payload")
"""What ``to_*`` leaves beside the payload: the columns that the sink takes."""

CONTENT_TYPES: dict[Format, str] = {
    "json": "application/json",
    "msgpack": "application/msgpack",
    "cbor": "application/cbor",
    "avro": "application/avro",
}


def from_json(
    df: DataFrame,
    schema: Schema,
    column: str = "payload",
    *,
    mode: Mode = "permissive",
    corrupt: str | None = "corrupt",
    into: str | None = None,
) -> DataFrame:
    """The columns of JSON payloads.

    ``schema`` is a Spark type or its DDL text: a struct (``"sensor string, celsius double"``) gives a column per field, any
    other type (``"double"`` for payloads such as ``21.5``) the column ``value``. ``into`` gathers it in one column of its own.
    ``corrupt=None`` leaves out the column of corrupt payloads.

    Binary values are base64 text, timestamps and dates ISO 8601 text (UTC where they name no zone), decimals numbers or text.
    """
    return _decoded(df, column, mode, corrupt, into, _Decoding("json", _data_type(schema)))


def from_msgpack(
    df: DataFrame,
    schema: Schema,
    column: str = "payload",
    *,
    mode: Mode = "permissive",
    corrupt: str | None = "corrupt",
    into: str | None = None,
) -> DataFrame:
    """The columns of MessagePack payloads; see :func:`from_json`. Timestamps are extension -1 or text, decimals text."""
    return _decoded(df, column, mode, corrupt, into, _Decoding("msgpack", _data_type(schema)))


def from_cbor(
    df: DataFrame,
    schema: Schema,
    column: str = "payload",
    *,
    mode: Mode = "permissive",
    corrupt: str | None = "corrupt",
    into: str | None = None,
) -> DataFrame:
    """The columns of CBOR payloads; see :func:`from_json`. Timestamps, dates and decimals are tagged, or text."""
    return _decoded(df, column, mode, corrupt, into, _Decoding("cbor", _data_type(schema)))


def from_avro(
    df: DataFrame,
    schema: str,
    column: str = "payload",
    *,
    mode: Mode = "permissive",
    corrupt: str | None = "corrupt",
    into: str | None = None,
    framing: Framing = "raw",
) -> DataFrame:
    """The columns of Avro payloads; see :func:`from_json`.

    ``schema`` is the writer's schema as JSON. Payloads are bare data (``framing="raw"``) or single objects, which name their
    schema by its fingerprint (``"single"``). Unions with null are nullable columns; other unions, and records that contain
    themselves, have no column and are refused. Times of day and UUIDs come as what carries them.
    """
    _require(framing in ("raw", "single"), f"framing is 'raw' or 'single', not {framing!r}")
    return _decoded(df, column, mode, corrupt, into, _Decoding("avro", AvroSchema(schema).data_type, schema, framing))


def to_json(df: DataFrame, columns: Sequence[str] | None = None, column: str = "payload") -> DataFrame:
    """Columns packed into JSON payloads: an object per row, ``columns`` (default: all but the sink's own) as its fields.

    They are replaced by ``column``, and the other columns stay. A content type is added where there is none. NaN and infinity,
    which JSON does not have, become null; decimals are text, binary values base64, timestamps ISO 8601 in UTC.
    """
    return _encoded(df, columns, column, _Encoding("json"))


def to_msgpack(df: DataFrame, columns: Sequence[str] | None = None, column: str = "payload") -> DataFrame:
    """Columns packed into MessagePack payloads; see :func:`to_json`."""
    return _encoded(df, columns, column, _Encoding("msgpack"))


def to_cbor(df: DataFrame, columns: Sequence[str] | None = None, column: str = "payload") -> DataFrame:
    """Columns packed into CBOR payloads; see :func:`to_json`."""
    return _encoded(df, columns, column, _Encoding("cbor"))


def to_avro(
    df: DataFrame, schema: str, columns: Sequence[str] | None = None, column: str = "payload", *, framing: Framing = "raw"
) -> DataFrame:
    """Columns packed into Avro payloads by a writer's schema, which has to be a record; see :func:`to_json`."""
    _require(framing in ("raw", "single"), f"framing is 'raw' or 'single', not {framing!r}")
    record = AvroSchema(schema).data_type
    if not isinstance(record, spark.StructType):
        raise PipelineError(f"to_avro packs columns into a record; this schema is of type {record.simpleString()}")
    if columns is None:
        columns = record.names
    return _encoded(df, columns, column, _Encoding("avro", schema, framing))


class _Decoding:
    """What a Python worker decodes; its decoder is made there, once."""

    def __init__(self, kind: Format, schema: spark.DataType, avro: str = "", framing: Framing = "raw") -> None:
        self.kind: Format = kind
        self.schema = schema
        self._avro = avro
        self._framing: Framing = framing
        if kind != "avro":
            python_type(schema)  # refuses types that no payload has, here and not in a worker

    def make(self) -> PayloadDecoder:
        if self.kind == "avro":
            return avro_decoder(AvroSchema(self._avro), self._framing)
        return decoder(self.kind, self.schema)


class _Encoding:
    def __init__(self, kind: Format, avro: str = "", framing: Framing = "raw") -> None:
        self.kind: Format = kind
        self._avro = avro
        self._framing: Framing = framing

    def make(self) -> Callable[[Any], bytes]:
        if self.kind == "avro":
            return avro_encoder(AvroSchema(self._avro), self._framing)
        return encoder(self.kind)


def _decoded(df: DataFrame, column: str, mode: Mode, corrupt: str | None, into: str | None, decoding: _Decoding) -> DataFrame:
    _require(mode in ("permissive", "drop", "fail"), f"mode is 'permissive', 'drop' or 'fail', not {mode!r}")
    schema = decoding.schema
    _require(column in df.columns, f"there is no column {column!r} to decode; there are {', '.join(df.columns)}")
    if into is None and not isinstance(schema, spark.StructType):
        into = "value"
    kept = [name for name in df.columns if name != column]
    added = [into] if into is not None else list(schema.names)  # type: ignore[attr-defined]  # a struct: see above
    if mode == "permissive" and corrupt is not None:
        added.append(corrupt)
    twice = sorted({name for name in added if name in kept or added.count(name) > 1})
    _require(not twice, f"columns {', '.join(twice)} would be there twice: drop or rename them first, or gather with into=")
    # Topic and index, where the rows have them, say which message a failure is about.
    place = [name for name in ("topic", "index") if name in kept] if mode == "fail" else []
    function = _decode_function(decoding, mode, place)
    found = _unused("decoded", df.columns)
    rows = df.withColumn(found, function(F.col(_quoted(column)), *(F.col(name) for name in place)))
    if mode == "drop":
        rows = rows.filter(F.col(f"{found}.reason").isNull())
    columns: list[Column] = [F.col(_quoted(name)) for name in kept]
    if into is not None:
        columns.append(F.col(f"{found}.value").alias(into))
    else:
        columns += [F.col(f"{found}.value.{_quoted(name)}").alias(name) for name in added[: len(schema.names)]]  # type: ignore[attr-defined]
    if mode == "permissive" and corrupt is not None:
        reason = F.col(f"{found}.reason")
        both = F.struct(F.col(_quoted(column)).cast("binary").alias("payload"), reason.alias("reason"))
        columns.append(F.when(reason.isNotNull(), both).alias(corrupt))
    return rows.select(*columns)


def _decode_function(decoding: _Decoding, mode: Mode, place: Sequence[str]) -> Callable[..., Column]:
    result = spark.StructType(
        [spark.StructField("value", decoding.schema), spark.StructField("reason", spark.StringType())],
    )
    made: list[PayloadDecoder] = []

    def decode(payloads: pa.Array, *where: pa.Array) -> pa.Array:
        if not made:
            made.append(decoding.make())
        values, reasons = made[0].decode(payloads.to_pylist())
        if mode == "fail":
            for number, reason in reasons.items():
                message = " ".join(f"{name} {array[number].as_py()!r}" for name, array in zip(place, where, strict=True))
                raise PipelineError(f"corrupt {decoding.kind} payload{' of ' if message else ''}{message}: {reason}")
        if reasons:
            texts = pa.array([reasons.get(number) for number in range(len(payloads))], pa.string())
        else:
            texts = pa.nulls(len(payloads), pa.string())
        return pa.StructArray.from_arrays([values, texts], names=["value", "reason"])

    return _arrow_function(decode, result, 1 + len(place))


def _encoded(df: DataFrame, columns: Sequence[str] | None, column: str, encoding: _Encoding) -> DataFrame:
    names = [name for name in df.columns if name not in SINK_COLUMNS] if columns is None else list(columns)
    missing = [name for name in names if name not in df.columns]
    _require(not missing, f"there is no column {', '.join(missing)} to encode; there are {', '.join(df.columns)}")
    _require(bool(names), "there is no column to make a payload of")
    kept = [name for name in df.columns if name not in names]
    _require(column not in kept, f"there is a column {column!r} already: drop it, or encode it too")
    made: list[Callable[[Any], bytes]] = []

    def encode(values: pa.Array) -> pa.Array:
        if not made:
            made.append(encoding.make())
        return encode_rows(values, made[0])

    function = _arrow_function(encode, spark.BinaryType(), 1)
    packed = [F.col(_quoted(name)) for name in kept]
    packed.append(function(F.struct(*(F.col(_quoted(name)) for name in names))).alias(column))
    if "content_type" not in df.columns:
        packed.append(F.lit(CONTENT_TYPES[encoding.kind]).alias("content_type"))
    return df.select(*packed)


def _arrow_function(function: Callable[..., pa.Array], result: spark.DataType, arguments: int) -> Callable[..., Column]:
    """An Arrow function of so many columns. Called non-deterministic so that a filter on its result does not run it twice."""

    def arrow_udf(wanted: Callable[..., pa.Array]) -> Callable[..., Column]:
        made: Callable[..., Column] = functions.arrow_udf(wanted, result).asNondeterministic()  # type: ignore[call-overload]
        return made

    if arguments == 1:

        def one(a: pa.Array) -> pa.Array:
            return function(a)

        return arrow_udf(one)
    if arguments == 2:

        def two(a: pa.Array, b: pa.Array) -> pa.Array:
            return function(a, b)

        return arrow_udf(two)

    def three(a: pa.Array, b: pa.Array, c: pa.Array) -> pa.Array:
        return function(a, b, c)

    return arrow_udf(three)


def _data_type(schema: Schema) -> spark.DataType:
    if isinstance(schema, spark.DataType):
        return schema
    try:
        return spark.DataType.fromDDL(schema)
    except ParseException as error:
        raise PipelineError(f"{schema!r} is no schema: {str(error).strip().splitlines()[0]}") from None


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PipelineError(message)


def _quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def _unused(name: str, names: Sequence[str]) -> str:
    while name in names:
        name += "_"
    return name

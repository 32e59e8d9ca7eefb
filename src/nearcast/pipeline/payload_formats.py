"""JSON, MessagePack, CBOR and Avro: payloads to Arrow columns by a Spark schema, and columns back to payloads.

The decoders are those of msgspec, cbor2 and fastavro, written in C or Rust. Payloads come from anyone who may publish: what is
too short, too long, too deep or of another shape is an error of that one payload, with a reason. This module knows batches of
payloads; DataFrames and what becomes of corrupt ones belong to :mod:`nearcast.pipeline.payloads`.
"""

from __future__ import annotations

import datetime
import decimal
import io
import secrets
from collections.abc import Callable
from typing import Any, Literal

import cbor2
import fastavro
import msgspec
import pyarrow as pa
from pyspark.sql import types as spark

from nearcast.errors import PipelineError
from nearcast.pipeline.avro_schemas import AvroSchema
from nearcast.pipeline.payload_columns import Builder, builder, python_type

Format = Literal["json", "msgpack", "cbor", "avro"]
Framing = Literal["raw", "single"]

MAX_REASON_CHARACTERS = 200

_CBOR_TYPES = (bytes, datetime.datetime, datetime.date, decimal.Decimal)


class PayloadDecoder:
    """Turns payloads into an array of one type, and says of each that could not be decoded why."""

    def __init__(self, decode: Callable[[bytes], Any], build: Builder) -> None:
        self._decode = decode
        self._build = build

    def decode(self, payloads: list[bytes | None]) -> tuple[pa.Array, dict[int, str]]:
        """The values, null where the payload is null or corrupt, and the reason for each corrupt one by its position."""
        decode = self._decode
        reasons: dict[int, str] = {}
        try:
            values = [None if payload is None else decode(payload) for payload in payloads]
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - three libraries, each with its own errors; which payload it was is found below
            values = self._one_by_one(payloads, reasons)
        array = self._array(values)
        if array is None:
            self._find(values, 0, len(values), reasons)
            array = self._build(values)
        return array, reasons

    def _one_by_one(self, payloads: list[bytes | None], reasons: dict[int, str]) -> list[Any]:
        values: list[Any] = []
        for number, payload in enumerate(payloads):
            value = None
            if payload is not None:
                try:
                    value = self._decode(payload)
                except MemoryError:
                    raise
                except Exception as error:  # noqa: BLE001 - whatever a decoder raises, this payload is corrupt
                    reasons[number] = _reason(error)
            values.append(value)
        return values

    def _array(self, values: list[Any]) -> pa.Array | None:
        try:
            return self._build(values)
        except (pa.ArrowException, ValueError, OverflowError, TypeError):
            return None

    def _find(self, values: list[Any], start: int, end: int, reasons: dict[int, str]) -> None:
        """Which values do not fit their column (a decimal with too many digits, say), by halving; they become null."""
        if end - start > 1:
            middle = (start + end) // 2
            for first, last in ((start, middle), (middle, end)):
                if self._array(values[first:last]) is None:
                    self._find(values, first, last, reasons)
            return
        try:
            self._build(values[start:end])
        except (pa.ArrowException, ValueError, OverflowError, TypeError) as error:
            reasons[start] = _reason(error)
            values[start] = None


def decoder(kind: Format, schema: spark.DataType) -> PayloadDecoder:
    """A decoder of JSON, MessagePack or CBOR payloads."""
    wanted = python_type(schema)
    if kind == "json":
        return PayloadDecoder(msgspec.json.Decoder(wanted).decode, builder(schema))
    if kind == "msgpack":
        return PayloadDecoder(msgspec.msgpack.Decoder(wanted).decode, builder(schema))
    return PayloadDecoder(_cbor_decode(wanted, schema), builder(schema))


def _cbor_decode(wanted: Any, schema: spark.DataType) -> Callable[[bytes], Any]:
    # cbor2 ignores what follows the first value. A payload is therefore read as the first of two, the second being known only
    # here: anything after the payload's value, or missing from it, shows in the second.
    last = secrets.token_bytes(16)
    tail = b"\x50" + last
    # Keys that are numbers can be made to collide; they are only taken where the schema has such keys.
    text_keys = not _has_other_keys(schema)
    # Looked through for every payload, which takes as long as converting it.
    types = _CBOR_TYPES if _has_tagged_values(schema) else None

    def decode(payload: bytes) -> Any:
        pair = cbor2.loads(b"\x82" + payload + tail, semantic_decoders=_CBOR_REFUSED, strict_hashable_types=text_keys)
        if pair[1] != last:
            raise ValueError("not exactly one CBOR value")
        return msgspec.convert(pair[0], wanted, builtin_types=types)

    return decode


def _refuse(*_: Any) -> Any:
    raise ValueError("a CBOR tag that payloads may not use")


_CBOR_REFUSED = dict.fromkeys((25, 28, 29, 35, 256), _refuse)
"""References within a value, which can make it endless, and regular expressions."""


def _has_other_keys(schema: spark.DataType) -> bool:
    if isinstance(schema, spark.StructType):
        return any(_has_other_keys(field.dataType) for field in schema.fields)
    if isinstance(schema, spark.ArrayType):
        return _has_other_keys(schema.elementType)
    if isinstance(schema, spark.MapType):
        return not isinstance(schema.keyType, spark.StringType) or _has_other_keys(schema.valueType)
    return False


def _has_tagged_values(schema: spark.DataType) -> bool:
    """Whether values of this type come out of CBOR as something else than text, numbers and truth values."""
    if isinstance(schema, spark.StructType):
        return any(_has_tagged_values(field.dataType) for field in schema.fields)
    if isinstance(schema, spark.ArrayType):
        return _has_tagged_values(schema.elementType)
    if isinstance(schema, spark.MapType):
        return _has_tagged_values(schema.keyType) or _has_tagged_values(schema.valueType)
    kinds = (spark.BinaryType, spark.DecimalType, spark.DateType, spark.TimestampType, spark.TimestampNTZType)
    return isinstance(schema, kinds)


def avro_decoder(schema: AvroSchema, framing: Framing) -> PayloadDecoder:
    """A decoder of Avro data: bare, or as single objects with the fingerprint of their schema before them."""
    header = schema.header if framing == "single" else b""
    parsed = schema.parsed

    def decode(payload: bytes) -> Any:
        if not payload.startswith(header):
            raise ValueError("no Avro single object of this schema")
        source = io.BytesIO(payload)
        source.seek(len(header))
        value = fastavro.schemaless_reader(source, parsed, None)
        if source.tell() != len(payload):
            raise ValueError(f"{len(payload) - source.tell()} bytes too many after the Avro datum")
        return value

    return PayloadDecoder(decode, builder(schema.data_type, mappings=True))


def encoder(kind: Format) -> Callable[[Any], bytes]:
    """What makes a JSON, MessagePack or CBOR payload of a Python value."""
    if kind == "json":
        return msgspec.json.Encoder().encode
    if kind == "msgpack":
        return msgspec.msgpack.Encoder().encode

    def encode(value: Any) -> bytes:
        return cbor2.dumps(value, timezone=datetime.UTC)

    return encode


def avro_encoder(schema: AvroSchema, framing: Framing) -> Callable[[Any], bytes]:
    """What makes an Avro payload of a Python value."""
    header = schema.header if framing == "single" else b""
    parsed = schema.parsed

    def encode(value: Any) -> bytes:
        target = io.BytesIO()
        target.write(header)
        fastavro.schemaless_writer(target, parsed, value)
        return target.getvalue()

    return encode


def encode_rows(values: pa.Array, encode: Callable[[Any], bytes]) -> pa.Array:
    """A payload for each value; the first that the format cannot hold is named in a :class:`PipelineError`."""
    rows = _python_values(values)
    payloads: list[bytes] = []
    for number, row in enumerate(rows):
        try:
            payloads.append(encode(row))
        except MemoryError:
            raise
        except Exception as error:
            shown = repr(row)[:MAX_REASON_CHARACTERS]
            raise PipelineError(f"row {number} of its batch cannot be encoded: {_reason(error)}; it is {shown}") from error
    return pa.array(payloads, pa.binary())


def _python_values(values: pa.Array) -> list[Any]:
    """Python values of an array; the fields of a struct one column at a time, which is several times faster than rows."""
    if not isinstance(values, pa.StructArray) or values.null_count:
        return list(values.to_pylist(maps_as_pydicts="strict"))
    names = [field.name for field in values.type]
    if not names:
        return [{} for _ in range(len(values))]
    columns = [_column_values(column) for column in values.flatten()]
    return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]


def _column_values(column: pa.Array) -> list[Any]:
    if column.null_count == 0 and (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        # Arrow makes an object of its own for each value on the way; NumPy does not.
        return list(column.to_numpy().tolist())
    return _python_values(column)


def _reason(error: Exception) -> str:
    return (str(error) or type(error).__name__)[:MAX_REASON_CHARACTERS]

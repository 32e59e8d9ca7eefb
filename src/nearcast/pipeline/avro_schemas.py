"""Avro schemas: the Spark type that one describes, and the header that single-object encoding puts before a datum.

Reading and writing data is fastavro's part; this module only translates, and refuses what has no column.
"""

from __future__ import annotations

from typing import Any

import fastavro
import msgspec
from fastavro.schema import SchemaParseException, fingerprint, to_parsing_canonical_form
from pyspark.sql import types as spark

from nearcast.errors import PipelineError

SINGLE_OBJECT_MARK = b"\xc3\x01"

_PRIMITIVES: dict[str, spark.DataType] = {
    "boolean": spark.BooleanType(),
    "int": spark.IntegerType(),
    "long": spark.LongType(),
    "float": spark.FloatType(),
    "double": spark.DoubleType(),
    "bytes": spark.BinaryType(),
    "string": spark.StringType(),
}
_LOGICAL: dict[tuple[str, str], spark.DataType] = {
    ("int", "date"): spark.DateType(),
    ("long", "timestamp-millis"): spark.TimestampType(),
    ("long", "timestamp-micros"): spark.TimestampType(),
    ("long", "local-timestamp-millis"): spark.TimestampNTZType(),
    ("long", "local-timestamp-micros"): spark.TimestampNTZType(),
}
_WIDER = [({"int", "long"}, "long"), ({"float", "double"}, "double")]
MAX_DECIMAL_DIGITS = 38


class AvroSchema:
    """A writer's schema: ``parsed`` for fastavro, ``data_type`` for Spark, ``header`` of its single objects."""

    def __init__(self, text: str) -> None:
        try:
            raw = msgspec.json.decode(text)
            parsed = fastavro.parse_schema(raw)
            digest = fingerprint(to_parsing_canonical_form(parsed), "CRC-64-AVRO")
        except (msgspec.DecodeError, SchemaParseException, KeyError, TypeError, ValueError, RecursionError) as error:
            raise PipelineError(f"the Avro schema cannot be used: {_reason(error)}") from error
        self._named: dict[str, Any] = {}
        self._open: set[str] = set()
        self.data_type, _ = self._translate(parsed, "payload")
        self.parsed = parsed
        # fastavro writes the fingerprint as Avro's own library prints it: its bytes are those of the header.
        self.header = SINGLE_OBJECT_MARK + bytes.fromhex(digest)

    def _translate(self, schema: Any, path: str) -> tuple[spark.DataType, bool]:
        """The Spark type of a parsed schema, and whether it can be null."""
        if isinstance(schema, list):
            return self._union(schema, path)
        if isinstance(schema, str):
            if schema in _PRIMITIVES:
                return _PRIMITIVES[schema], False
            if schema not in self._named:
                raise PipelineError(
                    f"{path}: the Avro type {schema!r} has no column; leave it out, or read the payload as it is"
                )
            return self._translate(self._named[schema], path)
        kind = schema["type"]
        if kind in ("record", "error"):
            return self._record(schema, path), False
        if kind == "array":
            element, nullable = self._translate(schema["items"], f"{path}[]")
            return spark.ArrayType(element, nullable), False
        if kind == "map":
            value, nullable = self._translate(schema["values"], f"{path}[]")
            return spark.MapType(spark.StringType(), value, nullable), False
        if kind in ("enum", "fixed"):
            self._named[schema["name"]] = schema
        logical = schema.get("logicalType")
        if logical == "decimal" and kind in ("bytes", "fixed"):
            precision, scale = schema["precision"], schema.get("scale", 0)
            if precision > MAX_DECIMAL_DIGITS:
                raise PipelineError(f"{path}: decimals have at most {MAX_DECIMAL_DIGITS} digits in Spark, not {precision}")
            return spark.DecimalType(precision, scale), False
        if kind == "enum":
            return spark.StringType(), False
        if kind == "fixed":
            if schema["size"] < 1:
                raise PipelineError(f"{path}: values of 0 bytes have no column")
            return spark.BinaryType(), False
        if (kind, logical) in _LOGICAL:
            return _LOGICAL[kind, logical], False
        # Logical types that Spark has no column for are read as what carries them.
        schema.pop("logicalType", None)
        return self._translate(kind, path)

    def _record(self, schema: Any, path: str) -> spark.StructType:
        name = schema["name"]
        if name in self._open:
            raise PipelineError(f"{path}: the record {name!r} contains itself, which no column can")
        self._named[name] = schema
        self._open.add(name)
        fields = []
        for field in schema["fields"]:
            data_type, nullable = self._translate(field["type"], f"{path}.{field['name']}")
            fields.append(spark.StructField(field["name"], data_type, nullable))
        self._open.discard(name)
        if not fields:
            # Also: any number of them takes no bytes, so that a payload of a few bytes could ask for all memory there is.
            raise PipelineError(f"{path}: the record {name!r} has no fields, and a column needs some")
        return spark.StructType(fields)

    def _union(self, branches: list[Any], path: str) -> tuple[spark.DataType, bool]:
        others = [branch for branch in branches if branch != "null"]
        nullable = len(others) < len(branches)
        if len(others) == 1:
            return self._translate(others[0], path)[0], nullable
        plain = {branch for branch in others if isinstance(branch, str)}
        for members, wider in _WIDER:
            if plain == members and len(plain) == len(others):
                return _PRIMITIVES[wider], nullable
        raise PipelineError(
            f"{path}: a union of several types has no column; only unions with null (and int/long, float/double)"
        )


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:200]

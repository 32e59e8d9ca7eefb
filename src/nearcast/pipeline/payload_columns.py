"""Decoded payloads as Arrow columns, by a Spark schema: what a decoder is asked for, and how its values become arrays.

A decoder gives one Python value per payload. Columns are then built one at a time, nested ones from their flattened children,
so that no Python code runs per cell beyond reading it. This module knows types; formats and DataFrames are others' business.
"""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from operator import attrgetter, itemgetter
from typing import Annotated, Any

import msgspec
import pyarrow as pa
from pyspark.sql import types as spark
from pyspark.sql.pandas.types import to_arrow_type

from nearcast.errors import PipelineError

Builder = Callable[[list[Any]], pa.Array]
"""Makes one array of the values of one column, None for null."""

_INTEGER_BITS = {spark.ByteType: 8, spark.ShortType: 16, spark.IntegerType: 32, spark.LongType: 64}
_PLAIN: dict[type[spark.DataType], type] = {
    spark.BooleanType: bool,
    spark.FloatType: float,
    spark.DoubleType: float,
    spark.StringType: str,
    spark.CharType: str,
    spark.VarcharType: str,
    spark.BinaryType: bytes,
    spark.DecimalType: decimal.Decimal,
    spark.DateType: datetime.date,
    spark.TimestampType: datetime.datetime,
    spark.TimestampNTZType: datetime.datetime,
}


def python_type(data_type: spark.DataType, path: str = "payload") -> Any:
    """The type that msgspec checks a decoded value against.

    A struct becomes a class whose fields are called f0, f1, ... (a name in a payload need not be a Python name); fields that
    the schema allows to be null may also be missing, fields that it does not know are ignored.
    """
    kind = type(data_type)
    if kind in _INTEGER_BITS:
        bound = 1 << (_INTEGER_BITS[kind] - 1)
        return Annotated[int, msgspec.Meta(ge=-bound, le=bound - 1)]
    if kind in _PLAIN:
        return _PLAIN[kind]
    if isinstance(data_type, spark.ArrayType):
        return list[_nullable(python_type(data_type.elementType, f"{path}[]"), data_type.containsNull)]  # type: ignore[misc]
    if isinstance(data_type, spark.MapType):
        key = python_type(data_type.keyType, f"{path} (key)")
        value = _nullable(python_type(data_type.valueType, f"{path}[]"), data_type.valueContainsNull)
        return dict[key, value]  # type: ignore[valid-type]
    if isinstance(data_type, spark.StructType):
        fields: list[Any] = []
        for number, field in enumerate(data_type.fields):
            wanted = _nullable(python_type(field.dataType, f"{path}.{field.name}"), field.nullable)
            fields.append((f"f{number}", wanted, None) if field.nullable else (f"f{number}", wanted))
        names = {f"f{number}": field.name for number, field in enumerate(data_type.fields)}
        # kw_only, so that fields that may be missing can stand before others; no cycles are possible, hence no gc.
        return msgspec.defstruct("Payload", fields, rename=names, kw_only=True, gc=False)
    raise PipelineError(f"{path}: a payload cannot have the type {data_type.simpleString()}; use another in the schema")


def _nullable(wanted: Any, nullable: bool) -> Any:
    return wanted | None if nullable else wanted


def builder(data_type: spark.DataType, *, mappings: bool = False) -> Builder:
    """What makes arrays of ``data_type``. Structs are objects of :func:`python_type`, or dictionaries with ``mappings``."""
    if isinstance(data_type, spark.StructType):
        return _struct_builder(data_type, mappings)
    if isinstance(data_type, spark.ArrayType):
        return _list_builder(data_type, mappings)
    if isinstance(data_type, spark.MapType):
        return _map_builder(data_type, mappings)
    arrow = arrow_type(data_type)

    def leaf(values: list[Any]) -> pa.Array:
        return pa.array(values, arrow)

    return leaf


def arrow_type(data_type: spark.DataType) -> pa.DataType:
    """The Arrow type that Spark wants, its time zone being UTC."""
    return to_arrow_type(data_type, timezone="UTC")


def _struct_builder(data_type: spark.StructType, mappings: bool) -> Builder:
    children = [
        (itemgetter(field.name) if mappings else attrgetter(f"f{number}"), builder(field.dataType, mappings=mappings))
        for number, field in enumerate(data_type.fields)
    ]
    arrow = arrow_type(data_type)
    fields = [arrow.field(number) for number in range(arrow.num_fields)]

    def struct(values: list[Any]) -> pa.Array:
        missing = [value is None for value in values]
        if not fields:
            return pa.array([None if absent else {} for absent in missing], arrow)
        if True not in missing:
            return pa.StructArray.from_arrays([build(list(map(get, values))) for get, build in children], fields=fields)
        # Arrow wants a value in fields that cannot be null even where the whole struct is null: they are allowed to here,
        # and take their place in the type afterwards.
        arrays = [build([None if value is None else get(value) for value in values]) for get, build in children]
        relaxed = [field.with_nullable(True) for field in fields]
        array = pa.StructArray.from_arrays(arrays, fields=relaxed, mask=pa.array(missing, pa.bool_()))
        return pa.Array.from_buffers(
            arrow, len(array), array.buffers()[:1], children=[array.field(i) for i in range(len(fields))]
        )

    return struct


def _list_builder(data_type: spark.ArrayType, mappings: bool) -> Builder:
    build = builder(data_type.elementType, mappings=mappings)
    arrow = arrow_type(data_type)

    def lists(values: list[Any]) -> pa.Array:
        offsets, mask, flat = _flatten(values)
        return pa.ListArray.from_arrays(offsets, build(flat), type=arrow, mask=mask)

    return lists


def _map_builder(data_type: spark.MapType, mappings: bool) -> Builder:
    build_keys = builder(data_type.keyType, mappings=mappings)
    build_values = builder(data_type.valueType, mappings=mappings)
    arrow = arrow_type(data_type)

    def maps(values: list[Any]) -> pa.Array:
        offsets, mask, keys = _flatten(values)
        items = [item for value in values if value is not None for item in value.values()]
        return pa.MapArray.from_arrays(offsets, build_keys(keys), build_values(items), type=arrow, mask=mask)

    return maps


def _flatten(values: list[Any]) -> tuple[pa.Array, pa.Array | None, list[Any]]:
    """Arrow's offsets, what is null, and all elements in a row (of dictionaries: the keys)."""
    offsets = [0]
    end = 0
    for value in values:
        if value is not None:
            end += len(value)
        offsets.append(end)
    flat = [item for value in values if value is not None for item in value]
    missing = [value is None for value in values]
    mask = pa.array(missing, pa.bool_()) if True in missing else None
    return pa.array(offsets, pa.int32()), mask, flat

"""Telemetry as tables: what rows look like between Spark and Python, and how they become the arrays that are decided on.

Two kinds of rows go through one shuffle by topic: *samples*, a client's part in a topic (``report`` is null), and *reports*,
what one broker said of a topic (``role`` and the coordinate are null). So whoever has a topic's rows has all of them, and
needs no join. Arrays are those of :mod:`nearcast.placement.gathering` and :mod:`nearcast.telemetry.places`; a row whose
coordinate is none counts for nothing, here as there.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from nearcast.coordinates.coordinate import DIMENSIONS, LEAST_HEIGHT_MS
from nearcast.placement.gathering import MAX_COORDINATE_MS, Rows
from nearcast.telemetry.places import Floats, Indices, Mask, Places
from nearcast.telemetry.summaries import Crowds

SAMPLE: Final = "topic string, role tinyint, vector array<double>, height double, adjustment double"
"""Role 0 is a producer, 1 a consumer; the coordinate is in milliseconds of round-trip time."""

CROWD: Final = (
    "struct<count: bigint, vector: array<double>, height: double, adjustment: double, deviation_ms: double, worst_ms: double>"
)
REPORT: Final = (
    f"struct<epoch: bigint, owner: string, rate: double, max_latency_ms: double, producers: {CROWD}, consumers: {CROWD}>"
)
ROWS: Final = f"{SAMPLE}, report {REPORT}"

_CROWD_TYPE: Final = pa.struct(
    [
        ("count", pa.int64()),
        ("vector", pa.list_(pa.float64())),
        ("height", pa.float64()),
        ("adjustment", pa.float64()),
        ("deviation_ms", pa.float64()),
        ("worst_ms", pa.float64()),
    ]
)
_REPORT_TYPE: Final = pa.struct(
    [
        ("epoch", pa.int64()),
        ("owner", pa.string()),
        ("rate", pa.float64()),
        ("max_latency_ms", pa.float64()),
        ("producers", _CROWD_TYPE),
        ("consumers", _CROWD_TYPE),
    ]
)
ROWS_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("role", pa.int8()),
        ("vector", pa.list_(pa.float64())),
        ("height", pa.float64()),
        ("adjustment", pa.float64()),
        ("report", _REPORT_TYPE),
    ]
)
"""The same as :data:`ROWS`, for Arrow."""


class Samples:
    """Clients' parts in topics, by row: ``topics`` are Arrow strings."""

    __slots__ = ("places", "roles", "topics")

    def __init__(self, topics: pa.Array, roles: Indices, places: Places) -> None:
        self.topics = topics
        self.roles = roles
        self.places = places

    def __len__(self) -> int:
        return len(self.roles)


def split_rows(table: pa.Table) -> tuple[Rows, Samples, int]:
    """The reports and the samples among rows of :data:`ROWS_SCHEMA`, and how many samples were none."""
    table = table.combine_chunks()
    is_report = pc.is_valid(table.column("report"))
    reports = table.filter(is_report)
    samples = table.filter(pc.invert(is_report)) if len(reports) else table
    good, refused = _samples(samples)
    return _reports(reports), good, refused


def _samples(table: pa.Table) -> tuple[Samples, int]:
    vectors, counts = list_rows(_array(table, "vector"))
    heights = _floats(_array(table, "height"), np.nan)
    adjustments = _floats(_array(table, "adjustment"), 0.0)
    roles = _integers(_array(table, "role"), -1)
    topics = _array(table, "topic")
    good = counts & _credible(vectors, heights, adjustments) & ((roles == 0) | (roles == 1))
    if topics.null_count:
        good &= topics.is_valid().to_numpy(zero_copy_only=False)
    if good.all():
        return Samples(topics, roles, Places(vectors, heights, adjustments)), 0
    kept = Places(vectors[good], heights[good], adjustments[good])
    return Samples(topics.filter(pa.array(good)), roles[good], kept), int(len(good) - good.sum())


def _reports(table: pa.Table) -> Rows:
    report = _array(table, "report")
    names = table.column("topic").to_pylist()
    owners = ["" if owner is None else owner for owner in report.field("owner").to_pylist()]
    return Rows(
        names,
        owners,
        _integers(report.field("epoch"), 0),
        _crowds(report.field("producers")),
        _crowds(report.field("consumers")),
        _positive(_floats(report.field("rate"), 0.0)),
        _positive(_floats(report.field("max_latency_ms"), 0.0)),
    )


def _crowds(crowds: pa.StructArray) -> Crowds:
    """A field of a struct that is null is whatever its buffer has: what is null counts nobody."""
    counts = _integers(crowds.field("count"), 0)
    if crowds.null_count:
        counts = np.where(crowds.is_valid().to_numpy(zero_copy_only=False), counts, 0)
    vectors, are_vectors = list_rows(crowds.field("vector"))
    heights = _floats(crowds.field("height"), np.nan)
    adjustments = _floats(crowds.field("adjustment"), 0.0)
    deviation = _floats(crowds.field("deviation_ms"), np.nan)
    worst = _floats(crowds.field("worst_ms"), np.nan)
    good = (counts > 0) & are_vectors & _credible(vectors, heights, adjustments)
    good &= (deviation >= 0.0) & (deviation < MAX_COORDINATE_MS) & (worst >= 0.0) & (worst < MAX_COORDINATE_MS)
    places = Places(
        np.where(good[:, None], vectors, 0.0),
        np.where(good, heights, LEAST_HEIGHT_MS),
        np.where(good, adjustments, 0.0),
    )
    zeros = np.zeros(len(counts))
    return Crowds(np.where(good, counts, 0), places, np.where(good, deviation, zeros), np.where(good, worst, zeros))


def report_rows(rows: Rows, *, with_crowds: bool = True) -> pa.RecordBatch:
    """Reports as rows of :data:`ROWS_SCHEMA`; ``with_crowds`` false for a broker that reports its clients one by one."""
    number = len(rows)
    producers, consumers = rows.producers, rows.consumers
    if not with_crowds:
        producers = consumers = Crowds.empty(number, rows.producers.centroids.dimensions)
    report = pa.StructArray.from_arrays(
        [
            pa.array(rows.epochs, pa.int64()),
            pa.array(rows.owners, pa.string()),
            pa.array(rows.rates),
            pa.array(rows.bounds_ms),
            _crowd_array(producers),
            _crowd_array(consumers),
        ],
        fields=list(_REPORT_TYPE),
    )
    nothing: list[Any] = [pa.nulls(number, field.type) for field in ROWS_SCHEMA][1:-1]
    return pa.RecordBatch.from_arrays([pa.array(rows.names, pa.string()), *nothing, report], schema=ROWS_SCHEMA)


def sample_rows(topics: list[str], roles: list[int], vectors: Floats, heights: list[float], adjustments: list[float]) -> Any:
    """Samples as a batch of :data:`ROWS_SCHEMA`."""
    return pa.RecordBatch.from_arrays(
        [
            pa.array(topics, pa.string()),
            pa.array(roles, pa.int8()),
            list_array(vectors),
            pa.array(heights, pa.float64()),
            pa.array(adjustments, pa.float64()),
            pa.nulls(len(topics), _REPORT_TYPE),
        ],
        schema=ROWS_SCHEMA,
    )


def _crowd_array(crowds: Crowds) -> pa.StructArray:
    places = crowds.centroids
    return pa.StructArray.from_arrays(
        [
            pa.array(crowds.counts, pa.int64()),
            list_array(places.vectors),
            pa.array(places.heights),
            pa.array(places.adjustments),
            pa.array(crowds.deviation_ms),
            pa.array(crowds.worst_ms),
        ],
        fields=list(_CROWD_TYPE),
    )


def list_array(vectors: Floats) -> pa.ListArray:
    """A list a row."""
    rows, columns = vectors.shape
    offsets = pa.array(np.arange(rows + 1, dtype=np.int32) * np.int32(columns))
    return pa.ListArray.from_arrays(offsets, pa.array(np.ascontiguousarray(vectors).reshape(-1)))


def list_rows(lists: pa.ListArray, dimensions: int = DIMENSIONS) -> tuple[Floats, Mask]:
    """Lists as rows of a matrix, and which have as many numbers as they should; others are zeros."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0).to_numpy(zero_copy_only=False)
    good: Mask = lengths == dimensions
    if good.all() and not lists.null_count:
        flat = _floats(lists.flatten(), np.nan)
        return flat.reshape(len(lists), dimensions), good
    vectors = np.zeros((len(lists), dimensions))
    if good.any():
        vectors[good] = _floats(lists.filter(pa.array(good)).flatten(), np.nan).reshape(-1, dimensions)
    return vectors, good


def _credible(vectors: Floats, heights: Floats, adjustments: Floats) -> Mask:
    """:func:`nearcast.placement.gathering.credible` for many. The comparisons are false for what is not a number."""
    good: Mask = np.abs(vectors).max(axis=1, initial=0.0) < MAX_COORDINATE_MS
    good &= (heights >= 0.0) & (heights < MAX_COORDINATE_MS) & (np.abs(adjustments) < MAX_COORDINATE_MS)
    return good


def _array(table: pa.Table, name: str) -> Any:
    """A column in one piece."""
    column = table.column(name)
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks)
        if column.num_chunks
        else pa.array([], column.type)
    )


def _floats(array: pa.Array, missing: float) -> Floats:
    if array.null_count:
        array = pc.fill_null(array, missing)
    floats: Floats = array.to_numpy(zero_copy_only=False)
    return floats


def _integers(array: pa.Array, missing: int) -> Indices:
    if array.null_count:
        array = pc.fill_null(array, missing)
    integers: Indices = array.to_numpy(zero_copy_only=False).astype(np.int64)
    return integers


def _positive(values: Floats) -> Floats:
    return np.where(np.isfinite(values) & (values > 0.0), values, 0.0)

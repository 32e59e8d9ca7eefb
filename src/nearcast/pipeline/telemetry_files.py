"""Telemetry in files: the tables ``samples``, ``topics`` and ``brokers``, as Parquet, read and made up.

========  =====================================================================================================================
table     columns; further ones are passed over
========  =====================================================================================================================
samples   ``topic string, role tinyint`` (0 producer, 1 consumer), ``vector array<double>, height double``; if there,
          ``adjustment double``: a client's part in a topic, and its coordinate
topics    ``topic string, epoch bigint, owner string, in_per_second double, out_per_second double``; if there,
          ``max_latency_ms double``, and ``producers``, ``consumers``: crowds that are not among the samples
brokers   ``broker string, time double, vector array<double>, height double, cpu double, memory double, network double,
          messages_out_per_second double``; if there, ``adjustment double``
========  =====================================================================================================================

:func:`generate` writes tables of any size: brokers and clients scattered around cities, topics whose clients are mostly near
each other, most owned where they should be and a share of them elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from nearcast.coordinates.coordinate import DIMENSIONS
from nearcast.errors import PipelineError
from nearcast.pipeline.telemetry_tables import CROWD, SAMPLE, list_array
from nearcast.placement.gathering import fleet_of
from nearcast.telemetry.places import Floats, Places
from nearcast.telemetry.records import BrokerReport, Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from nearcast.placement.topics import Fleet

_REQUIRED: Final = {
    "samples": {"topic": "string", "role": "tinyint", "vector": "array<double>", "height": "double"},
    "topics": {
        "topic": "string",
        "epoch": "bigint",
        "owner": "string",
        "in_per_second": "double",
        "out_per_second": "double",
    },
    "brokers": {
        "broker": "string",
        "time": "double",
        "vector": "array<double>",
        "height": "double",
        "cpu": "double",
        "memory": "double",
        "network": "double",
        "messages_out_per_second": "double",
    },
}


def read_tables(spark: SparkSession, directory: Path) -> tuple[DataFrame, Fleet, float]:
    """Rows of :data:`~nearcast.pipeline.telemetry_tables.ROWS`, the brokers, and the time of the last report."""
    from pyspark.sql import functions as F  # noqa: N812 - PySpark's own convention

    samples, topics, brokers = (_table(spark, directory, name) for name in _REQUIRED)
    bound = F.col("max_latency_ms") if "max_latency_ms" in topics.columns else F.lit(None).cast("double")
    crowds = [
        F.col(name).cast(CROWD) if name in topics.columns else F.lit(None).cast(CROWD) for name in ("producers", "consumers")
    ]
    adjustment = F.col("adjustment") if "adjustment" in samples.columns else F.lit(0.0)
    report = F.struct(
        "epoch",
        "owner",
        (F.col("in_per_second") + F.col("out_per_second")).alias("rate"),
        bound.cast("double").alias("max_latency_ms"),
        crowds[0].alias("producers"),
        crowds[1].alias("consumers"),
    )
    reports = topics.select("topic", report.alias("report"))
    columns = samples.select("topic", "role", "vector", "height", adjustment.cast("double").alias("adjustment"))
    rows = columns.unionByName(reports, allowMissingColumns=True)
    found = [_broker(row.asDict()) for row in brokers.collect()]
    return rows, fleet_of(found), max((report.time for report in found), default=0.0)


def _table(spark: SparkSession, directory: Path, name: str) -> DataFrame:
    from pyspark.errors import AnalysisException

    path = directory / name
    try:
        frame = spark.read.parquet(str(path))
    except AnalysisException as error:
        raise PipelineError(f"{path} is no Parquet: {error.getCondition()}") from error
    found = {field.name: field.dataType.simpleString() for field in frame.schema}
    for column, kind in _REQUIRED[name].items():
        if column not in found:
            raise PipelineError(f"{path} has no column {column} ({kind}); it has {', '.join(found)}")
        if found[column] != kind:
            frame = frame.withColumn(column, frame[column].cast(kind))
    return frame


def _broker(row: dict[str, Any]) -> BrokerReport:
    place = None
    if row["vector"] is not None and row["height"] is not None:
        place = Place(tuple(row["vector"]), row["height"], row.get("adjustment") or 0.0)
    return BrokerReport(
        broker=row["broker"],
        time=row["time"] or 0.0,
        coordinate=place,
        cpu=row["cpu"] or 0.0,
        memory=row["memory"] or 0.0,
        network=row["network"] or 0.0,
        messages_out_per_second=row["messages_out_per_second"] or 0.0,
    )


class Synthesis(msgspec.Struct, frozen=True, kw_only=True):
    """Tables that are made up. The same numbers give the same tables."""

    samples: int = 10_000_000
    topics: int = 1_000_000
    brokers: int = 200
    misplaced: float = 0.05
    """Share of topics that are owned anywhere rather than near their clients."""
    overloaded: float = 0.02
    """Share of brokers with more load than they should have."""
    bound_ms: float = 40.0
    seed: int = 7
    time: float = 1_700_000_000.0
    dimensions: int = DIMENSIONS


_CITIES: Final = 64
_SPREAD_MS: Final = 45.0
"""Standard deviation of cities in each of three dimensions: 80 ms or so between two of them."""


class _World:
    """Where cities and brokers are, for every task the same."""

    def __init__(self, synthesis: Synthesis) -> None:
        rng = np.random.default_rng([synthesis.seed, 0])
        self.cities = np.zeros((_CITIES, synthesis.dimensions))
        self.cities[:, :3] = rng.normal(0.0, _SPREAD_MS, (_CITIES, 3))
        number = synthesis.brokers
        self.names = [f"broker-{row:04d}" for row in range(number)]
        at = np.arange(number) % _CITIES
        vectors = self.cities[at] + rng.normal(0.0, 1.5, (number, synthesis.dimensions))
        self.places = Places(vectors, rng.uniform(0.2, 2.0, number), rng.normal(0.0, 0.05, number))
        self.cpu = rng.uniform(0.1, 0.6, number)
        self.cpu[rng.permutation(number)[: round(number * synthesis.overloaded)]] = 0.93
        nearest = Places(self.cities, np.full(_CITIES, 0.01), np.zeros(_CITIES)).matrix_ms(self.places)
        self.nearest = nearest.argmin(axis=1) if number else np.zeros(_CITIES, np.int64)


def generate(spark: SparkSession, directory: Path, synthesis: Synthesis) -> None:
    """Write the three tables into a new directory. Executors do it, a part of the topics each."""
    world = _World(synthesis)
    directory.mkdir(parents=True)
    per_broker = np.full(synthesis.brokers, 8.0 * synthesis.topics / max(1, synthesis.brokers))
    brokers = pa.table(
        {
            "broker": world.names,
            "time": np.full(synthesis.brokers, synthesis.time),
            "vector": list_array(world.places.vectors),
            "height": world.places.heights,
            "adjustment": world.places.adjustments,
            "cpu": world.cpu,
            "memory": np.full(synthesis.brokers, 0.3),
            "network": np.full(synthesis.brokers, 0.1),
            "messages_out_per_second": per_broker,
        }
    )
    (directory / "brokers").mkdir()
    pq.write_table(brokers, directory / "brokers" / "part-0.parquet")
    tasks = max(1, min(64, synthesis.samples // 250_000))
    reports = "topic string, epoch bigint, owner string, in_per_second double, out_per_second double, max_latency_ms double"
    for name, schema, make in (("topics", reports, _topics), ("samples", SAMPLE, _samples)):
        made = spark.range(0, tasks, 1, tasks).mapInArrow(_task(synthesis, tasks, make), schema)
        made.write.parquet(str(directory / name))


def _task(
    synthesis: Synthesis, tasks: int, make: Callable[[Synthesis, _World, Any, Any], pa.RecordBatch]
) -> Callable[[Iterable[Any]], Iterator[Any]]:
    def work(batches: Iterable[Any]) -> Iterator[Any]:
        world = _World(synthesis)
        for batch in batches:
            for task in batch.column(0).to_pylist():
                rows = np.arange(synthesis.topics * task // tasks, synthesis.topics * (task + 1) // tasks)
                yield make(synthesis, world, rows, np.random.default_rng([synthesis.seed, 1, task]))

    return work


def _names(topics: Any) -> pa.Array:
    return pa.array([f"game/{number >> 10}/zone/{number}" for number in topics.tolist()], pa.string())


def _homes(synthesis: Synthesis, topics: Any) -> Any:
    """Each topic's city, whichever task asks."""
    return (topics * 2_654_435_761 + synthesis.seed) % 4_294_967_296 % _CITIES


def _topics(synthesis: Synthesis, world: _World, topics: Any, rng: np.random.Generator) -> pa.RecordBatch:
    number = len(topics)
    owner = world.nearest[_homes(synthesis, topics)]
    elsewhere = rng.random(number) < synthesis.misplaced
    owner = np.where(elsewhere, rng.integers(0, synthesis.brokers, number), owner)
    rate = rng.lognormal(1.0, 1.0, number)
    return pa.RecordBatch.from_pydict(
        {
            "topic": _names(topics),
            "epoch": pa.array(np.full(number, round((synthesis.time - 3_600.0) * 1e6))),
            "owner": pa.array([world.names[row] for row in owner.tolist()], pa.string()),
            "in_per_second": rate,
            "out_per_second": 3.0 * rate,
            "max_latency_ms": np.full(number, synthesis.bound_ms),
        }
    )


def _samples(synthesis: Synthesis, world: _World, topics: Any, rng: np.random.Generator) -> pa.RecordBatch:
    """Clients of these topics: around the topic's city most of the time, in another now and then; in no order."""
    number = round(synthesis.samples * len(topics) / max(1, synthesis.topics))
    chosen = topics[rng.integers(0, len(topics), number)] if len(topics) else topics
    home = _homes(synthesis, chosen)
    vectors: Floats = world.cities[home] + rng.normal(0.0, 2.0, (number, synthesis.dimensions))
    return pa.RecordBatch.from_pydict(
        {
            "topic": _names(chosen),
            "role": pa.array((rng.random(number) < 0.7).astype(np.int8)),
            "vector": list_array(vectors),
            "height": rng.uniform(1.0, 9.0, number),
            "adjustment": rng.normal(0.0, 0.05, number),
        }
    )

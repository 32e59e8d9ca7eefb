"""What a user's pipeline gets as ``topics``: reading and writing a broker's topics with the broker's address filled in.

Thin: everything is ``spark.read/readStream.format("nearcast")`` and its writing counterparts, which remain usable as they are
(``topics.options`` has the connection's options).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nearcast.errors import PipelineError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


class TopicFrames:
    """A broker's topics as DataFrames.

    ``parameters`` are what ``--set NAME=VALUE`` gave; ``trigger`` is what ``writeStream.trigger(**topics.trigger)`` should
    have: ``availableNow`` when the job was started so, else as fast as it goes.
    """

    def __init__(
        self,
        spark: SparkSession,
        options: Mapping[str, str],
        *,
        checkpoints: Path,
        available_now: bool = False,
        parameters: Mapping[str, str] | None = None,
    ) -> None:
        self.options = dict(options)
        self.parameters = dict(parameters or {})
        self.available_now = available_now
        self._spark = spark
        self._checkpoints = checkpoints
        self._names: set[str] = set()

    @property
    def trigger(self) -> dict[str, Any]:
        return {"availableNow": True} if self.available_now else {"processingTime": "0 seconds"}

    def read(self, *filters: str, columns: Sequence[str] | None = None, **options: object) -> DataFrame:
        """What topics hold now: ``topics.read("sensors/#", starting_time="2026-05-01")``.

        ``columns`` reads only those, which is faster. Options of the source may be written ``starting_time`` or
        ``startingTime``.
        """
        reader = self._spark.read.format("nearcast").options(**self._source_options(filters, options))
        if columns is not None:
            reader = reader.schema(_schema(columns))
        return reader.load()

    def stream(self, *filters: str, columns: Sequence[str] | None = None, **options: object) -> DataFrame:
        """What arrives from now on (``starting_offsets="earliest"``: all there is first), as a streaming DataFrame."""
        reader = self._spark.readStream.format("nearcast").options(**self._source_options(filters, options))
        if columns is not None:
            reader = reader.schema(_schema(columns))
        return reader.load()

    def write(self, frame: DataFrame, topic: str | None = None, **options: object) -> None:
        """Publish the rows of a DataFrame: columns ``topic`` (or one ``topic`` for all) and ``payload``, and more."""
        frame.write.format("nearcast").mode("append").options(**self._sink_options(topic, options)).save()

    def write_stream(
        self,
        frame: DataFrame,
        topic: str | None = None,
        *,
        name: str = "topics",
        checkpoint: str | Path | None = None,
        output_mode: str = "append",
        **options: object,
    ) -> StreamingQuery:
        """Publish the rows of a streaming DataFrame, each once, as they come.

        ``name`` is the query's, and that of its directory below ``--checkpoint``; ``checkpoint`` names another directory. A
        pipeline with several queries gives each a name of its own.
        """
        if checkpoint is None:
            checkpoint = self.checkpoint(name)
        writer = frame.writeStream.format("nearcast").queryName(name).outputMode(output_mode).trigger(**self.trigger)
        return writer.options(**self._sink_options(topic, options)).start(checkpointLocation=str(checkpoint))

    def checkpoint(self, name: str) -> str:
        """The directory where a query of this name keeps how far it is; for queries that you start yourself."""
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name) or name.strip(".") == "":
            raise PipelineError(f"a query cannot be called {name!r}: letters, digits, - and _ make a directory's name")
        if name in self._names:
            raise PipelineError(f"two queries are called {name!r}: give each its name, so that each has its checkpoint")
        self._names.add(name)
        return str((self._checkpoints / name).absolute())

    def _source_options(self, filters: Sequence[str], options: Mapping[str, object]) -> dict[str, str]:
        if not filters:
            raise PipelineError('name the topics to read: topics.read("sensors/#")')
        return {**self.options, "topics": json.dumps(list(filters)), **_texts(options)}

    def _sink_options(self, topic: str | None, options: Mapping[str, object]) -> dict[str, str]:
        given = {**self.options, **_texts(options)}
        if topic is not None:
            given["topic"] = topic
        return given


def _texts(options: Mapping[str, object]) -> dict[str, str]:
    """``starting_time=...`` as Spark's ``startingTime``, with values as text."""
    texts = {}
    for name, value in options.items():
        first, *rest = name.split("_")
        camel = first + "".join(word.capitalize() for word in rest)
        texts[camel] = str(value).lower() if isinstance(value, bool) else str(value)
    return texts


def _schema(columns: Sequence[str]) -> Any:
    from pyspark.sql.types import StructType

    from nearcast.pipeline.source import SCHEMA

    known = {field.name: field for field in SCHEMA.fields}
    for column in columns:
        if column not in known:
            raise PipelineError(f"topics have no column {column!r}: there are {', '.join(known)}")
    return StructType([known[column] for column in columns])

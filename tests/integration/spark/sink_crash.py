"""A driver that dies between the sink's commit and Spark's: run by test_sink.py in a process of its own.

    python -m tests.integration.spark.sink_crash URL DIRECTORY

Every task fails at its first attempt, after it has handed some rows in. The driver and its JVM are killed as soon as the
broker has committed batch 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from nearcast.pipeline.session import build_session
from nearcast.pipeline.sink import StreamSinkWriter
from tests.integration.spark.conftest import QUICK


class DeadlyWriter(StreamSinkWriter):
    """The sink, in a driver that has an accident."""

    def __init__(self, options: dict[str, str], schema: StructType, overwrite: bool, driver: int) -> None:
        super().__init__(options, schema, overwrite)
        self._driver = driver

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return super().write(self._failing(iterator))

    def _failing(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        task = TaskContext.get()
        for batch in batches:
            yield batch
            if self._driver and task is not None and task.attemptNumber() == 0:
                raise RuntimeError("this attempt fails on purpose")

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        super().commit(messages, batchId)
        if self._driver and batchId == 1:
            for parent in psutil.Process().parents():
                if parent.name() == "java":
                    parent.kill()
            os.kill(self._driver, signal.SIGKILL)


class DeadlySource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "deadly"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802 - Spark's name
        options = dict(self.options)
        return DeadlyWriter({"url": options["url"], "topic": options["topic"]}, schema, overwrite, int(options["driver"]))


def run(spark: SparkSession, url: str, directory: Path, *, kill: bool) -> None:
    """Publish the files of a directory, a micro-batch for each; without ``kill`` nothing happens to anybody."""
    spark.dataSource.register(DeadlySource)
    stream = spark.readStream.schema("payload string").option("maxFilesPerTrigger", 1).parquet(str(directory / "in"))
    query = (
        stream.repartition(2)
        .writeStream.format("deadly")
        .option("url", url)
        .option("topic", "once")
        .option("driver", os.getpid() if kill else 0)
        .option("checkpointLocation", str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    session = build_session("sink crash", master="local[2,3]", settings=QUICK)
    run(session, sys.argv[1], Path(sys.argv[2]), kill=True)

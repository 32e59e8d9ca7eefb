"""A driver of its own that copies topics to files, one per micro-batch: run, and killed, by test_stream_source.py.

    python -m tests.integration.spark.stream_copy URL DIRECTORY

Each batch is written to a file of its number that takes the place of an earlier one: what a repeated batch writes shows.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from nearcast.pipeline.session import build_session
from tests.integration.spark.conftest import QUICK


def copy(frame: DataFrame, batch: int, directory: Path) -> None:
    """Write a batch; there is one file for each, whole or not at all."""
    rows = [(row.topic, row["index"], row.payload.decode()) for row in frame.select("topic", "index", "payload").collect()]
    draft = directory / f"{batch}.draft"
    draft.write_text(json.dumps(rows), encoding="utf-8")
    draft.rename(directory / f"{batch}.json")


def read_copies(directory: Path) -> list[tuple[str, int, str]]:
    """All rows of all batches, in the order of the batches."""
    files = sorted(directory.glob("*.json"), key=lambda path: int(path.stem))
    return [tuple(row) for path in files for row in json.loads(path.read_text(encoding="utf-8"))]


def run(spark: SparkSession, url: str, directory: Path) -> None:
    output = directory / "output"
    output.mkdir(exist_ok=True)
    frame = (
        spark.readStream.format("nearcast")
        .options(url=url, topics="copied/#", startingOffsets="earliest", maxRecordsPerTrigger="50")
        .load()
    )
    query = (
        frame.writeStream.option("checkpointLocation", str(directory / "checkpoint"))
        .foreachBatch(lambda rows, batch: copy(rows, batch, output))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    run(build_session("stream copy", master="local[2]", settings=QUICK), sys.argv[1], Path(sys.argv[2]))

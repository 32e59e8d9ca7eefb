"""Waiting for streaming queries: until all have ended, one has failed, or the time is up."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_TURN_SECONDS = 0.5


def await_queries(spark: SparkSession, timeout_seconds: float | None = None) -> None:
    """Wait until no streaming query of the session runs any more; when the time is up, stop those that do.

    The first failure stops the other queries and is raised. Queries that ended before this was called count too.
    """
    deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    known: dict[str, StreamingQuery] = {}
    try:
        while True:
            active = spark.streams.active
            known.update((str(query.runId), query) for query in active)
            for query in known.values():
                failure = query.exception()
                if failure is not None:
                    raise failure
            if not active:
                # One that failed before it was ever seen here: this raises for it.
                spark.streams.awaitAnyTermination(0)
                return
            turn_seconds = _TURN_SECONDS
            if deadline is not None:
                turn_seconds = min(turn_seconds, deadline - time.monotonic())
                if turn_seconds <= 0:
                    return
            active[0].awaitTermination(max(turn_seconds, 0.001))  # type: ignore[arg-type]  # seconds, in parts too
    finally:
        stop_queries(spark)
        forget_queries(spark)


def stop_queries(spark: SparkSession) -> None:
    """Stop every streaming query of the session. What a query has not committed, it does again after a restart."""
    for query in spark.streams.active:
        query.stop()


def forget_queries(spark: SparkSession) -> None:
    """Those that ended before count no more: for a session that has seen other jobs."""
    spark.streams.resetTerminated()

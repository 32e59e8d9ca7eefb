"""What Spark is doing at the moment: stages with their tasks, streaming queries with their last micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nearcast.errors import PipelineError
from nearcast.pipeline.offsets import describe

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True)
class Stage:
    """A stage that has tasks to do."""

    id: int
    name: str
    tasks: int
    done: int
    active: int
    failed: int


@dataclass(frozen=True)
class Query:
    """A streaming query after its last micro-batch."""

    name: str
    batch: int
    rows: int
    """In the last micro-batch that had to do with any."""

    total_rows: int
    rows_per_second: float
    batch_ms: int
    lag_records: int | None
    """Records in the topics that are not read yet, when the source says so."""


class Watcher:
    """Looks at a session. Called from one thread; counts rows of micro-batches, each once."""

    def __init__(self, session: SparkSession) -> None:
        self._session = session
        self._tracker = session.sparkContext.statusTracker()
        self._totals: dict[str, tuple[int, int]] = {}

    def stages(self) -> list[Stage]:
        stages = []
        for stage_id in self._tracker.getActiveStageIds():
            info = self._tracker.getStageInfo(stage_id)
            if info is not None:
                stages.append(
                    Stage(
                        id=info.stageId,
                        name=info.name,
                        tasks=info.numTasks,
                        done=info.numCompletedTasks,
                        active=info.numActiveTasks,
                        failed=info.numFailedTasks,
                    )
                )
        return sorted(stages, key=lambda stage: stage.id)

    def queries(self) -> list[Query]:
        return [self._query(query) for query in self._session.streams.active]

    def _query(self, query: Any) -> Query:
        run = str(query.runId)
        last_batch, total_rows = self._totals.get(run, (-1, 0))
        latest: Mapping[str, Any] | None = None
        for progress in query.recentProgress:
            if progress["batchId"] > last_batch:
                last_batch = progress["batchId"]
                total_rows += _rows(progress)
            latest = progress
        self._totals[run] = (last_batch, total_rows)
        name = query.name or str(query.id)[:8]
        if latest is None:
            return Query(name, -1, 0, total_rows, 0.0, 0, None)
        return Query(
            name=name,
            batch=latest["batchId"],
            rows=_rows(latest),
            total_rows=total_rows,
            rows_per_second=_number(latest["processedRowsPerSecond"]),
            batch_ms=int(latest["durationMs"].get("triggerExecution", 0)),
            lag_records=_lag(latest),
        )


def _rows(progress: Mapping[str, Any]) -> int:
    return sum(source["numInputRows"] for source in progress["sources"])


def _number(value: object) -> float:
    """Rates are endless or no number when no time passed."""
    return value if isinstance(value, float) and value - value == 0 else 0.0


def _lag(progress: Mapping[str, Any]) -> int | None:
    """How far the newest offset is ahead of the last one read, summed over topics."""
    lag: int | None = None
    for source in progress["sources"]:
        end, newest = _offset(source["endOffset"]), _offset(source["latestOffset"])
        if end is not None and newest is not None:
            lag = (lag or 0) + sum(max(0, index - end.get(topic, 0)) for topic, index in newest.items())
    return lag


def _offset(text: object) -> dict[str, int] | None:
    """Of our source; other sources have offsets of other kinds."""
    try:
        return describe(text) if isinstance(text, str) else None
    except (PipelineError, ValueError, AttributeError, TypeError):
        return None

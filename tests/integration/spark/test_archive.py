"""The archive job against a live broker: every record once, in the right directory, over runs, crashes and gaps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.errors import PipelineError
from nearcast.pipeline import archive
from nearcast.pipeline.archive_files import Archive, read_gaps
from nearcast.pipeline.progress import Silent
from tests.integration.spark.conftest import LogBroker
from tests.integration.spark.publishing import publish, records

pytestmark = pytest.mark.integration

LONG = "archived/" + "é" * 300
TOPICS = ["archived/plain", "archived/100%", "archived/b:c=d", "archived/2026", LONG]


def run(spark: SparkSession, broker: LogBroker, directory: Path, **options: object) -> dict[str, object]:
    chosen = {"topics": ("archived/#",), "url": broker.bulk_url, "out": str(directory), "available_now": True, **options}
    made = archive.Options(**chosen)  # type: ignore[arg-type]
    archive.check(made)
    return dict(archive.run(spark, made, Silent()))


def test_records_are_archived_once_by_topic_and_date(
    spark: SparkSession, own_broker: Callable[[], LogBroker], tmp_path: Path
) -> None:
    broker = own_broker()
    out = tmp_path / "archive"
    sent = [(topic, f"{number}") for number in range(20) for topic in TOPICS]
    publish(broker, sent)
    assert run(spark, broker, out, max_records=60)["records"] == 100, "in two micro-batches"
    # A driver that was killed after the last batch was in, before Spark noted it: the batch is repeated, and is in already.
    commits = sorted((out / "_checkpoint" / "commits").iterdir(), key=lambda path: int(path.name))
    commits[-1].unlink()
    publish(broker, [("archived/plain", "more")])
    assert run(spark, broker, out)["records"] == 1
    assert commits[-1].exists(), "the batch was repeated"
    kept = archive.read_archive(spark, out)
    expected = sorted((record.topic, record.index, record.payload) for record in records(broker, "archived/#"))
    assert len(expected) == 101
    rows = kept.collect()
    assert sorted((row.topic, row["index"], bytes(row.payload)) for row in rows) == expected
    assert all(row.date == row.time.date() for row in rows)
    by_key = {row.topic_key: row.topic for row in rows}
    assert len(by_key) == len(TOPICS)
    assert by_key["archived/plain"] == "archived/plain"
    names = [path.name for path in out.glob("topic_key=*")]
    assert all(name.isascii() and len(name) <= 255 for name in names)
    (directory,) = (out / "topic_key=archived%2Fplain").glob("date=*")
    before = len(list(directory.glob("*.parquet")))
    assert run(spark, broker, out, compact=True, compact_files=2)["files saved"] == len(TOPICS) + 1
    assert before == 3
    assert len(list(directory.glob("*.parquet"))) == 1
    spark.catalog.clearCache()
    again = archive.read_archive(spark, out)
    assert sorted((row.topic, row["index"], bytes(row.payload)) for row in again.collect()) == expected


def test_records_that_retention_removed_are_noted(
    spark: SparkSession, own_broker: Callable[[str], LogBroker], tmp_path: Path
) -> None:
    broker = own_broker('[[topics]]\ntopic = "#"\nretention = { max_records = 10 }\n')
    out = tmp_path / "archive"
    publish(broker, [("archived/a", "first")])
    assert run(spark, broker, out, hourly=True)["records"] == 1
    publish(broker, [("archived/a", f"{number}") for number in range(100)])
    with BlockingTopics(broker.bulk_url) as topics:
        # Retention is carried out now and then.
        while topics.topics("archived/a")[0].first_index <= 2:
            threading.Event().wait(0.02)
    result = run(spark, broker, out, hourly=True)
    found = archive.read_archive(spark, out)
    assert "hour" in found.columns
    kept = [row["index"] for row in found.collect()]
    assert len(kept) == len(set(kept)) == result["records"] + 1  # type: ignore[operator]
    (gap,) = read_gaps(out)
    assert result["gaps"] == 1
    assert gap.topic == "archived/a"
    assert set(range(gap.first_index, gap.next_index)) == set(range(1, 102)) - set(kept), "what is missing is what was noted"


def test_a_checkpoint_that_lost_its_last_batch_is_noticed(spark: SparkSession, tmp_path: Path) -> None:
    """After a power cut Spark may give the number of a batch that is in the archive to another one."""
    with Archive(tmp_path) as files:
        files.begin("None")  # outside a query there is no id
        assert files.state is not None
        files.state.last_batch, files.state.next_indexes = 3, {"archived/a": 8}
        filling = archive.Filling(files, archive.Options(out=str(tmp_path)), Silent())
        repeated = spark.sql("SELECT 'archived/a' AS topic, 7L AS index")
        filling.batch(repeated, 3)
        with pytest.raises(PipelineError, match=r"lost batch 3 .*: record 8 of 'archived/a' would be left out"):
            filling.batch(repeated.selectExpr("topic", "index + 1 AS index"), 3)


def test_what_cannot_be_archived_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match="say which topics"):
        archive.check(archive.Options(out=str(tmp_path)))
    with pytest.raises(PipelineError, match="s3a:// is not"):
        archive.check(archive.Options(out="s3a://bucket/x", topics=("a",)))
    with pytest.raises(PipelineError, match="nothing to compact"):
        archive.check(archive.Options(out=str(tmp_path / "none"), compact=True))
    with pytest.raises(PipelineError, match="option topics"):
        archive.check(archive.Options(out=str(tmp_path), topics=("a/#/b",)))

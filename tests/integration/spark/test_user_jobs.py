"""Files of users as jobs, against a live broker: reading and writing topics, ending, failing."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.errors import ConfigError
from nearcast.pipeline import sweep, user_jobs
from nearcast.pipeline.failures import in_one_line
from nearcast.pipeline.progress import Silent
from nearcast.pipeline.queries import await_queries
from nearcast.pipeline.watching import Watcher
from tests.integration.spark.conftest import LogBroker

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture(autouse=True)
def _in_an_own_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def run(spark: SparkSession, text: str, name: str, **options: Any) -> Any:
    Path(name).write_text(text)
    given = user_jobs.Options(file=name, **options)
    user_jobs.check(given)
    return user_jobs.run(spark, given, Silent())


BOTH_WAYS = """
from pyspark.sql import functions as F


def pipeline(spark, topics):
    prefix = topics.parameters["prefix"]
    frame = topics.read(f"{prefix}/in/#", columns=["topic", "payload"])
    totals = frame.groupBy().agg(F.sum(F.col("payload").cast("string").cast("int")).alias("total"))
    topics.write(totals.select(F.col("total").cast("string").alias("payload")), topic=f"{prefix}/total")
    stream = topics.stream(f"{prefix}/in/#", starting_offsets="earliest")
    doubled = stream.select(
        F.regexp_replace("topic", "/in/", "/out/").alias("topic"),
        (F.col("payload").cast("string").cast("int") * 2).cast("string").alias("payload"),
    )
    topics.write_stream(doubled, name="doubled")
    return {"read": frame.count()}
"""


def test_a_file_reads_and_writes_topics_and_goes_on_where_it_was(spark: SparkSession, log_broker: LogBroker) -> None:
    with BlockingTopics(log_broker.bulk_url) as topics:
        for number in (1, 2, 3):
            topics.publish("both/in/a", str(number).encode())
        options = {"url": log_broker.bulk_url, "set": ("prefix=both",), "available_now": True}
        assert run(spark, BOTH_WAYS, "both_ways.py", **options) == {"read": 3}
        assert topics.get("both/total", 1).payload == b"6"
        assert [topics.get("both/out/a", index).payload for index in (1, 2, 3)] == [b"2", b"4", b"6"]
        assert Path("checkpoints/both_ways/doubled/commits").is_dir()
        topics.publish("both/in/a", b"4")
        assert run(spark, BOTH_WAYS, "both_ways.py", **options) == {"read": 4}
        assert topics.latest_index("both/out/a") == 4, "only what is new"
        assert topics.get("both/out/a", 4).payload == b"8"


FAILING = """
from pyspark.sql.functions import udf


def broken(value):
    return 1 / (value - 3)


def pipeline(spark, topics):
    rate = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
    fine = rate.writeStream.format("noop").queryName("fine").option("checkpointLocation", topics.checkpoint("fine"))
    fine.start()
    failing = rate.select(udf(broken)("value")).writeStream.format("noop")
    failing.option("checkpointLocation", topics.checkpoint("failing")).start()
"""


def test_a_query_that_fails_ends_the_others_and_names_the_users_line(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="division by zero") as raised:
        run(spark, FAILING, "failing.py")
    assert in_one_line(raised.value, Path("failing.py")) == "failing.py:6: ZeroDivisionError: division by zero"
    assert spark.streams.active == []


def test_the_time_is_up(spark: SparkSession, tmp_path: Path) -> None:
    query = (
        spark.readStream.format("rate").load().writeStream.format("noop").queryName("timed")
        .option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip
    watcher = Watcher(spark)
    query.processAllAvailable()
    (seen,) = watcher.queries()
    assert seen.name == "timed"
    assert seen.batch >= 0
    await_queries(spark, timeout_seconds=0.1)
    assert not query.isActive
    assert watcher.queries() == []


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("topics.read()", "file.py:2: name the topics to read"),
        ("topics.read('a/#', columns=['nope'])", "file.py:2: topics have no column 'nope': there are topic, index"),
        ("topics.checkpoint('a/b')", "file.py:2: a query cannot be called 'a/b'"),
        ("topics.checkpoint('x'), topics.checkpoint('x')", "file.py:2: two queries are called 'x'"),
        ("topics.read('a/#', nonsense=1).count()", "unknown option nonsense for reading"),
        (
            "spark.range(3).selectExpr('nope').collect()",
            "file.py:2: A column, variable, or function parameter",
        ),
    ],
)
def test_mistakes_are_told_in_one_line(spark: SparkSession, body: str, expected: str) -> None:
    user_jobs._loaded.clear()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the line is what counts
        run(spark, f"def pipeline(spark, topics):\n    {body}\n", "file.py")
    assert expected in in_one_line(raised.value, Path("file.py"))


def test_a_broker_that_is_not_there_is_one_line(spark: SparkSession) -> None:
    body = "def pipeline(spark, topics):\n    topics.read('a/#', reconnect_seconds=0).count()\n"
    user_jobs._loaded.clear()
    with pytest.raises(Exception) as raised:  # noqa: PT011  # the line is what counts
        run(spark, body, "file.py", url="nearcast://127.0.0.1:1")
    line = in_one_line(raised.value, Path("file.py"))
    assert "127.0.0.1:1" in line
    assert "Traceback" not in line


def test_what_the_guide_shows_runs(
    spark: SparkSession, log_broker: LogBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "pipelines.md").read_text()
    averages, walk, doubling = re.findall(r"^```python\n(.*?)^```", guide, re.DOTALL | re.MULTILINE)
    with BlockingTopics(log_broker.bulk_url) as topics:
        topics.publish("sensors/hall/temperature", b"20.5")
    run(spark, averages, "averages.py", url=log_broker.bulk_url, available_now=True)
    assert Path("checkpoints/averages/averages/commits").is_dir()
    Path("walk.py").write_text(walk)
    settings = ("steps=10,100", "stride=1..3")
    answer = sweep.run(spark, sweep.Options(function="walk.py:walk", set=settings, seeds="5", out="walks"), Silent())
    assert answer == {"points": 30, "failed": 0, "results": "walks/results.parquet"}
    # One session is enough for all tests.
    monkeypatch.setattr("nearcast.pipeline.session.build_session", lambda name, master: spark)
    monkeypatch.setattr("nearcast.pipeline.session.stop_session", lambda session: None)
    exec(compile(doubling, "doubling.py", "exec"), {"__name__": "doubling"})  # noqa: S102  # our own page
    assert "avg(value)" in capsys.readouterr().out


def test_a_password_comes_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("secret\n")
    options = user_jobs.Options(file="x.py", username="me", password_file=str(tmp_path / "password"), ca_file="ca.pem")
    assert user_jobs.connection_options(options) == {
        "url": "nearcast://127.0.0.1:7883", "username": "me", "password": "secret", "caFile": str(tmp_path / "ca.pem"),
    }  # fmt: skip
    with pytest.raises(ConfigError, match="--password-file gone"):
        user_jobs.connection_options(user_jobs.Options(file="x.py", password_file="gone"))

"""Spark reads topics of a replica set by the bulk port of a broker that has none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from nearcast.client import BlockingTopics
from tests.integration.broker.running import wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.test_owned_topics import meet
from tests.integration.test_replica_sets import leader_at

pytestmark = pytest.mark.integration

NAMES = ("b1", "b2", "b3", "b4")
COUNT = 300


@pytest.fixture
def fabric(tmp_path: Path) -> Iterator[ControlledFabric]:
    with ControlledFabric(tmp_path) as made:
        made.start(*NAMES, data=True)
        meet(made, *NAMES)
        made.nearcast("set", "create", "eu", "--members", "b1,b2,b3", "--preferred", "b2")
        made.nearcast("topic", "create", "orders/#", "--class", "owned", "--durable", "--set", "eu")
        wait_for("the preferred leader", lambda: leader_at(made, "b4") == "b2")
        yield made


def publish(fabric: ControlledFabric, first: int) -> None:
    with BlockingTopics(fabric.nodes["b4"].bulk_url) as topics:
        for topic in ("orders/a", "orders/b"):
            for begin in range(first, first + COUNT, 50):
                topics.publish_many(topic, [str(number).encode() for number in range(begin, begin + 50)])


def found(frame: DataFrame) -> list[tuple[str, int, bytes]]:
    rows = frame.select("topic", "index", "payload").collect()
    return sorted((row.topic, row["index"], bytes(row.payload)) for row in rows)


def test_a_batch_and_a_stream_at_a_broker_that_is_no_member(
    spark: SparkSession, fabric: ControlledFabric, tmp_path: Path
) -> None:
    """The stream goes on when the leader is dead: everything once."""
    options = {"url": fabric.nodes["b4"].bulk_url, "topics": "orders/#"}
    publish(fabric, 1)

    def expected(count: int) -> list[tuple[str, int, bytes]]:
        return [(topic, n, str(n).encode()) for topic in ("orders/a", "orders/b") for n in range(1, count + 1)]

    assert found(spark.read.format("nearcast").options(**options).load()) == expected(COUNT)
    rows = tmp_path / "rows"
    for count in (COUNT, 2 * COUNT):
        if count > COUNT:
            publish(fabric, COUNT + 1)
            fabric.nodes["b2"].kill()
        stream = spark.readStream.format("nearcast").options(**options, startingOffsets="earliest").load()
        query = (
            stream.writeStream.format("parquet")
            .options(path=str(rows), checkpointLocation=str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination(120)
        assert found(spark.read.parquet(str(rows))) == expected(count)

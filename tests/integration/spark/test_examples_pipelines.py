"""The pipelines in examples/ run against a live broker with real MQTT publishers, and their results are right."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from nearcast.pipeline.queries import await_queries
from nearcast.pipeline.topic_frames import TopicFrames
from nearcast.pipeline.user_code import load_file
from tests.integration.spark.conftest import LogBroker
from tests.integration.spark.publishing import contents, publish, records

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "pipelines"
START = datetime(2026, 5, 1, 12, tzinfo=UTC)


@pytest.fixture
def broker(own_broker: object) -> LogBroker:
    return own_broker()  # type: ignore[operator, no-any-return]


@pytest.fixture(autouse=True)
def _settings(spark: SparkSession) -> Iterator[None]:
    """One partition of state is enough here. Pipelines may choose where state is kept; the shared session keeps its choice."""
    keys = ("spark.sql.streaming.stateStore.providerClass", "spark.sql.shuffle.partitions")
    before = {key: spark.conf.get(key) for key in keys}
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    yield
    for key, value in before.items():
        spark.conf.set(key, value or "")


def run(spark: SparkSession, broker: LogBroker, name: str, directory: Path, **parameters: str) -> None:
    """What ``nearcast pipeline run examples/pipelines/NAME.py --available-now`` does, in the shared session."""
    topics = TopicFrames(
        spark, {"url": broker.bulk_url}, checkpoints=directory / name, available_now=True, parameters=parameters
    )
    load_file(EXAMPLES / f"{name}.py").pipeline(spark, topics)
    await_queries(spark)


def reading(topic: str, seconds: float, celsius: float) -> tuple[str, str]:
    return topic, json.dumps({"at": (START + timedelta(seconds=seconds)).isoformat(), "celsius": celsius})


def test_windowed_averages(spark: SparkSession, broker: LogBroker, tmp_path: Path) -> None:
    randomness = random.Random(4)
    values: dict[tuple[str, int], list[float]] = {}
    messages = []
    for number in range(600):
        sensor, seconds = randomness.choice("ab"), number * 0.5
        celsius = round(randomness.uniform(10, 30), 2)
        values.setdefault((sensor, int(seconds // 60)), []).append(celsius)
        messages.append(reading(f"sensors/{sensor}/temperature", seconds, celsius))
    publish(broker, [*messages, ("sensors/a/temperature", b"garbage"), reading("sensors/a/temperature", 900, 0.0)])
    run(spark, broker, "windowed_averages", tmp_path)
    for sensor in "ab":
        windows = sorted(contents(broker, f"averages/{sensor}"), key=lambda window: window["start"])
        assert [window["start"] for window in windows] == [f"2026-05-01T12:0{minute}:00Z" for minute in range(5)]
        for minute, window in enumerate(windows):
            expected = values[sensor, minute]
            assert window["count"] == len(expected)
            assert window["average"] == pytest.approx(statistics.fmean(expected))
            assert (window["lowest"], window["highest"]) == (min(expected), max(expected))
    # The next run goes on where this one ended: windows that were published are not published again.
    publish(broker, [reading("sensors/b/temperature", 1_000, 1.0), reading("sensors/b/temperature", 2_000, 1.0)])
    run(spark, broker, "windowed_averages", tmp_path)
    starts = [(record.topic, json.loads(record.payload)["start"]) for record in records(broker, "averages/+")]
    assert len(starts) == len(set(starts)) == 12


def test_anomaly_alerts(spark: SparkSession, broker: LogBroker, tmp_path: Path) -> None:
    randomness = random.Random(5)
    messages = []
    for number in range(100):
        for sensor, usual in (("kitchen", 21.0), ("freezer", -18.0)):
            celsius = usual + randomness.gauss(0, 0.5)
            if (sensor, number) in (("kitchen", 60), ("freezer", 80)):
                celsius = 5.0
            messages.append(reading(f"sensors/{sensor}/temperature", number, celsius))
    half = len(messages) // 2
    publish(broker, messages[:half])
    run(spark, broker, "anomaly_alerts", tmp_path)
    assert contents(broker, "alerts/#") == []
    publish(broker, messages[half:])
    run(spark, broker, "anomaly_alerts", tmp_path)
    (kitchen,) = contents(broker, "alerts/kitchen")
    (freezer,) = contents(broker, "alerts/freezer")
    assert kitchen["at"] == "2026-05-01T12:01:00Z"
    assert kitchen["expected"] == pytest.approx(21.0, abs=0.5), "what was learned in the first run is remembered in the second"
    assert freezer["at"] == "2026-05-01T12:01:20Z"
    assert freezer["sigmas"] > 20
    assert [record.qos for record in records(broker, "alerts/#")] == [2, 2]


def test_temperature_predictor(spark: SparkSession, broker: LogBroker, tmp_path: Path) -> None:
    randomness = random.Random(6)
    truths = {}
    messages = []
    cpu = 45.0
    for number in range(200):
        before, cpu = cpu, cpu + randomness.uniform(-2, 2)
        # The box is 25 degrees warmer inside, and follows the weather with some delay.
        outdoor = -25.0 + 1.1 * cpu + 0.8 * (cpu - before if number else 0.0)
        messages.append(reading("stations/field/cpu", number * 60, cpu))
        truths[(START + timedelta(minutes=number)).isoformat().replace("+00:00", "Z")] = outdoor
        # A thermometer was there for the first hundred minutes.
        if number < 100:
            messages.append(reading("stations/field/outdoor", number * 60 + 1, outdoor))
    publish(broker, messages)
    run(spark, broker, "temperature_predictor", tmp_path)
    predictions = contents(broker, "stations/field/predicted")
    assert len(predictions) == 190, "one for each reading after the first ten pairs"
    assert predictions[-1]["pairs"] == 100
    assert predictions[-1]["error"] < 0.5
    for prediction in predictions[100:]:
        assert prediction["celsius"] == pytest.approx(truths[prediction["at"]], abs=0.2)

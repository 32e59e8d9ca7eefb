"""Owned topics planned by Spark: on real brokers with a real controller, and on logs whose plan is known."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.mqtt.packets import Connect, Publish, Subscribe, SubscriptionRequest
from nearcast.pipeline import telemetry
from nearcast.pipeline.progress import Silent
from nearcast.pipeline.telemetry_rounds import BROKER, CLIENTS, TOPICS, topic_of
from nearcast.placement.deciding import decide
from nearcast.placement.gathering import Held, fleet_of, rows_of, topics_of
from nearcast.placement.plans import PlanRecord
from nearcast.placement.topics import PlacementSettings
from nearcast.telemetry.records import BrokerReport, ClientReport, ClientSample, Place, TopicReport, TopicSummary
from nearcast.telemetry.summaries import crowd
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.controllers import ControlledFabric
from tests.integration.spark.conftest import LogBroker

pytestmark = [pytest.mark.integration, pytest.mark.slow]

LOG = """
[[topics]]
topic = "$nearcast/telemetry/#"

[[security.acl]]
action = "allow"
access = "all"
topic = "#"

[[security.acl]]
action = "allow"
access = "all"
topic = "$nearcast/#"
"""

CONFIG = f"[fabric.telemetry]\ninterval_seconds = 0.5\nraw = true\n{LOG}"

LIMIT = 400.0
PLACED = (f"out_rate_limit={LIMIT:g}",)


def place(rng: random.Random) -> Place:
    return Place((rng.uniform(-40, 40), rng.uniform(-40, 40), *[0.0] * 6), rng.uniform(0.1, 6.0), 0.0)


class World:
    """Three brokers and sixty topics, each with clients at one broker, which is not always the owner."""

    def __init__(self) -> None:
        rng = random.Random(7)
        self.brokers = [
            BrokerReport(f"b{number}", 1.0, place(rng), cpu=0.2, messages_out_per_second=rate)
            for number, rate in enumerate((100.0, 450.0, 20.0))
        ]
        at = {report.broker: report.coordinate for report in self.brokers}
        self.summaries: dict[str, list[TopicSummary]] = {name: [] for name in at}
        self.samples: dict[str, list[ClientSample]] = {name: [] for name in at}
        for number in range(60):
            topic, owner, home = f"t/{number}", rng.choice(sorted(at)), rng.choice(sorted(at))
            clients = [[place(rng) for _ in range(rng.randint(1, 4))] for _ in range(2)]
            reporters = {owner, home}
            for name in sorted(reporters):
                mine = clients if name == home else [[], []]
                self.summaries[name].append(
                    TopicSummary(
                        topic,
                        number + 1,
                        owner,
                        crowd(mine[0], at[owner]),
                        crowd(mine[1], at[owner]),
                        in_per_second=10.0 if name == home else 0.0,
                        max_latency_ms=30.0,
                    )
                )
                self.samples[name] += [
                    ClientSample(topic, f"c{index}", role, each) for role in (0, 1) for index, each in enumerate(mine[role])
                ]

    def records(self, name: str, *, raw: bool = False, parts: int = 3, number: int = 1) -> list[tuple[str, bytes]]:
        """What broker ``name`` has in its log of one round."""
        report = next(report for report in self.brokers if report.broker == name)
        found = [(topic_of(BROKER, name), msgspec.json.encode(report))]
        for part in range(parts):
            summaries = TopicReport(name, 1.0, number, part, parts, self.summaries[name][part::parts])
            found.append((topic_of(TOPICS, name), msgspec.json.encode(summaries)))
            if raw:
                samples = ClientReport(name, 1.0, number, part, parts, self.samples[name][part::parts])
                found.append((topic_of(CLIENTS, name), msgspec.json.encode(samples)))
        return found

    def moves(self) -> set[tuple[str, str, str, str]]:
        """What a controller would decide on the same reports."""
        fleet = fleet_of(self.brokers)
        reported = [summary for summaries in self.summaries.values() for summary in summaries]
        # The directory: by name, as a controller has it.
        known = {each.topic: Held(each.owner, each.epoch) for each in sorted(reported, key=lambda summary: summary.topic)}
        merged = topics_of([rows_of(each) for each in self.summaries.values()], fleet, known)
        plan = decide(merged, fleet, PlacementSettings(out_rate_limit=LIMIT), time.time())
        return {(move.topic, move.origin, move.target, move.reason) for move in plan.moves}


def moves_of(record: PlanRecord) -> set[tuple[str, str, str, str]]:
    return {(move.topic, move.origin, move.target, move.reason) for move in record.moves}


def planned_in(directory: Path) -> set[tuple[str, str, str, str]]:
    return moves_of(msgspec.json.decode((directory / "plan.json").read_bytes(), type=PlanRecord))


class Told(Silent):
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def run(spark: SparkSession, **options: Any) -> tuple[dict[str, Any], Told]:
    told = Told()
    return dict(telemetry.run(spark, telemetry.Options(placement=PLACED, **options), told)), told


def keep(broker: LogBroker, records: list[tuple[str, bytes]]) -> None:
    with BlockingTopics(broker.bulk_url) as topics:
        for topic, payload in records:
            topics.publish(topic, payload)


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.fixture
def logs(own_broker: Callable[..., LogBroker], world: World) -> dict[str, LogBroker]:
    """Each broker of the world by itself, with its own reports in its log."""
    return {report.broker: own_broker(LOG) for report in world.brokers}


@pytest.mark.parametrize(("raw", "partitions"), [(False, 1), (True, 7)])
def test_the_plan_of_spark_is_that_of_a_controller(
    spark: SparkSession, world: World, logs: dict[str, LogBroker], tmp_path: Path, raw: bool, partitions: int
) -> None:
    """In one batch and as a stream; garbage beside it counts for nothing; a broker that is down is left out."""
    urls = tuple(broker.bulk_url for broker in logs.values())
    for name, broker in logs.items():
        keep(broker, world.records(name, raw=raw))
        keep(broker, [(topic_of(TOPICS, name), b"{"), (topic_of(BROKER, "nobody"), b"[]"), ("$nearcast/telemetry/x", b"\xff")])
        # A round that never becomes whole.
        keep(broker, world.records(name, raw=raw, number=2)[:2])
    expected = world.moves()
    assert {reason for *_, reason in expected} == {"latency", "overload"}
    out = tmp_path / "batch"
    result, told = run(spark, url=urls, available_now=True, stale=600.0, dry_run=True, out=str(out), partitions=partitions)
    assert planned_in(out) == expected
    assert (result["brokers"], result["topics"], result["moves"]) == (3, 60, len(expected))
    assert any("9 records" in note for note in told.notes)
    assert (result["samples"] > 0) == raw
    out = tmp_path / "stream"
    result, told = run(
        spark, url=urls, stale=600.0, every=0.0, timeout=15.0, dry_run=True, out=str(out), partitions=partitions
    )
    assert planned_in(out) == expected
    assert result["plans"] >= 1
    if not raw:
        return
    logs["b1"].kill()
    result, told = run(spark, url=urls, available_now=True, stale=600.0, dry_run=True)
    assert (result["brokers"], result["moves"] > 0) == (2, True)


def test_tables_of_samples_give_the_plan_of_their_clients(spark: SparkSession, world: World, tmp_path: Path) -> None:
    samples = {(each.topic, each.client, each.role): each for found in world.samples.values() for each in found}
    topics = {each.topic: each for found in world.summaries.values() for each in found}
    tables = {
        "samples": [
            {"topic": each.topic, "role": each.role, "vector": list(each.place.vector), "height": each.place.height}
            for each in samples.values()
        ],
        "topics": [
            {
                "topic": each.topic, "epoch": each.epoch, "owner": each.owner,
                "in_per_second": 10.0, "out_per_second": 0.0, "max_latency_ms": each.max_latency_ms,
            }
            for each in topics.values()
        ],
        "brokers": [
            {
                "broker": each.broker, "time": 1.0, "vector": list(each.coordinate.vector), "height": each.coordinate.height,
                "cpu": each.cpu, "memory": 0.0, "network": 0.0, "messages_out_per_second": each.messages_out_per_second,
            }
            for each in world.brokers if each.coordinate is not None
        ],
    }  # fmt: skip
    for name, rows in tables.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "part.parquet")
    for partitions in (1, 5):
        out = tmp_path / f"out-{partitions}"
        # Tables are planned on at the time of their last report; these epochs were long before.
        settings = (*PLACED, "min_seconds_between_moves=0", "move_cost_share=0")
        options = telemetry.Options(tables=str(tmp_path), out=str(out), partitions=partitions, placement=settings)
        telemetry.run(spark, options, Told())
        assert planned_in(out) == world.moves()


# --- real brokers, a real controller, real clients ---------------------------------------------------------------------------


class Publishing:
    """A client at ``broker`` that publishes some topics twenty times a second each and hears them itself."""

    def __init__(self, fabric: ControlledFabric, broker: str, topics: list[str]) -> None:
        self._topics = topics
        self._connection = fabric.nodes[broker].connect(Connect("player"))
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.wait(0.05):
            for topic in self._topics:
                self._connection.send(Publish(topic, b"x"))

    def __enter__(self) -> Publishing:
        self._connection.__enter__()
        self._connection.send(Subscribe(1, [SubscriptionRequest("owned/#", 0)]))
        self._connection.receive()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE_SECONDS)
        self._connection.close()


@contextmanager
def job(*arguments: str) -> Iterator[list[dict[str, Any]]]:
    """``nearcast pipeline run telemetry`` as a process; what it says."""
    command = [sys.executable, "-m", "nearcast", "pipeline", "run", "telemetry", "--master", "local[2]", "--json", *arguments]
    command += ["--conf", "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    lines: list[dict[str, Any]] = []

    def read() -> None:
        assert process.stdout is not None
        lines.extend(json.loads(line) for line in process.stdout)

    reading = threading.Thread(target=read)
    reading.start()
    try:
        yield lines
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        process.wait(120)
        reading.join()
        assert process.stdout is not None
        process.stdout.close()


def owners(fabric: ControlledFabric) -> dict[str, str]:
    return {each["topic"]: each["owner"] for each in fabric.controller.client().get("/topics")["topics"]}


@pytest.mark.parametrize("streaming", [False, True])
def test_a_topic_moves_because_spark_said_so(tmp_path: Path, streaming: bool) -> None:
    with ControlledFabric(tmp_path, ["--planner", "spark"]) as fabric:
        fabric.start("b1", "b2", data=True, config=CONFIG)
        wait_for("brokers meeting", lambda: fabric.nodes["b1"].sees("b2"))
        fabric.nearcast("topic", "create", "owned/#", "--class", "owned", "--max-latency-ms", "2000")
        topics = [f"owned/{number}" for number in range(4)]
        urls = [word for node in fabric.nodes.values() for word in ("--url", node.bulk_url)]
        with Publishing(fabric, "b1", topics):
            wait_for("owners", lambda: owners(fabric) == dict.fromkeys(topics, "b1"))
            arguments = [*urls, "--placement", "out_rate_limit=60", "--stale", "20", "--every", "1"]
            if not streaming:
                arguments.append("--available-now")
            with job(*arguments) as said:
                wait_for("a topic that moved", lambda: "b2" in owners(fabric).values(), seconds=150)
            assert not any(line["event"] == "failed" for line in said), said
            moved = next(topic for topic, owner in owners(fabric).items() if owner == "b2")
            reasons = {each["reason"] for each in fabric.controller.client().get("/migrations")}
            assert reasons == {"spark: overload"}
            assert moved in fabric.nearcast("topic", "why", moved)

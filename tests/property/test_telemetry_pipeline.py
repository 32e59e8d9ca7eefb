"""Telemetry on Spark, without Spark: what tasks make of rows and the driver of their answers is what a controller decides."""

from __future__ import annotations

import random

import msgspec
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.pipeline import telemetry_records
from nearcast.pipeline.telemetry_rounds import CLIENTS, TOPICS, Round, topic_of
from nearcast.pipeline.telemetry_summaries import Totals, from_table, gather, is_pressing, summariser, to_batch
from nearcast.pipeline.telemetry_tables import ROWS_SCHEMA
from nearcast.placement.deciding import Plan, decide
from nearcast.placement.gathering import fleet_of, rows_of, topics_of
from nearcast.placement.topics import Fleet, PlacementSettings
from nearcast.telemetry.records import BrokerReport, ClientReport, ClientSample, Crowd, Place, TopicReport, TopicSummary
from nearcast.telemetry.summaries import crowd, merge

NOW = 1_000.0
SETTINGS = PlacementSettings(out_rate_limit=400.0)


def place(rng: random.Random, spread: float = 40.0) -> Place:
    return Place(
        (round(rng.uniform(-spread, spread), 3), round(rng.uniform(-spread, spread), 3), *[0.0] * 6),
        round(rng.uniform(0.1, 6.0), 3),
        round(rng.uniform(-0.05, 0.05), 3),
    )


class World:
    """Brokers, topics, clients; and what brokers report of them, in crowds and one by one."""

    def __init__(self, rng: random.Random) -> None:
        self.brokers = [
            BrokerReport(
                f"b{number}",
                NOW,
                place(rng),
                cpu=rng.choice([0.2, 0.5, 0.9]),
                messages_out_per_second=rng.choice([0.0, 100.0, 350.0, 500.0]),
            )
            for number in range(rng.randint(1, 5))
        ]
        self.fleet: Fleet = fleet_of(self.brokers)
        names = [report.broker for report in self.brokers]
        self.clients: dict[tuple[str, str, int], list[Place]] = {}
        self.owners: dict[str, tuple[int, str]] = {}
        topics = [f"t/{number}" for number in range(rng.randint(0, 20))]
        self.reports: dict[str, list[TopicSummary]] = {name: [] for name in names}
        for topic in topics:
            owner = rng.choice([*names, "silent"])
            epoch = rng.randint(2, 900)
            self.owners[topic] = (epoch, owner)
            informed = owner if owner in names else rng.choice(names)
            for name in names:
                if name != informed and rng.random() < 0.4:
                    continue
                # Some have not heard yet that the topic has moved.
                is_late = name != informed and rng.random() < 0.2
                known = (epoch - 1, rng.choice(names)) if is_late else (epoch, owner)
                self._report(rng, topic, name, *known)

    def _report(self, rng: random.Random, topic: str, name: str, epoch: int, owner: str) -> None:
        at = {report.broker: report.coordinate for report in self.brokers}.get(owner)
        crowds = []
        for role in (0, 1):
            clients = [place(rng) for _ in range(rng.choice([0, 0, 1, 1, 2, 5]))]
            self.clients[topic, name, role] = clients
            crowds.append(crowd(clients, at))
        self.reports[name].append(
            TopicSummary(
                topic,
                epoch,
                owner,
                crowds[0],
                crowds[1],
                in_per_second=rng.choice([0.0, 10.0, 60.0]),
                out_per_second=rng.choice([0.0, 30.0]),
                max_latency_ms=rng.choice([0.0, 20.0, 40.0]),
            )
        )

    def records(self, raw: set[str]) -> pa.Table:
        """What the log has of them; brokers of ``raw`` report single clients, too."""
        found = []
        for name, summaries in self.reports.items():
            report = TopicReport(name, NOW, 1, 0, 1, summaries)
            found.append((topic_of(TOPICS, name), 1, msgspec.json.encode(report)))
            if name in raw:
                samples = [
                    ClientSample(topic, f"c{number}", role, each)
                    for (topic, broker, role), clients in self.clients.items()
                    if broker == name
                    for number, each in enumerate(clients)
                ]
                found.append((topic_of(CLIENTS, name), 1, msgspec.json.encode(ClientReport(name, NOW, 1, 0, 1, samples))))
        topics, indexes, payloads = zip(*found, strict=True)
        times = pa.array([0] * len(found), pa.timestamp("us", "UTC"))
        return pa.table({"topic": topics, "index": indexes, "time": times, "payload": pa.array(payloads, pa.binary())})

    def rows(self, raw: set[str]) -> pa.Table:
        rounds = {name: Round(1, 1, 1, NOW, NOW) for name in self.reports}
        read = telemetry_records.contents(rounds, {name: rounds[name] for name in raw})
        return pa.Table.from_batches(list(read(self.records(raw).to_batches())), ROWS_SCHEMA)


def in_tasks(rows: pa.Table, fleet: Fleet, tasks: int, *, everything: bool) -> tuple[Plan, Totals]:
    """As Spark does it: rows by topic to some tasks, their answers to the driver."""
    share = np.array([hash(topic) % tasks for topic in rows.column("topic").to_pylist()], np.int64)
    work = summariser(fleet, SETTINGS, (), everything=everything)
    answers = []
    for task in range(tasks):
        mine = rows.filter(pa.array(share == task))
        answers += list(work(mine.to_batches(max_chunksize=3)))
    if not answers:
        return decide(topics_of([], fleet, {}), fleet, SETTINGS, NOW), Totals()
    table = pa.Table.from_batches(answers)
    wanted = [
        bool(pressing) or totals is not None
        for pressing, totals in zip(table.column("pressing").to_pylist(), table.column("totals").to_pylist(), strict=True)
    ]
    topics, totals = from_table(table.filter(pa.array(wanted)), fleet)
    return decide(topics, fleet, SETTINGS, NOW), totals


def in_process(world: World) -> Plan:
    """As a controller does it; topics in the order of their names, those of owners that do not report left alone."""
    reported = [rows_of(sorted(summaries, key=lambda summary: summary.topic)) for summaries in world.reports.values()]
    topics = topics_of(reported, world.fleet, {})
    order = np.array(sorted(range(len(topics)), key=lambda row: topics.names[row]), np.int64)
    order = order[topics.owner[order] >= 0]
    topics.moved_at = topics.epochs / 1e6
    for name in type(topics).__slots__:
        value = getattr(topics, name)
        if name == "names":
            topics.names = [value[row] for row in order.tolist()]
        elif name in ("producers", "consumers"):
            setattr(topics, name, value.rows(order))
        else:
            setattr(topics, name, value[order])
    return decide(topics, world.fleet, SETTINGS, NOW)


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
@settings(max_examples=60, deadline=None)
def test_the_plan_of_tasks_is_the_plan_of_a_controller(seed: int, tasks: int, everything: bool) -> None:
    world = World(random.Random(seed))
    plan, totals = in_tasks(world.rows(set()), world.fleet, tasks, everything=everything)
    assert plan.record(1, NOW, "x") == in_process(world).record(1, NOW, "x")
    assert totals.topics == len(world.owners)
    assert totals.unowned == sum(1 for _, owner in world.owners.values() if owner == "silent")


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_topics_are_what_their_clients_are(seed: int) -> None:
    """Every client by itself, from some brokers or all: centroids, worst cases and counts as of all clients together, the
    deviation exactly where all come singly, and a bound elsewhere."""
    rng = random.Random(seed)
    world = World(rng)
    raw = {name for name in world.reports if rng.random() < 0.6}
    topics, totals = gather(world.rows(raw), world.fleet)
    coordinates = {report.broker: report.coordinate for report in world.brokers}
    assert totals.refused == totals.unreported == 0
    assert sorted(topics.names) == sorted(world.owners)
    singly = 0
    for row, name in enumerate(topics.names):
        epoch, owner = world.owners[name]
        assert topics.epochs[row] == epoch
        at = coordinates.get(owner)
        sides = []
        for role, places, counts in (
            (0, topics.producers, topics.producer_counts),
            (1, topics.consumers, topics.consumer_counts),
        ):
            clients = {key[1]: each for key, each in world.clients.items() if key[0] == name and key[2] == role}
            together = [each for some in clients.values() for each in some]
            exact = crowd(together, at)
            loose = merge(
                [crowd([each for key in clients if key in raw for each in clients[key]], at)]
                + [crowd(clients[key], at) for key in clients if key not in raw]
            )
            singly += sum(len(each) for key, each in clients.items() if key in raw)
            assert counts[row] == exact.count
            if exact.centroid is not None:
                assert places.place(row).vector == pytest.approx(exact.centroid.vector)
                assert places.heights[row] == pytest.approx(exact.centroid.height)
            sides.append((exact, loose))
        assert topics.deviation_ms[row] == pytest.approx(sum(loose.deviation_ms for _, loose in sides), abs=1e-9)
        assert topics.deviation_ms[row] >= sum(exact.deviation_ms for exact, _ in sides) - 1e-9
        both = all(exact.count for exact, _ in sides)
        if both and set(world.reports) == raw:
            assert topics.worst_ms[row] == pytest.approx(sum(exact.worst_ms for exact, _ in sides), abs=1e-9)
        elif both:
            # Where a broker measured to an owner of before, its crowd counts with a bound.
            assert topics.worst_ms[row] >= sum(exact.worst_ms for exact, _ in sides) - 1e-9 or owner == "silent"
        else:
            assert topics.worst_ms[row] == 0.0
    assert totals.samples == singly


def test_rows_that_are_none_count_for_nothing() -> None:
    fleet = fleet_of([BrokerReport("b", NOW, Place((0.0,) * 8, 1.0))])
    good, bad = [0.0] * 8, [float("nan")] + [0.0] * 7
    crowded = {"count": 3, "vector": good, "height": 1.0, "adjustment": 0.0, "deviation_ms": 0.0, "worst_ms": 1.0}
    report = {"epoch": 5, "owner": "b", "rate": float("inf"), "max_latency_ms": -1.0, "producers": crowded}
    rows = [
        {"topic": "t", "report": {**report, "consumers": {**crowded, "deviation_ms": -1.0}}},
        {"topic": "t", "role": 1, "vector": good, "height": 2.0, "adjustment": None},
        {"topic": "t", "role": 1, "vector": bad, "height": 2.0, "adjustment": 0.0},
        {"topic": "t", "role": 1, "vector": good[:7], "height": 2.0, "adjustment": 0.0},
        {"topic": "t", "role": 1, "vector": None, "height": 2.0, "adjustment": 0.0},
        {"topic": "t", "role": 2, "vector": good, "height": 2.0, "adjustment": 0.0},
        {"topic": "t", "role": 1, "vector": good, "height": -2.0, "adjustment": 0.0},
        {"topic": None, "role": 1, "vector": good, "height": 2.0, "adjustment": 0.0},
        {"topic": "unknown", "role": 1, "vector": good, "height": 2.0, "adjustment": 0.0},
    ]
    topics, totals = gather(pa.Table.from_pylist(rows, ROWS_SCHEMA), fleet, [("x/#", 3.0), ("t", 50.0)])
    assert totals == Totals(topics=1, samples=1, refused=6, unreported=1)
    assert (topics.producer_counts.tolist(), topics.consumer_counts.tolist()) == ([3], [1])
    assert (topics.rate.tolist(), topics.bound_ms.tolist()) == ([0.0], [50.0])
    assert topics.worst_ms.tolist() == [1.0 + (1.0 + 2.0) / 2]
    assert (
        from_table(
            pa.Table.from_batches([to_batch(topics, fleet, is_pressing(topics, fleet, SETTINGS), np.arange(1), totals)]), fleet
        )[1]
        == totals
    )


def test_what_is_no_telemetry_is_told_apart() -> None:
    payloads = {
        topic_of(TOPICS, "a"): msgspec.json.encode(TopicReport("a", 1.0, 4, 1, 3, [])),
        topic_of(TOPICS, "b"): msgspec.json.encode(TopicReport("a", 1.0, 4, 1, 3, [])),
        topic_of(CLIENTS, "a"): b"{",
        topic_of(CLIENTS, "c"): msgspec.json.encode(ClientReport("c", 1.0, 4, 3, 3, [])),
        topic_of("broker", "a"): msgspec.json.encode(BrokerReport("a", 1.0)),
        topic_of("broker", "b"): b"[]",
        "other": b"",
    }
    table = pa.table(
        {
            "topic": list(payloads),
            "index": [7] * len(payloads),
            "time": pa.array([1_500_000] * len(payloads), pa.timestamp("us", "UTC")),
            "payload": pa.array(list(payloads.values()), pa.binary()),
        }
    )
    (batch,) = telemetry_records.headers(table.to_batches())
    seen, refused = telemetry_records.seen_of(batch.to_pylist())
    assert refused == 5
    assert [(each.kind, each.broker, each.index, each.time, each.round, each.part, each.parts) for each in seen] == [
        (TOPICS, "a", 7, 1.5, 4, 1, 3),
        ("broker", "a", 7, 1.5, 0, 0, 1),
    ]
    assert seen[0].payload == b""
    read = telemetry_records.contents({"a": Round(5, 7, 7, 1.0, 1.0)}, {"a": Round(4, 7, 7, 1.0, 1.0)})
    assert list(read(table.to_batches())) == [], "another round; and no JSON"


def test_crowds_without_a_coordinate_are_nobody() -> None:
    fleet = fleet_of([BrokerReport("b", NOW, Place((0.0,) * 8, 1.0))])
    report = TopicReport("b", NOW, 1, 0, 1, [TopicSummary("t", 5, "b", Crowd(count=2), Crowd())])
    table = pa.table(
        {
            "topic": [topic_of(TOPICS, "b")],
            "index": [1],
            "time": pa.array([0], pa.timestamp("us", "UTC")),
            "payload": pa.array([msgspec.json.encode(report)], pa.binary()),
        }
    )
    read = telemetry_records.contents({"b": Round(1, 1, 1, NOW, NOW)}, {})
    topics, totals = gather(pa.Table.from_batches(list(read(table.to_batches()))), fleet)
    assert totals.topics == 1
    assert topics.silent().all()

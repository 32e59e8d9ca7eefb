"""An evaluation in Spark finds what the plain reference finds, event by event; and its job leaves what it says."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyspark.sql import SparkSession

from nearcast.experiments import perform
from nearcast.experiments.iov import Iov, IovParameters
from nearcast.pipeline import evaluate as job
from nearcast.pipeline.evaluation import Bound, EvaluationOptions, evaluate, passes
from nearcast.pipeline.evaluation.histograms import PERCENTILES, RELATIVE_ERROR
from nearcast.pipeline.progress import Silent
from tests.integration.spark.evaluation_reference import Flow, Reference, quantile, record_chaos, record_processed

pytestmark = pytest.mark.integration

SEED = 11
BOUNDS_MS = {"a/one/+": 60.0, "b/#": 100.0, "$special/x": 40.0}
SETTLE_NS = 150_000_000
RUNS = ("first", "second")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    print(f"seed {SEED}")  # noqa: T201
    found = {}
    for number, run in enumerate(RUNS):
        found[run] = tmp_path_factory.mktemp(run) / "events"
        record_chaos(found[run], run, SEED + number, messages=60 if number == 0 else 20)
    record_processed(found["second"], "second", SEED)
    return found


@pytest.fixture(scope="module")
def references(recorded: dict[str, Path]) -> dict[str, Reference]:
    return {run: Reference(path, BOUNDS_MS, settle_ns=SETTLE_NS, linked=True) for run, path in recorded.items()}


@pytest.fixture(scope="module")
def all_tables(
    spark: SparkSession, recorded: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Of the same events judged in one part, and in many small ones with most topics split."""
    sites = tmp_path_factory.mktemp("sites") / "sites.json"
    sites.write_bytes(
        msgspec.json.encode({f"pub-{n}": f"site-{n % 2}" for n in range(5)} | {f"sub-{n}": f"site-{n % 3}" for n in range(6)})
    )
    options = EvaluationOptions(
        bounds=tuple(Bound(topic_filter, round(bound * 1e6)) for topic_filter, bound in BOUNDS_MS.items()),
        sites=sites,
        settle_ns=SETTLE_NS,
        strategies=("first=flooding", "second=relay"),
    )
    result = {}
    for parts, rows in (("one part", passes.ROWS_PER_PART), ("many parts", 250)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(passes, "ROWS_PER_PART", rows)
            evaluation = evaluate(spark, [path.parent for path in recorded.values()], options)
        with evaluation:
            plan = evaluation.passes.plan
            if parts == "one part":
                assert (plan.parts, plan.splits) == (1, {})
            else:
                assert len(set(plan.part_of.tolist()) - {-1}) > 1, "several parts of whole topics"
                assert any(min(each.streams, each.subscribers, each.messages) > 1 for each in plan.splits.values())
            result[parts] = {name: [row.asDict() for row in table.collect()] for name, table in evaluation.tables.items()}
    return result


@pytest.fixture(params=["one part", "many parts"])
def tables(all_tables: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = all_tables[request.param]
    return found


def test_tables_are_the_same_however_events_are_dealt_out(all_tables: dict[str, Any]) -> None:
    one, many = all_tables["one part"], all_tables["many parts"]
    assert one.keys() == many.keys()
    for name in one:
        for row, other in zip(*(sorted(each[name], key=_names) for each in (one, many)), strict=True):
            for column, value in row.items():
                same = math.isclose(value, other[column]) if isinstance(value, float) else value == other[column]
                assert same, (name, column, row, other)


def _names(row: dict[str, Any]) -> list[str]:
    """What orders the rows of any table: text and whole numbers, which do not depend on the order of additions."""
    return [str(value) for value in row.values() if isinstance(value, str | int)] + [str(row.get("at_s"))]


def flow_of(row: dict[str, Any]) -> Flow:
    return row["subscriber"], row["publisher"], row["stream"], row["topic"]


def assert_distribution(row: dict[str, Any], values: Any) -> None:
    assert row["samples"] == len(values)
    if not len(values):
        return
    assert math.isclose(row["mean_ms"], values.mean(), rel_tol=1e-9)
    assert (row["min_ms"], row["max_ms"]) == (values.min(), values.max())
    for name, share in PERCENTILES.items():
        assert math.isclose(row[name], quantile(values, share), rel_tol=RELATIVE_ERROR * 1.001), name


def test_flows_are_those_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        rows = {flow_of(row): row for row in tables["flows"] if row["run"] == run}
        assert rows.keys() == reference.came.keys() | reference.expected.keys()
        for flow, row in rows.items():
            lost = reference.lost.get(flow, {})
            assert row["expected"] == len(reference.expected.get(flow, ())), flow
            assert row["lost"] == len(lost), flow
            for cause in ("away", "unacknowledged", "qos_0", "unexplained"):
                assert row[f"lost_{cause}"] == list(lost.values()).count(cause), (flow, cause)
            assert row["deliveries"] == len(reference.came.get(flow, ()))
            assert row["duplicates"] == reference.duplicates(flow), flow
            assert row["out_of_order"] == reference.out_of_order(flow), flow
            assert row["late"] == len(reference.late(flow)), flow
            assert row["violations"] == reference.violations(flow), flow


def test_lost_messages_are_those_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        found = {(flow_of(row), row["message_id"], row["cause"]) for row in tables["losses"] if row["run"] == run}
        wanted = {(flow, identity, cause) for flow, lost in reference.lost.items() for identity, cause in lost.items()}
        assert found == wanted
        assert run == "second" or len({cause for _, _, cause in wanted}) == 4, "the reference run has every cause"


def test_latencies_are_those_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        assert_distribution(next(row for row in tables["runs"] if row["run"] == run), reference.latencies_ms())
        for row in tables["topics"]:
            if row["run"] == run:
                assert_distribution(row, reference.latencies_ms(topic=row["topic"]))
                assert row["bound_ms"] == reference.bound_ms(row["topic"])
        histogram = [row for row in tables["histogram"] if row["run"] == run]
        assert sum(row["samples"] for row in histogram) == len(reference.latencies_ms())
        assert max(row["share"] for row in histogram) == 1.0


def test_episodes_are_those_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        found: dict[Flow, list[tuple[int, int, int]]] = {}
        for row in tables["episodes"]:
            if row["run"] == run:
                found.setdefault(flow_of(row), []).append((row["begin_ns"], row["end_ns"], row["messages"]))
                assert math.isclose(row["duration_ms"], (row["end_ns"] - row["begin_ns"]) / 1e6)
        wanted = {flow: episodes for flow in reference.came if (episodes := reference.episodes(flow))}
        assert {flow: sorted(episodes) for flow, episodes in found.items()} == wanted


def test_excess_data_is_that_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        found = [row for row in tables["brokers"] if row["run"] == run]
        rows = {row["broker"]: row for row in found if row["carried_messages"]}
        topics = [row for row in tables["topics"] if row["run"] == run]
        for name in ("carried_messages", "excess_messages"):
            assert sum(row[name] for row in topics) == sum(row[name] for row in rows.values())
        assert {name: (row["carried_messages"], row["excess_messages"]) for name, row in rows.items()} == reference.carried()
        assert rows["cloud"]["excess_share"] == 1.0, "nobody is connected there"
        assert {row["strategy"] for row in rows.values()} == {"flooding" if run == "first" else "relay"}


def test_excess_data_of_broadcast_groups(spark: SparkSession, tmp_path: Path) -> None:
    """Spark finds in what brokers recorded what the experiment finds in memory: tables I and II, with a threshold of 5 ms."""
    parameters = IovParameters(simulated=True, duration_s=3.0, strategies=("groups",))
    outcome = perform(Iov(), parameters, tmp_path / "out")
    assert outcome.ok, outcome.error
    with evaluate(spark, [tmp_path / "out"]) as evaluation:
        topics = {row["topic"]: row for row in evaluation.tables["topics"].collect()}
        brokers = {row["broker"]: row for row in evaluation.tables["brokers"].collect()}
    assert {topic: round(100 * row["excess_share"]) for topic, row in topics.items()} == {
        "/car-telemetry/realtime/1": 33,
        "/car-telemetry/realtime/2": 33,
        "/car-telemetry/realtime/3": 33,
        "/traffic-control/monitoring/1": 0,
    }
    told = outcome.figures["groups_processed"]
    for broker, row in brokers.items():
        tallies = [each[broker] for each in told.values() if broker in each]
        assert row["excess_messages"] == sum(tally["redundant"] for tally in tallies)
        assert row["carried_messages"] == sum(tally["redundant"] + tally["correct"] for tally in tallies)


def test_downtime_is_that_of_the_reference(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    for run, reference in references.items():
        rows = [row for row in tables["downtime"] if row["run"] == run]
        found = sorted((row["client"], row["gone_ns"], row["back_ns"] or float("inf")) for row in rows)
        clients = {row["client"] for row in reference.rows}
        assert found == sorted((client, gone, back) for client in clients for gone, back in reference.absences(client))
        for row in rows:
            assert row["failed_attempts"] == 1
            heard = [
                each["received_ns"]
                for each in reference.by_kind["delivered"]
                if row["back_ns"] is not None and each["subscriber"] == row["client"] and each["received_ns"] >= row["back_ns"]
            ]
            assert row["first_delivery_ns"] == (min(heard) if heard else None)
        resubscribed = next(row for row in rows if row["client"] == "sub-1")
        assert resubscribed["until_subscribed_ms"] == 260.0


def test_sums_over_time_and_sites_are_those_of_the_run(tables: dict[str, Any]) -> None:
    for run in tables["runs"]:
        over_time = [row for row in tables["timeline"] if row["run"] == run["run"]]
        assert sum(row["published"] for row in over_time) == run["published"]
        assert sum(row["deliveries"] for row in over_time) == run["delivered"]
        assert sum(row["delivered_bytes"] for row in over_time) == run["delivered_bytes"]
        assert sum(row["lost"] for row in over_time) == run["lost"]
        pairs = [row for row in tables["site_pairs"] if row["run"] == run["run"]]
        assert sum(row["deliveries"] for row in pairs) == run["delivered"]
        assert {(row["publisher_site"], row["subscriber_site"]) for row in pairs} == {
            (f"site-{one}", f"site-{other}") for one in range(2) for other in range(3)
        }


def test_refusals_have_their_reasons(tables: dict[str, Any], references: dict[str, Reference]) -> None:
    found = {(row["run"], row["kind"], row["reason"]): row["events"] for row in tables["refusals"]}
    for run, reference in references.items():
        assert found[run, "refused", "quota"] == len(reference.by_kind["refused"])
        assert found[run, "skipped", "no connection"] == len(reference.by_kind["skipped"])
        assert found[run, "unconnected", "refused"] == 1


def test_the_job_leaves_tables_summary_and_report(spark: SparkSession, recorded: dict[str, Path], tmp_path: Path) -> None:
    """One run of a scenario with bounds and sites, in a folder as experiments leave them; brokers that are not linked."""
    out = tmp_path / "evaluation"
    options = job.Options(
        paths=(str(recorded["second"]),), out=str(out), bound=("50ms",), brokers="separate", title="<b>&</b>"
    )
    job.check(options)
    result = job.run(spark, options, Silent())
    assert result["runs"] == 1
    summary = msgspec.json.decode((out / job.SUMMARY).read_bytes())
    reference = Reference(recorded["second"], {"#": 50.0}, settle_ns=1_000_000_000, linked=False)
    (run,) = summary["runs"]
    assert run["expected"] == sum(map(len, reference.expected.values()))
    assert run["lost"] == sum(map(len, reference.lost.values()))
    assert run["links"] == "separate"
    page = (out / job.REPORT).read_text()
    assert "<title>&lt;b&gt;&amp;&lt;/b&gt;</title>" in page
    assert {path.stem for path in out.glob("*.parquet")} >= {"runs", "topics", "flows", "timeline", "brokers", "downtime"}
    assert not list(out.glob(".work-*"))
    job.check(options)  # the same place again

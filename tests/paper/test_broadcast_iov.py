"""Hasenburg et al., "Managing Latency and Excess Data Dissemination in Fog-Based Publish/Subscribe Systems", sections IV-B to
IV-D: the experiment in the simulator, with the code that is shipped. `nearcast experiment iov` runs it with real processes."""

from __future__ import annotations

from typing import Any

import pytest

from nearcast.experiments import Outcome, perform
from nearcast.experiments.iov import STRATEGIES, Iov, IovParameters


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    parameters = IovParameters(simulated=True, duration_s=3.0)
    found = perform(Iov(), parameters, tmp_path_factory.mktemp("iov") / "out")
    assert found.error is None
    return found


def latencies_ms(outcome: Outcome, strategy: str, way: tuple[str, ...]) -> set[Any]:
    """Median and 99th percentile of all pairs whose messages take this way."""
    table = outcome.tables[0]
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    chosen = [row for row in rows if row["strategy"] == strategy and row["way"] == " → ".join(way)]
    return {row[column] for row in chosen for column in ("median ms", "p99 ms")}


def test_every_bar_holds(outcome: Outcome) -> None:
    assert [bar.name for bar in outcome.bars if not bar.ok] == []
    assert outcome.ok


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cars_at_one_broker(outcome: Outcome, strategy: str) -> None:
    """IV-C: "50% of the messages received by Car 2 and Car 3 to have an MDL of about 4 ms", with every strategy."""
    assert latencies_ms(outcome, strategy, ("broker-3",)) == {4.0}


@pytest.mark.parametrize("strategy", ["flooding", "groups"])
def test_cars_at_two_brokers_of_a_group(outcome: Outcome, strategy: str) -> None:
    """IV-C: "the remaining 50% ..., as well as all messages received by Car 1, should have an MDL of about 7 ms"."""
    for way in (("broker-2", "broker-3"), ("broker-3", "broker-2")):
        assert latencies_ms(outcome, strategy, way) == {7.0}


def test_cars_over_the_cloud(outcome: Outcome) -> None:
    """IV-C: "should be routed via the cloud, which leads to an MDL of 55 ms or higher"; here without the long tail."""
    for way in (("broker-2", "cloud-broker", "broker-3"), ("broker-3", "cloud-broker", "broker-2")):
        assert latencies_ms(outcome, "relay", way) == {55.0}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_traffic_authority(outcome: Outcome, strategy: str) -> None:
    """IV-C: "All messages received by the traffic authority ... should have a latency of 44 ms"."""
    assert latencies_ms(outcome, strategy, ("broker-1", "cloud-broker")) == {44.0}


@pytest.mark.parametrize(
    ("table", "strategy", "percent"),
    [
        (1, "flooding", 50.0),
        (1, "groups", 33.33),
        (1, "relay", 33.33),
        (2, "flooding", 50.0),
        (2, "groups", 0.0),
        (2, "relay", 0.0),
    ],
)
def test_excess_data(outcome: Outcome, table: int, strategy: str, percent: float) -> None:
    """Tables I and II."""
    [row] = [row for row in outcome.tables[table].rows if row[0] == strategy]
    assert row[3] == percent


def test_flooding_and_relay_are_thresholds(outcome: Outcome) -> None:
    """VI: a very large threshold mimics flooding, zero mimics cloud relay: one group of all, and each broker its own."""
    groups = {name: outcome.figures[f"{name}_groups"]["count"] for name in STRATEGIES}
    assert groups == {"flooding": 1, "groups": 2, "relay": 3}

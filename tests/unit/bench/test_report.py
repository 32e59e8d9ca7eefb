"""Percentiles, medians, ratios and verdicts."""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from rich.console import Console

from nearcast.bench.comparison import Comparison, Measurement, choose_scenarios, to_json
from nearcast.bench.report import Row, make_notes, make_rows, make_table, to_summary
from nearcast.bench.results import summarise
from nearcast.bench.scenarios import SCENARIOS, Sample
from nearcast.errors import ConfigError


def test_percentiles() -> None:
    latency = summarise(np.arange(0, 1_000_001, 1000, dtype=np.int64), 3)
    assert (latency.count, latency.late_sends) == (1001, 3)
    measured = (latency.p50_us, latency.p90_us, latency.p99_us, latency.p999_us, latency.max_us)
    assert measured == pytest.approx((500, 900, 990, 999, 1000))
    assert summarise(np.empty(0, dtype=np.int64)).count == 0


def comparison_of(scenario: str, figure: str, values: dict[str, list[float]], lost: int = 0) -> Comparison:
    comparison = Comparison(
        started="now",
        machine={"cpu": "c", "cores": 2},
        brokers=dict.fromkeys(values, "1"),
        rounds=3,
        seconds=1.0,
        pinned=True,
    )
    for broker, rounds in values.items():
        for number, value in enumerate(rounds, 1):
            sample = Sample(figures={figure: value}, cpu_us=1e4 / value, lost=lost, raw={})
            comparison.measurements.append(Measurement(scenario=scenario, broker=broker, round=number, sample=sample))
    return comparison


def rows_of(scenario: str, figure: str, values: dict[str, list[float]], lost: int = 0) -> dict[str, Row]:
    comparison = comparison_of(scenario, figure, values, lost)
    return {row.broker: row for row in make_rows(comparison, choose_scenarios([scenario]))}


@pytest.mark.parametrize(("rate", "verdict"), [(700.0, "below"), (800.0, "bar"), (1999.0, "bar"), (2000.0, "goal")])
def test_throughput_verdicts(rate: float, verdict: str) -> None:
    rows = rows_of("qos0-pairs", "messages_per_second", {"mosquitto": [90.0, 100.0, 400.0], "nearcast": [rate]})
    assert rows["nearcast"].verdict == verdict
    assert rows["nearcast"].ratio == pytest.approx(rate / 100)
    assert rows["mosquitto"].verdict == ""
    assert (rows["mosquitto"].low, rows["mosquitto"].value, rows["mosquitto"].high) == (90, 100, 400)


def test_a_fast_broker_that_loses_messages_is_wrong() -> None:
    rows = rows_of("qos0-pairs", "messages_per_second", {"mosquitto": [1.0], "nearcast": [100.0]}, lost=1)
    assert rows["nearcast"].verdict == "wrong"


def test_memory_is_held_against_an_absolute_bar() -> None:
    rows = rows_of("idle-1k", "kib_per_connection", {"nearcast": [9.0]})
    assert rows["nearcast"].verdict == "bar"
    rows = rows_of("idle-1k", "kib_per_connection", {"nearcast": [11.0]})
    assert rows["nearcast"].verdict == "below"


def test_without_the_baseline_there_is_no_verdict() -> None:
    row = rows_of("qos0-pairs", "messages_per_second", {"nearcast": [100.0]})["nearcast"]
    assert (row.ratio, row.verdict) == (None, "")


def test_growth_of_the_subscription_curve() -> None:
    comparison = comparison_of("subscriptions-1k", "messages_per_second", {"nearcast": [1000.0]})
    comparison.measurements += comparison_of("subscriptions-100k", "messages_per_second", {"nearcast": [500.0]}).measurements
    rows = make_rows(comparison, choose_scenarios(["subscriptions-*"]))
    assert rows[-1].scenario == "subscriptions-growth"
    assert (rows[-1].value, rows[-1].verdict) == (2.0, "below")


def test_notes_say_what_spoils_the_figures() -> None:
    comparison = comparison_of("qos0-pairs", "messages_per_second", {"mosquitto": [10.0], "nearcast": [77.0]})
    assert make_notes(comparison) == []
    spoiled = Sample(figures={"messages_per_second": 77.0}, generator_idle=0.01, wait_share=0.4, raw={})
    comparison.measurements = [Measurement(scenario="qos0-pairs", broker="nearcast", round=1, sample=spoiled)]
    busy, tired = make_notes(comparison)
    assert "40% of a core" in busy
    assert "qos0-pairs: the generator was busy all the time against nearcast" in tired


@pytest.mark.parametrize("columns", [80, 130])
def test_the_table_and_the_json_hold_every_row(columns: int) -> None:
    comparison = comparison_of("qos1-pairs", "messages_per_second", {"mosquitto": [10.0], "nearcast": [77.0]})
    rows = make_rows(comparison, choose_scenarios(["qos1-pairs"]))
    screen = io.StringIO()
    Console(width=columns, file=screen).print(make_table(rows, columns))
    printed = screen.getvalue()
    assert "mosquitto" in printed
    assert "7.70" in printed
    assert "bar met" in printed
    written = json.loads(to_json(comparison, to_summary(rows)))
    assert [each["broker"] for each in written["summary"]] == ["mosquitto", "nearcast"]
    assert written["measurements"][1]["sample"]["figures"] == {"messages_per_second": 77.0}


def test_scenarios_are_chosen_by_name_or_pattern() -> None:
    assert choose_scenarios([]) == SCENARIOS
    assert [each.name for each in choose_scenarios(["latency-*", "connects"])] == ["latency-1k", "latency-10k", "connects"]
    with pytest.raises(ConfigError, match="no scenario is called"):
        choose_scenarios(["qos9"])


def test_persistence_is_a_cost_and_not_judged() -> None:
    values = {"mosquitto": [100.0], "nearcast": [1000.0], "nearcast --data": [250.0]}
    rows = rows_of("qos1-persistent", "messages_per_second", values)
    assert (rows["nearcast --data"].bar, rows["nearcast --data"].verdict) == ("0.25× nearcast", "")
    assert rows_of("qos1-persistent", "messages_per_second", values, lost=1)["nearcast --data"].verdict == "wrong"


def test_a_hypervisor_that_takes_the_cores_away_is_named() -> None:
    comparison = comparison_of("qos0-pairs", "messages_per_second", {"mosquitto": [1.0]})
    assert make_notes(comparison) == []
    comparison.measurements[0] = Measurement(
        scenario="qos0-pairs", broker="mosquitto", round=1, sample=comparison.measurements[0].sample, stolen_share=0.3
    )
    assert "the hypervisor kept 30%" in make_notes(comparison)[0]

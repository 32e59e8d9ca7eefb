"""The experiment ``tradeoff``: a workload that does not depend on the threshold, and a table with both ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from nearcast.errors import ConfigError
from nearcast.experiments import perform
from nearcast.experiments.experiment import effective_parameters
from nearcast.experiments.tradeoff import Tradeoff, TradeoffParameters, interest, scenario_of
from nearcast.scenario.expansion import expand_clients

SMALL = TradeoffParameters(scale=0.375, thresholds_ms=(0.0, 10_000.0), duration_s=2.0, adaptive_s=0.0)


def test_the_workload_is_the_same_for_every_threshold() -> None:
    one, other = (scenario_of(SMALL, threshold_ms) for threshold_ms in (0.0, 5.0))
    assert one.clients == other.clients
    assert one.settings != other.settings
    adaptive = scenario_of(msgspec.structs.replace(SMALL, adaptive_s=50.0), 5.0, adaptive=True)
    assert adaptive.clients == one.clients
    assert adaptive.duration_s == one.duration_s + 50.0
    assert adaptive.settings["fabric"]["groups"]["adaptive"] is True


def test_near_brokers_and_some_far_ones_want_what_is_published() -> None:
    parameters = TradeoffParameters()
    scenario = scenario_of(parameters, 0.0)
    hosts = [broker.host for broker in scenario.brokers if broker.fabric]
    wanted = interest(scenario, hosts, parameters.seed)
    for source in hosts:
        takers = [host for host, sources in wanted.items() if source in sources]
        assert source not in takers
        assert len(takers) >= 2, "the nearest, and one that was drawn"
    assert "broker-essen-de" in wanted["broker-dortmund-de"], "32 km"
    assert len(wanted["broker-essen-de"]) > len(wanted["broker-berlin-de"]), "there is much around it"
    clients = {client.name: client for client in expand_clients(scenario)}
    for host, sources in wanted.items():
        assert [each.filter for each in clients[f"wants-{host}"].subscribe] == [f"from/{source}" for source in sources]


@pytest.mark.parametrize(
    "wrong",
    [
        {"thresholds_ms": [1.0]},
        {"thresholds_ms": [2.0, 1.0]},
        {"thresholds_ms": [-1.0, 1.0]},
        {"scale": 100.0},
        {"rate_hz": 0.0},
        {"adaptive_s": -1.0},
        {"excess_budget": 1.0},
    ],
)
def test_parameters_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        effective_parameters(Tradeoff(), wrong, quick=False)


def test_latency_is_bought_with_excess_data(tmp_path: Path) -> None:
    outcome = perform(Tradeoff(), SMALL, tmp_path / "out")
    assert outcome.error is None
    assert [bar.name for bar in outcome.bars if not bar.ok] == []
    [table] = outcome.tables
    relay, flooding = (dict(zip(table.columns, row, strict=True)) for row in table.rows)
    assert (relay["threshold"], relay["groups"], relay["largest"]) == ("0 ms", 6, 1)
    assert (flooding["threshold"], flooding["groups"], flooding["largest"]) == ("all", 1, 6)
    # A message is published at one broker and wanted at two: the cloud has it for nobody, and so have three others, flooded.
    assert relay["excess %"] == pytest.approx(100 * 1 / 4, abs=0.1)
    assert relay["at the edge %"] == 0.0
    assert flooding["excess %"] == pytest.approx(100 * 4 / 7, abs=0.1)
    assert flooding["at the edge %"] == pytest.approx(100 * 3 / 6, abs=0.1)

"""The probes protocol: what it measures, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.scenario.events import Crash
from nearcast.scenario.files import load_scenario
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, Site, Topology
from nearcast.simulation.runs import simulate


def scenario(hosts: int = 3, latency_ms: float = 10.0, loss: float = 0.0, **fields: Any) -> Scenario:
    topology = Topology(
        name="one-site",
        sites=(Site(name="site", local=Conditions(latency_ms=latency_ms, loss=loss)),),
        hosts=(Host(name="node", site="site", count=hosts),),
    )
    return Scenario(name="test", topology=topology, protocol="probes", **{"duration_s": 20.0, "settle_s": 1.0, **fields})


def test_round_trips_are_measured() -> None:
    figures = simulate(scenario()).figures
    assert figures["probes"] == 60
    assert figures["answers"] == 60
    assert figures["unanswered"] == 0.0
    assert figures["round_trip_p50_ms"] == pytest.approx(20.0, rel=0.02)
    assert figures["round_trip_max_ms"] == pytest.approx(20.0)


def test_settings() -> None:
    figures = simulate(scenario(settings={"period_s": 0.1, "size_bytes": 1000})).figures
    assert figures["probes"] == 600


def test_losses_show() -> None:
    figures = simulate(scenario(loss=0.2, settings={"period_s": 0.05})).figures
    assert figures["unanswered"] == pytest.approx(1 - 0.8 * 0.8, abs=0.06)


def test_a_crash_is_survived() -> None:
    outcome = simulate(scenario(events=(Crash(at_s=5.0, host="node-1", restart_after_s=5.0),)))
    assert outcome.ok
    assert outcome.figures["answers"] < outcome.figures["probes"]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"settings": {"period_s": 0}}, "`settings.period_s` must be a number above 0"),
        ({"settings": {"size_bytes": "big"}}, "`settings.size_bytes` must be a number above 0"),
        ({"settings": {"rate": 1}}, "`settings.rate`: the protocol probes has only period_s and size_bytes"),
        ({"hosts": 1}, "needs a topology with at least two hosts"),
    ],
)
def test_refusals(fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        simulate(scenario(**fields))


def test_the_ready_scenario_is_the_scale_bar() -> None:
    ready = load_scenario("probes")
    assert isinstance(ready.topology, Topology)
    assert len(ready.topology.host_names()) == 10_000

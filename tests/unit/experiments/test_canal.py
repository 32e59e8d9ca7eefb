"""The models of the Canal experiments: which share of requests is served, and a ring that loses sets."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearcast.errors import ConfigError, InvalidValue
from nearcast.experiments import perform
from nearcast.experiments.canal_availability import AvailabilityParameters, CanalAvailability, draw, served
from nearcast.experiments.canal_failover import FailoverParameters
from nearcast.experiments.canal_ring import restabilisations
from nearcast.experiments.experiment import effective_parameters

NO_ELECTION = AvailabilityParameters(election_s=0.0)


def test_a_majority_of_machines_that_fail_each_for_itself() -> None:
    edge = 0.9
    assert served("machines", 3, edge, NO_ELECTION) == pytest.approx(edge**3 + 3 * edge**2 * (1 - edge))
    cloud = NO_ELECTION.cloud
    one = cloud**2 + 2 * cloud * (1 - cloud) * edge
    assert served("machines", 1, edge, NO_ELECTION) == pytest.approx(one)


def test_a_site_takes_all_of_its_replicas_with_it() -> None:
    assert served("sites", 3, 0.9, NO_ELECTION) == pytest.approx(0.9)
    assert served("sites", 2, 0.9, NO_ELECTION) == pytest.approx(0.9)
    assert served("sites", 1, 0.9, NO_ELECTION) == pytest.approx(NO_ELECTION.cloud)
    assert served("sites", 0, 0.9, NO_ELECTION) == pytest.approx(NO_ELECTION.cloud)


def test_elections_cost_what_they_take() -> None:
    slow = AvailabilityParameters(election_s=10.0, repair_s=100.0)
    without = AvailabilityParameters(election_s=0.0, repair_s=100.0)
    lost = served("machines", 3, 0.9, without) - served("machines", 3, 0.9, slow)
    assert lost == pytest.approx(0.1 / 100.0 * 0.9**2 * 10.0)


@pytest.mark.parametrize("failing", ["machines", "sites"])
def test_what_is_drawn_is_what_is_computed(failing: str) -> None:
    parameters = AvailabilityParameters(years=20.0)
    drawn, error = draw(failing, 2, 0.95, parameters, np.random.default_rng(1))
    assert abs(drawn - served(failing, 2, 0.95, parameters)) < 5 * error


def test_a_quick_run_holds_its_bars(tmp_path: Path) -> None:
    experiment = CanalAvailability()
    parameters = effective_parameters(experiment, {"years": 5.0, "edge": "0.9,0.99"}, quick=True)
    outcome = perform(experiment, parameters, tmp_path / "out", quick=True)
    assert outcome.ok, outcome
    assert outcome.plots == ["plots/served-machines.png", "plots/served-sites.png"]


def test_a_ring_is_whole_again_when_the_lease_of_the_lost_set_is_over() -> None:
    assert all(6.0 < seconds < 10.0 for seconds in restabilisations(2, 1))


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises((ConfigError, InvalidValue), match="edge"):
        AvailabilityParameters(edge=(1.0,))
    with pytest.raises((ConfigError, InvalidValue), match="frozen"):
        FailoverParameters(frozen=2.0)
    assert FailoverParameters(scale=0.1).losses == 100

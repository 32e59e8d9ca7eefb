"""Where topics are put, and what telemetry costs, in small: without Spark, the sweep's function by itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from nearcast.errors import ConfigError, NearcastError
from nearcast.experiments import effective_parameters, perform
from nearcast.experiments.monitoring import Monitoring, report_bytes
from nearcast.experiments.selection import Selection
from nearcast.experiments.selection_runs import (
    DRONES,
    GROUPS,
    PLAYERS,
    SWARMS,
    Asked,
    Choose,
    choose,
    measure,
    players,
    swarms,
)
from nearcast.telemetry.records import Place


@pytest.fixture(scope="module")
def prepared() -> Choose:
    return choose.prepare([{"topology": "mmog-4"}, {"topology": "uav-4"}])


def test_a_permutation_follows_from_its_parameters_and_seed(prepared: Choose) -> None:
    first = prepared({"topology": "uav-4"}, 3)
    assert first == choose({"topology": "uav-4"}, 3)
    assert first != prepared({"topology": "uav-4"}, 4)


def test_owners_in_the_swarms_zone_keep_the_bound_and_hashing_does_not(prepared: Choose) -> None:
    for seed in range(5):
        figures = prepared({"topology": "uav-4"}, seed)
        assert figures["centroids_violations"] == 0.0
        assert figures["centroids_worst_ms"] == figures["all_pairs_worst_ms"] < 40.0 < figures["hashing_worst_ms"]
        assert figures["hashing_violations"] > 0.4
        assert figures["ours_sure"] > 0.9 > figures["published_sure"]


def test_centroids_are_about_as_good_as_knowing_every_client(prepared: Choose) -> None:
    figures = prepared({"topology": "mmog-4"}, 1)
    assert figures["topics"] == PLAYERS
    assert figures["centroids_worst_ms"] <= 1.25 * figures["all_pairs_worst_ms"] < figures["hashing_worst_ms"]


def test_nodes_of_one_site_are_found_to_be_near_each_other() -> None:
    """Zones are all equally far from each other, which heights alone would explain."""
    measured = measure(Asked(topology="uav-4"))
    assert np.diag(measured.estimated_ms).max() < 2.0
    assert measured.estimated_ms[0, 1] == pytest.approx(15.25, rel=0.15)


def test_players_are_in_groups_and_swarms_in_zones() -> None:
    rng = np.random.default_rng(1)
    permutation = players(rng, 5)
    assert len(permutation.names) == PLAYERS
    assert np.unique(permutation.topic).tolist() == list(range(PLAYERS))
    per_topic = np.bincount(permutation.topic)
    assert per_topic.max() <= min(5, PLAYERS // GROUPS)
    flown = swarms(rng, np.array([[0.0, 0.0], [10.0, 0.0]]))
    assert len(flown.names) == 2 * SWARMS
    assert len(flown.topic) == 2 * SWARMS * (DRONES - 1)
    leads = flown.topic == 0
    assert (flown.producer[leads] == flown.producer[leads][0]).all()


@pytest.mark.parametrize("topology", ["mmog", "mmog-1", "mmog-301", "moon-4", "uav-x"])
def test_a_topology_that_is_none_is_refused(topology: str) -> None:
    with pytest.raises(ConfigError, match="mmog-5 or uav-4"):
        choose.prepare([{"topology": topology}])


@pytest.mark.parametrize(
    "given", [{"cities": "1,5"}, {"zones": "4,4"}, {"permutations": "1000000"}, {"cities": "", "zones": ""}]
)
def test_parameters_that_make_no_sense_are_refused(given: dict[str, str]) -> None:
    with pytest.raises(NearcastError):
        effective_parameters(Selection(), given, quick=False)


def test_quick_is_small() -> None:
    parameters = effective_parameters(Selection(), {}, quick=True)
    assert parameters.count * (len(parameters.cities) + len(parameters.zones)) <= 100
    assert {bar.name for bar in Selection().bars(parameters)} >= {"runs", "mmog_worst_ratio", "uav_violations"}


# --- monitoring -----------------------------------------------------------------------------------------------------------


def test_what_is_reported_of_a_topic_does_not_depend_on_its_clients() -> None:
    owner = Place(tuple([1.0] * 8), 1.0)
    gateways = [Place(tuple([float(number)] * 8), 2.0, 0.5, 0.1) for number in range(4)]
    few, few_raw = report_bytes(owner, gateways, 50, 4, 1)
    many, many_raw = report_bytes(owner, gateways, 50, 64, 1)
    assert many < 1.1 * few
    assert 15 < many_raw / few_raw < 17
    twice, _ = report_bytes(owner, gateways, 100, 4, 1)
    assert 1.9 < twice / few < 2.1


def test_monitoring_holds_its_bars(tmp_path: Path) -> None:
    experiment = Monitoring()
    parameters = effective_parameters(experiment, {"topics": "2,20", "gateways": "3"}, quick=True)
    outcome = perform(experiment, parameters, tmp_path / "run", command="", quick=True)
    assert outcome.ok, outcome.bars
    assert outcome.plots == ["plots/monitoring.png"]


@pytest.mark.parametrize("given", [{"topics": "5"}, {"clients": "1,2"}, {"topics": "5,2"}, {"interval_s": "0"}])
def test_monitoring_refuses_what_makes_no_sense(given: dict[str, str]) -> None:
    with pytest.raises(NearcastError):
        effective_parameters(Monitoring(), given, quick=False)

"""What the ePulsar paper (Gupta et al., SEC 2021) says, a claim per test, with its section."""

from __future__ import annotations

import numpy as np
import pytest

from nearcast.coordinates import topologies
from nearcast.coordinates.coordinate import Coordinate
from nearcast.experiments.coordinates_model import accuracy
from nearcast.experiments.monitoring import report_bytes
from nearcast.experiments.selection_runs import Choose, choose
from nearcast.simulation.agents import Agents
from nearcast.telemetry.records import Place

# --- section 4: the coordinates of clients --------------------------------------------------------------------------------


def test_a_client_is_at_its_gateway_and_its_own_latency_goes_into_the_height() -> None:
    """Section 4: the latency between a mobile client and its proxy is added to the height of the proxy's coordinate."""
    gateway, broker = Coordinate([1.0] * 8, 2.0), Coordinate([5.0] * 8, 1.0)
    assert gateway.raised(20.0).distance_ms(broker) == pytest.approx(gateway.distance_ms(broker) + 20.0)


# --- section 5.3: accuracy ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 8, 32])
def test_the_error_is_below_3_5_ms_whatever_the_number_of_nodes(nodes: int) -> None:
    """Section 5.3, figure 3: nodes at one switch; the error of a pair stays low with more nodes."""
    rtt_ms = topologies.star(nodes, 100.0)
    agents = Agents(rtt_ms, seed=1)
    agents.run(120.0)
    assert accuracy(agents.coordinates, rtt_ms).mean_error_ms < 3.5


@pytest.mark.parametrize("between_ms", [10.0, 50.0, 200.0])
def test_the_error_is_below_6_percent_of_the_round_trip(between_ms: float) -> None:
    """Section 5.3, figure 3: it grows with the round-trip time, and stays small beside it."""
    rtt_ms = topologies.star(16, between_ms)
    agents = Agents(rtt_ms, seed=1)
    agents.run(120.0)
    assert accuracy(agents.coordinates, rtt_ms).mean_error_ms < 0.06 * between_ms


# --- section 5.5: selection of brokers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def prepared() -> Choose:
    return choose.prepare([{"topology": topology} for topology in ("mmog-5", "mmog-10", "uav-4", "uav-16")])


@pytest.mark.parametrize("topology", ["mmog-5", "mmog-10"])
def test_centroids_offer_a_worst_case_similar_to_all_pairs_and_hashing_a_worse_one(prepared: Choose, topology: str) -> None:
    """Section 5.5.2, figure 4."""
    runs = [prepared({"topology": topology}, seed) for seed in range(5)]
    for found in runs:
        assert found["centroids_violations"] <= found["all_pairs_violations"] + 0.01
        assert found["hashing_violations"] > found["centroids_violations"] + 0.02
    ours, known, hashed = (
        np.mean([found[f"{policy}_worst_ms"] for found in runs]) for policy in ("centroids", "all_pairs", "hashing")
    )
    assert ours <= 1.25 * known
    assert hashed >= 1.3 * ours


@pytest.mark.parametrize("topology", ["uav-4", "uav-16"])
def test_swarms_have_no_violations_however_many_zones_there_are(prepared: Choose, topology: str) -> None:
    """Section 5.5.3, figure 5."""
    for seed in range(5):
        found = prepared({"topology": topology}, seed)
        assert found["centroids_violations"] == 0.0
        assert found["centroids_worst_ms"] < 40.0 < found["hashing_worst_ms"]


# --- section 5.6: monitoring ----------------------------------------------------------------------------------------------


def test_what_is_reported_grows_with_topics_and_not_with_clients() -> None:
    """Section 5.6, figure 6: and without centroids it grows with both."""
    owner = Place(tuple([1.0] * 8), 1.0)
    gateways = [Place(tuple([float(number)] * 8), 2.0, 0.5, 0.1) for number in range(4)]
    few, few_raw = report_bytes(owner, gateways, 20, 4, 1)
    many, many_raw = report_bytes(owner, gateways, 20, 128, 1)
    more_topics, _ = report_bytes(owner, gateways, 80, 4, 1)
    assert many < 1.1 * few
    assert many_raw > 25 * few_raw
    assert 3.5 < more_topics / few < 4.5

"""The ready-made topologies have the figures of the papers they come from."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from nearcast.network.network import Network
from nearcast.scenario.assembly import build_network
from nearcast.scenario.files import load_topology, ready_topologies


class Figures:
    """One-way milliseconds between hosts, by name."""

    def __init__(self, name: str) -> None:
        self.network, names = build_network(load_topology(name), Random(0))
        self.names = names
        self._index = {host: index for index, host in enumerate(names)}

    def one_way(self, *path: str) -> float:
        """Along hosts that hand a message on: publisher, brokers, subscriber."""
        return sum(self.network.one_way_ms(self._index[source], self._index[target]) for source, target in pairwise(path))


@pytest.mark.parametrize("name", ready_topologies())
def test_every_host_reaches_every_other(name: str) -> None:
    topology = load_topology(name)
    network, names = build_network(topology, Random(0))
    assert isinstance(network, Network)
    assert names == topology.host_names()
    assert topology.name == name
    assert len(topology.description) > 100
    for source in range(len(names)):
        for target in range(len(names)):
            assert 0 <= network.one_way_ms(source, target) < 1000


def test_uav_zones_and_cloud() -> None:
    """ePulsar 5.1.1: 30 ms round trip between sites, the cloud 40 ms one way from any; 5.8.1: 4 zones, 8 swarms."""
    uav = Figures("uav")
    brokers = [f"broker-{zone}" for zone in range(1, 5)]
    for one in brokers:
        assert uav.one_way(one, "cloud-broker") == pytest.approx(40)
        assert uav.one_way("cloud-broker", one) == pytest.approx(40)
        for other in brokers:
            if one != other:
                assert uav.one_way(one, other, one) == pytest.approx(30)
    assert sum(name.startswith("swarm-") for name in uav.names) == 8
    assert uav.one_way("swarm-1", "broker-1", "swarm-5") == pytest.approx(20), "in its own zone: within the bound of 40 ms"
    assert uav.one_way("swarm-1", "broker-2", "swarm-5") == pytest.approx(50), "over another zone: a violation"


def test_mmog_cities() -> None:
    """ePulsar 5.1.2: a broker and a game server in each of five US cities, 5 ms apart; the bound is 100 ms."""
    mmog = Figures("mmog")
    cities = ["new-york", "chicago", "dallas", "los-angeles", "seattle"]
    for city in cities:
        assert mmog.one_way(f"server-{city}", f"broker-{city}") == pytest.approx(5)
        for other in cities:
            assert mmog.one_way(f"server-{city}", f"broker-{city}", f"server-{other}") < 100
    # WonderNetwork's round trips are about 70 ms from New York to Los Angeles and 20 ms to Chicago.
    assert mmog.one_way("broker-new-york", "broker-los-angeles") == pytest.approx(34.7, abs=0.2)
    assert mmog.one_way("broker-new-york", "broker-chicago") == pytest.approx(10.1, abs=0.2)
    assert mmog.one_way("manager", "broker-new-york") == 0


def test_iov_expected_delivery_latencies() -> None:
    """Broadcast groups IV-C: 4, 7, 55 and 44 ms."""
    iov = Figures("iov")
    for car, other in (("car-2", "car-3"), ("car-3", "car-2")):
        assert iov.one_way(car, "broker-3", other) == pytest.approx(4), "matched at edge broker 3 directly"
    for car in ("car-2", "car-3"):
        flooded = (car, "broker-3", "broker-2", "car-1")
        relayed = (car, "broker-3", "cloud-broker", "broker-2", "car-1")
        for path, expected in ((flooded, 7), (relayed, 55)):
            assert iov.one_way(*path) == pytest.approx(expected)
            assert iov.one_way(*reversed(path)) == pytest.approx(expected)
    assert iov.one_way("camera", "broker-1", "cloud-broker", "authority") == pytest.approx(44)


def test_iov_groups_form_as_in_the_paper() -> None:
    """Broadcast groups IV-B: with a threshold of 5 ms, edge brokers 2 and 3 are a group and edge broker 1 is alone."""
    iov = Figures("iov")
    assert iov.one_way("broker-2", "broker-3") == pytest.approx(3)
    assert iov.one_way("broker-1", "broker-2") > 5
    assert iov.one_way("broker-1", "broker-3") > 5
    assert iov.one_way("broker-2", "cloud-broker") == pytest.approx(25), "the direct leg, not the way over edge 3"
    assert iov.one_way("broker-3", "cloud-broker") == pytest.approx(26)


def test_emma_regions() -> None:
    """EMMA figure 4: 98, 85 and 27 ms round trip; within a region less than a millisecond. VI-B-2: the groups of clients."""
    emma = Figures("emma")
    for one, other, rtt_ms in (
        ("broker-east", "broker-central", 98),
        ("broker-east", "broker-west-1", 85),
        ("broker-west-2", "broker-central", 27),
    ):
        assert emma.one_way(one, other, one) == pytest.approx(rtt_ms)
    assert emma.one_way("broker-west-1", "broker-west-2", "broker-west-1") < 1
    assert sum(name.startswith("clients-east") for name in emma.names) == 10
    assert sum(name.startswith("clients-west") for name in emma.names) == 10


def test_canal_clouds() -> None:
    """Canal IV: 24 machines; all traffic of the farm goes over one lossy link of 100 Mb/s to the campus."""
    canal = Figures("canal")
    assert sum("-node-" in name for name in canal.names) == 24
    assert canal.one_way("lab-node-1", "farm-node-1") == pytest.approx(
        canal.one_way("lab-node-1", "campus-node-1") + canal.one_way("campus-node-1", "farm-node-1")
    )
    link = canal.network.link_conditions(canal.network.sites.index("campus"), canal.network.sites.index("farm"))
    assert link is not None
    assert link.bandwidth_mbps == 100
    assert link.loss > 0

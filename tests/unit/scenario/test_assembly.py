"""A topology becomes a network with the same latencies, links and hosts."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random
from typing import get_args

import msgspec
import numpy as np
import pytest

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.network.matrices import MAX_SITES
from nearcast.scenario import matrix_files
from nearcast.scenario.assembly import build_network, coordinates_of
from nearcast.scenario.matrix_files import read_rtt_ms
from nearcast.scenario.topology import Host, LatencyModel, Shape, Site, SiteLink, Topology

VIENNA = Site(name="vienna", latitude=48.2085, longitude=16.3721)
BERLIN = Site(name="berlin", latitude=52.5244, longitude=13.4105)
ROME = Site(name="rome", latitude=41.8919, longitude=12.5113)


def topology(**changes: object) -> Topology:
    settings: dict[str, object] = {
        "name": "t",
        "sites": (VIENNA, BERLIN, ROME),
        "hosts": (Host(name="v", site="vienna"), Host(name="b", site="berlin", count=2), Host(name="r", site="rome")),
    }
    return Topology(**(settings | changes))  # type: ignore[arg-type]


def test_hosts_are_endpoints_in_order() -> None:
    network, names = build_network(topology(model=LatencyModel()), Random(1))
    assert names == ["v", "b-1", "b-2", "r"]
    assert [network.sites[network.site_of(index)] for index in range(4)] == ["vienna", "berlin", "berlin", "rome"]


def test_fibre_is_distance_at_the_speed_of_light_in_glass_inflated() -> None:
    network, _ = build_network(topology(model=LatencyModel(inflation=2.0, base_ms=1.0)), Random(1))
    assert network.one_way_ms(0, 1) == pytest.approx(524 * 2 / 204.2 + 1, abs=0.05)
    assert network.one_way_ms(1, 2) == 0, "at the same site"


def test_linear_is_distance_times_a_factor() -> None:
    network, _ = build_network(topology(model=LatencyModel(kind="linear", ms_per_km=0.01)), Random(1))
    assert network.one_way_ms(0, 1) == pytest.approx(5.24, abs=0.02)


def test_links_come_before_the_model() -> None:
    link = SiteLink(between=("vienna", "berlin"), latency_ms=50, loss=0.5)
    network, _ = build_network(topology(model=LatencyModel(), links=(link,)), Random(1))
    assert network.one_way_ms(0, 1) == network.one_way_ms(1, 0) == 50
    assert network.one_way_ms(0, 3) < 20, "not joined by links: by distance"
    assert network.link_conditions(0, 1) == Conditions(latency_ms=50, loss=0.5)


def test_one_way_links_access_and_local_latency() -> None:
    network, _ = build_network(
        Topology(
            name="t",
            sites=(Site(name="a", local=Conditions(latency_ms=0.5)), Site(name="b")),
            links=(
                SiteLink(between=("a", "b"), latency_ms=10, one_way=True),
                SiteLink(between=("b", "a"), latency_ms=30, one_way=True),
            ),
            hosts=(
                Host(name="x", site="a", access=Conditions(latency_ms=1)),
                Host(name="y", site="a", access=Conditions(latency_ms=2)),
                Host(name="z", site="b"),
            ),
        ),
        Random(1),
    )
    assert network.one_way_ms(0, 2) == pytest.approx(11)
    assert network.one_way_ms(2, 0) == pytest.approx(31)
    assert network.one_way_ms(0, 1) == pytest.approx(3.5)


def test_conditions_of_the_model_hold_for_its_pairs() -> None:
    network, _ = build_network(topology(model=LatencyModel(loss=1.0)), Random(1))
    assert network.transit(0, 1, 100, 0.0) < 0
    assert network.transit(1, 2, 100, 0.0) == 0, "not within a site"


def test_what_has_problems_is_not_built() -> None:
    with pytest.raises(ConfigError, match="nothing leads from vienna to berlin"):
        build_network(topology(), Random(1))


def test_ten_thousand_sites_are_built_quickly() -> None:
    sites = tuple(Site(name=f"s{n}", latitude=n % 180 - 90, longitude=n % 360 - 180) for n in range(10_000))
    hosts = tuple(Host(name=f"h{n}", site=f"s{n}") for n in range(10_000))
    network, names = build_network(Topology(name="t", sites=sites, hosts=hosts, model=LatencyModel()), Random(1))
    assert len(names) == len(network) == 10_000


def test_sites_without_a_place_are_nowhere() -> None:
    assert coordinates_of(VIENNA) == (48.2085, 16.3721)
    assert all(map(math.isnan, coordinates_of(Site(name="x"))))
    assert coordinates_of(Site(name="x", city="Vienna, AT")) == pytest.approx((48.2, 16.4), abs=0.1)


def test_a_site_that_links_reach_needs_no_place() -> None:
    cloud = Site(name="cloud")
    links = tuple(SiteLink(between=("cloud", site.name), latency_ms=40) for site in (VIENNA, BERLIN, ROME))
    network, _ = build_network(topology(sites=(VIENNA, BERLIN, ROME, cloud), links=links, model=LatencyModel()), Random(1))
    assert network.one_way_ms(0, 1) == 80, "over the cloud: links come first"


# --- matrices ---

PLAIN = "0,10,20\n10,0,30\n20,30,0\n"


def matrix_topology(path: Path, base_ms: float = 0.0) -> Topology:
    return topology(model=LatencyModel(kind="matrix", file=str(path), base_ms=base_ms))


@pytest.mark.parametrize(
    "text",
    [
        PLAIN,
        "vienna,berlin,rome\n" + PLAIN,
        ",rome,paris,berlin,vienna\nrome,0,1,30,20\nparis,1,0,4,5\nberlin,30,4,,10\nvienna,20,nan,10,0\n",
    ],
)
def test_a_csv_matrix_is_round_trips(tmp_path: Path, text: str) -> None:
    (tmp_path / "rtt.csv").write_text(text)
    network, _ = build_network(matrix_topology(tmp_path / "rtt.csv", base_ms=1), Random(1))
    assert network.one_way_ms(0, 1) == network.one_way_ms(1, 0) == 6
    assert network.one_way_ms(1, 3) == 16


def test_an_npz_matrix(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "rtt.npz", rtt_ms=np.array([[0, 10, np.nan], [10, 0, 30], [np.nan, 30, 0]]))
    network, _ = build_network(matrix_topology(tmp_path / "rtt.npz"), Random(1))
    assert network.one_way_ms(0, 1) == 5
    assert network.one_way_ms(0, 3) == math.inf, "not a number: no way"


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("x.csv", b"", ": the matrix is empty"),
        ("x.csv", b"0,1\n1,0\n", ": the matrix is 2 × 2, and there are 3 sites"),
        ("x.csv", b"0,1,2\n1,0\n", ":2: this row has 2 values"),
        ("x.csv", b"0,1,2\n1,x,3\n", ":2: value 2 of this row is 'x', not a number"),
        ("x.csv", b"vienna,berlin,paris\n0,1,2\n1,0,2\n1,2,0\n", ": the matrix has no row for the site 'rome'"),
        ("x.csv", b"\xff\xfe\x00", ": not a CSV file"),
        ("x.npz", b"garbage", ": not a .npz file"),
        ("x.txt", b"", ": a matrix is a .npz or .csv file, not '.txt'"),
    ],
)
def test_a_matrix_that_cannot_be_used(tmp_path: Path, name: str, content: bytes, says: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        build_network(matrix_topology(tmp_path / name), Random(1))
    assert str(caught.value).startswith(f"{tmp_path}/{name}{says}")
    assert "\n" not in str(caught.value)


def test_an_archive_without_the_array_or_too_large_for_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "x.npz", other=np.zeros((3, 3)))
    with pytest.raises(ConfigError, match="no array `rtt_ms`"):
        read_rtt_ms(tmp_path / "x.npz", ["a"])
    np.savez(tmp_path / "o.npz", rtt_ms=np.array([{"a": 1}], dtype=object))
    with pytest.raises(ConfigError, match=r"not a \.npz file"):
        read_rtt_ms(tmp_path / "o.npz", ["a"])
    monkeypatch.setattr(matrix_files, "MAX_FILE_BYTES", 1_000)
    np.savez_compressed(tmp_path / "z.npz", rtt_ms=np.zeros(1_000))
    with pytest.raises(ConfigError, match=f"larger than a matrix of {MAX_SITES:,} sites"):
        read_rtt_ms(tmp_path / "z.npz", ["a"])
    (tmp_path / "z.csv").write_text("0," * 1_000)
    with pytest.raises(ConfigError, match=f"larger than a matrix of {MAX_SITES:,} sites"):
        read_rtt_ms(tmp_path / "z.csv", ["a"])


def test_a_missing_matrix_is_one_line(tmp_path: Path) -> None:
    for name in ("x.csv", "x.npz"):
        with pytest.raises(ConfigError, match="cannot read the latency matrix: No such file"):
            read_rtt_ms(tmp_path / name, ["a"])


@pytest.mark.parametrize("shape", get_args(Shape))
def test_generated_networks(shape: Shape) -> None:
    model = LatencyModel(kind="generated", shape=shape, rtt_ms=60.0, base_ms=1.0)
    network, _ = build_network(topology(model=model), Random(1))
    again, _ = build_network(topology(model=model), Random(2))
    between = [network.between_sites_ms(a, b) for a in range(3) for b in range(3) if a != b]
    assert between == [again.between_sites_ms(a, b) for a in range(3) for b in range(3) if a != b]
    assert min(between) >= 1.0
    if shape in ("star", "line"):
        assert network.between_sites_ms(0, 1) == 31.0
        assert network.between_sites_ms(1, 2) == (61.0 if shape == "star" else 31.0)
    if shape == "internet":
        other, _ = build_network(topology(model=msgspec.structs.replace(model, shape_seed=7)), Random(1))
        assert between != [other.between_sites_ms(a, b) for a in range(3) for b in range(3) if a != b]

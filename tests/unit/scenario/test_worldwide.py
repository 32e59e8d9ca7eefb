"""Topologies of cities: names that can be used, places that are right, sizes that experiments need."""

from __future__ import annotations

from random import Random

import pytest

from nearcast.scenario.assembly import build_network
from nearcast.scenario.places import City
from nearcast.scenario.worldwide import city_topology, site_names


def test_ten_thousand_cities_make_a_network() -> None:
    topology = city_topology(10_000)
    assert len({site.name for site in topology.sites}) == 10_000
    network, names = build_network(topology, Random(1))
    shanghai, beijing = names.index("broker-shanghai-cn"), names.index("broker-beijing-cn")
    assert network.one_way_ms(shanghai, beijing) == pytest.approx(1_068 * 1.8 / 204.2, rel=0.02)


def test_cities_of_a_country() -> None:
    topology = city_topology(5, country="AT", host="edge")
    assert topology.name == "cities-5-at"
    assert topology.sites[0].name == "vienna-at"
    assert topology.host_names()[0] == "edge-vienna-at"


def test_names_are_plain_and_unique() -> None:
    def city(name: str, country: str = "XX") -> City:
        return City(name, country, "", 0.0, 0.0, 1)

    cities = [city("São Paulo"), city("Sao Paulo"), city("Sao Paulo", "YY"), city("東京"), city("L'Aquila"), city("x" * 90)]
    assert site_names(cities) == ["sao-paulo-xx", "sao-paulo-xx-2", "sao-paulo-yy", "city-xx", "l-aquila-xx", "x" * 40 + "-xx"]

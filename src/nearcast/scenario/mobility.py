"""Movement becomes ``move`` events: random waypoint over the area of the sites, or a trace file.

A moving host is at the nearest site, and changes only to one that is nearer by more than the hysteresis, so that one on a
border does not flap. Everything is decided before the run; the same seed gives the same ways.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import numpy as np

from nearcast.errors import ConfigError
from nearcast.network.latency import EARTH_RADIUS_KM
from nearcast.scenario.assembly import coordinates_of
from nearcast.scenario.events import Move
from nearcast.scenario.expansion import match_hosts
from nearcast.scenario.movement import Mobility, Trace, Waypoints
from nearcast.scenario.rules import shown, unknown
from nearcast.scenario.topology import Topology

MAX_STEPS = 2_000_000
"""Positions looked at for one scenario: hosts times duration over step."""

MAX_ROWS = 5_000_000
"""Rows of a trace."""

_KM_PER_DEGREE = EARTH_RADIUS_KM * math.pi / 180


def moves(topology: Topology, mobility: Mobility, duration_s: float, rng: Random) -> list[Move]:
    """The moves of one entry of a scenario, in the order of their time, up to ``duration_s``."""
    if isinstance(mobility, Waypoints):
        return random_waypoint(topology, mobility, duration_s, rng)
    return [move for move in read_trace(topology, mobility) if move.at_s <= duration_s]


def random_waypoint(topology: Topology, mobility: Waypoints, duration_s: float, rng: Random) -> list[Move]:
    """Moves of hosts that go from random point to random point. Each host has its own random numbers, so that another host
    more or less does not change the ways of the rest."""
    names = topology.host_names()
    hosts: dict[str, None] = {}
    for pattern in mobility.hosts:
        matched = match_hosts(pattern, names)
        if not matched:
            raise ConfigError(f"`mobility.hosts`: {unknown('host', pattern, names)}", key="mobility.hosts")
        hosts.update(dict.fromkeys(matched))
    if len(hosts) * duration_s / mobility.step_s > MAX_STEPS:
        raise ConfigError(f"more than {MAX_STEPS:,} steps of moving hosts: lengthen `step_s` or move fewer", key="step_s")
    cells = Cells(topology, mobility.sites)
    if len(cells.names) < 2:
        raise ConfigError(f"random waypoint needs two sites or more with coordinates; {topology.name} has {len(cells.names)}")
    area = _Area(cells.places, mobility.margin)
    if area.diagonal_km * 1000 < mobility.max_speed_mps * mobility.step_s:
        message = f"at {mobility.max_speed_mps:g} m/s a host crosses the area of the sites within one step: shorten `step_s`"
        raise ConfigError(message, key="step_s")
    home = _homes(topology)
    seed = rng.getrandbits(64)
    found: list[Move] = []
    for host in hosts:
        way = _walk(area, cells.place(home[host]), mobility, duration_s, Random(f"{seed}/{host}"))
        found += _handovers(cells, host, home[host], way, mobility.hysteresis)
    return sorted(found, key=lambda move: move.at_s)


def read_trace(topology: Topology, mobility: Trace) -> list[Move]:
    """Moves of a trace file. ConfigError names the file and the line."""
    try:
        with Path(mobility.file).open(encoding="utf-8", newline="") as file:
            return trace_moves(topology, file, mobility, mobility.file)
    except OSError as error:
        raise ConfigError(f"cannot read the trace: {error.strerror or error}", path=mobility.file) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"not a CSV file: {error}", path=mobility.file) from error


def trace_moves(topology: Topology, lines: Iterable[str], mobility: Trace, location: str) -> list[Move]:
    """The moves of a trace's lines. Rows may be in any order of time; ``location`` is for errors."""
    rows = csv.reader(lines)
    header = [cell.strip() for cell in next(rows, [])]
    by_site = header == ["time_s", "host", "site"]
    if not by_site and header != ["time_s", "host", "latitude", "longitude"]:
        message = "the first line must be time_s,host,site or time_s,host,latitude,longitude"
        raise ConfigError(message, path=location, line=1)
    home = _homes(topology)
    sites = {site.name for site in topology.sites}
    cells = None if by_site else Cells(topology, mobility.sites)
    if cells is not None and not cells.names:
        raise ConfigError(f"a trace of coordinates needs sites with coordinates; {topology.name} has none", path=location)
    stops: dict[str, list[tuple[float, str]]] = {}
    fixes: dict[str, list[tuple[float, float, float]]] = {}
    for count, row in enumerate(rows):
        if not any(cell.strip() for cell in row):
            continue
        try:
            if count >= MAX_ROWS:
                raise ValueError(f"a trace has at most {MAX_ROWS:,} rows")
            if len(row) != len(header):
                raise ValueError(f"{len(row)} values where the header has {len(header)}")
            at_s, host = _number(row[0], 0.0, 1e9, "time_s"), row[1].strip()
            if host not in home:
                raise ValueError(unknown("host", host, home))
            if by_site:
                site = row[2].strip()
                if site not in sites:
                    raise ValueError(unknown("site", site, sites))
                stops.setdefault(host, []).append((at_s, site))
            else:
                latitude, longitude = _number(row[2], -90, 90, "latitude"), _number(row[3], -180, 180, "longitude")
                fixes.setdefault(host, []).append((at_s, latitude, longitude))
        except ValueError as error:
            raise ConfigError(str(error), path=location, line=rows.line_num) from None
    found: list[Move] = []
    for host, visited in stops.items():
        here = home[host]
        for at_s, site in sorted(visited, key=lambda stop: stop[0]):
            if site != here:
                found.append(Move(at_s=at_s, host=host, site=site))
                here = site
    if cells is not None:
        for host, way in fixes.items():
            way.sort(key=lambda fix: fix[0])
            found += _handovers(cells, host, home[host], way, mobility.hysteresis)
    return sorted(found, key=lambda move: move.at_s)


class Cells:
    """Which site is nearest to a point, among those that have a place."""

    def __init__(self, topology: Topology, names: tuple[str, ...] = ()) -> None:
        known = {site.name: site for site in topology.sites}
        for name in names:
            if name not in known:
                raise ConfigError(f"`mobility.sites`: {unknown('site', name, known)}", key="mobility.sites")
            if not known[name].located:
                raise ConfigError(f"`mobility.sites`: {name} has neither city nor coordinates", key="mobility.sites")
        self.names = list(names) or [site.name for site in topology.sites if site.located]
        self.places = [coordinates_of(known[name]) for name in self.names]
        self._index = {name: index for index, name in enumerate(self.names)}
        self._vectors = np.array([_unit(*place) for place in self.places]).reshape(len(self.names), 3)

    def place(self, site: str) -> tuple[float, float] | None:
        """Latitude and longitude of a site; None if it is none of these."""
        index = self._index.get(site)
        return None if index is None else self.places[index]

    def choose(self, latitude: float, longitude: float, current: str, hysteresis: float) -> str:
        """The site for a point: ``current``, unless another one is nearer by the hysteresis."""
        # Chords grow with distances, and ratios of short ones are those of the distances.
        chords = np.linalg.norm(self._vectors - _unit(latitude, longitude), axis=1)
        best = int(np.argmin(chords))
        index = self._index.get(current)
        if index is not None and not chords[best] < chords[index] * (1 - hysteresis):
            return current
        return self.names[best]


def _handovers(
    cells: Cells, host: str, home: str, way: Iterable[tuple[float, float, float]], hysteresis: float
) -> Iterator[Move]:
    here = home
    for at_s, latitude, longitude in way:
        chosen = cells.choose(latitude, longitude, here, hysteresis)
        if chosen != here:
            yield Move(at_s=at_s, host=host, site=chosen)
            here = chosen


class _Area:
    """The rectangle around the sites, as a map of kilometres around its middle: exact enough for cities and countries,
    which is what waypoints are for."""

    def __init__(self, places: list[tuple[float, float]], margin: float) -> None:
        self.south, self.north = _widened([place[0] for place in places], margin, 89.0)
        self.west, self.east = _widened([place[1] for place in places], margin, 180.0)
        self._east_km = _KM_PER_DEGREE * math.cos(math.radians((self.south + self.north) / 2))
        self.diagonal_km = self.distance_km((self.south, self.west), (self.north, self.east))

    def point(self, rng: Random) -> tuple[float, float]:
        return rng.uniform(self.south, self.north), rng.uniform(self.west, self.east)

    def distance_km(self, one: tuple[float, float], other: tuple[float, float]) -> float:
        return math.hypot((other[0] - one[0]) * _KM_PER_DEGREE, (other[1] - one[1]) * self._east_km)


def _walk(
    area: _Area, start: tuple[float, float] | None, mobility: Waypoints, duration_s: float, rng: Random
) -> Iterator[tuple[float, float, float]]:
    """Where a host is at every step, as (seconds, latitude, longitude)."""
    here = start or area.point(rng)
    step = 0
    moment_s = 0.0
    while moment_s < duration_s:
        there = area.point(rng)
        speed_mps = rng.uniform(mobility.min_speed_mps, mobility.max_speed_mps)
        travel_s = area.distance_km(here, there) * 1000 / speed_mps
        while step * mobility.step_s < min(moment_s + travel_s, duration_s):
            share = (step * mobility.step_s - moment_s) / travel_s
            at_s = step * mobility.step_s
            yield at_s, here[0] + share * (there[0] - here[0]), here[1] + share * (there[1] - here[1])
            step += 1
        moment_s += travel_s
        here = there
        pause_s = rng.uniform(0.0, mobility.max_pause_s)
        moment_s += pause_s
        # Nothing changes while it stands still.
        step = max(step, math.ceil(moment_s / mobility.step_s))


def _widened(values: list[float], margin: float, bound: float) -> tuple[float, float]:
    spare = (max(values) - min(values)) * margin
    return max(min(values) - spare, -bound), min(max(values) + spare, bound)


def _unit(latitude: float, longitude: float) -> tuple[float, float, float]:
    north, east = math.radians(latitude), math.radians(longitude)
    return math.cos(north) * math.cos(east), math.cos(north) * math.sin(east), math.sin(north)


def _homes(topology: Topology) -> dict[str, str]:
    return {name: host.site for host in topology.hosts for name in host.names()}


def _number(cell: str, low: float, high: float, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise ValueError(f"{column} is {shown(cell)}, not a number") from None
    if not low <= value <= high:
        raise ValueError(f"{column} is {cell.strip()}: must be between {low:g} and {high:g}")
    return value

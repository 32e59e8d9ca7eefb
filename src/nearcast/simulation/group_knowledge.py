"""What simulated brokers know of each other while they form groups: who leads, and how far everybody is.

Ten thousand brokers that hear ten thousand announcements and measure as many round trips would be the whole simulation, so
here they look at two things that all share. The :class:`Board` is the announcement topic at the cloud: what a leader says is
there after its way to the cloud, and a broker hears it after its own way from there. :class:`Surroundings` has the latencies
of the network model, without jitter, as a moving average of many pings would have them. What :class:`Known` makes of both is
what :class:`nearcast.groups.formation.Neighbours` asks for. It decides nothing.

Left out, beside jitter: dialling (a link is there when it is needed), the load of the announcements, and their repetition,
of which only the consequence is kept, that leaders who fall silent are forgotten.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from nearcast.network.network import Network
from nearcast.scenario.assembly import coordinates_of
from nearcast.scenario.events import ChangeAccess, ChangeLink, Move
from nearcast.scenario.expansion import topology_of
from nearcast.scenario.scenario import Scenario

if TYPE_CHECKING:
    from nearcast.simulation.world import World

Floats = npt.NDArray[np.float64]

NEVER = math.inf

_NOWHERE = -2.0
"""In the place of a cosine: not this one."""

_ATTEMPTS = 16
"""So many that are listed and not heard are passed over one by one; then all of them at once."""

_ROWS = 256
"""Of a matrix of distances at a time."""


class Surroundings:
    """How far brokers are from each other, by the indexes of their hosts; and which do not answer."""

    def __init__(self, network: Network, names: Sequence[str], steady: bool) -> None:
        """``names`` are those of all hosts; ``steady`` says that nothing will ever change."""
        self.network = network
        self.steady = steady
        self.names = list(names)
        self.numbers = {name: number for number, name in enumerate(names)}
        self.silent: set[int] = set()
        """Brokers whose pings have been missing for so long that nobody counts on them."""

    def latency_ms(self, one: int, other: int) -> float:
        """One way, as half a round trip; infinity while there is no answer."""
        if other in self.silent:
            return math.inf
        return (self.network.one_way_ms(one, other) + self.network.one_way_ms(other, one)) / 2.0


class Board:
    """Who is announced as a leader, as of each moment at the cloud. Times are the world's."""

    def __init__(self, delays_s: Floats, unit_vectors: Floats | None) -> None:
        """``delays_s`` is each broker's way to the cloud, by index; ``unit_vectors`` (a row of x, y, z for each) where the
        nearest leader can be found from them."""
        count = len(delays_s)
        self.delays_s = delays_s
        self.listed = 0
        """Entries; the first so many of the arrays below."""
        self.latest = -math.inf
        """When the youngest entry came to the cloud."""
        self.who = np.zeros(count, np.int64)
        self._places = np.full(count, -1, np.int64)
        self._since = np.zeros(count)
        self._until = np.zeros(count)
        self.vectors = unit_vectors
        """Where brokers are, if the nearest is the one with the largest cosine."""
        self._columns = np.zeros((3, count))
        self._leaving: list[tuple[float, int]] = []  # a heap: when an end has been heard everywhere
        self._farthest_s = float(delays_s.max(initial=0.0))

    def post(self, who: int, now: float) -> None:
        """A leader announces itself."""
        since = now + float(self.delays_s[who])
        place = int(self._places[who])
        if place < 0:
            place = self.listed
            self.listed += 1
            self.who[place] = who
            self._places[who] = place
            if self.vectors is not None:
                self._columns[:, place] = self.vectors[who]
        elif self._until[place] == NEVER:
            return
        self._since[place] = since
        self._until[place] = NEVER
        self.latest = max(self.latest, since)

    def withdraw(self, who: int, now: float) -> None:
        """It leads no more, and says so; or it has been silent for too long."""
        place = int(self._places[who])
        if place >= 0 and self._until[place] == NEVER:
            self._until[place] = now + float(self.delays_s[who])
            heappush(self._leaving, (float(self._until[place]) + self._farthest_s, who))

    def is_listed(self, who: int) -> bool:
        """Whether it is announced, heard everywhere yet or not."""
        place = int(self._places[who])
        return place >= 0 and bool(self._until[place] == NEVER)

    def has_heard(self, reader: int, place: int, now: float, known_for_s: float) -> bool:
        """The same as :meth:`heard`, of one entry."""
        moment = now - float(self.delays_s[reader])
        return bool(self._since[place] <= moment - known_for_s and self._until[place] > moment)

    def heard(self, reader: int, now: float, known_for_s: float) -> npt.NDArray[np.bool_]:
        """Which entries a broker has heard, that long ago at least, and not heard the end of."""
        self.forget(now)
        moment = now - float(self.delays_s[reader])
        listed = self.listed
        return (self._since[:listed] <= moment - known_for_s) & (self._until[:listed] > moment)

    def cosines(self, reader: int) -> Floats:
        """Of the angles between a broker's place and those of all entries."""
        assert self.vectors is not None  # noqa: S101  # the caller looked
        x, y, z = self.vectors[reader]
        listed = self.listed
        # Not a matrix product: its rounding depends on the machine, and one seed is one run on all of them.
        cosines: Floats = self._columns[0, :listed] * x
        cosines += self._columns[1, :listed] * y
        cosines += self._columns[2, :listed] * z
        return cosines

    def forget(self, now: float) -> None:
        """Drop entries whose end has been heard everywhere."""
        leaving = self._leaving
        while leaving and leaving[0][0] <= now:
            _, who = heappop(leaving)
            place = int(self._places[who])
            if place < 0 or self._until[place] + self._farthest_s > now:
                continue  # Announced again since.
            last = self.listed - 1
            moved = int(self.who[last])
            for column in (self.who, self._since, self._until):
                column[place] = column[last]
            self._columns[:, place] = self._columns[:, last]
            self._places[moved] = place
            self._places[who] = -1
            self.listed = last


class Known:
    """One broker's :class:`~nearcast.groups.formation.Neighbours`."""

    def __init__(
        self, number: int, board: Board, surroundings: Surroundings, world: World, known_for_s: float, cloud: int | None
    ) -> None:
        """``known_for_s``: how long after the first announcement a leader's latency is known. ``cloud``: the host it is on,
        if the way there can be cut."""
        self._number = number
        self._board = board
        self._surroundings = surroundings
        self._world = world
        self._known_for_s = known_for_s
        self._cloud = cloud
        self._none_below_ms = -1.0
        self._none_as_of = -math.inf

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        # What time the broker's own clock shows does not matter: the board keeps the world's.
        now = self._world.now
        board = self._board
        moment = now - self._known_for_s - float(board.delays_s[self._number])
        if self._surroundings.steady and below_ms <= self._none_below_ms and board.latest <= self._none_as_of:
            return ""  # Nobody has been announced since there was nobody.
        if self._cloud is not None and self._surroundings.latency_ms(self._number, self._cloud) == math.inf:
            return ""
        found = self._nearest(below_ms, now, avoid)
        if found == "" and not avoid:
            self._none_below_ms = below_ms
            self._none_as_of = moment
        else:
            self._none_as_of = -math.inf
        return found

    def latency_ms(self, name: str) -> float:
        number = self._surroundings.numbers.get(name, -1)
        return math.inf if number < 0 else self._surroundings.latency_ms(self._number, number)

    def address(self, name: str) -> str:
        return address_of(name) if name in self._surroundings.numbers else ""

    def _nearest(self, below_ms: float, now: float, avoid: Collection[str]) -> str:
        board, surroundings = self._board, self._surroundings
        not_these = {self._number, *(surroundings.numbers.get(name, -1) for name in avoid)}
        board.forget(now)
        if board.vectors is not None:
            return self._nearest_by_place(below_ms, now, not_these)
        best, least_ms = "", below_ms
        for candidate in board.who[: board.listed][board.heard(self._number, now, self._known_for_s)].tolist():
            latency_ms = surroundings.latency_ms(self._number, candidate)
            if candidate not in not_these and latency_ms < least_ms:
                best, least_ms = surroundings.names[candidate], latency_ms
        return best

    def _nearest_by_place(self, below_ms: float, now: float, not_these: Collection[int]) -> str:
        """Down the list of those announced, the nearest first, until one has been heard and answers, or is too far."""
        board, surroundings, own = self._board, self._surroundings, self._number
        cosines = board.cosines(own)
        for attempt in range(board.listed):
            if attempt == _ATTEMPTS:
                cosines[~board.heard(own, now, self._known_for_s)] = _NOWHERE
            place = int(cosines.argmax())
            if cosines[place] == _NOWHERE:
                break
            candidate = int(board.who[place])
            if candidate not in not_these:
                latency_ms = surroundings.latency_ms(own, candidate)
                if below_ms <= latency_ms < math.inf:
                    break
                if latency_ms < below_ms and board.has_heard(own, place, now, self._known_for_s):
                    return surroundings.names[candidate]
            cosines[place] = _NOWHERE
        return ""


def nearest_others(vectors: Floats, numbers: Sequence[int]) -> list[int]:
    """For each of these places, which other of them is the nearest."""
    chosen = vectors[np.asarray(numbers, dtype=np.int64)]
    found: list[int] = []
    for start in range(0, len(chosen), _ROWS):
        cosines = chosen[start : start + _ROWS] @ chosen.T
        rows = np.arange(len(cosines))
        cosines[rows, start + rows] = _NOWHERE
        found += [numbers[place] for place in cosines.argmax(axis=1).tolist()]
    return found


def address_of(name: str) -> str:
    """Where a simulated broker's links would be."""
    return f"{name}:1884"


def unit_vectors(scenario: Scenario, cloud: str | None) -> Floats | None:
    """Where hosts are on the unit sphere, if the nearest there is the nearest by latency: a model by distance and nothing
    beside it, with one broker at a site, that stays. None otherwise. Where the cloud is does not matter."""
    topology = topology_of(scenario)
    model = topology.model
    if model is None or model.kind not in ("fibre", "linear") or topology.links or not stays(scenario):
        return None
    brokers = [(name, host) for host in topology.hosts for name in host.names() if name != cloud]
    if len({host.site for _, host in brokers}) < len(brokers) or len({host.access.latency_ms for _, host in brokers}) > 1:
        return None
    sites = {site.name: site for site in topology.sites}
    rows = []
    for host in topology.hosts:
        latitude, longitude = coordinates_of(sites[host.site])
        north, east = math.radians(latitude), math.radians(longitude)
        row = (math.cos(north) * math.cos(east), math.cos(north) * math.sin(east), math.sin(north))
        rows += [row] * host.count
    return np.array(rows, dtype=float).reshape(-1, 3)


def stays(scenario: Scenario) -> bool:
    """Whether all latencies stay as they are, as long as there is a way at all."""
    faults = scenario.random_faults
    changes = any(isinstance(event, (ChangeAccess, ChangeLink, Move)) for event in scenario.events)
    return not (scenario.mobility or changes or (faults is not None and faults.slow_links_per_minute > 0))

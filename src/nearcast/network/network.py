"""The network: sites joined by links or by a latency model, endpoints at sites, cuts between endpoints.

:meth:`Network.transit` answers the one question both runtimes have: a packet is sent now, when does it arrive? The simulator
makes an event of the answer, the emulated WAN's router a departure time. Pure: ``now`` and a ``random.Random`` are handed in,
so one seed and the same questions give the same answers, compiled or plain.

A packet's way is the access link of its source, the path between the sites, the access link of its target. It is decided when
the packet is sent: what changes later (a cut, a move, other conditions) is for later packets. Not modelled: congestion
control, fragmentation, routing protocols, queues that several links share.

Indices are those that ``sites`` and :meth:`Network.join` give. Times are seconds, sizes bytes; ``now`` must not go back.
"""

from __future__ import annotations

import math
from random import Random
from typing import Final

from mypy_extensions import i64

from nearcast.errors import LocalProtocolError
from nearcast.network.conditions import Conditions
from nearcast.network.endpoints import Cuts, Endpoint
from nearcast.network.latency import Latency
from nearcast.network.links import FULL, IDEAL, LOST, UNREACHABLE, Dice, Link
from nearcast.network.routing import Graph
from nearcast.network.statistics import LinkFigures, LinkKind, NetworkFigures

__all__ = ["FULL", "IDEAL", "LOST", "UNREACHABLE", "Network"]

STATEFUL_SITES: Final = 512
"""Up to so many sites each pair that the model joins has a link of its own; beyond it such pairs have no memory."""

_ROUTES: Final = 262_144
"""Bound on remembered routes beyond that: then all are forgotten and found again when needed."""


class _Route:
    """What leads from one site to another: links, or for a pair without a link of its own only a latency."""

    def __init__(self, links: list[Link], latency_ms: float, epoch: i64) -> None:
        self.links = links
        self.single: Link | None = links[0] if len(links) == 1 else None
        self.latency_ms = latency_ms
        self.latency_s = latency_ms / 1000.0
        self.reachable = latency_ms < math.inf
        self.doubles = any(link.duplicate > 0.0 for link in links)
        self.epoch: i64 = epoch


class Network:
    """Sites, endpoints at them, and what happens to packets in between."""

    def __init__(self, sites: list[str], latency: Latency | None, rng: Random, model: Conditions = IDEAL) -> None:
        """``latency`` joins sites that no links join (None: only links do); ``model`` is what else such pairs do to
        packets, its own ``latency_ms`` means nothing."""
        self.sites = list(sites)
        self.packets: i64 = 0
        self.bytes: i64 = 0
        self.lost: i64 = 0
        self.full: i64 = 0
        self.unreachable: i64 = 0
        self.duplicated: i64 = 0
        self._size: i64 = len(sites)
        self._latency = latency
        self._model = model
        self._dice = Dice(rng)
        self._endpoints: list[Endpoint] = []
        self._locals: list[Link] = [Link(IDEAL, 0.0) for _ in sites]
        self._graph = Graph(len(sites))
        self._model_links: dict[int, Link] = {}
        self._shared = Link(model, 0.0)
        self._passing = _Route([self._shared], 0.0, 0)
        self._stateful = len(sites) <= STATEFUL_SITES
        self._epoch: i64 = 0
        self._table: list[_Route | None] = [None] * (len(sites) * len(sites)) if self._stateful else []
        self._routes: dict[int, _Route] = {}
        self._cuts = Cuts()
        self._copy_arrival = LOST

    # --- building and changing ---

    def connect(self, a: i64, b: i64, conditions: Conditions, one_way: bool = False) -> None:
        """Joins two sites by a link, or gives the link between them other conditions; both directions unless ``one_way``."""
        self._check_site(a)
        self._check_site(b)
        if a == b:
            raise LocalProtocolError(
                f"site {self.sites[a]} cannot be linked to itself: set_local() says what happens within it"
            )
        self._connect(a, b, conditions)
        if not one_way:
            self._connect(b, a, conditions)

    def disconnect(self, a: i64, b: i64, one_way: bool = False) -> None:
        """Takes away the link between two sites; nothing happens if there is none."""
        self._check_site(a)
        self._check_site(b)
        self._graph.remove(a, b)
        if not one_way:
            self._graph.remove(b, a)
        self._epoch += 1  # every known route is out of date

    def link_conditions(self, a: i64, b: i64) -> Conditions | None:
        """Conditions of the link from site ``a`` to site ``b``; None if no explicit link joins them."""
        self._check_site(a)
        self._check_site(b)
        link = self._graph.find(a, b)
        return None if link is None else link.conditions

    def set_local(self, site: i64, conditions: Conditions) -> None:
        """What happens to packets between two endpoints at ``site``; all of them share it."""
        self._check_site(site)
        self._locals[site].configure(conditions, conditions.latency_ms)

    def join(self, site: i64, access: Conditions | None = None) -> int:
        """A new endpoint at ``site``; returns its index. ``access`` is its own link, each way."""
        self._check_site(site)
        self._endpoints.append(Endpoint(site, IDEAL if access is None else access))
        return len(self._endpoints) - 1

    def set_access(self, endpoint: i64, conditions: Conditions) -> None:
        """Gives an endpoint's access link other conditions, both ways."""
        one = self._endpoint(endpoint)
        one.up.configure(conditions, conditions.latency_ms)
        one.down.configure(conditions, conditions.latency_ms)

    def access_conditions(self, endpoint: i64) -> Conditions:
        """Conditions of an endpoint's access link."""
        return self._endpoint(endpoint).up.conditions

    def move(self, endpoint: i64, site: i64) -> None:
        """``endpoint`` is at ``site`` from now on; its access link and the cuts around it move with it."""
        self._check_site(site)
        self._endpoint(endpoint).site = site

    def site_of(self, endpoint: i64) -> int:
        """Where ``endpoint`` is."""
        return self._endpoint(endpoint).site

    def __len__(self) -> int:
        """How many endpoints have joined."""
        return len(self._endpoints)

    def cut(self, sources: list[int], targets: list[int], one_way: bool = False) -> int:
        """Nothing passes from any of ``sources`` to any of ``targets``, nor back unless ``one_way``; returns a handle.

        Cuts add up: what two cuts stop stays stopped until both are healed. An endpoint still reaches itself.
        """
        from_ = [self._endpoint(endpoint) for endpoint in sources]
        to = [self._endpoint(endpoint) for endpoint in targets]
        return self._cuts.make(from_, to, one_way)

    def heal(self, handle: int) -> None:
        """Undoes one cut. A handle whose cut is already healed does nothing."""
        self._cuts.heal(handle)

    def heal_all(self) -> None:
        """Undoes every cut."""
        self._cuts.heal_all()

    # --- packets ---

    def transit(self, source: i64, target: i64, size_bytes: i64, now: float) -> float:
        """When a packet sent ``now`` arrives; :data:`LOST`, :data:`FULL` or :data:`UNREACHABLE` if it never does."""
        self.packets += 1
        self.bytes += size_bytes
        self._copy_arrival = LOST
        if source == target:
            return now
        sender = self._endpoints[source]
        receiver = self._endpoints[target]
        if self._cuts.bits and sender.no_out & receiver.no_in:
            self.unreachable += 1
            return UNREACHABLE
        up = sender.up
        down = receiver.down
        if sender.site == receiver.site:
            local = self._locals[sender.site]
            if up.duplicate > 0.0 or local.duplicate > 0.0 or down.duplicate > 0.0:
                return self._transit_doubling([up, local, down], 0.0, size_bytes, now)
            moment = up.carry(size_bytes, now, now, self._dice)
            if moment >= 0.0:
                moment = local.carry(size_bytes, moment, now, self._dice)
        else:
            route = self._route(sender.site, receiver.site)
            if not route.reachable:
                self.unreachable += 1
                return UNREACHABLE
            if up.duplicate > 0.0 or route.doubles or down.duplicate > 0.0:
                return self._transit_doubling([up, *route.links, down], route.latency_s, size_bytes, now)
            moment = up.carry(size_bytes, now, now, self._dice)
            if moment >= 0.0:
                moment = self._between(route, size_bytes, moment, now)
        if moment >= 0.0:
            moment = down.carry(size_bytes, moment, now, self._dice)
            if moment >= 0.0:
                return moment
        self._count_loss(moment)
        return moment

    def take_duplicate(self) -> float:
        """When the packet of the last :meth:`transit` arrives a second time; negative if it does not."""
        arrival = self._copy_arrival
        self._copy_arrival = LOST
        return arrival

    def one_way_ms(self, source: i64, target: i64) -> float:
        """What a small packet takes on idle links without jitter; infinity while it would not arrive."""
        if source == target:
            return 0.0
        sender = self._endpoint(source)
        receiver = self._endpoint(target)
        if sender.no_out & receiver.no_in:
            return math.inf
        between = self.between_sites_ms(sender.site, receiver.site)
        return sender.up.latency_ms + between + receiver.down.latency_ms

    def between_sites_ms(self, a: i64, b: i64) -> float:
        """The part of it between two sites, or within one; infinity where no path leads."""
        self._check_site(a)
        self._check_site(b)
        if a == b:
            return self._locals[a].latency_ms
        route = self._route(a, b)
        return route.latency_ms if route.reachable else math.inf

    # --- figures ---

    def figures(self) -> NetworkFigures:
        """All counters, with a row for each link that has carried something."""
        rows: list[LinkFigures] = []
        for key in sorted(self._graph.links):
            self._add_row(rows, "link", self.sites[key // self._size], self.sites[key % self._size], self._graph.links[key])
        for key in sorted(self._model_links):
            self._add_row(rows, "model", self.sites[key // self._size], self.sites[key % self._size], self._model_links[key])
        self._add_row(rows, "model", "*", "*", self._shared)
        for site in range(len(self.sites)):
            self._add_row(rows, "local", self.sites[site], self.sites[site], self._locals[site])
        for index in range(len(self._endpoints)):
            endpoint = self._endpoints[index]
            self._add_row(rows, "up", str(index), self.sites[endpoint.site], endpoint.up)
            self._add_row(rows, "down", self.sites[endpoint.site], str(index), endpoint.down)
        return NetworkFigures(
            packets=self.packets,
            bytes=self.bytes,
            lost=self.lost,
            full=self.full,
            unreachable=self.unreachable,
            duplicated=self.duplicated,
            links=tuple(rows),
        )

    # --- inside ---

    def _between(self, route: _Route, size_bytes: i64, moment: float, now: float) -> float:
        """Over a route from site to site."""
        single = route.single
        if single is None:
            for link in route.links:
                moment = link.carry(size_bytes, moment, now, self._dice)
                if moment < 0.0:
                    break
            return moment
        if single is self._shared:
            return single.scatter(size_bytes, moment, route.latency_s, self._dice)
        return single.carry(size_bytes, moment, now, self._dice)

    def _transit_doubling(self, links: list[Link], latency_s: float, size_bytes: i64, now: float) -> float:
        """Over links of which some may double the packet. At most one second packet comes of it; it goes its own way from the
        link that made it on; if only that one arrives, it is the answer."""
        moment = now
        copy_from = -1
        copy_moment = LOST
        for hop in range(len(links)):
            link = links[hop]
            if copy_from < 0 and link.duplicate > 0.0 and self._dice.uniform() < link.duplicate:
                copy_from = hop
                copy_moment = moment
            moment = self._carry(link, latency_s, size_bytes, moment, now)
            if moment < 0.0:
                break
        if copy_from >= 0:
            for hop in range(copy_from, len(links)):
                copy_moment = self._carry(links[hop], latency_s, size_bytes, copy_moment, now)
                if copy_moment < 0.0:
                    break
            if copy_moment >= 0.0 and moment >= 0.0:
                self.duplicated += 1
                self._copy_arrival = copy_moment
            elif copy_moment >= 0.0:
                moment = copy_moment
        if moment < 0.0:
            self._count_loss(moment)
        return moment

    def _carry(self, link: Link, latency_s: float, size_bytes: i64, moment: float, now: float) -> float:
        if link is self._shared:
            return link.scatter(size_bytes, moment, latency_s, self._dice)
        return link.carry(size_bytes, moment, now, self._dice)

    def _count_loss(self, outcome: float) -> None:
        if outcome == FULL:
            self.full += 1
        else:
            self.lost += 1

    def _route(self, a: i64, b: i64) -> _Route:
        """How to get from site ``a`` to another site ``b``; to be used at once."""
        key = a * self._size + b
        if self._stateful:
            known = self._table[key]
            if known is None or known.epoch != self._epoch:
                known = self._table[key] = self._find_route(a, b)
            return known
        if not self._graph.links:
            return self._find_route(a, b)
        known = self._routes.get(key)
        if known is not None and known.epoch == self._epoch:
            return known
        route = self._find_route(a, b)
        if route is not self._passing:
            if len(self._routes) >= _ROUTES:
                self._routes.clear()
            self._routes[key] = route
        return route

    def _find_route(self, a: i64, b: i64) -> _Route:
        path = self._graph.path(a, b)
        if path is not None:
            total_ms = 0.0
            for link in path:
                total_ms += link.latency_ms
            return _Route(path, total_ms, self._epoch)
        latency_ms = -1.0
        if self._latency is not None:
            latency_ms = self._latency.between_ms(a, b)
        reachable = 0.0 <= latency_ms < 1e9  # an unknown latency is NaN
        if not self._stateful:
            # One object for all pairs, over and over: there may be a hundred million of them.
            route = self._passing
            route.latency_ms = latency_ms
            route.latency_s = latency_ms / 1000.0
            route.reachable = reachable
            return route
        if not reachable:
            return _Route([], math.inf, self._epoch)
        key = a * self._size + b
        own = self._model_links.get(key)
        if own is None:
            own = self._model_links[key] = Link(self._model, latency_ms)
        return _Route([own], latency_ms, self._epoch)

    def _connect(self, a: i64, b: i64, conditions: Conditions) -> None:
        link = self._graph.find(a, b)
        if link is None:
            self._graph.add(a, b, Link(conditions, conditions.latency_ms))
        else:
            if link.latency_ms != conditions.latency_ms:
                self._graph.changed()
            link.configure(conditions, conditions.latency_ms)
        self._epoch += 1  # every known route is out of date

    def _endpoint(self, index: i64) -> Endpoint:
        if not 0 <= index < len(self._endpoints):
            raise LocalProtocolError(f"there is no endpoint {index}: {len(self._endpoints)} have joined")
        return self._endpoints[index]

    def _check_site(self, index: i64) -> None:
        if not 0 <= index < self._size:
            raise LocalProtocolError(f"there is no site {index}: the network has {self._size}")

    def _add_row(self, rows: list[LinkFigures], kind: LinkKind, source: str, target: str, link: Link) -> None:
        if link.packets:
            rows.append(
                LinkFigures(
                    kind=kind,
                    source=source,
                    target=target,
                    packets=link.packets,
                    bytes=link.bytes,
                    lost=link.lost,
                    full=link.full,
                )
            )

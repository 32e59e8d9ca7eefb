"""Paths over explicit links between sites: least latency, then fewest links, then lowest site numbers.

Owns the graph and its shortest paths. The result does not depend on the order in which links were made. It does not know
traffic: a loaded or lossy link is as good as an idle one with the same latency.

Sites that hang on the rest by a single neighbour are peeled off, again and again, until only a core of rings is left. The way
through what was peeled off is the only one there is; only the core needs Dijkstra's algorithm. So a star or a tree of 10,000
sites costs a few steps per path, and a ring of data centres with a tree behind each no more than the ring.
"""

from __future__ import annotations

import heapq
from array import array
from typing import Final

from mypy_extensions import i64

from nearcast.network.links import Link

TREE_CELLS: Final = 16_000_000
"""Bound on remembered predecessors over all trees: 64 MB. Beyond it trees are forgotten and computed again when needed."""


class Graph:
    """Directed links between sites, and the path from any site to any other."""

    def __init__(self, size: int) -> None:
        self.size: i64 = size
        self.links: dict[int, Link] = {}
        """By ``source * size + target``."""
        self._neighbours: dict[int, list[int]] = {}
        self._trees: dict[int, array[int]] = {}
        self._tree_cells = TREE_CELLS
        # Of every site: the group that links join it to, the site it hangs on (-1 in the core), and how far out it hangs.
        self._surveyed = False
        self._component: list[int] = []
        self._parent: list[int] = []
        self._depth: list[int] = []

    def find(self, a: i64, b: i64) -> Link | None:
        """The link from ``a`` straight to ``b``."""
        return self.links.get(a * self.size + b)

    def add(self, a: i64, b: i64, link: Link) -> None:
        """Makes ``link`` lead from ``a`` to ``b``, between which there is none yet."""
        self.links[a * self.size + b] = link
        self._neighbours.setdefault(a, []).append(b)
        self._surveyed = False
        self.changed()

    def remove(self, a: i64, b: i64) -> None:
        """Takes the link from ``a`` to ``b`` away, if there is one."""
        if self.links.pop(a * self.size + b, None) is not None:
            self._neighbours[a].remove(b)
            self._surveyed = False
            self.changed()

    def changed(self) -> None:
        """The latency of a link is not what it was."""
        self._trees.clear()

    def path(self, a: i64, b: i64) -> list[Link] | None:
        """The links from ``a`` to ``b`` in order; None where there is no path. ``a`` and ``b`` differ."""
        if not self.links:
            return None
        if not self._surveyed:
            self._survey()
        if self._component[a] != self._component[b]:
            return None
        ahead = [int(a)]
        behind = [int(b)]
        # From both ends inwards, the one further out first, until they meet or are in the core.
        while ahead[-1] != behind[-1]:
            depth_ahead = self._depth[ahead[-1]]
            depth_behind = self._depth[behind[-1]]
            if depth_ahead == 0 and depth_behind == 0:
                through = self._through_core(ahead[-1], behind[-1])
                if through is None:
                    return None
                ahead.extend(through)
                break
            if depth_ahead >= depth_behind:
                ahead.append(self._parent[ahead[-1]])
            else:
                behind.append(self._parent[behind[-1]])
        behind.pop()
        behind.reverse()
        ahead.extend(behind)
        path: list[Link] = []
        for position in range(1, len(ahead)):
            link = self.links.get(ahead[position - 1] * self.size + ahead[position])
            if link is None:  # it only leads the other way
                return None
            path.append(link)
        return path

    def _through_core(self, a: i64, b: i64) -> list[int] | None:
        """The sites after ``a`` on the best way to ``b``, both in the core."""
        tree = self._trees.get(a)
        if tree is None:
            if (len(self._trees) + 1) * self.size > self._tree_cells:
                self._trees.clear()
            tree = self._trees[a] = self._tree(a)
        if tree[b] < 0:
            return None
        sites: list[int] = []
        site: i64 = b
        while site != a:
            sites.append(site)
            site = tree[site]
        sites.reverse()
        return sites

    def _tree(self, root: i64) -> array[int]:
        """For each site of the core the one before it on the way from ``root`` (Dijkstra); -1 where no way leads."""
        before = array("i", [-1]) * int(self.size)
        heap: list[tuple[float, int, int, int]] = [(0.0, 0, root, root)]
        while heap:
            distance, hops, site, previous = heapq.heappop(heap)
            if before[site] >= 0:
                continue
            before[site] = previous
            for neighbour in self._neighbours.get(site, []):
                if before[neighbour] < 0 and self._depth[neighbour] == 0:
                    link = self.links[site * self.size + neighbour]
                    heapq.heappush(heap, (distance + link.latency_ms, hops + 1, neighbour, site))
        return before

    def _survey(self) -> None:
        size = int(self.size)
        joined: dict[int, set[int]] = {}
        for key in self.links:
            a, b = divmod(key, size)
            joined.setdefault(a, set()).add(b)
            joined.setdefault(b, set()).add(a)
        self._component = self._components(joined)
        parent = [-1] * size
        depth = [0] * size
        peeled: list[int] = []
        loose = [site for site in joined if len(joined[site]) == 1]
        while loose:
            site = loose.pop()
            if len(joined[site]) != 1:  # the last of its group: what hung on it is gone
                continue
            neighbour = joined[site].pop()
            joined[neighbour].discard(site)
            parent[site] = neighbour
            peeled.append(site)
            if len(joined[neighbour]) == 1:
                loose.append(neighbour)
        for site in reversed(peeled):
            depth[site] = depth[parent[site]] + 1
        self._parent = parent
        self._depth = depth
        self._surveyed = True

    def _components(self, joined: dict[int, set[int]]) -> list[int]:
        """Numbers the groups of sites that links join, whatever their direction; a site without links is alone."""
        component = [-1] * int(self.size)
        for site in range(int(self.size)):
            if component[site] >= 0:
                continue
            component[site] = site
            waiting = [site]
            while waiting:
                for neighbour in joined.get(waiting.pop(), set()):
                    if component[neighbour] < 0:
                        component[neighbour] = site
                        waiting.append(neighbour)
        return component

"""Paths over explicit links between sites: least latency, then fewest links, then lowest site numbers.

Owns the graph and its shortest paths. The result does not depend on the order in which links were made. It does not know
traffic: a loaded or lossy link is as good as an idle one with the same latency.
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
        self._component: list[int] = []
        self._tree_cells = TREE_CELLS

    def find(self, a: i64, b: i64) -> Link | None:
        return self.links.get(a * self.size + b)

    def add(self, a: i64, b: i64, link: Link) -> None:
        self.links[a * self.size + b] = link
        self._neighbours.setdefault(a, []).append(b)
        self.changed()

    def remove(self, a: i64, b: i64) -> Link | None:
        link = self.links.pop(a * self.size + b, None)
        if link is not None:
            self._neighbours[a].remove(b)
            self.changed()
        return link

    def changed(self) -> None:
        """A link or its latency is not what it was."""
        self._trees.clear()
        self._component.clear()

    def path(self, a: i64, b: i64) -> list[Link] | None:
        """The links from ``a`` to ``b`` in order; None where there is no path. ``a`` and ``b`` differ."""
        if not self.links:
            return None
        if not self._component:
            self._find_components()
        # Most questions about sites without links end here, without a tree.
        if self._component[a] != self._component[b]:
            return None
        tree = self._trees.get(a)
        if tree is None:
            if len(self._trees) * self.size > self._tree_cells:
                self._trees.clear()
            tree = self._trees[a] = self._tree(a)
        if tree[b] < 0:
            return None
        path: list[Link] = []
        site: i64 = b
        while site != a:
            previous: i64 = tree[site]
            path.append(self.links[previous * self.size + site])
            site = previous
        path.reverse()
        return path

    def _tree(self, root: i64) -> array[int]:
        """For each site the one before it on the way from ``root`` (Dijkstra); -1 where no way leads."""
        before = array("i", [-1]) * int(self.size)
        heap: list[tuple[float, int, int, int]] = [(0.0, 0, root, root)]
        while heap:
            distance, hops, site, previous = heapq.heappop(heap)
            if before[site] >= 0:
                continue
            before[site] = previous
            for neighbour in self._neighbours.get(site, []):
                if before[neighbour] < 0:
                    link = self.links[site * self.size + neighbour]
                    heapq.heappush(heap, (distance + link.latency_ms, hops + 1, neighbour, site))
        return before

    def _find_components(self) -> None:
        """Numbers the groups of sites that links join, whatever their direction; a site without links is alone."""
        component = [-1] * int(self.size)
        joined: dict[int, list[int]] = {}
        for key in self.links:
            a, b = divmod(key, int(self.size))
            joined.setdefault(a, []).append(b)
            joined.setdefault(b, []).append(a)
        for site in range(int(self.size)):
            if component[site] >= 0:
                continue
            component[site] = site
            waiting = [site]
            while waiting:
                for neighbour in joined.get(waiting.pop(), []):
                    if component[neighbour] < 0:
                        component[neighbour] = site
                        waiting.append(neighbour)
        self._component = component

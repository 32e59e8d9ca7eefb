"""Paths over explicit links; the comparison with Floyd and Warshall's algorithm is in tests/property."""

from __future__ import annotations

import itertools

from nearcast.network.conditions import Conditions
from nearcast.network.links import Link
from nearcast.network.routing import Graph


def graph(size: int, *links: tuple[int, int, float]) -> Graph:
    made = Graph(size)
    for a, b, latency_ms in links:
        made.add(a, b, Link(Conditions(latency_ms=latency_ms), latency_ms))
    return made


def sites_of(made: Graph, a: int, b: int) -> list[int] | None:
    """The sites a path leads over, without the first."""
    path = made.path(a, b)
    if path is None:
        return None
    targets = {id(link): key % made.size for key, link in made.links.items()}
    return [targets[id(link)] for link in path]


def test_the_way_with_the_least_latency_wins_over_the_one_with_fewer_links() -> None:
    made = graph(4, (0, 3, 10.0), (0, 1, 3.0), (1, 2, 3.0), (2, 3, 3.0))
    assert sites_of(made, 0, 3) == [1, 2, 3]


def test_links_are_directed() -> None:
    made = graph(3, (0, 1, 1.0), (1, 2, 1.0))
    assert sites_of(made, 0, 2) == [1, 2]
    assert made.path(2, 0) is None


def test_equal_ways_are_chosen_by_links_then_by_numbers_whatever_came_first() -> None:
    links = [(0, 2, 1.0), (2, 4, 1.0), (0, 1, 1.0), (1, 4, 1.0), (0, 3, 1.0), (3, 4, 1.0)]
    for order in itertools.permutations(links):
        assert sites_of(graph(5, *order), 0, 4) == [1, 4]
    # Without latency, the direct way.
    assert sites_of(graph(3, (0, 1, 0.0), (1, 2, 0.0), (0, 2, 0.0)), 0, 2) == [2]


def test_changes_are_seen() -> None:
    made = graph(3, (0, 1, 1.0), (1, 2, 1.0), (0, 2, 5.0))
    assert sites_of(made, 0, 2) == [1, 2]
    assert made.remove(1, 2) is not None
    assert made.remove(1, 2) is None
    assert sites_of(made, 0, 2) == [2]
    made.add(1, 2, Link(Conditions(latency_ms=1), 1.0))
    assert sites_of(made, 0, 2) == [1, 2]


def test_sites_without_links_have_no_way() -> None:
    assert Graph(3).path(0, 2) is None
    assert graph(4, (0, 1, 1.0)).path(0, 3) is None
    assert graph(4, (0, 1, 1.0), (2, 3, 1.0)).path(0, 3) is None


def test_remembered_trees_are_bounded() -> None:
    size = 6_000
    made = graph(size, *((0, site, 1.0) for site in range(1, 4)), *((site, 0, 1.0) for site in range(1, 4)))
    made._tree_cells = 2 * size
    for a, b in itertools.permutations(range(4), 2):
        assert made.path(a, b) is not None
        assert len(made._trees) <= 3

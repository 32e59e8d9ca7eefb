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
    made.remove(1, 2)
    made.remove(1, 2)
    assert sites_of(made, 0, 2) == [2]
    made.add(1, 2, Link(Conditions(latency_ms=1), 1.0))
    assert sites_of(made, 0, 2) == [1, 2]


def test_sites_without_links_have_no_way() -> None:
    assert Graph(3).path(0, 2) is None
    assert graph(4, (0, 1, 1.0)).path(0, 3) is None
    assert graph(4, (0, 1, 1.0), (2, 3, 1.0)).path(0, 3) is None


def test_remembered_trees_are_bounded() -> None:
    ring = [(site, (site + 1) % 8, 1.0) for site in range(8)]
    made = graph(8, *ring)
    made._tree_cells = 3 * 8
    for a, b in itertools.permutations(range(8), 2):
        assert sites_of(made, a, b) == [(a + step) % 8 for step in range(1, (b - a) % 8 + 1)]
        assert len(made._trees) <= 3


def both_ways(*links: tuple[int, int, float]) -> list[tuple[int, int, float]]:
    return [*links, *((b, a, latency_ms) for a, b, latency_ms in links)]


def test_what_hangs_on_one_neighbour_needs_no_tree() -> None:
    #   3 - 1 - 0 - 2 - 5        and a pair apart: 6 - 7
    #       |
    #       4
    made = graph(8, *both_ways((0, 1, 1.0), (0, 2, 1.0), (1, 3, 1.0), (1, 4, 1.0), (2, 5, 1.0), (6, 7, 1.0)))
    assert sites_of(made, 3, 5) == [1, 0, 2, 5]
    assert sites_of(made, 5, 4) == [2, 0, 1, 4]
    assert sites_of(made, 3, 4) == [1, 4]
    assert sites_of(made, 3, 1) == [1]
    assert sites_of(made, 0, 3) == [1, 3]
    assert sites_of(made, 6, 7) == [7]
    assert sites_of(made, 7, 6) == [6]
    assert made.path(3, 6) is None
    assert not made._trees


def test_trees_behind_a_ring() -> None:
    # A ring 0-1-2 with 3 - 4 behind 0 and 5 behind 2, of which 5 only sends.
    made = graph(6, *both_ways((0, 1, 1.0), (1, 2, 1.0), (0, 2, 5.0), (0, 3, 1.0), (3, 4, 1.0)), (5, 2, 1.0))
    assert sites_of(made, 4, 2) == [3, 0, 1, 2]
    assert sites_of(made, 5, 4) == [2, 1, 0, 3, 4]
    assert made.path(4, 5) is None
    assert sites_of(made, 4, 3) == [3]


def test_a_star_of_ten_thousand_sites() -> None:
    size = 10_000
    made = graph(size, *both_ways(*((0, site, 1.0) for site in range(1, size))))
    for site in range(1, size):
        path = made.path(site, size - site)
        assert path is not None
        assert len(path) == (0 if 2 * site == size else 2)
    assert not made._trees

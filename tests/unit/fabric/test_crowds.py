"""Crowds by anchors give what the summary of the clients one by one gives."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from nearcast.coordinates.coordinate import Coordinate
from nearcast.fabric.crowds import Anchor, Gathering
from nearcast.telemetry.records import Place
from nearcast.telemetry.summaries import crowd

AXIS = st.floats(-300, 300).map(lambda value: round(value, 3))
HEIGHT = st.floats(0.01, 100).map(lambda value: round(value, 3))
ADJUSTMENT = st.floats(-0.005, 20).map(lambda value: round(value, 3))
COORDINATES = st.builds(Coordinate, st.lists(AXIS, min_size=3, max_size=3), HEIGHT, ADJUSTMENT, st.floats(0, 1.5))


def place_of(coordinate: Coordinate) -> Place:
    return Place(tuple(coordinate.vector), coordinate.height, coordinate.adjustment, coordinate.error)


@given(
    anchors=st.lists(COORDINATES, min_size=1, max_size=4),
    clients=st.lists(st.tuples(st.integers(0, 3), st.floats(0, 500)), min_size=1, max_size=30),
    owner=COORDINATES,
)
def test_a_crowd_is_that_of_its_clients(
    anchors: list[Coordinate], clients: list[tuple[int, float]], owner: Coordinate
) -> None:
    made = [Anchor(str(number), coordinate, False) for number, coordinate in enumerate(anchors)]
    gathering = Gathering()
    places = []
    for which, latency_ms in clients:
        anchor = made[which % len(made)]
        gathering.add(anchor, latency_ms)
        places.append(place_of(anchor.coordinate.raised(latency_ms)))
    gathering.sum_up("owner", owner, False)
    expected = crowd(places, place_of(owner))
    assert expected.centroid is not None
    assert gathering.count == expected.count
    for found, wanted in zip(gathering.vector, expected.centroid.vector, strict=True):
        assert math.isclose(found, wanted, abs_tol=1e-3)
    assert math.isclose(gathering.height, expected.centroid.height, abs_tol=1e-6)
    assert math.isclose(gathering.adjustment, expected.centroid.adjustment, abs_tol=1e-6)
    assert math.isclose(gathering.error, expected.centroid.error, abs_tol=1e-6)
    assert math.isclose(gathering.deviation_ms, expected.deviation_ms, abs_tol=1e-6)
    assert math.isclose(gathering.worst_ms, expected.worst_ms, abs_tol=1e-6)


def test_a_client_of_the_owner_itself_is_as_far_as_its_connection_says() -> None:
    here = Coordinate([1.0, 2.0], 5.0)
    gathering = Gathering()
    gathering.add(Anchor("b", here, True), 3.0)
    gathering.sum_up("b", here, True)
    assert gathering.worst_ms == 1.5, "without the owner's access link, which it does not cross"
    assert gathering.height == 8.0


def test_a_client_of_another_broker_crosses_both_access_links() -> None:
    gathering = Gathering()
    gathering.add(Anchor("b", Coordinate([0.0, 0.0], 5.0), True), 3.0)
    gathering.sum_up("c", Coordinate([3.0, 4.0], 1.0), False)
    assert gathering.worst_ms == (5.0 + 5.0 + 1.0 + 3.0) / 2


def test_where_somebody_has_no_place_the_crowd_has_none() -> None:
    gathering = Gathering()
    gathering.add(Anchor("b", Coordinate([0.0], 1.0), True), 3.0)
    gathering.add(None, 3.0)
    gathering.sum_up("b", Coordinate([0.0], 1.0), True)
    assert (gathering.count, gathering.placed, gathering.worst_ms) == (2, False, 0.0)


def test_without_an_owner_nobody_is_far_from_it() -> None:
    gathering = Gathering()
    gathering.add(Anchor("b", Coordinate([0.0], 1.0), True), 3.0)
    gathering.sum_up("", None, False)
    assert (gathering.worst_ms, gathering.height) == (0.0, 4.0)

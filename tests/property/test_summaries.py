"""Crowds bound their clients; merged crowds are what one crowd would have been; arrays say what records say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearcast.telemetry.places import Places
from nearcast.telemetry.records import Crowd, Place
from nearcast.telemetry.summaries import (
    CONSUMER,
    PRODUCER,
    Crowds,
    coordinate_of,
    crowd,
    deviation_ms,
    latency_ms,
    merge,
    merge_rows,
    summarise_samples,
)

DIMENSIONS = 3
numbers = st.floats(-500, 500, allow_nan=False)


@st.composite
def places(draw: st.DrawFn) -> Place:
    vector = tuple(draw(numbers) for _ in range(DIMENSIONS))
    height = draw(st.floats(0.01, 100))
    # Within the height on both sides, no distance is without its adjustments.
    return Place(vector, height, draw(st.floats(-height, height)), 0.5)


crowds_of_places = st.lists(places(), min_size=1, max_size=12)


@given(crowds_of_places, places())
def test_no_client_is_farther_from_any_broker_than_its_crowd_says(clients: list[Place], broker: Place) -> None:
    for paper in (False, True):
        summary = crowd(clients, broker, paper=paper)
        assert summary.centroid is not None
        if paper and min(client.height + client.adjustment for client in clients) < 0:
            continue
        bound = latency_ms(summary.centroid, broker) + summary.deviation_ms
        assert all(latency_ms(client, broker) <= bound + 1e-6 for client in clients)
        assert summary.worst_ms == max(latency_ms(client, broker) for client in clients)


@given(crowds_of_places)
def test_the_tight_deviation_is_never_above_the_papers(clients: list[Place]) -> None:
    assert crowd(clients, None).deviation_ms <= crowd(clients, None, paper=True).deviation_ms + 1e-6


@given(st.lists(crowds_of_places, min_size=1, max_size=5), places())
def test_merged_crowds_are_one_crowd(parts: list[list[Place]], owner: Place) -> None:
    merged = merge([crowd(part, owner) for part in parts] + [Crowd()])
    together = crowd([client for part in parts for client in part], owner)
    assert merged.centroid is not None
    assert together.centroid is not None
    assert merged.count == together.count
    assert merged.worst_ms == together.worst_ms
    assert merged.centroid.vector == pytest.approx(together.centroid.vector, abs=1e-6)
    assert merged.centroid.height == pytest.approx(together.centroid.height, abs=1e-6)
    assert merged.deviation_ms >= together.deviation_ms - 1e-6


@given(st.lists(st.tuples(st.integers(0, 3), crowds_of_places), max_size=8), places())
@settings(deadline=None)
def test_merging_rows_is_merging_records(parts: list[tuple[int, list[Place]]], owner: Place) -> None:
    summaries = [(key, crowd(clients, owner)) for key, clients in parts]
    rows = merge_rows(
        np.array([key for key, _ in summaries], np.int64),
        4,
        Crowds(
            np.array([each.count for _, each in summaries], np.int64),
            Places.of([each.centroid for _, each in summaries if each.centroid is not None], DIMENSIONS),
            np.array([each.deviation_ms for _, each in summaries]),
            np.array([each.worst_ms for _, each in summaries]),
        ),
    )
    for key in range(4):
        same(rows.crowd(key), merge([each for where, each in summaries if where == key]))


samples = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([PRODUCER, CONSUMER]), places()), max_size=40)


@given(samples, st.lists(places(), min_size=4, max_size=4), st.lists(st.booleans(), min_size=4, max_size=4))
@settings(deadline=None)
def test_summaries_of_samples_are_exact(
    given_samples: list[tuple[int, int, Place]], owners: list[Place], known: list[bool]
) -> None:
    summary = summarise_samples(
        np.array([topic for topic, _, _ in given_samples], np.int32),
        np.array([role for _, role, _ in given_samples], np.int8),
        Places.of([place for _, _, place in given_samples], DIMENSIONS),
        Places.of(owners),
        np.array(known),
    )
    for topic in range(4):
        owner = owners[topic] if known[topic] else None
        both = []
        for role, found in ((PRODUCER, summary.producers), (CONSUMER, summary.consumers)):
            expected = crowd([place for t, r, place in given_samples if (t, r) == (topic, role)], owner)
            same(found.crowd(topic), expected)
            both.append(expected)
        worst = both[0].worst_ms + both[1].worst_ms if both[0].count and both[1].count else 0.0
        assert summary.worst_ms[topic] == pytest.approx(worst, abs=1e-6)
        assert summary.deviation_ms[topic] == pytest.approx(both[0].deviation_ms + both[1].deviation_ms, abs=1e-6)


@given(crowds_of_places, crowds_of_places)
@settings(deadline=None)
def test_distances_of_arrays_are_those_of_coordinates(first: list[Place], second: list[Place]) -> None:
    expected = [[coordinate_of(one).distance_ms(coordinate_of(other)) for other in second] for one in first]
    found = Places.of(first).matrix_ms(Places.of(second))
    assert found == pytest.approx(np.array(expected), abs=1e-4)
    pairs = min(len(first), len(second))
    paired = Places.of(first[:pairs]).paired_ms(Places.of(second[:pairs]))
    assert paired == pytest.approx(np.diag(np.array(expected))[:pairs], abs=1e-6)
    assert latency_ms(first[0], second[0]) == pytest.approx(expected[0][0] / 2)


def test_a_single_client_deviates_by_nothing_though_the_paper_counts_its_heights() -> None:
    place = Place((1.0, 2.0, 3.0), 5.0)
    assert deviation_ms(place, place) == 0.0
    assert deviation_ms(place, place, paper=True) == 5.0


def same(found: Crowd, expected: Crowd) -> None:
    assert found.count == expected.count
    assert found.deviation_ms == pytest.approx(expected.deviation_ms, abs=1e-6)
    assert found.worst_ms == pytest.approx(expected.worst_ms, abs=1e-6)
    if expected.centroid is None:
        assert found.centroid is None
    else:
        assert found.centroid is not None
        assert found.centroid.vector == pytest.approx(expected.centroid.vector, abs=1e-6)
        assert found.centroid.height == pytest.approx(expected.centroid.height, abs=1e-6)
        assert found.centroid.adjustment == pytest.approx(expected.centroid.adjustment, abs=1e-6)

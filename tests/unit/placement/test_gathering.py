"""From reports to what is decided on: merging, owners that changed, and coordinates that are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from nearcast.placement.gathering import Held, credible, fleet_of, rows_of, topics_of
from nearcast.placement.topics import UNOWNED
from nearcast.telemetry.records import BrokerReport, Crowd, Place, TopicSummary
from nearcast.telemetry.summaries import crowd, merge


def at(position: float, height: float = 1.0) -> Place:
    return Place((float(position), *[0.0] * 7), height)


BROKERS = {"a": at(0), "b": at(50), "c": at(100)}


def fleet_here(**changes: BrokerReport) -> list[BrokerReport]:
    return [changes.get(name, BrokerReport(name, 1.0, place)) for name, place in BROKERS.items()]


def summary(name: str, owner: str, epoch: int, producers: list[float], consumers: list[float], **more: float) -> TopicSummary:
    return TopicSummary(
        name,
        epoch,
        owner,
        crowd([at(each) for each in producers], BROKERS.get(owner)),
        crowd([at(each) for each in consumers], BROKERS.get(owner)),
        **more,
    )


def test_reports_of_several_brokers_become_one_topic() -> None:
    first = summary("t", "a", 7, [0], [10], in_per_second=3, out_per_second=4, max_latency_ms=40)
    second = summary("t", "a", 7, [100], [20, 30], in_per_second=1, max_latency_ms=30)
    topics = topics_of([rows_of([first]), rows_of([second])], fleet_of(fleet_here()), {"t": Held("a", 7, 5.0)})
    producers, consumers = merge([first.producers, second.producers]), merge([first.consumers, second.consumers])
    assert topics.producers.place(0).vector[0] == 50.0
    assert topics.producer_counts.tolist() == [2]
    assert topics.consumer_counts.tolist() == [3]
    assert topics.deviation_ms[0] == pytest.approx(producers.deviation_ms + consumers.deviation_ms)
    assert topics.worst_ms[0] == pytest.approx(producers.worst_ms + consumers.worst_ms)
    assert (topics.rate[0], topics.bound_ms[0], topics.moved_at[0], topics.epochs[0]) == (8.0, 30.0, 5.0, 7)


def test_bounds_come_from_the_rules_where_there_are_some() -> None:
    rows = [rows_of([summary("t", "a", 7, [0], [0], max_latency_ms=30)])]
    assert topics_of(rows, fleet_of(fleet_here()), {}, lambda name: 12.0).bound_ms.tolist() == [12.0]


def test_what_was_measured_to_another_owner_counts_by_its_centroid() -> None:
    """The topic moved to c since this broker reported; E(t) through c is bounded, not taken from a's."""
    report = summary("t", "a", 7, [90, 110], [100])
    topics = topics_of([rows_of([report])], fleet_of(fleet_here()), {"t": Held("c", 8)})
    exact = crowd([at(90), at(110)], BROKERS["c"]).worst_ms + crowd([at(100)], BROKERS["c"]).worst_ms
    assert exact <= topics.worst_ms[0] < 20.0
    assert report.producers.worst_ms > 50.0


def test_topics_that_are_held_but_not_reported_have_no_clients_and_the_other_way_round() -> None:
    rows = [rows_of([summary("reported", "b", 3, [0], [0]), summary("elsewhere", "gone", 2, [0], [0])])]
    topics = topics_of(rows, fleet_of(fleet_here()), {"held": Held("a", 1), "orphan": Held("gone", 1)})
    assert list(topics.names) == ["held", "orphan", "reported", "elsewhere"]
    assert topics.owner.tolist() == [0, UNOWNED, 1, UNOWNED]
    assert topics.silent().tolist() == [True, True, False, False]
    assert topics.worst_ms[3] == 0.0


def test_the_highest_epoch_says_who_owns_what_nobody_holds() -> None:
    rows = [rows_of([summary("t", "a", 3, [0], [0])]), rows_of([summary("t", "b", 5, [0], [0])])]
    topics = topics_of(rows, fleet_of(fleet_here()), {})
    assert (topics.owner.tolist(), topics.epochs.tolist()) == ([1], [5])


def test_nothing_at_all_is_fine() -> None:
    assert len(topics_of([], fleet_of([]), {})) == 0
    assert len(topics_of([rows_of([])], fleet_of(fleet_here()), {})) == 0


BAD = [
    Place((1.0, 2.0), 1.0),
    Place((math.nan, *[0.0] * 7), 1.0),
    Place((math.inf, *[0.0] * 7), 1.0),
    Place(tuple([1e9] * 8), 1.0),
    Place(tuple([0.0] * 8), -1.0),
    Place(tuple([0.0] * 8), math.nan),
    Place(tuple([0.0] * 8), 1.0, math.nan),
]


@pytest.mark.parametrize("place", BAD)
def test_a_coordinate_that_is_none_spoils_nothing(place: Place) -> None:
    assert not credible(place)
    bad = TopicSummary("bad", 1, "a", Crowd(5, place, 1.0, 1.0), Crowd(5, place, 1.0, 1.0))
    topics = topics_of([rows_of([bad, summary("good", "a", 1, [0], [0])])], fleet_of(fleet_here()), {})
    assert topics.producer_counts.tolist() == [0, 1]
    assert np.isfinite(topics.producers.vectors).all()
    fleet = fleet_of(fleet_here(b=BrokerReport("b", 1.0, place, cpu=math.nan, messages_out_per_second=-4.0)))
    assert fleet.usable.tolist() == [True, False, True]
    assert np.isfinite(fleet.places.vectors).all()
    assert (fleet.cpu[1], fleet.out_rate[1]) == (0.0, 0.0)


def test_numbers_that_are_none_count_as_nothing() -> None:
    odd = TopicSummary("t", 1, "a", Crowd(2, at(0), math.nan, 0.0), Crowd(2, at(0), -1.0, 0.0), math.inf, 1.0, 0.0, math.nan)
    rows = rows_of([odd])
    assert rows.producers.counts.tolist() == [0]
    assert rows.consumers.counts.tolist() == [0]
    assert (rows.rates.tolist(), rows.bounds_ms.tolist()) == ([0.0], [0.0])


def test_brokers_that_leave_or_may_get_nothing_are_marked() -> None:
    fleet = fleet_of([*fleet_here(), BrokerReport("d", 1.0)], leaving={"a"}, unusable={"b"})
    assert fleet.names == ["a", "b", "c", "d"]
    assert fleet.usable.tolist() == [False, False, True, False]
    assert fleet.leaving.tolist() == [True, False, False, False]

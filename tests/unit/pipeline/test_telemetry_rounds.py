"""Which records of telemetry count."""

from __future__ import annotations

import random

import msgspec
import pytest

from nearcast.pipeline.telemetry_rounds import BROKER, CLIENTS, TOPICS, Round, Rounds, Seen, parse_topic, topic_of
from nearcast.telemetry.records import BrokerReport, Place


def part(index: int, round_: int, part_: int, parts: int, broker: str = "a", kind: str = TOPICS) -> Seen:
    return Seen(kind, broker, index, 100.0 + index, round_, part_, parts)


def report(index: int, broker: str = "a", cpu: float = 0.5) -> Seen:
    place = Place((0.0,) * 8, 1.0)
    return Seen(BROKER, broker, index, 100.0 + index, payload=msgspec.json.encode(BrokerReport(broker, 1.0, place, cpu)))


def test_a_round_counts_when_it_is_whole() -> None:
    rounds = Rounds()
    assert not rounds.take([part(5, 1, 0, 2)])
    assert rounds.whole(TOPICS, 0.0) == {}
    assert rounds.take([part(6, 1, 1, 2)])
    assert rounds.whole(TOPICS, 0.0) == {"a": Round(1, 5, 6, 106.0, 105.0)}
    # The next one is on its way: the last whole one counts until it is there.
    assert not rounds.take([part(7, 2, 0, 2)])
    assert rounds.whole(TOPICS, 0.0)["a"].number == 1
    assert rounds.take([part(8, 2, 1, 2)])
    assert rounds.whole(TOPICS, 0.0)["a"] == Round(2, 7, 8, 108.0, 107.0)
    assert rounds.latest == 108.0


def test_records_may_come_in_any_order_within_a_batch_and_from_many_brokers() -> None:
    seen = [
        part(number, 1, number - 1, 4, broker, kind)
        for number in range(1, 5)
        for broker in "abc"
        for kind in (TOPICS, CLIENTS)
    ]
    random.Random(3).shuffle(seen)
    rounds = Rounds()
    assert rounds.take(seen)
    for kind in (TOPICS, CLIENTS):
        assert rounds.whole(kind, 0.0) == {broker: Round(1, 1, 4, 104.0, 101.0) for broker in "abc"}


@pytest.mark.parametrize(
    "seen",
    [
        [part(1, 1, 0, 3), part(2, 1, 2, 3)],
        [part(1, 1, 1, 3), part(2, 1, 2, 3)],
        [part(1, 1, 0, 2), part(2, 2, 1, 2)],
        [part(1, 1, 0, 3), part(2, 1, 1, 3), part(3, 1, 1, 3), part(4, 1, 2, 3)],
    ],
    ids=["a part is missing", "the first is missing", "parts of two rounds", "a part came twice"],
)
def test_a_round_that_is_not_whole_never_counts(seen: list[Seen]) -> None:
    rounds = Rounds()
    assert not rounds.take(seen)
    assert rounds.whole(TOPICS, 0.0) == {}


def test_a_broker_that_began_anew_counts_its_rounds_from_one_again() -> None:
    rounds = Rounds()
    assert rounds.take([part(1, 9, 0, 1), part(2, 10, 0, 2), part(3, 1, 0, 2), part(4, 1, 1, 2)])
    assert rounds.whole(TOPICS, 0.0) == {"a": Round(1, 3, 4, 104.0, 103.0)}


def test_what_is_old_does_not_count() -> None:
    rounds = Rounds()
    rounds.take([part(1, 1, 0, 1), part(50, 1, 0, 1, "b"), report(1), report(50, "b")])
    assert list(rounds.whole(TOPICS, 120.0)) == ["b"]
    old, new = rounds.reports(120.0)
    assert (old.broker, old.coordinate, old.cpu) == ("a", None, 0.0), "known, and not to be given anything"
    assert (new.broker, new.cpu) == ("b", 0.5)
    assert new.coordinate is not None
    rounds.forget(120.0)
    assert [each.broker for each in rounds.reports(0.0)] == ["b"]
    assert list(rounds.whole(TOPICS, 0.0)) == ["b"]


def test_the_last_report_of_itself_counts() -> None:
    rounds = Rounds()
    rounds.take([report(2, cpu=0.9), report(1, cpu=0.1)])
    assert [each.cpu for each in rounds.reports(0.0)] == [0.9]


def test_nobody_speaks_for_another() -> None:
    rounds = Rounds()
    rounds.take([Seen(BROKER, "a", 1, 1.0, payload=msgspec.json.encode(BrokerReport("b", 1.0))), Seen(BROKER, "c", 1, 1.0)])
    assert rounds.reports(0.0) == []
    assert rounds.refused == 2


def test_topics_of_telemetry() -> None:
    assert parse_topic(topic_of(TOPICS, "eu/one")) == (TOPICS, "eu/one")
    for topic in (
        "a",
        "$nearcast/plan",
        "$nearcast/telemetry/topics",
        "$nearcast/telemetry/topics/",
        "$nearcast/telemetry/x/a",
    ):
        assert parse_topic(topic) is None

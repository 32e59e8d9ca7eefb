"""Which topics move where, told in small stories; the whole is in tests/property/test_placement.py."""

from __future__ import annotations

import random

import pytest

from nearcast.errors import InvalidValue
from nearcast.placement.deciding import Plan, decide
from nearcast.placement.explanations import explain, explanations
from nearcast.placement.topics import PAPER, Fleet, PlacementSettings
from tests.placement_stories import Topic, line, topics_on

NOW = 1_000.0
SETTINGS = PlacementSettings(out_rate_limit=100.0)


def moves(plan: Plan) -> dict[str, str]:
    return {move.topic: move.target for move in plan.moves}


def planned(fleet: Fleet, *topics: Topic, settings: PlacementSettings = SETTINGS, now: float = NOW) -> Plan:
    return decide(topics_on(fleet, *topics), fleet, settings, now)


def test_a_topic_above_its_bound_moves_to_where_it_is_kept() -> None:
    fleet = line({"far": 0, "near": 90, "nearer": 100})
    plan = planned(fleet, Topic("t", [100], [100], "far", bound_ms=40), Topic("fine", [0], [0], "far", bound_ms=40))
    assert moves(plan) == {"t": "nearer"}
    move = plan.moves[0]
    assert (move.origin, move.reason, move.epoch, move.worst_ms, move.expected_ms) == ("far", "latency", 1, 100.0, 0.0)


def test_a_topic_without_a_bound_stays_however_far_it_is() -> None:
    fleet = line({"far": 0, "near": 1000})
    assert moves(planned(fleet, Topic("t", [1000], [1000], "far"))) == {}


def test_where_no_broker_keeps_the_bound_the_least_bad_is_taken() -> None:
    fleet = line({"a": 0, "b": 50, "c": 300})
    assert moves(planned(fleet, Topic("t", [0], [100], "c", bound_ms=10))) == {"t": "a"}
    # And the tie between a and b goes to the one that passes on less.
    fleet = line({"a": 0, "b": 50, "c": 300}, out_rate={"a": 2.0, "b": 1.0, "c": 0.0})
    assert moves(planned(fleet, Topic("t", [0], [100], "c", bound_ms=10))) == {"t": "b"}


def test_a_full_broker_is_passed_over_and_fills_within_one_plan() -> None:
    fleet = line({"far": 0, "near": 100, "next": 90})
    topics = [Topic(f"t{number}", [100], [100], "far", bound_ms=40, rate=40) for number in range(4)]
    assert moves(planned(fleet, *topics)) == {"t0": "near", "t1": "near", "t2": "next", "t3": "next"}


def test_topics_with_fewer_brokers_to_choose_from_are_placed_first() -> None:
    fleet = line({"far": 0, "near": 100, "next": 90})
    easy = Topic("easy", [100], [100], "far", bound_ms=40, rate=80)
    hard = Topic("hard", [100], [100], "far", bound_ms=5, rate=80)
    assert moves(planned(fleet, easy, hard)) == {"hard": "near", "easy": "next"}


def test_an_overloaded_broker_sheds_its_busiest_topics_until_it_is_not() -> None:
    fleet = line({"busy": 0, "idle": 10}, out_rate={"busy": 150})
    topics = [Topic(name, [0], [0], "busy", rate=rate) for name, rate in (("small", 20), ("large", 60), ("middle", 50))]
    assert moves(planned(fleet, *topics)) == {"large": "idle"}
    fleet = line({"busy": 0, "idle": 10}, out_rate={"busy": 160})
    assert moves(planned(fleet, *topics)) == {"large": "idle"}
    fleet = line({"busy": 0, "idle": 10}, out_rate={"busy": 161})
    assert planned(fleet, *topics).outcome.tolist() == [0, 1, 5]  # the second is shed, too, and has no room


def test_an_overloaded_processor_counts_like_a_rate() -> None:
    fleet = line({"busy": 0, "idle": 10}, out_rate={"busy": 90}, cpu={"busy": 0.95})
    plan = planned(fleet, Topic("a", [0], [0], "busy", rate=9), Topic("b", [0], [0], "busy", rate=8))
    # 90 × 0.85 / 0.95 is 80.5: both have to go.
    assert moves(plan) == {"a": "idle", "b": "idle"}
    assert {move.reason for move in plan.moves} == {"overload"}


def test_nothing_moves_to_an_overloaded_broker() -> None:
    fleet = line({"far": 0, "near": 100}, memory={"near": 0.9})
    plan = planned(fleet, Topic("t", [100], [100], "far", bound_ms=40))
    assert moves(plan) == {}
    assert explain(plan, 0).outcome == "full"


def test_topics_of_a_broker_that_leaves_go_in_any_case_even_to_a_full_one() -> None:
    fleet = line({"leaving": 0, "full": 10, "far": 100}, leaving={"leaving": 1}, out_rate={"full": 100, "far": 99})
    topics = [Topic("light", [0], [0], "leaving", rate=1), Topic("heavy", [0], [0], "leaving", rate=50)]
    plan = planned(fleet, *topics, Topic("gone", [100], [100], "", rate=50))
    assert moves(plan) == {"light": "far", "heavy": "full", "gone": "far"}
    assert [move.reason for move in plan.moves] == ["gone", "leaving", "leaving"]


def test_a_broker_that_is_only_not_usable_keeps_its_topics_and_gets_none() -> None:
    fleet = line({"new": 0, "other": 100}, usable={"new": 0})
    plan = planned(fleet, Topic("mine", [0], [0], "new"), Topic("theirs", [0], [0], "other", bound_ms=10))
    assert moves(plan) == {}


def test_topics_without_clients_are_spread() -> None:
    fleet = line({"a": 0, "b": 10, "c": 20})
    plan = planned(fleet, *(Topic(f"t{number}", [], []) for number in range(5)))
    assert list(moves(plan).values()) == ["a", "b", "c", "a", "b"]


def test_without_any_usable_broker_nothing_moves() -> None:
    fleet = line({"a": 0}, leaving={"a": 1})
    plan = planned(fleet, Topic("t", [0], [0], "a"))
    assert plan.moves == []
    assert explain(plan, 0).outcome == "nowhere"
    assert decide(topics_on(fleet), fleet, SETTINGS, NOW).moves == []


# --- past the paper: hysteresis and the cost of moving ----------------------------------------------------------------------


def test_a_move_that_gains_too_little_is_not_made() -> None:
    fleet = line({"here": 0, "there": 1})
    topic = Topic("t", [41], [41], "here", bound_ms=40.5)
    assert moves(planned(fleet, topic, settings=PAPER)) == {"t": "there"}
    plan = planned(fleet, topic, settings=PlacementSettings(hysteresis_ms=2.0))
    assert moves(plan) == {}
    assert explain(plan, 0).outcome == "borderline"
    assert explain(plan, 0).text() == (
        "here owns it, at 41.0 ms in the worst case, above its 40.5 ms. "
        "It stays: there would gain less than 2.0 ms (at most 40.0 ms expected)."
    )


def test_a_topic_stays_a_while_where_it_was_moved_to() -> None:
    fleet = line({"far": 0, "near": 100})
    topic = Topic("t", [100], [100], "far", bound_ms=40, moved_at=NOW - 3)
    assert explain(planned(fleet, topic), 0).outcome == "settling"
    assert moves(planned(fleet, topic, now=NOW + 3)) == {"t": "near"}


def test_soon_after_a_move_the_next_has_to_gain_more() -> None:
    fleet = line({"here": 0, "there": 4})
    topic = Topic("t", [42], [42], "here", bound_ms=40, moved_at=NOW - 6)
    assert moves(planned(fleet, topic)) == {}  # 4 ms is what it gains; a tenth of 42 ms is what it costs
    assert moves(planned(fleet, topic, now=NOW + 60)) == {"t": "there"}


def moved_in_ten_minutes(settings: PlacementSettings) -> int:
    """How often a topic moves whose clients are a little nearer to one broker, then to the other, every five seconds."""
    fleet = line({"a": 0, "b": 80})
    owner, moved_at, moved = "a", 0.0, 0
    for second in range(0, 600, 5):
        clients = [41.5 if second // 5 % 2 == 0 else 38.5]
        topic = Topic("t", clients, clients, owner, bound_ms=40, moved_at=moved_at)
        for move in planned(fleet, topic, settings=settings, now=NOW + second).moves:
            owner, moved_at = move.target, NOW + second
            moved += 1
    return moved


def test_a_topic_between_two_brokers_does_not_go_back_and_forth() -> None:
    assert moved_in_ten_minutes(PAPER) == 120
    assert moved_in_ten_minutes(SETTINGS) <= 20


def moved_by_noise(settings: PlacementSettings, topics: int = 50, rounds: int = 360) -> int:
    """Moves of topics halfway between two brokers, just above their bound, in half an hour of noisy telemetry; clients stay
    where they are."""
    fleet = line({"a": 0, "b": 80})
    rng = random.Random(7)
    owner = ["a"] * topics
    moved_at = [0.0] * topics
    moved = 0
    for number in range(rounds):
        now = NOW + 5.0 * number
        seen = []
        for row in range(topics):
            clients = [40.0 + rng.gauss(0.0, 0.15) for _ in range(2)]
            seen.append(Topic(f"t{row}", clients, clients, owner[row], bound_ms=40, moved_at=moved_at[row]))
        for move in planned(fleet, *seen, settings=settings, now=now).moves:
            owner[move.row], moved_at[move.row] = move.target, now
            moved += 1
    return moved


def test_noise_alone_moves_next_to_nothing() -> None:
    assert moved_by_noise(PAPER, rounds=20) > 200
    assert moved_by_noise(SETTINGS) <= 3, "of 18,000 looks at topics that nothing but noise sets above their bound"


# --- explanations ---------------------------------------------------------------------------------------------------------


def test_a_move_says_which_bound_which_alternatives_and_why_this_one() -> None:
    fleet = line({"old": 0, "full": 100, "good": 95, "weak": 20, "off": 100}, out_rate={"full": 99}, leaving={"off": 1})
    plan = planned(fleet, Topic("t", [100], [100], "old", bound_ms=40, rate=10))
    [explanation] = explanations(plan)
    verdicts = {each.broker: each.verdict for each in explanation.alternatives}
    assert verdicts == {
        "full": "full",
        "off": "leaving",
        "good": "chosen",
        "weak": "breaks the bound",
        "old": "present owner",
    }
    assert (explanation.bound_ms, explanation.worst_ms, explanation.keeping, explanation.brokers) == (40, 100, 2, 4)
    assert explanation.text() == (
        "old owns it, at 100.0 ms in the worst case, above its 40 ms. "
        "It moves to good: the least of those with room (at most 5.0 ms expected)."
    )


@pytest.mark.parametrize(
    ("topic", "words"),
    [
        (Topic("t", [0], [0], "a", bound_ms=40), "a owns it, at 0.0 ms in the worst case, within its 40 ms. Nothing to do."),
        (Topic("t", [0], [9], "a"), "a owns it, at 4.5 ms in the worst case; it has no bound. Nothing to do."),
        (Topic("t", [0], [], "a", bound_ms=4), "a owns it; it has no consumers, so no latency. Nothing to do."),
        (Topic("t", [], [0], "a", bound_ms=4), "a owns it; it has no producers, so no latency. Nothing to do."),
        (Topic("t", [], [], "a", bound_ms=4), "a owns it; it has no clients, so no latency. Nothing to do."),
        (
            Topic("t", [9], [9], ""),
            "It has no owner. It moves to b because nobody owns it: the least (at most 1.0 ms expected).",
        ),
        (
            Topic("t", [0], [100], "b", bound_ms=4),
            "b owns it, at 50.0 ms in the worst case, above its 4 ms. "
            "No broker is sure to keep 4 ms. It stays: no other is nearer.",
        ),
    ],
)
def test_what_is_said(topic: Topic, words: str) -> None:
    plan = planned(line({"a": 0, "b": 10}, out_rate={"a": 1.0}), topic)
    assert explain(plan, 0).text() == words


# --- settings, plans ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("high_watermark", 0), ("high_watermark", 1.1), ("out_rate_limit", -1), ("move_cost_seconds", 0)]
)
def test_settings_that_make_no_sense_are_refused(name: str, value: float) -> None:
    with pytest.raises(InvalidValue, match=name):
        PlacementSettings(**{name: value})  # type: ignore[arg-type]


def test_a_plan_becomes_a_record() -> None:
    fleet = line({"far": 0, "near": 100})
    plan = planned(fleet, Topic("t", [100], [100], "far", bound_ms=40))
    record = plan.record(7, 12.5, "me")
    assert (record.number, record.time, record.planner) == (7, 12.5, "me")
    assert [(move.topic, move.origin, move.target, move.epoch, move.reason) for move in record.moves] == [
        ("t", "far", "near", 1, "latency")
    ]

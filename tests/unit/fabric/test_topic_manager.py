"""The controller's part in owned topics: asking, planning, migrating, and owners that die."""

from __future__ import annotations

import json

import msgspec
import pytest

from nearcast.fabric import frames
from nearcast.fabric.control import ClassRule, pack
from nearcast.fabric.frames import frame
from nearcast.fabric.owner_records import Owned, Owner
from nearcast.fabric.refusals import Refused
from nearcast.placement.plans import PlannedMove, PlanRecord, encode_plan
from nearcast.telemetry.records import BrokerReport, TopicReport, TopicSummary
from tests.topic_control_harness import OwningBroker, OwningNet, crowd, place, settings

NEAR, MIDDLE, FAR = place(0.0), place(30.0), place(100.0)


def three(**topics: object) -> OwningNet:
    net = OwningNet(control=settings(**topics))
    net.add_owning("b1", "b2", "b3")
    net.run_until(lambda: net.manager.settled, "the controller to know all owners")
    return net


def asked(net: OwningNet, name: str, *topics: str) -> None:
    net.owning(name).ask(*topics)
    net.run_until(lambda: all(net.owning(name).owner_of(topic) for topic in topics), "answers")


# --- asking ---------------------------------------------------------------------------------------------------------------


def test_whoever_asks_first_owns_a_topic_and_others_are_told_so() -> None:
    net = three()
    asked(net, "b2", "swarm/1")
    asked(net, "b1", "swarm/1")
    assert net.owning("b1").owner_of("swarm/1") == "b2"
    assert net.agreed("swarm/1") == "b2"


def test_two_that_ask_at_the_same_moment_get_the_same_owner() -> None:
    net = three()
    for name in ("b1", "b3"):
        net.owning(name).ask("swarm/1")
    net.run(1.0)
    assert net.agreed("swarm/1") in ("b1", "b3")


def test_a_controller_that_was_started_again_learns_the_owners_and_makes_no_new_ones() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b3", "swarm/1")
    epoch = net.owning("b1").topics[b"swarm/1"].epoch
    net.part("controller", "b1")  # the owner comes back last
    net.restart_controller()
    net.owning("b3").ask("swarm/1", "swarm/new")
    net.run(3.0)
    assert net.owner_of("swarm/1") == net.owner_of("swarm/new") == "", "b3 has a link to b1, which has not said what it owns"
    net.heal()
    net.run_until(lambda: net.agreed("swarm/1") == "b1", "the owner's word")
    assert net.owning("b3").topics[b"swarm/1"].epoch == epoch
    net.run_until(lambda: net.agreed("swarm/new") == "b3", "an owner for what nobody owns")


def test_a_broker_that_is_new_does_not_stand_for_all_when_a_controller_was_started_again() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b3", "swarm/1")
    epoch = net.owning("b1").topics[b"swarm/1"].epoch
    for name in ("b1", "b2", "b3"):
        net.part("controller", name)
    net.restart_controller()
    net.add_owning("b4")
    net.run_until(lambda: net.manager.settled, "b4, alone")
    net.heal()
    net.part("controller", "b1")  # the owner comes back last
    net.run(5.0)
    assert net.owner_of("swarm/1") == ""
    net.heal()
    net.run_until(lambda: net.agreed("swarm/1") == "b1", "the owner's word")
    assert net.owning("b1").topics[b"swarm/1"].epoch == epoch


def test_an_owner_that_does_not_come_back_to_a_new_controller_is_replaced_in_time() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b3", "swarm/1")
    epoch = net.owning("b1").topics[b"swarm/1"].epoch
    net.kill("b1")
    net.restart_controller()
    net.owning("b3").ask("swarm/1")
    net.run_until(lambda: net.owning("b3").owner_of("swarm/1") == "b3", "an owner that lives", 20.0)
    assert net.owning("b3").topics[b"swarm/1"].epoch > epoch


def test_the_first_broker_of_all_need_not_wait_for_anybody() -> None:
    net = OwningNet()
    net.add_owning("b1")
    net.owning("b1").ask("swarm/1")
    assert net.run_until(lambda: net.owner_of("swarm/1") == "b1", "an owner") < 1.0


def test_a_broker_that_is_drained_does_not_become_an_owner_by_asking() -> None:
    net = three()
    net.controller.drain("b1", True, net.now)
    asked(net, "b1", "swarm/1")
    assert net.agreed("swarm/1") in ("b2", "b3")


def test_a_topic_that_its_owner_forgot_has_none_and_gets_one_when_it_is_used_again() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    known = net.owning("b1").topics.pop(b"swarm/1")
    net.owning("b1").desk.owned("swarm/1", known.epoch, False)
    net.run_until(lambda: net.owner_of("swarm/1") == "", "the directory to forget it, too")
    asked(net, "b2", "swarm/1")
    assert net.agreed("swarm/1") == "b2"
    assert net.owning("b2").topics[b"swarm/1"].epoch > known.epoch


def test_a_broker_cannot_speak_for_another_one() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b2").registration.send(pack(frames.OWNED, Owned((Owner("swarm/1", 1 << 60, "b3"),))))
    net.run(1.0)
    assert net.agreed("swarm/1") == "b1"


def test_many_topics_fit_through_a_link() -> None:
    net = OwningNet()
    net.add_owning("b1")
    topics = [f"swarm/{number}/{'x' * 40}" for number in range(20_000)]
    asked(net, "b1", *topics)
    net.restart_controller()
    net.run_until(lambda: len(net.manager.directory) == 20_000, "all of them")


# --- migrations -----------------------------------------------------------------------------------------------------------


def test_a_topic_is_moved_by_hand_and_everybody_agrees() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    before = net.manager.directory.find("swarm/1")
    assert before is not None
    migration = net.manager.move("swarm/1", "b2", net.now)
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the new owner")
    assert (migration.state, migration.kind, migration.duration_ms) == ("done", "manual", 12.5)
    after = net.manager.directory.find("swarm/1")
    assert after is not None
    assert after.epoch == migration.new_epoch > before.epoch


def test_whoever_asked_once_hears_of_the_new_owner() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b3", "swarm/1")
    net.manager.move("swarm/1", "b2", net.now)
    net.run_until(lambda: net.owning("b3").owner_of("swarm/1") == "b2", "word of it")
    assert net.agreed("swarm/1") == "b2"


def test_also_after_the_controller_was_started_again() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b3", "swarm/1")
    net.restart_controller()
    net.run_until(lambda: net.manager.settled and net.owner_of("swarm/1") == "b1", "the owners")
    net.manager.move("swarm/1", "b2", net.now)
    net.run_until(lambda: net.owning("b3").owner_of("swarm/1") == "b2", "word of it")


@pytest.mark.parametrize(
    ("topic", "target", "words"),
    [
        ("swarm/none", "b2", "nobody owns swarm/none yet: nothing was published to it since it is of class owned"),
        ("plain", "b2", "plain is not owned: `nearcast topic create plain --class owned` makes it so"),
        ("swarm/1", "b9", "there is no broker 'b9'; `nearcast nodes` lists them"),
        ("swarm/1", "b1", "b1 owns swarm/1 already"),
        ("swarm/1", "g", "g is a gateway; brokers own topics"),
        ("swarm/1", "b3", "broker b3 is being drained; `nearcast drain b3 --stop` ends that"),
    ],
)
def test_what_cannot_be_moved(topic: str, target: str, words: str) -> None:
    net = three()
    net.add_gateway("g", b1=1.0)
    net.controller.drain("b3", True, net.now)
    asked(net, "b1", "swarm/1")
    net.run(1.0)
    with pytest.raises(Refused) as refused:
        net.manager.move(topic, target, net.now)
    assert str(refused.value) == words


def test_so_many_are_under_way_at_once_and_all_get_there() -> None:
    net = three(executors=4)
    topics = [f"swarm/{number}" for number in range(20)]
    asked(net, "b1", *topics)
    net.owning("b1").stubborn = True
    for topic in topics:
        net.manager.move(topic, "b2", net.now)
    net.run(1.0)
    assert net.manager.migrations.under_way == len(net.owning("b1").orders) == 4
    net.owning("b1").stubborn = False
    for order in list(net.owning("b1").orders):
        net.owning("b1").migrate(order, net.now)
    net.run_until(lambda: all(net.agreed(topic) == "b2" for topic in topics), "all of them")


def test_one_of_which_nothing_is_heard_has_failed_and_the_directory_stays_as_it_was() -> None:
    net = three(migration_timeout_s=2.0)
    asked(net, "b1", "swarm/1")
    net.owning("b1").stubborn = True
    migration = net.manager.move("swarm/1", "b2", net.now)
    net.run(3.0)
    assert (migration.state, migration.detail) == ("failed", "the owner did not say in time how it went")
    assert net.owner_of("swarm/1") == "b1"


def test_an_order_that_was_lost_with_its_link_is_given_again() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").stubborn = True
    migration = net.manager.move("swarm/1", "b2", net.now)
    net.run(0.2)
    net.owning("b1").stubborn = False
    for end in [end for end in net._ends if end.node.name == "b1"]:
        net.close(end)
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the second order")
    assert migration.state == "done"
    assert len({order.new_epoch for order in net.owning("b1").orders}) == 1, "the same order: it is carried out once"


def test_an_owner_that_refuses_is_believed() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").unable = "it is on its way here"
    migration = net.manager.move("swarm/1", "b2", net.now)
    net.run(1.0)
    assert (migration.state, migration.detail) == ("failed", "it is on its way here")
    assert net.agreed("swarm/1") == "b1"


def test_a_topic_that_its_owner_knows_nothing_of_goes_to_where_it_was_wanted() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").ignorant = True
    net.manager.move("swarm/1", "b2", net.now)
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the target")


# --- brokers that go ------------------------------------------------------------------------------------------------------


# semantics: N16
def test_topics_of_a_broker_that_dies_get_other_owners_and_everybody_hears_of_it() -> None:
    net = three()
    topics = [f"swarm/{number}" for number in range(10)]
    asked(net, "b1", *topics)
    asked(net, "b2", *topics)
    net.kill("b1")
    net.run_until(lambda: all(net.agreed(topic) in ("b2", "b3") for topic in topics), "other owners")
    owners = {net.owner_of(topic) for topic in topics}
    assert owners == {"b2", "b3"}, "without coordinates they are spread"
    assert {migration.kind for migration in net.manager.migrations.history("swarm/3")} == {"gone"}


# semantics: N19
def test_one_that_was_taken_for_dead_yields_when_it_is_back() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.part("controller", "b1")
    net.hang("b1")
    net.run_until(lambda: net.owner_of("swarm/1") in ("b2", "b3"), "another owner", 120.0)
    net.heal()
    net.resume("b1")
    net.run_until(lambda: net.agreed("swarm/1") in ("b2", "b3"), "the former owner to yield", 120.0)
    assert not net.owning("b1").topics[b"swarm/1"].mine


def test_a_broker_that_was_started_again_and_knows_nothing_gets_its_topics_again() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    asked(net, "b2", "swarm/1")
    epoch = net.owning("b2").topics[b"swarm/1"].epoch
    net.kill("b1")
    net.add_owning("b1")
    net.run_until(lambda: net.owning("b2").topics[b"swarm/1"].epoch > epoch, "a new epoch")
    assert net.agreed("swarm/1") == "b1"
    assert net.owning("b1").topics[b"swarm/1"].mine


def test_the_target_of_a_hand_over_dies_and_the_owner_gets_the_topic_back() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").stubborn = True
    net.manager.move("swarm/1", "b2", net.now)
    net.run(0.5)
    net.kill("b2")
    net.run_until(lambda: net.agreed("swarm/1") == "b1" and not net.manager.migrations.pending, "the owner before", 120.0)


def test_the_owner_dies_in_the_middle_of_a_hand_over_and_the_target_gets_the_topic() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").stubborn = True
    net.manager.move("swarm/1", "b3", net.now)
    net.run(0.5)
    net.kill("b1")
    net.run_until(lambda: net.agreed("swarm/1") == "b3", "the target", 120.0)


# semantics: N17
def test_with_no_broker_left_topics_wait_for_one() -> None:
    net = OwningNet()
    net.add_owning("b1")
    asked(net, "b1", "swarm/1")
    net.kill("b1")
    net.run(60.0)
    assert net.owner_of("swarm/1") == "b1"
    net.add_owning("b2")
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the new broker")


# semantics: N20
def test_a_broker_that_is_drained_hands_its_topics_over_and_gets_none() -> None:
    net = three()
    topics = [f"swarm/{number}" for number in range(40)]
    asked(net, "b1", *topics)
    net.controller.drain("b1", True, net.now)
    net.run_until(lambda: not net.manager.directory.count_of("b1"), "an empty broker")
    assert {net.owner_of(topic) for topic in topics} == {"b2", "b3"}
    assert all(net.agreed(topic) for topic in topics)
    assert net.manager.migrations.history("swarm/1")[0].reason == "b1 is being drained"
    net.controller.drain("b1", False, net.now)
    asked(net, "b1", "swarm/new")
    assert net.agreed("swarm/new") == "b1"


# semantics: N20
def test_a_broker_that_stops_hands_its_topics_over_first() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.owning("b1").registration.leave(net.now)
    net.machines["b1"].flush()
    net.run_until(lambda: net.agreed("swarm/1") in ("b2", "b3"), "another owner")
    assert net.manager.migrations.history("swarm/1")[0].kind == "draining"


def test_a_drain_that_is_ended_leaves_what_waits() -> None:
    net = three(executors=1)
    asked(net, "b1", "swarm/1", "swarm/2")
    net.owning("b1").stubborn = True
    net.controller.drain("b1", True, net.now)
    net.run(2.0)
    assert len(net.manager.migrations.pending) == 2
    net.controller.drain("b1", False, net.now)
    assert [migration.state for migration in net.manager.migrations.pending.values()] == ["ordered"]


# --- planning -------------------------------------------------------------------------------------------------------------


def reports(net: OwningNet, topic: str, owner: str, clients_at: object = FAR, worst_ms: float = 52.0) -> None:
    """b1 is here, b2 a bit away, b3 where the clients are."""
    at = clients_at
    summary = TopicSummary(
        topic,
        net.manager.directory.find(topic).epoch,  # type: ignore[union-attr]
        owner,
        crowd(at, 2, worst_ms),  # type: ignore[arg-type]
        crowd(at, 3, worst_ms),  # type: ignore[arg-type]
        10.0,
        30.0,
    )
    net.owning("b1").telemetry(NEAR, [summary] if owner == "b1" else [])
    net.owning("b2").telemetry(MIDDLE)
    net.owning("b3").telemetry(FAR)


# semantics: N21
def test_a_topic_whose_bound_is_violated_moves_to_where_its_clients_are() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    reports(net, "swarm/1", "b1")
    took = net.run_until(lambda: net.agreed("swarm/1") == "b3", "the owner that keeps the bound")
    assert took < 3.0
    migration = net.manager.migrations.history("swarm/1")[0]
    assert migration.kind == "latency"
    assert "above its bound of 40 ms" in migration.reason


# semantics: N21
def test_one_within_its_bound_stays_wherever_it_would_be_better() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    reports(net, "swarm/1", "b1", worst_ms=15.0)
    net.run(5.0)
    assert net.agreed("swarm/1") == "b1"
    assert net.manager.plans > 0


def test_old_telemetry_counts_for_nothing() -> None:
    net = three(plan_interval_s=20.0)
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    net.manager._plan_at = net.now + 30.0
    reports(net, "swarm/1", "b1")
    net.run(40.0)
    assert net.agreed("swarm/1") == "b1"


def test_a_report_about_the_owner_before_is_not_taken_for_one_about_this_one() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    reports(net, "swarm/1", "b1")
    net.run_until(lambda: net.agreed("swarm/1") == "b3", "the owner that keeps the bound")
    moved = net.manager.migrations.ended
    for _ in range(6):  # b1 still speaks of itself as the owner
        reports(net, "swarm/1", "b1")
        net.run(5.0)
    assert net.agreed("swarm/1") == "b3"
    assert net.manager.migrations.ended == moved


def test_without_a_planner_nothing_moves_by_itself() -> None:
    net = three(planner="none")
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    reports(net, "swarm/1", "b1")
    net.run(10.0)
    assert net.agreed("swarm/1") == "b1"
    assert net.manager.plans == 0


def test_topics_of_a_dead_broker_go_to_where_their_clients_are() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    net.run(10.0)
    summary = TopicSummary("swarm/1", 0, "b1", crowd(FAR, 2, 1.0), crowd(FAR, 3, 1.0), 10.0, 30.0)
    net.owning("b2").telemetry(MIDDLE)
    net.owning("b3").telemetry(FAR, [summary])
    net.run(1.0)
    net.kill("b1")
    net.run_until(lambda: net.agreed("swarm/1") == "b3", "the broker of its clients")


def test_an_overloaded_broker_gives_topics_away() -> None:
    net = three()
    asked(net, "b1", "swarm/1", "swarm/2")
    net.run(10.0)
    topics = [
        TopicSummary(topic, 0, "b1", crowd(NEAR, 2, 1.0), crowd(NEAR, 3, 1.0), rate, rate)
        for topic, rate in (("swarm/1", 100.0), ("swarm/2", 1000.0))
    ]
    net.owning("b2").telemetry(MIDDLE)
    net.owning("b3").telemetry(FAR)
    net.owning("b1").telemetry(NEAR, topics, cpu=0.95, out_rate=1100.0)
    net.run_until(lambda: net.agreed("swarm/2") == "b2", "the busiest topic elsewhere")
    assert net.agreed("swarm/1") == "b1"
    assert net.manager.migrations.history("swarm/2")[0].kind == "overload"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0",
        b"\0{",
        b"\1[]",
        b"\1" + msgspec.json.encode(TopicReport("b1", 0.0, 1, 5, 2, [])),
        b"\1" + msgspec.json.encode(TopicReport("b2", 0.0, 1, 0, 1, [])),
        b"\0" + msgspec.json.encode(BrokerReport("b2", 0.0)),
        b"\1\xff\xfe",
    ],
)
def test_what_is_no_telemetry_is_counted_and_the_broker_stays(content: bytes) -> None:
    net = three()
    net.owning("b1").registration.send(frame(frames.TELEMETRY, content))
    net.run(1.0)
    telemetry = net.manager.telemetry
    assert telemetry.rounds == telemetry.reports == 0
    assert telemetry.refused == (1 if content else 0)
    assert net.controller.entries["b1"].link is not None


# --- plans of others ------------------------------------------------------------------------------------------------------


def publish_plan(broker: OwningBroker, number: int, *moves: PlannedMove) -> None:
    broker.registration.send(frame(frames.PLAN, encode_plan(PlanRecord(number, 0.0, "spark@hq", moves))))


def test_a_plan_is_carried_out_where_the_world_is_still_as_it_was() -> None:
    net = three(planner="spark")
    asked(net, "b1", "swarm/1", "swarm/2", "swarm/3")
    known = net.manager.directory.find("swarm/1")
    assert known is not None
    publish_plan(
        net.owning("b2"),
        1,
        PlannedMove("swarm/1", "b2", "b1", known.epoch, "latency"),
        PlannedMove("swarm/2", "b2", "b1", known.epoch - 1, "latency"),
        PlannedMove("swarm/3", "b9"),
        PlannedMove("swarm/unknown", "b2"),
    )
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the planned owner")
    net.run(1.0)
    assert net.agreed("swarm/2") == net.agreed("swarm/3") == "b1"
    migration = net.manager.migrations.history("swarm/1")[0]
    assert (migration.kind, migration.reason) == ("plan", "spark@hq: latency")
    assert (net.manager.plans_taken, net.manager.last_ordered) == (1, 1)


def test_a_plan_counts_once_and_not_after_a_later_one() -> None:
    net = three(planner="spark")
    asked(net, "b1", "swarm/1")
    publish_plan(net.owning("b1"), 2, PlannedMove("swarm/1", "b2"))
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the planned owner")
    publish_plan(net.owning("b2"), 2, PlannedMove("swarm/1", "b3"))
    publish_plan(net.owning("b3"), 1, PlannedMove("swarm/1", "b3"))
    net.run(2.0)
    assert net.agreed("swarm/1") == "b2"
    assert net.manager.plans_taken == 1


def test_plans_of_others_are_refused_unless_the_configuration_wants_them() -> None:
    net = three()
    asked(net, "b1", "swarm/1")
    publish_plan(net.owning("b1"), 1, PlannedMove("swarm/1", "b2"))
    net.owning("b1").registration.send(frame(frames.PLAN, b"nonsense"))
    net.run(1.0)
    assert net.agreed("swarm/1") == "b1"
    assert net.manager.plans_refused == 2


def test_hostile_plans_are_refused_in_words_and_bounded() -> None:
    net = three(planner="spark")
    asked(net, "b1", "swarm/1")
    plan = {"number": 1, "time": 0.0, "planner": "x", "moves": []}
    hostile = [
        {**plan, "number": "1"},
        {**plan, "number": 2**70},
        {**plan, "planner": "x" * 501},
        {**plan, "moves": [{"topic": "swarm/1", "target": 2}]},
        {**plan, "moves": [{"topic": "swarm/1", "target": ""}]},
        {**plan, "moves": [{"topic": "swarm/1", "target": "b2", "reason": "x" * 501}]},
        [],
    ]
    for number, each in enumerate(hostile):
        net.owning("b1").registration.send(frame(frames.PLAN, json.dumps(each).encode()))
        net.run(0.5)
        assert net.manager.plans_refused == number + 1
        assert net.manager.last_refusal.startswith("not a plan: ")
        assert len(net.manager.last_refusal) < 300
    # Very many moves, all of them nonsense but the last.
    moves = [PlannedMove(f"swarm/{number}", "b2") for number in range(2, 20_000)]
    publish_plan(net.owning("b1"), 1, *moves, PlannedMove("swarm/1", "b9"), PlannedMove("swarm/1", "b2"))
    net.run_until(lambda: net.agreed("swarm/1") == "b2", "the planned owner")
    assert (net.manager.plans_taken, net.manager.last_ordered) == (1, 1)
    assert len(net.manager.migrations.past) == 1


# --- rules ----------------------------------------------------------------------------------------------------------------


def test_an_exception_comes_before_the_rule_that_it_is_one_of() -> None:
    net = three()
    net.controller.set_class("swarm/fast", "owned", net.now, 10.0)
    net.controller.set_class("#", "owned", net.now, 500.0)
    bounds = [net.manager.rules.bound_of(topic) for topic in ("swarm/fast", "swarm/1", "else")]
    assert bounds == [10.0, 40.0, 500.0]
    net.controller.remove_class("swarm/fast", net.now)
    assert net.manager.rules.bound_of("swarm/fast") == 40.0


@pytest.mark.parametrize(
    ("topic_class", "bound", "words"),
    [
        ("local", 5.0, "only topics of class owned have a latency bound, and this is local"),
        ("owned", -1.0, "a latency bound is between 0 (none) and 3,600,000 ms"),
        ("owned", float("nan"), "a latency bound is between 0 (none) and 3,600,000 ms"),
    ],
)
def test_bounds_that_make_no_sense(topic_class: str, bound: float, words: str) -> None:
    net = three()
    with pytest.raises(Refused, match="topic class of 'a'") as refused:
        net.controller.set_class("a", topic_class, net.now, bound)
    assert words in str(refused.value)


def test_a_controller_that_was_started_again_has_the_bounds_from_the_brokers() -> None:
    net = three()
    net.controller.set_class("fleet/#", "owned", net.now, 25.0)
    net.run(1.0)
    net.restart_controller()
    net.run_until(lambda: net.manager.rules.bound_of("fleet/7") == 25.0, "the rules")
    assert ClassRule("fleet/#", "owned", 25.0) in net.controller.rules.rules

"""Migrations that wait, go and end: how many at once, which first, and one of each topic."""

from __future__ import annotations

from nearcast.fabric import migrations as module
from nearcast.fabric.migrations import Migration, MigrationKind, Migrations
from nearcast.fabric.owner_records import Migrated


def wanted(topic: str, target: str = "b2", kind: MigrationKind = "latency", origin: str = "b1") -> Migration:
    return Migration(topic=topic, epoch=5, new_epoch=9, origin=origin, target=target, kind=kind)


def due(migrations: Migrations, *blocked: str) -> list[str]:
    return [one.topic for one in migrations.due(0.0, 100.0, lambda one: one.origin not in blocked)]


def outcome(migration: Migration, *, done: bool = True, reason: str = "") -> Migrated:
    return Migrated(
        number=migration.number, topic=migration.topic, epoch=9, owner="b2", done=done, reason=reason, duration_ms=7.0
    )


def test_so_many_at_once_in_their_order_and_the_next_when_one_ends() -> None:
    migrations = Migrations(1, 2, 30.0)
    made = [wanted(topic) for topic in "abc"]
    assert all(migrations.add(one) for one in made)
    assert due(migrations) == ["a", "b"]
    assert due(migrations) == []
    assert migrations.outcome(outcome(made[0]), 101.0) is made[0]
    assert (made[0].state, made[0].duration_ms, made[0].ended_at) == ("done", 7.0, 101.0)
    assert due(migrations) == ["c"]


def test_what_a_person_wants_and_what_empties_a_broker_goes_first() -> None:
    migrations = Migrations(1, 1, 30.0)
    for one in (wanted("a"), wanted("b", kind="draining"), wanted("c", kind="manual")):
        migrations.add(one)
    order = []
    while migrations.pending:
        [now] = migrations.due(0.0, 0.0, lambda one: True)
        order.append(now.topic)
        migrations.outcome(outcome(now), 0.0)
    assert order == ["b", "c", "a"]


def test_one_of_each_topic() -> None:
    migrations = Migrations(1, 1, 30.0)
    first = wanted("a")
    assert migrations.add(first)
    assert not migrations.add(wanted("a")), "the same again"
    second = wanted("a", "b3")
    assert migrations.add(second), "a later decision"
    assert (first.state, first.detail) == ("superseded", "a newer decision took its place")
    assert due(migrations) == ["a"]
    assert not migrations.add(wanted("a", "b4")), "it is under way"
    assert second.target == "b3"


def test_a_plan_does_not_undo_what_a_person_wants() -> None:
    migrations = Migrations(1, 1, 30.0)
    manual = wanted("a", kind="manual")
    migrations.add(manual)
    assert not migrations.add(wanted("a", "b3"))
    assert migrations.add(wanted("a", "b3", kind="manual"))


def test_a_broker_that_cannot_be_told_keeps_nobody_else_from_going() -> None:
    migrations = Migrations(1, 2, 30.0)
    for one in (wanted("a", origin="b7"), wanted("b"), wanted("c", origin="b7")):
        migrations.add(one)
    assert due(migrations, "b7") == ["b"]
    assert due(migrations) == ["a"]


def test_looking_at_those_that_cannot_go_is_bounded() -> None:
    migrations = Migrations(1, 2, 30.0)
    for number in range(module.MAX_LOOKED_AT + 1):
        migrations.add(wanted(f"far/{number}", origin="b7"))
    migrations.add(wanted("near"))
    looked: list[str] = []

    def can_order(one: Migration) -> bool:
        looked.append(one.topic)
        return one.origin != "b7"

    assert migrations.due(0.0, 0.0, can_order) == []
    assert len(looked) == module.MAX_LOOKED_AT
    assert [one.topic for one in migrations.due(0.0, 0.0, can_order)] == ["near"], "but they take turns"


def test_one_of_which_nothing_is_heard_fails() -> None:
    migrations = Migrations(1, 2, 30.0)
    one = wanted("a")
    migrations.add(one)
    migrations.due(10.0, 100.0, lambda one: True)
    assert migrations.next_deadline() == 40.0
    assert migrations.expire(39.0, 0.0) == []
    assert migrations.expire(40.0, 140.0) == [one]
    assert (one.state, migrations.counts) == ("failed", {"failed": 1})
    assert migrations.outcome(outcome(one), 0.0) is None, "too late"


def test_an_outcome_of_another_topic_or_number_is_none_of_ours() -> None:
    migrations = Migrations(1, 2, 30.0)
    one = wanted("a")
    migrations.add(one)
    migrations.due(0.0, 0.0, lambda one: True)
    assert migrations.outcome(Migrated(number=99, topic="a", epoch=9, owner="b2", done=True), 0.0) is None
    assert migrations.outcome(Migrated(number=one.number, topic="z", epoch=9, owner="b2", done=True), 0.0) is None
    assert one.state == "ordered"


def test_orders_on_a_link_that_is_gone_are_given_again_with_the_same_epoch() -> None:
    migrations = Migrations(1, 2, 30.0)
    one = wanted("a")
    migrations.add(one)
    due(migrations)
    order = one.order()
    migrations.order_again("b9")
    assert due(migrations) == []
    migrations.order_again("b1")
    assert due(migrations) == ["a"]
    assert one.order() == order


def test_history_newest_first_with_what_is_pending() -> None:
    migrations = Migrations(1, 2, 30.0)
    for target in ("b2", "b3"):
        one = wanted("a", target)
        migrations.add(one)
        due(migrations)
        migrations.outcome(outcome(one, done=target == "b3", reason=""), 0.0)
    migrations.add(wanted("a", "b4"))
    migrations.add(wanted("z"))
    assert [(one.target, one.state) for one in migrations.history("a")] == [
        ("b4", "waiting"),
        ("b3", "done"),
        ("b2", "failed"),
    ]
    found = migrations.find(migrations.history("a")[1].number)
    assert found is not None
    assert found.target == "b3"
    assert migrations.find(10_000) is None

"""A leader's book of its group."""

from __future__ import annotations

import math

from nearcast.groups import rosters, views
from nearcast.groups.messages import Join
from nearcast.groups.rosters import Roster
from nearcast.groups.settings import FormationSettings
from nearcast.groups.views import Member

REIGN = 77


def roster(settings: FormationSettings | None = None) -> Roster:
    return Roster(views.alone(Member("m", "m:1884", 10), 5.0, 6.25, REIGN), settings or FormationSettings())


def join(number: int = 1, version: int = 1, reign: int = 0, address: str = "a:1884") -> Join:
    return Join(number, 1.0, address, "", version, reign)


def test_a_leader_alone_has_nothing_to_tell_and_nobody_to_miss() -> None:
    alone = roster()
    assert alone.update(1e9) is None
    assert alone.silent(1e9) == []
    assert alone.next_deadline() == math.inf


def test_versions_rise_above_those_of_whoever_joins() -> None:
    group = roster()
    assert group.admit("a", join(version=3), 0.0) == rosters.ADMITTED
    assert group.view.version == 11
    assert group.admit("b", join(version=500), 0.0) == rosters.ADMITTED
    assert group.view.version == 501
    assert group.view.members["a"].joined_version == 11
    assert group.view.members["b"].joined_version == 501


def test_what_a_join_of_a_known_member_means() -> None:
    group = roster()
    group.admit("a", join(version=3), 0.0)
    group.update(0.0)
    view = group.view
    assert group.admit("a", join(version=3), 0.1) == rosters.BEHIND, "the Welcome is lost"
    assert group.admit("a", join(version=11, reign=REIGN), 0.2) == rosters.RENEWED
    assert group.view is view
    assert group.admit("a", join(version=11), 0.3) == rosters.ADMITTED, "it has led a group of its own since"
    assert group.view.members["a"].joined_version == 12
    assert group.admit("a", join(version=12, reign=5), 0.4) == rosters.ADMITTED, "it means an earlier life of ours"
    assert group.admit("a", join(version=900, reign=REIGN), 0.5) == rosters.ADMITTED
    assert group.view.version == 901


def test_an_update_that_is_still_to_be_told_is_no_reason_for_the_whole_view() -> None:
    group = roster()
    group.admit("a", join(), 0.0)
    group.update(0.0)
    group.admit("b", join(), 0.01)
    assert group.admit("a", join(version=11, reign=REIGN), 0.02) == rosters.RENEWED
    assert group.update(0.05) is not None
    assert group.admit("a", join(version=11, reign=REIGN), 0.06) == rosters.BEHIND


def test_each_broker_is_told_of_once_with_what_holds_in_the_end() -> None:
    group = roster()
    group.admit("a", join(), 0.0)
    group.update(0.0)
    group.admit("b", join(), 0.01)
    group.admit("c", join(), 0.01)
    group.remove("b", 0.02)
    group.remove("a", 0.02)
    group.admit("a", join(version=40), 0.03)
    assert group.update(0.04) is None, "not yet"
    assert group.next_deadline() == 0.05
    update = group.update(0.05)
    assert update is not None
    assert (update.base, update.version, update.left) == (11, 41, ["b"])
    assert sorted(member.name for member in update.joined) == ["a", "c"]


def test_large_groups_are_told_less_often() -> None:
    group = roster(FormationSettings(view_interval_s=0.05, updates_per_s=100.0))
    for number in range(49):
        group.admit(f"b{number}", join(), 0.0)
    assert group.update(0.0) is not None
    group.admit("late", join(), 0.1)
    assert group.next_deadline() == 51 / 100.0


def test_the_leader_is_never_removed() -> None:
    group = roster()
    assert not group.remove("m", 0.0)
    assert not group.remove("stranger", 0.0)
    assert group.view.version == 10


def test_who_is_heard_of_is_not_silent() -> None:
    group = roster()
    group.admit("a", join(), 0.0)
    group.admit("b", join(), 1.0)
    group.update(1.0)
    assert group.next_deadline() == 20.0
    assert group.note("a", 2.0)
    assert not group.note("stranger", 2.0)
    assert group.next_deadline() == 21.0
    assert group.silent(20.9) == []
    assert group.silent(21.0) == ["b"]
    assert group.silent(30.0) == ["b", "a"]


def test_thresholds_are_part_of_the_view() -> None:
    group = roster()
    assert not group.set_thresholds(5.0, 6.25, 0.0)
    assert group.set_thresholds(4.0, 5.0, 0.0)
    assert (group.view.version, group.view.join_ms, group.view.leave_ms) == (11, 4.0, 5.0)

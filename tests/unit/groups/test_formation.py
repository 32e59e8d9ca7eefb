"""One broker's machine, told everything by hand: what it says to whom, and what it becomes."""

from __future__ import annotations

import math
import random
from collections.abc import Collection

import pytest

from nearcast.groups import messages
from nearcast.groups.formation import Formation, LeaderChanged, ViewChanged, outranks
from nearcast.groups.messages import Answer, Ask, Join, Leave, Message, Notice, Refuse, Update, Welcome
from nearcast.groups.settings import FormationSettings
from nearcast.groups.thresholds import Thresholds
from nearcast.groups.views import Member, View


class Told:
    """Neighbours as the test says."""

    def __init__(self) -> None:
        self.leader = ""
        self.latencies_ms: dict[str, float] = {}
        self.avoided: list[str] = []

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        self.avoided = list(avoid)
        near = self.leader not in avoid and self.latency_ms(self.leader) < below_ms
        return self.leader if near else ""

    def latency_ms(self, name: str) -> float:
        return self.latencies_ms.get(name, 1.0)

    def address(self, name: str) -> str:
        return f"{name}:1884"


class Machine:
    """The machine of broker "m", its clock, and what it says."""

    def __init__(self, lcm: float = 5.0, settings: FormationSettings | None = None) -> None:
        self.now = 0.0
        self.neighbours = Told()
        self.thresholds = Thresholds(5.0, 6.25)
        rng = random.Random(7)
        self.formation = Formation(
            "m", "m:1884", settings or FormationSettings(), self.neighbours, self.thresholds, lcm, rng, self.now
        )

    def hear(self, sender: str, message: Message) -> list[tuple[str, Message]]:
        """What it answers."""
        self.formation.handle(sender, message, self.now)
        return self.formation.take_outgoing()

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """What it says meanwhile."""
        said = self.formation.take_outgoing()
        until = self.now + seconds
        while self.formation.next_deadline() <= until:
            self.now = max(self.now, self.formation.next_deadline())
            self.formation.tick(self.now)
            said += self.formation.take_outgoing()
        self.now = until
        return said

    def asks(self, leader: str) -> Ask:
        """Its question to a leader that has come near."""
        self.neighbours.leader = leader
        ((to, ask),) = self.wait(0.2)
        assert to == leader
        assert isinstance(ask, Ask)
        return ask

    def joins(self, leader: str, *others: str, version: int = 50) -> Join:
        """It becomes the member of a leader that asked it."""
        said = self.hear(leader, Ask(1, 9.0, 3, 5.0, 1.0))
        join = said[-1][1]
        assert isinstance(join, Join)
        self.hear(leader, Welcome(join.number, view(leader, version, "m", *others)))
        assert self.formation.leader == leader
        self.formation.take_changes()
        return join

    def takes_in(self, *names: str) -> None:
        """It becomes the leader of others."""
        for number, name in enumerate(names, start=1):
            (answer, *_) = self.hear(name, Join(number, 1.0, f"{name}:1884", "", 1, 0))
            assert isinstance(answer[1], Welcome)
        self.formation.take_changes()


def view(leader: str, version: int, *members: str, reign: int = 3) -> View:
    listed = {name: Member(name, f"{name}:1884", version) for name in (leader, *members)}
    return View(leader, version, 5.0, 6.25, listed, reign)


def kinds(said: list[tuple[str, Message]]) -> list[tuple[str, str]]:
    return [(to, type(message).__name__) for to, message in said]


def test_the_more_capable_leads_then_the_larger_group_then_the_larger_name() -> None:
    assert outranks(2.0, 1, "a", 1.0, 9, "b")
    assert outranks(1.0, 9, "a", 1.0, 1, "b")
    assert outranks(1.0, 1, "b", 1.0, 1, "a")
    for one, other in (((2.0, 1, "a"), (1.0, 9, "b")), ((1.0, 9, "a"), (1.0, 1, "b")), ((1.0, 1, "b"), (1.0, 1, "a"))):
        assert not outranks(*other, *one)


# --- asking and being asked -----------------------------------------------------------------------------------------------


def test_it_starts_as_the_leader_of_a_group_of_its_own() -> None:
    m = Machine()
    assert m.formation.leads
    assert m.formation.leader == "m"
    assert list(m.formation.view.members) == ["m"]
    assert m.formation.candidate is None
    assert m.wait(60.0) == []
    assert m.formation.take_changes() == []


def test_it_asks_a_leader_below_the_threshold_and_says_who_it_is() -> None:
    m = Machine(lcm=5.0)
    m.neighbours.latencies_ms["x"] = 4.5
    m.takes_in("a")
    ask = m.asks("x")
    assert (ask.lcm, ask.size, ask.threshold_ms, ask.latency_ms) == (5.0, 2, 5.0, 4.5)
    assert m.formation.asks == 1


def test_a_leader_at_the_threshold_is_not_asked() -> None:
    m = Machine()
    m.neighbours.leader = "x"
    m.neighbours.latencies_ms["x"] = 5.0
    assert m.wait(10.0) == []


@pytest.mark.parametrize(
    ("lcm", "size", "name", "verdict"),
    [
        (4.0, 9, "z", messages.I_LEAD),
        (5.0, 1, "a", messages.I_LEAD),
        (5.0, 1, "z", messages.YOU_LEAD),
        (6.0, 1, "a", messages.YOU_LEAD),
    ],
)
def test_who_is_asked_decides(lcm: float, size: int, name: str, verdict: int) -> None:
    m = Machine(lcm=5.0)
    said = m.hear(name, Ask(77, lcm, size, 5.0, 1.0))
    answer = said[0][1]
    assert isinstance(answer, Answer)
    assert (answer.number, answer.verdict) == (77, verdict)
    assert kinds(said) == [(name, "Answer")] + ([(name, "Join")] if verdict == messages.YOU_LEAD else [])
    assert m.formation.leads, "nothing has happened yet"


def test_the_asked_tells_the_asker_to_lead_and_joins() -> None:
    m = Machine()
    m.joins("x", "y")
    assert not m.formation.leads
    assert sorted(m.formation.view.members) == ["m", "x", "y"]
    assert m.formation.leader_joins == 1


def test_the_asker_joins_when_the_other_is_to_lead() -> None:
    m = Machine()
    ask = m.asks("x")
    ((to, join),) = m.hear("x", Answer(ask.number, messages.I_LEAD))
    assert to == "x"
    assert isinstance(join, Join)
    assert join.reign == 0
    assert m.formation.candidate is not None
    m.hear("x", Welcome(join.number, view("x", 9, "m")))
    changes = m.formation.take_changes()
    assert isinstance(changes[0], LeaderChanged)
    assert (changes[0].former, changes[0].present) == ("m", "x")
    assert isinstance(changes[1], ViewChanged)


def test_the_asker_leads_on_when_it_is_to_lead() -> None:
    m = Machine()
    ask = m.asks("x")
    assert m.hear("x", Answer(ask.number, messages.YOU_LEAD)) == []
    said = m.hear("x", Join(4, 1.0, "x:1884", "x:1885", 7, 0))
    assert kinds(said) == [("x", "Welcome")]
    assert m.formation.view.members["x"] == Member("x", "x:1884", 8, "x:1885")
    assert m.formation.view.version == 8, "above both versions before"


@pytest.mark.parametrize("other_lcm", [4.0, 6.0])
def test_two_that_ask_each_other_need_no_answer(other_lcm: float) -> None:
    m = Machine(lcm=5.0)
    m.asks("x")
    said = m.hear("x", Ask(3, other_lcm, 1, 5.0, 1.0))
    assert kinds(said) == ([("x", "Join")] if other_lcm > 5.0 else [])


def test_one_that_is_asking_or_joining_is_busy() -> None:
    m = Machine()
    ask = m.asks("x")
    ((_, answer),) = m.hear("y", Ask(3, 99.0, 1, 5.0, 1.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.BUSY
    m.hear("x", Answer(ask.number, messages.I_LEAD))
    ((_, answer),) = m.hear("y", Ask(4, 99.0, 1, 5.0, 1.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.BUSY


def test_after_busy_it_asks_again_soon() -> None:
    m = Machine()
    ask = m.asks("x")
    assert m.hear("x", Answer(ask.number, messages.BUSY)) == []
    assert m.formation.refusals == 1
    assert kinds(m.wait(0.2)) == [("x", "Ask")]


def test_a_member_sends_askers_to_its_leader() -> None:
    m = Machine()
    m.joins("x")
    ((_, answer),) = m.hear("y", Ask(3, 1.0, 1, 5.0, 1.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.FOLLOWS


def test_a_leader_that_does_not_answer_makes_room_for_others() -> None:
    m = Machine()
    m.asks("x")
    m.wait(1.1)
    assert m.neighbours.avoided == ["x"]
    said = m.wait(2.0)
    assert ("x", "Ask") in kinds(said), "not for ever"


def test_groups_with_different_thresholds_merge_only_below_both() -> None:
    m = Machine()
    ((_, answer),) = m.hear("x", Ask(3, 99.0, 1, 20.0, 7.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.NO


def test_it_does_not_join_a_leader_that_it_would_have_to_leave() -> None:
    m = Machine()
    m.neighbours.latencies_ms["x"] = 6.5
    ((_, answer),) = m.hear("x", Ask(3, 99.0, 1, 5.0, 4.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.NO


def test_it_does_not_join_a_leader_that_it_cannot_measure() -> None:
    # One behind a firewall measures us, and we do not measure it: we would join, leave, and be asked again, for ever.
    m = Machine()
    m.neighbours.latencies_ms["x"] = math.inf
    ((_, answer),) = m.hear("x", Ask(1, 9.0, 3, 5.0, 1.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.NO
    m.neighbours.latencies_ms["x"] = 1.0
    assert [type(said) for _, said in m.hear("x", Ask(2, 9.0, 3, 5.0, 1.0))] == [Answer, Join]


def test_a_group_that_would_be_too_large_is_not_made() -> None:
    m = Machine()
    ((_, answer),) = m.hear("x", Ask(1, 9.0, messages.MAX_MEMBERS, 5.0, 1.0))
    assert isinstance(answer, Answer)
    assert answer.verdict == messages.NO


def test_nobody_is_believed_to_be_thousands_of_years_ahead() -> None:
    m = Machine()
    with pytest.raises(ValueError, match="x speaks of a view of version"):
        m.hear("x", Join(1, 1.0, "x:1884", "", 1 << 60, 0))
    assert sorted(m.formation.view.members) == ["m"]
    join = m.joins("x")
    with pytest.raises(ValueError, match="x speaks of a view of version"):
        m.hear("x", Welcome(join.number, view("x", 1 << 60, "m")))
    with pytest.raises(ValueError, match="x speaks of a view of version"):
        m.hear("x", Update(0, 0, 1 << 60, 5.0, 6.25, [], []))
    assert m.formation.view.version == 50


def test_an_answer_to_another_question_is_ignored() -> None:
    m = Machine()
    ask = m.asks("x")
    assert m.hear("x", Answer(ask.number - 1, messages.I_LEAD)) == []
    assert m.hear("y", Answer(ask.number, messages.I_LEAD)) == []
    assert kinds(m.hear("x", Answer(ask.number, messages.I_LEAD))) == [("x", "Join")]


# --- giving up a group ----------------------------------------------------------------------------------------------------


def test_members_are_told_when_the_new_leader_has_taken_us_in_and_not_before() -> None:
    m = Machine()
    m.takes_in("a", "b")
    said = m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))
    assert kinds(said) == [("x", "Answer"), ("x", "Join")]
    join = said[-1][1]
    said = m.hear("x", Welcome(join.number, view("x", 50, "m")))
    assert kinds(said) == [("a", "Notice"), ("b", "Notice")]
    notice = said[0][1]
    assert isinstance(notice, Notice)
    assert (notice.leader, notice.address, notice.threshold_ms) == ("x", "x:1884", 5.0)
    assert m.formation.notifications == 2


def test_a_merger_that_fails_leaves_the_group_as_it_was() -> None:
    m = Machine()
    m.takes_in("a", "b")
    m.wait(0.1)
    m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))
    said = m.wait(3.1)
    assert kinds(said) == [("x", "Join"), ("x", "Join"), ("x", "Leave")]
    assert m.formation.leads
    assert sorted(m.formation.view.members) == ["a", "b", "m"]
    assert m.formation.take_changes() == []


@pytest.mark.parametrize("how", ["refused", "lost"])
def test_a_merger_that_is_refused_or_whose_leader_dies_leaves_the_group_as_it_was(how: str) -> None:
    m = Machine()
    m.takes_in("a")
    join = m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))[-1][1]
    if how == "refused":
        assert m.hear("x", Refuse(join.number, "z", "z:1884", "", 5.0)) == []
    else:
        m.formation.lost("x", m.now)
    assert m.formation.leads
    assert m.formation.candidate is None
    assert sorted(m.formation.view.members) == ["a", "m"]


def test_one_that_is_joining_takes_nobody_in() -> None:
    """They would have to move on at once."""
    m = Machine()
    m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))
    ((to, refuse),) = m.hear("x", Join(8, 9.0, "x:1884", "", 1, 0))
    assert to == "x"
    assert isinstance(refuse, Refuse)
    ((_, refuse),) = m.hear("y", Join(8, 9.0, "y:1884", "", 1, 0))
    assert isinstance(refuse, Refuse)
    assert (refuse.leader, refuse.address) == ("x", "x:1884")
    assert list(m.formation.view.members) == ["m"]


def test_a_member_that_renews_while_its_leader_joins_another_stays() -> None:
    m = Machine()
    m.takes_in("a")
    reign = m.formation.view.reign
    m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))
    assert m.hear("a", Join(9, 1.0, "a:1884", "", m.formation.view.version, reign)) == []


def test_a_welcome_must_be_above_our_own_view() -> None:
    m = Machine()
    m.takes_in("a")
    join = m.hear("x", Ask(3, 9.0, 3, 5.0, 1.0))[-1][1]
    m.formation.lost("a", m.now)
    version = m.formation.view.version
    said = m.hear("x", Welcome(join.number, view("x", version, "m")))
    assert kinds(said) == [("x", "Join")]
    again = said[0][1]
    assert isinstance(again, Join)
    assert again.version == version
    m.hear("x", Welcome(again.number, view("x", version + 1, "m")))
    assert m.formation.leader == "x"


# --- following ------------------------------------------------------------------------------------------------------------


def test_a_member_follows_to_a_leader_that_is_near() -> None:
    m = Machine()
    m.joins("x")
    ((to, join),) = m.hear("x", Notice("y", "y:1884", "y:1885", 5.0))
    assert to == "y"
    assert isinstance(join, Join)
    assert m.formation.leader == "x", "until the new one has taken it in"
    said = m.hear("y", Welcome(join.number, view("y", 60, "m")))
    assert kinds(said) == [("x", "Leave")]
    assert m.formation.leader == "y"
    assert m.formation.member_joins == 1


def test_a_member_leads_if_the_new_leader_is_far() -> None:
    m = Machine()
    m.joins("x")
    m.neighbours.latencies_ms["y"] = 5.0
    assert m.hear("x", Notice("y", "y:1884", "", 5.0)) == []
    assert m.formation.leads
    assert m.formation.splits == 1
    assert m.formation.view.version > 50


def test_a_member_measures_a_new_leader_that_it_does_not_know() -> None:
    m = Machine()
    m.joins("x")
    m.neighbours.latencies_ms["y"] = math.inf
    assert m.hear("x", Notice("y", "y:1884", "y:1885", 5.0)) == []
    assert m.formation.candidate == Member("y", "y:1884", 0, "y:1885")
    assert m.formation.place_of("y").probe_address == "y:1885"
    assert kinds(m.wait(1.0)) == []
    m.neighbours.latencies_ms["y"] = 2.0
    assert kinds(m.wait(0.2)) == [("y", "Join")]


def test_a_new_leader_that_cannot_be_measured_is_not_joined() -> None:
    m = Machine()
    m.joins("x")
    m.neighbours.latencies_ms["y"] = math.inf
    m.hear("x", Notice("y", "y:1884", "", 5.0))
    assert kinds(m.wait(5.2)) == []
    assert m.formation.leads


def test_a_notice_of_somebody_else_is_ignored() -> None:
    m = Machine()
    m.joins("x")
    assert m.hear("z", Notice("y", "y:1884", "", 5.0)) == []
    assert m.formation.leader == "x"


def test_a_member_follows_hints_but_not_for_ever() -> None:
    m = Machine()
    m.joins("x")
    ((to, join),) = m.hear("x", Notice("y0", "y0:1884", "", 5.0))
    hops = 0
    while not m.formation.leads:
        hops += 1
        assert isinstance(join, Join)
        said = m.hear(to, Refuse(join.number, f"y{hops}", f"y{hops}:1884", "", 5.0))
        if said:
            ((to, join),) = said
    assert hops == 4


@pytest.mark.parametrize("hint", ["", "m", "x"])
def test_hints_that_lead_nowhere_end_the_search(hint: str) -> None:
    m = Machine()
    m.joins("x")
    ((_, join),) = m.hear("x", Notice("y", "y:1884", "", 5.0))
    m.hear("y", Refuse(join.number, hint, "", "", 5.0))
    assert m.formation.leads


def test_a_member_above_the_leave_threshold_leaves_and_leads() -> None:
    m = Machine()
    m.joins("x")
    m.neighbours.latencies_ms["x"] = 6.25
    assert ("x", "Leave") not in kinds(m.wait(10.0)), "between the two thresholds nothing happens"
    m.neighbours.latencies_ms["x"] = 6.26
    assert ("x", "Leave") in kinds(m.wait(1.1))
    assert m.formation.leads
    assert m.formation.leaves == 1


def test_a_leader_that_answers_no_ping_any_more_is_left() -> None:
    m = Machine()
    m.joins("x")
    m.wait(2.0)
    m.neighbours.latencies_ms["x"] = math.inf
    m.wait(1.1)
    assert m.formation.leads


def test_a_leader_that_was_not_measured_yet_is_given_time() -> None:
    m = Machine()
    join = m.hear("x", Ask(1, 9.0, 3, 5.0, 1.0))[-1][1]
    m.neighbours.latencies_ms["x"] = math.inf  # it has moved
    m.hear("x", Welcome(join.number, view("x", 50, "m")))
    m.wait(4.0)
    assert m.formation.leader == "x"
    m.wait(3.0)
    assert m.formation.leads


def test_a_member_leads_when_its_leader_is_lost() -> None:
    m = Machine()
    m.joins("x")
    m.formation.lost("x", m.now)
    assert m.formation.leads
    assert m.formation.take_outgoing() == [], "there is no way there"


def test_a_member_whose_leader_is_lost_while_it_goes_elsewhere_goes_on() -> None:
    m = Machine()
    m.joins("x")
    ((_, join),) = m.hear("x", Notice("y", "y:1884", "", 5.0))
    m.formation.lost("x", m.now)
    assert not m.formation.leads
    m.hear("y", Welcome(join.number, view("y", 60, "m")))
    assert m.formation.leader == "y"


# --- going over by itself -------------------------------------------------------------------------------------------------


def test_a_member_goes_over_when_it_is_told_to() -> None:
    m = Machine()
    m.joins("x")
    m.formation.join("y", m.now)
    ((to, join),) = m.formation.take_outgoing()
    assert to == "y"
    assert kinds(m.hear("y", Welcome(join.number, view("y", 60, "m")))) == [("x", "Leave")]
    assert m.formation.leader == "y"


def test_it_stays_if_that_fails() -> None:
    m = Machine()
    m.joins("x")
    m.formation.join("y", m.now)
    ((_, join),) = m.formation.take_outgoing()
    m.hear("y", Refuse(join.number, "z", "z:1884", "", 5.0))
    assert m.formation.leader == "x"
    m.formation.join("y", m.now)
    m.wait(3.1)
    assert m.formation.leader == "x"
    assert m.formation.candidate is None


def test_it_leads_if_its_leader_is_lost_meanwhile_and_the_other_refuses() -> None:
    m = Machine()
    m.joins("x")
    m.formation.join("y", m.now)
    ((_, join),) = m.formation.take_outgoing()
    m.formation.lost("x", m.now)
    assert not m.formation.leads
    m.hear("y", Refuse(join.number, "", "", "", 5.0))
    assert m.formation.leads


@pytest.mark.parametrize("leader", ["m", "x", "far"])
def test_it_does_not_go_where_it_is_or_where_it_is_far(leader: str) -> None:
    m = Machine()
    m.neighbours.latencies_ms["far"] = 5.0
    m.joins("x")
    m.formation.join(leader, m.now)
    assert m.formation.take_outgoing() == []


def test_a_leader_does_not_go_over() -> None:
    m = Machine()
    m.formation.join("y", m.now)
    assert m.formation.take_outgoing() == []


# --- views ----------------------------------------------------------------------------------------------------------------


def test_members_hear_of_each_other() -> None:
    m = Machine()
    m.takes_in("a")
    said = m.hear("b", Join(2, 1.0, "b:1884", "", 1, 0))
    said += m.wait(0.1)
    assert kinds(said) == [("b", "Welcome"), ("a", "Update")]
    welcome, update = said[0][1], said[1][1]
    assert isinstance(welcome, Welcome)
    assert isinstance(update, Update)
    assert sorted(welcome.view.members) == ["a", "b", "m"]
    assert [member.name for member in update.joined] == ["b"]


def test_changes_in_a_short_time_are_told_together() -> None:
    m = Machine()
    m.takes_in("a")
    m.wait(1.0)
    m.hear("b", Join(1, 1.0, "b:1884", "", 1, 0))  # told at once
    m.hear("c", Join(1, 1.0, "c:1884", "", 1, 0))
    m.formation.lost("b", m.now)
    m.hear("d", Join(1, 1.0, "d:1884", "", 1, 0))
    said = m.wait(0.1)
    assert kinds(said) == [("a", "Update"), ("c", "Update")]
    update = said[0][1]
    assert isinstance(update, Update)
    assert ([member.name for member in update.joined], update.left) == (["c", "d"], ["b"])


def test_a_member_that_leaves_is_gone() -> None:
    m = Machine()
    m.takes_in("a", "b")
    m.wait(0.1)
    assert kinds(m.hear("a", Leave(1))) == [("b", "Update")]
    assert sorted(m.formation.view.members) == ["b", "m"]


def test_a_leave_that_is_older_than_the_last_join_is_ignored() -> None:
    m = Machine()
    m.hear("a", Join(9, 1.0, "a:1884", "", 1, 0))
    m.hear("a", Leave(8))
    assert "a" in m.formation.view.members
    m.hear("a", Leave(9))
    assert "a" not in m.formation.view.members


def test_a_member_that_falls_silent_is_gone_after_four_renewals() -> None:
    m = Machine()
    m.takes_in("a", "b")
    m.wait(15.0)
    m.hear("b", Join(7, 1.0, "b:1884", "", m.formation.view.version, m.formation.view.reign))
    m.wait(5.1)
    assert sorted(m.formation.view.members) == ["b", "m"]


def test_a_member_renews_and_hears_nothing_if_all_is_well() -> None:
    m = Machine()
    m.takes_in("a")
    m.wait(0.1)
    assert m.hear("a", Join(7, 1.0, "a:1884", "", m.formation.view.version, m.formation.view.reign)) == []


def test_a_member_that_is_behind_gets_the_whole_view() -> None:
    m = Machine()
    m.takes_in("a")
    version = m.formation.view.version
    m.takes_in("b")
    m.wait(0.1)
    said = m.hear("a", Join(7, 1.0, "a:1884", "", version, m.formation.view.reign))
    assert kinds(said) == [("a", "Welcome")]


def test_a_join_that_is_said_twice_is_answered_twice_and_changes_nothing() -> None:
    m = Machine()
    m.takes_in("a")
    before = m.formation.view
    said = m.hear("a", Join(2, 1.0, "a:1884", "", 1, 0))
    assert kinds(said) == [("a", "Welcome")]
    assert m.formation.view is before


def test_a_restarted_leader_takes_its_members_in_again_above_their_views() -> None:
    m = Machine()
    said = m.hear("a", Join(7, 1.0, "a:1884", "", 57, 12345))
    assert kinds(said) == [("a", "Welcome")]
    assert m.formation.view.version == 58
    assert m.formation.view.members["a"].joined_version == 58


def test_a_member_with_another_address_is_told_to_all() -> None:
    m = Machine()
    m.takes_in("a", "b")
    m.wait(0.1)
    said = m.hear("a", Join(7, 1.0, "moved:1884", "", m.formation.view.version, m.formation.view.reign)) + m.wait(0.1)
    assert kinds(said) == [("a", "Welcome"), ("b", "Update")]
    assert m.formation.view.members["a"].address == "moved:1884"


def test_a_member_that_asks_leads_again_and_is_no_member() -> None:
    """It restarted, and nobody has noticed."""
    m = Machine(lcm=9.0)
    m.takes_in("a")
    m.hear("a", Ask(1, 1.0, 1, 5.0, 1.0))
    assert list(m.formation.view.members) == ["m"]


def test_a_member_keeps_its_view_as_updates_say() -> None:
    m = Machine()
    m.joins("x", "y", version=50)
    assert m.hear("x", Update(3, 50, 52, 5.0, 6.25, [Member("z", "z:1884", 51)], ["y"])) == []
    assert sorted(m.formation.view.members) == ["m", "x", "z"]
    assert m.formation.view.version == 52
    assert [type(change) for change in m.formation.take_changes()] == [ViewChanged]


def test_a_member_that_missed_an_update_asks_for_the_view() -> None:
    m = Machine()
    m.joins("x", version=50)
    ((to, join),) = m.hear("x", Update(3, 51, 52, 5.0, 6.25, [], ["y"]))
    assert to == "x"
    assert isinstance(join, Join)
    assert (join.version, join.reign) == (50, 3)


def test_an_old_update_is_ignored() -> None:
    m = Machine()
    m.joins("x", version=50)
    assert m.hear("x", Update(3, 40, 50, 5.0, 6.25, [Member("z", "", 45)], [])) == []
    assert "z" not in m.formation.view.members


def test_a_member_that_is_not_in_the_view_joins_again() -> None:
    m = Machine()
    m.joins("x", version=50)
    ((to, join),) = m.hear("x", Update(3, 50, 51, 5.0, 6.25, [], ["m"]))
    assert (to, type(join)) == ("x", Join)


def test_who_is_counted_in_by_mistake_says_so() -> None:
    m = Machine()
    assert kinds(m.hear("x", Update(3, 1, 2, 5.0, 6.25, [], []))) == [("x", "Leave")]
    assert kinds(m.hear("x", Welcome(1, view("x", 50, "m")))) == [("x", "Leave")]
    assert m.formation.leads


def test_thresholds_of_the_group_reach_its_members() -> None:
    m = Machine()
    m.takes_in("a")
    m.wait(1.0)
    m.thresholds._join_ms, m.thresholds._leave_ms = 3.0, 4.0
    ((to, update),) = m.wait(1.0)
    assert to == "a"
    assert isinstance(update, Update)
    assert (update.join_ms, update.leave_ms) == (3.0, 4.0)


def test_a_member_leaves_by_its_groups_threshold() -> None:
    m = Machine()
    m.joins("x", version=50)
    m.neighbours.latencies_ms["x"] = 4.5
    m.wait(2.0)
    assert m.formation.leader == "x"
    m.hear("x", Update(3, 50, 51, 3.0, 4.0, [], []))
    m.wait(1.1)
    assert m.formation.leads


def test_a_link_that_is_back_makes_a_member_renew_at_once() -> None:
    m = Machine()
    m.joins("x")
    m.formation.linked("x", m.now)
    ((to, join),) = m.formation.take_outgoing()
    assert to == "x"
    assert isinstance(join, Join)
    assert join.reign == 3


def test_what_was_said_before_there_was_a_link_is_said_again() -> None:
    m = Machine()
    ask = m.asks("x")
    m.formation.linked("other", m.now)
    assert m.formation.take_outgoing() == []
    m.wait(0.5)
    m.formation.linked("x", m.now)
    ((to, again),) = m.formation.take_outgoing()
    assert to == "x"
    assert isinstance(again, Ask)
    assert again.number == ask.number
    assert m.wait(0.9) == [], "and waited for anew"
    ((_, join),) = m.hear("x", Answer(ask.number, messages.I_LEAD))
    m.formation.linked("x", m.now)
    ((_, repeated),) = m.formation.take_outgoing()
    assert isinstance(join, Join)
    assert isinstance(repeated, Join)
    m.hear("x", Welcome(join.number, view("x", 9, "m")))
    assert m.formation.leader == "x"


def test_a_link_that_comes_and_goes_does_not_keep_a_question_open() -> None:
    m = Machine()
    m.asks("x")
    for _ in range(20):
        m.formation.linked("x", m.now)
        m.wait(0.3)
    assert m.formation.asks > 1
    assert m.formation.messages_sent < 12


def test_an_earlier_life_is_told_apart() -> None:
    m = Machine()
    m.formation.begin("m:2884", "m:2885", 1_000_000)
    assert m.formation.view.version == 1_000_000
    assert m.formation.view.members["m"] == Member("m", "m:2884", 1_000_000, "m:2885")


# --- stopping -----------------------------------------------------------------------------------------------------------


def test_a_leader_that_retires_sends_its_members_away_and_takes_nobody_in() -> None:
    machine = Machine()
    join = Join(1, 1.0, "a:1884", "", 1, 0)
    machine.hear("a", join)
    machine.formation.retire(machine.now)
    ((to, notice),) = [each for each in machine.formation.take_outgoing() if isinstance(each[1], Notice)]
    assert isinstance(notice, Notice)
    assert (to, notice.leader) == ("a", "m")
    for newcomer in ("a", "b"):
        ((_, answer),) = machine.hear(newcomer, Join(2, 1.0, f"{newcomer}:1884", "", 1, 0))
        assert isinstance(answer, Refuse)
    machine.neighbours.leader = "b"
    assert not [each for each in machine.wait(5.0) if isinstance(each[1], Ask)]


def test_a_member_whose_leader_retires_leads() -> None:
    machine = Machine()
    machine.joins("a")
    machine.hear("a", Notice("a", "a:1884", "", 5.0))
    assert machine.formation.leads

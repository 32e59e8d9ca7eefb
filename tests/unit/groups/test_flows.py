"""Flow-aware membership: when a member goes over to another group, and when not."""

from __future__ import annotations

from nearcast.groups import flows
from nearcast.groups.flows import Flows


class Member:
    """A broker whose leader does what its flows prefer."""

    def __init__(self, leader: str) -> None:
        self.now = 0.0
        self.flows = Flows(self.now)
        self.leader = leader
        self.flows.belongs_to(leader, self.now)
        self.moves: list[tuple[float, str]] = []

    def period(self, arrivals: dict[str, int]) -> None:
        """Messages by the leader that relayed them, over one period."""
        for leader, messages in arrivals.items():
            self.flows.relevant(leader, messages)
        self.now += flows.PERIOD_S
        preferred = self.flows.preferred(self.now)
        if preferred:
            self.moves.append((self.now, preferred))
            self.leader = preferred
            self.flows.belongs_to(preferred, self.now)


def test_a_clear_and_lasting_majority_moves_a_member() -> None:
    member = Member("a")
    for _ in range(flows.PERIODS - 1):
        member.period({"": 20, "b": 80})
        assert member.leader == "a"
    member.period({"": 20, "b": 80})
    assert member.leader == "b"
    assert member.flows.changes == 1


def test_a_majority_that_is_not_clear_does_not() -> None:
    member = Member("a")
    for _ in range(50):
        member.period({"": 45, "b": 55})
    assert member.moves == []


def test_nor_one_that_does_not_last() -> None:
    member = Member("a")
    for period in range(60):
        member.period({"": 20, "b": 80} if period % 3 else {"": 80, "b": 20})
    assert member.moves == []


def test_nor_a_few_messages() -> None:
    member = Member("a")
    for _ in range(50):
        member.period({"b": flows.LEAST_MESSAGES - 1})
    assert member.moves == []


def test_nor_one_that_many_groups_share() -> None:
    member = Member("a")
    for _ in range(50):
        member.period({"b": 30, "c": 30, "d": 30})
    assert member.moves == []


def test_what_its_own_leader_relayed_is_of_its_own_group() -> None:
    member = Member("a")
    for _ in range(50):
        member.period({"a": 60, "b": 59})
    assert member.moves == []


def test_to_the_leader_with_the_smaller_name_it_takes_twice_as_long() -> None:
    member = Member("b")
    for _ in range(2 * flows.PERIODS - 1):
        member.period({"a": 100})
        assert member.leader == "b"
    member.period({"a": 100})
    assert member.leader == "a"


def test_two_that_want_each_others_messages_end_up_together() -> None:
    one, other = Member("a"), Member("b")
    for _ in range(1_000):
        together = one.leader == other.leader
        one.period({"" if together else other.leader: 100})
        other.period({"" if together else one.leader: 100})
    assert one.leader == other.leader
    assert len(one.moves) + len(other.moves) == 1


def test_one_whose_flows_swing_moves_ever_more_rarely() -> None:
    member = Member("a")
    moves = []
    for _ in range(4):
        before = len(member.moves)
        for _ in range(int(86_400 / flows.PERIOD_S)):
            # Wherever it is, what it wants is at the other place.
            member.period({"b" if member.leader == "a" else "a": 100})
        moves.append(len(member.moves) - before)
    assert moves[0] <= 15
    assert moves[3] <= 2


def test_a_change_that_formation_made_starts_the_count_anew() -> None:
    member = Member("a")
    for _ in range(flows.PERIODS - 1):
        member.period({"z": 100})
    member.flows.belongs_to("c", member.now)
    member.leader = "c"
    for _ in range(flows.PERIODS - 1):
        member.period({"z": 100})
        assert member.leader == "c"
    member.period({"z": 100})
    assert member.leader == "z"
    assert member.flows.changes == 1


def test_a_move_that_fails_is_tried_again() -> None:
    counted = Flows(0.0)
    counted.belongs_to("a", 0.0)
    tries = 0
    for period in range(1, 10):
        counted.relevant("b", 100)
        tries += counted.preferred(period * flows.PERIOD_S) == "b"
    assert tries == 10 - flows.PERIODS
    assert counted.changes == 0


def test_leaders_that_are_counted_are_bounded() -> None:
    counted = Flows(0.0)
    for number in range(2 * flows.MAX_LEADERS):
        counted.relevant(f"leader{number}")
    assert len(counted._counts) == flows.MAX_LEADERS
    for number in range(2 * flows.MAX_FORMER):
        counted._going_to = f"leader{number}"
        counted.belongs_to(f"leader{number}", float(number))
    assert len(counted._former) == flows.MAX_FORMER

"""Who is in a group, as its leader says.

A view is a value: a change makes another one. Versions rise with every change, and a leader that admits a broker first raises
its own above the broker's, as Lamport's clocks do. So a broker's views have rising versions for as long as it lives,
whomever it follows, and whoever restarts in between. A message that was flooded with version *v* by a member that joined
with a version above *v* was therefore flooded in another group; else it went to all who joined with a version of at most *v*.
"""

from __future__ import annotations


class Member:
    """A broker of a group: where it takes links, the version of the first view that it is in, and where it answers probes (""
    if that is where it takes links)."""

    def __init__(self, name: str, address: str, joined_version: int, probe_address: str = "") -> None:
        self.name = name
        self.address = address
        self.joined_version = joined_version
        self.probe_address = probe_address

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Member)
            and self.name == other.name
            and self.address == other.address
            and self.joined_version == other.joined_version
            and self.probe_address == other.probe_address
        )

    def __hash__(self) -> int:
        return hash((self.name, self.joined_version))

    def __repr__(self) -> str:
        return f"Member({self.name!r}, {self.address!r}, {self.joined_version})"


class View:
    """A group: its leader, its members by name (the leader is one), and the thresholds that hold in it. ``reign`` is a number
    that the leader drew when it began to lead: after a restart its versions start anew, and may meet those of before."""

    def __init__(
        self, leader: str, version: int, join_ms: float, leave_ms: float, members: dict[str, Member], reign: int = 0
    ) -> None:
        self.leader = leader
        self.version = version
        self.reign = reign
        self.join_ms = join_ms
        self.leave_ms = leave_ms
        self.members = members
        """Read only: views are shared."""

    def with_member(self, member: Member) -> View:
        """The view after a broker joined, or joined again: of the version that it joined with."""
        members = self.members.copy()
        members[member.name] = member
        return View(self.leader, member.joined_version, self.join_ms, self.leave_ms, members, self.reign)

    def without(self, name: str, version: int) -> View:
        """The view after a broker went."""
        members = self.members.copy()
        members.pop(name, None)
        return View(self.leader, version, self.join_ms, self.leave_ms, members, self.reign)

    def with_thresholds(self, join_ms: float, leave_ms: float, version: int) -> View:
        """The view after the group changed its mind about distances."""
        return View(self.leader, version, join_ms, leave_ms, self.members, self.reign)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, View)
            and self.leader == other.leader
            and self.version == other.version
            and self.reign == other.reign
            and self.join_ms == other.join_ms
            and self.leave_ms == other.leave_ms
            and self.members == other.members
        )

    def __hash__(self) -> int:
        return hash((self.leader, self.version))

    def __repr__(self) -> str:
        return f"View({self.leader!r}, {self.version}, {sorted(self.members)})"


def alone(leader: Member, join_ms: float, leave_ms: float, reign: int) -> View:
    """The group of a broker that has just begun to lead."""
    return View(leader.name, leader.joined_version, join_ms, leave_ms, {leader.name: leader}, reign)

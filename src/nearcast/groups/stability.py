"""When group formation is done: the two termination conditions of section II-C, and that the views agree.

For checking from outside, with the knowledge of all brokers that none of them has: simulations and tests do it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from nearcast.groups.formation import Formation

MAX_FINDINGS: Final = 100
"""More are not looked for: something is wrong anyhow."""


def unstable(formations: Iterable[Formation], latency_ms: Callable[[str, str], float]) -> list[str]:
    """What keeps the formation from being over, one sentence for each; empty if it is.

    (i) No two leaders are nearer than the join threshold (of two different ones, the lower). (ii) No member is farther from
    its leader than the leave threshold, and that one leads. The cost is quadratic in the number of leaders.
    """
    brokers = {formation.name: formation for formation in formations}
    leaders = [formation for formation in brokers.values() if formation.leads]
    found: list[str] = []
    for index, leader in enumerate(leaders):
        if leader.view.join_ms <= 0.0:
            continue  # nobody is nearer than that
        for other in leaders[index + 1 :]:
            threshold_ms = min(leader.view.join_ms, other.view.join_ms)
            apart_ms = latency_ms(leader.name, other.name)
            if apart_ms < threshold_ms:
                found.append(f"{leader.name} and {other.name} both lead, {apart_ms:g} ms apart: below {threshold_ms:g} ms")
                if len(found) >= MAX_FINDINGS:
                    return found
    for member in brokers.values():
        if member.leads:
            continue
        its_leader = brokers.get(member.leader)
        if its_leader is None or not its_leader.leads:
            found.append(
                f"{member.name} follows {member.leader}, which {'is gone' if its_leader is None else 'does not lead'}"
            )
        else:
            apart_ms = latency_ms(member.name, member.leader)
            if apart_ms > member.view.leave_ms:
                found.append(f"{member.name} follows {member.leader}, {apart_ms:g} ms away: above {member.view.leave_ms:g} ms")
        if len(found) >= MAX_FINDINGS:
            break
    return found


def disagreeing(formations: Iterable[Formation]) -> list[str]:
    """Where the brokers of a group do not have the same view: as long as an update is under way, and never for long."""
    brokers = {formation.name: formation for formation in formations}
    found = []
    # Members that were told by the same message share a view, so large groups have few to compare.
    agreed: set[int] = set()
    for member in brokers.values():
        leader = brokers.get(member.leader)
        if leader is None:
            found.append(f"{member.name} follows {member.leader}, which is gone")
        elif member.name not in leader.view.members:
            found.append(f"{member.name} follows {member.leader}, which does not know")
        elif id(member.view) in agreed or leader.view == member.view:
            agreed.add(id(member.view))
        else:
            found.append(f"{member.name} has {member.view!r}, its leader {leader.view!r}")
    for leader in brokers.values():
        if leader.leads:
            strangers = [name for name in leader.view.members if name not in brokers or brokers[name].leader != leader.name]
            found += [f"{leader.name} counts {name} in, which follows another or is gone" for name in strangers]
    return found

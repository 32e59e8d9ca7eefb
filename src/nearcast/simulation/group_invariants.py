"""What must hold of simulated groups: their formation ends, and ends as the paper says (Hasenburg et al., section II-C).

What holds is for :mod:`nearcast.groups.stability` to say; here is when it is asked. Sees everything at once, and changes
nothing.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from nearcast.errors import InvariantViolated
from nearcast.groups.formation import Formation
from nearcast.groups.stability import disagreeing, unstable
from nearcast.simulation.group_knowledge import nearest_others
from nearcast.simulation.invariants import Invariant

if TYPE_CHECKING:
    from nearcast.simulation.groups import Groups
    from nearcast.simulation.world import World

MANY_LEADERS: Final = 300
"""From here on, comparing all of them with each other takes too long."""

MOST_TOLD: Final = 5
"""Of what is wrong."""


class Termination(Invariant):
    """Group formation ends, and when it has, every leader is at least the threshold from every other, and no member farther
    from its leader than the threshold for leaving (section II-C)."""

    def __init__(self, groups: Groups, world: World, *, quiet_s: float, stuck_s: float, last_event_s: float) -> None:
        self._groups = groups
        self._world = world
        self._quiet_s = quiet_s
        self._stuck_s = stuck_s
        self._last_event_s = last_event_s
        self._looked_s = -math.inf
        self._wrong_since = math.inf
        self.holds = False
        """Whether the conditions did when they were last looked at."""

    @property
    def is_over(self) -> bool:
        """Whether nothing will change any more."""
        return self.holds and self._is_quiet and self._world.now > self._last_event_s + self._quiet_s

    @property
    def _is_quiet(self) -> bool:
        return self._world.now - self._groups.viewed_s >= self._quiet_s

    def check(self) -> None:
        if not self._is_quiet:
            self.holds = False
            self._wrong_since = math.inf
            return
        if self.holds and self._looked_s > max(self._groups.viewed_s, self._last_event_s) + self._quiet_s:
            return  # As it was.
        wrong = self._look()
        if not wrong:
            self._wrong_since = math.inf
        elif self._wrong_since == math.inf:
            self._wrong_since = self._world.now
        elif self._world.now - self._wrong_since >= self._stuck_s:
            self._violated(f"nothing has changed for {self._stuck_s:g} s, and", wrong)

    def finish(self) -> None:
        if self.is_over:
            return  # Looked at already.
        wrong = self._look()
        if wrong:
            self._violated("group formation has not ended:", wrong)

    def _look(self) -> list[str]:
        wrong = self._unstable() or disagreeing(self._groups.running())
        self.holds = not wrong
        self._looked_s = self._world.now
        return wrong

    def _unstable(self) -> list[str]:
        """What :func:`~nearcast.groups.stability.unstable` finds. Its cost is quadratic in the number of leaders; where places
        tell who is nearest, it is asked about each leader with the one nearest to it, and about each group: nothing else
        could be wrong."""
        formations = self._groups.running()
        vectors = self._groups.board.vectors
        leaders = [formation for formation in formations if formation.leads]
        if vectors is None or len(leaders) < MANY_LEADERS:
            return unstable(formations, self._latency_ms)
        by_leader: dict[str, list[Formation]] = {}
        for formation in formations:
            by_leader.setdefault(formation.leader, []).append(formation)
        numbers = self._groups.surroundings.numbers
        nearest = nearest_others(vectors, [numbers[leader.name] for leader in leaders])
        names = self._groups.surroundings.names
        by_name = {leader.name: leader for leader in leaders}
        pairs = {frozenset((leader.name, names[other])) for leader, other in zip(leaders, nearest, strict=True)}
        parts = [*by_leader.values(), *([by_name[name] for name in sorted(pair)] for pair in sorted(pairs, key=sorted))]
        return [finding for part in parts for finding in unstable(part, self._latency_ms)]

    def _latency_ms(self, one: str, other: str) -> float:
        surroundings = self._groups.surroundings
        return surroundings.latency_ms(surroundings.numbers[one], surroundings.numbers[other])

    def _violated(self, beginning: str, wrong: list[str]) -> None:
        more = f"; and {len(wrong) - MOST_TOLD} more" if len(wrong) > MOST_TOLD else ""
        raise InvariantViolated(f"{beginning} {'; '.join(wrong[:MOST_TOLD])}{more}")

"""What a change costs once groups have formed: brokers die, among them the leader of the largest group, and come back.

Section IV-A says that the formation it triggers "is considerably shorter than the initial one". Three runs with one seed:
nothing happens; :data:`SHARE` of the brokers lose power; they also come back. What the second has more than the first is due
to their deaths, what the third has more than the second to their return.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import msgspec

from nearcast.errors import InvariantViolated
from nearcast.experiments.groups_runs import Formed, Place, formation_scenario, host_name
from nearcast.scenario.events import Crash
from nearcast.scenario.scenario import Scenario
from nearcast.scenario.topology import LatencyModel
from nearcast.simulation.runs import Outcome, simulate

SHARE = 0.01
DEATH_S = 60.0
"""Groups have been stable for long by then."""

RETURN_S = 120.0


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """What happened, and what it took until groups were stable again."""

    what: str
    brokers: int
    """That it happened to."""

    stable_after_s: float
    joins: int
    notifications: int
    splits: int
    """Members that their leader's next leader was too far for."""


def changes(places: Sequence[Place], threshold_ms: float, model: LatencyModel, seed: int) -> list[Change]:
    """The first formation, the deaths, and the return."""
    scenario = formation_scenario(places, threshold_ms, model)
    first, leaders = _simulated(scenario, seed)
    drawn = random.Random(f"{seed}/changes").sample([host_name(place) for place in places], max(1, round(SHARE * len(places))))
    largest, _ = Counter(leaders.values()).most_common(1)[0]
    dying = sorted({*drawn, largest})
    deaths = tuple(Crash(at_s=DEATH_S, host=host) for host in dying)
    returns = tuple(Crash(at_s=DEATH_S, host=host, restart_after_s=RETURN_S - DEATH_S) for host in dying)
    without, _ = _simulated(msgspec.structs.replace(scenario, events=deaths), seed)
    again, _ = _simulated(msgspec.structs.replace(scenario, events=returns), seed)
    return [
        _change("they all start", len(places), 0.0, first, None),
        _change("some die", len(dying), DEATH_S, without, first),
        _change("these come back", len(dying), RETURN_S, again, without),
    ]


def _simulated(scenario: Scenario, seed: int) -> tuple[Outcome, dict[str, str]]:
    formed = Formed()
    outcome = simulate(scenario, seed, observers=[formed])
    if outcome.violation is not None:
        raise InvariantViolated(f"after {outcome.violation.at_s:.3f} s: {outcome.violation.message}", outcome.violation.hosts)
    return outcome, formed.leaders


def _change(what: str, brokers: int, since_s: float, outcome: Outcome, before: Outcome | None) -> Change:
    def more(*names: str) -> int:
        return sum(outcome.figures[name] - (0 if before is None else before.figures[name]) for name in names)

    return Change(
        what=what,
        brokers=brokers,
        stable_after_s=round(max(0.0, outcome.figures["stable_s"] - since_s), 3),
        joins=more("leader_joins", "member_joins"),
        notifications=more("notifications"),
        splits=more("splits"),
    )

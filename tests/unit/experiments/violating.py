"""A protocol whose invariant never holds."""

from __future__ import annotations

from nearcast.errors import InvariantViolated
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.invariants import Invariant, Protocol
from nearcast.simulation.world import World


class Never(Invariant):
    def check(self) -> None:
        raise InvariantViolated("two and two are five")


class Violating(Protocol):
    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        print("a protocol of one's own may print")  # noqa: T201
        world.check_every_s = 1e-6
        return [Never()]

"""What a user adds to a simulated protocol: which nodes there are, and what must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mypy_extensions import mypyc_attr

if TYPE_CHECKING:
    from nearcast.scenario.scenario import Scenario
    from nearcast.simulation.hosts import Host
    from nearcast.simulation.world import World


@mypyc_attr(allow_interpreted_subclasses=True)
class Invariant:
    """Something that must hold; raises ``InvariantViolated(message, hosts)`` when it does not.

    It sees everything at once, as nobody in the simulated world could, and must not change anything there.
    """

    def observed(self, host: Host, fact: object) -> None:
        """A node called ``host.observe(fact)``."""

    def check(self) -> None:
        """Called every ``World.check_every_s`` of virtual time."""

    def finish(self) -> None:
        """The run is over: what must hold in the end, once faults are over and everything has settled."""


@mypyc_attr(allow_interpreted_subclasses=True)
class Protocol:
    """What a scenario's ``protocol`` names. One object runs once."""

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        """Put nodes on the hosts of the topology (``world.place``), or on more (``world.add``); return what must hold."""
        raise NotImplementedError

    def done(self) -> bool:
        """Whether the run may end now, before its time: nothing that matters will happen any more. Asked now and then."""
        return False

    def report(self) -> dict[str, Any]:
        """Figures of the run, for people and for ``--json``: names to numbers, texts, or lists and dictionaries of them."""
        return {}

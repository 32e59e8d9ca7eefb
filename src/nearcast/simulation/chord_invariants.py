"""What must hold of a ring of replica sets: see :mod:`nearcast.simulation.chord`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from nearcast.chord.identifiers import CIRCLE, distance, identifier
from nearcast.chord.node import RingNode
from nearcast.chord.state import IN
from nearcast.errors import InvariantViolated
from nearcast.simulation.chord_histories import Began, Ended, History
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.world import World

if TYPE_CHECKING:
    from nearcast.simulation.chord import Chord, ReplicaSet

LOOKUPS: Final = 200
MOST_HOPS: Final = 512


class OneHistory(Invariant):
    """What clients saw is linearizable, topic by topic."""

    def __init__(self) -> None:
        self.history = History()

    def observed(self, host: Host, fact: object) -> None:
        if isinstance(fact, Began):
            self.history.began(fact)
        elif isinstance(fact, Ended):
            self.history.ended(fact, host)

    def abandoned(self, number: int) -> None:
        self.history.abandoned(number)


class OneOwner(Invariant):
    """No key is answered for by two sets at the same time. (Leaders of one set are kept apart by its log.)"""

    def __init__(self, ring: Chord) -> None:
        self._ring = ring

    def check(self) -> None:
        ranges = []
        for one in self._ring.sets:
            node = one.leading
            host = one.log.leader
            if node is not None and host is not None and node.state.phase == IN and node.has_lease(host.now):
                ranges.append((node.state.place, node.state.low, host))
        ranges.sort(key=lambda entry: entry[0])
        for index, (place, low, host) in enumerate(ranges):
            before, _, other = ranges[index - 1]
            if other is not host and distance(low, place) > distance(before, place):
                raise InvariantViolated(f"{host.name} and {other.name} may answer for the same keys", [host, other])


class TrueRing(Invariant):
    """In the end the ring is whole: every set that can work is on it, between its true neighbours, with a lease, and whoever
    looks up a key finds the set whose it is."""

    def __init__(self, ring: Chord, world: World) -> None:
        self._ring = ring
        self._world = world
        self.figures: dict[str, float] = {}

    def problem(self) -> tuple[str, list[Host]] | None:
        """Why the ring is not whole now."""
        due: list[tuple[ReplicaSet, RingNode]] = []
        for one in self._ring.sets:
            if not one.wanted or not one.log.can_work():
                continue
            node = one.leading
            if node is None:
                return f"{one.contact.name} has no leader", one.hosts
            due.append((one, node))
        due.sort(key=lambda entry: entry[1].state.place)
        for index, (one, node) in enumerate(due):
            host = one.log.leader or one.hosts[0]
            state = node.state
            name = one.contact.name
            if state.phase != IN:
                return f"{name} is not on the ring", [host]
            if len(due) == 1:
                break
            before, behind = due[index - 1][0], due[(index + 1) % len(due)][0]
            if not state.successors or state.successors[0].name != behind.contact.name:
                known = [contact.name for contact in state.successors]
                return f"{name} takes {known} for its successors, not {behind.contact.name}", [host]
            if state.predecessor is None or state.predecessor.name != before.contact.name or state.low != before.place:
                return f"{name} takes {state.predecessor} for its predecessor, not {before.contact.name}", [host]
            if not node.has_lease(host.now):
                return f"{name} has no lease", [host]
            if not node.is_copied(state.sequence):
                return f"{name} has changes that {behind.contact.name} does not have", [host]
        return None

    def finish(self) -> None:
        problem = self.problem()
        if problem is not None:
            raise InvariantViolated(*problem)
        self._look_up()

    def _look_up(self) -> None:
        """From everywhere to anywhere, along the routes that sets would name."""
        nodes = {one.contact.name: node for one in self._ring.sets if (node := one.leading) and node.state.phase == IN}
        if not nodes:
            return
        names = sorted(nodes)
        places = sorted((identifier(name), name) for name in names)
        now = {one.contact.name: one.log.leader.now for one in self._ring.sets if one.log.leader is not None}
        rng = self._world.rng
        hops = []
        for _ in range(LOOKUPS):
            key = rng.getrandbits(160) % CIRCLE
            at = names[int(rng.random() * len(names))]
            true = next((name for place, name in places if place >= key), places[0][1])
            count = 0
            while True:
                found, contacts = nodes[at].route(key, now[at])
                if found:
                    if contacts[0].name != true:
                        raise InvariantViolated(f"{at} finds {contacts[0].name} for a key of {true}")
                    break
                at = next((contact.name for contact in contacts if contact.name in nodes), "")
                count += 1
                if not at or count > MOST_HOPS:
                    raise InvariantViolated(f"a lookup for a key of {true} ends nowhere after {count} hops")
            hops.append(count)
        self.figures = {"lookup_hops_mean": round(sum(hops) / len(hops), 2), "lookup_hops_max": max(hops)}

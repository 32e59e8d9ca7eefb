"""A replicated log as a set of replicas agrees on it: what a protocol above Raft sees of it, without Raft.

One object stands for all replicas of a set. It promises what Raft promises, and uses all the freedom that leaves: a leader may
not know for a while that it leads no more; what it proposed and nobody confirmed may be in the log or not; replicas that were
down or cut off learn late. A proposal takes a round trip to the nearest majority. Elections take ``election_s``, and need a
majority whose replicas reach each other. Nothing that was committed is ever lost, whatever happens to disks: what protocols
lose when a majority's disks are gone is not what this is for.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Protocol

from nearcast.simulation.hosts import Host
from nearcast.simulation.world import World

LOOK_S = 0.25


class Replica(Protocol):
    """A replica's process."""

    host: Host

    def lead(self) -> None:
        """It leads now, and has everything that was committed."""

    def follow(self, leader: str) -> None:
        """Another replica leads, or (with an empty name) nobody that it knows."""

    def commit(self, entry: bytes) -> None:
        """The next entry."""


class AgreedLog:
    """See the module. ``hosts`` hold the replicas; ``changes`` counts leaders."""

    def __init__(self, world: World, hosts: list[Host], commit_s: float, election_s: float) -> None:
        self.hosts = hosts
        self.entries: list[bytes] = []
        self.leader: Host | None = None
        self.changes = 0
        self._world = world
        self._commit_s = commit_s
        self._election_s = election_s
        self._replicas: dict[int, Replica] = {}
        self._applied: dict[int, int] = {}
        self._pending: list[bytes] = []
        self._term = 0
        self._leaderless_since = 0.0
        world.at(0.0, self._look)

    # --- for replicas ----------------------------------------------------------------------------------------------------

    def attach(self, replica: Replica) -> None:
        """A replica's process has begun; it has applied nothing yet."""
        index = replica.host.index
        self._replicas[index] = replica
        self._applied[index] = 0
        self._catch_up(replica.host)
        if replica.host is self.leader:
            self._lose_leader()  # it led before it was started again

    def propose(self, replica: Replica, entry: bytes) -> None:
        """The leader's next entry; committed after a round trip, unless it leads no more by then."""
        if replica.host is not self.leader:
            return
        term = self._term
        self._pending.append(entry)

        def commit() -> None:
            if self._term == term and self._pending:
                if not self._reaches_majority(replica.host):
                    self._world.at(self._world.now + self._delay_s(replica.host), commit)
                    return
                self.entries.append(self._pending.pop(0))
                self._tell(replica.host)

        self._world.at(self._world.now + self._delay_s(replica.host), commit)

    def confirm(self, replica: Replica, confirmed: Callable[[], None]) -> None:
        """Call when it is certain that this replica led after now, and has applied all that was committed."""
        term, target = self._term, len(self.entries)
        if replica.host is not self.leader:
            return

        def check() -> None:
            host = replica.host
            if self._term != term or not host.running or self._replicas.get(host.index) is not replica:
                return
            if self._reaches_majority(host) and self._applied[host.index] >= target:
                confirmed()

        self._world.at(self._world.now + self._delay_s(replica.host), check)

    # --- how it goes -----------------------------------------------------------------------------------------------------

    @property
    def majority(self) -> int:
        return len(self.hosts) // 2 + 1

    def can_work(self) -> bool:
        """Whether there is, or could be, a leader."""
        return any(host.running and self._reaches_majority(host) for host in self.hosts)

    def _delay_s(self, host: Host) -> float:
        network = self._world.network
        trips = sorted(
            network.one_way_ms(host.index, other.index) + network.one_way_ms(other.index, host.index)
            for other in self.hosts
            if other is not host
        )
        needed = self.majority - 1
        trip_ms = trips[needed - 1] if needed else 0.0
        return self._commit_s + (trip_ms / 1000.0 if math.isfinite(trip_ms) else 1.0)

    def _reaches(self, one: Host, other: Host) -> bool:
        network = self._world.network
        there = network.one_way_ms(one.index, other.index)
        return other.running and math.isfinite(there + network.one_way_ms(other.index, one.index))

    def _reaches_majority(self, host: Host) -> bool:
        return 1 + sum(self._reaches(host, other) for other in self.hosts if other is not host) >= self.majority

    def _look(self) -> None:
        now = self._world.now
        leader = self.leader
        if leader is not None and not (leader.running and self._reaches_majority(leader)):
            if leader.running:
                self._follow(leader, "")  # it misses its majority (check quorum)
            self._lose_leader()
        if self.leader is None and now - self._leaderless_since >= self._election_s:
            able = [host for host in self.hosts if host.running and self._reaches_majority(host)]
            if able:
                self._elect(able[int(self._world.rng.random() * len(able))])
        for host in self.hosts:
            if host is self.leader or (self.leader is not None and self._reaches(self.leader, host)):
                self._catch_up(host)
        self._world.at(now + LOOK_S, self._look)

    def _lose_leader(self) -> None:
        self.leader = None
        self._leaderless_since = self._world.now

    def change_leader(self) -> None:
        """Another replica leads, if there is one that can; the former one learns of it a little later."""
        able = [host for host in self.hosts if host is not self.leader and host.running and self._reaches_majority(host)]
        if able:
            self._elect(able[int(self._world.rng.random() * len(able))])

    def _elect(self, host: Host) -> None:
        # Whatever the one before had proposed is in the log up to some point, which nobody but this leader decides.
        kept = int(self._world.rng.random() * (len(self._pending) + 1))
        self.entries += self._pending[:kept]
        self._pending = []
        former = self.leader
        self._term += 1
        self.leader = host
        self.changes += 1
        self._catch_up(host)
        self._replicas[host.index].lead()
        for other in self.hosts:
            if other is host or not other.running or not self._reaches(host, other):
                continue
            late_s = 2.0 * LOOK_S * self._world.rng.random() if other is former else 0.0
            self._world.at(self._world.now + late_s, functools.partial(self._told, other, host, self._term))

    def _told(self, other: Host, leader: Host, term: int) -> None:
        if term == self._term and other.running:
            self._follow(other, leader.name)

    def _follow(self, host: Host, leader: str) -> None:
        replica = self._replicas.get(host.index)
        if replica is not None and _runs(host, replica):
            replica.follow(leader)

    def _tell(self, leader: Host) -> None:
        for host in self.hosts:
            if host is leader or self._reaches(leader, host):
                self._catch_up(host)

    def _catch_up(self, host: Host) -> None:
        replica = self._replicas.get(host.index)
        if replica is None or not host.running or not _runs(host, replica):
            return
        while self._applied[host.index] < len(self.entries):
            entry = self.entries[self._applied[host.index]]
            self._applied[host.index] += 1
            replica.commit(entry)


def _runs(host: Host, process: object) -> bool:
    """Whether this is the host's process now, and not one before."""
    return host.node is process

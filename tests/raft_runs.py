"""Random runs of a replica set: everything that can go wrong, drawn from a seed. ``python -m tests.raft_runs --seeds 10000``.

A run has three or five replicas, clients that publish and read, and faults for some virtual seconds; then everything is well
again, and the set has to come to rest: somebody leads, all have the same log, a new message commits. The properties of Raft
are checked with every step (:mod:`nearcast.simulation.raft_checks`), linearizability in the end.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterable

import msgspec

from nearcast.errors import InvariantViolated, LocalProtocolError, NotLeader, ProposalRefused, RemoteProtocolError
from nearcast.raft.node import RaftNode
from nearcast.simulation.raft_checks import Operation
from tests.raft_cluster import SETTINGS, Cluster, Replica

FAULTS_S = 3.0
REST_S = 8.0
TOPICS = 2


class Client:
    """Publishes and reads, one thing after the other, and gives up on what takes too long."""

    PATIENCE_S = 0.5

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.count = 0
        self.reads = run.rng.choice((0.1, 0.3, 0.9))
        self.operation: Operation | None = None

    def act(self) -> None:
        run = self.run
        cluster = run.cluster
        if cluster.now >= run.end_s:
            return
        operation = self.operation
        if operation is not None and operation.position >= 0:
            self.operation = operation = None
        if operation is not None and cluster.now - operation.began_s < self.PATIENCE_S:
            cluster.at(cluster.now + 0.02, self.act)
            return
        reads = run.rng.random() < self.reads
        self.count += 1
        value = 0 if reads else self.number * 10_000 + self.count
        operation = Operation(run.rng.randrange(TOPICS), cluster.now, value)
        if self._begin(operation, reads):
            self.operation = operation
            cluster.operations.append(operation)
        cluster.at(cluster.now + 0.005 + run.rng.random() * 0.06, self.act)

    def _begin(self, operation: Operation, reads: bool) -> bool:
        run = self.run
        replicas = list(run.cluster.replicas.values())
        leaders = [replica for replica in replicas if replica.alive is not None and replica.alive.leading is not None]
        replica = run.rng.choice(leaders if leaders and run.rng.random() < 0.5 else replicas)
        if reads:
            return replica.read(operation)
        if replica.publish(operation):
            return True
        node = replica.alive
        leader = run.cluster.replicas.get(node.leader) if node is not None else None
        return leader is not None and leader.publish(operation)


class Run:
    """One seed."""

    def __init__(self, seed: int, node_class: type[RaftNode] = RaftNode) -> None:
        self.rng = random.Random(f"{seed}/run")
        rng = self.rng
        self.is_fickle = rng.random() < 0.35
        """Leaders are cut off from most others soon after they are elected, and come back: logs part."""
        count = 5 if self.is_fickle else rng.choice((3, 3, 3, 5))
        write_quorum = 0 if rng.random() < 0.85 else count // 2 + 2
        settings = SETTINGS
        if self.is_fickle and rng.random() < 0.5:
            settings = msgspec.structs.replace(SETTINGS, max_append_bytes=1)  # one entry in each message
        self.is_parting = self.is_fickle and rng.random() < 0.4
        """And nothing else happens: what only partings show is not drowned by other faults."""
        if self.is_parting:
            settings = msgspec.structs.replace(SETTINGS, max_append_bytes=1)
        self.cluster = Cluster(seed, count, settings, min(write_quorum, count), node_class)
        cluster = self.cluster
        cluster.validates = seed % 8 == 0
        cluster.jitter_s = rng.choice((0.0005, 0.002, 0.02))
        cluster.loss = rng.choice((0.0, 0.0, 0.02, 0.1))
        cluster.doubled = rng.choice((0.0, 0.05))
        self.end_s = FAULTS_S
        cluster.held_back = rng.choice((0.0, 0.3, 0.7))
        cluster.late = rng.choice((0.0, 0.02, 0.1))
        self.fault_every_s = rng.choice((0.08, 0.2, 0.5))
        self.joined = 0
        for number in range(1, rng.choice((2, 3, 4)) + 1):
            cluster.at(rng.random() * 0.2, Client(self, number).act)
        for replica in cluster.replicas.values():
            replica.flush_s = rng.choice((0.0005, 0.003, 0.02, 0.1 if self.is_fickle else 0.02))
        if self.is_parting:
            self.end_s = 2.0 * FAULTS_S
            for replica in cluster.replicas.values():
                replica.flush_s = rng.choice((0.003, 0.01, 0.03))
        else:
            cluster.at(0.2 + rng.random() * 0.3, self.fault)
        if self.is_fickle:
            cluster.on_leader.append(self._forsake_leader)
        elif rng.random() < 0.3:
            cluster.on_leader.append(self._hit_leader)

    def go(self) -> None:
        """Raises InvariantViolated."""
        cluster = self.cluster
        try:
            cluster.run(self.end_s)
            self._heal()
            if not cluster.run_until(self._is_at_rest, REST_S):
                raise InvariantViolated(f"no rest {REST_S:g} s after the last fault: {self._states()}")
            cluster.check_history()
        except (LocalProtocolError, RemoteProtocolError) as error:
            raise InvariantViolated(str(error)) from error

    # --- faults ---------------------------------------------------------------------------------------------------------

    def fault(self) -> None:
        cluster, rng = self.cluster, self.rng
        if cluster.now >= self.end_s:
            return
        cluster.at(cluster.now + self.fault_every_s * (0.3 + 1.4 * rng.random()), self.fault)
        replica = rng.choice(list(cluster.replicas.values()))
        leader = cluster.leader()
        if leader is not None and rng.random() < 0.4:
            replica = leader
        draw = rng.random()
        if draw < 0.25:
            self._crash(replica, rng.random() < 0.7)
        elif draw < 0.30:
            for other in list(cluster.replicas.values()):
                self._crash(other, rng.random() < 0.7)
        elif draw < 0.50:
            self._cut(replica)
        elif draw < 0.57:
            self._pause(replica)
        elif draw < 0.64:
            replica.set_rate(rng.choice((0.5, 0.75, 0.95, 1.0, 1.05, 1.25, 2.0)))
        elif draw < 0.74:
            cluster.compact(replica, rng.randrange(4))
        elif draw < 0.82:
            self._transfer(replica)
        elif draw < 0.88:
            replica.priority = rng.randrange(3)
            if replica.alive is not None:
                replica.alive.set_priority(replica.priority, replica.now)
        else:
            self._change(leader)

    def _crash(self, replica: Replica, power_cut: bool) -> None:
        if self.cluster.now >= self.end_s:
            return
        replica.crash(power_cut)
        cluster = self.cluster
        if self.rng.random() < 0.3:  # the others notice at once that its links broke
            for other in cluster.replicas.values():
                node = other.alive
                if node is not None:
                    node.unreachable(replica.number, other.now)
                    other.drive()
        cluster.at(cluster.now + self.rng.random() * self.rng.choice((0.05, 0.5)), replica.start)

    def _cut(self, replica: Replica) -> None:
        cluster, rng = self.cluster, self.rng
        everybody = list(cluster.replicas)
        leader = cluster.leader()
        if leader is not None and rng.random() < 0.3:
            inside = {leader.number}
            if rng.random() < 0.5:
                leader.set_rate(0.5)  # it takes longer to notice than the others
        elif rng.random() < 0.5:
            inside = {replica.number}
        else:
            inside = set(rng.sample(everybody, rng.randrange(1, len(everybody))))
        both_ways = rng.random() < 0.7
        cut = set()
        for one in inside:
            for other in everybody:
                if other not in inside:
                    cut.add((one, other))
                    if both_ways:
                        cut.add((other, one))
        cluster.cuts |= cut
        cluster.at(cluster.now + rng.random() * rng.choice((0.2, 0.8, 1.5)), lambda: cluster.cuts.difference_update(cut))

    def _pause(self, replica: Replica) -> None:
        if replica.alive is not None:
            replica.paused = True
            self.cluster.at(self.cluster.now + self.rng.random() * 0.6, replica.resume)

    def _transfer(self, replica: Replica) -> None:
        node = replica.alive
        if node is not None and node.leading is not None:
            others = [number for number in node.view.configuration.voters if number != node.id]
            if others:
                try:
                    node.transfer(self.rng.choice(others), replica.now)
                except ProposalRefused:
                    return
                replica.drive()

    def _change(self, leader: Replica | None) -> None:
        """Replicas come, catch up, vote, and go."""
        node = leader.alive if leader is not None else None
        if leader is None or node is None or node.leading is None:
            return
        cluster, rng = self.cluster, self.rng
        configuration = node.view.configuration
        try:
            if configuration.learners and rng.random() < 0.7:
                node.change(configuration.with_voter(rng.choice(configuration.learners)), leader.now)
            elif len(configuration.voters) > 2 and rng.random() < 0.5:
                node.change(configuration.without(rng.choice(configuration.replicas)), leader.now)
            elif len(configuration.replicas) < 6:
                gone = [
                    number
                    for number, replica in cluster.replicas.items()
                    if number not in configuration.replicas and replica.node is not None
                ]
                joining = rng.choice(gone) if gone else cluster.join().number
                node.change(configuration.with_learner(joining), leader.now)
        except (ProposalRefused, NotLeader):
            return
        leader.drive()

    def _hit_leader(self, replica: Replica) -> None:
        """Leaders die young: what they have of earlier terms and of their own is on some disks only."""
        if self.cluster.now < self.end_s and self.rng.random() < 0.5:
            starts = replica.starts

            def hit() -> None:
                if replica.starts == starts and self.cluster.now < self.end_s:
                    self._crash(replica, True)

            self.cluster.at(self.cluster.now + self.rng.random() * 0.02, hit)

    def _forsake_leader(self, replica: Replica) -> None:
        """Raft, figure 8: a leader reaches a few others, or none, and is out of reach before anything commits."""
        cluster, rng = self.cluster, self.rng
        if cluster.now >= self.end_s or rng.random() < 0.2:
            return
        others = [number for number in cluster.replicas if number != replica.number]
        few = set(rng.sample(others, min(rng.choice((0, 1, 1, 2)), len(others))))
        cut = {pair for other in others if other not in few for pair in ((replica.number, other), (other, replica.number))}

        def forsake() -> None:
            if cluster.now < self.end_s:
                cluster.cuts |= cut
                if rng.random() < 0.5:
                    cluster.at(cluster.now + rng.random() * 0.2, lambda: self._crash(replica, rng.random() < 0.7))
                cluster.at(cluster.now + 0.1 + rng.random() * 0.8, lambda: cluster.cuts.difference_update(cut))

        cluster.at(cluster.now + rng.random() * rng.choice((0.002, 0.02, 0.1)), forsake)

    # --- the end --------------------------------------------------------------------------------------------------------

    def _heal(self) -> None:
        cluster = self.cluster
        cluster.cuts.clear()
        cluster.loss = cluster.doubled = cluster.late = cluster.held_back = 0.0
        cluster.jitter_s = 0.001
        for replica in list(cluster.replicas.values()):
            if replica.paused:
                replica.resume()
            replica.start()

    def _is_at_rest(self) -> bool:
        cluster = self.cluster
        leader = cluster.leader()
        if leader is None or leader.node is None or not leader.node.leading or not leader.node.leading.is_settled:
            return False
        configuration = leader.node.view.configuration
        if leader.node.view.configuration_index > leader.node.commit:
            return False
        for number in configuration.replicas:
            node = cluster.replicas[number].node
            if node is None or node.term != leader.node.term or node.commit != leader.node.view.last_index:
                return False
        return True

    def _states(self) -> str:
        return "; ".join(
            f"{replica.number}: term {node.term} role {node.role} commit {node.commit} of {node.view.last_index}"
            if (node := replica.node) is not None
            else f"{replica.number}: down"
            for replica in self.cluster.replicas.values()
        )


def failures(seeds: Iterable[int], node_class: type[RaftNode] = RaftNode) -> Iterable[tuple[int, str]]:
    """Seeds that break something, and what."""
    for seed in seeds:
        try:
            Run(seed, node_class).go()
        except InvariantViolated as violation:
            yield seed, violation.message


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000, help="how many runs")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--trace", action="store_true", help="print every message of the runs")
    options = parser.parse_args()
    began = time.perf_counter()
    failed = 0
    figures = dict.fromkeys(("operations", "answered", "committed", "terms", "messages"), 0)
    for seed in range(options.first, options.first + options.seeds):
        run = Run(seed)
        if options.trace:
            run.cluster.trace = []
        try:
            run.go()
        except InvariantViolated as violation:
            failed += 1
            print(f"seed {seed}, {run.cluster.now:.6f} s: {violation.message}")  # noqa: T201
        for line in run.cluster.trace or ():
            print(line)  # noqa: T201
        figures["operations"] += len(run.cluster.operations)
        figures["answered"] += sum(operation.position >= 0 for operation in run.cluster.operations)
        figures["committed"] += run.cluster.safety.commit
        figures["terms"] += len(run.cluster.safety.leaders)
        figures["messages"] += run.cluster.sent
    took_s = time.perf_counter() - began
    text = ", ".join(f"{value:,} {name}" for name, value in figures.items())
    print(f"{options.seeds} runs in {took_s:.0f} s, {failed} failed: {text}")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""A replica set in virtual time, light enough for ten thousand runs: replicas, their disks, the network, clients and bad luck.

Beside the full simulator (``nearcast simulate raft``), which has real topologies and the machinery to replay and shrink, this
one has a heap of callbacks and nothing else, and one run takes milliseconds. The replicas are the shipped core, on:

- a disk that flushes when asked to and takes its time, several Readys at once; a power cut keeps an arbitrary beginning of
  what was not flushed, of the log and of the hard state independently, torn within an append;
- a network that delays, loses, doubles and reorders messages, and is cut in any direction;
- clocks of their own that run up to a quarter too fast or too slow.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

from nearcast.errors import InvariantViolated, NotLeader, ProposalRefused
from nearcast.raft.configuration import NOBODY, Configuration
from nearcast.raft.entries import CONFIGURATION, DATA, Entry, HardState, Snapshot
from nearcast.raft.messages import InstallSnapshot, Message, decode
from nearcast.raft.node import LEADER, RaftNode
from nearcast.raft.ready import Ready
from nearcast.raft.settings import RaftSettings
from nearcast.raft.storage import MemoryLog
from nearcast.simulation.raft_checks import Operation, Safety, check_linearizable

SETTINGS = RaftSettings(
    heartbeat_interval_seconds=0.04,
    election_timeout_seconds=0.18,
    max_append_bytes=64,
    max_inflight_bytes=256,
    max_inflight_messages=8,
    tail_bytes=128,
    handover_delay_seconds=0.3,
    max_handover_delay_seconds=2.0,
    caught_up_bytes=64,
)
"""Small sizes, so that windows close, tails are too short, and replicas need snapshots."""


class Disk:
    """What one replica has on disk, and what it has only written."""

    def __init__(self, configuration: Configuration) -> None:
        self.log = MemoryLog(configuration)
        """As the process sees it."""
        self.durable = MemoryLog(configuration)
        """As a power cut would leave it, at least."""
        self._log_changes: list[tuple[int, list[Entry], Snapshot | None]] = []
        self._hard_states: list[tuple[int, HardState]] = []
        self._operations = 0

    def write(self, ready: Ready) -> None:
        self._operations += 1
        if ready.snapshot is not None:
            self.log.install(ready.snapshot)
            self._log_changes.append((self._operations, [], ready.snapshot))
        if ready.hard_state is not None:
            self.log.hard_state = ready.hard_state
            self._hard_states.append((self._operations, ready.hard_state))
        if ready.entries:
            self.log.append(ready.entries)
            self._log_changes.append((self._operations, ready.entries, None))

    @property
    def operations(self) -> int:
        return self._operations

    def flushed(self, operations: int) -> None:
        """Everything up to this operation is safe."""
        while self._log_changes and self._log_changes[0][0] <= operations:
            _, entries, snapshot = self._log_changes.pop(0)
            self._keep(entries, snapshot)
        while self._hard_states and self._hard_states[0][0] <= operations:
            self.durable.hard_state = self._hard_states.pop(0)[1]

    def compact(self, snapshot: Snapshot) -> None:
        """Snapshots are flushed before anything is dropped for them."""
        self.flushed(self._operations)
        self.log.compact(snapshot)
        self.durable.compact(snapshot)

    def restart(self, rng: random.Random, power_cut: bool) -> None:
        """The process is gone, and with a power cut some of what was not flushed."""
        if power_cut:
            kept = rng.randrange(len(self._log_changes) + 1)
            for _, entries, snapshot in self._log_changes[:kept]:
                self._keep(entries, snapshot)
            if kept < len(self._log_changes):
                entries = self._log_changes[kept][1]
                self._keep(entries[: rng.randrange(len(entries) + 1)], None)
            for _, hard_state in self._hard_states[: rng.randrange(len(self._hard_states) + 1)]:
                self.durable.hard_state = hard_state
        else:
            self.flushed(self._operations)
        self._log_changes = []
        self._hard_states = []
        durable = self.durable
        self.log = MemoryLog()
        self.log.terms = durable.terms.copy()
        self.log.kept = durable.kept.copy()
        self.log.configurations = durable.configurations.copy()
        self.log.latest_snapshot = durable.latest_snapshot
        self.log.hard_state = durable.hard_state

    def _keep(self, entries: list[Entry], snapshot: Snapshot | None) -> None:
        if snapshot is not None:
            self.durable.install(snapshot)
        self.durable.append(entries)


class Replica:
    """A process on a disk."""

    def __init__(self, cluster: Cluster, number: int, configuration: Configuration) -> None:
        self.cluster = cluster
        self.number = number
        self.disk = Disk(configuration)
        self.node: RaftNode | None = None
        self.starts = 0
        self.paused = False
        self.flush_s = 0.002
        self.priority = 0
        self.applied = 0
        self.topics: dict[int, list[int]] = {}
        self.proposed: dict[int, tuple[int, Operation]] = {}
        """Index to term and operation."""
        self.reading: dict[int, tuple[int, Operation]] = {}
        """Token to index (0: not known yet) and operation."""
        self._clock = (0.0, 0.0, 1.0)
        self._tick_s = -1.0
        self._flushing = False
        self._flush_wanted = 0
        self._queued: list[Callable[[], None]] = []
        self._led_term = 0

    @property
    def now(self) -> float:
        anchor, own, rate = self._clock
        return own + (self.cluster.now - anchor) * rate

    def set_rate(self, rate: float) -> None:
        self._clock = (self.cluster.now, self.now, rate)
        self._tick_s = -1.0
        if self.node is not None:
            self.drive()

    @property
    def alive(self) -> RaftNode | None:
        """The node, while it can do something."""
        return None if self.paused else self.node

    def start(self) -> None:
        if self.node is not None:
            return
        self.starts += 1
        cluster = self.cluster
        self._clock = (cluster.now, 0.0, self._clock[2])
        log = self.disk.log
        self.node = cluster.make_node(self.number, log, self.now)
        self.node.set_priority(self.priority, self.now)
        base = log.terms.base_index
        self.topics = cluster.state_at(base)
        self.applied = base
        self._tick_s = -1.0
        self.apply(self.node.commit)
        self.drive()

    def crash(self, power_cut: bool) -> None:
        if self.node is None:
            return
        self.node = None
        self.paused = False
        self._queued = []
        self.proposed = {}
        self.reading = {}
        self._flushing = False
        self._flush_wanted = 0
        self.starts += 1
        self.disk.restart(self.cluster.rng, power_cut)

    def resume(self) -> None:
        self.paused = False
        queued, self._queued = self._queued, []
        for action in queued:
            action()

    def do(self, action: Callable[[], None]) -> None:
        """Something happens to the process: now, or when it goes on."""
        if self.paused:
            self._queued.append(action)
        elif self.node is not None:
            action()

    def receive(self, message: Message) -> None:
        if self.paused:
            self._queued.append(lambda: self.receive(message))
        elif self.node is not None:
            self.node.step(message, self.now)
            self.drive()

    def drive(self) -> None:
        """Do what the node wants, as the contract says."""
        node = self.node
        cluster = self.cluster
        while node is not None and (ready := node.ready()) is not None:
            if ready.entries:
                previous = node.view.term_of(ready.entries[0].index - 1)
                cluster.safety.wrote(self.number, ready.entries, previous)
            if ready.must_sync:
                self.disk.write(ready)
            for message in ready.messages:
                cluster.send(message)
            if ready.snapshot is not None:
                self.applied = ready.snapshot.index
                self.topics = cluster.state_at(ready.snapshot.index)
            if node.leading is not None and self._led_term != node.term:
                self._led_term = node.term
                log = self.disk.log
                terms = {entry.index: entry.term for entry in log.kept}
                cluster.safety.elected(self.number, node.term, terms, log.first_index)
                cluster.led(self)
            self.apply(ready.commit)
            for read in ready.reads:
                _, operation = self.reading[read.token]
                self.reading[read.token] = (read.index, operation)
            for token in ready.failed_reads:
                self.reading.pop(token, None)
            node.advance()
            if ready.must_sync:
                self._flush(ready.number)
        if node is not None:
            self._answer_reads()
            if cluster.validates:
                node.validate()
            self._plan_tick(node)

    def apply(self, commit: int) -> None:
        log = self.disk.log
        while self.applied < commit:
            self.applied += 1
            entry = log.entry(self.applied)
            if self.cluster.safety.commits(self.number, entry):
                self.cluster.first_committed(self, entry)
            position = 0
            if entry.kind == DATA:
                topic, value = divmod(int.from_bytes(entry.payload()[:8], "little"), 1 << 32)
                content = self.topics.setdefault(topic, [])
                content.append(value)
                position = len(content)
            waiting = self.proposed.pop(self.applied, None)
            if waiting is not None and waiting[0] == entry.term:
                operation = waiting[1]
                operation.position = position
                operation.ended_s = self.cluster.now

    def publish(self, operation: Operation) -> bool:
        node = self.alive
        if node is None:
            return False
        data = (operation.topic << 32 | operation.value).to_bytes(8, "little")
        try:
            index = node.propose([data, b"." * (operation.value % 50)], self.now)
        except (NotLeader, ProposalRefused):
            return False
        self.proposed[index] = (node.term, operation)
        self.cluster.at(self.cluster.now, lambda: self.do(self.drive))
        return True

    def read(self, operation: Operation) -> bool:
        node = self.alive
        if node is None:
            return False
        self.cluster.tokens += 1
        token = self.cluster.tokens
        try:
            node.read(token, self.now)
        except (NotLeader, ProposalRefused):
            return False
        self.reading[token] = (0, operation)
        self.drive()
        return True

    def _answer_reads(self) -> None:
        for token, (index, operation) in list(self.reading.items()):
            if 0 < index <= self.applied:
                del self.reading[token]
                operation.position = len(self.topics.get(operation.topic, []))
                operation.ended_s = self.cluster.now

    def _flush(self, number: int) -> None:
        self._flush_wanted = number
        if self._flushing:
            return
        self._flushing = True
        operations = self.disk.operations
        starts = self.starts

        def flushed() -> None:
            if self.starts != starts:
                return
            self.disk.flushed(operations)
            self._flushing = False
            self.do(persisted)
            if self._flush_wanted > number and self.starts == starts:
                self._flush(self._flush_wanted)

        def persisted() -> None:
            if self.starts == starts and self.node is not None:
                self.node.persisted(number, self.now)
                self.drive()

        cluster = self.cluster
        took_s = self.flush_s * (0.5 + cluster.rng.random())
        if cluster.rng.random() < 0.02:
            took_s *= 20.0
        cluster.at(cluster.now + took_s, flushed)

    def _plan_tick(self, node: RaftNode) -> None:
        anchor, own, rate = self._clock
        when = max(anchor + (node.next_deadline() - own) / rate + 1e-9, self.cluster.now)
        if self._tick_s >= self.cluster.now and self._tick_s <= when:
            return
        self._tick_s = when
        starts = self.starts

        def tick() -> None:
            if self.starts == starts and self._tick_s == when:
                self._tick_s = -1.0
                self.do(ticked)

        def ticked() -> None:
            if self.starts == starts and self.node is not None:
                self.node.tick(self.now)
                self.drive()

        self.cluster.at(when, tick)


class Cluster:
    """See the module."""

    def __init__(
        self,
        seed: int,
        replicas: int = 3,
        settings: RaftSettings = SETTINGS,
        write_quorum: int = 0,
        node_class: type[RaftNode] = RaftNode,
    ) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.settings = settings
        self.now = 0.0
        self.safety = Safety()
        self.node_class = node_class
        self.tokens = 0
        self.validates = True
        self.delay_s = 0.001
        self.jitter_s = 0.001
        self.loss = 0.0
        self.doubled = 0.0
        self.late = 0.0
        """Share of messages of which another copy comes up to two seconds later."""
        self.held_back = 0.0
        """Share of messages over a cut link that come after all, up to two seconds later, as a stream's do."""
        self.cuts: set[tuple[int, int]] = set()
        self.operations: list[Operation] = []
        self.sent = 0
        self.on_leader: list[Callable[[Replica], None]] = []
        self.trace: list[str] | None = None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._events = 0
        self._states: dict[int, dict[int, list[int]]] = {0: {}}
        configuration = Configuration(tuple(range(1, replicas + 1)), (), write_quorum)
        self.replicas: dict[int, Replica] = {}
        for number in configuration.voters:
            self.replicas[number] = Replica(self, number, configuration)
        for replica in self.replicas.values():
            replica.start()

    def make_node(self, number: int, log: MemoryLog, now: float) -> RaftNode:
        rng = random.Random(self.rng.random())
        return self.node_class(number, log, self.settings, rng, now)

    def join(self) -> Replica:
        """A machine that belongs to no set yet."""
        number = max(self.replicas) + 1
        replica = self.replicas[number] = Replica(self, number, NOBODY)
        replica.start()
        return replica

    def at(self, when: float, action: Callable[[], None]) -> None:
        self._events += 1
        heapq.heappush(self._heap, (when, self._events, action))

    def run(self, until: float) -> None:
        heap = self._heap
        while heap and heap[0][0] <= until:
            when, _, action = heapq.heappop(heap)
            self.now = max(self.now, when)
            action()
        self.now = until

    def run_until(self, holds: Callable[[], bool], at_most_s: float = 10.0) -> bool:
        end = self.now + at_most_s
        heap = self._heap
        while not holds():
            if not heap or heap[0][0] > end:
                return False
            when, _, action = heapq.heappop(heap)
            self.now = max(self.now, when)
            action()
        return True

    def send(self, message: Message) -> None:
        self.sent += 1
        rng = self.rng
        if self.trace is not None:
            self.trace.append(f"{self.now:9.6f} {message}")
        if self.sent % 32 == 0:
            message = decode(b"".join(message.encode()))
        target = self.replicas.get(message.target)
        is_lost = target is None or (message.source, message.target) in self.cuts or rng.random() < self.loss
        if isinstance(message, InstallSnapshot):
            self._bring_snapshot(message, target, is_lost)
            return
        if is_lost or target is None:
            if target is not None and rng.random() < self.held_back:
                self.at(self.now + rng.random() * 2.0, lambda: target.receive(message))
            return
        self.at(self.now + self.delay_s + rng.random() * self.jitter_s, lambda: target.receive(message))
        if self.doubled and rng.random() < self.doubled:
            self.at(self.now + self.delay_s + rng.random() * self.jitter_s * 20, lambda: target.receive(message))
        if self.late and rng.random() < self.late:
            self.at(self.now + rng.random() * 2.0, lambda: target.receive(message))

    def _bring_snapshot(self, message: InstallSnapshot, target: Replica | None, is_lost: bool) -> None:
        source = self.replicas[message.source]
        starts = source.starts

        def arrived() -> None:
            if target is not None and not is_lost:
                target.receive(message)

            def told() -> None:
                if source.starts == starts and source.node is not None:
                    source.node.snapshot_sent(message.target, not is_lost, source.now)
                    source.drive()

            source.do(told)

        self.at(self.now + 5 * self.delay_s, arrived)

    def leader(self) -> Replica | None:
        """Who leads in the highest term, as far as it knows."""
        best: Replica | None = None
        for replica in self.replicas.values():
            node = replica.node
            if node is not None and node.role == LEADER and (best is None or best.node is None or node.term > best.node.term):
                best = replica
        return best

    def led(self, replica: Replica) -> None:
        for listener in self.on_leader:
            listener(replica)

    def first_committed(self, replica: Replica, entry: Entry) -> None:
        """For the first time, anywhere: then enough disks must have it, or a snapshot with it."""
        node = replica.node
        if node is None or node.leading is None:
            return
        configuration = node.view.configuration_at(entry.index) if entry.kind == CONFIGURATION else node.view.configuration
        have = 0
        for number in configuration.voters:
            other = self.replicas[number]
            durable = other.disk.durable
            have += durable.terms.base_index >= entry.index or durable.terms.term_of(entry.index) == entry.term
        if have < configuration.commit_quorum:
            raise InvariantViolated(f"replica {replica.number} commits {entry}, which {have} disks have")

    def state_at(self, index: int) -> dict[int, list[int]]:
        """Topics as they are behind an entry that somebody committed."""
        topics: dict[int, list[int]] = {}
        for entry in self.safety.committed[:index]:
            if entry.kind == DATA:
                topic, value = divmod(int.from_bytes(entry.payload()[:8], "little"), 1 << 32)
                topics.setdefault(topic, []).append(value)
        return topics

    def compact(self, replica: Replica, keep: int) -> None:
        """Drop the beginning of a replica's log."""
        node = replica.alive
        if node is None:
            return
        index = min(node.commit, replica.applied, node.view.written_index) - keep
        if index > node.view.terms.base_index:
            term = node.view.term_of(index)
            snapshot = Snapshot(index, term, node.view.configuration_at(index), b"state %d" % index)
            replica.disk.compact(snapshot)
            node.compacted(index)

    def check_history(self) -> None:
        check_linearizable(self.operations, self.state_at(self.safety.commit))

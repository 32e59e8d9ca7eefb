"""Replicas driven by hand, from a text: what they write, send and take as committed is the text's other half.

A transcript is a file of commands, each followed by ``----`` and what came of it. ``NEARCAST_REWRITE=1 python
-m pytest tests/transcripts`` writes the second halves anew; read the difference before you commit it. Commands::

    set 3 [learners=4] [quorum=3] [outside=5]   replicas 1, 2, 3; learner 4; 5 runs and belongs to nothing yet
    pass MS                                     time passes; nobody is told
    tick N | due N                              replica N looks at the clock; at the moment that it asked for
    beat N TIMES                                due and settle, so many times, without a word
    ready N                                     replica N's work: written and sent, not flushed
    flush N                                     replica N's disk has all that was written
    deliver A->B | deliver                      what A sent to B, or all that was sent, arrives, in order
    drop A->B | drop                            it does not
    settle [without N...]                       ready, flush and deliver, until nothing happens; N hear nothing and say nothing
    propose N TEXT | read N TOKEN | transfer N TO | priority N P | unreachable N OTHER
    change N voters=1,2 [learners=3]
    compact N INDEX                             replica N drops its log up to there, for a snapshot
    cut N                                       power: replica N loses what is not flushed; then it starts again
    state                                       everybody's
"""

from __future__ import annotations

import random

from nearcast.errors import NearcastError
from nearcast.raft.configuration import NOBODY, Configuration
from nearcast.raft.entries import Entry, Snapshot
from nearcast.raft.messages import InstallSnapshot, Message, decode
from nearcast.raft.node import ROLES, RaftNode
from nearcast.raft.ready import Ready
from nearcast.raft.settings import RaftSettings
from tests.raft_cluster import Disk


class Machine:
    """One replica and its disk."""

    def __init__(self, number: int, configuration: Configuration) -> None:
        self.number = number
        self.disk = Disk(configuration)
        self.written = 0
        self.node = self.start(0.0)

    def start(self, now: float) -> RaftNode:
        self.written = 0
        self.node = RaftNode(self.number, self.disk.log, RaftSettings(), random.Random(self.number), now)
        return self.node


class Script:
    """See the module."""

    def __init__(self) -> None:
        self.now = 0.0
        self.machines: dict[int, Machine] = {}
        self.network: list[Message] = []
        self.output: list[str] = []

    def run(self, text: str) -> str:
        """All commands of a block; returns what came of them."""
        self.output = []
        for line in text.splitlines():
            command, *words = line.partition("#")[0].split()
            try:
                getattr(self, f"_{command}")(*words)
            except NearcastError as error:
                self.output.append(f"{type(error).__name__}: {error}")
        for machine in self.machines.values():
            machine.node.validate()
        return "\n".join(self.output) or "ok"

    def _set(self, count: str, *words: str) -> None:
        options = _options(words)
        voters = tuple(range(1, int(count) + 1))
        configuration = Configuration(voters, options.get("learners", ()), options.get("quorum", (0,))[0])
        for number in configuration.replicas:
            self.machines[number] = Machine(number, configuration)
        for number in options.get("outside", ()):
            self.machines[number] = Machine(number, NOBODY)

    def _pass(self, milliseconds: str) -> None:
        self.now += float(milliseconds) / 1_000.0

    def _tick(self, number: str) -> None:
        self._machine(number).node.tick(self.now)

    def _due(self, number: str) -> None:
        self.now = max(self.now, self._machine(number).node.next_deadline())
        self._tick(number)

    def _beat(self, number: str, times: str) -> None:
        output = self.output
        for _ in range(int(times)):
            self.output = []
            self._due(number)
            self._settle()
        self.output = output

    def _ready(self, number: str) -> None:
        machine = self._machine(number)
        while (ready := machine.node.ready()) is not None:
            self._show(machine, ready)
            if ready.must_sync:
                machine.disk.write(ready)
                machine.written = ready.number
            self.network.extend(ready.messages)
            machine.node.advance()

    def _flush(self, number: str) -> None:
        machine = self._machine(number)
        machine.disk.flushed(machine.disk.operations)
        machine.node.persisted(machine.written, self.now)

    def _deliver(self, way: str = "") -> None:
        arriving = [message for message in self.network if _goes(message, way)]
        self.network = [message for message in self.network if message not in arriving]
        for message in arriving:
            if message.target in self.machines:
                node = self.machines[message.target].node
                node.step(decode(b"".join(message.encode())), self.now)
                if isinstance(message, InstallSnapshot):
                    self.machines[message.source].node.snapshot_sent(message.target, True, self.now)

    def _drop(self, way: str = "") -> None:
        self.network = [message for message in self.network if not _goes(message, way)]

    def _settle(self, *words: str) -> None:
        deaf = set(map(int, words[1:]))
        for _ in range(100):
            lines = len(self.output)
            for machine in self.machines.values():
                if machine.number not in deaf:
                    self._ready(str(machine.number))
                    self._flush(str(machine.number))
            self.network = [message for message in self.network if not {message.source, message.target} & deaf]
            self._deliver()
            if len(self.output) == lines:
                return

    def _propose(self, number: str, text: str) -> None:
        index = self._machine(number).node.propose([text.encode()], self.now)
        self.output.append(f"{number}: entry {index}")

    def _read(self, number: str, token: str) -> None:
        self._machine(number).node.read(int(token), self.now)

    def _transfer(self, number: str, target: str) -> None:
        self._machine(number).node.transfer(int(target), self.now)

    def _priority(self, number: str, priority: str) -> None:
        self._machine(number).node.set_priority(int(priority), self.now)

    def _unreachable(self, number: str, other: str) -> None:
        self._machine(number).node.unreachable(int(other), self.now)

    def _change(self, number: str, *words: str) -> None:
        options = _options(words)
        configuration = Configuration(options["voters"], options.get("learners", ()))
        index = self._machine(number).node.change(configuration, self.now)
        self.output.append(f"{number}: entry {index}: {configuration}")

    def _compact(self, number: str, text: str) -> None:
        machine = self._machine(number)
        index = int(text)
        view = machine.node.view
        snapshot = Snapshot(index, view.term_of(index), view.configuration_at(index), b"up to %d" % index)
        machine.disk.compact(snapshot)
        machine.node.compacted(index)

    def _cut(self, number: str) -> None:
        machine = self._machine(number)
        machine.disk.restart(Nothing(), True)
        machine.start(self.now)

    def _state(self) -> None:
        for machine in self.machines.values():
            node = machine.node
            view = node.view
            text = f"{node.id}: {ROLES[node.role]}, term {node.term}, leader {node.leader}, log "
            text += f"{view.first_index}..{view.last_index}/{view.last_term}, committed {node.commit}"
            self.output.append(f"{text}, on disk {node.durability.persisted_index}")

    def _show(self, machine: Machine, ready: Ready) -> None:
        parts = []
        if ready.snapshot is not None:
            parts.append(f"install {ready.snapshot}")
        if ready.hard_state is not None:
            parts.append(f"store {ready.hard_state}")
        if ready.entries:
            parts.append(f"append {' '.join(map(_entry, ready.entries))}")
        if parts:
            self.output.append(f"{machine.number}: write #{ready.number}: {'; '.join(parts)}")
        for message in ready.messages:
            self.output.append(f"{machine.number}: send {message}")
        for read in ready.reads:
            self.output.append(f"{machine.number}: read {read.token} at {read.index}")
        for token in ready.failed_reads:
            self.output.append(f"{machine.number}: read {token} failed")
        leads = ", leads" if ready.leads else ""
        self.output.append(f"{machine.number}: term {ready.term}, leader {ready.leader}, committed {ready.commit}{leads}")

    def _machine(self, number: str) -> Machine:
        return self.machines[int(number)]


class Nothing(random.Random):
    """A power cut that leaves nothing of what was not flushed."""

    def randrange(self, *bounds: int) -> int:  # type: ignore[override]
        return 0


def _entry(entry: Entry) -> str:
    payload = entry.payload()
    return f"{entry!r} {payload.decode()}" if payload.isalnum() else repr(entry)


def _goes(message: Message, way: str) -> bool:
    source, _, target = way.partition("->")
    return not way or (message.source, message.target) == (int(source), int(target))


def _options(words: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    pairs = (word.partition("=") for word in words)
    return {name: tuple(map(int, value.split(","))) for name, _, value in pairs}

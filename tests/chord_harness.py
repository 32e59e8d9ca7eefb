"""Replica sets on a ring in one process, on virtual time: logs that commit at once, a network that may lose, leaders at will.

The simulator's protocol ``chord`` is the place for faults of all kinds; here a test says exactly what happens.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

from nearcast.chord.contacts import Contact
from nearcast.chord.effects import Confirm, Effect, Finished, Propose, Send
from nearcast.chord.identifiers import distance, identifier
from nearcast.chord.messages import Get, Message, Value, Write, decode, encode
from nearcast.chord.node import RingNode
from nearcast.chord.seeking import Seeker
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import IN

WALL_OFFSET = 1_700_000_000.0


class Ring:
    """Sets, and one client at a broker called ``client``. ``sent`` counts messages by the name of their body."""

    def __init__(self, settings: RingSettings | None = None, seed: int = 1, latency_s: float = 0.005) -> None:
        self.settings = RingSettings() if settings is None else settings
        self.now = 0.0
        self.rng = random.Random(seed)
        self.latency_s = latency_s
        self.nodes: dict[str, RingNode] = {}
        self.sets: dict[str, list[str]] = {}
        self.leaders: dict[str, str] = {}
        self.log: dict[str, int] = {}
        """Entries committed, by set."""
        self.commands: list[tuple[str, bytes]] = []
        self.down: set[str] = set()
        self.gone: set[str] = set()
        """Sets that are not to be on the ring any more."""
        self.loses: Callable[[str, str], bool] = lambda sender, receiver: False
        self.sent: dict[str, int] = {}
        self._queue: list[tuple[float, int, str, str, bytes]] = []
        self._count = itertools.count()
        self._effects: list[Effect] = []
        self.client = Seeker(self.settings, random.Random(f"{seed}/client"), self._effects)
        self.finished: dict[int, object] = {}

    # --- building --------------------------------------------------------------------------------------------------------

    def add(self, name: str, replicas: int = 1) -> RingNode:
        """A set whose first replica leads. It is on no ring yet."""
        brokers = [name] if replicas == 1 else [f"{name}.{number}" for number in range(replicas)]
        contact = Contact(name, tuple(brokers), brokers[0])
        self.sets[name] = brokers
        self.log[name] = 0
        seeds = [Contact(other, tuple(mine)) for other, mine in self.sets.items() if other != name]
        for broker in brokers:
            rng = random.Random(f"{self.rng.random()} {broker}")
            self.nodes[broker] = RingNode(broker, contact, self.settings, rng, self.now, WALL_OFFSET, seeds)
        self.client.meet([contact])
        self.lead(brokers[0])
        return self.nodes[brokers[0]]

    def grow(self, *names: str, replicas: int = 1) -> None:
        """The first one founds a ring if there is none; the others join, and all is settled."""
        for name in names:
            node = self.add(name, replicas)
            if len(self.sets) == 1:
                self.do(node, node.found(self.now))
                for broker in self.sets[name][1:]:
                    self.do(self.nodes[broker], self.nodes[broker].join(self.now))
            else:
                for broker in self.sets[name]:
                    self.do(self.nodes[broker], self.nodes[broker].join(self.now))
        self.until(self.is_whole)

    def lead(self, broker: str) -> None:
        """This replica leads its set from now on, and the others know."""
        node = self.nodes[broker]
        name = node.contact.name
        self.leaders[name] = broker
        for other in self.sets[name]:
            if other != broker and other not in self.down:
                self.do(self.nodes[other], self.nodes[other].follow(broker, self.now))
        self.do(node, node.lead(self.now))

    def kill(self, *names: str) -> None:
        """Brokers, or all brokers of sets, are gone."""
        for name in names:
            self.down.update(self.sets.get(name, [name]))

    # --- running ---------------------------------------------------------------------------------------------------------

    def do(self, node: RingNode | None, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send("client" if node is None else node.broker, effect.broker, effect.message)
            elif isinstance(effect, Propose) and node is not None:
                self._commit(node, effect.entry)
            elif isinstance(effect, Confirm) and node is not None:
                if self.leaders[node.contact.name] == node.broker:
                    self.do(node, node.confirmed(effect.number, self.now))
            elif isinstance(effect, Finished):
                self.finished[effect.number] = effect.answer

    def _commit(self, node: RingNode, entry: bytes) -> None:
        name = node.contact.name
        alive = [broker for broker in self.sets[name] if broker not in self.down]
        if self.leaders[name] != node.broker or 2 * len(alive) <= len(self.sets[name]):
            return
        self.log[name] += 1
        self.commands.append((name, entry))
        for broker in self.sets[name]:
            # The dead have it when they are back: their log is the set's.
            replica = self.nodes[broker]
            self.do(replica, replica.commit(entry, self.now))

    def _send(self, sender: str, receiver: str, message: Message) -> None:
        kind = type(message.body).__name__
        self.sent[kind] = self.sent.get(kind, 0) + 1
        if sender not in self.down and not self.loses(sender, receiver):
            when = self.now + self.latency_s
            heapq.heappush(self._queue, (when, next(self._count), sender, receiver, encode(message)))

    def _deliver(self, sender: str, receiver: str, data: bytes) -> None:
        message = decode(data)
        if receiver == "client":
            self.client.receive(sender, message, self.now)
        elif receiver not in self.down and receiver in self.nodes:
            node = self.nodes[receiver]
            self.do(node, node.receive(sender, message, self.now))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while True:
            self._flush()
            alive = [node for broker, node in self.nodes.items() if broker not in self.down]
            deadline = min((node.next_deadline() for node in alive), default=end)
            deadline = min(deadline, self.client.next_deadline())
            arrival = self._queue[0][0] if self._queue else end
            when = min(deadline, arrival)
            if when >= end:
                break
            self.now = max(self.now, when)
            if arrival <= deadline:
                _, _, sender, receiver, data = heapq.heappop(self._queue)
                self._deliver(sender, receiver, data)
            else:
                self.client.tick(self.now)
                for node in alive:
                    if node.next_deadline() <= self.now:
                        self.do(node, node.tick(self.now))
        self.now = end

    def _flush(self) -> None:
        effects = self._effects[:]
        self._effects.clear()
        self.do(None, effects)

    def until(self, condition: Callable[[], bool], limit_s: float = 120.0) -> float:
        """Let time pass until something holds; returns how long that took."""
        began = self.now
        while not condition():
            assert self.now - began < limit_s, f"not within {limit_s} s: {self.describe()}"
            self.run(0.05)
        return self.now - began

    # --- looking ---------------------------------------------------------------------------------------------------------

    def leading(self) -> list[RingNode]:
        """Leaders of the sets that are alive and on the ring, around the circle."""
        nodes = [self.nodes[broker] for broker in self.leaders.values() if broker not in self.down]
        return sorted((node for node in nodes if node.state.phase == IN), key=lambda node: node.state.place)

    def is_whole(self) -> bool:
        """All that are alive are on the ring, in order, with a lease and a copy."""
        nodes = self.leading()
        if {node.contact.name for node in nodes} != {
            name for name, broker in self.leaders.items() if broker not in self.down and name not in self.gone
        }:
            return False
        for before, node in zip([nodes[-1], *nodes], nodes, strict=False):
            state = node.state
            if len(nodes) > 1 and (
                state.low != before.state.place
                or before.state.successors[0].name != node.contact.name
                or not node.has_lease(self.now)
                or not node.is_settled(state.sequence)
                or state.reserved
            ):
                return False
        return True

    def owner(self, topic: str) -> str:
        """The set whose a topic truly is, of those that are alive and on the ring."""
        key = identifier(topic)
        return min(self.leading(), key=lambda node: distance(key - 1, node.state.place)).contact.name

    def owners(self, topic: str) -> list[str]:
        """All that would answer for a topic now."""
        key = identifier(topic)
        return [node.contact.name for node in self.leading() if node.state.owns(key) and node.has_lease(self.now)]

    def ask(self, body: Get | Write, limit_s: float = 60.0) -> Value:
        """The client's request and its answer."""
        number = self.client.get(body.topic, self.now) if isinstance(body, Get) else self.client.write(body, self.now)
        self.until(lambda: number in self.finished, limit_s)
        answer = self.finished.pop(number)
        assert isinstance(answer, Value), f"no answer to {body}: {self.describe()}"
        return answer

    def describe(self) -> str:
        return "; ".join(
            f"{node.contact.name}: phase {node.state.phase}, lease {node.has_lease(self.now)}, "
            f"before {[one.name for one in node.state.predecessors[:1]]}, behind {[one.name for one in node.state.successors]}"
            for broker in self.leaders.values()
            if broker not in self.down
            for node in [self.nodes[broker]]
        )

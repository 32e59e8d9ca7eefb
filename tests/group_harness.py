"""Brokers that form groups on a network that exists only here: latencies, losses, duplicates, crashes, partitions.

The machines are the shipped ones (:mod:`nearcast.groups.formation`). What others know of leaders is modelled: each broker sees
who led ``board_delay_s`` ago, as announcements at the cloud would tell it, and latencies as they are.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

from nearcast.groups.formation import Formation, LeaderChanged
from nearcast.groups.messages import Message
from nearcast.groups.settings import FormationSettings
from nearcast.groups.stability import disagreeing, unstable
from nearcast.groups.thresholds import Thresholds

Latency = Callable[[str, str], float]


@dataclass
class Weather:
    """What the network does to messages."""

    loss: float = 0.0
    duplicates: float = 0.0
    jitter_s: float = 0.0
    """Up to so much later: more than messages are apart, so they overtake each other."""


class Oracle:
    """What one broker knows of the others."""

    def __init__(self, network: GroupNetwork, name: str) -> None:
        self._network = network
        self._name = name
        self._measured_since: dict[str, float] = {}

    def nearest_leader(self, below_ms: float, now: float, avoid: Collection[str] = ()) -> str:
        network = self._network
        best, best_ms = "", below_ms
        for name in network.announced:
            latency_ms = network.seen_ms(self._name, name)
            if name != self._name and latency_ms < best_ms and name not in avoid:
                best, best_ms = name, latency_ms
        return best

    def latency_ms(self, name: str) -> float:
        network = self._network
        since = self._measured_since.setdefault(name, network.now)
        return network.seen_ms(self._name, name) if network.now >= since + network.measuring_s else math.inf

    def address(self, name: str) -> str:
        return f"{name}:1883"


class GroupNetwork:
    """Brokers, what they send each other, and time."""

    def __init__(
        self, latency: Latency, join_ms: float, leave_ms: float = 0.0, seed: int = 1, settings: FormationSettings | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.now = 100.0
        self.latency = latency
        self.join_ms = join_ms
        self.leave_ms = leave_ms or 1.25 * join_ms
        self.settings = settings or FormationSettings()
        self.weather = Weather()
        self.brokers: dict[str, Formation] = {}
        self.announced: list[str] = []
        self.board_delay_s = 0.05
        self.measuring_s = 0.0
        """How long it takes to know the latency of a broker that nobody asked about before. (Announced leaders are known.)"""
        self.sent: Counter[str] = Counter()
        self.separated: set[tuple[str, str]] = set()
        """Pairs that have no way to each other."""
        self.codec = False
        """Whether messages go through bytes."""
        self._events: list[tuple[float, int, str, str, Message]] = []
        self._count = 0
        self._board_at = self.now
        self.leader_changes = 0
        self.delivered = 0
        self.on_delivery: Callable[[int], None] | None = None
        """Called after each message that arrived, with their number."""
        self._versions: dict[str, int] = {}
        self._deadlines: dict[str, float] = {}
        self._wakes: list[tuple[float, str]] = []

    def add(self, name: str, lcm: float = 1.0) -> Formation:
        thresholds = Thresholds(self.join_ms, self.leave_ms)
        formation = Formation(
            name,
            f"{name}:1883",
            self.settings,
            Oracle(self, name),
            thresholds,
            lcm,
            random.Random(self.rng.getrandbits(64)),
            self.now,
        )
        self.brokers[name] = formation
        self._versions[name] = 0
        self._deadlines[name] = math.inf
        return formation

    def crash(self, name: str, noticed: bool = True) -> None:
        """A broker is gone; the others' links to it break, unless nobody ``noticed``: then only pings tell."""
        del self.brokers[name]
        if noticed:
            for broker in list(self.brokers.values()):
                broker.lost(name, self.now)
                self._collect(broker)

    def lose_link(self, one: str, other: str) -> None:
        """Both hear that there is no link between them any more."""
        for name, lost in ((one, other), (other, one)):
            broker = self.brokers.get(name)
            if broker is not None:
                broker.lost(lost, self.now)
                self._collect(broker)

    def separate(self, one: str, other: str) -> None:
        self.separated.update({(one, other), (other, one)})

    def seen_ms(self, one: str, other: str) -> float:
        if other not in self.brokers or (one, other) in self.separated:
            return math.inf
        return self.latency(one, other)

    def _collect(self, broker: Formation) -> None:
        changes = broker.take_changes()
        self.leader_changes += sum(isinstance(change, LeaderChanged) for change in changes)
        self._check(broker, bool(changes))
        for to, message in broker.take_outgoing():
            self.sent[type(message).__name__] += 1
            if (broker.name, to) in self.separated or self.rng.random() < self.weather.loss:
                continue
            for _ in range(2 if self.rng.random() < self.weather.duplicates else 1):
                self._count += 1
                latency_ms = self.latency(broker.name, to)
                at = self.now + latency_ms / 1e3 + self.rng.random() * self.weather.jitter_s
                content = Message.decode(message.encode()) if self.codec else message
                heapq.heappush(self._events, (at, self._count, broker.name, to, content))
        deadline = broker.next_deadline()
        if deadline != self._deadlines[broker.name]:
            self._deadlines[broker.name] = deadline
            if deadline < math.inf:
                heapq.heappush(self._wakes, (deadline, broker.name))

    def _check(self, broker: Formation, changed: bool) -> None:
        """What holds at every moment, whatever the network does."""
        view = broker.view
        version = self._versions[broker.name]
        assert view.version > version or (view.version == version and not changed), f"{broker.name}: {view} after {version}"
        self._versions[broker.name] = view.version
        assert view.leader == broker.leader
        assert broker.leads == (broker.leader == broker.name)
        assert view.leader in view.members
        assert not broker.leads or broker.name in view.members
        seen = {broker.name}
        above = self.brokers.get(broker.leader)
        while above is not None and not above.leads:
            assert above.name not in seen, f"{sorted(seen)} follow each other, and nobody leads"
            seen.add(above.name)
            above = self.brokers.get(above.leader)

    def run(self, seconds: float) -> None:
        """Lets time pass."""
        until = self.now + seconds
        for broker in self.brokers.values():
            self._collect(broker)  # a test may have done something to it
        while True:
            at = min(self._board_at, self._events[0][0] if self._events else math.inf)
            at = min(at, self._wakes[0][0] if self._wakes else math.inf)
            if at > until:
                break
            self.now = max(self.now, at)
            if self._board_at <= self.now:
                self.announced = [name for name, broker in self.brokers.items() if broker.leads]
                self._board_at = self.now + self.board_delay_s
            elif self._events and self._events[0][0] <= self.now:
                self._deliver(*heapq.heappop(self._events)[2:])
            else:
                self._wake(*heapq.heappop(self._wakes))
        self.now = until

    def _deliver(self, sender: str, to: str, message: Message) -> None:
        receiver = self.brokers.get(to)
        if receiver is not None and sender in self.brokers and (sender, to) not in self.separated:
            receiver.handle(sender, message, self.now)
            self._collect(receiver)
            self.delivered += 1
            if self.on_delivery is not None:
                self.on_delivery(self.delivered)

    def _wake(self, at: float, name: str) -> None:
        broker = self.brokers.get(name)
        if broker is None or self._deadlines[name] != at:
            return  # it has been put off, or the broker is gone
        broker.tick(self.now)
        assert broker.next_deadline() > self.now, f"{name} is not done at {self.now}"
        self._collect(broker)

    def problems(self) -> list[str]:
        """What is not as it should be once all is calm."""
        return unstable(self.brokers.values(), self.seen_ms) + disagreeing(self.brokers.values())

    def settle(self, within_s: float) -> None:
        """Lets time pass until groups are formed and all know it; that must be so in time."""
        until = self.now + within_s
        while self.now < until and self.problems():
            self.run(0.5)
        assert not self.problems()

    def groups(self) -> dict[str, set[str]]:
        """Leaders, and who follows them."""
        found: dict[str, set[str]] = {}
        for broker in self.brokers.values():
            found.setdefault(broker.leader, set()).add(broker.name)
        return found

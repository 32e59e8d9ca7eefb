"""The built-in protocol ``chord``: replica sets on a ring, and clients that read and write the directory on it.

Every host of the topology has a replica of one set, with the :class:`~nearcast.chord.node.RingNode` that ships, and a client.
Messages travel through the simulated network as bytes. What a set agrees on is an
:class:`~nearcast.simulation.agreed_logs.AgreedLog`. A run fails when two sets may answer for one key at one time, when what
clients saw cannot have been one register per topic, and when in the end the ring is not the one that there should be, or
somebody looks up a key and finds another set. Settings:

``replicas``, ``placement``
    Hosts per set (3), and which: ``colocated``, neighbours in the topology, or ``distributed``, as far from each other there
as can be. ``ring``
    Settings of :class:`nearcast.chord.settings.RingSettings`.
``commit_ms``, ``election_s``
    What a commit takes beside the way to a majority (2), and an election (0.6).
``late``
    Sets that join later, one after the other over the run (0); others join from the start.
``topics``, ``operations_hz``
    How many topics there are (200), and how often each client reads or writes one (2).
``leaves_per_minute``, ``losses_per_minute``, ``elections_per_minute``
    How often some set leaves in order, is lost with all its replicas, or gets another leader (0, 0, 0), until ``duration_s``.
``away_s``
    For how long a set leaves or is lost (20).
"""

from __future__ import annotations

import functools
import random
from typing import Any, Literal

import msgspec

from nearcast.chord.contacts import Contact
from nearcast.chord.effects import Confirm, Effect, Finished, Propose, Send
from nearcast.chord.identifiers import identifier
from nearcast.chord.messages import BUSY, DONE, UNCERTAIN, VERSION, Value, Write, decode, encode
from nearcast.chord.node import RingNode
from nearcast.chord.records import Record
from nearcast.chord.seeking import Seeker
from nearcast.chord.settings import RingSettings
from nearcast.chord.state import IN, OUT
from nearcast.errors import ConfigError
from nearcast.scenario.scenario import Scenario
from nearcast.simulation.agreed_logs import AgreedLog
from nearcast.simulation.chord_histories import Began, Ended
from nearcast.simulation.chord_invariants import OneHistory, OneOwner, TrueRing
from nearcast.simulation.hosts import Host, Node
from nearcast.simulation.invariants import Invariant, Protocol
from nearcast.simulation.world import World


class ChordSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    replicas: int = 3
    placement: Literal["colocated", "distributed"] = "colocated"
    ring: dict[str, float] = {}
    commit_ms: float = 2.0
    election_s: float = 0.6
    late: int = 0
    topics: int = 200
    operations_hz: float = 2.0
    leaves_per_minute: float = 0.0
    losses_per_minute: float = 0.0
    elections_per_minute: float = 0.0
    away_s: float = 20.0

    def __post_init__(self) -> None:
        if not 1 <= self.replicas <= 9:
            raise ValueError("`replicas` must be from 1 to 9")
        if not 1 <= self.topics <= 1_000_000 or self.late < 0:
            raise ValueError("`topics` must be from 1 to a million, `late` not negative")
        for field in ("commit_ms", "election_s", "operations_hz", "leaves_per_minute", "losses_per_minute", "away_s"):
            if not 0.0 <= getattr(self, field) <= 1e6:
                raise ValueError(f"`{field}` must be 0 or more, and at most a million")


class Asked(msgspec.Struct):
    """A client's request on its way."""

    number: int
    topic: str
    is_write: bool


class ChordNode(Node):
    """A replica of a set, and a client."""

    def __init__(self, host: Host, ring: Chord, replica_set: ReplicaSet) -> None:
        super().__init__(host)
        self._ring = ring
        self._set = replica_set
        wall_offset = host.wall - host.now
        rng = random.Random(host.rng.random())
        self.node = RingNode(
            host.name, replica_set.contact, ring.ring_settings, rng, host.now, wall_offset, ring.seeds_of(replica_set)
        )
        self._outgoing: list[Effect] = []
        self.seeker = Seeker(ring.ring_settings, rng, self._outgoing)
        self.seeker.meet(ring.seeds_of(None))
        self._wanted = replica_set.wanted
        self._asked: dict[int, Asked] = {}
        self._seen: dict[str, int] = {}
        self._next_at = host.now + host.rng.random()

    # --- what happens ---

    def start(self) -> None:
        self._set.log.attach(self)
        if self._set.wanted:
            self.act(self.node.join(self.host.now))
        else:
            self.act(self.node.leave(self.host.now))  # it may have been asked to, and have died before it was done
        self.host.wake_at(self._next_at)

    def received(self, source: int, message: object) -> None:
        if not isinstance(message, bytes):
            return
        now = self.host.now
        broker = self.host.world.host_at(source).name
        decoded = decode(message)
        if decoded.is_request:
            self.act(self.node.receive(broker, decoded, now))
        else:
            self.act(self.node.receive(broker, decoded, now))
            self.seeker.receive(broker, decoded, now)
            self.act(self._take())

    def woken(self) -> None:
        now = self.host.now
        if self._wanted != self._set.wanted:
            self.want(self._set.wanted)  # it stood still when that was said
        self.act(self.node.tick(now))
        self.seeker.tick(now)
        ring = self._ring
        if now >= self._next_at and ring.settings.operations_hz > 0.0:
            self._next_at = now + (0.5 + self.host.rng.random()) / ring.settings.operations_hz
            if self.host.world.now < ring.ends_s:
                self._operate(now)
        self.act(self._take())

    def lead(self) -> None:
        host, node = self.host, self.node
        self.act(node.lead(host.now))
        if self._set.founds and node.state.phase == OUT and not self._set.has_founded:
            self._set.has_founded = True
            self.act(node.found(host.now))

    def follow(self, leader: str) -> None:
        self.act(self.node.follow(leader, self.host.now))

    def commit(self, entry: bytes) -> None:
        self.act(self.node.commit(entry, self.host.now))

    def want(self, wanted: bool) -> None:
        """Be on the ring, or not."""
        self._wanted = wanted
        node = self.node
        self.act(node.join(self.host.now) if wanted else node.leave(self.host.now))

    # --- what it does ---

    def _take(self) -> list[Effect]:
        effects = self._outgoing[:]
        self._outgoing.clear()
        return effects

    def act(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(effect)
            elif isinstance(effect, Propose):
                self._set.log.propose(self, effect.entry)
            elif isinstance(effect, Confirm):
                self._set.log.confirm(self, functools.partial(self._confirmed, effect.number))
            else:
                self._finished(effect)
        self.host.wake_at(min(self.node.next_deadline(), self.seeker.next_deadline(), self._next_at))

    def _confirmed(self, number: int) -> None:
        self.act(self.node.confirmed(number, self.host.now))

    def _send(self, effect: Send) -> None:
        data = encode(effect.message)
        self._ring.sent += 1
        self._ring.sent_bytes += len(data)
        world = self.host.world
        if world.has_host(effect.broker):
            self.host.send(world.host(effect.broker).index, data, len(data))

    def _operate(self, now: float) -> None:
        ring, rng = self._ring, self.host.rng
        topic = f"topic/{int(rng.random() ** 2 * ring.settings.topics)}"
        ring.operations += 1
        if rng.random() < 0.5:
            expected = self._seen.get(topic, 0)
            epoch = ring.operations
            record = Record(topic, self.host.name, "owned", epoch=epoch, writer=f"{self.host.name} {epoch}")
            number = self.seeker.write(Write(record, VERSION, expected), now)
            self.host.observe(Began(ring.operations, topic, expected))
        else:
            number = self.seeker.get(topic, now)
            self.host.observe(Began(ring.operations, topic, None))
        self._asked[number] = Asked(ring.operations, topic, ring.operations > 0)

    def _finished(self, effect: Finished) -> None:
        asked = self._asked.pop(effect.number)
        value = effect.answer
        if not isinstance(value, Value) or value.outcome in (UNCERTAIN, BUSY):
            self._ring.unanswered += 1
            self._ring.history.abandoned(asked.number)
            return
        record = value.record
        version = 0 if record is None else record.version
        self._seen[asked.topic] = version
        writer = "" if record is None else record.writer
        self.host.observe(Ended(asked.number, version, writer, value.outcome == DONE))


class ReplicaSet:
    """A set, over all processes of its replicas."""

    def __init__(self, name: str, hosts: list[Host], log: AgreedLog) -> None:
        self.contact = Contact(name, tuple(host.name for host in hosts))
        self.hosts = hosts
        self.log = log
        self.wanted = True
        """Whether it is to be on the ring."""
        self.founds = False
        self.has_founded = False
        self.busy = False
        """Whether it is on its way out or in by the run's doing."""

    @property
    def place(self) -> int:
        return identifier(self.contact.name)

    @property
    def leading(self) -> RingNode | None:
        """The leader's node."""
        host = self.log.leader
        return host.node.node if host is not None and host.running and isinstance(host.node, ChordNode) else None

    def want(self, wanted: bool) -> None:
        self.wanted = wanted
        for host in self.hosts:
            if host.running and isinstance(host.node, ChordNode):
                host.node.want(wanted)


class Chord(Protocol):
    """See the module."""

    def __init__(self) -> None:
        self.settings = ChordSettings()
        self.ring_settings = RingSettings()
        self.sets: list[ReplicaSet] = []
        self.operations = self.unanswered = self.sent = self.sent_bytes = 0
        self.ends_s = 0.0
        self.left = self.lost = 0
        self._world: World | None = None
        self.history = OneHistory()
        self._true_ring: TrueRing | None = None

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        try:
            settings = self.settings = msgspec.convert(scenario.settings, ChordSettings)
            self.ring_settings = msgspec.convert(settings.ring, RingSettings)
        except msgspec.ValidationError as error:
            raise ConfigError(f"`settings` of protocol chord: {error}", key="settings") from None
        self._world = world
        self.ends_s = scenario.duration_s
        hosts = world.hosts
        count = len(hosts) // settings.replicas
        if not count:
            raise ConfigError(f"the protocol chord needs at least {settings.replicas} hosts, `settings.replicas`")
        for number in range(count):
            first = number * settings.replicas
            mine = hosts[first : first + settings.replicas] if settings.placement == "colocated" else hosts[number::count]
            log = AgreedLog(world, mine[: settings.replicas], settings.commit_ms / 1000.0, settings.election_s)
            self.sets.append(ReplicaSet(f"set-{number + 1}", mine[: settings.replicas], log))
        self.sets[0].founds = True
        for replica_set in self.sets:
            for host in replica_set.hosts:
                world.place(host.name, functools.partial(ChordNode, ring=self, replica_set=replica_set))
        late = self.sets[count - min(settings.late, count - 1) :] if settings.late else []
        for number, replica_set in enumerate(late):
            replica_set.wanted = False
            when_s = (0.1 + 0.8 * number / len(late)) * scenario.duration_s
            world.at(when_s, functools.partial(replica_set.want, True))
        self._plan(settings.leaves_per_minute, self._let_leave)
        self._plan(settings.losses_per_minute, self._lose)
        self._plan(settings.elections_per_minute, self._change_leader)
        self._true_ring = TrueRing(self, world)
        return [self.history, OneOwner(self), self._true_ring]

    def seeds_of(self, replica_set: ReplicaSet | None) -> list[Contact]:
        """Sets that somebody who begins knows: the first three, and one more."""
        return [one.contact for one in (*self.sets[:3], self.sets[-1]) if one is not replica_set]

    # --- what goes on ----------------------------------------------------------------------------------------------------

    def _plan(self, per_minute: float, action: Any) -> None:
        world = self._world
        if not per_minute or world is None:
            return

        def happen() -> None:
            if world.now < self.ends_s:
                action(self.sets[int(world.rng.random() * len(self.sets))])
                plan()

        def plan() -> None:
            world.at(world.now + world.rng.expovariate(per_minute / 60.0), happen)

        plan()

    def _let_leave(self, replica_set: ReplicaSet) -> None:
        node = replica_set.leading
        if replica_set.busy or node is None or node.state.phase != IN or self._world is None:
            return
        self.left += 1
        replica_set.busy = True
        replica_set.want(False)
        self._world.at(self._world.now + self.settings.away_s, lambda: self._come_back(replica_set))

    def _come_back(self, replica_set: ReplicaSet) -> None:
        replica_set.busy = False
        replica_set.want(True)

    def _lose(self, replica_set: ReplicaSet) -> None:
        """All its replicas lose power."""
        world = self._world
        if replica_set.busy or world is None:
            return
        self.lost += 1
        replica_set.busy = True
        for host in replica_set.hosts:
            host.crash()

        def back() -> None:
            replica_set.busy = False
            for host in replica_set.hosts:
                host.boot()

        world.at(world.now + self.settings.away_s, back)

    def _change_leader(self, replica_set: ReplicaSet) -> None:
        replica_set.log.change_leader()

    def report(self) -> dict[str, Any]:
        leading = [node for one in self.sets if (node := one.leading) is not None]
        history = self.history.history
        lookups = sum(node.seeker.lookups for node in leading)
        return {
            "sets": len(self.sets),
            "on_ring": sum(node.state.phase == IN for node in leading),
            "records": sum(len(node.state.share) for node in leading),
            "operations": self.operations,
            "reads": history.reads,
            "writes": history.writes,
            "conflicts": history.conflicts,
            "unanswered": self.unanswered,
            "leaders": sum(one.log.changes for one in self.sets),
            "left": self.left,
            "lost": self.lost,
            "takeovers": sum(node.takeovers for node in leading),
            "rounds": sum(node.rounds for node in leading),
            "hops_mean": round(sum(node.seeker.hops for node in leading) / lookups, 2) if lookups else 0.0,
            "fingers_mean": round(sum(len(node.fingers) for node in leading) / len(leading), 1) if leading else 0.0,
            **(self._true_ring.figures if self._true_ring is not None else {}),
            "log_entries": sum(len(one.log.entries) for one in self.sets),
            "messages": self.sent,
            "megabytes": round(self.sent_bytes / 1e6, 3),
        }

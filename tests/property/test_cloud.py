"""The way to the cloud under everything that goes wrong: cut connections, crashes of either process, a cloud that forgets.

One leader relays, another one listens, our own engine is the cloud. Bytes are on their way in between and arrive in pieces; a
connection that is cut loses what is on its way. Whoever crashes forgets everything but what a journal would have: the one that
relays what was not confirmed, the one that listens what it was given.
"""

from __future__ import annotations

import random

import pytest

from nearcast.config import EngineSettings, Limits
from nearcast.fabric.identities import Identity
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.publication import build
from tests.unit.fabric.clouds import Leader

SEEDS = range(24)
FILTERS = ("x/#", "x/+", "+/1", "x/1", "x/2", "#")


class Line:
    """A leader's connection: what it and the cloud have said and the other one has not heard."""

    def __init__(self, leader: Leader, connection: Connection) -> None:
        self.leader = leader
        self.connection = connection
        self.up = b""
        self.down = b""


class World:
    """Two leaders and a cloud, and what must be true of them."""

    def __init__(self, seed: int, version: str, crashes: bool) -> None:
        self.rng = random.Random(seed)
        self.version = version
        self.crashes = crashes
        self.now = 0.0
        self.engine = Engine(EngineSettings(limits=Limits(receive_maximum=7)), AllowAll(), None, random.Random(seed), 0.0)
        self.lines: dict[str, Line] = {}
        self.sender = self._start("a")
        self.receiver = self._start("b")
        self.sequence = 0
        #: What the sender's journal has: the messages that are not confirmed, by number.
        self.unconfirmed: dict[int, tuple[str, int]] = {}
        self.tokens_seen = 0
        #: By number: how often the receiver got it.
        self.received: dict[bytes, int] = {}
        #: Numbers that were published to a topic whose subscription the receiver's owner was told of before.
        self.owed: set[bytes] = set()
        self.exactly_once: set[bytes] = set()
        self.version_wanted = 0
        self.placed = False
        self.mark = 0
        self.marks_owed: dict[int, set[bytes]] = {}
        self.seen_by_mark = 0

    def _start(self, name: str) -> Leader:
        leader = Leader(name, cloud_version=self.version)
        leader.cloud._markers._nonce = self.rng.randbytes(8)
        leader.cloud.want(True, self.now)
        return leader

    # --- what happens ---------------------------------------------------------------------------------------------------

    def relay(self) -> None:
        self.sequence += 1
        number = self.sequence
        topic = f"x/{self.rng.randrange(1, 3)}"
        qos = self.rng.randrange(1, 3)
        self.unconfirmed[number] = (topic, qos)
        if qos == 2:
            self.exactly_once.add(b"%d" % number)
        self._give(number)
        if self.placed:
            self.owed.add(b"%d" % number)

    def _give(self, number: int) -> None:
        topic, qos = self.unconfirmed[number]
        publication = build(topic.encode(), b"%d" % number, qos, False)
        self.sender.cloud.relay(publication, 0, Identity("a", 1, number), number, self.now)

    def subscribe(self) -> None:
        """Change what is subscribed to; x/# is always covered once it was placed."""
        wanted = {one: self.rng.randrange(3) for one in self.rng.sample(FILTERS, self.rng.randrange(4))}
        wanted["x/#"] = 2
        self.version_wanted += 1
        self.receiver.set_filters(wanted, self.version_wanted, self.now)

    def send_mark(self) -> None:
        self.mark += 1
        confirmed = {b"%d" % number for number in range(1, self.sequence + 1) if number not in self.unconfirmed}
        self.marks_owed[self.mark] = confirmed & self.owed
        self.receiver.cloud.mark(self.mark, self.now)

    def cut(self, name: str) -> None:
        line = self.lines.pop(name, None)
        if line is not None:
            self.engine.lose(line.connection, self.now)
            line.leader.take()
            line.leader.cloud.lost(self.now)
            line.leader.take()

    def crash_sender(self) -> None:
        self.look()
        self.cut("a")
        self.sender = self._start("a")
        self.tokens_seen = 0
        for number in self.unconfirmed:
            self._give(number)

    def crash_receiver(self) -> None:
        self.look()
        self.cut("b")
        self.receiver = self._start("b")
        self.seen_by_mark = 0
        self.marks_owed.clear()
        self.version_wanted += 1
        self.receiver.set_filters({"x/#": 2}, self.version_wanted, self.now)

    def carry(self) -> None:
        """Some bytes arrive, somewhere."""
        if self.lines:
            line = self.lines[self.rng.choice(sorted(self.lines))]
            self.carry_on(line, self.rng.randrange(1, 400))

    def carry_on(self, line: Line, size: int) -> bool:
        line.up += line.leader.take()
        up, line.up = line.up[:size], line.up[size:]
        if up:
            self.engine.receive(line.connection, up, self.now)
        self.engine.ready()
        for other in self.lines.values():
            other.down += b"".join(other.connection.take()) + b"".join(other.connection.take_held() or [])
        down, line.down = line.down[:size], line.down[size:]
        if down:
            line.leader.cloud.receive(down, self.now)
        if line.connection.closing or (line.leader.cloud.connection is not None and line.leader.cloud.connection.closing):
            self.cut(line.leader.name)
        return bool(up or down)

    def wait(self) -> None:
        self.now += self.rng.random()
        for leader in (self.sender, self.receiver):
            leader.cloud.tick(self.now)
        self.dial()

    def dial(self) -> None:
        for leader in (self.sender, self.receiver):
            if leader.cloud.wants_dial(self.now):
                if self.rng.random() < 0.3:
                    leader.cloud.dial_failed(self.now)
                else:
                    connection = self.engine.open(Peer("leader"), leader, self.now)
                    leader.cloud.opened(leader, self.now)
                    self.lines[leader.name] = Line(leader, connection)

    # --- what is seen ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """What the owners were told goes into their journals."""
        owner = self.receiver.owner
        for _, payload, identity in owner.messages:
            self.received[payload] = self.received.get(payload, 0) + 1
            assert self.version == "3.1.1" or identity is not None
        owner.messages.clear()
        if self.version_wanted in owner.versions:
            self.placed = True
        for token in owner.marks[self.seen_by_mark :]:
            owed = self.marks_owed.pop(token)
            assert owed <= set(self.received), "what the cloud had before the marker is here"
        self.seen_by_mark = len(owner.marks)
        for number, accepted in self.sender.owner.confirmed[self.tokens_seen :]:
            assert accepted
            del self.unconfirmed[number]
        self.tokens_seen = len(self.sender.owner.confirmed)

    def run(self) -> None:
        steps = [self.relay] * 5 + [self.carry] * 25 + [self.wait] * 3 + [self.subscribe, self.send_mark]
        steps += [lambda: self.cut("a"), lambda: self.cut("b")]
        if self.crashes:
            steps += [self.crash_sender, self.crash_receiver]
        self.subscribe()
        for _ in range(400):
            self.rng.choice(steps)()
            self.look()
        self.settle()

    def settle(self) -> None:
        """Nothing goes wrong any more."""
        self.mark += 1
        self.marks_owed[self.mark] = set()
        self.receiver.cloud.mark(self.mark, self.now)
        for _ in range(200):
            busy = True
            while busy:
                busy = False
                for line in list(self.lines.values()):
                    busy |= self.carry_on(line, 100_000)
            self.look()
            if not self.unconfirmed and not self.marks_owed:
                return
            self.now += 1.0
            self.wait()
        raise AssertionError(f"not at rest: {self.unconfirmed} {self.marks_owed}")


@pytest.mark.parametrize("seed", SEEDS)
def test_nothing_is_lost_whatever_breaks(seed: int) -> None:
    world = World(seed, "5", crashes=True)
    world.run()
    assert world.owed <= set(world.received)


@pytest.mark.parametrize("seed", SEEDS[:8])
@pytest.mark.parametrize("version", ["5", "3.1.1"])
def test_without_crashes_the_cloud_gives_each_message_its_own_guarantee(seed: int, version: str) -> None:
    """QoS 2 is exactly once by the protocol itself, before anybody looks at identities."""
    world = World(seed, version, crashes=False)
    world.run()
    assert world.owed <= set(world.received)
    assert [payload for payload, count in world.received.items() if count > 1 and payload in world.exactly_once] == []

"""A toy for the simulator's own tests: a register kept by three replicas, with a bug that only some runs show.

The writer sends every value to all replicas and counts it as written when two have answered; the reader takes the newest of
the first two answers. Two of three always overlap in one, so a value once written is always read: if a replica keeps what it
has acknowledged. With ``flush_first = false`` it answers before its disk has it, and a power cut at the wrong moment, while
another replica is out of reach, brings an old value back.
"""

from __future__ import annotations

from typing import Any

from nearcast.errors import InvariantViolated
from nearcast.scenario.scenario import Scenario
from nearcast.simulation import Host, Invariant, Node, Protocol, World

REPLICAS = 3
QUORUM = 2
FLUSH_EVERY_S = 1.0
WRITE_EVERY_S = 1.0
READ_EVERY_S = 0.2
RETRY_S = 1.5


class Replica(Node):
    """Keeps the newest value in a file; answers a write when it is flushed, or (the bug) at once."""

    def __init__(self, host: Host, flush_first: bool) -> None:
        super().__init__(host)
        self.flush_first = flush_first
        self.value = 0
        self.waiting: dict[int, list[tuple[int, int]]] = {}
        self.token = 0

    def start(self) -> None:
        if self.host.disk.exists("values"):
            lines = self.host.disk.read("values").split(b"\n")
            # The last piece is a torn line, or nothing.
            self.value = max((int(line) for line in lines[:-1]), default=0)
        if not self.flush_first:
            self.host.wake_at(self.host.now + FLUSH_EVERY_S)

    def woken(self) -> None:
        self.host.disk.sync()
        self.host.wake_at(self.host.now + FLUSH_EVERY_S)

    def received(self, source: int, message: object) -> None:
        assert isinstance(message, tuple)
        kind, value = message
        if kind == "read":
            self.host.send(source, ("is", value, self.value), 24)
            return
        if value > self.value:
            self.value = value
            self.host.disk.append("values", b"%d\n" % value)
        if self.flush_first:
            self.token += 1
            self.waiting[self.token] = [(source, value)]
            self.host.disk.sync(self.token)
        else:
            self.host.send(source, ("wrote", value), 16)

    def synced(self, token: int) -> None:
        for source, value in self.waiting.pop(token, ()):
            self.host.send(source, ("wrote", value), 16)


class Writer(Node):
    """Writes 1, 2, 3, ...; the next when two replicas have the one before."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.value = 1
        self.have: set[int] = set()

    def start(self) -> None:
        self.woken()

    def woken(self) -> None:
        for replica in range(REPLICAS):
            self.host.send(replica, ("write", self.value), 16)
        self.host.wake_at(self.host.now + RETRY_S)

    def received(self, source: int, message: object) -> None:
        assert isinstance(message, tuple)
        if message == ("wrote", self.value):
            self.have.add(source)
            if len(self.have) >= QUORUM:
                self.host.observe(("written", self.value))
                self.value += 1
                self.have = set()
                self.host.wake_at(self.host.now + WRITE_EVERY_S)


class Reader(Node):
    """Asks all replicas again and again; what the first two know is the answer."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.asked = 0
        self.answers: dict[int, int] = {}

    def start(self) -> None:
        self.woken()

    def woken(self) -> None:
        self.asked += 1
        self.answers = {}
        self.host.observe(("asks", self.asked))
        for replica in range(REPLICAS):
            self.host.send(replica, ("read", self.asked), 16)
        self.host.wake_at(self.host.now + READ_EVERY_S)

    def received(self, source: int, message: object) -> None:
        assert isinstance(message, tuple)
        _, asked, value = message
        if asked == self.asked and len(self.answers) < QUORUM:
            self.answers[source] = value
            if len(self.answers) == QUORUM:
                self.host.observe(("read", asked, max(self.answers.values()), tuple(self.answers)))


class NothingWrittenIsLost(Invariant):
    """A read that began after a value was written returns it or a newer one."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.written = 0
        self.before: dict[int, int] = {}
        self.reads = 0

    def observed(self, host: Host, fact: object) -> None:
        match fact:
            case ("written", int(value)):
                self.written = max(self.written, value)
            case ("asks", int(number)):
                self.before = {number: self.written}
            case ("read", int(number), int(value), tuple(replicas)):
                self.reads += 1
                if value < self.before[number]:
                    involved = [host, *(self.world.hosts[index] for index in replicas)]
                    raise InvariantViolated(f"{self.before[number]} was written, and {value} was read", involved)


class Register(Protocol):
    """Settings: ``flush_first`` (true is right, false the planted bug)."""

    def __init__(self) -> None:
        self.invariant: NothingWrittenIsLost | None = None

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        flush_first = bool(scenario.settings.get("flush_first", True))
        for number in range(1, REPLICAS + 1):
            world.place(f"replica-{number}", lambda host: Replica(host, flush_first))
        world.place("writer", Writer)
        world.place("reader", Reader)
        self.invariant = NothingWrittenIsLost(world)
        return [self.invariant]

    def report(self) -> dict[str, Any]:
        return {"written": self.invariant.written, "reads": self.invariant.reads} if self.invariant else {}

"""Brokers of a fabric in one process, without sockets: engines, fabrics, and the streams between them, which tests cut and
drain.

Nothing moves unless a test says so (:meth:`Mesh.run`), so every interleaving can be tried.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from nearcast.config import EngineSettings, Limits
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import Link
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.commits import Commits
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine

WALL_OFFSET = 1_700_000_000.0
SECRET = b"a secret that all of them have"


@dataclass(eq=False)
class End:
    """One end of a stream, as a broker's transport."""

    node: Node
    connection: Connection | None = None
    link: Link | None = None
    other: End | None = None
    held_bytes: int = 0
    waits_to_close: bool = False
    inbox: deque[bytes] = field(default_factory=deque)
    received: bytearray = field(default_factory=bytearray)
    closed: bool = False

    def send(self, chunks: list[bytes]) -> None:
        if self.other is not None and not self.closed:
            self.other.inbox.append(b"".join(chunks))

    def close(self) -> None:
        self.closed = True


class Node:
    """One broker."""

    def __init__(self, mesh: Mesh, name: str, settings: FabricSettings, limits: Limits) -> None:
        self.mesh = mesh
        self.name = name
        rng = random.Random(f"{mesh.seed}-{name}")
        self.engine = Engine(EngineSettings(limits=limits), AllowAll(), None, rng, WALL_OFFSET)
        self.commits = Commits(self.engine, lambda: mesh.now, lambda: None, lambda error: None)
        epoch = rng.getrandbits(60)
        self.fabric = Fabric(settings, limits, self.engine, name, epoch, SECRET, b"", rng, mesh.now)
        self.ends: list[End] = []

    def flush(self) -> None:
        self.fabric.settle(self.mesh.now)
        self.commits.flush()

    def client(self) -> End:
        """A client's transport: feed it with :meth:`feed`, read ``received``."""
        theirs = End(self)
        ours = End(self, other=theirs)
        ours.connection = self.engine.open(Peer("test"), ours, self.mesh.now)
        theirs.other = ours
        self.ends.append(ours)
        return theirs

    def feed(self, client: End, data: bytes) -> None:
        """Bytes of a client arrive."""
        assert client.other is not None
        assert client.other.connection is not None
        self.engine.receive(client.other.connection, data, self.mesh.now)
        self.flush()
        while client.inbox:
            client.received += client.inbox.popleft()


class Mesh:
    """Brokers and the links between them."""

    def __init__(self, seed: int = 1, settings: FabricSettings | None = None, limits: Limits | None = None) -> None:
        self.seed = seed
        self.now = 100.0
        self.settings = settings or FabricSettings()
        self.limits = limits or Limits()
        self.nodes: dict[str, Node] = {}
        self.streams: list[tuple[End, End]] = []

    def add(self, name: str) -> Node:
        self.nodes[name] = Node(self, name, self.settings, self.limits)
        return self.nodes[name]

    def link(self, first: str, second: str) -> tuple[End, End]:
        """``first`` dials ``second``."""
        one, two = self.nodes[first], self.nodes[second]
        left, right = End(one), End(two)
        left.other, right.other = right, left
        left.link = one.fabric.connected(second, left, self.now)
        left.connection = left.link.connection
        right.link = two.fabric.accepted(right, Peer(first), self.now)
        right.connection = right.link.connection
        self.streams.append((left, right))
        one.flush()
        two.flush()
        return left, right

    def cut(self, stream: tuple[End, End]) -> None:
        """The connection breaks; whatever is on its way is lost."""
        self.streams.remove(stream)
        for end in stream:
            end.closed = True
            end.inbox.clear()
            assert end.link is not None
            end.node.fabric.lost(end.link, self.now)
            end.node.flush()

    def run(self) -> None:
        """Let everything arrive that is on its way, until nothing is."""
        moved = True
        while moved:
            moved = False
            for stream in list(self.streams):
                for end in stream:
                    while end.inbox and end.link is not None:
                        data = end.inbox.popleft()
                        moved = True
                        end.node.fabric.receive(end.link, data, self.now)
                        end.node.flush()
            for node in self.nodes.values():
                for ours in node.ends:
                    theirs = ours.other
                    while theirs is not None and theirs.inbox:
                        theirs.received += theirs.inbox.popleft()
                        moved = True

    def advance(self, seconds: float) -> None:
        """Time passes for everyone."""
        self.now += seconds
        for node in self.nodes.values():
            node.engine.tick(self.now)
            node.fabric.tick(self.now)
            node.flush()
        self.run()

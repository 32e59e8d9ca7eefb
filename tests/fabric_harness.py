"""Brokers of a fabric in one process, without sockets: engines, fabrics, and the streams between them, which tests cut and
drain.

Nothing moves unless a test says so (:meth:`Mesh.run`), so every interleaving can be tried.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

from nearcast.config import EngineSettings, Limits
from nearcast.errors import StorageUnavailable
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import Link
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.access import AllowAll, Peer
from nearcast.mqtt.commits import Commits
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.engine import Engine
from nearcast.mqtt.journaling import Journaling
from tests.unit.mqtt.test_journaling import MemoryStorage

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


class MemoryJournal:
    """A journal in memory: what was written is safe once :meth:`Node.sync` was called, as on a disk with a write cache."""

    def __init__(self, engine: Engine, storage: CrashingStorage, now: float) -> None:
        self.needs_sync = True
        self.storage = storage
        self.synced_bytes = 0
        self.machine = Journaling(engine, storage, 20_000, 2_000)
        self.machine.recover()
        self.replace()
        self.machine.opened(now)
        self.sync()

    @property
    def unsynced(self) -> bool:
        return self.machine.bytes_written > self.synced_bytes

    def append(self, records: list[bytes]) -> None:
        self.machine.append(records)

    def replace(self) -> None:
        if self.machine.replacing:
            self.storage.carry_out()
            self.machine.replaced()

    def sync(self) -> None:
        self.synced_bytes = self.machine.bytes_written
        self.storage.sync()
        self.replace()


class CrashingStorage(MemoryStorage):
    """Forgets at a crash what was not synced."""

    def __init__(self) -> None:
        super().__init__()
        self.safe: dict[str, bytes] = {}

    def sync(self) -> None:
        self.safe = {name: bytes(data) for name, data in self.files.items()}

    def crash(self) -> None:
        self.files = {name: bytearray(data) for name, data in self.safe.items()}
        self.replaced = []


class MemorySpool:
    """Files of queues that are too long, in memory. Writing is done when :meth:`Node.sync` is called."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], bytes] = {}
        self.begun: dict[tuple[int, int], bytes] = {}
        self.written = 0

    def write(self, session_number: int, file_number: int, data: bytes) -> None:
        self.begun[session_number, file_number] = data

    def read(self, session_number: int, file_number: int) -> bytes:
        data = self.kept.get((session_number, file_number))
        if data is None:
            raise StorageUnavailable(f"spool/{session_number}-{file_number}", "is not there")
        return data

    def remove(self, session_number: int, file_number: int) -> None:
        self.kept.pop((session_number, file_number), None)

    def files(self) -> list[tuple[int, int]]:
        return list(self.kept)


class Node:
    """One broker; a durable one has a journal and a spool, and comes back after a crash."""

    def __init__(self, mesh: Mesh, name: str, settings: FabricSettings, limits: Limits, durable: bool = False) -> None:
        self.mesh = mesh
        self.name = name
        self.durable = durable
        self._settings = settings
        self._limits = limits
        self.storage = CrashingStorage()
        self.spool = MemorySpool()
        self.starts = 0
        self._start()

    def _start(self) -> None:
        mesh = self.mesh
        rng = random.Random(f"{mesh.seed}-{self.name}-{self.starts}" if self.starts else f"{mesh.seed}-{self.name}")
        self.starts += 1
        self.wants_sync = False
        self.journal: MemoryJournal | None = None
        settings = EngineSettings(limits=self._limits, durable=self.durable)
        self.engine = Engine(settings, AllowAll(), None, rng, WALL_OFFSET)
        self.commits = Commits(self.engine, lambda: mesh.now, self._request_sync, lambda error: None)
        epoch = rng.getrandbits(60)
        self.fabric = Fabric(self._settings, self._limits, self.engine, self.name, epoch, SECRET, b"", rng, mesh.now)
        self.attach()
        if self.durable:
            self.journal = MemoryJournal(self.engine, self.storage, mesh.now)
            self.commits.journal = self.journal
            self.fabric.begin(mesh.now)
            self.fabric.channels.use_spool(self.spool)
        self.ends: list[End] = []

    def attach(self) -> None:
        """What else the broker has is set up, before it begins."""

    def _request_sync(self) -> None:
        self.wants_sync = True

    def flush(self) -> None:
        self.fabric.settle(self.mesh.now)
        self.commits.flush()

    def write_spool(self) -> bool:
        """Files of the spool that were begun are on disk; returns whether there were any."""
        moved = bool(self.spool.begun)
        while self.spool.begun:
            (session_number, file_number), data = self.spool.begun.popitem()
            self.spool.kept[session_number, file_number] = data
            self.spool.written += 1
            self.fabric.channels.spilled(session_number, file_number, False)
            self.flush()
        return moved

    def sync(self) -> bool:
        """The disk takes what was written; returns whether anything waited for that."""
        moved = self.write_spool()
        while self.wants_sync and self.journal is not None and self.commits.begin_sync():
            self.journal.sync()
            self.commits.synced()
            moved = True
        self.wants_sync = False
        self.commits.syncing = False
        return moved

    def crash(self, *, power_cut: bool = True) -> None:
        """The process is gone, with a power cut also what the disk had not taken; then it starts again."""
        for stream in list(self.mesh.streams):
            if stream[0].node is self or stream[1].node is self:
                self.mesh.cut(stream, gone=self)
        for ours in self.ends:
            ours.closed = True
            if ours.other is not None:
                ours.other.closed = True
        if power_cut:
            self.storage.crash()
        self.spool.begun.clear()
        self._start()

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

    def add(self, name: str, *, durable: bool = False) -> Node:
        self.nodes[name] = self.node(name, durable)
        return self.nodes[name]

    def node(self, name: str, durable: bool) -> Node:
        return Node(self, name, self.settings, self.limits, durable)

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

    def cut(self, stream: tuple[End, End], gone: Node | None = None) -> None:
        """The connection breaks; whatever is on its way is lost. A node that is ``gone`` does not notice."""
        self.streams.remove(stream)
        for end in stream:
            end.closed = True
            end.inbox.clear()
            assert end.link is not None
            if end.node is not gone:
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
                if node.sync():
                    moved = True
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

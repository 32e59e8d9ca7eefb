"""Brokers of a fabric with replica sets, in one process: logs in memory that lose in a crash what was not flushed."""

from __future__ import annotations

from nearcast.errors import StorageUnavailable
from nearcast.fabric.hosted_sets import HostedSet
from nearcast.fabric.replica_sets import replica_number
from nearcast.fabric.set_logs import ReplicaSetLog
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import ReplicaSet, TopicClass
from nearcast.raft.configuration import Configuration
from nearcast.raft.entries import HardState
from nearcast.topiclog.replica import ReplicaLog
from nearcast.topiclog.storage import MemoryStorage
from tests.fabric_harness import Mesh, Node

SET = ReplicaSet(name="eu", members=("b1", "b2", "b3"))
KEPT = TopicClass(topic="kept/#", topic_class="owned", replica_set="eu")
STEP_S = 0.01


class Disk:
    """What a replica has on disk: the files of its log, and its state."""

    def __init__(self) -> None:
        self.storage = MemoryStorage()
        self.state = HardState()
        self._safe: dict[str, bytes] = {}
        self._safe_state = self.state

    def load(self) -> HardState:
        return self.state

    def store(self, state: HardState) -> None:
        self.state = state

    def sync(self) -> None:
        self._safe = {name: bytes(data) for name, data in self.storage.files.items()}
        self._safe_state = self.state

    def crash(self) -> None:
        self.storage = MemoryStorage()
        self.storage.files = {name: bytearray(data) for name, data in self._safe.items()}
        self.state = self._safe_state


class SetNode(Node):
    """A broker that may host replica sets. ``slow``: its disk flushes only when a test says so."""

    disks: dict[str, Disk]

    def attach(self) -> None:
        if self.starts == 1:
            self.disks = {}
            self.slow = False
        self._asked: dict[str, int] = {}
        self.fabric.sets.driver = self

    def open_log(self, definition: ReplicaSet, members: dict[int, str]) -> ReplicaSetLog:
        disk = self.disks.setdefault(definition.name, Disk())
        voters = tuple(replica_number(name) for name in definition.members)
        log = ReplicaLog(disk.storage, 65_536, 1_000)
        return ReplicaSetLog(log, disk, Configuration(voters, (), definition.write_quorum))

    def request_sync(self, set_name: str, ready: int) -> None:
        self._asked[set_name] = ready

    def function_has_work(self, set_name: str, function: str) -> None:
        """Tests ask for themselves."""

    def functions_changed(self) -> None:
        """Tests ask for themselves."""

    def close_log(self, set_name: str) -> None:
        """What is in memory stays."""

    def looped(self) -> None:
        """Looked at after every flush."""

    def failed(self, error: StorageUnavailable) -> None:
        raise error

    def sync(self) -> bool:
        moved = super().sync()
        return self.flush_sets() or moved if not self.slow else moved

    def flush_sets(self) -> bool:
        asked, self._asked = self._asked, {}
        for name, ready in asked.items():
            self.disks[name].sync()
            self.fabric.sets.synced(name, ready, self.mesh.now)
        if asked or self.fabric.sets.looped:
            self.flush()
            return True
        return False

    def crash(self, *, power_cut: bool = True) -> None:
        for disk in self.disks.values():
            if power_cut:
                disk.crash()
        super().crash(power_cut=power_cut)

    @property
    def hosted(self) -> HostedSet:
        return self.fabric.sets.hosted["eu"]


class SetMesh(Mesh):
    """Brokers that all know the set ``eu``; all linked."""

    nodes: dict[str, SetNode]  # type: ignore[assignment]

    def __init__(self, *names: str, seed: int = 1, durable: bool = True, definition: ReplicaSet = SET) -> None:
        super().__init__(seed, FabricSettings(classes=(KEPT,), replica_sets=(definition,)))
        for name in names:
            self.add(name, durable=durable)
        for at, first in enumerate(names):
            for second in names[at + 1 :]:
                self.link(first, second)
        self.run()

    def node(self, name: str, durable: bool) -> Node:
        return SetNode(self, name, self.settings, self.limits, durable)

    def wait(self, seconds: float) -> None:
        """Time passes in small steps."""
        for _ in range(round(seconds / STEP_S)):
            self.advance(STEP_S)

    def leader(self) -> SetNode:
        """The broker that leads, once one does."""
        for _ in range(500):
            leading = [node for node in self.nodes.values() if node.fabric.sets.hosted and node.hosted.leads]
            if len(leading) == 1 and all(node.fabric.sets.leader_of("eu") == leading[0].name for node in self.nodes.values()):
                return leading[0]
            self.advance(STEP_S)
        raise AssertionError("nobody leads")

    def back(self, name: str) -> None:
        """A broker that crashed is linked again."""
        for other in self.nodes:
            if other != name:
                self.link(name, other)
        self.run()

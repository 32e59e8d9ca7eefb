"""Brokers of a fabric with owned topics, in one process, with a directory in memory that answers when a test lets it."""

from __future__ import annotations

from nearcast.fabric.owned_topics import OWNER
from nearcast.fabric.owner_records import Migrated, MigrateOrder
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import TopicClass
from tests.fabric_harness import Mesh, Node

OWNED_CLASS = TopicClass(topic="owned/#", topic_class="owned", max_latency_ms=40.0)


class MemoryDirectory:
    """Who owns what. The first who asks for a topic becomes its owner; the highest epoch is true."""

    def __init__(self, mesh: OwnedMesh) -> None:
        self._mesh = mesh
        self.owners: dict[str, tuple[int, str]] = {}
        self.outcomes: list[Migrated] = []
        self.silent = False
        self._questions: list[tuple[str, str, int]] = []

    def ask(self, asker: str, topics: list[tuple[str, int]]) -> None:
        self._questions += [(asker, topic, epoch) for topic, epoch in topics]

    def answer(self) -> bool:
        """Answer everybody; returns whether anybody asked."""
        if self.silent:
            return False
        questions, self._questions = self._questions, []
        for asker, topic, epoch in questions:
            known = self.owners.get(topic)
            appointed = known is None or not known[1]
            if known is None or not known[1]:
                known = (max(epoch, known[0] if known else 0) + 1, asker)
                self.owners[topic] = known
            node = self._mesh.nodes[asker]
            node.fabric.ownership.told(topic, known[0], known[1], self._mesh.now, appointed)
            node.flush()
        return bool(questions)

    def claimed(self, broker: str, topic: str, epoch: int, mine: bool) -> None:
        known = self.owners.get(topic, (0, ""))
        if mine and epoch >= known[0]:
            self.owners[topic] = (epoch, broker)

    def migrated(self, record: Migrated) -> None:
        self.outcomes.append(record)
        if record.done and record.epoch > self.owners.get(record.topic, (0, ""))[0]:
            self.owners[record.topic] = (record.epoch, record.owner)

    def appoint(self, topic: str, broker: str, *tell: str) -> None:
        """The owner is dead: this one is it from now on; these are told."""
        epoch = self.owners[topic][0] + 1
        self.owners[topic] = (epoch, broker)
        for name in tell:
            node = self._mesh.nodes[name]
            node.fabric.ownership.told(topic, epoch, broker, self._mesh.now, True)
            node.flush()


class _Client:
    """The directory as one broker sees it."""

    def __init__(self, directory: MemoryDirectory, name: str) -> None:
        self._directory = directory
        self._name = name

    def ask(self, topics: list[tuple[str, int]], now: float) -> None:
        self._directory.ask(self._name, topics)

    def owned(self, topic: str, epoch: int, mine: bool) -> None:
        self._directory.claimed(self._name, topic, epoch, mine)

    def migrated(self, record: Migrated) -> None:
        self._directory.migrated(record)


class OwnedMesh(Mesh):
    """Brokers that all link to each other, and a directory."""

    def __init__(self, *names: str, seed: int = 1, durable: bool = False, settings: FabricSettings | None = None) -> None:
        super().__init__(seed, settings or FabricSettings(classes=(OWNED_CLASS,)))
        self.directory = MemoryDirectory(self)
        self._orders = 0
        for name in names:
            self.add(name, durable=durable)
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                self.link(first, second)
        self.run()

    def add(self, name: str, *, durable: bool = False) -> Node:
        node = super().add(name, durable=durable)
        self.attach(name)
        return node

    def attach(self, name: str) -> None:
        """A broker that was (re)started finds the directory."""
        self.nodes[name].fabric.ownership.directory = _Client(self.directory, name)

    def run(self) -> None:
        super().run()
        while self.directory.answer():
            super().run()

    def migrate(self, topic: str, target: str, workflow: str = "handover") -> Migrated | None:
        """Order the owner to hand a topic over; nothing moves yet. Returns a refusal."""
        epoch, owner = self.directory.owners[topic]
        self._orders += 1
        order = MigrateOrder(
            number=self._orders,
            topic=topic,
            epoch=epoch,
            new_epoch=epoch + 10,
            target=target,
            workflow="release" if workflow == "release" else "handover",
        )
        node = self.nodes[owner]
        before = len(self.directory.outcomes)
        node.fabric.ownership.migrate(order, self.now)
        node.flush()
        refusals = [outcome for outcome in self.directory.outcomes[before:] if not outcome.done]
        return refusals[0] if refusals else None

    def owners(self, topic: str) -> list[str]:
        """The brokers that order a topic's messages."""
        found = []
        for name, node in self.nodes.items():
            known = node.fabric.ownership.topics.get(topic.encode())
            if known is not None and known.state == OWNER:
                found.append(name)
        return found

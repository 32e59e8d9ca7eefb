"""The ring of replica sets in brokers, over real consensus: founding, joining and leaving, the directory from any broker,
leaders and brokers that are lost."""

from __future__ import annotations

import pytest

from nearcast.chord.messages import ANY, CONFLICT, DONE, VERSION, Value, Write
from nearcast.chord.node import RingNode
from nearcast.chord.records import Record
from nearcast.chord.state import IN
from nearcast.fabric import ring as ring_module
from nearcast.fabric.ring import COMMANDS, STATE, newest_snapshot
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import ReplicaSet
from tests.fabric_harness import Mesh
from tests.set_harness import SetMesh, SetNode

NAMES = ("b1", "b2", "b3", "b4", "b5")
SETS = (
    ReplicaSet(name="eu", members=("b1", "b2", "b3")),
    ReplicaSet(name="us", members=("b2", "b3", "b4")),
    ReplicaSet(name="asia", members=("b3", "b4", "b1")),
)
OTHER = ReplicaSet(name="africa", members=("b4", "b2", "b1"))


class RingMesh(SetMesh):
    """Brokers with several sets; ``b5`` hosts none."""

    def __init__(self, *sets: ReplicaSet, seed: int = 1) -> None:
        Mesh.__init__(self, seed, FabricSettings(replica_sets=sets, ring=True))
        self.sets = list(sets)
        for name in NAMES:
            self.add(name, durable=True)
        for at, first in enumerate(NAMES):
            for second in NAMES[at + 1 :]:
                self.link(first, second)
        self.run()

    def leading(self, name: str) -> SetNode | None:
        """The broker whose replica of a set leads."""
        for node in self.nodes.values():
            hosted = node.fabric.sets.hosted.get(name)
            if hosted is not None and hosted.leads and node.fabric.ring.members[name].leads:
                return node
        return None

    def ring_node(self, name: str) -> RingNode:
        node = self.leading(name)
        assert node is not None, f"nobody leads {name}"
        return node.fabric.ring.members[name].node

    def is_whole(self, *names: str) -> bool:
        """Whether these sets, and no others, are on one ring, in order, with leases and copies."""
        if any(self.leading(name) is None for name in names):
            return False
        nodes = sorted((self.ring_node(name) for name in names), key=lambda node: node.state.place)
        if any(node.state.phase != IN or not node.has_lease(self.now) for node in nodes):
            return False
        if len(nodes) == 1:
            return nodes[0].state.is_alone
        for before, node in zip([nodes[-1], *nodes], nodes, strict=False):
            state = node.state
            is_between = state.low == before.state.place and before.state.successors[:1] != ()
            if not is_between or before.state.successors[0].name != node.contact.name or not node.is_settled(state.sequence):
                return False
        return True

    def until_whole(self, *names: str, limit_s: float = 60.0) -> None:
        began = self.now
        while not self.is_whole(*names):
            assert self.now - began < limit_s, self.describe()
            self.advance(0.02)

    def describe(self) -> str:
        return "; ".join(
            f"{name} at {node.name}: phase {member.node.state.phase}, "
            f"leads {member.leads}, lease {member.node.has_lease(self.now)}"
            for node in self.nodes.values()
            for name, member in node.fabric.ring.members.items()
        )

    def begin(self, broker: str, body: Write | str) -> list[Value | None]:
        """A request of a broker; the list has its answer once there is one."""
        answers: list[Value | None] = []
        node = self.nodes[broker]

        def answered(value: Value | None, now: float) -> None:
            answers.append(value)

        if isinstance(body, Write):
            node.fabric.ring.write(body, answered, self.now)
        else:
            node.fabric.ring.get(body, answered, self.now)
        node.flush()
        self.run()
        return answers

    def ask(self, broker: str, body: Write | str) -> Value:
        answers = self.begin(broker, body)
        began = self.now
        while not answers:
            assert self.now - began < 30.0, self.describe()
            self.advance(0.02)
        assert answers[0] is not None, f"no answer: {self.describe()}"
        return answers[0]

    def replace(self, *sets: ReplicaSet) -> None:
        """Other sets are defined from now on, at all brokers."""
        self.sets = list(sets)
        for node in self.nodes.values():
            node.fabric.sets.replace(sets, self.now)
            node.flush()
        self.run()


def names_of(*sets: ReplicaSet) -> tuple[str, ...]:
    return tuple(one.name for one in sets)


def write(topic: str, owner: str, expected: int, writer: str = "") -> Write:
    return Write(Record(topic, owner, "owned", epoch=1, writer=writer), VERSION, expected)


def test_sets_found_a_ring_and_any_broker_reads_and_writes() -> None:
    mesh = RingMesh(*SETS)
    mesh.until_whole(*names_of(*SETS))
    versions = {}
    for number in range(30):
        broker = NAMES[number % len(NAMES)]
        value = mesh.ask(broker, write(f"t/{number}", broker, 0))
        assert value.outcome == DONE
        assert value.record is not None
        versions[number] = value.record.version
    for number in range(30):
        value = mesh.ask(NAMES[(number + 2) % len(NAMES)], f"t/{number}")
        assert value.record is not None
        assert (value.record.owner, value.record.version) == (NAMES[number % len(NAMES)], versions[number])
    holders = {name for name in names_of(*SETS) if len(mesh.ring_node(name).state.share)}
    assert len(holders) > 1
    lost = mesh.ask("b5", write("t/1", "b5", 0))
    assert lost.outcome == CONFLICT
    assert lost.record is not None
    assert mesh.ask("b5", write("t/1", "b5", lost.record.version)).outcome == DONE


def test_one_set_alone_is_a_ring() -> None:
    mesh = RingMesh(SETS[0])
    mesh.until_whole("eu")
    assert mesh.ask("b5", write("a", "b5", 0)).outcome == DONE
    assert mesh.ask("b4", "nothing").record is None


def test_compare_and_set_over_crashes_of_leaders() -> None:
    """All brokers want to count the same record up at the same time: each version is followed by one only. Leaders lose power
    while the requests are on their way."""
    mesh = RingMesh(*SETS)
    mesh.until_whole(*names_of(*SETS))
    counted = 0
    for number in range(30):
        value = mesh.ask("b5", "count")
        version = 0 if value.record is None else value.record.version
        if value.record is not None:
            counted = int(value.record.bound_ms)
        bids = []
        for broker in NAMES:
            record = Record("count", broker, "owned", float(counted + 1), writer=f"{broker} {number}")
            bids.append((broker, mesh.begin(broker, Write(record, VERSION, version))))
        crashed = mesh.leading(names_of(*SETS)[number // 3 % 3]) if number % 3 == 0 else None
        if crashed is not None:
            crashed.crash()
            mesh.back(crashed.name)
        began = mesh.now
        while not all(answers or (crashed is not None and broker == crashed.name) for broker, answers in bids):
            assert mesh.now - began < 30.0, mesh.describe()
            mesh.advance(0.02)
        won = [broker for broker, answers in bids if answers and answers[0] is not None and answers[0].outcome == DONE]
        assert len(won) <= 1
        last = mesh.ask("b5", "count")
        assert last.record is not None
        assert last.record.bound_ms == counted + 1
        assert not won or last.record.owner == won[0]
    mesh.until_whole(*names_of(*SETS))


def test_a_set_joins_and_leaves_while_the_directory_is_used() -> None:
    mesh = RingMesh(*SETS)
    mesh.until_whole(*names_of(*SETS))
    for number in range(40):
        assert mesh.ask("b5", write(f"t/{number}", "b5", 0)).outcome == DONE
    mesh.replace(*SETS, OTHER)
    mesh.until_whole(*names_of(*SETS, OTHER))
    for number in range(40):
        assert mesh.ask("b3", f"t/{number}").record is not None
    for name in OTHER.members:
        mesh.nodes[name].fabric.ring.leave_ring("africa", mesh.now)
        mesh.nodes[name].flush()
    mesh.run()
    while not all(mesh.nodes[name].fabric.ring.has_left_ring("africa") for name in OTHER.members):
        mesh.advance(0.02)
    mesh.replace(*SETS)
    mesh.until_whole(*names_of(*SETS))
    for number in range(40):
        assert mesh.ask("b1", f"t/{number}").record is not None


def test_a_change_of_leader_does_not_stabilise_the_ring_anew() -> None:
    mesh = RingMesh(*SETS)
    mesh.until_whole(*names_of(*SETS))
    mesh.wait(3.0)
    before = {name: mesh.ring_node(name).state.successors for name in names_of(*SETS)}
    takeovers = sum(m.node.takeovers for node in mesh.nodes.values() for m in node.fabric.ring.members.values())
    leading = mesh.leading("us")
    assert leading is not None
    leading.crash()
    mesh.back(leading.name)
    mesh.wait(2.0)
    mesh.until_whole(*names_of(*SETS))
    assert {name: mesh.ring_node(name).state.successors for name in names_of(*SETS)} == before
    assert sum(m.node.takeovers for node in mesh.nodes.values() for m in node.fabric.ring.members.values()) <= takeovers


def test_all_brokers_lose_power_and_the_directory_is_there() -> None:
    mesh = RingMesh(*SETS)
    mesh.until_whole(*names_of(*SETS))
    for number in range(20):
        assert mesh.ask("b5", write(f"t/{number}", "b5", 0)).outcome == DONE
    for name in NAMES:
        mesh.nodes[name].crash()
    for at, first in enumerate(NAMES):
        for second in NAMES[at + 1 :]:
            mesh.link(first, second)
    mesh.run()
    mesh.until_whole(*names_of(*SETS))
    for number in range(20):
        value = mesh.ask(NAMES[number % 5], f"t/{number}")
        assert value.record is not None
        assert value.record.owner == "b5"


def test_snapshots_in_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start reads the newest snapshot and what came after it, and comes to the same state."""
    monkeypatch.setattr(ring_module, "SNAPSHOT_RECORDS", 20)
    monkeypatch.setattr(ring_module, "PART_BYTES", 512)
    mesh = RingMesh(SETS[0])
    mesh.until_whole("eu")
    for number in range(50):
        assert mesh.ask("b5", Write(Record(f"t/{number}", "b5"), ANY)).outcome == DONE
    node = mesh.nodes["b2"]
    member = node.fabric.ring.members["eu"]
    hosted = member.hosted
    assert hosted.last_index(STATE) > 1
    found = newest_snapshot(hosted)
    assert found is not None
    assert found[0] >= 40
    applied = hosted.last_index(COMMANDS)
    node.crash()
    mesh.back("b2")
    again = node.fabric.ring.members["eu"]
    mesh.wait(0.5)
    assert again.snapshot_at >= 40
    assert again.applied >= applied
    assert dict(again.node.state.share.items()) == dict(mesh.ring_node("eu").state.share.items())


def test_without_the_setting_nothing_is_said() -> None:
    mesh = SetMesh("b1", "b2", "b3")
    leader = mesh.leader()
    mesh.wait(5.0)
    assert not leader.fabric.ring.members
    assert leader.hosted.last_index(COMMANDS) == 0
    assert leader.fabric.ring.has_left_ring("eu")

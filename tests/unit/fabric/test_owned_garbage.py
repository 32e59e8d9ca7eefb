"""What other nodes say about owned topics that no node means: the link ends, or it is ignored. Nothing breaks."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable

import msgspec
import pytest

from nearcast.errors import RemoteProtocolError
from nearcast.fabric import frames
from nearcast.fabric import owner_errands as errands
from nearcast.fabric.control import pack, unpack
from nearcast.fabric.direct_lines import BY_HOME, PIECE
from nearcast.fabric.frames import frame
from nearcast.fabric.owner_records import MAX_EPOCH, Migrated, MigrateOrder, Owned, Owner, Owners, OwnersAsk
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Publish
from nearcast.mqtt.publication import build
from nearcast.mqtt.records import blob, number, text
from tests.fabric_clients import Client
from tests.fabric_harness import Node
from tests.ownership_harness import OwnedMesh
from tests.topic_control_harness import OwningNet
from tests.unit.fabric.test_direct import TOPIC, Story

ROUNDS = 400


def content_of(data: bytes) -> bytes:
    """What is in a frame."""
    return data[4:]


def mutated(content: bytes, rng: random.Random) -> bytes:
    """The same kind of frame, and something is wrong with it."""
    data = bytearray(content)
    for _ in range(rng.randint(1, 4)):
        action = rng.randrange(5)
        at = rng.randint(1, len(data)) if len(data) > 1 else 1
        if action == 0:
            del data[at:]
        elif action == 1:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        elif action == 2 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif action == 3:
            data[at : at + rng.randint(0, 5)] = b"\xff" * rng.randint(0, 10)
        else:
            data[1:] = rng.randbytes(rng.randint(0, 40))
    return bytes(data)


def survives(handle: Callable[[], object]) -> bool:
    """Whether it was taken; what is refused is refused in one way."""
    try:
        handle()
    except (RemoteProtocolError, ValueError):
        return False
    return True


def test_what_a_gateway_says_that_makes_no_sense() -> None:
    rng = random.Random(1)
    story = Story()
    story.go_direct()
    node = story.mesh.nodes["b"]
    packet = encode(Publish(TOPIC, b"x", 1, packet_id=3), 5)
    (trunk,) = node.fabric.trunks.by_link.values()
    taken = 0
    for round_number in range(ROUNDS):
        before = number(trunk.branch.taken + 1) + blob(b"sender") + text(None) + number(5) + number(9) + number(1)
        said = (
            frame(frames.OWNED_PUBLISH, before, blob(b"a"), number(7), packet),
            frame(frames.OWNED_PUBLISH, before, blob(b""), number(0), packet * 3),
            frame(frames.OWNED_PUBLISH, number(PIECE), packet),
            frame(frames.SOURCE_CLOSED, blob(TOPIC.encode()), number(1), blob(b"b"), number(7), number(1)),
            frame(frames.PLACE, blob(b"\0" * 88), number(1), number(1), number(5), number(1), blob(b"sender")),
        )
        content = mutated(content_of(said[round_number % len(said)]), rng)
        taken += survives(functools.partial(trunk.trunks.link_frame, trunk.link, content, story.mesh.now))
        node.flush()
    assert 0 < taken < ROUNDS
    story.mesh.advance(20.0)
    sent = story.publish(1)
    story.mesh.run()
    assert story.received()[-1:] == sent


def test_what_a_broker_says_to_a_gateway_that_makes_no_sense() -> None:
    rng = random.Random(2)
    story = Story()
    story.go_direct()
    line = story.host.machine.lines["b"]
    said = [
        frame(frames.OWNER, blob(TOPIC.encode()), number(9), blob(b"c"), number(1), text("user")),
        frame(frames.OWNED_ACK, number(0), number(1), number(1), number(BY_HOME)),
        frame(frames.FOLLOW, number(1), blob(b"c")),
    ]
    for round_number in range(ROUNDS):
        content = mutated(content_of(said[round_number % len(said)]), rng)
        survives(functools.partial(story.host.machine.link_frame, line.link, content, story.mesh.now))
        story.host.flush()
    story.mesh.run()
    story.host.advance(5.0)


def test_what_brokers_say_to_each_other_that_makes_no_sense() -> None:
    rng = random.Random(3)
    story = Story()
    story.begin()
    node = story.mesh.nodes["b"]
    peer = node.fabric.peers["a"]
    said = [
        errands.to_owner(1, "c", 1, errands.identity("c", 3, 4)),
        errands.ordered(1, errands.identity("c", 3, 4)),
        *[
            errands.word(what, 1, "c", "a", ["a", "c"])
            for what in (
                errands.OWNED_BY,
                errands.END_OF,
                errands.ACQUIRE,
                errands.READY,
                errands.IN_CHARGE,
                errands.CLOSING,
                errands.CLOSED,
                errands.COME_THROUGH,
            )
        ],
    ]
    for round_number in range(ROUNDS):
        good = said[round_number % len(said)]
        via = mutated(good.encode("utf-8"), rng).decode("utf-8", "replace")
        publication = build(TOPIC.encode(), b"x", round_number % 2, False)
        publication.sequence = round_number + 1
        survives(functools.partial(node.fabric.ownership.arrived, peer, publication, via, story.mesh.now))
        node.flush()
        if round_number % 40 == 0:
            story.mesh.run()
            story.mesh.advance(0.3)
    story.mesh.advance(6.0)
    topic = node.fabric.ownership.topic(TOPIC.encode())
    assert topic.epoch <= MAX_EPOCH
    for name in "abc":
        assert story.mesh.nodes[name].fabric.peers


@pytest.mark.parametrize("qos", [0, 1])
def test_two_that_take_each_other_for_the_owner_do_not_pass_messages_to_and_fro(qos: int) -> None:
    mesh = OwnedMesh("a", "b")
    subscriber = Client(mesh.nodes["a"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    mesh.nodes["a"].fabric.ownership.told(TOPIC, 5, "b", mesh.now)
    mesh.nodes["b"].fabric.ownership.told(TOPIC, 5, "a", mesh.now)
    Client(mesh.nodes["a"], "publisher").publish(TOPIC, b"1", qos)
    node = mesh.nodes["b"]
    node.fabric.ownership.words.say(
        node.fabric.ownership.topic(TOPIC.encode()), "a", errands.word(errands.CLOSED, 4, "b", "c"), mesh.now
    )
    node.flush()
    mesh.run()
    mesh.advance(0.5)
    mesh.run()
    subscriber.read()
    assert subscriber.payloads == [b"1"]
    assert len(mesh.owners(TOPIC)) == 1


@pytest.mark.parametrize("epoch", [MAX_EPOCH + 1, 1 << 63, 1 << 200, -1])
def test_an_epoch_that_no_clock_shows_is_none(epoch: int) -> None:
    for via in (
        errands.to_owner(epoch, "", 0, errands.NO_IDENTITY),
        errands.ordered(epoch, errands.NO_IDENTITY),
        errands.word(errands.CLOSING, epoch, "a", "b"),
    ):
        with pytest.raises(ValueError, match="epoch"):
            errands.parse(via)
    if -(1 << 63) <= epoch < 1 << 64:
        with pytest.raises(msgspec.ValidationError):
            msgspec.msgpack.decode(msgspec.msgpack.encode(Owner("t", epoch, "b")), type=Owner)


def test_what_a_broker_says_to_the_controller_that_makes_no_sense() -> None:
    rng = random.Random(4)
    net = OwningNet()
    net.add_owning("a", "b")
    net.run(5.0)
    said = [
        pack(frames.OWNERS_ASK, OwnersAsk((("swarm/1", 0), ("swarm/2", 3)))),
        pack(frames.OWNED, Owned((Owner("swarm/1", 5, "a"), Owner("swarm/2", 6, "")), True, True)),
        pack(frames.MIGRATED, Migrated(number=1, topic="swarm/1", epoch=5, owner="b", done=True)),
        frame(frames.TELEMETRY, bytes([0]), b'{"broker":"a","time":1.0}'),
        frame(frames.TELEMETRY, bytes([1]), b'{"broker":"a","time":1.0,"round":1,"part":0,"parts":1,"topics":[]}'),
        frame(frames.PLAN, b'{"planner":"x","number":1,"moves":[]}'),
    ]
    entry = net.controller.entries["a"]
    for round_number in range(ROUNDS):
        content = mutated(content_of(said[round_number % len(said)]), rng)
        survives(functools.partial(net.controller.topics.frame, entry, content, net.now))
        if round_number % 50 == 0:
            net.run(0.2)
    net.run(5.0)


def test_what_a_controller_says_that_makes_no_sense() -> None:
    rng = random.Random(5)
    said = [
        pack(frames.OWNERS, Owners((Owner("swarm/1", 5, "a", True),))),
        pack(frames.MIGRATE, MigrateOrder(number=1, topic="swarm/1", epoch=5, new_epoch=6, target="b")),
    ]
    story = Story()
    story.begin()
    node = story.mesh.nodes["b"]
    for round_number in range(ROUNDS):
        content = mutated(content_of(said[round_number % 2]), rng)
        survives(functools.partial(obey, node, content, story.mesh.now))
        node.flush()
    story.mesh.advance(6.0)


def obey(node: Node, content: bytes, now: float) -> None:
    """As a broker does what its controller says."""
    if content[0] == frames.OWNERS:
        for owner in unpack(content, Owners).owners:
            node.fabric.ownership.told(owner.topic, owner.epoch, owner.owner, now, owner.appointed)
    elif content[0] == frames.MIGRATE:
        node.fabric.ownership.migrate(unpack(content, MigrateOrder), now)

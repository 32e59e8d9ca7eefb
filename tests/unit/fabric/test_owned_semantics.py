"""docs/semantics.md, class ``owned``: each promise has a test that names it; those that no other file keeps are here."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from nearcast.fabric.owner_words import WAIT_S
from nearcast.mqtt import reasons
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import (
    MQTT_3_1_1,
    MQTT_5,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from tests.fabric_clients import Client
from tests.gateway_hosts import GatewayHost
from tests.ownership_harness import OwnedMesh
from tests.unit.fabric.test_direct import Story

TOPIC = "owned/t"


def owned_by(name: str, *names: str, durable: bool = False) -> OwnedMesh:
    """Brokers of which this one owns the topic, and all know that."""
    mesh = OwnedMesh(*names, durable=durable)
    mesh.directory.owners[TOPIC] = (0, "")
    mesh.directory.appoint(TOPIC, name, *names)
    mesh.run()
    return mesh


def subscribers(mesh: OwnedMesh, *names: str, qos: int = 2, version: int = MQTT_5) -> list[Client]:
    made = [Client(mesh.nodes[name], f"subscriber {name}", version=version) for name in names]
    for client in made:
        client.subscribe("owned/#", qos)
    mesh.run()
    assert all(client.subacks for client in made)
    return made


def settle(mesh: OwnedMesh, seconds: float = 3.0) -> None:
    mesh.run()
    for _ in range(round(seconds / 0.25)):
        mesh.advance(0.25)


def cut(mesh: OwnedMesh, one: str, *others: str) -> None:
    for stream in list(mesh.streams):
        ends = {stream[0].node.name, stream[1].node.name}
        if one in ends and ends & set(others):
            mesh.cut(stream)
    mesh.run()


# --- delivery and order -------------------------------------------------------------------------------------------------


# semantics: N1
@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
@pytest.mark.parametrize("published", [0, 1, 2])
@pytest.mark.parametrize("asked", [0, 1, 2])
@pytest.mark.parametrize("durable", [False, True])
def test_each_subscriber_gets_it_once_at_the_lower_qos_however_the_topic_moves(
    version: int, published: int, asked: int, durable: bool
) -> None:
    mesh = owned_by("a", "a", "b", "c", "d", durable=durable)
    present = subscribers(mesh, "a", "b", "c", qos=asked, version=version)
    publishers = [Client(mesh.nodes[name], f"publisher {name}", version=version) for name in "abcd"]
    sent = Counter[tuple[bytes, int]]()
    for number, target in enumerate("bdca"):
        for publisher in publishers:
            payload = f"{publisher.client_id} {number}".encode()
            publisher.publish(TOPIC, payload, published)
            sent[payload, min(published, asked)] += 1
        assert mesh.migrate(TOPIC, target) is None
        for publisher in publishers:
            payload = f"{publisher.client_id} {number} again".encode()
            publisher.publish(TOPIC, payload, published)
            sent[payload, min(published, asked)] += 1
        mesh.run()
        assert mesh.owners(TOPIC) == [target]
    settle(mesh)
    for client in present:
        assert Counter((message.payload, message.qos) for message in client.messages) == sent


# semantics: N2
def test_messages_go_to_the_owner_and_from_there_only_to_who_wants_them() -> None:
    mesh = owned_by("b", "a", "b", "c", "d")
    (here, there) = subscribers(mesh, "a", "c")
    a, d = mesh.nodes["a"], mesh.nodes["d"]
    received = a.fabric.peers["b"].received
    Client(a, "publisher").publish(TOPIC, b"x", 1)
    mesh.run()
    assert here.payloads == there.payloads == [b"x"]
    assert a.fabric.peers["b"].received > received, "the publisher's own broker has it from the owner"
    assert mesh.nodes["c"].fabric.peers["a"].received == 0
    assert [peer.received for peer in d.fabric.peers.values()] == [0, 0, 0]


# semantics: N2 N3
@pytest.mark.parametrize("durable", [False, True])
def test_what_is_for_an_owner_that_is_away_waits_for_it_and_nobody_has_it_before(durable: bool) -> None:
    mesh = owned_by("b", "a", "b", durable=durable)
    (here,) = subscribers(mesh, "a")
    publisher = Client(mesh.nodes["a"], "publisher")
    cut(mesh, "a", "b")
    publisher.publish(TOPIC, b"not at all", 0)
    for qos in (1, 2):
        publisher.publish(TOPIC, b"later %d" % qos, qos)
    mesh.run()
    publisher.read()
    assert any(isinstance(packet, PubAck) for packet in publisher.packets)
    assert here.payloads == [], "not even those of its own broker"
    if durable:
        mesh.nodes["a"].crash()
        mesh.attach("a")
        (here,) = subscribers(mesh, "a")
    mesh.link("a", "b")
    settle(mesh)
    assert here.payloads == [b"later 1", b"later 2"]


# semantics: N6 N7
@pytest.mark.parametrize("seed", range(8))
def test_all_see_one_order_whoever_publishes_and_whoever_owns(seed: int) -> None:
    rng = random.Random(seed)
    mesh = owned_by("a", "a", "b", "c", "d", durable=seed % 2 == 0)
    present = subscribers(mesh, "a", "b", "c", "d")
    publishers = [Client(mesh.nodes[name], f"p{name}") for name in "abcd"]
    sent: dict[tuple[bytes, bool], list[bytes]] = {}
    for number in range(150):
        choice = rng.random()
        if choice < 0.5:
            publisher = rng.choice(publishers)
            qos = rng.randrange(3)
            payload = f"{publisher.client_id} {number}".encode()
            sent.setdefault((payload[:2], qos > 0), []).append(payload)
            publisher.publish(TOPIC, payload, qos)
        elif choice < 0.54:
            mesh.migrate(TOPIC, rng.choice("abcd"))
        else:
            ends = [end for stream in mesh.streams for end in stream if end.inbox]
            if ends:
                end = rng.choice(ends)
                assert end.link is not None
                end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                end.node.flush()
    settle(mesh)
    lines = [
        [[m.payload for m in client.messages if (m.qos > 0) == reliable] for reliable in (False, True)] for client in present
    ]
    assert lines[1:] == lines[:-1]
    for (publisher_id, reliable), payloads in sent.items():
        assert [payload for payload in lines[0][reliable] if payload.startswith(publisher_id)] == payloads


# semantics: N7
def test_behind_a_gateway_qos_1_and_2_each_keep_their_order_and_go_different_ways() -> None:
    story = Story()
    story.go_direct()
    held = next(stream for stream in story.mesh.streams if {stream[0].node.name, stream[1].node.name} == {"a", "b"})
    story.mesh.streams.remove(held)
    for number in (90, 91):
        story.sender.whisper(encode(Publish(TOPIC, b"qos 2: %d" % number, 2, packet_id=number), 5))
    straight = story.publish(2)
    story.mesh.run()
    assert story.received() == straight, "published later, and not held up"
    assert [packet.packet_id for packet in story.sender.take() if isinstance(packet, PubRec)] == [90, 91]
    story.mesh.streams.append(held)
    story.mesh.run()
    assert story.received() == [b"qos 2: 90", b"qos 2: 91"]


# semantics: N8
def test_order_is_given_up_before_messages_are() -> None:
    """A broker with subscribers does not say that it is ready: it is not waited for for ever."""
    mesh = owned_by("a", "a", "b", "c")
    subscriber, _ = subscribers(mesh, "b", "c")
    held = next(stream for stream in mesh.streams if {stream[0].node.name, stream[1].node.name} == {"a", "c"})
    mesh.streams.remove(held)
    assert mesh.migrate(TOPIC, "b") is None
    Client(mesh.nodes["b"], "publisher").publish(TOPIC, b"waits", 1)
    mesh.run()
    assert subscriber.payloads == []
    assert mesh.owners(TOPIC) == []
    mesh.advance(WAIT_S / 2)
    assert subscriber.payloads == []
    mesh.advance(WAIT_S / 2 + 0.5)
    assert mesh.owners(TOPIC) == ["b"]
    assert mesh.nodes["b"].fabric.ownership.late_gates > 0
    assert subscriber.payloads == [b"waits"]


# semantics: N4
def test_no_matching_subscribers_is_said_by_the_owner_alone() -> None:
    mesh = owned_by("b", "a", "b")
    codes = {}
    for name in "ab":
        publisher = Client(mesh.nodes[name], f"publisher {name}")
        publisher.publish(TOPIC, b"x", 1)
        mesh.run()
        publisher.read()
        codes[name] = [packet.reason_code for packet in publisher.packets if isinstance(packet, PubAck)]
    assert codes == {"a": [reasons.SUCCESS], "b": [reasons.NO_MATCHING_SUBSCRIBERS]}


# semantics: N5
def test_when_a_subscription_is_confirmed_whoever_owns_the_topic_next_knows_of_it() -> None:
    mesh = owned_by("a", "a", "b", "c")
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"before", 1)
    mesh.run()
    assert mesh.migrate(TOPIC, "b") is None
    subscriber = Client(mesh.nodes["c"], "subscriber")
    subscriber.subscribe(TOPIC)
    assert subscriber.subacks == []
    mesh.run()
    assert subscriber.subacks
    for target in "cab":
        publisher.publish(TOPIC, target.encode(), 2)
        assert mesh.migrate(TOPIC, target) is None
        mesh.run()
    settle(mesh)
    assert subscriber.payloads == [b"c", b"a", b"b"]


# --- what goes with messages --------------------------------------------------------------------------------------------


# semantics: N9
@pytest.mark.parametrize("durable", [False, True])
@pytest.mark.parametrize("ahead_s", [0.0, 30.0, -30.0])
def test_the_retained_message_is_the_one_that_was_ordered_last_whatever_the_clocks_say(ahead_s: float, durable: bool) -> None:
    mesh = owned_by("a", "a", "b", "c", durable=durable)
    first, second = Client(mesh.nodes["a"], "first"), Client(mesh.nodes["c"], "second")
    mesh.run()
    mesh.nodes["a"].engine.effects.wall_offset += ahead_s
    first.publish(TOPIC, b"old", 1, retain=True)
    mesh.run()
    assert mesh.migrate(TOPIC, "b") is None  # where nobody subscribes, and nobody has told of the change yet
    mesh.run()
    second.publish(TOPIC, b"new", 1, retain=True)
    settle(mesh, 10.0)
    for name in "abc":
        late = Client(mesh.nodes[name], f"late {name}")
        late.subscribe(TOPIC)
        mesh.run()
        assert [(message.payload, message.retain) for message in late.messages] == [(b"new", True)]


# semantics: N9
def test_a_retained_message_is_cleared_in_its_turn() -> None:
    mesh = owned_by("a", "a", "b", "c")
    publisher = Client(mesh.nodes["b"], "publisher")
    for payload in (b"1", b"", b"2", b""):
        publisher.publish(TOPIC, payload, 1, retain=True)
    settle(mesh)
    assert [mesh.nodes[name].engine.retained.get(TOPIC.encode()) for name in "abc"] == [None, None, None]


# semantics: N10
def test_one_member_of_a_group_gets_each_message_those_at_the_owner_first() -> None:
    mesh = owned_by("a", "a", "b", "c")
    members = {name: Client(mesh.nodes[name], f"member {name}") for name in "bc"}
    for member in members.values():
        member.subscribe("$share/g/owned/#")
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    sent: list[bytes] = []
    for target in "bcab":
        for qos in (0, 1, 2):
            sent.append(f"{len(sent)}".encode())
            publisher.publish(TOPIC, sent[-1], qos)
        assert mesh.migrate(TOPIC, target) is None
        for qos in (0, 1, 2):
            sent.append(f"{len(sent)}".encode())
            publisher.publish(TOPIC, sent[-1], qos)
        mesh.run()
    settle(mesh)
    assert sorted(members["b"].payloads + members["c"].payloads) == sorted(sent)
    before = len(members["b"].payloads), len(members["c"].payloads)
    assert mesh.owners(TOPIC) == ["b"]
    for _ in range(4):
        publisher.publish(TOPIC, b"near the owner", 1)
    mesh.run()
    assert (len(members["b"].payloads), len(members["c"].payloads)) == (before[0] + 4, before[1])


# semantics: N11
def test_a_will_is_ordered_like_any_message() -> None:
    mesh = owned_by("b", "a", "b", "c")
    (subscriber,) = subscribers(mesh, "c")
    dying = Client(mesh.nodes["a"], "dying", will=Will(TOPIC, b"gone", 1, True))
    mesh.run()
    assert mesh.migrate(TOPIC, "c") is None
    dying.vanish()
    settle(mesh)
    assert subscriber.payloads == [b"gone"]
    late = Client(mesh.nodes["a"], "late")
    late.subscribe(TOPIC)
    mesh.run()
    assert late.payloads == [b"gone"]


# semantics: N13
@pytest.mark.parametrize("seed", range(6))
def test_sessions_and_topics_move_at_once(seed: int) -> None:
    rng = random.Random(seed)
    mesh = owned_by("a", "a", "b", "c", durable=seed % 2 == 0)
    host = GatewayHost(mesh)
    for name in "abc":
        host.link(name)
    host.machine.assign("a", ["a", "b", "c"], mesh.now)
    mesh.run()
    listener = host.connect("listener")
    listener.say(Subscribe(1, [SubscriptionRequest("owned/#", 2)]))
    assert isinstance(listener.take()[-1], SubAck)
    publishers = [Client(mesh.nodes[name], f"p{name}") for name in "abc"]
    mesh.run()
    sent: dict[tuple[bytes, bool], list[bytes]] = {}
    received: list[Publish] = []

    def listen() -> None:
        for packet in listener.take():
            if isinstance(packet, Publish):
                received.append(packet)
                if packet.qos == 1:
                    listener.whisper(encode(PubAck(packet.packet_id), 5))
                elif packet.qos == 2:
                    listener.whisper(encode(PubRec(packet.packet_id), 5))
            elif isinstance(packet, PubRel):
                listener.whisper(encode(PubComp(packet.packet_id), 5))

    for number in range(200):
        choice = rng.random()
        if choice < 0.4:
            publisher = rng.choice(publishers)
            qos = rng.randrange(3)
            payload = f"{publisher.client_id} {number}".encode()
            sent.setdefault((payload[:2], qos > 0), []).append(payload)
            publisher.publish(TOPIC, payload, qos)
        elif choice < 0.44:
            mesh.migrate(TOPIC, rng.choice("abc"))
        elif choice < 0.48:
            host.machine.move(rng.choice("abc"), mesh.now, client="listener")
            host.flush()
        elif choice < 0.5:
            mesh.run()
        else:
            ends = [end for stream in mesh.streams for end in stream if end.inbox]
            if ends:
                end = rng.choice(ends)
                assert end.link is not None
                end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                end.node.flush()
        listen()
    for _ in range(20):
        host.advance(0.25)
        listen()
    got = Counter((packet.payload, packet.qos > 0) for packet in received)
    assert got == Counter((payload, reliable) for (_, reliable), payloads in sent.items() for payload in payloads)
    for (publisher_id, reliable), payloads in sent.items():
        mine = [p.payload for p in received if p.payload.startswith(publisher_id) and (p.qos > 0) == reliable]
        assert mine == payloads


# --- what is kept -------------------------------------------------------------------------------------------------------


class Shelf:
    """Keeps every topic, in memory."""

    durable = True

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    def keeping(self, topic: bytes) -> Shelf:
        return self

    def keep(self, payloads: list[bytes], qos: int, retain: bool, properties: bytes, publisher: bytes, mark: int) -> bool:
        self.payloads += payloads
        return True


# semantics: N14
def test_a_topic_is_kept_by_the_broker_that_takes_the_message_from_the_client() -> None:
    story = Story()
    shelves = {name: Shelf() for name in "abc"}
    for name, shelf in shelves.items():
        story.mesh.nodes[name].engine.keep_with(shelf)
    story.begin()
    story.publish(2)
    story.mesh.run()
    story.sender.say(Publish(TOPIC, b"at home", 2, packet_id=90))
    Client(story.mesh.nodes["c"], "plain").publish(TOPIC, b"at c", 1)
    story.mesh.run()
    assert {name: shelf.payloads for name, shelf in shelves.items()} == {
        "a": [b"1", b"at home"],
        "b": [b"2", b"3"],
        "c": [b"at c"],
    }


# --- what fails ---------------------------------------------------------------------------------------------------------


# semantics: N16
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("durable", [True, False])
def test_an_owner_that_dies(durable: bool, qos: int) -> None:
    """It had one message that it had sent on, one that it had confirmed and not sent on, and one that it never got."""
    mesh = owned_by("b", "a", "b", "c", durable=durable)
    (subscriber,) = subscribers(mesh, "c")
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish(TOPIC, b"sent on", qos)
    mesh.run()
    cut(mesh, "b", "c")
    publisher.publish(TOPIC, b"confirmed", qos)
    mesh.run()
    cut(mesh, "a", "b")
    publisher.publish(TOPIC, b"never got", qos)
    mesh.run()
    assert subscriber.payloads == [b"sent on"]
    mesh.nodes["b"].crash()
    mesh.directory.appoint(TOPIC, "c", "a", "c")
    mesh.run()
    publisher.publish(TOPIC, b"after", qos)
    mesh.run()
    assert subscriber.payloads == [b"sent on", b"never got", b"after"], "nobody waits for what the dead one has"
    mesh.attach("b")
    mesh.link("a", "b")
    mesh.link("b", "c")
    settle(mesh)
    assert subscriber.payloads == [b"sent on", b"never got", b"after"] + [b"confirmed"] * durable


# semantics: N16
@pytest.mark.parametrize("qos", [1, 2])
def test_what_a_dead_owner_had_sent_on_and_not_confirmed_is_sent_again_and_delivered_once(qos: int) -> None:
    mesh = owned_by("b", "a", "b", "c")
    present = subscribers(mesh, "a", "c")
    publisher = Client(mesh.nodes["a"], "publisher")
    mesh.run()
    # What b says to a is not heard any more: neither its messages nor its confirmations.
    stream = next(stream for stream in mesh.streams if {stream[0].node.name, stream[1].node.name} == {"a", "b"})
    mesh.streams.remove(stream)
    to_b = next(end for end in stream if end.node.name == "b")
    publisher.publish(TOPIC, b"x", qos)
    while to_b.inbox:
        assert to_b.link is not None
        mesh.nodes["b"].fabric.receive(to_b.link, to_b.inbox.popleft(), mesh.now)
        mesh.nodes["b"].flush()
    mesh.run()
    assert [client.payloads for client in present] == [[], [b"x"]]
    mesh.streams.append(stream)
    cut(mesh, "b", "a", "c")
    mesh.directory.appoint(TOPIC, "c", "a", "c")
    settle(mesh)
    assert [client.payloads for client in present] == [[b"x"], [b"x"]]


# semantics: N17
def test_without_the_controller_topics_go_on_where_they_are_and_those_without_an_owner_wait() -> None:
    mesh = owned_by("a", "a", "b", "c")
    present = subscribers(mesh, "b", "c")
    publisher = Client(mesh.nodes["c"], "publisher")
    mesh.directory.silent = True
    publisher.publish(TOPIC, b"as ever", 1)
    for qos in (0, 1, 2):
        publisher.publish("owned/new", b"waits", qos)
    mesh.run()
    mesh.advance(60.0)
    assert [client.payloads for client in present] == [[b"as ever"]] * 2
    publisher.read()
    assert len([packet for packet in publisher.packets if isinstance(packet, PubAck)]) == 2, "the publisher does not wait"
    mesh.directory.silent = False
    settle(mesh)
    assert [client.payloads for client in present] == [[b"as ever", b"waits", b"waits", b"waits"]] * 2


# semantics: N18
@pytest.mark.parametrize("durable", [False, True])
def test_a_partition_in_which_another_owner_is_made(durable: bool) -> None:
    mesh = owned_by("a", "a", "b", "c", "d", durable=durable)
    present = subscribers(mesh, "a", "b", "c", "d")
    publishers = {name: Client(mesh.nodes[name], f"publisher {name}") for name in "abcd"}
    mesh.run()
    for name in "ab":
        cut(mesh, name, "c", "d")
    mesh.directory.appoint(TOPIC, "d", "c", "d")
    mesh.run()
    for number in range(3):
        for name, publisher in publishers.items():
            publisher.publish(TOPIC, f"{name} {number}".encode(), 1 + number % 2)
    mesh.run()
    sides = [sorted(client.payloads) for client in present]
    assert sides[0] == sides[1] == sorted(f"{name} {number}".encode() for name in "ab" for number in range(3))
    assert sides[2] == sides[3] == sorted(f"{name} {number}".encode() for name in "cd" for number in range(3))
    assert mesh.owners(TOPIC) == ["a", "d"], "of two epochs"
    for one, other in ("ac", "ad", "bc", "bd"):
        mesh.link(one, other)
    settle(mesh)
    for client in present:
        assert sorted(client.payloads) == sorted(f"{name} {number}".encode() for name in "abcd" for number in range(3))
    publishers["b"].publish(TOPIC, b"and now", 1)
    settle(mesh)
    assert mesh.owners(TOPIC) == ["d"]
    assert [client.payloads[-1] for client in present] == [b"and now"] * 4


# semantics: N20
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_broker_that_stops_hands_its_topics_to_one_with_subscribers(qos: int) -> None:
    mesh = owned_by("a", "a", "b", "c", "d")
    present = subscribers(mesh, "a", "c")
    publishers = [Client(mesh.nodes[name], f"publisher {name}") for name in "bcd"]
    for publisher in publishers:
        publisher.publish(TOPIC, b"before", qos)
    mesh.nodes["a"].fabric.ownership.leave(mesh.now)
    mesh.nodes["a"].flush()
    for publisher in publishers:
        publisher.publish(TOPIC, b"after", qos)
    mesh.run()
    assert mesh.owners(TOPIC) == ["c"]
    assert mesh.nodes["a"].fabric.ownership.has_left()
    settle(mesh)
    assert present[0].payloads == present[1].payloads
    assert Counter(present[0].payloads) == {b"before": 3, b"after": 3}

"""Owned topics between brokers: who orders, what waits, how a topic changes hands."""

from __future__ import annotations

import random

import pytest

from nearcast.fabric import owner_errands as errands
from nearcast.fabric.identities import Identity
from nearcast.fabric.owner_errands import OwnerErrand
from nearcast.fabric.owner_words import WAIT_S
from nearcast.fabric.parking import further_queue, parking_name, parse_parking_name, source_of
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.publication import build, build_all
from tests.fabric_clients import Client
from tests.fabric_harness import End
from tests.ownership_harness import OWNED_CLASS, OwnedMesh

TOPIC = "owned/t"


def test_the_first_who_publishes_becomes_the_owner_and_everybody_is_served() -> None:
    mesh = OwnedMesh("a", "b", "c")
    near, far = Client(mesh.nodes["a"], "near"), Client(mesh.nodes["c"], "far")
    near.subscribe(TOPIC)
    far.subscribe("owned/#")
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish(TOPIC, b"1", 1)
    mesh.run()
    assert mesh.owners(TOPIC) == ["a"]
    other = Client(mesh.nodes["b"], "other")
    for qos in (0, 1, 2):
        other.publish(TOPIC, b"%d" % (qos + 2), qos)
        mesh.run()
    for client in (near, far):
        client.read()
        assert sorted(client.payloads) == [b"1", b"2", b"3", b"4"]


# semantics: N15
def test_a_client_that_does_not_want_its_own_messages_gets_none_from_the_owner() -> None:
    mesh = OwnedMesh("a", "b")
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    selfish = Client(mesh.nodes["b"], "selfish")
    selfish.subscribe(TOPIC, no_local=True)
    mesh.run()
    selfish.publish(TOPIC, b"mine", 1)
    Client(mesh.nodes["b"], "neighbour").publish(TOPIC, b"yours", 1)
    mesh.run()
    selfish.read()
    assert selfish.payloads == [b"yours"]


def test_retained_messages_are_what_the_owner_ordered_last() -> None:
    mesh = OwnedMesh("a", "b", "c")
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    Client(mesh.nodes["b"], "other").publish(TOPIC, b"kept", 1, retain=True)
    mesh.run()
    mesh.advance(5.0)
    late = Client(mesh.nodes["c"], "late")
    late.subscribe(TOPIC)
    mesh.run()
    late.read()
    assert late.payloads == [b"kept"]


# semantics: N3
def test_messages_wait_while_nobody_knows_the_owner() -> None:
    mesh = OwnedMesh("a", "b")
    subscriber = Client(mesh.nodes["b"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    mesh.directory.silent = True
    publisher = Client(mesh.nodes["a"], "publisher")
    for number in range(5):
        publisher.publish(TOPIC, b"%d" % number, number % 3)
    mesh.run()
    subscriber.read()
    assert subscriber.payloads == []
    mesh.directory.silent = False
    mesh.advance(2.0)
    subscriber.read()
    assert sorted(subscriber.payloads) == [b"0", b"1", b"2", b"3", b"4"]
    assert not mesh.nodes["a"].fabric.ownership.parking_sessions()


# semantics: N3
def test_parked_messages_survive_a_crash() -> None:
    mesh = OwnedMesh("a", "b", durable=True)
    subscriber = Client(mesh.nodes["b"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    mesh.directory.silent = True
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish(TOPIC, b"1", 1)
    publisher.publish(TOPIC, b"2", 2)
    mesh.run()
    mesh.nodes["a"].crash()
    mesh.attach("a")
    mesh.directory.silent = False
    mesh.link("a", "b")
    mesh.advance(2.0)
    mesh.advance(2.0)
    subscriber.read()
    assert subscriber.payloads == [b"1", b"2"]


@pytest.mark.parametrize("target", ["b", "c", "d"])
def test_a_topic_changes_hands(target: str) -> None:
    mesh = OwnedMesh("a", "b", "c", "d")
    subscribers = [Client(mesh.nodes[name], f"subscriber {name}") for name in ("a", "c", "d")]
    for subscriber in subscribers:
        subscriber.subscribe(TOPIC)
    mesh.run()
    publishers = [Client(mesh.nodes[name], f"publisher {name}") for name in ("a", "b", "d")]
    for publisher in publishers:
        publisher.publish(TOPIC, f"{publisher.client_id} 0".encode(), 1)
        mesh.run()
    assert mesh.owners(TOPIC) == ["a"]
    for publisher in publishers:
        publisher.publish(TOPIC, f"{publisher.client_id} 1".encode(), 1)
    assert mesh.migrate(TOPIC, target) is None
    for number in (2, 3):
        for publisher in publishers:
            publisher.publish(TOPIC, f"{publisher.client_id} {number}".encode(), 1)
    mesh.run()
    assert mesh.owners(TOPIC) == [target]
    assert mesh.directory.outcomes[-1].done
    for publisher in publishers:
        publisher.publish(TOPIC, f"{publisher.client_id} 4".encode(), 1)
    mesh.run()
    mesh.advance(1.0)
    assert all(not node.fabric.ownership.parking_sessions() for node in mesh.nodes.values())
    for subscriber in subscribers:
        subscriber.read()
        received = subscriber.payloads
        for publisher in publishers:
            own = [payload for payload in received if payload.startswith(publisher.client_id.encode())]
            assert own == [f"{publisher.client_id} {number}".encode() for number in range(5)], subscriber.client_id
        assert received == subscribers[0].payloads


# semantics: N16
def test_an_owner_that_dies_is_replaced_and_what_it_had_not_confirmed_is_sent_again_once() -> None:
    mesh = OwnedMesh("a", "b", "c")
    subscriber = Client(mesh.nodes["c"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"arrives", 1)
    mesh.run()
    publisher.publish(TOPIC, b"does not arrive", 1)
    for stream in list(mesh.streams):
        if mesh.nodes["a"] in (stream[0].node, stream[1].node):
            mesh.cut(stream)
    mesh.directory.appoint(TOPIC, "c", "b", "c")
    mesh.run()
    publisher.publish(TOPIC, b"after", 1)
    mesh.run()
    subscriber.read()
    assert subscriber.payloads == [b"first", b"arrives", b"does not arrive", b"after"]
    # The dead one comes back, and passes on what was sent to it before.
    mesh.link("a", "b")
    mesh.link("a", "c")
    mesh.run()
    mesh.advance(6.0)
    subscriber.read()
    assert subscriber.payloads == [b"first", b"arrives", b"does not arrive", b"after"]
    Client(mesh.nodes["a"], "third").publish(TOPIC, b"again", 1)
    mesh.run()
    mesh.advance(6.0)
    assert mesh.owners(TOPIC) in (["c"], ["a", "c"])


def between(mesh: OwnedMesh, first: str, second: str) -> tuple[End, End]:
    return next(stream for stream in mesh.streams if {stream[0].node.name, stream[1].node.name} == {first, second})


def test_what_went_to_a_former_owner_that_dies_with_it_goes_to_the_new_one() -> None:
    """The controller found out before the link did: the owner that was is told, and never hears it."""
    mesh = OwnedMesh("a", "b", "c")
    subscriber = Client(mesh.nodes["c"], "subscriber")
    subscriber.subscribe(TOPIC)
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"second", 1)
    mesh.run()
    dying = between(mesh, "a", "b")
    mesh.streams.remove(dying)
    publisher.publish(TOPIC, b"third", 1)
    mesh.directory.appoint(TOPIC, "c", "b", "c")
    mesh.run()
    mesh.streams.append(dying)
    for end in dying:
        end.inbox.clear()
    for stream in list(mesh.streams):
        if "a" in (stream[0].node.name, stream[1].node.name):
            mesh.cut(stream, gone=mesh.nodes["a"])
    mesh.advance(WAIT_S - 1.0)
    subscriber.read()
    assert subscriber.payloads == [b"first", b"second"], "it may come back, and then nothing is out of order"
    mesh.advance(2.0)
    subscriber.read()
    assert subscriber.payloads == [b"first", b"second", b"third"]


def test_who_publishes_to_an_owner_that_cannot_be_reached_asks_whether_it_still_is_that() -> None:
    mesh = OwnedMesh("a", "b", "c")
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["c"], "publisher")
    publisher.publish(TOPIC, b"second", 1)
    mesh.run()
    subscriber = Client(mesh.nodes["b"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    for other in ("b", "c"):
        mesh.cut(between(mesh, "a", other))
    mesh.directory.appoint(TOPIC, "b", "b")  # who was told of it is not c
    publisher.publish(TOPIC, b"third", 1)
    mesh.run()
    subscriber.read()
    assert subscriber.payloads == [b"third"]
    assert mesh.nodes["c"].fabric.ownership.owner_of(TOPIC.encode())[0] == "b"


def test_of_messages_that_are_sent_again_together_only_those_are_delivered_that_were_not() -> None:
    mesh = OwnedMesh("a", "b", "c")
    subscriber, far = Client(mesh.nodes["b"], "subscriber"), Client(mesh.nodes["c"], "far")
    for client in (subscriber, far):
        client.subscribe(TOPIC)
    mesh.run()
    mesh.directory.owners[TOPIC] = (1, "b")
    mesh.nodes["b"].fabric.ownership.told(TOPIC, 1, "b", mesh.now, True)
    mesh.run()
    ownership = mesh.nodes["b"].fabric.ownership
    ownership.delivered.take("x", 7, 101, 2)  # the second and the third, in the order of the owner before
    (together,) = build_all(TOPIC.encode(), [b"1", b"2", b"3", b"4"], 1, False)
    who = Identity("x", 7, 100)
    again = OwnerErrand(errands.TO_OWNER, 0, "", errands.AGAIN)
    ownership._intake(ownership.topic(TOPIC.encode()), "", again, who, together, mesh.now)
    mesh.nodes["b"].flush()
    mesh.run()
    for client in (subscriber, far):
        client.read()
    assert subscriber.payloads == [b"1", b"4"]
    assert far.payloads == [b"1", b"2", b"3", b"4"]
    assert mesh.nodes["c"].fabric.ownership.delivered.take("x", 7, 100, 4) == []


def test_what_the_owner_ordered_before_it_was_cut_off_is_not_delivered_there_again() -> None:
    mesh = OwnedMesh("a", "b", "c")
    subscribers = [Client(mesh.nodes[name], f"s-{name}") for name in "ac"]
    for subscriber in subscribers:
        subscriber.subscribe(TOPIC)
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"second", 2)
    mesh.run()
    publisher.publish(TOPIC, b"third", 2)
    source = between(mesh, "a", "b")
    owner = next(end for end in source if end.node.name == "a")
    while owner.inbox:
        owner.node.fabric.receive(owner.link, owner.inbox.popleft(), mesh.now)  # type: ignore[arg-type]
    assert mesh.nodes["a"].fabric.ownership.topic(TOPIC.encode()).ordered == 3
    for other in "bc":  # before it says that it has it
        mesh.cut(between(mesh, "a", other))
    mesh.directory.appoint(TOPIC, "c", "b", "c")
    mesh.run()
    mesh.link("a", "b")
    mesh.link("a", "c")
    mesh.advance(WAIT_S + 1.0)
    for subscriber in subscribers:
        subscriber.read()
        assert subscriber.payloads == [b"first", b"second", b"third"]


def test_an_owner_that_stays_the_owner_is_sent_nothing_again() -> None:
    """It crashed after it had ordered a message, and before it said so; the controller gives it the topic again."""
    mesh = OwnedMesh("a", "b", durable=True)
    subscriber = Client(mesh.nodes["a"], "subscriber", clean_start=False, expiry=100)
    subscriber.subscribe(TOPIC)
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"second", 2)
    mesh.run()
    subscriber.read()
    stream = between(mesh, "a", "b")
    owner = next(end for end in stream if end.node.name == "a")
    publisher.publish(TOPIC, b"third", 2)
    mesh.nodes["b"].sync()
    while owner.inbox:
        owner.node.fabric.receive(owner.link, owner.inbox.popleft(), mesh.now)  # type: ignore[arg-type]
    owner.node.flush()
    owner.node.sync()
    subscriber.read()
    before = len(subscriber.payloads)
    mesh.nodes["a"].crash()
    mesh.attach("a")
    mesh.directory.appoint(TOPIC, "a", "a", "b")
    mesh.link("a", "b")
    mesh.run()
    again = Client(mesh.nodes["a"], "subscriber", clean_start=False, expiry=100)
    mesh.run()
    again.read()
    assert subscriber.payloads[:before] == [b"first", b"second", b"third"]
    assert again.payloads in ([], [b"third"])


def test_an_owner_that_comes_back_hears_that_it_is_not_the_owner_before_it_takes_what_was_sent_to_it() -> None:
    """The controller is away. What waited for it, retained messages among it, is old by now."""
    mesh = OwnedMesh("a", "b", durable=True)
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["b"], "publisher")
    publisher.publish(TOPIC, b"second", 1, retain=True)
    mesh.run()
    mesh.nodes["a"].crash()
    publisher.publish(TOPIC, b"third", 1, retain=True)
    mesh.nodes["b"].sync()
    mesh.directory.appoint(TOPIC, "b", "b")
    mesh.run()
    publisher.publish(TOPIC, b"fourth", 1, retain=True)
    mesh.run()
    mesh.directory.silent = True
    mesh.attach("a")
    mesh.link("a", "b")
    mesh.run()
    mesh.advance(3.0)
    assert mesh.owners(TOPIC) == ["b"]
    for name in "ab":
        late = Client(mesh.nodes[name], f"late-{name}")
        late.subscribe(TOPIC)
        mesh.run()
        late.read()
        assert late.payloads == [b"fourth"]


def run_but(mesh: OwnedMesh, sender: str, receiver: str) -> None:
    """Everything arrives but what one broker sends to another."""
    busy = True
    while busy:
        busy = False
        for stream in mesh.streams:
            for end, other in (stream, stream[::-1]):
                if (other.node.name, end.node.name) == (sender, receiver):
                    continue
                while end.inbox:
                    busy = True
                    assert end.link is not None
                    end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                    end.node.flush()


def test_a_topic_that_comes_back_at_once_waits_for_what_was_passed_on_meanwhile() -> None:
    """The source's word is for the broker that it sent to all along; but its last message went from there and back."""
    mesh = OwnedMesh("a", "b", "c")
    subscriber = Client(mesh.nodes["a"], "subscriber")
    subscriber.subscribe(TOPIC)
    mesh.run()
    Client(mesh.nodes["b"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    assert mesh.migrate(TOPIC, "c") is None
    publisher.publish(TOPIC, b"second", 1)  # reaches b, which passes it on to c
    toward = between(mesh, "b", "c")
    acquire = next(end for end in toward if end.node.name == "c")
    acquire.node.fabric.receive(acquire.link, acquire.inbox.popleft(), mesh.now)  # type: ignore[arg-type]
    acquire.node.flush()
    run_but(mesh, "b", "c")
    assert mesh.owners(TOPIC) == ["c"]
    mesh.directory.owners[TOPIC] = (mesh.nodes["c"].fabric.ownership.owner_of(TOPIC.encode())[1], "c")
    assert mesh.migrate(TOPIC, "b") is None
    run_but(mesh, "b", "c")
    assert mesh.owners(TOPIC) == ["b"]
    publisher.publish(TOPIC, b"third", 1)
    run_but(mesh, "b", "c")
    mesh.run()
    subscriber.read()
    assert subscriber.payloads == [b"first", b"second", b"third"]
    assert sum(node.fabric.ownership.late_gates for node in mesh.nodes.values()) == 0


def test_a_link_that_takes_the_place_of_another_does_not_end_a_wait() -> None:
    mesh = OwnedMesh("a", "b", "c")
    Client(mesh.nodes["c"], "subscriber").subscribe(TOPIC)
    mesh.run()
    Client(mesh.nodes["a"], "publisher").publish(TOPIC, b"first", 1)
    mesh.run()
    assert mesh.migrate(TOPIC, "b") is None
    run_but(mesh, "a", "c")
    new_owner = mesh.nodes["b"]
    peer = new_owner.fabric.peers["c"]
    new_owner.fabric.ownership.peer_down(peer, mesh.now)
    new_owner.fabric.ownership.peer_up(peer, mesh.now)
    new_owner.flush()
    assert mesh.owners(TOPIC) == []  # c may lack what a ordered
    mesh.run()
    assert mesh.owners(TOPIC) == ["b"]


class Owner:
    """Broker a, which was a source, has just been made the owner, and waits for its own word from b, the owner before.
    ``passed`` is what c sent it meanwhile, and it passed on."""

    BEFORE = 1_000
    EPOCH = 2_000

    def __init__(self, passed: bytes = b"") -> None:
        self.mesh = OwnedMesh("a", "b", "c")
        self.subscriber = Client(self.mesh.nodes["a"], "subscriber")
        self.subscriber.subscribe(TOPIC)
        self.mesh.run()
        self._sequence = 1
        self.ownership = self.mesh.nodes["a"].fabric.ownership
        self.ownership.told(TOPIC, self.BEFORE, "b", self.mesh.now)
        Client(self.mesh.nodes["a"], "publisher").publish(TOPIC, b"", 1)
        if passed:
            self.arrives("c", errands.to_owner(self.BEFORE - 1, "", 0, errands.NO_IDENTITY), passed)
        self.ownership.told(TOPIC, self.EPOCH, "a", self.mesh.now, True)

    def arrives(self, sender: str, via: str, payload: bytes = b"") -> None:
        publication = build(TOPIC.encode(), payload, 1, False)
        publication.sequence = self._sequence
        self._sequence += 1
        node = self.mesh.nodes["a"]
        self.ownership.arrived(node.fabric.peers[sender], publication, via, self.mesh.now)
        node.flush()

    def closed(self, source: str) -> None:
        self.arrives("b", errands.word(errands.CLOSED, self.EPOCH, "a", source))

    @property
    def ordered(self) -> list[bytes]:
        self.subscriber.read()
        return self.subscriber.payloads


def test_what_waits_for_less_is_not_followed_by_what_waits_for_more() -> None:
    """A source's old messages go on when those before them have come round; of its new ones, some went another way."""
    owner = Owner(passed=b"first")
    owner.arrives("c", errands.to_owner(Owner.BEFORE, "", 0, errands.NO_IDENTITY), b"second")
    owner.arrives("c", errands.to_owner(Owner.EPOCH, "b", 0, errands.NO_IDENTITY), b"fourth")
    assert owner.ordered == []
    owner.arrives("b", errands.to_owner(Owner.EPOCH, "", 0, errands.identity("c", 1, 1)), b"first")
    owner.closed("a")
    assert owner.ordered == [b"first", b"second"]
    owner.arrives("b", errands.to_owner(Owner.EPOCH, "", 0, errands.identity("c", 1, 3)), b"third")
    owner.closed("c")
    assert owner.ordered == [b"first", b"second", b"third", b"fourth"]
    assert not owner.ownership.parking_sessions()


def test_a_word_does_not_wait_for_what_nothing_before_it_went_by() -> None:
    """The owner's own word may stand behind the very messages that wait for this one."""
    owner = Owner()
    owner.arrives("c", errands.to_owner(Owner.EPOCH, "b", 0, errands.NO_IDENTITY), b"second")
    assert owner.ordered == []
    owner.closed("c")
    assert owner.ordered == [b"second"]


def test_the_queues_of_a_source_are_known_by_their_names() -> None:
    assert source_of(further_queue("c", 0x7D0)) == source_of("c") == "c"
    name = parking_name(TOPIC.encode(), further_queue("c", 0x7D0))
    assert parse_parking_name(name) == (TOPIC.encode(), further_queue("c", 0x7D0))


def test_a_word_finds_room_where_messages_do_not() -> None:
    mesh = OwnedMesh("a", "b", "c", settings=FabricSettings(classes=(OWNED_CLASS,), max_queued_messages=3))
    Client(mesh.nodes["c"], "subscriber").subscribe(TOPIC)
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish(TOPIC, b"0", 1)
    mesh.run()
    held = between(mesh, "a", "c")
    mesh.streams.remove(held)
    for number in range(8):
        publisher.publish(TOPIC, b"%d" % number, 1)
    assert mesh.nodes["a"].engine.stats.dropped_queue_full
    assert mesh.migrate(TOPIC, "b") is None
    mesh.run()
    mesh.streams.append(held)
    mesh.run()
    assert mesh.owners(TOPIC) == ["b"]
    assert sum(node.fabric.ownership.late_gates for node in mesh.nodes.values()) == 0


def test_an_order_that_cannot_be_carried_out_is_refused_with_a_reason() -> None:
    mesh = OwnedMesh("a", "b")
    Client(mesh.nodes["a"], "first").publish(TOPIC, b"first", 1)
    mesh.run()
    refused = mesh.migrate(TOPIC, "nowhere")
    assert refused is not None
    assert "no link" in refused.reason
    refused = mesh.migrate(TOPIC, "a")
    assert refused is not None
    assert "already" in refused.reason


# semantics: N6 N7
@pytest.mark.parametrize("seed", range(40))
def test_random_moves_keep_the_order_of_every_publisher(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c", "d"]
    mesh = OwnedMesh(*names, seed=seed)
    subscribers = [Client(mesh.nodes[name], f"s{name}") for name in names if rng.random() < 0.8]
    for subscriber in subscribers:
        subscriber.subscribe(TOPIC)
    mesh.run()
    publishers = [Client(mesh.nodes[name], f"p{name}") for name in names if rng.random() < 0.9]
    sent = dict.fromkeys(publishers, 0)
    moves = 0
    for _ in range(200):
        action = rng.random()
        if action < 0.5 and publishers:
            publisher = rng.choice(publishers)
            publisher.publish(TOPIC, f"{publisher.client_id} {sent[publisher]}".encode(), 1)
            sent[publisher] += 1
        elif action < 0.55 and TOPIC in mesh.directory.owners:
            moves += mesh.migrate(TOPIC, rng.choice(names)) is None
        elif action < 0.6:
            mesh.directory.answer()
        else:
            _let_something_arrive(mesh, rng)
    mesh.run()
    mesh.advance(0.5)
    assert moves
    for subscriber in subscribers:
        subscriber.read()
        received = subscriber.payloads
        for publisher in publishers:
            own = [payload for payload in received if payload.split()[0] == publisher.client_id.encode()]
            assert own == [f"{publisher.client_id} {number}".encode() for number in range(sent[publisher])]
        assert received == subscribers[0].payloads
    assert sum(node.fabric.ownership.late_gates for node in mesh.nodes.values()) == 0


def _let_something_arrive(mesh: OwnedMesh, rng: random.Random) -> None:
    """One piece of one stream arrives: every interleaving of links that TCP allows."""
    ends = [end for stream in mesh.streams for end in stream if end.inbox]
    if ends:
        end = rng.choice(ends)
        assert end.link is not None
        end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
        end.node.flush()


# semantics: N22
@pytest.mark.parametrize("seed", range(30))
def test_a_topic_that_changes_its_class_while_it_moves_loses_and_doubles_nothing(seed: int) -> None:
    rng = random.Random(seed)
    mesh = OwnedMesh("a", "b", "c", seed=seed)
    subscribers = [Client(mesh.nodes[name], f"s{name}") for name in "abc"]
    for subscriber in subscribers:
        subscriber.subscribe(TOPIC)
    mesh.run()
    publishers = [Client(mesh.nodes[name], f"p{name}") for name in "abc"]
    sent: list[bytes] = []
    stamp = 5
    for _ in range(250):
        action = rng.random()
        if action < 0.3:
            sent.append(b"%d" % len(sent))
            rng.choice(publishers).publish(TOPIC, sent[-1], 1)
        elif action < 0.34 and len(mesh.owners(TOPIC)) == 1:
            owner = mesh.owners(TOPIC)[0]
            mesh.directory.owners[TOPIC] = (mesh.nodes[owner].fabric.ownership.owner_of(TOPIC.encode())[1], owner)
            mesh.migrate(TOPIC, rng.choice("abc"))
        elif action < 0.38:
            stamp += 1
            node = mesh.nodes[rng.choice("abc")]
            node.fabric.classes.replace([("owned/#", rng.choice(("owned", "bridged")))], stamp)
            node.flush()
        elif action < 0.45:
            mesh.directory.answer()
        else:
            _let_something_arrive(mesh, rng)
    for node in mesh.nodes.values():
        node.fabric.classes.replace([("owned/#", "owned")], stamp + 1)
        node.flush()
    for _ in range(20):
        mesh.run()
        mesh.advance(1.0)
    for subscriber in subscribers:
        subscriber.read()
        assert sorted(subscriber.payloads, key=int) == sent, subscriber.client_id

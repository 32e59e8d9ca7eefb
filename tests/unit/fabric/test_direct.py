"""A gateway's clients publish owned topics straight to the owner: ways, answers, order, and what happens when a way breaks."""

from __future__ import annotations

import random

import pytest

from nearcast.fabric import direct_clients, frames
from nearcast.fabric.audience import Audience
from nearcast.fabric.crowds import Gathering
from nearcast.fabric.direct_clients import DirectClient, puback
from nearcast.fabric.gateway import GatewaySettings
from nearcast.mqtt import reasons
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import (
    Connect,
    Disconnect,
    PingReq,
    PingResp,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
)
from tests.gateway_hosts import Client, GatewayHost
from tests.ownership_harness import OwnedMesh

TOPIC = "owned/t"


class Story:
    """Brokers a (home), b (owner) and c, a gateway, a publisher and a subscriber, who is at c without a gateway."""

    def __init__(self, *, durable: bool = False, settings: GatewaySettings | None = None, version: int = 5) -> None:
        self.mesh = OwnedMesh("a", "b", "c", durable=durable)
        self.host = GatewayHost(self.mesh, settings=settings or GatewaySettings(follow_owners=False))
        for name in "abc":
            self.host.link(name)
        self.host.machine.assign("a", ["a", "b", "c"], self.mesh.now)
        self.listener = self.host.connect("listener")
        self.host.machine.move("c", self.mesh.now, client="listener")
        self.mesh.run()
        self.listener.say(Subscribe(1, [SubscriptionRequest("owned/#", 1)]))
        assert isinstance(self.listener.take()[-1], SubAck)
        self.sender = self.host.connect("sender", version)
        self.number = 0
        self.mesh.nodes["b"].fabric.ownership.told(TOPIC, 1, "b", self.mesh.now, True)
        self.mesh.directory.owners[TOPIC] = (1, "b")
        self.mesh.run()

    @property
    def direct_messages(self) -> int:
        return self.host.machine.direct.messages

    def at(self, broker: str) -> int:
        """Messages that came straight from the gateway to a broker."""
        return self.mesh.nodes[broker].fabric.branches.messages

    def publish(self, count: int = 1, qos: int = 1, sender: Client | None = None, topic: str = TOPIC) -> list[bytes]:
        """Publish, without letting anything arrive."""
        sent = []
        for _ in range(count):
            self.number += 1
            payload = b"%d" % self.number
            packet = Publish(topic, payload, qos, packet_id=self.number if qos else 0)
            one = sender or self.sender
            one.whisper(encode(packet, one.version))
            sent.append(payload)
        return sent

    def received(self) -> list[bytes]:
        """What came to the listener, which acknowledges it."""
        payloads = []
        for packet in self.listener.take():
            if isinstance(packet, Publish):
                payloads.append(packet.payload)
                if packet.qos:
                    self.listener.whisper(encode(PubAck(packet.packet_id), 5))
        return payloads

    def answers(self) -> list[int]:
        return [packet.packet_id for packet in self.sender.take() if isinstance(packet, PubAck)]

    def begin(self) -> None:
        """The first message went by the home broker; the gateway knows the owner now."""
        sent = self.publish()
        self.mesh.run()
        assert self.received() == sent
        assert self.answers() == [self.number]
        assert self.direct_messages == 0

    def go_direct(self) -> None:
        """The second one went straight to the owner, and whatever had to come before it did."""
        self.begin()
        sent = self.publish()
        self.mesh.run()
        assert self.received() == sent
        assert self.answers() == [self.number]
        assert self.at("b") == 1


# semantics: N12
@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1])
@pytest.mark.parametrize("durable", [False, True])
def test_messages_go_straight_to_the_owner(version: int, qos: int, durable: bool) -> None:
    story = Story(version=version, durable=durable)
    story.begin()
    sent = story.publish(5, qos)
    story.mesh.run()
    assert story.received() == sent
    assert story.at("b") == 5
    assert story.at("a") == 0
    assert story.answers() == ([2, 3, 4, 5, 6] if qos else [])
    mirror = story.sender.tunnel.mirror if story.sender.tunnel else None
    assert mirror is not None
    assert mirror.kept_bytes == 0
    assert mirror.messages_in == 6


# semantics: N12
def test_the_acknowledgement_waits_for_the_owners_journal() -> None:
    story = Story(durable=True)
    story.begin()
    story.publish()
    owner = story.mesh.nodes["b"]
    left, right = story.host.streams["b"]
    while right.inbox:
        owner.fabric.receive(right.link, right.inbox.popleft(), story.mesh.now)  # type: ignore[arg-type]
    owner.flush()
    while left.inbox:
        story.host.fabric.receive(left.link, left.inbox.popleft(), story.mesh.now)  # type: ignore[arg-type]
    story.host.flush()
    assert story.at("b") == 1
    assert story.answers() == []
    story.mesh.run()
    assert story.answers() == [2]


# semantics: N12
def test_qos_2_stays_with_the_home_broker() -> None:
    story = Story()
    story.begin()
    story.sender.say(Publish(TOPIC, b"once", 2, packet_id=9))
    assert story.sender.take() == [PubRec(9)]
    story.sender.say(PubRel(9))
    assert story.sender.take() == [PubComp(9)]
    assert story.at("b") == 0
    assert story.received() == [b"once"]


def test_other_topics_stay_with_the_home_broker() -> None:
    story = Story()
    story.begin()
    story.listener.say(Subscribe(2, [SubscriptionRequest("plain", 0)]))
    story.listener.take()
    story.sender.say(Publish("plain", b"x"), Publish(TOPIC, b"y"), Publish("plain", b"z"))
    assert story.at("b") == 1
    assert sorted(story.received()) == [b"x", b"y", b"z"]


def test_packets_of_one_read_share_a_frame() -> None:
    story = Story()
    story.begin()
    run = b"".join(
        encode(Publish(TOPIC, b"%d" % number, number % 2, packet_id=number % 2 * number), 5) for number in range(2, 42)
    )
    story.sender.whisper(run)
    line = story.host.machine.lines["b"]
    assert len(line.direct.unanswered) == 1
    story.mesh.run()
    received = [int(payload) for payload in story.received()]
    assert [number for number in received if number % 2] == list(range(3, 42, 2))
    assert [number for number in received if not number % 2] == list(range(2, 42, 2))
    assert story.answers() == [number for number in range(2, 42) if number % 2]


def test_a_second_client_uses_what_the_first_learnt_once_its_broker_said_who_it_is() -> None:
    story = Story()
    story.begin()
    other = story.host.connect("other")
    first = story.publish(1, 1, other)
    story.mesh.run()
    assert story.at("b") == 0, "nobody has said yet who this client is"
    second = story.publish(1, 1, other)
    story.mesh.run()
    assert story.at("b") == 1
    assert story.received() == first + second


def test_the_switch_from_home_to_owner_keeps_the_order_of_each_client() -> None:
    """What went by the home broker may be late; what goes straight to the owner waits for it there."""
    story = Story()
    story.begin()
    other = story.host.connect("other")
    first = story.publish(1, 1, other)
    # The gateway hears who it is; its first message is held up between the home broker and the owner.
    held = [stream for stream in story.mesh.streams if {stream[0].node.name, stream[1].node.name} == {"a", "b"}]
    assert len(held) == 1
    story.mesh.streams.remove(held[0])
    story.mesh.run()
    second = story.publish(2, 1, other)
    story.mesh.run()
    assert story.at("b") == 2
    assert story.received() == [], "they wait for the word from the home broker"
    story.mesh.streams.append(held[0])
    story.mesh.run()
    assert story.received() == first + second


# semantics: N12
def test_puback_order_across_paths() -> None:
    """[MQTT-4.6.0-2]: the owner's answer comes first, the home broker's is for an earlier message."""
    story = Story()
    story.go_direct()
    home = story.host.streams["a"]
    story.mesh.streams.remove(home)
    story.sender.whisper(encode(Publish("plain", b"p", 1, packet_id=50), 5))
    story.sender.whisper(encode(Publish(TOPIC, b"o", 1, packet_id=51), 5))
    story.mesh.run()
    assert story.received() == [b"o"]
    assert story.answers() == []
    story.mesh.streams.append(home)
    story.mesh.run()
    assert story.answers() == [50, 51]


def test_a_message_that_was_on_its_way_home_before_is_answered_first() -> None:
    story = Story()
    home = story.host.streams["a"]
    story.publish(1)
    # The home broker takes it and says who owns the topic; its PUBACK is held up.
    _, right = home
    story.mesh.streams.remove(home)
    node = story.mesh.nodes["a"]
    while right.inbox:
        node.fabric.receive(right.link, right.inbox.popleft(), story.mesh.now)  # type: ignore[arg-type]
    node.flush()
    story.mesh.run()
    story.mesh.streams.append(home)
    story.mesh.run()
    story.publish(1)
    story.mesh.run()
    assert story.answers() == [1, 2]


# --- the owner moves ----------------------------------------------------------------------------------------------------


# semantics: N1 N7
@pytest.mark.parametrize("target", ["a", "c"])
@pytest.mark.parametrize("qos", [0, 1])
def test_the_owner_moves_and_nothing_is_lost_doubled_or_out_of_order(target: str, qos: int) -> None:
    story = Story()
    story.begin()
    sent = story.publish(3, qos)
    story.mesh.run()
    assert story.mesh.migrate(TOPIC, target) is None
    sent += story.publish(3, qos)  # these reach the former owner
    story.mesh.run()
    sent += story.publish(3, qos)
    story.mesh.run()
    assert story.received() == sent
    assert story.mesh.owners(TOPIC) == [target]
    assert story.host.machine.direct.topics[TOPIC.encode()].owner == target
    assert story.at(target) == 3
    story.host.advance(direct_clients.MARKED_S)
    sent = story.publish(3, qos)
    story.mesh.run()
    assert story.received() == sent
    # With the owner at home there is no other way any more.
    assert story.at(target) == (3 if target == "a" else 6)


def test_what_the_former_owner_passes_on_comes_before_what_goes_straight_to_the_new_one() -> None:
    story = Story()
    story.begin()
    sent = story.publish(2)
    story.mesh.run()
    story.received()
    story.mesh.migrate(TOPIC, "c")
    between = next(stream for stream in story.mesh.streams if {stream[0].node.name, stream[1].node.name} == {"b", "c"})
    sent = story.publish(2)
    # The gateway's link to b is live: b tells it of c, and passes on what came late. Its link to c is held up.
    story.mesh.streams.remove(between)
    story.mesh.run()
    sent += story.publish(2)
    story.mesh.run()
    assert story.at("c") == 2
    assert story.received() == []
    story.mesh.streams.append(between)
    story.mesh.run()
    assert story.received() == sent


def test_without_a_link_to_the_new_owner_the_former_one_passes_on() -> None:
    story = Story()
    story.begin()
    story.publish(1)
    story.mesh.run()
    story.host.cut("c")
    story.mesh.migrate(TOPIC, "c")
    story.mesh.run()
    story.received()
    sent = story.publish(3)
    story.mesh.run()
    assert story.at("b") == 4
    assert story.received() == sent
    story.host.link("c")
    story.mesh.run()
    sent = story.publish(1)
    story.mesh.run()
    assert story.received() == sent
    assert story.at("c") == 1
    assert story.answers()[-4:] == [3, 4, 5, 6]


def test_a_chain_of_moves() -> None:
    story = Story()
    story.begin()
    sent: list[bytes] = []
    for target in ("c", "a", "b", "c", "b"):
        sent += story.publish(2)
        assert story.mesh.migrate(TOPIC, target) is None
        sent += story.publish(2)
        story.mesh.run()
    sent += story.publish(2)
    story.mesh.run()
    assert story.received() == sent


# --- what breaks --------------------------------------------------------------------------------------------------------


# semantics: N12
def test_what_a_lost_owner_has_not_answered_goes_by_the_home_broker() -> None:
    story = Story()
    story.begin()
    story.publish(2)
    story.publish(1, 0)
    owner = story.mesh.nodes["b"]
    story.host.cut("b")
    owner.flush()
    story.mesh.run()
    assert story.host.machine.direct.sent_again == 2
    assert story.answers() == [2, 3]
    assert story.received() == [b"2", b"3"], "what nobody acknowledges at QoS 0 is lost with the link"
    sent = story.publish(2)
    story.mesh.run()
    assert story.received() == sent
    assert story.at("b") == 0


def test_the_home_broker_is_lost_and_the_owner_is_not() -> None:
    story = Story()
    story.go_direct()
    owner = story.host.streams["b"]
    story.mesh.streams.remove(owner)
    sent = story.publish(2)
    story.host.cut("a")
    story.mesh.run()
    assert story.answers() == []
    story.mesh.streams.append(owner)
    story.mesh.run()
    assert story.answers() == [3, 4], "what is under way to the owner is not sent again"
    assert story.received() == sent
    assert story.host.machine.direct.sent_again == 0
    sent = story.publish(2)
    story.mesh.run()
    assert story.received() == sent


def test_home_and_owner_are_lost_at_once() -> None:
    story = Story()
    story.begin()
    sent = story.publish(2)
    story.host.cut("b", crashed=True)
    story.host.cut("a")
    assert story.host.broker_of(story.sender) == "c"
    story.mesh.run()
    sent += story.publish(1)
    story.mesh.run()
    assert story.answers() == [2, 3, 4]
    assert story.received() == sent


def test_a_client_that_left_is_not_answered() -> None:
    story = Story()
    story.begin()
    story.publish(2)
    story.sender.vanish()
    story.mesh.run()
    assert story.received() == [b"2", b"3"]
    story.host.cut("b")
    story.mesh.run()
    assert story.host.machine.direct.sent_again == 0


# semantics: N22
def test_a_topic_of_another_class_goes_home_again() -> None:
    story = Story()
    story.begin()
    for node in story.mesh.nodes.values():
        node.fabric.classes.replace([("owned/#", "bridged")], 5)
        node.flush()
    sent = story.publish(2)
    story.mesh.run()
    assert story.answers() == [2, 3]
    assert sorted(story.received()) == sent
    assert story.host.machine.direct.topics == {}
    sent = story.publish(2)
    story.mesh.run()
    assert story.received() == sent


# --- what a client may not do -------------------------------------------------------------------------------------------


class Rules:
    """One client may publish nothing."""

    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return client_id != "other"

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return True


# semantics: N12
@pytest.mark.parametrize("version", [4, 5])
def test_the_owner_refuses_what_its_rules_forbid(version: int) -> None:
    story = Story()
    story.begin()
    other = story.host.connect("other", version)
    story.publish(1, 1, other)
    story.mesh.run()
    assert story.received() != []
    other.take()
    story.mesh.nodes["b"].engine.set_authorizer(Rules())
    story.publish(1, 1, other)
    story.mesh.run()
    assert story.received() == []
    assert other.take() == [PubAck(story.number, reasons.NOT_AUTHORIZED if version == 5 else 0)]
    story.mesh.nodes["b"].engine.set_authorizer(None)
    sent = story.publish(1, 1, other)
    story.mesh.run()
    assert story.received() == sent


def test_what_makes_no_sense_is_judged_by_the_home_broker() -> None:
    story = Story()
    story.begin()
    # A PUBLISH with a property that no PUBLISH has.
    body = len(TOPIC).to_bytes(2, "big") + TOPIC.encode() + b"\x00\x07" + b"\x02\x17\x01" + b"x"
    story.sender.say(bytes((0x32, len(body))) + body)
    assert isinstance(story.sender.take()[-1], Disconnect)
    assert story.sender.closed


# semantics: N15
def test_a_client_that_does_not_want_its_own_messages_does_not_get_them() -> None:
    story = Story()
    story.begin()
    story.sender.say(Subscribe(9, [SubscriptionRequest("owned/#", 1, no_local=True)]))
    story.sender.take()
    sent = story.publish(2)
    story.mesh.run()
    assert story.received() == sent
    assert [packet for packet in story.sender.take() if isinstance(packet, Publish)] == []


def test_a_gateway_may_be_told_to_leave_it() -> None:
    story = Story(settings=GatewaySettings(publish_to_owners=False, follow_owners=False))
    story.begin()
    sent = story.publish(3)
    story.mesh.run()
    assert story.received() == sent
    assert story.at("b") == 0


# --- aliases, sizes, keep-alive -----------------------------------------------------------------------------------------


def aliased(topic: str, payload: bytes, alias: int, packet_id: int = 0) -> Publish:
    return Publish(topic, payload, 1 if packet_id else 0, packet_id=packet_id, properties=Properties(topic_alias=alias))


@pytest.mark.parametrize("qos", [0, 1])
def test_aliases_mean_the_same_on_every_path(qos: int) -> None:
    story = Story()
    story.begin()
    story.listener.say(Subscribe(2, [SubscriptionRequest("plain", 1)]))
    story.listener.take()
    story.sender.say(aliased("plain", b"1", 1, qos * 61))  # defined at home
    story.sender.say(aliased(TOPIC, b"2", 1, qos * 62))  # defined anew, elsewhere
    story.sender.say(aliased("", b"3", 1, qos * 63))
    assert story.at("b") == 2
    story.host.cut("b")
    story.mesh.run()
    story.sender.say(aliased("", b"4", 1, qos * 64))  # the home broker has to know it now
    story.sender.say(aliased("", b"5", 1, qos * 65))
    assert story.at("b") == 2
    story.sender.say(aliased("plain", b"6", 1, qos * 66))
    story.sender.say(aliased("", b"7", 1, qos * 67))
    assert sorted(story.received()) == [b"1", b"2", b"3", b"4", b"5", b"6", b"7"]
    assert not story.sender.closed
    assert story.answers() == ([61, 62, 63, 64, 65, 66, 67] if qos else [])


def test_a_large_packet_goes_in_pieces() -> None:
    story = Story()
    story.begin()
    large = b"l" * 900_000
    story.number += 1
    story.sender.whisper(encode(Publish(TOPIC, large, 1, packet_id=story.number), 5))
    behind = story.publish(2)
    story.mesh.run()
    assert story.received() == [large, *behind]
    assert story.answers() == [2, 3, 4]
    assert story.at("b") == 3


def test_a_very_large_packet_goes_home_and_those_behind_it_wait_for_it() -> None:
    story = Story()
    story.host.machine.direct.max_packet_bytes = 262_144
    story.begin()
    large = b"l" * 300_000
    story.number += 1
    story.sender.whisper(encode(Publish(TOPIC, large, 1, packet_id=story.number), 5))
    behind = story.publish(2)
    story.mesh.run()
    assert story.received() == [large, *behind]
    assert story.answers() == [2, 3, 4]
    assert story.at("b") == 2


# semantics: N7
def test_a_very_large_packet_waits_for_those_before_it() -> None:
    story = Story()
    story.host.machine.direct.max_packet_bytes = 262_144
    story.go_direct()
    owner = story.host.streams["b"]
    story.mesh.streams.remove(owner)
    sent = story.publish(2)
    run = b""
    for payload in (b"small", b"l" * 300_000):  # of one read
        story.number += 1
        sent.append(payload)
        run += encode(Publish(TOPIC, payload, 1, packet_id=story.number), 5)
    story.sender.whisper(run)
    sent += story.publish(2)
    story.mesh.run()
    assert story.received() == [], "the way home is quicker, and not taken"
    story.mesh.streams.append(owner)
    story.mesh.run()
    assert story.received() == sent
    assert story.answers() == [3, 4, 5, 6, 7, 8]


def test_the_home_broker_does_not_take_a_client_that_talks_to_the_owner_for_silent() -> None:
    story = Story()
    sender = story.host.accept()
    sender.say(Connect("alive", keep_alive=4))
    sender.take()
    story.sender = sender
    story.begin()
    for _ in range(10):
        story.publish(1)
        story.host.advance(1.0)
    assert story.at("b") == 10
    assert not sender.closed
    assert story.mesh.nodes["a"].engine.stats.keep_alive_timeouts == 0
    sender.say(PingReq())
    assert sender.take()[-1] == PingResp()


def test_a_link_that_takes_no_more_holds_up_its_clients_and_no_others() -> None:
    story = Story()
    story.begin()
    stream = story.host.streams["b"]
    stream[0].link.connection.congested = True  # type: ignore[union-attr]
    sent = story.publish(1)
    story.sender.say(PingReq())
    assert story.sender.take() == [], "packets stay in order on the way home, too"
    other = story.host.connect("other")
    other.say(PingReq())
    assert other.take() == [PingResp()]
    stream[0].link.connection.congested = False  # type: ignore[union-attr]
    story.host.fabric.link_writable(stream[0].link, story.mesh.now)  # type: ignore[arg-type]
    story.host.flush()
    story.mesh.run()
    assert story.received() == sent
    assert PingResp() in story.sender.take()


# semantics: N7
def test_a_client_moves_while_it_publishes() -> None:
    story = Story()
    story.begin()
    sent: list[bytes] = []
    for target in ("c", "b", "a", "b"):
        sent += story.publish(2)
        story.host.machine.move(target, story.mesh.now, client="sender")
        sent += story.publish(2)
        story.mesh.run()
        sent += story.publish(1)
        story.mesh.run()
        assert story.host.broker_of(story.sender) == target
    assert story.received() == sent
    assert story.answers() == list(range(2, story.number + 1))


def test_links_to_owners_are_kept_while_they_are_used() -> None:
    story = Story()
    story.host.machine.choice.known["b"].configured = False
    story.host.machine.choice.ranking = []
    story.begin()
    for _ in range(40):
        story.publish(1)
        story.host.advance(1.0)
    assert "b" in story.host.machine.lines
    assert story.at("b") == 40


# --- everything at once -------------------------------------------------------------------------------------------------


# semantics: N7
@pytest.mark.parametrize("seed", range(12))
def test_owners_and_clients_move_while_everything_is_under_way(seed: int) -> None:
    """Nothing breaks: then nothing is lost, nothing comes twice, each client's messages stay in order, and so do its
    PUBACKs, whatever overtakes whatever."""
    rng = random.Random(seed)
    story = Story(durable=seed % 3 == 0)
    senders = [story.sender] + [story.host.connect(f"s{number}") for number in range(2)]
    sent: dict[Client, list[bytes]] = {sender: [] for sender in senders}
    asked: dict[Client, list[int]] = {sender: [] for sender in senders}
    received: list[bytes] = []
    for _ in range(400):
        choice = rng.random()
        if choice < 0.15:
            sender = rng.choice(senders)
            size = rng.choice((0, 0, 0, 300_000 if rng.random() < 0.1 else 5))
            story.number += 1
            payload = b"%d %d" % (senders.index(sender), story.number) + b"." * size
            sender.whisper(encode(Publish(TOPIC, payload, 1, packet_id=story.number), 5))
            sent[sender].append(payload)
            asked[sender].append(story.number)
        elif choice < 0.17:
            story.mesh.directory.answer()
            _, owner = story.mesh.directory.owners[TOPIC]
            if story.mesh.owners(TOPIC) == [owner]:
                story.mesh.migrate(TOPIC, rng.choice([name for name in "abc" if name != owner]))
        elif choice < 0.18:
            client = f"s{rng.randrange(2)}"
            story.host.machine.move(rng.choice("abc"), story.mesh.now, client=client)
            story.host.flush()
        else:
            one_arrives(story, rng)
        received += story.received()
    for _ in range(30):
        story.mesh.run()
        received += story.received()
        story.host.advance(0.3)
    assert story.host.machine.direct.messages > 0
    for number, sender in enumerate(senders):
        prefix = b"%d " % number
        assert [payload for payload in received if payload.startswith(prefix)] == sent[sender], f"seed {seed}"
        assert [packet.packet_id for packet in sender.take() if isinstance(packet, PubAck)] == asked[sender]
    assert sum(node.fabric.ownership.late_gates for node in story.mesh.nodes.values()) == 0


def one_arrives(story: Story, rng: random.Random) -> None:
    """A piece of one stream arrives, or a disk takes what was written."""
    waiting = [end for stream in story.mesh.streams for end in stream if end.inbox]
    if waiting:
        end = rng.choice(waiting)
        assert end.link is not None
        end.node.fabric.receive(end.link, end.inbox.popleft(), story.mesh.now)
        end.node.flush()
    for node in story.mesh.nodes.values():
        if node.wants_sync and rng.random() < 0.3:
            node.sync()
    story.mesh.directory.answer()


# --- the pieces ---------------------------------------------------------------------------------------------------------


def test_answers_in_order() -> None:
    client = DirectClient(None, "a", 0.0)
    for packet_id in (3, 1, 2):
        client.published(packet_id)
    assert client.answered(1, puback(1, 0)) == []
    assert client.answered(9, puback(9, 0)) == [puback(9, 0)], "somebody else's business"
    assert client.in_order(puback(3, 0) + b"\xd0\x00") == puback(3, 0) + puback(1, 0) + b"\xd0\x00"
    assert client.unanswered == 1
    assert client.in_order(puback(2, 0x87)) == puback(2, 0x87)
    assert client.unanswered == 0


def test_a_gateway_that_counts_wrong_loses_its_link() -> None:
    story = Story()
    story.begin()
    line = story.host.machine.lines["b"]
    line.direct._number = 7
    story.publish(1)
    story.mesh.run()
    assert story.at("b") == 0
    assert "b" not in story.host.machine.lines
    assert story.answers() == [2]


def test_frames_that_are_not_for_a_broker() -> None:
    story = Story()
    line = story.host.machine.lines["b"]
    line.link.send(frames.frame(frames.OWNED_ACK, b"\x00\x00"))
    story.host.flush()
    story.mesh.run()
    assert "b" not in story.host.machine.lines


def counted(story: Story, broker: str) -> int:
    """Producers of the topic, as a broker would report them."""
    node = story.mesh.nodes[broker]
    audience = Audience(node.fabric, None)
    audience.begin(None, story.mesh.now)
    crowd = Gathering()
    audience.producers(node.fabric.ownership.topic(TOPIC.encode()), crowd, story.mesh.now)
    return crowd.count


def test_a_producer_counts_once_whichever_way_its_messages_go() -> None:
    story = Story()
    story.begin()
    assert (counted(story, "a"), counted(story, "b")) == (1, 0)
    story.publish(1)
    story.mesh.run()
    assert (counted(story, "a"), counted(story, "b")) == (0, 1), "straight to the owner"
    story.host.machine.move("b", story.mesh.now, client="sender")
    story.mesh.run()
    story.host.advance(direct_clients.MARKED_S)
    story.publish(1)
    story.mesh.run()
    assert story.at("b") == 1
    assert (counted(story, "a"), counted(story, "b")) == (0, 1), "the owner is its home"
    story.mesh.migrate(TOPIC, "c")
    story.mesh.run()
    story.host.advance(1.0)
    story.publish(1)
    story.mesh.run()
    assert [counted(story, name) for name in "abc"] == [0, 0, 1]
    story.sender.say(Publish(TOPIC, b"by the home broker", 1, dup=True, packet_id=900))
    story.host.advance(1.0)
    assert [counted(story, name) for name in "abc"] == [0, 1, 0]

"""A gateway moves clients between real brokers, without sockets: nothing is lost, nothing comes twice, whatever breaks."""

from __future__ import annotations

import random

import pytest

from nearcast.config import Limits
from nearcast.fabric.gateway import GatewaySettings
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import (
    Connect,
    PingReq,
    PingResp,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    Subscribe,
    SubscriptionRequest,
)
from tests.fabric_harness import End
from tests.gateway_hosts import Client, GatewayHost
from tests.unit.fabric.test_gateway import gateway, subscribe


def move(host: GatewayHost, client: Client, target: str) -> None:
    assert client.tunnel is not None
    host.machine.move(target, host.mesh.now, client=client.tunnel.client_id)
    host.flush()


def at(host: GatewayHost, broker: str, client_id: str, version: int = 5) -> Client:
    host.machine.assign(broker, [], host.mesh.now)
    client = host.connect(client_id, version)
    assert host.broker_of(client) == broker
    return client


@pytest.mark.parametrize("version", [4, 5])
def test_a_client_is_moved_and_notices_nothing(version: int) -> None:
    host = gateway("a", "b")
    client, sender = at(host, "a", "c", version), at(host, "a", "s", version)
    subscribe(client, "t", 1)
    move(host, client, "b")
    host.mesh.run()
    assert host.broker_of(client) == "b"
    assert host.machine.moves.moved == 1
    assert client.take() == []
    sender.say(Publish("t", b"hello", 1, packet_id=1))
    assert client.payloads() == [b"hello"]
    assert "c" not in host.mesh.nodes["a"].engine.sessions.by_client
    assert not [channel for channel in host.machine.lines["a"].channels.values() if channel.tunnel is client.tunnel]


@pytest.mark.parametrize("seed", range(12))
def test_messages_of_every_quality_while_a_client_moves_to_and_fro(seed: int) -> None:
    """Steps of everything happen in between: what the gateway has read, what is on its way, what has arrived."""
    rng = random.Random(seed)
    host = gateway("a", "b", "c")
    version = rng.choice([4, 5])
    client = at(host, "a", "c", version)
    senders = [at(host, name, f"s{name}", version) for name in "abc"]
    for qos in (0, 1, 2):
        client.say(Subscribe(qos + 1, [SubscriptionRequest(f"t/{qos}", qos)]))
    client.take()
    sent: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    received: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
    own: list[int] = []

    def answer() -> None:
        for packet in client.take():
            if isinstance(packet, Publish):
                received[int(packet.topic[2:])].append(packet.payload)
                if packet.qos == 1:
                    client.whisper(_raw(PubAck(packet.packet_id), version))
                elif packet.qos == 2:
                    client.whisper(_raw(PubRec(packet.packet_id), version))
            elif isinstance(packet, PubRel):
                client.whisper(_raw(PubComp(packet.packet_id), version))
            elif isinstance(packet, PubAck):
                own.remove(packet.packet_id)

    for step in range(150):
        sender = rng.choice(senders)
        qos = rng.randrange(3)
        payload = b"%d" % step
        sent[qos].append(payload)
        sender.whisper(_raw(Publish(f"t/{qos}", payload, qos, packet_id=step + 1 if qos else 0), version))
        if rng.random() < 0.3:
            own.append(step + 1)
            client.whisper(_raw(Publish("own", payload, 1, packet_id=step + 1), version))
        if rng.random() < 0.2:
            move(host, client, rng.choice("abc"))
        for _ in range(rng.randrange(20)):
            _step(host, rng)
        answer()
    for _ in range(5):
        host.mesh.run()
        answer()
    for qos in (0, 1, 2):
        assert sorted(received[qos], key=int) == sent[qos], f"QoS {qos}, seed {seed}"
    assert own == [], "every message of its own was acknowledged, once"
    assert host.machine.moves.moved > 3
    assert host.machine.moves.failed == 0


def _raw(packet: PubAck | PubRec | PubRel | PubComp | Publish, version: int) -> bytes:

    return encode(packet, version)


def _step(host: GatewayHost, rng: random.Random) -> None:
    """One thing that is on its way arrives."""
    ends = [end for stream in host.mesh.streams for end in stream if end.inbox and end.link is not None]
    if ends:
        end = rng.choice(ends)
        assert end.link is not None
        end.node.fabric.receive(end.link, end.inbox.popleft(), host.mesh.now)
        end.node.flush()


def test_a_move_to_an_unknown_broker_fails_and_the_client_stays() -> None:
    host = gateway("a")
    client = at(host, "a", "c")
    move(host, client, "nowhere")
    host.mesh.run()
    (order,) = host.machine.moves.take_finished()
    assert order.failed == 1
    assert "nowhere cannot be reached" in order.reason
    client.say(PingReq())
    assert client.take() == [PingResp()]


def test_a_large_packet_is_finished_before_the_client_moves() -> None:

    host = gateway("a", "b", limits=Limits(max_packet_bytes=4_000_000, max_output_bytes=8_000_000))
    client, receiver = at(host, "a", "c"), at(host, "b", "r")
    subscribe(receiver, "t")
    payload = bytes(range(256)) * 4_000
    client.whisper(_raw(Publish("t", payload), 5))
    assert client.tunnel is not None
    assert client.tunnel.pending_bytes > 0
    move(host, client, "b")
    client.whisper(_raw(Publish("t", b"after"), 5))
    host.mesh.run()
    assert host.broker_of(client) == "b"
    assert receiver.payloads() == [payload, b"after"]


def test_all_clients_leave_a_broker_that_stops() -> None:
    host = gateway("a", "b")
    clients = [at(host, "a", f"c{number}") for number in range(100)]
    for line in host.mesh.nodes["a"].fabric.trunks.by_link:
        assert line is not None
    host.mesh.nodes["a"].fabric.trunks.leave(host.mesh.now)
    host.mesh.nodes["a"].flush()
    host.mesh.run()
    assert {host.broker_of(client) for client in clients} == {"b"}
    assert host.mesh.nodes["a"].fabric.trunks.clients() == 0
    assert host.broker_of(host.connect("new")) == "b"


def test_orders_are_paced() -> None:
    host = gateway("a", "b")
    for number in range(20):
        at(host, "a", f"c{number}")
    host.machine.move("b", host.mesh.now, number=7, per_second=4)
    host.flush()
    host.mesh.run()
    begun = host.machine.moves.moved
    assert 0 < begun < 10
    for _ in range(80):
        host.advance(0.1)
    assert host.machine.moves.moved == 20
    (order,) = host.machine.moves.take_finished()
    assert (order.number, order.moved, order.failed) == (7, 20, 0)


def test_a_client_that_leaves_in_the_middle_of_a_move() -> None:
    host = gateway("a", "b")
    client = at(host, "a", "c")
    rng = random.Random(3)
    move(host, client, "b")
    for _ in range(6):
        _step(host, rng)
    client.vanish()
    for name in "ab":
        assert host.mesh.nodes[name].engine.stats.connected_clients == 0
    assert not host.machine.moves.under_way


@pytest.mark.parametrize("steps", range(0, 40, 2))
@pytest.mark.parametrize("lost", ["a", "b"])
def test_a_broker_that_is_lost_at_any_moment_of_a_move(steps: int, lost: str) -> None:
    """The client goes on at one of the brokers that are left, and its session is whole: nothing of QoS 1 is missing."""
    host = gateway("a", "b", "c", settings=GatewaySettings(move_timeout_s=2))
    client, sender = at(host, "a", "c"), at(host, "c", "s")
    subscribe(client, "t", 1)
    rng = random.Random(steps)
    client.whisper(_raw(Publish("own", b"x", 1, packet_id=77), 5))
    move(host, client, "b")
    for _ in range(steps):
        _step(host, rng)
    host.cut(lost)
    for _ in range(40):
        host.advance(0.1)
    assert not client.closed
    assert host.broker_of(client) in {"a", "b", "c"} - {lost}
    assert [packet.packet_id for packet in client.take() if isinstance(packet, PubAck)] == [77]
    for number in range(5):
        sender.say(Publish("t", b"%d" % number, 1, packet_id=number + 1))
    came = [packet for packet in client.take() if isinstance(packet, Publish)]
    assert [packet.payload for packet in came] == [b"0", b"1", b"2", b"3", b"4"]
    client.say(PingReq())
    assert client.take()[-1] == PingResp()
    assert not host.machine.moves.under_way


@pytest.mark.parametrize("version", [4, 5])
def test_what_a_broker_that_is_lost_in_a_move_passed_on_at_qos_0_does_not_go_out_again(version: int) -> None:
    host = gateway("a", "b", "c", settings=GatewaySettings(move_timeout_s=2))
    client, other = at(host, "a", "c", version), at(host, "c", "s")
    subscribe(other, "own", 1)
    move(host, client, "b")
    from_a, from_b = host.streams["a"][0], host.streams["b"][0]
    between = next(stream for stream in host.mesh.streams if {end.node.name for end in stream} == {"a", "b"})
    b_to_a = next(end for end in between if end.node.name == "a")
    _run_but(host, from_a)
    _run_but(host, from_b, b_to_a)
    client.whisper(_raw(Publish("own", b"first", 0), version) + _raw(Publish("own", b"last", 1, packet_id=77), version))
    _run_but(host, from_b, b_to_a)  # b has the client, and nobody else knows
    host.cut("b")
    host.mesh.cut(between)
    for _ in range(40):
        host.advance(0.1)
    came = [packet.payload for packet in other.take() if isinstance(packet, Publish)]
    assert came.count(b"first") == 1
    assert came[-1] == b"last"
    assert [packet.packet_id for packet in client.take() if isinstance(packet, PubAck)] == [77]


def _run_but(host: GatewayHost, *deaf: End) -> None:
    """Everything arrives but what comes to these ends."""
    while True:
        ends = [end for stream in host.mesh.streams for end in stream if end.inbox and end.link and end not in deaf]
        for end in ends:
            assert end.link is not None
            end.node.fabric.receive(end.link, end.inbox.popleft(), host.mesh.now)
            end.node.flush()
        if not ends:
            return


def test_clients_leave_a_broker_that_is_no_longer_configured() -> None:
    host = gateway("a", "b")
    clients = [at(host, "a", f"c{number}") for number in range(5)]
    host.machine.assign("", [], host.mesh.now)
    host.machine.use([("b", "")], host.mesh.now)
    host.flush()
    host.mesh.run()
    assert {host.broker_of(client) for client in clients} == {"b"}
    assert host.broker_of(host.connect("new")) == "b"


@pytest.mark.parametrize("seed", range(10))
def test_links_break_and_come_back_under_load(seed: int) -> None:
    """Whatever link breaks whenever: nothing of QoS 1 or 2 is missing, nothing of QoS 2 comes twice, each exchange ends, and
    the client stays connected."""
    rng = random.Random(seed)
    host = gateway("a", "b", "c")
    version = rng.choice([4, 5])
    client = at(host, "a", "c", version)
    watcher = host.mesh.nodes["c"].client()
    node = host.mesh.nodes["c"]
    node.feed(watcher, encode(Connect("w"), 5) + encode(Subscribe(1, [SubscriptionRequest("own", 0)]), 5))
    client.say(Subscribe(1, [SubscriptionRequest("own", 1)]))
    client.take()
    sent: list[bytes] = []
    once: list[bytes] = []
    unacknowledged: dict[int, bytes] = {}
    heard: set[bytes] = set()

    def answer() -> None:
        for packet in client.take():
            if isinstance(packet, Publish):
                heard.add(packet.payload)
                client.whisper(_raw(PubAck(packet.packet_id), version))
            elif isinstance(packet, PubRec):
                client.whisper(_raw(PubRel(packet.packet_id), version))
            elif isinstance(packet, (PubAck, PubComp)):
                unacknowledged.pop(packet.packet_id, None)

    for step in range(1, 120):
        payload = b"%d" % step
        sent.append(payload)
        unacknowledged[step] = payload
        qos = rng.choice([1, 2])
        if qos == 2:
            once.append(payload)
        client.whisper(_raw(Publish("own", payload, qos, packet_id=step), version))
        if rng.random() < 0.1 and len(host.streams) > 1:
            host.cut(rng.choice(list(host.streams)))
        elif rng.random() < 0.15 and len(host.streams) < 3:
            host.link(rng.choice([name for name in "abc" if name not in host.streams]))
        elif rng.random() < 0.1:
            move(host, client, rng.choice("abc"))
        for _ in range(rng.randrange(15)):
            _step(host, rng)
        answer()
    for _ in range(60):
        host.advance(0.2)
        answer()
    assert not client.closed
    assert host.machine.stats.resumed > 0
    assert not host.machine.moves.under_way
    assert unacknowledged == {}
    while watcher.inbox:
        watcher.received += watcher.inbox.popleft()
    arrived = [packet.payload for packet in PacketReader(5).feed(bytes(watcher.received)) if isinstance(packet, Publish)]
    assert set(arrived) == set(sent), f"seed {seed}"
    assert [payload for payload in once if arrived.count(payload) != 1] == [], f"seed {seed}"
    assert heard == set(sent), f"seed {seed}"

"""Moves that do not go as planned: brokers and links that break at any moment, clients that do other things meanwhile."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from nearcast.config import Limits
from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Connect, Disconnect, Publish, Unsubscribe, Will
from nearcast.mqtt.records import blob, number
from tests.fabric_harness import End, Mesh
from tests.gateway_harness import Gateway, MqttClient, Shuffle, run_all


class World:
    """Brokers that are all linked, and a gateway."""

    def __init__(self, names: str = "abc", *, seed: int = 1, durable: bool = False) -> None:
        self.mesh = Mesh(seed, FabricSettings(move_timeout_seconds=2.0))
        self.links: dict[str, tuple[End, End]] = {}
        for name in names:
            self.mesh.add(name, durable=durable)
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                self.link(first + second)
        self.mesh.run()
        self.gateway = Gateway(self.mesh, "gateway")

    def link(self, pair: str) -> None:
        self.links[pair] = self.mesh.link(pair[0], pair[1])

    def cut(self, pair: str) -> None:
        stream = self.links.pop(pair)
        if stream in self.mesh.streams:
            self.mesh.cut(stream)

    def run(self) -> None:
        run_all(self.mesh, self.gateway)

    def advance(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.25)):
            self.mesh.advance(0.25)
            self.run()

    def crash(self, name: str, *, power_cut: bool = True) -> None:
        """A broker dies and starts again; its links to brokers are made anew."""
        trunk = self.gateway.trunks.pop(name, None)
        if trunk is not None:
            trunk.up = False
        self.mesh.nodes[name].crash(power_cut=power_cut)
        for pair in list(self.links):
            if name in pair:
                del self.links[pair]
                self.link(pair)

    def homes(self, client_id: str) -> str:
        """The brokers that have a session of this client."""
        return "".join(name for name, node in self.mesh.nodes.items() if client_id in node.engine.sessions.by_client)

    def clean(self) -> None:
        """Nothing is left of any move."""
        for node in self.mesh.nodes.values():
            handover = node.fabric.handover
            assert not handover.departures.by_move
            assert not handover.departures.by_client
            assert not handover.arrivals.by_move
            assert not any(peer.fenced for peer in node.fabric.peers.values())

    def frozen(self, client: MqttClient) -> None:
        """Prepare a move to b up to the moment of FREEZE, which is under way."""
        self.gateway.stepwise = True
        client.move("b")
        Shuffle(self.mesh, random.Random(1), self.gateway).until(lambda: client.switching)


def world_with_client(*, durable: bool = False, **connect: object) -> tuple[World, MqttClient, MqttClient]:
    world = World(durable=durable)
    publisher = world.gateway.mqtt_client("c", "publisher")
    client = world.gateway.mqtt_client("a", "client", MQTT_5, **connect)
    client.subscribe("t/#", 2)
    world.run()
    return world, client, publisher


# --- refused from the start ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "reason"), [("a", "here already"), ("nowhere", "cannot be reached from a")])
def test_targets_that_are_none(target: str, reason: str) -> None:
    world, client, publisher = world_with_client()
    client.move_number = 5
    client.trunk.send(frame(frames.MOVE, number(client.number), number(5), blob(target.encode())))
    world.run()
    assert reason in client.failures[0]
    publisher.publish("t", b"x", 1)
    world.run()
    assert client.messages == [("t", b"x")]
    world.clean()


def test_a_client_that_is_not_connected_cannot_be_moved() -> None:
    world = World()
    client = world.gateway.client("a")
    client.move("b")
    assert client.failures == ["the client is not connected"]


def test_a_client_is_moved_once_at_a_time() -> None:
    world, client, _ = world_with_client()
    client.gateway.stepwise = True
    client.move("b")
    client.trunk.send(frame(frames.MOVE, number(client.number), number(77), blob(b"c")))
    client.gateway.stepwise = False
    first = client.move_number
    client.trunk.step_to_broker()
    client.trunk.step_to_broker()
    client.move_number = 77
    client.trunk.step_to_gateway()
    assert client.failures == ["the client is being moved already"]
    client.move_number = first
    world.run()
    assert client.moves == 1


def test_another_client_of_that_name_is_there() -> None:
    world, client, _ = world_with_client()
    other = world.mesh.nodes["b"]
    end = other.client()
    other.engine.handshake.claims = None  # as if it had connected at the same moment
    other.feed(end, encode(Connect(version=MQTT_5, client_id="client", clean_start=True, keep_alive=0), MQTT_5))
    client.move("b")
    world.run()
    assert client.failures[:1] == ["another client of this name is at b"] or client.closed is not None
    world.clean()


# --- what the client does meanwhile -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_subscriptions_that_change_during_a_move(seed: int) -> None:
    rng = random.Random(seed)
    world, client, publisher = world_with_client(durable=rng.random() < 0.5, expiry=100)
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    client.move("b")
    shuffle.steps(rng.randrange(40))
    client.subscribe("late", 1)
    client.write(encode(Unsubscribe(4_000, ["t/#"]), MQTT_5))
    shuffle.until(lambda: client.subacks == 2 and not client.is_moving)
    publisher.publish("late", b"1", 1)
    publisher.publish("t/x", b"2", 1)
    shuffle.run()
    assert client.messages == [("late", b"1")]
    assert (client.moves, client.failures) == (1, [])
    world.advance(1)
    world.clean()


def test_a_client_that_leaves_before_it_is_moved() -> None:
    world, client, _ = world_with_client()
    client.gateway.stepwise = True
    client.move("b")
    client.write(encode(Disconnect(), MQTT_5))
    client.gateway.stepwise = False
    world.run()
    assert client.closed == "client disconnected"
    assert world.homes("client") == ""
    world.clean()


@pytest.mark.parametrize("goodbye", [True, False])
def test_a_client_that_leaves_while_its_session_is_on_its_way(goodbye: bool) -> None:
    world, client, publisher = world_with_client(will=Will("t/will", b"gone"))
    publisher.subscribe("t/will", 0)
    world.run()
    world.frozen(client)
    if goodbye:
        client.write(encode(Disconnect(), MQTT_5))
    else:
        client.close()
    world.gateway.stepwise = False
    world.run()
    assert publisher.messages == ([] if goodbye else [("t/will", b"gone")])
    assert world.homes("client") == ""
    world.clean()


def test_the_will_goes_along_and_is_not_published() -> None:
    world, client, publisher = world_with_client(will=Will("will", b"gone"))
    publisher.subscribe("will", 1)
    client.move("b")
    world.run()
    world.advance(1)
    assert publisher.messages == []
    client.close()
    world.run()
    assert publisher.messages == [("will", b"gone")]


def test_a_client_does_not_get_its_own_messages_back() -> None:
    world = World()
    client = world.gateway.mqtt_client("a", "client")
    client.subscribe("t", 1, no_local=True)
    other = world.gateway.mqtt_client("c", "other")
    other.subscribe("t", 1)
    world.run()
    shuffle = Shuffle(world.mesh, random.Random(3), world.gateway)
    sent = 0
    for target in "bcabcacb":
        for _ in range(5):
            client.publish("t", b"%d" % sent, 1)
            sent += 1
            shuffle.steps(2)
        if target != client.trunk.broker:
            client.move(target)
        shuffle.until(lambda: not client.is_moving)
    shuffle.run()
    assert client.messages == []
    assert sorted(payload for _, payload in other.messages) == sorted(b"%d" % index for index in range(sent))


@pytest.mark.parametrize("seed", range(12))
def test_messages_of_shared_subscriptions_are_delivered_once(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed=seed, durable=rng.random() < 0.5)
    members = [world.gateway.mqtt_client(name, f"member-{name}", expiry=50) for name in "ab"]
    publishers = [world.gateway.mqtt_client(name, f"publisher-{name}") for name in "abc"]
    for member in members:
        member.subscribe("$share/group/t/#", 2)
    world.run()
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    for index in range(90):
        rng.choice(publishers).publish(f"t/{index % 3}", b"%d" % index, index % 3)
        mover = rng.choice(members)
        if not mover.is_moving and rng.random() < 0.3:
            mover.move(rng.choice([name for name in "abc" if name != mover.trunk.broker]))
        shuffle.steps(rng.randrange(20))
    shuffle.run()
    for _ in range(20):
        world.mesh.advance(0.2)
        shuffle.run()
    got = sorted(int(payload) for member in members for _, payload in member.messages)
    assert got == list(range(90))
    assert sum(member.moves for member in members) > 3
    world.clean()


def test_a_client_that_does_not_read_is_moved_with_all_it_is_owed() -> None:
    world, client, publisher = world_with_client(expiry=100)
    client.reads = False
    client.acknowledges = False
    for index in range(100):
        publisher.write(encode(Publish("t/bulk", b"%04d" % index + b"." * 10_000, 1, packet_id=index + 1), MQTT_5))
    world.run()
    client.move("b")
    world.run()
    assert client.moves == 1
    client.reads = True
    client.acknowledges = True
    client.answer()
    client.pass_on()
    world.run()
    assert [int(payload[:4]) for _, payload in client.messages] == list(range(100))


def test_retained_messages_that_wait_for_room_are_not_forgotten() -> None:
    world = World()
    publisher = world.gateway.mqtt_client("a", "publisher")
    for index in range(200):
        publisher.write(encode(Publish(f"r/{index}", b"." * 10_000, 0, retain=True), MQTT_5))
    client = world.gateway.mqtt_client("a", "client")
    client.reads = False
    client.subscribe("r/#", 0)
    world.run()
    client.move("b")
    world.run()
    client.reads = True
    client.pass_on()
    world.run()
    assert client.moves == 1
    assert {topic for topic, _ in client.messages} == {f"r/{index}" for index in range(200)}
    assert len(client.messages) == 200


# --- what breaks --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", range(0, 60, 6))
@pytest.mark.parametrize("pair", ["ab", "ac", "bc"])
def test_a_link_that_breaks_at_any_moment(steps: int, pair: str) -> None:
    world, client, publisher = world_with_client(durable=True, expiry=100)
    rng = random.Random(steps)
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    client.move("b")
    sent = 0
    for step in range(60):
        if step == steps:
            world.cut(pair)
        if step % 4 == 0:
            publisher.publish("t", b"%d" % sent, 1 + sent % 2)
            sent += 1
        shuffle.step()
    shuffle.run()
    for _ in range(8):
        world.mesh.advance(0.5)
        shuffle.run()
    world.link(pair)
    for _ in range(30):
        world.mesh.advance(0.5)
        shuffle.run()
    assert [int(payload) for _, payload in client.messages] == list(range(sent))
    assert world.homes("client") == client.trunk.broker
    world.clean()


@pytest.mark.parametrize("seed", range(16))
def test_links_that_break_again_and_again_while_clients_move(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed=seed, durable=rng.random() < 0.5)
    publishers = [world.gateway.mqtt_client(name, f"publisher-{name}") for name in "abc"]
    client = world.gateway.mqtt_client("a", "client", expiry=100)
    client.subscribe("q1/#", 1)
    client.subscribe("q2/#", 2)
    world.run()
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    sent: dict[str, list[int]] = {}
    for index in range(100):
        number_of = rng.randrange(3)
        topic = f"q{rng.choice([1, 2])}/{number_of}"
        publishers[number_of].publish(topic, b"%d" % index, int(topic[1]))
        sent.setdefault(topic, []).append(index)
        if not client.is_moving and rng.random() < 0.3:
            client.move(rng.choice([name for name in "abc" if name != client.trunk.broker]))
        if rng.random() < 0.05 and world.links:
            world.cut(rng.choice(list(world.links)))
        elif rng.random() < 0.15:
            missing = [pair for pair in ("ab", "ac", "bc") if pair not in world.links]
            if missing:
                world.link(rng.choice(missing))
        if rng.random() < 0.1:
            world.mesh.advance(0.3)
        shuffle.steps(rng.randrange(25))
    for pair in ("ab", "ac", "bc"):
        if pair not in world.links:
            world.link(pair)
    for _ in range(60):
        world.mesh.advance(0.5)
        shuffle.run()
    got: dict[str, list[int]] = {}
    for topic, payload in client.messages:
        got.setdefault(topic, []).append(int(payload))
    assert not client.is_moving
    assert got == sent
    for values in got.values():
        assert all(before < after for before, after in pairwise(values))
    assert world.homes("client") == client.trunk.broker
    world.clean()


# --- brokers that crash -------------------------------------------------------------------------------------------------


def _publish_to_session(world: World, publisher: MqttClient) -> None:
    publisher.publish("t/1", b"kept", 1)
    world.run()


@pytest.mark.parametrize("installed", [False, True])
def test_the_old_broker_crashes_while_the_session_is_on_its_way(installed: bool) -> None:
    """It comes back with its copy, and asks the new broker, which has the session or not. There is one in the end."""
    world, client, publisher = world_with_client(durable=True, expiry=100, will=Will("will", b"gone"))
    publisher.subscribe("will", 1)
    client.acknowledges = False
    _publish_to_session(world, publisher)
    world.frozen(client)
    a, b = world.mesh.nodes["a"], world.mesh.nodes["b"]
    while client.trunk.broker == "b" and not a.engine.sessions.by_client["client"].departing_by:
        world.gateway.trunks["a"].step_to_broker()
    a.sync()
    if installed:
        world.gateway.stepwise = False
        for end in world.links["ab"]:
            while end.inbox and end.node is b:
                assert end.link is not None
                b.fabric.receive(end.link, end.inbox.popleft(), world.mesh.now)
                b.flush()
        world.gateway.trunks["b"].run()
        b.sync()
        assert "client" in b.engine.sessions.by_client
    world.crash("a")
    assert "client" in world.mesh.nodes["a"].engine.sessions.by_client
    world.run()
    world.advance(8)
    world.clean()
    if installed:
        assert world.homes("client") == "b"
        assert publisher.messages == []
        client.frozen = True
        client.answer()
    else:
        assert world.homes("client") == "a"
        assert publisher.messages == [("will", b"gone")]
        assert world.mesh.nodes["a"].engine.sessions.by_client["client"].inflight


def test_the_new_broker_crashes_before_it_has_the_session() -> None:
    world, client, publisher = world_with_client(durable=True, expiry=100)
    world.frozen(client)
    client.publish("own", b"kept by the gateway", 1)
    world.crash("b", power_cut=True)
    client.take_back()
    world.gateway.stepwise = False
    world.run()
    world.advance(3)
    assert client.taken_back == 1
    assert client.moves == 1
    assert client.trunk.broker == "a"
    assert len(client.acknowledged) == 1
    publisher.publish("t", b"x", 2)
    world.run()
    assert client.messages == [("t", b"x")]
    assert world.homes("client") == "a"
    world.clean()


def test_a_session_that_came_is_still_there_after_a_power_cut() -> None:
    world, client, publisher = world_with_client(durable=True, expiry=100)
    client.acknowledges = False
    for index in range(30):
        publisher.publish("t/1", b"%d" % index, 1 + index % 2)
    world.run()
    client.move("b")
    world.run()
    assert client.moves == 1
    world.crash("b")
    world.run()
    session = world.mesh.nodes["b"].engine.sessions.by_client["client"]
    assert len(session.inflight) + session.queued_messages == 30
    assert list(session.subscriptions) == ["t/#"]
    assert world.homes("client") == "b"


# --- a broker that is being left ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("durable", [False, True])
def test_sessions_of_clients_that_are_away_are_handed_over(durable: bool) -> None:
    world, client, publisher = world_with_client(durable=durable, expiry=100)
    client.close()
    publisher.publish("t", b"1", 1)
    world.run()
    world.mesh.nodes["a"].fabric.leave(world.mesh.now)
    world.mesh.nodes["a"].flush()
    world.run()
    publisher.publish("t", b"2", 2)
    world.run()
    assert world.mesh.nodes["a"].fabric.handover.has_left()
    assert world.homes("client") in "bc"
    session = world.mesh.nodes[world.homes("client")].engine.sessions.by_client["client"]
    assert session.queued_messages == 2
    assert session.expires_at > world.mesh.now
    world.clean()


def test_a_broker_that_stops_takes_no_clients() -> None:
    world, client, _ = world_with_client()
    world.mesh.nodes["b"].fabric.handover.leave(world.mesh.now)
    client.move("b")
    world.run()
    assert client.failures == ["b is stopping"]
    world.clean()


def test_a_client_that_goes_away_while_its_broker_is_being_left_is_handed_over_too() -> None:
    world, client, _ = world_with_client(expiry=100)
    world.mesh.nodes["a"].fabric.leave(world.mesh.now)
    world.run()
    client.close()
    world.advance(1)
    assert world.mesh.nodes["a"].fabric.handover.has_left()
    assert world.homes("client") in "bc"
    world.clean()


def test_a_broker_that_does_not_take_such_subscriptions_says_so_and_stays_linked() -> None:
    world, client, publisher = world_with_client()
    client.subscribe("t/" + "x/" * 20, 1)
    world.run()
    world.mesh.nodes["b"].fabric.limits = Limits(max_topic_levels=5)
    client.move("b")
    world.run()
    assert "does not take what the client subscribed to" in client.failures[0]
    assert world.mesh.nodes["a"].fabric.peers["b"].up
    publisher.publish("t", b"x", 1)
    world.run()
    assert client.messages == [("t", b"x")]
    world.clean()


def test_a_broker_that_is_full_takes_no_clients() -> None:
    world, client, _ = world_with_client()
    world.mesh.nodes["b"].fabric.limits = Limits(max_connections=1)
    world.gateway.mqtt_client("b", "the one")
    client.move("b")
    world.run()
    assert client.failures == ["b has no room for another client"]
    world.clean()

"""Clients that connect again while their session is between two brokers, and brokers that lose track of who has it: there is
one session in the end, with everything that was promised, and nobody is sent away who came last."""

from __future__ import annotations

import random

import pytest

from nearcast.fabric import frames
from nearcast.fabric.frames import frame
from nearcast.mqtt.records import number
from tests.fabric_harness import Node
from tests.gateway_harness import MqttClient, Shuffle
from tests.unit.fabric.test_handover_faults import World, world_with_client


def deliver(world: World, pair: str, to: str) -> None:
    """What is under way on one link in one direction arrives."""
    for end in world.links[pair]:
        while end.inbox and end.node.name == to:
            assert end.link is not None
            end.node.fabric.receive(end.link, end.inbox.popleft(), world.mesh.now)
            end.node.flush()


def leave_frozen(world: World, client: MqttClient) -> Node:
    """The client's session has left a, durably, and b has not heard of it."""
    world.frozen(client)
    a = world.mesh.nodes["a"]
    trunk = world.gateway.trunks["a"]
    while not a.engine.sessions.by_client["client"].departing_by:
        trunk.step_to_broker()
    a.sync()
    return a


def connect_again(world: World, broker: str) -> MqttClient:
    """The same client connects again, elsewhere or at the same broker, and wants its session."""
    return world.gateway.mqtt_client(broker, "client", expiry=100, clean_start=False)


# --- the client connects again ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broker", ["a", "b", "c"])
@pytest.mark.parametrize("seed", range(8))
def test_a_client_that_connects_again_during_a_move_gets_its_session(broker: str, seed: int) -> None:
    """Whatever the move was about to do: who connected last has the session, and is not refused."""
    rng = random.Random(seed)
    world, client, publisher = world_with_client(durable=seed % 2 == 0, expiry=100)
    client.acknowledges = False
    publisher.publish("t", b"1", 1)
    world.run()
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    client.move("b")
    shuffle.steps(seed * 5)
    world.mesh.now += 0.01
    again = connect_again(world, broker)
    shuffle.run()
    for _ in range(20):
        world.mesh.advance(0.5)
        shuffle.run()
    assert [(answer.reason_code, answer.session_present) for answer in again.connacks] == [(0, True)], f"seed {seed}"
    assert again.closed is None
    publisher.publish("t", b"2", 2)
    shuffle.run()
    assert again.messages == [("t", b"1"), ("t", b"2")]
    assert world.homes("client") == broker
    world.clean()


@pytest.mark.parametrize("seed", range(12))
def test_a_client_that_is_moved_and_connects_again_at_random_loses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World(seed=seed, durable=True)
    publishers = [world.gateway.mqtt_client(name, f"publisher-{name}") for name in "abc"]
    client = world.gateway.mqtt_client("a", "client", expiry=100)
    client.subscribe("t", 1)
    world.run()
    connections = [client]
    shuffle = Shuffle(world.mesh, rng, world.gateway)
    for index in range(60):
        rng.choice(publishers).publish("t", b"%d" % index, 1)
        if client.connacks and client.closed is None and not client.is_moving and rng.random() < 0.3:
            client.move(rng.choice([name for name in "abc" if name != client.trunk.broker]))
        if rng.random() < 0.08:
            world.mesh.now += 0.01
            client = connect_again(world, rng.choice("abc"))
            connections.append(client)
        shuffle.steps(rng.randrange(25))
    shuffle.run()
    for _ in range(40):
        world.mesh.advance(0.5)
        shuffle.run()
    alive = [connection for connection in connections if connection.closed is None]
    assert len(alive) == 1
    assert world.homes("client") == alive[0].trunk.broker
    assert {int(payload) for connection in connections for _, payload in connection.messages} == set(range(60))
    world.clean()


def test_a_client_that_connects_at_its_old_broker_while_the_session_is_on_its_way() -> None:
    """It waits until the new broker has the session, and then gets it from there."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    leave_frozen(world, client)
    again = connect_again(world, "a")
    world.gateway.stepwise = False
    publisher.publish("t", b"1", 1)
    world.run()
    world.advance(6)
    assert [(answer.reason_code, answer.session_present) for answer in again.connacks] == [(0, True)]
    assert again.messages == [("t", b"1")]
    assert world.homes("client") == "a"
    world.clean()


def test_a_client_that_takes_its_frozen_session_up_again_keeps_it_after_a_restart() -> None:
    """The new broker cannot be reached: the old one's copy is the session again, also in its journal."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    a = leave_frozen(world, client)
    deliver(world, "ab", "b")
    world.gateway.trunks["b"].run()
    world.mesh.nodes["b"].sync()  # it has the session, and its word gets lost
    world.cut("ab")
    world.cut("bc")
    again = connect_again(world, "a")
    world.gateway.trunks["a"].run()
    world.mesh.run()
    assert [(answer.reason_code, answer.session_present) for answer in again.connacks] == [(0, True)]
    assert a.engine.stats.connected_clients == 1
    again.acknowledges = False
    publisher.publish("t", b"1", 1)
    world.gateway.stepwise = False
    world.run()
    assert again.messages == [("t", b"1")]
    world.crash("a")
    world.link("ab")
    world.link("bc")
    world.run()
    world.advance(8)
    assert world.homes("client") == "a"
    session = world.mesh.nodes["a"].engine.sessions.by_client["client"]
    assert len(session.inflight) == 1
    world.clean()


# --- the new broker is cut off when it has the session, and before it could say so --------------------------------------


def crash_after_install(world: World, client: MqttClient) -> None:
    """The new broker installed the session, has it on disk, and goes down before anybody hears of it."""
    leave_frozen(world, client)
    deliver(world, "ab", "b")
    trunk = world.gateway.trunks["b"]
    while trunk.to_broker:
        trunk.step_to_broker()
    b = world.mesh.nodes["b"]
    assert b.engine.sessions.by_client["client"].arrived_by
    b.sync()
    for end in world.links["ab"]:
        end.inbox.clear()
    world.crash("b")


@pytest.mark.parametrize("ahead_s", [0.0, 60.0])
def test_a_client_that_came_back_stays_when_the_new_broker_returns_with_the_session(ahead_s: float) -> None:
    """Also when that broker's clock is ahead: the copy that came back is the later one."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    world.mesh.nodes["b"].engine.effects.wall_offset += ahead_s
    client.acknowledges = False
    publisher.publish("t", b"1", 1)
    publisher.publish("t", b"2", 2)
    world.run()
    crash_after_install(world, client)
    client.take_back()
    world.gateway.trunks["a"].run()  # before the two brokers meet again
    world.gateway.stepwise = False
    world.run()
    assert client.trunk.broker == "a"
    world.advance(8)
    assert client.closed is None
    assert world.homes("client") == "a"
    client.answer()
    publisher.publish("t", b"3", 2)
    world.run()
    assert client.messages == [("t", b"1"), ("t", b"2"), ("t", b"3")]
    world.clean()


def test_messages_that_arrive_late_are_fenced_off_after_a_power_cut_too() -> None:
    """What the client had at its old broker and reaches the new one only after that one restarted is not delivered again."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    world.gateway.stepwise = True
    client.move("b")
    Shuffle(world.mesh, random.Random(1), world.gateway).until(lambda: client.switching)
    late = world.links["bc"]
    # c's messages reach a, and are on their way to b.
    trunk = world.gateway.trunks["c"]
    publisher.publish("t", b"once", 2)
    while trunk.to_broker:
        trunk.step_to_broker()
    world.mesh.nodes["c"].sync()
    deliver(world, "ac", "a")
    a, b = world.mesh.nodes["a"], world.mesh.nodes["b"]
    world.gateway.trunks["a"].run()
    a.sync()
    world.gateway.trunks["a"].run()
    deliver(world, "ab", "b")
    world.gateway.trunks["b"].run()
    b.sync()
    world.gateway.trunks["b"].run()
    assert "client" in b.engine.sessions.by_client
    assert client.messages == [("t", b"once")]
    assert any(end.inbox for end in late)
    deliver(world, "ab", "a")
    world.crash("b")
    world.gateway.stepwise = False
    world.run()
    again = connect_again(world, "b")
    world.run()
    world.advance(3)
    assert again.messages == []
    world.clean()


# --- moves that fail after the client's bytes go elsewhere ----------------------------------------------------------------


def test_an_answer_that_waits_for_other_brokers_is_not_lost_with_a_move() -> None:
    """SUBSCRIBE arrived just before FREEZE, and the move fails while both wait for a broker that is slow."""
    world, client, publisher = world_with_client(expiry=100)
    world.frozen(client)
    trunk = world.gateway.trunks["a"]
    # Its SUBSCRIBE is processed between MOVE_READY and FREEZE.
    trunk.to_broker.appendleft(
        frame(
            frames.CLIENT_DATA,
            number(client.origin[1] if client.origin else 0),
            b"\x82\x09\x00\x07\x00\x00\x03new\x01",
        )
    )
    while trunk.to_broker:
        trunk.step_to_broker()
    departures = world.mesh.nodes["a"].fabric.handover.departures
    assert [departure.freeze_asked for departure in departures.by_move.values()] == [True]
    assert client.subacks == 1
    world.cut("ab")
    world.gateway.stepwise = False
    world.run()
    assert client.taken_back == 1
    assert client.trunk.broker == "a"
    assert client.subacks == 2
    publisher.publish("new", b"1", 1)
    world.run()
    assert client.messages == [("new", b"1")]
    world.link("ab")
    world.advance(3)
    world.clean()


@pytest.mark.parametrize("frozen", [False, True])
def test_a_session_that_nobody_has_brought_back_yet_is_given_to_who_connects(frozen: bool) -> None:
    """The move fails after FREEZE, and the client connects elsewhere before its gateway brings it back."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    client.acknowledges = False
    publisher.publish("t", b"1", 1)
    world.run()
    if frozen:
        a = leave_frozen(world, client)
    else:
        world.frozen(client)
        a = world.mesh.nodes["a"]
        world.gateway.trunks["a"].to_broker.appendleft(
            frame(frames.CLIENT_DATA, number(client.origin[1] if client.origin else 0), b"\x82\x09\x00\x07\x00\x00\x03new\x01")
        )
        while world.gateway.trunks["a"].to_broker:
            world.gateway.trunks["a"].step_to_broker()
    if frozen:
        world.mesh.nodes["b"].fabric.handover.leave(world.mesh.now)
        arrival = next(iter(world.mesh.nodes["b"].fabric.handover.arrivals.by_move.values()))
        world.mesh.nodes["b"].fabric.handover.arrivals.give_up(arrival, "of no use", world.mesh.now)
        world.mesh.nodes["b"].flush()
        deliver(world, "ab", "a")
        assert [departure.abandoned for departure in a.fabric.handover.departures.by_move.values()] == [True]
    again = connect_again(world, "c")
    world.gateway.trunks["c"].run()
    world.mesh.run()
    world.gateway.trunks["c"].run()
    for _ in range(3):
        world.mesh.advance(0.2)
        world.gateway.trunks["c"].run()
    assert [(answer.reason_code, answer.session_present) for answer in again.connacks] == [(0, True)]
    assert again.messages == [("t", b"1")]
    world.gateway.stepwise = False
    world.run()
    world.advance(5)
    assert client.closed == "session taken over"  # and not told to come back with what it knows
    assert world.homes("client") == "c"
    world.clean()


def test_a_broker_that_hears_that_a_session_left_knows_where_it_went() -> None:
    """The client connects where the old broker's word has arrived and the new one's has not: its session is found."""
    world, client, publisher = world_with_client(durable=True, expiry=100)
    client.acknowledges = False
    publisher.publish("t", b"1", 1)
    world.run()
    world.frozen(client)
    for _ in range(20):
        for name in "ab":
            world.gateway.trunks[name].run()
            world.mesh.nodes[name].sync()
            deliver(world, "ab", name)
        deliver(world, "ac", "c")
    assert client.moves == 1
    assert world.homes("client") == "b"
    assert any(end.inbox for end in world.links["bc"])
    again = connect_again(world, "c")
    world.gateway.stepwise = False
    world.gateway.trunks["c"].run()
    world.run()
    world.advance(1)
    assert [(answer.reason_code, answer.session_present) for answer in again.connacks] == [(0, True)]
    assert again.messages == [("t", b"1")]
    assert world.homes("client") == "c"
    world.clean()

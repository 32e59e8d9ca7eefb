"""A client identifier is one client in the whole fabric: whoever connects elsewhere takes its session along."""

from __future__ import annotations

import random

import pytest

from nearcast.fabric import presence
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Disconnect, Properties, Subscribe, SubscriptionRequest, Will
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh, Node


def mesh_of(*names: str, durable: bool = False) -> tuple[Mesh, list[Node]]:
    mesh = Mesh()
    nodes = [mesh.add(name, durable=durable) for name in names]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            mesh.link(name, other)
    mesh.run()
    return mesh, nodes


def settle(mesh: Mesh) -> None:
    for _ in range(5):
        mesh.advance(0.1)


def client_ids(node: Node) -> list[str]:
    return [session.client_id for session in node.engine.sessions.by_client.values() if not session.is_peer]


# semantics: T1
@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
def test_a_client_that_connects_elsewhere_ends_its_old_connection(version: int) -> None:
    mesh, (a, b) = mesh_of("a", "b")
    first = Client(a, "c", version=version)
    mesh.run()
    second = Client(b, "c", version=version)
    settle(mesh)
    assert first.closed
    if version == MQTT_5:
        assert first.goodbye == Disconnect(reasons.SESSION_TAKEN_OVER)
    assert second.connack is not None
    assert second.connack.reason_code == 0
    assert not second.connack.session_present
    assert client_ids(a) == []
    assert client_ids(b) == ["c"]
    assert a.engine.stats.takeovers == 1


# semantics: T2
@pytest.mark.parametrize("qos", [1, 2])
@pytest.mark.parametrize("durable", [False, True])
def test_a_session_whose_client_is_away_comes_along(qos: int, durable: bool) -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c", durable=durable)
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    mesh.run()
    client.disconnect()
    publisher = Client(c, "publisher")
    mesh.run()
    publisher.publish("news/1", b"while away", qos)
    settle(mesh)
    again = Client(b, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present
    assert again.payloads == [b"while away"]
    assert client_ids(a) == []
    publisher.publish("news/1", b"after", qos)
    settle(mesh)
    assert again.payloads == [b"while away", b"after"]
    assert b.fabric.presence.elsewhere["a"] == {}
    assert "c" in a.fabric.presence.elsewhere["b"]


# semantics: T2
@pytest.mark.parametrize("qos", [1, 2])
def test_messages_in_flight_are_sent_again_by_the_new_broker(qos: int) -> None:
    mesh, (a, b) = mesh_of("a", "b")
    client = Client(a, "c", expiry=1_000, acknowledges=False)
    client.subscribe("news/#")
    mesh.run()
    Client(b, "publisher").publish("news/1", b"x", qos)
    settle(mesh)
    assert client.payloads == [b"x"]
    client.vanish()
    mesh.run()
    again = Client(b, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert [(message.payload, message.dup) for message in again.messages] == [(b"x", True)]
    assert again.messages[0].packet_id == client.messages[0].packet_id


# semantics: T2
def test_what_is_published_while_the_session_moves_is_not_lost() -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    mesh.run()
    client.disconnect()
    mesh.run()
    publishers = [Client(node, f"publisher {node.name}") for node in (a, b, c)]
    mesh.run()
    again = Client(b, "c", clean_start=False, expiry=1_000)
    sent = []
    # A byte of progress on every stream at a time: publications fall into every step of the move.
    for step in range(200):
        for publisher in publishers:
            if step % 5 == 0:
                payload = b"%s %d" % (publisher.client_id.encode(), step)
                publisher.publish("news/1", payload, 1)
                sent.append(payload)
        moved = False
        for stream in list(mesh.streams):
            for end in stream:
                if end.inbox and end.link is not None:
                    end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                    end.node.flush()
                    moved = True
        if not moved and step > 100:
            break
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present
    for publisher in publishers:
        name = publisher.client_id.encode()
        expected = [payload for payload in sent if payload.startswith(name)]
        assert [payload for payload in again.payloads if payload.startswith(name)] == expected


# semantics: T3
def test_a_clean_start_ends_the_session_elsewhere() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    client.disconnect()
    mesh.run()
    again = Client(b, "c", clean_start=True, expiry=1_000)
    settle(mesh)
    assert again.connack is not None
    assert not again.connack.session_present
    assert client_ids(a) == []
    Client(a, "publisher").publish("news/1", b"x")
    settle(mesh)
    assert again.payloads == []


# semantics: T4
def test_a_client_identifier_belongs_to_the_user_who_began_the_session_everywhere() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    owner = Client(a, "c", username="owner", expiry=1_000)
    mesh.run()
    for clean_start in (False, True):
        thief = Client(b, "c", username="thief", clean_start=clean_start)
        settle(mesh)
        assert thief.connack is not None
        assert thief.connack.reason_code == reasons.NOT_AUTHORIZED
        assert thief.closed
    assert not owner.closed
    assert client_ids(a) == ["c"]


# semantics: T4
def test_another_user_does_not_disturb_a_client_that_waits() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "c", username="owner", expiry=1_000).disconnect()
    mesh.run()
    owner = Client(b, "c", username="owner", clean_start=False, expiry=1_000)
    thief = Client(b, "c", username="thief", clean_start=False, expiry=1_000)
    settle(mesh)
    assert thief.connack is not None
    assert thief.connack.reason_code == reasons.NOT_AUTHORIZED
    assert owner.connack is not None
    assert owner.connack.session_present


def test_a_session_is_found_while_its_broker_tells_all_anew() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    a.fabric.presence.piece_bytes = 1
    stream = mesh.link("a", "b")
    mesh.run()
    for number in range(20):
        Client(a, f"c {number}", expiry=1_000).disconnect()
    for _ in range(30):
        mesh.advance(presence.PIECE_S)
    assert len(b.fabric.presence.elsewhere["a"]) == 20
    mesh.cut(stream)
    mesh.link("a", "b")
    mesh.run()
    assert len(b.fabric.presence.elsewhere["a"]) < 5
    again = Client(b, "c 19", clean_start=False, expiry=1_000)
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present
    for _ in range(30):
        mesh.advance(presence.PIECE_S)
    assert len(b.fabric.presence.elsewhere["a"]) == 19
    assert b.fabric.presence._former == {}


def test_packets_behind_connect_wait_for_the_session() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "c", expiry=1_000).disconnect()
    mesh.run()
    again = Client(b, "c", clean_start=False, expiry=1_000)
    again.send(Subscribe(7, [SubscriptionRequest("x", 1)]))
    assert again.packets == []
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present
    assert [answer.packet_id for answer in again.subacks] == [7]


# semantics: T5
def test_without_the_other_broker_the_client_begins_anew_and_the_old_session_ends_later() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    mesh.run()
    mesh.cut(stream)
    mesh.advance(1)
    again = Client(b, "c", clean_start=False, expiry=1_000)
    assert again.connack is not None  # at once
    assert not again.connack.session_present
    assert client_ids(a) == ["c"]
    mesh.link("a", "b")
    settle(mesh)
    assert client.goodbye == Disconnect(reasons.SESSION_TAKEN_OVER)
    assert client_ids(a) == []
    assert client_ids(b) == ["c"]
    assert not again.closed


# semantics: T5
def test_a_broker_that_does_not_answer_is_not_waited_for_for_ever() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "c", expiry=1_000).disconnect()
    mesh.run()
    again = Client(b, "c", clean_start=False, expiry=1_000)
    mesh.now += mesh.settings.takeover_timeout_seconds
    b.fabric.presence.tick(mesh.now)
    b.flush()
    assert again.connack is not None
    assert not again.connack.session_present
    settle(mesh)
    assert client_ids(a) == []
    assert not again.closed


def test_a_link_that_breaks_meanwhile_lets_the_client_in() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    Client(a, "c", expiry=1_000).disconnect()
    mesh.run()
    again = Client(b, "c", clean_start=False, expiry=1_000)
    mesh.cut(stream)
    assert again.connack is not None
    assert not again.connack.session_present


# semantics: T6
def test_of_two_that_connect_at_once_one_stays() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    one = Client(a, "c", expiry=1_000)
    mesh.now += 0.001
    two = Client(b, "c", expiry=1_000)  # neither broker knows of the other's
    settle(mesh)
    assert one.closed
    assert not two.closed
    assert client_ids(a) == []
    assert client_ids(b) == ["c"]


# semantics: T6
def test_of_two_that_want_one_session_at_once_the_later_one_has_it() -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    client.disconnect()
    mesh.run()
    one = Client(b, "c", clean_start=False, expiry=1_000)
    mesh.now += 0.001
    two = Client(c, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    settle(mesh)
    assert two.connack is not None
    assert two.connack.session_present
    assert one.closed
    assert not two.closed
    assert [client_ids(node) for node in (a, b, c)] == [[], [], ["c"]]
    Client(a, "publisher").publish("news/1", b"x")
    settle(mesh)
    assert two.payloads == [b"x"]


def test_of_two_that_wait_at_one_broker_the_later_one_is_let_in() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    Client(a, "c", expiry=1_000).disconnect()
    mesh.run()
    one = Client(b, "c", clean_start=False, expiry=1_000)
    two = Client(b, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert one.connack is not None
    assert one.connack.reason_code == reasons.SERVER_UNAVAILABLE
    assert two.connack is not None
    assert two.connack.session_present


def test_a_client_that_gives_up_waiting_leaves_its_session_where_it_came_to() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    client.disconnect()
    mesh.run()
    Client(b, "c", clean_start=False, expiry=1_000).vanish()
    settle(mesh)
    assert sorted(client_ids(a) + client_ids(b)) == ["c"]
    Client(a, "publisher").publish("news/1", b"x")
    settle(mesh)
    again = Client(a, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert again.payloads == [b"x"]


def test_a_session_is_followed_to_where_it_moved() -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    Client(a, "c", expiry=1_000).disconnect()
    mesh.run()
    # c does not hear that the session goes to b.
    known = dict(c.fabric.presence.elsewhere["a"])
    Client(b, "c", clean_start=False, expiry=1_000).disconnect()
    settle(mesh)
    c.fabric.presence.elsewhere["a"] = known
    c.fabric.presence.elsewhere["b"] = {}
    again = Client(c, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present
    assert [client_ids(node) for node in (a, b, c)] == [[], [], ["c"]]


# --- wills ---------------------------------------------------------------------------------------------------------------


def will_of(delay: int = 0) -> Will:
    return Will("wills/c", b"gone", 1, False, Properties(will_delay_interval=delay) if delay else None)


# semantics: W1
def test_a_will_is_published_where_the_client_was_and_reaches_everyone() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    watcher = Client(b, "watcher")
    watcher.subscribe("wills/+")
    mesh.run()
    client = Client(a, "c", will=will_of())
    client.vanish()
    settle(mesh)
    assert watcher.payloads == [b"gone"]
    other = Client(a, "c", will=will_of())
    other.disconnect()
    settle(mesh)
    assert watcher.payloads == [b"gone"]


# semantics: W2
def test_a_takeover_elsewhere_treats_wills_as_one_at_the_same_broker() -> None:
    for delay, published in ((0, [b"gone"]), (60, [])):
        mesh, (a, b) = mesh_of("a", "b")
        watcher = Client(b, "watcher")
        watcher.subscribe("wills/+")
        mesh.run()
        Client(a, "c", expiry=1_000, will=will_of(delay))
        mesh.run()
        again = Client(b, "c", clean_start=False, expiry=1_000)
        settle(mesh)
        assert again.connack is not None
        assert again.connack.session_present
        mesh.advance(100)
        assert watcher.payloads == published


# semantics: W3
def test_a_will_that_waits_is_not_published_when_the_client_comes_back_elsewhere() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    watcher = Client(b, "watcher")
    watcher.subscribe("wills/+")
    mesh.run()
    Client(a, "c", expiry=1_000, will=will_of(60)).vanish()
    mesh.advance(30)
    Client(b, "c", clean_start=False, expiry=1_000, will=will_of(60))
    settle(mesh)
    mesh.advance(100)
    assert watcher.payloads == []


# semantics: W3
def test_a_will_that_waits_is_published_once_when_the_client_stays_away() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    watcher = Client(b, "watcher")
    watcher.subscribe("wills/+")
    mesh.run()
    Client(a, "c", expiry=1_000, will=will_of(60)).vanish()
    settle(mesh)
    mesh.advance(61)
    settle(mesh)
    assert watcher.payloads == [b"gone"]


# --- crashes -------------------------------------------------------------------------------------------------------------


# semantics: T8
def test_a_broker_that_comes_back_gives_way_to_the_later_session() -> None:
    mesh, (a, b) = mesh_of("a", "b", durable=True)
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    mesh.run()
    a.crash()
    mesh.advance(1)
    again = Client(b, "c", clean_start=False, expiry=1_000)
    mesh.run()
    assert again.connack is not None
    assert not again.connack.session_present
    assert client_ids(a) == ["c"]
    mesh.link("a", "b")
    settle(mesh)
    assert client_ids(a) == []
    assert not again.closed


# semantics: T8
def test_a_recovered_session_is_found_by_the_next_broker() -> None:
    mesh, (a, b) = mesh_of("a", "b", durable=True)
    client = Client(a, "c", expiry=1_000)
    client.subscribe("news/#")
    mesh.run()
    Client(b, "publisher").publish("news/1", b"before")
    mesh.run()
    a.crash()
    mesh.link("a", "b")
    settle(mesh)
    again = Client(b, "c", clean_start=False, expiry=1_000)
    settle(mesh)
    assert again.connack is not None
    assert again.connack.session_present


# semantics: W4
@pytest.mark.parametrize("comes_back", [True, False])
def test_the_will_of_a_client_whose_broker_crashed_waits_for_word_of_it(comes_back: bool) -> None:
    mesh, (a, b) = mesh_of("a", "b", durable=True)
    watcher = Client(b, "watcher")
    watcher.subscribe("wills/+")
    mesh.run()
    Client(a, "c", expiry=1_000, will=will_of())
    mesh.run()
    a.crash()
    mesh.advance(1)
    if comes_back:
        Client(b, "c", clean_start=False, expiry=1_000, will=will_of())
    mesh.link("a", "b")
    settle(mesh)
    for _ in range(20):
        mesh.advance(1)
    assert watcher.payloads == ([] if comes_back else [b"gone"])


# --- anything ------------------------------------------------------------------------------------------------------------


def creep(mesh: Mesh, rng: random.Random, pieces: int) -> None:
    """Let a few pieces arrive, on streams that chance picks."""
    for _ in range(pieces):
        ends = [end for stream in mesh.streams for end in stream if end.inbox and end.link is not None]
        if not ends:
            break
        end = rng.choice(ends)
        assert end.link is not None
        end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
        end.node.flush()
    for node in mesh.nodes.values():
        if rng.random() < 0.5:
            node.sync()


# semantics: T2
@pytest.mark.parametrize("seed", range(12))
def test_a_client_that_hops_from_broker_to_broker_misses_nothing(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    mesh, nodes = mesh_of(*names, durable=seed % 3 == 2)
    publishers = [Client(node, f"publisher {node.name}") for node in nodes]
    first = Client(nodes[0], "hopper", clean_start=False, expiry=10_000)
    first.subscribe("news/#")
    settle(mesh)
    hops = [first]
    sent: dict[str, list[bytes]] = {publisher.client_id: [] for publisher in publishers}
    for step in range(150):
        act = rng.random()
        if act < 0.5:
            publisher = rng.choice(publishers)
            payload = b"%s/%d" % (publisher.client_id.encode(), step)
            publisher.publish("news/1", payload, 2)
            sent[publisher.client_id].append(payload)
        elif act < 0.6:
            if rng.random() < 0.5:
                hops[-1].vanish()
            hops.append(Client(rng.choice(nodes), "hopper", clean_start=False, expiry=10_000))
        else:
            creep(mesh, rng, rng.randrange(6))
        if rng.random() < 0.3:
            mesh.now += rng.choice([0.001, 0.1])
            for node in nodes:
                node.engine.tick(mesh.now)
                node.fabric.tick(mesh.now)
                node.flush()
        for hop in hops:
            hop.read()
    settle(mesh)
    hops.append(Client(nodes[0], "hopper", clean_start=False, expiry=10_000))
    for _ in range(3):
        settle(mesh)
        for hop in hops:
            hop.read()
    assert hops[-1].connack is not None
    assert hops[-1].connack.session_present
    assert sum("hopper" in node.engine.sessions.by_client for node in nodes) == 1
    # What was sent and not acknowledged comes again, marked as a duplicate and with its packet identifier.
    got = [message for hop in hops for message in hop.messages]
    fresh = [message.payload for message in got if not message.dup]
    assert len(fresh) == len(set(fresh)), seed
    for publisher in publishers:
        # Identifiers are given in the order of sending, whatever connection it was.
        mine = {
            (message.packet_id, message.payload)
            for message in got
            if message.payload.startswith(publisher.client_id.encode() + b"/")
        }
        assert [payload for _, payload in sorted(mine)] == sent[publisher.client_id], seed


@pytest.mark.parametrize("seed", range(12))
def test_whatever_happens_one_session_is_left(seed: int) -> None:
    rng = random.Random(seed)
    names = ["a", "b", "c"]
    mesh = Mesh(seed)
    for name in names:
        mesh.add(name, durable=True)
    pairs = [("a", "b"), ("a", "c"), ("b", "c")]
    streams = {pair: mesh.link(*pair) for pair in pairs}
    mesh.run()
    clients: list[Client] = []
    for _ in range(60):
        act = rng.random()
        pair = rng.choice(pairs)
        node = mesh.nodes[rng.choice(names)]
        if act < 0.4:
            name = rng.choice(["one", "two"])
            clients.append(Client(node, name, clean_start=rng.random() < 0.3, expiry=10_000))
            if rng.random() < 0.5:
                clients[-1].subscribe("news/#")
        elif act < 0.5 and pair in streams and streams[pair] in mesh.streams:
            mesh.cut(streams.pop(pair))
        elif act < 0.65 and (pair not in streams or streams[pair] not in mesh.streams):
            streams[pair] = mesh.link(*pair)
        elif act < 0.7:
            node.crash()
        else:
            creep(mesh, rng, rng.randrange(20))
        mesh.now += 0.001
        if rng.random() < 0.2:
            mesh.advance(rng.choice([0.1, 6.0]))
    for pair in pairs:
        if pair not in streams or streams[pair] not in mesh.streams:
            mesh.link(*pair)
    for _ in range(100):
        mesh.advance(1)
    for name in {client.client_id for client in clients}:
        holders = [node.name for node in mesh.nodes.values() if name in node.engine.sessions.by_client]
        assert len(holders) <= 1, (seed, name)
    for node in mesh.nodes.values():
        for other in mesh.nodes.values():
            if other is not node:
                known = set(node.fabric.presence.elsewhere[other.name])
                assert known == set(client_ids(other)), seed

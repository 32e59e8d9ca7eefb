"""Interest tables: versions, pieces, and SUBACKs that wait until everybody knows."""

from __future__ import annotations

import pytest

from nearcast.fabric.interest import MAX_HELD, MAX_PIECE_BYTES
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.packets import SubAck, UnsubAck
from tests.fabric_clients import Client
from tests.fabric_harness import End, Mesh


def star(*names: str, settings: FabricSettings | None = None) -> tuple[Mesh, dict[str, tuple[End, End]]]:
    """Brokers that are all linked with the first."""
    mesh = Mesh(settings=settings)
    for name in names:
        mesh.add(name)
    streams = {name: mesh.link(names[0], name) for name in names[1:]}
    mesh.run()
    return mesh, streams


def answers(client: Client) -> list[type]:
    client.read()
    return [type(packet) for packet in client.packets if isinstance(packet, SubAck | UnsubAck)]


def filters(mesh: Mesh, at: str, of: str) -> set[str]:
    return set(mesh.nodes[at].fabric.peers[of].session.subscriptions)


def test_suback_comes_once_every_broker_that_is_there_knows_the_subscription() -> None:
    mesh, streams = star("a", "b", "c")
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    assert answers(client) == []
    for name in ("b", "c"):
        assert answers(client) == []
        ours, theirs = streams[name]
        while theirs.inbox:
            assert theirs.link is not None
            theirs.node.fabric.receive(theirs.link, theirs.inbox.popleft(), mesh.now)
            theirs.node.flush()
        while ours.inbox:
            assert ours.link is not None
            ours.node.fabric.receive(ours.link, ours.inbox.popleft(), mesh.now)
            ours.node.flush()
    assert answers(client) == [SubAck]
    assert mesh.nodes["a"].fabric.interest.held_answers == 1


def test_what_everybody_knows_already_is_answered_at_once() -> None:
    mesh, _ = star("a", "b")
    Client(mesh.nodes["a"], "first").subscribe("t")
    mesh.run()
    second = Client(mesh.nodes["a"], "second")
    second.subscribe("t")
    assert answers(second) == [SubAck]


def test_a_subscription_that_is_still_spreading_is_waited_for_by_the_second_client_too() -> None:
    mesh, _ = star("a", "b")
    first, second = Client(mesh.nodes["a"], "first"), Client(mesh.nodes["a"], "second")
    first.subscribe("t")
    second.subscribe("t")
    assert answers(second) == []
    mesh.run()
    assert answers(first) == answers(second) == [SubAck]


def test_without_other_brokers_nothing_waits() -> None:
    mesh, streams = star("a", "b")
    mesh.cut(streams["b"])
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    assert answers(client) == [SubAck]


def test_a_broker_that_goes_is_not_waited_for() -> None:
    mesh, streams = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    mesh.cut(streams["b"])
    assert answers(client) == [SubAck]


def test_a_broker_that_does_not_answer_is_waited_for_as_long_as_is_configured() -> None:
    mesh, streams = star("a", "b", settings=FabricSettings(subscribe_timeout_seconds=3.0))
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    streams["b"][1].inbox.clear()
    mesh.advance(2.9)
    assert answers(client) == []
    assert mesh.nodes["a"].fabric.next_deadline() <= mesh.now + 0.2
    mesh.advance(0.2)
    assert answers(client) == [SubAck]
    assert mesh.nodes["a"].fabric.interest.late_answers == 1


def test_answers_of_one_client_stay_in_order() -> None:
    mesh, _ = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    client.unsubscribe("other")
    assert answers(client) == []
    mesh.run()
    assert answers(client) == [SubAck, UnsubAck]


def test_a_client_that_does_not_wait_for_answers_has_a_bounded_number_of_them_waiting() -> None:
    mesh, _ = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    for index in range(MAX_HELD + 5):
        client.subscribe(f"t/{index}")
    assert len(answers(client)) == 5
    mesh.run()
    assert len(answers(client)) == MAX_HELD + 5


def test_who_waited_in_vain_is_not_remembered() -> None:
    mesh, streams = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    mesh.streams.remove(streams["b"])  # it is there, and silent
    interest = mesh.nodes["a"].fabric.interest
    for index in range(2 * MAX_HELD):
        client.subscribe(f"t/{index}")
    mesh.now += 3.0
    interest.tick(mesh.now)
    mesh.nodes["a"].flush()
    assert len(answers(client)) == 2 * MAX_HELD
    assert interest._waiting == []
    mesh.streams.append(streams["b"])
    mesh.run()
    client.subscribe("one/more")
    mesh.run()
    assert len(answers(client)) == 2 * MAX_HELD + 1


def test_what_waits_for_one_broker_and_then_another_is_answered_when_both_know() -> None:
    mesh, streams = star("a", "b")
    first, second = Client(mesh.nodes["a"], "first"), Client(mesh.nodes["a"], "second")
    first.subscribe("t")
    second.subscribe("u")
    first.subscribe("u")
    mesh.add("c")
    late = mesh.link("a", "c")
    mesh.streams.remove(streams["b"])
    mesh.run()
    assert answers(first) == answers(second) == []
    mesh.streams.remove(late)
    mesh.streams.append(streams["b"])
    mesh.run()
    assert (len(answers(first)), len(answers(second))) == (2, 1)
    assert mesh.nodes["a"].fabric.interest.late_answers == 0
    assert mesh.nodes["a"].fabric.interest.next_deadline() == float("inf")


def test_zero_seconds_mean_that_nothing_waits() -> None:
    mesh, _ = star("a", "b", settings=FabricSettings(subscribe_timeout_seconds=0.0))
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    assert answers(client) == [SubAck]


def test_a_client_that_left_is_owed_nothing() -> None:
    mesh, _ = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("t")
    a = mesh.nodes["a"]
    connection = a.ends[-1].connection
    assert connection is not None
    a.engine.lose(connection, mesh.now)
    a.flush()
    mesh.run()
    assert a.fabric.interest.next_deadline() == float("inf")
    assert filters(mesh, "b", "a") == set()


@pytest.mark.parametrize("count", [1, 700])
def test_a_large_table_comes_in_pieces(count: int) -> None:
    mesh = Mesh()
    a = mesh.add("a")
    mesh.add("b")
    client = Client(a, "client")
    wanted = {f"{index}/{'long' * 250}/+" for index in range(count)}
    assert count == 1 or sum(map(len, wanted)) > 2 * MAX_PIECE_BYTES
    for name in wanted:
        client.subscribe(name)
    stream = mesh.link("a", "b")
    mesh.run()
    assert filters(mesh, "b", "a") == wanted
    assert a.fabric.interest.confirmed["b"] == a.fabric.interest.version
    client.subscribe("more")
    mesh.run()
    mesh.cut(stream)
    for name in sorted(wanted)[: count // 2 + 1]:
        client.unsubscribe(name)
        wanted.discard(name)
    mesh.link("a", "b")
    mesh.run()
    assert filters(mesh, "b", "a") == wanted | {"more"}


def test_a_change_that_got_lost_makes_the_other_ask_for_everything() -> None:
    mesh, streams = star("a", "b")
    client = Client(mesh.nodes["a"], "client")
    client.subscribe("lost")
    streams["b"][1].inbox.clear()
    client.subscribe("t")
    mesh.run()
    assert filters(mesh, "b", "a") == {"lost", "t"}


def test_a_filter_that_comes_and_goes_at_once_is_no_news() -> None:
    mesh, _ = star("a", "b")
    a = mesh.nodes["a"]
    client = Client(a, "client")
    client.subscribe("t")
    mesh.run()
    version = a.fabric.interest.version
    session = a.engine.sessions.by_client["client"]
    subscription = session.subscriptions["t"]
    a.engine.sessions.unsubscribe(session, "t")
    a.engine.sessions.subscribe(session, subscription)
    a.flush()
    assert a.fabric.interest.version == version


def test_recovered_sessions_count_from_the_start() -> None:
    mesh = Mesh()
    a = mesh.add("a", durable=True)
    mesh.add("b")
    client = Client(a, "client", expiry=1_000)
    client.subscribe("t")
    client.subscribe("$share/g/s")
    a.sync()
    a.crash()
    mesh.link("a", "b")
    mesh.run()
    assert filters(mesh, "b", "a") == {"t", "$share/g/s"}
    again = Client(a, "client", clean_start=False, expiry=1_000)
    again.subscribe("u")
    mesh.run()
    assert filters(mesh, "b", "a") == {"t", "$share/g/s", "u"}

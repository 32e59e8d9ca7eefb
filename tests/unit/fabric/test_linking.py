"""The links of a node: dialling again, who stays when two meet twice, who is given up."""

from __future__ import annotations

import itertools

import pytest

from nearcast.fabric import links
from nearcast.fabric.fabric import NAMESAKE_S
from nearcast.fabric.linking import LAST_RETRY_S, MAX_STRANGERS
from nearcast.fabric.links import Link
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Connect, Publish, Subscribe, SubscriptionRequest
from tests.fabric_harness import End, Mesh, Node


def pair() -> tuple[Mesh, Node, Node]:
    mesh = Mesh()
    return mesh, mesh.add("a"), mesh.add("b")


def link_of(node: Node, other: str) -> Link:
    link = node.fabric.peers[other].link
    assert link is not None
    return link


def up(node: Node, other: str) -> bool:
    return node.fabric.peers[other].up


def dials(node: Node, seconds: float) -> list[tuple[float, str]]:
    """What is dialled when nobody ever answers."""
    found: list[tuple[float, str]] = []
    mesh = node.mesh
    for _ in range(int(seconds * 20)):
        mesh.advance(0.05)
        for address in node.fabric.take_dials():
            found.append((mesh.now, address))
            node.fabric.dial_failed(address, mesh.now)
    return found


def test_an_address_is_dialled_again_less_and_less_often() -> None:
    mesh, a, _ = pair()
    a.fabric.dial("there:1", mesh.now)
    assert a.fabric.take_dials() == ["there:1"]
    a.fabric.dial_failed("there:1", mesh.now)
    times = [at for at, _ in dials(a, 100.0)]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert gaps[0] < 1.0
    assert LAST_RETRY_S / 2 <= gaps[-1] <= LAST_RETRY_S * 1.5 + 0.1
    a.fabric.forget_address("there:1")
    assert dials(a, 30.0) == []


def test_the_larger_name_lets_the_smaller_dial_first() -> None:
    mesh, a, b = pair()
    a.fabric.dial("b:1", mesh.now, "b")
    b.fabric.dial("a:1", mesh.now, "a")
    assert a.fabric.take_dials() == ["b:1"]
    assert b.fabric.take_dials() == []
    mesh.link("a", "b")
    mesh.run()
    mesh.advance(5.0)
    assert b.fabric.take_dials() == []  # there is a link by now


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a")])
def test_of_two_links_that_both_dialled_at_once_the_smaller_names_stays(order: tuple[str, str]) -> None:
    mesh, a, b = pair()
    first = mesh.link(*order)
    second = mesh.link(order[1], order[0])
    mesh.run()
    kept = first if order == ("a", "b") else second
    ends = {end.node.name: end.link for end in kept}
    assert link_of(a, "b") is ends["a"]
    assert link_of(b, "a") is ends["b"]
    assert len(a.fabric.links) == len(b.fabric.links) == 1


def test_whoever_dials_again_has_lost_the_one_before() -> None:
    mesh, a, b = pair()
    mesh.link("a", "b")
    mesh.run()
    before = link_of(b, "a")
    again = mesh.link("a", "b")
    mesh.run()
    assert before.state == links.CLOSED
    assert link_of(b, "a") is again[1].link
    assert up(a, "b")


def test_a_silent_link_is_given_up_and_a_quiet_one_is_not() -> None:
    mesh, a, _ = pair()
    stream = mesh.link("a", "b")
    mesh.run()
    for _ in range(40):
        mesh.advance(0.5)
    assert up(a, "b")
    mesh.streams.remove(stream)  # nothing arrives any more, and nobody says so
    for _ in range(12):
        mesh.advance(0.5)
    assert not up(a, "b")
    link = stream[0].link
    assert link is not None
    assert link.close_reason == "silent for 5 s"


def test_a_process_that_slept_does_not_blame_the_others() -> None:
    mesh, a, b = pair()
    mesh.link("a", "b")
    mesh.run()
    mesh.now += 60.0
    for node in (a, b):
        node.fabric.tick(mesh.now)
        node.flush()
    assert up(a, "b")
    mesh.run()
    for _ in range(20):
        mesh.advance(0.5)
    assert up(a, "b")


def test_who_never_greets_is_sent_away() -> None:
    mesh, a, b = pair()
    stranger = End(b)
    link = a.fabric.accepted(End(a, other=stranger), Peer("stranger"), mesh.now)
    for _ in range(25):
        mesh.advance(0.5)
    assert link.state == links.CLOSED
    assert not a.fabric.links
    assert a.fabric.protocol_errors == 1


def test_strangers_in_numbers_keep_nobody_out() -> None:
    mesh, a, b = pair()
    found = [a.fabric.accepted(End(a, other=End(b)), Peer("stranger"), mesh.now) for _ in range(MAX_STRANGERS)]
    mesh.link("b", "a")
    assert [link.state == links.CLOSED for link in found] == [True] + [False] * (MAX_STRANGERS - 1)
    mesh.run()
    assert up(a, "b")
    a.fabric.accepted(End(a, other=End(b)), Peer("stranger"), mesh.now)
    assert up(a, "b")
    assert len(a.fabric.links) == MAX_STRANGERS + 1


def test_an_epoch_that_was_replaced_does_not_come_back() -> None:
    """A broker that restarts has another epoch, once. One that comes back with the former is a second broker of that name."""
    mesh, a, b = pair()
    mesh.link("b", "a")
    mesh.run()
    first = b.fabric.greeting.epoch
    b.fabric.greeting.epoch = first + 1
    mesh.link("b", "a")
    mesh.run()
    assert a.fabric.peers["b"].epoch == first + 1
    b.fabric.greeting.epoch = first
    refused = mesh.link("b", "a")
    mesh.run()
    assert refused[1].link is not None
    assert "two brokers are called b" in refused[1].link.close_reason
    assert a.fabric.peers["b"].epoch == first + 1


def test_a_broker_that_finds_its_data_again_is_let_in_once_the_other_one_is_gone() -> None:
    """It was started without its data directory for a while: that is no second broker."""
    mesh, a, b = pair()
    mesh.link("b", "a")
    mesh.run()
    first = b.fabric.greeting.epoch
    b.fabric.greeting.epoch = first + 1
    stream = mesh.link("b", "a")
    mesh.run()
    mesh.cut(stream)
    b.fabric.greeting.epoch = first
    mesh.link("b", "a")
    mesh.run()
    assert not up(a, "b")
    mesh.advance(NAMESAKE_S)
    mesh.link("b", "a")
    mesh.run()
    assert up(a, "b")
    assert a.fabric.peers["b"].epoch == first


def test_more_than_fits_is_sent_when_there_is_room_again() -> None:
    mesh, a, b = pair()
    mesh.link("a", "b")
    mesh.run()
    link_of(a, "b").connection.max_output_bytes = 10_000
    subscriber, publisher = b.client(), a.client()
    for node, client in ((a, publisher), (b, subscriber)):
        node.feed(client, encode(Connect("", version=MQTT_5, keep_alive=0), MQTT_5))
    b.feed(subscriber, encode(Subscribe(1, [SubscriptionRequest("bulk", 1)]), MQTT_5))
    mesh.run()
    count = 50
    messages = [Publish("bulk", b"<%d>" % number + bytes(1_000), 1, packet_id=number) for number in range(1, count + 1)]
    a.feed(publisher, b"".join(encode(message, MQTT_5) for message in messages))
    mesh.run()
    received = bytes(subscriber.received)
    assert [received.count(b"<%d>" % number) for number in range(1, count + 1)] == [1] * count

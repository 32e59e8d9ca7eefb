"""A shared subscription is one over the whole fabric: each message has one receiver, the nearest that can take it."""

from __future__ import annotations

import pytest

from tests.fabric_clients import Client
from tests.fabric_harness import Mesh, Node

SHARED = "$share/workers/jobs/+"


def mesh_of(*names: str) -> tuple[Mesh, list[Node]]:
    mesh = Mesh()
    nodes = [mesh.add(name) for name in names]
    for index, name in enumerate(names):
        for other in names[index + 1 :]:
            mesh.link(name, other)
    mesh.run()
    return mesh, nodes


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_each_message_has_one_receiver(qos: int) -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    workers = [Client(node, f"worker {node.name}") for node in (b, c)]
    for worker in workers:
        worker.subscribe(SHARED)
    mesh.run()
    publisher = Client(a, "publisher")
    for number in range(20):
        publisher.publish("jobs/1", b"%d" % number, qos)
    mesh.run()
    received = [payload for worker in workers for payload in worker.payloads]
    assert sorted(received, key=int) == [b"%d" % number for number in range(20)]
    # Both are as near, so both get some.
    assert all(worker.payloads for worker in workers)


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_local_members_that_are_connected_come_first(qos: int) -> None:
    mesh, (a, b) = mesh_of("a", "b")
    here, there = Client(a, "here"), Client(b, "there")
    here.subscribe(SHARED)
    there.subscribe(SHARED)
    mesh.run()
    publisher = Client(a, "publisher")
    for number in range(5):
        publisher.publish("jobs/1", b"%d" % number, qos)
    mesh.run()
    assert len(here.payloads) == 5
    assert there.payloads == []


def test_the_nearest_broker_with_a_connected_member_comes_next() -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    near, far = Client(b, "near"), Client(c, "far")
    near.subscribe(SHARED)
    far.subscribe(SHARED)
    mesh.run()
    for name, rtt_ms in (("b", 10.0), ("c", 100.0)):
        link = a.fabric.peers[name].link
        assert link is not None
        link.rtt_ms = rtt_ms
    publisher = Client(a, "publisher")
    for number in range(5):
        publisher.publish("jobs/1", b"%d" % number)
    mesh.run()
    assert len(near.payloads) == 5
    near.disconnect()
    mesh.run()
    publisher.publish("jobs/1", b"5")
    mesh.run()
    assert far.payloads == [b"5"]


def test_connected_members_elsewhere_come_before_local_ones_that_are_away() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    here, there = Client(a, "here", expiry=100), Client(b, "there", expiry=100)
    here.subscribe(SHARED)
    there.subscribe(SHARED)
    here.disconnect()
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("jobs/1", b"now")
    mesh.run()
    assert there.payloads == [b"now"]
    # All are away: the local one keeps it.
    there.disconnect()
    mesh.run()
    publisher.publish("jobs/1", b"later")
    mesh.run()
    assert Client(b, "there", clean_start=False, expiry=100).payloads == []
    assert Client(a, "here", clean_start=False, expiry=100).payloads == [b"later"]


def test_a_member_that_is_away_elsewhere_is_better_than_none() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    there = Client(b, "there", expiry=100)
    there.subscribe(SHARED)
    there.disconnect()
    mesh.run()
    publisher = Client(a, "publisher")
    publisher.publish("jobs/1", b"kept", 1)
    publisher.publish("jobs/1", b"not kept", 0)
    mesh.run()
    assert Client(b, "there", clean_start=False, expiry=100).payloads == [b"kept"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_plain_subscribers_of_the_chosen_broker_get_their_copy_and_those_of_others_too(qos: int) -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    worker, plain_b, plain_c, plain_a = Client(b, "worker"), Client(b, "pb"), Client(c, "pc"), Client(a, "pa")
    worker.subscribe(SHARED)
    for plain in (plain_a, plain_b, plain_c):
        plain.subscribe("jobs/#")
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x", qos)
    mesh.run()
    for client in (worker, plain_a, plain_b, plain_c):
        assert client.payloads == [b"x"], client.client_id


def test_a_member_with_a_plain_subscription_gets_both_copies() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    both = Client(b, "both")
    both.subscribe(SHARED)
    both.subscribe("jobs/#")
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x")
    mesh.run()
    assert both.payloads == [b"x", b"x"]


def test_groups_are_served_apart() -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    one, two = Client(b, "one"), Client(c, "two")
    one.subscribe("$share/one/jobs/#")
    two.subscribe("$share/two/jobs/#")
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x")
    mesh.run()
    assert one.payloads == [b"x"]
    assert two.payloads == [b"x"]


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_broker_whose_members_left_meanwhile_passes_on(qos: int) -> None:
    mesh, (a, b, c) = mesh_of("a", "b", "c")
    leaving, staying = Client(b, "leaving"), Client(c, "staying")
    leaving.subscribe(SHARED)
    mesh.run()
    staying.subscribe(SHARED)  # a and b do not know yet
    publisher = Client(a, "publisher")
    b.feed(leaving._end, b"")
    publisher.publish("jobs/1", b"x", qos)  # on its way to b
    leaving.unsubscribe(SHARED)
    # b learns of c's member before it gets the message.
    for stream in mesh.streams:
        for end in stream:
            if end.node is b and end.other is not None and end.other.node is c:
                while end.inbox:
                    assert end.link is not None
                    b.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                    b.flush()
    mesh.run()
    assert leaving.payloads == []
    assert staying.payloads == [b"x"]


def test_what_nobody_is_left_for_ends() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    leaving = Client(b, "leaving")
    leaving.subscribe(SHARED)
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x")
    leaving.unsubscribe(SHARED)
    before = b.engine.stats.unmatched
    mesh.run()
    assert b.engine.stats.unmatched == before + 1
    assert a.fabric.peers["b"].session.queued_messages == 0


def test_a_member_whose_session_ends_leaves_its_messages_to_members_elsewhere() -> None:
    mesh, (a, b) = mesh_of("a", "b")
    ending, staying = Client(a, "ending", expiry=100, acknowledges=False), Client(b, "staying")
    ending.subscribe(SHARED)
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x", 1)
    assert ending.payloads == [b"x"]
    ending.vanish()
    staying.subscribe(SHARED)
    mesh.run()
    Client(a, "ending")  # clean start: the session is over, and the message was never acknowledged
    mesh.run()
    assert staying.payloads == [b"x"]


def test_the_state_of_groups_is_told_again_when_a_link_comes_back() -> None:
    mesh = Mesh()
    a, b = mesh.add("a"), mesh.add("b")
    stream = mesh.link("a", "b")
    mesh.run()
    here, there = Client(a, "here", expiry=100), Client(b, "there")
    here.subscribe(SHARED)
    there.subscribe(SHARED)
    mesh.run()
    mesh.cut(stream)
    here.disconnect()
    there.disconnect()
    mesh.link("a", "b")
    mesh.run()
    Client(a, "publisher").publish("jobs/1", b"x")
    mesh.run()
    assert Client(a, "here", clean_start=False, expiry=100).payloads == [b"x"]

"""docs/semantics.md, classes ``broadcast`` and ``broadcast-filtered``: each promise has a test that names it."""

from __future__ import annotations

import random
from collections import Counter

import msgspec
import pytest

from nearcast.fabricconfig import Groups
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Properties, PubAck
from tests.broadcast_harness import SETTINGS, GroupMesh, GroupNode
from tests.fabric_clients import Client
from tests.fabric_harness import Mesh

FOUR = ("a", "b", "c", "d")


def two_groups(*, durable: bool = False, **groups: object) -> tuple[GroupMesh, list[GroupNode]]:
    """a leads b; far from them, c leads d."""
    mesh = GroupMesh()
    mesh.far(("a", "b"), ("c", "d"))
    nodes = [mesh.broker(name, lcm=40.0 - place, durable=durable, **groups) for place, name in enumerate(FOUR)]
    mesh.form(("a", "b"), ("c", "d"))
    return mesh, nodes


def subscribers(mesh: GroupMesh, nodes: list[GroupNode], topic_filter: str = "cars/#", version: int = MQTT_5) -> list[Client]:
    """One at each broker, all of whom are answered."""
    made = [Client(node, f"subscriber {node.name}", version=version) for node in nodes]
    for client in made:
        client.subscribe(topic_filter)
    mesh.until("SUBACKs", lambda: all(client.subacks for client in made))
    return made


def received(client: Client) -> Counter[bytes]:
    return Counter(client.payloads)


# --- delivery -----------------------------------------------------------------------------------------------------------


# semantics: B1
@pytest.mark.parametrize("topic", ["cars/1", "trains/1"])
@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
@pytest.mark.parametrize("cloud_version", ["3.1.1", "5"])
def test_each_subscriber_of_every_group_gets_each_message_once(topic: str, version: int, cloud_version: str) -> None:
    mesh, nodes = two_groups(cloud_version=cloud_version)
    present = subscribers(mesh, nodes, "+/1", version)
    sent = Counter[tuple[bytes, int]]()
    for node in nodes:
        publisher = Client(node, f"publisher {node.name}", version=version)
        for qos in (0, 1, 2):
            payload = f"{node.name} {qos}".encode()
            publisher.publish(topic, payload, qos)
            sent[payload, qos] += 1
    mesh.advance(2.0)
    for client in present:
        assert Counter((message.payload, message.qos) for message in client.messages) == sent


# semantics: B1
@pytest.mark.parametrize(("seed", "durable"), [(1, False), (2, False), (3, True)])
def test_once_also_while_groups_form_and_change(seed: int, durable: bool) -> None:
    """Brokers come near each other and part again, while all of them publish."""
    mesh = GroupMesh(seed)
    mesh.far(("a",), ("b",), ("c",), ("d",))
    # Not so far apart that they hardly measure each other.
    nodes = [mesh.broker(name, lcm=40.0 - place, durable=durable, threshold_ms=70.0) for place, name in enumerate(FOUR)]
    mesh.form(*((name,) for name in FOUR))
    present = subscribers(mesh, nodes)
    publishers = [Client(node, f"publisher {node.name}") for node in nodes]
    sent = 0

    def publish() -> None:
        nonlocal sent
        for publisher in publishers:
            publisher.publish("cars/1", b"%d" % sent, 1 + sent % 2)
            sent += 1

    sites = ((("a", "b"), ("c", "d")), (FOUR,), (("b", "c"), ("a", "d")), (("a",), ("b", "c", "d")), (FOUR,))
    for near in sites:
        mesh.distances.clear()
        mesh.far(*near)
        wanted = {frozenset(site) for site in near}

        def formed(wanted: set[frozenset[str]] = wanted) -> bool:
            publish()
            mesh.advance(0.15)
            for client in present:
                client.read()
            return {frozenset(node.members) for node in nodes} == wanted

        mesh.until(f"groups {near}", formed)
    mesh.advance(5.0)
    for client in present:
        assert len(received(client)) == sent
        assert [payload for payload, count in received(client).items() if count > 1] == []


# semantics: B1 T2
@pytest.mark.parametrize("topic", ["cars/1", "trains/1"])
@pytest.mark.parametrize(("seed", "durable"), [(1, False), (2, True), (3, True)])
def test_a_session_that_goes_to_another_broker_of_the_group_gets_each_message_once(
    seed: int, durable: bool, topic: str
) -> None:
    """Whatever is on its way between brokers, to the cloud and out of it, in whatever order it arrives."""
    mesh, nodes = two_groups(durable=durable)
    rng = random.Random(seed)
    traveller = Client(nodes[1], "traveller", clean_start=False, expiry=1_000)
    traveller.subscribe("+/1")
    mesh.advance(1.0)
    publishers = [Client(node, f"publisher {node.name}") for node in nodes]
    found = Counter[bytes]()
    sent = 0
    for place in (0, 1, 0, 1):
        former = traveller
        for half in range(2):
            if half:
                traveller = Client(nodes[place], "traveller", clean_start=False, expiry=1_000)
            for _ in range(6):
                for publisher in publishers:
                    publisher.publish(topic, b"%d" % sent, 2)
                    sent += 1
                for _ in range(rng.randrange(30)):
                    mesh.step(rng)
                traveller.read()
        mesh.advance(0.5)
        assert traveller.connack is not None
        assert traveller.connack.session_present
        count_once(former, found)
    mesh.advance(3.0)
    count_once(traveller, found)
    assert found == Counter(b"%d" % number for number in range(sent))


def count_once(client: Client, found: Counter[bytes]) -> None:
    """What a client got, without what it is told may have come before."""
    for message in client.messages:
        if not (message.dup and found[message.payload]):
            found[message.payload] += 1


# semantics: B2
def test_a_group_is_flooded_and_others_get_what_they_want() -> None:
    mesh, (a, b, c, d) = two_groups()
    publisher = Client(a, "publisher")
    publisher.publish("cars/1", b"to b", 1)
    publisher.publish("trains/1", b"to nobody", 1)
    mesh.advance(1.0)
    assert b.fabric.channels.received_messages == 1, "whether it wants it or not"
    assert c.fabric.broadcast.cloud is not None
    assert c.fabric.broadcast.cloud.arrived_messages == 0
    # A client that comes to a broker of the group is served from that moment on: nobody has to hear of it first.
    late = Client(b, "late")
    late.subscribe("cars/#")
    publisher.publish("cars/1", b"at once", 1)
    mesh.run()
    assert late.payloads == [b"at once"]
    # One subscriber makes the whole other group get it; of the filtered class only those of its brokers that want it.
    wanting = Client(d, "wanting")
    wanting.subscribe("+/1")
    mesh.advance(1.0)
    before = d.fabric.channels.received_messages
    publisher.publish("cars/1", b"both", 1)
    publisher.publish("trains/1", b"one", 1)
    mesh.advance(1.0)
    assert c.fabric.broadcast.cloud.arrived_messages == 2
    assert d.fabric.channels.received_messages == before + 2
    assert wanting.payloads == [b"both", b"one"]
    wanting.unsubscribe("+/1")
    mesh.advance(1.0)
    publisher.publish("cars/1", b"nobody there", 1)
    mesh.advance(1.0)
    assert c.fabric.broadcast.cloud.arrived_messages == 2


# semantics: B3
@pytest.mark.parametrize("origin", ["a", "b"])
def test_the_publisher_s_broker_keeps_it_until_the_cloud_has_it(origin: str) -> None:
    mesh, nodes = two_groups(durable=True)
    far = Client(nodes[2], "far")
    far.subscribe("cars/#")
    mesh.advance(1.0)
    mesh.stop_cloud()
    node = next(node for node in nodes if node.name == origin)
    publisher = Client(node, "publisher")
    for number in range(5):
        publisher.publish("cars/1", b"%d" % number, 1)
    mesh.advance(2.0)
    assert node.waiting == 5
    node.crash()
    mesh.advance(1.0)
    assert node.waiting == 5, "it is on disk"
    mesh.start_cloud()
    mesh.until("the messages", lambda: len(far.payloads) == 5)
    assert far.payloads == [b"%d" % number for number in range(5)]
    mesh.until("word of it", lambda: node.waiting == 0)


# semantics: B4
def test_qos_0_goes_at_once_or_not_at_all() -> None:
    mesh, (a, b, c, _) = two_groups()
    near, far = Client(b, "near"), Client(c, "far")
    for client in (near, far):
        client.subscribe("cars/#")
    mesh.advance(1.0)
    mesh.stop_cloud()
    publisher = Client(a, "publisher")
    publisher.publish("cars/1", b"now", 0)
    mesh.start_cloud()
    mesh.advance(15.0)
    assert (near.payloads, far.payloads) == ([b"now"], [])


# semantics: B5
def test_an_acknowledgement_waits_for_nobody_else() -> None:
    mesh, (a, *_) = two_groups()
    mesh.stop_cloud()
    mesh.part("a", "b")
    publisher = Client(a, "publisher")
    publisher.publish("cars/1", b"x", 1)
    assert any(isinstance(packet, PubAck) for packet in publisher.packets)


# semantics: B6
@pytest.mark.parametrize("place", [2, 3])
def test_a_suback_says_that_other_groups_are_heard(place: int) -> None:
    mesh, nodes = two_groups()
    for number in range(10):
        subscriber = Client(nodes[place], f"subscriber {number}")
        subscriber.subscribe(f"cars/{number}")
        mesh.until("the SUBACK", lambda client=subscriber: bool(client.subacks))  # type: ignore[misc]
        Client(nodes[0], f"publisher {number}").publish(f"cars/{number}", b"x", 0)
        mesh.advance(0.5)
        assert subscriber.payloads == [b"x"]


# semantics: B6
def test_a_suback_does_not_wait_for_a_cloud_that_is_not_there() -> None:
    mesh, nodes = two_groups()
    mesh.stop_cloud()
    mesh.advance(1.0)
    for node in nodes:
        subscriber = Client(node, "subscriber")
        subscriber.subscribe("cars/#")
        mesh.run()
        assert subscriber.subacks, node.name


# --- what fails ---------------------------------------------------------------------------------------------------------


# semantics: B7
def test_without_the_cloud_groups_go_on_and_catch_up_afterwards() -> None:
    mesh, nodes = two_groups()
    present = subscribers(mesh, nodes)
    mesh.stop_cloud()
    mesh.advance(1.0)
    Client(nodes[1], "publisher").publish("cars/1", b"x", 1)
    mesh.advance(30.0)
    assert [client.payloads for client in present] == [[b"x"], [b"x"], [], []]
    assert nodes[1].leader == "a", "nobody leaves because of it"
    mesh.start_cloud()
    mesh.advance(15.0)
    assert [client.payloads for client in present] == [[b"x"]] * 4


# semantics: B8
@pytest.mark.parametrize("victim", FOUR)
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_crash_loses_nothing_that_was_acknowledged(victim: str, power_cut: bool) -> None:
    mesh, nodes = two_groups(durable=True)
    sessions = {node.name: Client(node, f"subscriber {node.name}", expiry=1_000) for node in nodes}
    for client in sessions.values():
        client.subscribe("cars/#")
    mesh.advance(1.0)
    sent: set[bytes] = set()
    by_name = {node.name: node for node in nodes}

    def publish(round_number: int) -> None:
        for node in nodes:
            publisher = Client(node, "publisher")
            payload = f"{node.name} {round_number}".encode()
            publisher.publish("cars/1", payload, 1)
            mesh.run()
            publisher.read()
            if any(isinstance(packet, PubAck) for packet in publisher.packets):
                sent.add(payload)
            publisher.disconnect()

    for round_number in range(5):
        publish(round_number)
    by_name[victim].crash(power_cut=power_cut)
    found: dict[str, set[bytes]] = {name: set(client.payloads) for name, client in sessions.items()}
    sessions[victim] = Client(by_name[victim], f"subscriber {victim}", clean_start=False, expiry=1_000)
    for round_number in range(5, 25):
        mesh.advance(0.2)
        publish(round_number)
    mesh.advance(20.0)
    assert len(sent) == 100
    for name, client in sessions.items():
        assert sent - (found[name] | set(client.payloads)) == set(), f"subscriber of {name}"


# semantics: B8
def test_members_of_a_leader_that_is_gone_go_on_by_themselves() -> None:
    mesh, (_, b, c, d) = two_groups()
    far = Client(d, "far")
    far.subscribe("cars/#")
    mesh.advance(1.0)
    for other in ("b", "c", "d", "cloud"):
        mesh.part("a", other)
    publisher = Client(b, "publisher")
    publisher.publish("cars/1", b"in between", 1)
    mesh.until("b leads itself", lambda: b.leader == "b")
    mesh.until("the message", lambda: far.payloads == [b"in between"])
    assert c.members == {"c", "d"}


# --- others at the cloud ------------------------------------------------------------------------------------------------


# semantics: B9
@pytest.mark.parametrize("cloud_version", ["3.1.1", "5"])
def test_clients_of_the_cloud_take_part(cloud_version: str) -> None:
    mesh, nodes = two_groups(cloud_version=cloud_version)
    present = subscribers(mesh, nodes)
    outside = Client(mesh.cloud, "outside")
    outside.subscribe("cars/#")
    for qos in (0, 1, 2):
        outside.publish("cars/1", b"down %d" % qos, qos)
    Client(nodes[1], "publisher").publish("cars/1", b"up", 1, properties=Properties(user_properties=[("own", "kept")]))
    mesh.advance(2.0)
    for client in [outside, *present]:
        assert received(client) == Counter([b"down 0", b"down 1", b"down 2", b"up"])
    for client in present:
        told = next(message.properties for message in client.messages if message.payload == b"up")
        own = [] if told is None else told.user_properties
        # MQTT 3.1.1 has no properties: they arrive where the message need not pass the cloud.
        assert own == ([("own", "kept")] if cloud_version == "5" or client.node in nodes[:2] else [])


# semantics: B10
def test_what_brokers_say_to_each_other_cannot_be_said_by_others() -> None:
    mesh, nodes = two_groups()
    outside = Client(mesh.cloud, "outside")
    outside.subscribe("#")
    Client(nodes[0], "publisher").publish("cars/1", b"genuine", 1)
    mesh.advance(1.0)
    # Somebody at the cloud repeats what leaders announce, and what identifies messages, with content of their own.
    genuine = next(message for message in outside.messages if message.topic == "cars/1")
    announced = next(message for message in outside.messages if message.topic.startswith("nearcast/leaders/"))
    present = subscribers(mesh, nodes)
    outside.publish("cars/2", b"forged", 1, properties=genuine.properties)
    outside.publish(announced.topic, announced.payload[:-1] + b"?", 0)
    mesh.advance(1.0)
    for client in present:
        assert received(client) == Counter([b"forged"]), "a message of somebody at the cloud, whoever it says it is from"
    assert [(node.leader, node.members) for node in nodes] == [("a", {"a", "b"})] * 2 + [("c", {"c", "d"})] * 2


# semantics: B10
def test_topics_of_brokers_and_of_servers_are_not_relayed() -> None:
    settings = msgspec.structs.replace(SETTINGS, classes=(msgspec.structs.replace(SETTINGS.classes[0], topic="#"),))
    mesh = GroupMesh(settings=settings)
    mesh.far(("a",), ("b",))
    a, b = mesh.broker("a", lcm=2.0), mesh.broker("b", lcm=1.0)
    mesh.form(("a",), ("b",))
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("#")
    subscriber.subscribe("$own/#")
    mesh.advance(1.0)
    publisher = Client(a, "publisher")
    for topic in ("nearcast/leaders/world", "$own/1", "cars/1"):
        publisher.publish(topic, b"x", 1)
    mesh.advance(1.0)
    assert [message.topic for message in subscriber.messages] == ["cars/1"]
    assert a.waiting == 0, "nothing waits for what never goes"


# --- order, retained messages -------------------------------------------------------------------------------------------


# semantics: B11
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_order_is_kept_while_groups_are_what_they_are(qos: int) -> None:
    mesh, nodes = two_groups()
    present = subscribers(mesh, nodes)
    publishers = [Client(node, f"publisher {node.name}") for node in nodes]
    for number in range(30):
        for place, publisher in enumerate(publishers):
            publisher.publish(f"cars/{place}", b"%d" % number, qos)
        if number % 7 == 0:
            mesh.run()
    mesh.advance(2.0)
    for client in present:
        for place in range(4):
            arrived = [message.payload for message in client.messages if message.topic == f"cars/{place}"]
            assert arrived == [b"%d" % number for number in range(30)]


# semantics: B12
@pytest.mark.parametrize("origin", range(4))
def test_retained_messages_are_found_in_every_group(origin: int) -> None:
    mesh, nodes = two_groups()
    publisher = Client(nodes[origin], "publisher")
    for payload in (b"first", b"kept"):
        publisher.publish("cars/1", payload, 1, retain=True)
        mesh.advance(3.0)
    for node in nodes:
        late = Client(node, "late")
        late.subscribe("cars/#")
        mesh.until("it", lambda client=late: bool(client.payloads))  # type: ignore[misc]
        mesh.advance(1.0)
        assert received(late) == Counter([b"kept"])
    Client(nodes[3 - origin], "other").publish("cars/1", b"", 1, retain=True)
    mesh.advance(3.0)
    for node in nodes:
        later = Client(node, "later")
        later.subscribe("cars/#")
        mesh.advance(1.0)
        assert later.payloads == []


# --- shared subscriptions -----------------------------------------------------------------------------------------------


# semantics: B13
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("places", [(0, 1, 2, 3), (2, 3), (3,), (1, 3)])
def test_one_member_of_a_shared_subscription_gets_each_message(places: tuple[int, ...], qos: int) -> None:
    mesh, nodes = two_groups()
    workers = {place: Client(nodes[place], f"worker {place}") for place in places}
    for worker in workers.values():
        worker.subscribe("$share/pool/cars/#")
    watcher = Client(nodes[2], "watcher")
    watcher.subscribe("cars/#")
    mesh.advance(2.0)
    sent = Counter[bytes]()
    for place, node in enumerate(nodes):
        publisher = Client(node, "publisher")
        for number in range(10):
            publisher.publish("cars/1", b"%d %d" % (place, number), qos)
            sent[b"%d %d" % (place, number)] += 1
        mesh.advance(0.5)
    mesh.advance(2.0)
    assert sum((received(worker) for worker in workers.values()), Counter[bytes]()) == sent
    assert received(watcher) == sent, "plain subscribers are not concerned"
    for place, worker in workers.items():
        elsewhere = {0, 1} if place > 1 else {2, 3}
        if elsewhere & set(places):
            assert not [payload for payload in worker.payloads if int(payload[:1]) in elsewhere], "its own group is nearer"


# --- which brokers have links -------------------------------------------------------------------------------------------


# semantics: B14
@pytest.mark.parametrize("links", ["auto", "all"])
def test_other_classes_go_where_there_are_links(links: str) -> None:
    mesh = GroupMesh()
    mesh.far(("a", "b"), ("c", "d"))
    nodes = [mesh.broker(name, lcm=40.0 - place, links=links) for place, name in enumerate(FOUR)]
    if links == "all":
        for node in nodes:
            for other in FOUR:
                if other > node.name:
                    node.fabric.dial(f"{other}:1884", mesh.now, other)
    mesh.form(("a", "b"), ("c", "d"))
    present = subscribers(mesh, nodes, "#")
    for node in nodes:
        publisher = Client(node, "publisher")
        for topic in ("cars/1", "trains/1", "rooms/1", "yards/1"):
            publisher.publish(topic, node.name.encode(), 1)
    mesh.advance(2.0)
    for place, client in enumerate(present):
        groups = "abcd" if links == "all" else "ab" if place < 2 else "cd"
        expected = [(topic, name) for topic in ("cars/1", "trains/1") for name in "abcd"]
        expected += [("rooms/1", name) for name in groups] + [("yards/1", nodes[place].name)]
        assert Counter((message.topic, message.payload.decode()) for message in client.messages) == Counter(expected)
    others = {node.name: sorted(name for name, peer in node.fabric.peers.items() if peer.up) for node in nodes}
    assert all(len(names) == (3 if links == "all" else 1) for names in others.values()), others


# --- without a cloud ----------------------------------------------------------------------------------------------------


# semantics: B15
def test_without_a_cloud_every_broker_is_flooded() -> None:
    mesh = Mesh(settings=msgspec.structs.replace(SETTINGS, groups=Groups()))
    a, b, c = (mesh.add(name) for name in ("a", "b", "c"))
    for first, second in (("a", "b"), ("a", "c"), ("b", "c")):
        mesh.link(first, second)
    mesh.run()
    subscriber = Client(b, "subscriber")
    subscriber.subscribe("#")
    mesh.run()
    publisher = Client(a, "publisher")
    for topic in ("cars/1", "trains/1", "rooms/1", "yards/1"):
        publisher.publish(topic, b"x", 1)
    mesh.run()
    assert [message.topic for message in subscriber.messages] == ["cars/1", "trains/1", "rooms/1"]
    assert c.fabric.channels.received_messages == 1, "only what is flooded goes where nobody subscribes"

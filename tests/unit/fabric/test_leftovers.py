"""A broker that was lost comes back with its journal: what it has of sessions that went on elsewhere follows them."""

from __future__ import annotations

from nearcast.fabric.leftovers import LOST_LATELY_S, NOWHERE_S
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import MQTT_5, Properties, PubRec, Unsubscribe
from tests.fabric_harness import Mesh
from tests.gateway_harness import Gateway, MqttClient, run_all
from tests.unit.fabric.test_resumption import Returning, connect, facts, resume

KEPT = Properties(session_expiry_interval=1_000)


class Scene:
    """A client at broker a; a publisher at c; b is where the client goes on. Broker a is durable."""

    def __init__(self, *, durable: bool = True) -> None:
        self.mesh = Mesh()
        self.gateway = Gateway(self.mesh, "gateway")
        self.mesh.add("a", durable=durable)
        for name in ("b", "c", "d"):
            self.mesh.add(name, durable=True)
        for pair in ("ab", "ac", "bc", "ad", "bd", "cd"):
            self.mesh.link(*pair)
        self.client = self.gateway.mqtt_client("a", "client", expiry=1_000)
        self.publisher = self.gateway.mqtt_client("c", "publisher")
        self.run()

    def run(self, seconds: float = 0.0) -> None:
        run_all(self.mesh, self.gateway)
        while seconds > 0:
            self.mesh.advance(0.5)
            run_all(self.mesh, self.gateway)
            seconds -= 0.5

    def publish(self, *payloads: str, topic: str = "t", qos: int = 2) -> None:
        for payload in payloads:
            self.publisher.publish(topic, payload.encode(), qos)
        self.run()

    def lose(self, name: str = "a") -> None:
        """The broker is killed. It runs again, and nobody has heard of it."""
        self.gateway.cut(name)
        self.mesh.nodes[name].crash()
        self.run()

    def resume(self, broker: str = "b", *, filters: tuple[str, ...] = ("t",), had: bytes = b"", lost: str = "a") -> Returning:
        known = facts(
            connect(properties=KEPT, clean_start=False),
            subscriptions=tuple((name, 2) for name in filters),
            unreleased=had,
            lost_at=tuple((name, had) for name in lost),
        )
        client = resume(self.gateway, broker, known)
        self.run()
        return client

    def back(self, name: str = "a", *, seconds: float = 3.0) -> None:
        for other in "abcd":
            if other != name:
                self.mesh.link(name, other)
        self.run(seconds)

    def has_session(self, name: str) -> bool:
        return "client" in self.mesh.nodes[name].engine.sessions.by_client


def payloads(client: MqttClient) -> list[str]:
    return [payload.decode() for _, payload in client.messages]


def fill(scene: Scene, qos: int = 2) -> None:
    """Some messages are in flight at a, some wait: the client takes twenty at a time and answers none."""
    scene.client.subscribe("t", qos)
    scene.run()
    scene.client.acknowledges = False
    scene.publish(*[str(number) for number in range(30)])


def test_what_the_lost_broker_had_arrives_once() -> None:
    scene = Scene()
    fill(scene)
    got = payloads(scene.client)
    assert len(got) == 20
    had = b"".join(number.to_bytes(2, "big") for number in range(1, 21))
    scene.lose()
    scene.publish("kept for a")
    after = scene.resume(had=had)
    scene.publish("by itself")
    assert payloads(after) == ["by itself"]
    scene.back()
    assert sorted(got + payloads(after)) == sorted([*map(str, range(30)), "kept for a", "by itself"])
    assert not scene.has_session("a")
    assert not scene.mesh.nodes["b"].engine.sessions.by_client["client"].lost


def test_messages_in_flight_that_did_not_reach_the_client_do_and_released_ones_are_there() -> None:
    scene = Scene()
    fill(scene)
    scene.client.write(encode(PubRec(1), MQTT_5))  # its PUBREL comes: the gateway has 1 as unfinished, a as released
    scene.run()
    had = b"".join(number.to_bytes(2, "big") for number in range(1, 11))  # of twenty, ten were passed on
    scene.lose()
    after = scene.resume(had=had)
    scene.back()
    assert sorted(payloads(after), key=int) == [str(number) for number in range(10, 30)]


def test_qos_1_comes_at_least_once() -> None:
    scene = Scene()
    fill(scene, qos=1)
    scene.lose()
    after = scene.resume()
    scene.back()
    assert set(map(str, range(30))) <= set(payloads(scene.client) + payloads(after))


def test_messages_of_the_new_broker_and_of_the_lost_one_come_once() -> None:
    scene = Scene()
    scene.client.subscribe("t", 2)
    scene.run()
    scene.lose()
    at_b = scene.gateway.mqtt_client("b", "at b")
    at_b.publish("t", b"from b before", 2)
    scene.run()
    after = scene.resume()
    at_b.publish("t", b"from b after", 2)
    at_a = scene.gateway.mqtt_client("a", "at a")
    at_a.publish("t", b"from a before", 2)
    scene.run()
    scene.back()
    at_a.publish("t", b"from a after", 2)
    scene.run()
    assert sorted(payloads(after)) == ["from a after", "from a before", "from b after", "from b before"]


def test_what_another_client_of_the_new_broker_wants_anyway_comes_once() -> None:
    scene = Scene()
    other = scene.gateway.mqtt_client("b", "other")
    other.subscribe("#", 2)
    other.subscribe("t", 2)
    scene.client.subscribe("t", 2)
    scene.run()
    scene.lose()
    scene.publish("1", "2")
    # c has the next one on its way to b when the client comes there.
    scene.publisher.publish("t", b"3", 2)
    after = scene.resume()
    scene.publish("4")
    scene.back()
    assert sorted(payloads(after)) == ["1", "2", "3", "4"]


def test_subscriptions_of_an_earlier_connection_come_back() -> None:
    scene = Scene()
    scene.client.subscribe("t", 2)
    scene.client.subscribe("early", 2)
    scene.run()
    scene.lose()
    scene.publish("1", topic="early")
    after = scene.resume()
    scene.publish("2", topic="early")
    scene.back()
    scene.publish("3", topic="early")
    assert payloads(after) == ["1", "2", "3"]


def test_what_the_client_asks_for_again_comes_once() -> None:
    scene = Scene()
    scene.client.subscribe("t", 2)  # its SUBACK does not reach the gateway any more
    scene.run()
    scene.lose()
    scene.publish("1")
    after = scene.resume(filters=())
    after.subscribe("t", 2)
    scene.run()
    scene.publish("2")
    scene.back()
    scene.publish("3")
    assert sorted(payloads(after)) == ["1", "2", "3"]


def test_a_filter_that_the_client_left_meanwhile_does_not_come_back() -> None:
    scene = Scene()
    scene.client.subscribe("t", 2)
    scene.client.subscribe("u", 2)
    scene.run()
    scene.lose()
    after = scene.resume(filters=("t", "u"))
    after.write(encode(Unsubscribe(77, ["u"]), MQTT_5))
    scene.run()
    scene.back()
    scene.publish("1", topic="u")
    assert set(scene.mesh.nodes["b"].engine.sessions.by_client["client"].subscriptions) == {"t"}
    assert payloads(after) == []


def test_a_client_that_began_anew_gets_nothing_of_it() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    after = scene.resume()
    after.close()
    scene.run()
    fresh = scene.gateway.mqtt_client("b", "client", expiry=1_000, clean_start=True)
    fresh.subscribe("t", 2)
    scene.run()
    scene.back()
    assert payloads(fresh) == []
    assert not scene.has_session("a")


def test_a_session_that_ended_meanwhile_ends_at_the_lost_broker_too() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    after = scene.resume()
    scene.mesh.link("a", "b")
    scene.run()
    assert "client" in scene.mesh.nodes["a"].fabric.leftovers.copies
    node = scene.mesh.nodes["b"]
    session = node.engine.sessions.by_client["client"]
    assert session.connection is not None
    after.close()
    node.engine.sessions.end(session, scene.mesh.now)
    node.flush()
    scene.back(seconds=NOWHERE_S + 2)
    assert not scene.has_session("a")


def test_it_follows_a_client_that_moved_on() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    after = scene.resume()
    scene.run(LOST_LATELY_S + 1)
    after.move("d")
    scene.run()
    assert scene.has_session("d")
    assert not scene.has_session("b")
    scene.publish("later")
    scene.back()
    assert sorted(payloads(after)) == sorted([*map(str, range(30)), "later"])
    assert not scene.has_session("a")


def test_it_is_given_to_a_client_that_is_away_by_then() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    after = scene.resume()
    after.close()
    scene.run()
    scene.back()
    assert not scene.has_session("a")
    later = scene.gateway.mqtt_client("b", "client", expiry=1_000, clean_start=False)
    scene.run()
    assert sorted(payloads(later), key=int) == [str(number) for number in range(30)]


def test_both_crash_and_what_they_know_of_it_stays() -> None:
    scene = Scene()
    fill(scene)
    had = b"".join(number.to_bytes(2, "big") for number in range(1, 21))
    scene.lose()
    after = scene.resume(had=had)
    scene.publish("by itself")
    assert payloads(after) == ["by itself"]
    scene.lose("b")
    scene.mesh.link("b", "c")
    scene.mesh.link("b", "d")
    scene.run()
    scene.back()
    assert not scene.has_session("a")
    later = scene.gateway.mqtt_client("b", "client", expiry=1_000, clean_start=False)
    scene.run()
    assert sorted(payloads(later), key=int) == [str(number) for number in range(20, 30)]


def test_two_brokers_bring_what_they_have() -> None:
    scene = Scene()
    fill(scene)
    got = payloads(scene.client)
    had = b"".join(number.to_bytes(2, "big") for number in range(1, 21))
    scene.lose()
    second = scene.resume(had=had)
    second.acknowledges = False
    scene.publish(*[f"b{number}" for number in range(5)])
    scene.lose("b")
    third = scene.resume("d", had=had, lost="ab")
    scene.mesh.link("a", "b")
    for name in "ab":
        scene.mesh.link(name, "c")
        scene.mesh.link(name, "d")
    scene.run(5.0)
    assert not scene.has_session("a")
    assert not scene.has_session("b")
    # What b sent is in flight there: that the client has it, its gateway did not say here.
    assert set(got + payloads(third)) == {*map(str, range(30)), *[f"b{number}" for number in range(5)]}


def test_a_copy_waits_for_a_third_broker_that_has_more_for_it() -> None:
    scene = Scene()
    scene.client.subscribe("t", 2)
    scene.run()
    scene.lose()
    scene.publish("kept")
    scene.lose("c")
    after = scene.resume()
    scene.mesh.link("a", "b")
    scene.mesh.link("a", "d")
    scene.run(3.0)
    assert scene.has_session("a")
    scene.mesh.link("c", "a")
    scene.mesh.link("c", "b")
    scene.mesh.link("c", "d")
    scene.run(3.0)
    assert payloads(after) == ["kept"]
    assert not scene.has_session("a")


def test_the_will_of_a_client_that_goes_on_is_not_published() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    scene.resume()
    scene.back(seconds=20.0)
    assert scene.mesh.nodes["a"].engine.stats.wills_published == 0


def test_lost_brokers_are_forgotten_in_time() -> None:
    scene = Scene()
    fill(scene)
    scene.lose()
    scene.resume()
    fabric = scene.mesh.nodes["b"].fabric
    assert scene.mesh.nodes["b"].engine.sessions.by_client["client"].lost
    fabric.forget(fabric.peers["a"], scene.mesh.now)
    assert not scene.mesh.nodes["b"].engine.sessions.by_client["client"].lost
    assert not fabric.leftovers.by_client

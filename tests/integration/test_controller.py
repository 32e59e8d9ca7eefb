"""A controller as a process, with brokers, gateways and clients that are real: registering, moving, draining, losing."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearcast.mqtt.packets import Connect, Publish, Subscribe, SubscriptionRequest
from tests.integration.broker.running import RawClient, wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.controllers import ControlledFabric


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlledFabric]:
    """Two brokers and a gateway, for all tests: starting processes takes most of the time here. Each leaves it as it was."""
    made = ControlledFabric(tmp_path_factory.mktemp("fabric"))
    with made:
        assert "no node has registered" in made.nearcast("nodes")
        made.start("b1", "b2", gateway="g")
        yield made


@pytest.fixture(autouse=True)
def all_there(fabric: ControlledFabric) -> None:
    fabric.wait_for_states(b1="up", b2="up", g="up")
    wait_for("brokers meeting", lambda: fabric.nodes["b1"].sees("b2") and fabric.nodes["b2"].sees("b1"))


@pytest.fixture(autouse=True)
def sockets_closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clients of a test end with it."""
    opened: list[RawClient] = []
    connect = RawClient.connected

    def remembered(self: RawClient, packet: Connect | None = None) -> RawClient:
        opened.append(self)
        return connect(self, packet)

    monkeypatch.setattr(RawClient, "connected", remembered)
    yield
    for client in opened:
        client.socket.close()


def subscriber(at: NearcastBroker, client_id: str, topic_filter: str) -> RawClient:
    client = at.connect(Connect(client_id, version=5))
    client.send(Subscribe(1, [SubscriptionRequest(topic_filter, 1)]))
    client.receive()
    return client


def passes(source: NearcastBroker, client: RawClient, topic: str, payload: bytes) -> None:
    """A message published at ``source`` reaches a client."""
    publisher = source.connect()
    publisher.send(Publish(topic, payload, 0))
    received = client.receive()
    assert isinstance(received, Publish)
    assert (received.topic, received.payload) == (topic, payload)


def place_of(fabric: ControlledFabric, client_id: str) -> str:
    """The broker that a client of the gateway is at, once the controller knows."""

    def known() -> str | None:
        page = fabric.controller.client().get("/clients", node="g")
        return next((client["broker"] for client in page["clients"] if client["client"] == client_id), None)

    return str(wait_for(f"{client_id} to be known", known))


def test_a_fabric_from_nothing_moved_drained_and_shown(fabric: ControlledFabric) -> None:
    b1, b2, gateway = (fabric.nodes[name] for name in ("b1", "b2", "g"))
    api = fabric.controller.client()
    wait_for("measured paths", lambda: sum(link["kind"] == "monitored" for link in api.get("/links")) == 2)

    # A client by name, while it is served.
    client = subscriber(gateway, "c", "t/#")
    place_of(fabric, "c")
    (facts,) = fabric.json("status", "--clients", "--links")["clients"]
    assert (facts["client"], facts["gateway"]) == ("c", "g")
    home = facts["broker"]
    other = "b2" if home == "b1" else "b1"
    assert "moved 1 client" in fabric.nearcast("move", other, "--client", "c")
    passes(b1, client, "t/1", b"after the first move")
    (move, *_) = api.get("/moves")
    assert (move["state"], move["kind"], move["moved_clients"]) == ("done", "manual", 1)

    # A broker is emptied; nothing goes there until that is ended.
    assert "gets none" in fabric.nearcast("drain", other, "--wait", "30")
    passes(b2, client, "t/2", b"after the drain")
    assert fabric.controller.nodes()["g"]["brokers"] == {home: 1}
    assert "is being drained" in fabric.nearcast("move", other, "--client", "c", code=1)
    api.send("DELETE", f"/nodes/{other}/drain")

    # A class changes in the running fabric.
    away = b2 if home == "b1" else b1
    fabric.nearcast("class", "t/private/#", "local")
    elsewhere = away.connect()

    def stays_away() -> bool:
        # Behind one that must not arrive, one that must: what arrives first says whether the rule is in force.
        elsewhere.send(Publish("t/private/x", b"", 0), Publish("t/public", b"", 0))
        received = client.receive()
        assert isinstance(received, Publish)
        if received.topic == "t/private/x":
            client.receive()
        return received.topic == "t/public"

    wait_for("the class to hold", stays_away)
    assert fabric.json("class") == [{"topic_filter": "t/private/#", "topic_class": "local", "max_latency_ms": 0.0}]
    assert "every topic is bridged" in fabric.nearcast("class", "t/private/#", "--remove")

    nodes = fabric.nearcast_process("nodes")
    assert all(word in nodes for word in ("b1", "b2", "g", "here", "gateway"))
    assert "2 brokers, 1 gateway, " in fabric.nearcast("status")


def test_a_broker_that_is_killed_is_found_out_and_its_clients_go_on(fabric: ControlledFabric) -> None:
    client = subscriber(fabric.nodes["g"], "k", "t/#")
    home = place_of(fabric, "k")
    other = "b2" if home == "b1" else "b1"
    fabric.nodes[home].kill()
    fabric.wait_for_states(**{home: "down", other: "up"})
    wait_for("the client at the other broker", lambda: place_of(fabric, "k") == other)
    passes(fabric.nodes[other], client, "t/1", b"still here")
    assert fabric.controller.client().get("/status")["nodes_not_up"] == [home]
    fabric.nodes[home].start()
    fabric.wait_for_states(**{home: "up"})


def test_a_broker_that_hangs_is_found_out(fabric: ControlledFabric) -> None:
    b1 = fabric.nodes["b1"]
    b1.signal(signal.SIGSTOP)
    fabric.wait_for_states(b1="down", b2="up", g="up")
    b1.signal(signal.SIGCONT)
    fabric.wait_for_states(b1="up")


def test_a_broker_that_stops_has_left(fabric: ControlledFabric) -> None:
    fabric.nodes["b1"].stop()
    fabric.wait_for_states(b1="left", b2="up")
    wait_for("the other one to forget it", lambda: fabric.nodes["b2"].sees())
    fabric.nodes["b1"].start()


def test_nothing_waits_for_a_controller_that_is_gone_and_a_new_one_learns_everything(fabric: ControlledFabric) -> None:
    b1, b2, gateway = (fabric.nodes[name] for name in ("b1", "b2", "g"))
    client = subscriber(gateway, "early", "t/#")
    fabric.controller.client().send("PUT", "/classes", {"topic_filter": "x/#", "topic_class": "local"})
    # Its next word to the brokers is behind the rule on the same link.
    fabric.start("b3")
    wait_for("brokers meeting", lambda: b1.sees("b2", "b3"))
    fabric.controller.kill()
    passes(b1, client, "t/1", b"without a controller")
    late = subscriber(gateway, "late", "t/#")
    passes(b2, late, "t/2", b"for one that came meanwhile")
    client.receive()
    fabric.controller.start()
    fabric.wait_for_states(b1="up", b2="up", g="up")
    api = fabric.controller.client()
    place_of(fabric, "early")
    place_of(fabric, "late")
    assert {"topic_filter": "x/#", "topic_class": "local", "max_latency_ms": 0.0} in api.get("/classes")
    passes(b1, client, "t/3", b"nothing moved")
    assert all(move["moved_clients"] == 0 for move in api.get("/moves") if move["kind"] != "balance")
    fabric.nodes.pop("b3").kill()
    api.send("DELETE", "/classes?topic_filter=x/%23")


def test_errors_say_what_to_do(fabric: ControlledFabric, tmp_path: Path) -> None:
    assert "--api says where it is" in fabric.nearcast("status", "--api", "http://127.0.0.1:1", code=1)
    assert "write http://HOST:PORT" in fabric.nearcast("status", "--api", "127.0.0.1:1", code=1)
    assert "no controller" in fabric.nearcast("status", "--api", fabric.controller.api + "/x", code=1)
    wrong = tmp_path / "wrong"
    wrong.write_text("some-other-token-123456")
    assert "does not know this token" in fabric.nearcast("status", "--token-file", str(wrong), code=1)
    taken = fabric.controller.ready["port"]
    assert "--port takes another one" in fabric.nearcast_process(
        "controller", "--fabric-secret", str(fabric.secret), "--port", str(taken), "--no-http", code=1
    )
    assert "nearcast secret FILE" in fabric.nearcast("controller", "--fabric-secret", str(tmp_path / "none"), code=1)

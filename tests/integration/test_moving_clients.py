"""Real clients through a real gateway, moved between three brokers again and again: nothing lost, nothing doubled."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from nearcast.fabric.gateway import Gateway
from nearcast.serving.secrets import make_secret
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker
from tests.integration.gateways import EmbeddedGateway, config
from tests.integration.test_paho import MQTTv5, Paho, both_versions
from tests.integration.tools import require

pytestmark = pytest.mark.integration

MESSAGES = 60
MESSAGES_PER_MOVE = 3


@pytest.fixture(scope="module", params=["memory", "journal"])
def gateway(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGateway]:
    """Three brokers, with a journal or without, and a gateway in front of them."""
    directory: Path = tmp_path_factory.mktemp("moving")
    secret = directory / "fabric.secret"
    make_secret(secret)
    with contextlib.ExitStack() as stack:
        brokers: list[NearcastBroker] = []
        for name in ("b0", "b1", "b2"):
            home = directory / name
            home.mkdir()
            arguments = ["--name", name, "--fabric-secret", str(secret)]
            if request.param == "journal":
                arguments += ["--data", str(home / "data")]
            for other in brokers:
                arguments += ["--peer", other.link_address]
            brokers.append(stack.enter_context(NearcastBroker(home, arguments=arguments)))
        for broker in brokers:
            others = [f"b{index}" for index, other in enumerate(brokers) if other is not broker]
            wait_for("brokers meeting", lambda broker=broker, others=others: broker.sees(*others))  # type: ignore[misc]
        running = stack.enter_context(EmbeddedGateway(config([broker.link_address for broker in brokers], secret)))
        wait_for("brokers behind the gateway", lambda: running.ask(lambda machine: len(machine.lines)) == 3)
        yield running


class Mover:
    """Moves clients to the next broker, one move of each at a time."""

    def __init__(self, gateway: EmbeddedGateway, *clients: str) -> None:
        self._gateway = gateway
        self._targets = {client: itertools.cycle(["b1", "b2", "b0"]) for client in clients}
        self._before = gateway.ask(lambda machine: (machine.moves.moved, machine.moves.failed))

    def move(self) -> None:
        wait_for("the last moves", lambda: self._gateway.ask(lambda machine: not machine.moves.under_way))
        for client, targets in self._targets.items():
            if not self._gateway.move(next(targets), client):
                self._gateway.move(next(targets), client)  # it was there

    def finish(self) -> tuple[int, int]:
        """How many moves took place, and how many did not."""
        wait_for("the last moves", lambda: self._gateway.ask(lambda machine: not machine.moves.under_way))
        moved, failed = self._gateway.ask(lambda machine: (machine.moves.moved, machine.moves.failed))
        return moved - self._before[0], failed - self._before[1]


@both_versions
def test_a_subscriber_that_is_moved_misses_nothing(gateway: EmbeddedGateway, version: MQTTProtocolVersion) -> None:
    subscriber = Paho(gateway.port, version, "subscriber")
    publisher = Paho(gateway.port, MQTTv5, "publisher")
    try:
        for qos in range(3):
            subscriber.subscribe(f"moving/{qos}", qos)
        mover = Mover(gateway, "subscriber")
        for index in range(MESSAGES):
            if index % MESSAGES_PER_MOVE == 0:
                mover.move()
            for qos in range(3):
                publisher.publish(f"moving/{qos}", b"%d" % index, qos)
        got: dict[str, list[int]] = {f"moving/{qos}": [] for qos in range(3)}
        for _ in range(3 * MESSAGES):
            message = subscriber.receive()
            got[message.topic].append(int(message.payload))
        moved, failed = mover.finish()
        publisher.publish("moving/1", b"-1", 1)
        assert int(subscriber.receive().payload) == -1  # and nothing came twice before it
        assert got == {f"moving/{qos}": list(range(MESSAGES)) for qos in range(3)}
        assert moved >= MESSAGES // MESSAGES_PER_MOVE
        assert failed == 0
        assert subscriber.ends.empty()
    finally:
        subscriber.close()
        publisher.close()


@both_versions
def test_a_publisher_that_is_moved_loses_nothing(gateway: EmbeddedGateway, version: MQTTProtocolVersion) -> None:
    subscriber = Paho(gateway.port, MQTTv5, "subscriber")
    publisher = Paho(gateway.port, version, "publisher")
    try:
        for qos in range(3):
            subscriber.subscribe(f"moved/{qos}", qos)
        mover = Mover(gateway, "publisher", "subscriber")
        for index in range(MESSAGES):
            if index % MESSAGES_PER_MOVE == 0:
                mover.move()
            for qos in range(3):
                publisher.publish(f"moved/{qos}", b"%d" % index, qos)
        got: dict[str, list[int]] = {f"moved/{qos}": [] for qos in range(3)}
        for _ in range(3 * MESSAGES):
            message = subscriber.receive()
            got[message.topic].append(int(message.payload))
        _, failed = mover.finish()
        publisher.publish("moved/1", b"-1", 1)
        assert int(subscriber.receive().payload) == -1
        # Over different links, what it published here and there may come in another order.
        assert {topic: sorted(found) for topic, found in got.items()} == {
            f"moved/{qos}": list(range(MESSAGES)) for qos in range(3)
        }
        assert failed == 0
        assert publisher.ends.empty()
    finally:
        subscriber.close()
        publisher.close()


def has_subscribed(machine: Gateway, client_id: str) -> bool:
    """Whether a client's SUBSCRIBE was answered."""
    return any(
        tunnel.client_id == client_id and tunnel.mirror is not None and len(tunnel.mirror.subscriptions) > 0
        for tunnel in machine.tunnels
    )


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_mosquitto_sub_is_moved(gateway: EmbeddedGateway, qos: int) -> None:
    command = [str(require("mosquitto_sub")), "-h", "127.0.0.1", "-p", str(gateway.port), "-V", "5", "-i", "mosquitto"]
    command += ["-t", "lines", "-q", str(qos), "-C", str(MESSAGES), "-W", str(int(PATIENCE_SECONDS))]
    publisher = Paho(gateway.port, MQTTv5, "publisher")
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        wait_for("subscribing", lambda: gateway.ask(lambda machine: has_subscribed(machine, "mosquitto")))
        mover = Mover(gateway, "mosquitto")
        for index in range(MESSAGES):
            if index % MESSAGES_PER_MOVE == 0:
                mover.move()
            publisher.publish("lines", b"%d" % index, qos)
        lines = process.stdout.read().split()  # it ends after so many, or in time
        assert lines == [b"%d" % index for index in range(MESSAGES)]
        assert process.wait() == 0
        assert mover.finish()[0]  # the last one may find that it has left
    finally:
        process.kill()
        process.communicate()
        publisher.close()

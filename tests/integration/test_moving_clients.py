"""Real clients through a real gateway, moved between three brokers ten times a second and more: nothing lost, nothing doubled.

A client's next move begins as soon as its last one is over, while messages are published without a pause. How often a second
that was is reported (``-rP`` shows it); it depends on the machine, so nothing is asserted of it.
"""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator
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

MOVES = 20
"""Of every client, in every test."""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedGateway]:
    """Three brokers, two of them with a journal, and a gateway in front of them."""
    directory: Path = tmp_path_factory.mktemp("moving")
    secret = directory / "fabric.secret"
    make_secret(secret)
    with contextlib.ExitStack() as stack:
        brokers: list[NearcastBroker] = []
        for name in ("b0", "b1", "b2"):
            home = directory / name
            home.mkdir()
            arguments = ["--name", name, "--fabric-secret", str(secret)]
            for other in brokers:
                arguments += ["--peer", other.link_address]
            brokers.append(stack.enter_context(NearcastBroker(home, data=name != "b2", arguments=arguments)))
        for broker in brokers:
            others = [f"b{index}" for index, other in enumerate(brokers) if other is not broker]
            wait_for("brokers meeting", lambda broker=broker, others=others: broker.sees(*others))  # type: ignore[misc]
        running = stack.enter_context(EmbeddedGateway(config([broker.link_address for broker in brokers], secret)))
        wait_for("brokers behind the gateway", lambda: running.ask(lambda machine: len(machine.lines)) == 3)
        yield running


class Mover:
    """Moves clients to the next broker, again and again, one move of each at a time."""

    def __init__(self, gateway: EmbeddedGateway, *clients: str) -> None:
        self._gateway = gateway
        self._targets = {client: itertools.cycle(["b1", "b2", "b0"]) for client in clients}
        self._before = self._counts()
        self._began = time.monotonic()

    def _counts(self) -> tuple[int, int]:
        return self._gateway.ask(lambda machine: (machine.moves.moved, machine.moves.failed))

    def _idle(self, machine: Gateway) -> bool:
        return not machine.moves.under_way and not machine.moves.orders

    def move(self) -> None:
        """Begin a move of every client."""
        for client, targets in self._targets.items():
            if not self._gateway.move(next(targets), client):
                self._gateway.move(next(targets), client)  # it was there

    def while_moving(self, publish: Callable[[int], None]) -> int:
        """Publish until all clients were moved so often; returns how many times, counted from 0, ``publish`` was called."""
        wanted = MOVES * len(self._targets)
        begun = 0
        for index in itertools.count():
            if self._gateway.ask(self._idle):
                if begun == wanted:
                    return index
                self.move()
                begun += len(self._targets)
            assert time.monotonic() - self._began < 3 * PATIENCE_SECONDS, f"{self.finish()} of {wanted} moves in time"
            publish(index)
        raise AssertionError("there is always another number")

    def finish(self) -> tuple[int, int]:
        """How many moves took place, and how many did not."""
        wait_for("the last moves", lambda: self._gateway.ask(self._idle))
        seconds = time.monotonic() - self._began
        moved, failed = self._counts()
        moved -= self._before[0]
        gap_ms = self._gateway.ask(lambda machine: machine.moves.longest_gap_ms)
        print(  # noqa: T201 - the figure that the machine decides
            f"{moved} moves in {seconds:.2f} s: {moved / seconds:.1f} a second, longest gap so far {gap_ms:.0f} ms"
        )
        return moved, failed - self._before[1]


@both_versions
def test_a_subscriber_that_is_moved_misses_nothing(gateway: EmbeddedGateway, version: MQTTProtocolVersion) -> None:
    subscriber = Paho(gateway.port, version, "subscriber")
    publisher = Paho(gateway.port, MQTTv5, "publisher")
    try:
        for qos in range(3):
            subscriber.subscribe(f"moving/{qos}", qos)
        mover = Mover(gateway, "subscriber")
        sent = mover.while_moving(lambda index: publisher.publish(f"moving/{index % 3}", b"%d" % index, index % 3))
        moved, failed = mover.finish()
        got: dict[str, list[int]] = {f"moving/{qos}": [] for qos in range(3)}
        for _ in range(sent):
            message = subscriber.receive()
            got[message.topic].append(int(message.payload))
        publisher.publish("moving/1", b"-1", 1)
        assert int(subscriber.receive().payload) == -1  # and nothing came twice before it
        assert got == {f"moving/{qos}": list(range(qos, sent, 3)) for qos in range(3)}
        assert moved >= MOVES  # and those that the gateway finds right by itself
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
        sent = mover.while_moving(lambda index: publisher.publish(f"moved/{index % 3}", b"%d" % index, index % 3))
        moved, failed = mover.finish()
        got: dict[str, list[int]] = {f"moved/{qos}": [] for qos in range(3)}
        for _ in range(sent):
            message = subscriber.receive()
            got[message.topic].append(int(message.payload))
        publisher.publish("moved/1", b"-1", 1)
        assert int(subscriber.receive().payload) == -1
        # Over different links, what it published here and there may come in another order.
        assert {topic: sorted(found) for topic, found in got.items()} == {
            f"moved/{qos}": list(range(qos, sent, 3)) for qos in range(3)
        }
        assert moved >= 2 * MOVES
        assert failed == 0
        assert publisher.ends.empty()
        assert subscriber.ends.empty()
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
    command += ["-t", "lines", "-q", str(qos), "-W", str(int(3 * PATIENCE_SECONDS))]
    publisher = Paho(gateway.port, MQTTv5, "publisher")
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        wait_for("subscribing", lambda: gateway.ask(lambda machine: has_subscribed(machine, "mosquitto")))
        mover = Mover(gateway, "mosquitto")

        def publish(index: int) -> None:
            publisher.publish("lines", b"%d" % index, qos)
            publisher.publish("nobody", b"", 1)  # its answer says that the broker keeps up, also at QoS 0

        sent = mover.while_moving(publish)
        moved, failed = mover.finish()
        assert moved >= MOVES
        assert failed == 0
        publisher.publish("lines", b"end", qos)
        lines: list[bytes] = []
        for line in process.stdout:  # it ends by itself when nothing comes
            if line.strip() == b"end":
                break
            lines.append(line.strip())
        assert lines == [b"%d" % index for index in range(sent)]
        assert process.poll() is None  # it never lost its connection
        process.terminate()
        assert process.stderr.read() == b""
    finally:
        process.kill()
        process.communicate()
        publisher.close()

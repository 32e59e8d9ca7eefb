"""A gateway in front of brokers that are not part of a fabric, without sockets. With real ones: tests/integration."""

from __future__ import annotations

import random

from nearcast.config import Limits
from nearcast.fabric import links
from nearcast.fabric.gateway import GatewaySettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Greeting
from nearcast.fabric.plain import Dial, PlainGateway
from nearcast.fabric.tunnels import Tunnel
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import ConnAck, Connect
from tests.fabric_harness import SECRET


class Wire:
    """Any transport, of a client or to a broker."""

    def __init__(self) -> None:
        self.sent = b""
        self.closed = False

    def send(self, chunks: list[bytes]) -> None:
        self.sent += b"".join(chunks)

    def close(self) -> None:
        self.closed = True

    def rtt_ms(self) -> float:
        return 0.0

    def pause_reading(self) -> None:
        """Nothing is read."""

    def resume_reading(self) -> None:
        """Nothing is read."""


def make() -> tuple[PlainGateway, Tunnel, Dial]:
    """A gateway with a client that is connected at the first of two brokers, and the dial of that connection."""
    rng = random.Random(1)
    hub = Hub(Greeting(links.GATEWAY, "g", 1), SECRET, FabricSettings(), Limits(), rng)
    machine = PlainGateway(hub, Limits(), GatewaySettings(), rng, 0.0, [("one:1", "one:1"), ("two:1", "two:1")], 5.0)
    tunnel = machine.accept(Wire(), Peer("192.0.2.1", "tcp"), 0.0)
    machine.receive(tunnel, encode(Connect("c"), 5), 0.0)
    (dial,) = machine.take_plain_dials()
    assert machine.plain_connected(dial, Wire(), 0.0)
    assert dial.upstream is not None
    machine.plain_receive(dial.upstream, encode(ConnAck(), 5), 0.0)
    return machine, tunnel, dial


def test_a_client_of_a_lost_broker_goes_on_at_the_next() -> None:
    machine, _, dial = make()
    assert dial.upstream is not None
    machine.plain_lost(dial.upstream, 1.0)
    (asking,) = machine.take_plain_dials()
    assert asking.broker is dial.broker
    machine.plain_failed(asking, "refused", 1.0)
    (replay,) = machine.take_plain_dials()
    assert replay.broker.name != dial.broker.name


def test_nobody_is_connected_in_the_name_of_a_client_that_left() -> None:
    """While its broker is asked whether it lives, the client goes."""
    machine, tunnel, dial = make()
    assert dial.upstream is not None
    machine.plain_lost(dial.upstream, 1.0)
    (asking,) = machine.take_plain_dials()
    machine.lost(tunnel, 1.0)
    machine.plain_failed(asking, "refused", 1.0)
    assert machine.take_plain_dials() == []
    assert [broker.clients for broker in machine.brokers] == [0, 0]

"""Small worlds for tests: two or more hosts on one link, with nodes that write down what they are told."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from nearcast.network.conditions import Conditions
from nearcast.network.network import Network
from nearcast.simulation import Host, Node, Stream, World
from nearcast.simulation.tracing import Tracer

PORT = 1883


class Recorder(Node):
    """Remembers everything it is told, with the world's time; ``script`` may add to it."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.told: list[tuple[Any, str, Any]] = []
        self.streams: list[Stream] = []
        self.bytes = bytearray()
        self.echo = False

    def say(self, what: str, about: object = None) -> None:
        self.told.append((self.host.world.now, what, about))

    def what(self) -> list[str]:
        return [what for _, what, _ in self.told]

    def start(self) -> None:
        self.host.listen(PORT)
        self.say("start")

    def received(self, source: int, message: object) -> None:
        self.say("received", message)

    def woken(self) -> None:
        self.say("woken", self.host.now)

    def accepted(self, stream: Stream, port: int) -> None:
        self.streams.append(stream)
        self.say("accepted", port)

    def opened(self, stream: Stream) -> None:
        self.say("opened", stream)

    def stream_received(self, stream: Stream, data: bytes) -> None:
        self.bytes += data
        self.say("data", len(data))
        if self.echo:
            stream.write(data)

    def writable(self, stream: Stream) -> None:
        self.say("writable")

    def closed(self, stream: Stream, reason: str) -> None:
        self.say("closed", reason)

    def synced(self, token: int) -> None:
        self.say("synced", token)


def make_world(
    conditions: Conditions | None = None,
    *,
    hosts: int = 2,
    seed: int = 1,
    tracer: Tracer | None = None,
    node: type[Node] = Recorder,
) -> World:
    """Hosts ``h0``, ``h1``, ... each at a site of its own (``s0``, ``s1``, ...), all joined by links of these conditions."""
    sites = [f"s{index}" for index in range(hosts)]
    network = Network(sites, None, random.Random(f"{seed}/network"))
    for first in range(hosts):
        for second in range(first + 1, hosts):
            network.connect(first, second, Conditions(latency_ms=10.0) if conditions is None else conditions)
    world = World(network, seed, tracer)
    for index in range(hosts):
        world.add(f"h{index}", f"s{index}", node)
    world.run(0.0)
    return world


def recorder(world: World, index: int) -> Recorder:
    """The node that runs on a host now."""
    node = world.hosts[index].node
    assert isinstance(node, Recorder)
    return node


def connected(world: World) -> tuple[Stream, Stream]:
    """An open stream from h0 to h1: both ends."""
    ours = world.hosts[0].connect(1, PORT)
    run_until(world, lambda: bool(recorder(world, 1).streams) and "opened" in recorder(world, 0).what())
    return ours, recorder(world, 1).streams[-1]


def run_until(world: World, condition: Callable[[], bool], limit_s: float = 3600.0) -> None:
    """Let time pass until something holds."""
    end_s = world.now + limit_s
    while not condition():
        assert world.now < end_s, "it did not happen"
        world.run(world.now + 0.001 if world.now < 5 else world.now + 0.05)

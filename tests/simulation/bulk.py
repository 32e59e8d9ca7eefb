"""Streams and disks under faults, for comparing digests: clients send numbered blocks to a server that writes them down."""

from __future__ import annotations

import random

from nearcast.network.conditions import Conditions
from nearcast.network.network import Network
from nearcast.scenario.events import Crash, Cut, Kill, Pause, SkewClock
from nearcast.simulation import Host, Node, Stream, World

PORT = 7


class Server(Node):
    def start(self) -> None:
        self.host.listen(PORT)

    def stream_received(self, stream: Stream, data: bytes) -> None:
        self.host.disk.append("all", data)
        self.host.disk.sync(len(data))
        stream.write(data[:100])


class Client(Node):
    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.stream: Stream | None = None
        self.sent = 0

    def start(self) -> None:
        self.host.wake_at(self.host.now + self.host.rng.random())

    def woken(self) -> None:
        if self.stream is None:
            self.stream = self.host.connect(0, PORT)
        if not self.stream.congested:
            self.sent += 1
            self.stream.write(b"%d " % self.sent * self.host.rng.randrange(1, 3000))
        self.host.wake_at(self.host.now + 0.3)

    def closed(self, stream: Stream, reason: str) -> None:
        self.stream = None


def bulk_digest(seed: int) -> tuple[int, int, int]:
    network = Network(["here", "there"], None, random.Random(f"{seed}/network"))
    network.connect(
        0, 1, Conditions(latency_ms=15.0, jitter_ms=5.0, loss=0.03, reorder=0.02, duplicate=0.02, bandwidth_mbps=4.0)
    )
    world = World(network, seed)
    world.add("server", "here", Server)
    for index in range(5):
        world.add(f"client-{index}", "there", Client)
    for event in (
        Cut(at_s=3.0, source=("client-1",), one_way=True, for_s=4.0),
        Kill(at_s=5.0, host="client-2", restart_after_s=1.0),
        Pause(at_s=6.0, host="client-3", for_s=3.0),
        SkewClock(at_s=7.0, host="client-4", offset_s=2.0, rate=1.01),
        Crash(at_s=10.0, host="server", restart_after_s=2.0),
    ):
        world.schedule(event)
    world.run(30.0)
    world.finish()
    return world.digest, world.events, world.host("server").disk.used_bytes

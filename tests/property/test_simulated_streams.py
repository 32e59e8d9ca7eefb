"""Megabytes both ways over bad links: whatever delays, loses, doubles or reorders packets, and whoever stands still for a
while, every byte arrives once and in its place, and then the end does."""

from __future__ import annotations

import random

import pytest

from nearcast.network.conditions import Conditions, JitterKind
from nearcast.network.network import Network
from nearcast.simulation import Host, Node, Stream, World

PORT = 7
JITTERS: tuple[JitterKind, ...] = ("uniform", "normal", "lognormal", "pareto")


class Talker(Node):
    """Writes all it has as fast as it may; sometimes stops reading for a moment."""

    def __init__(self, host: Host) -> None:
        super().__init__(host)
        self.rng = random.Random(host.index)
        self.to_write = b""
        self.written = 0
        self.sizes: tuple[int, ...] = (1000,)
        self.hesitation = 0.0
        self.read = bytearray()
        self.stream: Stream | None = None
        self.ended: str | None = None

    def start(self) -> None:
        self.host.listen(PORT)

    def accepted(self, stream: Stream, port: int) -> None:
        self.opened(stream)

    def opened(self, stream: Stream) -> None:
        self.stream = stream
        self.writable(stream)

    def writable(self, stream: Stream) -> None:
        while self.written < len(self.to_write) and not stream.congested:
            size = self.rng.choice(self.sizes)
            stream.write(self.to_write[self.written : self.written + size])
            self.written += size

    def stream_received(self, stream: Stream, data: bytes) -> None:
        self.read += data
        if self.rng.random() < self.hesitation:
            stream.pause()
            self.host.wake_at(self.host.now + self.rng.random() * 0.3)

    def woken(self) -> None:
        if self.stream is not None:
            self.stream.resume()

    def closed(self, stream: Stream, reason: str) -> None:
        self.ended = reason


def bad_conditions(rng: random.Random) -> Conditions:
    return Conditions(
        latency_ms=rng.choice((0.0, 0.1, 5.0, 80.0)),
        jitter_ms=rng.choice((0.0, 1.0, 30.0)),
        jitter=rng.choice(JITTERS),
        loss=rng.choice((0.0, 0.01, 0.1)),
        reorder=rng.choice((0.0, 0.05, 0.5)),
        duplicate=rng.choice((0.0, 0.05, 1.0)),
        bandwidth_mbps=rng.choice((0.0, 5.0, 100.0)),
        queue_ms=rng.choice((2.0, 20.0, 200.0)),
    )


def trouble(world: World, rng: random.Random) -> None:
    """One thing that delays bytes and must not lose any."""
    network, host = world.network, world.hosts[rng.randrange(2)]
    what = rng.randrange(30)
    if what == 0:
        handle = network.cut([0], [1], rng.random() < 0.5)
        world.at(world.now + rng.random() * 3.0, lambda: network.heal(handle))
    elif what == 1:
        host.pause()
        world.at(world.now + rng.random() * 3.0, host.resume)
    elif what == 2:
        network.connect(host.index, 1 - host.index, bad_conditions(rng), one_way=True)
    elif what == 3:
        network.move(host.index, rng.randrange(3))
    elif what == 4:
        host.skew(rng.random() - 0.5, rng.choice((0.9, 1.0, 1.1)))


def talkers(seed: int, rng: random.Random) -> tuple[World, Talker, Talker]:
    network = Network(["a", "b", "c"], None, random.Random(seed))
    for one, other in ((0, 1), (1, 0), (1, 2), (2, 1), (0, 2), (2, 0)):
        network.connect(one, other, bad_conditions(rng), one_way=True)
    world = World(network, seed)
    world.segment_bytes = rng.choice((524, 1448, 8948))
    world.add("left", "a", Talker)
    world.add("right", "b", Talker)
    world.run(0.0)
    left, right = (host.node for host in world.hosts)
    assert isinstance(left, Talker)
    assert isinstance(right, Talker)
    for talker, size in ((left, 1_000_000), (right, rng.choice((0, 1000, 1_000_000)))):
        talker.to_write = rng.randbytes(size)
        talker.sizes = rng.choice(((17, 1448, 5000), (100_000,), (300, 20_000)))
        talker.hesitation = rng.choice((0.0, 0.02, 0.3))
    return world, left, right


@pytest.mark.parametrize("seed", range(40))
def test_every_byte_arrives_once_and_in_its_place(seed: int) -> None:
    rng = random.Random(seed)
    world, left, right = talkers(seed, rng)
    stream = world.hosts[0].connect(1, PORT)
    moved, moved_at = 0, 0.0
    while len(right.read) < len(left.to_write) or len(left.read) < len(right.to_write):
        world.run(world.now + rng.random() * 0.5)
        trouble(world, rng)
        if len(left.read) + len(right.read) > moved:
            moved, moved_at = len(left.read) + len(right.read), world.now
        assert (left.ended, right.ended) == (None, None)
        assert world.now - moved_at < 600.0, "nothing moves any more"
    assert right.read == left.to_write
    assert left.read == right.to_write
    stream.close()
    world.run(world.now + 600.0)
    assert right.ended == "end"
    assert len(right.read) == len(left.to_write)
    assert not any(host.streams for host in world.hosts)

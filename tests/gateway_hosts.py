"""A gateway's machine in the mesh of :mod:`tests.fabric_harness`, with clients that are byte strings."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from nearcast.config import Limits
from nearcast.fabric import links
from nearcast.fabric.gateway import Gateway, GatewaySettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Greeting
from nearcast.fabric.tunnels import Tunnel
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.access import Peer
from nearcast.mqtt.codec import PacketReader, encode
from nearcast.mqtt.packets import Connect, Packet, Publish
from tests.fabric_harness import SECRET, End, Mesh


@dataclass(eq=False)
class Client:
    """A client's transport at the gateway: what it was sent, and whether it is read from."""

    host: GatewayHost
    version: int = 5
    reading: bool = True
    closed: bool = False
    packets: list[Packet] = field(default_factory=list)
    tunnel: Tunnel | None = None
    round_trip_ms: float = 0.0

    def __post_init__(self) -> None:
        self.reader = PacketReader(self.version)

    # What the machine calls.

    def send(self, chunks: list[bytes]) -> None:
        self.packets.extend(self.reader.feed(b"".join(chunks)))

    def close(self) -> None:
        self.closed = True

    def rtt_ms(self) -> float:
        return self.round_trip_ms

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    # What a test calls.

    def say(self, *packets: Packet | bytes) -> None:
        """Send packets, and let everything arrive."""
        data = b"".join([item if isinstance(item, bytes) else encode(item, self.version) for item in packets])
        self.whisper(data)
        self.host.mesh.run()

    def whisper(self, data: bytes) -> None:
        """Send bytes; the gateway has them, and nothing moves."""
        assert self.tunnel is not None
        self.host.machine.receive(self.tunnel, data, self.host.mesh.now)
        self.host.flush()

    def vanish(self) -> None:
        assert self.tunnel is not None
        self.host.machine.lost(self.tunnel, self.host.mesh.now)
        self.host.flush()
        self.host.mesh.run()

    def take(self) -> list[Packet]:
        """What came since the last call."""
        taken, self.packets = self.packets, []
        return taken

    def payloads(self) -> list[bytes]:
        return [packet.payload for packet in self.take() if isinstance(packet, Publish)]


class GatewayHost:
    """A gateway. To the mesh's streams it looks like a node."""

    def __init__(
        self, mesh: Mesh, name: str = "g", settings: GatewaySettings | None = None, limits: Limits | None = None
    ) -> None:
        self.mesh = mesh
        self.name = name
        rng = random.Random(f"{mesh.seed}-{name}")
        limits = limits or Limits()
        self.fabric = Hub(Greeting(links.GATEWAY, name, 1), SECRET, FabricSettings(), limits, rng)
        self.machine = Gateway(self.fabric, limits, settings or GatewaySettings(), rng, mesh.now)
        self.streams: dict[str, tuple[End, End]] = {}

    def flush(self) -> None:
        self.fabric.settle(self.mesh.now)
        self.fabric.flush(self.mesh.now)
        self.fabric.take_dials()

    def link(self, broker: str) -> None:
        """A link to a broker comes up."""
        self.machine.choice.add(broker, configured=True)
        node = self.mesh.nodes[broker]
        left, right = End(self), End(node)  # type: ignore[arg-type]
        left.other, right.other = right, left
        left.link = self.fabric.connected(broker, left, self.mesh.now)
        left.connection = left.link.connection
        right.link = node.fabric.accepted(right, Peer(self.name), self.mesh.now)
        right.connection = right.link.connection
        self.mesh.streams.append((left, right))
        self.streams[broker] = (left, right)
        self.flush()
        node.flush()
        self.mesh.run()

    def cut(self, broker: str, *, crashed: bool = False) -> None:
        """The link to a broker breaks; one that crashed does not notice."""
        stream = self.streams.pop(broker)
        self.mesh.cut(stream, gone=self.mesh.nodes[broker] if crashed else None)

    def accept(self, version: int = 5) -> Client:
        client = Client(self, version)
        client.tunnel = self.machine.accept(client, Peer("192.0.2.1", "tcp"), self.mesh.now)
        return client

    def connect(self, client_id: str, version: int = 5, clean_start: bool = True) -> Client:
        client = self.accept(version)
        client.say(Connect(client_id, version, clean_start))
        client.take()
        return client

    def broker_of(self, client: Client) -> str:
        assert client.tunnel is not None
        return "" if client.tunnel.upstream is None else client.tunnel.upstream.broker

    def advance(self, seconds: float) -> None:
        self.mesh.advance(seconds)
        self.fabric.tick(self.mesh.now)
        self.flush()
        self.mesh.run()

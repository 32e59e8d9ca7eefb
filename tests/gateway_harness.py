"""A gateway for tests of the broker's side: it speaks the trunk's frames, and moves clients as a test says.

It is as simple as the contract allows: one client is one number of bytes written and read; nothing is parsed.
"""

from __future__ import annotations

import random

from nearcast.fabric import frames, links
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Greeting, Link
from nearcast.fabric.trunks import peer_fields
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import Connection
from nearcast.mqtt.effects import Effects
from nearcast.mqtt.records import Fields, blob, number
from tests.fabric_harness import SECRET, End, Mesh


class TestTrunk:
    """The gateway's end of a link to one broker."""

    __test__ = False

    def __init__(self, gateway: Gateway, broker: str) -> None:
        self.gateway = gateway
        self.broker = broker
        self.channels: dict[int, Client] = {}
        self.up = True
        self.leaving = False
        mesh = gateway.mesh
        node = mesh.nodes[broker]
        self.theirs = End(node)
        self.ours = End(node, other=self.theirs)
        self.theirs.other = self.ours
        connection = Connection(Effects(False), Peer(broker), self.ours, mesh.now, mesh.limits)
        self.link = Link(Greeting(links.GATEWAY, gateway.name, 1), SECRET, connection, broker, gateway.rng, mesh.now)
        self.theirs.link = node.fabric.accepted(self.theirs, Peer(gateway.name), mesh.now)
        self.theirs.connection = self.theirs.link.connection
        node.flush()
        self.run()
        self.link.max_frame_bytes = 1 << 30

    def send(self, data: bytes) -> None:
        self.link.send(data)
        self.gateway.run()

    def run(self) -> bool:
        """Pass on what is on its way in both directions; returns whether there was something."""
        mesh = self.gateway.mesh
        moved = False
        out = self.link.connection.take()
        if out and self.theirs.link is not None:
            moved = True
            self.theirs.node.fabric.receive(self.theirs.link, b"".join(out), mesh.now)
            self.theirs.node.flush()
        while self.ours.inbox:
            moved = True
            for content in self.link.feed(self.ours.inbox.popleft(), mesh.now):
                self._frame(content)
        if self.theirs.closed or self.link.state == links.CLOSED:
            self.up = False
        return moved

    def _frame(self, content: bytes) -> None:
        kind = content[0]
        if kind == frames.LEAVING:
            self.leaving = True
            return
        fields = Fields(content)
        client = self.channels.get(fields.number())
        if client is None:
            return
        if kind == frames.CLIENT_DATA:
            client.arrived(self, content[fields.position :])
        elif kind == frames.CLIENT_WINDOW:
            client.granted_bytes += fields.number()
        elif kind == frames.CLIENT_CLOSE:
            client.closed = fields.blob().decode()
        else:
            client.moving(self, kind, fields)


class Client:
    """One client of the gateway, at one broker at a time."""

    def __init__(self, gateway: Gateway, trunk: TestTrunk, peer: Peer) -> None:
        self.gateway = gateway
        self.trunk = trunk
        self.number = gateway.next_number()
        trunk.channels[self.number] = self
        self.received = bytearray()
        self.reads = True
        self.unread = 0
        self.closed: str | None = None
        self.sent_bytes = 0
        self.granted_bytes = 0
        trunk.send(frame(frames.CLIENT_OPEN, number(self.number), peer_fields(peer)))

    def write(self, data: bytes) -> None:
        """The client sends something."""
        self.sent_bytes += len(data)
        self.trunk.send(frame(frames.CLIENT_DATA, number(self.number), data))

    def arrived(self, trunk: TestTrunk, data: bytes) -> None:
        self.received += data
        self.unread += len(data)
        self.pass_on()

    def pass_on(self) -> None:
        """The client reads what is there."""
        if self.reads and self.unread:
            unread, self.unread = self.unread, 0
            self.trunk.send(frame(frames.CLIENT_WINDOW, number(self.number), number(unread)))

    def close(self) -> None:
        """The client's transport is gone."""
        self.trunk.send(frame(frames.CLIENT_CLOSE, number(self.number), blob(b"connection lost")))

    def moving(self, trunk: TestTrunk, kind: int, fields: Fields) -> None:
        raise AssertionError(f"frame {kind}")


class Gateway:
    """A gateway with a link to each broker it uses."""

    def __init__(self, mesh: Mesh, name: str) -> None:
        self.mesh = mesh
        self.name = name
        self.rng = random.Random(f"{mesh.seed}-{name}")
        self.trunks: dict[str, TestTrunk] = {}
        self._numbers = 0
        self._running = False

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def trunk(self, broker: str) -> TestTrunk:
        if broker not in self.trunks:
            self.trunks[broker] = TestTrunk(self, broker)
            self.run()
        return self.trunks[broker]

    def client(self, broker: str, peer: Peer | None = None) -> Client:
        return Client(self, self.trunk(broker), peer or Peer("test"))

    def cut(self, broker: str) -> None:
        """The link to a broker breaks."""
        trunk = self.trunks.pop(broker)
        trunk.up = False
        node = trunk.theirs.node
        trunk.theirs.closed = trunk.ours.closed = True
        assert trunk.theirs.link is not None
        node.fabric.lost(trunk.theirs.link, self.mesh.now)
        node.flush()

    def run(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while any([trunk.run() for trunk in list(self.trunks.values())]):
                pass
        finally:
            self._running = False

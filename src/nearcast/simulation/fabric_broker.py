"""A broker of a fabric on a simulated host: the broker of :mod:`nearcast.simulation.mqtt_broker`, and its links.

The order of things is that of :mod:`nearcast.broker.links`: after every event the fabric settles, output leaves as the journal
allows, and what the fabric wants to be dialled is dialled.
"""

from __future__ import annotations

from typing import Final

import msgspec

from nearcast.config import Limits
from nearcast.fabric.fabric import Fabric
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.scenario.scenario import Broker
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import LinkStreams
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.mqtt_topics import SimulatedTopics
from nearcast.simulation.programs import ProgramNode
from nearcast.simulation.streams import Stream

SECRET: Final = b"what all nodes of a simulated fabric share"


class FabricBroker(SimulatedBroker):
    """One broker's process. ``peers`` are the link addresses that it is told of."""

    def __init__(
        self,
        host: Host,
        described: Broker,
        settings: FabricSettings,
        peers: list[str],
        limits: Limits,
        snapshot_bytes: int,
        step_bytes: int,
        node: ProgramNode,
        topics: SimulatedTopics | None = None,
    ) -> None:
        super().__init__(host, described.port, described.durable, limits, snapshot_bytes, step_bytes, node, topics)
        self.name = described.name
        self.link_port = described.link_port
        self.peers = peers
        facts = msgspec.msgpack.encode({"address": f"{host.name}:{described.link_port}", "site": ""})
        epoch = host.rng.getrandbits(60)
        self.fabric = Fabric(settings, limits, self.engine, described.name, epoch, SECRET, facts, host.rng, host.now)
        self.links = LinkStreams(self.fabric, host, self, node.owners)

    def _let_in(self) -> None:
        for address in self.peers:
            self.fabric.dial(address, self.host.now)
        self.fabric.tick(self.host.now)
        self.host.listen(self.link_port)
        super()._let_in()
        self._settle()

    # --- streams --------------------------------------------------------------------------------------------------------

    def accepted(self, stream: Stream) -> None:
        if stream.port != self.link_port:
            super().accepted(stream)
        elif self.failed:
            stream.reset()
        else:
            self.links.accepted(stream)
            self._settle()

    def opened(self, stream: Stream) -> None:
        if not self.failed and self.links.opened(stream):
            self._settle()

    def received(self, stream: Stream, data: bytes) -> None:
        if not self.failed and self.links.received(stream, data):
            self._settle()
        else:
            super().received(stream, data)

    def writable(self, stream: Stream) -> None:
        if not self.failed and self.links.writable(stream):
            self._settle()
        else:
            super().writable(stream)

    def lost(self, stream: Stream, reason: str) -> None:
        if not self.failed and self.links.lost(stream):
            self._settle()
        else:
            super().lost(stream, reason)

    def _settle(self) -> None:
        if self.failed:
            return
        super()._settle()
        while self.links.reap():
            super()._settle()
        self.links.dial()

    def _flush(self) -> None:
        self.fabric.settle(self.host.now)
        super()._flush()

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        if self.open and self.links.next_deadline() <= self.host.now:
            self.links.tick()
            self._settle()
        if self.open and self.fabric.next_deadline() <= self.host.now:
            self.fabric.tick(self.host.now)
            self._settle()

    def next_deadline(self) -> float:
        if not self.open:
            return float("inf")
        return min(super().next_deadline(), self.fabric.next_deadline(), self.links.next_deadline())

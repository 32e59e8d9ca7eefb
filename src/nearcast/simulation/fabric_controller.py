"""The shipped controller on a simulated host: the machine of ``nearcast controller`` without its HTTP interface."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from nearcast.config import Limits
from nearcast.fabric.controlling import Controller, ControlSettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import BROKER, CONTROLLER, GATEWAY, Greeting
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.scenario.scenario import Controller as Described
from nearcast.simulation.fabric_broker import SECRET
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import LinkStreams
from nearcast.simulation.programs import Program, ProgramNode
from nearcast.simulation.streams import Stream

NAME = "controller"


class SimulatedController(Program):
    """The controller's process."""

    def __init__(self, host: Host, described: Described, settings: FabricSettings, node: ProgramNode) -> None:
        self.host = host
        self.port = described.port
        self._node = node
        epoch = host.rng.getrandbits(60)
        self.hub = Hub(Greeting(CONTROLLER, NAME, epoch), SECRET, settings, Limits(), host.rng)
        monitoring = MonitorSettings(ping_interval_s=described.ping_interval_ms / 1e3, period_s=described.interval_s)
        self.monitor = Monitor(NAME, SECRET, host.rng, monitoring, standing=False)
        control = ControlSettings(interval_s=described.interval_s)
        self._wall_s = host.wall - host.now
        self.machine = Controller(control, self.monitor, epoch, self._wall_s, host.rng, host.now)
        self.hub.users[BROKER] = self.machine
        self.hub.users[GATEWAY] = self.machine
        self.links = LinkStreams(self.hub, host, self, node.owners)
        self._running = False
        node.ports[self.port] = self
        node.datagram_ports[self.port] = self

    def moves(self) -> list[dict[str, Any]]:
        """All moves it ordered, as its HTTP interface would show them, but that times are those of the simulation."""
        found = []
        for move in (*self.machine.moves.past, *self.machine.moves.pending.values()):
            fields = msgspec.to_builtins(move)
            for key in ("created_at", "ordered_at", "ended_at"):
                fields[key] = round(fields[key] - self._wall_s, 6) if fields[key] else None
            found.append(fields)
        return found

    def start(self) -> None:
        self._running = True
        self.host.listen(self.port)

    def stop(self) -> None:
        """Say goodbye; nodes go on with what they know."""
        if self._running:
            self.host.stop_listening(self.port)
            for link in list(self.hub.links):
                link.close("the controller is stopping")
            self._settle()
            self._running = False

    def accepted(self, stream: Stream) -> None:
        self.links.accepted(stream)
        self._settle()

    def received(self, stream: Stream, data: bytes) -> None:
        self.links.received(stream, data)
        self._settle()

    def writable(self, stream: Stream) -> None:
        self.links.writable(stream)
        self._settle()

    def lost(self, stream: Stream, reason: str) -> None:
        self.links.lost(stream)
        self._settle()

    def datagram(self, source: str, data: bytes) -> None:
        if self._running:
            self.monitor.handle(data, source, self.host.now)
            self._settle()

    def _settle(self) -> None:
        again = True
        while again:
            self.hub.settle(self.host.now)
            self.hub.flush(self.host.now)
            again = self.links.reap()
        for address, data in self.monitor.take_outgoing():
            self._node.send_datagram(self.port, address, data)

    def tick(self) -> None:
        if self.hub.next_deadline() <= self.host.now:
            self.hub.tick(self.host.now)
            self._settle()

    def next_deadline(self) -> float:
        return self.hub.next_deadline() if self._running else math.inf

"""The shipped gateway on a simulated host: the machine of ``nearcast gateway``, with other I/O."""

from __future__ import annotations

import math

from nearcast.config import Limits
from nearcast.fabric.control import Node, Registration
from nearcast.fabric.gateway import Gateway, GatewaySettings
from nearcast.fabric.gateway_node import GatewayNode
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import CONTROLLER, GATEWAY, Greeting
from nearcast.fabric.tunnels import Tunnel
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.gossip import Gossip
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.mqtt import reasons
from nearcast.mqtt.access import Peer
from nearcast.scenario.scenario import Gateway as Described
from nearcast.simulation.fabric_broker import SECRET
from nearcast.simulation.gossip import simulated_gossip
from nearcast.simulation.handles import round_trip_ms
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import LinkStreams
from nearcast.simulation.programs import Program, ProgramNode
from nearcast.simulation.streams import Stream


class ClientEnd:
    """One client's stream, as the handle of its tunnel."""

    def __init__(self, stream: Stream, closed: list[Stream]) -> None:
        self.stream = stream
        self.tunnel: Tunnel | None = None
        self._closed = closed

    def send(self, chunks: list[bytes]) -> None:
        self.stream.write(chunks[0] if len(chunks) == 1 else b"".join(chunks))
        if self.stream.congested and self.tunnel is not None:
            self.tunnel.congested = True

    def close(self) -> None:
        self.stream.close()
        self._closed.append(self.stream)

    def rtt_ms(self) -> float:
        return round_trip_ms(self.stream)

    def pause_reading(self) -> None:
        self.stream.pause()

    def resume_reading(self) -> None:
        self.stream.resume()


class SimulatedGateway(Program):
    """One gateway's process. ``brokers`` are the link addresses it is told of, ``controller`` that of the controller."""

    def __init__(
        self,
        host: Host,
        described: Described,
        settings: FabricSettings,
        gateway_settings: GatewaySettings,
        brokers: list[str],
        controller: str | None,
        limits: Limits,
        node: ProgramNode,
    ) -> None:
        self.host = host
        self.port = described.port
        self.name = described.name
        self._node = node
        self._brokers = brokers
        self._controller = controller
        self._epoch = host.rng.getrandbits(60)
        self.hub = Hub(Greeting(GATEWAY, self.name, self._epoch), SECRET, settings, limits, host.rng)
        self.machine = Gateway(self.hub, limits, gateway_settings, host.rng, host.now)
        self.monitor: Monitor | None = None
        self.gossip: Gossip | None = None
        if controller is not None:
            self.monitor = Monitor(self.name, SECRET, host.rng, MonitorSettings(), standing=True)
            registration = Registration(GatewayNode(self.machine, self._describe, host.wall - host.now), self.monitor)
            self.gossip = simulated_gossip(host, self.name, self.port, self._epoch, SECRET)
            registration.gossip = self.gossip
            self.machine.places.agent = self.gossip
            self.hub.users[CONTROLLER] = registration
            self.machine.on_order = lambda order: registration.urgent()
            node.datagram_ports[self.port] = self
        self.links = LinkStreams(self.hub, host, self, node.owners)
        self._ends: dict[Stream, ClientEnd] = {}
        self._closed: list[Stream] = []
        self._running = False

    def _describe(self) -> Node:
        return Node(name=self.name, role="gateway", epoch=self._epoch, monitoring=f"{self.host.name}:{self.port}")

    # --- life -----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._running = True
        for address in self._brokers:
            self.machine.choice.add(address, configured=True)
        if self._controller is not None:
            self.hub.dial(self._controller, self.host.now)
        self.machine.connect(self.host.now)
        self.host.listen(self.port)
        self._settle()

    def stop(self) -> None:
        """Send clients away, and end."""
        if not self._running:
            return
        self.host.stop_listening(self.port)
        for tunnel in list(self.machine.tunnels):
            tunnel.refuse(reasons.SERVER_SHUTTING_DOWN, "the gateway is stopping", self.host.now)
        for user in self.hub.users.values():
            user.leave(self.host.now)
        self._settle()
        for link in list(self.hub.links):
            link.close("the gateway stops")
        self._settle()
        self._running = False

    # --- streams --------------------------------------------------------------------------------------------------------

    def accepted(self, stream: Stream) -> None:
        end = ClientEnd(stream, self._closed)
        self._ends[stream] = end
        end.tunnel = self.machine.accept(end, Peer(stream.remote_host.name), self.host.now)
        self._settle()

    def opened(self, stream: Stream) -> None:
        if self.links.opened(stream):
            self._settle()

    def received(self, stream: Stream, data: bytes) -> None:
        end = self._ends.get(stream)
        if end is not None and end.tunnel is not None:
            self.machine.receive(end.tunnel, data, self.host.now)
        else:
            self.links.received(stream, data)
        self._settle()

    def writable(self, stream: Stream) -> None:
        end = self._ends.get(stream)
        if end is not None and end.tunnel is not None:
            self.machine.writable(end.tunnel, self.host.now)
        else:
            self.links.writable(stream)
        self._settle()

    def lost(self, stream: Stream, reason: str) -> None:
        if not self._lose(stream):
            self.links.lost(stream)
        self._settle()

    def _lose(self, stream: Stream) -> bool:
        end = self._ends.pop(stream, None)
        if end is None:
            return False
        tunnel, end.tunnel = end.tunnel, None
        if tunnel is not None:
            self.machine.lost(tunnel, self.host.now)
        return True

    def datagram(self, source: str, data: bytes) -> None:
        if self.gossip is not None and self.gossip.handle(data, source, self.host.now):
            self._send_gossip(self.gossip)
        elif self.monitor is not None:
            self.monitor.handle(data, source, self.host.now)
            self._settle()

    def _send_gossip(self, gossip: Gossip) -> None:
        for address, data in gossip.take_outgoing():
            self._node.send_datagram(self.port, address, data)

    def _settle(self) -> None:
        """After every call into the machine. What was closed is lost only then, as an event loop would have it."""
        again = True
        while again:
            self.hub.settle(self.host.now)
            self.hub.flush(self.host.now)
            closed = self._closed[:]
            self._closed.clear()
            for stream in closed:
                self._node.owners.pop(stream, None)
                self._lose(stream)
            again = self.links.reap() or bool(closed)
        self.links.dial()
        if self.monitor is not None:
            for address, data in self.monitor.take_outgoing():
                self._node.send_datagram(self.port, address, data)

    # --- time -----------------------------------------------------------------------------------------------------------

    def move(self, client: str, target: str) -> bool:
        """Move a client to another broker; whether there was anything to move."""
        moved = self.machine.move(target, self.host.now, client) > 0
        self._settle()
        return moved

    def tick(self) -> None:
        now = self.host.now
        if self.links.next_deadline() <= now:
            self.links.tick()
            self._settle()
        if self.hub.next_deadline() <= now:
            self.hub.tick(now)
            self._settle()
        if self.gossip is not None and self.gossip.next_deadline() <= now:
            self.gossip.tick(now)
            self._send_gossip(self.gossip)

    def next_deadline(self) -> float:
        if not self._running:
            return math.inf
        deadline = min(self.hub.next_deadline(), self.links.next_deadline())
        return deadline if self.gossip is None else min(deadline, self.gossip.next_deadline())

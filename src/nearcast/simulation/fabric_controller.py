"""The shipped controller on a simulated host: the machine of ``nearcast controller`` without its HTTP interface."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from nearcast.config import Limits
from nearcast.errors import ConfigError
from nearcast.fabric.controlling import Controller, ControlSettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import BROKER, CONTROLLER, GATEWAY, Greeting
from nearcast.fabric.migrations import Workflow
from nearcast.fabric.refusals import Refused
from nearcast.fabric.topic_settings import TopicSettings
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.placement.topics import PlacementSettings
from nearcast.scenario.scenario import Controller as Described
from nearcast.simulation.fabric_broker import SECRET
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import LinkStreams
from nearcast.simulation.programs import Program, ProgramNode
from nearcast.simulation.streams import Stream

NAME = "controller"


class OwnedTopics(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The part of a controller's configuration file that a simulated one uses: how it looks after owned topics."""

    planner: Literal["own", "spark", "none"] = "own"
    executors: int = 16
    plan_interval_seconds: float = 1.0
    migration_timeout_seconds: float = 30.0
    settle_seconds: float = 10.0
    migration_workflow: Workflow = "handover"
    placement: PlacementSettings = PlacementSettings()


def topics_of(described: Described) -> TopicSettings:
    """How a scenario's controller looks after owned topics; raises :class:`~nearcast.errors.ConfigError`."""
    try:
        said = msgspec.convert(described.settings, OwnedTopics)
        return TopicSettings(
            planner=said.planner,
            executors=said.executors,
            plan_interval_s=said.plan_interval_seconds,
            migration_timeout_s=said.migration_timeout_seconds,
            settle_s=said.settle_seconds,
            workflow=said.migration_workflow,
            placement=said.placement,
        )
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(f"`controller.settings`: {error}", key="controller.settings") from None


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
        control = ControlSettings(interval_s=described.interval_s, topics=topics_of(described))
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

    # --- owned topics ---------------------------------------------------------------------------------------------------

    def owner_of(self, topic: str) -> tuple[str, int]:
        """A topic's owner and epoch in the directory; nothing and 0 if it has none."""
        known = self.machine.topics.directory.find(topic)
        return ("", 0) if known is None else (known.owner, known.epoch)

    def owned_topics(self) -> list[str]:
        """The topics that somebody owns."""
        return sorted(owner.topic for owner in self.machine.topics.directory.owners())

    def move_topic(self, topic: str, target: str) -> bool:
        """Have a topic moved, as by hand; whether that can be done."""
        if not self._running:
            return False
        try:
            self.machine.topics.move(topic, target, self.host.now)
        except Refused:
            return False
        self._settle()
        return True

    # --- life -----------------------------------------------------------------------------------------------------------

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

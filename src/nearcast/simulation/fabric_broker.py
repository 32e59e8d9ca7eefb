"""A broker of a fabric on a simulated host: the broker of :mod:`nearcast.simulation.mqtt_broker`, and its links.

The order of things is that of :mod:`nearcast.broker.links`: after every event the fabric settles, output leaves as the journal
allows, and what the fabric wants to be dialled is dialled, the cloud of its broadcast groups included.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from nearcast.config import Limits
from nearcast.errors import StorageUnavailable
from nearcast.fabric.broker_node import BrokerNode
from nearcast.fabric.control import ClassRules, Node, Registration
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import CONTROLLER
from nearcast.fabric.plan_intake import PlanIntake
from nearcast.fabric.telemetry import TelemetryReporter
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.gossip import Gossip
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.scenario.scenario import Broker
from nearcast.simulation.cloud_streams import CloudStreams
from nearcast.simulation.disks import Disk
from nearcast.simulation.folders import DiskFolder
from nearcast.simulation.gossip import simulated_gossip
from nearcast.simulation.hosts import Host
from nearcast.simulation.link_streams import LinkStreams
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.mqtt_facts import GroupChanged, MergeBegan
from nearcast.simulation.mqtt_topics import SimulatedTopics
from nearcast.simulation.programs import ProgramNode
from nearcast.simulation.replica_sets import SimulatedSets
from nearcast.simulation.streams import Stream

SECRET: Final = b"what all nodes of a simulated fabric share"

SPOOL: Final = 2
"""What a flush of the disk is for, beside those of the journal."""

SETS: Final = 3
"""What another one is for."""

LEAVE_S: Final = 10.0
"""How long a broker that is asked to end has for handing over what it has: ``shutdown_timeout_seconds`` of a real one."""


class DiskSpool:
    """A simulated disk as the place for what is too much for memory. One flush at a time covers all files written by then."""

    def __init__(self, disk: Disk, folder: str, token: int) -> None:
        self._disk = disk
        self._folder = DiskFolder(disk, folder)
        self._token = token
        self._written: list[tuple[int, int]] = []
        self._covered: list[tuple[int, int]] = []

    def _path(self, session_number: int, file_number: int) -> str:
        return self._folder.path(f"{session_number}-{file_number}")

    def write(self, session_number: int, file_number: int, data: bytes) -> None:
        self._disk.write(self._path(session_number, file_number), data)
        self._written.append((session_number, file_number))
        if not self._covered:
            self._flush()

    def _flush(self) -> None:
        self._covered, self._written = self._written, []
        if self._covered:
            self._disk.sync(self._token)

    def flushed(self) -> list[tuple[int, int]]:
        """A flush is done: which files are on disk."""
        done = self._covered
        self._flush()
        return done

    def read(self, session_number: int, file_number: int) -> bytes:
        return self._disk.read(self._path(session_number, file_number))

    def remove(self, session_number: int, file_number: int) -> None:
        if (session_number, file_number) in self.files():
            self._disk.remove(self._path(session_number, file_number))

    def files(self) -> list[tuple[int, int]]:
        found = [name.partition("-") for name in self._folder.names()]
        return [(int(session), int(number)) for session, _, number in found]


class Group(NamedTuple):
    """What was told last of a broker's group."""

    leader: str
    version: int
    asks: int


class FabricBroker(SimulatedBroker):
    """One broker's process. ``peers`` are the link addresses that it is told of, ``lcm`` is its capability as a leader."""

    def __init__(
        self,
        host: Host,
        described: Broker,
        settings: FabricSettings,
        peers: list[str],
        controller: str | None,
        limits: Limits,
        snapshot_bytes: int,
        step_bytes: int,
        node: ProgramNode,
        topics: SimulatedTopics | None = None,
        lcm: float = 1.0,
    ) -> None:
        super().__init__(host, described.port, described.durable, limits, snapshot_bytes, step_bytes, node, topics)
        self.name = described.name
        self.link_port = described.link_port
        self.peers = peers
        self.controller = controller
        self.left = False
        self._node = node
        self._leave_by = float("inf")
        epoch = host.rng.getrandbits(60)
        self.fabric = Fabric(settings, limits, self.engine, described.name, epoch, SECRET, b"", host.rng, host.now)
        self.sets = SimulatedSets(self.fabric.sets, host.disk, f"broker-{described.port}-sets", self.token + SETS)
        self.links = LinkStreams(self.fabric, host, self, node.owners)
        self.spool: DiskSpool | None = None
        if described.durable:
            self.spool = DiskSpool(host.disk, f"broker-{described.port}-spool/", self.token + SPOOL)
        self.monitor: Monitor | None = None
        self.gossip: Gossip | None = None
        self.reporter: TelemetryReporter | None = None
        self.registration: Registration | None = None
        self._as_node: BrokerNode | None = None
        cloud = self.fabric.broadcast.cloud
        if controller is not None or cloud is not None:
            self.monitor = Monitor(described.name, SECRET, host.rng, MonitorSettings(), standing=False)
            node.datagram_ports[described.link_port] = self
        if controller is not None and self.monitor is not None:
            self._as_node = BrokerNode(self.fabric, self._describe, durable=described.durable)
            self.registration = Registration(self._as_node, self.monitor)
            self.gossip = simulated_gossip(host, described.name, described.link_port, epoch, SECRET)
            self.registration.gossip = self.gossip
            self.reporter = TelemetryReporter(self.fabric, host.now, self.gossip, self.registration)
            PlanIntake(self.engine.router, self.registration)
            self.fabric.users[CONTROLLER] = self.registration
        self.lcm = lcm
        self.cloud: CloudStreams | None = None
        if cloud is not None:
            self.cloud = CloudStreams(cloud, settings.groups.cloud or "", host, self, node.owners)
        self._group = Group("", 0, 0)

    def _describe(self) -> Node:
        address = f"{self.host.name}:{self.link_port}"
        rules = ClassRules() if self._as_node is None else self._as_node.class_rules()
        return Node(name=self.name, role="broker", epoch=self.fabric.epoch, link=address, monitoring=address, classes=rules)

    # --- life -----------------------------------------------------------------------------------------------------------

    def _let_in(self) -> None:
        fabric = self.fabric
        fabric.begin(self.host.now)
        if self.spool is not None:
            fabric.channels.use_spool(self.spool)
        fabric.routes.address = f"{self.host.name}:{self.link_port}"
        for address in self.peers:
            fabric.dial(address, self.host.now)
        if self.controller is not None:
            fabric.dial(self.controller, self.host.now)
        if self.monitor is not None and self.cloud is not None:
            fabric.broadcast.start(self.monitor, fabric.routes.address, fabric.routes.address, self.lcm, self.host.now)
        fabric.tick(self.host.now)
        self.host.listen(self.link_port)
        super()._let_in()
        self._settle()

    def stop(self) -> None:
        """As the real one: others take over what they can, for a while; then clients are sent away."""
        if not self.open or self.left:
            return
        self.left = True
        self._leave_by = self.host.now + LEAVE_S
        self.host.stop_listening(self.port)
        self.fabric.leave(self.host.now)
        self._settle()

    def _end_if_left(self) -> None:
        fabric = self.fabric
        waiting = any(peer.up and peer.session.queued_messages for peer in fabric.peers.values())
        if self.host.now < self._leave_by and (waiting or not fabric.has_left()):
            return
        self._leave_by = float("inf")
        super().stop()
        self.host.stop_listening(self.link_port)
        for link in list(fabric.links):
            link.close("the broker is stopping")
        if self.cloud is not None:
            self.cloud.close()
        super()._settle()

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
        if not self.failed and (self.links.opened(stream) or (self.cloud is not None and self.cloud.opened(stream))):
            self._settle()

    def received(self, stream: Stream, data: bytes) -> None:
        if self.failed:
            return
        if self.links.received(stream, data) or (self.cloud is not None and self.cloud.received(stream, data)):
            self._settle()
        else:
            super().received(stream, data)

    def writable(self, stream: Stream) -> None:
        if self.failed:
            return
        if self.links.writable(stream) or (self.cloud is not None and self.cloud.writable(stream)):
            self._settle()
        else:
            super().writable(stream)

    def lost(self, stream: Stream, reason: str) -> None:
        if self.failed:
            return
        if self.links.lost(stream) or (self.cloud is not None and self.cloud.lost(stream)):
            self._settle()
        else:
            super().lost(stream, reason)

    def datagram(self, source: str, data: bytes) -> None:
        if not self.open:
            return
        if self.gossip is not None and self.gossip.handle(data, source, self.host.now):
            self._send_gossip(self.gossip)
        elif self.monitor is not None:
            self.monitor.handle(data, source, self.host.now)
            self._settle()

    def _send_gossip(self, gossip: Gossip) -> None:
        for address, data in gossip.take_outgoing():
            self._node.send_datagram(self.link_port, address, data)

    def synced(self, purpose: int) -> None:
        if purpose == SETS:
            if not self.failed:
                self.sets.flushed(self.host.now)
                self._settle()
        elif purpose != SPOOL:
            super().synced(purpose)
        elif self.spool is not None and not self.failed:
            try:
                for session_number, file_number in self.spool.flushed():
                    self.fabric.channels.spilled(session_number, file_number, failed=False)
            except StorageUnavailable as error:
                self.host.note(f"messages for another broker cannot be put on disk: {error}")
            self._settle()

    def _settle(self) -> None:
        if self.failed:
            return
        super()._settle()
        while self.links.reap() or (self.cloud is not None and self.cloud.reap()):
            super()._settle()
        self.links.dial()
        if self.cloud is not None and self.open:
            self.cloud.dial()
            self._tell_group()
        if self.monitor is not None:
            for address, data in self.monitor.take_outgoing():
                self._node.send_datagram(self.link_port, address, data)

    def _tell_group(self) -> None:
        """Tell whoever watches what this broker knows of its group, if that is new."""
        formation = self.fabric.broadcast.formation
        view = formation.view
        known = Group(formation.leader, view.version, formation.asks)
        if known == self._group:
            return
        if known.asks != self._group.asks:
            self.host.observe(MergeBegan(self.name))
        if (known.leader, known.version) != (self._group.leader, self._group.version):
            self.host.observe(GroupChanged(self.name, formation.leader, view.version, tuple(view.members)))
        self._group = known

    def _flush(self) -> None:
        while True:
            self.fabric.settle(self.host.now)
            super()._flush()
            if self._sets_failed():
                return
            if not self.fabric.sets.looped:
                break
        self.sets.begin_flush()
        self._sets_failed()

    def _sets_failed(self) -> bool:
        error = self.sets.error
        if error is None:
            return False
        self._disk_failed(error)
        return True

    # --- time -----------------------------------------------------------------------------------------------------------

    def tick(self) -> None:
        super().tick()
        if self.open and self.links.next_deadline() <= self.host.now:
            self.links.tick()
            self._settle()
        if self.open and self.cloud is not None and self.cloud.next_deadline() <= self.host.now:
            self.cloud.tick()
            self._settle()
        if self.open and self.fabric.next_deadline() <= self.host.now:
            self.fabric.tick(self.host.now)
            self._settle()
        if self.open and self.gossip is not None and self.gossip.next_deadline() <= self.host.now:
            self.gossip.tick(self.host.now)
            self._send_gossip(self.gossip)
        if self.open and self.reporter is not None and self.reporter.next_deadline() <= self.host.now:
            self.reporter.tick(self.host.now)
            self._settle()
        if self.open and self._leave_by < float("inf"):
            self._end_if_left()

    def next_deadline(self) -> float:
        if not self.open:
            return float("inf")
        deadline = min(super().next_deadline(), self.fabric.next_deadline(), self.links.next_deadline(), self._leave_by)
        if self.gossip is not None:
            deadline = min(deadline, self.gossip.next_deadline())
        if self.reporter is not None:
            deadline = min(deadline, self.reporter.next_deadline())
        return deadline if self.cloud is None else min(deadline, self.cloud.next_deadline())

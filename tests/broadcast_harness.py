"""Brokers of :mod:`tests.fabric_harness` that form broadcast groups around a cloud: a broker that knows nothing of fabrics.

Links and connections to the cloud are opened as the machines ask for them, and datagrams take as long as the test says two
brokers are apart. Bytes on streams arrive at once, so that a test of messages need not wait: nothing moves but in
:meth:`GroupMesh.run`, and with time in :meth:`GroupMesh.advance`.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import msgspec

from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.fabricconfig import Groups, TopicClass
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.mqtt.access import Peer
from tests.fabric_harness import SECRET, End, Mesh, Node

STEP_S = 0.05
PATIENCE_S = 60.0
FAR_S = 0.1
"""How far brokers are apart, one way, that a test does not want in one group. Near ones are no distance apart."""

LINKS = ":1884"
PROBES = ":1885"

GROUPS = Groups(cloud="mqtt://cloud:1883", announce_interval_seconds=0.2, ping_interval_seconds=0.1)
CLASSES = (
    TopicClass(topic="cars/#", topic_class="broadcast"),
    TopicClass(topic="trains/#", topic_class="broadcast-filtered"),
    TopicClass(topic="yards/#", topic_class="local"),
)
SETTINGS = FabricSettings(secret_file="unread", classes=CLASSES, groups=GROUPS)


class GroupNode(Node):
    """A broker that forms groups."""

    def __init__(self, mesh: GroupMesh, name: str, settings: FabricSettings, durable: bool) -> None:
        self.group_mesh = mesh
        self.cloud_end: End | None = None
        super().__init__(mesh, name, settings, mesh.limits, durable)

    def _start(self) -> None:
        super()._start()
        now = self.mesh.now
        self.cloud_end = None
        self.monitor = Monitor(self.name, SECRET, random.Random(f"probes {self.name}"), MonitorSettings(), standing=False)
        if not self.durable:
            self.fabric.begin(now)
        self.fabric.routes.address = self.name + LINKS
        lcm = self._settings.groups.lcm or 0.0
        self.fabric.broadcast.start(self.monitor, self.name + LINKS, self.name + PROBES, lcm, now)

    def crash(self, *, power_cut: bool = True) -> None:
        end = self.cloud_end
        if end is not None:
            self.group_mesh.drop_cloud_end(end, tell=False)
        super().crash(power_cut=power_cut)

    def flush(self) -> None:
        super().flush()
        self.group_mesh.connect(self)

    @property
    def leader(self) -> str:
        return self.fabric.broadcast.formation.leader

    @property
    def members(self) -> set[str]:
        return set(self.fabric.broadcast.formation.view.members)

    @property
    def waiting(self) -> int:
        """Messages of this broker's clients that the cloud has not confirmed."""
        relay = self.fabric.broadcast.relay
        assert relay is not None
        return relay.session.queued_messages


class GroupMesh(Mesh):
    """Brokers with groups, and their cloud, which clients may use as well (``cloud``)."""

    def __init__(self, seed: int = 1, settings: FabricSettings = SETTINGS) -> None:
        super().__init__(seed, settings)
        self.cloud = Node(self, "cloud", FabricSettings(), self.limits)
        self.cloud_up = True
        self.distances: dict[frozenset[str], float] = {}
        self.parted: set[frozenset[str]] = set()
        self.stalled: set[str] = set()
        """Brokers whose stream to and from the cloud does not move."""
        self._cloud_ends: list[tuple[GroupNode, End, End]] = []
        self._datagrams: list[tuple[float, int, str, str, bytes]] = []
        self._sent = 0

    def broker(self, name: str, *, lcm: float, durable: bool = False, **groups: object) -> GroupNode:
        """Of brokers that are near each other the one with the highest ``lcm`` comes to lead."""
        changed = msgspec.structs.replace(self.settings.groups, lcm=lcm, **groups)
        node = GroupNode(self, name, msgspec.structs.replace(self.settings, groups=changed), durable)
        self.nodes[name] = node
        return node

    def group_nodes(self) -> list[GroupNode]:
        return [node for node in self.nodes.values() if isinstance(node, GroupNode)]

    def far(self, *sites: tuple[str, ...]) -> None:
        """Brokers of different sites are far from each other."""
        for index, site in enumerate(sites):
            for other in sites[index + 1 :]:
                for first in site:
                    for second in other:
                        self.distances[frozenset((first, second))] = FAR_S

    # --- streams --------------------------------------------------------------------------------------------------------

    def connect(self, node: GroupNode) -> None:
        """Open what a broker's machines ask for, and send its datagrams."""
        for address in node.fabric.take_dials():
            name = address.removesuffix(LINKS)
            if name in self.nodes and frozenset((node.name, name)) not in self.parted:
                self._dial(node, self.nodes[name], address)
            else:
                node.fabric.dial_failed(address, self.now)
        cloud = node.fabric.broadcast.cloud
        if cloud is not None and cloud.wants_dial(self.now):
            if self.cloud_up and frozenset((node.name, "cloud")) not in self.parted:
                ours, theirs = End(node), End(self.cloud)
                ours.other, theirs.other = theirs, ours
                self._cloud_ends.append((node, ours, theirs))
                node.cloud_end = ours
                theirs.connection = self.cloud.engine.open(Peer(node.name), theirs, self.now)
                ours.connection = cloud.opened(ours, self.now)
                node.flush()
            else:
                cloud.dial_failed(self.now)
        for address, data in node.monitor.take_outgoing():
            self._send_datagram(node.name, address.removesuffix(PROBES), data)

    def _dial(self, one: Node, two: Node, address: str) -> None:
        left, right = End(one), End(two)
        left.other, right.other = right, left
        left.link = one.fabric.connected(address, left, self.now)
        left.connection = left.link.connection
        right.link = two.fabric.accepted(right, Peer(one.name), self.now)
        right.connection = right.link.connection
        self.streams.append((left, right))
        one.flush()
        two.flush()

    def drop_cloud_end(self, ours: End, *, tell: bool = True) -> None:
        """A broker's connection to the cloud breaks."""
        for entry in list(self._cloud_ends):
            node, end, theirs = entry
            if end is ours:
                self._cloud_ends.remove(entry)
                node.cloud_end = None
                end.closed = theirs.closed = True
                end.inbox.clear()
                theirs.inbox.clear()
                assert theirs.connection is not None
                self.cloud.engine.lose(theirs.connection, self.now)
                self.cloud.flush()
                cloud = node.fabric.broadcast.cloud
                if tell and cloud is not None:
                    cloud.lost(self.now)
                    node.flush()

    def stop_cloud(self) -> None:
        """The cloud is not there; it keeps its sessions."""
        self.cloud_up = False
        for _, end, _ in list(self._cloud_ends):
            self.drop_cloud_end(end)

    def start_cloud(self) -> None:
        self.cloud_up = True

    def part(self, first: str, second: str) -> None:
        """No way between two hosts, of which one may be the cloud."""
        self.parted.add(frozenset((first, second)))
        for stream in list(self.streams):
            if {stream[0].node.name, stream[1].node.name} == {first, second}:
                self.cut(stream)
        for node, end, _ in list(self._cloud_ends):
            if {node.name, "cloud"} == {first, second}:
                self.drop_cloud_end(end)

    def heal(self) -> None:
        self.parted.clear()

    # --- datagrams and time ---------------------------------------------------------------------------------------------

    def _send_datagram(self, source: str, target: str, data: bytes) -> None:
        pair = frozenset((source, target))
        if pair not in self.parted:
            self._sent += 1
            at = self.now + self.distances.get(pair, 0.0)
            heapq.heappush(self._datagrams, (at, self._sent, source, target, data))

    def _deliver_datagrams(self) -> bool:
        moved = False
        while self._datagrams and self._datagrams[0][0] <= self.now:
            _, _, source, target, data = heapq.heappop(self._datagrams)
            node = self.nodes.get(target)
            if isinstance(node, GroupNode):
                moved = True
                node.monitor.handle(data, source + PROBES, self.now)
                node.flush()
        return moved

    def run(self) -> None:
        moved = True
        while moved:
            super().run()
            moved = self._deliver_datagrams()
            for node, ours, theirs in list(self._cloud_ends):
                while self._to_cloud(theirs) or self._from_cloud(node, ours):
                    moved = True
                if ours.closed or theirs.closed:
                    self.drop_cloud_end(ours)
            for end in self.cloud.ends:
                theirs_end = end.other
                while theirs_end is not None and theirs_end.inbox:
                    theirs_end.received += theirs_end.inbox.popleft()
            for stream in list(self.streams):
                if (stream[0].closed or stream[1].closed) and not (stream[0].inbox or stream[1].inbox):
                    self.cut(stream)
                    moved = True

    def _to_cloud(self, theirs: End) -> bool:
        """A piece of what is on its way to the cloud arrives; whether there is one."""
        if not theirs.inbox or theirs.connection is None or (theirs.other and theirs.other.node.name in self.stalled):
            return False
        self.cloud.engine.receive(theirs.connection, theirs.inbox.popleft(), self.now)
        self.cloud.flush()
        return True

    def _from_cloud(self, node: GroupNode, ours: End) -> bool:
        cloud = node.fabric.broadcast.cloud
        if not ours.inbox or cloud is None or node.cloud_end is not ours or node.name in self.stalled:
            return False
        cloud.receive(ours.inbox.popleft(), self.now)
        node.flush()
        return True

    def step(self, rng: random.Random) -> bool:
        """One thing happens of those that could: a piece of a stream arrives, or a disk takes what was written."""
        ends = [end for stream in self.streams for end in stream if end.inbox]
        clouds = [
            entry for entry in self._cloud_ends if (entry[1].inbox or entry[2].inbox) and entry[0].name not in self.stalled
        ]
        nodes = [node for node in self.nodes.values() if node.wants_sync or node.spool.begun]
        if not ends and not clouds and not nodes:
            return False
        chosen = rng.randrange(len(ends) + len(clouds) + len(nodes))
        if chosen < len(ends):
            end = ends[chosen]
            assert end.link is not None
            end.node.fabric.receive(end.link, end.inbox.popleft(), self.now)
            end.node.flush()
        elif chosen < len(ends) + len(clouds):
            node, ours, theirs = clouds[chosen - len(ends)]
            if not self._to_cloud(theirs):
                self._from_cloud(node, ours)
        else:
            nodes[chosen - len(ends) - len(clouds)].sync()
        return True

    def tick(self, seconds: float) -> None:
        """Time passes, and nothing arrives but datagrams."""
        self.now += seconds
        self.cloud.engine.tick(self.now)
        self.cloud.flush()
        for node in self.nodes.values():
            node.engine.tick(self.now)
            node.fabric.tick(self.now)
            if isinstance(node, GroupNode):
                node.monitor.tick(self.now)
            node.flush()
        self._deliver_datagrams()

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            self.tick(min(STEP_S, end - self.now))
            self.run()

    def forget_cloud(self) -> None:
        """The cloud is not there, and when it is again, it knows nothing any more."""
        self.stop_cloud()
        self.cloud = Node(self, "cloud", FabricSettings(), self.limits)

    def until(self, what: str, condition: Callable[[], bool]) -> None:
        """Let time pass until something is so."""
        end = self.now + PATIENCE_S
        while not condition():
            assert self.now < end, f"{what} did not happen within {PATIENCE_S:g} s"
            self.advance(STEP_S)

    def form(self, *groups: tuple[str, ...]) -> None:
        """Wait until the groups are these, each named with its leader first, and everything of them is in place."""

        def formed() -> bool:
            for leader, *members in groups:
                names = {leader, *members}
                for name in names:
                    node = self.nodes[name]
                    assert isinstance(node, GroupNode)
                    if node.leader != leader or node.members != names:
                        return False
                    if any(other != name and not node.fabric.peers[other].up for other in names if other in node.fabric.peers):
                        return False
            return True

        self.until(f"the groups {groups}", formed)
        self.advance(1.0)

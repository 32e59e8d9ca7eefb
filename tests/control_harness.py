"""A controller and its nodes in virtual time, without sockets: streams and datagrams between them take as long as a test says,
or forever.

Nodes are the shipped :class:`~nearcast.fabric.control.Registration` over the shipped Hub and Monitor; what a gateway does with
its orders is played by :class:`FakeGateway`, because here the question is what it is told.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field

from nearcast.config import Limits
from nearcast.fabric import links
from nearcast.fabric.control import (
    Assignment,
    ClassRules,
    ClientFacts,
    Departure,
    Measurement,
    Member,
    MoveOrder,
    Node,
    Outcome,
    Registrant,
    Registration,
    Report,
)
from nearcast.fabric.controlling import Controller, ControlSettings
from nearcast.fabric.hub import Hub
from nearcast.fabric.links import Greeting, Link
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import Connection

SECRET = b"a secret that all of them have"
WALL_OFFSET = 1_700_000_000.0
TICK_S = 0.05


class End:
    """One end of a stream."""

    def __init__(self, node: Machine) -> None:
        self.node = node
        self.other: End | None = None
        self.link: Link | None = None
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False
        self.closed = False

    def send(self, chunks: list[bytes]) -> None:
        self.node.net.stream(self, b"".join(chunks))

    def close(self) -> None:
        self.node.net.close(self)


class Machine:
    """Something with links and datagrams. ``alive`` false: the process is gone or hangs."""

    def __init__(self, net: Net, name: str, hub: Hub, monitor: Monitor) -> None:
        self.net = net
        self.name = name
        self.hub = hub
        self.monitor = monitor
        self.alive = True

    def flush(self) -> None:
        now = self.net.now
        self.hub.settle(now)
        self.hub.flush(now)
        for address, data in self.monitor.take_outgoing():
            self.net.datagram(self.name, address, data)
        for address in self.hub.take_dials():
            self.net.dial(self, address)


class FakeRegistrant(Registrant):
    """Remembers what it is told."""

    def __init__(self, net: Net, node: Node) -> None:
        self.net = net
        self.facts = node
        self.known: dict[str, Member] = {}
        self.gone: list[Departure] = []
        self.assignments: list[Assignment] = []
        self.rules: list[ClassRules] = []
        self.drains: list[bool] = []
        self.for_good = True
        self.measurements: dict[str, Measurement] = {}
        self.next_report = Report()

    def node(self) -> Node:
        return self.facts

    def leaves_for_good(self) -> bool:
        return self.for_good

    def members(self, changed: tuple[Member, ...], gone: tuple[Departure, ...], now: float) -> None:
        self.known |= {member.name: member for member in changed}
        self.gone.extend(gone)

    def measured(self, measurement: Measurement, now: float) -> None:
        self.measurements[measurement.target] = measurement

    def assigned(self, assignment: Assignment, now: float) -> None:
        self.assignments.append(assignment)

    def classes(self, rules: ClassRules, now: float) -> None:
        self.rules.append(rules)

    def draining(self, draining: bool, now: float) -> None:
        self.drains.append(draining)

    def report(self, now: float) -> Report:
        return self.next_report


class FakeGateway(FakeRegistrant):
    """Does as it is told, at once, unless ``stubborn`` (says nothing) or ``unable`` (says why not)."""

    def __init__(self, net: Net, node: Node) -> None:
        super().__init__(net, node)
        self.clients: dict[str, str] = {}
        self.home = ""
        self.orders: list[MoveOrder] = []
        self.stubborn = False
        self.unable = ""
        self.registration: Registration | None = None
        self._outcomes: list[Outcome] = []
        self._whole = True
        self._told: dict[str, str] = {}

    def has_news(self) -> bool:
        return self._told != self.clients

    def registered(self, controller: str, now: float) -> None:
        self._whole = True

    def assigned(self, assignment: Assignment, now: float) -> None:
        super().assigned(assignment, now)
        if assignment.home and not self.unable and not self.stubborn:
            self.home = assignment.home
        for order in assignment.moves:
            self.orders.append(order)
            if self.stubborn:
                continue
            moving = [
                client
                for client, broker in self.clients.items()
                if order.client in ("", client) and order.origin in ("", broker)
            ]
            if self.unable:
                self._outcomes.append(Outcome(order.number, 0, len(moving), self.unable))
            else:
                self.clients |= dict.fromkeys(moving, order.target)
                self._outcomes.append(Outcome(order.number, len(moving)))
            assert self.registration is not None
            self.registration.urgent()

    def report(self, now: float) -> Report:
        brokers: dict[str, int] = {}
        for broker in self.clients.values():
            brokers[broker] = brokers.get(broker, 0) + 1
        self._told = dict(self.clients)
        outcomes, self._outcomes = self._outcomes, []
        whole, self._whole = self._whole, False
        return Report(
            home=self.home,
            connections=len(self.clients),
            brokers=brokers,
            clients=[ClientFacts(client, broker) for client, broker in self.clients.items()],
            clients_whole=whole,
            outcomes=outcomes,
        )


@dataclass
class Net:
    """Everything, and the time. ``rtt_ms`` is by pair of names; pairs in ``cut`` do not reach each other."""

    seed: int = 1
    control: ControlSettings = field(default_factory=ControlSettings)
    monitoring: MonitorSettings = field(default_factory=MonitorSettings)

    def __post_init__(self) -> None:
        self.now = 100.0
        self.rng = random.Random(self.seed)
        self.machines: dict[str, Machine] = {}
        self.registrants: dict[str, FakeRegistrant] = {}
        self.rtt_ms: dict[frozenset[str], float] = {}
        self.cut: set[frozenset[str]] = set()
        self.datagrams: list[tuple[str, str, bytes]] = []
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._ends: list[End] = []
        self.settings = FabricSettings(probe_interval_seconds=1.0, fail_after_seconds=10.0)
        self.start_controller()

    # --- who there is ---------------------------------------------------------------------------------------------------

    def start_controller(self) -> None:
        rng = random.Random(self.rng.random())
        monitor = Monitor("controller", SECRET, rng, self.monitoring, standing=False)
        epoch = rng.getrandbits(60)
        hub = Hub(Greeting(links.CONTROLLER, "controller", epoch), SECRET, self.settings, Limits(), rng)
        self.controller = Controller(self.control, monitor, epoch, WALL_OFFSET, rng, self.now)
        hub.users[links.BROKER] = self.controller
        hub.users[links.GATEWAY] = self.controller
        self.machines["controller"] = Machine(self, "controller", hub, monitor)

    def _add(self, node: Node, registrant: FakeRegistrant, role: int, standing: bool) -> Registration:
        rng = random.Random(self.rng.random())
        monitor = Monitor(node.name, SECRET, rng, self.monitoring, standing=standing)
        hub = Hub(Greeting(role, node.name, node.epoch), SECRET, self.settings, Limits(), rng)
        registration = Registration(registrant, monitor)
        hub.users[links.CONTROLLER] = registration
        machine = Machine(self, node.name, hub, monitor)
        self.machines[node.name] = machine
        self.registrants[node.name] = registrant
        hub.dial("controller:1885", self.now)
        machine.flush()
        return registration

    def add_broker(self, name: str, *, classes: ClassRules | None = None) -> Registration:
        """A broker starts."""
        node = Node(
            name=name,
            role="broker",
            epoch=self.rng.getrandbits(60),
            link=f"{name}:1884",
            monitoring=f"{name}:1884",
            classes=classes or ClassRules(),
        )
        return self._add(node, FakeRegistrant(self, node), links.BROKER, standing=False)

    def add_gateway(self, name: str, clients: int = 1, home: str = "", **rtt_ms: float) -> FakeGateway:
        """A gateway starts, so far from these brokers, with so many clients at ``home``."""
        node = Node(name=name, role="gateway", epoch=self.rng.getrandbits(60), monitoring=f"{name}:1")
        gateway = FakeGateway(self, node)
        gateway.home = home
        gateway.clients = dict.fromkeys((f"{name}-{number}" for number in range(clients)), home)
        for broker, distance_ms in rtt_ms.items():
            self.set_rtt(name, broker, distance_ms)
        gateway.registration = self._add(node, gateway, links.GATEWAY, standing=True)
        return gateway

    def gateway(self, name: str) -> FakeGateway:
        found = self.registrants[name]
        assert isinstance(found, FakeGateway)
        return found

    def set_rtt(self, first: str, second: str, rtt_ms: float) -> None:
        self.rtt_ms[frozenset((first, second))] = rtt_ms

    # --- what happens to it ---------------------------------------------------------------------------------------------

    def kill(self, name: str) -> None:
        """A process dies: its streams break, and nothing answers."""
        self.machines[name].alive = False
        for end in [end for end in self._ends if end.node.name == name]:
            self.close(end)

    def hang(self, name: str) -> None:
        """A process, or its machine, stops answering; no stream breaks."""
        self.machines[name].alive = False

    def resume(self, name: str) -> None:
        """It goes on."""
        self.machines[name].alive = True

    def restart_controller(self) -> None:
        """The controller dies, and another one starts at its address."""
        self.kill("controller")
        self.start_controller()

    def part(self, first: str, second: str) -> None:
        """Two nodes do not reach each other any more; streams between them hang."""
        self.cut.add(frozenset((first, second)))

    def heal(self) -> None:
        self.cut.clear()

    # --- moving things --------------------------------------------------------------------------------------------------

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (self.now + delay_s, next(self._numbers), action))

    def _delay_s(self, first: str, second: str) -> float:
        return self.rtt_ms.get(frozenset((first, second)), 1.0) / 2e3

    def reaches(self, first: str, second: str) -> bool:
        return frozenset((first, second)) not in self.cut

    def dial(self, machine: Machine, address: str) -> None:
        target = self.machines[address.partition(":")[0]]
        if not target.alive or not self.reaches(machine.name, target.name):
            self._later(0.01, lambda: machine.hub.dial_failed(address, self.now))
            return
        ours, theirs = End(machine), End(target)
        ours.other, theirs.other = theirs, ours
        self._ends += [ours, theirs]
        ours.link = machine.hub.connected(address, ours, self.now)
        theirs.link = target.hub.accepted(theirs, Peer(f"10.0.0.{len(self.machines)}"), self.now)
        machine.flush()
        target.flush()

    def stream(self, end: End, data: bytes) -> None:
        other = end.other
        if other is None or end.closed:
            return

        def arrive() -> None:
            if other.closed or other.link is None:
                return
            if not other.node.alive or not self.reaches(end.node.name, other.node.name):
                self._later(0.2, arrive)  # as TCP does, for as long as the stream lives
                return
            other.node.hub.receive(other.link, data, self.now)
            other.node.flush()

        self._later(self._delay_s(end.node.name, other.node.name), arrive)

    def close(self, end: End) -> None:
        for one in (end, end.other):
            if one is None or one.closed:
                continue
            one.closed = True
            if one in self._ends:
                self._ends.remove(one)
            if one.link is not None and one.node.alive:
                self._later(0.001, functools.partial(self._lost, one))

    def _lost(self, end: End) -> None:
        assert end.link is not None
        end.node.hub.lost(end.link, self.now)
        end.node.flush()

    def datagram(self, source: str, address: str, data: bytes) -> None:
        self.datagrams.append((source, address, data))
        target = address.partition(":")[0]
        machine = self.machines.get(target)
        if machine is None or not self.reaches(source, target):
            return

        def arrive() -> None:
            if self.machines.get(target) is machine and machine.alive:
                machine.monitor.handle(data, f"{source}:1", self.now)
                machine.flush()

        self._later(self._delay_s(source, target), arrive)

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        next_tick = self.now
        while True:
            due = min(next_tick, self._agenda[0][0] if self._agenda else next_tick)
            if due > end:
                break
            self.now = max(self.now, due)
            if self._agenda and self._agenda[0][0] <= self.now and self._agenda[0][0] <= next_tick:
                heapq.heappop(self._agenda)[2]()
                continue
            next_tick = self.now + TICK_S
            for machine in list(self.machines.values()):
                if machine.alive:
                    machine.hub.tick(self.now)
                    machine.flush()
        self.now = end

    def run_until(self, condition: Callable[[], bool], what: str, within_s: float = 60.0) -> float:
        """Let time pass until something holds; returns how long that took."""
        start = self.now
        while not condition():
            if self.now - start > within_s:
                raise AssertionError(f"{what}: not within {within_s} s (seed {self.seed})")
            self.run(TICK_S)
        return self.now - start

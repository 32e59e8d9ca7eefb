"""The built-in protocol ``fabric``: brokers with links, gateways, a controller and clients, with the code that is shipped.

Every broker has ``fabric = true`` and is called as its host (with its port, unless that is 1883). Without a controller each is
told of all the others, or of those that ``links`` says. What must hold is in :mod:`nearcast.simulation.fabric_invariants`.

With ``fabric.groups.cloud = "mqtt://host:port"``, brokers form broadcast groups, and the one broker without ``fabric`` that
listens there is their cloud. They are told of nobody then, unless ``links`` or a controller does it or ``fabric.groups.links``
is "all". What must hold of groups is in :mod:`nearcast.simulation.broadcast_ledger` and
:mod:`nearcast.simulation.broadcast_tables`; of topics of class ``owned``, in :mod:`nearcast.simulation.owned_ledger` and
:mod:`nearcast.simulation.owned_tables`; of topics that replica sets keep, in :mod:`nearcast.simulation.set_ledger`.

Settings, beside those of ``mqtt``:

``links``
    Pairs of brokers that can link to each other, by name: the first of a pair can dial the second, and is told of it. Others
    have to be reached through those in between. (All with all.)
``fabric``
    Settings of the links, as in a broker's configuration.
``moves_per_minute``
    How often a client of a gateway, any one, is moved to another broker, any one, until ``duration_s`` is over (0).
``lcm``
    Leadership capability of brokers, by name; others have ``fabric.groups.lcm``, or 1.
``migrations_per_minute``
    How often owned topics, any, are moved to another broker, any one, until ``duration_s`` is over (0). Needs a controller, as
    owned topics do.
``migrations_at_once``
    How many topics are moved each time (1).
``merge_kills``
    In which share of merges of two groups, until ``duration_s`` is over, a leader dies at some moment of it, to start again
    within seconds (0).
"""

from __future__ import annotations

import random
from typing import Any

from nearcast.errors import ConfigError
from nearcast.fabric.gateway import GatewaySettings
from nearcast.scenario.expansion import Client, expand_brokers, expand_clients, expand_gateways
from nearcast.scenario.scenario import Broker, Controller, Gateway, Scenario
from nearcast.simulation.broadcast_faults import MergeKills
from nearcast.simulation.broadcast_ledger import BroadcastLedger, GroupBrokers
from nearcast.simulation.broadcast_tables import BroadcastTables, RuleClasses
from nearcast.simulation.cloud_broker import CloudBroker
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_controller import SimulatedController, topics_of
from nearcast.simulation.fabric_gateway import SimulatedGateway
from nearcast.simulation.fabric_invariants import Brokers, FabricLedger, FabricTables
from nearcast.simulation.fabric_settings import FabricSettings, settings_of
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt import Mqtt, MqttNode, refuse_changing
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.mqtt_client import Workload
from nearcast.simulation.owned_ledger import OwnedLedger
from nearcast.simulation.owned_moves import TopicMoves
from nearcast.simulation.owned_tables import OwnedRules, OwnedTables
from nearcast.simulation.set_ledger import SetLedger, SetTables
from nearcast.simulation.streams import Stream
from nearcast.simulation.world import World


class Fabric(Mqtt):
    """Brokers, gateways, clients. A subclass may put another broker in the place of ours."""

    fabric_broker_class: type[FabricBroker] = FabricBroker
    settings: FabricSettings

    def __init__(self) -> None:
        super().__init__()
        self.settings = FabricSettings()
        self.brokers: dict[str, Broker] = {}
        self.tables: FabricTables | None = None
        self._dials: dict[str, list[str]] = {}
        self._gateways_of: dict[str, list[Gateway]] = {}
        self._controller: Controller | None = None
        self._cloud: Broker | None = None
        self._duration_s = 0.0
        self.gateways = 0
        self.moves_asked = 0

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        self.settings = settings_of(scenario)
        self._world = world
        clients = expand_clients(scenario)
        refuse_changing(clients)
        for broker in expand_brokers(scenario):
            if broker.fabric:
                self.brokers[broker.name] = broker
            elif (broker.host, broker.port) == self.settings.cloud:
                self._cloud = broker
            else:
                raise ConfigError(f"`brokers`: {broker.name} needs `fabric = true` in the protocol fabric", key="brokers")
            self.brokers_of.setdefault(broker.host, []).append(broker)
        self._check_groups()
        self._controller = scenario.controller
        if self._controller is not None:
            topics_of(self._controller)  # a mistake there is the scenario's, not a run's
        self._check_owned()
        self._duration_s = scenario.duration_s
        self._dials = self._whom_to_dial()
        gateways = expand_gateways(scenario)
        for gateway in gateways:
            self._gateways_of.setdefault(gateway.host, []).append(gateway)
        self.gateways = len(gateways)
        doors = {(gateway.host, gateway.port) for gateway in gateways}
        listening = {(broker.host, broker.port) for brokers in self.brokers_of.values() for broker in brokers} | doors
        for client in clients:
            if (client.broker, client.port) not in listening:
                raise ConfigError(
                    f"`clients`: {client.name} connects to {client.broker} at port {client.port}, where nothing listens",
                    key="clients",
                )
            self.workloads_of.setdefault(client.host, []).append(Workload(client, world.seed))
        self._brokers, self._clients = len(self.brokers), len(clients)
        controllers = [] if self._controller is None else [self._controller.host]
        for name in dict.fromkeys([*controllers, *self.brokers_of, *self._gateways_of, *self.workloads_of]):
            world.place(name, lambda host: MqttNode(host, self))
        self.ledger, self.tables = self._what_must_hold(world, clients, doors)
        if self.settings.moves_per_minute > 0:
            self._plan_move(world, random.Random(f"{world.seed}/moves"))
        if self.settings.migrations_per_minute > 0:
            TopicMoves(
                world,
                self._running_controller,
                list(self.brokers),
                self.settings.migrations_per_minute,
                self.settings.migrations_at_once,
                self._duration_s,
            ).plan()
        hosts = {broker.name: broker.host for broker in self.brokers.values()}
        kills = MergeKills(world, hosts, self.settings.merge_kills, self._duration_s)
        return [self.ledger, self.tables, *([kills] if self.settings.merge_kills > 0 else [])]

    def _what_must_hold(
        self, world: World, clients: tuple[Client, ...], doors: set[tuple[str, int]]
    ) -> tuple[FabricLedger, FabricTables]:
        durable = {broker.name: broker.durable for broker in self.brokers.values()}

        def is_meant(name: str) -> bool:
            return _is_meant(self.brokers[name], world.now)

        def now() -> float:
            return world.now

        cloud = self._cloud
        if cloud is None and self.settings.has_owned:
            return self._what_must_hold_of_owned(world, clients, doors, Brokers(durable, self._running, is_meant))
        if cloud is None and self.settings.has_sets:
            found = Brokers(durable, self._running, is_meant)
            of_sets = SetLedger(clients, found, doors, now, self.settings.fabric.classes)
            return of_sets, SetTables(clients, found, now, lambda: world.is_cut, lambda: of_sets.disturbances == 0)
        if cloud is None:
            brokers = Brokers(durable, self._running, is_meant)
            ledger = FabricLedger(clients, brokers, doors, now)
            return ledger, FabricTables(clients, brokers, now, lambda: world.is_cut, lambda: ledger.disturbances == 0)
        groups = self.settings.fabric.groups
        rules = RuleClasses(self.settings.fabric.classes)
        address = (cloud.host, cloud.port)
        grouped = GroupBrokers(
            durable, self._running, is_meant, lambda: self._process(*address), address, cloud_durable=cloud.durable
        )
        broadcast = BroadcastLedger(clients, grouped, doors, now, groups, rules.class_of, lambda: world.is_cut)

        def latency_ms(one: str, other: str) -> float:
            hosts = [world.host(self.brokers[name].host) for name in (one, other)]
            return world.network.one_way_ms(hosts[0].index, hosts[1].index)

        tables = BroadcastTables(
            clients,
            grouped,
            now,
            lambda: world.is_cut,
            lambda: broadcast.disturbances == 0,
            groups,
            latency_ms,
            rules.class_of,
        )
        return broadcast, tables

    def _what_must_hold_of_owned(
        self, world: World, clients: tuple[Client, ...], doors: set[tuple[str, int]], brokers: Brokers
    ) -> tuple[FabricLedger, FabricTables]:
        rules = OwnedRules(self.settings.fabric.classes)

        def now() -> float:
            return world.now

        def cut_off() -> bool:
            return world.is_cut

        ledger = OwnedLedger(clients, brokers, doors, now, rules, cut_off)

        def is_calm() -> bool:
            return ledger.disturbances == 0

        return ledger, OwnedTables(clients, brokers, now, cut_off, is_calm, self._owner_in_directory)

    def _owner_in_directory(self, topic: str) -> tuple[str, int] | None:
        found = self._running_controller()
        return None if found is None else found[1].owner_of(topic)

    def _running_controller(self) -> tuple[MqttNode, SimulatedController] | None:
        world = self._world
        if world is None or self._controller is None or not world.host(self._controller.host).running:
            return None
        node = world.host(self._controller.host).node
        programs = node.programs if isinstance(node, MqttNode) else []
        for program in programs:
            if isinstance(program, SimulatedController) and isinstance(node, MqttNode):
                return node, program
        return None

    def _check_owned(self) -> None:
        settings = self.settings
        if not settings.has_owned:
            if settings.migrations_per_minute > 0:
                raise ConfigError(
                    "`settings.migrations_per_minute`: no rule in `settings.fabric.classes` makes topics `owned`",
                    key="settings",
                )
        elif self._controller is None:
            raise ConfigError("`controller`: topics of class `owned` need one, which decides their owners", key="controller")
        elif self._cloud is not None:
            raise ConfigError(
                "`settings.fabric.classes`: owned topics and broadcast groups are checked in different scenarios",
                key="settings",
            )

    def _check_groups(self) -> None:
        settings = self.settings
        if settings.cloud is not None and self._cloud is None:
            host, port = settings.cloud
            raise ConfigError(
                f"`settings.fabric.groups.cloud`: no broker without `fabric` is on {host} at port {port}", key="settings"
            )
        for name in settings.lcm:
            if name not in self.brokers:
                raise ConfigError(f"`settings.lcm`: no broker is called {name}", key="settings.lcm")

    def _plan_move(self, world: World, rng: random.Random) -> None:
        """Move some client somewhere, and again after a while."""

        def move() -> None:
            if world.now >= self._duration_s:
                return
            self._move(world, rng)
            self._plan_move(world, rng)

        world.at(world.now + rng.expovariate(self.settings.moves_per_minute / 60.0), move)

    def _move(self, world: World, rng: random.Random) -> None:
        target = rng.choice(list(self.brokers))
        chosen = rng.random()
        found = [
            (node, gateway, tunnel.client_id)
            for node, gateway in self._running_gateways(world)
            for tunnel in gateway.machine.tunnels
        ]
        if found:
            node, gateway, client = found[int(chosen * len(found))]
            self.moves_asked += gateway.move(client, target)
            node.plan(gateway)

    def _running_gateways(self, world: World) -> list[tuple[MqttNode, SimulatedGateway]]:
        nodes = [world.host(name).node for name in self._gateways_of if world.host(name).running]
        return [
            (node, program)
            for node in nodes
            if isinstance(node, MqttNode)
            for program in node.programs
            if isinstance(program, SimulatedGateway)
        ]

    def add_programs(self, node: MqttNode) -> None:
        settings = self.settings
        controller = self._controller
        if controller is not None and controller.host == node.host.name:
            made = SimulatedController(node.host, controller, settings.fabric, node)
            node.add(made, controller.start_s, controller.stop_s)
        for gateway in self._gateways_of.get(node.host.name, ()):
            governed = controller if gateway.controller else None
            known = [] if governed is not None else [_address(broker) for broker in self.brokers.values()]
            program = SimulatedGateway(
                node.host,
                gateway,
                settings.fabric,
                GatewaySettings(),
                known,
                None if governed is None else f"{governed.host}:{governed.port}",
                settings.limits,
                node,
            )
            node.ports[gateway.port] = program
            node.add(program, gateway.start_s, gateway.stop_s)

    def _whom_to_dial(self) -> dict[str, list[str]]:
        """The link addresses that each broker is told of."""
        dials: dict[str, list[str]] = {name: [] for name in self.brokers}
        pairs = self.settings.links
        if pairs is None and (self._controller is not None or self._links_by_group()):
            return dials
        if pairs is None:
            pairs = tuple((one, other) for one in self.brokers for other in self.brokers if one != other)
        for one, other in pairs:
            for name in (one, other):
                if name not in self.brokers:
                    raise ConfigError(f"`settings.links`: no broker is called {name}", key="settings.links")
            dials[one].append(_address(self.brokers[other]))
        return dials

    def _links_by_group(self) -> bool:
        """Whether brokers find each other by their groups alone."""
        groups = self.settings.fabric.groups
        return groups.cloud is not None and groups.links != "all" and self.settings.links is None and self._controller is None

    def make_broker(self, host: Host, broker: Broker, node: MqttNode) -> SimulatedBroker:
        settings = self.settings
        if not broker.fabric:
            return CloudBroker(host, broker, settings.limits, settings.snapshot_bytes, settings.snapshot_step_bytes, node)
        made = self.fabric_broker_class(
            host,
            broker,
            settings.fabric,
            self._dials[broker.name],
            None if self._controller is None else f"{self._controller.host}:{self._controller.port}",
            settings.limits,
            settings.snapshot_bytes,
            settings.snapshot_step_bytes,
            node,
            lcm=settings.lcm.get(broker.name, settings.fabric.groups.lcm or 1.0),
        )
        node.ports[broker.link_port] = made
        if settings.links is not None:
            made.links.reachable = {*self._dials[broker.name], made.controller or ""}

        def arrived(stream: Stream, data: bytes) -> None:
            if self.tables is not None:
                self.tables.arrived(made, stream, data)

        made.links.watcher = arrived
        return made

    def _running(self, name: str) -> FabricBroker | None:
        """The process of a broker, if it runs."""
        broker = self.brokers[name]
        found = self._process(broker.host, broker.port)
        return found if isinstance(found, FabricBroker) else None

    def report(self) -> dict[str, Any]:
        tables = self.tables
        crossed = {} if tables is None else {"crossed": tables.crossed, "crossed_again": tables.crossed_again}
        figures = {**super().report(), **crossed}
        if isinstance(tables, BroadcastTables):
            figures |= tables.figures()
        if isinstance(tables, OwnedTables) and isinstance(self.ledger, OwnedLedger):
            figures |= tables.figures() | self.ledger.figures()
        if isinstance(self.ledger, SetLedger):
            figures |= self.ledger.figures()
        if self.gateways and self._world is not None:
            moves = [gateway.machine.moves for _, gateway in self._running_gateways(self._world)]
            figures["gateways"] = self.gateways
            figures["moved"] = sum(each.moved for each in moves)
            figures["moves_failed"] = sum(each.failed for each in moves)
            figures["longest_gap_ms"] = round(max([each.longest_gap_ms for each in moves], default=0.0), 3)
            figures["gateway_brokers"] = {
                gateway.name: tunnel.upstream.broker
                for _, gateway in self._running_gateways(self._world)
                for tunnel in gateway.machine.tunnels
                if tunnel.upstream is not None
            }
            figures["moves"] = self._ordered_moves()
        return figures

    def _ordered_moves(self) -> list[dict[str, Any]]:
        """What the controller ordered, and why."""
        found = self._running_controller()
        return [] if found is None else found[1].moves()


def _address(broker: Broker) -> str:
    return f"{broker.host}:{broker.link_port}"


def _is_meant(broker: Broker, now_s: float) -> bool:
    return broker.start_s <= now_s and (broker.stop_s is None or now_s < broker.stop_s)

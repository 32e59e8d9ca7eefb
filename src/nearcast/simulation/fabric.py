"""The built-in protocol ``fabric``: brokers with links, gateways, a controller and clients, with the code that is shipped.

Every broker has ``fabric = true`` and is called as its host (with its port, unless that is 1883). Without a controller each is
told of all the others, or of those that ``links`` says. What must hold is in :mod:`nearcast.simulation.fabric_invariants`.
Settings, beside those of ``mqtt``:

``links``
    Pairs of brokers that can link to each other, by name: the first of a pair can dial the second, and is told of it. Others
    have to be reached through those in between. (All with all.)
``fabric``
    Settings of the links, as in a broker's configuration.
"""

from __future__ import annotations

from typing import Any

import msgspec

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric as LinkSettings
from nearcast.scenario.expansion import expand_brokers, expand_clients
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.simulation.fabric_broker import FabricBroker
from nearcast.simulation.fabric_invariants import Brokers, FabricLedger, FabricTables
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant
from nearcast.simulation.mqtt import Mqtt, MqttNode, MqttSettings
from nearcast.simulation.mqtt_client import Workload
from nearcast.simulation.streams import Stream
from nearcast.simulation.world import World


class FabricSettings(MqttSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    links: tuple[tuple[str, str], ...] | None = None
    fabric: LinkSettings = LinkSettings()


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

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        self.settings = _settings(scenario)
        self._world = world
        clients = expand_clients(scenario)
        for broker in expand_brokers(scenario):
            if not broker.fabric:
                raise ConfigError(f"`brokers`: {broker.name} needs `fabric = true` in the protocol fabric", key="brokers")
            self.brokers[broker.name] = broker
            self.brokers_of.setdefault(broker.host, []).append(broker)
        self._dials = self._whom_to_dial()
        listening = {(broker.host, broker.port) for broker in self.brokers.values()}
        for client in clients:
            if (client.broker, client.port) not in listening:
                raise ConfigError(
                    f"`clients`: {client.name} connects to {client.broker} at port {client.port}, where nothing listens",
                    key="clients",
                )
            self.workloads_of.setdefault(client.host, []).append(Workload(client, world.seed))
        self._brokers, self._clients = len(self.brokers), len(clients)
        for name in dict.fromkeys([*self.brokers_of, *self.workloads_of]):
            world.place(name, lambda host: MqttNode(host, self))
        durable = {broker.name: broker.durable for broker in self.brokers.values()}
        brokers = Brokers(durable, self._running, lambda name: _is_meant(self.brokers[name], world.now))
        ledger = FabricLedger(clients, brokers, set(), lambda: world.now)
        self.ledger = ledger
        self.tables = FabricTables(clients, brokers, lambda: world.now, lambda: world.is_cut, lambda: ledger.disturbances == 0)
        return [ledger, self.tables]

    def _whom_to_dial(self) -> dict[str, list[str]]:
        """The link addresses that each broker is told of."""
        dials: dict[str, list[str]] = {name: [] for name in self.brokers}
        pairs = self.settings.links
        if pairs is None:
            pairs = tuple((one, other) for one in self.brokers for other in self.brokers if one != other)
        for one, other in pairs:
            for name in (one, other):
                if name not in self.brokers:
                    raise ConfigError(f"`settings.links`: no broker is called {name}", key="settings.links")
            dials[one].append(f"{self.brokers[other].host}:{self.brokers[other].link_port}")
        return dials

    def make_broker(self, host: Host, broker: Broker, node: MqttNode) -> FabricBroker:
        settings = self.settings
        made = self.fabric_broker_class(
            host,
            broker,
            settings.fabric,
            self._dials[broker.name],
            settings.limits,
            settings.snapshot_bytes,
            settings.snapshot_step_bytes,
            node,
        )
        node.ports[broker.link_port] = made
        if settings.links is not None:
            made.links.reachable = set(self._dials[broker.name])

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
        return {**super().report(), **crossed}


def _is_meant(broker: Broker, now_s: float) -> bool:
    return broker.start_s <= now_s and (broker.stop_s is None or now_s < broker.stop_s)


def _settings(scenario: Scenario) -> FabricSettings:
    try:
        return msgspec.convert(scenario.settings, FabricSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`settings` of protocol fabric: {error}", key="settings") from None

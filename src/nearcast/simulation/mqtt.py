"""The built-in protocol ``mqtt``: a scenario's brokers and clients, with the code that is shipped, in virtual time.

Brokers are the engine, journal and output order of ``nearcast broker``; clients the machine of ``nearcast.client``, with a
workload. What must hold is in :mod:`nearcast.simulation.mqtt_invariants`. Settings:

``snapshot_bytes``
    Bytes of journal after which a durable broker writes its state anew (65,536: small, so that it happens often).
``snapshot_step_bytes``
    How much of the state is copied at a time (4,096).
``limits``
    Limits of the brokers, as in a broker's configuration.
``topics``
    Topics that durable brokers keep in their log, as in a broker's configuration (none).
``segment_bytes``
    Size at which a file of that log is closed and the next begins (4,096: small, so that it happens often).
``max_topics``
    Topics that the log keeps (1,000).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec

from nearcast.config import Limits, TopicRule
from nearcast.errors import ConfigError
from nearcast.scenario.expansion import Client, expand_brokers, expand_clients
from nearcast.scenario.scenario import Broker, Scenario
from nearcast.simulation.hosts import Host
from nearcast.simulation.invariants import Invariant, Protocol
from nearcast.simulation.mqtt_broker import SimulatedBroker
from nearcast.simulation.mqtt_client import SimulatedClient, Workload
from nearcast.simulation.mqtt_invariants import Ledger
from nearcast.simulation.mqtt_log_invariants import LogLedger
from nearcast.simulation.mqtt_topics import SimulatedTopics
from nearcast.simulation.programs import ProgramNode
from nearcast.simulation.world import World


class MqttSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    snapshot_bytes: int = 65_536
    snapshot_step_bytes: int = 4_096
    limits: Limits = Limits()
    topics: tuple[TopicRule, ...] = ()
    segment_bytes: int = 4_096
    max_topics: int = 1_000

    def __post_init__(self) -> None:
        if self.snapshot_bytes < 1 or self.snapshot_step_bytes < 1:
            raise ValueError("`snapshot_bytes` and `snapshot_step_bytes` must be at least 1")
        if self.segment_bytes < 1 or self.max_topics < 1:
            raise ValueError("`segment_bytes` and `max_topics` must be at least 1")


def refuse_changing(clients: Iterable[Client]) -> None:
    """What load processes can do and simulated clients cannot is refused, not left out."""
    for client in clients:
        if client.roams or client.changes:
            what = "roams" if client.roams else "changes its subscriptions"
            raise ConfigError(f"`clients`: {client.name} {what}: only clients on the emulated WAN can", key="clients")


class MqttNode(ProgramNode):
    """Everything MQTT on one host: any number of brokers, each on its port, and of clients."""

    def __init__(self, host: Host, protocol: Mqtt) -> None:
        super().__init__(host)
        self.brokers: dict[int, SimulatedBroker] = {}
        for broker in protocol.brokers_of.get(host.name, ()):
            made = protocol.make_broker(host, broker, self)
            self.brokers[broker.port] = made
            self.ports[broker.port] = made
            self.add(made, broker.start_s, broker.stop_s)
        protocol.add_programs(self)
        for workload in protocol.workloads_of.get(host.name, ()):
            self.add(SimulatedClient(host, workload, host.world.host(workload.client.broker), self.owners))


class Mqtt(Protocol):
    """Brokers and clients. A subclass may put another broker in the place of ours, to see what the invariants say to it."""

    broker_class: type[SimulatedBroker] = SimulatedBroker

    def __init__(self) -> None:
        self.settings = MqttSettings()
        self.brokers_of: dict[str, list[Broker]] = {}
        self.workloads_of: dict[str, list[Workload]] = {}
        self.ledger: Ledger | None = None
        self.log_ledger: LogLedger | None = None
        self._world: World | None = None
        self._brokers = 0
        self._clients = 0

    def build(self, world: World, scenario: Scenario) -> list[Invariant]:
        self.settings = _settings(scenario)
        self._world = world
        clients = expand_clients(scenario)
        durable: dict[tuple[str, int], bool] = {}
        for broker in expand_brokers(scenario):
            if (broker.host, broker.port) in durable:
                raise ConfigError(f"`brokers`: two brokers on {broker.host} at port {broker.port}", key="brokers")
            durable[broker.host, broker.port] = broker.durable
            self.brokers_of.setdefault(broker.host, []).append(broker)
        refuse_changing(clients)
        for client in clients:
            if (client.broker, client.port) not in durable:
                raise ConfigError(
                    f"`clients`: {client.name} connects to {client.broker} at port {client.port}, where no broker is",
                    key="clients",
                )
            self.workloads_of.setdefault(client.host, []).append(Workload(client, world.seed))
        self._brokers, self._clients = len(durable), len(clients)
        # Brokers first: then a client's first attempt finds one.
        names = [*self.brokers_of, *(name for name in self.workloads_of if name not in self.brokers_of)]
        for name in names:
            world.place(name, lambda host: MqttNode(host, self))
        self.ledger = Ledger(clients, durable, self._process, lambda: world.now)
        if not self.settings.topics:
            return [self.ledger]
        self.log_ledger = LogLedger(clients, durable, self.settings.topics, self._process)
        return [self.ledger, self.log_ledger]

    def add_programs(self, node: MqttNode) -> None:
        """What else runs on a host, beside brokers and clients; a subclass may have more."""

    def make_broker(self, host: Host, broker: Broker, node: MqttNode) -> SimulatedBroker:
        """A broker's process."""
        settings = self.settings
        topics = None
        if settings.topics:
            topics = SimulatedTopics(settings.topics, settings.segment_bytes, settings.max_topics)
        return self.broker_class(
            host,
            broker.port,
            broker.durable,
            settings.limits,
            settings.snapshot_bytes,
            settings.snapshot_step_bytes,
            node,
            topics,
        )

    def _process(self, host: str, port: int) -> SimulatedBroker | None:
        """The broker there, if its process runs."""
        if self._world is None:
            return None
        node = self._world.host(host).node
        return node.brokers.get(port) if isinstance(node, MqttNode) else None

    def report(self) -> dict[str, Any]:
        ledger = self.ledger
        if ledger is None:
            return {}
        latencies = sorted(ledger.latencies_s)
        kept = {} if self.log_ledger is None else self.log_ledger.figures()
        return {
            "brokers": self._brokers,
            "clients": self._clients,
            "published": ledger.published,
            "skipped": ledger.skipped,
            "refused": ledger.refused,
            "acknowledged": ledger.acknowledged,
            "expected": ledger.expected,
            "delivered": ledger.delivered,
            "pending": ledger.pending,
            "lost": ledger.lost,
            "duplicated": ledger.duplicated,
            "retained": ledger.retained,
            "latency_p50_ms": _quantile_ms(latencies, 0.50),
            "latency_p95_ms": _quantile_ms(latencies, 0.95),
            "latency_p99_ms": _quantile_ms(latencies, 0.99),
            "latency_max_ms": _quantile_ms(latencies, 1.0),
            **kept,
        }


def _settings(scenario: Scenario) -> MqttSettings:
    try:
        return msgspec.convert(scenario.settings, MqttSettings)
    except msgspec.ValidationError as error:
        raise ConfigError(f"`settings` of protocol mqtt: {error}", key="settings") from None


def _quantile_ms(ordered_s: list[float], share: float) -> float:
    """The latency that so large a share stays below or at; 0 without messages."""
    if not ordered_s:
        return 0.0
    return round(ordered_s[max(0, math.ceil(len(ordered_s) * share) - 1)] * 1000.0, 3)

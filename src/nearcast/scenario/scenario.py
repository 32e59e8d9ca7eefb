"""A whole scenario: topology, brokers, gateways, clients, events; what ``nearcast simulate`` and experiments run."""

from __future__ import annotations

from typing import Any

import msgspec

from nearcast.scenario.events import Event, RandomFaults
from nearcast.scenario.movement import Mobility
from nearcast.scenario.rules import require, require_name, require_range, require_seconds
from nearcast.scenario.topology import Topology
from nearcast.scenario.workload import Clients

MQTT_PROTOCOLS = ("mqtt", "fabric")
"""Those with MQTT brokers and clients: what the emulated WAN runs too."""


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Nearcast broker on a host. On the emulated WAN, a process of the topology on the same host whose ready check has the
    same port takes its place: Mosquitto, or a Nearcast with options of its own."""

    host: str
    """A host, or with a trailing ``*`` all that begin so."""

    port: int = 1883
    """Where it listens."""

    durable: bool = False
    """Keep a journal and flush it before acknowledging (``nearcast broker --data``)."""

    fabric: bool = False
    """Whether it is one of the brokers that are a fabric together. They know each other from the scenario's controller;
    without one, each is told of all the others."""

    link_port: int = 1884
    """Where other brokers and gateways link to it, if it is part of a fabric."""

    start_s: float = 0.0
    """When it starts, in seconds after the start of the scenario; 0 is before everything else."""

    stop_s: float | None = None
    """When it is asked to end, in seconds after the start: it hands its clients over first. Unset: it runs to the end."""

    def __post_init__(self) -> None:
        require_range(self.port, 1, 65_535, "port")
        require_range(self.link_port, 1, 65_535, "link_port")
        require(not self.fabric or self.link_port != self.port, "link_port", "must not be the same as `port`")
        _require_span(self.start_s, self.stop_s)

    @property
    def name(self) -> str:
        """What it is called in its fabric: its host, and where that has several brokers, the port with it."""
        return self.host if self.port == 1883 else f"{self.host}-{self.port}"


class Controller(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The controller of the scenario's fabric: brokers and gateways register with it, and it tells gateways where to move
    clients."""

    host: str
    """Where it runs."""

    port: int = 1885
    """Where brokers and gateways link to it."""

    http_port: int = 8885
    """Where its HTTP interface is."""

    interval_s: float = 15.0
    """How often it looks for better brokers for clients, and how old a measured path may get, in seconds."""

    ping_interval_ms: float = 250.0
    """Between two pings of a measurement, in milliseconds. Scaled-down runs shorten it with the rest."""

    settings: dict[str, Any] = {}
    """How it looks after owned topics: as in the section ``[controller]`` of its configuration file."""

    start_s: float = 0.0
    """When it starts, in seconds after the start of the scenario; 0 is before everything else."""

    stop_s: float | None = None
    """When it is asked to end; unset, it runs to the end."""

    def __post_init__(self) -> None:
        require_range(self.port, 1, 65_535, "port")
        require_range(self.http_port, 1, 65_535, "http_port")
        require(self.http_port != self.port, "http_port", "must not be the same as `port`")
        require_seconds(self.interval_s, "interval_s", zero=False)
        require_range(self.ping_interval_ms, 1, 60_000, "ping_interval_ms")
        _require_span(self.start_s, self.stop_s)


class Gateway(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gateway on a host: clients connect to it as to a broker, and it takes them to one, and on to better ones."""

    host: str
    """A host, or with a trailing ``*`` all that begin so."""

    port: int = 1883
    """Where it listens for clients."""

    controller: bool = True
    """Whether it asks the scenario's controller. If not, or without one, it knows the brokers of the fabric from the start and
    uses the nearest."""

    start_s: float = 0.0
    """When it starts, in seconds after the start of the scenario; 0 is before everything else."""

    stop_s: float | None = None
    """When it is asked to end; unset, it runs to the end."""

    def __post_init__(self) -> None:
        require_range(self.port, 1, 65_535, "port")
        _require_span(self.start_s, self.stop_s)

    @property
    def name(self) -> str:
        """What it is called in its fabric."""
        return f"gateway-{self.host}" if self.port == 1883 else f"gateway-{self.host}-{self.port}"


def _require_span(start_s: float, stop_s: float | None) -> None:
    require_seconds(start_s, "start_s")
    require_seconds(stop_s, "stop_s")
    require(stop_s is None or stop_s > start_s, "stop_s", "must be after `start_s`")


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs where, for how long, and what happens meanwhile."""

    name: str
    """What it is called in lists and reports; letters, digits, ``-`` and ``_``."""

    description: str = ""
    """What it shows."""

    topology: str | Topology
    """A topology itself, the name of a ready-made one, or a file, relative to this one."""

    protocol: str = "mqtt"
    """What the simulator runs: ``mqtt`` (brokers and clients below), ``fabric`` (gateways and the controller too), ``groups``
    (how brokers form broadcast groups, and nothing else), ``probes``, or ``package.module:Class`` of your own."""

    settings: dict[str, Any] = {}
    """Passed to the protocol."""

    duration_s: float = 60.0
    """How long clients publish, in seconds."""

    settle_s: float = 10.0
    """After ``duration_s`` clients stop publishing and the run goes on for so long, so that what is on its way arrives."""

    brokers: tuple[Broker, ...] = ()
    """Nearcast brokers, and where they run."""

    controller: Controller | None = None
    """The controller of the fabric that the brokers with ``fabric`` are."""

    gateways: tuple[Gateway, ...] = ()
    """Gateways in front of the fabric."""

    clients: tuple[Clients, ...] = ()
    """Who publishes and subscribes what."""

    events: tuple[Event, ...] = ()
    """What happens at known times."""

    mobility: tuple[Mobility, ...] = ()
    """How hosts move: at random, or as a trace says."""

    random_faults: RandomFaults | None = None
    """What happens at random times, drawn from the seed."""

    def __post_init__(self) -> None:
        require_name(self.name)
        require_seconds(self.duration_s, "duration_s", zero=False)
        require_seconds(self.settle_s, "settle_s")

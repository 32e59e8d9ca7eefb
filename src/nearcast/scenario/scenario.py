"""A whole scenario: topology, brokers, clients, events; what ``nearcast simulate`` and experiments run."""

from __future__ import annotations

from typing import Any

import msgspec

from nearcast.scenario.events import Event, RandomFaults
from nearcast.scenario.movement import Mobility
from nearcast.scenario.rules import require_name, require_range, require_seconds
from nearcast.scenario.topology import Topology
from nearcast.scenario.workload import Clients


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Nearcast broker on a host. On the emulated WAN, a process of the topology on the same host whose ready check has the
    same port takes its place: Mosquitto, or a Nearcast with options of its own."""

    host: str
    """A host, or with a trailing ``*`` all that begin so."""

    port: int = 1883
    """Where it listens."""

    durable: bool = False
    """Keep a journal and flush it before acknowledging (``nearcast broker --data``)."""

    def __post_init__(self) -> None:
        require_range(self.port, 1, 65_535, "port")


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs where, for how long, and what happens meanwhile."""

    name: str
    """What it is called in lists and reports; letters, digits, ``-`` and ``_``."""

    description: str = ""
    """What it shows."""

    topology: str | Topology
    """A topology itself, the name of a ready-made one, or a file, relative to this one."""

    protocol: str = "mqtt"
    """What the simulator runs: ``mqtt`` (brokers and clients below), ``probes``, or ``package.module:Class`` of your own."""

    settings: dict[str, Any] = {}
    """Passed to the protocol."""

    duration_s: float = 60.0
    """How long clients publish, in seconds."""

    settle_s: float = 10.0
    """After ``duration_s`` clients stop publishing and the run goes on for so long, so that what is on its way arrives."""

    brokers: tuple[Broker, ...] = ()
    """Nearcast brokers, and where they run."""

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

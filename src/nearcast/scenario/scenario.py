"""A whole scenario: topology, brokers, clients, events; what ``nearcast simulate`` and experiments run."""

from __future__ import annotations

from typing import Any

import msgspec

from nearcast.scenario.events import Event, RandomFaults
from nearcast.scenario.topology import Topology
from nearcast.scenario.workload import Clients


class Broker(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Nearcast broker on a host."""

    host: str
    """A host, or with a trailing ``*`` all that begin so."""

    port: int = 1883
    durable: bool = False
    """Keep a journal and flush it before acknowledging (``nearcast broker --data``)."""


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What runs where, for how long, and what happens meanwhile."""

    name: str
    description: str = ""
    topology: str | Topology
    """A topology itself, the name of a ready-made one, or a file, relative to this one."""

    protocol: str = "mqtt"
    """What the simulator runs: ``mqtt`` (brokers and clients below), ``probes``, or ``package.module:Class`` of your own."""

    settings: dict[str, Any] = {}
    """Passed to the protocol."""

    duration_s: float = 60.0
    settle_s: float = 10.0
    """After ``duration_s`` clients stop publishing and the run goes on for so long, so that what is on its way arrives."""

    brokers: tuple[Broker, ...] = ()
    clients: tuple[Clients, ...] = ()
    events: tuple[Event, ...] = ()
    random_faults: RandomFaults | None = None

"""Who publishes and subscribes what, as data; one vocabulary for simulated and real clients."""

from __future__ import annotations

import msgspec


class Publishing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One stream of messages of every client in a group."""

    topic: str
    """``{client}`` is the client's name, ``{index}`` its number in its group from 0, ``{host}`` its host."""

    rate_hz: float = 1.0
    """Messages per second, evenly spaced from a random first moment; with ``poisson``, that many on average."""

    poisson: bool = False
    payload_bytes: int = 100
    """Size of the payload, at least 32: it begins with the message's identity (:mod:`nearcast.scenario.identity`)."""

    qos: int = 0
    retain: bool = False


class Subscribing(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One subscription of every client in a group."""

    filter: str
    """Same placeholders as ``Publishing.topic``."""

    qos: int = 0


class Clients(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of alike MQTT clients on a host."""

    name: str
    """Unique; clients are called ``name`` or, with ``count`` above 1, ``name-1``, ``name-2``, ..."""

    host: str
    """A host, or with a trailing ``*`` all that begin so: then each gets such a group, and its name is ``name@host``."""

    broker: str
    """Host they connect to; with a trailing ``*``, the hosts that begin so in turn."""

    port: int = 1883
    count: int = 1
    publish: tuple[Publishing, ...] = ()
    subscribe: tuple[Subscribing, ...] = ()
    protocol: str = "5.0"
    """``"5.0"`` or ``"3.1.1"``."""

    clean_start: bool = True
    """False keeps the session over reconnects and restarts."""

    keepalive_s: int = 30
    start_s: float = 0.0
    """When they connect, in seconds after the start."""

    stop_s: float | None = None
    """When they stop publishing; None goes on until the scenario's end."""

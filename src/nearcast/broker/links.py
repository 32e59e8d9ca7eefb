"""The broker's part in a fabric: :class:`~nearcast.fabric.fabric.Fabric` wired to files, sockets, clock and log.

Whom to trust comes from the secret's file, who this broker is from the configuration; everything else is decided by the
fabric's machines.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from nearcast.config import LINK_KINDS, BrokerConfig
from nearcast.errors import ConfigError
from nearcast.fabric.fabric import Fabric
from nearcast.mqtt.access import Peer
from nearcast.serving.links import LinkSockets, LinkTransport, join_address, split_address
from nearcast.serving.secrets import read_secret

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

MQTT_KINDS = ("tcp", "tls", "ws", "wss")


class Links:
    """All links of a broker that is part of a fabric."""

    def __init__(self, broker: Broker, flush_engine: Callable[[], None]) -> None:
        config = broker.config
        settings = config.fabric
        if settings.secret_file is None:
            raise ConfigError("a broker of a fabric needs its secret: `nearcast secret FILE`", key="fabric.secret_file")
        self._broker = broker
        self._flush_engine = flush_engine
        for address in (*settings.peers, *((settings.controller,) if settings.controller else ())):
            split_address(address)
        now = broker.monotonic()
        rng = random.Random(secrets.randbits(128))
        self.fabric = Fabric(
            settings,
            config.limits,
            broker.engine,
            broker_name(config),
            rng.getrandbits(60),
            read_secret(settings.secret_file),
            b"",
            rng,
            now,
        )
        self.sockets = LinkSockets(self.fabric, settings, broker.monotonic, self.flush)

    def start(self, listeners: list[BoundListener]) -> None:
        """Everything is bound: say where this broker is reached, and begin to look for the others."""
        address = self._broker.config.fabric.advertise or advertised(listeners)
        self.fabric.greeting.facts = msgspec.msgpack.encode({"address": address, "site": self._broker.config.fabric.site})
        now = self._broker.monotonic()
        for peer in self._broker.config.fabric.peers:
            self.fabric.dial(peer, now)
        self.fabric.tick(now)
        self.flush()

    def transport_for(self, listener: BoundListener) -> LinkTransport:
        """A node connects to a link listener."""

        def peer_of(stream: asyncio.Transport) -> Peer | None:
            peer = listener.peer_of(stream)
            return peer if listener.admits(peer) else None

        return LinkTransport(self.sockets, "", peer_of)

    def flush(self) -> None:
        """What the broker does after every call into its machines."""
        self.fabric.settle(self._broker.monotonic())
        self._flush_engine()
        self.sockets.dial()

    def tick(self, now: float) -> None:
        """Time passed."""
        if self.fabric.next_deadline() <= now:
            self.fabric.tick(now)
            self.flush()

    def say_goodbye(self, reason: str) -> None:
        """Close every link, each once what was sent on it is out."""
        self.sockets.stop_dialling()
        for link in list(self.fabric.links):
            link.close(reason)


def broker_name(config: BrokerConfig) -> str:
    """What this broker is called: what was configured, or its machine and port."""
    if config.fabric.name is not None:
        return config.fabric.name
    port = next((listener.effective_port for listener in config.listeners if listener.kind in MQTT_KINDS), 0)
    if port:
        return f"{socket.gethostname()}:{port}"
    if config.persistence.directory is not None:
        message = "a broker with a data directory and no fixed port needs a name that stays the same: --name"
        raise ConfigError(message, key="fabric.name")
    return f"{socket.gethostname()}:{secrets.token_hex(4)}"


def advertised(listeners: list[BoundListener]) -> str:
    """Where other nodes reach this broker, as far as its listeners tell; empty when nowhere."""
    for listener in listeners:
        if listener.config.kind in LINK_KINDS:
            host = listener.config.host
            if host in ("0.0.0.0", "::", ""):  # noqa: S104  # nothing is bound here
                host = socket.gethostname()
            return join_address(host, listener.port)
    return ""

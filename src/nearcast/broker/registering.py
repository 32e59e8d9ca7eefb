"""A broker's registration with the controller, on real sockets: the machine is
:class:`~nearcast.fabric.control.Registration`, its link is one of the fabric's, and here are its datagrams.

Probes are answered on UDP, on the same address and, where it is free, the same port as links.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from nearcast import __version__
from nearcast.config import LINK_KINDS
from nearcast.errors import ConfigError
from nearcast.fabric.broker_node import BrokerNode
from nearcast.fabric.control import Node, Registration
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import CONTROLLER
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.serving.links import join_address, split_address
from nearcast.serving.monitoring import MonitoringSockets, bind_udp

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

MQTT_KINDS = ("tcp", "tls", "ws", "wss")


class Registering:
    """The broker as a member. Without a controller there is none of this."""

    def __init__(self, broker: Broker, fabric: Fabric, secret: bytes, flush: Callable[[], None]) -> None:
        self._broker = broker
        self._fabric = fabric
        self._flush = flush
        self._listeners: list[BoundListener] = []
        self._sockets: MonitoringSockets | None = None
        # Ids of probes and orders must not be guessed.
        self.monitor = Monitor(fabric.name, secret, random.SystemRandom(), MonitorSettings(), standing=False)
        durable = broker.config.persistence.directory is not None
        self.node = BrokerNode(fabric, self._describe, durable=durable)
        self.registration = Registration(self.node, self.monitor)
        fabric.users[CONTROLLER] = self.registration

    def start(self, listeners: list[BoundListener]) -> None:
        """Links are listened for by now: answer probes beside them."""
        self._listeners = listeners
        link = next((listener for listener in listeners if listener.config.kind in LINK_KINDS), None)
        host, port = ("127.0.0.1", 0) if link is None else (link.config.host, link.port)
        try:
            sockets = bind_udp(host, port, "listeners")
        except ConfigError:
            # Another program has this port on UDP. Nodes are told which one it is, so any will do.
            sockets = bind_udp(host, 0, "listeners")
        self._sockets = MonitoringSockets(self.monitor, sockets, self._broker.monotonic, self._flush)
        self._sockets.start()

    def send(self) -> None:
        """Send datagrams; called after every flush."""
        if self._sockets is not None:
            self._sockets.send()

    def close(self) -> None:
        """Answer no more."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None

    def health(self) -> dict[str, object]:
        """What /healthz shows."""
        return {
            "address": self._broker.config.fabric.controller,
            "up": self.registration.up,
            "name": self.registration.controller or None,
            "draining": self.node.is_draining,
            "topic_classes": self.node.classes_fault or "ok",
        }

    def _describe(self) -> Node:
        settings = self._broker.config.fabric
        link = next((listener for listener in self._listeners if listener.config.kind in LINK_KINDS), None)
        mqtt = next((listener for listener in self._listeners if listener.config.kind in MQTT_KINDS), None)
        address = settings.advertise or ("" if link is None else join_address(link.config.host, link.port))
        # Whoever says where links reach it means probes as well.
        host = split_address(settings.advertise)[0] if settings.advertise else "" if link is None else link.config.host
        return Node(
            name=self._fabric.name,
            role="broker",
            epoch=self._fabric.epoch,
            link=address,
            monitoring=join_address(host, self._sockets.port) if self._sockets is not None else "",
            mqtt="" if mqtt is None else mqtt.address,
            site=settings.site,
            version=__version__,
            classes=self.node.class_rules(),
            draining=self.node.is_draining,
        )

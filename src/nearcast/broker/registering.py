"""A broker's registration with the controller: the machine is :class:`~nearcast.fabric.control.Registration`, its link is one
of the fabric's, and its datagrams are those of :mod:`nearcast.broker.probing`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nearcast import __version__
from nearcast.broker.rule_file import RuleFile
from nearcast.config import LINK_KINDS
from nearcast.fabric.broker_node import BrokerNode
from nearcast.fabric.control import Node, Registration
from nearcast.fabric.fabric import Fabric
from nearcast.fabric.links import CONTROLLER
from nearcast.serving.links import join_address

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.probing import Probing
    from nearcast.broker.process import Broker

MQTT_KINDS = ("tcp", "tls", "ws", "wss")


class Registering:
    """The broker as a member. Without a controller there is none of this."""

    def __init__(self, broker: Broker, fabric: Fabric, probing: Probing) -> None:
        self._broker = broker
        self._fabric = fabric
        self._probing = probing
        self._listeners: list[BoundListener] = []
        durable = broker.config.persistence.directory is not None
        self.node = BrokerNode(fabric, self._describe, durable=durable)
        self.registration = Registration(self.node, probing.monitor)
        self.registration.gossip = probing.gossip
        fabric.users[CONTROLLER] = self.registration

    def restore(self, now: float) -> None:
        """The journal was read: begin with the rules that were in use last."""
        directory = self._broker.config.persistence.directory
        if directory is None:
            return
        file = RuleFile(Path(directory))
        rules = file.load()
        if rules is not None:
            self.node.classes(rules, now)
        self.node.on_rules = file.save

    def start(self, listeners: list[BoundListener]) -> None:
        """Everything is bound: where this broker is reached can be said."""
        self._listeners = listeners

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
        return Node(
            name=self._fabric.name,
            role="broker",
            epoch=self._fabric.epoch,
            link=address,
            monitoring=self._probing.address(address),
            mqtt="" if mqtt is None else mqtt.address,
            site=settings.site,
            version=__version__,
            classes=self.node.class_rules(),
            draining=self.node.is_draining,
        )

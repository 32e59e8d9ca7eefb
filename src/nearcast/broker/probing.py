"""A broker's probes on real sockets: it answers those of other nodes, and sends those of its machines.

Whoever measures paths to a broker or from it needs this: the controller and gateways, and other brokers that form groups with
it. Probes are answered on UDP, on the same address and, where it is free, the same port as links.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

from nearcast.config import LINK_KINDS
from nearcast.errors import ConfigError
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.serving.monitoring import MonitoringSockets, bind_udp

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener


class Probing:
    """The monitor of a broker and its UDP sockets."""

    def __init__(self, name: str, secret: bytes, monotonic: Callable[[], float], flush: Callable[[], None]) -> None:
        self._monotonic = monotonic
        self._flush = flush
        self._sockets: MonitoringSockets | None = None
        # Ids of probes and orders must not be guessed.
        self.monitor = Monitor(name, secret, random.SystemRandom(), MonitorSettings(), standing=False)

    @property
    def port(self) -> int:
        """Where probes are answered; 0 before :meth:`start` and after :meth:`close`."""
        return 0 if self._sockets is None else self._sockets.port

    def address(self, link_address: str) -> str:
        """``host:port`` for probes of a broker whose links are reached at ``link_address``: the same host, none if that has
        none."""
        return f"{link_address.rpartition(':')[0]}:{self.port}"

    def start(self, listeners: list[BoundListener]) -> None:
        """Links are listened for by now: answer probes beside them."""
        link = next((listener for listener in listeners if listener.config.kind in LINK_KINDS), None)
        host, port = ("127.0.0.1", 0) if link is None else (link.config.host, link.port)
        try:
            sockets = bind_udp(host, port, "listeners")
        except ConfigError:
            # Another program has this port on UDP. Nodes are told which one it is, so any will do.
            sockets = bind_udp(host, 0, "listeners")
        self._sockets = MonitoringSockets(self.monitor, sockets, self._monotonic, self._flush)
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

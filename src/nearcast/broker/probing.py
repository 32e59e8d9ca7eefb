"""A broker's probes on real sockets: it answers those of other nodes, and sends those of its machines.

Whoever measures paths to a broker or from it needs this: the controller and gateways, other brokers that form groups with it,
and all of them for their coordinates. Probes are answered on UDP, on the same address and, where it is free, the same port as
links. A broker with a data directory keeps its coordinate there, so that it knows where it is after a restart.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from nearcast.config import LINK_KINDS
from nearcast.errors import ConfigError
from nearcast.membership.gossip import Gossip, GossipSettings
from nearcast.membership.monitoring import Monitor, MonitorSettings
from nearcast.serving import logs
from nearcast.serving.monitoring import MonitoringSockets, bind_udp

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener


ANY_HOST = ("", "0.0.0.0", "::", "[::]")  # noqa: S104  # nothing is bound here
COORDINATE_FILE = "coordinate.json"
SAVE_SECONDS = 60.0


class Probing:
    """The monitor of a broker, its gossip, and their UDP sockets. ``wall_s``: the wall clock at the start."""

    def __init__(
        self, name: str, secret: bytes, monotonic: Callable[[], float], flush: Callable[[], None], wall_s: float
    ) -> None:
        self._monotonic = monotonic
        self._flush = flush
        self._sockets: MonitoringSockets | None = None
        # Ids of probes and orders must not be guessed.
        self.monitor = Monitor(name, secret, random.SystemRandom(), MonitorSettings(), standing=False)
        now = monotonic()
        self.gossip = Gossip(name, "", secret, GossipSettings(), random.SystemRandom(), now, life=int(wall_s * 1e6))
        self._file: Path | None = None
        self._save_at = now + SAVE_SECONDS

    @property
    def port(self) -> int:
        """Where probes are answered; 0 before :meth:`start` and after :meth:`close`."""
        return 0 if self._sockets is None else self._sockets.port

    def address(self, link_address: str) -> str:
        """``host:port`` for probes of a broker whose links are reached at ``link_address``: the same host, none if that has
        none."""
        return f"{link_address.rpartition(':')[0]}:{self.port}"

    def keep_in(self, directory: Path) -> None:
        """Begin where the broker was when it stopped, and keep in this directory where it is."""
        self._file = directory / COORDINATE_FILE
        try:
            saved = self._file.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            logs.event(logging.WARNING, "the saved coordinate cannot be read", path=str(self._file), reason=error.strerror)
            return
        if not self.gossip.restore(saved):
            logs.event(logging.WARNING, "the saved coordinate is of no use; a new one is learned", path=str(self._file))

    def _save(self) -> None:
        if self._file is None:
            return
        # Neither flushed nor locked: without the file a broker only takes half a minute to find its place again.
        written = self._file.with_suffix(".new")
        try:
            written.write_bytes(self.gossip.save())
            os.replace(written, self._file)
        except OSError as error:
            logs.event(logging.WARNING, "the coordinate cannot be saved", path=str(self._file), reason=error.strerror)

    def start(self, listeners: list[BoundListener], link_address: str) -> None:
        """Links are listened for by now, and reached at ``link_address``: answer probes beside them."""
        link = next((listener for listener in listeners if listener.config.kind in LINK_KINDS), None)
        host, port = ("127.0.0.1", 0) if link is None else (link.config.host, link.port)
        try:
            sockets = bind_udp(host, port, "listeners")
        except ConfigError:
            # Another program has this port on UDP. Nodes are told which one it is, so any will do.
            sockets = bind_udp(host, 0, "listeners")
        self._sockets = MonitoringSockets(self.monitor, sockets, self._monotonic, self._flush, self.gossip)
        self._sockets.start()
        known = link_address.rpartition(":")[0] not in ANY_HOST
        self.gossip.address = self.address(link_address) if known else f":{self.port}"

    def tick(self, now: float) -> None:
        """Time passed."""
        if self._sockets is None:
            return
        if self.gossip.next_deadline() <= now:
            # What the broker did since it looked at the clock is no part of a path.
            self.gossip.tick(self._monotonic())
            self._sockets.send()
        if self._save_at <= now:
            self._save_at = now + SAVE_SECONDS
            self._save()

    def send(self) -> None:
        """Send datagrams; called after every flush."""
        if self._sockets is not None:
            self._sockets.send()

    def gauges(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        return {
            "coordinate_error": (self.gossip.coordinate.error, "Relative error of this broker's coordinate, as it thinks."),
            "gossip_members": (len(self.gossip.members()), "Nodes that probes tell of, this one not included."),
        }

    def counters(self) -> dict[str, tuple[float, str]]:
        """Figures for /metrics."""
        gossip = self.gossip
        return {
            "coordinate_samples": (gossip.vivaldi.samples, "Round trips that the coordinate was learned from."),
            "coordinate_samples_refused": (gossip.vivaldi.refused, "Round trips or coordinates that made no sense."),
            "gossip_packets_sent": (gossip.packets_sent, "Probes and answers sent."),
            "gossip_packets_ignored": (gossip.ignored, "Probes and answers that were repeated, not asked for or not ours."),
            "gossip_unanswered": (gossip.unanswered, "Probes that nobody answered."),
        }

    def close(self) -> None:
        """Answer no more."""
        if self._sockets is not None:
            self._sockets.close()
            self._sockets = None
            self._save()

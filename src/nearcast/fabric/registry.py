"""Who registered at a controller and what is known of each: the network graph. Decides nothing."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from nearcast.fabric.control import ClientFacts, LinkFacts, Measurement, Member, Node, Report
from nearcast.fabric.links import Link

NodeState = Literal["up", "suspect", "down", "left"]

#: Hosts that stand for every interface of a machine, and so for none that others could use.
ANY_HOST: Final = ("", "0.0.0.0", "::", "[::]", "*")  # noqa: S104

STALE_AFTER_S: Final = 90.0
"""A measurement that was not repeated for so long counts as unknown."""


def reachable(address: str, seen_host: str) -> str:
    """An address (``host:port``, or a URL) that others can use: where its host stands for every interface, the one the node
    is seen to come from."""
    scheme, separator, rest = address.rpartition("://")
    place, slash, path = rest.partition("/")
    host, colon, port = place.rpartition(":")
    if not colon or host not in ANY_HOST:
        return address
    known = f"[{seen_host}]" if ":" in seen_host else seen_host
    return f"{scheme}{separator}{known}:{port}{slash}{path}"


class Measured(msgspec.Struct):
    """A measurement and when it came."""

    quality: Measurement
    at: float


class Entry:
    """One node. ``state``: there; not sure; found dead; left by its own word. ``home`` is the broker a gateway uses."""

    def __init__(self, node: Node, now: float) -> None:
        self.node = node
        self.state: NodeState = "up"
        self.link: Link | None = None
        self.registered_at = now
        self.changed_at = now
        self.report = Report()
        self.report_at = 0.0
        self.home = ""
        self.ranking: tuple[str, ...] = ()
        self.ranked_for: tuple[object, ...] = ()
        """What the ranking was made of: it is made again only when that changed."""
        self.measurements_taken = 0
        self.held_until = 0.0
        """Until when the automatic reconfiguration leaves this gateway where somebody put it by hand."""
        self.failed_moves = 0
        self.rest_until = 0.0
        """A gateway whose moves fail is left alone for a while, longer each time."""
        self.draining = False
        self.drain_clients_per_second = 0.0
        self.leaving = False
        self.for_good = False
        self.clients: dict[str, ClientFacts] = {}
        self.measured: dict[str, Measured] = {}
        self.links: dict[str, LinkFacts] = {}
        self.rates: dict[str, float] = {}

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def is_broker(self) -> bool:
        return self.node.role == "broker"

    @property
    def shunned(self) -> bool:
        """Whether no client should be sent there."""
        return self.draining or self.leaving

    @property
    def usable(self) -> bool:
        """Whether it is a member: being unsure is no reason to move anybody."""
        return self.state in ("up", "suspect")

    def member(self) -> Member:
        """The broker as others are told of it."""
        node = self.node
        return Member(
            name=node.name,
            link=node.link,
            monitoring=node.monitoring,
            mqtt=node.mqtt,
            site=node.site,
            epoch=node.epoch,
            draining=self.shunned,
        )

    def latency_ms(self, now: float) -> dict[str, float]:
        """Round-trip times to brokers, as far as they are known and fresh."""
        return {
            name: measured.quality.latency_ms
            for name, measured in self.measured.items()
            if measured.quality.loss < 1.0 and now - measured.at < STALE_AFTER_S
        }

    def take_report(self, report: Report, now: float) -> bool:
        """Remember what a node reported; returns whether a broker was measured that was unknown (or dead) before."""
        elapsed = now - self.report_at
        if self.report_at and elapsed > 0.0:
            before = self.report.figures
            self.rates = {
                name: max(0.0, value - before[name]) / elapsed for name, value in report.figures.items() if name in before
            }
        if report.clients_whole:
            self.clients.clear()
        for client in report.clients_gone:
            self.clients.pop(client, None)
        for facts in report.clients:
            self.clients[facts.client] = facts
        news = False
        self.measurements_taken += len(report.measurements)
        for measurement in report.measurements:
            known = self.measured.get(measurement.target)
            news = news or known is None or (known.quality.loss >= 1.0) != (measurement.loss >= 1.0)
            self.measured[measurement.target] = Measured(measurement, now)
        self.links = {facts.name: facts for facts in report.links}
        # A gateway that nobody told anything uses what it found; where its clients are is its home then.
        used = max(report.brokers, key=report.brokers.__getitem__) if report.brokers else self.home
        self.home = report.home or used
        self.report = report
        self.report_at = now
        report.clients = []
        report.clients_gone = []
        report.measurements = []
        return news

    def freshen(self, now: float) -> None:
        """A node reports only measurements that changed; while it reports at all, the others hold."""
        for measured in self.measured.values():
            measured.at = now

"""A gateway in the eyes of the controller: what it registers with and reports, and what it makes of the controller's word."""

from __future__ import annotations

from collections.abc import Callable

from nearcast.fabric.choosing import UNKNOWN_MS
from nearcast.fabric.control import (
    MAX_CLIENTS_PER_REPORT,
    Assignment,
    ClientFacts,
    Departure,
    Measurement,
    Member,
    Node,
    Outcome,
    Registrant,
    Report,
)
from nearcast.fabric.gateway import Gateway
from nearcast.fabric.tunnels import Tunnel


class GatewayNode(Registrant):
    """See the module. ``describe`` says what to register with; ``wall_offset`` turns the machine's time into wall clock."""

    def __init__(self, gateway: Gateway, describe: Callable[[], Node], wall_offset: float) -> None:
        self._gateway = gateway
        self._describe = describe
        self._wall_offset = wall_offset
        self._reported: dict[str, ClientFacts] = {}
        self._whole = True
        self._seen = (0, 0, 0)

    def node(self) -> Node:
        return self._describe()

    def has_news(self) -> bool:
        return self._seen != self._coming_and_going()

    def _coming_and_going(self) -> tuple[int, int, int]:
        """Figures of which one changes when a client comes or goes, or is saved from a broker that was lost."""
        gateway = self._gateway
        return gateway.stats.opened, len(gateway.tunnels), gateway.stats.resumed

    def registered(self, controller: str, now: float) -> None:
        self._reported.clear()
        self._whole = True

    def members(self, changed: tuple[Member, ...], gone: tuple[Departure, ...], now: float) -> None:
        choice = self._gateway.choice
        for member in changed:
            before = choice.named(member.name)
            if before is not None and before.address != member.link and member.link:
                choice.remove(member.name)
            if member.link:
                choice.add(member.link, member.name).draining = member.draining
        for departure in gone:
            # One that only does not answer may be there for us: its own link says whether it is.
            if departure.left:
                address = choice.remove(departure.name)
                if address:
                    self._gateway.hub.forget_address(address)
        self._gateway.connect(now)

    def measured(self, measurement: Measurement, now: float) -> None:
        known = self._gateway.choice.named(measurement.target)
        if known is not None:
            known.latency_ms = measurement.latency_ms if measurement.loss < 1 else UNKNOWN_MS

    def assigned(self, assignment: Assignment, now: float) -> None:
        gateway = self._gateway
        if assignment.home:
            ranking = list(assignment.ranking) or gateway.choice.ranking
            gateway.assign(assignment.home, ranking, now)
        for order in assignment.moves:
            gateway.move(order.target, now, order.client, order.origin, order.number, order.clients_per_second)

    def report(self, now: float) -> Report:
        gateway = self._gateway
        self._seen = self._coming_and_going()
        brokers: dict[str, int] = {}
        present: dict[str, ClientFacts] = {}
        for tunnel in gateway.tunnels:
            upstream = tunnel.upstream
            mirror = tunnel.mirror
            if upstream is None or mirror is None or not mirror.connected:
                continue
            brokers[upstream.broker] = brokers.get(upstream.broker, 0) + 1
            present[mirror.client_id] = self._facts(tunnel)
        changed = [facts for client, facts in present.items() if self._reported.get(client) != facts]
        changed = changed[:MAX_CLIENTS_PER_REPORT]
        gone = [client for client in self._reported if client not in present]
        for facts in changed:
            self._reported[facts.client] = facts
        for client in gone:
            del self._reported[client]
        whole, self._whole = self._whole, False
        outcomes = [
            Outcome(order.number, order.moved, order.failed, order.reason, order.longest_gap_ms)
            for order in gateway.moves.take_finished()
            if order.number
        ]
        return Report(
            home=gateway.choice.home,
            connections=len(present),
            brokers=brokers,
            figures=self.figures(),
            clients=changed,
            clients_gone=gone,
            clients_whole=whole,
            outcomes=outcomes,
        )

    def _facts(self, tunnel: Tunnel) -> ClientFacts:
        mirror = tunnel.mirror
        upstream = tunnel.upstream
        return ClientFacts(
            client=tunnel.client_id,
            broker="" if upstream is None else upstream.broker,
            since=round(tunnel.opened_at + self._wall_offset, 3),
            username=None if mirror is None else mirror.username,
        )

    def figures(self) -> dict[str, float]:
        """Counters since the start."""
        gateway = self._gateway
        stats = gateway.stats
        totals = gateway.totals()
        return {
            "messages_received": totals[0],
            "messages_sent": totals[1],
            "bytes_received": stats.bytes_in,
            "bytes_sent": totals[2],
            "clients_moved": gateway.moves.moved,
            "moves_failed": gateway.moves.failed,
            "clients_resumed": stats.resumed,
            "brokers_lost": stats.brokers_lost,
        }

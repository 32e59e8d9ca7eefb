"""/metrics and /healthz of a gateway: a small ASGI application, which :mod:`nearcast.serving.http` serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import msgspec
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nearcast import __version__
from nearcast.fabric import tunnels

if TYPE_CHECKING:
    from nearcast.gateway.process import GatewayProcess

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class GatewayCollector(Collector):
    """Reads one gateway's counters when it is scraped."""

    def __init__(self, process: GatewayProcess) -> None:
        self._process = process

    def collect(self) -> Iterator[Metric]:
        process = self._process
        machine = process.machine
        stats = machine.stats
        yield InfoMetricFamily(
            "nearcast_gateway", "The running gateway.", value={"version": __version__, "name": process.name}
        )
        gauges = {
            "clients": (len(process.clients), "Transports of clients that are open."),
            "clients_waiting": (machine.count(tunnels.WAITING), "Clients that wait for a broker."),
            "clients_resuming": (machine.count(tunnels.RESUMING), "Clients whose next broker has not taken over yet."),
            "clients_stalled": (len(process.stalled), "Clients that are slow to take their output."),
            "moves_under_way": (len(machine.moves.under_way), "Clients that are on their way to another broker."),
            "longest_move_gap_milliseconds": (machine.moves.longest_gap_ms, "Longest time a moved client was not served."),
        }
        for name, (value, help_text) in gauges.items():
            yield GaugeMetricFamily(f"nearcast_gateway_{name}", help_text, value=value)
        messages_in, messages_out, bytes_out = machine.totals()
        counters = {
            "clients_opened": (stats.opened, "Transports accepted."),
            "clients_refused": (stats.refused, "Clients turned away by the gateway itself."),
            "clients_resumed": (stats.resumed, "Clients that went on at another broker when theirs was lost."),
            "clients_not_resumed": (stats.resume_failed, "Clients that could not go on when their broker was lost."),
            "brokers_lost": (stats.brokers_lost, "Links to brokers that broke."),
            "moves": (machine.moves.moved, "Clients moved to another broker."),
            "moves_failed": (machine.moves.failed, "Moves that did not come about."),
            "moves_taken_back": (machine.moves.taken_back, "Moves after which the old broker has the client again."),
            "bytes_received": (stats.bytes_in, "Bytes received from clients."),
            "bytes_sent": (bytes_out, "Bytes sent to clients."),
            "messages_received": (messages_in, "PUBLISH packets from clients."),
            "messages_sent": (messages_out, "PUBLISH packets to clients."),
        }
        for name, (value, help_text) in counters.items():
            yield CounterMetricFamily(f"nearcast_gateway_{name}", help_text, value=value)
        clients = GaugeMetricFamily("nearcast_gateway_broker_clients", "Clients by broker.", labels=["broker"])
        rtts = GaugeMetricFamily(
            "nearcast_gateway_broker_rtt_milliseconds", "Round-trip time on the link to a broker.", labels=["broker"]
        )
        for line in machine.lines.values():
            clients.add_metric([line.name], len(line.channels))
            rtts.add_metric([line.name], line.link.rtt_ms)
        yield clients
        yield rtts


class ObservabilityApp:
    """The ASGI application."""

    def __init__(self, process: GatewayProcess) -> None:
        self._process = process
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(GatewayCollector(process))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = self._answer(scope["method"], scope["path"])
        headers = [(b"content-type", content_type.encode("ascii")), (b"content-length", str(len(body)).encode("ascii"))]
        headers.append((b"cache-control", b"no-store"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        if path not in ("/metrics", "/healthz"):
            return 404, "text/plain", b"there is /metrics and /healthz\n"
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE, generate_latest(self._registry)
        health = self._process.health()
        return (200 if health["ok"] else 503), "application/json", msgspec.json.encode(health)

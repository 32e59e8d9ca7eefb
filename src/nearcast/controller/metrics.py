"""The controller's figures for Prometheus."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from nearcast.fabric.controlling import Controller

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _ControllerCollector(Collector):
    def __init__(self, controller: Controller) -> None:
        self._controller = controller

    def collect(self) -> Iterator[Metric]:
        controller = self._controller
        nodes = GaugeMetricFamily("nearcast_controller_nodes", "Nodes known, by role and state.", labels=["role", "state"])
        counts: dict[tuple[str, str], int] = {}
        for entry in controller.entries.values():
            place = (entry.node.role, entry.state)
            counts[place] = counts.get(place, 0) + 1
        for (role, state), count in sorted(counts.items()):
            nodes.add_metric([role, state], count)
        yield nodes
        yield GaugeMetricFamily(
            "nearcast_controller_pending_moves", "Moves waiting or under way.", len(controller.moves.pending)
        )
        moves = CounterMetricFamily("nearcast_controller_moves", "Moves that ended, by how.", labels=["state"])
        for state, count in sorted(controller.moves.counts.items()):
            moves.add_metric([state], count)
        yield moves
        yield CounterMetricFamily(
            "nearcast_controller_reconfigurations", "Looks at the whole network.", controller.reconfigurations
        )
        yield CounterMetricFamily("nearcast_controller_reports", "Reports of nodes.", controller.reports)
        topics = controller.topics
        yield GaugeMetricFamily("nearcast_controller_owned_topics", "Topics that have an owner.", len(topics.directory))
        yield GaugeMetricFamily(
            "nearcast_controller_pending_migrations", "Migrations waiting or under way.", len(topics.migrations.pending)
        )
        migrations = CounterMetricFamily(
            "nearcast_controller_migrations", "Migrations of topics that ended, by how.", labels=["state"]
        )
        for state, count in sorted(topics.migrations.counts.items()):
            migrations.add_metric([state], count)
        yield migrations
        for name, text, number in (
            ("plans", "Plans made here.", topics.plans),
            ("plans_taken", "Plans of others that were carried out.", topics.plans_taken),
            ("plans_refused", "Plans of others that were not.", topics.plans_refused),
            ("failovers", "Topics whose owner died.", topics.desk.appointed),
            ("telemetry_rounds", "Rounds of reports on topics.", topics.telemetry.rounds),
            ("telemetry_bytes", "Bytes of reports.", topics.telemetry.bytes_received),
            ("telemetry_refused", "Reports that could not be read.", topics.telemetry.refused),
        ):
            yield CounterMetricFamily(f"nearcast_controller_{name}", text, number)
        monitor = controller.monitor
        for name, value in (
            ("sent_packets", monitor.packets_sent),
            ("sent_bytes", monitor.bytes_sent),
            ("received_packets", monitor.packets_received),
            ("received_bytes", monitor.bytes_received),
            ("ignored_packets", monitor.ignored),
        ):
            yield CounterMetricFamily(f"nearcast_monitoring_{name}", "Monitoring over UDP, without headers.", value)


def render(controller: Controller) -> bytes:
    """All figures, as text."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_ControllerCollector(controller))
    return generate_latest(registry)

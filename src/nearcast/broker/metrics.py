"""The engine's counters as Prometheus metrics. Read when scraped; nothing here is on the path of a message."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from nearcast import __version__
from nearcast.broker.rates import Rates
from nearcast.broker.sys_topics import packets_received
from nearcast.mqtt.effects import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_GAUGES = {
    "connections": "Transports that are open, with or without a CONNECT.",
    "connected_clients": "Clients that are connected.",
    "sessions": "Sessions kept, connected or not.",
    "retained_messages": "Retained messages kept.",
    "retained_bytes": "Bytes of retained messages.",
    "queued_messages": "QoS 1 and 2 messages waiting in sessions.",
    "queued_bytes": "Bytes of waiting messages.",
    "inflight_messages": "QoS 1 and 2 messages sent and not yet acknowledged.",
}
_COUNTERS = {
    "connections_opened": "Transports accepted.",
    "connects_accepted": "CONNECT packets accepted.",
    "connects_refused": "CONNECT packets refused.",
    "protocol_errors": "Connections ended because the client broke the protocol.",
    "keep_alive_timeouts": "Connections ended because the client was silent for too long.",
    "takeovers": "Connections ended because the same client identifier connected again.",
    "sessions_expired": "Sessions that ended because their expiry interval passed.",
    "bytes_received": "Bytes received from clients.",
    "bytes_sent": "Bytes sent to clients.",
    "publish_bytes_received": "Bytes of PUBLISH packets received.",
    "publish_bytes_sent": "Bytes of PUBLISH packets sent.",
    "unmatched": "Messages that no subscription wanted.",
    "not_retained": "Messages that were to be retained and found no room.",
    "not_kept": "Messages of topics that the log was to keep and had no room for.",
    "wills_published": "Will messages published.",
    "resent": "PUBLISH packets sent again after a reconnect.",
}
_DROPPED = ("slow_consumer", "queue_full", "expired", "too_large", "not_authorized")


class BrokerCollector(Collector):
    """Reads one broker's counters. ``gauges`` and ``counters`` give what the driver itself knows, by name;
    ``by_broker`` what it knows of other brokers of the fabric."""

    def __init__(
        self,
        stats: Stats,
        rates: Rates,
        gauges: Callable[[], dict[str, tuple[float, str]]],
        counters: Callable[[], dict[str, tuple[float, str]]] = dict,
        by_broker: Callable[[], dict[str, tuple[str, dict[str, float]]]] = dict,
    ) -> None:
        self._stats = stats
        self._rates = rates
        self._gauges = gauges
        self._counters = counters
        self._by_broker = by_broker

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        yield InfoMetricFamily("nearcast_broker", "The running broker.", value={"version": __version__})
        for name, help_text in _GAUGES.items():
            yield GaugeMetricFamily(f"nearcast_{name}", help_text, value=getattr(stats, name))
        for name, help_text in _COUNTERS.items():
            yield CounterMetricFamily(f"nearcast_{name}", help_text, value=getattr(stats, name))
        help_text = "MQTT packets of any type received, PUBLISH included."
        yield CounterMetricFamily("nearcast_packets_received", help_text, value=packets_received(stats))
        for name, help_text, by_qos in (
            ("messages_received", "PUBLISH packets received, by QoS.", stats.publishes_received),
            ("messages_sent", "PUBLISH packets sent, by QoS, without those sent again.", stats.publishes_sent),
        ):
            family = CounterMetricFamily(f"nearcast_{name}", help_text, labels=["qos"])
            for qos, count in enumerate(by_qos):
                family.add_metric([str(qos)], count)
            yield family
        family = CounterMetricFamily("nearcast_messages_dropped", "Messages a receiver did not get.", labels=["reason"])
        for reason in _DROPPED:
            family.add_metric([reason], getattr(stats, f"dropped_{reason}"))
        yield family
        for name, (value, help_text) in self._gauges().items():
            yield GaugeMetricFamily(f"nearcast_{name}", help_text, value=value)
        for name, (value, help_text) in self._counters().items():
            yield CounterMetricFamily(f"nearcast_{name}", help_text, value=value)
        for name, (help_text, values) in self._by_broker().items():
            labelled = GaugeMetricFamily(f"nearcast_{name}", help_text, labels=["broker"])
            for broker, value in values.items():
                labelled.add_metric([broker], value)
            yield labelled
        yield from self._busiest()

    def _busiest(self) -> Iterator[Metric]:
        rates = self._rates
        help_text = "Messages per second into the broker, for the busiest topics."
        topics = GaugeMetricFamily("nearcast_topic_messages_per_second", help_text, labels=["topic"])
        for topic in rates.topics:
            topics.add_metric([topic.topic], topic.messages_per_second)
        yield topics
        help_text = "Messages per second of the busiest clients."
        clients = GaugeMetricFamily("nearcast_client_messages_per_second", help_text, labels=["client", "direction"])
        for client in rates.clients:
            clients.add_metric([client.client, "in"], client.messages_in_per_second)
            clients.add_metric([client.client, "out"], client.messages_out_per_second)
        yield clients


class Metrics:
    """A registry of this broker alone, with the process's own figures."""

    def __init__(self, collector: BrokerCollector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self) -> bytes:
        return generate_latest(self._registry)

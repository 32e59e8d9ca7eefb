"""Rates, metrics, /healthz and $SYS: bounded, and true to the engine's counters."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from nearcast.broker.http import ObservabilityApp
from nearcast.broker.metrics import BrokerCollector, Metrics
from nearcast.broker.process import Broker
from nearcast.broker.rates import Rates
from nearcast.broker.sys_topics import LoadAverage, SysTopics, counters
from nearcast.config import BrokerConfig, Observability
from nearcast.mqtt.effects import Stats
from nearcast.mqtt.packets import Connect, Publish, Subscribe, SubscriptionRequest
from tests.unit.broker.fakes import attach, feed, in_loop


def test_topic_rates_are_differences_of_the_busiest() -> None:
    rates = Rates(2)
    rates.sample_topics([("a", 10, 100), ("b", 5, 50), ("c", 1, 10)], 1.0)
    assert [(rate.topic, rate.messages_per_second) for rate in rates.topics] == [("a", 10.0), ("b", 5.0)]
    rates.sample_topics([("a", 10, 100), ("b", 7, 70), ("c", 41, 410)], 2.0)
    assert [(rate.topic, rate.messages_per_second, rate.bytes_per_second) for rate in rates.topics] == [
        ("c", 20.0, 200.0),
        ("b", 1.0, 10.0),
    ]


def test_a_counter_that_began_anew_does_not_go_negative() -> None:
    rates = Rates(5)
    rates.sample_topics([("a", 1_000, 10_000)], 1.0)
    rates.sample_topics([("a", 3, 30)], 1.0)
    assert rates.topics[0].messages_per_second == 3.0


def test_topic_names_are_not_kept_between_samples() -> None:
    rates = Rates(2)

    def counts(factor: int) -> Iterator[tuple[str, int, int]]:
        for number in range(200):
            yield f"{number}" + "x" * 60_000, factor * number, factor * 100 * number

    tracemalloc.start()
    try:
        rates.sample_topics(counts(1), 1.0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 5 * 60_000
    assert peak < 10 * 60_000
    rates.sample_topics(counts(2), 1.0)
    assert [rate.messages_per_second for rate in rates.topics] == [199.0, 198.0]


@in_loop
async def test_client_rates() -> None:
    broker = Broker(BrokerConfig(observability=Observability(top_n=2, sys_interval_seconds=0)))
    subscriber, _ = attach(broker)
    feed(subscriber, Connect("s"), Subscribe(1, [SubscriptionRequest("t", 0)]))
    for number in range(3):
        publisher, _ = attach(broker)
        feed(publisher, Connect(f"p{number}"), *[Publish("t", b"x") for _ in range(number + 1)])
    await broker.rates.sample_clients(broker.handles, 2.0)
    found = [(rate.client, rate.messages_in_per_second, rate.messages_out_per_second) for rate in broker.rates.clients]
    assert found == [("s", 0.0, 3.0), ("p2", 1.5, 0.0)]
    await broker.rates.sample_clients(broker.handles, 2.0)
    assert broker.rates.clients == []


def test_load_averages_weigh_the_recent_more_in_short_windows() -> None:
    load = LoadAverage()
    assert load.update(600, 60.0) == [600.0, 600.0, 600.0]
    one, five, fifteen = load.update(600, 60.0)
    assert 0 < one < five < fifteen < 600


def test_sys_topics_are_published_when_they_change() -> None:
    published: dict[str, bytes] = {}
    stats = Stats()
    topics = SysTopics(stats, lambda: 4, published.__setitem__)
    topics.update(1.0, 1.0)
    assert published["$SYS/broker/uptime"] == b"1 seconds"
    assert published["$SYS/broker/subscriptions/count"] == b"4"
    assert published["$SYS/broker/version"].startswith(b"nearcast version ")
    for name in ("clients/connected", "messages/received", "bytes/sent", "retained messages/count", "load/bytes/sent/5min"):
        assert f"$SYS/broker/{name}" in published
    published.clear()
    stats.connected_clients = 3
    stats.dropped_queue_full = 2
    topics.update(1.0, 1.0)
    assert published["$SYS/broker/clients/connected"] == b"3"
    assert published["$SYS/broker/clients/maximum"] == b"3"
    assert published["$SYS/broker/publish/messages/dropped"] == b"2"
    assert "$SYS/broker/version" not in published
    stats.connected_clients = 1
    topics.update(1.0, 1.0)
    assert published["$SYS/broker/clients/maximum"] == b"3"


@in_loop
async def test_messages_are_packets_of_any_type_and_publish_messages_are_publishes() -> None:
    broker = Broker(BrokerConfig(observability=Observability(sys_interval_seconds=0)))
    client, _ = attach(broker)
    feed(client, Connect("c"), Subscribe(1, [SubscriptionRequest("t", 0)]))
    feed(client, *[Publish("t", b"x") for _ in range(10)])
    client.data_received(b"\xc0\x00")
    broker.engine.stats.resent = 3
    found = counters(broker.engine.stats, 1)
    assert found["messages/received"] == 13
    assert found["publish/messages/received"] == 10
    assert found["publish/messages/sent"] == 13
    assert rendered(broker)["nearcast_packets_received_total"] == 13
    published: dict[str, bytes] = {}
    SysTopics(broker.engine.stats, lambda: 1, published.__setitem__).update(60.0, 60.0)
    assert published["$SYS/broker/load/messages/received/1min"] == b"13.00"
    assert published["$SYS/broker/load/connections/1min"] == b"1.00"
    assert published["$SYS/broker/load/sockets/1min"] == b"1.00"


def rendered(broker: Broker) -> dict[str, float]:
    text = Metrics(BrokerCollector(broker.engine.stats, broker.rates, broker._gauges)).render().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


@in_loop
async def test_metrics_follow_the_engine() -> None:
    broker = Broker(BrokerConfig(observability=Observability(sys_interval_seconds=0)))
    client, _ = attach(broker)
    feed(client, Connect("c"), Subscribe(1, [SubscriptionRequest('odd "\\ topic\n', 1)]))
    feed(client, Publish('odd "\\ topic\n', b"x"), Publish("q1", b"x", qos=1, packet_id=1))
    broker.rates.sample_topics(broker.engine.topic_counts(), 1.0)
    await broker.rates.sample_clients(broker.handles, 1.0)
    found = rendered(broker)
    assert found["nearcast_connected_clients"] == 1
    assert found["nearcast_sessions"] == 1
    assert found["nearcast_subscriptions"] == 1
    assert found["nearcast_messages_received_total{qos=0}"] == 1
    assert found["nearcast_messages_received_total{qos=1}"] == 1
    assert found["nearcast_messages_sent_total{qos=0}"] == 1
    assert found["nearcast_messages_dropped_total{reason=slow_consumer}"] == 0
    assert found["nearcast_bytes_received_total"] > 10
    assert found['nearcast_topic_messages_per_second{topic=odd "\\ topic\n}'] == 1
    assert found["nearcast_client_messages_per_second{client=c,direction=in}"] == 2
    assert found["process_resident_memory_bytes"] > 0


class Request:
    """Asks an ASGI application without a server."""

    def __init__(self, app: ObservabilityApp) -> None:
        self._app = app

    def get(self, path: str, method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
        messages: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request"}

        async def send(message: Any) -> None:
            messages.append(message)

        asyncio.run(self._app({"type": "http", "method": method, "path": path}, receive, send))
        start, body = messages
        return start["status"], dict(start["headers"]), body["body"]


def test_the_application_answers() -> None:
    health: dict[str, object] = {"ok": True}
    rates = Rates(3)
    rates.sample_topics([("a", 1, 1)], 1.0)
    metrics = Metrics(BrokerCollector(Stats(), rates, dict))
    request = Request(ObservabilityApp(metrics, rates, lambda: health))
    status, headers, body = request.get("/metrics")
    assert (status, headers[b"content-type"].split(b";")[0]) == (200, b"text/plain")
    assert b"nearcast_connections 0.0" in body
    assert request.get("/healthz")[0] == 200
    assert json.loads(request.get("/rates")[2])["topics"][0]["topic"] == "a"
    health["ok"] = False
    assert request.get("/healthz")[0] == 503
    assert request.get("/other")[0] == 404
    assert request.get("/metrics", "POST")[0] == 405
    status, headers, body = request.get("/metrics", "HEAD")
    assert (status, body) == (200, b"")
    assert int(headers[b"content-length"]) > 100

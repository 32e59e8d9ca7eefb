"""Real MQTT publishers for the tests of pipelines, and what topics hold afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import Record
from tests.integration.spark.conftest import LogBroker


def publish(broker: LogBroker, messages: Iterable[tuple[str, bytes | str]], qos: int = 1) -> None:
    """Publish with paho-mqtt; returns when the broker has acknowledged everything."""
    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.max_queued_messages_set(0)
    client.connect("127.0.0.1", broker.port())
    client.loop_start()
    try:
        for sent in [client.publish(topic, payload, qos) for topic, payload in messages]:
            sent.wait_for_publish(60)
    finally:
        client.disconnect()
        client.loop_stop()


def records(broker: LogBroker, topic_filter: str) -> list[Record]:
    """What the log has of these topics."""
    with BlockingTopics(broker.bulk_url) as topics:
        return [record for batch in topics.read(topic_filter) for record in batch.records()]


def contents(broker: LogBroker, topic_filter: str) -> list[dict[str, Any]]:
    """The JSON payloads of these topics."""
    return [json.loads(record.payload) for record in records(broker, topic_filter)]

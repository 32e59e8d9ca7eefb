"""Telemetry of real brokers: read by Mosquitto's client, kept by a durable topic, answered by a plan."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.mqtt.packets import Connect, Publish, Subscribe, SubscriptionRequest
from nearcast.serving.secrets import make_secret
from nearcast.telemetry.records import BrokerReport, ClientReport, TopicReport
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, started_together
from tests.integration.controllers import NearcastController
from tests.integration.gateways import NearcastGateway
from tests.integration.tools import require

pytestmark = pytest.mark.integration

R = TypeVar("R", BrokerReport, TopicReport, ClientReport)

CONFIG = """
[fabric.telemetry]
interval_seconds = 0.5
raw = true

[[fabric.classes]]
topic = "owned/#"
topic_class = "owned"
max_latency_ms = 40

[[topics]]
topic = "$nearcast/telemetry/#"

[[security.acl]]
action = "allow"
access = "all"
topic = "#"

[[security.acl]]
action = "allow"
access = "subscribe"
topic = "$nearcast/#"

[[security.acl]]
action = "allow"
access = "publish"
client = "planner"
topic = "$nearcast/plan"
"""


class Fabric:
    """A controller, two brokers (the first with a data directory) and a gateway."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        secret = directory / "fabric.secret"
        make_secret(secret)
        home = directory / "controller"
        home.mkdir()
        self.controller = stack.enter_context(NearcastController(home, secret))
        made: list[NearcastBroker] = []
        for name in ("b1", "b2", "g"):
            (directory / name).mkdir()
            arguments = ["--name", name, "--fabric-secret", str(secret), "--controller", self.controller.link_address]
            if name == "g":
                made.append(NearcastGateway(directory / name, arguments=arguments))
            else:
                config = CONFIG if name == "b1" else CONFIG.replace('[[topics]]\ntopic = "$nearcast/telemetry/#"\n', "")
                made.append(NearcastBroker(directory / name, config, data=name == "b1", arguments=arguments))
        started_together(made, stack)
        self.b1, self.b2, self.gateway = made


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fabric]:
    require("mosquitto_sub")
    with ExitStack() as stack:
        yield Fabric(tmp_path_factory.mktemp("telemetry"), stack)


def read(broker: NearcastBroker, topic: str, record: type[R], count: int = 1) -> list[R]:
    """The next messages of a topic, by mosquitto_sub."""
    words = [str(require("mosquitto_sub")), "-h", "127.0.0.1", "-p", str(broker.port()), "-V", "5", "-t", topic]
    words += ["-C", str(count), "-W", str(int(PATIENCE_SECONDS))]
    result = subprocess.run(words, capture_output=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert result.returncode == 0, result.stderr.decode()
    return [msgspec.json.decode(line, type=record, strict=True) for line in result.stdout.splitlines()]


def test_every_broker_reports_itself_at_any_broker(fabric: Fabric) -> None:
    for broker in (fabric.b1, fabric.b2):
        (report,) = read(fabric.b1, f"$nearcast/telemetry/broker/{broker.directory.name}", BrokerReport)
        assert report.broker == broker.directory.name
        assert 0.0 <= report.cpu <= 1.0
        assert 0.0 < report.memory < 1.0
        assert report.clients >= 0


def test_places_are_found_and_reported(fabric: Fabric) -> None:
    def place() -> bool:
        (report,) = read(fabric.b2, "$nearcast/telemetry/broker/b1", BrokerReport)
        return report.coordinate is not None and len(report.coordinate.vector) == 8

    wait_for("a coordinate", place)


def test_owned_topics_are_reported_with_clients_of_brokers_and_of_gateways(fabric: Fabric) -> None:
    with fabric.gateway.connect() as subscriber, fabric.b2.connect() as publisher:
        subscriber.send(Subscribe(1, [SubscriptionRequest("owned/t", 0)]))
        subscriber.receive()

        def counted() -> bool:
            publisher.send(Publish("owned/t", b"x"))
            reports = [read(fabric.b1, f"$nearcast/telemetry/topics/{name}", TopicReport)[0] for name in ("b1", "b2")]
            topics = [topic for report in reports for topic in report.topics]
            assert all(topic.max_latency_ms == 40.0 for topic in topics)
            producers = sum(topic.producers.count for topic in topics)
            placed = [topic.consumers for topic in topics if topic.consumers.centroid is not None]
            return producers >= 1 and [crowd.count for crowd in placed] == [1]

        wait_for("the topic's clients", counted)
        assert isinstance(subscriber.receive(), Publish)

        def sampled() -> bool:
            publisher.send(Publish("owned/t", b"x"))
            reports = [read(fabric.b1, f"$nearcast/telemetry/clients/{name}", ClientReport)[0] for name in ("b1", "b2")]
            return {sample.role for report in reports for sample in report.clients} == {0, 1}

        wait_for("every client by itself", sampled)


def test_telemetry_is_kept_where_a_rule_says_so(fabric: Fabric) -> None:
    with BlockingTopics(fabric.b1.bulk_url) as topics:

        def kept() -> list[bytes]:
            batches = topics.read(["$nearcast/telemetry/broker/b1"])
            return [record.payload for batch in batches for record in batch.records()]

        wait_for("records", lambda: len(kept()) >= 3)
        reports = [msgspec.json.decode(payload, type=BrokerReport) for payload in kept()]
        times = [report.time for report in reports]
        assert times == sorted(times)


def test_a_plan_reaches_the_controller_if_its_client_may_publish_it(fabric: Fabric) -> None:
    for client, passed_on in (("somebody", 0.0), ("planner", 1.0)):
        with fabric.b1.connect(Connect(client)) as connected:
            connected.send(Publish("$nearcast/plan", b"{}", 1, packet_id=1))
            connected.receive()
        assert fabric.b1.metric("plans_passed_on_total") == passed_on


def test_figures_of_reporting_are_metrics(fabric: Fabric) -> None:
    wait_for("reports", lambda: fabric.b1.metric("telemetry_reports_total") > 2)
    assert fabric.b1.metric("telemetry_bytes_total") > 0
    assert 0.0 < fabric.b1.metric("memory_share") < 1.0

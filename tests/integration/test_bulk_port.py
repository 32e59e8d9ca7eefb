"""The bulk port of real broker processes: TLS, certificates, ``kill -9`` while batches are committed and topics are read."""

from __future__ import annotations

import random
import threading
import time
from pathlib import Path

import pytest

from nearcast.client import BlockingTopics, TlsOptions
from nearcast.errors import BatchRefused, ConnectionClosed, ConnectionRefused, RequestRefused
from tests.integration.broker.running import Authority, RunningBroker
from tests.integration.brokers import NearcastBroker

pytestmark = pytest.mark.integration

ROWS = 800
PARTITIONS = 3


def test_tls_and_users_from_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    authority.issue("localhost", "server")
    certificate, key = authority.issue("device-7", "device")
    config = """
    [[listeners]]
    kind = "bulk-tls"
    port = 0
    certificate_file = "server.pem"
    key_file = "server.key"
    ca_file = "ca.pem"
    client_certificates = "optional"
    certificate_username = true
    [security]
    allow_anonymous = false
    acl = [{ action = "allow", topic = "devices/%u/#" }]
    [persistence]
    directory = "data"
    [[topics]]
    topic = "devices/#"
    """
    with RunningBroker(tmp_path, config=config) as broker:
        url = f"nearcasts://localhost:{broker.port('bulk-tls')}"
        trusting = TlsOptions(ca_file=str(authority.certificate))
        own = TlsOptions(str(authority.certificate), str(certificate), str(key))
        with BlockingTopics(url, tls=own) as topics:
            payloads = [bytes(10_000) for _ in range(300)]
            topics.publish_many("devices/device-7/x", payloads[:50])
            assert topics.stage("q", 0, 0, 0, (("devices/device-7/x", payload, None) for payload in payloads)) == 300
            assert topics.commit_batch("q", 0, {0: 0})
            assert sum(1 for batch in topics.read("devices/device-7/#") for _ in batch.records()) == 350
            with pytest.raises(RequestRefused, match="not allowed"):
                topics.topics("devices/#")
            with pytest.raises(BatchRefused, match="not allowed"):
                topics.stage("q", 1, 0, 0, [("devices/device-8/x", b"", None)])
        with pytest.raises(ConnectionRefused):
            BlockingTopics(url, tls=trusting, password="hunter2", username="ann").open()
        with pytest.raises(ConnectionClosed, match="cannot trust"):
            BlockingTopics(url).open()
        with pytest.raises(ConnectionClosed):
            BlockingTopics(url.replace("nearcasts", "nearcast"), timeout_seconds=5).open()
        assert "hunter2" not in broker.log()


def test_nobody_there_is_one_clear_line() -> None:
    with pytest.raises(ConnectionClosed, match="nothing listens there; does the broker run, with a bulk port"):
        BlockingTopics("nearcast://127.0.0.1:1").open()


def rows(batch: int, partition: int) -> list[tuple[str, bytes, None]]:
    return [(f"a/{row % 4}", b"%d.%d.%d" % (batch, partition, row), None) for row in range(ROWS)]


def test_batches_survive_kill_9(tmp_path: Path) -> None:
    """A query commits batch after batch and begins each anew when something fails, as Spark does; the broker is killed again
    and again at any moment. In the end each topic has its rows once, batch by batch."""
    seed = time.time_ns() % 1_000_000
    rng = random.Random(seed)
    batches = 6
    killed = threading.Event()
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "a/#", "--sync", "os"]) as broker:
        url = broker.bulk_url
        query_topics = BlockingTopics(url, reconnect_seconds=60)
        query_topics.open()
        done = threading.Event()
        failures: list[BaseException] = []

        def query() -> None:
            try:
                attempt = 0
                with query_topics as topics:
                    batch = 0
                    nonlocal batches
                    while batch < batches or not killed.is_set():
                        batches = max(batches, batch + 1)
                        last = topics.last_batch("query")
                        if last is not None and last >= batch:
                            batch += 1
                            continue
                        try:
                            attempts = {}
                            for partition in range(PARTITIONS):
                                attempt += 1
                                topics.stage("query", batch, partition, attempt, rows(batch, partition))
                                attempts[partition] = attempt
                            topics.commit_batch("query", batch, attempts)
                        except (ConnectionClosed, BatchRefused):
                            continue
            except BaseException as error:  # noqa: BLE001 - the edge of the thread: the test raises it
                failures.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=query)
        thread.start()
        kills = 0
        while kills < 3 and not done.wait(rng.uniform(0.05, 0.5)):
            broker.kill()
            broker.start()
            kills += 1
        killed.set()
        thread.join(120)
        assert not failures, (seed, failures)
        with BlockingTopics(url) as topics:
            for name in ("a/0", "a/1", "a/2", "a/3"):
                got = [record.payload for batch in topics.read(name) for record in batch.records()]
                assert got == [
                    payload
                    for batch in range(batches)
                    for partition in range(PARTITIONS)
                    for topic, payload, _ in rows(batch, partition)
                    if topic == name
                ], f"seed {seed}, {kills} kills"
        assert not any((tmp_path / "data" / "topics" / "staging").iterdir())


def test_reading_survives_kill_9(tmp_path: Path) -> None:
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "a/#"]) as broker:  # noqa: SIM117
        with BlockingTopics(broker.bulk_url) as topics:
            for start in range(0, 9_000, 300):
                topics.publish_many(
                    f"a/{start // 300 % 3}", [b"%d" % number + bytes(500) for number in range(start, start + 300)]
                )
            got: list[tuple[str, int]] = []
            killed = False
            with BlockingTopics(broker.bulk_url, window_bytes=200_000, reconnect_seconds=60) as reader:
                for batch in reader.read("a/#"):
                    got += [(record.topic, record.index) for record in batch.records()]
                    if len(got) > 1_000 and not killed:
                        killed = True
                        broker.kill()
                        broker.start()
                        topics.publish("a/0", b"after the end of what was asked for")
            assert killed
            assert len(got) == len(set(got)) == 9_000
            for name in ("a/0", "a/1", "a/2"):
                assert [index for topic, index in got if topic == name] == list(range(1, 3_001))

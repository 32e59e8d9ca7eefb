"""Durable topics with real parts: foreign publishers of both protocol versions, a broker process, its files, its bulk port.

What was acknowledged is in the log, in order, with indexes from 1 on without a gap.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiomqtt
import psutil
import pytest
from paho.mqtt.client import Client as PahoClient
from paho.mqtt.enums import CallbackAPIVersion, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties as PahoProperties

from nearcast.client.blocking_topics import BlockingTopics
from nearcast.client.records import Record, TopicState
from nearcast.config import Retention
from nearcast.errors import RecordUnavailable, TopicUnknown
from nearcast.mqtt.packets import ConnAck, Connect, Disconnect, Properties, PubAck, Publish, PubRec, PubRel, Will
from tests.integration.broker.running import PATIENCE_SECONDS, wait_for
from tests.integration.brokers import NearcastBroker, nearcast_broker
from tests.integration.tools import JS_DIRECTORY, require
from tests.integration.wire import Wire

pytestmark = pytest.mark.integration

MESSAGES = 40
USER_PROPERTY = ("unit", "C")

Fill = Callable[[NearcastBroker, list[str], int], None]
"""Publishes to three topics, at QoS 0, 1 and 2."""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NearcastBroker]:
    with nearcast_broker(tmp_path_factory, data=True, arguments=["--durable", "d/#"]) as running:
        yield running


def opened(broker: NearcastBroker, **options: Any) -> BlockingTopics:
    return BlockingTopics(broker.bulk_url, **options)


def everything(topics: BlockingTopics, *filters: str) -> list[Record]:
    return [record for batch in topics.read(list(filters)) for record in batch.records()]


def state_of(topics: BlockingTopics, topic: str) -> TopicState:
    (found,) = topics.topics(topic)
    return found


# --- publishers -----------------------------------------------------------------------------------------------------------


def payloads() -> list[bytes]:
    return [b"%d" % number for number in range(MESSAGES)]


def fill_by_paho(broker: NearcastBroker, topics: list[str], version: int) -> None:
    client = PahoClient(CallbackAPIVersion.VERSION2, "paho", protocol=MQTTProtocolVersion(version))
    client.connect("127.0.0.1", broker.port())
    client.loop_start()
    properties = None
    if version == 5:
        properties = PahoProperties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.UserProperty = [USER_PROPERTY]
    try:
        for qos, topic in enumerate(topics):
            for sent in [client.publish(topic, payload, qos, properties=properties) for payload in payloads()]:
                sent.wait_for_publish(PATIENCE_SECONDS)
                assert sent.is_published()
    finally:
        client.disconnect()
        client.loop_stop()


def fill_by_aiomqtt(broker: NearcastBroker, topics: list[str], version: int) -> None:
    properties = None
    if version == 5:
        properties = PahoProperties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.UserProperty = [USER_PROPERTY]

    async def main() -> None:
        async with (
            asyncio.timeout(PATIENCE_SECONDS),
            aiomqtt.Client(
                "127.0.0.1", broker.port(), identifier="aiomqtt", protocol=aiomqtt.ProtocolVersion(version)
            ) as client,
        ):
            for qos, topic in enumerate(topics):
                for payload in payloads():
                    await client.publish(topic, payload, qos, properties=properties)

    asyncio.run(main())


def fill_by_mosquitto(broker: NearcastBroker, topics: list[str], version: int) -> None:
    for qos, topic in enumerate(topics):
        command = [str(require("mosquitto_pub")), "-h", "127.0.0.1", "-p", str(broker.port()), "-i", "mosquitto"]
        command += ["-V", "5" if version == 5 else "311", "-t", topic, "-q", str(qos), "-l"]
        if version == 5:
            command += ["-D", "publish", "user-property", *USER_PROPERTY]
        subprocess.run(command, input=b"\n".join(payloads()), timeout=PATIENCE_SECONDS, check=True, capture_output=True)


def fill_by_mqttjs(broker: NearcastBroker, topics: list[str], version: int) -> None:
    require("mqtt.js")
    command = [str(require("node")), str(JS_DIRECTORY / "fill.js"), broker.url, str(version)]
    command += [str(MESSAGES), *USER_PROPERTY, *topics]
    subprocess.run(command, timeout=PATIENCE_SECONDS, check=True, capture_output=True)


PUBLISHERS: dict[str, Fill] = {
    "paho": fill_by_paho,
    "aiomqtt": fill_by_aiomqtt,
    "mosquitto": fill_by_mosquitto,
    "mqttjs": fill_by_mqttjs,
}


@pytest.mark.parametrize("version", [4, 5], ids=["3.1.1", "5.0"])
@pytest.mark.parametrize("publisher", PUBLISHERS)
def test_what_foreign_clients_publish_is_in_the_log(broker: NearcastBroker, publisher: str, version: int) -> None:
    names = [f"d/{publisher}/{version}/{qos}" for qos in (0, 1, 2)]
    before_us = int(time.time() * 1_000_000)
    PUBLISHERS[publisher](broker, names, version)
    with opened(broker) as topics:
        # What was acknowledged is there at once; nobody acknowledges QoS 0.
        assert [state_of(topics, name).latest_index for name in names[1:]] == [MESSAGES, MESSAGES]
        wait_for("QoS 0", lambda: [found.latest_index for found in topics.topics(names[0])] == [MESSAGES])
        for qos, name in enumerate(names):
            records = everything(topics, name)
            assert [record.index for record in records] == list(range(1, MESSAGES + 1))
            assert [record.payload for record in records] == payloads()
            assert {(record.topic, record.publisher, record.qos, record.retain) for record in records} == {
                (name, publisher, qos, False)
            }
            assert all(record.user_properties == ([USER_PROPERTY] if version == 5 else []) for record in records)
            times = [record.time_us for record in records]
            assert times == sorted(times)
            assert before_us <= times[0] <= times[-1] <= int(time.time() * 1_000_000)
            assert topics.get(name, 17).payload == b"16"
        merged = everything(topics, f"d/{publisher}/{version}/+")
        assert [record.topic for record in merged] == [name for name in names for _ in range(MESSAGES)]


def test_properties_and_flags_are_kept(broker: NearcastBroker) -> None:
    with opened(broker) as topics, Wire(broker.port()) as wire:
        wire.connect("everything")
        properties = Properties(
            payload_format_indicator=1,
            message_expiry_interval=1_000,
            content_type="text/plain",
            response_topic="answers/here",
            correlation_data=b"\x00\x01",
            user_properties=[("a", "1"), ("a", "2")],
        )
        wire.send(Publish("d/all", "grüß".encode(), 1, True, packet_id=1, properties=properties))
        assert wire.expect(PubAck).reason_code == 0
        record = topics.get("d/all", 1)
        assert (record.text, record.publisher, record.qos, record.retain) == ("grüß", "everything", 1, True)
        assert (record.content_type, record.response_topic, record.correlation_data) == ("text/plain", "answers/here", b"\0\1")
        assert (record.payload_format, record.user_properties) == (1, [("a", "1"), ("a", "2")])


def test_live_subscribers_get_it_as_ever(broker: NearcastBroker) -> None:
    with opened(broker) as topics, Wire(broker.port()) as subscriber, Wire(broker.port()) as publisher:
        subscriber.connect()
        subscriber.subscribe("d/live/#", 1)
        publisher.connect()
        publisher.send(Publish("d/live/a", b"by MQTT", 1, packet_id=1))
        assert publisher.expect(PubAck).reason_code == 0
        assert topics.publish("d/live/a", b"by the bulk port") == 2
        assert [subscriber.expect(Publish).payload for _ in range(2)] == [b"by MQTT", b"by the bulk port"]


def test_a_will_is_kept_too(broker: NearcastBroker) -> None:
    with opened(broker) as topics:
        with Wire(broker.port()) as device:
            device.send(Connect("dying", 5, will=Will("d/will", b"died", 1)))
            assert device.expect(ConnAck).reason_code == 0
        wait_for("the will in the log", lambda: [state.latest_index for state in topics.topics("d/will")] == [1])
        record = topics.get("d/will", 1)
        assert (record.payload, record.publisher, record.qos) == (b"died", "dying", 1)


def test_topics_no_rule_names_are_not_kept(broker: NearcastBroker) -> None:
    with opened(broker) as topics, Wire(broker.port()) as wire:
        wire.connect()
        wire.send(Publish("other", b"x", 1, packet_id=1))
        assert wire.expect(PubAck).reason_code == 0x10, "no subscriber, and no log either"
        wire.send(Publish("d/other", b"x", 1, packet_id=1))
        assert wire.expect(PubAck).reason_code == 0, "the log is somebody"
        assert topics.topics("other") == []
        with pytest.raises(TopicUnknown):
            topics.get("other", 1)


# --- taps and retention ---------------------------------------------------------------------------------------------------


def test_a_tap_copies_what_passes(broker: NearcastBroker) -> None:
    with opened(broker) as topics, Wire(broker.port()) as wire:
        wire.connect()
        assert topics.tap("tapped/#")
        for qos in (0, 1):
            wire.send(Publish("tapped/a", b"%d" % qos, qos, packet_id=qos))
        assert wire.expect(PubAck).reason_code == 0x10, "a tap is no subscriber"
        wait_for("the copies", lambda: [state.latest_index for state in topics.topics("tapped/a")] == [2])
        assert [record.payload for record in everything(topics, "tapped/#")] == [b"0", b"1"]
        topics.delete_topic("tapped/#")


def test_retention_moves_the_first_index(broker: NearcastBroker) -> None:
    with opened(broker) as topics, Wire(broker.port()) as wire:
        wire.connect()
        topics.create_topic("r/count", Retention(max_records=10))
        topics.create_topic("r/age", Retention(max_age_seconds=0.2))
        topics.create_topic("r/size", Retention(max_bytes=20_000))
        for number in range(100):
            for name in ("count", "age", "size"):
                topics.publish(f"r/{name}", b"%03d" % number + bytes(1_000))
        wait_for("retention by count", lambda: state_of(topics, "r/count").first_index == 91)
        wait_for("retention by age", lambda: state_of(topics, "r/age").first_index == 100)
        wait_for("retention by size", lambda: state_of(topics, "r/size").bytes <= 20_000)
        size = state_of(topics, "r/size")
        assert size.next_index == 101
        assert 5 <= size.count <= 20
        for name, first in (("count", 91), ("age", 100), ("size", size.first_index)):
            records = everything(topics, f"r/{name}")
            assert [record.index for record in records] == list(range(first, 101))
            assert [record.payload[:3] for record in records] == [b"%03d" % number for number in range(first - 1, 100)]
            with pytest.raises(RecordUnavailable, match=f"removed by retention; the oldest there is {first}") as caught:
                topics.get(f"r/{name}", 1)
            assert (caught.value.first_index, caught.value.next_index) == (first, 101)
            with pytest.raises(RecordUnavailable, match="the newest there is 100"):
                topics.get(f"r/{name}", 101)
        gaps: list[tuple[str, int, int]] = []
        read = topics.read("r/count", start=1, on_gap=lambda gap: gaps.append((gap.topic, gap.first_index, gap.next_index)))
        assert [record.index for batch in read for record in batch.records()] == list(range(91, 101))
        assert gaps == [("r/count", 1, 91)]


def test_bounds_that_change_hold_for_what_is_there(broker: NearcastBroker) -> None:
    with opened(broker) as topics:
        assert topics.create_topic("c/#")
        assert not topics.create_topic("c/#"), "so it was already"
        for number in range(20):
            topics.publish("c/a", b"%d" % number)
        assert topics.create_topic("c/#", Retention(max_records=5))
        wait_for("the new bound", lambda: state_of(topics, "c/a").first_index == 16)
        topics.delete_topic("c/#")
        with pytest.raises(TopicUnknown):
            topics.delete_topic("c/#")


# --- life of the process --------------------------------------------------------------------------------------------------


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    with NearcastBroker(tmp_path, data=True) as broker:
        with opened(broker) as topics:
            topics.create_topic("made/#", Retention(max_records=1_000))
            rules = topics.rules()
            for number in range(10):
                topics.publish(f"made/{number % 2}", b"%d" % number)
        for end in (broker.stop, broker.kill):
            end()
            broker.start()
            with opened(broker) as topics:
                assert topics.rules() == rules
                before = {state.topic: state.latest_index for state in topics.topics()}
                assert topics.publish("made/0", b"more") == before["made/0"] + 1
        with opened(broker) as topics:
            assert [record.index for record in everything(topics, "made/0")] == list(range(1, 8))


def test_a_reader_waits_through_a_restart(tmp_path: Path) -> None:
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "#"]) as broker:
        found: list[tuple[int, bytes]] = []

        def follow() -> None:
            with opened(broker, reconnect_seconds=PATIENCE_SECONDS) as topics:
                for record in topics.tail("a", start="earliest"):
                    found.append((record.index, record.payload))
                    if record.payload == b"end":
                        return

        reader = threading.Thread(target=follow, daemon=True)
        with opened(broker) as topics:
            topics.publish("a", b"1")
        reader.start()
        wait_for("the first record", lambda: len(found) == 1)
        for payload in (b"2", b"end"):
            broker.kill()
            broker.start()
            with opened(broker) as topics:
                topics.publish("a", payload)
        reader.join(PATIENCE_SECONDS)
        assert found == [(1, b"1"), (2, b"2"), (3, b"end")]


@pytest.mark.parametrize("damage", ["half a block", "cut short", "flipped bit"])
def test_a_damaged_tail_is_reported_and_what_precedes_it_is_there(tmp_path: Path, damage: str) -> None:
    total = 40
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "#"]) as broker:
        with opened(broker) as topics:
            for number in range(total):
                topics.publish("a", b"%06d" % number)
        broker.kill()
        segment = max((broker.data / "topics").glob("*.log"))
        content = bytearray(segment.read_bytes())
        size = len(content)
        if damage == "half a block":
            content += content[-200:][:60]
        elif damage == "cut short":
            del content[size - 500 :]
        else:
            content[content.index(b"%06d" % (total // 2))] ^= 1
        segment.write_bytes(content)
        broker.start()
        intact = {"cut short": range(1, total), "flipped bit": [total // 2]}.get(damage, [total])
        (line,) = [line for line in broker.log().splitlines() if "the topic log is damaged" in line]
        said = re.search(r"path=(\S+) offset=(\d+)", line)
        assert said is not None, line
        assert said[1] == str(segment)
        assert int(said[2]) <= size
        with opened(broker) as topics:
            records = everything(topics, "a")
            assert [record.index for record in records] == list(range(1, len(records) + 1))
            assert [int(record.payload) for record in records] == list(range(len(records)))
            assert len(records) in intact
            assert topics.publish("a", b"next") == len(records) + 1
        if damage == "half a block":
            # It is history at the next start.
            broker.kill()
            broker.start()
            assert broker.log().count("the topic log is damaged") == 1
            with opened(broker) as topics:
                assert topics.get("a", len(records) + 1).payload == b"next"


def test_a_damaged_file_of_rules_keeps_the_broker_from_starting(tmp_path: Path) -> None:
    broker = NearcastBroker(tmp_path, data=True)
    with broker:
        with opened(broker) as topics:
            topics.create_topic("a")
        broker.stop()
        path = broker.data / "topics" / "definitions.json"
        path.write_bytes(path.read_bytes()[:-20])
        assert broker.launch().wait(PATIENCE_SECONDS) == 1
        assert f"{path}: byte 0:" in broker.log()
        assert "put back a copy, or remove the file" in broker.log()
        broker.process = None


def test_two_brokers_do_not_share_a_directory(tmp_path: Path) -> None:
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "#"]) as broker:
        command = [sys.executable, "-m", "nearcast", "broker", "--port", "0", "--data", str(broker.data), "--durable", "#"]
        second = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
        assert second.returncode == 1
        assert "another broker uses this directory; give each its own" in second.stderr
        assert "Traceback" not in second.stderr
        with opened(broker) as topics:
            assert topics.publish("a", b"untouched") == 1


def test_a_bulk_port_that_is_taken(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [
            sys.executable,
            "-m",
            "nearcast",
            "broker",
            "--port",
            "0",
            "--data",
            str(tmp_path),
            "--bulk-port",
            str(port),
        ]
        run = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False)
    assert run.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in run.stderr
    assert "--bulk-port takes another port" in run.stderr


def test_rules_of_the_configuration_are_read_again(tmp_path: Path) -> None:
    rule = '[[topics]]\ntopic = "{}"\n'
    with NearcastBroker(tmp_path, rule.format("before/#"), data=True) as broker, opened(broker) as topics:
        topics.create_topic("made/#")
        topics.publish("before/a", b"1")
        broker.config_path.write_text(rule.format("after/#"), encoding="utf-8")
        broker.reload()
        assert [rule.topic for rule in topics.rules()] == ["after/#", "made/#"]
        assert topics.publish("after/a", b"1") == 1
        assert topics.publish("made/a", b"1") == 1
        with Wire(broker.port()) as wire:
            wire.connect()
            wire.send(Publish("before/a", b"2", 1, packet_id=1))
            assert wire.expect(PubAck).reason_code == 0x10, "not kept any more"
        assert topics.get("before/a", 1).payload == b"1", "what was kept stays"
        broker.config_path.write_text(rule.format("a/#/b"), encoding="utf-8")
        broker.reload()
        broker.wait_for_log("reload refused")
        assert [rule.topic for rule in topics.rules()] == ["after/#", "made/#"]


def test_a_full_disk_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    """Whatever could not be written is acknowledged to nobody; the broker stops, and starts again once there is room."""
    broker = NearcastBroker(tmp_path, data=True, arguments=["--durable", "#"])
    with broker:
        acknowledged = {1: 0, 2: 0}
        psutil.Process(broker.ready["pid"]).rlimit(psutil.RLIMIT_FSIZE, (300_000, 300_000))
        with contextlib.suppress(ConnectionError), Wire(broker.port()) as wire:
            wire.connect("publisher", expiry_seconds=1_000)
            for number in range(10_000):
                for qos in (1, 2):
                    wire.send(Publish(f"q/{qos}", b"%06d" % number + bytes(500), qos, packet_id=qos))
                    answer = wire.receive()
                    if answer is None or isinstance(answer, Disconnect):
                        break
                    assert isinstance(answer, PubAck if qos == 1 else PubRec)
                    assert answer.reason_code == 0
                    acknowledged[qos] += 1
                else:
                    wire.send(PubRel(2))
                    wire.receive()
                    continue
                break
        assert broker.process is not None
        assert broker.process.wait(PATIENCE_SECONDS) == 1
        assert "cannot be written: File too large" in broker.log()
        assert "Traceback" not in broker.log()
        assert 50 < acknowledged[1] < 10_000
        broker.process = None
        broker.start()
        with opened(broker) as topics:
            for qos in (1, 2):
                numbers = [int(record.payload[:6]) for record in everything(topics, f"q/{qos}")]
                assert numbers == list(range(len(numbers)))
                assert len(numbers) - acknowledged[qos] in (0, 1)
            assert topics.publish("q/1", b"again") == len(everything(topics, "q/1"))


def test_signals_while_readers_wait(tmp_path: Path) -> None:
    """A broker with readers that wait stops at once."""
    with NearcastBroker(tmp_path, data=True, arguments=["--durable", "#"]) as broker:
        topics = opened(broker, reconnect_seconds=0.0)
        topics.open()
        with opened(broker) as writer:
            writer.publish("a", b"1")
        tail = topics.tail("a", start="earliest")
        assert next(tail).payload == b"1"
        began = time.monotonic()
        assert broker.process is not None
        broker.process.send_signal(signal.SIGTERM)
        assert broker.process.wait(PATIENCE_SECONDS) == 0
        assert time.monotonic() - began < PATIENCE_SECONDS
        topics.close()

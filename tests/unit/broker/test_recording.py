"""What a broker records of the messages it processes: those of a workload, each with what its clients' events know it by."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from nearcast.broker.process import Broker
from nearcast.broker.recording import ProcessedMessages
from nearcast.clock import SystemClock
from nearcast.config import BrokerConfig, Listener, Recording
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import Connect, Publish
from nearcast.mqtt.publication import build, build_all
from nearcast.recording import EventWriter, check, message_id, read_events
from nearcast.scenario.identity import Identity, encode_identity
from tests.fabric_harness import Mesh
from tests.unit.broker.fakes import in_loop


def config(directory: Path, **recording: str) -> BrokerConfig:
    return BrokerConfig(
        listeners=(Listener(port=0),), recording=Recording(directory=str(directory), name="edge-1", run="r", **recording)
    )


def payload(sequence: int, size: int = 40) -> bytes:
    return encode_identity(Identity(7, sequence, 1_000 + sequence), size)


def test_every_message_of_a_workload_and_no_other(tmp_path: Path) -> None:
    recorder = ProcessedMessages(config(tmp_path), str(tmp_path), SystemClock())
    for publication in build_all(b"cars/1", [payload(0), payload(1), b"somebody else's", payload(2, 20)], 1, True):
        recorder.processed(publication, 5.0)
    recorder.close()
    events = sorted(read_events(tmp_path), key=lambda event: event.sequence or 0)
    assert [event.message_id for event in events] == [message_id(7, number) for number in range(3)]
    assert [event.size_bytes for event in events] == [40, 40, 20]
    first = events[0]
    assert (first.kind, first.client, first.path, first.topic) == ("processed", "edge-1", ("edge-1",), "cars/1")
    assert (first.sent_ns, first.qos, first.retained, first.publisher) == (1_000, 1, True, None)
    assert not check(tmp_path).problems
    assert recorder.events == 3


def test_what_the_cloud_was_given_is_processed_by_the_cloud(tmp_path: Path) -> None:
    recorder = ProcessedMessages(config(tmp_path, cloud="sky"), str(tmp_path), SystemClock())
    (publication,) = build_all(b"cars/1", [payload(0), payload(1)], 0, False)
    recorder.relayed(publication, 1, 5.0)
    recorder.close()
    (event,) = read_events(tmp_path)
    assert (event.client, event.path, event.message_id) == ("sky", ("sky",), message_id(7, 1))


def test_a_disk_that_fails_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: EventWriter) -> None:
        raise StorageUnavailable(str(tmp_path), "events cannot be recorded: no space left")

    before = set(threading.enumerate())
    recorder = ProcessedMessages(config(tmp_path), str(tmp_path), SystemClock())
    monkeypatch.setattr(EventWriter, "flush", fail)
    with caplog.at_level("ERROR", logger="nearcast"):
        recorder.flush()
        recorder.processed(build(b"cars/1", payload(0), 0, False), 5.0)
        recorder.close()
    assert recorder.events == 0
    assert set(threading.enumerate()) <= before, "nobody waits for events that do not come"
    assert len([record for record in caplog.records if "no longer recorded" in record.getMessage()]) == 1


@in_loop
async def test_a_broker_that_was_told_to_records(tmp_path: Path) -> None:
    broker = Broker(config(tmp_path))
    await broker.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", broker.listeners[0].port)
    writer.write(encode(Connect("c"), 5) + encode(Publish("cars/1", payload(3), 1, packet_id=1), 5))
    answered = b""
    while b"\x40" not in answered:
        answered += await reader.read(1_000)
    writer.close()
    await broker.stop()
    (event,) = read_events(tmp_path)
    assert (event.client, event.sequence) == ("edge-1", 3)


@in_loop
async def test_a_directory_that_cannot_be_made_keeps_the_broker_from_starting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broker = Broker(config(tmp_path / "file" / "events"))
    with pytest.raises(StorageUnavailable, match="record elsewhere"):
        await broker.start()


def test_names_must_be_there() -> None:
    with pytest.raises(ValueError, match="`cloud` must not be empty"):
        Recording(cloud="")


def test_messages_of_other_brokers_are_told_where_they_arrive() -> None:
    told: list[tuple[str, bytes]] = []

    class Told:
        def __init__(self, name: str) -> None:
            self._name = name

        def processed(self, publication: object, now: float) -> None:
            told.extend((self._name, each) for each in publication.payloads())  # type: ignore[attr-defined]

        def relayed(self, publication: object, index: int, now: float) -> None:
            raise AssertionError("there is no cloud")

    from tests.unit.fabric.test_bridging import connect, publish, subscribe

    mesh = Mesh()
    a, b, c = mesh.add("a"), mesh.add("b"), mesh.add("c")
    for pair in (("a", "b"), ("a", "c"), ("b", "c")):
        mesh.link(*pair)
    for node, name in ((a, "a"), (b, "b"), (c, "c")):
        node.engine.effects.witness = Told(name)
    mesh.run()
    subscriber, publisher = connect(b, "subscriber"), connect(a, "publisher")
    subscribe(b, subscriber, "rooms/+")
    mesh.run()
    for number, qos in enumerate((0, 1, 2)):
        publish(a, publisher, "rooms/1", str(number).encode(), qos, number + 1)
    mesh.run()
    assert sorted(told) == sorted((name, str(number).encode()) for name in ("a", "b") for number in range(3))

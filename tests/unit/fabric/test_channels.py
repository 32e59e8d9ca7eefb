"""Messages between two brokers: bounds, files, pace, gaps, what expires or is too large, who is forgotten."""

from __future__ import annotations

import pytest

from nearcast.config import Limits
from nearcast.errors import StorageUnavailable
from nearcast.fabric import frames
from nearcast.fabric.channels import RELIABLE_STREAM, UNRELIABLE_STREAM, forget_peers
from nearcast.fabric.frames import frame
from nearcast.fabric.links import Link
from nearcast.fabric.messages import MAX_PART_BYTES
from nearcast.fabric.outgoing import MAX_READS, PeerSession
from nearcast.fabric.parts import Peer
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.records import number
from tests.fabric_clients import Client
from tests.fabric_harness import End, MemorySpool, Mesh


def pair(settings: FabricSettings | None = None, *, durable: bool = False, limits: Limits | None = None) -> Mesh:
    mesh = Mesh(settings=settings, limits=limits)
    mesh.add("a", durable=durable)
    mesh.add("b", durable=durable)
    return mesh


def linked(settings: FabricSettings | None = None, *, durable: bool = False) -> tuple[Mesh, tuple[End, End]]:
    mesh = pair(settings, durable=durable)
    stream = mesh.link("a", "b")
    mesh.run()
    return mesh, stream


def subscribed(mesh: Mesh) -> tuple[Client, Client]:
    """A publisher at ``a``, a subscriber with a session at ``b``."""
    subscriber = Client(mesh.nodes["b"], "subscriber", expiry=100_000)
    subscriber.subscribe("t")
    mesh.run()
    return Client(mesh.nodes["a"], "publisher"), subscriber


def link_of(end: End) -> Link:
    assert end.link is not None
    return end.link


def session_at(mesh: Mesh, name: str, other: str) -> PeerSession:
    return mesh.nodes[name].fabric.peers[other].session


def payloads(client: Client) -> list[bytes]:
    client.read()
    return [message.payload for message in client.messages]


def test_a_queue_that_is_too_long_goes_on_in_files_and_arrives_in_order() -> None:
    settings = FabricSettings(max_queued_bytes=2_000, max_queued_messages=40)
    mesh, stream = linked(settings, durable=True)
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 100 for index in range(200)]
    for payload in sent:
        publisher.publish("t", payload, 1)
        mesh.nodes["a"].sync()
    session = session_at(mesh, "a", "b")
    assert session.dropped_messages == 0
    assert session.spilled_messages > 150
    assert session.queued_bytes <= 2_000
    assert len(mesh.nodes["a"].spool.kept) > 10
    mesh.nodes["a"].crash()
    session = session_at(mesh, "a", "b")
    assert session.spilled_messages > 150
    mesh.link("b", "a")
    mesh.run()
    assert payloads(subscriber) == sent
    mesh.advance(2.0)
    assert not mesh.nodes["a"].spool.kept
    assert (session.spilled, session.spilled_bytes, session.spilled_messages, session.queued_bytes) == (None, 0, 0, 0)


def test_files_that_the_journal_knows_nothing_of_are_removed_at_the_start() -> None:
    mesh, _ = linked(durable=True)
    mesh.nodes["a"].spool.kept[3, 77] = b"left by a crash"
    mesh.nodes["a"].crash()
    assert not mesh.nodes["a"].spool.kept


class QuickSpool(MemorySpool):
    """Its files are there from the moment that their writing begins, as on a disk."""

    def files(self) -> list[tuple[int, int]]:
        return [*self.kept, *self.begun]

    def remove(self, session_number: int, file_number: int) -> None:
        super().remove(session_number, file_number)
        self.begun.pop((session_number, file_number), None)


def test_a_file_that_is_begun_at_the_start_is_not_taken_for_one_that_nobody_knows() -> None:
    mesh, stream = linked(FabricSettings(max_queued_bytes=20_000, max_queued_messages=1_000), durable=True)
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 100 for index in range(150)]
    for payload in sent:
        publisher.publish("t", payload, 1)
    node = mesh.nodes["a"]
    node.spool = QuickSpool()
    node.crash(power_cut=False)
    assert len(node.spool.begun) == 1
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == sent


@pytest.mark.parametrize("damage", [b"", b"nonsense", None])
def test_a_file_that_cannot_be_read_costs_its_messages_and_no_other(damage: bytes | None) -> None:
    settings = FabricSettings(max_queued_bytes=2_000, max_queued_messages=40)
    mesh, stream = linked(settings, durable=True)
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 100 for index in range(60)]
    for payload in sent:
        publisher.publish("t", payload, 1)
        mesh.nodes["a"].sync()
    session = session_at(mesh, "a", "b")
    assert session.spilled is not None
    lost = session.spilled[1]
    if damage is None:
        del mesh.nodes["a"].spool.kept[session.number, lost.number]
    else:
        mesh.nodes["a"].spool.kept[session.number, lost.number] = damage
    mesh.link("a", "b")
    mesh.run()
    if damage is None:
        assert len(payloads(subscriber)) < len(sent) - lost.messages
        for _ in range(MAX_READS):
            mesh.advance(1.0)
    assert len(payloads(subscriber)) == len(sent) - lost.messages
    assert session.unreadable_files == 1
    assert session.dropped_messages == lost.messages
    assert not session.queued_messages
    assert session.spilled is None


class FailingSpool(MemorySpool):
    """Refuses what is asked of it while it is ``out``."""

    out = False
    asked = 0

    def write(self, session_number: int, file_number: int, data: bytes) -> None:
        self.asked += 1
        if self.out:
            raise StorageUnavailable("spool", "no space left on device")
        super().write(session_number, file_number, data)

    def read(self, session_number: int, file_number: int) -> bytes:
        self.asked += 1
        if self.out:
            raise StorageUnavailable("spool", "too many open files")
        return super().read(session_number, file_number)


def test_a_disk_that_gives_nothing_for_a_moment_costs_no_messages() -> None:
    mesh = pair(FabricSettings(max_queued_bytes=2_000, max_queued_messages=40), durable=True)
    spool = FailingSpool()
    mesh.nodes["a"].spool = spool
    mesh.nodes["a"].crash()
    stream = mesh.link("a", "b")
    mesh.run()
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 100 for index in range(80)]
    for payload in sent[:60]:
        publisher.publish("t", payload, 1)
        mesh.nodes["a"].sync()
    spool.out = True
    spool.asked = 0
    mesh.link("a", "b")
    mesh.run()
    for payload in sent[60:]:
        publisher.publish("t", payload, 1)
        mesh.run()
    assert payloads(subscriber) == []
    assert spool.asked <= 4  # not with every message
    spool.out = False
    mesh.advance(1.0)
    mesh.advance(1.0)
    assert payloads(subscriber) == sent


def test_a_full_disk_is_not_tried_with_every_message() -> None:
    mesh = pair(FabricSettings(max_queued_bytes=2_000, max_queued_messages=40), durable=True)
    spool = FailingSpool()
    mesh.nodes["a"].spool = spool
    mesh.nodes["a"].crash()
    stream = mesh.link("a", "b")
    mesh.run()
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    spool.out = True
    sent = [b"%03d" % index + b"." * 100 for index in range(100)]
    for payload in sent:
        publisher.publish("t", payload, 1)
        mesh.nodes["a"].sync()
    assert spool.asked == 1
    spool.out = False
    mesh.advance(1.0)
    assert session_at(mesh, "a", "b").spilled_messages
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == sent


def test_without_a_journal_what_has_no_room_is_dropped_and_counted() -> None:
    mesh, stream = linked(FabricSettings(max_queued_messages=5))
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    for index in range(8):
        publisher.publish("t", b"%d" % index, 1)
    session = session_at(mesh, "a", "b")
    assert session.dropped_messages == 3
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == [b"0", b"1", b"2", b"3", b"4"]


def test_a_disk_that_is_slow_for_a_moment_costs_no_messages() -> None:
    mesh, stream = linked(FabricSettings(max_queued_bytes=2_000), durable=True)
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 100 for index in range(100)]
    for payload in sent:
        publisher.publish("t", payload, 1)
    session = session_at(mesh, "a", "b")
    assert session.spilling is not None
    assert session.queued_messages == 100
    mesh.run()
    assert session.queued_bytes <= 2_000
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == sent


def test_disk_space_for_a_broker_that_is_away_is_bounded() -> None:
    settings = FabricSettings(max_queued_bytes=2_000, max_spilled_bytes=3_000)
    mesh, stream = linked(settings, durable=True)
    publisher, _ = subscribed(mesh)
    mesh.cut(stream)
    for index in range(100):
        publisher.publish("t", b"%03d" % index + b"." * 100, 1)
        mesh.nodes["a"].sync()
    session = session_at(mesh, "a", "b")
    assert 3_000 <= session.spilled_bytes < 3_000 + 2_000
    assert session.dropped_messages > 30
    assert session.queued_messages + session.spilled_messages + session.dropped_messages == 100


def test_after_an_outage_a_backlog_is_paced_and_new_messages_stay_in_order() -> None:
    rate = 4_000_000
    mesh, stream = linked(FabricSettings(catch_up_bytes_per_second=rate, max_unconfirmed_bytes=1 << 30))
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    sent = [b"%03d" % index + b"." * 60_000 for index in range(100)]
    for payload in sent:
        publisher.publish("t", payload, 1)
    mesh.link("a", "b")
    mesh.run()
    session = session_at(mesh, "a", "b")
    assert session.catching_up
    at_once = len(payloads(subscriber))
    assert 10 < at_once < 25  # a quarter of a second's worth
    mesh.advance(0.25)
    assert at_once + 10 < len(payloads(subscriber)) < at_once + 25
    publisher.publish("t", b"new", 1)
    sent.append(b"new")
    for _ in range(10):
        mesh.advance(0.25)
    assert payloads(subscriber) == sent
    assert not session.catching_up


def test_what_expires_while_it_waits_does_not_arrive_and_nothing_waits_for_it() -> None:
    mesh, stream = linked()
    publisher, subscriber = subscribed(mesh)
    mesh.cut(stream)
    publisher.publish("t", b"short", 1, properties=Properties(message_expiry_interval=1))
    mesh.now += 5
    publisher.publish("t", b"long", 1, properties=Properties(message_expiry_interval=1_000))
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == [b"long"]
    assert mesh.nodes["a"].engine.stats.dropped_expired == 1
    assert not session_at(mesh, "a", "b").queued_messages
    (message,) = subscriber.messages
    assert message.properties is not None
    assert message.properties.message_expiry_interval in (999, 1_000)


@pytest.mark.parametrize("qos", [0, 1])
def test_what_is_too_large_for_the_other_broker_is_dropped_and_counted(qos: int) -> None:
    mesh = Mesh(limits=Limits(max_packet_bytes=3_000_000))
    mesh.add("a")
    mesh.limits = Limits(max_packet_bytes=1_000_000)
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    publisher, subscriber = subscribed(mesh)
    publisher.publish("t", b"x" * 2_500_000, qos)
    publisher.publish("t", b"x" * 900_000, qos)
    mesh.run()
    assert [len(payload) for payload in payloads(subscriber)] == [900_000]
    assert mesh.nodes["a"].engine.stats.dropped_too_large == 1
    assert mesh.nodes["a"].fabric.peers["b"].up
    assert not session_at(mesh, "a", "b").queued_messages


def test_a_topic_that_is_not_allowed_there_does_not_end_the_link() -> None:
    mesh = Mesh(limits=Limits(max_topic_levels=10))
    mesh.add("a")
    mesh.limits = Limits(max_topic_levels=3)
    mesh.add("b")
    mesh.link("a", "b")
    mesh.run()
    subscriber = Client(mesh.nodes["b"], "subscriber")
    subscriber.subscribe("#")
    mesh.run()
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish("1/2/3/4", b"deep", 1)
    publisher.publish("1/2", b"fine", 1)
    mesh.run()
    assert payloads(subscriber) == [b"fine"]
    assert mesh.nodes["b"].fabric.channels.refused == 1
    deep = Client(mesh.nodes["a"], "deep")
    deep.subscribe("1/2/3/4/#")
    mesh.run()
    assert mesh.nodes["b"].fabric.peers["a"].up


def test_a_frame_that_got_lost_on_the_way_is_asked_for_again() -> None:
    mesh, stream = linked()
    publisher, subscriber = subscribed(mesh)
    publisher.publish("t", b"1", 1)
    mesh.run()
    publisher.publish("t", b"2", 1)
    assert stream[1].inbox
    stream[1].inbox.clear()  # as a relay does that dies
    publisher.publish("t", b"3", 1)
    publisher.publish("t", b"4", 1)
    mesh.run()
    assert payloads(subscriber) == [b"1", b"2", b"3", b"4"]
    assert mesh.nodes["b"].fabric.channels.gaps == 1


def test_the_last_frame_is_sent_again_when_nothing_is_heard_of_it() -> None:
    mesh, stream = linked()
    publisher, subscriber = subscribed(mesh)
    publisher.publish("t", b"1", 2)
    stream[1].inbox.clear()
    mesh.run()
    assert payloads(subscriber) == []
    for _ in range(8):
        mesh.advance(1.0)
    assert payloads(subscriber) == [b"1"]
    assert session_at(mesh, "a", "b").rewinds == 1


def test_a_message_after_a_long_silence_is_not_sent_twice() -> None:
    mesh, stream = linked()
    publisher, _ = subscribed(mesh)
    publisher.publish("t", b"1", 1)
    mesh.run()
    mesh.advance(60.0)
    publisher.publish("t", b"2", 1)
    on_its_way = list(stream[1].inbox)
    stream[1].inbox.clear()
    mesh.advance(2.0)
    stream[1].inbox.extend(on_its_way)
    mesh.run()
    assert session_at(mesh, "a", "b").rewinds == 0
    assert mesh.nodes["b"].fabric.channels.duplicates == 0


def test_a_broker_that_is_away_too_long_is_forgotten() -> None:
    settings = FabricSettings(keep_for_seconds=100, max_queued_bytes=2_000)
    mesh, stream = linked(settings, durable=True)
    publisher, _ = subscribed(mesh)
    mesh.cut(stream)
    for _ in range(60):
        publisher.publish("t", b"." * 100, 1)
        mesh.nodes["a"].sync()
    a = mesh.nodes["a"]
    assert a.spool.kept
    mesh.advance(99)
    assert "b" in a.fabric.peers
    mesh.advance(5)
    assert "b" not in a.fabric.peers
    for _ in range(len(a.spool.kept)):  # one after the other
        mesh.advance(1.0)
    assert not a.spool.kept
    assert a.engine.tree.count == 0
    a.crash(power_cut=False)
    assert not a.fabric.peers
    assert not a.engine.origins.by_name


def test_a_link_that_was_quiet_for_long_does_not_count_as_being_away() -> None:
    mesh, stream = linked(FabricSettings(keep_for_seconds=60))
    publisher, subscriber = subscribed(mesh)
    for _ in range(100):
        mesh.advance(1.0)
    mesh.cut(stream)
    mesh.advance(2.0)
    publisher.publish("t", b"kept", 1)
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == [b"kept"]


def test_what_was_queued_for_a_group_elsewhere_is_given_to_others_when_that_broker_is_forgotten() -> None:
    mesh, stream = linked(FabricSettings(keep_for_seconds=100))
    there = Client(mesh.nodes["b"], "there", expiry=10_000)
    there.subscribe("$share/g/t")
    mesh.run()
    mesh.cut(stream)
    publisher = Client(mesh.nodes["a"], "publisher")
    publisher.publish("t", b"1", 1)
    here = Client(mesh.nodes["a"], "here")
    here.subscribe("$share/g/t")
    mesh.advance(150)
    assert payloads(here) == [b"1"]


def test_what_waits_for_a_group_elsewhere_in_files_is_given_to_others_too() -> None:
    settings = FabricSettings(keep_for_seconds=100, max_queued_bytes=2_000, max_queued_messages=40)
    mesh, stream = linked(settings, durable=True)
    there = Client(mesh.nodes["b"], "there", expiry=10_000)
    there.subscribe("$share/g/t")
    there.subscribe("plain")
    mesh.run()
    mesh.cut(stream)
    publisher = Client(mesh.nodes["a"], "publisher")
    sent = [b"%03d" % index + b"." * 100 for index in range(60)]
    for payload in sent:
        publisher.publish("t", payload, 1)
        publisher.publish("plain", payload, 1)
        mesh.nodes["a"].sync()
    files = len(mesh.nodes["a"].spool.kept)
    assert files > 3
    here = Client(mesh.nodes["a"], "here")
    here.subscribe("$share/g/t")
    mesh.advance(150)
    for _ in range(files):
        mesh.advance(1.0)
    assert sorted(payloads(here)) == sent
    assert not mesh.nodes["a"].spool.kept


def test_a_broker_that_leaves_its_fabric_keeps_nothing_for_it() -> None:
    mesh, stream = linked(durable=True)
    publisher, _ = subscribed(mesh)
    mesh.cut(stream)
    publisher.publish("t", b"1", 1)
    a = mesh.nodes["a"]
    forget_peers(a.engine, mesh.now)
    assert a.engine.tree.count == 0
    assert a.engine.stats.queued_messages == 0


def test_epoch_and_sequences_survive_a_restart_with_a_journal_whatever_the_clock_says() -> None:
    mesh, _ = linked(durable=True)
    publisher, subscriber = subscribed(mesh)
    publisher.publish("t", b"1", 1)
    mesh.run()
    a = mesh.nodes["a"]
    epoch, sequence = a.fabric.epoch, a.engine.router.next_sequence
    mesh.now -= 50_000.0
    a.crash()
    assert a.fabric.epoch == epoch
    assert a.engine.router.next_sequence > sequence
    mesh.link("a", "b")
    mesh.run()
    again = Client(a, "publisher")
    again.publish("t", b"2", 1)
    mesh.run()
    assert payloads(subscriber) == [b"1", b"2"]


def test_a_restart_without_a_journal_begins_a_new_epoch() -> None:
    mesh, _ = linked()
    a, b = mesh.nodes["a"], mesh.nodes["b"]
    publisher, subscriber = subscribed(mesh)
    publisher.publish("t", b"1", 1)
    mesh.run()
    epoch = a.fabric.epoch
    a.crash()
    assert a.fabric.epoch != epoch
    mesh.link("a", "b")
    mesh.run()
    assert b.fabric.peers["a"].epoch == a.fabric.epoch
    Client(a, "publisher").publish("t", b"2", 1)
    mesh.run()
    assert payloads(subscriber) == [b"1", b"2"]


def test_interest_that_was_confirmed_holds_after_a_crash_before_the_link_is_back() -> None:
    mesh, _ = linked(durable=True)
    _, subscriber = subscribed(mesh)
    mesh.nodes["a"].crash()
    Client(mesh.nodes["a"], "publisher").publish("t", b"early", 1)
    mesh.nodes["a"].sync()
    mesh.nodes["a"].crash()
    mesh.link("a", "b")
    mesh.run()
    assert payloads(subscriber) == [b"early"]


class Watcher:
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def progressed(self, peer: Peer, token: int, stream: int, now: float) -> None:
        self.seen.append((token, stream))


def test_progress_comes_behind_all_that_was_sent_before_in_both_streams() -> None:
    mesh, _ = linked(FabricSettings(max_unconfirmed_bytes=1))
    publisher, subscriber = subscribed(mesh)
    b = mesh.nodes["b"]
    watcher = Watcher()
    b.fabric.channels.watcher = watcher
    for index in range(3):
        publisher.publish("t", b"%d" % index, 1)
    publisher.publish("t", b"0", 0)
    position = mesh.nodes["a"].engine.router.next_sequence - 1
    assert b.fabric.channels.ask_progress(b.fabric.peers["a"], 7)
    b.flush()
    mesh.run()
    assert sorted(watcher.seen) == [(7, UNRELIABLE_STREAM), (7, RELIABLE_STREAM)]
    assert b.fabric.peers["a"].received == position
    assert b.fabric.peers["a"].received_unreliable == position
    publisher.publish("t", b"3", 1)
    mesh.run()
    assert sorted(payloads(subscriber)) == [b"0", b"0", b"1", b"2", b"3"]


def test_what_does_not_wait_for_the_others_disk_works_before_it_says_what_it_has() -> None:
    """CHANNEL waits for the disk of whoever says it; interest, barriers and QoS 0 messages do not."""
    mesh = pair()
    mesh.add("b", durable=True)
    a, b = mesh.nodes["a"], mesh.nodes["b"]
    subscriber = Client(b, "subscriber", expiry=100_000)
    subscriber.subscribe("t")
    mesh.run()
    Client(b, "another", expiry=100_000)  # the disk has something to do
    stream = mesh.link("a", "b")
    for _ in range(10):  # everything arrives but what waits for the disk
        for end in stream:
            while end.inbox and end.link is not None:
                end.node.fabric.receive(end.link, end.inbox.popleft(), mesh.now)
                end.node.flush()
    session = session_at(mesh, "a", "b")
    assert not session.ready
    assert "t" in session.subscriptions
    watcher = Watcher()
    b.fabric.channels.watcher = watcher
    assert b.fabric.channels.ask_progress(b.fabric.peers["a"], 7)
    b.flush()
    publisher = Client(a, "publisher")
    publisher.publish("t", b"at once", 0)
    publisher.publish("t", bytes(MAX_PART_BYTES), 0)  # whether this is too large is not known yet
    while stream[0].inbox:
        a.fabric.receive(link_of(stream[0]), stream[0].inbox.popleft(), mesh.now)
        a.flush()
    mesh.run()
    assert payloads(subscriber) == [b"at once"]
    assert sorted(watcher.seen) == [(7, UNRELIABLE_STREAM), (7, RELIABLE_STREAM)]
    assert a.engine.stats.dropped_too_large == 1


@pytest.mark.parametrize(
    "content",
    [
        frame(frames.MESSAGES, number(4)),
        frame(frames.MESSAGES, number(4), number(9), number(0), number(2), number(7), number(1), *[number(0)] * 6),
        frame(frames.RECEIVED),
        frame(frames.INTEREST, number(1), number(0), number(5), number(1), b"\x02\xff\xfe"),
    ],
)
def test_nonsense_ends_the_link_and_nothing_else(content: bytes) -> None:
    mesh, stream = linked()
    stream[1].inbox.append(content)
    mesh.run()
    assert not mesh.nodes["b"].fabric.peers["a"].up

"""What the engine hands to whatever keeps topics, what it answers then, and how QoS 2 survives a crash between two files."""

from __future__ import annotations

import pytest

from nearcast.mqtt import reasons, records
from nearcast.mqtt.packets import MQTT_3_1_1, MQTT_5, Disconnect, Properties, PubAck, PubComp, Publish, PubRec, PubRel, Will
from nearcast.mqtt.recovery import Recovery, Snapshot
from tests.engine_harness import World


class Kept:
    """One topic's way into a :class:`FakeLog`."""

    def __init__(self, log: FakeLog, topic: str, durable: bool) -> None:
        self.durable = durable
        self._log = log
        self._topic = topic

    def keep(self, payloads: list[bytes], qos: int, retain: bool, properties: bytes, publisher: bytes, mark: int) -> bool:
        if self._log.full:
            return False
        self._log.calls.append((self._topic, payloads, qos, retain, properties, publisher.decode(), mark))
        return True


class FakeLog:
    """Keeps "d/..." as durable topics and "t/..." as tapped ones, in a list."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[bytes], int, bool, bytes, str, int]] = []
        self.asked: list[bytes] = []
        self.full = False
        self.durable = b"d/"

    def keeping(self, topic: bytes) -> Kept | None:
        self.asked.append(topic)
        if topic.startswith((self.durable, b"t/")):
            return Kept(self, topic.decode(), topic.startswith(self.durable))
        return None

    def payloads(self) -> list[bytes]:
        return [payload for call in self.calls for payload in call[1]]


def world_with_log(durable: bool = True) -> tuple[World, FakeLog]:
    world = World(durable=durable)
    log = FakeLog()
    world.engine.keep_with(log)
    return world, log


def code_of(packet: object) -> int:
    assert isinstance(packet, PubAck | PubRec)
    return packet.reason_code


# --- what is kept ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_durable_topic_is_kept_at_every_qos_and_without_subscribers(qos: int) -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    client.publish("d/a", b"x", qos, retain=True, properties=Properties(content_type="text/plain"))
    assert log.calls == [("d/a", [b"x"], qos, True, b"\x03\x00\x0atext/plain", "ann", 0)]
    if qos:
        assert code_of(client.packets()[0]) == reasons.SUCCESS


def test_a_tap_is_copied_and_a_plain_topic_is_not() -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    client.publish("t/a", b"x", 1).publish("plain", b"y", 1, packet_id=2)
    assert log.payloads() == [b"x"]
    assert [code_of(packet) for packet in client.packets()] == [reasons.NO_MATCHING_SUBSCRIBERS] * 2


def test_messages_that_come_together_are_kept_by_one_call() -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    client.send(*(Publish("d/a", b"%d" % number, 1, False, False, number + 1) for number in range(5)))
    assert [call[1] for call in log.calls] == [[b"0", b"1", b"2", b"3", b"4"]]
    assert len(client.packets()) == 5


def test_a_topic_is_asked_about_once_until_rules_change() -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    for number in range(3):
        client.publish("d/a", b"%d" % number).publish("other", b"x")
    assert log.asked == [b"d/a", b"other"]
    log.durable = b"other"
    world.engine.keep_with(log)
    client.publish("d/a", b"late").publish("other", b"kept now")
    assert log.payloads() == [b"0", b"1", b"2", b"kept now"]


def test_message_expiry_is_kept_as_it_came_and_means_nothing_else() -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    client.publish("d/a", b"x", properties=Properties(message_expiry_interval=300))
    assert log.calls[0][4] == b"\x02\x00\x00\x01\x2c"


def test_an_alias_is_resolved() -> None:
    world, log = world_with_log()
    client = world.connect("ann")
    client.publish("d/a", b"1", properties=Properties(topic_alias=1))
    client.publish("", b"2", properties=Properties(topic_alias=1))
    assert [(call[0], call[1], call[4]) for call in log.calls] == [("d/a", [b"1"], b""), ("d/a", [b"2"], b"")]


def test_what_the_broker_publishes_is_kept_and_its_own_figures_never() -> None:
    world, log = world_with_log()
    log.durable = b""
    world.engine.publish("$SYS/broker/uptime", b"1", 0, True, world.now)
    world.engine.publish("d/a", b"news", 1, False, world.now)
    assert log.calls == [("d/a", [b"news"], 1, False, b"", "", 0)]
    assert b"$SYS/broker/uptime" not in log.asked


def test_a_will_is_kept() -> None:
    world, log = world_with_log()
    client = world.connect("ann", will=Will("d/will", b"gone", 1, True))
    client.lose()
    assert log.calls == [("d/will", [b"gone"], 1, True, b"", "ann", 0)]


def test_deliver_reaches_subscribers_and_not_the_log() -> None:
    world, log = world_with_log()
    subscriber = world.connect("sue")
    subscriber.subscribe("d/#", 1)
    world.engine.deliver(b"d/a", [b"1", b"22", b"33", b"4"], 1, True, b"\x03\x00\x01t", world.now)
    world.flush()
    assert subscriber.payloads() == [b"1", b"22", b"33", b"4"]
    assert log.calls == []
    late = world.connect("late")
    late.subscribe("d/#", 1)
    assert late.payloads() == [b"4"]


class Denied:
    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return True


def test_what_is_not_allowed_is_not_kept() -> None:
    world, log = world_with_log()
    world.engine.set_authorizer(Denied())
    client = world.connect("ann")
    client.publish("d/a", b"x", 1)
    assert code_of(client.packets()[0]) == reasons.NOT_AUTHORIZED
    assert log.calls == []


# --- no room ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
def test_without_room_a_durable_message_is_refused_and_nowhere(qos: int) -> None:
    world, log = world_with_log()
    log.full = True
    subscriber = world.connect("sue")
    subscriber.subscribe("#", 2)
    client = world.persistent("ann")
    client.publish("d/a", b"x", qos, retain=True)
    assert code_of(client.packets()[0]) == reasons.QUOTA_EXCEEDED
    assert subscriber.payloads() == []
    assert world.engine.retained.count == 0
    assert world.engine.stats.not_kept == 1
    assert not world.session("ann").received_ids
    world.validate()


def test_without_room_3_1_1_is_sent_away_rather_than_lied_to() -> None:
    world, log = world_with_log()
    log.full = True
    client = world.connect("ann", MQTT_3_1_1)
    client.publish("d/a", b"x", 0)
    before = client.closed
    client.publish("d/a", b"x", 1)
    assert (before, client.closed, client.take()) == (False, True, b"")
    world.validate()


def test_without_room_a_tap_lets_messages_pass() -> None:
    world, log = world_with_log()
    log.full = True
    subscriber = world.connect("sue")
    subscriber.subscribe("#", 1)
    client = world.connect("ann")
    client.publish("t/a", b"x", 1)
    assert code_of(client.packets()[0]) == reasons.SUCCESS
    assert subscriber.payloads() == [b"x"]


def test_without_room_a_will_is_not_published() -> None:
    world, log = world_with_log()
    log.full = True
    subscriber = world.connect("sue")
    subscriber.subscribe("#", 1)
    world.connect("ann", will=Will("d/will", b"gone", 1, False)).lose()
    assert subscriber.payloads() == []
    assert world.engine.stats.wills_published == 0


# --- marks -----------------------------------------------------------------------------------------------------------------


def kept_records(world: World) -> list[tuple[int, int, bytes]]:
    """(mark, session, packet identifiers) of every KEPT record."""
    found = []
    for record in world.records():
        if record[0] == records.KEPT:
            fields = records.Fields(record)
            found.append((fields.number(), fields.number(), fields.blob()))
    return found


def test_qos_2_of_a_session_that_stays_is_marked_in_both_files() -> None:
    world, log = world_with_log()
    client = world.persistent("ann")
    client.publish("d/a", b"1", 2, packet_id=7).publish("d/a", b"2", 2, packet_id=8).publish("d/a", b"3", 1, packet_id=9)
    assert [call[6] for call in log.calls] == [1, 2, 0]
    number = world.session("ann").number
    assert kept_records(world) == [(1, number, b"\x00\x07"), (2, number, b"\x00\x08")]
    # In the frame that remembers the identifier: there together, or not at all.
    for frame in world.frames:
        kinds = [record[0] for record in frame]
        assert kinds.count(records.KEPT) == kinds.count(records.REMEMBERED)


def test_what_needs_no_mark_gets_none() -> None:
    world, log = world_with_log()
    world.connect("short").publish("d/a", b"1", 2)
    world.persistent("ann").publish("t/a", b"2", 2)
    assert [call[6] for call in log.calls] == [0, 0]
    assert kept_records(world) == []


def test_a_will_at_qos_2_is_marked() -> None:
    world, log = world_with_log()
    client = world.connect("ann", clean=False, expiry=1_000, will=Will("d/will", b"gone", 2, False))
    client.lose()
    assert [call[6] for call in log.calls] == [1]
    assert kept_records(world) == [(1, 0, b"")]


def test_a_released_identifier_is_forgotten_with_its_mark() -> None:
    world, _ = world_with_log()
    client = world.persistent("ann")
    client.publish("d/a", b"1", 2, packet_id=7)
    assert world.session("ann").marks == {7: 1}
    client.send(PubRel(7))
    assert world.session("ann").marks is None
    assert world.recovered().session("ann").marks == {}


def crashed(world: World, log_mark: int) -> tuple[World, FakeLog]:
    """The world after a crash, when the log has got so far."""
    again = world.recovered()
    recovery = again.recovery
    assert recovery is not None
    recovery.reconcile(log_mark)
    recovery.finish(again.now)
    again.flush()
    log = FakeLog()
    again.engine.keep_with(log)
    return again, log


@pytest.mark.parametrize("version", [MQTT_3_1_1, MQTT_5])
def test_a_message_that_the_log_lost_is_kept_when_it_comes_again_and_delivered_once(version: int) -> None:
    world, _ = world_with_log()
    subscriber = world.persistent("sue")
    subscriber.subscribe("d/#", 2)
    subscriber.send(Disconnect())
    world.persistent("ann", version).publish("d/a", b"1", 2, packet_id=7).publish("d/a", b"2", 2, packet_id=8)

    again, log = crashed(world, log_mark=1)
    client = again.persistent("ann", version)
    for number, payload in ((7, b"1"), (8, b"2"), (8, b"2")):
        client.publish("d/a", payload, 2, packet_id=number, dup=True)
    assert log.payloads() == [b"2"], "the log had the first, and the second need be there once"
    assert log.calls[0][6] == 3, "marks go on behind those of either file"
    assert [packet.packet_id for packet in client.packets() if isinstance(packet, PubRec)] == [7, 8, 8]
    client.send(PubRel(7), PubRel(8))
    assert [type(packet) for packet in client.packets()] == [PubComp, PubComp]
    assert again.session("ann").marks is None
    back = again.persistent("sue")
    assert [message.payload for message in back.acknowledge_all()] == [b"1", b"2"]
    again.validate()


def test_a_second_crash_does_not_forget_what_the_first_lost() -> None:
    world, _ = world_with_log()
    world.persistent("ann").publish("d/a", b"1", 2, packet_id=7)
    again, _ = crashed(world, log_mark=0)
    # Everything is written anew at a start: only that is left.
    snapshot = Snapshot(again.engine)
    again.frames = []
    while step := snapshot.step(1_000):
        again.frames.append(step)
    third, log = crashed(again, log_mark=0)
    third.persistent("ann").publish("d/a", b"1", 2, packet_id=7, dup=True)
    assert log.payloads() == [b"1"]
    assert log.calls[0][6] == 2


def test_marks_survive_a_snapshot() -> None:
    world, _ = world_with_log()
    client = world.persistent("ann")
    client.publish("d/a", b"1", 2, packet_id=7).publish("d/a", b"2", 2, packet_id=8)
    client.send(PubRel(7), PubRel(8))
    snapshot = Snapshot(world.engine)
    again = World(durable=True)
    recovery = Recovery(again.engine)
    while step := snapshot.step(1):
        for record in step:
            recovery.apply(record)
    assert again.engine.effects.last_mark == 2


def test_a_lost_message_whose_topic_is_kept_no_more_is_only_answered() -> None:
    world, _ = world_with_log()
    world.persistent("ann").publish("d/a", b"1", 2, packet_id=7)
    again, log = crashed(world, log_mark=0)
    log.durable = b"nothing"
    again.engine.keep_with(log)
    client = again.persistent("ann")
    client.publish("d/a", b"1", 2, packet_id=7, dup=True)
    assert log.calls == []
    assert [type(packet) for packet in client.packets()] == [PubRec]

"""The engine's edges: endings, deadlines, bounds, verdicts that come late, and the order of records and output."""

from __future__ import annotations

import pytest

from nearcast.config import Limits
from nearcast.errors import UnknownRecord
from nearcast.mqtt import reasons, records
from nearcast.mqtt.access import Credentials, Verdict
from nearcast.mqtt.codec import encode
from nearcast.mqtt.packets import (
    Auth,
    ConnAck,
    Connect,
    Disconnect,
    Packet,
    PingReq,
    PingResp,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    SubscriptionRequest,
    Will,
)
from nearcast.mqtt.recovery import Recovery, Snapshot
from tests.engine_harness import Client, World, durable_state


class Pending:
    """Answers nobody until the test does."""

    def __init__(self) -> None:
        self.asked: list[Credentials] = []

    def authenticate(self, credentials: Credentials, connection: object) -> Verdict | None:
        self.asked.append(credentials)
        return None


def decide(client: Client, verdict: Verdict) -> None:
    client.world.engine.authenticated(client.connection, verdict, client.world.now)
    client.world.flush()


# --- verdicts that come late ----------------------------------------------------------------------------------------------


def test_what_arrives_before_the_verdict_waits_for_it() -> None:
    world = World(authenticator=Pending())
    client = world.open(4)
    client.send(Connect("c", 4), PingReq())
    client.send(b"\xc0")
    assert client.take() == b""
    decide(client, Verdict(True))
    assert [type(packet) for packet in client.packets()] == [ConnAck, PingResp]
    client.send(b"\x00")
    assert client.packets() == [PingResp()]


def test_a_late_refusal_forgets_what_arrived() -> None:
    world = World(authenticator=Pending())
    client = world.open(5)
    client.send(Connect("c", 5), Publish("t", b"m", retain=True))
    decide(client, Verdict(False, reasons.NOT_AUTHORIZED, "no"))
    assert client.packets() == [ConnAck(reasons.NOT_AUTHORIZED, False, Properties(reason_string="no"))]
    assert client.closed
    assert world.engine.retained.count == 0


def test_a_verdict_for_a_client_that_left_is_harmless() -> None:
    world = World(authenticator=Pending())
    client = world.open(5)
    client.send(Connect("c", 5))
    client.lose()
    decide(client, Verdict(True))
    assert world.engine.stats.connected_clients == 0
    world.validate()


def test_only_one_verdict_counts() -> None:
    world = World(authenticator=Pending())
    client = world.open(5)
    client.send(Connect("c", 5))
    decide(client, Verdict(True))
    decide(client, Verdict(False, reasons.NOT_AUTHORIZED))
    assert not client.closed


def test_bytes_before_the_verdict_are_bounded() -> None:
    world = World(authenticator=Pending(), limits=Limits(max_packet_bytes=100))
    client = world.open(5)
    client.send(Connect("c", 5))
    for _ in range(4):
        client.send(bytes(40))
    assert client.closed
    assert client.connection.partial is None


def test_bytes_before_the_verdict_of_another_round_are_bounded() -> None:
    authenticator = Pending()
    world = World(authenticator=authenticator, limits=Limits(max_packet_bytes=100))
    client = world.open(5)
    client.send(Connect("c", 5, properties=Properties(authentication_method="X")))
    decide(client, Verdict(True))
    client.packets()
    client.send(Auth(reasons.RE_AUTHENTICATE, Properties(authentication_method="X")), PingReq())
    assert client.take() == b""
    for _ in range(4):
        client.send(encode(PingReq(), 5) * 20)
    (goodbye,) = client.packets()
    assert isinstance(goodbye, Disconnect)
    assert goodbye.reason_code == reasons.QUOTA_EXCEEDED
    assert client.closed


def test_a_refused_round_says_what_a_disconnect_can_say() -> None:
    authenticator = Pending()
    world = World(authenticator=authenticator)
    client = world.open(5)
    client.send(Connect("c", 5, properties=Properties(authentication_method="X", request_problem_information=0)))
    decide(client, Verdict(True))
    client.packets()
    client.send(Auth(reasons.RE_AUTHENTICATE, Properties(authentication_method="X")))
    decide(client, Verdict(False, reasons.BAD_USER_NAME_OR_PASSWORD))
    assert client.packets() == [Disconnect(reasons.UNSPECIFIED_ERROR)]
    assert client.closed


def test_a_client_that_is_never_answered_is_timed_out() -> None:
    world = World(authenticator=Pending(), limits=Limits(connect_timeout_seconds=3))
    client = world.open(5)
    client.send(Connect("c", 5))
    world.advance(2.9)
    before = client.closed
    world.advance(0.2)
    assert (before, client.closed) == (False, True)
    world.validate()


def test_two_clients_of_one_name_wait_for_their_verdicts() -> None:
    world = World(authenticator=Pending())
    first, second = world.open(5), world.open(5)
    first.send(Connect("c", 5))
    second.send(Connect("c", 5))
    decide(second, Verdict(True))
    decide(first, Verdict(True))
    assert (first.closed, second.closed) == (False, True)
    assert world.engine.stats.takeovers == 1
    world.validate()


# --- endings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reason_code", [reasons.SERVER_SHUTTING_DOWN, reasons.ADMINISTRATIVE_ACTION, reasons.SERVER_MOVED])
def test_an_administrative_disconnect(reason_code: int) -> None:
    world = World()
    witness = world.connect("witness")
    witness.subscribe("w")
    new, old = world.connect("new", 5, will=Will("w", b"new")), world.connect("old", 4, will=Will("w", b"old"))
    world.engine.disconnect(new.connection, reason_code, world.now, "other:1883")
    world.engine.disconnect(old.connection, reason_code, world.now)
    world.flush()
    assert new.packets() == [Disconnect(reason_code, Properties(server_reference="other:1883"))]
    assert old.take() == b""
    assert new.closed
    assert old.closed
    assert witness.payloads() == [b"new", b"old"]


def test_nothing_happens_to_a_connection_that_has_ended() -> None:
    world = World()
    client = world.connect("c", 5)
    client.send(Disconnect())
    world.engine.receive(client.connection, b"\xc0\x00", world.now)
    world.engine.disconnect(client.connection, reasons.SERVER_SHUTTING_DOWN, world.now)
    world.engine.writable(client.connection, world.now)
    world.flush()
    assert client.take() == b""
    world.validate()


def test_a_transport_that_was_never_a_client_is_sent_away_silently() -> None:
    world = World()
    client = world.open()
    world.engine.disconnect(client.connection, reasons.SERVER_SHUTTING_DOWN, world.now)
    world.flush()
    assert client.closed
    assert client.take() == b""


def test_a_delayed_will_survives_the_end_of_other_things() -> None:
    world = World()
    witness = world.connect("witness")
    witness.subscribe("w")
    will = Will("w", b"gone", properties=Properties(will_delay_interval=400))
    client = world.connect("c", 5, expiry=1_000, will=will)
    client.lose()
    world.advance(399)
    assert witness.payloads() == []
    world.advance(1)
    assert witness.payloads() == [b"gone"]
    world.advance(599)
    assert "c" in world.engine.sessions.by_client
    world.advance(1)
    assert "c" not in world.engine.sessions.by_client
    assert world.engine.stats.sessions_expired == 1
    world.validate()


def test_clients_that_come_and_go_leave_nothing_behind() -> None:
    world = World()
    for number in range(500):
        client = world.connect(f"c{number}", 5, keep_alive=65_535)
        client.send(Disconnect())
    world.advance(301)
    assert len(world.engine.timers) == 0
    assert world.engine.sessions.by_client == {}
    world.validate()


# --- bounds ---------------------------------------------------------------------------------------------------------------


def test_a_client_that_does_not_read_does_not_grow_the_broker() -> None:
    world = World(limits=Limits(max_output_bytes=2_000, max_queued_messages=30))
    slow = world.persistent("slow")
    slow.subscribe("t", 1)
    slow.connection.congested = True
    fast = world.connect("fast", 4)
    for number in range(200):
        fast.publish("t", b"x" * 50, number % 2, packet_id=number + 1)
    assert slow.connection.out_bytes < 2_200
    assert world.session("slow").queued_messages <= 30
    stats = world.engine.stats
    assert stats.dropped_slow_consumer > 0
    assert stats.dropped_queue_full > 0
    world.validate()
    world.engine.writable(slow.connection, world.now)
    world.flush()
    got = slow.acknowledge_all()
    assert len(got) == 200 - stats.dropped_slow_consumer - stats.dropped_queue_full
    world.validate()


def test_what_is_sent_again_respects_the_output_bound() -> None:
    world = World(limits=Limits(max_output_bytes=1_000))
    client = world.persistent("c", 4)
    client.subscribe("t", 1)
    publisher = world.connect("p", 4)
    for number in range(50):
        publisher.publish("t", bytes([number]) * 100, 1, packet_id=number + 1)
    first = client.payloads()
    assert len(first) == 50
    client.lose()
    again = world.open(4)
    again.connection.congested = True
    again.send(Connect("c", 4, False))
    assert again.connection.out_bytes < 1_300
    world.engine.writable(again.connection, world.now)
    world.flush()
    assert [message.payload for message in again.acknowledge_all()] == first
    world.validate()


def test_new_messages_wait_behind_those_that_are_sent_again() -> None:
    world = World()
    client = world.persistent("c", receive_maximum=3)
    client.subscribe("t", 1)
    publisher = world.connect("p", 4)
    for number in range(3):
        publisher.publish("t", bytes([number]), 1, packet_id=number + 1)
    client.lose()
    again = world.persistent("c", receive_maximum=1)
    publisher.publish("t", bytes([3]), 1, packet_id=9)
    messages = again.acknowledge_all()
    assert [message.payload[0] for message in messages] == [0, 1, 2, 3]
    assert [message.dup for message in messages] == [True, True, True, False]
    world.validate()


def test_acknowledgements_of_what_was_not_sent_again_yet() -> None:
    """The client has them from the connection before, and may say so."""
    world = World()
    client = world.persistent("c")
    client.subscribe("t", 2)
    publisher = world.connect("p", 4)
    for number, qos in enumerate((1, 1, 2, 2)):
        publisher.publish("t", bytes([number]), qos, packet_id=number + 1)
    client.lose()
    again = world.persistent("c", receive_maximum=1)
    assert [packet.packet_id for packet in again.messages()] == [1]
    again.send(PubAck(2), PubRec(3), PubRec(4, reasons.UNSPECIFIED_ERROR))
    assert again.packets() == [PubRel(3)]
    again.send(PubAck(1), PubComp(3))
    assert again.packets() == []
    assert world.session("c").inflight == {}
    assert world.session("c").unsent is None
    world.validate()


def test_a_run_of_acknowledgements_that_ends_in_an_error_counts_up_to_there() -> None:
    world = World(durable=True)
    client = world.persistent("c")
    client.subscribe("t", 2)
    publisher = world.connect("p", 4)
    for number, qos in enumerate((1, 1, 2, 1)):
        publisher.publish("t", bytes([number]), qos, packet_id=number + 1)
    client.send(PubAck(1), PubAck(2), PubAck(3), PubAck(4))
    assert client.closed
    assert sorted(world.session("c").inflight) == [3, 4]
    world.validate()
    assert durable_state(world.recovered()) == durable_state(world)


def test_subscriptions_of_a_refused_packet_size_do_not_block_the_queue() -> None:
    world = World()
    client = world.connect("c", 5, properties=Properties(maximum_packet_size=40, receive_maximum=1))
    client.subscribe("t", 1)
    publisher = world.connect("p", 4)
    for number, size in enumerate((10, 100, 10, 200, 10)):
        publisher.publish("t", b"x" * size, 1, packet_id=number + 1)
    assert [len(message.payload) for message in client.acknowledge_all()] == [10, 10, 10]
    assert world.engine.stats.dropped_too_large == 2
    world.validate()


def test_identifiers_wrap_around_those_in_use() -> None:
    world = World(limits=Limits(max_inflight=10))
    client = world.connect("c", 4)
    client.subscribe("t", 1)
    publisher = world.connect("p", 4)
    publisher.publish("t", b"kept", 1)
    (kept,) = client.messages()
    world.session("c").next_id = 65_534
    publisher.send(*[Publish("t", b"m", 1, packet_id=number + 1) for number in range(5)])
    assert [message.packet_id for message in client.messages()] == [65_534, 65_535, 2, 3, 4]
    assert kept.packet_id == 1
    world.validate()


def test_limits_can_change_while_clients_are_connected() -> None:
    world = World()
    client = world.connect("c", 5)
    world.engine.apply(Limits(max_subscriptions=1, max_topic_levels=2, max_packet_bytes=100))
    assert client.subscribe("a") == 0
    assert client.subscribe("b") == reasons.QUOTA_EXCEEDED
    assert client.subscribe("a/b/c") == reasons.TOPIC_FILTER_INVALID
    client.publish("a/b/c")
    (goodbye,) = client.packets()
    assert isinstance(goodbye, Disconnect)
    assert goodbye.reason_code == reasons.TOPIC_NAME_INVALID


# --- rules that change ----------------------------------------------------------------------------------------------------


class Nobody:
    def may_publish(self, client_id: str, username: str | None, topic: str) -> bool:
        return False

    def may_subscribe(self, client_id: str, username: str | None, topic_filter: str) -> bool:
        return False


def test_rules_can_change_while_clients_are_connected() -> None:
    world = World()
    client = world.connect("c", 5)
    client.subscribe("t", 0)
    client.publish("t", b"1")
    assert client.payloads() == [b"1"]
    world.engine.set_authorizer(Nobody())
    client.publish("t", b"2", 1)
    assert client.packets() == [PubAck(1, reasons.NOT_AUTHORIZED)]
    assert client.subscribe("u") == reasons.NOT_AUTHORIZED
    assert world.engine.stats.dropped_not_authorized == 1
    world.engine.set_authorizer(None)
    client.publish("t", b"3")
    assert client.payloads() == [b"3"]


# --- the broker's own messages --------------------------------------------------------------------------------------------


def test_the_broker_publishes_past_the_rules() -> None:
    world = World(durable=True, authorizer=Nobody())
    world.engine.publish("$SYS/broker/uptime", b"5", 0, True, world.now)
    world.flush()
    world.engine.set_authorizer(None)
    client = world.connect("c")
    client.subscribe("$SYS/#")
    assert client.payloads() == [b"5"]
    assert world.frames == [], "the broker's figures are not journalled"


# --- records before output ------------------------------------------------------------------------------------------------


def test_what_promises_something_is_held_back() -> None:
    """With a journal, no acknowledgement and no QoS 1 or 2 message is in ``take()``: it waits for the records."""
    world = World(durable=True)
    client = world.persistent("c")
    session_records = world.frames.pop()
    assert session_records[0][0] == records.SESSION
    engine, connection = world.engine, client.connection

    def receive(*packets: Packet) -> tuple[bytes, bytes, list[int]]:
        engine.receive(connection, b"".join(encode(packet, 5) for packet in packets), world.now)
        kinds = [record[0] for record in engine.take_records()]
        engine.ready()
        return b"".join(connection.take()), b"".join(connection.take_held() or []), kinds

    out, held, kinds = receive(Subscribe(1, [SubscriptionRequest("t", 2)]))
    assert (out, held) == (b"", encode(SubAck(1, [2]), 5))
    assert kinds == [records.SUBSCRIBED]

    out, held, kinds = receive(Publish("t", b"m", 1, packet_id=1))
    assert (out, held) == (b"", encode(Publish("t", b"m", 1, packet_id=1), 5) + encode(PubAck(1), 5))
    assert kinds == [records.PUBLISHED, records.SENT]

    out, held, kinds = receive(Publish("t", b"m", 2, packet_id=2))
    assert (out, held) == (b"", encode(Publish("t", b"m", 2, packet_id=2), 5) + encode(PubRec(2), 5))
    assert kinds == [records.PUBLISHED, records.SENT, records.REMEMBERED]

    out, held, kinds = receive(PubRel(2), PubAck(1), PubRec(2))
    assert (out, held) == (b"", encode(PubComp(2), 5) + encode(PubRel(2), 5))
    assert kinds == [records.FORGOTTEN, records.ACKNOWLEDGED, records.RELEASED]

    out, held, kinds = receive(Publish("t", b"m", 0), PingReq())
    assert (out, held, kinds) == (encode(Publish("t", b"m"), 5) + encode(PingResp(), 5), b"", [])

    out, held, kinds = receive(PubComp(2), Publish("r", b"m", 0, True))
    assert kinds == [records.ACKNOWLEDGED, records.RETAINED]

    out, held, kinds = receive(Disconnect(properties=Properties(session_expiry_interval=0)))
    assert kinds == [records.SESSION_ENDED]


@pytest.mark.parametrize(
    ("clean", "expiry", "held"), [(True, 100, True), (True, 0, True), (False, 0, True), (False, 100, False)]
)
def test_connack_waits_for_the_disk_when_a_durable_session_ends(clean: bool, expiry: int, held: bool) -> None:
    world = World(durable=True)
    world.persistent("c").lose()
    connection = world.open().connection
    properties = Properties(session_expiry_interval=expiry)
    data = encode(Connect("c", clean_start=clean, properties=properties), 5) + encode(PingReq(), 5)
    world.engine.receive(connection, data, world.now)
    out, waiting = b"".join(connection.take()), b"".join(connection.take_held() or [])
    assert out[:1] == (b"" if held else b"\x20")
    assert waiting[:1] == (b"\x20" if held else b"")
    connection.committed()
    world.engine.receive(connection, encode(PingReq(), 5), world.now)
    assert b"".join(connection.take()) == encode(PingResp(), 5)


def test_without_a_journal_nothing_is_held_and_nothing_recorded() -> None:
    world = World()
    client = world.persistent("c")
    client.subscribe("t", 2)
    engine = world.engine
    engine.receive(client.connection, encode(Publish("t", b"m", 2, packet_id=1, retain=True), 5), world.now)
    assert engine.take_records() == []
    assert client.connection.take_held() is None
    assert b"".join(client.connection.take()) != b""


def test_sessions_that_end_with_their_connection_leave_no_trace() -> None:
    world = World(durable=True)
    client = world.connect("c", 5)
    client.subscribe("t", 2)
    client.publish("t", b"m", 2)
    assert world.frames == []
    client.lose()
    assert world.frames == []


def test_a_held_message_does_not_define_an_alias() -> None:
    """It could be overtaken by one that uses it."""
    world = World(durable=True)
    client = world.connect("c", 5, properties=Properties(topic_alias_maximum=5))
    client.subscribe("t", 1)
    publisher = world.connect("p", 4)
    publisher.publish("t", b"1", 1)
    (first,) = client.messages()
    assert first.topic == "t"
    assert first.properties is None
    publisher.publish("t", b"2", 0)
    publisher.publish("t", b"3", 1, packet_id=2)
    second, third = client.messages()
    assert second.properties == Properties(topic_alias=1)
    assert third.topic == ""
    assert third.properties == Properties(topic_alias=1)


# --- recovery -------------------------------------------------------------------------------------------------------------


def test_recovered_sessions_expire_and_their_wills_are_published() -> None:
    world = World(durable=True)
    watcher = world.persistent("watcher")
    watcher.subscribe("w", 1)
    will = Will("w", b"delayed", 1, properties=Properties(will_delay_interval=50))
    world.connect("early", 5, expiry=100, will=will).lose()
    world.connect("connected", 5, expiry=100, will=Will("w", b"at once", 1))
    world.advance(20)
    other = world.recovered()
    assert other.recovery is not None
    other.recovery.finish(other.now)
    other.flush()
    other.validate()
    watcher = other.persistent("watcher")
    assert watcher.payloads() == [b"at once"]
    watcher.send(PubAck(1))
    other.advance(30)
    assert watcher.payloads() == [b"delayed"]
    other.advance(50)
    assert "early" not in other.engine.sessions.by_client
    assert "connected" in other.engine.sessions.by_client
    other.advance(20)
    assert "connected" not in other.engine.sessions.by_client
    other.validate()


def test_expiry_runs_on_while_the_broker_is_down() -> None:
    world = World(durable=True)
    client = world.connect("c", 5, expiry=100)
    client.subscribe("t", 1)
    client.lose()
    publisher = world.connect("p", 5)
    publisher.publish("t", b"short", 1, properties=Properties(message_expiry_interval=10))
    publisher.publish("t", b"long", 1, packet_id=2, properties=Properties(message_expiry_interval=90))
    world.now += 40
    # A new process has another monotonic clock.
    other = World(durable=True)
    other.now = 7.0
    other.engine.effects.wall_offset = world.now + world.engine.effects.wall_offset - other.now
    recovery = Recovery(other.engine)
    for record in world.records():
        recovery.apply(record)
    recovery.finish(other.now)
    again = other.connect("c", 5, clean=False, expiry=100)
    (message,) = again.messages()
    assert message.payload == b"long"
    assert message.properties == Properties(message_expiry_interval=50)
    again.lose()
    other.advance(100)
    assert other.engine.sessions.by_client == {}


@pytest.mark.parametrize("record", [b"", b"\x63", b"\x05\x01", b"\x10\x63\x00", b"\x01\x01"])
def test_records_that_make_no_sense_are_refused(record: bytes) -> None:
    with pytest.raises((ValueError, IndexError, UnknownRecord)):
        Recovery(World(durable=True).engine).apply(record)


def test_a_retained_message_and_a_new_one_never_share_a_journal_key() -> None:
    world = World(durable=True)
    reader = world.persistent("reader")
    reader.subscribe("r", 1)
    world.connect("p", 4).publish("r", b"retained", 1, retain=True)
    reader.acknowledge_all()
    snapshot = Snapshot(world.engine)
    frames = []
    while found := snapshot.step(10_000):
        frames.append(found)
    other = world.recovered(frames)
    key = other.engine.retained.all()[0].journal_key
    assert key > 0
    assert other.engine.effects.next_journal_key > key


def test_a_message_is_written_again_in_the_generation_that_needs_it() -> None:
    """The file that held its content first may be gone by then."""
    world = World(durable=True)
    reader = world.persistent("reader")
    reader.subscribe("r", 1)
    world.connect("p", 4).publish("r", b"retained", 1, retain=True)
    reader.acknowledge_all()
    snapshot = Snapshot(world.engine)
    frames = []
    while found := snapshot.step(10_000):
        frames.append(found)
    world.frames.clear()
    reader.subscribe("r", 1, packet_id=2)
    assert len(world.session("reader").inflight) == 1
    assert durable_state(world.recovered(frames + world.frames)) == durable_state(world)


def test_silence_of_a_client_that_is_not_read_proves_nothing() -> None:
    """Found by simulation: a client behind a slow link had more waiting than its bound, so it was not read, so its pings were
    not seen, so it was sent away, and got everything again."""
    world = World()
    client = world.connect("c", 5, keep_alive=10)
    client.connection.congested = True
    client.connection.reading = False
    world.advance(100)
    assert not client.closed
    assert world.engine.stats.keep_alive_timeouts == 0
    world.engine.writable(client.connection, world.now)
    world.flush()
    world.advance(14)
    assert not client.closed, "it has its time again"
    world.advance(20)
    assert [client.closed, world.engine.stats.keep_alive_timeouts] == [True, 1]

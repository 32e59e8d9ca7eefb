"""The cloud, and whoever may publish there, can send anything; and a cloud may be set up in a way that does not suit us. None
of it ends a broker, stalls it, or keeps it waiting for ever."""

from __future__ import annotations

import pytest

from nearcast.fabric.cloud import STALE_S
from nearcast.fabric.cloud_markers import LONGEST_S, QUIET_S
from nearcast.fabric.cloud_memory import TAG_BYTES, FilterMemory
from nearcast.fabric.envelopes import MAX_TRIED, Envelopes
from nearcast.fabric.identities import Identity
from nearcast.mqtt import reasons
from nearcast.mqtt.inbound import forwarded_properties
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Packet,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRel,
    SubAck,
    Subscribe,
    Unsubscribe,
)
from nearcast.mqtt.properties import MAX_USER_PROPERTIES
from nearcast.mqtt.publication import build
from nearcast.mqtt.records import blob, number
from tests.unit.fabric.clouds import SECRET, EngineCloud, Leader, ScriptedCloud, only

MARKS = "nearcast/marks/a"


def wanting(*filters: str) -> Leader:
    leader = Leader("a")
    leader.cloud.want(True, 0.0)
    leader.set_filters(set(filters), 1, 0.0)
    return leader


# --- what others say --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"a\0b", b"$share/", b"a" * 70_000, b"\xff"])
def test_a_list_of_filters_that_somebody_else_wrote_is_not_believed(text: bytes) -> None:
    leader = wanting()
    script = ScriptedCloud(leader)
    script.grant(script.accept(session_present=True))
    for tag in (b"", bytes(TAG_BYTES)):
        script.say(Publish("nearcast/filters/a/1", tag + number(1) + blob(text), 0, True))
    leader.cloud.tick(STALE_S + 1)
    given_up = [one.topic_filters for one in script.heard() if isinstance(one, Unsubscribe)]
    assert given_up == [["nearcast/filters/a/+"]]


def test_a_list_of_filters_is_its_brokers_own() -> None:
    ours, theirs = FilterMemory("nearcast/filters/a/", SECRET), FilterMemory("nearcast/filters/b/", SECRET)
    (_, payload) = theirs.add(["x/1"])[0]
    assert ours.recall(payload) == ([], [])
    assert theirs.recall(payload) == (["x/1"], [])


def test_a_list_that_was_overwritten_before_it_was_read_is_written_again() -> None:
    former = FilterMemory("nearcast/filters/a/", SECRET)
    (topic, payload) = former.add(["x/1"])[0]
    same_piece = next(name for name in (f"x/{n}" for n in range(2, 10_000)) if former.add([name])[0][0] == topic)
    present = FilterMemory("nearcast/filters/a/", SECRET)
    present.add([same_piece])
    (found, [(written_to, written)]) = present.recall(payload)
    assert (found, written_to) == (["x/1"], topic)
    assert FilterMemory("nearcast/filters/a/", SECRET).recall(written)[0] == [same_piece, "x/1"]


@pytest.mark.parametrize(("forged", "found"), [(0, True), (MAX_TRIED - 1, True), (MAX_TRIED, False), (900, False)])
def test_of_properties_that_look_like_ours_only_the_last_are_looked_into(forged: int, found: bool) -> None:
    """Each costs a hash over the payload. Ours is the last one, so clients' own do not hide it."""
    envelopes = Envelopes(SECRET, MQTT_5)
    theirs = [("nearcast", "AAAA")] * 900
    publication = build(b"x/1", b"payload", 1, False, forwarded_properties(Properties(user_properties=theirs)), 0.0)
    message = envelopes.put(publication, 0, Identity("a", 7, 1), 1, False, 0.0)
    assert message.properties is not None
    pairs = message.properties.user_properties
    assert pairs is not None
    assert pairs[:-1] == theirs
    pairs += [("nearcast", "AAAA")] * forged
    taken, identity = envelopes.take(message, 0.0)
    assert (identity is not None) == found
    if not forged:
        assert taken.properties == publication.properties


def test_more_properties_than_are_read_do_not_end_the_connection() -> None:
    """It would be sent again with the next one, and the next."""
    leader = wanting("x/#")
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    script.say(Publish("x/1", b"many", 1, packet_id=1, properties=Properties(user_properties=[("k", "v")] * 5_000)))
    assert leader.cloud.connected
    assert [payload for _, payload, _ in leader.owner.messages] == [b"many"]


def test_a_message_without_a_place_for_our_property_is_refused_here() -> None:
    leader = wanting()
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    script.heard()
    for count, accepted in ((MAX_USER_PROPERTIES, False), (MAX_USER_PROPERTIES - 1, True)):
        properties = forwarded_properties(Properties(user_properties=[("k", "v")] * count))
        publication = build(b"x/1", b"payload", 0, False, properties, 0.0)
        leader.cloud.relay(publication, 0, Identity("a", 7, count), count, 0.0)
        assert leader.owner.confirmed[-1] == (count, accepted)
    assert len(only(script.heard(), Publish)) == 1


# --- what a cloud does not take ---------------------------------------------------------------------------------------------


def test_a_filter_that_became_too_long_is_refused_here() -> None:
    leader = wanting("a" * 65_530 + "/longer/#", "x/1")
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    assert leader.owner.versions == [1]
    assert len(leader.cloud.refused_filters) == 1
    leader.set_filters({"x/1"}, 2, 0.0)
    assert leader.cloud.refused_filters == []


def test_a_cloud_with_small_packets_gets_small_requests() -> None:
    filters = {f"{level:03}/{'x' * 100}" for level in range(50)}
    leader = wanting("y" * 600, *filters)
    script = ScriptedCloud(leader)
    packets = script.accept(connack=ConnAck(0, False, Properties(maximum_packet_size=512)))
    from nearcast.mqtt.codec import encode

    assert max(len(encode(packet, MQTT_5)) for packet in packets) <= 512
    script.grant(packets)
    assert leader.owner.versions == [1]
    assert leader.cloud.refused_filters == ["y" * 600]
    leader.set_filters(set(), 2, 0.0)
    packets = script.heard()
    assert max(len(encode(packet, MQTT_5)) for packet in packets) <= 512
    given_up = {name for one in packets if isinstance(one, Unsubscribe) for name in one.topic_filters}
    assert given_up == filters


def test_a_cloud_that_takes_next_to_nothing_ends_nobody() -> None:
    leader = wanting("x/1")
    script = ScriptedCloud(leader)
    script.grant(script.accept(connack=ConnAck(0, False, Properties(maximum_qos=0, maximum_packet_size=20))))
    leader.cloud.mark(1, 0.0)
    leader.cloud.publish("nearcast/leaders/world", bytes(100), 0.0)
    assert leader.owner.marks == [1]
    assert "too large" in leader.cloud.problem or "refuses" in leader.cloud.problem


def test_a_cloud_without_wildcards_is_not_asked_for_the_list_of_an_earlier_process() -> None:
    script = ScriptedCloud(wanting("x/1"))
    packets = script.accept(connack=ConnAck(0, True, Properties(wildcard_subscription_available=0)))
    asked = [one.topic_filter for packet in packets if isinstance(packet, Subscribe) for one in packet.subscriptions]
    assert sorted(asked) == ["nearcast/leaders/world", MARKS, "x/1"]


@pytest.mark.parametrize("highest", [0, 1])
def test_messages_in_flight_go_on_at_a_cloud_that_serves_less_now(highest: int) -> None:
    leader = wanting()
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    script.heard()
    leader.relay("x/1", b"1", 2, retain=True)
    leader.relay("x/1", b"2", 1)
    leader.relay("x/1", b"3", 2)
    script.heard()
    leader.cloud.lost(1.0)
    less = Properties(maximum_qos=highest, retain_available=0)
    sent = [one for one in script.accept(now=100.0, connack=ConnAck(0, True, less)) if isinstance(one, Publish)]
    sent = [one for one in sent if one.topic == "x/1"]
    assert [(one.payload, one.qos, one.retain) for one in sent] == [(b, highest, False) for b in (b"1", b"2", b"3")]
    for one in sent:
        if highest:
            script.say(PubAck(one.packet_id), now=100.0)
    assert leader.owner.confirmed == [(1, True), (2, True), (3, True)]
    assert leader.cloud.relaying.unconfirmed_bytes == 0


def test_a_cloud_without_qos_2_has_nothing_to_release() -> None:
    leader = wanting()
    script = ScriptedCloud(leader)
    packets = script.accept(connack=ConnAck(0, True, Properties(maximum_qos=1)))
    assert only(packets, PubRel) == []
    leader.relay("x/1", b"at once", 2)
    assert [one.payload for one in script.heard() if isinstance(one, Publish) and one.topic == "x/1"] == [b"at once"]


# --- markers that do not come back ------------------------------------------------------------------------------------------


def answers(packets: list[Packet], refused: str) -> list[Packet]:
    """To subscriptions, with one that is refused."""
    return [
        SubAck(
            packet.packet_id,
            [reasons.NOT_AUTHORIZED if one.topic_filter == refused else one.qos for one in packet.subscriptions],
        )
        for packet in packets
        if isinstance(packet, Subscribe)
    ]


def test_markers_are_given_up_at_once_where_their_subscription_is_refused() -> None:
    leader = wanting("x/1")
    script = ScriptedCloud(leader)
    packets = script.accept()
    script.say(*answers(packets, refused=MARKS))
    leader.cloud.mark(1, 0.0)
    leader.cloud.mark(2, 0.0)
    assert leader.owner.marks == [1, 2]
    assert leader.owner.versions == [1]
    assert MARKS in leader.cloud.problem
    for one in packets + script.heard():
        if isinstance(one, Publish):
            assert one.topic.startswith("nearcast/filters/a/")
            script.say(PubAck(one.packet_id))
    leader.cloud.want(False, 0.0)
    script.grant(script.heard())
    assert not leader.cloud.connected  # nobody waits for anything


def test_markers_are_given_up_at_once_where_they_may_not_be_published() -> None:
    leader = wanting()
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    leader.cloud.mark(1, 0.0)
    (marker,) = [one for one in script.heard() if isinstance(one, Publish)]
    script.say(PubAck(marker.packet_id, reasons.NOT_AUTHORIZED))
    assert leader.owner.marks == [1]
    assert leader.cloud.problem == f"markers are refused: let this broker publish and subscribe to '{MARKS}' there"


def test_markers_that_vanish_are_given_up_once_the_cloud_is_quiet() -> None:
    leader = wanting("x/#")
    script = ScriptedCloud(leader)
    script.grant(script.accept())
    leader.cloud.mark(1, 0.0)
    for one in script.heard():
        if isinstance(one, Publish):
            script.say(PubAck(one.packet_id), now=1.0)
    # There may be a long queue before the marker.
    script.say(Publish("x/1", b"of the queue"), now=QUIET_S)
    leader.cloud.tick(QUIET_S + 1.0)
    assert leader.owner.marks == []
    # Leaders' announcements are never over.
    script.say(Publish("nearcast/leaders/world", b"I lead"), now=2 * QUIET_S - 1.0)
    assert leader.cloud.next_deadline() <= 2 * QUIET_S
    leader.cloud.tick(2 * QUIET_S)
    assert leader.owner.marks == [1]
    assert "do not come back" in leader.cloud.problem


def test_markers_are_given_up_in_any_case_and_forgiven_when_one_is_back() -> None:
    cloud = EngineCloud()
    leader = wanting("x/#")
    cloud.connect(leader)
    leader.cloud.mark(1, 0.0)
    kept = leader.take()  # on its way to a cloud that takes its time
    leader.cloud.tick(LONGEST_S)
    assert leader.owner.marks == [1]
    assert leader.cloud.problem
    cloud.engine.receive(cloud.ends[leader], kept, LONGEST_S)
    cloud.settle(LONGEST_S)
    assert leader.owner.marks == [1]
    assert leader.cloud.problem == ""


def test_a_marker_that_is_back_in_time_is_no_problem() -> None:
    cloud = EngineCloud()
    leader = wanting("x/#")
    cloud.connect(leader)
    leader.cloud.mark(1, 0.0)
    cloud.settle()
    assert leader.owner.marks == [1]
    leader.cloud.mark(2, 1.0)
    cloud.settle(1.0)
    assert leader.owner.marks == [1, 2]
    assert leader.cloud.next_deadline() < QUIET_S  # that is the keep-alive's
    leader.cloud.tick(2 * LONGEST_S)
    assert leader.cloud.problem == ""


def test_what_an_unknown_server_answers_is_harmless() -> None:
    script = ScriptedCloud(wanting())
    script.grant(script.accept())
    script.say(PubComp(2_048), PubAck(77), SubAck(99, [0]))
    assert script.leader.cloud.connected

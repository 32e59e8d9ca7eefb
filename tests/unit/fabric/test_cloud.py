"""The way to the cloud: connection, subscriptions, relaying, markers; with our own engine as the cloud, and with scripts."""

from __future__ import annotations

from typing import Any

import pytest

from nearcast.config import Limits
from nearcast.fabric.cloud import STALE_S
from nearcast.fabric.cloud_relaying import WINDOW_BYTES
from nearcast.fabric.cloud_settings import MAX_PACKET_IDENTIFIER, marks_topic, topic_level
from nearcast.fabric.identities import Identity
from nearcast.fabricconfig import Groups
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import (
    MQTT_5,
    ConnAck,
    Connect,
    Disconnect,
    Properties,
    PubAck,
    PubComp,
    Publish,
    PubRec,
    PubRel,
    SubAck,
    Subscribe,
    Unsubscribe,
)
from nearcast.mqtt.publication import build
from tests.unit.fabric.clouds import Bystander, EngineCloud, Leader, ScriptedCloud, only

VERSIONS = ["5", "3.1.1"]


def joined(cloud: EngineCloud, name: str, *filters: str, **settings: Any) -> Leader:
    leader = Leader(name, **settings)
    leader.cloud.want(True, 0.0)
    leader.set_filters(set(filters), 1, 0.0)
    cloud.connect(leader)
    return leader


def texts(leader: Leader) -> list[tuple[str, bytes]]:
    return [(topic, payload) for topic, payload, _ in leader.owner.messages]


# --- with our own engine as the cloud -------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("qos", [0, 1, 2])
def test_a_message_goes_to_the_other_leader_and_is_confirmed(version: str, qos: int) -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a", "cars/#", cloud_version=version)
    b = joined(cloud, "b", "cars/#", cloud_version=version)
    token = a.relay("cars/1", b"fast", qos)
    cloud.settle()
    assert a.owner.confirmed == [(token, True)]
    assert texts(b) == [("cars/1", b"fast")]
    assert b.owner.publications[0].qos == qos
    assert texts(a) == []
    identity = b.owner.messages[0][2]
    if version == "5":
        assert identity is not None
        assert (identity.origin, identity.epoch, identity.sequence, identity.leader) == ("a", 7, 1, "a")
    else:
        assert identity is None


def test_nothing_is_wanted_at_first_and_nothing_is_dialled() -> None:
    leader = Leader("a")
    assert not leader.cloud.wants_dial(0.0)
    assert leader.cloud.next_deadline() == float("inf")
    assert leader.cloud.state == "idle"


def test_subscriptions_are_confirmed_by_their_version() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a", "x/1")
    assert a.owner.versions == [1]
    a.set_filters({"x/1": 1, "x/2": 1}, 2, 0.0)
    a.set_filters({"x/2": 1}, 3, 0.0)
    assert a.owner.versions == [1]
    cloud.settle()
    assert a.owner.versions == [1, 3]  # which needs nothing that 2 does not
    a.set_filters({"x/2": 1}, 4, 0.0)
    assert a.owner.versions == [1, 3, 4]


def test_thousands_of_subscriptions_are_made_and_given_up() -> None:
    cloud = EngineCloud(Limits(max_subscriptions=100_000))
    a = joined(cloud, "a")
    b = joined(cloud, "b")
    a.set_filters({f"x/{number}": 1 for number in range(20_000)}, 2, 0.0)
    cloud.settle()
    assert a.owner.versions == [1, 2]
    b.relay("x/19999", b"here")
    cloud.settle()
    assert texts(a) == [("x/19999", b"here")]
    a.set_filters({"x/0": 1}, 3, 0.0)
    cloud.settle()
    b.relay("x/19999", b"gone")
    b.relay("x/0", b"stays")
    cloud.settle()
    assert texts(a)[1:] == [("x/0", b"stays")]


def test_messages_wait_at_the_cloud_for_a_leader_that_is_away() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#")
    cloud.lose(b)
    assert b.owner.losses == 1
    a.relay("x/1", b"1", 1)
    a.relay("x/2", b"2", 2)
    cloud.settle()
    assert not b.cloud.wants_dial(0.0)
    cloud.connect(b, now=b.cloud.next_deadline())
    assert b.owner.connections == [False, True]
    assert texts(b) == [("x/1", b"1"), ("x/2", b"2")]


def test_a_process_that_starts_anew_goes_on_with_the_session() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#")
    cloud.lose(b)
    a.relay("x/1", b"1", 2)
    cloud.settle()
    again = Leader("b")
    again.cloud.want(True, 0.0)
    cloud.connect(again)
    assert again.owner.connections == [True]
    assert texts(again) == [("x/1", b"1")]


def test_exactly_once_over_lost_connections() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#")
    for number in range(5):
        a.relay("x/1", b"%d" % number, 2)
    a.cloud.connection.take()  # type: ignore[union-attr]  # what was sent never arrives
    cloud.lose(a)
    cloud.connect(a, now=100.0)
    cloud.settle(100.0)
    assert [payload for _, payload in texts(b)] == [b"0", b"1", b"2", b"3", b"4"]
    assert a.owner.confirmed == [(number, True) for number in range(1, 6)]


def test_a_cloud_that_forgot_gets_everything_again() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#", "y/1")
    a.relay("x/1", b"before", 1)
    a.take()
    cloud.restart_forgetting()
    cloud.connect(b, now=100.0)
    assert b.owner.connections == [False, False]
    cloud.connect(a, now=100.0)
    assert texts(b) == [("x/1", b"before")]
    assert a.owner.confirmed == [(1, True)]


def test_a_new_version_waits_for_a_cloud_that_forgot() -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b", "x/#")
    b.set_filters({"x/#": 2, "y/#": 2}, 2, 0.0)
    b.take()
    cloud.restart_forgetting()
    assert b.owner.versions == [1]
    cloud.connect(b, now=100.0)
    assert b.owner.versions == [1, 2]


def subscriptions(cloud: EngineCloud, name: str) -> set[str]:
    """What a leader has at the cloud, apart from what brokers talk on."""
    found = cloud.engine.sessions.by_client[f"nearcast/{name}"].subscriptions
    return {topic_filter for topic_filter in found if not topic_filter.startswith("nearcast/")}


def test_what_an_earlier_process_subscribed_to_and_nobody_wants_is_given_up() -> None:
    cloud = EngineCloud(Limits(max_subscriptions=10_000))
    b = joined(cloud, "b", "$share/g/y", "x/#", *[f"z/{number}" for number in range(500)])
    b.set_filters({"$share/g/y": 1, "$share/h/y": 1, "x/1": 1, "x/2": 1, "z/7": 1}, 2, 0.0)
    cloud.settle()
    wanted = {"$share/g/y", "$share/h/y", "x/1", "x/2", "z/7"}
    assert subscriptions(cloud, "b") == wanted
    cloud.lose(b)
    again = joined(cloud, "b", "$share/g/y", "x/2", "x/3")
    # Shared ones at once, because their messages would be nobody's; others once nobody can depend on them any more.
    assert subscriptions(cloud, "b") == {"$share/g/y", "x/1", "x/2", "x/3", "z/7"}
    assert again.cloud.next_deadline() <= STALE_S
    again.cloud.tick(STALE_S)
    cloud.settle(STALE_S)
    assert subscriptions(cloud, "b") == {"$share/g/y", "x/2", "x/3"}
    cloud.lose(again)
    third = joined(cloud, "b", "x/3")
    third.cloud.tick(STALE_S)
    cloud.settle(STALE_S)
    assert subscriptions(cloud, "b") == {"x/3"}
    assert third.owner.versions == [1]


def test_what_is_written_down_is_for_nobody_else() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a", "#"), joined(cloud, "b", "x/1")
    assert (a.owner.said, a.owner.messages) == ([], [])
    Bystander(cloud).publish("nearcast/filters/b/3", b"nonsense")
    cloud.lose(b)
    again = joined(cloud, "b", "x/1")
    again.cloud.tick(STALE_S)
    cloud.settle(STALE_S)
    assert subscriptions(cloud, "b") == {"x/1"}


def test_what_a_new_subscription_may_have_brought_out_of_store_says_so() -> None:
    cloud = EngineCloud()
    bystander = Bystander(cloud)
    bystander.publish("x/1", b"stored", retain=True)
    b = Leader("b")
    stored: list[tuple[bytes, bool]] = []
    b.owner.arrived = lambda publication, identity, now: stored.append((publication.payloads()[0], b.cloud.may_be_stored))  # type: ignore[method-assign]
    b.cloud.want(True, 0.0)
    b.set_filters({"x/#": 1}, 1, 0.0)
    cloud.connect(b)
    bystander.publish("x/1", b"live", retain=True)
    b.set_filters({"x/1": 1}, 2, 0.0)
    cloud.settle()
    bystander.publish("x/1", b"live again", retain=True)
    bystander.publish("x/1", b"just so")
    assert stored == [
        (b"stored", True), (b"live", False), (b"live", True), (b"live again", False), (b"just so", False)
    ]  # fmt: skip


def test_a_marker_comes_back_behind_everything_else() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#")
    order: list[object] = []
    b.owner.arrived = lambda publication, identity, now: order.append(publication.payloads()[0])  # type: ignore[method-assign]
    b.owner.marked = lambda token, now: order.append(token)  # type: ignore[method-assign]
    for number in range(50):
        a.relay("x/1", b"%d" % number, number % 2 + 1)
    b.cloud.mark(9, 0.0)
    cloud.settle()
    assert order == [b"%d" % number for number in range(50)] + [9]


def test_markers_survive_lost_connections_and_are_not_those_of_an_earlier_process() -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b")
    b.cloud.mark(1, 0.0)
    cloud.lose(b)
    assert b.cloud.state == "waiting"
    again = Leader("b")
    again.cloud.want(True, 0.0)
    again.cloud.mark(2, 0.0)
    cloud.connect(again)
    assert again.owner.marks == [2]
    cloud.lose(again)
    cloud.connect(b, now=100.0)
    assert b.owner.marks == [1]


def test_a_marker_cannot_be_forged() -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b")
    bystander = Bystander(cloud)
    bystander.publish(marks_topic(b.groups, "b"), b"")
    bystander.publish(marks_topic(b.groups, "b"), b"x" * 40)
    b.cloud.mark(3, 0.0)
    cloud.settle()
    assert b.owner.marks == [3]
    assert b.owner.messages == []


def test_what_brokers_say_reaches_brokers_of_their_region_only() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a", "#"), joined(cloud, "b", "#")
    c = joined(cloud, "c", "#", region="europe")
    topic = "nearcast/leaders/world"
    a.cloud.publish(topic, b"I lead", 0.0)
    cloud.settle()
    assert set(b.owner.said) == {(topic, b"I lead")}
    assert b.owner.messages == []
    assert a.owner.said == []
    assert (c.owner.said, c.owner.messages) == ([], [])
    a.cloud.publish("nearcast/leaders/europe", b"here", 0.0)
    cloud.settle()
    assert c.owner.said == [("nearcast/leaders/europe", b"here")]
    assert set(b.owner.said) == {(topic, b"I lead")}


def test_clients_cannot_speak_as_brokers_through_the_relay() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b")
    token = a.relay("nearcast/leaders/world", b"I lead", 1)
    cloud.settle()
    assert a.owner.confirmed == [(token, False)]
    assert b.owner.said == []


@pytest.mark.parametrize("version", VERSIONS)
def test_a_message_of_a_bystander_has_no_identity(version: str) -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b", "x/#", cloud_version=version)
    bystander = Bystander(cloud)
    bystander.publish("x/1", b"hello")
    assert b.owner.messages == [("x/1", b"hello", None)]


def test_a_bystander_sees_an_ordinary_message() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a")
    bystander = Bystander(cloud)
    bystander.subscribe("x/#")
    a.relay("x/1", b"hello", 1)
    cloud.settle()
    [message] = bystander.look()
    assert (message.topic, message.payload) == ("x/1", b"hello")


def test_overlapping_filters_bring_a_message_once() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "a/+", "+/b", "c")
    bystander = Bystander(cloud)
    for payload in (b"1", b"2", b"2"):
        bystander.publish("a/b", payload)
    bystander.publish("a/x", b"3")
    assert texts(b) == [("a/b", b"1"), ("a/b", b"2"), ("a/b", b"2"), ("a/x", b"3")]
    a.relay("a/b", b"4", 1)
    cloud.settle()
    assert [payload for _, payload in texts(b)][4:] in ([b"4"], [b"4", b"4"])  # its identity tells


def test_in_3_1_1_filters_are_widened_until_none_overlaps() -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b", "a/+", "+/b", cloud_version="3.1.1")
    bystander = Bystander(cloud)
    bystander.publish("a/b", b"1")
    assert texts(b) == [("a/b", b"1")]


def test_in_3_1_1_echoes_are_known_and_others_saying_the_same_are_heard() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a", "x/#", cloud_version="3.1.1")
    bystander = Bystander(cloud)
    a.relay("x/1", b"on", 1)
    a.relay("x/1", b"off", 0)
    cloud.settle()
    assert texts(a) == []
    assert a.cloud.echoes == 2
    bystander.publish("x/1", b"on")
    assert texts(a) == [("x/1", b"on")]


def test_in_3_1_1_echoes_of_what_an_earlier_process_subscribed_to_are_known() -> None:
    cloud = EngineCloud()
    former = joined(cloud, "a", "x/#", cloud_version="3.1.1")
    cloud.lose(former)
    present = Leader("a", cloud_version="3.1.1")
    present.owner.connected = lambda session_kept, now: (present.relay("x/1", b"on", 2), None)[1]  # type: ignore[method-assign]
    present.cloud.want(True, 0.0)
    cloud.connect(present)
    assert texts(present) == []
    assert present.cloud.echoes == 1


def test_a_shared_subscription_brings_its_messages_as_such() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "$share/g/x/#", "x/1")
    by: list[list[str]] = []
    b.owner.arrived = lambda publication, identity, now: by.append(b.cloud.arrived_by)  # type: ignore[method-assign]
    a.relay("x/1", b"hello", 1)
    cloud.settle()
    assert sorted(by) == [[], ["$share/g/x/#"]]


def test_a_shared_subscription_does_not_get_through_3_1_1() -> None:
    cloud = EngineCloud()
    b = joined(cloud, "b", "$share/g/x/#", "y", cloud_version="3.1.1")
    assert b.owner.versions == [1]
    assert b.cloud.refused_filters == ["$share/g/x/#"]


def test_a_retained_message_keeps_its_flag_and_waits_for_whoever_subscribes() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/1")
    a.relay("x/1", b"warm", 1, retain=True)
    cloud.settle()
    assert b.owner.publications[0].retain
    c = joined(cloud, "c", "x/#")
    assert texts(c) == [("x/1", b"warm")]
    assert c.owner.publications[0].retain
    assert repr(c.owner.messages[0][2]) == "a/7/1"


def test_expired_messages_are_not_relayed_and_the_rest_of_the_time_goes_along() -> None:
    cloud = EngineCloud()
    a, b = joined(cloud, "a"), joined(cloud, "b", "#")
    publication = build(b"x/1", b"late", 1, False, b"", 5.0)
    a.cloud.relay(publication, 0, Identity("a", 7, 1), 1, 6.0)
    a.cloud.relay(publication, 0, Identity("a", 7, 2), 2, 2.0)
    cloud.settle(2.0)
    assert a.owner.confirmed == [(1, True), (2, True)]
    assert a.cloud.relaying.expired_messages == 1
    [arrived] = b.owner.publications
    assert arrived.expires_at == 5.0


def test_a_connection_ends_when_it_is_not_wanted_and_all_is_confirmed() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a")
    a.relay("x", b"last", 2)
    a.cloud.want(False, 0.0)
    assert a.cloud.connected
    cloud.settle()
    assert a.owner.confirmed == [(1, True)]
    assert a.cloud.connection is None
    assert a.owner.losses == 1
    assert not a.cloud.wants_dial(1e9)
    a.cloud.want(True, 10.0)
    cloud.connect(a, 10.0)
    assert a.owner.connections == [False, True]


def test_goodbye_is_for_good() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a")
    a.relay("x", b"unconfirmed", 1)
    a.cloud.end(0.0)
    cloud.settle()
    assert a.cloud.connection is None
    assert not a.cloud.wants_dial(1e9)


def test_what_arrives_is_acknowledged_after_the_journal() -> None:
    cloud = EngineCloud()
    a = joined(cloud, "a")
    b = joined(cloud, "b", "x/#", gated=True)
    a.relay("x/1", b"hello", 1)
    a_end = cloud.ends[a]
    cloud.engine.receive(a_end, a.take(), 0.0)
    cloud.engine.ready()
    data = b"".join(cloud.ends[b].take())
    b.cloud.receive(data, 0.0)
    assert texts(b) == [("x/1", b"hello")]
    connection = b.cloud.connection
    assert connection is not None
    assert connection.take() == []
    assert connection.take_held() is not None


# --- with a script --------------------------------------------------------------------------------------------------------


def scripted(**settings: Any) -> tuple[Leader, ScriptedCloud]:
    leader = Leader("a", **settings)
    leader.cloud.want(True, 0.0)
    return leader, ScriptedCloud(leader)


def test_how_a_broker_introduces_itself() -> None:
    leader, server = scripted(cloud_username="fog", prefix="fabric/one")
    leader.cloud.set_password(b"secret")
    connect = server.accept()[0]
    assert isinstance(connect, Connect)
    assert (connect.client_id, connect.clean_start, connect.version) == ("fabric/one/a", False, MQTT_5)
    assert (connect.username, connect.password) == ("fog", b"secret")
    assert connect.properties is not None
    assert connect.properties.session_expiry_interval == 86_400


def test_subscriptions_have_the_options_that_a_relay_needs() -> None:
    leader, server = scripted()
    leader.set_filters({"x/#": 2, "x/1": 1, "$share/g/y": 1}, 1, 0.0)
    asked = [one for packet in only(server.accept(), Subscribe) for one in packet.subscriptions]  # type: ignore[union-attr]
    options = {one.topic_filter: (one.qos, one.no_local, one.retain_as_published, one.retain_handling) for one in asked}
    assert options == {
        "nearcast/marks/a": (1, False, True, 1),
        "nearcast/leaders/world": (0, True, True, 1),
        "x/#": (2, True, True, 1),
        "$share/g/y": (1, False, True, 1),
    }


def test_subscriptions_are_made_before_others_are_given_up() -> None:
    leader, server = scripted()
    leader.set_filters({"x/1": 1}, 1, 0.0)
    server.grant(server.accept())
    leader.set_filters({"x/#": 1}, 2, 0.0)
    kinds = [type(packet) for packet in server.heard()]
    assert kinds[-3:] == [Publish, Subscribe, Unsubscribe]  # what is written down first is what it subscribes to


def test_a_version_is_reached_when_all_before_it_is_answered_in_whatever_order() -> None:
    leader, server = scripted()
    server.grant(server.accept())
    leader.set_filters({"x/1": 1}, 1, 0.0)
    [first] = only(server.heard(), Subscribe)
    leader.set_filters({"x/1": 1, "x/2": 1}, 2, 0.0)
    [second] = only(server.heard(), Subscribe)
    server.grant([second])
    assert leader.owner.versions == []
    server.grant([first])
    assert leader.owner.versions == [1, 2]


def test_refused_filters_hold_nobody_up_and_are_tried_again_with_the_next_connection() -> None:
    leader, server = scripted()
    leader.set_filters({"x/1": 1}, 1, 0.0)
    for packet in only(server.accept(), Subscribe):
        assert isinstance(packet, Subscribe)
        codes = [reasons.NOT_AUTHORIZED if one.topic_filter == "x/1" else 1 for one in packet.subscriptions]
        server.say(SubAck(packet.packet_id, codes))
    assert leader.owner.versions == [1]
    assert leader.cloud.refused_filters == ["x/1"]
    leader.cloud.lost(0.0)
    again = server.accept(100.0, session_present=True)
    assert [one.topic_filter for packet in only(again, Subscribe) for one in packet.subscriptions] == ["x/1"]  # type: ignore[union-attr]


def test_a_filter_that_got_a_higher_qos_is_asked_for_again() -> None:
    leader, server = scripted()
    leader.set_filters({"x/1": 0}, 1, 0.0)
    server.grant(server.accept())
    leader.set_filters({"x/1": 2}, 2, 0.0)
    [packet] = only(server.heard(), Subscribe)
    assert isinstance(packet, Subscribe)
    assert [(one.topic_filter, one.qos) for one in packet.subscriptions] == [("x/1", 2)]


def test_a_refused_publish_is_counted_and_the_next_goes_on() -> None:
    leader, server = scripted()
    server.grant(server.accept())
    tokens = [leader.relay("x", b"1", 1), leader.relay("x", b"2", 2), leader.relay("x", b"3", 1)]
    ids = [packet.packet_id for packet in only(server.heard(), Publish)]  # type: ignore[union-attr]
    server.say(PubAck(ids[0], reasons.NOT_AUTHORIZED), PubRec(ids[1], reasons.QUOTA_EXCEEDED), PubAck(ids[2]))
    assert leader.owner.confirmed == [(tokens[0], False), (tokens[1], False), (tokens[2], True)]
    assert leader.cloud.relaying.refused_messages == 2


def test_what_the_cloud_cannot_take_is_lowered_or_refused() -> None:
    leader, server = scripted()
    limits = Properties(maximum_qos=1, retain_available=0, maximum_packet_size=300)
    server.accept(connack=ConnAck(0, False, limits))
    leader.relay("x", b"1", 2, retain=True)
    [message] = only(server.heard(), Publish)
    assert isinstance(message, Publish)
    assert (message.qos, message.retain) == (1, False)
    large = leader.relay("x", b"x" * 300, 1)
    larger = leader.relay("x", b"x" * 300, 0)
    assert leader.owner.confirmed == [(large, False), (larger, False)]
    server.say(PubAck(message.packet_id))
    assert leader.owner.confirmed[-1] == (1, True)


def test_the_window_is_bounded_in_messages_and_bytes() -> None:
    leader, server = scripted()
    server.accept(connack=ConnAck(0, False, Properties(receive_maximum=10)))
    server.heard()
    count = 0
    while leader.cloud.has_room():
        leader.relay("x", b"x", 1)
        count += 1
    assert count == leader.cloud.machine.settings.max_inflight
    sent = only(server.heard(), Publish)
    assert len(sent) == 10
    server.say(PubAck(sent[0].packet_id))  # type: ignore[union-attr]
    assert leader.cloud.has_room()
    leader.relay("x", b"x" * WINDOW_BYTES, 1)
    assert not leader.cloud.has_room()
    assert leader.cloud.takes_unreliable()  # QoS 0 does not wait behind it
    leader.relay("x", b"now", 0)
    assert [packet.payload for packet in only(server.heard(), Publish)][-1] == b"now"  # type: ignore[union-attr]


def test_qos_0_needs_a_connection() -> None:
    leader, _ = scripted()
    token = leader.relay("x", b"1", 0)
    assert leader.owner.confirmed == [(token, False)]
    assert leader.cloud.relaying.dropped_messages == 1


def test_identifiers_that_an_earlier_process_left_are_released_first() -> None:
    leader, server = scripted()
    leader.relay("x", b"1", 2)
    for now in (0.0, 100.0):  # the first connection breaks before all are
        said = server.accept(now, session_present=True)
        releases = [packet.packet_id for packet in only(said, PubRel)]  # type: ignore[union-attr]
        assert releases == list(range(1, MAX_PACKET_IDENTIFIER + 1))
        for packet_id in releases[:-1]:
            server.say(PubComp(packet_id, reasons.PACKET_IDENTIFIER_NOT_FOUND), now=now)
        assert only([*said, *server.heard()], Publish) == []
        if now == 0.0:
            leader.cloud.lost(now)
    server.say(PubComp(MAX_PACKET_IDENTIFIER), now=100.0)
    [message] = only(server.heard(), Publish)
    assert isinstance(message, Publish)
    server.say(PubRec(message.packet_id), now=100.0)
    server.say(PubComp(message.packet_id), now=100.0)
    assert leader.owner.confirmed == [(1, True)]
    leader.cloud.lost(100.0)
    assert only(server.accept(200.0, session_present=True), PubRel) == []


def test_a_cloud_that_kept_nothing_has_nothing_to_release() -> None:
    leader, server = scripted()
    leader.relay("x", b"1", 2)
    said = server.accept()
    assert only(said, PubRel) == []
    assert len(only(said, Publish)) == 1


def test_in_flight_messages_go_out_again_with_the_next_connection_as_the_same() -> None:
    leader, server = scripted()
    server.accept()
    leader.relay("x", b"1", 2)
    [first] = only(server.heard(), Publish)
    leader.cloud.lost(0.0)
    [again] = only(server.accept(100.0, session_present=True), Publish)
    assert isinstance(first, Publish)
    assert isinstance(again, Publish)
    assert again.dup
    assert (again.packet_id, again.properties) == (first.packet_id, first.properties)


def test_a_refused_connection_is_tried_again_rarely_and_says_why_once() -> None:
    leader, server = scripted()
    server.accept(connack=ConnAck(reasons.BAD_USER_NAME_OR_PASSWORD))
    assert leader.cloud.connection is not None
    assert leader.cloud.connection.closing
    leader.cloud.lost(0.0)
    due = leader.cloud.next_deadline()
    assert due >= 5.0
    server.accept(due, connack=ConnAck(reasons.BAD_USER_NAME_OR_PASSWORD))
    leader.cloud.lost(due)
    news = leader.cloud.take_news()
    assert len(news) == 1
    assert not news[0][0]
    assert "refused" in leader.cloud.problem
    assert leader.owner.losses == 0


def test_attempts_become_rarer_and_a_connection_that_lasted_begins_anew() -> None:
    leader, server = scripted()
    now = 0.0
    waits = []
    for _ in range(8):
        assert leader.cloud.wants_dial(now)
        assert not leader.cloud.wants_dial(now)
        leader.cloud.dial_failed(now)
        waits.append(leader.cloud.next_deadline() - now)
        now = leader.cloud.next_deadline()
    assert waits[0] < 0.3
    assert waits[-1] >= 5.0
    server.accept(now)
    assert leader.cloud.problem == ""
    leader.cloud.lost(now + 60.0)
    assert leader.cloud.next_deadline() <= now + 60.3


def test_a_silent_cloud_is_given_up() -> None:
    leader, server = scripted()
    server.accept()
    now = leader.cloud.next_deadline()
    leader.cloud.tick(now)
    assert leader.cloud.state == "connected"
    now = leader.cloud.next_deadline()
    leader.cloud.tick(now)
    assert leader.cloud.state == "connecting"  # until its transport is gone
    assert leader.owner.losses == 1
    assert any(isinstance(packet, Disconnect) for packet in server.heard())
    leader.cloud.lost(now)
    assert leader.owner.losses == 1
    assert leader.cloud.next_deadline() > now


def test_another_broker_of_our_name_is_not_fought_for_the_session() -> None:
    leader, server = scripted()
    server.accept()
    server.say(Disconnect(reasons.SESSION_TAKEN_OVER))
    leader.cloud.lost(0.0)
    assert leader.cloud.next_deadline() >= 5.0


def test_a_cloud_that_breaks_the_protocol_is_left() -> None:
    leader, server = scripted()
    server.accept()
    leader.cloud.receive(b"\x00\x00", 0.0)
    assert not leader.cloud.connected
    assert leader.cloud.connection is not None
    assert leader.cloud.connection.closing


def test_an_owner_may_call_back_from_everything() -> None:
    cloud = EngineCloud()
    a = Leader("a")

    def connected(session_kept: bool, now: float) -> None:
        a.set_filters({"x/#": 1}, 1, now)
        a.cloud.mark(1, now)

    def subscribed(version: int, now: float) -> None:
        a.owner.versions.append(version)
        if version < 5:
            a.set_filters({f"x/{version}/#": 1, "y": 1}, version + 1, now)

    def marked(token: int, now: float) -> None:
        a.relay("y/1", b"1", 2)

    a.owner.connected = connected  # type: ignore[method-assign]
    a.owner.subscribed = subscribed  # type: ignore[method-assign]
    a.owner.marked = marked  # type: ignore[method-assign]
    a.cloud.want(True, 0.0)
    cloud.connect(a)
    assert a.owner.versions == [1, 2, 3, 4, 5]
    assert a.owner.confirmed == [(1, True)]


def test_names_make_one_level() -> None:
    assert topic_level("a/b+c#d%") == "a%2Fb%2Bc%23d%25"
    assert marks_topic(Groups(prefix="p"), "a/b") == "p/marks/a%2Fb"


def test_limits_of_a_small_cloud() -> None:
    cloud = EngineCloud(Limits(receive_maximum=1, max_qos=1))
    a, b = joined(cloud, "a"), joined(cloud, "b", "x/#")
    for number in range(20):
        a.relay("x/1", b"%d" % number, 2)
    cloud.settle()
    assert len(a.owner.confirmed) == 20
    assert [payload for _, payload in texts(b)] == [b"%d" % number for number in range(20)]

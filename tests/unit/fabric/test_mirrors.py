"""What a gateway keeps of a client's session, and what it says again when a broker is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.errors import RemoteProtocolError
from nearcast.fabric.mirrors import Cutter, Mirror, without
from nearcast.mqtt.codec import decode, encode
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
    UnsubAck,
    Unsubscribe,
)
from nearcast.mqtt.records import Fields


def mirror(version: int = 5, alias_maximum: int = 10) -> Mirror:
    found = Mirror(encode(Connect("c", version), version))
    properties = Properties(topic_alias_maximum=alias_maximum) if version == 5 else None
    found.incoming(encode(ConnAck(properties=properties), version))
    return found


def packets(raw: list[bytes], version: int = 5) -> list[Packet]:
    return [decode(item[0], item[2:], version) for item in raw]


@given(st.lists(st.binary(max_size=300), min_size=1, max_size=20), st.data())
def test_whole_packets_come_out_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join([encode(Publish("t", payload), 5) for payload in payloads])
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=30)))
    cutter = Cutter(1_000)
    runs: list[bytes] = []
    for start, stop in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        run = cutter.feed(stream[start:stop])
        if run:
            whole = Cutter(1_000)
            assert whole.feed(run) == run, "a run holds whole packets only"
            assert whole.kept_bytes == 0
        runs.append(run)
    assert b"".join(runs) == stream
    assert cutter.kept_bytes == 0


def test_a_packet_that_is_too_large_is_refused_before_it_is_there() -> None:
    cutter = Cutter(100)
    with pytest.raises(RemoteProtocolError):
        cutter.feed(encode(Publish("t", bytes(200)), 5)[:5])


def test_a_length_that_never_ends_is_refused() -> None:
    with pytest.raises(RemoteProtocolError):
        Cutter(100).feed(b"\x30\xff\xff\xff\xff\x01")


def test_parts_are_cut_out() -> None:
    assert without(b"abcdef", [(0, 1), (2, 4)]) == b"bef"
    assert without(b"abcdef", [(0, 6)]) == b""


@pytest.mark.parametrize("version", [4, 5])
def test_messages_are_kept_until_they_are_acknowledged(version: int) -> None:
    seen = mirror(version)
    first, second = Publish("a", b"1", 1, packet_id=1), Publish("a", b"2", 1, packet_id=2)
    seen.outgoing(encode(first, version) + encode(Publish("a", b"0"), version) + encode(second, version))
    assert [packet.payload for packet in packets(seen.unanswered(), version) if isinstance(packet, Publish)] == [b"1", b"2"]
    assert all(packet.dup for packet in packets(seen.unanswered(), version) if isinstance(packet, Publish))
    seen.incoming(encode(PubAck(1), version))
    assert len(seen.unanswered()) == 1
    seen.incoming(encode(PubAck(2), version))
    assert seen.unanswered() == []
    assert seen.kept_bytes == 0


@pytest.mark.parametrize("version", [4, 5])
def test_each_step_of_exactly_once(version: int) -> None:
    seen = mirror(version)
    seen.outgoing(encode(Publish("a", b"1", 2, packet_id=7), version))
    (again,) = packets(seen.unanswered(), version)
    assert isinstance(again, Publish)
    seen.incoming(encode(PubRec(7), version))
    assert seen.unanswered() == []
    assert seen.received == {7}
    seen.outgoing(encode(PubRel(7), version))
    assert seen.received == set()
    assert packets(seen.unanswered(), version) == [PubRel(7)]
    seen.incoming(encode(PubComp(7), version))
    assert seen.unanswered() == []


def test_a_message_that_was_refused_is_not_remembered() -> None:
    seen = mirror()
    seen.outgoing(encode(Publish("a", b"1", 2, packet_id=7), 5))
    seen.incoming(encode(PubRec(7, 0x87), 5))
    assert seen.unanswered() == []
    assert seen.received == set()


def test_subscriptions_are_those_that_were_granted() -> None:
    seen = mirror()
    asked = Subscribe(
        3,
        [
            SubscriptionRequest("a/#", 2, no_local=True, retain_as_published=True, retain_handling=1),
            SubscriptionRequest("forbidden", 1),
            SubscriptionRequest("$share/g/b", 2),
        ],
        Properties(subscription_identifiers=[42]),
    )
    seen.outgoing(encode(asked, 5))
    assert seen.subscriptions == {}
    assert len(seen.unanswered()) == 1
    seen.incoming(encode(SubAck(3, [1, 0x87, 2]), 5))
    assert seen.subscriptions == {"a/#": (1 | 4 | 8 | 16, 42), "$share/g/b": (2, 42)}
    seen.outgoing(encode(Unsubscribe(4, ["a/#"]), 5))
    seen.incoming(encode(UnsubAck(4, [0]), 5))
    assert list(seen.subscriptions) == ["$share/g/b"]
    assert seen.kept_bytes == 0


def test_an_unsuback_of_mqtt_3_takes_all() -> None:
    seen = mirror(4)
    seen.outgoing(encode(Subscribe(1, [SubscriptionRequest("a", 1), SubscriptionRequest("b", 1)]), 4))
    seen.incoming(encode(SubAck(1, [1, 0]), 4))
    seen.outgoing(encode(Unsubscribe(2, ["a", "b"]), 4))
    seen.incoming(encode(UnsubAck(2), 4))
    assert seen.subscriptions == {}


def test_what_is_sent_again_has_its_topic_whatever_an_alias_means_by_then() -> None:
    seen = mirror()
    seen.outgoing(encode(Publish("first", b"0", properties=Properties(topic_alias=1)), 5))
    seen.outgoing(encode(Publish("", b"1", 1, packet_id=1, properties=Properties(topic_alias=1)), 5))
    seen.outgoing(encode(Publish("second", b"2", 1, packet_id=2, properties=Properties(topic_alias=1)), 5))
    again = [packet for packet in packets(seen.unanswered()) if isinstance(packet, Publish)]
    assert [(packet.topic, packet.payload) for packet in again] == [("first", b"1"), ("second", b"2")]
    assert seen.aliases == {1: b"second"}


def test_messages_at_qos_0_are_taken_out_where_no_later_one_needs_them() -> None:
    seen = mirror()
    defining = encode(Publish("t", b"alias", 0, properties=Properties(topic_alias=1)), 5)
    one, other = encode(Publish("t", b"1", 0), 5), encode(Publish("t", b"2", 0, retain=True), 5)
    kept = encode(Publish("t", b"3", 1, packet_id=1), 5)
    assert seen.without_unreliable(one + kept + defining + other + encode(PingReq(), 5)) == kept + defining + encode(
        PingReq(), 5
    )
    assert seen.without_unreliable(one + other) == b""
    assert seen.without_unreliable(kept + one[:-1]) == kept + one[:-1]
    assert mirror(4, 0).without_unreliable(encode(Publish("t", b"1", 0), 4)) == b""


def test_a_request_without_an_answer_is_made_again() -> None:
    seen = mirror()
    seen.outgoing(encode(Subscribe(9, [SubscriptionRequest("a")]), 5) + encode(PingReq(), 5))
    assert packets(seen.unanswered()) == [Subscribe(9, [SubscriptionRequest("a")]), PingReq()]
    seen.incoming(encode(PingResp(), 5))
    assert len(seen.unanswered()) == 1


def test_acknowledgements_of_a_lost_broker_are_not_for_the_next() -> None:
    seen = mirror()
    seen.incoming(encode(Publish("a", b"1", 1, packet_id=1), 5) + encode(Publish("a", b"2", 2, packet_id=2), 5))
    seen.lost(complete_here=False)
    # The next broker uses the same identifier before the client has acknowledged the first message.
    seen.incoming(encode(Publish("a", b"3", 1, packet_id=1), 5))
    assert seen.outgoing(encode(PubAck(1), 5)) == b""
    assert seen.outgoing(encode(PubAck(1), 5)) == encode(PubAck(1), 5)
    assert seen.outgoing(encode(PubRec(2), 5)) == encode(PubRec(2), 5), "of this one the next broker was told"


def test_exactly_once_can_be_brought_to_its_end_here() -> None:
    seen = mirror()
    seen.incoming(encode(Publish("a", b"1", 2, packet_id=1), 5) + encode(Publish("a", b"2", 2, packet_id=2), 5))
    seen.outgoing(encode(PubRec(2), 5))
    seen.lost(complete_here=True)
    assert packets(seen.take_answers()) == [PubRel(2)]
    assert seen.outgoing(encode(PubRec(1), 5)) == b""
    assert packets(seen.take_answers()) == [PubRel(1)]
    assert seen.outgoing(encode(PubComp(1), 5) + encode(PubComp(2), 5)) == b""
    assert seen.orphans == {}


def test_facts_for_the_next_broker() -> None:
    seen = mirror()
    seen.outgoing(encode(Subscribe(1, [SubscriptionRequest("a/+", 1)]), 5))
    seen.incoming(encode(SubAck(1, [1]), 5))
    seen.outgoing(encode(Publish("a", b"1", 2, packet_id=7), 5))
    seen.incoming(encode(PubRec(7), 5))
    seen.incoming(encode(Publish("a", b"2", 2, packet_id=3), 5) + encode(Publish("a", b"2", 1, packet_id=4), 5))
    seen.outgoing(encode(Publish("t", b"0", properties=Properties(topic_alias=5)), 5))
    fields = Fields(b"\x00" + seen.facts())
    assert fields.blob() == seen.connect
    assert fields.blob() == b"c"
    assert fields.number() == 1
    assert (fields.blob(), fields.number(), fields.number()) == (b"a/+", 1, 0)
    assert fields.blob() == (7).to_bytes(2, "big")
    assert fields.blob() == (3).to_bytes(2, "big")
    assert fields.number() == 1
    assert (fields.number(), fields.blob()) == (5, b"t")


def test_what_the_session_has_from_before_is_known() -> None:
    seen = mirror()
    seen.found([("before", 2, 9)], [7])
    seen.incoming(encode(PubRel(3), 5))
    fields = Fields(b"\x00" + seen.facts())
    assert (fields.blob(), fields.blob(), fields.number()) == (seen.connect, b"c", 1)
    assert (fields.blob(), fields.number(), fields.number()) == (b"before", 2, 9)
    assert (fields.blob(), fields.blob()) == (b"\x00\x07", b"\x00\x03")
    seen.outgoing(encode(PubComp(3), 5) + encode(PubRel(7), 5))
    seen.incoming(encode(PubComp(7), 5))
    assert seen.at_rest


def test_an_assigned_identifier_counts() -> None:
    seen = Mirror(encode(Connect(""), 5))
    seen.incoming(encode(ConnAck(properties=Properties(assigned_client_identifier="given")), 5))
    assert seen.client_id == "given"
    assert seen.resumable


def test_who_cannot_be_gone_on_with() -> None:
    assert not Mirror(encode(Connect("c"), 5)).resumable, "not connected"
    refused = Mirror(encode(Connect("c"), 5))
    refused.incoming(encode(ConnAck(0x87), 5))
    assert not refused.resumable
    leaving = mirror()
    leaving.outgoing(encode(Disconnect(), 5))
    assert not leaving.resumable
    proving = mirror()
    proving.outgoing(encode(Auth(0x19, Properties(authentication_method="m")), 5))
    assert not proving.resumable
    proving.incoming(encode(Auth(0, Properties(authentication_method="m")), 5))
    assert proving.resumable


@given(st.binary(min_size=0, max_size=40), st.integers(1, 15), st.integers(0, 15), st.sampled_from([4, 5]))
def test_packets_that_make_no_sense_are_passed_on(body: bytes, kind: int, flags: int, version: int) -> None:
    seen = mirror(version)
    raw = bytes((kind << 4 | flags, len(body))) + body
    assert seen.outgoing(raw) == raw
    seen.incoming(raw)

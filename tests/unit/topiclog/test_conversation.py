"""The client's side of the bulk port: answers find their requests, credit is given back, streams go on where they were."""

from __future__ import annotations

import pytest

from nearcast.errors import (
    BatchRefused,
    ConnectionClosed,
    ConnectionRefused,
    RecordUnavailable,
    RemoteProtocolError,
    RequestRefused,
    StorageUnavailable,
    TopicUnknown,
)
from nearcast.topiclog import wire
from nearcast.topiclog.conversation import Conversation, Reading, refusal, welcomed


def body(content: wire.Message) -> bytes:
    return wire.message(0, content)[wire.HEADER_BYTES :]


def sent(conversation: Conversation) -> list[tuple[int, wire.FromClient]]:
    reader = wire.FrameReader(1 << 20, 0)
    frames = reader.feed(b"".join(conversation.output))
    conversation.output.clear()
    return [(number, wire.decode_from_client(content)) for _, number, content in frames]


def hear(conversation: Conversation, number: int, content: wire.Message) -> None:
    conversation.frame(wire.MESSAGE, number, body(content))


def opened(asked: wire.Open, window_bytes: int = 1_000) -> tuple[Conversation, Reading]:
    conversation, reading = Conversation(), Reading(asked, window_bytes)
    conversation.open(reading)
    hear(conversation, reading.number, wire.Names([wire.Name(4, "a", 10, 50), wire.Name(5, "b", 1, 90)]))
    hear(conversation, reading.number, wire.Opened())
    sent(conversation)
    return conversation, reading


def batch(conversation: Conversation, reading: Reading, size: int, *progress: tuple[int, int]) -> None:
    conversation.frame(wire.DATA, reading.number, bytes(size))
    hear(conversation, reading.number, wire.Progress(list(progress)))


def test_answers_find_their_requests_in_any_order() -> None:
    conversation = Conversation()
    first, second = conversation.ask(wire.ListRules()), conversation.ask(wire.LastBatch("q"))
    assert [number for number, _ in sent(conversation)] == [first.number, second.number]
    hear(conversation, second.number, wire.Done(7))
    assert not first.done
    assert second.answer == wire.Done(7)
    hear(conversation, first.number, wire.Refused("topic-unknown", "no such topic", topic="x"))
    assert isinstance(first.error, TopicUnknown)
    assert conversation.idle


def test_what_nobody_asked_for_is_a_protocol_error() -> None:
    conversation = Conversation()
    with pytest.raises(RemoteProtocolError):
        hear(conversation, 3, wire.Done())
    with pytest.raises(RemoteProtocolError):
        conversation.frame(wire.DATA, 3, b"")
    with pytest.raises(RemoteProtocolError):
        hear(conversation, 0, wire.Done())
    for content in (wire.Progress([(1, 2)]), wire.Gap(1, 2, 3), wire.Done()):
        conversation, reading = opened(wire.Open(["#"]))
        with pytest.raises(RemoteProtocolError):
            hear(conversation, reading.number, content)
    conversation, reading = opened(wire.Open(["#"]))
    with pytest.raises(RemoteProtocolError, match="not named"):
        batch(conversation, reading, 8, (99, 2))


def test_answers_to_what_was_given_up_are_dropped() -> None:
    conversation = Conversation()
    request = conversation.ask(wire.ListRules())
    conversation.forget(request)
    hear(conversation, request.number, wire.Rules([]))
    conversation, reading = opened(wire.Open(["#"]))
    number = reading.number
    conversation.close(reading)
    assert sent(conversation) == [(number, wire.Close())]
    conversation.frame(wire.DATA, number, b"")
    hear(conversation, number, wire.Progress([]))
    hear(conversation, number, wire.End())
    with pytest.raises(RemoteProtocolError):
        hear(conversation, number, wire.End())


def test_credit_is_given_back_for_what_was_used() -> None:
    conversation, reading = opened(wire.Open(["#"]), window_bytes=1_000)
    batch(conversation, reading, 200, (4, 11))
    batch(conversation, reading, 200, (5, 3))
    conversation.use(reading)
    assert sent(conversation) == [], "nothing was used"
    assert reading.take() is not None
    conversation.use(reading)
    assert sent(conversation) == [], "not worth a message"
    assert reading.take() is not None
    conversation.use(reading)
    assert sent(conversation) == [(reading.number, wire.Credit(400))]
    assert reading.take() is None


def test_a_stream_is_opened_again_behind_the_last_whole_batch() -> None:
    asked = wire.Open(["a", "b"], "latest", end_time_us=77)
    conversation, reading = opened(asked)
    batch(conversation, reading, 100, (4, 20))
    conversation.frame(wire.DATA, reading.number, bytes(100))  # and its progress never comes
    assert conversation.lost(ConnectionClosed("gone")) == [reading]
    again = Conversation()
    again.open(reading)
    ((_, opening),) = sent(again)
    assert isinstance(opening, wire.Open)
    assert opening.start_indexes == {"a": 20, "b": 1}
    assert opening.end_indexes == {"a": 50, "b": 90}
    assert opening.listed_only
    assert opening.credit == 900, "one batch still waits here"
    assert opening.end_time_us == 77
    first = reading.take()
    assert first is not None
    assert first.topics == {4: "a", 5: "b"}
    # The numbers of the second connection are others.
    hear(again, reading.number, wire.Names([wire.Name(1, "a", 20, 50), wire.Name(2, "b", 1, 90)]))
    hear(again, reading.number, wire.Opened())
    batch(again, reading, 10, (2, 90))
    hear(again, reading.number, wire.Gap(1, 20, 50))
    hear(again, reading.number, wire.End())
    second, third = reading.take(), reading.take()
    assert second is not None
    assert second.topics == {1: "a", 2: "b"}
    assert third is not None
    assert [(gap.topic, gap.first_index, gap.next_index) for gap in third.gaps] == [("a", 20, 50)]
    assert reading.ended


def test_a_stream_that_was_lost_before_all_was_named_begins_anew() -> None:
    conversation, reading = Conversation(), Reading(wire.Open(["#"], "latest", follow=True), 1_000)
    conversation.open(reading)
    hear(conversation, reading.number, wire.Names([wire.Name(4, "a", 10, None)]))
    conversation.lost(ConnectionClosed("gone"))
    again = Conversation()
    again.open(reading)
    assert sent(again)[-1][1] == wire.Open(["#"], "latest", follow=True, credit=1_000)


def test_a_follower_reads_topics_that_appeared_meanwhile_from_their_first_record() -> None:
    conversation, reading = Conversation(), Reading(wire.Open(["#"], "latest", follow=True), 1_000)
    conversation.open(reading)
    hear(conversation, reading.number, wire.Names([wire.Name(4, "a", 10, None)]))
    hear(conversation, reading.number, wire.Opened())
    conversation.lost(ConnectionClosed("gone"))
    again = Conversation()
    again.open(reading)
    opening = sent(again)[-1][1]
    assert isinstance(opening, wire.Open)
    assert (opening.start, opening.start_indexes, opening.listed_only, opening.follow) == ("earliest", {"a": 10}, False, True)


def test_pings_are_answered() -> None:
    conversation = Conversation()
    hear(conversation, 0, wire.Ping())
    assert sent(conversation) == [(0, wire.Pong())]
    conversation.ping()
    assert sent(conversation) == [(0, wire.Ping())]
    hear(conversation, 0, wire.Pong())


def test_the_end_of_a_connection_fails_what_waits() -> None:
    conversation = Conversation()
    request = conversation.ask(wire.ListRules())
    gone = ConnectionClosed("gone")
    assert conversation.lost(gone) == []
    assert request.error is gone


def test_refusals_are_errors_with_facts() -> None:
    assert isinstance(refusal(wire.Refused("batch", "full")), BatchRefused)
    assert isinstance(refusal(wire.Refused("storage", "full")), StorageUnavailable)
    error = refusal(wire.Refused("record-unavailable", "gone", 0x83, "t", 3, 5, 9))
    assert isinstance(error, RecordUnavailable)
    assert (error.topic, error.index, error.first_index, error.next_index) == ("t", 3, 5, 9)
    error = refusal(wire.Refused("something a later version says", "no", 0x87))
    assert isinstance(error, RequestRefused)
    assert error.reason_code == 0x87
    with pytest.raises(ConnectionRefused, match="who are you"):
        welcomed(wire.MESSAGE, 0, body(wire.Refused("request", "who are you", 0x86)))
    with pytest.raises(RemoteProtocolError):
        welcomed(wire.MESSAGE, 0, body(wire.Done()))


def test_a_busy_broker_is_asked_again_and_one_that_says_no_is_not() -> None:
    for reason_code, error in ((0x89, ConnectionClosed), (0x86, ConnectionRefused)):
        with pytest.raises(error):
            welcomed(wire.MESSAGE, 0, body(wire.Refused("request", "no", reason_code)))

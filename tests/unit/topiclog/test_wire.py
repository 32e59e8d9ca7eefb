"""Frames of the bulk port: whole, byte by byte, with garbage; and messages that are none."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.errors import RemoteProtocolError
from nearcast.topiclog import wire

MESSAGES = [
    wire.Hello(client_id="reader", username="ann", password=b"secret"),
    wire.ListTopics(["sensors/#"], 7),
    wire.Open(["a", "b/+"], "index", 12, {"a": 3}, True, None, {"a": 9}, None, True, 1 << 20),
    wire.Publish("a", [b"x", b""], b"\x03\x00\x01t", 2, True),
    wire.CommitBatch("query", 3, [(0, 1), (1, 5)]),
]


def test_messages_come_back_as_they_went() -> None:
    reader = wire.FrameReader(1 << 20, 0)
    sent = b"".join(wire.message(number, content) for number, content in enumerate(MESSAGES, start=1))
    frames = reader.feed(sent)
    assert [number for _, number, _ in frames] == [1, 2, 3, 4, 5]
    assert [wire.decode_from_client(body) for _, _, body in frames] == MESSAGES
    assert reader.waiting_bytes == 0


@given(st.randoms(use_true_random=False))
def test_frames_do_not_depend_on_how_they_are_cut(rng: random.Random) -> None:
    sent = b"".join(wire.message(1, content) for content in MESSAGES) + wire.data_header(9, 40) + bytes(40)
    reader = wire.FrameReader(1 << 20, 1 << 20)
    frames = []
    while sent:
        size = rng.choice((1, 2, 11, 12, 13, 100, 1000))
        frames += reader.feed(sent[:size])
        sent = sent[size:]
    assert [wire.decode_from_client(body) for kind, _, body in frames if kind == wire.MESSAGE] == MESSAGES
    assert frames[-1] == (wire.DATA, 9, bytes(40))


def test_a_frame_that_is_too_large_is_refused_before_it_arrives() -> None:
    reader = wire.FrameReader(wire.MAX_HELLO_BYTES, 0)
    with pytest.raises(RemoteProtocolError, match="16385 bytes, 16384 allowed") as refused:
        reader.feed(wire.HEADER.pack(wire.MAX_HELLO_BYTES + 1, wire.MESSAGE, 0))
    assert refused.value.reason_code == 0x95
    with pytest.raises(RemoteProtocolError, match="0 allowed"):
        wire.FrameReader(100, 0).feed(wire.HEADER.pack(1, wire.DATA, 0))


def test_another_protocol_is_recognised() -> None:
    with pytest.raises(RemoteProtocolError, match="unknown kind"):
        wire.FrameReader(1 << 20, 0).feed(b"GET / HTTP/1.1\r\n")


@given(st.binary(max_size=400))
def test_garbage_is_a_protocol_error_and_nothing_else(body: bytes) -> None:
    for decode in (wire.decode_from_client, wire.decode_from_broker):
        with contextlib.suppress(RemoteProtocolError):
            decode(body)


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_message_with_one_wrong_byte_is_a_message_or_an_error(place: int, byte: int) -> None:
    for content in MESSAGES:
        body = bytearray(wire.message(0, content)[wire.HEADER_BYTES :])
        body[place % len(body)] = byte
        with contextlib.suppress(RemoteProtocolError):
            wire.decode_from_client(body)


def test_what_a_client_said_is_not_repeated_in_errors() -> None:
    body = bytearray(wire.message(0, wire.Hello(password=b"hunter2"))[wire.HEADER_BYTES :])
    body[0] = 0xC1
    with pytest.raises(RemoteProtocolError) as refused:
        wire.decode_from_client(body)
    assert "hunter2" not in str(refused.value)


def test_a_later_version_may_add_fields() -> None:
    import msgspec

    body = msgspec.msgpack.encode(["done", 7, "something new"])
    assert wire.decode_from_broker(body) == wire.Done(7)


@pytest.mark.parametrize(
    "content",
    [
        wire.Get("a", 1 << 63),
        wire.FindIndexes(["a"], (1 << 64) - 1),
        wire.Open(["a"], start_indexes={"a": 1 << 63}),
        wire.CommitBatch("p", 1, [(0, 1 << 63)]),
    ],
)
def test_numbers_that_the_log_cannot_count_are_no_messages(content: wire.Message) -> None:
    with pytest.raises(RemoteProtocolError):
        wire.decode_from_client(wire.message(1, content)[wire.HEADER_BYTES :])

"""The ring's messages as bytes: round trips, and whatever else arrives."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.chord.commands import Change, Entry, Split, decode_entry, encode_entry
from nearcast.chord.contacts import Contact
from nearcast.chord.identifiers import packed
from nearcast.chord.messages import (
    EPOCH,
    MAX_MESSAGE_BYTES,
    MAX_RECORD_BYTES,
    AnyBody,
    Beat,
    Check,
    Checked,
    Chunk,
    Copied,
    Copy,
    Depart,
    Departed,
    Fetch,
    Find,
    Get,
    Hints,
    Join,
    Joined,
    Message,
    NotLeader,
    Passed,
    Repay,
    Repayment,
    Round,
    Route,
    Value,
    Vouch,
    Write,
    decode,
    encode,
)
from nearcast.chord.records import Interval, Item, Record, Segment
from nearcast.errors import LocalProtocolError, RemoteProtocolError

CONTACT = Contact("set-1", ("a", "b", "c"), "b", 7)
KEY = packed(12345)
RECORD = Record("t/1", "set-1", "owned", 60.0, 3, (Segment("set-1", 0), Segment("set-2", 55)), ("f.py:f",), 9, "w 1")
ITEMS = (Item(KEY, RECORD), Item(packed(0), None))
LOST = (Interval(KEY, packed(99), "set-3 4"),)
BODIES: list[AnyBody] = [
    NotLeader("a"),
    Find(KEY),
    Route(True, (CONTACT,)),
    Beat(CONTACT, 1, 2, (CONTACT,)),
    Vouch(True, False, -1, False, None, (CONTACT,)),
    Vouch(False, True, 5, True, CONTACT, ()),
    Join(CONTACT, 3),
    Joined(False, ()),
    Fetch("set-1", 3, "set-2", KEY),
    Chunk(4, 3, True, ITEMS, KEY, (CONTACT,), 9, LOST),
    Copy("set-1", 3, -1, 6, ITEMS, Interval(KEY, KEY), KEY, (CONTACT,), 9, LOST),
    Copied(True, 6, True),
    Depart("set-1", 3, 6),
    Departed(True),
    Get("t/1"),
    Write(RECORD, EPOCH, 2),
    Value(0, RECORD),
    Value(3, None),
    Hints((CONTACT,)),
    Round("set-1", 8, "set-2", 3),
    Passed(False),
    Check(),
    Checked(True),
    Repay("set-1 3", packed(4), packed(9), (Interval(packed(5), packed(6), "set-2 1"),)),
    Repayment(True, packed(9)),
]


def message(body: AnyBody) -> Message:
    is_request = isinstance(body, Find | Beat | Join | Fetch | Copy | Depart | Get | Write | Hints | Round | Check | Repay)
    return Message("set-1" if is_request else "", 42, body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_what_is_encoded_is_decoded(body: AnyBody) -> None:
    assert decode(encode(message(body))) == message(body)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: type(body).__name__)
def test_a_part_of_a_message_is_none(body: AnyBody) -> None:
    data = encode(message(body))
    for end in range(len(data)):
        with pytest.raises(RemoteProtocolError):
            decode(data[:end])
    with pytest.raises(RemoteProtocolError):
        decode(data + b"\x00")


@given(st.binary(max_size=200))
def test_garbage_raises_remote_protocol_error_only(data: bytes) -> None:
    try:
        decode(data)
    except RemoteProtocolError:
        pass
    try:
        decode_entry(data)
    except RemoteProtocolError:
        pass


def test_changed_bytes_raise_remote_protocol_error_only() -> None:
    rng = random.Random(1)
    for body in BODIES:
        data = bytearray(encode(message(body)))
        for _ in range(300):
            changed = bytearray(data)
            for _ in range(rng.randint(1, 3)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            try:
                decode(bytes(changed))
            except RemoteProtocolError:
                pass


def test_an_answer_is_no_request() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(encode(Message("set-1", 1, Copied(True, 1, True))))
    with pytest.raises(RemoteProtocolError):
        decode(encode(Message("", 1, Find(KEY))))


def test_sizes_are_bounded() -> None:
    with pytest.raises(RemoteProtocolError):
        decode(bytes(MAX_MESSAGE_BYTES + 1))
    many = tuple(Segment("s" * 120, number) for number in range(1_000))
    large = Record("t" * 65_000, "o", segments=many)
    with pytest.raises(RemoteProtocolError) as refusal:
        decode(encode(Message("set-1", 1, Write(large))))
    assert refusal.value.reason_code == 0x95
    assert MAX_RECORD_BYTES < 200_000
    with pytest.raises(LocalProtocolError):
        encode(Message("", 1, Route(False, tuple(Contact("n" * 128, ("r" * 128,) * 9) for _ in range(1_000)))))
    with pytest.raises(RemoteProtocolError):
        decode(encode(Message("", 1, Route(False, (CONTACT,) * 65))))


def test_entries_of_the_log() -> None:
    for command in (Split(CONTACT, 4), Change(Write(RECORD))):
        entry = Entry("a", 77, command)
        assert decode_entry(encode_entry(entry)) == entry

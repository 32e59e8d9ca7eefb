"""The codec of Raft messages: what goes out comes in; garbage is refused, and nothing else happens."""

from __future__ import annotations

import random

import pytest

from nearcast.errors import RemoteProtocolError
from nearcast.raft.configuration import MAX_ID, Configuration
from nearcast.raft.entries import CONFIGURATION, DATA, NOOP, Entry, HardState, Snapshot
from nearcast.raft.messages import (
    MAX_NUMBER,
    Append,
    AppendResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    Message,
    ReadRequest,
    ReadResponse,
    TimeoutNow,
    VoteRequest,
    VoteResponse,
    decode,
)

CONFIGURED = Configuration((1, 2, 3), (7,), 3, b"where")
MESSAGES: list[Message] = [
    Append(1, 2, 9, 4, 3, 2, []),
    Append(
        1,
        MAX_ID,
        MAX_NUMBER,
        4,
        3,
        2,
        [
            Entry(5, 3, DATA, [b"one", b"", b"two"]),
            Entry(6, 4, NOOP, []),
            Entry(7, 9, CONFIGURATION, [CONFIGURED.encode()]),
            Entry(8, 9, DATA, [b"x" * 70_000]),
        ],
    ),
    AppendResponse(1, 2, 9, 5),
    AppendResponse(1, 2, 9, 5, True, 3, 2, -7),
    Heartbeat(1, 2, 9, 5, 77, 1.25, 2, 0.18),
    HeartbeatResponse(1, 2, 9, 77, 1.25, 5, 6, 12),
    VoteRequest(1, 2, 9, 5, 4, True),
    VoteRequest(1, 2, 9, 5, 4, False, True),
    VoteRequest(1, 2, 9, 5, 4, False),
    VoteResponse(1, 2, 9, True, True),
    VoteResponse(1, 2, 9, False, False),
    TimeoutNow(1, 2, 9),
    InstallSnapshot(1, 2, 9, Snapshot(5, 4, CONFIGURED, b"somewhere")),
    ReadRequest(1, 2, 9, 3),
    ReadResponse(1, 2, 9, 3, 5),
]


def whole(message: Message) -> bytes:
    return b"".join(message.encode())


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_round_trip(message: Message) -> None:
    again = decode(whole(message))
    assert type(again) is type(message)
    assert repr(again) == repr(message)
    assert whole(again) == whole(message)


def test_payloads_are_sent_as_they_are() -> None:
    payload = b"x" * 100_000
    pieces = Append(1, 2, 3, 0, 0, 0, [Entry(1, 3, DATA, [payload])]).encode()
    assert any(piece is payload for piece in pieces)


@pytest.mark.parametrize("message", MESSAGES, ids=repr)
def test_cut_short_or_too_long(message: Message) -> None:
    content = whole(message)
    for length in range(min(len(content), 200)):
        with pytest.raises(RemoteProtocolError):
            decode(content[:length])
    with pytest.raises(RemoteProtocolError):
        decode(content + b"\0")


def test_garbage_is_refused_or_is_a_message() -> None:
    rng = random.Random(8)
    refused = 0
    for number in range(20_000):
        content = bytearray(whole(MESSAGES[number % len(MESSAGES)])[:300])
        for _ in range(rng.randrange(1, 4)):
            content[rng.randrange(len(content))] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        try:
            again = decode(bytes(content))
        except RemoteProtocolError:
            refused += 1
        else:
            assert whole(decode(whole(again))) == whole(again)
    assert refused > 2_000


@pytest.mark.parametrize(
    "message",
    [
        Append(0, 2, 9, 4, 3, 2, []),
        Append(1, 2, 9, 4, 5, 2, [Entry(5, 4, DATA, [b""])]),  # terms fall
        Append(1, 2, 9, 4, 5, 2, [Entry(5, 10, DATA, [b""])]),  # of a term to come
        Append(1, 2, 9, 4, 3, 2, [Entry(5, 4, CONFIGURATION, [b"nobody"])]),
        Heartbeat(1, 2, 9, 5, 77, float("nan"), 2, 0.18),
        Heartbeat(1, 2, 9, 5, 77, 1.0, 2, -1.0),
        VoteRequest(1, 2, 9, 5, 4, True, True),
        InstallSnapshot(1, 2, 9, Snapshot(5, 10, CONFIGURED)),
        InstallSnapshot(1, 2, 9, Snapshot(5, 4, Configuration(()))),
        ReadRequest(1, 2, MAX_NUMBER + 1, 3),
    ],
    ids=repr,
)
def test_what_cannot_be(message: Message) -> None:
    with pytest.raises(RemoteProtocolError):
        decode(whole(message))


def test_configurations_and_hard_states() -> None:
    assert Configuration.decode(CONFIGURED.encode()) == CONFIGURED
    again = HardState.decode(HardState(5, 2, 9).encode())
    assert (again.term, again.vote, again.commit) == (5, 2, 9)

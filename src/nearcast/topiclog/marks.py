"""Marks: what ends a group of blocks in the log and says who wrote it.

A group is there whole or not at all, so whatever a mark says is true exactly when the messages before it are in the log. That
is what makes two things exactly once: batches of a producer (a Spark query) and QoS 2 publications of a client.
"""

from __future__ import annotations

from typing import Final

import msgspec

RAFT: Final = "$raft"
"""The producer whose marks end entries of a replica's log: ``batch`` is the entry's index, ``part`` its term."""
FORGOTTEN: Final = -1
"""The batch of a mark that says: do not remember this producer any more."""


class Mark(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Who wrote a group, and how far that one has come."""

    producer: str = ""
    """Name under which the log remembers the latest of its marks, also across restarts; "" remembers none."""

    batch: int = 0
    """Number of the producer's batch that the group belongs to."""

    part: int = 0
    """Which part of the batch it is, counted from 0."""

    final: bool = True
    """Whether the batch is complete with it."""

    client_id: str = ""
    """The MQTT client whose publications the group holds."""

    packet_ids: tuple[int, ...] = ()
    """Their packet identifiers, in order."""

    body: bytes = b""
    """What whoever wrote it wants to find there again."""


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(Mark)
_LIST_DECODER: Final = msgspec.msgpack.Decoder(list[Mark])


def encode_mark(mark: Mark) -> bytes:
    """The body of a MARK block."""
    return _ENCODER.encode(mark)


def decode_mark(data: bytes | memoryview) -> Mark:
    """The mark in a MARK block's body; ``ValueError`` when it holds none."""
    return _DECODER.decode(data)


def encode_marks(marks: list[Mark]) -> bytes:
    """Several marks in one piece."""
    return _ENCODER.encode(marks)


def decode_marks(data: bytes | memoryview) -> list[Mark]:
    """What :func:`encode_marks` wrote; ``ValueError`` for anything else."""
    return _LIST_DECODER.decode(data)


def remember(marks: dict[str, Mark], mark: Mark) -> None:
    """Take note of a mark as the latest of its producer."""
    if mark.batch == FORGOTTEN:
        marks.pop(mark.producer, None)
    elif mark.producer:
        marks[mark.producer] = mark

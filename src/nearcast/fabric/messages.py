"""Publications as bytes: in MESSAGES frames on a link, and in the files of a spool.

A frame says what its messages are and then has their packets as they came from the client, unchanged::

    MESSAGES   flags | sequence of the first | previous reliable sequence | count | stride | head size | ms left
               | via | stamp | properties | topic | packets

``previous`` is the last reliable message sent before, so that the receiver sees a gap. ``via`` says on whose behalf the
receiver gets them: empty for its plain subscribers, else the shared subscriptions it is to serve (nearcast.fabric.sharing).
``stamp`` is that of a retained message (nearcast.fabric.replication), else 0.
A *void* frame has no packets: its messages expired or are too large for the receiver, and only their numbers are passed on.
"""

from __future__ import annotations

from typing import Final

from nearcast.fabric import frames
from nearcast.mqtt import records
from nearcast.mqtt.publication import Publication
from nearcast.mqtt.records import Fields, blob, number
from nearcast.mqtt.session import Pending

V5: Final = 1
FORWARDABLE: Final = 2
RELIABLE: Final = 4
VOID: Final = 8

#: Every node takes frames up to this size, whatever its limit for packets: larger publications are sent in parts.
MAX_PART_BYTES: Final = 786_432

_KIND: Final = bytes([frames.MESSAGES])


def head(publication: Publication, previous: int, via: str, now: float, flags: int) -> bytes:
    """A MESSAGES frame up to the packets, which follow it as they are."""
    if publication.v5:
        flags |= V5
    if publication.raw_flags >= 0:
        flags |= FORWARDABLE
    left_ms = 0
    if publication.expires_at > 0:
        left_ms = max(1, int((publication.expires_at - now) * 1e3))
    packets_bytes = 0 if flags & VOID else len(publication.packets)
    fields = b"".join(
        (
            _KIND,
            number(flags),
            number(publication.sequence),
            number(previous),
            number(publication.count),
            number(publication.stride),
            number(publication.head_size),
            number(left_ms),
            b"\x00" if not via else blob(via.encode("utf-8")),
            b"\x00" if not publication.stamp else number(publication.stamp),
            blob(publication.properties),
            blob(publication.topic),
            number(packets_bytes),
        )
    )
    return (len(fields) + packets_bytes).to_bytes(frames.LENGTH_BYTES, "big") + fields


class Arrived:
    """A MESSAGES frame that was read. ``publication`` is none where the frame is void."""

    def __init__(self, content: bytes, now: float) -> None:
        fields = Fields(content)
        flags = fields.number()
        self.reliable = (flags & RELIABLE) != 0
        self.sequence = fields.number()
        self.previous = fields.number()
        self.count = fields.number()
        stride = fields.number()
        head_size = fields.number()
        left_ms = fields.number()
        self.via = fields.blob().decode("utf-8")
        stamp = fields.number()
        properties = fields.blob()
        topic = fields.blob()
        packets = fields.blob()
        self.publication: Publication | None = None
        if self.count < 1 or self.sequence < 1:
            raise ValueError("messages without a number")
        if flags & VOID:
            return
        if not packets or (stride and stride * self.count != len(packets)) or packets[0] & 0xF0 != 0x30:
            raise ValueError("messages whose sizes do not fit")
        if self.reliable and (not stride or not packets[0] & 0x06):
            raise ValueError("reliable messages that cannot be told apart")
        publication = Publication(
            topic,
            packets,
            self.count,
            stride,
            (flags & V5) != 0,
            head_size,
            properties,
            now + left_ms / 1e3 if left_ms else 0.0,
            (flags & FORWARDABLE) != 0,
        )
        publication.sequence = self.sequence
        publication.stamp = stamp
        self.publication = publication

    @property
    def last(self) -> int:
        return self.sequence + self.count - 1


def spooled(pending: Pending, wall_offset: float) -> bytes:
    """A stretch of a queue as it is kept in a file."""
    return b"".join(
        (
            b"\x01",
            records.publication_fields(pending.publication, wall_offset),
            number(pending.start),
            number(pending.count),
            records.terms_fields(pending.terms),
        )
    )


def unspooled(record: bytes, wall_offset: float) -> Pending:
    """The stretch that :func:`spooled` made bytes of; raises ``ValueError``."""
    if record[:1] != b"\x01":
        raise ValueError("this is no stretch of a queue")
    fields = Fields(record)
    publication = fields.publication(wall_offset)
    start = fields.number()
    count = fields.number()
    if count < 1 or start + count > publication.count:
        raise ValueError("a stretch is longer than its publication")
    return Pending(publication, start, count, fields.terms())

"""What one entry of a replicated log says, and how it travels: the runs of messages of one turn of a broker's event loop,
topics that are emptied, and marks of whoever sent all that.

An entry holds its records as blocks do (:mod:`nearcast.topiclog.blocks`): the body of a run is byte for byte what stands
behind the header of its block. So it is made once, by whoever proposes it, and goes from there to links and disks of all
replicas; what differs between replicas, a topic's number and the checksum, is in the header. All numbers are little-endian::

    entry     u8 format, three zeros, u32 count of items, items
    RUN       _RUN, the topic's name, the body; no name: the topic of the run before
    TIME      _TIME: when the runs that follow came, microseconds since 1970
    DELETION  _SIZED, the topic's name: all its records up to here are removed
    MARK      _SIZED, a mark as MessagePack

This module knows bytes; terms and indexes of entries, and topics' numbers, are :mod:`nearcast.topiclog.replica`'s business.
"""

from __future__ import annotations

import struct
from typing import Final

from mypy_extensions import i64

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.topiclog.blocks import HEADER_BYTES, QOS_MASK, RETAIN, encode_body
from nearcast.topiclog.marks import RAFT, Mark, decode_mark, encode_mark

FORMAT: Final = 1
MAX_ENTRY_BYTES: Final = 1 << 28
RESERVED_PRODUCERS: Final = RAFT
"""Producers with this beginning are the log's own."""

_MALFORMED: Final = 0x81
_FLAGS: Final = QOS_MASK | RETAIN

RUN: Final = 1
TIME: Final = 2
DELETION: Final = 3
MARK: Final = 4

_HEAD: Final = struct.Struct("<B3xI")
_HEAD_BYTES: Final = 8
_RUN: Final = struct.Struct("<BBHHxxIII")
"""Kind, flags, topic_bytes, publisher_bytes, properties_bytes, count, body_bytes."""
_RUN_BYTES: Final = 20
_TIME: Final = struct.Struct("<Bq")
_TIME_BYTES: Final = 9
_SIZED: Final = struct.Struct("<BI")
_SIZED_BYTES: Final = 5
_JOINED_BYTES: Final = 2_048
"""Pieces up to this size are joined with those beside them."""


class Run:
    """Messages that share topic, publisher, properties and arrival. ``body`` is that of their block, in pieces."""

    def __init__(
        self,
        topic: bytes,
        flags: int,
        time_us: int,
        count: int,
        publisher_bytes: int,
        properties_bytes: int,
        body: list[bytes],
        body_bytes: int,
    ) -> None:
        self.topic = topic
        self.flags = flags
        self.time_us = time_us
        self.count = count
        self.publisher_bytes = publisher_bytes
        self.properties_bytes = properties_bytes
        self.body = body
        self.body_bytes = body_bytes

    def publisher(self) -> bytes:
        """The client identifier of whoever published these."""
        begin = 4 * (self.count + 1)
        return self.whole_body()[begin : begin + self.publisher_bytes]

    def properties(self) -> bytes:
        """MQTT 5 properties that they share, encoded, without their length."""
        begin = 4 * (self.count + 1) + self.publisher_bytes
        return self.whole_body()[begin : begin + self.properties_bytes]

    def payloads(self) -> list[bytes]:
        """Of all messages, in order."""
        body = self.whole_body()
        ends = struct.unpack_from(f"<{self.count + 1}I", body)
        base = 4 * (self.count + 1) + self.publisher_bytes + self.properties_bytes
        return [body[base + ends[at] : base + ends[at + 1]] for at in range(self.count)]

    def whole_body(self) -> bytes:
        """The body in one piece."""
        return self.body[0] if len(self.body) == 1 else b"".join(self.body)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Run):
            return NotImplemented
        mine = (self.topic, self.flags, self.time_us, self.count, self.publisher_bytes, self.properties_bytes)
        theirs = (other.topic, other.flags, other.time_us, other.count, other.publisher_bytes, other.properties_bytes)
        return mine == theirs and self.whole_body() == other.whole_body()

    def __hash__(self) -> int:
        return hash((self.topic, self.flags, self.time_us, self.count))

    def __repr__(self) -> str:
        return f"Run({self.topic!r}, {self.count} messages, {self.body_bytes} bytes)"


class Deletion:
    """All records that a topic has at this point of the log are removed; its index goes on."""

    def __init__(self, topic: bytes) -> None:
        self.topic = topic

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Deletion) and self.topic == other.topic

    def __hash__(self) -> int:
        return hash(self.topic)

    def __repr__(self) -> str:
        return f"Deletion({self.topic!r})"


Item = Run | Deletion | Mark


class EntryWriter:
    """Gathers what an entry is to say. ``earliest_us`` is the arrival of what the log has last: times never fall in it."""

    def __init__(self, earliest_us: int = 0) -> None:
        self.size: int = _HEAD_BYTES
        """Of the entry so far, in bytes."""
        self.items: list[Item] = []
        self._pieces: list[bytes] = []
        self._small: list[bytes] = []
        self._count: int = 0
        self._topic = b""
        self._time_us: int = earliest_us
        self._noted_us: int = -1

    def run(self, topic: bytes, publisher: bytes, flags: int, properties: bytes, payloads: list[bytes], time_us: int) -> None:
        """Messages of one publication, or of several that share all but their payloads."""
        body = encode_body(publisher, properties, payloads)
        size = 0
        for piece in body:
            size += len(piece)
        self.add(Run(topic, flags, time_us, len(payloads), len(publisher), len(properties), body, size))

    def take(self, run: Run, time_us: int) -> None:
        """The messages of another entry's run, which arrive now."""
        made = Run(
            run.topic, run.flags, time_us, run.count, run.publisher_bytes, run.properties_bytes, run.body, run.body_bytes
        )
        self.add(made)

    def add(self, run: Run) -> None:
        """A run that is made already; it belongs to this entry from now on."""
        topic = run.topic
        flags_known = not run.flags & ~_FLAGS and run.flags & QOS_MASK != 3
        if not 0 < len(topic) < 65_536 or run.count < 1 or run.publisher_bytes > 65_535 or not flags_known:
            raise LocalProtocolError(f"{run!r} cannot be in an entry")
        if run.time_us < self._time_us:
            run.time_us = self._time_us
        self._time_us = run.time_us
        if self._noted_us != run.time_us:
            self._noted_us = run.time_us
            self._put(_TIME.pack(TIME, run.time_us))
        name = topic
        if topic == self._topic:
            name = b""
        self._topic = topic
        head = _RUN.pack(RUN, run.flags, len(name), run.publisher_bytes, run.properties_bytes, run.count, run.body_bytes)
        self.items.append(run)
        small = self._small
        small.append(head)
        if name:
            small.append(name)
        self.size += _RUN_BYTES + len(name) + run.body_bytes
        self._count += 1
        for piece in run.body:
            if len(piece) > _JOINED_BYTES:
                self._pieces.append(b"".join(small))
                small.clear()
                self._pieces.append(piece)
            elif piece:
                small.append(piece)

    def delete(self, topic: bytes) -> None:
        """Remove all that a topic has at this point."""
        if not 0 < len(topic) < 65_536:
            raise LocalProtocolError("a topic without a name cannot be emptied")
        self.items.append(Deletion(topic))
        self._put(_SIZED.pack(DELETION, len(topic)) + topic)

    def mark(self, mark: Mark) -> None:
        """How far a producer has come with this entry. A :data:`~nearcast.topiclog.marks.FORGOTTEN` one is the last of it."""
        if not mark.producer or mark.producer.startswith(RESERVED_PRODUCERS):
            raise LocalProtocolError(f"{mark.producer!r} cannot mark an entry")
        self.items.append(mark)
        data = encode_mark(mark)
        self._put(_SIZED.pack(MARK, len(data)) + data)

    def _put(self, data: bytes) -> None:
        self._small.append(data)
        self.size += len(data)
        self._count += 1

    def finish(self) -> list[bytes]:
        """The entry in pieces, of which large payloads are some as they are."""
        head = _HEAD.pack(FORMAT, self._count)
        pieces = self._pieces
        if not pieces:
            return [b"".join([head, *self._small])]
        pieces[0] = head + pieces[0]
        if self._small:
            pieces.append(b"".join(self._small))
            self._small = []
        return pieces


def decode(data: bytes, max_bytes: int = MAX_ENTRY_BYTES) -> list[Item]:
    """What an entry says. Anything that is not one, whole, is a :class:`~nearcast.errors.RemoteProtocolError`."""
    end: i64 = len(data)
    if end < _HEAD_BYTES or end > max_bytes:
        raise _malformed(f"it has {end} bytes")
    entry_format, count = _HEAD.unpack_from(data)
    if entry_format != FORMAT:
        raise _malformed(f"its format is {entry_format}")
    items: list[Item] = []
    at: i64 = _HEAD_BYTES
    topic = b""
    time_us = -1
    left: i64 = count
    while left:
        left -= 1
        if at >= end:
            raise _malformed("it ends before its last item")
        kind = data[at]
        if kind == RUN:
            if end - at < _RUN_BYTES:
                raise _malformed("it ends inside a run")
            _, flags, topic_bytes, publisher_bytes, properties_bytes, records, body_bytes = _RUN.unpack_from(data, at)
            name_at = at + _RUN_BYTES
            body_at = name_at + i64(topic_bytes)
            size: i64 = body_bytes
            if size > end - body_at:
                raise _malformed("it ends inside a run")
            if topic_bytes:
                topic = data[name_at:body_at]
            if not topic or time_us < 0 or flags & ~_FLAGS or flags & QOS_MASK == 3:
                raise _malformed("a run lacks its topic or time, or has flags that there are not")
            _check_body(data, body_at, size, records, publisher_bytes, properties_bytes)
            body = data[body_at : body_at + size]
            items.append(Run(topic, flags, time_us, records, publisher_bytes, properties_bytes, [body], body_bytes))
            at = body_at + size
        elif kind == TIME:
            if end - at < _TIME_BYTES:
                raise _malformed("it ends inside a time")
            later = _TIME.unpack_from(data, at)[1]
            if later < 0 or later < time_us:
                raise _malformed("its times fall")
            time_us = later
            at += _TIME_BYTES
        elif kind in (DELETION, MARK):
            if end - at < _SIZED_BYTES:
                raise _malformed("it ends inside an item")
            length: i64 = _SIZED.unpack_from(data, at)[1]
            at += _SIZED_BYTES
            if length > end - at:
                raise _malformed("it ends inside an item")
            items.append(_deletion(data[at : at + length]) if kind == DELETION else _mark(data[at : at + length]))
            at += length
        else:
            raise _malformed(f"an item is of kind {kind}")
    if at != end:
        raise _malformed(f"{end - at} bytes follow it")
    return items


def _check_body(data: bytes, at: i64, size: i64, records: int, publisher_bytes: int, properties_bytes: int) -> None:
    """Whether the parts of a block's body fill it exactly."""
    count: i64 = records
    before = 4 * (count + 1) + publisher_bytes + properties_bytes
    if count == 0 or before > size:
        raise _malformed("a run has no records, or more than fit")
    payload_bytes: i64
    if count == 1:
        payload_bytes = _number(data, at + 4)
        rises = _number(data, at) == 0
    else:
        offsets = list(struct.unpack_from(f"<{records + 1}I", data, at))
        payload_bytes = offsets[-1]
        rises = offsets[0] == 0 and offsets == sorted(offsets)
    filled = HEADER_BYTES + before + payload_bytes
    filled += -filled & 7
    if not rises or filled != HEADER_BYTES + size:
        raise _malformed("the offsets of a run's payloads do not fit its size")


def _number(data: bytes, at: i64) -> i64:
    low: i64 = data[at]
    second: i64 = data[at + 1]
    third: i64 = data[at + 2]
    high: i64 = data[at + 3]
    return low + (second << 8) + (third << 16) + (high << 24)


def _deletion(name: bytes) -> Deletion:
    if not name or len(name) > 65_535:
        raise _malformed("a topic that is emptied has no name")
    return Deletion(name)


def _mark(data: bytes) -> Mark:
    try:
        mark = decode_mark(data)
    except ValueError as error:
        raise _malformed(f"a mark makes no sense: {error}") from error
    if not mark.producer or mark.producer.startswith(RESERVED_PRODUCERS):
        raise _malformed(f"{mark.producer!r} cannot mark an entry")
    return mark


def _malformed(why: str) -> RemoteProtocolError:
    return RemoteProtocolError(_MALFORMED, f"this is not an entry of a replicated log: {why}")

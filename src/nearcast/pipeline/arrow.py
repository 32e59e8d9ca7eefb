"""Blocks of the log as Arrow columns, without a Python object per row.

Owns the way from the bytes that the bulk port sends (:mod:`nearcast.topiclog.blocks`) to record batches in the form that Spark
wants, and the proof that a range of indexes came whole: every record once, none left out. Refuses to know Spark and networks.

How it stays fast. Walking the lengths of the blocks is the only loop. All fields are then taken by NumPy from the bytes seen
as 32-bit and 64-bit words (blocks are aligned). Payloads are copied by Arrow: the bytes between two payloads are declared to
be elements as well, and taking every other element leaves the payloads. Properties are decoded once per distinct value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from nearcast.errors import RecordUnavailable, RemoteProtocolError
from nearcast.mqtt import reasons
from nearcast.mqtt.packets import Properties
from nearcast.mqtt.properties import decode_properties
from nearcast.mqtt.wire import PUBLISH, encode_varint
from nearcast.topiclog import blocks
from nearcast.topiclog.columns import block_starts

Words = npt.NDArray[Any]

TIMESTAMP = pa.timestamp("us", "UTC")
USER_PROPERTIES = pa.map_(pa.string(), pa.string())
COLUMNS: dict[str, pa.DataType] = {
    "topic": pa.string(),
    "index": pa.int64(),
    "time": TIMESTAMP,
    "publisher": pa.string(),
    "qos": pa.int8(),
    "retain": pa.bool_(),
    "content_type": pa.string(),
    "response_topic": pa.string(),
    "correlation_data": pa.binary(),
    "payload_format": pa.int8(),
    "payload": pa.binary(),
    "user_properties": USER_PROPERTIES,
}
"""All columns there are, in their order."""

MAX_ROWS = 65_536
"""Rows of one record batch: more would only make Spark's side hold more at once."""

MAX_TOPIC_NUMBER = 1 << 26
"""Numbers are the broker's; this bounds the table that they index."""

_PROPERTY_COLUMNS = ("content_type", "response_topic", "correlation_data", "payload_format", "user_properties")


class Extractor:
    """Turns the blocks of one stream into record batches of ``schema``, and checks that ``ranges`` come whole.

    The stream may go on over another connection, with another table of topic numbers; a table itself only grows.

    ``ranges`` has for each topic the first index wanted and the one after the last. Records outside are dropped: a block may
    hold more than was asked for, and a stream that was taken up again may repeat some. ``lost`` is called with a
    :class:`RecordUnavailable` for records that are missing, and decides: it raises, or the gap is skipped.
    """

    def __init__(
        self, schema: pa.Schema, ranges: Mapping[str, tuple[int, int]], lost: Callable[[RecordUnavailable], None]
    ) -> None:
        self._schema = schema
        self._lost = lost
        self._names = list(ranges)
        self._code_of_name = {name: code for code, name in enumerate(self._names)}
        bounds = np.array(list(ranges.values()), dtype=np.int64).reshape(-1, 2)
        self._next: Words = bounds[:, 0].copy()
        self._end: Words = bounds[:, 1].copy()
        self._topic_column = pa.array(self._names, pa.string())
        self._code_of_number: Words = np.full(64, -1, dtype=np.int64)
        self._table: Mapping[int, str] | None = None

    @property
    def remaining(self) -> dict[str, tuple[int, int]]:
        """What has not come yet, in the form of ``ranges``."""
        left = np.flatnonzero(self._next < self._end)
        return {self._names[code]: (int(self._next[code]), int(self._end[code])) for code in left}

    def extract(self, data: bytes, names: Mapping[int, str]) -> Iterable[pa.RecordBatch]:
        """The wanted records of some whole blocks; ``names`` has the topic of every number that occurs in them."""
        rows = _Rows(data)
        if rows.blocks == 0:
            return
        codes = self._codes(rows.numbers, names)
        row_codes = codes if rows.single else codes[rows.block_of_row]
        wanted = (row_codes >= 0) & (rows.index >= self._next[row_codes]) & (rows.index < self._end[row_codes])
        if not wanted.all():
            kept = np.flatnonzero(wanted)
            if len(kept) == 0:
                return
            rows.keep(kept)
            row_codes = row_codes[kept]
        self._advance(row_codes, rows.index)
        for start in range(0, rows.count, MAX_ROWS):
            part = rows if rows.count <= MAX_ROWS else rows.part(start, start + MAX_ROWS)
            yield pa.RecordBatch.from_arrays(
                self._arrays(part, row_codes[start : start + MAX_ROWS]),
                schema=self._schema,
            )

    def finish(self) -> None:
        """The stream is over: whatever has not come is lost."""
        for topic, (start, end) in self.remaining.items():
            self._lost(RecordUnavailable(topic, start, end, end))
        self._next = self._end.copy()

    def _codes(self, numbers: Words, names: Mapping[int, str]) -> Words:
        """For each block the place of its topic in ``ranges``; -1 for topics nobody asked for."""
        if names is not self._table:
            # Another table may be another connection's, where the same number is another topic.
            self._table = names
            self._code_of_number[:] = -1
        highest = int(numbers.max())
        if highest >= len(self._code_of_number):
            if highest not in names or highest > MAX_TOPIC_NUMBER:
                raise _unnamed(highest)
            grown = np.full(max(highest + 1, 2 * len(self._code_of_number)), -1, dtype=np.int64)
            grown[: len(self._code_of_number)] = self._code_of_number
            self._code_of_number = grown
        codes: Words = self._code_of_number[numbers]
        if (codes < 0).any():
            for number in np.unique(numbers[codes < 0]).tolist():
                if number not in names:
                    raise _unnamed(number)
                self._code_of_number[number] = self._code_of_name.get(names[number], -1)
            codes = self._code_of_number[numbers]
        return codes

    def _advance(self, codes: Words, index: Words) -> None:
        """Move on per topic, and notice gaps: from the record expected to the last that came must be as many as came."""
        if codes[0] == codes[-1] and (codes == codes[0]).all():
            present = codes[:1]
            counts = np.array([len(codes)])
        else:
            all_counts = np.bincount(codes, minlength=len(self._names))
            present = np.flatnonzero(all_counts)
            counts = all_counts[present]
        before = self._next[present]
        self._next[codes] = index + 1  # in order: the last of each topic stays
        gaps = np.flatnonzero(self._next[present] - before != counts)
        for place in gaps.tolist():
            code = int(present[place])
            came = index[codes == code]
            expected = int(before[place])
            jump = int(np.argmax(came != np.arange(expected, expected + len(came))))
            self._lost(RecordUnavailable(self._names[code], expected + jump, int(came[jump]), int(self._end[code])))

    def _arrays(self, rows: _Rows, codes: Words) -> list[pa.Array]:
        properties: dict[str, pa.Array] = {}
        if any(name in _PROPERTY_COLUMNS for name in self._schema.names):
            properties = _property_columns(rows, [name for name in self._schema.names if name in _PROPERTY_COLUMNS])
        arrays = []
        for name in self._schema.names:
            if name == "topic":
                array = self._topic_column.take(pa.array(codes))
            elif name == "index":
                array = pa.array(rows.index)
            elif name == "time":
                array = pa.Array.from_buffers(TIMESTAMP, rows.count, [None, pa.py_buffer(rows.per_row(rows.time))])
            elif name == "publisher":
                array = rows.publisher()
            elif name == "qos":
                array = pa.array((rows.per_row(rows.flags) & blocks.QOS_MASK).astype(np.int8))
            elif name == "retain":
                array = pa.array((rows.per_row(rows.flags) & blocks.RETAIN) != 0)
            elif name == "payload":
                array = rows.payload()
            else:
                array = properties[name]
            arrays.append(array)
        return arrays


class _Rows:
    """The records of some blocks as positions and numbers: what all columns are taken from."""

    def __init__(self, data: bytes) -> None:
        starts = np.array(block_starts(data), dtype=np.int64)
        self._buffer = pa.py_buffer(data)
        words = np.frombuffer(data, dtype="<u4")
        longs = np.frombuffer(data, dtype="<i8")
        if len(starts):
            starts = starts[words[starts // 4 + 2] & 0xFF == blocks.RECORDS]
        self.blocks = len(starts)
        if self.blocks == 0:
            return
        word = starts // 4
        kinds = words[word + 2]
        counts = words[word + 8].astype(np.int64)
        publisher_bytes = (kinds >> 16).astype(np.int64)
        properties_bytes = words[word + 9].astype(np.int64)
        self.flags: Words = (kinds >> 8).astype(np.uint8)
        self.numbers: Words = words[word + 3].astype(np.int64)
        self.time: Words = longs[starts // 8 + 3]
        first_index = longs[starts // 8 + 2]
        self._publisher_at: Words = starts + blocks.HEADER_BYTES + 4 + 4 * counts
        self._publisher_end: Words = self._publisher_at + publisher_bytes
        self._properties_end: Words = self._publisher_end + properties_bytes
        ends = starts + words[word]
        if not ((counts >= 1) & (self._properties_end <= ends)).all():
            raise _damaged()
        self.single = bool((counts == 1).all())
        if self.single:
            self.index: Words = first_index
            self.block_of_row: Words = np.arange(self.blocks)
            self._payload_at: Words = self._properties_end
            self._payload_end: Words = self._properties_end + words[word + 11]
            sound = words[word + 10] == 0
        else:
            rows_before = np.cumsum(counts) - counts
            total = int(counts.sum())
            self.block_of_row = np.repeat(np.arange(self.blocks), counts)
            place = np.arange(total) - np.repeat(rows_before, counts)
            offsets_at = (word + 10)[self.block_of_row] + place
            base = self._properties_end[self.block_of_row]
            self.index = first_index[self.block_of_row] + place
            self._payload_at = base + words[offsets_at]
            self._payload_end = base + words[offsets_at + 1]
            sound = words[word + 10] == 0
        self.count = len(self.index)
        if not (sound.all() and ((self._payload_at <= self._payload_end) & (self._payload_end <= self.per_row(ends))).all()):
            raise _damaged()

    def keep(self, kept: Words) -> None:
        """Only these rows, from now on."""
        self.index = self.index[kept]
        self.block_of_row = self.block_of_row[kept]
        self._payload_at = self._payload_at[kept]
        self._payload_end = self._payload_end[kept]
        self.count = len(kept)
        self.single = False

    def part(self, start: int, end: int) -> _Rows:
        """Some of the rows, as rows of their own."""
        part = object.__new__(_Rows)
        part.__dict__.update(self.__dict__)
        part.keep(np.arange(start, min(end, self.count)))
        return part

    def per_row(self, per_block: Words) -> Words:
        return per_block if self.single else np.ascontiguousarray(per_block[self.block_of_row])

    def payload(self) -> pa.Array:
        if (self._payload_end[:-1] == self._payload_at[1:]).all():
            # One after the other, as in a block of many records: the offsets are all it takes, and nothing is copied.
            offsets = np.empty(self.count + 1, dtype=np.int32)
            offsets[:-1] = self._payload_at
            offsets[-1] = self._payload_end[-1]
            return pa.Array.from_buffers(pa.binary(), self.count, [None, pa.py_buffer(offsets), self._buffer])
        return self._spans(self._payload_at, self._payload_end, pa.binary())

    def publisher(self) -> pa.Array:
        return self._of_block(self._spans(self._publisher_at, self._publisher_end, pa.string()))

    def properties(self) -> pa.Array:
        """The encoded properties of each row."""
        return self._of_block(self._spans(self._publisher_end, self._properties_end, pa.binary()))

    @property
    def has_properties(self) -> bool:
        return bool((self._publisher_end != self._properties_end).any())

    def _of_block(self, per_block: pa.Array) -> pa.Array:
        return per_block if self.single else per_block.take(pa.array(self.block_of_row))

    def _spans(self, at: Words, end: Words, kind: pa.DataType) -> pa.Array:
        """The bytes between two positions, for each pair of them."""
        count = len(at)
        offsets = np.empty(2 * count, dtype=np.int32)
        offsets[0::2] = at
        offsets[1::2] = end
        mixed = pa.Array.from_buffers(kind, 2 * count - 1, [None, pa.py_buffer(offsets), self._buffer])
        return mixed.take(pa.array(np.arange(0, 2 * count, 2)))


def _property_columns(rows: _Rows, names: Sequence[str]) -> dict[str, pa.Array]:
    if not rows.has_properties:
        return {name: _no_properties(name, rows.count) for name in names}
    encoded = rows.properties().dictionary_encode()
    decoded = [decode(value) for value in encoded.dictionary.to_pylist()]
    return {name: _property_values(name, decoded).take(encoded.indices) for name in names}


def _no_properties(name: str, count: int) -> pa.Array:
    if name != "user_properties":
        return pa.nulls(count, COLUMNS[name])
    nothing = pa.array([], pa.string())
    return pa.MapArray.from_arrays(np.zeros(count + 1, dtype=np.int32), nothing, nothing)


def _property_values(name: str, decoded: Sequence[Properties | None]) -> pa.Array:
    if name == "user_properties":
        # MQTT allows a key twice, a map does not: the last one counts.
        return pa.array(
            [list(dict(each.user_properties or ()).items()) if each is not None else [] for each in decoded], USER_PROPERTIES
        )
    attribute = "payload_format_indicator" if name == "payload_format" else name
    return pa.array([None if each is None else getattr(each, attribute) for each in decoded], COLUMNS[name])


def decode(encoded: bytes) -> Properties | None:
    """The properties of a message as the log keeps them: encoded, without their length."""
    return decode_properties(encode_varint(len(encoded)) + encoded, 0, PUBLISH)[0]


def _unnamed(number: int) -> RemoteProtocolError:
    return RemoteProtocolError(reasons.PROTOCOL_ERROR, f"the broker sent records of topic number {number} without its name")


def _damaged() -> RemoteProtocolError:
    return RemoteProtocolError(reasons.MALFORMED_PACKET, "the broker sent a block of records that cannot be read")

"""The packets of a load: equal-sized PUBLISH packets in NumPy views, and the few control packets around them.

Owns the layout of a benchmark message. All PUBLISH packets of one run have the same size (topics are padded to one length,
payloads have one size), so a batch is an array of records: sequence numbers, times and packet identifiers are columns,
written and read for hundreds of packets at once. Knows nothing of sockets or time.

Payload, little endian: magic (4 bytes), publisher (u32), sequence (u64), send time in ns (u64), then filler.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from nearcast.errors import ConfigError

MAGIC = b"NcB1"
PAYLOAD_HEAD = struct.Struct("<4sIQQ")
MIN_PAYLOAD_BYTES = PAYLOAD_HEAD.size
PACKET_IDS = 65_535
"""Packet identifiers cycle through 1..65,535: message n of a publisher carries 1 + n mod 65,535."""

Records = npt.NDArray[Any]
Sequences = npt.NDArray[np.uint64]
PacketIds = npt.NDArray[np.uint16]


def true_prefix(conditions: npt.NDArray[np.bool_]) -> int:
    """How many conditions from the first on hold. (Several times as fast as ``all`` and ``argmin`` on short arrays.)"""
    index = conditions.tobytes().find(0)
    return len(conditions) if index < 0 else index


def varint(value: int) -> bytes:
    """MQTT's variable byte integer."""
    encoded = bytearray()
    while True:
        value, digit = divmod(value, 128)
        encoded.append(digit | 0x80 if value else digit)
        if not value:
            return bytes(encoded)


def packet(first_byte: int, body: bytes) -> bytes:
    return bytes((first_byte,)) + varint(len(body)) + body


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack(">H", len(encoded)) + encoded


def connect_packet(client_id: str, version: int, *, persistent: bool = False, receive_maximum: int = 0) -> bytes:
    """CONNECT without keep-alive. A persistent session of MQTT 5 is asked to outlive its connection by ten minutes."""
    body = text("MQTT") + bytes((version, 0x00 if persistent else 0x02)) + b"\x00\x00"
    if version == 5:
        properties = b"\x11" + struct.pack(">I", 600) if persistent else b""
        if receive_maximum:
            properties += b"\x21" + struct.pack(">H", receive_maximum)
        body += varint(len(properties)) + properties
    return packet(0x10, body + text(client_id))


def subscribe_packet(packet_id: int, filters: list[str], qos: int, version: int) -> bytes:
    body = struct.pack(">H", packet_id) + (b"\x00" if version == 5 else b"")
    return packet(0x82, body + b"".join(text(topic_filter) + bytes((qos,)) for topic_filter in filters))


DISCONNECT = b"\xe0\x00"


def packet_end(buffer: bytearray, position: int, end: int) -> tuple[int, int]:
    """Where the body of the packet at ``position`` begins and ends; an end of 0 says that it is not complete yet."""
    length = 0
    for index in range(1, 5):
        at = position + index
        if at >= end:
            return 0, 0
        digit = buffer[at]
        length |= (digit & 0x7F) << (7 * (index - 1))
        if digit < 0x80:
            body = at + 1
            return (body, body + length) if body + length <= end else (0, 0)
    raise ValueError("a remaining length of more than four bytes")


def skip_properties(body: bytes, position: int) -> int:
    """Where the MQTT 5 properties that begin at ``position`` end."""
    length = shift = 0
    while position < len(body):
        digit = body[position]
        position += 1
        length |= (digit & 0x7F) << shift
        shift += 7
        if digit < 0x80:
            break
    return position + length


class PublishLayout:
    """Where things are in every PUBLISH of a run."""

    def __init__(self, topic_bytes: int, payload_bytes: int, qos: int, version: int) -> None:
        if payload_bytes < MIN_PAYLOAD_BYTES:
            raise ConfigError(f"a payload needs at least {MIN_PAYLOAD_BYTES} bytes for its sequence number and time")
        self.topic_bytes = topic_bytes
        self.payload_bytes = payload_bytes
        self.qos = qos
        self.version = version
        self.first_byte = 0x30 | qos << 1
        remaining_bytes = 2 + topic_bytes + (2 if qos else 0) + (1 if version == 5 else 0) + payload_bytes
        self._head = bytes((self.first_byte,)) + varint(remaining_bytes)
        self.packet_bytes = len(self._head) + remaining_bytes
        self.topic_offset = len(self._head) + 2
        self.id_offset = self.topic_offset + topic_bytes
        self.payload_offset = self.packet_bytes - payload_bytes

        # Everything up to and with the publisher's number must be as expected, but for the packet identifier. Comparing a
        # few (overlapping) machine words per packet costs nanoseconds; comparing byte strings costs ten times that.
        magic_end = self.payload_offset + len(MAGIC)
        publisher_end = magic_end + 4
        spans = [(0, self.id_offset), (self.id_offset + 2, publisher_end)] if qos else [(0, publisher_end)]
        names: list[str] = []
        formats: list[str] = []
        offsets: list[int] = []
        for start, end in spans:
            width = 8 if end - start >= 8 else 4
            starts = sorted({*range(start, end - width + 1, width), end - width})
            for offset in starts:
                names.append(f"word{len(names)}")
                formats.append(f"<u{width}")
                offsets.append(offset)
        self.words: tuple[str, ...] = tuple(names)
        names += ["publisher", "sequence", "time"]
        formats += ["<u4", "<u8", "<u8"]
        offsets += [magic_end, publisher_end, publisher_end + 8]
        if qos:
            names.append("id")
            formats.append(">u2")
            offsets.append(self.id_offset)
        self.dtype: np.dtype[Any] = np.dtype(
            {"names": names, "formats": formats, "offsets": offsets, "itemsize": self.packet_bytes}
        )

    def publish(self, topic: bytes, publisher: int, sequence: int = 0, time_ns: int = 0) -> bytes:
        """One packet, built the plain way; the batches start from it and the tests compare with it."""
        middle = struct.pack(">H", sequence % PACKET_IDS + 1) if self.qos else b""
        if self.version == 5:
            middle += b"\x00"
        payload = PAYLOAD_HEAD.pack(MAGIC, publisher, sequence, time_ns).ljust(self.payload_bytes, b".")
        return self._head + struct.pack(">H", len(topic)) + topic + middle + payload

    def view(self, buffer: bytearray, offset: int, count: int) -> Records:
        return np.frombuffer(buffer, self.dtype, count, offset)


class PublishBatch:
    """One publisher's packets, rebuilt in place for every write.

    The publisher goes through its topics in turn: message n has topic n mod T. With ``rolling``, message n is built at place
    n mod ``max_packets``, so that the last packets stay to be compared with; batches must then not run over the end.
    """

    def __init__(
        self, layout: PublishLayout, publisher: int, topics: list[bytes], max_packets: int, *, rolling: bool = False
    ) -> None:
        self._layout = layout
        self._rolling = rolling
        self._buffer = bytearray(b"".join(layout.publish(topics[0], publisher) for _ in range(max_packets)))
        self._bytes = memoryview(self._buffer)
        self._rows = np.frombuffer(self._buffer, np.uint8).reshape(max_packets, layout.packet_bytes)
        self._records = layout.view(self._buffer, 0, max_packets)
        self._steps: Sequences = np.arange(max_packets, dtype=np.uint64)
        self._topics: npt.NDArray[np.uint8] | None = None
        if len(topics) > 1:
            self._topics = np.frombuffer(b"".join(topics), np.uint8).reshape(len(topics), layout.topic_bytes)
            self._topic_columns = self._rows[:, layout.topic_offset : layout.topic_offset + layout.topic_bytes]
        self.max_packets = max_packets

    def build(self, first_sequence: int, count: int, time_ns: int) -> memoryview:
        """The packets ``first_sequence`` .. + ``count``; valid until the next call."""
        place = first_sequence % self.max_packets if self._rolling else 0
        if place + count > self.max_packets:
            raise ValueError("a batch that runs over the end of its buffer")
        records = self._records[place : place + count]
        sequences = self._steps[:count] + np.uint64(first_sequence)
        records["sequence"] = sequences
        records["time"] = time_ns
        if self._layout.qos:
            records["id"] = sequences % np.uint64(PACKET_IDS) + np.uint64(1)
        if self._topics is not None:
            self._topic_columns[place : place + count] = self._topics[sequences % np.uint64(len(self._topics))]
        size = self._layout.packet_bytes
        return self._bytes[place * size : (place + count) * size]

    def holds(self, first_sequence: int, buffer: bytearray, position: int, count: int) -> int:
        """How many of ``count`` packets in ``buffer`` are, byte for byte, the ones built from ``first_sequence`` on.

        All that lie before the end of the rolling buffer, or none. Packet identifiers are the broker's to choose.
        """
        place = first_sequence % self.max_packets
        count = min(count, self.max_packets - place)
        # Older or newer packets may stand there; equal bytes of those would be equal to the wrong thing.
        sequences = self._records["sequence"]
        if int(sequences[place]) != first_sequence or int(sequences[place + count - 1]) != first_sequence + count - 1:
            return 0
        layout = self._layout
        size = layout.packet_bytes
        received = np.frombuffer(buffer, np.uint8, count * size, position).reshape(count, size)
        same = self._rows[place : place + count] == received
        if layout.qos:
            same[:, layout.id_offset : layout.id_offset + 2] = True
        return count if same.all() else 0

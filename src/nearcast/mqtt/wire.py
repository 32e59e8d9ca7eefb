"""The data types every MQTT packet is made of (MQTT 5.0 section 1.5), and the cutting of a byte stream into frames (2.1).

Owns: integers, strings, binary data, variable byte integers, packet type numbers, :class:`FrameReader`. Refuses to know what
any packet means: that is :mod:`nearcast.mqtt.codec`. Readers take ``(data, pos, end)`` and give ``(value, next position)``;
nothing at or beyond ``end`` is touched. Whatever the peer got wrong is a ``RemoteProtocolError``, whatever we got wrong on
the way out is a ``LocalProtocolError``; no other exception leaves this module.
"""

from __future__ import annotations

from typing import Final

from mypy_extensions import i64

from nearcast.errors import LocalProtocolError, RemoteProtocolError
from nearcast.mqtt import reasons

CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15

#: Packet names by type number, for messages to people. Number 0 is reserved on the wire; the properties of a will use it.
PACKET_NAMES: Final[tuple[str, ...]] = (
    "will",
    "CONNECT",
    "CONNACK",
    "PUBLISH",
    "PUBACK",
    "PUBREC",
    "PUBREL",
    "PUBCOMP",
    "SUBSCRIBE",
    "SUBACK",
    "UNSUBSCRIBE",
    "UNSUBACK",
    "PINGREQ",
    "PINGRESP",
    "DISCONNECT",
    "AUTH",
)

MAX_VARINT: Final = 268_435_455
#: The protocol's own ceiling for a packet: the largest remaining length, and five bytes of fixed header.
MAX_PACKET_BYTES: Final = 268_435_460
MAX_STRING_BYTES: Final = 65_535


def malformed(message: str) -> RemoteProtocolError:
    """A packet that cannot be parsed (reason code 0x81)."""
    return RemoteProtocolError(reasons.MALFORMED_PACKET, message)


def violation(message: str) -> RemoteProtocolError:
    """A packet that can be parsed and says what the protocol forbids (reason code 0x82)."""
    return RemoteProtocolError(reasons.PROTOCOL_ERROR, message)


def read_u16(data: bytes, pos: int, end: int, what: str) -> tuple[int, int]:
    """A two byte integer (1.5.2)."""
    if pos + 2 > end:
        raise malformed(f"{what}: the packet ends inside it")
    return data[pos] << 8 | data[pos + 1], pos + 2


def read_u32(data: bytes, pos: int, end: int, what: str) -> tuple[int, int]:
    """A four byte integer (1.5.3)."""
    if pos + 4 > end:
        raise malformed(f"{what}: the packet ends inside it")
    return data[pos] << 24 | data[pos + 1] << 16 | data[pos + 2] << 8 | data[pos + 3], pos + 4


def read_binary(data: bytes, pos: int, end: int, what: str) -> tuple[bytes, int]:
    """Binary data behind a two byte length (1.5.6)."""
    if pos + 2 > end:
        raise malformed(f"{what}: the packet ends inside its length")
    start = pos + 2
    stop = start + (data[pos] << 8 | data[pos + 1])
    if stop > end:
        raise malformed(f"{what}: says {stop - start} bytes, and {end - start} are left")
    return data[start:stop], stop


def read_string(data: bytes, pos: int, end: int, what: str) -> tuple[str, int]:
    """A UTF-8 encoded string (1.5.4). Python's strict decoder refuses surrogates and overlong forms [MQTT-1.5.4-1]."""
    raw, stop = read_binary(data, pos, end, what)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise malformed(f"{what}: not well-formed UTF-8") from None
    if "\0" in text:
        raise malformed(f"{what}: contains U+0000")  # [MQTT-1.5.4-2]
    return text, stop


def read_varint(data: bytes, pos: int, end: int, what: str) -> tuple[int, int]:
    """A variable byte integer (1.5.5): at most four bytes, and no more of them than needed [MQTT-1.5.5-1]."""
    value = 0
    shift = 0
    while pos < end:
        byte = data[pos]
        pos += 1
        if byte < 128:
            if byte == 0 and shift > 0:
                raise malformed(f"{what}: variable byte integer is longer than needed")
            return value | byte << shift, pos
        if shift == 21:
            raise malformed(f"{what}: variable byte integer is longer than four bytes")
        value |= (byte & 127) << shift
        shift += 7
    raise malformed(f"{what}: the packet ends inside it")


def encode_varint(n: int) -> bytes:
    """A variable byte integer, 0 to 268,435,455."""
    if n < 0 or n > MAX_VARINT:
        raise LocalProtocolError(f"{n} does not fit a variable byte integer (0 to {MAX_VARINT})")
    if n < 128:
        return bytes((n,))
    if n < 16_384:
        return bytes((n & 127 | 128, n >> 7))
    if n < 2_097_152:
        return bytes((n & 127 | 128, n >> 7 & 127 | 128, n >> 14))
    return bytes((n & 127 | 128, n >> 7 & 127 | 128, n >> 14 & 127 | 128, n >> 21))


def encode_byte(value: int, what: str) -> bytes:
    if value < 0 or value > 255:
        raise LocalProtocolError(f"{what}: {value} does not fit one byte")
    return bytes((value,))


def encode_u16(value: int, what: str) -> bytes:
    if value < 0 or value > 65_535:
        raise LocalProtocolError(f"{what}: {value} does not fit two bytes")
    return bytes((value >> 8, value & 255))


def encode_u32(value: int, what: str) -> bytes:
    if value < 0 or value > 4_294_967_295:
        raise LocalProtocolError(f"{what}: {value} does not fit four bytes")
    return bytes((value >> 24, value >> 16 & 255, value >> 8 & 255, value & 255))


def encode_binary(value: bytes, what: str) -> bytes:
    if len(value) > MAX_STRING_BYTES:
        raise LocalProtocolError(f"{what}: {len(value)} bytes are more than the {MAX_STRING_BYTES} that MQTT can carry")
    return encode_u16(len(value), what) + value


def encode_string(value: str, what: str) -> bytes:
    if "\0" in value:
        raise LocalProtocolError(f"{what}: contains U+0000, which MQTT strings cannot")
    try:
        raw = value.encode("utf-8")
    except UnicodeEncodeError:
        raise LocalProtocolError(f"{what}: contains a lone surrogate, which MQTT strings cannot") from None
    return encode_binary(raw, what)


def split_packets(chunk: bytes) -> list[bytes]:
    """Complete, valid packets that stand back to back, one by one."""
    found: list[bytes] = []
    position: i64 = 0
    end: i64 = len(chunk)
    while position < end:
        size: i64 = 0
        shift: i64 = 0
        cursor: i64 = position + 1
        while True:
            byte: i64 = chunk[cursor]
            cursor += 1
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        found.append(chunk[position : cursor + size])
        position = cursor + size
    return found


class FrameReader:
    """Cuts a byte stream into frames: ``(first byte, body)``.

    However the stream is cut into chunks, the frames are the same. Whatever precedes a fault is still delivered: the call
    that meets the fault after complete frames returns those, and the next call (with any data, or none) raises. ``failure``
    says so at once to whoever does not want to wait for that call. A reader that failed stays failed: behind a bad length
    nothing can be found again.

    A body is copied once out of each chunk and once when it is complete, so a packet in n chunks costs O(bytes), not
    O(bytes × n). At most ``max_packet_bytes`` (fixed header included, as Maximum Packet Size counts, 3.1.2.11.4) are kept;
    a longer packet is refused when its header is read, before its body arrives.
    """

    def __init__(self, max_packet_bytes: int = MAX_PACKET_BYTES) -> None:
        self.max_packet_bytes = max_packet_bytes
        self.failure: RemoteProtocolError | None = None
        self._kept = bytearray()
        #: Bytes that must be here before the frame at the start of ``_kept`` can be looked at again.
        self._needed_bytes = 0

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now."""
        if self.failure is not None:
            raise self.failure
        if self._kept:
            self._kept += data
            if len(self._kept) < self._needed_bytes:
                return []
            data = bytes(self._kept)
            self._kept = bytearray()
        frames: list[tuple[int, bytes]] = []
        pos = 0
        end = len(data)
        while pos < end:
            length = 0
            shift = 0
            start = pos + 1
            complete = False
            while start < end:
                byte = data[start]
                start += 1
                if byte < 128:
                    if byte == 0 and shift > 0:
                        return self._fail(frames, malformed("remaining length is longer than needed"))
                    length |= byte << shift
                    complete = True
                    break
                if shift == 21:
                    return self._fail(frames, malformed("remaining length is longer than four bytes"))
                length |= (byte & 127) << shift
                shift += 7
            if not complete:
                self._keep(data, pos, end - pos + 1)
                return frames
            stop = start + length
            if stop - pos > self.max_packet_bytes:
                message = f"a packet of {stop - pos} bytes is more than the {self.max_packet_bytes} accepted"
                return self._fail(frames, RemoteProtocolError(reasons.PACKET_TOO_LARGE, message))
            if stop > end:
                self._keep(data, pos, stop - pos)
                return frames
            frames.append((data[pos], data[start:stop]))
            pos = stop
        return frames

    def _keep(self, data: bytes, pos: int, needed_bytes: int) -> None:
        self._kept = bytearray(data[pos:])
        self._needed_bytes = needed_bytes

    def _fail(self, frames: list[tuple[int, bytes]], failure: RemoteProtocolError) -> list[tuple[int, bytes]]:
        self.failure = failure
        if not frames:
            raise failure
        return frames

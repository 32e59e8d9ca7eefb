"""The identity of a workload's message: the first 32 bytes of its payload, or 20 of a shorter one.

Both runtimes write it when a client publishes and read it when one receives, so that a delivery is known by who sent what
when, whatever broker carried it. Big-endian:

====== ===== ==========================================================================
offset bytes what
====== ===== ==========================================================================
0      4     ``NCID``
4      8     publisher: a hash of the client's name and the position of its stream
12     8     sequence of the message in its stream, from 0
20     8     when it was sent, in nanoseconds (since 1970 for real clients, since the
             start in the simulator)
28     4     CRC-32 of the 28 bytes before
====== ===== ==========================================================================

What follows is filling, and not looked at. A payload of anybody else is recognised by the mark and the checksum.

Of 20 to 31 bytes (the telemetry of the broadcast-group paper has 20), a shorter form begins the payload:

====== ===== ==========================================================================
offset bytes what
====== ===== ==========================================================================
0      2     ``nc``
2      4     publisher: the first half of that hash
6      4     sequence
10     8     when it was sent
18     2     last two bytes of the CRC-32 of the 18 bytes before
====== ===== ==========================================================================
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from typing import Final, NamedTuple

IDENTITY_BYTES: Final = 32
SHORT_IDENTITY_BYTES: Final = 20

_MARK: Final = b"NCID"
_LAYOUT: Final = struct.Struct(">4sQQQ")
_CHECKSUM: Final = struct.Struct(">I")
_SHORT_MARK: Final = b"nc"
_SHORT_LAYOUT: Final = struct.Struct(">2sIIQ")
_SHORT_CHECKSUM: Final = struct.Struct(">H")
_FILLING: Final = bytes(range(256)) * 4


class Identity(NamedTuple):
    """Which message this is."""

    publisher: int
    """See :func:`publisher_number`."""

    sequence: int
    sent_ns: int


def publisher_number(client: str, stream: int = 0, payload_bytes: int = IDENTITY_BYTES) -> int:
    """The number of a client's stream of messages (the position in ``Clients.publish``). The same in every process, and for up
    to a million clients different with a probability above 1 - 3e-8; for up to a thousand whose payloads have only room for
    the short form, above 1 - 2e-4."""
    digest = hashlib.blake2b(f"{stream}/{client}".encode(), digest_size=8).digest()
    return int.from_bytes(digest if payload_bytes >= IDENTITY_BYTES else digest[:4], "big")


def encode_identity(identity: Identity, payload_bytes: int = IDENTITY_BYTES) -> bytes:
    """A payload of ``payload_bytes`` (at least 20) that begins with the identity."""
    if payload_bytes < SHORT_IDENTITY_BYTES:
        raise ValueError(f"a payload with an identity has at least {SHORT_IDENTITY_BYTES} bytes, not {payload_bytes}")
    if payload_bytes < IDENTITY_BYTES:
        head = _SHORT_LAYOUT.pack(_SHORT_MARK, identity.publisher, identity.sequence, identity.sent_ns)
        head += _SHORT_CHECKSUM.pack(zlib.crc32(head) & 0xFFFF)
    else:
        head = _LAYOUT.pack(_MARK, identity.publisher, identity.sequence, identity.sent_ns)
        head += _CHECKSUM.pack(zlib.crc32(head))
    rest = payload_bytes - len(head)
    filling = (
        _FILLING[:rest] if rest <= len(_FILLING) else _FILLING * (rest // len(_FILLING)) + _FILLING[: rest % len(_FILLING)]
    )
    return head + filling


def decode_identity(payload: bytes | bytearray | memoryview) -> Identity | None:
    """The identity at the beginning of a payload; None if it has none."""
    if len(payload) >= IDENTITY_BYTES:
        head = bytes(payload[:IDENTITY_BYTES])
        mark, publisher, sequence, sent_ns = _LAYOUT.unpack_from(head)
        if mark != _MARK or _CHECKSUM.unpack_from(head, _LAYOUT.size)[0] != zlib.crc32(head[: _LAYOUT.size]):
            return None
    elif len(payload) >= SHORT_IDENTITY_BYTES:
        head = bytes(payload[:SHORT_IDENTITY_BYTES])
        mark, publisher, sequence, sent_ns = _SHORT_LAYOUT.unpack_from(head)
        checksum = zlib.crc32(head[: _SHORT_LAYOUT.size]) & 0xFFFF
        if mark != _SHORT_MARK or _SHORT_CHECKSUM.unpack_from(head, _SHORT_LAYOUT.size)[0] != checksum:
            return None
    else:
        return None
    return Identity(publisher, sequence, sent_ns)

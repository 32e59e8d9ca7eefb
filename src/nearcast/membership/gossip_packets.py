"""Packets of :mod:`nearcast.membership.gossip`: a probe and its answer, which say the same of whoever sends them.

========== ============================================================================================================
field      bytes
========== ============================================================================================================
kind       1: PROBE or ANSWER
id         8: random in a probe, the probe's in an answer, so that an answer cannot be forged without seeing the probe
life       8: rises with every start of the sender, so that what it said in a life before counts no more
number     4: rises with every packet of that life
dwell      4: microseconds that the probe waited in the node that answers; 0 in a probe
coordinate 1 + 4 × (dimensions + 3): number of dimensions, vector, height, adjustment, error
name       1 + n: the sender's
address    1 + n: where the sender is reached; one without a host (``:1234``) is where the packet comes from
members    1 + Σ (1 + n, 1 + n, 8): name, address and life of nodes that the sender has heard itself
tag        16: truncated HMAC-SHA-256 over everything before, with the monitoring key of the fabric
========== ============================================================================================================

All numbers are big-endian. Anybody can send anything: what is not a whole packet with the right tag is nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import msgspec

from nearcast.coordinates.coordinate import Coordinate
from nearcast.membership.packets import TAG_BYTES

PROBE: Final = 7
ANSWER: Final = 8

MAX_PACKET_BYTES: Final = 1200
"""Below every path's MTU, so that no packet is fragmented."""

MAX_TEXT_BYTES: Final = 255
MAX_DIMENSIONS: Final = 16

_HEAD: Final = struct.Struct(">BQQII")
_LIFE: Final = struct.Struct(">Q")


class Heard(msgspec.Struct, frozen=True, array_like=True):
    """A node that somebody has heard."""

    name: str
    address: str
    life: int


class Packet(msgspec.Struct, frozen=True, kw_only=True):
    """Content of both kinds."""

    kind: int
    identifier: int
    life: int
    number: int
    dwell_us: int = 0
    coordinate: Coordinate
    name: str
    address: str
    members: tuple[Heard, ...] = ()


def is_gossip(data: bytes) -> bool:
    """Whether a datagram claims to be one of these."""
    return bool(data) and data[0] in (PROBE, ANSWER)


def fits(text: str) -> bool:
    """Whether a name or address can be in a packet."""
    return len(text.encode("utf-8", "surrogatepass")) <= MAX_TEXT_BYTES


def pack(packet: Packet, key: bytes) -> bytes:
    """The bytes of a packet. Members that find no room are left out."""
    where = packet.coordinate
    numbers = (*where.vector, where.height, where.adjustment, where.error)
    parts = [
        _HEAD.pack(packet.kind, packet.identifier, packet.life, packet.number, packet.dwell_us),
        struct.pack(f">B{len(numbers)}f", len(where.vector), *numbers),
        _text(packet.name),
        _text(packet.address),
    ]
    room = MAX_PACKET_BYTES - TAG_BYTES - 1 - sum(len(part) for part in parts)
    entries: list[bytes] = []
    for member in packet.members:
        entry = _text(member.name) + _text(member.address) + _LIFE.pack(member.life)
        room -= len(entry)
        if room < 0 or len(entries) == 255:
            break
        entries.append(entry)
    body = b"".join([*parts, bytes([len(entries)]), *entries])
    return body + hmac.digest(key, body, hashlib.sha256)[:TAG_BYTES]


def unpack(data: bytes, key: bytes) -> Packet | None:
    """What a datagram says; ``None`` for what is no packet of the fabric. Coordinates are numbers, but may be absurd."""
    body = data[:-TAG_BYTES]
    if len(data) > MAX_PACKET_BYTES or len(body) <= _HEAD.size:
        return None
    if not hmac.compare_digest(hmac.digest(key, body, hashlib.sha256)[:TAG_BYTES], data[-TAG_BYTES:]):
        return None
    try:
        kind, identifier, life, number, dwell_us = _HEAD.unpack_from(body)
        at = _HEAD.size
        dimensions = body[at]
        if kind not in (PROBE, ANSWER) or not 0 < dimensions <= MAX_DIMENSIONS:
            return None
        numbers = struct.unpack_from(f">{dimensions + 3}f", body, at + 1)
        at += 1 + 4 * (dimensions + 3)
        name, at = _read_text(body, at)
        address, at = _read_text(body, at)
        members = []
        count = body[at]
        at += 1
        for _ in range(count):
            member, at = _read_text(body, at)
            place, at = _read_text(body, at)
            members.append(Heard(member, place, _LIFE.unpack_from(body, at)[0]))
            at += _LIFE.size
    except (struct.error, IndexError, UnicodeDecodeError):
        return None
    if at != len(body) or not name:
        return None
    where = Coordinate(list(numbers[:dimensions]), *numbers[dimensions:])
    return Packet(
        kind=kind,
        identifier=identifier,
        life=life,
        number=number,
        dwell_us=dwell_us,
        coordinate=where,
        name=name,
        address=address,
        members=tuple(members),
    )


def _text(text: str) -> bytes:
    encoded = text.encode("utf-8")
    return bytes([len(encoded)]) + encoded


def _read_text(body: bytes, at: int) -> tuple[str, int]:
    end = at + 1 + body[at]
    if end > len(body):
        raise IndexError
    return body[at + 1 : end].decode("utf-8"), end

"""EMMA's monitoring packets (section V-A, Table I), in the paper's sizes and with what its future work asks for.

========= ===== ============================================================================================
packet    bytes layout behind the type byte
========= ===== ============================================================================================
QOSREQ       13 id 4 · target 8: measure the path to this node and answer
QOSRESP       9 id 4 · quality 4: round-trip time, jitter and loss of what was asked for
PINGREQ       5 id 4
PINGRESP      5 id 4, the same
RECONNREQ    47 id 4 · gateway 8 · broker 8 · epoch 8 · result 2 · tag 16: use another broker
RECONNACK    47 the same with the result, tagged again
========= ===== ============================================================================================

All numbers are big-endian. Nodes are named by 8 bytes of a hash of their name, where EMMA has an IPv4 address and a port:
that fits IPv6, and a forged packet can only make a node probe nodes it knows. Ids are 32 random bits, so an answer cannot be
forged without seeing the question. What moves clients is authenticated: ``tag`` is a truncated HMAC with the fabric's
secret over everything before it, the controller's ``epoch`` included, so that nothing recorded from an earlier controller
counts; ids rise within an epoch, so that nothing counts twice.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from typing import Final

import msgspec

QOSREQ: Final = 1
QOSRESP: Final = 2
PINGREQ: Final = 3
PINGRESP: Final = 4
RECONNREQ: Final = 5
RECONNACK: Final = 6

SIZES: Final = {QOSREQ: 13, QOSRESP: 9, PINGREQ: 5, PINGRESP: 5, RECONNREQ: 47, RECONNACK: 47}

TAG_BYTES: Final = 16

# Results in a RECONNACK.
ACCEPTED: Final = 0
REFUSED: Final = 1

_ID: Final = struct.Struct(">BI")
_QOSREQ: Final = struct.Struct(">BI8s")
_QOSRESP: Final = struct.Struct(">BII")
_RECONN: Final = struct.Struct(">BI8s8sQH")

UNIT_MS: Final = 0.01
"""Resolution of times in QOSRESP: 10 µs below 20 ms (latency) and 1.3 ms (jitter), a thousandth and a hundredth above."""

LATENCY_BITS: Final = 11
JITTER_BITS: Final = 7
EXPONENT_BITS: Final = 4
LOSS_BITS: Final = 6
ALL_LOST: Final = (1 << LOSS_BITS) - 1


class Quality(msgspec.Struct, frozen=True):
    """A measured path: round-trip time and its mean deviation, and the share of probes lost. With ``loss`` 1 there is no
    time."""

    latency_ms: float
    jitter_ms: float = 0.0
    loss: float = 0.0


class Reconnect(msgspec.Struct, frozen=True):
    """Content of RECONNREQ and RECONNACK."""

    number: int
    gateway: bytes
    broker: bytes
    epoch: int
    result: int = ACCEPTED


def name_hash(name: str) -> bytes:
    """Eight bytes that stand for a node's name."""
    return hashlib.blake2b(name.encode("utf-8"), digest_size=8, person=b"nearcast name").digest()


def monitoring_key(secret: bytes) -> bytes:
    """The key of the tags, derived from the fabric's secret, which is used for nothing but deriving and proving."""
    return hmac.digest(secret, b"nearcast monitoring", hashlib.sha256)


def kind_of(data: bytes) -> int:
    """The packet's type, or 0 for what is none: wrong type, wrong size."""
    return data[0] if data and SIZES.get(data[0]) == len(data) else 0


def id_of(data: bytes) -> int:
    """The id of any packet that :func:`kind_of` knows."""
    return int.from_bytes(data[1:5], "big")


def pingreq(identifier: int) -> bytes:
    return _ID.pack(PINGREQ, identifier)


def pingresp(identifier: int) -> bytes:
    return _ID.pack(PINGRESP, identifier)


def qosreq(identifier: int, target: bytes) -> bytes:
    return _QOSREQ.pack(QOSREQ, identifier, target)


def qosreq_target(data: bytes) -> bytes:
    return data[5:13]


def qosresp(identifier: int, quality: Quality) -> bytes:
    return _QOSRESP.pack(QOSRESP, identifier, pack_quality(quality))


def qosresp_quality(data: bytes) -> Quality:
    return unpack_quality(int.from_bytes(data[5:9], "big"))


def reconnect(kind: int, content: Reconnect, key: bytes) -> bytes:
    """A RECONNREQ or RECONNACK with its tag."""
    body = _RECONN.pack(kind, content.number, content.gateway, content.broker, content.epoch, content.result)
    return body + hmac.digest(key, body, hashlib.sha256)[:TAG_BYTES]


def read_reconnect(data: bytes, key: bytes) -> Reconnect | None:
    """What it says, or ``None`` when its tag is not right."""
    body = data[:-TAG_BYTES]
    if not hmac.compare_digest(hmac.digest(key, body, hashlib.sha256)[:TAG_BYTES], data[-TAG_BYTES:]):
        return None
    _, number, gateway, broker, epoch, result = _RECONN.unpack(body)
    return Reconnect(number, gateway, broker, epoch, result)


# --- three figures in four bytes ------------------------------------------------------------------------------------------


def _pack_time(time_ms: float, bits: int) -> int:
    """A small float: mantissa and exponent of two, rounded to nearest; what is too large is the largest."""
    units = max(0.0, time_ms) / UNIT_MS
    largest = (1 << bits) - 1
    exponent = 0
    while round(units) > largest:
        units /= 2
        exponent += 1
    if exponent >= 1 << EXPONENT_BITS:
        return (((1 << EXPONENT_BITS) - 1) << bits) | largest
    return (exponent << bits) | round(units)


def _unpack_time(packed: int, bits: int) -> float:
    return ((packed & ((1 << bits) - 1)) << (packed >> bits)) * UNIT_MS


def pack_quality(quality: Quality) -> int:
    """Latency 15 bits, jitter 11, loss 6. Some loss never looks like none, nor like all."""
    loss = min(max(quality.loss, 0.0), 1.0)
    packed_loss = round(loss * ALL_LOST)
    if 0.0 < loss < 1.0:
        packed_loss = min(max(packed_loss, 1), ALL_LOST - 1)
    latency = _pack_time(quality.latency_ms, LATENCY_BITS)
    jitter = _pack_time(quality.jitter_ms, JITTER_BITS)
    return (latency << (EXPONENT_BITS + JITTER_BITS + LOSS_BITS)) | (jitter << LOSS_BITS) | packed_loss


def unpack_quality(packed: int) -> Quality:
    """The reverse of :func:`pack_quality`."""
    loss = packed & ALL_LOST
    jitter = (packed >> LOSS_BITS) & ((1 << (EXPONENT_BITS + JITTER_BITS)) - 1)
    latency = packed >> (EXPONENT_BITS + JITTER_BITS + LOSS_BITS)
    return Quality(_unpack_time(latency, LATENCY_BITS), _unpack_time(jitter, JITTER_BITS), loss / ALL_LOST)

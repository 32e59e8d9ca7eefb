"""The circle of identifiers: 160 bits of SHA-1, for keys and for replica sets alike (Canal §III-A, Chord §4.1).

A key belongs to the first set at or behind it, clockwise. Ranges are open at their lower end and closed at their upper one,
as ``(predecessor, set]`` is; a range from a place to itself is the whole circle.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Final

BITS: Final = 160
CIRCLE: Final = 1 << BITS
KEY_BYTES: Final = BITS // 8


@lru_cache(maxsize=1 << 16)
def identifier(name: str) -> int:
    """Where a name is on the circle: a set's, or a topic's."""
    return int.from_bytes(hashlib.sha1(name.encode("utf-8", "surrogatepass"), usedforsecurity=False).digest(), "big")


def distance(source: int, target: int) -> int:
    """How far it is clockwise from one place to another; the whole circle from a place to itself."""
    return (target - source) % CIRCLE or CIRCLE


def within(key: int, low: int, high: int) -> bool:
    """Whether a key is in ``(low, high]``."""
    return distance(low, key) <= distance(low, high)


def between(key: int, low: int, high: int) -> bool:
    """Whether a key is in ``(low, high)``."""
    return distance(low, key) < distance(low, high)


def packed(key: int) -> bytes:
    return key.to_bytes(KEY_BYTES, "big")


def unpacked(data: bytes) -> int:
    return int.from_bytes(data, "big")

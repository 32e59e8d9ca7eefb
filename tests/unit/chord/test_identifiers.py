"""Places on the circle, checked against counting around a small one."""

from __future__ import annotations

import hashlib

from nearcast.chord.identifiers import CIRCLE, between, distance, identifier, packed, unpacked, within


def test_identifiers_are_sha_1() -> None:
    assert identifier("a/b") == int(hashlib.sha1(b"a/b", usedforsecurity=False).hexdigest(), 16)
    assert unpacked(packed(identifier("a/b"))) == identifier("a/b")
    assert len(packed(0)) == 20


def test_within_and_between_around_the_end_of_the_circle() -> None:
    low, high = CIRCLE - 2, 3
    inside = [CIRCLE - 1, 0, 1, 2]
    assert all(between(key, low, high) and within(key, low, high) for key in inside)
    assert within(high, low, high)
    assert not between(high, low, high)
    assert not within(low, low, high)
    assert not within(4, low, high)


def test_from_a_place_to_itself_is_the_whole_circle() -> None:
    assert distance(5, 5) == CIRCLE
    assert all(within(key, 5, 5) for key in (4, 5, 6))
    assert between(6, 5, 5)
    assert not between(5, 5, 5)

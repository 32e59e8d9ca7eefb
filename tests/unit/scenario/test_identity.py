"""The identity of a message: there and back, and recognised among garbage."""

from __future__ import annotations

import pytest

from nearcast.scenario.identity import (
    IDENTITY_BYTES,
    SHORT_IDENTITY_BYTES,
    Identity,
    decode_identity,
    encode_identity,
    publisher_number,
)

ONE = Identity(publisher_number("car-1"), 7, 1_700_000_000_123_456_789)
SHORT = Identity(publisher_number("car-1", 0, 20), 7, 1_700_000_000_123_456_789)


def test_the_layout_is_what_is_documented() -> None:
    payload = encode_identity(Identity(1, 2, 3))
    assert payload[:28] == b"NCID" + bytes([0] * 7 + [1] + [0] * 7 + [2] + [0] * 7 + [3])
    assert len(payload) == IDENTITY_BYTES == 32


def test_the_short_layout_is_what_is_documented() -> None:
    payload = encode_identity(Identity(1, 2, 3), 20)
    assert payload[:18] == b"nc" + bytes([0] * 3 + [1] + [0] * 3 + [2] + [0] * 7 + [3])
    assert len(payload) == SHORT_IDENTITY_BYTES == 20


@pytest.mark.parametrize("size", [32, 33, 1055, 1056, 1057, 5000])
def test_a_payload_has_the_size_asked_for(size: int) -> None:
    payload = encode_identity(ONE, size)
    assert len(payload) == size
    assert decode_identity(payload) == decode_identity(memoryview(payload)) == decode_identity(bytearray(payload)) == ONE


@pytest.mark.parametrize("size", [20, 21, 31])
def test_a_small_payload_has_the_short_form(size: int) -> None:
    payload = encode_identity(SHORT, size)
    assert len(payload) == size
    assert decode_identity(payload) == decode_identity(memoryview(payload)) == decode_identity(bytearray(payload)) == SHORT


def test_too_small_a_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 20 bytes, not 19"):
        encode_identity(ONE, 19)


@pytest.mark.parametrize("payload", [b"", b"hello", b"NCID", b"\0" * 32, b"NCID" + b"\0" * 28, encode_identity(ONE)[:31]])
def test_other_payloads_have_no_identity(payload: bytes) -> None:
    assert decode_identity(payload) is None


@pytest.mark.parametrize("payload", [encode_identity(ONE), encode_identity(SHORT, 20)])
def test_every_flipped_bit_is_noticed(payload: bytes) -> None:
    for position in range(len(payload) * 8):
        broken = bytearray(payload)
        broken[position // 8] ^= 1 << position % 8
        assert decode_identity(broken) is None


def test_publishers_are_told_apart() -> None:
    assert publisher_number("car-1") == publisher_number("car-1", 0) != publisher_number("car-1", 1)
    assert len({publisher_number(f"client-{n}", stream) for n in range(2000) for stream in range(2)}) == 4000
    assert publisher_number("car-1") == 257590156649982107, "the same in every process and version"
    assert publisher_number("car-1", 0, 31) == publisher_number("car-1") >> 32, "its first half"

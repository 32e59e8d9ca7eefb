"""The identity of a message: there and back, and recognised among garbage."""

from __future__ import annotations

import pytest

from nearcast.scenario.identity import IDENTITY_BYTES, Identity, decode_identity, encode_identity, publisher_number

ONE = Identity(publisher_number("car-1"), 7, 1_700_000_000_123_456_789)


def test_the_layout_is_what_is_documented() -> None:
    payload = encode_identity(Identity(1, 2, 3))
    assert payload[:28] == b"NCID" + bytes([0] * 7 + [1] + [0] * 7 + [2] + [0] * 7 + [3])
    assert len(payload) == IDENTITY_BYTES == 32


@pytest.mark.parametrize("size", [32, 33, 1055, 1056, 1057, 5000])
def test_a_payload_has_the_size_asked_for(size: int) -> None:
    payload = encode_identity(ONE, size)
    assert len(payload) == size
    assert decode_identity(payload) == decode_identity(memoryview(payload)) == decode_identity(bytearray(payload)) == ONE


def test_too_small_a_payload_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 32 bytes, not 31"):
        encode_identity(ONE, 31)


@pytest.mark.parametrize("payload", [b"", b"hello", b"NCID", b"\0" * 32, b"NCID" + b"\0" * 28, encode_identity(ONE)[:31]])
def test_other_payloads_have_no_identity(payload: bytes) -> None:
    assert decode_identity(payload) is None


def test_every_flipped_bit_is_noticed() -> None:
    payload = encode_identity(ONE)
    for position in range(IDENTITY_BYTES * 8):
        broken = bytearray(payload)
        broken[position // 8] ^= 1 << position % 8
        assert decode_identity(broken) is None


def test_publishers_are_told_apart() -> None:
    assert publisher_number("car-1") == publisher_number("car-1", 0) != publisher_number("car-1", 1)
    assert len({publisher_number(f"client-{n}", stream) for n in range(2000) for stream in range(2)}) == 4000
    assert publisher_number("car-1") == 257590156649982107, "the same in every process and version"

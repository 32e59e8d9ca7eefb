"""Monitoring packets: sizes, round trips, and what forged or broken ones do."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.membership import packets
from nearcast.membership.packets import Quality, Reconnect

KEY = packets.monitoring_key(b"secret")
NAME = packets.name_hash("broker-1")


def every_packet() -> dict[int, bytes]:
    reconnect = Reconnect(7, packets.name_hash("g"), NAME, 12345678901234567)
    return {
        packets.QOSREQ: packets.qosreq(1, NAME),
        packets.QOSRESP: packets.qosresp(1, Quality(98.0, 0.5, 0.1)),
        packets.PINGREQ: packets.pingreq(1),
        packets.PINGRESP: packets.pingresp(1),
        packets.RECONNREQ: packets.reconnect(packets.RECONNREQ, reconnect, KEY),
        packets.RECONNACK: packets.reconnect(packets.RECONNACK, reconnect, KEY),
    }


@pytest.mark.parametrize("kind", list(packets.SIZES))
def test_a_packet_is_known_by_its_type_and_exact_size(kind: int) -> None:
    data = every_packet()[kind]
    assert packets.kind_of(data) == kind
    assert len(data) == packets.SIZES[kind]
    assert packets.kind_of(data[:-1]) == 0
    assert packets.kind_of(data + b"\0") == 0
    assert packets.kind_of(b"") == 0


def test_ids_and_targets_are_read_back() -> None:
    assert packets.id_of(packets.pingreq(0xFFFF_FFFF)) == 0xFFFF_FFFF
    assert packets.qosreq_target(packets.qosreq(5, NAME)) == NAME
    assert len(NAME) == 8
    assert packets.name_hash("broker-2") != NAME


@given(st.integers(0, 2**32 - 1), st.binary(min_size=8, max_size=8), st.integers(0, 2**60 - 1), st.integers(0, 65_535))
def test_a_reconnect_is_read_back(number: int, broker: bytes, epoch: int, result: int) -> None:
    content = Reconnect(number, NAME, broker, epoch, result)
    assert packets.read_reconnect(packets.reconnect(packets.RECONNREQ, content, KEY), KEY) == content


@given(st.integers(0, 46), st.integers(1, 255))
def test_a_reconnect_that_was_changed_anywhere_is_refused(place: int, change: int) -> None:
    data = bytearray(packets.reconnect(packets.RECONNREQ, Reconnect(7, NAME, NAME, 3), KEY))
    data[place] ^= change
    assert packets.read_reconnect(bytes(data), KEY) is None


def test_a_request_cannot_be_turned_into_an_acknowledgement_or_read_with_another_secret() -> None:
    data = packets.reconnect(packets.RECONNREQ, Reconnect(7, NAME, NAME, 3), KEY)
    assert packets.read_reconnect(bytes([packets.RECONNACK]) + data[1:], KEY) is None
    assert packets.read_reconnect(data, packets.monitoring_key(b"another")) is None


@given(st.floats(0, 600_000), st.floats(0, 40_000), st.floats(0, 1))
def test_quality_keeps_its_precision_in_four_bytes(latency_ms: float, jitter_ms: float, loss: float) -> None:
    packed = packets.pack_quality(Quality(latency_ms, jitter_ms, loss))
    assert 0 <= packed < 2**32
    found = packets.unpack_quality(packed)
    assert found.latency_ms == pytest.approx(latency_ms, rel=0.0006, abs=0.0051)
    assert found.jitter_ms == pytest.approx(jitter_ms, rel=0.009, abs=0.0051)
    assert abs(found.loss - loss) < 0.017
    assert (found.loss == 0.0) == (loss == 0.0)
    assert (found.loss == 1.0) == (loss == 1.0)
    assert packets.pack_quality(found) == packed


def test_what_is_too_large_for_the_format_is_its_largest() -> None:
    found = packets.unpack_quality(packets.pack_quality(Quality(1e12, 1e12, 0.5)))
    assert found.latency_ms > 600_000
    assert found.jitter_ms > 40_000

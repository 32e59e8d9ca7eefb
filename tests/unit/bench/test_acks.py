"""Acknowledgements in runs and one by one come to the same."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nearcast.bench.acks import PUBACK, PUBCOMP, PUBREC, PUBREL, AckLine, PublisherAcks, ack_run, find_run, one_ack
from nearcast.bench.traffic import PACKET_IDS


def acks_of(kind: int, ids: list[int]) -> bytes:
    return b"".join(one_ack(kind, number) for number in ids)


def test_a_run_is_the_acknowledgements_one_by_one() -> None:
    ids = [1, 2, 300, 65_535]
    assert ack_run(PUBREL, np.array(ids, dtype=np.uint16)) == acks_of(PUBREL, ids)
    assert acks_of(PUBACK, [258]) == b"\x40\x02\x01\x02"


def test_find_run_ends_at_another_packet() -> None:
    buffer = bytearray(b"??" + acks_of(PUBACK, list(range(1, 9))) + acks_of(PUBREC, [7]) + b"\x40\x02")
    found = find_run(buffer, 2, len(buffer))
    assert found is not None
    assert found.tolist() == list(range(1, 9))
    assert find_run(bytearray(acks_of(PUBACK, [1, 2, 3])), 0, 12) is None


def feed(acks: PublisherAcks, data: bytes, chunk_bytes: int) -> None:
    carry = b""
    for start in range(0, len(data), chunk_bytes):
        buffer = bytearray(carry + data[start : start + chunk_bytes])
        carry = bytes(buffer[acks.feed(buffer, 0, len(buffer)) :])
    assert carry == b""


@pytest.mark.parametrize("chunk_bytes", [1, 3, 50, 10_000])
def test_qos_1(chunk_bytes: int) -> None:
    acks = PublisherAcks(1)
    acks.sent = 100
    feed(acks, acks_of(PUBACK, list(range(1, 91))), chunk_bytes)
    assert (acks.in_flight, acks.unexpected, acks.disorder, bytes(acks.output)) == (10, 0, 0, b"")


@pytest.mark.parametrize("chunk_bytes", [1, 3, 50, 10_000])
def test_qos_2_releases_what_was_received(chunk_bytes: int) -> None:
    acks = PublisherAcks(2)
    acks.sent = 50
    ids = list(range(1, 51))
    feed(acks, acks_of(PUBREC, ids), chunk_bytes)
    assert bytes(acks.output) == acks_of(PUBREL, ids)
    assert acks.in_flight == 50
    feed(acks, acks_of(PUBCOMP, ids[:20]), chunk_bytes)
    assert (acks.in_flight, acks.unexpected, acks.disorder) == (30, 0, 0)


def test_identifiers_wrap_around() -> None:
    line = AckLine()
    sent = PACKET_IDS + 10
    line.take_run(np.arange(1, PACKET_IDS + 1, dtype=np.uint16), sent)
    assert line.done == PACKET_IDS
    line.take_run(np.array([1, 2, 3, 4, 5], dtype=np.uint16), sent)
    assert (line.done, line.unexpected, line.disorder) == (PACKET_IDS + 5, 0, 0)


def test_acknowledgements_out_of_order_are_taken_and_counted() -> None:
    line = AckLine()
    ids = list(range(1, 101))
    random.Random(5).shuffle(ids)
    line.take_run(np.array(ids, dtype=np.uint16), 100)
    assert (line.done, line.acknowledged, line.unexpected) == (100, 100, 0)
    assert line.disorder > 0


def test_acknowledgements_of_nothing_are_unexpected() -> None:
    acks = PublisherAcks(1)
    acks.sent = 2
    feed(acks, acks_of(PUBACK, [1, 1, 7]), 100)
    feed(acks, acks_of(PUBACK, [9, 9, 9, 9, 9]), 100)
    feed(acks, acks_of(PUBREC, [2]) + b"\xd0\x00", 100)
    assert (acks.in_flight, acks.unexpected) == (1, 9)


def test_reason_codes_of_version_5() -> None:
    acks = PublisherAcks(2)
    acks.sent = 3
    feed(acks, b"\x50\x03\x00\x01\x10" + b"\x50\x03\x00\x02\x97" + b"\x50\x04\x00\x03\x00\x00", 100)
    assert bytes(acks.output) == acks_of(PUBREL, [1, 3])
    assert (acks.refused, acks.in_flight) == (1, 2)


def test_regular_runs_are_taken_by_bytes_and_irregular_ones_all_the_same() -> None:
    acks = PublisherAcks(2)
    acks.sent = 40
    mixed = acks_of(PUBREC, list(range(1, 21))) + acks_of(PUBCOMP, list(range(1, 11))) + acks_of(PUBREC, [22, 21, 23, 24, 25])
    feed(acks, mixed, len(mixed))
    assert bytes(acks.output) == acks_of(PUBREL, [*range(1, 21), 22, 21, 23, 24, 25])
    assert (acks.in_flight, acks.unexpected, acks.disorder) == (30, 0, 1)

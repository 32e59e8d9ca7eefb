"""Batches against packets built one by one, and against literal bytes."""

from __future__ import annotations

import pytest

from nearcast.bench.traffic import (
    MIN_PAYLOAD_BYTES,
    PACKET_IDS,
    PublishBatch,
    PublishLayout,
    connect_packet,
    packet_end,
    skip_properties,
    subscribe_packet,
    varint,
)
from nearcast.errors import ConfigError

TOPIC = b"b00001/0007/v"


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (127, "7f"), (128, "8001"), (16_383, "ff7f"), (2_097_152, "80808001")]
)
def test_varint(value: int, encoded: str) -> None:
    assert varint(value).hex() == encoded


def test_publish_bytes_of_version_4_qos_0() -> None:
    layout = PublishLayout(3, 25, 0, 4)
    assert layout.publish(b"a/b", 1, 2, 3) == (
        b"\x30\x1e\x00\x03a/bNcB1\x01\x00\x00\x00" + b"\x02" + bytes(7) + b"\x03" + bytes(7) + b"."
    )


def test_publish_bytes_of_version_5_qos_1_have_an_identifier_and_no_properties() -> None:
    packet = PublishLayout(3, 25, 1, 5).publish(b"a/b", 0, 0, 0)
    assert packet[:10] == b"\x32\x21\x00\x03a/b\x00\x01\x00"
    assert packet[10:14] == b"NcB1"


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("qos", [0, 1, 2])
@pytest.mark.parametrize("payload_bytes", [24, 100, 300])
def test_a_batch_is_the_packets_one_by_one(version: int, qos: int, payload_bytes: int) -> None:
    layout = PublishLayout(len(TOPIC), payload_bytes, qos, version)
    batch = PublishBatch(layout, 7, [TOPIC], 50)
    for first, count in ((0, 50), (50, 13), (PACKET_IDS - 5, 20)):
        expected = b"".join(layout.publish(TOPIC, 7, first + step, 99) for step in range(count))
        assert bytes(batch.build(first, count, 99)) == expected


def test_a_batch_goes_through_its_topics_in_turn() -> None:
    topics = [b"t/%03d" % number for number in range(7)]
    layout = PublishLayout(5, 24, 0, 4)
    batch = PublishBatch(layout, 0, topics, 20)
    expected = b"".join(layout.publish(topics[number % 7], 0, number, 5) for number in range(11, 31))
    assert bytes(batch.build(11, 20, 5)) == expected


def test_a_rolling_batch_keeps_what_was_sent() -> None:
    layout = PublishLayout(len(TOPIC), 100, 0, 4)
    batch = PublishBatch(layout, 7, [TOPIC], 30, rolling=True)
    sent = b"".join(bytes(batch.build(first, 10, first)) for first in range(0, 50, 10))
    size = layout.packet_bytes
    assert sent == b"".join(layout.publish(TOPIC, 7, number, number // 10 * 10) for number in range(50))

    received = bytearray(b"xyz" + sent[20 * size :])
    assert batch.holds(20, received, 3, 10) == 10
    assert batch.holds(20, received, 3, 30) == 10  # up to the end of the buffer
    assert batch.holds(30, received, 3 + 10 * size, 20) == 20
    assert batch.holds(10, bytearray(sent[10 * size :]), 0, 5) == 0  # overwritten since
    assert batch.holds(40, received, 3 + 10 * size, 10) == 0  # right bytes, wrong place
    received[3 + 25 * size + size - 1] ^= 1
    assert batch.holds(30, received, 3 + 10 * size, 15) == 15
    assert batch.holds(30, received, 3 + 10 * size, 16) == 0
    with pytest.raises(ValueError, match="over the end"):
        batch.build(55, 10, 0)


def test_a_payload_without_room_for_its_header_is_refused() -> None:
    with pytest.raises(ConfigError, match=str(MIN_PAYLOAD_BYTES)):
        PublishLayout(3, 23, 0, 4)


def test_connect_bytes() -> None:
    assert connect_packet("c", 4) == b"\x10\x0d\x00\x04MQTT\x04\x02\x00\x00\x00\x01c"
    assert connect_packet("c", 4, persistent=True) == b"\x10\x0d\x00\x04MQTT\x04\x00\x00\x00\x00\x01c"
    assert connect_packet("c", 5, persistent=True, receive_maximum=100) == (
        b"\x10\x16\x00\x04MQTT\x05\x00\x00\x00\x08\x11\x00\x00\x02\x58\x21\x00\x64\x00\x01c"
    )


def test_subscribe_bytes() -> None:
    assert subscribe_packet(1, ["a", "b/#"], 1, 4) == b"\x82\x0c\x00\x01\x00\x01a\x01\x00\x03b/#\x01"
    assert subscribe_packet(1, ["a"], 2, 5) == b"\x82\x07\x00\x01\x00\x00\x01a\x02"


def test_packet_end_waits_for_the_whole_packet() -> None:
    data = bytearray(b"\xff" + b"\x40\x02\x00\x01" + b"\x30\x80\x01" + bytes(128))
    assert [packet_end(data, 1, end)[1] for end in range(1, 6)] == [0, 0, 0, 0, 5]
    assert packet_end(data, 5, len(data)) == (8, len(data))
    assert packet_end(data, 5, len(data) - 1) == (0, 0)
    with pytest.raises(ValueError, match="four bytes"):
        packet_end(bytearray(b"\x30\xff\xff\xff\xff\x01"), 0, 6)


def test_skip_properties() -> None:
    assert skip_properties(b"xx\x00rest", 2) == 3
    assert skip_properties(b"\x02\x01\x01rest", 0) == 3
    assert skip_properties(b"\x80\x01" + bytes(128) + b"rest", 0) == 130

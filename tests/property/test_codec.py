"""The codec against every packet there is, every way of cutting it up, and garbage."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from nearcast.errors import RemoteProtocolError
from nearcast.mqtt import codec
from nearcast.mqtt.packets import Connect, Packet
from tests.property import strategies

by_version = pytest.mark.parametrize("version", strategies.VERSIONS)

Outcome = tuple[list[tuple[int, bytes]], int | None]


def frame_of(data: bytes) -> tuple[int, bytes]:
    """The one frame in ``data``."""
    [frame] = codec.FrameReader().feed(data)
    return frame


def read_frames(pieces: list[bytes], max_packet_bytes: int) -> Outcome:
    """All frames, and the reason code of the fault that ended them, if one did."""
    reader = codec.FrameReader(max_packet_bytes)
    frames: list[tuple[int, bytes]] = []
    try:
        for piece in [*pieces, b""]:
            frames += reader.feed(piece)
    except RemoteProtocolError as fault:
        return frames, fault.reason_code
    return frames, None


def read_packets(version: int, pieces: list[bytes]) -> tuple[list[Packet], int | None]:
    reader = codec.PacketReader(version, 4_096)
    packets: list[Packet] = []
    try:
        for piece in [*pieces, b""]:
            packets += reader.feed(piece)
    except RemoteProtocolError as fault:
        return packets, fault.reason_code
    return packets, None


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[index : index + 1] for index in range(len(data))]


@by_version
@given(data=st.data())
def test_every_packet_survives_the_round_trip(version: int, data: st.DataObject) -> None:
    packet = data.draw(strategies.any_packet(version))
    first_byte, body = frame_of(codec.encode(packet, version))
    decoded = codec.decode(first_byte, body, version)
    assert decoded == packet
    assert type(decoded) is type(packet)


@by_version
@given(data=st.data())
def test_the_wire_form_is_canonical(version: int, data: st.DataObject) -> None:
    """Decoding and encoding again gives the same bytes, so nothing is lost that equality would not notice."""
    wire_form = codec.encode(data.draw(strategies.any_packet(version)), version)
    assert codec.encode(codec.decode(*frame_of(wire_form), version), version) == wire_form


@by_version
@given(data=st.data())
def test_any_chunking_gives_the_same_packets(version: int, data: st.DataObject) -> None:
    sent = data.draw(st.lists(strategies.packets_but_connect(version), max_size=5))
    stream = b"".join(codec.encode(packet, version) for packet in sent)
    trailing = data.draw(st.sampled_from([b"", b"\x30", b"\x30\x85", b"\x30\x05\x00\x03a"]))
    for pieces in ([stream + trailing], byte_by_byte(stream + trailing), data.draw(strategies.chunks(stream + trailing))):
        assert read_packets(version, pieces) == (sent, None)


@given(data=st.data(), version=strategies.versions)
def test_a_reader_takes_the_version_from_the_connect(data: st.DataObject, version: int) -> None:
    sent: list[Packet] = [data.draw(strategies.connects(version)), data.draw(strategies.packets_but_connect(version))]
    stream = b"".join(codec.encode(packet, version) for packet in sent)
    for start_version in strategies.VERSIONS:
        assert read_packets(start_version, data.draw(strategies.chunks(stream))) == (sent, None)


@given(data=st.data(), garbage=st.binary(max_size=60), max_packet_bytes=st.integers(2, 80))
def test_any_chunking_of_anything_gives_the_same_frames_and_the_same_fault(
    data: st.DataObject, garbage: bytes, max_packet_bytes: int
) -> None:
    whole = read_frames([garbage], max_packet_bytes)
    assert read_frames(byte_by_byte(garbage), max_packet_bytes) == whole
    assert read_frames(data.draw(strategies.chunks(garbage)), max_packet_bytes) == whole


@given(data=st.data(), version=strategies.versions, garbage=st.binary(max_size=60))
def test_any_chunking_of_anything_gives_the_same_packets_and_the_same_fault(
    data: st.DataObject, version: int, garbage: bytes
) -> None:
    valid = data.draw(st.lists(strategies.any_packet(version), max_size=3))
    stream = b"".join(codec.encode(packet, version) for packet in valid) + garbage
    whole = read_packets(version, [stream])
    assert read_packets(version, byte_by_byte(stream)) == whole
    assert read_packets(version, data.draw(strategies.chunks(stream))) == whole


@given(first_byte=st.integers(0, 255), body=st.binary(max_size=80), version=strategies.versions)
@example(first_byte=0x10, body=b"", version=4)
@example(first_byte=0x00, body=b"", version=5)
def test_arbitrary_bytes_raise_only_the_protocol_error(first_byte: int, body: bytes, version: int) -> None:
    try:
        packet = codec.decode(first_byte, body, version)
    except RemoteProtocolError:
        return
    codec.encode(packet, version)  # what decode accepts, encode can write


@by_version
@given(data=st.data())
def test_a_valid_packet_with_changed_bytes_raises_only_the_protocol_error(version: int, data: st.DataObject) -> None:
    """Random bytes seldom get past a CONNECT's first field; damaged packets reach the depths."""
    first_byte, body = frame_of(codec.encode(data.draw(strategies.any_packet(version)), version))
    damaged = bytearray(body)
    for _ in range(data.draw(st.integers(1, 3)) if damaged else 0):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        packet = codec.decode(first_byte, bytes(damaged), version)
    except RemoteProtocolError:
        return
    codec.encode(packet, packet.version if isinstance(packet, Connect) else version)


@by_version
@given(data=st.data())
def test_truncating_or_extending_a_body_raises_only_the_protocol_error(version: int, data: st.DataObject) -> None:
    first_byte, body = frame_of(codec.encode(data.draw(strategies.any_packet(version)), version))
    for length in range(len(body)):
        try:
            codec.decode(first_byte, body[:length], version)
        except RemoteProtocolError:
            pass
    try:
        codec.decode(first_byte, body + data.draw(st.binary(min_size=1, max_size=5)), version)
    except RemoteProtocolError:
        pass


@by_version
@given(data=st.data())
def test_a_truncated_stream_gives_the_packets_before_the_cut(version: int, data: st.DataObject) -> None:
    sent = data.draw(st.lists(strategies.packets_but_connect(version), min_size=1, max_size=3))
    forms = [codec.encode(packet, version) for packet in sent]
    stream = b"".join(forms)
    cut = data.draw(st.integers(0, len(stream)))
    complete = 0
    while complete < len(forms) and sum(map(len, forms[: complete + 1])) <= cut:
        complete += 1
    assert read_packets(version, [stream[:cut]]) == (sent[:complete], None)

"""Publishers that only count acknowledgements."""

from __future__ import annotations

import socket
import threading

import pytest

from nearcast.bench.persisted import PersistedLoad, publish_persisted, ring
from nearcast.bench.replicated import Measured, bar_of, medians
from nearcast.bench.traffic import packet_end
from nearcast.bench.wire import read_packet
from nearcast.errors import ConfigError


def test_a_ring_has_packets_of_one_size_and_identifiers_from_one_on() -> None:
    packets, size = ring("a/b", 3, 10, 1)
    data = bytearray(packets)
    assert len(data) == 3 * size
    payloads = set()
    for number in range(3):
        body, end = packet_end(data, number * size, len(data))
        assert end == (number + 1) * size
        assert data[body : body + 7] == b"\0\3a/b" + bytes([0, number + 1])
        payloads.add(bytes(data[body + 7 : end]))
    assert len(payloads) == 3
    with pytest.raises(ConfigError):
        ring("a", 65_536, 1, 1)


def acknowledging(listener: socket.socket, backwards: bool) -> None:
    """A broker that acknowledges pairs of messages, in their order or not."""
    peer, _ = listener.accept()
    with peer:
        read_packet(peer)
        peer.sendall(b"\x20\x02\0\0")
        waiting: list[bytes] = []
        try:
            while True:
                first_byte, body = read_packet(peer)
                if first_byte != 0x32:
                    return
                end = 2 + int.from_bytes(body[:2], "big")
                waiting.append(b"\x40\x02" + body[end : end + 2])
                if len(waiting) == 2:
                    peer.sendall(b"".join(reversed(waiting) if backwards else waiting))
                    waiting.clear()
        except Exception:  # noqa: BLE001  # the load is over
            return


@pytest.mark.parametrize("backwards", [False, True])
def test_all_that_is_acknowledged_is_counted(backwards: bool) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=acknowledging, args=(listener, backwards))
        thread.start()
        load = PersistedLoad(publishers=1, window=8, payload_bytes=20, seconds=0.3, warmup_seconds=0.1)
        result = publish_persisted([listener.getsockname()[:2]], load)
        thread.join()
    assert result.acknowledged > 0
    assert result.total >= result.acknowledged
    assert result.unexpected == 0
    assert 0 < result.p50_ms <= result.p99_ms <= result.max_ms


def test_medians_and_what_they_are_held_to() -> None:
    rounds = [Measured(load="publish_8k", messages_per_second=rate, disk=disk) for rate, disk in ((1, 9), (2, 7), (9, 8))]
    [found] = medians([*rounds, rounds[1]][:3]).values()
    assert (found.messages_per_second, found.disk) == (2, 8)
    assert bar_of(found) == 8, "the disk's limit is below the bar"
    assert bar_of(Measured(load="publish_8k", messages_per_second=1, disk=1e6)) == 10_000
    assert bar_of(Measured(load="latency_8k", messages_per_second=1)) == 0

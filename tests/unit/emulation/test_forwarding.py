"""The router's loop on socket pairs instead of devices: what it takes, holds, drops, counts, and when it writes."""

from __future__ import annotations

import os
import random
import select
import socket
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nearcast.emulation.forwarding import HISTOGRAM_BUCKETS, Forwarder, Histogram
from nearcast.emulation.router_process import Timer
from nearcast.network.conditions import Conditions
from nearcast.network.network import Network

ADDRESSES = [bytes([10, 77, 0, 1]), bytes([10, 77, 0, 2]), bytes([10, 77, 0, 3])]


def packet(source: bytes, target: bytes, payload: bytes = b"payload") -> bytes:
    """An IPv4 packet as far as the router looks at it."""
    size = 20 + len(payload)
    return bytes([0x45, 0, size >> 8, size & 255, 0, 0, 0, 0, 64, 17, 0, 0]) + source + target + payload


class Wires:
    """Three hosts at two sites (0 and 1 at the first, 2 at the second), each the far end of a pair of sockets."""

    def __init__(self, between: Conditions, *, max_packets: int = 100, max_bytes: int = 100_000) -> None:
        self.network = Network(["left", "right"], None, random.Random(1))
        self.network.connect(0, 1, between)
        for site in (0, 0, 1):
            self.network.join(site)
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in ADDRESSES]
        self.hosts = [host for host, _ in pairs]
        self.devices = [device for _, device in pairs]
        for one in (*self.hosts, *self.devices):
            one.setblocking(False)
        descriptors = [device.fileno() for device in self.devices]
        self.forwarder = Forwarder(self.network, descriptors, list(ADDRESSES), 1500, max_packets, max_bytes, 0.0)

    def close(self) -> None:
        for one in (*self.hosts, *self.devices):
            one.close()

    def received(self, host: int) -> list[bytes]:
        found = []
        while True:
            try:
                found.append(self.hosts[host].recv(2000))
            except BlockingIOError:
                return found


@pytest.fixture
def wires() -> Iterator[Wires]:
    made = Wires(Conditions())
    yield made
    made.close()


def test_packets_go_to_the_host_with_their_address_in_order(wires: Wires) -> None:
    sent = [packet(ADDRESSES[0], ADDRESSES[2], bytes([number])) for number in range(5)]
    for one in sent:
        wires.hosts[0].send(one)
    assert wires.forwarder.receive(0) == 5
    assert wires.forwarder.release() == -1.0
    assert wires.received(2) == sent
    assert wires.received(1) == []
    assert wires.forwarder.delivered == 5


def test_a_batch_is_bounded_so_that_one_host_does_not_shut_out_the_others(wires: Wires) -> None:
    forwarder = wires.forwarder
    for _ in range(5):
        for _ in range(10):
            wires.hosts[0].send(packet(ADDRESSES[0], ADDRESSES[1]))
        read = forwarder.receive(0)
        assert 0 < read <= 32


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"\x45",
        b"\x60" + bytes(39),  # IPv6
        packet(ADDRESSES[0], ADDRESSES[2])[:-1],  # shorter than it says
        packet(ADDRESSES[0], ADDRESSES[2]) + b"x",
        bytes(20),
    ],
    ids=["empty", "one byte", "ipv6", "truncated", "too long", "zeros"],
)
def test_what_is_no_ipv4_packet_is_counted_and_dropped(wires: Wires, garbage: bytes) -> None:
    wires.forwarder.take(0, garbage, 1.0)
    assert wires.forwarder.malformed == 1
    assert wires.forwarder.held == []


@pytest.mark.parametrize(
    "target",
    [bytes([10, 77, 0, 9]), bytes([10, 77, 255, 255]), bytes([255] * 4), bytes([224, 0, 0, 251]), ADDRESSES[0]],
    ids=["unknown", "subnet broadcast", "broadcast", "multicast", "itself"],
)
def test_packets_to_no_other_host_are_counted_and_dropped(wires: Wires, target: bytes) -> None:
    wires.forwarder.take(0, packet(ADDRESSES[0], target), 1.0)
    assert wires.forwarder.misaddressed == 1
    assert wires.network.packets == 0


def test_packets_with_anothers_source_address_are_counted_and_dropped(wires: Wires) -> None:
    wires.forwarder.take(0, packet(ADDRESSES[1], ADDRESSES[2]), 1.0)
    assert wires.forwarder.spoofed == 1
    assert wires.forwarder.held == []


@given(data=st.binary(max_size=60), endpoint=st.integers(0, 2))
def test_any_bytes_are_counted_once(data: bytes, endpoint: int) -> None:
    made = Wires(Conditions())
    forwarder = made.forwarder
    forwarder.take(endpoint, data, 1.0)
    assert forwarder.received == 1
    assert forwarder.malformed + forwarder.spoofed + forwarder.misaddressed + made.network.packets == 1
    made.close()


def test_packets_wait_until_they_are_due() -> None:
    wires = Wires(Conditions(latency_ms=60_000.0))
    now = time.monotonic()
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), now)
    assert wires.forwarder.release() == pytest.approx(now + 60.0)
    assert wires.received(2) == []
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[1]), now)  # at the same site: overtakes
    assert wires.forwarder.release() == pytest.approx(now + 60.0)
    assert len(wires.received(1)) == 1
    wires.close()


def test_late_packets_are_written_and_their_lateness_is_counted(wires: Wires) -> None:
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), time.monotonic() - 2.0)
    wires.forwarder.release()
    assert len(wires.received(2)) == 1
    assert 2.0 <= wires.forwarder.lateness.largest_s < 60.0


def test_duplicates_arrive_twice() -> None:
    wires = Wires(Conditions(duplicate=1.0))
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), 1.0)
    wires.forwarder.release()
    assert len(wires.received(2)) == 2
    assert wires.forwarder.duplicated == 1
    wires.close()


def test_lost_packets_are_not_held() -> None:
    wires = Wires(Conditions(loss=1.0))
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), 1.0)
    assert wires.forwarder.held == []
    assert wires.network.lost == 1
    wires.close()


def test_packets_held_are_bounded_in_number() -> None:
    wires = Wires(Conditions(latency_ms=1000.0), max_packets=3)
    for _ in range(5):
        wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), time.monotonic())
    assert len(wires.forwarder.held) == 3
    assert wires.forwarder.overflowed == 2
    wires.close()


def test_packets_held_are_bounded_in_bytes_and_room_comes_back() -> None:
    size = len(packet(ADDRESSES[0], ADDRESSES[2], bytes(80)))
    wires = Wires(Conditions(), max_bytes=2 * size)
    for _ in range(3):
        wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2], bytes(80)), 1.0)
    assert wires.forwarder.overflowed == 1
    wires.forwarder.release()
    assert wires.forwarder.held_bytes == 0
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2], bytes(80)), 1.0)
    assert wires.forwarder.overflowed == 1
    wires.close()


def test_a_device_that_does_not_take_a_packet_costs_that_packet_only(wires: Wires) -> None:
    wires.hosts[2].close()
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[2]), 1.0)
    wires.forwarder.take(0, packet(ADDRESSES[0], ADDRESSES[1]), 1.0)
    wires.forwarder.release()
    assert wires.forwarder.refused == 1
    assert len(wires.received(1)) == 1


class Loop:
    """What the router's process puts around the forwarder, with a socket of the test's in place of the control socket."""

    def __init__(self, wires: Wires) -> None:
        self.timer = Timer()
        self.poller = select.epoll()
        self.stop, self._stopped = socket.socketpair()
        self.poller.register(self._stopped.fileno(), select.EPOLLIN)
        self.poller.register(self.timer.descriptor, select.EPOLLIN | select.EPOLLET)
        for device in wires.devices:
            self.poller.register(device.fileno(), select.EPOLLIN)

    def serve(self, forwarder: Forwarder) -> list[int]:
        return forwarder.serve(self.poller, self.timer.arm, self.timer.descriptor)

    def close(self) -> None:
        os.close(self.timer.descriptor)
        self.poller.close()
        self.stop.close()
        self._stopped.close()


@pytest.mark.parametrize("spin_s", [0.0, 100e-6])
def test_the_loop_sleeps_until_packets_are_due(spin_s: float) -> None:
    wires = Wires(Conditions(latency_ms=20.0))
    wires.forwarder.spin_s = spin_s
    loop = Loop(wires)
    wires.hosts[0].send(packet(ADDRESSES[0], ADDRESSES[2]))
    wires.hosts[2].setblocking(True)
    began = time.monotonic()
    # The packet's arrival makes host 2 readable: that ends the loop, as a control socket would.
    loop.poller.register(wires.hosts[2].fileno(), select.EPOLLIN)
    assert loop.serve(wires.forwarder) == [wires.hosts[2].fileno()]
    assert time.monotonic() - began >= 0.0199
    assert wires.forwarder.rounds < 200, "it does not spin through the whole delay"
    loop.close()
    wires.close()


def test_a_command_ends_the_loop_while_packets_are_under_way() -> None:
    wires = Wires(Conditions(latency_ms=60_000.0))
    loop = Loop(wires)
    wires.hosts[0].send(packet(ADDRESSES[0], ADDRESSES[2]))
    loop.stop.send(b"x")
    assert len(loop.serve(wires.forwarder)) == 1
    assert wires.forwarder.received == 1
    assert len(wires.forwarder.held) == 1
    loop.close()
    wires.close()


def test_histogram_counts_within_an_eighth() -> None:
    histogram = Histogram()
    histogram.add(-1.0)
    histogram.add(1e9)
    assert sum(histogram.counts) == 2
    assert histogram.counts[0] == 1
    assert histogram.largest_s == 1e9
    assert len(histogram.counts) == HISTOGRAM_BUCKETS
    histogram.add(0.001, 5)
    assert 5 in histogram.counts

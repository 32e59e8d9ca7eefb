"""The router's hot loop: packets in from devices, held until the network model says they arrive, and out again. Compiled.

Owns the packets under way and the bound on them, and keeps the books on how late it was. It knows IPv4 addresses and nothing
else of a packet. What a packet experiences is :mod:`nearcast.network`'s to say; commands and the process are
:mod:`nearcast.emulation.router_process`'s.

Time is ``CLOCK_MONOTONIC`` in seconds. A packet counts as sent when the router reads it and as arrived when the router writes
it; two histograms say how far that is from the truth: ``lateness`` (written after it was due) and ``waiting`` (an upper
bound on how long packets sat in a device because the router was busy with others).
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable
from heapq import heappop, heappush
from time import monotonic
from typing import Final

from mypy_extensions import i64

from nearcast.network.network import Network

BATCH_PACKETS: Final = 32
"""Packets read from one device before the others, and packets that are due, get their turn."""

EARLY_S: Final = 10e-6
"""A packet due so soon is written now: waking up for it would take longer."""

SPIN_SHARE: Final = 0.25
"""Time awake that sleeping earns: waiting for deadlines awake takes at most so much of the time when nothing is to be done."""

HISTOGRAM_BUCKETS: Final = 208
"""Microseconds from 0 to 2**28 (more than four minutes) at three significant bits."""


class Histogram:
    """Counts of durations. Buckets are microseconds up to 15, then eight to each doubling: within an eighth of the truth."""

    def __init__(self) -> None:
        self.counts: list[int] = [0] * HISTOGRAM_BUCKETS
        self.largest_s: float = 0.0

    def add(self, seconds: float, times: i64 = 1) -> None:
        """Count a duration; below zero counts as zero."""
        if seconds > self.largest_s:
            self.largest_s = seconds
        microseconds: i64 = 0
        if seconds > 200.0:
            microseconds = 200_000_000
        elif seconds > 0.0:
            microseconds = i64(seconds * 1e6)
        octave: i64 = 0
        while microseconds >= 16:
            microseconds >>= 1
            octave += 1
        bucket: i64 = octave * 8 + microseconds
        self.counts[bucket] += times


class Forwarder:
    """All packets between a set of devices.

    ``descriptors[i]`` is the device of endpoint i of ``network`` and ``addresses[i]`` its IPv4 address, four bytes. With
    ``max_held_packets`` or ``max_held_bytes`` under way, more are dropped. A packet that is due within ``spin_s`` is waited
    for awake: going to sleep and waking up would take longer.
    """

    def __init__(
        self,
        network: Network,
        descriptors: list[int],
        addresses: list[bytes],
        mtu_bytes: int,
        max_held_packets: int,
        max_held_bytes: int,
        spin_s: float,
    ) -> None:
        self.network = network
        self.descriptors = descriptors
        self.addresses = addresses
        self.endpoints: dict[bytes, int] = {address: index for index, address in enumerate(addresses)}
        self.by_descriptor: dict[int, int] = {descriptor: index for index, descriptor in enumerate(descriptors)}
        self.mtu_bytes = mtu_bytes
        self.max_held_packets: i64 = max_held_packets
        self.max_held_bytes: i64 = max_held_bytes
        self.spin_s = spin_s
        self.held: list[tuple[float, int, int, bytes]] = []
        self.held_bytes: i64 = 0
        self.sequence: i64 = 0
        self.armed_for: float = -1.0
        # Every packet received is counted once more: by the network, or as malformed, spoofed or misaddressed.
        self.received: i64 = 0
        self.received_bytes: i64 = 0
        self.malformed: i64 = 0
        self.spoofed: i64 = 0
        self.misaddressed: i64 = 0
        self.overflowed: i64 = 0
        self.delivered: i64 = 0
        self.duplicated: i64 = 0
        self.refused: i64 = 0
        self.gone: i64 = 0
        self.rounds: i64 = 0
        self.lateness = Histogram()
        self.waiting = Histogram()

    def serve(self, poller: select.epoll, arm: Callable[[float], None], timer: int) -> list[int]:
        """Forward packets until a descriptor that is no device's (and not ``timer``) is ready; returns those that are.

        ``arm(when)`` makes ``timer`` ready at ``when``; it is registered edge-triggered, so that nobody has to read it.
        """
        by_descriptor = self.by_descriptor
        others: list[int] = []
        before = monotonic()  # when the round before began
        credit = 0.0
        while not others:
            due = self.release()
            slept = monotonic()
            spin = self.spin_s if credit > self.spin_s else credit
            if due >= 0.0 and due - slept <= spin:
                ready = poller.poll(0, 256)
                began = monotonic()
                credit -= began - slept
                blocked = False
            else:
                if due >= 0.0 and due != self.armed_for:
                    arm(due - spin)
                    self.armed_for = due
                ready = poller.poll(-1, 256)
                began = monotonic()
                credit = min(credit + SPIN_SHARE * (began - slept), 10.0 * self.spin_s)
                # If it did not sleep, packets had come in the round before and waited for its end.
                blocked = began - slept > 5e-6
            self.rounds += 1
            for descriptor, _ in ready:
                endpoint = by_descriptor.get(descriptor, -1)
                if endpoint >= 0:
                    read = self.receive(endpoint)
                    if read < 0:
                        poller.unregister(descriptor)
                        self.gone += 1
                        continue
                    self.waiting.add(0.0 if blocked else began - before, read)
                    self.release()
                elif descriptor == timer:
                    self.armed_for = -1.0
                else:
                    others.append(descriptor)
            before = began
        return others

    def receive(self, endpoint: i64) -> i64:
        """Take what waits in an endpoint's device, up to a batch; returns how many that was, -1 if the device is gone."""
        descriptor = self.descriptors[endpoint]
        mtu_bytes = self.mtu_bytes
        count: i64 = 0
        while count < BATCH_PACKETS:
            try:
                packet = os.read(descriptor, mtu_bytes)
            except BlockingIOError:
                break
            except OSError:
                return -1  # somebody inside has removed it
            count += 1
            self.take(endpoint, packet, monotonic())
        return count

    def take(self, endpoint: i64, packet: bytes, now: float) -> None:
        """A packet that an endpoint sent: hold it until it arrives, unless it does not."""
        size: i64 = len(packet)
        self.received += 1
        self.received_bytes += size
        if size < 20 or packet[0] >> 4 != 4 or (packet[2] << 8 | packet[3]) != size:
            self.malformed += 1
            return
        if packet[12:16] != self.addresses[endpoint]:
            self.spoofed += 1
            return
        target = self.endpoints.get(packet[16:20], -1)
        if target < 0 or target == endpoint:
            self.misaddressed += 1
            return
        arrival = self.network.transit(endpoint, target, size, now)
        if arrival < 0.0:
            return
        self.hold(arrival, target, packet, size)
        again = self.network.take_duplicate()
        if again >= 0.0:
            self.duplicated += 1
            self.hold(again, target, packet, size)

    def hold(self, arrival: float, target: int, packet: bytes, size: i64) -> None:
        if len(self.held) >= self.max_held_packets or self.held_bytes + size > self.max_held_bytes:
            self.overflowed += 1
            return
        self.sequence += 1
        self.held_bytes += size
        heappush(self.held, (arrival, self.sequence, target, packet))

    def release(self) -> float:
        """Write every packet that is due; returns when the next one is, or -1 when none is under way."""
        held = self.held
        if not held:
            return -1.0
        now = monotonic()
        while held:
            due = held[0][0]
            if due > now + EARLY_S:
                # The clock moved while writing.
                now = monotonic()
                if due > now + EARLY_S:
                    return due
            _, _, target, packet = heappop(held)
            self.held_bytes -= len(packet)
            try:
                os.write(self.descriptors[target], packet)
                self.delivered += 1
            except OSError:
                self.refused += 1  # the device is down, or the kernel has no memory: a host that misses a packet
            now = monotonic()
            self.lateness.add(now - due)
        return -1.0

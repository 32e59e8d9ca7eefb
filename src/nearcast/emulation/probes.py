"""Programs that measure the emulated WAN from inside: ``python -m nearcast.emulation.probes ROLE``, work on standard input.

They are cheap so that what they measure is the router. A sender's packets carry the moment of sending; the receiver takes the
moment of arrival from the kernel (``SO_TIMESTAMPNS``: when the packet came out of the host's device), so it may read them late
and in bulk. Both moments are of ``CLOCK_REALTIME``, which all namespaces share; a clock that was set meanwhile is noticed.

The sockets are opened by :mod:`nearcast.emulation.measurement` inside the hosts and inherited as descriptors. Results go to
standard output.
"""

from __future__ import annotations

import array
import os
import select
import socket
import struct
import sys
import threading
import time
from typing import Final

import msgspec

MIN_PAYLOAD_BYTES: Final = 16
TICK_S: Final = 0.0002
"""Senders sleep at least so long: at high rates packets leave in small bursts, as a busy process sends them."""

CATCH_UP_S: Final = 0.002
"""A sender that was held up makes up for at most so long and lets go of the rest: a longer burst would measure how the machine
treats the sender. What it did not send lowers its rate, which is reported."""

_SO_TIMESTAMPNS: Final = 35
_PACKET = struct.Struct("=qq")
_TIMESTAMP = struct.Struct("=qq")
_RECEIVE_BUFFER_BYTES: Final = 64 * 1024 * 1024
_LARGEST_STEP_S: Final = 0.0005


class Sending(msgspec.Struct, frozen=True, kw_only=True):
    """Send from connected sockets in turn."""

    descriptors: list[int]
    packets_per_s: float
    duration_s: float
    payload_bytes: int


class Receiving(msgspec.Struct, frozen=True, kw_only=True):
    """Receive on all sockets until nothing has come for ``quiet_s`` after standard input ended."""

    descriptors: list[int]
    quiet_s: float


class Echoing(msgspec.Struct, frozen=True, kw_only=True):
    """Send a packet there, then back, then the next."""

    there: int
    back: int
    count: int


class Transferring(msgspec.Struct, frozen=True, kw_only=True):
    """Send TCP data from a connected socket to an accepted one for so long."""

    source: int
    target: int
    duration_s: float


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """What a sender did."""

    packets: int
    refused: int
    """Packets that the sender's own kernel did not take."""

    elapsed_s: float
    cpu_s: float


class Transferred(msgspec.Struct, frozen=True, kw_only=True):
    """What a transfer came to, from the first byte received to the last."""

    bytes: int
    elapsed_s: float


def clock_offset_s() -> float:
    """Of the clock that can be set from the one that cannot: when it changes, the clock was set."""
    # Whatever happens between the two readings makes the difference smaller.
    return max(time.time() - time.monotonic() for _ in range(20))


def send(work: Sending) -> Sent:
    sockets = [socket.socket(fileno=descriptor) for descriptor in work.descriptors]
    payload = bytearray(work.payload_bytes)
    interval_s = 1.0 / work.packets_per_s
    longest_burst = max(1, round(CATCH_UP_S / interval_s))
    sent = refused = 0
    realtime_ns = time.time_ns
    pack = _PACKET.pack_into
    senders = [one.send for one in sockets]
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    except OSError:
        pass  # then it is held up more often, and says so by its rate
    count = len(senders)
    start = time.monotonic()
    end = start + work.duration_s
    due = start  # when the next packet is to leave
    while (now := time.monotonic()) < end:
        due = max(due, now - CATCH_UP_S)
        for _ in range(min(longest_burst, int((now - due) / interval_s) + 1)):
            pair = sent % count
            pack(payload, 0, pair, realtime_ns())
            try:
                senders[pair](payload)
            except OSError:
                refused += 1
            sent += 1
            due += interval_s
        time.sleep(max(due - time.monotonic(), TICK_S))
    return Sent(packets=sent, refused=refused, elapsed_s=time.monotonic() - start, cpu_s=time.process_time())


def receive(work: Receiving) -> array.array[int]:
    """Triples: pair, nanoseconds sent, nanoseconds received."""
    records = array.array("q")
    sockets = {descriptor: socket.socket(fileno=descriptor) for descriptor in work.descriptors}
    poller = select.epoll()
    for descriptor, one in sockets.items():
        poller.register(descriptor, select.EPOLLIN)
        one.setblocking(False)
    buffer = bytearray(65536)
    buffers = [buffer]
    unpack = _PACKET.unpack_from
    timestamp = _TIMESTAMP.unpack
    space = socket.CMSG_SPACE(_TIMESTAMP.size)
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.buffer.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    last = time.monotonic()
    while not ended.is_set() or time.monotonic() - last < work.quiet_s:
        for descriptor, _ in poller.poll(0.05):
            one = sockets[descriptor]
            take = one.recvmsg_into
            last = time.monotonic()
            while True:
                try:
                    size, ancillary, _, _ = take(buffers, space)
                except BlockingIOError:
                    break
                if size < MIN_PAYLOAD_BYTES or not ancillary:
                    continue
                pair, sent_ns = unpack(buffer, 0)
                seconds, nanoseconds = timestamp(ancillary[0][2])
                records.extend((pair, sent_ns, seconds * 1_000_000_000 + nanoseconds))
    return records


def prepare_receiver(one: socket.socket) -> None:
    """Room for what comes while the receiver sleeps, and kernel timestamps. Before anything is sent to it."""
    try:
        one.setsockopt(socket.SOL_SOCKET, 33, _RECEIVE_BUFFER_BYTES)  # SO_RCVBUFFORCE
    except OSError:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
    one.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)


def echo(work: Echoing) -> list[float]:
    """Round-trip times in milliseconds."""
    there = socket.socket(fileno=work.there)
    back = socket.socket(fileno=work.back)
    there.settimeout(10.0)
    back.settimeout(10.0)
    times = []
    for _ in range(work.count):
        start = time.monotonic()
        there.send(b"there" * 10)
        data, origin = back.recvfrom(2048)
        back.sendto(data, origin)
        there.recv(2048)
        times.append((time.monotonic() - start) * 1000.0)
    return times


def transfer(work: Transferring) -> Transferred:
    source = socket.socket(fileno=work.source)
    target = socket.socket(fileno=work.target)
    data = bytes(1 << 18)
    stop = threading.Event()

    def push() -> None:
        while not stop.is_set():
            try:
                source.sendall(data)
            except OSError:
                return

    threading.Thread(target=push, daemon=True).start()
    buffer = bytearray(1 << 20)
    received = target.recv_into(buffer)
    start = now = time.monotonic()
    while now - start < work.duration_s:
        received += target.recv_into(buffer)
        now = time.monotonic()
    stop.set()
    return Transferred(bytes=received, elapsed_s=now - start)


def main(arguments: list[str]) -> int:
    role = arguments[0]
    line = sys.stdin.buffer.readline()
    output = sys.stdout.buffer
    before = clock_offset_s()
    if role == "send":
        result = msgspec.json.encode(send(msgspec.json.decode(line, type=Sending)))
    elif role == "receive":
        result = receive(msgspec.json.decode(line, type=Receiving)).tobytes()
    elif role == "echo":
        result = msgspec.json.encode(echo(msgspec.json.decode(line, type=Echoing)))
    else:
        result = msgspec.json.encode(transfer(msgspec.json.decode(line, type=Transferring)))
    if abs(clock_offset_s() - before) > _LARGEST_STEP_S:
        print("the machine's clock was set during the measurement: measure again", file=sys.stderr)  # noqa: T201
        return 1
    output.write(result)
    output.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Connections as the load: how fast they come and go, and what an idle one costs in memory."""

from __future__ import annotations

import errno
import os
import select
import socket
import time

from nearcast.bench.process import cpu_seconds, resident_bytes
from nearcast.bench.results import ConnectResult, IdleResult
from nearcast.bench.traffic import DISCONNECT, connect_packet
from nearcast.errors import ConnectionClosed

_PORTS_PER_ADDRESS = 20_000
_STALL_SECONDS = 10.0
# Kernel headers say so; the socket module does not export it everywhere.
_IP_BIND_ADDRESS_NO_PORT = 24


class Swarm:
    """Many connections being opened at once, at most ``concurrency`` of them unfinished.

    On a loopback address they come from several source addresses, because one has only so many ports.
    """

    def __init__(self, address: tuple[str, int], concurrency: int, *, keep: bool) -> None:
        self._address = address
        self._concurrency = concurrency
        self._keep = keep
        self._epoll = select.epoll()
        self._opening: dict[int, socket.socket] = {}
        self._closing: dict[int, socket.socket] = {}
        self._kept: list[socket.socket] = []
        self._started = 0
        self._tag = f"{os.getpid():x}"
        self.finished = 0
        self.refused = 0

    def open(self, total: int) -> None:
        """Make ``total`` connections; those kept stay open, the others go through DISCONNECT to the broker's close."""
        target = self.finished + self.refused + total
        remaining = total
        deadline = time.monotonic() + _STALL_SECONDS
        while self.finished + self.refused < target:
            while remaining and len(self._opening) + len(self._closing) < self._concurrency:
                self._start()
                remaining -= 1
            events = self._epoll.poll(1.0)
            if events:
                deadline = time.monotonic() + _STALL_SECONDS
            elif time.monotonic() > deadline:
                raise ConnectionClosed(f"the broker stopped answering after {self.finished} connections")
            for descriptor, _ in events:
                self._advance(descriptor)

    def _start(self) -> None:
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        host = self._address[0]
        if host.startswith("127."):
            peer.setsockopt(socket.IPPROTO_IP, _IP_BIND_ADDRESS_NO_PORT, 1)
            peer.bind((f"127.0.0.{2 + self._started // _PORTS_PER_ADDRESS % 200}", 0))
        code = peer.connect_ex(self._address)
        if code not in (0, errno.EINPROGRESS):
            peer.close()
            raise ConnectionClosed(f"cannot connect to {host}:{self._address[1]}: {os.strerror(code)}")
        packet = connect_packet(f"idle-{self._tag}-{self._started}", 4)
        self._started += 1
        self._opening[peer.fileno()] = peer
        try:  # a loopback connect is complete at once
            peer.send(packet)
            self._epoll.register(peer.fileno(), select.EPOLLIN)
        except BlockingIOError:
            self._epoll.register(peer.fileno(), select.EPOLLOUT)
        except OSError:
            self._refuse(peer.fileno())

    def _advance(self, descriptor: int) -> None:
        peer = self._closing.get(descriptor)
        if peer is not None:
            if not _read(peer):
                del self._closing[descriptor]
                peer.close()
                self.finished += 1
            return
        peer = self._opening[descriptor]
        answer = _read(peer)
        if answer[:1] != b"\x20" or answer[3:4] != b"\x00":
            self._refuse(descriptor)
            return
        del self._opening[descriptor]
        if self._keep:
            self._epoll.unregister(descriptor)
            self._kept.append(peer)
            self.finished += 1
            return
        try:
            peer.send(DISCONNECT)
        except OSError:
            pass  # then the next read sees the end as well
        self._closing[descriptor] = peer

    def _refuse(self, descriptor: int) -> None:
        self._opening.pop(descriptor).close()
        self.refused += 1

    def close(self) -> None:
        for peer in (*self._kept, *self._opening.values(), *self._closing.values()):
            peer.close()
        self._epoll.close()


def _read(peer: socket.socket) -> bytes:
    try:
        return peer.recv(256)
    except OSError:
        return b""


def measure_connects(
    address: tuple[str, int], connections: int, concurrency: int, *, broker_pid: int | None = None
) -> ConnectResult:
    """Whole lives of connections: TCP connect, CONNECT, CONNACK, DISCONNECT, and the broker's close."""
    swarm = Swarm(address, concurrency, keep=False)
    try:
        swarm.open(min(200, connections))  # warm up
        cpu = cpu_seconds(broker_pid) if broker_pid is not None else 0.0
        begin = time.monotonic()
        swarm.open(connections)
        seconds = time.monotonic() - begin
        used = cpu_seconds(broker_pid) - cpu if broker_pid is not None else None
    finally:
        swarm.close()
    return ConnectResult(
        connections=connections,
        seconds=seconds,
        connects_per_second=connections / seconds,
        refused=swarm.refused,
        cpu_us_per_connect=used / connections * 1e6 if used is not None else None,
    )


_BASE_CONNECTIONS = 100
_SETTLE_SECONDS = 0.3


def measure_idle(address: tuple[str, int], connections: int, broker_pid: int) -> IdleResult:
    """Growth of the broker's resident memory from 100 idle connections to ``connections``."""
    swarm = Swarm(address, 64, keep=True)
    try:
        swarm.open(_BASE_CONNECTIONS)
        time.sleep(_SETTLE_SECONDS)
        base = resident_bytes(broker_pid)
        swarm.open(connections - _BASE_CONNECTIONS)
        time.sleep(_SETTLE_SECONDS)
        full = resident_bytes(broker_pid)
        if swarm.refused:
            raise ConnectionClosed(f"the broker refused {swarm.refused} of {connections} connections")
    finally:
        swarm.close()
    return IdleResult(
        connections=connections,
        base_rss_bytes=base,
        full_rss_bytes=full,
        bytes_per_connection=(full - base) / (connections - _BASE_CONNECTIONS),
    )

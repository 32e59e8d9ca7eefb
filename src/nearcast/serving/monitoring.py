"""The protocols on real UDP sockets: moves datagrams between the network and a node's machines, its
:class:`~nearcast.membership.monitoring.Monitor` and :class:`~nearcast.membership.gossip.Gossip`, and turns addresses as text
into those of sockets."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import logging
import socket
from collections.abc import Callable
from typing import Any, Protocol

from nearcast.errors import ConfigError
from nearcast.serving import logs
from nearcast.serving.arrivals import note_arrivals, receive
from nearcast.serving.links import split_address

MAX_DATAGRAM_BYTES = 1500
"""More than any packet of the protocols has."""

READS_PER_WAKEUP = 256
RESOLVED_FOR_SECONDS = 60.0


class Datagrams(Protocol):
    """The machine behind the sockets."""

    def handle(self, data: bytes, source: str, now: float, waited_s: float) -> None:
        """A datagram arrived, ``waited_s`` before it was read."""

    def take_outgoing(self) -> list[tuple[str, bytes]]:
        """Datagrams to send, with their addresses."""


class GossipDatagrams(Protocol):
    """A machine that shares the sockets, and says which datagrams are its own."""

    def handle(self, data: bytes, source: str, now: float, waited_s: float) -> bool:
        """A datagram arrived, ``waited_s`` before it was read; whether it was for this machine."""

    def take_outgoing(self) -> list[tuple[str, bytes]]:
        """Datagrams to send, with their addresses."""


def bind_udp(host: str, port: int, key: str) -> list[socket.socket]:
    """UDP sockets on every address of ``host``; port 0 takes any, the same one for all."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_DGRAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        reason = error.strerror if isinstance(error, socket.gaierror) else "not a host name"
        raise ConfigError(f"cannot answer probes on {host}: {reason}", key=key) from error
    sockets: list[socket.socket] = []
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            bound.setblocking(False)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            note_arrivals(bound)
            bound.bind((address[0], port, *address[2:]))
            port = bound.getsockname()[1]
    except OSError as error:
        for bound in sockets:
            bound.close()
        hint = "; is another node running?" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot answer probes on {host}:{port} (UDP): {error.strerror}{hint}", key=key) from error
    return sockets


class MonitoringSockets:
    """A node's UDP sockets. ``flush`` is what the node does after every call into its machines; it calls :meth:`send`."""

    def __init__(
        self,
        monitor: Datagrams,
        sockets: list[socket.socket],
        monotonic: Callable[[], float],
        flush: Callable[[], None],
        gossip: GossipDatagrams | None = None,
    ) -> None:
        self._monitor = monitor
        self._gossip = gossip
        self._sockets = sockets
        self._by_family = {bound.family: bound for bound in reversed(sockets)}
        self._monotonic = monotonic
        self._flush = flush
        self._resolved: dict[str, tuple[float, socket.AddressFamily, Any]] = {}
        self._resolving: dict[str, asyncio.Task[None]] = {}

    @property
    def port(self) -> int:
        """The real port."""
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        """Begin to read."""
        loop = asyncio.get_running_loop()
        for bound in self._sockets:
            loop.add_reader(bound.fileno(), self._readable, bound)

    def close(self) -> None:
        """Close everything."""
        loop = asyncio.get_running_loop()
        for task in self._resolving.values():
            task.cancel()
        for bound in self._sockets:
            if bound.fileno() >= 0:
                loop.remove_reader(bound.fileno())
                bound.close()

    def _readable(self, bound: socket.socket) -> None:
        for _ in range(READS_PER_WAKEUP):
            try:
                data, address, waited_s = receive(bound, MAX_DATAGRAM_BYTES)
            except (BlockingIOError, InterruptedError):
                break
            except OSError:
                continue  # a port that somebody was sent to is closed: the probe is lost, which is all there is to know
            now = self._monotonic()
            source = _joined(address)
            if self._gossip is None or not self._gossip.handle(data, source, now, waited_s):
                self._monitor.handle(data, source, now, waited_s)
            self.send()  # before the next is read, and before all that a flush does: an answer that lies here is a distance
        self._flush()

    def send(self) -> None:
        """Send what the machines want to have sent. Called after every call into them."""
        self._send_all(self._monitor.take_outgoing())
        if self._gossip is not None:
            self._send_all(self._gossip.take_outgoing())

    def _send_all(self, datagrams: list[tuple[str, bytes]]) -> None:
        for address, data in datagrams:
            known = self._resolved.get(address)
            if known is None:
                known = self._resolve(address, data)
            elif known[0] < self._monotonic():
                # Asked for again beside: a probe that waits for a name measures the name server.
                self._resolve(address, None)
            if known is not None:
                self._send_to(known[1], known[2], data)

    def _send_to(self, family: socket.AddressFamily, address: Any, data: bytes) -> None:
        bound = self._by_family.get(family)
        if bound is None or bound.fileno() < 0:
            return
        try:
            bound.sendto(data, address)
        except OSError as error:  # a full buffer or no route: lost, as on the way
            logs.event(logging.DEBUG, "a probe was not sent", address=str(address[0]), reason=error.strerror)

    def _resolve(self, address: str, data: bytes | None) -> tuple[float, socket.AddressFamily, Any] | None:
        """Find the socket address. Numbers need no help; names are looked up beside, and the datagram, if any, follows."""
        try:
            host, number = split_address(address)
        except ConfigError:
            return None  # others say where they are, and may say anything
        try:
            version = ipaddress.ip_address(host.partition("%")[0]).version
        except ValueError:
            if address not in self._resolving:
                task = asyncio.get_running_loop().create_task(self._look_up(address, host, number, data), name="resolve")
                self._resolving[address] = task
            return None
        family = socket.AF_INET if version == 4 else socket.AF_INET6
        known = (float("inf"), family, (host, number))
        if len(self._resolved) > 10_000:
            self._resolved.clear()
        self._resolved[address] = known
        return known

    async def _look_up(self, address: str, host: str, port: int, data: bytes | None) -> None:
        try:
            found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
            for family, _, _, _, resolved in found:
                if family in self._by_family:
                    known = (self._monotonic() + RESOLVED_FOR_SECONDS, socket.AddressFamily(family), resolved)
                    self._resolved[address] = known
                    if data is not None:
                        self._send_to(known[1], known[2], data)
                    break
        except (OSError, ValueError) as error:  # UnicodeError: no name of a host
            reason = error.strerror if isinstance(error, OSError) else "not a host name"
            logs.event(logging.DEBUG, "a node's name is not known", address=address, reason=reason)
        finally:
            del self._resolving[address]


def _joined(address: Any) -> str:
    host = str(address[0])
    return f"[{host}]:{address[1]}" if ":" in host else f"{host}:{address[1]}"

"""Sockets of the generator: the handshake, and connections that read into one shared buffer.

Owns connecting, non-blocking reads and writes with what is left over from either. Parsing is given in.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from nearcast.bench.traffic import connect_packet, subscribe_packet
from nearcast.errors import ConfigError, ConnectionClosed, ConnectionRefused

RECEIVE_BYTES = 256 * 1024
FILTERS_PER_SUBSCRIBE = 100
_HANDSHAKE_SECONDS = 10.0

Parser = Callable[[bytearray, int, int], int]


def parse_url(url: str) -> tuple[str, int]:
    """Host and port of ``mqtt://host:port``."""
    try:
        parts = urlsplit(url)
        port = parts.port or 1883
    except ValueError as error:
        raise ConfigError(f"{url}: {error}") from None
    if parts.scheme != "mqtt" or not parts.hostname:
        raise ConfigError(f"{url}: a URL such as mqtt://127.0.0.1:1883 is needed")
    return parts.hostname, port


def _read_exactly(peer: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = peer.recv(count - len(data))
        if not chunk:
            raise ConnectionClosed("the broker closed the connection during the handshake")
        data += chunk
    return data


def read_packet(peer: socket.socket) -> tuple[int, bytes]:
    """One packet from a blocking socket; nothing after it is read."""
    first_byte = _read_exactly(peer, 1)[0]
    length = shift = 0
    while True:
        digit = _read_exactly(peer, 1)[0]
        length |= (digit & 0x7F) << shift
        shift += 7
        if digit < 0x80:
            return first_byte, _read_exactly(peer, length)


def open_session(
    address: tuple[str, int], client_id: str, version: int, *, persistent: bool = False, receive_maximum: int = 0
) -> socket.socket:
    """A blocking socket with an accepted CONNECT."""
    try:
        peer = socket.create_connection(address, timeout=_HANDSHAKE_SECONDS)
    except OSError as error:
        raise ConnectionClosed(f"cannot connect to {address[0]}:{address[1]}: {error.strerror or error}") from None
    try:
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.sendall(connect_packet(client_id, version, persistent=persistent, receive_maximum=receive_maximum))
        first_byte, body = read_packet(peer)
        if first_byte != 0x20 or len(body) < 2:
            raise ConnectionClosed("the broker did not answer CONNECT with CONNACK")
        if body[1]:
            raise ConnectionRefused(body[1], f"the broker refused the connection (code {body[1]})")
    except OSError as error:
        peer.close()
        raise ConnectionClosed(f"the handshake failed: {error}") from None
    except (ConnectionClosed, ConnectionRefused):
        peer.close()
        raise
    return peer


def subscribe(peer: socket.socket, filters: list[str], qos: int, version: int) -> None:
    """Subscribe on a blocking socket, and see every filter granted."""
    for start in range(0, len(filters), FILTERS_PER_SUBSCRIBE):
        some = filters[start : start + FILTERS_PER_SUBSCRIBE]
        peer.sendall(subscribe_packet(start // FILTERS_PER_SUBSCRIBE % 65_535 + 1, some, qos, version))
        first_byte, body = read_packet(peer)
        granted = body[-len(some) :]
        if first_byte != 0x90 or any(code != qos for code in granted):
            raise ConnectionRefused(max(granted, default=0x80), f"the broker did not grant the subscription to {some[0]}")


class Wire:
    """One non-blocking connection: parses what it reads, keeps what could not be written."""

    def __init__(self, peer: socket.socket, parse: Parser) -> None:
        peer.setblocking(False)
        self.peer = peer
        self.descriptor = peer.fileno()
        self._parse = parse
        self._carry = b""
        self._unsent: memoryview | None = None
        self._later = bytearray()
        self.closed = False
        self.watched = False
        """Whether the loop waits for this connection to become writable."""

    @property
    def blocked(self) -> bool:
        return self._unsent is not None or bool(self._later)

    def read(self, buffer: bytearray, view: memoryview) -> int:
        """Read once into the shared buffer and parse; returns the bytes read."""
        carried = len(self._carry)
        buffer[:carried] = self._carry
        try:
            count = self.peer.recv_into(view[carried:])
        except BlockingIOError:
            return 0
        except OSError:
            count = 0
        if not count:
            self.closed = True
            return 0
        end = carried + count
        position = self._parse(buffer, 0, end)
        self._carry = bytes(buffer[position:end])
        return count

    def write(self, data: memoryview) -> None:
        """Write a batch that stays valid until :attr:`blocked` is false."""
        if self.blocked:
            raise AssertionError("a batch is written when the previous one is gone")
        self._unsent = data
        self.flush()

    def write_later(self, data: bytearray) -> None:
        """Write small packets, after whatever is still waiting."""
        self._later += data
        self.flush()

    def flush(self) -> None:
        if self.closed:
            return
        try:
            if self._unsent is not None:
                self._unsent = self._unsent[self.peer.send(self._unsent) :]
                if self._unsent:
                    return
                self._unsent = None
            if self._later:
                del self._later[: self.peer.send(self._later)]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True

    def close(self) -> None:
        self.peer.close()

"""Links on real sockets: the transport under a :class:`~nearcast.fabric.links.Link`, and the dialling of others.

What is said on a link, whom to dial and when to try again is the machine's business (:class:`Machine`): a broker's
:class:`~nearcast.fabric.fabric.Fabric`, or what a gateway or a controller has in its place.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any, Protocol, cast

from nearcast.errors import ConfigError
from nearcast.fabricconfig import Fabric as FabricSettings
from nearcast.mqtt.access import Peer
from nearcast.mqtt.connection import Connection
from nearcast.serving import logs
from nearcast.serving.streams import StreamTransport

#: Above this the kernel has taken too little for now. Higher than a client's: one link carries what thousands of them want.
WRITE_HIGH_BYTES = 1_048_576
WRITE_LOW_BYTES = 262_144

DIAL_TIMEOUT_SECONDS = 5.0

CLOSE_TIMEOUT_SECONDS = 5.0
"""How long a link that is closing may take to get rid of its last bytes."""


class Machine(Protocol):
    """What a link's driver needs of whoever has the links."""

    def accepted(self, handle: Any, peer: Peer, now: float) -> Any:
        """Another node connected; returns the link."""

    def connected(self, address: str, handle: Any, now: float) -> Any:
        """A node that was dialled answered; returns the link."""

    def dial_failed(self, address: str, now: float) -> None:
        """It did not."""

    def receive(self, link: Any, data: bytes, now: float) -> None:
        """Bytes arrived."""

    def writable(self, link: Any, now: float) -> None:
        """There is room for output again."""

    def lost(self, link: Any, now: float) -> None:
        """The transport is gone."""

    def take_dials(self) -> list[str]:
        """Addresses to connect to."""


class LinkTransport(StreamTransport):
    """One link's stream. Also the ``handle`` of its :class:`~nearcast.mqtt.connection.Connection`."""

    def __init__(self, sockets: LinkSockets, address: str, peer_of: Callable[[asyncio.Transport], Peer | None] | None) -> None:
        super().__init__()
        self.sockets = sockets
        self.address = address
        self._peer_of = peer_of
        self.link: Any = None
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        sockets = self.sockets
        peer = self._peer_of(stream) if self._peer_of is not None else None
        if sockets.closed or (self._peer_of is not None and peer is None):
            stream.abort()
            return
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        sockets.transports.add(self)
        now = sockets.monotonic()
        if peer is not None:
            self.link = sockets.machine.accepted(self, peer, now)
        else:
            self.link = sockets.machine.connected(self.address, self, now)
        self.connection = self.link.connection
        sockets.flush()

    def data_received(self, data: bytes) -> None:
        if self.connection is not None:
            sockets = self.sockets
            sockets.machine.receive(self.link, data, sockets.monotonic())
            sockets.flush()

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.congested = True

    def resume_writing(self) -> None:
        if self.connection is not None:
            self.connection.congested = False
            sockets = self.sockets
            sockets.machine.writable(self.link, sockets.monotonic())
            sockets.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        connection, self.connection = self.connection, None
        sockets = self.sockets
        sockets.transports.discard(self)
        if connection is not None:
            sockets.machine.lost(self.link, sockets.monotonic())
            sockets.flush()
        if not sockets.transports:
            sockets.empty.set()

    # What :class:`~nearcast.mqtt.commits.Commits` calls.

    def close(self) -> None:
        """Close once what was sent is out, or after a while in any case."""
        self.close_within(CLOSE_TIMEOUT_SECONDS)

    def cut(self) -> None:
        """Close at once, and let the machine hear nothing of it, nor of anything that still arrives."""
        self.connection = None
        self.abort()


class LinkSockets:
    """All links of one process. ``flush`` is what the process does after every call into its machines."""

    def __init__(
        self, machine: Machine, settings: FabricSettings, monotonic: Callable[[], float], flush: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.monotonic = monotonic
        self.flush = flush
        self.transports: set[LinkTransport] = set()
        self.empty = asyncio.Event()
        self.closed = False
        self._context = client_context(settings) if settings.tls else None
        self._dials: dict[str, asyncio.Task[None]] = {}
        self._failures: dict[str, str] = {}

    def dial(self) -> None:
        """Connect to whatever the machine says. Called after every flush."""
        for address in self.machine.take_dials():
            if self.closed:
                return
            if address not in self._dials:
                task = asyncio.get_running_loop().create_task(self._dial(address), name=f"link-{address}")
                self._dials[address] = task

    async def _dial(self, address: str) -> None:
        try:
            host, port = split_address(address)
            async with asyncio.timeout(DIAL_TIMEOUT_SECONDS):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: LinkTransport(self, address, None), host, port, ssl=self._context
                )
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except (OSError, ConfigError, ValueError) as error:  # ssl.SSLError and TimeoutError are OSErrors
            self._failed(address, error)
        else:
            if self._failures.pop(address, None) is not None:
                logs.event(logging.INFO, "node reached", address=address)
        finally:
            del self._dials[address]

    def _failed(self, address: str, error: Exception) -> None:
        reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
        reason = str(reason or str(error) or "no answer in time")
        if self._failures.get(address) != reason:
            # Once per reason: it is tried again and again.
            self._failures[address] = reason
            logs.event(logging.WARNING, "cannot reach a node, trying again", address=address, reason=reason)
        self.machine.dial_failed(address, self.monotonic())
        self.flush()

    def stop_dialling(self) -> None:
        """Open nothing more."""
        self.closed = True
        # One that is there ends like any other: a dial that is cancelled between `connection_made` and its own end would, with
        # uvloop, take the connection with it and never say `connection_lost`.
        made = {transport.address for transport in self.transports}
        for address, task in self._dials.items():
            if address not in made:
                task.cancel()

    def cut_all(self) -> None:
        """End everything at once; the machine hears nothing."""
        self.stop_dialling()
        for transport in list(self.transports):
            transport.cut()

    def abort_all(self) -> None:
        """End everything at once."""
        self.stop_dialling()
        for transport in list(self.transports):
            transport.abort()

    async def emptied(self) -> None:
        """Wait until there is no link any more, nor one being dialled."""
        if self._dials:
            await asyncio.wait(list(self._dials.values()))
        while self.transports:
            self.empty.clear()
            await self.empty.wait()


def split_address(address: str) -> tuple[str, int]:
    """``host:port``, also ``[::1]:1884``."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ConfigError(f"{address!r} is no address of a node: write an IPv6 address as [address]:port")
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 < int(port) <= 65_535:
        raise ConfigError(f"{address!r} is no address of a node: write host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The reverse of :func:`split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def client_context(settings: FabricSettings) -> ssl.SSLContext:
    """TLS for links that this node opens; :class:`ConfigError` says which file cannot be used."""
    return trusting_context(settings.ca_file, settings.certificate_file, settings.key_file, "fabric.")


def trusting_context(ca_file: str | None, certificate_file: str | None, key_file: str | None, prefix: str) -> ssl.SSLContext:
    """TLS towards a server that these authorities vouch for. ``prefix`` is what the files' keys in the configuration have in
    front."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
        else:
            context.load_default_certs()
    except (ssl.SSLError, OSError) as error:
        message = f"the certificate authorities cannot be read: {error.strerror or error}"
        raise ConfigError(message, path=ca_file, key=f"{prefix}ca_file") from error
    if certificate_file is not None:

        def no_passphrase() -> str:
            message = "the private key has a passphrase; give one without"
            raise ConfigError(message, path=key_file, key=f"{prefix}key_file")

        try:
            context.load_cert_chain(certificate_file, key_file, password=no_passphrase)
        except (ssl.SSLError, OSError) as error:
            message = f"the certificate and its key {key_file} cannot be used: {error.strerror or error}"
            raise ConfigError(message, path=certificate_file, key=f"{prefix}certificate_file") from error
    return context

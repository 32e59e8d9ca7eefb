"""Listeners of every kind, from configuration to accepted transports.

TCP, WebSocket and Unix listeners are accepted by the event loop, without a task per connection. TLS listeners accept by hand,
because a connection must pass admission *before* its handshake costs anything; the handshake is a short task, one per client.
What is served on a transport is the process's business: a subclass makes the protocols.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
from typing import Protocol

from nearcast.config import SECURE_KINDS, Listener
from nearcast.mqtt.access import Peer
from nearcast.serving import certificates, logs
from nearcast.serving.admission import is_loopback
from nearcast.serving.sockets import ANOTHER_PROCESS, bind_tcp, bind_unix

SCHEMES = {
    "tcp": "mqtt",
    "tls": "mqtts",
    "bulk": "nearcast",
    "bulk-tls": "nearcasts",
    "link": "nearcast-link",
    "link-tls": "nearcast-links",
}

ACCEPTS_PER_WAKEUP = 64
EXHAUSTED_PAUSE_SECONDS = 0.5


class Host(Protocol):
    """The process behind a listener."""

    #: TLS handshakes under way, which count as connections.
    handshakes: int
    events: logs.LimitedEvents

    def admits(self, address: str, listener: str) -> bool:
        """Whether one more connection may come in, by number and by rate."""
        ...

    def handshake_seconds(self) -> float:
        """How long a TLS handshake may take."""
        ...


class BaseListener:
    """A configured listener with its sockets. ``close`` stops accepting; accepted transports live on."""

    #: What to say when somebody else has the port.
    when_taken = ANOTHER_PROCESS

    def __init__(self, host: Host, config: Listener) -> None:
        self._host = host
        self.config = config
        self.name = config.name
        self.secure = config.kind in SECURE_KINDS
        self._context = certificates.server_context(config) if self.secure else None
        self._sockets: list[socket.socket] = []
        self._servers: list[asyncio.AbstractServer] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        self._socket_inode = 0

    def make_transport(self) -> asyncio.Protocol:
        """The protocol of one more accepted connection."""
        raise NotImplementedError

    def bind(self) -> None:
        """Open the sockets; nothing is accepted before :meth:`start`."""
        config = self.config
        if config.kind == "unix" and config.path is not None:
            self._sockets = [bind_unix(config.path, config.mode, config.backlog)]
            self._socket_inode = os.stat(config.path).st_ino
        else:
            self._sockets = bind_tcp(config.host, config.effective_port, config.backlog, when_taken=self.when_taken)

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        for listening in self._sockets:
            if self._context is not None:
                loop.add_reader(listening.fileno(), self._accept, listening)
            elif self.config.kind == "unix":
                self._servers.append(await loop.create_unix_server(self.make_transport, sock=listening))
            else:
                backlog = self.config.backlog
                self._servers.append(await loop.create_server(self.make_transport, sock=listening, backlog=backlog))

    @property
    def port(self) -> int:
        """The real port, also when 0 was asked for; 0 for a Unix socket."""
        if self.config.kind == "unix" or not self._sockets:
            return 0
        return int(self._sockets[0].getsockname()[1])

    @property
    def address(self) -> str:
        """Where clients find this listener, as a URL."""
        config = self.config
        if config.kind == "unix":
            return f"unix:{config.path}"
        scheme = SCHEMES.get(config.kind, config.kind)
        host = f"[{config.host}]" if ":" in config.host else config.host
        path = (config.path or "/mqtt") if config.kind in ("ws", "wss") else ""
        return f"{scheme}://{host}:{self.port}{path}"

    def reload(self, config: Listener, context: ssl.SSLContext | None) -> None:
        """Use these settings, and the context made of them, from the next handshake on."""
        self.config = config
        self._context = context

    def peer_of(self, transport: asyncio.Transport) -> Peer:
        """What the engine and the rules get to know of the other end."""
        if self.config.kind == "unix":
            return Peer("", self.name)
        name = transport.get_extra_info("peername")
        address = str(name[0]) if name else "?"
        certificate_name = None
        # A handshake that began before a reload was judged by other authorities, and perhaps under other rules: no name then.
        if self.config.certificate_username and transport.get_extra_info("sslcontext") is self._context:
            certificate_name = certificates.common_name(transport.get_extra_info("peercert"))
        return Peer(address, self.name, self.secure, certificate_name, is_loopback(address))

    def admits(self, peer: Peer) -> bool:
        """Whether an accepted transport may go on. TLS transports were asked before their handshake."""
        return self.secure or self._host.admits(peer.address, self.name)

    # TLS.

    def _accept(self, listening: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(ACCEPTS_PER_WAKEUP):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                # Out of descriptors or memory. The socket stays readable, so pause instead of spinning.
                logs.event(logging.ERROR, "cannot accept connections", listener=self.name, reason=error.strerror)
                loop.remove_reader(listening.fileno())
                loop.call_later(EXHAUSTED_PAUSE_SECONDS, self._resume_accepting, listening)
                return
            if not self._host.admits(str(address[0]), self.name):
                accepted.close()
                continue
            accepted.setblocking(False)
            task = loop.create_task(self._handshake(accepted), name=f"tls-handshake-{address[0]}")
            self._handshakes.add(task)
            self._host.handshakes += 1
            task.add_done_callback(self._handshake_done)

    def _handshake_done(self, task: asyncio.Task[None]) -> None:
        self._handshakes.discard(task)
        self._host.handshakes -= 1

    def _resume_accepting(self, listening: socket.socket) -> None:
        if listening in self._sockets and listening.fileno() >= 0:
            asyncio.get_running_loop().add_reader(listening.fileno(), self._accept, listening)

    async def _handshake(self, accepted: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        timeout = self._host.handshake_seconds()
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            await loop.connect_accepted_socket(
                self.make_transport, accepted, ssl=self._context, ssl_handshake_timeout=timeout, ssl_shutdown_timeout=5.0
            )
        except OSError as error:  # ssl.SSLError and TimeoutError are OSErrors
            accepted.close()
            reason = error.reason if isinstance(error, ssl.SSLError) else error.strerror
            self._host.events.event(
                logging.INFO, "TLS handshake failed", listener=self.name, reason=reason or str(error) or "timed out"
            )

    def stop_accepting(self) -> None:
        """Stop listening, end handshakes that are under way, and remove the socket file if it is still ours."""
        loop = asyncio.get_running_loop()
        for server in self._servers:
            server.close()
        for listening in self._sockets:
            if self._context is not None and listening.fileno() >= 0:
                loop.remove_reader(listening.fileno())
            listening.close()
        self._sockets = []
        self._servers = []
        for task in self._handshakes:
            task.cancel()
        path = self.config.path
        if self.config.kind == "unix" and path is not None:
            try:
                if os.stat(path).st_ino == self._socket_inode:
                    os.unlink(path)
                    self._socket_inode = 0
            except FileNotFoundError:
                pass
            except OSError as error:
                logs.event(logging.WARNING, "the socket file stays behind", path=path, reason=error.strerror)

    async def close(self) -> None:
        """:meth:`stop_accepting`, and wait for what it ended."""
        self.stop_accepting()
        if self._handshakes:
            await asyncio.wait(self._handshakes)

"""The way to the cloud on a real socket: TCP or TLS, credentials, and what is logged about it.

When to connect, what to say and when to try again is :class:`nearcast.fabric.cloud.Cloud`'s business.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Final, cast
from urllib.parse import urlsplit

from nearcast.errors import ConfigError
from nearcast.fabric.cloud import Cloud
from nearcast.fabricconfig import Groups
from nearcast.mqtt.connection import Connection
from nearcast.serving import logs
from nearcast.serving.links import (
    CLOSE_TIMEOUT_SECONDS,
    DIAL_TIMEOUT_SECONDS,
    WRITE_HIGH_BYTES,
    WRITE_LOW_BYTES,
    join_address,
    trusting_context,
)
from nearcast.serving.streams import StreamTransport

PORTS: Final = {"mqtt": 1883, "mqtts": 8883}
MAX_PASSWORD_BYTES: Final = 65_535

SHORT_SECONDS: Final = 30.0
SHORT_STAYS: Final = 3
"""So many connections in a row that were lost within that time look like two brokers of one name, who take the cloud's session
from each other. Not every cloud says so."""


class CloudTransport(StreamTransport):
    """One connection to the cloud. Also the ``handle`` of its :class:`~nearcast.mqtt.connection.Connection`."""

    def __init__(self, sockets: CloudSocket) -> None:
        super().__init__()
        self._owner = sockets
        self.connection: Connection | None = None
        self.held_bytes = 0
        self.waits_to_close = False

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        owner = self._owner
        if owner.closed:
            stream.abort()
            return
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        owner.transport = self
        self.connection = owner.cloud.opened(self, owner.monotonic())
        owner.flush()

    def data_received(self, data: bytes) -> None:
        if self.connection is not None:
            self._owner.cloud.receive(data, self._owner.monotonic())
            self._owner.flush()

    def eof_received(self) -> bool | None:
        return None

    def pause_writing(self) -> None:
        if self.connection is not None:
            self.connection.congested = True

    def resume_writing(self) -> None:
        if self.connection is not None:
            self._owner.cloud.writable(self._owner.monotonic())
            self._owner.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        connection, self.connection = self.connection, None
        owner = self._owner
        if owner.transport is self:
            owner.transport = None
        if connection is not None:
            owner.cloud.lost(owner.monotonic(), f"the connection was lost{f': {_reason(exc)}' if exc is not None else ''}")
            owner.flush()
        owner.idle.set()

    # What :class:`~nearcast.mqtt.commits.Commits` calls.

    def close(self) -> None:
        """Close once what was sent is out, or after a while in any case."""
        self.close_within(CLOSE_TIMEOUT_SECONDS)

    def cut(self) -> None:
        """Close at once, and let the machine hear nothing of it, nor of anything that still arrives."""
        self.connection = None
        self.abort()


class CloudSocket:
    """The broker's connection to the cloud. ``flush`` is what the process does after every call into its machines.

    ``closed``: nothing is opened any more. ``idle`` is set when there is no connection."""

    def __init__(self, cloud: Cloud, settings: Groups, monotonic: Callable[[], float], flush: Callable[[], None]) -> None:
        self.cloud = cloud
        self.monotonic = monotonic
        self.flush = flush
        self.transport: CloudTransport | None = None
        self.closed = False
        self.idle = asyncio.Event()
        self._host, self._port, secure = cloud_address(settings)
        self.address = join_address(self._host, self._port)
        self._context: ssl.SSLContext | None = None
        if secure:
            self._context = trusting_context(
                settings.cloud_ca_file, settings.cloud_certificate_file, settings.cloud_key_file, "fabric.groups.cloud_"
            )
        if settings.cloud_password_file is not None:
            cloud.set_password(read_password(settings.cloud_password_file))
        self._dialling: asyncio.Task[None] | None = None
        self._came_at: float | None = None
        self._short_stays = 0

    def dial(self) -> None:
        """Connect if the machine says so, and log what it has to tell. Called after every flush."""
        for up, text in self.cloud.take_news():
            if up:
                kept = self.cloud.session_kept
                self._came_at = self.monotonic()
                logs.event(logging.INFO, "connected to the cloud", address=self.address, session_kept=kept)
            else:
                reason = text + self._suspicion()
                logs.event(logging.WARNING, "no connection to the cloud, trying again", address=self.address, reason=reason)
        if not self.closed and self.cloud.wants_dial(self.monotonic()):
            self._dialling = asyncio.get_running_loop().create_task(self._dial(), name="cloud")

    def _suspicion(self) -> str:
        """A connection was lost, or not made: why that may be, if it happens all the time."""
        came_at, self._came_at = self._came_at, None
        if came_at is not None:
            self._short_stays = self._short_stays + 1 if self.monotonic() - came_at < SHORT_SECONDS else 0
        return "; has another broker the same name?" if self._short_stays >= SHORT_STAYS else ""

    async def _dial(self) -> None:
        try:
            async with asyncio.timeout(DIAL_TIMEOUT_SECONDS):
                transport, _ = await asyncio.get_running_loop().create_connection(
                    lambda: CloudTransport(self),
                    self._host,
                    self._port,
                    ssl=self._context,
                    server_hostname=self._host if self._context is not None else None,
                )
            raw = transport.get_extra_info("socket")
            if raw is not None:
                raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # ssl.SSLError, socket.gaierror and TimeoutError are OSErrors; a host name that cannot be one is a UnicodeError.
        except (OSError, UnicodeError) as error:
            reason = _reason(error)
            if self._context is not None and isinstance(error, ConnectionResetError):
                reason += "; is it a TLS port?"
            self.cloud.dial_failed(self.monotonic(), reason)
            self.flush()
        finally:
            self._dialling = None

    # --- the end --------------------------------------------------------------------------------------------------------

    def stop_dialling(self) -> None:
        """Open nothing more."""
        self.closed = True
        # One that is there ends like any other; see LinkSockets.stop_dialling.
        if self._dialling is not None and self.transport is None:
            self._dialling.cancel()

    def say_goodbye(self) -> None:
        """End the connection in order; the cloud keeps the session."""
        self.stop_dialling()
        self.cloud.end(self.monotonic())
        self.flush()

    async def ended(self) -> None:
        """Wait until there is no connection any more, nor one being made."""
        dialling = self._dialling
        if dialling is not None:
            await asyncio.wait([dialling])
        while self.transport is not None:
            self.idle.clear()
            await self.idle.wait()

    def cut(self) -> None:
        """End everything at once; the machine hears nothing."""
        self.stop_dialling()
        if self.transport is not None:
            self.transport.cut()

    def abort(self) -> None:
        """End everything at once."""
        self.stop_dialling()
        if self.transport is not None:
            self.transport.abort()


def cloud_address(settings: Groups) -> tuple[str, int, bool]:
    """Host, port and whether TLS, of the cloud's URL; :class:`ConfigError` says what is wrong with it."""
    url = settings.cloud or ""
    key = "fabric.groups.cloud"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{url.rpartition('@')[2]!r} is not a URL: {error}", key=key) from error
    if parts.username is not None or parts.password is not None:
        message = "the cloud's URL must not have credentials in it: use cloud_username and cloud_password_file"
        raise ConfigError(message, key=key)
    if parts.scheme not in PORTS or not parts.hostname or port == 0:
        raise ConfigError(f"{url!r} is no cloud: write mqtt://host:port or mqtts://host:port", key=key)
    if parts.path not in ("", "/") or parts.query:
        raise ConfigError(f"{url!r}: a cloud's URL has no path; `prefix` says where brokers speak there", key=key)
    return parts.hostname, port or PORTS[parts.scheme], parts.scheme == "mqtts"


def read_password(path: str) -> bytes:
    """The first line of a file."""
    key = "fabric.groups.cloud_password_file"
    try:
        with open(path, "rb") as file:
            line = file.readline(MAX_PASSWORD_BYTES + 2).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"cannot read the password for the cloud: {error.strerror}", path=path, key=key) from error
    if not line or len(line) > MAX_PASSWORD_BYTES:
        raise ConfigError("the first line of this file must be the password for the cloud", path=path, key=key)
    return line


def _reason(error: BaseException) -> str:
    """Why there is no connection, in a few words."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate cannot be trusted: {error.verify_message} (cloud_ca_file names who vouches for it)"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed: {error.reason or error}; is it a TLS port?"
    if isinstance(error, socket.gaierror):
        return f"its host name is unknown ({error.strerror})"
    if isinstance(error, UnicodeError):
        return "its host name is none"
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    return str(getattr(error, "strerror", None) or str(error) or "no answer in time")

"""Connections to brokers that are not part of a fabric: one for each client, over TCP or TLS."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from typing import cast

from nearcast.errors import ConfigError
from nearcast.fabric.plain import Dial, PlainGateway, PlainUpstream
from nearcast.gateway.config import GatewayConfig, plain_address
from nearcast.serving import logs
from nearcast.serving.links import client_context
from nearcast.serving.streams import StreamTransport

WRITE_HIGH_BYTES = 131_072
WRITE_LOW_BYTES = 32_768
DIAL_TIMEOUT_SECONDS = 5.0
CLOSING_SECONDS = 5.0


class PlainTransport(StreamTransport):
    """One connection. Also the handle of its :class:`~nearcast.fabric.plain.PlainUpstream`."""

    def __init__(self, sockets: PlainSockets, dial: Dial) -> None:
        super().__init__()
        self._sockets = sockets
        self._dial = dial
        self._upstream: PlainUpstream | None = None

    # What asyncio calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.transport = stream
        stream.set_write_buffer_limits(WRITE_HIGH_BYTES, WRITE_LOW_BYTES)
        sockets = self._sockets
        if sockets.closed or not sockets.machine.plain_connected(self._dial, self, sockets.monotonic()):
            stream.abort()
        else:
            self._upstream = self._dial.upstream
            sockets.transports.add(self)
        sockets.flush()

    def data_received(self, data: bytes) -> None:
        if self._upstream is not None:
            sockets = self._sockets
            sockets.machine.plain_receive(self._upstream, data, sockets.monotonic())
            sockets.flush()

    def pause_writing(self) -> None:
        if self._upstream is not None:
            self._upstream.congested = True

    def resume_writing(self) -> None:
        if self._upstream is not None:
            sockets = self._sockets
            sockets.machine.plain_writable(self._upstream, sockets.monotonic())
            sockets.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        upstream, self._upstream = self._upstream, None
        sockets = self._sockets
        sockets.transports.discard(self)
        if upstream is not None:
            sockets.machine.plain_lost(upstream, sockets.monotonic())
            sockets.flush()
        if not sockets.transports:
            sockets.empty.set()

    # What the machine calls.

    def close(self) -> None:
        self.close_within(CLOSING_SECONDS)


class PlainSockets:
    """All such connections of a gateway. ``flush`` is what the process does after every call into its machine."""

    def __init__(
        self, machine: PlainGateway, config: GatewayConfig, monotonic: Callable[[], float], flush: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.monotonic = monotonic
        self.flush = flush
        self.transports: set[PlainTransport] = set()
        self.empty = asyncio.Event()
        self.closed = False
        self._dials: set[asyncio.Task[None]] = set()
        self._failures: dict[str, str] = {}
        secure = any(plain_address(address)[2] for address in config.brokers)
        self._context = client_context(config.fabric) if secure else None

    def dial(self) -> None:
        """Connect as the machine says. Called after every flush."""
        for dial in self.machine.take_plain_dials():
            if self.closed:
                return
            task = asyncio.get_running_loop().create_task(self._dial(dial), name=f"broker-{dial.broker.name}")
            self._dials.add(task)
            task.add_done_callback(self._dials.discard)

    async def _dial(self, dial: Dial) -> None:
        address = dial.broker.address
        try:
            host, port, secure = plain_address(address)
            async with asyncio.timeout(DIAL_TIMEOUT_SECONDS):
                await asyncio.get_running_loop().create_connection(
                    lambda: PlainTransport(self, dial), host, port, ssl=self._context if secure else None
                )
        except (OSError, ConfigError, UnicodeError) as error:
            reason = error.reason if isinstance(error, ssl.SSLError) else getattr(error, "strerror", None)
            reason = str(reason or str(error) or "no answer in time")
            if self._failures.get(address) != reason:
                self._failures[address] = reason
                logs.event(logging.WARNING, "cannot reach a broker, trying again", address=address, reason=reason)
            self.machine.plain_failed(dial, reason, self.monotonic())
            self.flush()
        else:
            if self._failures.pop(address, None) is not None:
                logs.event(logging.INFO, "broker reached", address=address)

    def stop_dialling(self) -> None:
        """Open nothing more."""
        self.closed = True
        for task in self._dials:
            task.cancel()

    async def close(self) -> None:
        """End everything."""
        self.stop_dialling()
        if self._dials:
            await asyncio.wait(list(self._dials))
        for transport in list(self.transports):
            transport.abort()
        while self.transports:
            self.empty.clear()
            await self.empty.wait()

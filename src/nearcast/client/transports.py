"""Opens the byte stream to an endpoint: TCP, TLS, Unix socket, and the WebSocket layer above either.

Knows no MQTT. Whatever fails becomes :class:`~nearcast.errors.ConnectionClosed` with one line that says what to look at.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import Protocol

from nearcast.client.endpoints import Endpoint, TlsOptions
from nearcast.errors import ConnectionClosed

Tls = TlsOptions | ssl.SSLContext | None


class Wire(Protocol):
    """What a link needs of its transport; asyncio's transports and our WebSocket layer have it."""

    def write(self, data: bytes) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None: ...

    def abort(self) -> None: ...


class Receiver(Protocol):
    """What a wire tells the link above it."""

    def opened(self, wire: Wire) -> None: ...

    def received(self, data: bytes) -> None: ...

    def lost(self, error: Exception | None) -> None: ...

    def paused_writing(self) -> None: ...

    def resumed_writing(self) -> None: ...


class StreamProtocol(asyncio.Protocol):
    """A plain byte stream as a wire."""

    def __init__(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # asyncio hands out a full-duplex transport here; uvloop's is one without being a subclass.
        self._receiver.opened(transport)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        self._receiver.received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self._receiver.lost(exc)

    def pause_writing(self) -> None:
        self._receiver.paused_writing()

    def resume_writing(self) -> None:
        self._receiver.resumed_writing()


async def open_wire(endpoint: Endpoint, receiver: Receiver, tls: Tls, timeout_seconds: float) -> None:
    """Connect; ``receiver.opened`` is called as soon as bytes can flow."""
    context = tls.context() if isinstance(tls, TlsOptions) else tls
    if context is None and endpoint.secure:
        context = TlsOptions().context()
    loop = asyncio.get_running_loop()

    def protocol() -> asyncio.Protocol:
        if endpoint.scheme in ("ws", "wss"):
            from nearcast.client.websocket import WebSocketProtocol  # heavy, and few need it

            return WebSocketProtocol(receiver, endpoint)
        return StreamProtocol(receiver)

    try:
        async with asyncio.timeout(timeout_seconds):
            if endpoint.scheme == "unix":
                await loop.create_unix_connection(protocol, endpoint.path)
            else:
                transport, _ = await loop.create_connection(
                    protocol, endpoint.host, endpoint.port, ssl=context if endpoint.secure else None
                )
                connection = transport.get_extra_info("socket")
                if connection is not None:
                    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    except TimeoutError as error:
        raise ConnectionClosed(f"cannot reach {endpoint}: no answer within {timeout_seconds:g} s") from error
    except ssl.SSLCertVerificationError as error:
        raise ConnectionClosed(
            f"cannot trust {endpoint}: {error.verify_message}: name its CA (tls=TlsOptions(ca_file=...), --ca FILE)"
        ) from error
    except ssl.SSLError as error:
        raise ConnectionClosed(f"cannot speak TLS with {endpoint}: {error.reason or error}: is it a TLS port?") from error
    except socket.gaierror as error:
        raise ConnectionClosed(f"cannot reach {endpoint}: the host name is unknown ({error.strerror})") from error
    except ConnectionRefusedError as error:
        raise ConnectionClosed(f"cannot reach {endpoint}: nothing listens there; is the broker running?") from error
    except OSError as error:
        reason = error.strerror or str(error) or "the connection was closed in the middle of opening it"
        hint = "; is it a TLS port?" if endpoint.secure and isinstance(error, ConnectionError) else ""
        raise ConnectionClosed(f"cannot reach {endpoint}: {reason}{hint}") from error

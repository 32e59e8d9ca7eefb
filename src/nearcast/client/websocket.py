"""MQTT over WebSocket (MQTT 5.0 section 6), as a layer between a byte transport and a link.

The framing is the sans-I/O core of the ``websockets`` library; this only moves bytes. MQTT packets may begin and end anywhere
in binary frames, so frames are passed up as they come.
"""

from __future__ import annotations

import asyncio

from websockets.client import ClientProtocol
from websockets.frames import Frame, Opcode
from websockets.http11 import Response
from websockets.protocol import OPEN
from websockets.typing import Subprotocol
from websockets.uri import parse_uri

from nearcast.client.endpoints import Endpoint
from nearcast.client.transports import Receiver
from nearcast.errors import ConnectionClosed

CLOSE_TIMEOUT_SECONDS = 0.5


class WebSocketProtocol(asyncio.Protocol):
    """A protocol to the transport below, a wire to the link above."""

    def __init__(self, receiver: Receiver, endpoint: Endpoint) -> None:
        self._receiver = receiver
        self._endpoint = endpoint
        self._websocket = ClientProtocol(parse_uri(str(endpoint)), subprotocols=[Subprotocol("mqtt")], max_size=None)
        self._transport: asyncio.Transport | None = None
        self._failure: Exception | None = None
        self._closing: asyncio.TimerHandle | None = None

    # -- below: asyncio ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # uvloop's transports are none of asyncio's classes
        self._websocket.send_request(self._websocket.connect())
        self._send()

    def data_received(self, data: bytes) -> None:
        self._websocket.receive_data(data)
        for event in self._websocket.events_received():
            if isinstance(event, Response):
                if self._websocket.handshake_exc is None:
                    self._receiver.opened(self)
            elif isinstance(event, Frame) and event.opcode in (Opcode.BINARY, Opcode.CONT):
                self._receiver.received(bytes(event.data))
            elif isinstance(event, Frame) and event.opcode is Opcode.TEXT:
                self._websocket.fail(1003, "MQTT travels in binary frames")  # [MQTT-6.0.0-1]
        if self._websocket.handshake_exc is not None:
            self._failure = ConnectionClosed(
                f"{self._endpoint} does not speak MQTT over WebSocket: {self._websocket.handshake_exc}; check port and path"
            )
        self._send()
        if self._websocket.close_rcvd is not None and self._websocket.close_sent is not None and self._transport is not None:
            self._transport.close()  # both sides said goodbye
        elif self._websocket.close_expected():
            self._close_soon()

    def eof_received(self) -> None:
        self._websocket.receive_eof()
        self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._closing is not None:
            self._closing.cancel()
        self._receiver.lost(self._failure or exc)

    def pause_writing(self) -> None:
        self._receiver.paused_writing()

    def resume_writing(self) -> None:
        self._receiver.resumed_writing()

    # -- above: the wire ---------------------------------------------------------------------------------------------------

    def write(self, data: bytes) -> None:
        if self._websocket.state is OPEN:
            self._websocket.send_binary(data)
            self._send()

    def pause_reading(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None:
            self._transport.resume_reading()

    def close(self) -> None:
        if self._websocket.state is OPEN:
            self._websocket.send_close(1000)
            self._send()
        self._close_soon()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        for data in self._websocket.data_to_send():
            if data:
                self._transport.write(data)
            elif self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                self._transport.close()  # TLS cannot close one direction only

    def _close_soon(self) -> None:
        """The server closes the TCP connection after both close frames; not for ever."""
        if self._closing is None and self._transport is not None:
            self._closing = asyncio.get_running_loop().call_later(CLOSE_TIMEOUT_SECONDS, self._transport.abort)

"""MQTT over WebSocket (section 6): the framing between a stream and MQTT bytes, on the ``websockets`` library.

MQTT packets and frames are independent: a packet may span frames and a frame may hold many packets [MQTT-6.0.0-2], so each
frame's payload is handed on as it comes, without putting messages together first. Text frames end the connection
[MQTT-6.0.0-1]; the subprotocol must be ``mqtt`` [MQTT-6.0.0-3].
"""

from __future__ import annotations

import asyncio
import http
import logging
from urllib.parse import urlsplit

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from nearcast.config import Listener

#: Frame payload accepted at least, so that a small packet limit does not forbid frames with many packets.
MIN_FRAME_BYTES = 65_536

_quiet = logging.getLogger("nearcast.serving.websocket")
_quiet.addHandler(logging.NullHandler())
_quiet.propagate = False
_quiet.setLevel(logging.CRITICAL)

# 3.1 clients ask for "mqttv3.1"; serving them is as cheap as refusing.
_SUBPROTOCOLS = (Subprotocol("mqtt"), Subprotocol("mqttv3.1"))


def origin_allowed(origin: str | None, host: str | None, origins: tuple[str, ...] | None) -> bool:
    """Whether a page of this origin may connect; without a configured list, only pages of the host it connects to."""
    if origin is None:
        return True
    if origins is not None:
        return "*" in origins or origin in origins
    page, target = urlsplit(origin).hostname, urlsplit(f"//{host}").hostname
    return page is not None and page == target


class ServerFraming:
    """The server's end of one WebSocket. After every call, :meth:`outgoing` is what to write."""

    __slots__ = ("_config", "_protocol")

    def __init__(self, config: Listener, max_packet_bytes: int) -> None:
        self._config = config
        limit = max(max_packet_bytes, MIN_FRAME_BYTES)
        self._protocol = ServerProtocol(subprotocols=_SUBPROTOCOLS, max_size=(None, limit), logger=_quiet)

    def receive(self, data: bytes) -> bytes:
        """Bytes arrived; returns the MQTT bytes among them."""
        protocol = self._protocol
        if protocol.state is State.CONNECTING:
            data = self._handshake(data)
        pieces: list[bytes] = []
        if data:
            protocol.receive_data(data)
            for item in protocol.events_received():
                if isinstance(item, Frame):
                    if item.opcode is Opcode.BINARY or item.opcode is Opcode.CONT:
                        pieces.append(bytes(item.data))
                    elif item.opcode is Opcode.TEXT:
                        protocol.fail(CloseCode.UNSUPPORTED_DATA, "MQTT travels in binary frames")
                        break
        return b"".join(pieces)

    def receive_eof(self) -> None:
        """The client sends nothing more."""
        self._protocol.receive_eof()

    def send(self, chunks: list[bytes]) -> None:
        """MQTT bytes to send."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_binary(b"".join(chunks))

    def close(self) -> None:
        """Say that nothing more comes."""
        if self._protocol.state is State.OPEN:
            self._protocol.send_close(CloseCode.NORMAL_CLOSURE)

    def write_to(self, transport: asyncio.Transport | None) -> None:
        """Write what is to be sent by now, if the stream is still open."""
        for chunk in self._protocol.data_to_send():
            if transport is None or transport.is_closing():
                return
            if chunk:
                transport.write(chunk)
            else:
                # The library's way to say that this side is done: nothing more will be sent.
                transport.close()

    def _handshake(self, data: bytes) -> bytes:
        """Read the request, line by line, and answer it; returns what came after it, which is nothing after a refusal.

        The library would go on to read frames behind a request that has not been answered, and answer those first.
        """
        protocol = self._protocol
        position = 0
        while position < len(data):
            end = data.find(b"\n", position) + 1 or len(data)
            protocol.receive_data(data[position:end])
            position = end
            for item in protocol.events_received():
                if isinstance(item, Request):
                    response = self._answer(item)
                    protocol.send_response(response)
                    return data[position:] if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS else b""
            if protocol.eof_sent:
                break
        return b""

    def _answer(self, request: Request) -> Response:
        config = self._config
        path = request.path.partition("?")[0]
        if config.path is not None and path != config.path:
            return self._protocol.reject(http.HTTPStatus.NOT_FOUND, f"MQTT is served at {config.path}\n")
        headers = request.headers
        origins, hosts = headers.get_all("Origin"), headers.get_all("Host")
        if len(origins) > 1 or not origin_allowed(
            origins[0] if origins else None, hosts[0] if hosts else None, config.origins
        ):
            return self._protocol.reject(http.HTTPStatus.FORBIDDEN, "pages of this origin may not connect here\n")
        return self._protocol.accept(request)

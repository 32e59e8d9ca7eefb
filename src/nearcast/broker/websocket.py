"""MQTT over WebSocket (section 6): the framing between a stream transport and the engine, on the ``websockets`` library.

MQTT packets and frames are independent: a packet may span frames and a frame may hold many packets [MQTT-6.0.0-2], so each
frame's payload goes to the engine as it comes, without putting messages together first. Text frames end the connection
[MQTT-6.0.0-1]; the subprotocol must be ``mqtt`` [MQTT-6.0.0-3].
"""

from __future__ import annotations

import http
import logging
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.typing import Subprotocol

from nearcast.broker.transports import WRITE_HIGH_BYTES, ClientTransport

if TYPE_CHECKING:
    from nearcast.broker.listeners import BoundListener
    from nearcast.broker.process import Broker

#: Frame payload accepted at least, so that a small packet limit does not forbid frames with many packets.
MIN_FRAME_BYTES = 65_536

#: Bytes that may wait for a client on top of the MQTT output that the limits admit, before it is cut off.
MAX_PENDING_BYTES = 16 * WRITE_HIGH_BYTES

_quiet = logging.getLogger("nearcast.broker.websocket")
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


class WebSocketTransport(ClientTransport):
    """A :class:`ClientTransport` whose bytes travel in binary WebSocket frames."""

    __slots__ = ("frames",)

    def __init__(self, broker: Broker, listener: BoundListener) -> None:
        super().__init__(broker, listener)
        limit = max(broker.config.limits.max_packet_bytes, MIN_FRAME_BYTES)
        self.frames = ServerProtocol(subprotocols=_SUBPROTOCOLS, max_size=(None, limit), logger=_quiet)

    def data_received(self, data: bytes) -> None:
        frames = self.frames
        if frames.state is State.CONNECTING:
            data = self._handshake(data)
        pieces: list[bytes] = []
        if data:
            frames.receive_data(data)
            for item in frames.events_received():
                if isinstance(item, Frame):
                    if item.opcode is Opcode.BINARY or item.opcode is Opcode.CONT:
                        pieces.append(bytes(item.data))
                    elif item.opcode is Opcode.TEXT:
                        frames.fail(CloseCode.UNSUPPORTED_DATA, "MQTT travels in binary frames")
                        break
        if pieces:
            self.deliver(b"".join(pieces))
        self._write()
        # The engine bounds MQTT output; pongs are ours to bound, for a client that sends pings and never reads.
        if self.write_buffer_bytes() > MAX_PENDING_BYTES:
            limits = self.broker.config.limits
            if self.write_buffer_bytes() > MAX_PENDING_BYTES + limits.max_output_bytes + limits.max_packet_bytes:
                self.abort()

    def eof_received(self) -> bool | None:
        self.frames.receive_eof()
        self._write()
        return None

    def send(self, chunks: list[bytes]) -> None:
        if self.frames.state is State.OPEN:
            self.frames.send_binary(b"".join(chunks))
            self._write()

    def close(self) -> None:
        if self.frames.state is State.OPEN:
            self.frames.send_close(CloseCode.NORMAL_CLOSURE)
            self._write()
        super().close()

    def _handshake(self, data: bytes) -> bytes:
        """Read the request, line by line, and answer it; returns what came after it, which is nothing after a refusal.

        The library would go on to read frames behind a request that has not been answered, and answer those first.
        """
        frames = self.frames
        position = 0
        while position < len(data):
            end = data.find(b"\n", position) + 1 or len(data)
            frames.receive_data(data[position:end])
            position = end
            for item in frames.events_received():
                if isinstance(item, Request):
                    response = self._answer(item)
                    frames.send_response(response)
                    return data[position:] if response.status_code == http.HTTPStatus.SWITCHING_PROTOCOLS else b""
            if frames.eof_sent:
                break
        return b""

    def _answer(self, request: Request) -> Response:
        config = self.listener.config
        path = request.path.partition("?")[0]
        if config.path is not None and path != config.path:
            return self.frames.reject(http.HTTPStatus.NOT_FOUND, f"MQTT is served at {config.path}\n")
        headers = request.headers
        origins, hosts = headers.get_all("Origin"), headers.get_all("Host")
        if len(origins) > 1 or not origin_allowed(
            origins[0] if origins else None, hosts[0] if hosts else None, config.origins
        ):
            return self.frames.reject(http.HTTPStatus.FORBIDDEN, "pages of this origin may not connect here\n")
        return self.frames.accept(request)

    def _write(self) -> None:
        transport = self.transport
        for chunk in self.frames.data_to_send():
            if transport is None or transport.is_closing():
                return
            if chunk:
                transport.write(chunk)
            else:
                # The library's way to say that this side is done: nothing more will be sent.
                transport.close()

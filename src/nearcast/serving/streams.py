"""What every stream transport of ours does with asyncio's: write in few system calls, pause, resume, close, give up."""

from __future__ import annotations

import asyncio

from nearcast.serving.round_trips import tcp_round_trip_ms

#: Beyond this many chunks, joining them costs less than giving the kernel one vector entry each.
JOIN_ABOVE_CHUNKS = 4


class StreamTransport(asyncio.Protocol):
    """The sending half of a protocol. ``transport`` is asyncio's while the connection is open."""

    __slots__ = ("transport",)

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None

    def send(self, chunks: list[bytes]) -> None:
        """Send bytes after those sent before."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            if len(chunks) == 1:
                transport.write(chunks[0])
            elif len(chunks) <= JOIN_ABOVE_CHUNKS:
                transport.writelines(chunks)
            else:
                transport.write(b"".join(chunks))

    def close_within(self, seconds: float) -> None:
        """Close once what was sent is out, and after so long in any case."""
        transport = self.transport
        if transport is not None and not transport.is_closing():
            transport.close()
            if transport.get_write_buffer_size():
                asyncio.get_running_loop().call_later(seconds, transport.abort)

    def pause_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def abort(self) -> None:
        """Close at once."""
        if self.transport is not None:
            self.transport.abort()

    def write_buffer_bytes(self) -> int:
        """Bytes the kernel has not taken yet."""
        return self.transport.get_write_buffer_size() if self.transport is not None else 0

    def rtt_ms(self) -> float:
        """Round-trip time to the other end (:mod:`nearcast.serving.round_trips`); 0 while that is not known."""
        return tcp_round_trip_ms(self.transport)

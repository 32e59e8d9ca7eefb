"""Round-trip times of connections, as the kernel has them."""

from __future__ import annotations

import asyncio
import struct
import sys

import pytest

from nearcast.serving.round_trips import read_round_trip_ms, tcp_round_trip_ms
from nearcast.serving.streams import StreamTransport


def tcp_info(smoothed_us: int, least_us: int) -> bytes:
    return struct.pack("=68xI76xI", smoothed_us, least_us)


def test_the_least_time_counts_because_acknowledgements_are_delayed() -> None:
    assert read_round_trip_ms(tcp_info(41_500, 1_500)) == 1.5


def test_before_there_is_a_least_time_the_mean_counts() -> None:
    assert read_round_trip_ms(tcp_info(2_500, 0xFFFF_FFFF)) == 2.5
    assert read_round_trip_ms(tcp_info(2_500, 7)[:104]) == 2.5, "kernels that know no least time"


@pytest.mark.parametrize("info", [b"", b"\0" * 40])
def test_a_kernel_that_says_nothing_says_zero(info: bytes) -> None:
    assert read_round_trip_ms(info) == 0.0


class Server(StreamTransport):
    def __init__(self, made: asyncio.Future[Server]) -> None:
        super().__init__()
        self._made = made

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._made.set_result(self)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says how far away a peer is")
def test_a_connection_of_this_machine_is_near() -> None:
    async def connect() -> float:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[Server] = loop.create_future()
        server = await loop.create_server(lambda: Server(made), "127.0.0.1", 0)
        _, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        accepted = await made
        round_trip_ms = accepted.rtt_ms()
        writer.close()
        await writer.wait_closed()
        accepted.abort()
        server.close()
        await server.wait_closed()
        return round_trip_ms

    assert 0.0 < asyncio.run(connect()) < 1_000.0


def test_without_a_connection_there_is_no_time() -> None:
    assert tcp_round_trip_ms(None) == 0.0


def test_a_unix_socket_has_none(tmp_path: object) -> None:
    async def connect() -> float:
        loop = asyncio.get_running_loop()
        made: asyncio.Future[Server] = loop.create_future()
        path = f"{tmp_path}/socket"
        server = await loop.create_unix_server(lambda: Server(made), path)
        _, writer = await asyncio.open_unix_connection(path)
        accepted = await made
        round_trip_ms = accepted.rtt_ms()
        writer.close()
        await writer.wait_closed()
        accepted.abort()
        server.close()
        await server.wait_closed()
        return round_trip_ms

    assert asyncio.run(connect()) == 0.0

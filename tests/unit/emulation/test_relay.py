"""Relayed connections: bytes whole and in order whatever the network does, delays kept, cuts silent, ends passed on."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable

import pytest

from nearcast.emulation.relay import WINDOW_BYTES, Relay
from nearcast.network.conditions import Conditions
from nearcast.network.network import Network

Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def network(conditions: Conditions) -> Network:
    made = Network(["a", "b"], None, random.Random(1))
    made.connect(0, 1, conditions)
    made.join(0)
    made.join(1)
    return made


def relayed(conditions: Conditions, scenario: Callable[[Network, Pair, Pair], Awaitable[None]]) -> None:
    """A client and a server with a relay between them."""

    async def main() -> None:
        model = network(conditions)
        accepted: asyncio.Future[Pair] = asyncio.get_running_loop().create_future()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result((reader, writer))

        server = await asyncio.start_server(accept, "127.0.0.1", 0)
        ours, theirs = _tcp_pair()
        theirs.setblocking(False)
        relay = asyncio.create_task(Relay(model, 0, 1, theirs).run(server.sockets[0].getsockname(), "127.0.0.1"))
        client = await asyncio.open_connection(sock=ours)
        try:
            async with asyncio.timeout(30):
                there = await accepted
                await scenario(model, client, there)
        finally:
            client[1].close()
            if accepted.done():
                accepted.result()[1].close()
            server.close()
            relay.cancel()
            await asyncio.gather(relay, return_exceptions=True)

    asyncio.run(main())


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        one = socket.create_connection(listener.getsockname())
        other, _ = listener.accept()
    return one, other


async def _now() -> float:
    return asyncio.get_running_loop().time()


def test_a_round_trip_takes_as_long_as_the_model_says() -> None:
    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        client[1].write(b"x")  # the first byte waits for the handshake
        await server[0].readexactly(1)
        took_s = 1.0
        for _ in range(50):
            began = await _now()
            client[1].write(b"y")
            await server[0].readexactly(1)
            server[1].write(b"z")
            await client[0].readexactly(1)
            took_s = await _now() - began
            assert took_s >= 0.06
            if took_s < 0.12:
                break  # else the machine was busy
        assert took_s < 0.12

    relayed(Conditions(latency_ms=30), scenario)


@pytest.mark.parametrize(
    "conditions",
    [
        Conditions(latency_ms=1),
        Conditions(latency_ms=2, jitter_ms=2),
        Conditions(latency_ms=1, loss=0.02),
        Conditions(latency_ms=1, reorder=0.3),
        Conditions(latency_ms=1, duplicate=0.5),
        Conditions(latency_ms=1, bandwidth_mbps=20, queue_ms=5),
    ],
    ids=["plain", "jitter", "loss", "reorder", "duplicate", "narrow"],
)
def test_bytes_arrive_whole_and_in_order(conditions: Conditions) -> None:
    data = random.Random(2).randbytes(300_000)

    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        client[1].write(data)
        client[1].write_eof()
        server[1].write(data[::-1])
        server[1].write_eof()
        assert await server[0].read(-1) == data
        assert await client[0].read(-1) == data[::-1]

    relayed(conditions, scenario)


def test_bandwidth_is_kept() -> None:
    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        began = await _now()
        client[1].write(bytes(250_000))
        await server[0].readexactly(250_000)
        assert await _now() - began >= 0.18  # 2 Mb at 10 Mb/s

    relayed(Conditions(bandwidth_mbps=10), scenario)


def test_a_reader_that_does_not_read_stops_the_writer() -> None:
    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        server[1].transport.pause_reading()  # type: ignore[attr-defined]
        client[1].write(bytes(64 * WINDOW_BYTES))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await client[1].drain()
        assert model.bytes < 32 * WINDOW_BYTES
        client[1].transport.abort()

    relayed(Conditions(), scenario)


def test_a_cut_is_silence_and_then_everything_comes() -> None:
    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        cut = model.cut([0], [1])
        client[1].write(b"through")
        while model.unreachable < 2:  # noqa: ASYNC110  # the model counts, and calls nobody
            await asyncio.sleep(0.005)
        reading = asyncio.create_task(server[0].readexactly(7))
        assert not reading.done()
        model.heal(cut)
        assert await reading == b"through"

    relayed(Conditions(latency_ms=1), scenario)


def test_when_nothing_gets_through_for_too_long_both_ends_hear_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearcast.emulation.relay.DATA_GIVE_UP_S", 0.01)

    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        client[1].write(b"x")
        await server[0].readexactly(1)
        model.connect(0, 1, Conditions(loss=1.0))
        client[1].write(b"lost for ever")
        for reader, _ in (client, server):
            with pytest.raises(ConnectionResetError):
                await reader.readexactly(1)

    relayed(Conditions(latency_ms=1), scenario)


def test_a_reset_is_passed_on() -> None:
    async def scenario(model: Network, client: Pair, server: Pair) -> None:
        client[1].write(b"x")
        await server[0].readexactly(1)
        server[1].transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes([1] + 7 * [0]))
        server[1].close()
        with pytest.raises(ConnectionResetError):
            await client[0].readexactly(1)

    relayed(Conditions(latency_ms=1), scenario)


def test_nobody_there_is_a_reset_after_a_round_trip() -> None:
    async def main() -> None:
        ours, theirs = _tcp_pair()
        theirs.setblocking(False)
        with socket.create_server(("127.0.0.1", 0)) as closed:
            address = closed.getsockname()
        began = await _now()
        relay = asyncio.create_task(Relay(network(Conditions(latency_ms=10)), 0, 1, theirs).run(address, "127.0.0.1"))
        reader, writer = await asyncio.open_connection(sock=ours)
        with pytest.raises((ConnectionResetError, asyncio.IncompleteReadError)):
            await reader.readexactly(1)
        assert await _now() - began >= 0.0199
        writer.close()
        await relay

    asyncio.run(main())

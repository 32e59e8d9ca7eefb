"""Requests with descriptors: each program gets its own streams, whatever became of the requests before it."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from nearcast.emulation.client import ControlClient
from nearcast.emulation.control import Execute, Request
from nearcast.emulation.server import MAX_REQUESTS, Connection, Server
from nearcast.errors import EmulationError


class Names:
    """Answers a request with what its descriptors are called, once ``go`` is set."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.under_way = 0

    async def handle(self, request: Request, connection: Connection, descriptors: tuple[int, ...]) -> Any:
        self.under_way += 1
        names = [os.readlink(f"/proc/self/fd/{descriptor}") for descriptor in descriptors]
        for descriptor in descriptors:
            os.close(descriptor)
        await self.go.wait()
        return names

    def disconnected(self, connection: Connection) -> None: ...


def test_requests_beyond_the_bound_are_refused_and_mix_up_nothing(tmp_path: Path) -> None:
    beyond = 20

    async def scenario() -> None:
        handler = Names()
        server = Server(handler, "many", tmp_path / "control.sock")
        ours, theirs = socket.socketpair()
        server.adopt(theirs)
        client = ControlClient(ours)
        await client.greeted()
        pending = []
        for number in range(MAX_REQUESTS + beyond):
            with (tmp_path / str(number)).open("w") as file:
                request = Execute(id=client.take_number(), host="x", command=("true",))
                pending.append(client.begin(request, (file.fileno(),) * 3))
        for refused in pending[MAX_REQUESTS:]:
            with pytest.raises(EmulationError, match="requests are under way"):
                await client.finish(refused)
        assert handler.under_way == MAX_REQUESTS
        handler.go.set()
        for number, one in enumerate(pending[:MAX_REQUESTS]):
            assert await client.finish(one) == [str(tmp_path / str(number))] * 3
        with (tmp_path / "last").open("w") as file:
            last = Execute(id=client.take_number(), host="x", command=("true",))
            assert await client.ask(last, (file.fileno(),) * 3) == [str(tmp_path / "last")] * 3
        client.close()
        server.close()
        await server.flushed(1.0)

    before = len(os.listdir("/proc/self/fd"))
    asyncio.run(scenario())
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_socket_may_be_deep_in_the_file_system(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / "wan"
    deep.mkdir(parents=True)

    async def scenario() -> None:
        handler = Names()
        handler.go.set()
        server = Server(handler, "deep", deep / "control.sock")
        server.open()
        client = await ControlClient.connect(deep / "control.sock")
        assert await client.greeted() == "deep"
        client.close()
        server.close()
        await server.flushed(1.0)

    asyncio.run(scenario())


def test_a_wan_that_is_not_there_yet_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(EmulationError, match="is just being started or ended: try again"):
        asyncio.run(ControlClient.connect(tmp_path / "control.sock"))

"""HTTP as a part of a process: uvicorn in the process's own event loop, on sockets that are bound already."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator
from typing import Any

import uvicorn

MAX_CONCURRENT_REQUESTS = 32


class _EmbeddedServer(uvicorn.Server):
    """uvicorn as a part of this process: signals are the process's, and no timer ticks while nobody asks."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.stop = asyncio.Event()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self.stop.wait()


class HttpServer:
    """Serves an application on a socket that is bound already."""

    def __init__(self, app: Any, listening: list[socket.socket], context: ssl.SSLContext | None = None) -> None:
        self._sockets = listening
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            http="h11",
            ws="none",
            interface="asgi3",
            limit_concurrency=MAX_CONCURRENT_REQUESTS,
            timeout_keep_alive=5,
            timeout_graceful_shutdown=1,
            server_header=False,
            date_header=False,
        )
        config.load()
        config.ssl = context
        self._server = _EmbeddedServer(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        return int(self._sockets[0].getsockname()[1])

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._server.serve(self._sockets), name="http")

    async def stop(self) -> None:
        self._server.stop.set()
        if self._task is not None:
            await self._task

"""/metrics, /healthz and /rates: a small ASGI application, and uvicorn running it inside the broker's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any

import msgspec
import uvicorn

from nearcast.broker.metrics import CONTENT_TYPE, Metrics
from nearcast.broker.rates import Rates

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_CONCURRENT_REQUESTS = 32


class ObservabilityApp:
    """The ASGI application. ``health`` gives what /healthz shows; its ``ok`` decides between 200 and 503."""

    def __init__(self, metrics: Metrics, rates: Rates, health: Callable[[], dict[str, object]]) -> None:
        self._metrics = metrics
        self._rates = rates
        self._health = health

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        status, content_type, body = self._answer(scope["method"], scope["path"])
        headers = [(b"content-type", content_type.encode("ascii")), (b"content-length", str(len(body)).encode("ascii"))]
        headers.append((b"cache-control", b"no-store"))
        if status == 405:
            headers.append((b"allow", b"GET, HEAD"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, method: str, path: str) -> tuple[int, str, bytes]:
        if path not in ("/metrics", "/healthz", "/rates"):
            return 404, "text/plain", b"there is /metrics, /healthz and /rates\n"
        if method not in ("GET", "HEAD"):
            return 405, "text/plain", b"only GET\n"
        if path == "/metrics":
            return 200, CONTENT_TYPE, self._metrics.render()
        if path == "/healthz":
            health = self._health()
            return (200 if health["ok"] else 503), "application/json", msgspec.json.encode(health)
        rates = {"topics": self._rates.topics, "clients": self._rates.clients}
        return 200, "application/json", msgspec.json.encode(rates)


class _EmbeddedServer(uvicorn.Server):
    """uvicorn as a part of this process: signals are the broker's, and no timer ticks while nobody asks."""

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

    def __init__(self, app: ObservabilityApp, listening: list[socket.socket]) -> None:
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

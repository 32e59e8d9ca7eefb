"""/metrics, /healthz and /rates: a small ASGI application, which :mod:`nearcast.serving.http` serves."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from nearcast.broker.metrics import CONTENT_TYPE, Metrics
from nearcast.broker.rates import Rates

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


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

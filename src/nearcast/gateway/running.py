"""A gateway as the whole of a process: what ``nearcast gateway`` runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec
import uvloop

from nearcast import compiled
from nearcast.config import SECURE_KINDS
from nearcast.gateway.config import GatewayConfig
from nearcast.gateway.process import GatewayProcess
from nearcast.serving import logs
from nearcast.serving.certificates import server_context


def ready_report(gateway: GatewayProcess) -> bytes:
    """Where a running gateway can be reached, as JSON: what ``--ready-file`` holds."""
    report = {
        "pid": os.getpid(),
        "name": gateway.name,
        "listeners": [
            {"kind": listener.config.kind, "address": listener.address, "host": listener.config.host, "port": listener.port}
            for listener in gateway.listeners
        ],
        "http_port": gateway.http_port,
    }
    return msgspec.json.encode(report)


def check(config: GatewayConfig) -> None:
    """Raise :class:`~nearcast.errors.ConfigError` for whatever keeps a gateway from starting, short of opening sockets."""
    GatewayProcess(config)
    for listener in config.listeners:
        if listener.kind in SECURE_KINDS:
            server_context(listener)


def run(
    config: GatewayConfig,
    reload_config: Callable[[], GatewayConfig],
    on_ready: Callable[[GatewayProcess], None] | None,
) -> int:
    """Run a gateway in this process until it is told to stop; returns the exit code."""

    def ready(gateway: GatewayProcess) -> None:
        notice = compiled.notice()
        if notice is not None:
            logs.event(logging.WARNING, notice)
        if on_ready is not None:
            on_ready(gateway)

    async def main() -> int:
        return await GatewayProcess(config, reload_config=reload_config).serve(ready)

    return uvloop.run(main())

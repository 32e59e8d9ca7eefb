"""A broker as the whole of a process: what ``nearcast broker`` runs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import msgspec
import uvloop

from nearcast import compiled
from nearcast.broker.process import Broker
from nearcast.config import SECURE_KINDS, BrokerConfig
from nearcast.serving import logs
from nearcast.serving.certificates import server_context


def ready_report(broker: Broker) -> bytes:
    """Where a running broker can be reached, as JSON: what ``--ready-file`` holds."""
    report = {
        "pid": os.getpid(),
        "listeners": [
            {"kind": listener.config.kind, "address": listener.address, "host": listener.config.host, "port": listener.port}
            for listener in broker.listeners
        ],
        "http_port": broker.http_port,
        "name": None if broker.links is None else broker.links.fabric.name,
    }
    return msgspec.json.encode(report)


def check(config: BrokerConfig) -> None:
    """Raise :class:`~nearcast.errors.ConfigError` for whatever would keep a broker from starting, short of opening sockets."""
    Broker(config)
    for listener in config.listeners:
        if listener.kind in SECURE_KINDS:
            server_context(listener)


def run(config: BrokerConfig, reload_config: Callable[[], BrokerConfig], on_ready: Callable[[Broker], None] | None) -> int:
    """Run a broker in this process until it is told to stop; returns the exit code."""

    def ready(broker: Broker) -> None:
        notice = compiled.notice()
        if notice is not None:
            logs.event(logging.WARNING, notice)
        if config.persistence.directory is not None and not any(item.kind.startswith("bulk") for item in config.listeners):
            logs.event(logging.INFO, "there is no bulk port: topic logs can be written, not read; --bulk-port gives one")
        if on_ready is not None:
            on_ready(broker)

    async def main() -> int:
        return await Broker(config, reload_config=reload_config).serve(ready)

    return uvloop.run(main())

"""A process that serves clients, from its start to the signal that ends it: what broker and gateway have in common."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from typing import Any, Protocol

from nearcast.serving import logs

GC_THRESHOLDS = (50_000, 20, 50)
"""The hot path makes little cyclic garbage, and a full collection over 10,000 connections is a visible pause."""


class Serving(Protocol):
    """What can be run."""

    async def start(self) -> None:
        """Begin to serve."""

    async def stop(self) -> None:
        """End in order."""

    def ask_to_stop(self) -> None:
        """What SIGTERM and SIGINT do."""

    def reload(self) -> None:
        """What SIGHUP does."""


async def run(process: Serving, on_ready: Callable[[], None], stop_asked: asyncio.Event) -> None:
    """Start, serve until ``stop_asked`` is set, by a signal or otherwise, and stop."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_log_unexpected)
    await process.start()
    # Here and not in `start`: these settings are the whole process's, and not an embedded one's to change.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, process.ask_to_stop)
    loop.add_signal_handler(signal.SIGHUP, process.reload)
    try:
        on_ready()
        await stop_asked.wait()
    finally:
        await process.stop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _log_unexpected(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Whatever nobody caught: a defect of ours. It ends one connection or task, is logged, and the process goes on."""
    error = context.get("exception")
    trace = (type(error), error, error.__traceback__) if isinstance(error, BaseException) else None
    logs.logger.error("unexpected: %s", context.get("message"), exc_info=trace)

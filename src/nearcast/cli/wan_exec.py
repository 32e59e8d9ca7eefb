"""A command on a host of a WAN with the streams and the signals of this process."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from nearcast.emulation.wan import Signal, Wan

_FORWARDED: dict[int, Signal] = {signal.SIGINT: "INT", signal.SIGTERM: "TERM", signal.SIGHUP: "HUP", signal.SIGQUIT: "QUIT"}


async def run_command(wan: Wan, host: str, command: Sequence[str], signals: asyncio.Queue[Signal]) -> int:
    """Run a command with this process's streams; signals are passed on to it. A signal's end becomes 128 + its number."""
    loop = asyncio.get_running_loop()
    for number, name in _FORWARDED.items():
        loop.add_signal_handler(number, signals.put_nowait, name)
    try:
        code = await wan.execute(host, command, signals=signals)
    finally:
        for number in _FORWARDED:
            loop.remove_signal_handler(number)
    return code if code >= 0 else 128 - code

"""How load processes of one machine begin together: each says when it is ready, and somebody names the moment.

Nobody has to guess how long a busy machine takes to start them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from nearcast.errors import ConfigError, StorageUnavailable
from nearcast.load.spec import SharedClock

START = "start"
POLL_S = 0.01
PATIENCE_S = 120.0
LEAD_NS = 200_000_000
"""From naming the moment to the moment: all have polled several times by then."""


async def begin(meeting: str, name: str) -> int:
    """For a load process: say that it is ready, wait for the others; the moment to begin at."""
    directory = Path(meeting)
    try:
        (directory / f"{name}.ready").touch()
    except OSError as error:
        raise StorageUnavailable(meeting, f"cannot meet other load processes there: {error.strerror}") from error
    start = directory / START
    await _until_there([start], f"nobody started the load within {PATIENCE_S:g} s: {start} is missing")
    return int(start.read_text())


async def start_together(meeting: Path, names: Iterable[str], clock: SharedClock) -> int:
    """For whoever started them: wait until all are ready and name the moment to begin at, which is returned."""
    names = list(names)
    await _until_there([meeting / f"{name}.ready" for name in names], f"not every load was ready within {PATIENCE_S:g} s")
    start_ns = clock.now_ns() + LEAD_NS
    aside = meeting / f".{START}"
    aside.write_text(str(start_ns))
    aside.rename(meeting / START)
    return start_ns


async def _until_there(paths: list[Path], otherwise: str) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            for path in paths:
                while not path.exists():  # noqa: ASYNC110  # another process makes it
                    await asyncio.sleep(POLL_S)
    except TimeoutError:
        raise ConfigError(otherwise) from None

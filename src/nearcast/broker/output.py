"""Flushes the disk when output waits for it. What waits for what is :class:`~nearcast.mqtt.commits.Commits`'s business."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from nearcast.broker.journal import Journal
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.commits import Commits, Log
from nearcast.mqtt.engine import Engine


class Outbox:
    """Carries out what the engine decided."""

    def __init__(
        self, engine: Engine, monotonic: Callable[[], float], on_failure: Callable[[StorageUnavailable], None]
    ) -> None:
        self._commits = Commits(engine, monotonic, self._begin, on_failure)
        self._journal: Journal | None = None
        self._syncing: asyncio.Task[None] | None = None
        #: Persist and send whatever is pending. Called after every call into the engine.
        self.flush = self._commits.flush

    @property
    def failed(self) -> StorageUnavailable | None:
        """Why nothing more can be promised, if so."""
        return self._commits.failed

    def use(self, journal: Journal | None, log: Log | None = None) -> None:
        """Keep this journal and topic log from now on, or none."""
        self._journal = journal
        self._commits.journal = journal
        self._commits.log = log

    def _begin(self) -> None:
        self._syncing = asyncio.get_running_loop().create_task(self._sync(), name="journal-sync")

    async def _sync(self) -> None:
        try:
            # Whatever is held by now was written before; what comes during the flush waits for the next one.
            while self._journal is not None and self._commits.begin_sync():
                await self._journal.sync()
                self._commits.synced()
        except StorageUnavailable as error:
            self._commits.fail(error)
        finally:
            self._syncing = None
            self._commits.syncing = False

    async def drain(self) -> None:
        """Wait until nothing is held back any more."""
        while self._syncing is not None:
            await asyncio.wait([self._syncing])

"""The order of things after every call into the engine: records first, then what they hold back.

The contract is :class:`~nearcast.mqtt.effects.Effects`'s. Here it meets the disk:

- without a journal everything is sent at once;
- with ``sync = "os"`` the records are written to the kernel, then everything is sent;
- with ``sync = "fsync"`` the records are written, output that waits for nothing is sent, and the held output is gathered until
  the next flush of the disk has covered its records. While one flush runs, the next batch gathers: group commit.

A disk that fails stops the broker (:attr:`Outbox.failed`): an acknowledgement that nothing stands behind must not leave.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from nearcast.broker.journal import Journal
from nearcast.broker.transports import ClientTransport
from nearcast.errors import StorageUnavailable
from nearcast.mqtt.engine import Engine


class Outbox:
    """Carries out what the engine decided. ``journal`` is set while there is one."""

    def __init__(
        self, engine: Engine, monotonic: Callable[[], float], on_failure: Callable[[StorageUnavailable], None]
    ) -> None:
        self._engine = engine
        self._monotonic = monotonic
        self.journal: Journal | None = None
        self._on_failure = on_failure
        self._held: list[tuple[ClientTransport, list[bytes]]] = []
        self._syncing: asyncio.Task[None] | None = None
        self.failed: StorageUnavailable | None = None

    def flush(self) -> None:
        """Persist and send whatever is pending. Called after every call into the engine."""
        engine = self._engine
        journal = self.journal
        if journal is not None:
            self._commit(journal)
            return
        ready = engine.ready()
        while ready:
            for connection in ready:
                if connection.congested and not connection.closing:
                    continue
                handle = cast(ClientTransport, connection.handle)
                chunks = connection.take()
                if chunks:
                    handle.send(chunks)
                if connection.closing:
                    handle.close()
                elif connection.starved and not connection.congested:
                    engine.writable(connection, self._monotonic())
            ready = engine.ready()

    def _commit(self, journal: Journal) -> None:
        while self.failed is None and self._commit_once(journal):
            pass

    def _commit_once(self, journal: Journal) -> bool:
        """One round of records and output; returns whether that made room for more."""
        engine = self._engine
        records = engine.take_records()
        if records:
            try:
                journal.append(records)
            except StorageUnavailable as error:
                self._fail(error)
                return False
        again = False
        for connection in engine.ready():
            if connection.congested and not connection.closing:
                continue
            handle = cast(ClientTransport, connection.handle)
            chunks = connection.take()
            if chunks and connection.closing and handle.held_batches:
                # The last word, a DISCONNECT: it must not overtake the answers that wait for the disk [MQTT-3.14.4-1].
                self._held.append((handle, chunks))
                handle.held_batches += 1
            elif chunks:
                handle.send(chunks)
            held = connection.take_held()
            if held:
                # A flush that is under way may be the one this output waits for, if its client could not take it before.
                unsafe = journal.needs_sync and (journal.unsynced or self._syncing is not None)
                if handle.held_batches or unsafe:
                    self._held.append((handle, held))
                    handle.held_batches += 1
                else:
                    handle.send(held)
            if connection.closing:
                if handle.held_batches:
                    handle.waits_to_close = True
                else:
                    handle.close()
            elif connection.starved and not connection.congested:
                engine.writable(connection, self._monotonic())
                again = True
        if self._held and self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync(journal), name="journal-sync")
        return again

    async def _sync(self, journal: Journal) -> None:
        try:
            while self._held:
                # Whatever is held by now was appended before; what comes during the flush waits for the next one.
                batch, self._held = self._held, []
                await journal.sync()
                for handle, chunks in batch:
                    handle.held_batches -= 1
                    handle.send(chunks)
                    if handle.waits_to_close and not handle.held_batches:
                        handle.close()
        except StorageUnavailable as error:
            self._fail(error)
        finally:
            self._syncing = None

    def _fail(self, error: StorageUnavailable) -> None:
        self.failed = error
        self._held.clear()
        self._on_failure(error)

    async def drain(self) -> None:
        """Wait until nothing is held back any more."""
        while self._syncing is not None:
            await asyncio.wait([self._syncing])

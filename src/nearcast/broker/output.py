"""The order of things after every call into the engine: records first, then what they hold back.

The contract is :class:`~nearcast.mqtt.effects.Effects`'s. Here it meets the disk:

- without a journal everything is sent at once;
- with ``sync = "os"`` the records are written to the kernel, then everything is sent;
- with ``sync = "fsync"`` the records are written, output that waits for nothing is sent, and the held output is gathered until
  the next flush of the disk has covered its records. While one flush runs, the next batch gathers: group commit. A client for
  which ``max_output_bytes`` wait for the disk gets its further output gathered by the engine, under the engine's bounds, until
  the flush is done.

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
        self._held: list[tuple[ClientTransport, list[bytes], int]] = []
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
            if chunks and connection.closing and handle.held_bytes:
                # The last word, a DISCONNECT: it must not overtake the answers that wait for the disk [MQTT-3.14.4-1].
                self._hold(handle, chunks, sum(map(len, chunks)))
            elif chunks:
                handle.send(chunks)
            if handle.held_bytes >= connection.max_output_bytes and not connection.closing:
                # Enough waits for the disk. The rest stays with the engine, which counts it; `_sync` comes back for it.
                continue
            counted = connection.out_bytes
            held = connection.take_held()
            if held:
                # A flush that is under way may be the one this output waits for, if its client could not take it before.
                unsafe = journal.needs_sync and (journal.unsynced or self._syncing is not None)
                if handle.held_bytes or unsafe:
                    self._hold(handle, held, counted - connection.out_bytes)
                else:
                    handle.send(held)
            if connection.closing:
                if handle.held_bytes:
                    handle.waits_to_close = True
                else:
                    handle.close()
            elif connection.starved and not connection.congested:
                engine.writable(connection, self._monotonic())
                again = True
        if self._held and self._syncing is None:
            self._syncing = asyncio.get_running_loop().create_task(self._sync(journal), name="journal-sync")
        return again

    def _hold(self, handle: ClientTransport, chunks: list[bytes], size: int) -> None:
        self._held.append((handle, chunks, size))
        handle.held_bytes += size

    async def _sync(self, journal: Journal) -> None:
        try:
            while self._held:
                # Whatever is held by now was appended before; what comes during the flush waits for the next one.
                batch, self._held = self._held, []
                await journal.sync()
                if self.failed is not None:
                    return
                for handle, chunks, size in batch:
                    handle.held_bytes -= size
                    handle.send(chunks)
                    connection = handle.connection
                    if handle.waits_to_close:
                        if not handle.held_bytes:
                            handle.close()
                    elif connection is not None and (connection.starved or connection.held is not None):
                        # It was left out while too much of it was waiting here. A congested one has to wait for its client.
                        connection.touch()
                self._commit(journal)
        except StorageUnavailable as error:
            self._fail(error)
        finally:
            self._syncing = None

    def _fail(self, error: StorageUnavailable) -> None:
        if self.failed is None:
            self.failed = error
            self._held.clear()
            self._on_failure(error)

    async def drain(self) -> None:
        """Wait until nothing is held back any more."""
        while self._syncing is not None:
            await asyncio.wait([self._syncing])
